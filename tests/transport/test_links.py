"""Life of a link: who may talk, who has gone, and who came back."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from pw.core import messages as msg
from pw.core.ids import CONTROLLER, Address
from pw.transport.links import codec
from pw.transport.links.link import Versions
from pw.transport.links.zmtp import Zmtp
from tests.stages import programs
from tests.stages.cluster import Cluster, Recorder, make_cluster, numbers

PLAIN = ["ipc", "tcp"]
"""Where raw ZeroMQ sockets can connect."""


@pytest.fixture(params=[*PLAIN, "tls"])
def sockets(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Cluster]:
    yield from make_cluster(request.param, tmp_path, uv=True)


@pytest.fixture(params=["asyncio", "uvloop"])
def tcp(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Cluster]:
    yield from make_cluster("tcp", tmp_path, uv=request.param == "uvloop")


@pytest.fixture
def dealer() -> Iterator[Callable[[str], zmq.Socket[bytes]]]:
    """Raw sockets, for frames that no node would send."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()

    def connect(endpoint: str) -> zmq.Socket[bytes]:
        raw = context.socket(zmq.DEALER)
        raw.connect(endpoint)
        return raw

    yield connect
    context.destroy(linger=0)


def greeting(name: str, silence_s: float = 0.0) -> bytes:
    return codec.encode_frame(0, [("", "", msg.Hello(*Versions.installed(), name, 1, silence_s))])


@pytest.mark.parametrize("field", ["protocol", "pw", "jax"])
def test_other_versions_are_refused_with_words_on_both_sides(sockets: Cluster, field: str) -> None:
    assert Versions(1, "1.0.3", "0.10.2").fits(Versions(1, "1.0.4", "0.10.2"))
    ours = Versions(1, "1.0", "0.10.2")
    theirs = ours._replace(**{field: 99 if field == "protocol" else "99.0"})
    a = sockets.node("a", versions=ours)
    b = sockets.node("b", listens=False, versions=theirs)
    sockets.introduce(a, b)
    b.env.send(a.env.address, msg.Ready(0))
    sockets.until(lambda: a.of(msg.PeerRefused) and b.of(msg.PeerRefused))
    for one, other in ((a, "b"), (b, "a")):
        (refusal,) = one.of(msg.PeerRefused)
        assert refusal.node == other
        assert refusal.error.kind == "VersionMismatch"
        assert str(ours) in refusal.error.message
        assert str(theirs) in refusal.error.message
        for versions, node in ((ours, "b"), (theirs, "a")):
            command = f"pip install jax=={versions.jax} jaxlib=={versions.jax} for {node}"
            assert (command in refusal.error.message) == (field == "jax")
    assert not numbers(a)


@pytest.mark.parametrize("sockets", PLAIN, indirect=True)
@pytest.mark.parametrize("name", ["a", "b"])
def test_a_refused_stranger_cannot_harm_the_node_whose_name_it_claims(
    sockets: Cluster, dealer: Callable[[str], zmq.Socket[bytes]], name: str
) -> None:
    a, b = sockets.node("a"), sockets.node("b", listens=False)
    sockets.introduce(a, b)
    b.env.send(a.env.address, msg.Ready(0))
    sockets.until(lambda: a.received)
    raw = dealer(sockets.endpoint(a))
    raw.send(codec.encode_frame(0, [("", "", msg.Hello(1, "9.9", "9.9", name, 99))]))
    sockets.until(lambda: sockets.of(a).counters["hellos_refused"])
    b.env.send(a.env.address, msg.Ready(1))
    sockets.until(lambda: numbers(a) == [0, 1])
    assert [type(message) for _, message in a.received] == [msg.Ready, msg.Ready]


def test_a_peer_under_another_name_is_refused(sockets: Cluster) -> None:
    a, b = sockets.node("a"), sockets.node("b")
    b.env.introduce("other", sockets.endpoint(a))
    b.env.send(Address("other", "session"), msg.Ready(0))
    has_certificates = sockets.where == "tls"  # so nothing is said to the listener
    sockets.until(lambda: b.of(msg.PeerRefused) and (has_certificates or a.of(msg.PeerRefused)))
    (refusal,) = b.of(msg.PeerRefused)
    words = "answers a, where other was expected"
    if has_certificates:
        words = "its certificate is that of worker a, not of other"
    assert words in refusal.error.message


@pytest.mark.parametrize("newcomer", [2, 1, 0])
def test_the_newer_incarnation_of_a_name_wins(sockets: Cluster, newcomer: int) -> None:
    a = sockets.node("a")
    old = sockets.node("b", incarnation=1, listens=False)
    new = sockets.node("b", incarnation=newcomer, listens=False)
    sockets.introduce(a, old)
    sockets.introduce(a, new)
    old.env.send(a.env.address, msg.Ready(1))
    sockets.until(lambda: numbers(a) == [1])
    new.env.send(a.env.address, msg.Ready(2))
    if newcomer == 0:
        sockets.until(lambda: new.of(msg.PeerRefused))
        assert not a.lost
        old.env.send(a.env.address, msg.Ready(3))
        sockets.until(lambda: numbers(a) == [1, 3])
    else:
        sockets.until(lambda: numbers(a) == [1, 2])
        assert [node for node, _ in a.lost] == ["b"]
        kinds = [type(message) for _, message in a.received]
        assert kinds == [msg.Ready, msg.PeerLost, msg.Ready]
    if newcomer == 2:
        sockets.until(lambda: old.of(msg.PeerRefused))


def test_a_peer_that_comes_back_gets_a_new_link(sockets: Cluster) -> None:
    a = sockets.node("a")
    for incarnation in (1, 2, 3):
        b = sockets.node("b", incarnation=incarnation, listens=False)
        sockets.introduce(a, b)
        b.react = lambda sender, message, b=b: b.env.send(sender, message)
        a_count = len(numbers(a))
        b.env.send(a.env.address, msg.Ready(incarnation))
        sockets.until(lambda n=a_count: len(numbers(a)) == n + 1)
        a.env.send(Address("b", "session"), msg.Ready(10 * incarnation))
        sockets.until(lambda n=a_count: len(numbers(a)) == n + 2)
        sockets.of(b).close()
        sockets.until(lambda i=incarnation: len(a.lost) == i)
    assert numbers(a) == [1, 10, 2, 20, 3, 30]


def test_a_peer_that_cannot_be_reached_is_lost(sockets: Cluster) -> None:
    a = sockets.node("a", heartbeat_s=0.02, connect_s=0.1)
    nowhere = "tcp://127.0.0.1:1" if sockets.where == "tcp" else f"ipc://{sockets.folder}/none"
    a.env.introduce("b", nowhere)
    a.env.introduce("c", "nonsense://x")
    a.env.send(Address("b", "session"), msg.Ready(0))
    a.env.send(Address("c", "session"), msg.Ready(0))
    sockets.until(lambda: len(a.lost) == 2)
    why = "Connection refused" if sockets.where == "tcp" else "No such file or directory"
    assert ("b", f"could not be reached at {nowhere}: nothing listens there ({why})") in a.lost
    assert any(node == "c" and "nonsense" in reason for node, reason in a.lost)


def test_a_controller_is_given_up_early_only_where_nothing_listens(sockets: Cluster) -> None:
    nowhere, silent = f"ipc://{sockets.folder}/none", f"{sockets.folder}/silent"
    dialled: list[Recorder] = []
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(silent)
        listener.listen()
        for name, endpoint in (("a", nowhere), ("b", f"ipc://{silent}")):
            one = sockets.node(name, heartbeat_s=0.02, connect_s=60.0, absent_s=0.1)
            one.env.introduce(CONTROLLER, endpoint)
            one.env.send(Address(CONTROLLER, "session"), msg.Ready(0))
            dialled.append(one)
        a, b = dialled
        sockets.until(lambda: a.lost)
        assert not b.lost


def test_a_peer_that_was_started_again_elsewhere_is_not_dialled_where_it_was(
    sockets: Cluster,
) -> None:
    a = sockets.node("a")
    nowhere = "tcp://127.0.0.1:1" if sockets.where == "tcp" else f"ipc://{sockets.folder}/none"
    a.env.introduce("b", nowhere)
    a.env.send(Address("b", "session"), msg.Ready(0))
    b = sockets.node("b", incarnation=2)
    b.env.introduce("a", sockets.endpoint(a))
    b.env.send(a.env.address, msg.Ready(1))
    sockets.until(lambda: numbers(a) == [1])
    a.env.introduce("b", sockets.endpoint(b))
    a.env.send(b.env.address, msg.Ready(2))
    sockets.until(lambda: b.lost or numbers(b) == [0, 2])
    assert not a.lost
    assert not b.lost


def test_a_forgotten_peer_is_not_spoken_to(sockets: Cluster) -> None:
    a, b = sockets.node("a"), sockets.node("b")
    sockets.introduce(a, b)
    a.env.send(b.env.address, msg.Ready(0))
    b.react = lambda sender, message: b.env.send(sender, message)
    sockets.until(lambda: a.received)
    a.env.forget("b")
    a.env.send(b.env.address, msg.Ready(1))
    sockets.until(lambda: b.lost)
    assert sockets.of(a).counters["messages_unroutable"] == 1
    assert not a.lost


def test_idle_links_stay_open(sockets: Cluster) -> None:
    a = sockets.node("a", heartbeat_s=0.02, lease_s=2.0)
    b = sockets.node("b", listens=False, heartbeat_s=0.02, lease_s=2.0)
    sockets.introduce(a, b)
    b.env.send(a.env.address, msg.Ready(0))
    sockets.until(lambda: sockets.of(b).counters["frames_received"] > 20)
    sockets.until(lambda: sockets.of(a).counters["frames_received"] > 20)
    assert not a.lost
    assert not b.lost


def test_links_that_are_looked_at_in_parts_all_stay_open(tcp: Cluster) -> None:
    a = tcp.node("a", heartbeat_s=0.05, lease_s=2.0)
    tcp.network(a).looks = 2
    peers = [tcp.node(f"b{at}", listens=False, heartbeat_s=0.05, lease_s=2.0) for at in range(5)]
    for peer in peers:
        tcp.introduce(a, peer)
        peer.env.send(a.env.address, msg.Ready(0))
    for peer in peers:
        tcp.until(lambda peer=peer: tcp.of(peer).counters["frames_received"] > 10)
    assert not a.lost


def test_a_stall_of_our_own_is_not_blamed_on_peers(tcp: Cluster) -> None:
    a = tcp.node("a", heartbeat_s=0.05, lease_s=0.5)
    b = tcp.node("b", listens=False, heartbeat_s=0.05, lease_s=0.5)
    tcp.introduce(a, b)
    b.env.send(a.env.address, msg.Ready(0))
    tcp.until(lambda: tcp.of(b).counters["frames_received"] > 1)
    b.react = lambda sender, message: threading.Event().wait(1.5)  # both live on this loop
    b.env.send(b.env.address, "stall")
    before = tcp.of(a).counters["frames_received"]
    tcp.until(lambda: tcp.of(a).counters["frames_received"] > before + 5)
    assert not a.lost
    assert not b.lost


def test_a_frame_that_takes_longer_than_a_silence_is_waited_for(tcp: Cluster) -> None:
    a = tcp.node("a", heartbeat_s=0.05, lease_s=0.7, patience_s=0.7)
    end = Zmtp(b"DEALER", codec.MAX_FRAME_BYTES)
    message = msg.Fetched(2, bytes(150_000))
    with socket.create_connection(("127.0.0.1", int(tcp.endpoint(a).rpartition(":")[2]))) as raw:
        raw.setblocking(False)

        def say() -> None:
            raw.sendall(b"".join(end.output))
            end.output.clear()

        def shake_hands() -> bool:
            say()
            with contextlib.suppress(BlockingIOError):
                end.feed(raw.recv(4096))
                assert end.next_message() is None
            return end.open

        tcp.until(shake_hands)
        say()
        raw.sendall(end.message(greeting("slow")))
        tcp.until(lambda: tcp.of(a).counters["frames_received"] == 1)
        data = end.message(codec.encode_frame(1, [("session", "session", message)]))
        pieces = deque(data[at : at + 10_000] for at in range(0, len(data), 10_000))
        due_s = tcp.loop.time()

        def trickle() -> bool:
            nonlocal due_s
            if pieces and tcp.loop.time() >= due_s:
                due_s += 0.1
                raw.sendall(pieces.popleft())
            return bool(a.received)

        tcp.until(trickle)
        assert a.received == [(Address("slow", "session"), message)]
        assert not pieces
        tcp.until(lambda: a.lost)
    assert a.lost == [("slow", "silent for 0.7 s")]


@pytest.mark.parametrize("sockets", PLAIN, indirect=True)
def test_how_long_a_peer_may_be_silent_is_its_own_to_say(
    sockets: Cluster, dealer: Callable[[str], zmq.Socket[bytes]]
) -> None:
    """A host is lost sooner than a client; no peer is waited for without end."""
    asked = {
        "patient": 300.0,
        "hasty": 0.1,
        "unmeasured": 1e9,
        "nonsense": float("nan"),
        "mute": 0.0,
    }
    a = sockets.node("a", heartbeat_s=0.02, lease_s=0.6, patience_s=0.6)
    raw = {name: dealer(sockets.endpoint(a)) for name in asked}
    for name, silence_s in asked.items():
        raw[name].send(greeting(name, silence_s))
    sockets.until(lambda: len(a.lost) == 4)
    assert a.lost[0] == ("hasty", "silent for 0.1 s")
    others = {(name, "silent for 0.6 s") for name in ("unmeasured", "nonsense", "mute")}
    assert set(a.lost[1:]) == others


@pytest.mark.parametrize("dials", [False, True], ids=["listens", "dials"])
def test_a_node_asks_for_its_own_silence_in_its_hello(sockets: Cluster, dials: bool) -> None:
    a = sockets.node("a", lease_s=7.0)
    b = sockets.node("b", lease_s=8.0, own_silence_s=2.5)
    sockets.introduce(a, b)
    first, second = (b, a) if dials else (a, b)
    first.env.send(second.env.address, msg.Ready(0))
    sockets.until(lambda: second.received)
    second.env.send(first.env.address, msg.Ready(1))
    sockets.until(lambda: first.received)
    networks: list[Any] = [sockets.of(one).network for one in (a, b)]
    bounds = [networks[0].links["b"].silence_s, networks[1].links["a"].silence_s]
    assert bounds == [2.5, 0.0]


CHILD = """
import sys, uvloop
from pw.core.actors.actor import Actor, handles
from pw.core.ids import CONTROLLER, Address
from pw.core.messages import PeerLost, Ready
from pw.transport.links.node import Node
from pw.transport.links.network import StreamNetwork

class Echo(Actor):
    @handles(Ready)
    def echo(self, sender, message):
        self.env.send(sender, message)

    @handles(PeerLost)
    def lost(self, sender, message):
        loop.stop()

name, incarnation, listens, parent = sys.argv[1:]
loop = uvloop.new_event_loop()
bind = "tcp://127.0.0.1:0" if listens == "yes" else None
network = StreamNetwork(loop, name, int(incarnation), bind=bind, heartbeat_s=0.05)
node = Node(name, loop, network)
echo = node.add("session", Echo)
print(network.endpoint, flush=True)
if listens == "no":
    echo.env.introduce("a", parent)
    echo.env.send(Address("a", "session"), Ready(-1))
loop.run_forever()
node.close()
"""


@pytest.fixture
def start() -> Iterator[Callable[..., tuple[Any, str]]]:
    """Starts a process with an echo on it; returns it and its endpoint."""
    children: list[Any] = []

    def run(name: str, incarnation: int, parent: str = "") -> tuple[Any, str]:
        out, theirs = os.pipe()
        arguments = ["-c", CHILD, name, str(incarnation), "no" if parent else "yes", parent]
        with open(os.devnull) as nothing, open(out) as lines:
            streams = (nothing.fileno(), theirs, 2)
            children.append(programs.start(arguments, dict(os.environ), programs.ROOT, streams))
            os.close(theirs)
            return children[-1], lines.readline().strip()

    yield run
    for child in children:
        child.kill()
        child.wait()


@pytest.mark.processes
@pytest.mark.parametrize("dials", [False, True], ids=["listens", "dials"])
def test_a_killed_process_is_lost(
    tcp: Cluster, start: Callable[..., tuple[Any, str]], dials: bool
) -> None:
    a = tcp.node("a", heartbeat_s=0.05)
    other = Address("b", "session")
    child, endpoint = start("b", 1, tcp.endpoint(a) if dials else "")
    if dials:
        tcp.until(lambda: a.received)
    else:
        a.env.introduce("b", endpoint)
    a.env.send(other, msg.Ready(1))
    tcp.until(lambda: 1 in numbers(a))
    child.send_signal(signal.SIGKILL)
    tcp.until(lambda: a.lost)
    assert a.lost == [("b", "connection lost")]  # at once, and not by its silence
    _, endpoint = start("b", 2, tcp.endpoint(a) if dials else "")
    if not dials:
        a.env.introduce("b", endpoint)
    else:
        tcp.until(lambda: numbers(a).count(-1) == 2)
    a.env.send(other, msg.Ready(2))
    tcp.until(lambda: 2 in numbers(a))


@pytest.mark.processes
def test_a_stopped_process_is_lost_and_hears_of_it_when_it_wakes(
    tcp: Cluster, start: Callable[..., tuple[Any, str]]
) -> None:
    a = tcp.node("a", heartbeat_s=0.05, lease_s=0.5, patience_s=0.5)
    child, _ = start("b", 1, tcp.endpoint(a))
    tcp.until(lambda: numbers(a) == [-1])
    child.send_signal(signal.SIGSTOP)
    tcp.until(lambda: a.lost)
    child.send_signal(signal.SIGCONT)
    tcp.until(lambda: child.poll() is not None)
    assert child.returncode == 0


@pytest.mark.parametrize("sockets", PLAIN, indirect=True)
def test_a_gap_in_the_numbers_loses_the_peer(
    sockets: Cluster, dealer: Callable[[str], zmq.Socket[bytes]]
) -> None:
    a = sockets.node("a")
    raw = dealer(sockets.endpoint(a))
    raw.send(greeting("raw"))
    raw.send(codec.encode_frame(1, [("session", "x", msg.Ready(1))]))
    sockets.until(lambda: raw.poll(0))
    assert codec.decode(raw.recv()).sequence == 0
    raw.send(codec.encode_frame(3, [("session", "x", msg.Ready(3))]))
    raw.send(codec.encode_frame(4, [("session", "x", msg.Ready(4))]))
    sockets.until(lambda: a.lost)
    assert numbers(a) == [1]
    assert a.lost == [("raw", "frames lost (expected 2, got 3)")]
    if raw.poll(500):  # the kernel takes it back if data comes for a closed socket
        assert codec.decode(raw.recv()).sequence == -1


@pytest.mark.parametrize("sockets", PLAIN, indirect=True)
def test_a_stranger_is_told_once_that_there_is_no_link(
    sockets: Cluster, dealer: Callable[[str], zmq.Socket[bytes]]
) -> None:
    """Who kept its link while we lost ours need not wait for our silence."""
    a = sockets.node("a")
    raw = dealer(sockets.endpoint(a))
    for number in (7, 8):
        raw.send(codec.encode_frame(number, [("session", "x", msg.Ready(number))]))
    raw.send(greeting("raw"))
    sockets.until(lambda: raw.poll(0))
    assert codec.decode(raw.recv()).sequence == -1
    sockets.until(lambda: raw.poll(0))
    assert codec.decode(raw.recv()).sequence == 0
    assert sockets.of(a).counters["frames_malformed"] == 2
    assert not a.received


@pytest.mark.parametrize("sockets", PLAIN, indirect=True)
def test_a_damaged_frame_of_a_peer_shows_as_a_gap(
    sockets: Cluster, dealer: Callable[[str], zmq.Socket[bytes]]
) -> None:
    a = sockets.node("a")
    raw = dealer(sockets.endpoint(a))
    raw.send(greeting("raw"))
    raw.send(codec.encode_frame(1, [("session", "x", msg.Ready(1))])[:-1])
    raw.send(codec.encode_frame(2, [("session", "x", msg.Ready(2))]))
    sockets.until(lambda: a.lost)
    assert a.lost == [("raw", "frames lost (expected 1, got 2)")]
    assert not numbers(a)
