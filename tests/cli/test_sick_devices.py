"""`pw doctor --devices`, and devices that fall ill, with real processes."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import pw
from tests.stages.daemons import Program, send, start_module, until

pytestmark = pytest.mark.processes


@pytest.fixture
def programs() -> Iterator[list[Program]]:
    started: list[Program] = []
    yield started
    pw.disconnect()
    for one in reversed(started):
        one.kill()


class Cluster:
    """A controller, and workers of which some have a sick device."""

    def __init__(self, folder: Path, programs: list[Program]) -> None:
        self.folder, self.programs = folder, programs
        self.controller = self.start("pw.cli.controller", "--bind", "tcp://127.0.0.1:0")
        self.controller.until_says("listens at")
        self.address = re.findall(r"listens at (\S+)", self.controller.out)[0]

    def start(self, module: str, *arguments: object, **variables: str) -> Program:
        self.programs.append(start_module(module, *arguments, folder=self.folder, **variables))
        return self.programs[-1]

    def worker(self, name: str, *more: object, sick: str = "", island: str = "i") -> Program:
        module = "tests.stages.sick_worker" if sick else "pw.cli.worker"
        common = ("--controller", self.address, "--island", island, "--name", name, "--devices", 2)
        worker = self.start(module, *common, *more, SICK=sick)
        if "--spare" not in more:
            worker.until_says("joined")
        return worker

    def doctor(self, *more: object) -> tuple[int, Program]:
        """Have the doctor look, again while a busy machine takes longer than it waits."""
        common = ("doctor", "--devices", "--address", self.address)
        seen: list[tuple[int, Program]] = []

        def looks() -> bool:
            doctor = self.start("pw.cli.main", *common, *more)
            seen.append((doctor.end(), doctor))
            return "untested" not in doctor.out

        until(looks, "the test of all devices")
        return seen[-1]


def test_the_doctor_names_a_device_with_wrong_bits(tmp_path: Path, programs: list[Program]) -> None:
    cluster = Cluster(tmp_path, programs)
    cluster.worker("well", island="a")
    assert cluster.doctor()[0] == 0
    cluster.worker("ill", sick="bits", island="b")
    code, doctor = cluster.doctor()
    assert code == 1
    assert "3 of 4 devices are ok, 1 failed" in doctor.out
    assert "has wrong bits" in doctor.out
    code, doctor = cluster.doctor("--json", "--island", "b")
    assert code == 1
    rows = json.loads(doctor.out)["devices"]
    assert [(row["host"], row["device"], row["outcome"]) for row in rows] == [
        ("ill", 0, "failed"),
        ("ill", 1, "ok"),
    ]
    assert rows[1]["flop_per_s"] > 1e6
    assert cluster.doctor("--island", "c")[0] == 1
    pw.connect(cluster.address)
    (host,) = [one for one in pw.status().hosts if one.sick]
    assert [(host.name, one.device, one.state) for one in host.sick] == [("ill", 0, "failed")]
    cluster.controller.until_says("there is no spare host")


def test_a_host_whose_device_errs_leaves_for_a_spare(
    tmp_path: Path, programs: list[Program]
) -> None:
    cluster = Cluster(tmp_path, programs)
    ill = cluster.worker("ill", sick="bits,errors")
    cluster.worker("spare", "--spare")
    pw.connect(cluster.address)
    until(lambda: pw.status().other_hosts, "the spare")
    mesh = pw.Mesh(pw.make_virtual_device_set().add_slice(devices=2).devices, ("x",))
    x = pw.jit(lambda x: x + 1, mesh=mesh)(np.arange(6, dtype=np.float32))

    def sick(x: np.ndarray) -> np.ndarray:  # type: ignore[type-arg]
        return x * 2

    with pytest.raises(pw.ComputationFailed, match="ECC"):
        pw.jit(sick, mesh=mesh)(x).block_until_ready()
    ill.until_says("device failed its test")
    assert ill.end() == 0
    assert np.asarray(x).tolist() == [1, 2, 3, 4, 5, 6]
    assert np.asarray(pw.jit(sick, mesh=mesh)(x)).tolist() == [2, 4, 6, 8, 10, 12]
    until(lambda: not pw.test_devices().untested, "the test of the spare's devices")
    assert not pw.test_devices().failed
    until(lambda: [host.name for host in pw.status().hosts] == ["spare"], "its end")


def test_an_island_without_a_spare_goes_on_without_the_device(
    tmp_path: Path, programs: list[Program]
) -> None:
    cluster = Cluster(tmp_path, programs)
    ill = cluster.worker("ill", sick="bits,errors")
    pw.connect(cluster.address)
    devices = pw.make_virtual_device_set()
    one = pw.Mesh(devices.add_slice(devices=1).devices, ("x",))
    both = pw.Mesh(devices.add_slice(devices=2).devices, ("x",))
    x, y = (pw.jit(lambda x: x + 1, mesh=mesh)(np.arange(4.0)) for mesh in (one, both))
    y.block_until_ready()

    def sick(x: np.ndarray) -> np.ndarray:  # type: ignore[type-arg]
        return x * 2

    with pytest.raises(pw.ComputationFailed, match="ECC"):
        pw.jit(sick, mesh=one)(x).block_until_ready()
    ill.until_says("device failed its test")
    assert np.asarray(x).tolist() == [1, 2, 3, 4], "its slice has the other device"
    words = "device 0 of host ill has failed its test"
    until(lambda: pw.status().devices == 1, "the status")
    assert "0 failed, left out" in str(pw.status())
    assert "device 0 of ill has failed its test" in str(pw.why())
    with pytest.raises(pw.IslandLost, match=words):
        np.asarray(y)
    with pytest.raises(pw.IslandLost, match=words):
        np.asarray(pw.jit(lambda x: x - 1, mesh=both)(np.arange(4.0)))
    with pytest.raises(pw.InsufficientDevices, match=words):
        devices.add_slice(devices=2)
    assert np.asarray(pw.jit(lambda x: x - 1, mesh=one)(x)).tolist() == [0, 1, 2, 3]


def test_an_idle_worker_tests_its_devices(tmp_path: Path, programs: list[Program]) -> None:
    cluster = Cluster(tmp_path, programs)
    ill = cluster.worker("ill", "--test-devices", "1s", sick="bits")
    ill.until_says("device failed its test")
    send(ill.process.pid, signal.SIGTERM)
    assert ill.end() == 0
    wrong = cluster.start(
        "pw.cli.worker", "--controller", cluster.address, "--spare", "--test-devices", "soon"
    )
    assert wrong.end() != 0
    assert "write it as 90s, 30m or 1h" in wrong.err
