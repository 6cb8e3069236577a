"""The sending end of transfers over tcp (see `pw.transport.chunks`), on the bulk thread."""

from __future__ import annotations

import errno
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from pw.core.errors import ConnectionFailed, TransferFailed
from pw.transport.blocks import Array
from pw.transport.chunks import (
    ACK,
    CHUNK,
    CHUNK_BYTES,
    FINISH,
    HEADER,
    MAGIC,
    PLANE,
    REFUSE,
    SILENCE_S,
    header,
    prepare,
)
from pw.transport.endpoints import look_up, parse
from pw.transport.peers import is_trusted
from pw.transport.pieces import Push, Unwatch, Watch, cut, packed
from pw.transport.proof import Proof, ProofError

TRANSFERS_AT_ONCE = 4
"""Long transfers per receiver; more at a time would make none of them faster."""
_LINES_AT_ONCE = 256
"""Less than the kernel's limit for one call."""
_REPLIES_AT_ONCE = 128


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
class _Receiver:
    """One receiver, at the sender."""

    endpoint: str
    socket: socket.socket
    heard_s: float
    """When it last took or said something, or was first owed an answer."""
    active: dict[int, _Outflow] = field(default_factory=dict)  # all that are not settled
    queued: deque[_Outflow] = field(default_factory=deque)
    short: deque[_Outflow] = field(default_factory=deque)
    turn: deque[_Outflow] = field(default_factory=deque)
    sending: _Outflow | None = None  # whose lines are being sent
    lines: list[memoryview] = field(default_factory=list)
    sending_next: bool = True  # to be told when it can take more
    inbox: bytearray = field(default_factory=bytearray)
    proof: Proof | None = (
        None  # until it has proven that it knows the secret; nothing is sent before
    )


@dataclass(eq=False)
class ChunkSender:
    """The sending ends of a plane's tcp connections."""

    _watch: Watch
    _unwatch: Unwatch
    _finish: Callable[[Push, Exception | None], None]
    _secret: bytes | None
    _receivers: dict[str, _Receiver] = field(default_factory=dict)
    _by_descriptor: dict[int, _Receiver] = field(default_factory=dict)

    @property
    def owed(self) -> bool:
        """Whether some receiver has yet to take or answer something."""
        return any(peer.active for peer in self._receivers.values())

    def push(self, push: Push) -> None:
        endpoint = push.landing.endpoint
        try:
            peer = self._receivers.get(endpoint) or self._connect(endpoint)
        except (OSError, ConnectionFailed) as error:
            self._finish(push, TransferFailed(f"cannot reach {endpoint!r}: {error}"))
            return
        if push.landing.transfer in peer.active:
            self._finish(push, TransferFailed("the same bytes are being sent already"))
            return
        if not peer.active:
            peer.heard_s = time.monotonic()
        line = peer.short if push.size_bytes <= CHUNK_BYTES else peer.queued
        peer.active[push.landing.transfer] = outflow = _Outflow(push, line)
        line.append(outflow)
        self._start_queued(peer)
        if not peer.sending_next:
            peer.sending_next = True
            self._watch(peer.socket.fileno(), self.ready, True)

    def ready(self, descriptor: int, readable: bool, writable: bool) -> None:
        peer = self._by_descriptor[descriptor]
        if writable:
            self._send_next(peer)
        if readable and self._by_descriptor.get(descriptor) is peer:
            self._receive(peer)

    def expire(self) -> None:
        """Drop receivers that have been silent for too long."""
        now_s = time.monotonic()
        for peer in list(self._receivers.values()):
            if peer.active and now_s - peer.heard_s > SILENCE_S:
                self._hang_up(peer, f"it was silent for {SILENCE_S} s")

    def close(self) -> None:
        for peer in list(self._receivers.values()):
            self._hang_up(peer, "this process has closed its connections")

    def _connect(self, endpoint: str) -> _Receiver:
        place = look_up(parse(endpoint))
        connection = socket.socket(place.family, socket.SOCK_STREAM)
        try:
            prepare(connection)
            code = connection.connect_ex(place.address)
            if code not in (0, errno.EINPROGRESS):
                raise OSError(code, os.strerror(code))
            if code == 0 and not is_trusted(connection):
                raise PermissionError("another user listens there")
        except OSError:
            connection.close()
            raise
        peer = _Receiver(endpoint, connection, time.monotonic())
        if self._secret is not None:
            peer.proof = Proof(self._secret, PLANE, listens=False)
            peer.lines.append(memoryview(peer.proof.hello))
        self._receivers[endpoint] = self._by_descriptor[connection.fileno()] = peer
        self._watch(connection.fileno(), self.ready, True)
        return peer

    def _hang_up(self, peer: _Receiver, why: str) -> None:
        if self._receivers.get(peer.endpoint) is not peer:
            return
        del self._receivers[peer.endpoint]
        del self._by_descriptor[peer.socket.fileno()]
        self._unwatch(peer.socket.fileno())
        peer.socket.close()
        for outflow in peer.active.values():
            words = (
                f"the connection to {peer.endpoint} was lost while an array was sent there: {why}"
            )
            self._finish(outflow.push, TransferFailed(words))

    def _start_queued(self, peer: _Receiver) -> None:
        while peer.queued and len(peer.turn) + (peer.sending is not None) < TRANSFERS_AT_ONCE:
            outflow = peer.queued.popleft()
            outflow.line = peer.turn
            peer.turn.append(outflow)

    def _send_next(self, peer: _Receiver) -> None:
        """Send the rest of a chunk, or the next one, until the socket is full."""
        if not peer.lines and not self._cut_next(peer):
            return
        try:
            sent = peer.socket.sendmsg(peer.lines)
        except BlockingIOError:
            return
        except OSError as error:
            self._hang_up(peer, str(error))
            return
        peer.heard_s = time.monotonic()
        while peer.lines and sent >= len(peer.lines[0]):
            sent -= len(peer.lines.pop(0))
        if peer.lines:
            peer.lines[0] = peer.lines[0][sent:]
        elif peer.sending is not None:
            self._sent(peer, peer.sending)

    def _cut_next(self, peer: _Receiver) -> bool:
        """Prepare the lines of the next transfer; False if there is none."""
        if peer.proof is not None or not (peer.short or peer.turn):
            peer.sending_next = False
            self._watch(peer.socket.fileno(), self.ready, False)
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

    def _sent(self, peer: _Receiver, outflow: _Outflow) -> None:
        peer.sending = None
        if outflow.refused:
            self._refused(peer, outflow)
        elif not outflow.finished:
            outflow.line.append(outflow)
        self._start_queued(peer)

    def _settle(self, peer: _Receiver, outflow: _Outflow, error: Exception | None) -> None:
        del peer.active[outflow.push.landing.transfer]
        if outflow in outflow.line:
            outflow.line.remove(outflow)
        self._start_queued(peer)
        self._finish(outflow.push, error)

    def _receive(self, peer: _Receiver) -> None:
        try:
            received = peer.socket.recv(_REPLIES_AT_ONCE * HEADER.size)
        except BlockingIOError:
            return
        except OSError as error:
            self._hang_up(peer, str(error))
            return
        if not received:
            self._hang_up(peer, "it closed the connection")
            return
        peer.heard_s = time.monotonic()
        peer.inbox += received
        if peer.proof is not None and not self._is_proven(peer, peer.proof):
            return
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

    def _is_proven(self, peer: _Receiver, proof: Proof) -> bool:
        """Whether the receiver has proven that it knows the secret; then send our proof."""
        try:
            answer = proof.take(peer.inbox)
        except ProofError as error:
            self._hang_up(peer, str(error))
            return False
        if answer:
            peer.proof = None
            peer.lines.append(memoryview(answer))
            peer.sending_next = True
            self._watch(peer.socket.fileno(), self.ready, True)
        return proof.is_done

    def _refused(self, peer: _Receiver, outflow: _Outflow) -> None:
        if outflow is peer.sending:  # an announced chunk must be sent to its end
            outflow.refused = True
            return
        why = "the receiver does not want these bytes any more"
        self._settle(peer, outflow, TransferFailed(why))
