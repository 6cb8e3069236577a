"""HTTP/2's frames (RFC 9113): their numbers, and bytes from and to frames.

All that is written in one turn of the loop leaves in one system call, and what the client does not wait for
leaves with what is written next, or after `LAZY_S`: each system call wakes threads of the client.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from typing import Any

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = (
    range(10)
)
END_STREAM, END_HEADERS, PADDED, WITH_PRIORITY = 0x1, 0x4, 0x8, 0x20
ACK = 0x1
MAX_STREAMS, INITIAL_WINDOW, MAX_FRAME, TRUE_BINARY = 3, 4, 5, 0xFE03
"""Numbers of settings; the last is gRPC's own: binary metadata come as they are, not as text."""

PROTOCOL_ERROR, FLOW_CONTROL_ERROR, FRAME_SIZE_ERROR, COMPRESSION_ERROR = 1, 3, 6, 9
CANCEL = 8

HEAD = struct.Struct(">HBBBI")
"""Head of a frame: its length in three bytes, its kind, its flags, its stream."""
HEAD_BYTES = 9

FRAME_BYTES = 1 << 20
"""Most bytes of a frame that a client may send."""
WINDOW = (1 << 31) - 1
"""The largest window, and the largest number of a stream."""
LAZY_S = 0.005
"""Seconds that bytes for which the client does not wait may wait for others."""
_SMALL_FRAME = 16384


class ProtocolViolation(Exception):
    """A client breaks HTTP/2.

    Args:
        code: HTTP/2's number of the error.
        words: what is wrong.
    """

    def __init__(self, code: int, words: str) -> None:
        super().__init__(words)
        self.code = code


class FrameReader:
    """Takes the bytes of one connection apart.

    Args:
        handle: called with the kind, the flags, the stream and the payload of each frame; the payload is valid
            during the call only. A long DATA frame comes in parts.
    """

    def __init__(self, handle: Callable[[int, int, int, memoryview], None]) -> None:
        self._handle = handle
        self.is_closed = False
        """Frames are not passed on any more."""
        self._received = bytearray()
        self._has_preface = False
        self._data_stream = 0
        self._data_left = 0
        """Bytes of a DATA frame that have not come yet."""
        self._data_ends = False

    def take(self, data: bytes) -> None:
        """Take bytes, and pass on all complete frames and what has come of DATA. Raises ProtocolViolation."""
        received = self._received
        if received:
            received += data
            content = memoryview(bytes(received))
            received.clear()
        else:
            content = memoryview(data)
        at, end = 0, len(content)
        if not self._has_preface:
            if end < len(PREFACE):
                received += content
                return
            if content[: len(PREFACE)] != PREFACE:
                raise ProtocolViolation(
                    PROTOCOL_ERROR, "this is a gRPC server, and that was no gRPC"
                )
            self._has_preface = True
            at = len(PREFACE)
        if self._data_left:
            at += self._take_data(content[at:])
        while end - at >= HEAD_BYTES:
            high, low, kind, flags, number = HEAD.unpack_from(content, at)
            size = high << 8 | low
            number &= WINDOW
            if size > FRAME_BYTES:
                raise ProtocolViolation(FRAME_SIZE_ERROR, f"{size} bytes at once")
            begin = at + HEAD_BYTES
            if end - begin < size:
                if kind == DATA and not flags & PADDED:
                    self._data_stream, self._data_left = number, size
                    self._data_ends = bool(flags & END_STREAM)
                    at = begin + self._take_data(content[begin:])
                break
            at = begin + size
            self._handle(kind, flags, number, content[begin:at])
            if self.is_closed:
                return
        if at < end:
            received += content[at:]

    def _take_data(self, available: memoryview) -> int:
        """Pass on bytes of a DATA frame as they come; returns how many."""
        part = available[: self._data_left]
        self._data_left -= len(part)
        is_last = self._data_ends and not self._data_left
        self._handle(DATA, END_STREAM if is_last else 0, self._data_stream, part)
        return len(part)


class FrameSender:
    """Sends the frames of one connection; drops them while it has no transport.

    Args:
        loop: the loop whose turns gather frames.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.transport: Any = None
        self.frame_bytes = _SMALL_FRAME
        """The largest frame that the client takes."""
        self._out: list[Any] = []
        """Heads and payloads of frames that have not left."""
        self._tail = (0, 0, 0)
        """Stream, place of the head, and bytes of the last frame, if that is a DATA frame."""
        self._flush_is_due = False
        """Whether the frames leave at the end of this turn of the loop."""
        self._has_hurried = False
        """Whether some frames have left already."""
        self._late: asyncio.TimerHandle | None = None
        """Sends frames that the client does not wait for."""

    def add(
        self,
        kind: int,
        flags: int,
        number: int,
        payload: bytes | memoryview,
        *,
        is_awaited: bool = True,
    ) -> None:
        """Send a frame of a stream, or of none: number 0."""
        if self.transport is None:
            return
        self._leave(is_awaited=is_awaited)
        size = len(payload)
        self._out.append(HEAD.pack(size >> 8, size & 0xFF, kind, flags, number))
        self._out.append(payload)
        self._tail = (number, len(self._out) - 2, size) if kind == DATA else (0, 0, 0)

    def add_data(self, number: int, data: bytes | memoryview, *, is_awaited: bool = True) -> None:
        """Send bytes of a stream, in the frame of its bytes before if that has not left."""
        last, at, size = self._tail
        size += len(data)
        if last == number and size <= self.frame_bytes:
            self._out[at] = HEAD.pack(size >> 8, size & 0xFF, DATA, 0, number)
            self._out.append(data)
            self._tail = number, at, size
            self._leave(is_awaited=is_awaited)
        else:
            self.add(DATA, 0, number, data, is_awaited=is_awaited)

    def _leave(self, *, is_awaited: bool) -> None:
        """Let the frames leave at the end of this turn, or later."""
        if is_awaited:
            if not self._flush_is_due:
                self._flush_is_due = True
                self._loop.call_soon(self.flush)
        elif self._late is None and not self._flush_is_due:
            self._late = self._loop.call_later(LAZY_S, self._flush_late)

    def hurry(self) -> None:
        """Send what the client waits for now, if nothing has left in this turn; the rest follows at its end."""
        if self._flush_is_due and not self._has_hurried:
            self._has_hurried = True
            self._send()

    def _flush_late(self) -> None:
        self._late = None
        self.flush()

    def flush(self) -> None:
        """Send all frames now."""
        self._flush_is_due = self._has_hurried = False
        self._send()

    def _send(self) -> None:
        if self._out and self.transport is not None:
            out, self._out, self._tail = self._out, [], (0, 0, 0)
            self.transport.writelines(out)
