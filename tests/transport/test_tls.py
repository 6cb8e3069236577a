"""One end of TLS, without a socket: whatever the splits of the bytes, the plain ones arrive in order."""

from __future__ import annotations

import ssl
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pw.transport.access.credentials import Credentials, explain
from pw.transport.access.tls import (
    HANDSHAKE_BYTES,
    RECORD_BYTES,
    NotTls,
    TlsEnd,
    TlsError,
    plain_alert,
)
from tests.stages.cluster import credentials_of, wire_bytes
from tests.stages.samples import examples


@pytest.fixture(scope="module")
def credentials(tmp_path_factory: pytest.TempPathFactory) -> Credentials:
    return credentials_of("worker", tmp_path_factory.mktemp("keys"))


def split(data: bytes, sizes: Iterable[int]) -> list[bytes]:
    pieces, at = [], 0
    for size in sizes:
        pieces.append(data[at : at + size])
        at += size
    return [piece for piece in (*pieces, data[at:]) if piece]


def shake(credentials: Credentials, sizes: Iterable[int] = ()) -> tuple[TlsEnd, TlsEnd, bytes]:
    """Two ends after their handshake, and plain bytes that came with its last part."""
    sizes = list(sizes)
    dialler = TlsEnd(credentials.connect(), listens=False)
    listener = TlsEnd(credentials.accept(), listens=True)
    early = b""
    while dialler.has_output or listener.has_output:
        for one, other in ((dialler, listener), (listener, dialler)):
            for piece in split(one.output(), sizes):
                if other.is_open:
                    early += other.feed(piece) or b""
                elif other.feed_handshake(piece):
                    early += other.feed(b"") or b""
    assert dialler.is_open
    assert listener.is_open
    return dialler, listener, early


SIZES = st.lists(st.integers(1, 3 * RECORD_BYTES), max_size=20)


@settings(max_examples=examples(50))
@given(
    handshake=st.lists(st.integers(1, 700), max_size=10),
    sizes=SIZES,
    messages=st.lists(st.binary(min_size=1, max_size=200) | st.just(bytes(70_000)), max_size=8),
)
def test_bytes_arrive_in_order_whatever_the_splits(
    credentials: Credentials, handshake: list[int], sizes: list[int], messages: list[bytes]
) -> None:
    for swap in (False, True):
        one, other, early = shake(credentials, handshake)
        assert early == b""
        if swap:
            one, other = other, one
        wire = b"".join(one.write(message) for message in messages)
        assert len(wire) <= wire_bytes(sum(map(len, messages))) + 64 * len(messages)
        heard = b"".join(other.feed(piece) or b"" for piece in split(wire, sizes))
        assert heard == b"".join(messages)
        assert not other.ended


@settings(max_examples=examples(30))
@given(data=st.data())
def test_a_changed_byte_is_noticed(credentials: Credentials, data: st.DataObject) -> None:
    one, other, _ = shake(credentials)
    wire = bytearray(one.write(b"some words"))
    at = data.draw(st.integers(0, len(wire) - 1))
    wire[at] ^= data.draw(st.integers(1, 255))
    told = b""
    try:
        told = other.feed(bytes(wire) + one.write(bytes(RECORD_BYTES))) or b""
    except ssl.SSLError:
        return
    assert told == b""  # the length has grown: TLS waits for more


@settings(max_examples=examples(50))
@given(garbage=st.binary(min_size=1, max_size=300), listens=st.booleans())
def test_garbage_is_an_error_and_never_a_handshake(
    credentials: Credentials, garbage: bytes, listens: bool
) -> None:
    end = TlsEnd(credentials.accept() if listens else credentials.connect(), listens)
    try:
        assert not end.feed_handshake(garbage)
    except NotTls:
        assert garbage[0] not in range(0x14, 0x18)
    except ssl.SSLError:
        pass
    assert not end.is_open


def test_a_handshake_takes_a_bounded_number_of_bytes(credentials: Credentials) -> None:
    end = TlsEnd(credentials.accept(), listens=True)
    record = b"\x16\x03\x03\x40\x00" + bytes(RECORD_BYTES)
    with pytest.raises((TlsError, ssl.SSLError)):
        for _ in range(2 + HANDSHAKE_BYTES // RECORD_BYTES):
            end.feed_handshake(record)
    slow = TlsEnd(credentials.accept(), listens=True)
    assert not slow.feed_handshake(record[:100])
    with pytest.raises(TlsError, match="more than 65536 bytes before"):
        slow.feed_handshake(bytes(HANDSHAKE_BYTES))


def test_the_end_is_said(credentials: Credentials) -> None:
    one, other, _ = shake(credentials)
    assert other.feed(one.write(b"last") + one.close()) == b"last"
    assert other.feed(b"") == b""
    assert other.ended


def test_each_end_has_the_others_certificate(credentials: Credentials) -> None:
    one, other, _ = shake(credentials)
    for end in (one, other):
        assert credentials.identify(end.certificate).name == "worker"


def test_the_alert_of_a_listener_without_credentials_refuses(credentials: Credentials) -> None:
    end = TlsEnd(credentials.connect(), listens=False)
    with pytest.raises(ssl.SSLError) as refused:
        end.feed_handshake(plain_alert())
    assert "no credentials" in explain(refused.value)
