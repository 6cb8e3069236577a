"""gRPC calls over HTTP/2: messages with a prefix of five bytes, and a status at the end."""

from __future__ import annotations

import base64
import struct
from collections.abc import Callable, Iterable
from urllib.parse import quote

from pw.gateway.protocol.http2 import Http2Stream

OK, CANCELLED, INVALID_ARGUMENT, NOT_FOUND, RESOURCE_EXHAUSTED = 0, 1, 3, 5, 8
FAILED_PRECONDITION, UNIMPLEMENTED, INTERNAL, UNAVAILABLE, DATA_LOSS = 9, 12, 13, 14, 15

MESSAGE_BYTES = 1 << 30
"""The largest message; programs with large constants are the largest ones."""


def header_block(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Encode headers without a table: literals that the receiver does not remember."""
    block = bytearray()
    for name, value in headers:
        block += b"\x00" + _length(len(name)) + name + _length(len(value)) + value
    return bytes(block)


def _length(size: int) -> bytes:
    """Encode a length in HPACK's form, with a prefix of seven bits."""
    if size < 0x7F:
        return bytes([size])
    encoded = bytearray([0x7F])
    size -= 0x7F
    while size >= 0x80:
        encoded.append(size & 0x7F | 0x80)
        size >>= 7
    encoded.append(size)
    return bytes(encoded)


_HEADERS = header_block([(b":status", b"200"), (b"content-type", b"application/grpc")])
_ENDED = header_block([(b"grpc-status", b"0")])
_PREFIX = struct.Struct(">BI")
"""Prefix of a message: whether it is compressed, and its size."""


class RpcCall:
    """One call of a client; subclasses take its messages.

    Args:
        stream: the stream that it has.
        headers: the client's metadata, among others.
    """

    def __init__(self, stream: Http2Stream, headers: dict[bytes, bytes]) -> None:
        self._stream = stream
        self._headers = headers
        self._buffer = bytearray()
        self._wanted = 5
        self.is_over = False
        stream.handler = self

    def metadata(self, name: str) -> bytes:
        """Return binary metadata. Raises KeyError."""
        text = self._headers[name.encode()]
        if text[:1] == b"\0":  # as it is
            return text[1:]
        return base64.b64decode(text + b"=" * (-len(text) % 4))

    # --- from the stream -----------------------------------------------------------------------------

    def received(self, data: memoryview) -> None:
        """Take bytes; `message` is called with each complete message."""
        if self.is_over:
            return
        if not self._buffer:
            at, end = 0, len(data)
            while end - at >= 5:  # whole messages, without a copy into the buffer
                begin = at + 5
                stop = begin + self._size(data, at)
                if not begin <= stop <= end:
                    break
                self.message(bytes(data[begin:stop]))
                at = stop
            if at == end:
                return
            data = data[at:]
        self._buffer += data
        while len(self._buffer) >= 5 and not self.is_over:
            size = self._size(self._buffer, 0)
            if size < 0 or len(self._buffer) < 5 + size:
                return
            message = bytes(memoryview(self._buffer)[5 : 5 + size])
            del self._buffer[: 5 + size]
            self.message(message)

    def _size(self, data: bytearray | memoryview, at: int) -> int:
        """Return the size of the message whose prefix is there; ends the call if it cannot be taken."""
        compressed, size = _PREFIX.unpack_from(data, at)
        if compressed or size > MESSAGE_BYTES:
            words = (
                "compressed messages are not supported"
                if compressed
                else f"a message of {size} bytes"
            )
            self.end(UNIMPLEMENTED if compressed else RESOURCE_EXHAUSTED, words)
            return -1
        return int(size)

    def message(self, data: bytes) -> None:
        """Take one message of the client."""
        raise NotImplementedError

    def ended(self) -> None:
        """The client has sent all its messages."""

    def lost(self) -> None:
        """The call is over before its end."""
        self.is_over = True

    def has_room(self) -> None:
        """All that was sent has left."""

    # --- to the stream -------------------------------------------------------------------------------

    def send(self, data: bytes, *, is_awaited: bool = True) -> None:
        """Send a small message; a little later, with others, if the client does not wait for it."""
        if not self.is_over:
            message = _PREFIX.pack(0, len(data)) + data
            self._stream.write(_HEADERS, message, is_awaited=is_awaited)

    def send_large(self, head: bytes, rest: memoryview) -> None:
        """Send a message of two parts, without a copy of the second."""
        if not self.is_over:
            prefix = _PREFIX.pack(0, len(head) + len(rest))
            self._stream.write(_HEADERS, prefix + head)
            self._stream.write(_HEADERS, rest)

    def hurry(self) -> None:
        """Send now what the client waits for: this turn of the loop has more to do."""
        self._stream.hurry()

    def end(self, code: int = OK, words: str = "", *, is_awaited: bool = True) -> None:
        """End the call with a status."""
        if self.is_over:
            return
        self.is_over = True
        trailers = _ENDED
        if code:
            message = quote(words, safe=" !#$&'()*+,-./:;<=>?@[]^_`{|}~").encode()[:4096]
            status = [(b"grpc-status", str(code).encode()), (b"grpc-message", message)]
            trailers = header_block(status)
        self._stream.end(_HEADERS, trailers, is_awaited=is_awaited)


class Unary(RpcCall):
    """A call with one message and one reply.

    Args:
        reply: called with the call and the message; ends the call.
    """

    def __init__(
        self,
        stream: Http2Stream,
        headers: dict[bytes, bytes],
        reply: Callable[[Unary, bytes], None],
    ) -> None:
        super().__init__(stream, headers)
        self._reply = reply

    def message(self, data: bytes) -> None:
        """Answer."""
        self._reply(self, data)

    def answer(self, data: bytes) -> None:
        """Send the reply, and end the call."""
        self.send(data)
        self.end()
