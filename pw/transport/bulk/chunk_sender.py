"""The sending end of transfers in chunks (see `pw.transport.bulk.chunks`), on the bulk thread."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from pw.core.errors import Error, TransferFailed
from pw.core.landing import AWAITED_S
from pw.transport.bulk.blocks import Array
from pw.transport.bulk.chunk_dial import ChunkDialler
from pw.transport.bulk.chunks import (
    ACK,
    CHUNK,
    CHUNK_BYTES,
    FINISH,
    HEADER,
    MAGIC,
    REFUSE,
    SILENCE_S,
    header,
)
from pw.transport.bulk.pieces import Push, Unwatch, Watch, cut, packed
from pw.transport.streams.stream import Stream

TRANSFERS_AT_ONCE = 4
"""Long transfers per receiver; more at a time would make none of them faster."""
_LINES_AT_ONCE = 256
"""Most lines of one system call, less than the kernel's limit."""
_REPLIES_AT_ONCE = 128
_PLANES = 4096


class _Outflow:
    """A transfer on its way to one receiver."""

    __slots__ = ("finished", "line", "pieces", "push", "refused", "unsent_bytes")

    def __init__(self, push: Push, line: deque[_Outflow]) -> None:
        self.push = push
        self.line = line  # where it waits for its turn
        self.pieces: Iterator[tuple[int, Array]] = cut(push.parts, CHUNK_BYTES)
        self.unsent_bytes = push.size_bytes
        self.finished = False
        self.refused = False

    def next_lines(self) -> list[memoryview]:
        """A chunk, or several small ones of about that size, and FINISH behind the last."""
        transfer = self.push.landing.transfer
        least_bytes = max(0, self.unsent_bytes - CHUNK_BYTES)
        lines: list[memoryview] = []
        while self.unsent_bytes > least_bytes and len(lines) < _LINES_AT_ONCE:
            offset, piece = next(self.pieces)
            lines.append(memoryview(header(CHUNK, transfer, offset, piece.nbytes)))
            lines.append(memoryview(packed(piece).data))
            self.unsent_bytes -= piece.nbytes
        if not self.unsent_bytes:
            self.finished = True
            lines.append(memoryview(header(FINISH, transfer, 0, self.push.size_bytes)))
        return lines


@dataclass(slots=True, eq=False)
class _ChunkReceiver:
    """One receiver, at the sender."""

    place: str
    """Endpoint of the receiver or, if it dials, its plane."""
    stream: Stream | None
    """Stream to the receiver; None until a receiver that dials has done so."""
    heard_s: float
    """Time, in seconds, at which the receiver last took or sent something, or was first owed an answer."""
    active: dict[int, _Outflow] = field(default_factory=dict)  # all that are not settled
    queued: deque[_Outflow] = field(default_factory=deque)
    short: deque[_Outflow] = field(default_factory=deque)
    turn: deque[_Outflow] = field(default_factory=deque)
    sending: _Outflow | None = None  # whose lines are being sent
    lines: list[memoryview] = field(default_factory=list)
    sending_next: bool = True  # to be told when it can take more
    inbox: bytearray = field(default_factory=bytearray)


@dataclass(eq=False)
class ChunkSender:
    """The sending ends of a plane's connections."""

    _dialler: ChunkDialler
    _watch: Watch
    _unwatch: Unwatch
    _finish: Callable[[Push, Exception | None], None]
    awaited_s: float = AWAITED_S
    """Seconds that a receiver has to dial this host."""
    receivers: dict[str, _ChunkReceiver] = field(default_factory=dict)
    """Receivers by plane; those that are dialled, by endpoint."""
    _by_descriptor: dict[int, _ChunkReceiver] = field(default_factory=dict)
    _answers: memoryview = field(
        default_factory=lambda: memoryview(bytearray(_REPLIES_AT_ONCE * HEADER.size))
    )

    @property
    def owed(self) -> bool:
        """Whether some receiver has yet to take or answer something."""
        return any(peer.active for peer in self.receivers.values())

    def push(self, push: Push) -> None:
        landing = push.landing
        try:
            peer = self.receivers.get(landing.plane or landing.endpoint)
            if peer is None:
                peer = (
                    self._await(landing.plane) if landing.plane else self._connect(landing.endpoint)
                )
        except (OSError, Error) as error:
            self._finish(push, TransferFailed(f"cannot reach {landing.endpoint!r}: {error}"))
            return
        if landing.transfer in peer.active:
            self._finish(push, TransferFailed("the same bytes are being sent already"))
            return
        if not peer.active:
            peer.heard_s = time.monotonic()
        line = peer.short if push.size_bytes <= CHUNK_BYTES else peer.queued
        peer.active[landing.transfer] = outflow = _Outflow(push, line)
        line.append(outflow)
        self._start_queued(peer)
        if peer.stream is not None and not peer.sending_next:
            self._watch_next(peer, peer.stream, True)

    def attach(self, plane: str, stream: Stream) -> bool:
        """Take the connection of a receiver that has dialled; it replaces an earlier one of that receiver.

        Returns False if that receiver is a process with another identity.
        """
        peer = self.receivers.get(plane)
        if peer is not None and peer.stream is not None:
            here, there = peer.stream.identity, stream.identity
            if (here and here.uri) != (there and there.uri):
                return False
            self._hang_up(peer, "it has connected again")
            peer = None
        if peer is None:
            peer = self._await(plane)
        peer.stream, peer.heard_s = stream, time.monotonic()
        self._by_descriptor[stream.socket.fileno()] = peer
        self._watch_next(peer, stream, True)
        return True

    def ready(self, descriptor: int, readable: bool, writable: bool) -> None:
        peer = self._by_descriptor[descriptor]
        stream = peer.stream
        assert stream is not None
        if not stream.is_open and not self._shake(peer, stream):
            return
        if writable:
            self._send_next(peer, stream)
        if readable and self._by_descriptor.get(descriptor) is peer:
            self._receive(peer, stream)

    def expire(self) -> None:
        """Drop receivers that are revoked, silent for too long, or have not dialled."""
        now_s = time.monotonic()
        for peer in list(self.receivers.values()):
            if peer.stream is not None and self._dialler.is_revoked(peer.stream):
                self._hang_up(peer, "its certificate is revoked")
            elif peer.stream is None and now_s - peer.heard_s > self.awaited_s:
                self._hang_up(
                    peer, f"the receiver has not dialled this host within {self.awaited_s:g} s"
                )
            elif peer.active and now_s - peer.heard_s > SILENCE_S:
                self._hang_up(peer, f"it was silent for {SILENCE_S} s")

    def close(self) -> None:
        for peer in list(self.receivers.values()):
            self._hang_up(peer, "this process has closed its connections")

    def _connect(self, endpoint: str) -> _ChunkReceiver:
        stream = self._dialler.dial(endpoint)
        peer = _ChunkReceiver(endpoint, stream, time.monotonic())
        self.receivers[endpoint] = self._by_descriptor[stream.socket.fileno()] = peer
        self._watch(stream.socket.fileno(), self.ready, True)
        return peer

    def _await(self, plane: str) -> _ChunkReceiver:
        """Expect the connection of a receiver that dials."""
        if len(self.receivers) >= _PLANES:
            idle = (one for one in self.receivers.values() if not one.active)
            if (oldest := next(idle, None)) is None:
                raise TransferFailed(f"{_PLANES} receivers are connected already")
            self._hang_up(oldest, "too many receivers")
        peer = self.receivers[plane] = _ChunkReceiver(plane, None, time.monotonic())
        return peer

    def _shake(self, peer: _ChunkReceiver, stream: Stream) -> bool:
        """Receive a part of a handshake; whether it is over."""
        try:
            is_open = stream.shake()
        except (OSError, Error) as error:
            self._hang_up(peer, str(error))
            return False
        self._watch_next(peer, stream, is_open or stream.has_unsent)
        return is_open

    def _watch_next(self, peer: _ChunkReceiver, stream: Stream, sending: bool) -> None:
        """Be told when the receiver says something and, if `sending`, can take more."""
        peer.sending_next = sending
        self._watch(stream.socket.fileno(), self.ready, sending)

    def _hang_up(self, peer: _ChunkReceiver, why: str) -> None:
        if self.receivers.get(peer.place) is not peer:
            return
        del self.receivers[peer.place]
        if peer.stream is not None:
            descriptor = peer.stream.socket.fileno()
            del self._by_descriptor[descriptor]
            self._unwatch(descriptor)
            peer.stream.close()
        for outflow in peer.active.values():
            there = peer.place if "://" in peer.place else "the receiver, which dials this host,"
            words = f"the connection to {there} was lost while an array was sent there: {why}"
            self._finish(outflow.push, TransferFailed(words))

    def _start_queued(self, peer: _ChunkReceiver) -> None:
        while peer.queued and len(peer.turn) + (peer.sending is not None) < TRANSFERS_AT_ONCE:
            outflow = peer.queued.popleft()
            outflow.line = peer.turn
            peer.turn.append(outflow)

    def _send_next(self, peer: _ChunkReceiver, stream: Stream) -> None:
        """Send the rest of a chunk, or the next one, until the socket is full."""
        try:
            stream.flush()
            if not peer.lines and not self._cut_next(peer, stream):
                return
            sent = stream.send_lines(peer.lines)
        except BlockingIOError:
            return
        except OSError as error:
            self._receive(peer, stream)  # it may have said why
            self._hang_up(peer, str(error))
            return
        peer.heard_s = time.monotonic()
        while peer.lines and sent >= len(peer.lines[0]):
            sent -= len(peer.lines.pop(0))
        if peer.lines:
            peer.lines[0] = peer.lines[0][sent:]
        elif peer.sending is not None:
            self._sent(peer, peer.sending)

    def _cut_next(self, peer: _ChunkReceiver, stream: Stream) -> bool:
        """Prepare the lines of the next transfer; False if there is none."""
        if not (peer.short or peer.turn):
            self._watch_next(peer, stream, False)
            return False
        outflow = (peer.short or peer.turn).popleft()
        try:
            peer.lines = outflow.next_lines()
        except Exception as error:  # noqa: BLE001 - an array that cannot be read fails its push only
            why = f"an array cannot be read to be sent: {error!r}"
            self._settle(peer, outflow, TransferFailed(why))
            return False
        peer.sending = outflow
        return True

    def _sent(self, peer: _ChunkReceiver, outflow: _Outflow) -> None:
        peer.sending = None
        if outflow.refused:
            self._refused(peer, outflow)
        elif not outflow.finished:
            outflow.line.append(outflow)
        self._start_queued(peer)

    def _settle(self, peer: _ChunkReceiver, outflow: _Outflow, error: Exception | None) -> None:
        del peer.active[outflow.push.landing.transfer]
        if outflow in outflow.line:
            outflow.line.remove(outflow)
        self._start_queued(peer)
        self._finish(outflow.push, error)

    def _receive(self, peer: _ChunkReceiver, stream: Stream) -> None:
        self._receive_once(peer, stream)
        while stream.holds and self.receivers.get(peer.place) is peer:
            self._receive_once(peer, stream)

    def _receive_once(self, peer: _ChunkReceiver, stream: Stream) -> None:
        try:
            count = stream.receive_into(self._answers)
        except BlockingIOError:
            return
        except OSError as error:
            self._hang_up(peer, str(error))
            return
        if not count:
            self._hang_up(peer, "it closed the connection")
            return
        peer.heard_s = time.monotonic()
        peer.inbox += self._answers[:count]
        while len(peer.inbox) >= HEADER.size:
            magic, kind, transfer, _, _ = HEADER.unpack_from(peer.inbox)
            del peer.inbox[: HEADER.size]
            if magic != MAGIC or kind not in (ACK, REFUSE):
                self._hang_up(peer, "it does not speak this protocol")
                return
            outflow = peer.active.get(transfer)
            if outflow is None:
                continue
            if kind == REFUSE:
                self._refused(peer, outflow)
            elif outflow.finished:
                self._settle(peer, outflow, None)

    def _refused(self, peer: _ChunkReceiver, outflow: _Outflow) -> None:
        if outflow is peer.sending:  # an announced chunk must be sent to its end
            outflow.refused = True
            return
        why = "the receiver does not want these bytes any more"
        self._settle(peer, outflow, TransferFailed(why))
