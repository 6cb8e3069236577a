"""Silence is not death: which silent peers are lost, and when."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pw.core import messages as msg
from pw.core.errors import ErrorReport
from pw.core.ids import Address
from pw.core.messages.links import in_words
from pw.core.messages.roles import Role
from pw.transport.links.interface import Connection
from pw.transport.links.link import Link
from tests.stages.cluster import Cluster, authority, make_cluster, numbers
from tests.stages.machines import run_inside
from tests.transport import echo_process

LEASE_S, PATIENCE_S = 10.0, 600.0
OTHER = Address("b", "session")
MIB = 1 << 20


class Scripted(Connection):
    """A connection that says of its peer what the test wants."""

    def __init__(self, unanswered_s: float = 0.0, waiting_bytes: int = 0, unread: bool = False):
        super().__init__()
        self.says = (unanswered_s, waiting_bytes)
        self.unread = unread

    @property
    def unanswered_s(self) -> float:
        return self.says[0]

    @property
    def waiting_bytes(self) -> int:
        return self.says[1]

    def receive(self) -> bool:
        return self.unread


@pytest.mark.parametrize(
    ("silent_s", "own_s", "connection", "reason"),
    [
        (9.0, 0.0, Scripted(9.0), ""),
        (11.0, 0.0, Scripted(), ""),
        (599.0, 0.0, Scripted(), ""),
        (11.0, 0.0, Scripted(9.0), ""),
        (11.0, 0.0, Scripted(10.5), "unanswered for 10 s"),
        (11.0, 0.0, Scripted(10.5, unread=True), ""),
        (601.0, 0.0, Scripted(), "silent for 600 s"),
        (601.0, 0.0, Scripted(unread=True), ""),
        (11.0, 0.0, Scripted(waiting_bytes=63 * MIB), ""),
        (11.0, 0.0, Scripted(waiting_bytes=65 * MIB), "silent for 11 s, with 64 MiB to read"),
        (9.0, 0.0, Scripted(waiting_bytes=65 * MIB), ""),
        (2.0, 3.0, Scripted(), ""),
        (4.0, 3.0, Scripted(), "silent for 3 s"),
        (4.0, 3.0, Scripted(unread=True), ""),
        (11.0, 30.0, Scripted(10.5), "unanswered for 10 s"),
    ],
)
def test_why_a_silent_peer_is_lost(
    silent_s: float, own_s: float, connection: Scripted, reason: str
) -> None:
    link = Link("client-a", connection, "", 0.0)
    link.open(connection, msg.Hello(1, "", "", "client-a", 1, own_s), 0.0)
    assert link.complaint(silent_s, LEASE_S, PATIENCE_S) == reason


def test_the_reasons_in_words() -> None:
    assert in_words("unanswered for 10 s") == "its machine has not answered for 10 s"
    assert in_words("silent for 600 s") == "it has sent no heartbeat for 600 s"


def test_a_peer_falls_silent_once() -> None:
    connection = Scripted()
    link = Link("client-a", connection, "", 0.0)
    assert not link.falls_silent(5.0, 2.0), "it has not greeted"
    link.open(connection, msg.Hello(1, "", "", "client-a", 1), 5.0)
    looks = [(6.0, False), (7.5, True), (8.5, False)]
    assert [(at_s, link.falls_silent(at_s, 2.0)) for at_s, _ in looks] == looks
    link.heard_s = 9.0
    assert not link.falls_silent(10.0, 2.0)
    assert link.falls_silent(12.0, 2.0)


@pytest.fixture
def sockets(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Cluster]:
    yield from make_cluster(request.param, tmp_path, uv=True)


@pytest.mark.processes
@pytest.mark.parametrize("sockets", ["ipc", "tcp", "tls"], indirect=True)
@pytest.mark.parametrize("is_full", [False, True], ids=["idle", "full"])
def test_a_stopped_process_is_slow_and_not_lost(sockets: Cluster, is_full: bool) -> None:
    """Its connection stands, also if its buffers are full. When it goes on, nothing is missing."""
    a = sockets.node("a", heartbeat_s=0.05, lease_s=0.1)
    network = sockets.network(a)
    arguments = ["b", sockets.endpoint(a)]
    if sockets.where == "tls":
        file = sockets.folder / "child.pem"
        file.touch(0o600)
        file.write_bytes(authority().issue(Role.WORKER, "b"))
        arguments.append(str(file))
    child = subprocess.Popen([sys.executable, "-m", echo_process.__name__, *arguments])
    try:
        sockets.until(lambda: numbers(a) == [-1])
        child.send_signal(signal.SIGSTOP)
        link = network.links["b"]
        sockets.until(lambda: a.silent)
        sent = [-1]
        while is_full and not link.out.is_waiting:
            sent.append(len(sent))
            words = ErrorReport("Error", "x" * 30_000)
            a.env.send(OTHER, msg.RequestFailed(sent[-1], words))
            sockets.of(a).network.flush()
        # From now on it has been silent for longer than any lease.
        link.heard_s -= 100.0
        assert link.source is not None
        link.source.heard_s -= 100.0
        complaints: list[str] = []
        complain = link.complaint
        link.complaint = lambda *times: complaints.append(complain(*times)) or complaints[-1]
        sockets.until(lambda: len(complaints) > 10)
        assert set(complaints) == {""}
        assert (network.heard_s("b") or 0.0) > 100.0
        child.send_signal(signal.SIGCONT)
        sent.append(len(sent))
        a.env.send(OTHER, msg.Ready(sent[-1]))
        sockets.until(lambda: len(numbers(a)) == len(sent))
        assert numbers(a) == sent
        assert not a.lost
    finally:
        child.kill()
        child.wait()


@pytest.mark.processes
def test_a_machine_that_is_cut_off_is_lost_and_a_stopped_process_is_not(tmp_path: Path) -> None:
    """Between two network namespaces: `tests.transport.cut_off` says what it sees."""
    said = json.loads(run_inside("tests.transport.cut_off", folder=tmp_path).splitlines()[-1])
    assert said == {
        "stopped": [],
        "stopped and cut off": ["unanswered for 1 s"],
        "cut off": ["unanswered for 1 s"],
    }
