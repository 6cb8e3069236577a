"""The receiving end of transfers in chunks (see `pw.transport.bulk.chunks`), on the bulk thread."""

from __future__ import annotations

import contextlib
import socket
import time
from dataclasses import dataclass
from typing import Protocol

from pw.core.errors import Error
from pw.transport.bulk.blocks import Bytes
from pw.transport.bulk.chunk_dial import ChunkDialler
from pw.transport.bulk.chunks import (
    ACK,
    CHUNK,
    CHUNK_BYTES,
    FINISH,
    HEADER,
    LEAST_BYTES_PER_S,
    MAGIC,
    REFUSE,
    SILENCE_S,
    header,
    receive_header,
)
from pw.transport.bulk.pieces import Unwatch, Watch
from pw.transport.log import log
from pw.transport.streams.stream import Stream

_READS_AT_ONCE = 8
UNREAD_REPLY_BYTES = 1 << 20
"""Bytes of unread replies at which a peer's connection is closed."""


@dataclass(slots=True, eq=False)
class Inflow:
    """A landing, for the bulk thread."""

    transfer: int
    target: Bytes
    peer: object = None
    received_bytes: int = 0
    sealed: bool = False  # complete or cancelled: nothing may be written any more


class Inflows(Protocol):
    """The plane of a receiver; called on the bulk thread."""

    def inflow(self, transfer: int) -> Inflow | None: ...
    def inflow_complete(self, transfer: int) -> None: ...
    def reject(self) -> None: ...


class _ChunkCaller:
    """A connection over which a sender pushes, at the receiver."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.socket = stream.socket
        self.header = memoryview(bytearray(HEADER.size))
        self.missing = self.header  # where the next bytes go
        self.reading_header = True
        self.inflow: Inflow | None = None  # whose chunk is read; None if it is thrown away
        self.outbox = bytearray()
        self.writing = False
        self.woken_bytes = 1
        self.wanted_bytes = HEADER.size
        self.begun_s = 0.0  # when a chunk or header began that is not whole

    def read_header(self) -> None:
        """Receive a header next."""
        self.inflow, self.reading_header = None, True
        self.want(self.header)

    def want(self, target: memoryview) -> None:
        """Receive these bytes next."""
        self.missing, self.wanted_bytes = target, len(target)

    def is_slow(self, now_s: float) -> bool:
        """Whether the sender brings too little of what it has begun."""
        age_s = now_s - self.begun_s
        least_bytes = age_s * LEAST_BYTES_PER_S
        return age_s > SILENCE_S and self.wanted_bytes - len(self.missing) < least_bytes

    def wait_for_bytes(self) -> None:
        """Wake when many bytes have come, or all that are missing, and not for each packet."""
        stream = self.stream
        missing_bytes = len(self.missing) - stream.slack_bytes
        wanted_bytes = max(1, min(missing_bytes, stream.worth_waking_bytes))
        if wanted_bytes != self.woken_bytes:
            self.woken_bytes = wanted_bytes
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, wanted_bytes)


class ChunkReceiver:
    """The receiving ends of a plane's connections.

    Args:
        inflows: the plane.
        plane: its number, which it says where it dials.
        dialler: makes connections to hosts.
        watch, unwatch: those of the bulk thread.
    """

    def __init__(
        self,
        inflows: Inflows,
        plane: str,
        dialler: ChunkDialler,
        watch: Watch,
        unwatch: Unwatch,
        unread_reply_bytes: int = UNREAD_REPLY_BYTES,
    ) -> None:
        self.unread_reply_bytes = unread_reply_bytes
        """Bytes of replies that a sender may leave unread."""
        self._inflows = inflows
        self.plane = plane
        """The name that a host knows this plane by, when this end dials."""
        self._dialler = dialler
        self._watch = watch
        self._unwatch = unwatch
        self.callers: dict[int, _ChunkCaller] = {}
        """Connections of senders, by descriptor."""
        self.dialled: dict[str, _ChunkCaller] = {}
        """Connections that this end began, by the endpoint of the host."""
        self._unfinished: set[_ChunkCaller] = set()
        self._wasted = memoryview(bytearray(CHUNK_BYTES))

    @property
    def owed(self) -> bool:
        """Whether it waits for the rest of a chunk, or for a handshake."""
        return bool(self._unfinished)

    def admit(self, stream: Stream, first: bytes) -> None:
        """Take the connection of a sender, which has sent its first header."""
        caller = self._take_on(stream)
        caller.header[:] = first
        if not self._take(caller):
            self._inflows.reject()
            self._hang_up(caller)
        else:
            self.ready(stream.socket.fileno(), readable=True, writable=False)

    def dial(self, endpoint: str) -> None:
        """Dial a host, unless that is done, so that it can push to this plane."""
        if endpoint in self.dialled:
            return
        try:
            stream = self._dialler.dial(endpoint)
        except (Error, OSError) as error:
            self._unreachable(endpoint, error)
            return
        caller = self.dialled[endpoint] = self._take_on(stream)
        caller.outbox += receive_header(self.plane)
        caller.writing = True
        caller.begun_s = time.monotonic()
        if not stream.is_open:
            self._unfinished.add(caller)
        self._watch(stream.socket.fileno(), self.ready, True)

    def ready(self, descriptor: int, readable: bool, writable: bool) -> None:
        caller = self.callers[descriptor]
        if not caller.stream.is_open and not self._shake(caller):
            return
        if writable:
            self._flush(caller)
        if readable and descriptor in self.callers:
            self._receive(caller)
            if descriptor in self.callers:
                self._measure(caller)
                caller.wait_for_bytes()

    def expire(self) -> None:
        """Drop senders that are revoked, or bring too little of what they have begun."""
        for caller in list(self.callers.values()):
            if self._dialler.is_revoked(caller.stream):
                self._inflows.reject()
                self._hang_up(caller)
        now_s = time.monotonic()
        for caller in list(self._unfinished):
            if caller.is_slow(now_s):
                self._inflows.reject()
                self._hang_up(caller)

    def close(self) -> None:
        for caller in list(self.callers.values()):
            self._hang_up(caller)

    def _take_on(self, stream: Stream) -> _ChunkCaller:
        descriptor = stream.socket.fileno()
        caller = self.callers[descriptor] = _ChunkCaller(stream)
        self._watch(descriptor, self.ready, False)
        return caller

    def _shake(self, caller: _ChunkCaller) -> bool:
        """Receive a part of a handshake; whether it is over."""
        try:
            is_open = caller.stream.shake()
        except (Error, OSError) as error:
            endpoint = self._endpoint_of(caller)
            self._hang_up(caller)
            self._unreachable(endpoint, error)
            return False
        if is_open:
            self._unfinished.discard(caller)
        writing = caller.writing = is_open or caller.stream.has_unsent
        self._watch(caller.socket.fileno(), self.ready, writing)
        return is_open

    def _measure(self, caller: _ChunkCaller) -> None:
        """Note when something began that is not whole."""
        if caller.reading_header and len(caller.missing) == caller.wanted_bytes:
            self._unfinished.discard(caller)
        elif caller not in self._unfinished:
            self._unfinished.add(caller)
            caller.begun_s = time.monotonic()

    def _endpoint_of(self, caller: _ChunkCaller) -> str:
        return next((place for place, one in self.dialled.items() if one is caller), "")

    def _unreachable(self, endpoint: str, error: Exception) -> None:
        self._inflows.reject()
        log("warning", "cannot receive arrays", endpoint, reason=error)

    def _hang_up(self, caller: _ChunkCaller) -> None:
        descriptor = caller.socket.fileno()
        self._unfinished.discard(caller)
        if endpoint := self._endpoint_of(caller):
            del self.dialled[endpoint]
        if self.callers.pop(descriptor, None) is not None:
            self._unwatch(descriptor)
            caller.stream.close()

    def _receive(self, caller: _ChunkCaller) -> None:
        """Receive a burst of bytes."""
        reads = 0
        while reads < _READS_AT_ONCE or caller.stream.holds:
            reads += 1
            inflow, wanted_bytes = caller.inflow, len(caller.missing)
            if inflow is not None and inflow.sealed:
                self._waste(caller, inflow.transfer, wanted_bytes)
                inflow = None
            try:
                count = caller.stream.receive_into(caller.missing)
            except BlockingIOError:
                return
            except OSError:
                count = 0
            if not count:
                self._hang_up(caller)
                return
            if inflow is not None:
                inflow.received_bytes += count
            if count < wanted_bytes:
                caller.missing = caller.missing[count:]
                return
            self._unfinished.discard(caller)
            if not caller.reading_header:
                caller.read_header()
            elif not self._take(caller):
                self._inflows.reject()
                self._hang_up(caller)
                return

    def _take(self, caller: _ChunkCaller) -> bool:
        """Obey a header; False if it is invalid."""
        magic, kind, transfer, offset, length = HEADER.unpack(caller.header)
        caller.want(caller.header)
        if magic != MAGIC or kind not in (CHUNK, FINISH):
            return False
        if kind == CHUNK and not 0 < length <= CHUNK_BYTES:
            return False
        inflow = self._inflows.inflow(transfer)
        if inflow is not None and (inflow.sealed or inflow.peer not in (None, caller)):
            inflow = None
        if kind == FINISH:
            if inflow is None or inflow.received_bytes != length:
                self._refuse(caller, transfer)
                return True
            inflow.sealed = True
            self._reply(caller, header(ACK, transfer))
            self._inflows.inflow_complete(transfer)
            return True
        if inflow is None or offset + length > inflow.target.size:
            self._waste(caller, transfer, length)
            return True
        inflow.peer = caller
        caller.inflow, caller.reading_header = inflow, False
        caller.want(memoryview(inflow.target.data)[offset : offset + length])
        return True

    def _waste(self, caller: _ChunkCaller, transfer: int, length: int) -> None:
        caller.inflow, caller.reading_header = None, False
        caller.want(self._wasted[:length])
        self._refuse(caller, transfer)

    def _refuse(self, caller: _ChunkCaller, transfer: int) -> None:
        self._inflows.reject()
        self._reply(caller, header(REFUSE, transfer))

    def _reply(self, caller: _ChunkCaller, line: bytes) -> None:
        caller.outbox += line
        if len(caller.outbox) > self.unread_reply_bytes:  # it does not read what it is told
            caller.outbox.clear()
            with contextlib.suppress(OSError):
                caller.socket.shutdown(socket.SHUT_RDWR)
        if not caller.writing:
            self._flush(caller)

    def _flush(self, caller: _ChunkCaller) -> None:
        sent = 0
        try:
            if caller.outbox:
                sent = caller.stream.send_lines([memoryview(bytes(caller.outbox))])
            else:
                caller.stream.flush()
        except BlockingIOError:
            pass
        except OSError:
            sent = len(caller.outbox)
            with contextlib.suppress(OSError):  # the reader then sees the end, and hangs up
                caller.socket.shutdown(socket.SHUT_RDWR)
        del caller.outbox[:sent]
        writing = bool(caller.outbox) or caller.stream.has_unsent
        if caller.writing != writing:
            caller.writing = writing
            self._watch(caller.socket.fileno(), self.ready, writing)
