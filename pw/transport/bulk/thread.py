"""The thread of a process that moves bytes: it copies and sends pieces of each transfer in turn.

Between some pieces it looks at its sockets, so no transfer delays another for longer than they
take. Helpers copy pieces of long transfers (`pw.transport.bulk.copying`). The
loop gives it pushes; it reports to the loop with `call_soon_threadsafe`.
"""

from __future__ import annotations

import asyncio
import contextlib
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial

from pw.core.errors import TransferFailed
from pw.transport.access.security import Security
from pw.transport.bulk.blocks import Block
from pw.transport.bulk.chunk_dial import ChunkDialler
from pw.transport.bulk.chunk_receiver import ChunkReceiver, Inflows
from pw.transport.bulk.chunk_sender import ChunkSender
from pw.transport.bulk.chunks import HEADER, RECEIVE, plane_of
from pw.transport.bulk.copying import Copying
from pw.transport.bulk.pieces import Push, Ready
from pw.transport.bulk.shared_sender import SharedSender
from pw.transport.streams.stream import Stream

EXPIRE_MS = 1000
"""Milliseconds between two searches for connections and transfers that have waited too long."""


class BulkThread:
    """Runs the connections of a plane, other than those of `SharedReceiver`.

    Args:
        loop: gets the ends of pushes.
        inflows: the plane.
        plane: its number.
        finish: called with the end of each push.
        unshare: called when a receiver has given a block back.
        security: how the process uses tcp.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        inflows: Inflows,
        plane: str,
        finish: Callable[[Push, Exception | None], None],
        unshare: Callable[[Block, bool], None],
        security: Security,
    ) -> None:
        self._loop = loop
        self._finish = finish
        self._poller = select.poll()
        self._watchers: dict[int, Ready] = {}
        self._pushes: deque[tuple[SharedSender | ChunkSender, Push]] = deque()
        self._calls: deque[Callable[[], None]] = deque()
        self._waker, self._wakened = socket.socketpair()
        self._waker.setblocking(False)
        self._wakened.setblocking(False)
        self._credentials = security.credentials
        self._inflows = inflows
        self._dialler = dialler = ChunkDialler(security)
        self.by_memory = SharedSender(
            self.watch, self.unwatch, finish, unshare, Copying(self._wake)
        )
        self.by_chunks = ChunkSender(dialler, self.watch, self.unwatch, finish)
        self.receiver = ChunkReceiver(inflows, plane, dialler, self.watch, self.unwatch)
        self._ends: list[SharedSender | ChunkSender | ChunkReceiver]
        self._ends = [self.by_memory, self.by_chunks, self.receiver]
        self._ended: TransferFailed | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="pw-bulk", daemon=True)

    def adopt(self, stream: Stream, head: bytes) -> None:
        """Take a connection that a peer has dialled, and its first header; on the loop."""
        if self._ended or self._closed:
            stream.close()
        else:
            self._call(partial(self._introduce, stream, head))

    def _introduce(self, stream: Stream, head: bytes) -> None:
        """Give a connection to the end that it is for: a client waits for pushes, or a host sends."""
        try:
            self._dialler.adopt(stream)
        except OSError:  # the peer is gone
            stream.close()
            return
        _, kind, high, low, _ = HEADER.unpack(head)
        if kind != RECEIVE:
            self.receiver.admit(stream, head)
        elif not self.by_chunks.attach(plane_of(high, low), stream):
            self._inflows.reject()
            stream.close()

    def dial(self, endpoint: str) -> None:
        """Have the process there push over a connection that this one makes; on the loop."""
        self._call(partial(self.receiver.dial, endpoint))

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def push(self, sender: SharedSender | ChunkSender, push: Push) -> None:
        """Begin a transfer with `by_memory` or `by_chunks`; on the loop."""
        self._pushes.append((sender, push))
        if self._ended:
            self._refuse_pushes(self._ended)
        else:
            self._wake()

    def _call(self, call: Callable[[], None]) -> None:
        self._calls.append(call)
        self._wake()

    def watch(self, descriptor: int, ready: Ready, writable: bool) -> None:
        """Call `ready` when a descriptor is readable or, if asked, writable."""
        self._watchers[descriptor] = ready
        self._poller.register(
            descriptor, select.POLLIN | select.POLLOUT if writable else select.POLLIN
        )

    def unwatch(self, descriptor: int) -> None:
        """Forget a descriptor."""
        del self._watchers[descriptor]
        self._poller.unregister(descriptor)

    def on_loop(self, callback: Callable[..., object], *args: object) -> None:
        """Call something on the loop; from any thread."""
        try:
            self._loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:
            if not self._loop.is_closed():
                raise

    def close(self) -> None:
        """End the thread; pushes that are in flight fail."""
        self._closed = True
        self._wake()
        self._thread.join()
        self._waker.close()
        self._wakened.close()

    def _run(self) -> None:
        reason = TransferFailed("this process has closed its connections")
        try:
            self._move()
        except Exception as error:  # noqa: BLE001 - the edge of the thread: becomes every push's error
            reason = TransferFailed(f"no array can be sent from this process any more: {error!r}")
            reason.__cause__ = error
            report = {"message": "the thread that moves arrays failed", "exception": error}
            self.on_loop(self._loop.call_exception_handler, report)
        finally:
            self._ended = reason
            for end in self._ends:
                end.close()
            self._refuse_pushes(reason)

    def _move(self) -> None:
        self.watch(self._wakened.fileno(), self._wakened_now, False)
        expiry_s = 0.0
        while not self._closed:
            while self._calls:
                self._calls.popleft()()
            while self._pushes:
                sender, push = self._pushes.popleft()
                sender.push(push)
                del push  # an idle thread must not keep the last arrays alive
            timeout_ms = 0 if self.by_memory.work() else None
            if timeout_ms is None and any(end.owed for end in self._ends):
                timeout_ms = EXPIRE_MS
            for descriptor, events in self._poller.poll(timeout_ms):
                ready = self._watchers.get(descriptor)
                if ready is not None:  # an event before it may have closed it
                    # An error is read, like bytes.
                    ready(descriptor, events != select.POLLOUT, bool(events & select.POLLOUT))
            now_s = time.monotonic()
            if now_s >= expiry_s:
                expiry_s = now_s + EXPIRE_MS / 1000
                if self._credentials is not None:
                    self._credentials.refresh()
                for end in self._ends:
                    end.expire()

    def _wakened_now(self, descriptor: int, readable: bool, writable: bool) -> None:
        self._wakened.recv(4096)

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # full: the thread is being woken already
            self._waker.send(b"\0")

    def _refuse_pushes(self, reason: TransferFailed) -> None:
        while self._pushes:
            _, push = self._pushes.popleft()
            self._finish(push, reason)
