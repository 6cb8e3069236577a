"""The server's side of HTTP/2, as far as gRPC needs it: frames, flow control, streams (RFC 9113).

JAX's client sends a message for each call of a function, so the cost of a message decides what a call
costs. Here it is some microseconds; `docs/decisions.md` has the figures of the alternatives.

Receiving: the windows are as large as they can be and are opened again in large steps: what a
client may send is bounded where the bytes go (`pw.gateway.server`). Sending: bytes wait in their
stream until the client's windows have room.
"""

from __future__ import annotations

import asyncio
import struct
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from hpack import HPACKError

from pw.gateway.protocol.frames import (
    ACK,
    COMPRESSION_ERROR,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    FLOW_CONTROL_ERROR,
    FRAME_BYTES,
    FRAME_SIZE_ERROR,
    GOAWAY,
    HEADERS,
    INITIAL_WINDOW,
    MAX_FRAME,
    MAX_STREAMS,
    PADDED,
    PING,
    PROTOCOL_ERROR,
    PUSH,
    RST_STREAM,
    SETTINGS,
    TRUE_BINARY,
    WINDOW,
    WINDOW_UPDATE,
    WITH_PRIORITY,
    FrameReader,
    FrameSender,
    ProtocolViolation,
)
from pw.gateway.protocol.headers import HeaderDecoder

HEADER_BYTES = 1 << 16
"""The most bytes of the headers of one stream."""
STREAMS = 4096
"""Most streams of a connection that may be open."""
_REOPEN = 1 << 29
_DEFAULT_WINDOW = 65535
_BATCH_BYTES = 1 << 18


class Handler(Protocol):
    """The receiver of one stream."""

    def received(self, data: memoryview) -> None:
        """Take bytes of the stream; they are valid during the call only."""

    def ended(self) -> None:
        """The client has sent everything."""

    def lost(self) -> None:
        """The stream is over: the client has reset it, or the connection is lost."""

    def has_room(self) -> None:
        """All that was written has left."""


class Http2Stream:
    """One stream of a connection."""

    def __init__(self, connection: Http2Connection, number: int, window: int) -> None:
        self._connection = connection
        self.credit = 0
        """Bytes received since its window was opened last."""
        self.number = number
        self.handler: Handler | None = None
        """None once the stream is over: each refers to the other, a handler may hold a large buffer, and
        collections are rare here."""
        self.window = window
        """Bytes that the client takes."""
        self.pending: deque[memoryview] = deque()
        self.unsent = 0
        """Bytes in `pending`."""
        self.headers_sent = False
        self.trailers: bytes | None = None

    def write(self, headers: bytes, data: bytes | memoryview, *, is_awaited: bool = True) -> None:
        """Send bytes as far as the client takes them; `headers` first if none were sent."""
        self._connection.write(self, headers, data, is_awaited=is_awaited)

    def end(self, headers: bytes, trailers: bytes, *, is_awaited: bool = True) -> None:
        """End the stream after all that was written."""
        self._connection.end(self, headers, trailers, is_awaited=is_awaited)

    def hurry(self) -> None:
        """Send now what the client waits for."""
        self._connection.hurry()

    def lose(self) -> None:
        """Tell the handler that the stream is over."""
        handler, self.handler = self.handler, None
        if handler is not None:
            handler.lost()


class Http2Connection(asyncio.Protocol):
    """One client's connection.

    Args:
        opened: called with each new stream and its headers; sets the stream's handler.
        closed: called when the connection is lost.
        refuses: called with the transport; whether to serve nothing there.
    """

    def __init__(
        self,
        opened: Callable[[Http2Stream, list[tuple[bytes, bytes]]], None],
        closed: Callable[[Http2Connection], None],
        refuses: Callable[[Any], bool] = lambda transport: False,
    ) -> None:
        self._opened = opened
        self._closed = closed
        self._refuses = refuses
        self._sender = FrameSender(asyncio.get_running_loop())
        self.hurry = self._sender.hurry
        self._reader = FrameReader(self._handle)
        self._decoder = HeaderDecoder(HEADER_BYTES)
        self._streams: dict[int, Http2Stream] = {}
        self._last = 0
        self._headers: tuple[int, int, bytearray] | None = None
        """The stream, flags and bytes of headers that CONTINUATION frames go on with."""
        self._window = _DEFAULT_WINDOW
        self._initial_window = _DEFAULT_WINDOW
        self._credit = 0
        """Bytes received since the connection's window was opened last."""
        self._is_paused = False
        self._waiting: dict[int, Http2Stream] = {}
        """Streams with pending bytes."""

    # --- the transport -------------------------------------------------------------------------------

    def connection_made(self, transport: Any) -> None:
        """Announce the server's settings."""
        self._sender.transport = transport
        if self._refuses(transport):
            transport.abort()
            return
        settings = {
            INITIAL_WINDOW: WINDOW,
            MAX_FRAME: FRAME_BYTES,
            MAX_STREAMS: STREAMS,
            TRUE_BINARY: 1,
        }
        payload = b"".join(struct.pack(">HI", *setting) for setting in settings.items())
        self._sender.add(SETTINGS, 0, 0, payload)
        self._sender.add(WINDOW_UPDATE, 0, 0, struct.pack(">I", WINDOW - _DEFAULT_WINDOW))

    def connection_lost(self, error: Exception | None) -> None:
        """End all streams."""
        streams, self._streams = list(self._streams.values()), {}
        self._waiting.clear()
        self._sender.transport = None
        self._reader.is_closed = True
        for stream in streams:
            stream.lose()
        self._closed(self)

    def pause_writing(self) -> None:
        """The system takes no more bytes."""
        self._is_paused = True

    def resume_writing(self) -> None:
        """The system takes bytes again."""
        self._is_paused = False
        self._pump()

    def close(self) -> None:
        """Close the connection after all that was written."""
        if self._sender.transport is not None:
            self._sender.flush()
            self._sender.transport.close()

    # --- receiving -----------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        """Handle all complete frames."""
        try:
            self._reader.take(data)
        except ProtocolViolation as error:
            self._fail(error.code, str(error))
        except HPACKError as error:
            self._fail(COMPRESSION_ERROR, str(error))

    def _fail(self, code: int, words: str) -> None:
        if self._sender.transport is not None:
            self._sender.add(GOAWAY, 0, 0, struct.pack(">II", self._last, code) + words.encode())
            self.close()

    def _handle(self, kind: int, flags: int, number: int, payload: memoryview) -> None:
        if self._headers is not None and kind != CONTINUATION:
            raise ProtocolViolation(PROTOCOL_ERROR, "headers are not complete")
        if kind == DATA:
            self._on_data(flags, number, payload)
        elif kind == WINDOW_UPDATE:
            self._on_window(number, payload)
        elif kind == HEADERS:
            self._on_headers(flags, number, payload)
        elif kind == CONTINUATION:
            self._on_continuation(flags, number, payload)
        elif kind == PING:
            if not flags & ACK:
                self._sender.add(PING, ACK, 0, bytes(payload))
        elif kind == SETTINGS:
            if not flags & ACK:
                self._on_settings(payload)
        elif kind == RST_STREAM:
            stream = self._streams.pop(number, None)
            self._waiting.pop(number, None)
            if stream is not None:
                stream.lose()
        elif kind == PUSH:
            raise ProtocolViolation(PROTOCOL_ERROR, "clients do not push")

    def _on_data(self, flags: int, number: int, payload: memoryview) -> None:
        self._credit += len(payload)
        if self._credit >= _REOPEN:
            self._sender.add(WINDOW_UPDATE, 0, 0, struct.pack(">I", self._credit))
            self._credit = 0
        if flags & PADDED:
            payload = _without_padding(payload, 1)
        stream = self._streams.get(number)
        if stream is None or stream.handler is None:
            return  # it was reset
        if payload:
            stream.credit += len(payload)
            if stream.credit >= _REOPEN:
                self._sender.add(WINDOW_UPDATE, 0, number, struct.pack(">I", stream.credit))
                stream.credit = 0
            stream.handler.received(payload)
        if flags & END_STREAM and stream.handler is not None:
            stream.handler.ended()

    def _on_window(self, number: int, payload: memoryview) -> None:
        if len(payload) != 4:
            raise ProtocolViolation(FRAME_SIZE_ERROR, "a window update has four bytes")
        more = int.from_bytes(payload, "big") & WINDOW
        if number == 0:
            self._window += more
        elif (stream := self._streams.get(number)) is not None:
            stream.window += more
        self._pump()

    def _on_settings(self, payload: memoryview) -> None:
        if len(payload) % 6:
            raise ProtocolViolation(FRAME_SIZE_ERROR, "settings have six bytes each")
        for setting, value in struct.iter_unpack(">HI", payload):
            if setting == INITIAL_WINDOW:
                if value > WINDOW:
                    raise ProtocolViolation(FLOW_CONTROL_ERROR, "a window is too large")
                change, self._initial_window = value - self._initial_window, value
                for stream in self._streams.values():
                    stream.window += change
            elif setting == MAX_FRAME:
                self._sender.frame_bytes = value
        self._sender.add(SETTINGS, ACK, 0, b"")
        self._pump()

    def _on_headers(self, flags: int, number: int, payload: memoryview) -> None:
        if flags & PADDED:
            payload = _without_padding(payload, 1)
        if flags & WITH_PRIORITY:
            payload = payload[5:]
        if flags & END_HEADERS:
            self._open(number, flags, bytes(payload))
        else:
            self._headers = (number, flags, bytearray(payload))

    def _on_continuation(self, flags: int, number: int, payload: memoryview) -> None:
        if self._headers is None or self._headers[0] != number:
            raise ProtocolViolation(PROTOCOL_ERROR, "no headers go on here")
        _, first, block = self._headers
        block += payload
        if len(block) > HEADER_BYTES:
            raise ProtocolViolation(PROTOCOL_ERROR, "the headers are too long")
        if flags & END_HEADERS:
            self._headers = None
            self._open(number, first, bytes(block))

    def _open(self, number: int, flags: int, block: bytes) -> None:
        headers = self._decoder.decode(block)  # always: it has a state
        stream = self._streams.get(number)
        if stream is None:
            if number <= self._last or not number % 2:
                return  # trailers of a stream that was reset
            if len(self._streams) >= STREAMS:
                self._sender.add(RST_STREAM, 0, number, struct.pack(">I", 7))
                return
            self._last = number
            stream = self._streams[number] = Http2Stream(self, number, self._initial_window)
            self._opened(stream, headers)
        if flags & END_STREAM and stream.handler is not None:
            stream.handler.ended()

    # --- sending -------------------------------------------------------------------------------------

    def write(
        self,
        stream: Http2Stream,
        headers: bytes,
        data: bytes | memoryview,
        *,
        is_awaited: bool = True,
    ) -> None:
        """Send bytes of a stream as far as the windows allow."""
        if stream.number not in self._streams:
            return
        if not stream.headers_sent:
            stream.headers_sent = True
            self._sender.add(HEADERS, END_HEADERS, stream.number, headers, is_awaited=is_awaited)
        size = len(data)
        room = min(self._window, stream.window, self._sender.frame_bytes)
        if size <= room and not stream.pending and not self._is_paused:
            self._window -= size
            stream.window -= size
            self._sender.add_data(stream.number, data, is_awaited=is_awaited)
        elif size:
            stream.pending.append(memoryview(data))
            stream.unsent += size
            self._waiting[stream.number] = stream
            self._pump()

    def end(
        self, stream: Http2Stream, headers: bytes, trailers: bytes, *, is_awaited: bool = True
    ) -> None:
        """End a stream after all that was written."""
        if stream.number not in self._streams:
            return
        if not stream.headers_sent:
            stream.headers_sent = True
            self._sender.add(HEADERS, END_HEADERS, stream.number, headers, is_awaited=is_awaited)
        stream.trailers = trailers
        if not stream.pending:
            self._finish(stream, is_awaited=is_awaited)

    def _finish(self, stream: Http2Stream, *, is_awaited: bool = True) -> None:
        assert stream.trailers is not None
        flags = END_HEADERS | END_STREAM
        self._sender.add(HEADERS, flags, stream.number, stream.trailers, is_awaited=is_awaited)
        self._streams.pop(stream.number, None)
        stream.handler = None

    def _pump(self) -> None:
        """Send pending bytes, stream by stream in turn."""
        gathered = 0
        while self._waiting and self._window > 0 and not self._is_paused:
            progress = False
            for stream in list(self._waiting.values()):
                room = min(self._window, stream.window, self._sender.frame_bytes)
                if room <= 0 or self._is_paused:
                    continue
                progress = True
                first = stream.pending[0]
                part = first[:room]
                self._window -= len(part)
                stream.window -= len(part)
                stream.unsent -= len(part)
                if len(part) == len(first):
                    stream.pending.popleft()
                else:
                    stream.pending[0] = first[room:]
                self._sender.add_data(stream.number, part)
                gathered += len(part)
                if gathered >= _BATCH_BYTES:  # one system call, after which the socket may be full
                    self._sender.flush()
                    gathered = 0
                if not stream.pending:
                    del self._waiting[stream.number]
                    if stream.trailers is not None:
                        self._finish(stream)
                    elif stream.handler is not None:
                        stream.handler.has_room()
            if not progress:
                return


def _without_padding(payload: memoryview, length: int) -> memoryview:
    if not payload or payload[0] >= len(payload):
        raise ProtocolViolation(PROTOCOL_ERROR, "there is more padding than there are bytes")
    return payload[length : len(payload) - payload[0]]
