"""Decodes HTTP/2's blocks of headers: quickly those that say what blocks before have said.

A gRPC client opens a stream for each host buffer. Its headers are those of the stream before, which it names
by their places in HPACK's table, and a new one in plain bytes.
"""

from __future__ import annotations

from typing import Any

from hpack import Decoder

Headers = list[tuple[bytes, bytes]]

_PLACE, _LONG_PLACE = 0x80, 0xFF
_LITERAL = (0x00, 0x10)
"""Begins a name and a value that do not go into the table."""
_LONG = 0x7F
_QUICK_BYTES = 1 << 10
_KEPT = 16


class HeaderDecoder:
    """HPACK's decoder of one connection.

    Args:
        limit: the most bytes of the headers of one block.
    """

    def __init__(self, limit: int) -> None:
        self._decoder = Decoder(limit)
        self._cache: dict[bytes, Headers] = {}
        """The headers at some places of the table, while it stays as it is."""

    def decode(self, block: bytes) -> Headers:
        """Return the headers of a block; call it with every block, in order. Raises HPACKError."""
        at, end = 0, len(block)
        while at < end and block[at] & _PLACE:
            at += 1
        places = block[:at]
        literals = None
        if end < _QUICK_BYTES and _LONG_PLACE not in places:
            literals = _literals(block, at)
        if literals is None:  # it may change the table
            self._cache.clear()
        elif (head := self._cache.get(places)) is not None:
            return head + literals
        headers: Any = self._decoder.decode(block, raw=True)
        if literals is not None and len(self._cache) < _KEPT:
            self._cache[places] = headers[:at]
        return list(headers)


def _literals(block: bytes, at: int) -> Headers | None:
    """Return the headers from here on if all are plain bytes that do not go into the table."""
    literals = []
    while at < len(block):
        if block[at] not in _LITERAL:
            return None
        at += 1
        words = []
        for _ in range(2):
            size = block[at] if at < len(block) else _LONG
            at += 1
            if size >= _LONG or at + size > len(block):  # compressed, long, or not complete
                return None
            words.append(block[at : at + size])
            at += size
        literals.append((words[0], words[1]))
    return literals
