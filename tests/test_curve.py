"""CURVE: whoever holds the cluster's keys is welcome, libzmq included; nobody else hears a word."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq
from zmq.utils import z85

from pw.core.ids import Address
from pw.core.messages import EdgeData, Hello, Ready
from pw.transport import codec
from pw.transport.link import Versions
from pw.transport.zmtp import Zmtp, ZmtpError, metadata
from tests.cluster import Cluster, libzmq_sockets, make_cluster, numbers

pytest.importorskip("nacl")

from pw.transport.curve import Curve, Keys, new_keys

KEYS = new_keys()


def end(kind: bytes, keys: Keys = KEYS) -> Zmtp:
    return Zmtp(kind, 1 << 20, Curve(keys, kind == b"ROUTER", metadata(kind)))


def said(one: Zmtp) -> bytes:
    data = b"".join(one.output)
    one.output.clear()
    return data


def heard(one: Zmtp, data: bytes) -> list[list[bytes]]:
    one.feed(data)
    return list(iter(one.next_message, None))


def talk(client: Zmtp, server: Zmtp) -> tuple[Zmtp, Zmtp]:
    for _ in range(4):
        assert heard(server, said(client)) == heard(client, said(server)) == []
    return client, server


def test_messages_go_both_ways_and_are_not_readable() -> None:
    client, server = talk(end(b"DEALER"), end(b"ROUTER"))
    assert client.open
    assert server.open
    for one, other in ((client, server), (server, client)):
        for size in (0, 10, 300, 70_000):
            sealed = one.message(b"secret" * size)
            assert b"secret" not in sealed
            assert heard(other, sealed) == [[b"secret" * size]]


@pytest.mark.parametrize("keys", [new_keys(), Keys(KEYS.public, new_keys().secret), None])
@pytest.mark.parametrize("wrong", [b"DEALER", b"ROUTER"])
def test_who_lacks_the_keys_is_refused(keys: Keys | None, wrong: bytes) -> None:
    other = b"ROUTER" if wrong == b"DEALER" else b"DEALER"
    ends = {
        wrong: end(wrong, keys) if keys else Zmtp(wrong, 1 << 20),
        other: end(other),
    }
    with pytest.raises(ZmtpError):
        talk(ends[b"DEALER"], ends[b"ROUTER"])
    assert not ends[other].open


@pytest.mark.parametrize("damage", ["changed", "repeated", "plain", "cut"])
def test_a_message_is_opened_once_and_unchanged(damage: str) -> None:
    client, server = talk(end(b"DEALER"), end(b"ROUTER"))
    sealed = client.message(b"hello")
    assert heard(server, sealed) == [[b"hello"]]
    other = {
        "changed": sealed[:-1] + bytes((sealed[-1] ^ 1,)),
        "repeated": sealed,
        "plain": b"\0\5hello",
        "cut": b"\0\x0a\7MESSAGE12",
    }
    with pytest.raises(ZmtpError):
        heard(server, other[damage])


# --- nodes and libzmq ---------------------------------------------------------------------------


@pytest.fixture(params=["ipc", "tcp"])
def sockets(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Cluster]:
    yield from make_cluster(request.param, tmp_path, uv=True)


@pytest.fixture
def libzmq() -> Iterator[Callable[[int], zmq.Socket[bytes]]]:
    def give_keys(made: zmq.Socket[bytes], kind: int) -> None:
        made.setsockopt(zmq.CURVE_PUBLICKEY, z85.encode(KEYS.public))
        made.setsockopt(zmq.CURVE_SECRETKEY, z85.encode(KEYS.secret))
        if kind == zmq.ROUTER:
            made.setsockopt(zmq.CURVE_SERVER, 1)
        else:
            made.setsockopt(zmq.CURVE_SERVERKEY, z85.encode(KEYS.public))

    yield from libzmq_sockets(give_keys)


def test_nodes_with_the_same_keys_talk_and_others_do_not(sockets: Cluster) -> None:
    a = sockets.node("a", keys=KEYS)
    b = sockets.node("b", listens=False, keys=KEYS)
    strangers = [
        sockets.node("c", listens=False, keys=new_keys(), connect_s=0.5, heartbeat_s=0.05),
        sockets.node("d", listens=False, connect_s=0.5, heartbeat_s=0.05),
    ]
    for one in (b, *strangers):
        sockets.introduce(a, one)
        one.env.send(a.env.address, Ready(ord(one.env.address.node)))
    a.react = lambda sender, message: a.env.send(sender, message)
    sockets.until(lambda: numbers(b) and all(one.lost for one in strangers))
    assert numbers(a) == [ord("b")]
    assert sockets.of(a).counters["connections_malformed"] >= 2


@pytest.mark.parametrize("dials", [True, False])
def test_libzmq_with_the_keys_is_a_peer(
    sockets: Cluster, libzmq: Callable[[int], zmq.Socket[bytes]], dials: bool
) -> None:
    a = sockets.node("a", listens=dials, keys=KEYS)
    hello = codec.encode_frame(0, [("", "", Hello(*Versions.installed(), "raw", 1))])
    route: list[bytes] = []
    if dials:
        raw = libzmq(zmq.DEALER)
        raw.connect(sockets.endpoint(a))
        raw.send(hello)
    else:
        raw = libzmq(zmq.ROUTER)
        raw.bind(f"ipc://{sockets.folder}/raw" if sockets.where == "ipc" else "tcp://127.0.0.1:*")
        a.env.introduce("raw", raw.getsockopt_string(zmq.LAST_ENDPOINT))
        a.env.send(Address("raw", "x"), Ready(0))
    sockets.until(lambda: raw.poll(0))
    *route, answer = raw.recv_multipart()
    assert isinstance(codec.decode(answer).envelopes[0][2], Hello)
    if not dials:
        raw.send_multipart([*route, hello])
    blob = EdgeData(1, 1, bytes(1_000_000))
    raw.send_multipart([*route, codec.encode_frame(1, [("main", "x", blob)])])
    sockets.until(lambda: a.of(EdgeData) == [blob])
    begun_s = sockets.loop.time()  # its heartbeats are answered, or it would hang up
    sockets.until(lambda: sockets.loop.time() > begun_s + 1.0)
    a.env.send(Address("raw", "x"), blob)
    got: list[object] = []
    while blob not in got:
        sockets.until(lambda: raw.poll(0))
        got += [m for _, _, m in codec.decode(raw.recv_multipart()[-1]).envelopes]
    assert not a.lost
