"""Transfers between processes of one machine: one copy, into pages that the receiver aliases.

Each receiver listens on a unix socket: in the private directory of its cluster or, where there is none,
under an abstract name (without a file, gone with its process).
A sender's bulk thread connects to it once and then, for each transfer,

    sender                                        receiver (on its loop)
      | WANT segment            ------------------->  |     only if it is not mapped yet
      |  <-------------------  SEGMENT, descriptor    |     or MISSING: cancelled, or never was
      | copies the parts                              |
      | FINISH transfer         ------------------->  |     delivers

Small transfers skip the segment: INLINE carries their bytes on the socket. DROP tells senders to
unmap a segment that the receiver let go of. What lies in a segment of the sender already, because it
was itself a transfer, is not copied at all. A landing goes to one sender, who either copies or shares,
so that its own segment was not touched then:

      | SHARE transfer, descriptor  -------------->  |     delivers an array over the sender's pages
      |  <------------------------  RETURN transfer  |     nobody aliases it any more
      |  <------------------------  RETIRE transfer  |     nor here, but perhaps in a forked process
      |  <------------------------    LOST transfer  |     no descriptor was left for it: copied after all

All records have one fixed size. Anything else on the socket, a record that breaks the protocol,
or a peer that runs as another user, closes that connection and nothing more.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from pw.core.errors import TransferFailed
from pw.core.landing import Landing
from pw.transport.endpoints import unlisten
from pw.transport.peers import is_trusted
from pw.transport.pieces import Push, Unwatch, Watch, cut, packed, place
from pw.transport.proof import PROOF_S, Proof, ProofError
from pw.transport.segments import Array, Bytes, Mapping, Segment, map_received

INLINE_BYTES = 32 * 1024
"""Up to this size the bytes travel on the socket: mapping a segment would cost more."""
PIECE_BYTES = 16 << 20
"""Copied between two looks at the sockets: about a millisecond."""
SILENCE_S = 30.0
"""A receiver that owes an answer for so long is taken for dead."""
SHARE_BYTES = 2 << 20
"""From this size on, a copy costs more than mapping the pages once more."""
WANTS_AT_ONCE = 64
_BURST_BYTES = 256 * 1024

_RECORD = struct.Struct("<4sIQQ")
_MAGIC = b"pwb1"
PLANE = b"shared memory"
WANT, FINISH, INLINE, SEGMENT, MISSING, DROP, SHARE, RETURN, RETIRE, LOST = range(1, 11)
_DESCRIPTORS_AT_ONCE = 16
_NO_DESCRIPTORS_S = 1.0
_GONE = -1
"""In the place of a descriptor that came when this process could have no more."""


class Malformed(Exception):
    """The other end of a connection does not speak this protocol."""


def record(kind: int, first: int, second: int = 0) -> bytes:
    return _RECORD.pack(_MAGIC, kind, first, second)


def parse(buffer: bytearray) -> Iterator[tuple[int, int, int]]:
    """Take complete records off the front of the buffer.

    Raises:
        Malformed: these bytes are no record.
    """
    while len(buffer) >= _RECORD.size:
        magic, kind, first, second = _RECORD.unpack_from(buffer)
        if magic != _MAGIC:
            raise Malformed("no record begins here")
        del buffer[: _RECORD.size]
        yield kind, first, second


def _receive(connection: socket.socket, limit_bytes: int) -> tuple[bytes, list[int]]:
    received, descriptors, flags, _ = socket.recv_fds(connection, limit_bytes, _DESCRIPTORS_AT_ONCE)
    for descriptor in descriptors:  # Python 3.11 drops the flag that would ask for it
        os.set_inheritable(descriptor, False)
    if flags & socket.MSG_CTRUNC:
        descriptors.append(_GONE)
    return received, descriptors


def _close(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        if descriptor != _GONE:
            os.close(descriptor)


def _address(name: str) -> str:
    """Where a listener of this name is: a path, or an abstract name."""
    return name if name.startswith("/") else f"\0{name}"


class Arrivals(Protocol):
    """What the listener needs of the plane it belongs to; called on the loop thread."""

    def segment(self, number: int) -> Segment | None: ...
    def arrived(self, transfer: int, segment: int) -> bool: ...
    def inline_size(self, transfer: int) -> int | None: ...
    def arrived_inline(self, transfer: int, payload: Bytes) -> None: ...
    def arrived_shared(
        self, transfer: int, mapping: Mapping, give_back: Callable[[bool], None]
    ) -> None: ...
    def reject(self) -> None: ...


@dataclass(slots=True, eq=False)
class _Caller:
    """One sender's connection, at the receiver."""

    socket: socket.socket
    inbox: bytearray = field(default_factory=bytearray)
    descriptors: deque[int] = field(default_factory=deque)
    outbox: deque[tuple[int, int]] = field(default_factory=deque)
    writing: bool = False
    mapped: set[int] = field(default_factory=set)
    inline: tuple[int, int] | None = None  # transfer and size of the payload that comes next
    proof: Proof | None = None  # until the sender has proven that it knows the secret


class Listener:
    """The receiving end, on the loop thread: hands out segments and hears of completed ones."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        arrivals: Arrivals,
        folder: Path | None = None,
        secret: bytes | None = None,
    ) -> None:
        random = os.urandom(8).hex()
        self.name = f"pw-bulk-{os.getpid()}-{random}"
        if folder is not None:
            self.name = f"{folder}/bulk-{random[:8]}"
        self._loop = loop
        self._arrivals = arrivals
        self._secret = secret
        self._callers: set[_Caller] = set()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.setblocking(False)
        self._socket.bind(_address(self.name))
        self._socket.listen(4096)
        self._listen()

    def drop(self, number: int) -> None:
        """Tell those who mapped a segment that it will not be used again."""
        for caller in list(self._callers):
            if number in caller.mapped:
                caller.mapped.discard(number)
                self._send(caller, DROP, number)

    def close(self) -> None:
        for caller in list(self._callers):
            self._hang_up(caller)
        if not self._loop.is_closed():
            self._loop.remove_reader(self._socket.fileno())
        unlisten(self._socket)

    def _listen(self) -> None:
        if self._socket.fileno() >= 0:
            self._loop.add_reader(self._socket.fileno(), self._accept)

    def _accept(self) -> None:
        try:
            connection, _ = self._socket.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError:  # no descriptors left: whoever dials can wait
            self._arrivals.reject()
            self._loop.remove_reader(self._socket.fileno())
            self._loop.call_later(_NO_DESCRIPTORS_S, self._listen)
            return
        if not is_trusted(connection):
            self._arrivals.reject()
            connection.close()
            return
        connection.setblocking(False)
        caller = _Caller(connection)
        self._callers.add(caller)
        if self._secret is not None:
            caller.proof = Proof(self._secret, PLANE, listens=True)
            self._loop.call_later(PROOF_S, self._expire, caller)
        self._loop.add_reader(connection.fileno(), self._readable, caller)

    def _expire(self, caller: _Caller) -> None:
        if caller.proof is not None and caller in self._callers:
            self._arrivals.reject()
            self._hang_up(caller)

    def _hang_up(self, caller: _Caller) -> None:
        if caller in self._callers:
            self._callers.discard(caller)
            if not self._loop.is_closed():
                self._loop.remove_reader(caller.socket.fileno())
                self._loop.remove_writer(caller.socket.fileno())
            caller.socket.close()
            _close(caller.descriptors)

    def _readable(self, caller: _Caller) -> None:
        try:
            received, descriptors = _receive(caller.socket, _BURST_BYTES)
            caller.descriptors.extend(descriptors)
        except BlockingIOError:
            return
        except OSError:
            received = b""
        if not received:
            self._hang_up(caller)
            return
        caller.inbox += received
        try:
            if self._is_proven(caller):
                self._take(caller)
        except (Malformed, ProofError, OSError):
            self._arrivals.reject()
            self._hang_up(caller)

    def _is_proven(self, caller: _Caller) -> bool:
        """Whether the sender knows the secret, as far as it has spoken."""
        proof = caller.proof
        if proof is None:
            return True
        if answer := proof.take(caller.inbox):
            caller.socket.send(answer)  # the first that is sent there: there is room
        if proof.is_done:
            caller.proof = None
        elif caller.descriptors:
            raise Malformed("a descriptor came before the proof")
        return proof.is_done

    def _take(self, caller: _Caller) -> None:
        while self._take_payload(caller):
            for kind, first, second in parse(caller.inbox):
                if kind == WANT:
                    self._send(caller, SEGMENT, first)
                elif kind == FINISH:
                    if second not in caller.mapped and self._arrivals.segment(second):
                        raise Malformed("it finished a transfer in a segment it never mapped")
                    if not self._arrivals.arrived(first, second):
                        raise Malformed("it finished a transfer in another one's segment")
                elif kind == SHARE:
                    self._take_shared(caller, first, second)
                elif kind == INLINE:
                    if second > INLINE_BYTES:
                        raise Malformed("an inline transfer is too long")
                    caller.inline = (first, second)
                    break
                else:
                    raise Malformed(f"record {kind} is not for a receiver")
            else:
                return

    def _take_shared(self, caller: _Caller, transfer: int, capacity_bytes: int) -> None:
        if not caller.descriptors:
            raise Malformed("shared pages came without their descriptor")
        descriptor = caller.descriptors.popleft()
        if descriptor == _GONE:
            self._send(caller, LOST, transfer)
            return
        try:
            mapping = map_received(descriptor, capacity_bytes, writable=False)
        except (ValueError, OSError) as error:
            raise Malformed(f"shared pages cannot be mapped: {error}") from error
        finally:
            os.close(descriptor)
        self._arrivals.arrived_shared(transfer, mapping, partial(self._give_back, caller, transfer))

    def _give_back(self, caller: _Caller, transfer: int, safe: bool) -> None:
        if caller in self._callers:
            self._send(caller, RETURN if safe else RETIRE, transfer)

    def _take_payload(self, caller: _Caller) -> bool:
        """False while the payload of an inline transfer is still under way."""
        if caller.inline is None:
            return True
        transfer, size_bytes = caller.inline
        if len(caller.inbox) < size_bytes:
            return False
        expected_bytes = self._arrivals.inline_size(transfer)
        if expected_bytes is not None and expected_bytes != size_bytes:
            raise Malformed("an inline transfer has the wrong size")
        payload: Bytes = np.frombuffer(bytes(caller.inbox[:size_bytes]), np.uint8)
        del caller.inbox[:size_bytes]
        caller.inline = None
        self._arrivals.arrived_inline(transfer, payload)
        return True

    def _send(self, caller: _Caller, kind: int, number: int) -> None:
        caller.outbox.append((kind, number))
        if not caller.writing:
            self._flush(caller)

    def _flush(self, caller: _Caller) -> None:
        while caller.outbox:
            try:
                self._send_now(caller, *caller.outbox[0])
            except BlockingIOError:
                if not caller.writing:
                    caller.writing = True
                    self._loop.add_writer(caller.socket.fileno(), self._flush, caller)
                return
            except OSError:
                # The reader then sees the end of the connection and hangs up.
                caller.outbox.clear()
                with contextlib.suppress(OSError):
                    caller.socket.shutdown(socket.SHUT_RDWR)
                break
            caller.outbox.popleft()
        if caller.writing:
            caller.writing = False
            self._loop.remove_writer(caller.socket.fileno())

    def _send_now(self, caller: _Caller, kind: int, number: int) -> None:
        segment = self._arrivals.segment(number) if kind == SEGMENT else None
        if segment is not None:
            line = record(SEGMENT, number, segment.capacity_bytes)
            sent = socket.send_fds(caller.socket, [line], [segment.descriptor])
            caller.mapped.add(number)
        else:
            line = record(MISSING if kind == SEGMENT else kind, number)
            sent = caller.socket.send(line)
        if sent != len(line):
            # A unix socket takes so small a record whole or not at all.
            raise ConnectionError("a record was cut")


@dataclass(slots=True, eq=False)
class _Target:
    """A pushed segment in this process: where the bytes go, and who may write there now."""

    mapping: Mapping
    bytes: Bytes
    word: npt.NDArray[np.uint64]


@dataclass(slots=True, eq=False)
class _Receiver:
    """One receiver's connection, at the sender."""

    socket: socket.socket
    inbox: bytearray = field(default_factory=bytearray)
    descriptors: deque[int] = field(default_factory=deque)
    outbox: deque[tuple[memoryview, Push | None]] = field(default_factory=deque)
    blocked: bool = False
    targets: dict[int, _Target] = field(default_factory=dict)
    shares: dict[int, tuple[Landing, Segment]] = field(default_factory=dict)
    waiting: dict[int, list[Push]] = field(default_factory=dict)
    unasked: deque[int] = field(default_factory=deque)
    asked: int = 0
    heard_s: float = 0.0
    proof: Proof | None = (
        None  # until it has proven that it knows the secret; nothing is sent before
    )


@dataclass(slots=True, eq=False)
class _Copy:
    """A transfer that is being copied."""

    push: Push
    receiver: _Receiver
    target: _Target
    pieces: Iterator[tuple[int, Array]]
    missing_bytes: int


class Copier:
    """The sending end, on the bulk thread.

    Args:
        watch: (re-)registers a descriptor with the thread's poller, and who is to be told that it is
            readable; or writable, if asked.
        unwatch: forgets it.
        finish: settles a push.
        unshare: takes back a shared segment, which may be used again or not.
        secret: of the cluster, if it has one.
    """

    def __init__(
        self,
        watch: Watch,
        unwatch: Unwatch,
        finish: Callable[[Push, Exception | None], None],
        unshare: Callable[[Segment, bool], None],
        secret: bytes | None = None,
    ) -> None:
        self._watch = watch
        self._unwatch = unwatch
        self._finish = finish
        self._unshare = unshare
        self._secret = secret
        self._receivers: dict[str, _Receiver] = {}
        self._by_descriptor: dict[int, str] = {}
        self._copies: deque[_Copy] = deque()

    @property
    def owed(self) -> bool:
        """Whether some receiver has yet to answer or to read."""
        return any(peer.waiting or peer.outbox for peer in self._receivers.values())

    def push(self, push: Push) -> None:
        name = push.landing.socket
        try:
            peer = self._receivers.get(name) or self._connect(name)
        except OSError as error:
            self._finish(push, TransferFailed(f"no receiver listens at {name!r}: {error}"))
            return
        number = push.landing.segment
        if push.shared is not None:
            line = record(SHARE, push.landing.transfer, push.shared.capacity_bytes)
            self._send(name, peer, line, push)
        elif number == 0:
            self._send_inline(name, peer, push)
        elif number in peer.targets:
            self._begin(peer, push, peer.targets[number])
        elif number in peer.waiting:
            peer.waiting[number].append(push)
        else:
            self._touch(peer)
            peer.waiting[number] = [push]
            peer.unasked.append(number)
            self._ask(name, peer)

    def work(self) -> bool:
        """Copy one piece of one transfer, each in turn; True if there is more to do."""
        if not self._copies:
            return False
        copy = self._copies.popleft()
        landing = copy.push.landing
        if copy.target.word[0] != landing.transfer:
            self._finish(
                copy.push,
                TransferFailed("the receiver does not want these bytes any more"),
            )
            return bool(self._copies)
        try:
            piece = next(copy.pieces, None)
            if piece is not None:
                place(copy.target.bytes, *piece)
                copy.missing_bytes -= piece[1].nbytes
        except Exception as error:  # noqa: BLE001 - an array that cannot be read fails its push only
            why = f"an array cannot be read to be sent: {error!r}"
            self._finish(copy.push, TransferFailed(why))
            return bool(self._copies)
        if copy.missing_bytes:
            self._copies.append(copy)
        else:
            line = record(FINISH, landing.transfer, landing.segment)
            self._send(landing.socket, copy.receiver, line, copy.push)
        return bool(self._copies)

    def ready(self, descriptor: int, readable: bool, writable: bool) -> None:
        name = self._by_descriptor[descriptor]
        peer = self._receivers[name]
        if writable:
            self._flush(name, peer)
        if readable and self._receivers.get(name) is peer:
            self._receive(name, peer)

    def expire(self) -> None:
        """Give up on receivers that have owed an answer for too long."""
        now_s = time.monotonic()
        for name, peer in list(self._receivers.items()):
            if (peer.waiting or peer.outbox) and now_s - peer.heard_s > SILENCE_S:
                self._hang_up(name, peer, f"it was silent for {SILENCE_S:.0f} s")

    def close(self) -> None:
        for name, peer in list(self._receivers.items()):
            self._hang_up(name, peer, "this process has closed its connections")

    def _touch(self, peer: _Receiver) -> None:
        if not peer.waiting and not peer.outbox:
            peer.heard_s = time.monotonic()

    def _connect(self, name: str) -> _Receiver:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.setblocking(False)
            connection.connect(_address(name))
            if not is_trusted(connection):
                raise PermissionError("another user listens there")
            peer = _Receiver(connection)
            if self._secret is not None:
                peer.proof = Proof(self._secret, PLANE, listens=False)
                connection.send(peer.proof.hello)
        except OSError:
            connection.close()
            raise
        self._receivers[name] = peer
        self._by_descriptor[connection.fileno()] = name
        self._watch(connection.fileno(), self.ready, False)
        return peer

    def _hang_up(self, name: str, peer: _Receiver, why: str) -> None:
        if self._receivers.get(name) is not peer:
            return
        del self._receivers[name]
        del self._by_descriptor[peer.socket.fileno()]
        self._unwatch(peer.socket.fileno())
        peer.socket.close()
        _close(peer.descriptors)
        lost = [push for pushes in peer.waiting.values() for push in pushes]
        lost += [push for _, push in peer.outbox if push is not None]
        lost += [copy.push for copy in self._copies if copy.receiver is peer]
        self._copies = deque(copy for copy in self._copies if copy.receiver is not peer)
        for push in lost:
            self._finish(
                push,
                TransferFailed(
                    f"the connection to {name!r} was lost while an array was sent there: {why}"
                ),
            )
        for _, segment in peer.shares.values():
            self._unshare(segment, False)

    def _begin(self, peer: _Receiver, push: Push, target: _Target) -> None:
        if push.landing.size_bytes > target.bytes.size:
            self._finish(
                push,
                TransferFailed("the receiver has too little room for the array that it asked for"),
            )
            return
        self._copies.append(
            _Copy(push, peer, target, cut(push.parts, PIECE_BYTES), push.size_bytes)
        )

    def _send_inline(self, name: str, peer: _Receiver, push: Push) -> None:
        size_bytes = push.landing.size_bytes
        if size_bytes > INLINE_BYTES:
            self._finish(
                push,
                TransferFailed("the receiver has made no room for the array that it asked for"),
            )
            return
        payload: Bytes = np.zeros(size_bytes, np.uint8)
        try:
            for offset, piece in cut(push.parts, INLINE_BYTES):
                payload[offset : offset + piece.nbytes] = packed(piece)
        except Exception as error:  # noqa: BLE001 - an array that cannot be read fails its push only
            self._finish(push, TransferFailed(f"an array cannot be read to be sent: {error!r}"))
            return
        line = record(INLINE, push.landing.transfer, size_bytes) + payload.tobytes()
        self._send(name, peer, line, push)

    def _ask(self, name: str, peer: _Receiver) -> None:
        while peer.unasked and peer.asked < WANTS_AT_ONCE:
            peer.asked += 1
            self._send(name, peer, record(WANT, peer.unasked.popleft()), None)

    def _send(self, name: str, peer: _Receiver, line: bytes, push: Push | None) -> None:
        self._touch(peer)
        peer.outbox.append((memoryview(line), push))
        if not peer.blocked:
            self._flush(name, peer)

    def _flush(self, name: str, peer: _Receiver) -> None:
        while peer.outbox and peer.proof is None:
            line, push = peer.outbox[0]
            try:
                if push is not None and push.shared is not None:
                    # So small a record goes whole or not at all.
                    sent = socket.send_fds(peer.socket, [line], [push.shared.descriptor])
                else:
                    sent = peer.socket.send(line)
            except BlockingIOError:
                sent = 0
            except OSError as error:
                self._hang_up(name, peer, str(error))
                return
            if sent < len(line):
                peer.outbox[0] = (line[sent:], push)
                if not peer.blocked:
                    peer.blocked = True
                    self._watch(peer.socket.fileno(), self.ready, True)
                return
            peer.heard_s = time.monotonic()
            peer.outbox.popleft()
            if push is not None:
                if push.shared is not None:
                    peer.shares[push.landing.transfer] = (push.landing, push.shared)
                self._finish(push, None)
        if peer.blocked:
            peer.blocked = False
            self._watch(peer.socket.fileno(), self.ready, False)

    def _receive(self, name: str, peer: _Receiver) -> None:
        try:
            received, descriptors = _receive(peer.socket, 4096)
        except BlockingIOError:
            return
        except OSError as error:
            self._hang_up(name, peer, str(error))
            return
        peer.descriptors.extend(descriptors)
        if not received:
            self._hang_up(name, peer, "it closed the connection")
            return
        peer.inbox += received
        peer.heard_s = time.monotonic()
        try:
            if peer.proof is not None:
                answer = peer.proof.take(peer.inbox)
                if not answer:
                    return
                peer.socket.send(answer)
                peer.proof = None
                self._flush(name, peer)
                if self._receivers.get(name) is not peer:
                    return
            for kind, number, capacity_bytes in parse(peer.inbox):
                self._heard(peer, kind, number, capacity_bytes)
                if self._receivers.get(name) is not peer:
                    return
        except (Malformed, ProofError, ValueError, OSError) as error:
            self._hang_up(name, peer, str(error))
            return
        self._ask(name, peer)

    def _heard(self, peer: _Receiver, kind: int, number: int, capacity_bytes: int) -> None:
        if kind == DROP:
            peer.targets.pop(number, None)
            return
        if kind in (RETURN, RETIRE, LOST) and number in peer.shares:
            landing, segment = peer.shares.pop(number)
            if kind == LOST:
                self._copy_shared(landing, segment)
            else:
                self._unshare(segment, kind == RETURN)
            return
        if kind not in (SEGMENT, MISSING) or number not in peer.waiting:
            raise Malformed(f"record {kind} about segment {number} was not asked for")
        pushes = peer.waiting.pop(number)
        peer.asked -= 1
        if kind == MISSING:
            for push in pushes:
                why = "the receiver does not want these bytes any more"
                self._finish(push, TransferFailed(why))
            return
        descriptor = peer.descriptors.popleft() if peer.descriptors else _GONE
        if descriptor == _GONE:
            peer.waiting[number] = pushes
            raise Malformed("a segment came without its descriptor")
        try:
            mapping = map_received(descriptor, capacity_bytes)
        except (ValueError, OSError):
            peer.waiting[number] = pushes  # settled with the connection
            raise
        finally:
            os.close(descriptor)
        peer.targets[number] = target = _Target(mapping, *mapping.views())
        for push in pushes:
            self._begin(peer, push, target)

    def _copy_shared(self, landing: Landing, segment: Segment) -> None:
        """Whoever pushed this has been told that it is done; its bytes stay here until it is."""
        pages = segment.bytes[: landing.size_bytes]
        self.push(Push(landing, [(0, pages)], pages.nbytes, lambda _: self._unshare(segment, True)))
