"""Transfers between machines: chunks of a megabyte over ZeroMQ, in credit windows.

Both ends live on the bulk thread and have sockets of their own, so that neither bytes nor their
acknowledgements share a queue with control messages. The receiver binds one ROUTER; a sender has
one DEALER per receiver.

    sender                                  receiver
      | CHUNK transfer, offset, length -->  |   received straight into the leased buffer
      |  <------------ CREDIT transfer, n   |
      | FINISH transfer, total bytes   -->  |   delivers
      |  <------------------ ACK transfer   |   or REFUSE, at any time

A landing is itself the first window of credits; each chunk received grants one more. A transfer
thus never has more than a window in flight, which keeps latency low for whatever shares the wire.

Whatever arrives is checked before a byte is written: the header, that the transfer is open, that
it belongs to this peer (the first to know its number), and that the chunk lies inside it. What
fails is counted, answered with REFUSE where there is somebody to answer, and dropped.

A sender that loses its receiver hears of it from the socket's monitor (a refused or broken
connection, missed heartbeats); a receiver that is connected but silent is given up after a while.
The DEALER is then closed, never reconnected: a queue replayed to a receiver that has started again
would help nobody.
"""

from __future__ import annotations

import struct
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import zmq
from zmq.utils.monitor import recv_monitor_message

from pw.core.errors import TransferFailed
from pw.transport.pieces import Array, Push, cut, packed
from pw.transport.segments import Bytes

CHUNK_BYTES = 1 << 20
WINDOW_CHUNKS = 8
TRANSFERS_AT_ONCE = 4
"""Per receiver; the others queue, because more of them in flight make none of them faster."""
SILENCE_S = 20.0
_HEARTBEAT_MS = 1000
_HEARTBEAT_TIMEOUT_MS = 5000
_CONNECT_TIMEOUT_MS = 5000
_CHUNK_HIGH_WATER = 2 * WINDOW_CHUNKS * TRANSFERS_AT_ONCE
_REPLY_HIGH_WATER = 16384
_MESSAGES_AT_ONCE = 32
_REPLY_BYTES = 1024  # a header is smaller, but ZeroMQ's own greeting must pass as well

_HEADER = struct.Struct("<4sIQQQ")
_MAGIC = b"pwc1"
CHUNK, FINISH, CREDIT, ACK, REFUSE = range(1, 6)
_KINDS = range(CHUNK, REFUSE + 1)

_LOST = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_CONNECT_RETRIED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
)


def header(kind: int, transfer: int, offset: int = 0, length: int = 0) -> bytes:
    return _HEADER.pack(_MAGIC, kind, transfer, offset, length)


def parse(frame: bytes) -> tuple[int, int, int, int] | None:
    """Kind, transfer, offset and length; None if this is no header."""
    if len(frame) != _HEADER.size:
        return None
    magic, kind, transfer, offset, length = _HEADER.unpack(frame)
    if magic != _MAGIC or kind not in _KINDS:
        return None
    return kind, transfer, offset, length


@dataclass(slots=True, eq=False)
class Inflow:
    """A landing as the bulk thread sees it."""

    transfer: int
    target: Bytes
    peer: bytes | None = None
    received_bytes: int = 0
    sealed: bool = False  # complete; nothing may be written any more


class Inflows(Protocol):
    """What a receiver needs of the plane it belongs to; called on the bulk thread."""

    def inflow(self, transfer: int) -> Inflow | None: ...
    def inflow_complete(self, transfer: int) -> None: ...
    def reject(self) -> None: ...


class ChunkReceiver:
    """The ROUTER of a plane."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], host: str, inflows: Inflows
    ) -> None:
        self._inflows = inflows
        self.socket = context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RCVHWM, _CHUNK_HIGH_WATER)
        self.socket.setsockopt(zmq.SNDHWM, _REPLY_HIGH_WATER)
        self.socket.setsockopt(zmq.MAXMSGSIZE, CHUNK_BYTES)
        self.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
        self.socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT_MS)
        shown = host
        if ":" in host:
            self.socket.setsockopt(zmq.IPV6, 1)
            shown = f"[{host}]"
        try:
            port = self.socket.bind_to_random_port(f"tcp://{shown}")
        except zmq.ZMQError:
            self.socket.close()
            raise
        self.endpoint = f"tcp://{shown}:{port}"

    def receive(self) -> None:
        """Take a burst of what has arrived."""
        for _ in range(_MESSAGES_AT_ONCE):
            try:
                peer = self.socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            if not self._take(peer):
                self._inflows.reject()
            while self.socket.get(zmq.RCVMORE):
                self.socket.recv(zmq.NOBLOCK)

    def close(self) -> None:
        self.socket.close()

    def _take(self, peer: bytes) -> bool:
        """Handle one message whose first frame was read; False if it is to be rejected."""
        if not self.socket.get(zmq.RCVMORE):
            return False
        fields = parse(self.socket.recv(zmq.NOBLOCK))
        if fields is None:
            return False
        kind, transfer, offset, length = fields
        inflow = self._inflows.inflow(transfer)
        accepted = (
            inflow is not None
            and not inflow.sealed
            and inflow.peer in (None, peer)
            and (
                (kind == CHUNK and self._take_chunk(inflow, peer, offset, length))
                or (kind == FINISH and self._take_finish(inflow, peer, length))
            )
        )
        if not accepted and kind in (CHUNK, FINISH):
            self._reply(peer, header(REFUSE, transfer))
        return accepted

    def _take_chunk(self, inflow: Inflow, peer: bytes, offset: int, length: int) -> bool:
        if not 0 < length <= CHUNK_BYTES or offset + length > inflow.target.size:
            return False
        if not self.socket.get(zmq.RCVMORE):
            return False
        target = memoryview(inflow.target.data)[offset : offset + length]
        # Writes at most what the target holds, whatever the frame's real size, which it returns.
        if self.socket.recv_into(target, flags=zmq.NOBLOCK) != length:
            return False
        if self.socket.get(zmq.RCVMORE):
            return False
        inflow.peer = peer
        inflow.received_bytes += length
        self._reply(peer, header(CREDIT, inflow.transfer, 0, 1))
        return True

    def _take_finish(self, inflow: Inflow, peer: bytes, total_bytes: int) -> bool:
        if self.socket.get(zmq.RCVMORE) or inflow.received_bytes != total_bytes:
            return False
        inflow.sealed = True
        self._reply(peer, header(ACK, inflow.transfer))
        self._inflows.inflow_complete(inflow.transfer)
        return True

    def _reply(self, peer: bytes, frame: bytes) -> None:
        try:
            self.socket.send_multipart([peer, frame], zmq.NOBLOCK)
        except zmq.ZMQError:
            # Gone, or it lets thousands of replies lie unread: it will notice by itself.
            self._inflows.reject()


@dataclass(slots=True, eq=False)
class _Outflow:
    """A transfer on its way to one receiver."""

    push: Push
    chunks: Iterator[tuple[int, Array]]
    credits: int = WINDOW_CHUNKS
    next: tuple[bytes, memoryview] | None = None  # cut, but not taken by the socket yet
    exhausted: bool = False
    finished: bool = False


@dataclass(slots=True, eq=False)
class _Receiver:
    """One receiver, at the sender."""

    endpoint: str
    socket: zmq.Socket[bytes]
    monitor: zmq.Socket[bytes]
    active: dict[int, _Outflow] = field(default_factory=dict)
    queued: deque[Push] = field(default_factory=deque)
    turn: deque[_Outflow] = field(default_factory=deque)  # those with credits, each in turn
    blocked: bool = False
    heard_s: float = 0.0


class ChunkSender:
    """The DEALERs of a plane.

    Args:
        watch: (re-)registers a socket with the thread's poller; writable as well if asked.
        unwatch: forgets it.
        finish: settles a push.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        watch: Callable[[zmq.Socket[bytes], bool], None],
        unwatch: Callable[[zmq.Socket[bytes]], None],
        finish: Callable[[Push, Exception | None], None],
    ) -> None:
        self._context = context
        self._watch = watch
        self._unwatch = unwatch
        self._finish = finish
        self._receivers: dict[str, _Receiver] = {}
        self._by_socket: dict[zmq.Socket[bytes], _Receiver] = {}

    @property
    def owed(self) -> bool:
        """Whether some receiver has yet to answer."""
        return any(peer.active for peer in self._receivers.values())

    def push(self, push: Push) -> None:
        endpoint = push.landing.endpoint
        try:
            peer = self._receivers.get(endpoint) or self._connect(endpoint)
        except zmq.ZMQError as error:
            self._finish(push, TransferFailed(f"cannot reach {endpoint!r}: {error}"))
            return
        if push.landing.transfer in peer.active:
            self._finish(push, TransferFailed("this landing is being pushed to already"))
            return
        if not peer.active:
            peer.heard_s = time.monotonic()
        peer.queued.append(push)
        self._start_queued(peer)

    def work(self) -> bool:
        """Send a chunk to every receiver that can take one; True if there is more to do."""
        busy = False
        for peer in list(self._receivers.values()):
            if peer.turn and not peer.blocked:
                self._send_next(peer)
                busy = busy or bool(peer.turn and not peer.blocked)
        return busy

    def ready(self, socket: zmq.Socket[bytes], readable: bool, writable: bool) -> None:
        peer = self._by_socket.get(socket)
        if peer is None:
            return
        if socket is peer.monitor:
            self._observe(peer)
            return
        if writable and peer.blocked:
            peer.blocked = False
            self._watch(peer.socket, False)
        if readable:
            self._receive(peer)

    def expire(self) -> None:
        """Give up on receivers that have been silent for too long."""
        now_s = time.monotonic()
        for peer in list(self._receivers.values()):
            if peer.active and now_s - peer.heard_s > SILENCE_S:
                self._hang_up(peer, f"it was silent for {SILENCE_S:.0f} s")

    def close(self) -> None:
        for peer in list(self._receivers.values()):
            self._hang_up(peer, "the bulk plane was closed")

    def _connect(self, endpoint: str) -> _Receiver:
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, _CHUNK_HIGH_WATER)
        socket.setsockopt(zmq.RCVHWM, _REPLY_HIGH_WATER)
        socket.setsockopt(zmq.MAXMSGSIZE, _REPLY_BYTES)
        socket.setsockopt(zmq.RECONNECT_IVL, -1)
        socket.setsockopt(zmq.CONNECT_TIMEOUT, _CONNECT_TIMEOUT_MS)
        socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT_MS)
        if "[" in endpoint:
            socket.setsockopt(zmq.IPV6, 1)
        monitor: zmq.Socket[bytes] = socket.get_monitor_socket(_LOST)
        monitor.setsockopt(zmq.LINGER, 0)
        peer = _Receiver(endpoint, socket, monitor)
        try:
            socket.connect(endpoint)
        except zmq.ZMQError:
            self._close_sockets(peer)
            raise
        self._receivers[endpoint] = peer
        for each in (socket, monitor):
            self._by_socket[each] = peer
            self._watch(each, False)
        return peer

    def _close_sockets(self, peer: _Receiver) -> None:
        peer.socket.disable_monitor()
        peer.monitor.close()
        peer.socket.close()

    def _hang_up(self, peer: _Receiver, why: str) -> None:
        del self._receivers[peer.endpoint]
        for each in (peer.socket, peer.monitor):
            del self._by_socket[each]
            self._unwatch(each)
        self._close_sockets(peer)
        lost = [outflow.push for outflow in peer.active.values()] + list(peer.queued)
        for push in lost:
            self._finish(push, TransferFailed(f"lost the receiver at {peer.endpoint}: {why}"))

    def _observe(self, peer: _Receiver) -> None:
        event = recv_monitor_message(peer.monitor, zmq.NOBLOCK)["event"]
        self._hang_up(peer, f"the connection ended ({zmq.Event(event).name})")

    def _start_queued(self, peer: _Receiver) -> None:
        while peer.queued and len(peer.active) < TRANSFERS_AT_ONCE:
            push = peer.queued.popleft()
            outflow = _Outflow(push, cut(push.parts, CHUNK_BYTES))
            peer.active[push.landing.transfer] = outflow
            peer.turn.append(outflow)

    def _send_next(self, peer: _Receiver) -> None:
        outflow = peer.turn[0]
        transfer = outflow.push.landing.transfer
        try:
            self._cut_next(outflow)
        except Exception as error:  # noqa: BLE001 - an array that cannot be read fails its push only
            self._settle(peer, outflow, TransferFailed(f"cannot read an array to push: {error!r}"))
            return
        try:
            if outflow.next is not None:
                peer.socket.send_multipart(outflow.next, zmq.NOBLOCK)
                outflow.next = None
                outflow.credits -= 1
            else:
                total_bytes = outflow.push.size_bytes
                peer.socket.send(header(FINISH, transfer, 0, total_bytes), zmq.NOBLOCK)
                outflow.finished = True
        except zmq.Again:
            peer.blocked = True
            self._watch(peer.socket, True)
            return
        peer.turn.popleft()
        if outflow.credits and not outflow.finished:
            peer.turn.append(outflow)

    def _cut_next(self, outflow: _Outflow) -> None:
        if outflow.next is None and not outflow.exhausted:
            offset, piece = next(outflow.chunks, (0, None))
            if piece is None:
                outflow.exhausted = True
            else:
                line = header(CHUNK, outflow.push.landing.transfer, offset, piece.nbytes)
                outflow.next = (line, packed(piece).data)

    def _settle(self, peer: _Receiver, outflow: _Outflow, error: Exception | None) -> None:
        del peer.active[outflow.push.landing.transfer]
        if outflow in peer.turn:
            peer.turn.remove(outflow)
        self._start_queued(peer)
        self._finish(outflow.push, error)

    def _receive(self, peer: _Receiver) -> None:
        for _ in range(_MESSAGES_AT_ONCE):
            try:
                fields = parse(peer.socket.recv(zmq.NOBLOCK))
            except zmq.Again:
                return
            while peer.socket.get(zmq.RCVMORE):
                peer.socket.recv(zmq.NOBLOCK)
            if fields is not None:
                self._heard(peer, *fields)

    def _heard(self, peer: _Receiver, kind: int, transfer: int, _: int, count: int) -> None:
        outflow = peer.active.get(transfer)
        if outflow is None:
            return
        peer.heard_s = time.monotonic()
        if kind == CREDIT:
            if not outflow.credits and count and not outflow.finished:
                peer.turn.append(outflow)
            outflow.credits = min(outflow.credits + count, WINDOW_CHUNKS)
            return
        if kind == ACK and outflow.finished:
            self._settle(peer, outflow, None)
        elif kind == REFUSE:
            why = f"the receiver gave up transfer {transfer}, or never had it"
            self._settle(peer, outflow, TransferFailed(why))
