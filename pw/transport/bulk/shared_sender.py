"""The sending end of transfers through shared memory (see `pw.transport.bulk.shared`), on the bulk
thread."""

from __future__ import annotations

import os
import socket
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from pw.core.errors import TransferFailed
from pw.core.landing import Landing
from pw.transport.access.unix import is_trusted
from pw.transport.bulk.blocks import Block, Bytes, map_received
from pw.transport.bulk.copying import Copying, Target
from pw.transport.bulk.pieces import Push, Unwatch, Watch, cut, packed
from pw.transport.bulk.shared import (
    BLOCK,
    DROP,
    FINISH,
    GONE,
    INLINE,
    LOST,
    MISSING,
    ON_SOCKET_BYTES,
    RETIRE,
    RETURN,
    SHARE,
    WANT,
    Malformed,
    close_all,
    parse,
    receive,
    record,
    socket_name,
)

SILENCE_S = 30.0
"""Seconds after which a receiver that owes an answer counts as dead."""
WANTS_AT_ONCE = 64


@dataclass(slots=True, eq=False)
class _Receiver:
    """One receiver's connection, at the sender."""

    socket: socket.socket
    inbox: bytearray = field(default_factory=bytearray)
    descriptors: deque[int] = field(default_factory=deque)
    outbox: deque[tuple[memoryview, Push | None]] = field(default_factory=deque)
    blocked: bool = False
    targets: dict[int, Target] = field(default_factory=dict)
    shares: dict[int, tuple[Landing, Block]] = field(default_factory=dict)
    waiting: dict[int, list[Push]] = field(default_factory=dict)
    unasked: deque[int] = field(default_factory=deque)
    asked: int = 0
    heard_s: float = 0.0


@dataclass(eq=False)
class SharedSender:
    """Copies pushes into the receivers' blocks, on the bulk thread."""

    _watch: Watch
    _unwatch: Unwatch
    _finish: Callable[[Push, Exception | None], None]
    _unshare: Callable[[Block, bool], None]
    _copying: Copying
    _receivers: dict[str, _Receiver] = field(default_factory=dict)
    _by_descriptor: dict[int, str] = field(default_factory=dict)

    @property
    def owed(self) -> bool:
        """Whether a receiver has yet to answer or to read."""
        return any(peer.waiting or peer.outbox for peer in self._receivers.values())

    def push(self, push: Push) -> None:
        name = push.landing.socket
        try:
            peer = self._receivers.get(name) or self._connect(name)
        except OSError as error:
            self._finish(push, TransferFailed(f"no receiver listens at {name!r}: {error}"))
            return
        number = push.landing.block
        if push.shared is not None:
            line = record(SHARE, push.landing.transfer, push.shared.capacity_bytes)
            self._send(name, peer, line, push)
        elif number == 0:
            self._send_inline(name, peer, push)
        elif number in peer.targets:
            self._begin(push, peer.targets[number])
        elif number in peer.waiting:
            peer.waiting[number].append(push)
        else:
            self._touch(peer)
            peer.waiting[number] = [push]
            peer.unasked.append(number)
            self._ask(name, peer)

    def work(self) -> bool:
        """Copy some pieces of transfers, of each in turn; False if there were none."""
        worked = self._copying.work()
        self._settle()
        return worked

    def _settle(self) -> None:
        """End the pushes whose copies are over."""
        for copy in self._copying.settled():
            landing = copy.push.landing
            if copy.error:
                self._finish(copy.push, TransferFailed(copy.error))
            else:
                line = record(FINISH, landing.transfer, landing.block)
                self._send(landing.socket, self._receivers[landing.socket], line, copy.push)

    def ready(self, descriptor: int, readable: bool, writable: bool) -> None:
        name = self._by_descriptor[descriptor]
        peer = self._receivers[name]
        if writable:
            self._flush(name, peer)
        if readable and self._receivers.get(name) is peer:
            self._receive(name, peer)

    def expire(self) -> None:
        """Drop receivers that have owed an answer for too long."""
        now_s = time.monotonic()
        for name, peer in list(self._receivers.items()):
            if (peer.waiting or peer.outbox) and now_s - peer.heard_s > SILENCE_S:
                self._hang_up(name, peer, f"it was silent for {SILENCE_S:.0f} s")

    def close(self) -> None:
        for name, peer in list(self._receivers.items()):
            self._hang_up(name, peer, "this process has closed its connections")
        self._copying.close()
        self._settle()

    def _touch(self, peer: _Receiver) -> None:
        if not peer.waiting and not peer.outbox:
            peer.heard_s = time.monotonic()

    def _connect(self, name: str) -> _Receiver:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.setblocking(False)
            connection.connect(socket_name(name))
            if not is_trusted(connection):
                raise PermissionError("another user listens there")
            peer = _Receiver(connection)
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
        close_all(peer.descriptors)
        lost = [push for pushes in peer.waiting.values() for push in pushes]
        lost += [push for _, push in peer.outbox if push is not None]
        words = f"the connection to {name!r} was lost while an array was sent there: {why}"
        for push in lost:
            self._finish(push, TransferFailed(words))
        self._copying.give_up(name, words)
        for _, block in peer.shares.values():
            self._unshare(block, False)

    def _begin(self, push: Push, target: Target) -> None:
        if push.landing.size_bytes > target.bytes.size:
            self._finish(
                push,
                TransferFailed("the receiver has too little room for the array that it asked for"),
            )
            return
        self._copying.begin(push, target)

    def _send_inline(self, name: str, peer: _Receiver, push: Push) -> None:
        size_bytes = push.landing.size_bytes
        if size_bytes > ON_SOCKET_BYTES:
            self._finish(
                push,
                TransferFailed("the receiver has made no room for the array that it asked for"),
            )
            return
        payload: Bytes = np.zeros(size_bytes, np.uint8)
        try:
            for offset, piece in cut(push.parts, ON_SOCKET_BYTES):
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
        while peer.outbox:
            line, push = peer.outbox[0]
            try:
                if push is not None and push.shared is not None:
                    # The kernel takes so small a record whole or not at all.
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
            received, descriptors = receive(peer.socket, 4096)
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
            for kind, number, capacity_bytes in parse(peer.inbox):
                self._heard(peer, kind, number, capacity_bytes)
                if self._receivers.get(name) is not peer:
                    return
        except (Malformed, ValueError, OSError) as error:
            self._hang_up(name, peer, str(error))
            return
        self._ask(name, peer)

    def _heard(self, peer: _Receiver, kind: int, number: int, capacity_bytes: int) -> None:
        if kind == DROP:
            peer.targets.pop(number, None)
            return
        if kind in (RETURN, RETIRE, LOST) and number in peer.shares:
            landing, block = peer.shares.pop(number)
            if kind == LOST:
                self._copy_shared(landing, block)
            else:
                self._unshare(block, kind == RETURN)
            return
        if kind not in (BLOCK, MISSING) or number not in peer.waiting:
            raise Malformed(f"record {kind} about block {number} was not asked for")
        pushes = peer.waiting.pop(number)
        peer.asked -= 1
        if kind == MISSING:
            for push in pushes:
                why = "the receiver does not want these bytes any more"
                self._finish(push, TransferFailed(why))
            return
        descriptor = peer.descriptors.popleft() if peer.descriptors else GONE
        if descriptor == GONE:
            peer.waiting[number] = pushes
            raise Malformed("a block came without its descriptor")
        try:
            mapping = map_received(descriptor, capacity_bytes)
        except (ValueError, OSError):
            peer.waiting[number] = pushes  # settled with the connection
            raise
        finally:
            os.close(descriptor)
        peer.targets[number] = target = Target(mapping, *mapping.views())
        for push in pushes:
            self._begin(push, target)

    def _copy_shared(self, landing: Landing, block: Block) -> None:
        """Copy a share that the receiver could not map; its push has ended, and its bytes stay
        until then."""
        pages = block.bytes[: landing.size_bytes]
        self.push(Push(landing, [(0, pages)], pages.nbytes, lambda _: self._unshare(block, True)))
