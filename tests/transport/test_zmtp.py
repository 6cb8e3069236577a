"""ZMTP: what one end says the other understands, however it is cut, and so does libzmq."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from pw.core.ids import Address
from pw.core.messages import Fetched, Hello, Ready
from pw.transport.links import codec
from pw.transport.links.link import Versions
from pw.transport.links.zmtp import LARGEST_COMMAND_BYTES, Zmtp, ZmtpError
from tests.stages.cluster import Cluster, make_cluster, numbers

LARGEST = 1 << 20


def said(end: Zmtp) -> bytes:
    data = b"".join(end.output)
    end.output.clear()
    return data


def heard(end: Zmtp, data: bytes) -> list[list[bytes]]:
    if data and (body := end.single(data)) is not None:
        return [[body]]
    end.feed(data)
    return list(iter(end.next_message, None))


def opened() -> tuple[Zmtp, Zmtp]:
    """Two ends after their handshake."""
    ends = Zmtp(b"DEALER", LARGEST), Zmtp(b"ROUTER", LARGEST)
    for _ in range(2):
        words = [said(end) for end in ends]
        for end, theirs in zip(ends, reversed(words), strict=True):
            assert heard(end, theirs) == []
    assert all(end.open for end in ends)
    return ends


def command(name: bytes, body: bytes = b"") -> bytes:
    whole = bytes((len(name),)) + name + body
    return b"\x06" + len(whole).to_bytes(8, "big") + whole


def multipart(parts: list[bytes]) -> bytes:
    """Parts in long frames, which need not be long."""
    flags = [2 | (index < len(parts) - 1) for index in range(len(parts))]
    return b"".join(
        bytes((flag,)) + len(part).to_bytes(8, "big") + part
        for flag, part in zip(flags, parts, strict=True)
    )


def cut(data: bytes, places: list[int]) -> Iterator[bytes]:
    edges = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    for start, end in itertools.pairwise(edges):
        yield data[start:end]


sizes = st.sampled_from([0, 1, 255, 256, 70_000])
places = st.lists(st.integers(0, 1 << 20), max_size=12)


@given(st.lists(sizes, max_size=6), places)
def test_messages_come_through_however_they_are_cut(lengths: list[int], at: list[int]) -> None:
    other, end = opened()
    messages = [bytes((index,)) * size for index, size in enumerate(lengths)]
    data = b"".join(other.message(message) for message in messages)
    got = [parts for piece in cut(data, at) for parts in heard(end, piece)]
    assert got == [[message] for message in messages]


@given(sizes, st.binary(max_size=3))
def test_a_message_is_whole_only_if_it_is_all_there_is(size: int, more: bytes) -> None:
    other, end = opened()
    message = other.message(bytes(size))
    assert end.single(message) == bytes(size)
    if more:
        assert end.single(message + more) is None
    assert end.single(message[:-1]) is None
    assert heard(end, message[:-1]) == []
    assert end.single(message) is None, "a part of an earlier one is here"
    assert heard(end, message[-1:]) == [[bytes(size)]]
    assert end.single(message) == bytes(size)


@given(st.lists(st.lists(st.binary(max_size=300), min_size=1, max_size=5), max_size=5), places)
def test_parts_and_commands_in_between(messages: list[list[bytes]], at: list[int]) -> None:
    _, end = opened()
    data = b"".join(command(b"PING", b"\0\7hello") + multipart(parts) for parts in messages)
    got = [parts for piece in cut(data, at) for parts in heard(end, piece)]
    assert got == messages
    assert said(end) == command(b"PONG", b"hello") * len(messages)


@given(places)
def test_a_handshake_may_be_cut(at: list[int]) -> None:
    client, server = Zmtp(b"DEALER", LARGEST), Zmtp(b"ROUTER", LARGEST)
    heard(client, said(server))
    greeting_and_ready = said(client)
    for piece in filter(None, cut(greeting_and_ready, at)):
        assert not server.open
        assert heard(server, piece) == []
    assert server.open


@given(st.binary(max_size=400), st.booleans())
def test_garbage_is_an_error_or_waited_out(garbage: bytes, after: bool) -> None:
    end = opened()[1] if after else Zmtp(b"ROUTER", LARGEST)
    with contextlib.suppress(ZmtpError):
        heard(end, garbage)


GREETING = said(Zmtp(b"DEALER", LARGEST))


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"GET / HTTP/1.1\r\n", "no greeting"),
        (GREETING[:10] + b"\x01\x05", "older version"),
        (GREETING.replace(b"NULL", b"CURV"), "security mechanism"),
        (GREETING + b"\0\1x", "before the handshake"),
        (GREETING + command(b"PING", b"\0\0"), "PING' in the handshake"),
        (GREETING + command(b"ERROR", b"\x02no"), "^no$"),
        (GREETING + command(b"READY", b"\x0bSocket-Type\0\0\0\x03PUB"), "type b'PUB'"),
        (GREETING + command(b"READY", b"\x0bSocket-Type\0\0\0\x09PUB"), "damaged"),
        (GREETING + b"\x04\x00", "damaged"),
        (GREETING + b"\x06" + (LARGEST_COMMAND_BYTES + 1).to_bytes(8, "big"), "a command of"),
    ],
)
def test_a_bad_handshake_says_what_is_wrong(data: bytes, words: str) -> None:
    with pytest.raises(ZmtpError, match=words):
        heard(Zmtp(b"ROUTER", LARGEST), data)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"\x08\x00", "flags 0x08"),
        (b"\x05\x00", "flags 0x05"),
        (b"\x02" + (LARGEST + 1).to_bytes(8, "big"), "more than"),
        (b"\x01\x00" * (LARGEST // 64 + 2), "more than"),
    ],
)
def test_what_is_over_a_bound_is_refused_before_it_is_kept(data: bytes, words: str) -> None:
    with pytest.raises(ZmtpError, match=words):
        heard(opened()[1], data)


# --- libzmq -------------------------------------------------------------------------------------


@pytest.fixture(params=["ipc", "tcp"])
def sockets(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Cluster]:
    yield from make_cluster(request.param, tmp_path, uv=True)


@pytest.fixture
def libzmq() -> Iterator[Callable[[int], zmq.Socket[bytes]]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()

    def make(kind: int) -> zmq.Socket[bytes]:
        made = context.socket(kind)
        made.setsockopt(zmq.LINGER, 0)
        made.setsockopt(zmq.HEARTBEAT_IVL, 10)
        made.setsockopt(zmq.HEARTBEAT_TIMEOUT, 500)
        return made

    yield make
    context.destroy(linger=0)


def hello(name: str) -> bytes:
    return codec.encode_frame(0, [("", "", Hello(*Versions.installed(), name, 1))])


def echo(cluster: Cluster, raw: zmq.Socket[bytes], route: list[bytes]) -> None:
    """Exchange small and large frames with a node called "a" that has said hello."""
    a = cluster.nodes[0]
    actor = a.actors["session"]
    sizes = [0, 10, 250, 70_000, 3_000_000]
    for number, size in enumerate(sizes):
        frame = codec.encode_frame(1 + number, [("session", "x", Fetched(number, bytes(size)))])
        raw.send_multipart([*route, frame])
    cluster.until(lambda: len(actor.of(Fetched)) == len(sizes))
    assert [len(message.data) for message in actor.of(Fetched)] == sizes
    pinged = a.counters["frames_received"]
    for message in actor.of(Fetched):
        actor.env.send(Address("raw", "x"), message)
    got: list[Fetched] = []
    while len(got) < len(sizes):
        cluster.until(lambda: raw.poll(0))
        for _, _, message in codec.decode(raw.recv_multipart()[-1]).envelopes:
            got += [message] if isinstance(message, Fetched) else []
    assert got == actor.of(Fetched)
    assert a.counters["frames_received"] == pinged
    # Its heartbeats are answered, or it would have hung up.
    begun_s = cluster.loop.time()
    cluster.until(lambda: cluster.loop.time() > begun_s + 1.0)
    raw.send_multipart([*route, codec.encode_frame(1 + len(sizes), [("session", "x", Ready(7))])])
    cluster.until(lambda: numbers(actor) == [7])
    assert not actor.lost


def test_a_dealer_of_libzmq_dials_us(
    sockets: Cluster, libzmq: Callable[[int], zmq.Socket[bytes]]
) -> None:
    a = sockets.node("a")
    raw = libzmq(zmq.DEALER)
    raw.setsockopt(zmq.ROUTING_ID, b"pw" + bytes(range(16)))
    raw.connect(sockets.endpoint(a))
    raw.send(hello("raw"))
    sockets.until(lambda: raw.poll(0))
    assert codec.decode(raw.recv()).sequence == 0
    echo(sockets, raw, [])


def test_we_dial_a_router_of_libzmq_that_comes_late(
    sockets: Cluster, libzmq: Callable[[int], zmq.Socket[bytes]]
) -> None:
    a = sockets.node("a", listens=False)
    raw = libzmq(zmq.ROUTER)
    endpoint = f"ipc://{sockets.folder}/raw"
    if sockets.where == "tcp":
        raw.bind("tcp://127.0.0.1:*")
        endpoint = raw.getsockopt_string(zmq.LAST_ENDPOINT)
        raw.unbind(endpoint)
    a.env.introduce("raw", endpoint)
    a.env.send(Address("raw", "x"), Ready(1))
    begun_s = sockets.loop.time()
    sockets.until(lambda: sockets.loop.time() > begun_s + 0.2)
    raw.bind(endpoint)
    sockets.until(lambda: raw.poll(0))
    route, greeting = raw.recv_multipart()
    assert isinstance(codec.decode(greeting).envelopes[0][2], Hello)
    raw.send_multipart([route, hello("raw")])
    sockets.until(lambda: raw.poll(0))
    assert codec.decode(raw.recv_multipart()[-1]).envelopes == [("x", "session", Ready(1))]
    echo(sockets, raw, [route])
