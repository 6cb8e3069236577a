"""Nodes and networks: messages arrive in order and once, and whatever is lost is reported."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvloop
import zmq

from pw.core.actor import Actor, Env
from pw.core.errors import ConnectionFailed, ProtocolError
from pw.core.ids import Address
from pw.core.messages import (
    Delete,
    EdgeData,
    GetStats,
    Hello,
    PeerLost,
    PeerRefused,
    Ready,
    SegmentLaunched,
)
from pw.transport import codec
from pw.transport.link import Versions
from pw.transport.local import LocalHub
from pw.transport.node import Node
from pw.transport.zmq_network import ZmqNetwork

BOUND_S = 30.0


class Recorder(Actor):
    """Keeps what it receives, and can be told what to do with it."""

    def __init__(self, env: Env) -> None:
        super().__init__(env)
        self.received: list[tuple[Address, object]] = []
        self.turns: list[int] = []
        self.react: Callable[[Address, Any], None] = lambda sender, message: None

    def receive(self, sender: Address, message: object) -> None:
        self.received.append((sender, message))
        self.react(sender, message)

    def turn_ended(self) -> None:
        self.turns.append(len(self.received))

    def of(self, kind: type) -> list[Any]:
        return [message for _, message in self.received if type(message) is kind]

    @property
    def lost(self) -> list[tuple[str, str]]:
        return [(message.node, message.reason) for message in self.of(PeerLost)]


class Cluster:
    """Nodes with one recorder each, called "main", on one loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, where: str, folder: Path) -> None:
        self.loop = loop
        self.where = where
        self.folder = folder
        self.hub = LocalHub(loop, codec=where == "codec")
        self.nodes: list[Node] = []

    def node(self, name: str, incarnation: int = 1, listens: bool = True, **how: Any) -> Recorder:
        network: Any
        if self.where in ("local", "codec"):
            network = self.hub.network(name)
        else:
            path = f"ipc://{self.folder}/{name}-{len(self.nodes)}"
            bind = path if self.where == "ipc" else "tcp://127.0.0.1:0"
            how.setdefault("bind", bind if listens else None)
            network = ZmqNetwork(self.loop, name, incarnation, **how)
        node = Node(name, self.loop, network)
        self.nodes.append(node)
        return node.add("main", Recorder)

    def of(self, recorder: Recorder) -> Node:
        (node,) = [node for node in self.nodes if node._actors.get("main") is recorder]
        return node

    def endpoint(self, recorder: Recorder) -> str:
        return getattr(self.of(recorder).network, "endpoint", "here")

    def introduce(self, *recorders: Recorder) -> None:
        for one in recorders:
            for other in recorders:
                if one is not other and self.endpoint(other):
                    one.env.introduce(other.env.address.node, self.endpoint(other))

    def until(self, condition: Callable[[], object]) -> None:
        async def poll() -> None:
            while not condition():
                await asyncio.sleep(0.001)

        async def bounded() -> None:
            await asyncio.wait_for(poll(), BOUND_S)

        self.loop.run_until_complete(bounded())

    def close(self) -> None:
        for node in self.nodes:
            node.close()


def make_cluster(where: str, folder: Path, uv: bool) -> Iterator[Cluster]:
    loop = uvloop.new_event_loop() if uv else asyncio.new_event_loop()
    cluster = Cluster(loop, where, folder)
    yield cluster
    cluster.close()
    loop.close()


@pytest.fixture(params=["local", "codec", "ipc", "tcp"])
def anywhere(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Cluster]:
    yield from make_cluster(request.param, tmp_path, uv=True)


@pytest.fixture(params=["ipc", "tcp"])
def sockets(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Cluster]:
    yield from make_cluster(request.param, tmp_path, uv=True)


@pytest.fixture(params=["asyncio", "uvloop"])
def tcp(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Cluster]:
    yield from make_cluster("tcp", tmp_path, uv=request.param == "uvloop")


@pytest.fixture
def local(tmp_path: Path) -> Iterator[Cluster]:
    yield from make_cluster("local", tmp_path, uv=False)


def numbers(recorder: Recorder) -> list[int]:
    return [message.request for message in recorder.of(Ready)]


# --- one node ----------------------------------------------------------------------------------


def test_handlers_never_run_inside_a_send(local: Cluster) -> None:
    actor = local.node("a")
    depth = []

    def react(sender: Address, message: Ready) -> None:
        depth.append("in")
        if message.request:
            actor.env.send(actor.env.address, Ready(message.request - 1))
        depth.append("out")

    actor.react = react
    actor.env.send(actor.env.address, Ready(3))
    assert not actor.received
    local.until(lambda: len(actor.received) == 4)
    assert depth == ["in", "out"] * 4
    assert actor.turns[-1] == 4


def test_a_turn_ends_once_for_all_that_came_in_it(local: Cluster) -> None:
    actor = local.node("a")
    for number in range(10):
        actor.env.send(actor.env.address, Ready(number))
    local.until(lambda: actor.turns)
    assert actor.turns == [10]


def test_an_endless_exchange_leaves_room_for_others(local: Cluster) -> None:
    actor = local.node("a")
    actor.react = lambda sender, message: actor.env.send(actor.env.address, message)
    actor.env.send(actor.env.address, Ready(0))
    fired: list[bool] = []
    local.loop.call_later(0, fired.append, True)
    local.until(lambda: fired and actor.turns)
    actor.react = lambda sender, message: None


def test_timers_fire_unless_cancelled(local: Cluster) -> None:
    actor = local.node("a")
    early = actor.env.call_later(0.001, "early")
    actor.env.call_later(0.002, "late")
    cancelled = actor.env.call_later(0.001, "cancelled")
    cancelled.cancel()
    local.until(lambda: len(actor.received) == 2)
    early.cancel()
    assert actor.received == [(actor.env.address, "early"), (actor.env.address, "late")]


def test_a_note_can_be_cancelled_while_it_waits_in_the_mailbox(local: Cluster) -> None:
    actor = local.node("a")
    timers = [actor.env.call_later(0, note) for note in ("first", "second")]
    actor.react = lambda sender, message: [timer.cancel() for timer in timers]
    local.loop.call_later(0, actor.env.send, actor.env.address, "end")
    local.until(lambda: "end" in [message for _, message in actor.received])
    assert "second" not in [message for _, message in actor.received]


def test_messages_from_threads_arrive_with_few_wakeups(local: Cluster) -> None:
    actor = local.node("a")
    node = local.of(actor)

    def work(first: int) -> None:
        for number in range(first, first + 1000):
            node.post_threadsafe("main", Ready(number))

    threads = [threading.Thread(target=work, args=(first,)) for first in (0, 1000, 2000)]
    for thread in threads:
        thread.start()
    local.until(lambda: len(actor.received) == 3000)
    for thread in threads:
        thread.join()
    for first in (0, 1000, 2000):
        mine = [number for number in numbers(actor) if first <= number < first + 1000]
        assert mine == list(range(first, first + 1000))


def test_pending_messages_of_a_thread_wake_the_loop_once(
    local: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    actor = local.node("a")
    node = local.of(actor)
    wakeups = []
    original = local.loop.call_soon_threadsafe
    monkeypatch.setattr(
        local.loop,
        "call_soon_threadsafe",
        lambda *args, **kwargs: (wakeups.append(args), original(*args, **kwargs))[1],
    )
    for number in range(100):
        node.post_threadsafe("main", Ready(number))
    local.until(lambda: len(actor.received) == 100)
    assert len(wakeups) == 1


def test_a_crash_is_reported_and_the_actor_goes_on(local: Cluster) -> None:
    actor = local.node("a")
    node = local.of(actor)

    def react(sender: Address, message: object) -> None:
        raise RuntimeError(f"cannot do {message}")

    actor.react = react
    crashes: list[tuple[str, str]] = []
    actor.env.send(actor.env.address, "one")
    local.until(lambda: node.counters["actor_crashes"] == 1)
    node.on_crash = lambda name, error: crashes.append((name, str(error)))
    actor.env.send(actor.env.address, "two")
    local.until(lambda: crashes)
    assert crashes == [("main", "cannot do two")]


def test_messages_to_unknown_actors_are_counted_and_logged_once(
    local: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    actor = local.node("a")
    for _ in range(3):
        actor.env.send(Address("a", "nobody"), Ready(0))
    local.until(lambda: local.of(actor).counters["messages_undeliverable"] == 3)
    assert [record.message for record in caplog.records] == [
        "message to an unknown actor node=a actor=nobody message=Ready"
    ]


def test_actors_come_and_go(local: Cluster) -> None:
    actor = local.node("a")
    node = local.of(actor)
    with pytest.raises(ValueError, match="main"):
        node.add("main", Recorder)
    actor.env.call_later(0, "a note for the removed")
    node.remove("main")
    again = node.add("other", Recorder)
    again.env.call_later(0.005, "last")
    local.until(lambda: again.received)
    assert not actor.received
    assert node.counters["messages_undeliverable"] == 0


# --- every network -----------------------------------------------------------------------------


def test_messages_come_in_order_and_replies_find_their_way(anywhere: Cluster) -> None:
    a, b = anywhere.node("a"), anywhere.node("b", listens=False)
    anywhere.introduce(a, b)
    a.react = lambda sender, message: a.env.send(sender, message)
    for number in range(2000):
        b.env.send(a.env.address, Ready(number))
    anywhere.until(lambda: len(b.received) == 2000)
    assert numbers(a) == numbers(b) == list(range(2000))
    assert {sender for sender, _ in a.received} == {Address("b", "main")}


def test_a_node_that_closes_is_lost_at_once_and_after_its_last_words(anywhere: Cluster) -> None:
    a, b = anywhere.node("a"), anywhere.node("b")
    anywhere.introduce(a, b)
    a.env.send(b.env.address, Ready(0))
    b.react = lambda sender, message: b.env.send(sender, message)
    anywhere.until(lambda: a.received)
    for number in range(1, 100):
        b.env.send(a.env.address, Ready(number))
    anywhere.of(b).close()
    anywhere.until(lambda: a.lost)
    assert numbers(a) == list(range(100))
    assert a.lost == [("b", "closed")]
    assert type(a.received[-1][1]) is PeerLost


def test_local_notes_cannot_leave_the_process(sockets: Cluster) -> None:
    a, b = sockets.node("a"), sockets.node("b")
    sockets.introduce(a, b)
    with pytest.raises(ProtocolError, match="SegmentLaunched"):
        a.env.send(b.env.address, SegmentLaunched(1, 1))
    a.env.send(b.env.address, Ready(1))
    sockets.until(lambda: b.received)


def test_messages_to_unknown_nodes_are_counted(anywhere: Cluster) -> None:
    a = anywhere.node("a")
    a.env.send(Address("nobody", "main"), Ready(0))
    anywhere.until(lambda: anywhere.of(a).counters["messages_unroutable"] == 1)
    assert not a.received


# --- inside one process ------------------------------------------------------------------------


def test_a_node_that_is_cut_loses_what_it_said_last(local: Cluster) -> None:
    a, b = local.node("a"), local.node("b")
    b.env.send(a.env.address, Ready(0))
    local.hub.cut("b")
    b.env.send(a.env.address, Ready(1))
    local.until(lambda: a.lost)
    assert a.lost == [("b", "killed")]
    assert not numbers(a)
    again = local.node("b")
    again.env.send(a.env.address, Ready(2))
    local.until(lambda: numbers(a) == [2])


# --- sockets -----------------------------------------------------------------------------------


def test_floods_both_ways_with_tiny_high_water_marks(sockets: Cluster) -> None:
    """One hub and three peers, one that listens and two that are answered through the ROUTER."""
    count, burst = 10_000, 50
    hub = sockets.node("hub", high_water_frames=2)
    peers = [sockets.node("p0", high_water_frames=2)]
    peers += [sockets.node(name, listens=False, high_water_frames=2) for name in ("p1", "p2")]
    sockets.introduce(hub, *peers)

    def flood(origin: Recorder, to: Address) -> Callable[[int], None]:
        # A frame for each message; a burst of them overruns the high-water mark.
        def more(first: int) -> None:
            for number in range(first, first + burst):
                origin.env.send(to, Ready(number))
                sockets.of(origin).network.flush()
            if first + burst < count:
                sockets.loop.call_soon(more, first + burst)

        return more

    for peer in peers:
        peer.env.send(hub.env.address, Ready(-1))
    sockets.until(lambda: len(numbers(hub)) == len(peers))
    for peer in peers:
        flood(peer, hub.env.address)(0)
        flood(hub, peer.env.address)(0)
    total = (count + 1) * len(peers)
    sockets.until(
        lambda: len(hub.received) == total and all(len(peer.received) == count for peer in peers)
    )
    for peer in peers:
        assert numbers(peer) == list(range(count))
        mine = [message for sender, message in hub.received if sender == peer.env.address]
        assert mine == [Ready(number) for number in range(-1, count)]
    assert sockets.of(hub).counters["sends_deferred"] > 0
    assert all(sockets.of(peer).counters["sends_deferred"] > 0 for peer in peers)


def test_what_is_said_in_one_turn_leaves_in_one_frame(sockets: Cluster) -> None:
    a, b = sockets.node("a"), sockets.node("b")
    sockets.introduce(a, b)
    for number in range(5000):
        a.env.send(b.env.address, Ready(number))
    sockets.until(lambda: len(b.received) == 5000)
    assert sockets.of(a).counters["messages_sent"] == 5000
    assert sockets.of(a).counters["frames_sent"] == 2  # the hello, and the rest
    assert sockets.of(b).counters["messages_received"] == 5000


def test_large_turns_are_split_into_frames(sockets: Cluster) -> None:
    a, b = sockets.node("a"), sockets.node("b")
    sockets.introduce(a, b)
    blobs = [EdgeData(1, number, bytes(50_000)) for number in range(40)]
    blobs.insert(20, EdgeData(1, 40, bytes(5_000_000)))
    for blob in blobs:
        a.env.send(b.env.address, blob)
    with pytest.raises(codec.MessageTooLarge):
        a.env.send(b.env.address, EdgeData(1, 1, bytes(codec.MAX_FRAME_BYTES)))
    sockets.until(lambda: len(b.received) == len(blobs))
    assert b.of(EdgeData) == blobs
    assert sockets.of(a).counters["frames_sent"] == 1 + 4 + 1 + 4  # the hello is alone


def test_a_message_to_many_is_encoded_once(
    sockets: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = sockets.node("a")
    peers = [sockets.node(f"h{number}") for number in range(8)]
    sockets.introduce(a, *peers)
    encoded: list[object] = []
    original = codec.encode_message
    monkeypatch.setattr(
        codec, "encode_message", lambda message: (encoded.append(message), original(message))[1]
    )
    message = Delete((1, 2, 3))
    for peer in peers:
        a.env.send(peer.env.address, message)
    sockets.until(lambda: all(peer.received for peer in peers))
    assert [m for m in encoded if type(m) is Delete] == [message]
    assert all(peer.of(Delete) == [message] for peer in peers)


def test_nodes_that_dial_each_other_at_once_have_one_link(sockets: Cluster) -> None:
    a, b = sockets.node("a"), sockets.node("b")
    sockets.introduce(a, b)
    for number in range(500):
        a.env.send(b.env.address, Ready(number))
        b.env.send(a.env.address, Ready(number))
    sockets.until(lambda: len(numbers(a)) == len(numbers(b)) == 500)
    for one, other in ((a, b), (b, a)):
        one.env.send(other.env.address, Ready(500))
    sockets.until(lambda: len(numbers(a)) == len(numbers(b)) == 501)
    assert not a.lost
    assert not b.lost
    assert numbers(a) == numbers(b) == list(range(501))


@pytest.mark.parametrize("field", ["protocol", "pw", "jax"])
def test_other_versions_are_refused_with_words_on_both_sides(sockets: Cluster, field: str) -> None:
    ours = Versions(1, "1.0", "0.10.2")
    theirs = ours._replace(**{field: 99 if field == "protocol" else "99.0"})
    a = sockets.node("a", versions=ours)
    b = sockets.node("b", listens=False, versions=theirs)
    sockets.introduce(a, b)
    b.env.send(a.env.address, Ready(0))
    sockets.until(lambda: a.of(PeerRefused) and b.of(PeerRefused))
    for one, other in ((a, "b"), (b, "a")):
        (refusal,) = one.of(PeerRefused)
        assert refusal.node == other
        assert refusal.error.kind == "VersionMismatch"
        assert str(ours) in refusal.error.message
        assert str(theirs) in refusal.error.message
    assert not numbers(a)


def test_a_peer_under_another_name_is_refused(sockets: Cluster) -> None:
    a, b = sockets.node("a"), sockets.node("b")
    b.env.introduce("somebody", sockets.endpoint(a))
    b.env.send(Address("somebody", "main"), Ready(0))
    sockets.until(lambda: b.of(PeerRefused) and a.of(PeerRefused))
    (refusal,) = b.of(PeerRefused)
    assert "answers a, where somebody was expected" in refusal.error.message


@pytest.mark.parametrize("newcomer", [2, 1, 0])
def test_the_newer_incarnation_of_a_name_wins(sockets: Cluster, newcomer: int) -> None:
    a = sockets.node("a")
    old = sockets.node("b", incarnation=1, listens=False)
    new = sockets.node("b", incarnation=newcomer, listens=False)
    sockets.introduce(a, old)
    sockets.introduce(a, new)
    old.env.send(a.env.address, Ready(1))
    sockets.until(lambda: numbers(a) == [1])
    new.env.send(a.env.address, Ready(2))
    if newcomer == 0:
        sockets.until(lambda: new.of(PeerRefused))
        assert not a.lost
        old.env.send(a.env.address, Ready(3))
        sockets.until(lambda: numbers(a) == [1, 3])
    else:
        sockets.until(lambda: numbers(a) == [1, 2])
        assert [node for node, _ in a.lost] == ["b"]
        kinds = [type(message) for _, message in a.received]
        assert kinds == [Ready, PeerLost, Ready]
    if newcomer == 2:
        sockets.until(lambda: old.of(PeerRefused))


def test_a_peer_that_comes_back_gets_a_new_link(sockets: Cluster) -> None:
    a = sockets.node("a")
    for incarnation in (1, 2, 3):
        b = sockets.node("b", incarnation=incarnation, listens=False)
        sockets.introduce(a, b)
        b.react = lambda sender, message, b=b: b.env.send(sender, message)
        a_count = len(numbers(a))
        b.env.send(a.env.address, Ready(incarnation))
        sockets.until(lambda n=a_count: len(numbers(a)) == n + 1)
        a.env.send(Address("b", "main"), Ready(10 * incarnation))
        sockets.until(lambda n=a_count: len(numbers(a)) == n + 2)
        sockets.of(b).close()
        sockets.until(lambda i=incarnation: len(a.lost) == i)
    assert numbers(a) == [1, 10, 2, 20, 3, 30]


def test_a_peer_that_cannot_be_reached_is_lost(sockets: Cluster) -> None:
    a = sockets.node("a", heartbeat_s=0.02, connect_s=0.1)
    nowhere = "tcp://127.0.0.1:1" if sockets.where == "tcp" else f"ipc://{sockets.folder}/none"
    a.env.introduce("b", nowhere)
    a.env.introduce("c", "nonsense://x")
    a.env.send(Address("b", "main"), Ready(0))
    a.env.send(Address("c", "main"), Ready(0))
    sockets.until(lambda: len(a.lost) == 2)
    assert ("b", f"could not be reached at {nowhere}") in a.lost
    assert any(node == "c" and "nonsense" in reason for node, reason in a.lost)


def test_a_forgotten_peer_is_not_spoken_to(sockets: Cluster) -> None:
    a, b = sockets.node("a"), sockets.node("b")
    sockets.introduce(a, b)
    a.env.send(b.env.address, Ready(0))
    b.react = lambda sender, message: b.env.send(sender, message)
    sockets.until(lambda: a.received)
    a.env.forget("b")
    a.env.send(b.env.address, Ready(1))
    sockets.until(lambda: b.lost)
    assert sockets.of(a).counters["messages_unroutable"] == 1
    assert not a.lost


def test_idle_links_stay_open(sockets: Cluster) -> None:
    a = sockets.node("a", heartbeat_s=0.02, silence_s=2.0)
    b = sockets.node("b", listens=False, heartbeat_s=0.02, silence_s=2.0)
    sockets.introduce(a, b)
    b.env.send(a.env.address, Ready(0))
    sockets.until(lambda: sockets.of(b).counters["frames_received"] > 20)
    sockets.until(lambda: sockets.of(a).counters["frames_received"] > 20)
    assert not a.lost
    assert not b.lost


def test_a_stall_of_our_own_is_not_blamed_on_peers(tcp: Cluster) -> None:
    a = tcp.node("a", heartbeat_s=0.05, silence_s=0.5)
    b = tcp.node("b", listens=False, heartbeat_s=0.05, silence_s=0.5)
    tcp.introduce(a, b)
    b.env.send(a.env.address, Ready(0))
    tcp.until(lambda: tcp.of(b).counters["frames_received"] > 1)
    b.react = lambda sender, message: threading.Event().wait(1.5)  # both live on this loop
    b.env.send(b.env.address, "stall")
    before = tcp.of(a).counters["frames_received"]
    tcp.until(lambda: tcp.of(a).counters["frames_received"] > before + 5)
    assert not a.lost
    assert not b.lost


CHILD = """
import sys, uvloop
from pw.core.actor import Actor, handles
from pw.core.ids import Address
from pw.core.messages import PeerLost, Ready
from pw.transport.node import Node
from pw.transport.zmq_network import ZmqNetwork

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
network = ZmqNetwork(loop, name, int(incarnation), bind=bind, heartbeat_s=0.05)
node = Node(name, loop, network)
echo = node.add("echo", Echo)
print(network.endpoint, flush=True)
if listens == "no":
    echo.env.introduce("a", parent)
    echo.env.send(Address("a", "main"), Ready(-1))
loop.run_forever()
node.close()
"""


@pytest.fixture
def start() -> Iterator[Callable[..., tuple[subprocess.Popen[str], str]]]:
    """Starts a process with an echo on it; returns it and its endpoint."""
    children: list[subprocess.Popen[str]] = []

    def run(name: str, incarnation: int, parent: str = "") -> tuple[subprocess.Popen[str], str]:
        child = subprocess.Popen(
            [
                sys.executable,
                "-c",
                CHILD,
                name,
                str(incarnation),
                "no" if parent else "yes",
                parent,
            ],
            stdout=subprocess.PIPE,
            text=True,
        )
        children.append(child)
        assert child.stdout is not None
        return child, child.stdout.readline().strip()

    yield run
    for child in children:
        child.kill()
        child.wait()
        if child.stdout is not None:
            child.stdout.close()


@pytest.mark.processes
@pytest.mark.parametrize("dials", [False, True], ids=["listens", "dials"])
def test_a_killed_process_is_lost(
    tcp: Cluster, start: Callable[..., tuple[subprocess.Popen[str], str]], dials: bool
) -> None:
    a = tcp.node("a", heartbeat_s=0.05, silence_s=0.5)
    other = Address("b", "echo")
    child, endpoint = start("b", 1, tcp.endpoint(a) if dials else "")
    if dials:
        tcp.until(lambda: a.received)
    else:
        a.env.introduce("b", endpoint)
    a.env.send(other, Ready(1))
    tcp.until(lambda: 1 in numbers(a))
    child.send_signal(signal.SIGKILL)
    tcp.until(lambda: a.lost)
    assert a.lost[0][0] == "b"
    _, endpoint = start("b", 2, tcp.endpoint(a) if dials else "")
    if not dials:
        a.env.introduce("b", endpoint)
    else:
        tcp.until(lambda: numbers(a).count(-1) == 2)
    a.env.send(other, Ready(2))
    tcp.until(lambda: 2 in numbers(a))


@pytest.mark.processes
def test_a_stopped_process_is_lost_and_hears_of_it_when_it_wakes(
    tcp: Cluster, start: Callable[..., tuple[subprocess.Popen[str], str]]
) -> None:
    a = tcp.node("a", heartbeat_s=0.05, silence_s=0.5)
    child, _ = start("b", 1, tcp.endpoint(a))
    tcp.until(lambda: numbers(a) == [-1])
    child.send_signal(signal.SIGSTOP)
    tcp.until(lambda: a.lost)
    child.send_signal(signal.SIGCONT)
    tcp.until(lambda: child.poll() is not None)
    assert child.returncode == 0


# --- hostile and broken peers ------------------------------------------------------------------


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


def greeting(name: str) -> bytes:
    return codec.encode_frame(0, [("", "", Hello(*Versions.installed(), name, 1))])


def test_garbage_disturbs_nobody(
    sockets: Cluster,
    dealer: Callable[[str], zmq.Socket[bytes]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    a, b = sockets.node("a"), sockets.node("b", listens=False)
    sockets.introduce(a, b)
    b.env.send(a.env.address, Ready(0))
    sockets.until(lambda: a.received)
    valid = codec.encode_frame(1, [("main", "x", Ready(7))])
    raw = dealer(sockets.endpoint(a))
    garbage = [[b""], [b"\xff" * 100], [valid[:-1]], [valid, valid], [valid], [b"x"] * 5]
    for parts in garbage:
        raw.send_multipart(parts)
    sockets.until(lambda: sockets.of(a).counters["frames_malformed"] == len(garbage))
    b.env.send(a.env.address, Ready(1))
    sockets.until(lambda: numbers(a) == [0, 1])
    assert not a.lost
    warnings = [record for record in caplog.records if "malformed frame" in record.message]
    assert len(warnings) == 1


def test_a_frame_over_the_bound_costs_its_sender_the_connection(
    sockets: Cluster, dealer: Callable[[str], zmq.Socket[bytes]]
) -> None:
    a, b = sockets.node("a"), sockets.node("b", listens=False)
    sockets.introduce(a, b)
    b.env.send(a.env.address, Ready(0))
    raw = dealer(sockets.endpoint(a))
    raw.send(bytes(codec.MAX_FRAME_BYTES + 1))
    raw.send(greeting("raw"))
    sockets.until(lambda: numbers(a) == [0])
    b.env.send(a.env.address, Ready(1))
    sockets.until(lambda: numbers(a) == [0, 1])
    assert not a.lost


def test_a_gap_in_the_numbers_loses_the_peer(
    sockets: Cluster, dealer: Callable[[str], zmq.Socket[bytes]]
) -> None:
    a = sockets.node("a")
    raw = dealer(sockets.endpoint(a))
    raw.send(greeting("raw"))
    raw.send(codec.encode_frame(1, [("main", "x", Ready(1))]))
    raw.send(codec.encode_frame(3, [("main", "x", Ready(3))]))
    raw.send(codec.encode_frame(4, [("main", "x", Ready(4))]))
    sockets.until(lambda: sockets.of(a).counters["frames_malformed"])
    assert numbers(a) == [1]
    assert a.lost == [("raw", "frames lost (expected 2, got 3)")]
    # A stranger is told once that there is no link, so that it need not wait for silence.
    answers = [codec.decode(raw.recv()) for _ in range(2)]
    assert [answer.sequence for answer in answers] == [0, -1]


def test_a_damaged_frame_of_a_peer_shows_as_a_gap(
    sockets: Cluster, dealer: Callable[[str], zmq.Socket[bytes]]
) -> None:
    a = sockets.node("a")
    raw = dealer(sockets.endpoint(a))
    raw.send(greeting("raw"))
    raw.send(codec.encode_frame(1, [("main", "x", Ready(1))])[:-1])
    raw.send(codec.encode_frame(2, [("main", "x", Ready(2))]))
    sockets.until(lambda: a.lost)
    assert a.lost == [("raw", "frames lost (expected 1, got 2)")]
    assert not numbers(a)


def test_bytes_that_are_not_zeromq_disturb_nobody(tcp: Cluster) -> None:
    a, b = tcp.node("a"), tcp.node("b", listens=False)
    tcp.introduce(a, b)
    port = int(tcp.endpoint(a).rpartition(":")[2])
    for data in (b"GET / HTTP/1.1\r\n\r\n", os.urandom(2000), b"\xff\x00\x00\x00", b""):
        with socket.create_connection(("127.0.0.1", port)) as raw:
            raw.sendall(data)
    b.env.send(a.env.address, Ready(0))
    tcp.until(lambda: numbers(a) == [0])
    assert not a.lost


# --- listening and leaving ---------------------------------------------------------------------


def test_a_taken_port_is_one_clear_line(tcp: Cluster) -> None:
    a = tcp.node("a")
    with pytest.raises(ConnectionFailed, match=r"cannot listen on tcp://127.*in use") as caught:
        tcp.node("b", bind=tcp.endpoint(a))
    assert "\n" not in str(caught.value)


def test_a_wildcard_is_advertised_as_something_to_dial(tcp: Cluster) -> None:
    a = tcp.node("a", bind="tcp://*:0", advertise="127.0.0.1")
    b = tcp.node("b", listens=False)
    tcp.introduce(a, b)
    b.env.send(a.env.address, Ready(0))
    tcp.until(lambda: a.received)
    assert "0.0.0.0" not in tcp.endpoint(tcp.node("c", bind="tcp://*:0"))


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="descriptors are counted in /proc")
def test_closing_leaves_no_descriptors(tmp_path: Path) -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    def once() -> None:
        for cluster in make_cluster("tcp", tmp_path, uv=True):
            nodes = [cluster.node(f"h{number}") for number in range(4)]
            cluster.introduce(*nodes)
            nodes[0].env.introduce("nowhere", "tcp://127.0.0.1:1")
            nodes[0].env.send(Address("nowhere", "main"), Ready(0))
            for one in nodes:
                for other in nodes:
                    if one is not other:
                        one.env.send(other.env.address, Ready(0))
            cluster.until(lambda nodes=nodes: all(len(n.received) == 3 for n in nodes))
            with pytest.raises(ConnectionFailed):
                cluster.node("taken", bind=cluster.endpoint(nodes[0]))

    once()
    before = descriptors()
    once()
    assert descriptors() == before
