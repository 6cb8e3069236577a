"""ZMTP: all that comes on a control link, before and after the handshake."""

from __future__ import annotations

from functools import partial

from pw.transport.links.zmtp import Zmtp, ZmtpError
from tests.fuzz.target import Target

LARGEST_BYTES = 1 << 20
_KINDS = (b"ROUTER", b"DEALER")


def _stream(kind: bytes) -> bytes:
    """What a peer of this kind says until the link is open."""
    ends = [Zmtp(one, LARGEST_BYTES) for one in _KINDS]
    said = dict.fromkeys(_KINDS, b"")
    for _ in range(2):
        for end, one in zip(ends, _KINDS, strict=True):
            words = b"".join(end.output)
            end.output.clear()
            said[one] += words
            other = ends[1 - _KINDS.index(one)]
            other.feed(words)
            assert other.next_message() is None
    assert all(end.open for end in ends)
    return said[kind]


def seeds(kind: bytes) -> list[bytes]:
    """Return what the peer of such an end may send."""
    opening = _stream(_KINDS[1 - _KINDS.index(kind)])
    more = [
        b"",
        b"\x00\x05hello",
        b"\x01\x02ab\x00\x00",
        b"\x02" + (300).to_bytes(8, "big") + bytes(300),
        b"\x04\x07\x04PING\x00\x0a",
        b"\x00\x01a" * 20,
    ]
    return [opening + rest for rest in more]


def run(kind: bytes, data: bytes) -> None:
    """Feed an end as a connection does, in pieces of sizes that the data decides."""
    end = Zmtp(kind, LARGEST_BYTES)
    step = 1 + (len(data) * 7 + sum(data[-8:])) % 997
    at = 0
    while at < len(data):
        piece = data[at : at + step]
        at += len(piece)
        if end.single(piece) is not None:
            continue
        end.feed(piece)
        while (parts := end.next_message()) is not None:
            assert sum(map(len, parts)) <= LARGEST_BYTES
            assert end.open
    assert len(end.output) <= 3 + len(data) // 8, "it says more than it hears"


TARGETS = [
    Target(
        f"zmtp-{kind.decode().lower()}",
        partial(seeds, kind),
        partial(run, kind),
        allowed=(ZmtpError,),
        weight=6,
    )
    for kind in _KINDS
]
