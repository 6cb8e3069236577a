"""Workers that say where their devices are (`pw-worker --coords`)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from pw.core.errors import InsufficientDevices
from tests.cli.test_cli import Cluster, Start, starter, until_ready
from tests.stages.daemons import BOUND_S, until

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc"),
]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    yield from starter(tmp_path)


def test_workers_say_where_their_devices_are(start: Start) -> None:
    cluster = Cluster(start)
    size = ("--island-hosts", 2, "--devices", 2, "--wrap", "4,0")
    for number in range(2):
        cluster.worker(f"torus-{number}", "torus", *size, "--coords", f"{2 * number},0:2x1")
    session = cluster.session()
    until_ready(session, "torus")
    bound = session.allocate_slice(4, topology=(4,))
    assert bound.coords == ((0, 0), (1, 0), (2, 0), (3, 0))
    assert [device.host for device in bound.devices] == ["torus-0"] * 2 + ["torus-1"] * 2
    with pytest.raises(
        InsufficientDevices, match=r"torus is a grid of 4x1 \(axis 0 wraps around\)"
    ):
        session.allocate_slice(4, topology=(2, 2))
    document = start("pw.cli.main", "status", "--json", PW_ADDRESS=cluster.address)
    assert document.end() == 0, document.err
    (island,) = json.loads(document.out)["islands"]
    assert (island["grid"], island["wraps"], island["free_blocks"]) == ([4, 1], [4, 0], [])
    twice = cluster.worker("third", "torus", *size, "--coords", "3,0:1x1;4,0:1x1")
    assert twice.end(BOUND_S) != 0
    assert "beyond axis 0, which wraps around after 4" in twice.err
    session.close()


def test_coordinates_that_two_workers_have_are_refused(start: Start) -> None:
    cluster = Cluster(start)
    cluster.worker("i-0", "i", "--island-hosts", 2, "--coords", "0,0")
    session = cluster.session()
    until(lambda: any(one.hosts for one in session.ask.status().islands), "a host in the island")
    session.close()
    cluster.worker("i-1", "i", "--island-hosts", 2, "--coords", "0,0")
    assert cluster.workers["i-1"].end(BOUND_S) != 0
    assert "hosts i-0 and i-1 both have a device at (0, 0)" in cluster.workers["i-1"].err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--coords", "here"), "looks like 0,2:2x2"),
        (("--coords", "0,0:1x2"), "more devices than the host's 1"),
        (("--wrap", "2"), "the devices have no coordinates"),
        (("--spare", "--coords", "0"), "coordinates in the grid of an --island"),
    ],
)
def test_a_worker_says_what_is_wrong_with_its_coordinates(
    start: Start, options: tuple[str, ...], words: str
) -> None:
    island = () if "--spare" in options else ("--island", "i")
    worker = start("pw.cli.worker", "--controller", "tcp://127.0.0.1:9", *island, *options)
    assert worker.end(BOUND_S) == 1
    said = " ".join(worker.err.replace("│", " ").split())
    assert words in said
