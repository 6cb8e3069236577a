"""The head of a reply: which request it answers, that it went well, and its number among the replies.

Each call of a function has replies. Their heads are written here as protobuf encodes a `ResponseMetadata` at
the beginning of an `IfrtResponse`: to fill in the message takes ten times as long.
"""

from __future__ import annotations

import struct

_HEAD, _OPERATION_OK, _NUMBER, _CONTEXTS = b"\x0a", struct.Struct("<BQH"), b"\x18", b"\x22"
"""The fields: `response_metadata`, `op_id` with an empty `status`, `seq_num`, `destroyed_user_context_ids`."""
_OPERATION, _OK = 0x09, 0x0012


class ReplyHeads:
    """Encodes the heads of one client's replies to requests that went well."""

    def __init__(self) -> None:
        self._count = 0
        self.dead_contexts: list[int] = []
        """Contexts of the client's requests that nothing here refers to; the next counted reply names them."""

    def counted(self, operation: int) -> bytes:
        """Return the head of a reply that counts for the sequence number."""
        number, self._count = self._count, self._count + 1
        body = _OPERATION_OK.pack(_OPERATION, operation, _OK) + _NUMBER + varint(number)
        if contexts := self.dead_contexts:
            listed = struct.pack(f"<{len(contexts)}Q", *contexts)
            body += _CONTEXTS + varint(len(listed)) + listed
            contexts.clear()
        return _HEAD + varint(len(body)) + body

    def uncounted(self, operation: int) -> bytes:
        """Return the head of another reply."""
        return _HEAD + b"\x0b" + _OPERATION_OK.pack(_OPERATION, operation, _OK)


def varint(number: int) -> bytes:
    """Encode a number of zero or more as protobuf does."""
    if number < 0x80:
        return number.to_bytes(1)
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)
