"""Networks: messages arrive in order and once, in few frames, whatever others send."""

from __future__ import annotations

import errno
import os
import resource
import select
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from pw.core import messages as msg
from pw.core.errors import ConnectionFailed, ErrorReport, ProtocolError
from pw.core.ids import CONTROLLER, Address
from pw.core.messages.roles import Role
from pw.transport import endpoints
from pw.transport.access import unix as peers
from pw.transport.endpoints import LOOPBACK, address_towards, parse
from pw.transport.links import codec, connection, entrance, nearby
from pw.transport.links import link as link_module
from pw.transport.links.link import Versions
from tests.stages.cluster import Cluster, Recorder, make_cluster, numbers
from tests.stages.samples import long


@pytest.fixture(params=["local", "codec", "ipc", "tcp", "tls"])
def anywhere(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Cluster]:
    yield from make_cluster(request.param, tmp_path, uv=True)


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


def test_messages_come_in_order_and_replies_find_their_way(anywhere: Cluster) -> None:
    a, b = anywhere.node("a"), anywhere.node("b", listens=False)
    anywhere.introduce(a, b)
    a.react = lambda sender, message: a.env.send(sender, message)
    for number in range(2000):
        b.env.send(a.env.address, msg.Ready(number))
    anywhere.until(lambda: len(b.received) == 2000)
    assert numbers(a) == numbers(b) == list(range(2000))
    assert {sender for sender, _ in a.received} == {Address("b", "session")}


def test_a_node_that_closes_is_lost_at_once_and_after_its_last_words(anywhere: Cluster) -> None:
    a, b = anywhere.node("a"), anywhere.node("b")
    anywhere.introduce(a, b)
    a.env.send(b.env.address, msg.Ready(0))
    b.react = lambda sender, message: b.env.send(sender, message)
    anywhere.until(lambda: a.received)
    for number in range(1, 100):
        b.env.send(a.env.address, msg.Ready(number))
    anywhere.of(b).close()
    anywhere.until(lambda: a.lost)
    assert numbers(a) == list(range(100))
    assert a.lost == [("b", "closed")]
    assert type(a.received[-1][1]) is msg.PeerLost


def test_local_notes_cannot_leave_the_process(sockets: Cluster) -> None:
    a, b = sockets.node("a"), sockets.node("b")
    sockets.introduce(a, b)
    with pytest.raises(ProtocolError, match="SegmentLaunched"):
        a.env.send(b.env.address, msg.SegmentLaunched(1, 1))
    a.env.send(b.env.address, msg.Ready(1))
    sockets.until(lambda: b.received)


def test_messages_to_unknown_nodes_are_counted(anywhere: Cluster) -> None:
    a = anywhere.node("a")
    a.env.send(Address("unknown", "session"), msg.Ready(0))
    anywhere.until(lambda: anywhere.of(a).counters["messages_unroutable"] == 1)
    assert not a.received


@pytest.mark.parametrize("sockets", ["ipc", long("tcp"), "tls"], indirect=True)
def test_floods_both_ways_with_tiny_buffers(sockets: Cluster) -> None:
    """One hub and three peers, one that listens and two that are answered through the ROUTER."""
    count, burst = 2_000, 50
    hub = sockets.node("hub", send_buffer_bytes=1)
    peers = [sockets.node("p0", send_buffer_bytes=1)]
    peers += [sockets.node(name, listens=False, send_buffer_bytes=1) for name in ("p1", "p2")]
    sockets.introduce(hub, *peers)

    def flood(origin: Recorder, to: Address) -> Callable[[int], None]:
        # A frame for each message; a burst of them is more than the kernel buffers.
        def more(first: int) -> None:
            for number in range(first, first + burst):
                origin.env.send(to, msg.Ready(number))
                sockets.of(origin).network.flush()
            if first + burst < count:
                sockets.loop.call_soon(more, first + burst)

        return more

    for peer in peers:
        peer.env.send(hub.env.address, msg.Ready(-1))
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
        assert mine == [msg.Ready(number) for number in range(-1, count)]
    assert sockets.of(hub).counters["sends_deferred"] > 0
    assert all(sockets.of(peer).counters["sends_deferred"] > 0 for peer in peers)


def hold_early(monkeypatch: pytest.MonkeyPatch, messages: int) -> None:
    monkeypatch.setattr(link_module, "HELD_MESSAGES", messages)


def test_a_peer_of_which_many_messages_wait_is_held_and_nothing_is_lost(
    sockets: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold_early(monkeypatch, 10)
    a, b = sockets.node("a", send_buffer_bytes=1), sockets.node("b", send_buffer_bytes=1)
    sockets.of(b).messages_per_turn = 5
    sockets.introduce(a, b)
    longest = 0

    def react(sender: Address, message: object) -> None:
        nonlocal longest
        longest = max(longest, sockets.of(b).backlog)

    b.react = react
    for number in range(5000):
        a.env.send(b.env.address, msg.Ready(number))
        sockets.of(a).network.flush()
    sockets.until(lambda: len(b.received) == 5000)
    assert numbers(b) == list(range(5000))
    assert longest <= 11


def test_a_peer_that_floods_does_not_delay_another(sockets: Cluster) -> None:
    """While 5000 slow messages of one peer wait, another peer's goes before nearly all of them."""
    hub, loud, quiet = (sockets.node(name) for name in ("hub", "loud", "quiet"))
    sockets.introduce(hub, loud, quiet)
    for peer in (loud, quiet):
        peer.env.send(hub.env.address, msg.Ready(-1))
    sockets.until(lambda: len(hub.received) == 2)
    before: list[int] = []
    clock_s = 0.0
    sockets.of(hub).clock = lambda: clock_s

    def react(sender: Address, message: object) -> None:
        nonlocal clock_s
        clock_s += 1e-4
        if sender == quiet.env.address:
            before.append(len(hub.received))

    hub.react = react
    for number in range(5000):
        loud.env.send(hub.env.address, msg.Ready(number))
        sockets.of(loud).network.flush()
    sockets.until(lambda: len(hub.received) > 50)
    start = len(hub.received)
    quiet.env.send(hub.env.address, msg.Ready(0))
    sockets.until(lambda: before)
    assert before[0] - start < 500
    sockets.until(lambda: len(hub.received) == 5003)
    mine = [message for sender, message in hub.received if sender == loud.env.address]
    assert mine == [msg.Ready(number) for number in range(-1, 5000)]


def test_a_peer_that_is_held_is_not_lost_for_its_silence(
    sockets: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is held for 0.8 s, until 80 messages are handled, and 0.4 s are too long a silence."""
    hold_early(monkeypatch, 160)
    quick = {"heartbeat_s": 0.02, "send_buffer_bytes": 1}
    a = sockets.node("a", lease_s=60.0, **quick)
    b = sockets.node("b", lease_s=0.4, **quick)
    sockets.of(b).messages_per_turn = 1
    sockets.introduce(a, b)

    def slowly(sender: Address, message: object) -> None:
        time.sleep(0.01)

    b.react = slowly
    for number in range(180):
        a.env.send(b.env.address, msg.Ready(number))
        sockets.of(a).network.flush()
    sockets.until(lambda: len(b.received) >= 180)
    assert not b.lost
    assert numbers(b) == list(range(180))


def unread(
    sockets: Cluster, monkeypatch: pytest.MonkeyPatch, silence_s: float
) -> tuple[Recorder, Recorder, connection.StreamConnection]:
    """A client that sends 3000 messages and does not read the answers; and where it would read them."""
    monkeypatch.setattr(link_module, "UNREAD_BYTES", 1 << 17)
    roles = {"quiet": Role.CLIENT}
    monkeypatch.setattr(link_module, "role_of", lambda node: roles.get(node, Role.WORKER))
    quick = {"heartbeat_s": 0.02, "send_buffer_bytes": 1}
    hub = sockets.node("hub", lease_s=silence_s, patience_s=silence_s, **quick)
    client = sockets.node("quiet", lease_s=60.0, **quick)
    sockets.introduce(hub, client)
    client.env.send(hub.env.address, msg.Ready(-1))
    sockets.until(lambda: hub.received)
    hub.env.send(client.env.address, msg.Ready(-1))
    sockets.until(lambda: client.received)
    words = ErrorReport("Error", "x" * 4000)

    def answer(sender: Address, message: Any) -> None:
        hub.env.send(client.env.address, msg.RequestFailed(message.request, words))

    hub.react = answer
    answers = sockets.network(client).links["hub"].source
    assert answers is not None
    answers.hold()
    for number in range(3000):
        client.env.send(hub.env.address, msg.Ready(number))
        sockets.of(client).network.flush()
    link = sockets.network(hub).links["quiet"]
    sockets.until(lambda: link.unread_bytes)
    assert len(hub.received) < 3000
    return hub, client, answers


def test_a_client_that_does_not_read_is_not_read(
    sockets: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the answers to what it asks would fill the memory. When it reads, it gets them all."""
    hub, client, answers = unread(sockets, monkeypatch, 60.0)
    waited = sockets.network(hub).links["quiet"].out.waiting_bytes
    assert waited < 2 << 20, "what is held, and answers to what had come before it was"
    answers.resume()
    sockets.until(lambda: len(client.received) == 3001)
    assert [one.request for one in client.of(msg.RequestFailed)] == list(range(3000))
    assert not hub.lost


def test_a_client_that_never_reads_again_is_lost(
    sockets: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub, _, _ = unread(sockets, monkeypatch, 0.4)
    wire = sockets.network(hub).links["quiet"].out.stream
    assert wire is not None
    sockets.until(lambda: hub.lost)
    assert not wire.waiting_bytes, "what was dropped does not wait"


NO_HEARTBEATS = {"heartbeat_s": 60.0, "lease_s": 200.0}
"""For tests that count frames, however slow the machine is."""


def test_what_is_said_in_one_turn_leaves_in_one_frame(sockets: Cluster) -> None:
    a, b = (sockets.node(name, **NO_HEARTBEATS) for name in "ab")
    sockets.introduce(a, b)
    for number in range(5000):
        a.env.send(b.env.address, msg.Ready(number))
    sockets.until(lambda: len(b.received) == 5000)
    assert sockets.of(a).counters["messages_sent"] == 5000
    assert sockets.of(a).counters["frames_sent"] == 2  # the hello, and the rest
    assert sockets.of(b).counters["messages_received"] == 5000


def test_large_turns_are_split_into_frames(sockets: Cluster) -> None:
    a, b = (sockets.node(name, **NO_HEARTBEATS) for name in "ab")
    sockets.introduce(a, b)
    blobs = [msg.Fetched(number, bytes(50_000)) for number in range(40)]
    blobs.insert(20, msg.Fetched(40, bytes(5_000_000)))
    for blob in blobs:
        a.env.send(b.env.address, blob)
    with pytest.raises(codec.MessageTooLarge):
        a.env.send(b.env.address, msg.Fetched(1, bytes(codec.MAX_FRAME_BYTES)))
    sockets.until(lambda: len(b.received) == len(blobs))
    assert b.of(msg.Fetched) == blobs
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
    message = msg.Ready(7)
    for peer in peers:
        a.env.send(peer.env.address, message)
    sockets.until(lambda: all(peer.received for peer in peers))
    assert [m for m in encoded if type(m) is msg.Ready] == [message]
    assert all(peer.of(msg.Ready) == [message] for peer in peers)


def test_nodes_that_dial_each_other_at_once_have_one_link(sockets: Cluster) -> None:
    a, b = sockets.node("a"), sockets.node("b")
    sockets.introduce(a, b)
    for number in range(500):
        a.env.send(b.env.address, msg.Ready(number))
        b.env.send(a.env.address, msg.Ready(number))
    sockets.until(lambda: len(numbers(a)) == len(numbers(b)) == 500)
    for one, other in ((a, b), (b, a)):
        one.env.send(other.env.address, msg.Ready(500))
    sockets.until(lambda: len(numbers(a)) == len(numbers(b)) == 501)
    assert not a.lost
    assert not b.lost
    assert numbers(a) == numbers(b) == list(range(501))


@pytest.mark.parametrize("sockets", PLAIN, indirect=True)
def test_garbage_disturbs_nobody(
    sockets: Cluster, dealer: Callable[[str], zmq.Socket[bytes]], caplog: pytest.LogCaptureFixture
) -> None:
    a, b = sockets.node("a"), sockets.node("b", listens=False)
    sockets.introduce(a, b)
    b.env.send(a.env.address, msg.Ready(0))
    sockets.until(lambda: a.received)
    valid = codec.encode_frame(1, [("session", "x", msg.Ready(7))])
    raw = dealer(sockets.endpoint(a))
    garbage = [[b""], [b"\xff" * 100], [valid[:-1]], [valid, valid], [valid], [b"x"] * 5]
    for parts in garbage:
        raw.send_multipart(parts)
    sockets.until(lambda: sockets.of(a).counters["frames_malformed"] == len(garbage))
    b.env.send(a.env.address, msg.Ready(1))
    sockets.until(lambda: numbers(a) == [0, 1])
    assert not a.lost
    warnings = [record for record in caplog.records if "malformed frame" in record.message]
    assert len(warnings) == 1


@pytest.mark.parametrize("sockets", PLAIN, indirect=True)
def test_a_frame_over_the_bound_costs_its_sender_the_connection(
    sockets: Cluster, dealer: Callable[[str], zmq.Socket[bytes]]
) -> None:
    a, b = sockets.node("a"), sockets.node("b", listens=False)
    sockets.introduce(a, b)
    b.env.send(a.env.address, msg.Ready(0))
    raw = dealer(sockets.endpoint(a))
    raw.send(bytes(codec.MAX_FRAME_BYTES + 1))
    raw.send(codec.encode_frame(0, [("", "", msg.Hello(*Versions.installed(), "raw", 1))]))
    sockets.until(lambda: sockets.of(a).counters["connections_malformed"])
    sockets.until(lambda: raw.poll(0))  # on the next connection it is welcome
    assert numbers(a) == [0]
    b.env.send(a.env.address, msg.Ready(1))
    sockets.until(lambda: numbers(a) == [0, 1])
    assert not a.lost


def test_bytes_that_are_not_zeromq_disturb_nobody(tcp: Cluster) -> None:
    a, b = tcp.node("a"), tcp.node("b", listens=False)
    tcp.introduce(a, b)
    port = int(tcp.endpoint(a).rpartition(":")[2])
    for data in (b"GET / HTTP/1.1\r\n\r\n", os.urandom(2000), b"\xff\x00\x00\x00", b""):
        with socket.create_connection(("127.0.0.1", port)) as raw:
            raw.sendall(data)
    b.env.send(a.env.address, msg.Ready(0))
    tcp.until(lambda: numbers(a) == [0])
    assert not a.lost


def test_a_host_may_be_dialled_by_its_name(tcp: Cluster) -> None:
    a, b = tcp.node("a"), tcp.node("b", listens=False)
    b.env.introduce("a", tcp.endpoint(a).replace("127.0.0.1", "localhost"))
    b.env.introduce("c", "tcp://no.such.host.invalid:1")
    b.env.introduce("d", "tcp://" + 80 * "x" + ":1")
    for node in ("a", "c", "d"):
        b.env.send(Address(node, "session"), msg.Ready(0))
    tcp.until(lambda: numbers(a) == [0])


def families(node: Recorder, cluster: Cluster) -> set[socket.AddressFamily]:
    """Of the sockets of all connections that a node has."""
    served = cluster.of(node).network.connections  # type: ignore[attr-defined]
    return {socket.AddressFamily(c.stream.socket.family) for c in served}


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="abstract names are Linux's")
@pytest.mark.parametrize("bind", ["tcp://127.0.0.1:0", "tcp://*:0"])
def test_a_tcp_endpoint_on_this_machine_is_reached_over_a_unix_socket(
    tcp: Cluster, bind: str
) -> None:
    a, b = tcp.node("a", bind=bind, advertise="127.0.0.1"), tcp.node("b", listens=False)
    tcp.introduce(a, b)
    b.env.send(a.env.address, msg.Ready(0))
    tcp.until(lambda: numbers(a) == [0])
    a.env.send(b.env.address, msg.Ready(1))
    tcp.until(lambda: numbers(b) == [1])
    assert families(a, tcp) == families(b, tcp) == {socket.AF_UNIX}


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="abstract names are Linux's")
def test_a_unix_socket_of_another_user_is_not_believed(
    tcp: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "peer_user", lambda connection: os.getuid() + 1)
    a, b = tcp.node("a"), tcp.node("b", listens=False)
    tcp.introduce(a, b)
    b.env.send(a.env.address, msg.Ready(0))
    tcp.until(lambda: numbers(a) == [0])
    assert families(b, tcp) == {socket.AF_INET}


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="abstract names are Linux's")
def test_a_name_that_something_else_has_taken_leaves_tcp(tcp: Cluster) -> None:
    with socket.socket() as free, socket.socket(socket.AF_UNIX) as mute:
        free.bind(("127.0.0.1", 0))
        endpoint = f"tcp://127.0.0.1:{free.getsockname()[1]}"
        mute.bind(f"\0pw {endpoint}")
        mute.listen()
        mute.setblocking(False)
        free.close()
        a, b = tcp.node("a", bind=endpoint), tcp.node("b", listens=False)
        tcp.network(b).strangers.handshake_s = 0.05
        tcp.introduce(a, b)
        b.env.send(a.env.address, msg.Ready(0))
        tcp.until(lambda: select.select([mute], [], [], 0)[0])
        tcp.network(b).links[
            "a"
        ].out.handshake_s = 60.0  # the connection over tcp may take its time
        tcp.until(lambda: numbers(a) == [0])
        assert families(b, tcp) == {socket.AF_INET}


def test_the_socket_file_of_a_killed_process_is_not_in_the_way(tmp_path: Path) -> None:
    for cluster in make_cluster("ipc", tmp_path, uv=True):
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(str(tmp_path / "here"))
        a = cluster.node("a", bind=f"ipc://{tmp_path}/here")
        b = cluster.node("b", listens=False)
        cluster.introduce(a, b)
        b.env.send(a.env.address, msg.Ready(0))
        cluster.until(lambda a=a: numbers(a) == [0])
        with pytest.raises(ConnectionFailed, match="in use"):
            cluster.node("c", bind=f"ipc://{tmp_path}/here")
        (tmp_path / "file").touch()
        with pytest.raises(ConnectionFailed, match="in use"):
            cluster.node("c", bind=f"ipc://{tmp_path}/file")
    assert not (tmp_path / "here").exists()
    assert (tmp_path / "file").exists()


def test_a_node_without_descriptors_accepts_later(
    tcp: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(entrance, "NO_DESCRIPTORS_S", 0.05)
    a, b = tcp.node("a"), tcp.node("b", listens=False)
    tcp.introduce(a, b)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    port = int(tcp.endpoint(a).rpartition(":")[2])
    with socket.socket() as raw:
        raw.setblocking(False)

        def exhausted() -> bool:  # inside the loop, which needs descriptors to be started
            resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
            raw.connect_ex(("127.0.0.1", port))
            return bool(tcp.of(a).counters["accepts_deferred"])

        try:
            tcp.until(exhausted)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    b.env.send(a.env.address, msg.Ready(0))
    tcp.until(lambda: numbers(a) == [0])


def test_without_descriptors_nobody_is_nearby(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor can tcp be dialled, but that is tried again; the sender must not fail."""

    def refuse(*how: int) -> socket.socket:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(socket, "socket", refuse)
    assert nearby.dial(parse("tcp://127.0.0.1:1")) is None


def test_a_taken_port_is_one_clear_line(tcp: Cluster) -> None:
    a = tcp.node("a")
    with pytest.raises(ConnectionFailed, match=r"cannot listen on tcp://127.*in use") as caught:
        tcp.node("b", bind=tcp.endpoint(a))
    assert "\n" not in str(caught.value)


def test_a_wildcard_is_advertised_as_something_to_dial(tcp: Cluster) -> None:
    a = tcp.node("a", bind="tcp://*:0", advertise="127.0.0.1")
    b = tcp.node("b", listens=False)
    tcp.introduce(a, b)
    b.env.send(a.env.address, msg.Ready(0))
    tcp.until(lambda: a.received)


def test_a_host_on_the_loopback_is_no_host_for_other_machines(
    tcp: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    """Its owner is told by those who are; what is all on one machine is fine."""
    inside = tcp.node("inside")
    outside = tcp.node("outside", bind="tcp://*:0", advertise="192.0.2.7")
    client = tcp.node("client", listens=False)
    for each in (inside, outside, client):
        for name, endpoint in (
            ("local", "tcp://127.0.0.1:1"),
            ("local", "tcp://127.0.0.1:2"),
            ("far", "tcp://192.0.2.8:1"),
            ("near", "ipc:///tmp/near"),
            (CONTROLLER, "tcp://127.0.0.1:7777"),
        ):
            each.env.introduce(name, endpoint)
    (warning,) = caplog.messages
    assert warning == (
        "no other machine can dial this peer, unless it gets another --bind "
        "node=outside peer=local endpoint=tcp://127.0.0.1:1"
    )


def test_a_wildcard_is_advertised_as_the_address_on_the_default_route_or_refused(
    tcp: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoints, "route_address", lambda where: "192.0.2.7")
    assert tcp.endpoint(tcp.node("a", bind="tcp://*:0")).startswith("tcp://192.0.2.7:")

    def no_route(where: endpoints.SocketAddress) -> str:
        raise OSError("Network is unreachable")

    monkeypatch.setattr(endpoints, "route_address", no_route)
    with pytest.raises(ConnectionFailed, match=r"no default route, so .*; listen at one address"):
        tcp.node("b", bind="tcp://0.0.0.0:0")


@pytest.mark.parametrize(
    "endpoint",
    [
        "tcp://127.0.0.1:7777",
        "tcp://localhost:7777",
        "ipc:///tmp/controller",
        "tcp://" + 80 * "x" + ":1",  # too long for a name, so no server is asked
    ],
)
def test_this_machine_and_what_cannot_be_dialled_are_met_on_the_loopback(endpoint: str) -> None:
    assert address_towards(endpoint) == LOOPBACK


def test_another_machine_is_met_at_the_address_on_the_way_there() -> None:
    """The address is reserved for examples, and nothing is sent there."""
    own = address_towards("tcp://198.51.100.1:7777")
    if own == LOOPBACK:
        pytest.skip("this machine has no network")
    assert address_towards(f"tcp://{own}:7777") == own
    with socket.socket() as listener:
        listener.bind((own, 0))


@pytest.mark.parametrize(
    ("bind", "controller", "told"),
    [
        ("tcp://*:0", "tcp://198.51.100.1:7777", "10.0.0.2"),
        ("tcp://0.0.0.0:0", "tcp://198.51.100.1:7777", "10.0.0.2"),
        ("tcp://0.0.0.0:0", "tcp://127.0.0.1:7777", None),
        ("tcp://0.0.0.0:0", "ipc://*controller", None),
        ("tcp://10.0.0.3:0", "tcp://198.51.100.1:7777", None),
        ("ipc://*host", "tcp://198.51.100.1:7777", None),
    ],
)
def test_with_a_wildcard_others_are_told_the_address_on_the_way_to_the_controller(
    bind: str, controller: str, told: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine that is 10.0.0.2 there, whatever its default route is, if any."""
    ways = {"198.51.100.1": "10.0.0.2", "127.0.0.1": LOOPBACK}
    monkeypatch.setattr(endpoints, "route_address", lambda where: ways[where.address[0]])
    assert endpoints.advertised(bind, controller) == told


def test_what_is_no_endpoint_has_no_way_there() -> None:
    with pytest.raises(ConnectionFailed, match="looks like tcp://host:port"):
        address_towards("tcp://nowhere")


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="descriptors are counted in /proc")
def test_closing_leaves_no_descriptors(tmp_path: Path) -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    def once() -> None:
        for cluster in make_cluster("tcp", tmp_path, uv=True):
            nodes = [cluster.node(f"h{number}") for number in range(4)]
            cluster.introduce(*nodes)
            nodes[0].env.introduce("nowhere", "tcp://127.0.0.1:1")
            nodes[0].env.send(Address("nowhere", "session"), msg.Ready(0))
            for one in nodes:
                for other in nodes:
                    if one is not other:
                        one.env.send(other.env.address, msg.Ready(0))
            cluster.until(lambda nodes=nodes: all(len(n.received) == 3 for n in nodes))
            with pytest.raises(ConnectionFailed):
                cluster.node("taken", bind=cluster.endpoint(nodes[0]))

    once()
    before = descriptors()
    once()
    assert descriptors() == before
