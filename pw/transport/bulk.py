"""The bulk plane: how large buffers go straight from process to process.

Control messages and buffers never share a socket. A receiver reserves a buffer and gets a
`Landing`; the landing reaches the sender in a control message; the sender pushes. Between processes
of one machine the bytes are copied once, into pages that the receiver then aliases
(`pw.transport.shared`); otherwise they go in chunks over tcp (`pw.transport.chunks`).

One thread per plane moves all bytes: it copies and sends one piece of each transfer in turn and
looks at its sockets in between, so no transfer blocks another for longer than a piece takes. What
is announced on the shared-memory channel arrives on the loop itself, without that thread.

    loop thread      land, cancel, push, deliver, done; the segment pool; the unix listener
    bulk thread      copying; tcp connections; the sending ends of unix connections

They share three things: a deque of pushes with a socket to wake the thread, the dictionary of
expected transfers, of which the bulk thread only reads single entries, and `call_soon_threadsafe`.

One push is one transfer: it is complete when all parts of that push are in. Parts need not cover
the landing; what lies between them is unspecified.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pw.core.errors import ConnectionFailed, OutOfHostMemory, TransferFailed
from pw.core.landing import Landing
from pw.transport.inflow import ChunkReceiver, Inflow
from pw.transport.outflow import ChunkSender
from pw.transport.pieces import Push, Ready, checked
from pw.transport.private import free_endpoint
from pw.transport.segments import (
    NO_DESCRIPTORS,
    Bytes,
    Mapping,
    Segment,
    SegmentPool,
    aligned_buffer,
    machine_identity,
)
from pw.transport.shared import INLINE_BYTES, SHARE_BYTES, Copier, Listener, Malformed

CHANNELS = ("auto", "shared", "tcp")
_SHARED_MEMORY = hasattr(os, "memfd_create")
_RECLAIM_S = 1.0
_EXPIRE_MS = 1000
_WILDCARDS = ("", "*", "0.0.0.0", "::")


@dataclass(slots=True, eq=False)
class _Expected:
    """A landing whose bytes are not all in yet."""

    segment: Segment | None
    inflow: Inflow
    deliver: Callable[[Bytes], None]


class BulkPlane:
    """Moves buffers between processes without touching the control plane; one per process.

    All methods belong to the thread of `loop`; all callbacks are made on it.

    Args:
        loop: the process's event loop.
        bind_host: the address at which other machines reach this one.
        pool_bytes: how much warm shared memory is kept when nobody uses it.
        folder: the private directory of the cluster, where this plane listens then, and on no port.
        secret: of the cluster; both ends of every connection prove that they know it.
        channel: `shared` (one machine only), `tcp`, or `auto` for the better of the two; the
            environment variable PW_BULK overrides `auto`.

    Raises:
        ValueError: an unknown channel, or a bind_host that is no address a peer could connect to.
    """

    sent_bytes: int
    received_bytes: int

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        bind_host: str = "127.0.0.1",
        pool_bytes: int = 1 << 30,
        channel: str = "auto",
        folder: Path | None = None,
        secret: bytes | None = None,
    ) -> None:
        if channel == "auto":
            channel = os.environ.get("PW_BULK", "auto")
        if channel not in CHANNELS:
            raise ValueError(f"bulk channel {channel!r} is none of {', '.join(CHANNELS)}")
        if bind_host in _WILDCARDS:
            raise ValueError(f"bind_host {bind_host!r} is no address that a peer could connect to")
        if channel == "auto" and not _SHARED_MEMORY:
            channel = "tcp"
        self.sent_bytes = 0
        self.received_bytes = 0
        self._shared_bytes = 0
        self._loop = loop
        self._channel = channel
        self._expected: dict[int, _Expected] = {}
        self._late = 0
        self._rejected = 0
        self._reclaiming: asyncio.TimerHandle | None = None
        self._closed = False
        self._machine = machine_identity() if _SHARED_MEMORY else ""
        self._pool = SegmentPool(pool_bytes, self._dropped)

        self._poller = select.poll()
        self._watchers: dict[int, Ready] = {}
        self._receiver: ChunkReceiver | None = None
        if channel != "shared":
            try:
                endpoint = free_endpoint(folder, "chunks", bind_host)
                self._receiver = ChunkReceiver(endpoint, self, self._watch, self._unwatch, secret)
            except ConnectionFailed as error:
                raise ValueError(f"cannot listen at bind_host {bind_host!r}: {error}") from error
        self._listener = Listener(loop, self, folder, secret) if channel != "tcp" else None

        self._pushes: deque[tuple[Copier | ChunkSender, Push]] = deque()
        self._waker, self._wakened = socket.socketpair()
        self._waker.setblocking(False)
        self._wakened.setblocking(False)
        self._copier = Copier(self._watch, self._unwatch, self._finish, self._unshare, secret)
        self._sender = ChunkSender(self._watch, self._unwatch, self._finish, secret)
        self._ended: TransferFailed | None = None
        self._thread = threading.Thread(target=self._run, name="pw-bulk", daemon=True)
        self._thread.start()

    # Receiving

    def land(self, size_bytes: int, deliver: Callable[[Bytes], None]) -> Landing:
        """Reserve a buffer for one transfer, to be described to whoever shall send it.

        Args:
            size_bytes: the size of the transfer.
            deliver: called once, with a uint8 array of that size on a 64-byte boundary, when all
                bytes are in. Its memory is used again only after the array and everything that
                aliases it are garbage.

        Raises:
            TransferFailed: there is no memory, no descriptor left, or the plane is closed.
        """
        if self._closed:
            raise TransferFailed(
                "this process has closed its connections, so no array can come here"
            )
        if size_bytes < 0:
            raise ValueError(f"nothing can have {size_bytes} bytes")
        transfer = secrets.randbits(63) or 1
        segment = None
        try:
            if size_bytes > INLINE_BYTES and _SHARED_MEMORY:
                segment = self._lease(size_bytes, transfer)
            target = segment.bytes[:size_bytes] if segment else aligned_buffer(size_bytes)
        except (OSError, MemoryError) as error:
            words = f"this process has no memory for an array of {size_bytes} bytes to come here: {error}"
            raise OutOfHostMemory(words) from error
        self._expected[transfer] = _Expected(segment, Inflow(transfer, target), deliver)
        listener = self._listener if segment or size_bytes <= INLINE_BYTES else None
        return Landing(
            transfer=transfer,
            size_bytes=size_bytes,
            segment=segment.number if segment else 0,
            machine=self._machine,
            socket=listener.name if listener else "",
            endpoint=self._receiver.endpoint if self._receiver else "",
        )

    def _lease(self, size_bytes: int, transfer: int) -> Segment | None:
        """Shared memory; None where descriptors are short and the bytes can come over tcp instead."""
        try:
            return self._pool.lease(size_bytes, transfer, sparing=self._receiver is not None)
        except OSError as error:
            if error.errno not in NO_DESCRIPTORS or self._receiver is None:
                raise
            return None

    def cancel(self, transfer: int) -> None:
        """Give up a landing: its bytes, should they still come, are discarded.

        A sender may be writing at this moment, so the buffer is never used again; its pages are
        freed when that sender lets go. Unknown and delivered transfers are left alone.
        """
        expected = self._expected.pop(transfer, None)
        if expected is None:
            return
        expected.inflow.sealed = True
        if expected.segment is not None:
            self._pool.retire(expected.segment)

    def landed_bytes(self, transfer: int) -> int:
        """How much of a landing has come in chunks; of shared memory only its end is heard."""
        expected = self._expected.get(transfer)
        return expected.inflow.received_bytes if expected is not None else 0

    # Sending

    def push(
        self,
        landing: Landing,
        parts: Sequence[tuple[int, npt.NDArray[Any]]],
        done: Callable[[Exception | None], None],
    ) -> None:
        """Copy arrays into a peer's landing, which completes that transfer.

        Args:
            landing: what the receiver's `land` returned.
            parts: byte offset in the landing, and the array whose bytes go there in row-major
                order; of any layout and any dtype that is not object.
            done: called once when the arrays are no longer needed, with None, or with
                TransferFailed (or ValueError, TypeError: the parts cannot go there) if the
                receiver will not have them.
        """
        mover: Copier | ChunkSender
        try:
            push = checked(landing, parts, done)
            if self._channel != "tcp" and landing.socket and landing.machine == self._machine:
                mover = self._copier
                push.shared = self._shareable(push)
            elif self._channel != "shared" and landing.endpoint:
                mover = self._sender
            else:
                raise TransferFailed(
                    f"arrays travel by {self._channel!r} here, which the receiver does not do; set the same "
                    "PW_BULK on all machines"
                )
        except (ValueError, TypeError, TransferFailed) as error:
            self._loop.call_soon(done, error)
            return
        self._pushes.append((mover, push))
        if self._ended:
            self._refuse_pushes(self._ended)
        else:
            self._wake()

    def _shareable(self, push: Push) -> Segment | None:
        """The segment in which all that is pushed lies already, if it is worth sharing."""
        if push.size_bytes < SHARE_BYTES or push.size_bytes != push.landing.size_bytes:
            return None
        (_, array), *others = push.parts
        if others or not array.flags.c_contiguous:
            return None
        return self._pool.share(array)

    # Housekeeping

    def counters(self) -> dict[str, int]:
        """What this plane has moved, holds and has turned away, for status pages and tests."""
        self._pool.reclaim()
        return {
            "sent_bytes": self.sent_bytes,
            "received_bytes": self.received_bytes,
            "shared_bytes": self._shared_bytes,  # of those that were sent, not copied
            "live_segments": self._pool.live_segments,
            "lent_segments": self._pool.lent_segments,
            "pooled_bytes": self._pool.pooled_bytes,
            "expected_transfers": len(self._expected),
            "late_transfers": self._late,
            "rejected": self._rejected,
        }

    def close(self) -> None:
        """Stop the thread and close everything; pushes still under way fail.

        Arrays that were delivered stay valid.
        """
        if self._closed:
            return
        self._closed = True
        if self._reclaiming is not None:
            self._reclaiming.cancel()
        if self._listener is not None:
            self._listener.close()
        self._wake()
        self._thread.join()
        for inflow in self._expected.values():
            inflow.inflow.sealed = True
        self._expected.clear()
        self._pool.close()
        self._waker.close()
        self._wakened.close()

    def _reclaim(self) -> None:
        self._pool.reclaim()
        self._reclaiming = None
        self._reclaim_later()

    def _reclaim_later(self) -> None:
        # Garbage collection only leaves a note; somebody has to read it even when nothing lands.
        if self._reclaiming is None and self._pool.lent_segments and not self._closed:
            self._reclaiming = self._loop.call_later(_RECLAIM_S, self._reclaim)

    def _dropped(self, number: int) -> None:
        if self._listener is not None and not self._closed:
            self._listener.drop(number)

    # What the listener asks and tells (loop thread)

    def segment(self, number: int) -> Segment | None:
        return self._pool.get(number)

    def arrived(self, transfer: int, segment: int) -> bool:
        """False if that transfer was not to arrive there."""
        expected = self._expected.get(transfer)
        if expected is None:
            self._late += 1
            return True
        if expected.segment is None or expected.segment.number != segment:
            return False
        self._deliver(transfer)
        return True

    def inline_size(self, transfer: int) -> int | None:
        expected = self._expected.get(transfer)
        return None if expected is None else expected.inflow.target.size

    def arrived_inline(self, transfer: int, payload: Bytes) -> None:
        expected = self._expected.get(transfer)
        if expected is None:
            self._late += 1
            return
        np.copyto(expected.inflow.target, payload)
        self._deliver(transfer)

    def arrived_shared(
        self, transfer: int, mapping: Mapping, give_back: Callable[[bool], None]
    ) -> None:
        """Its bytes lie in pages of the sender, which waits for them to be given back."""
        expected = self._expected.get(transfer)
        if expected is None:
            self._late += 1
            give_back(True)
            return
        if expected.segment is None or expected.inflow.target.size > mapping.capacity_bytes:
            raise Malformed("it shared other pages than those of this transfer")
        self._pool.restore(expected.segment)
        expected.segment, size_bytes = None, expected.inflow.target.size
        expected.inflow.target = self._pool.borrow(mapping, size_bytes, give_back)
        self._reclaim_later()
        self._deliver(transfer)

    def reject(self) -> None:
        self._rejected += 1

    def _deliver(self, transfer: int) -> None:
        expected = self._expected.pop(transfer, None)
        if expected is None:  # cancelled while the news was on its way from the bulk thread
            return
        buffer = expected.inflow.target
        if expected.segment is not None:
            buffer = self._pool.lend(expected.segment, buffer.size)
            self._reclaim_later()
        self.received_bytes += buffer.size
        try:
            expected.deliver(buffer)
        except Exception as error:  # noqa: BLE001 - one receiver's fault must not reach the others
            self._loop.call_exception_handler(
                {"message": f"the receiver of transfer {transfer} failed", "exception": error}
            )

    # What the chunk receiver asks and tells (bulk thread)

    def inflow(self, transfer: int) -> Inflow | None:
        expected = self._expected.get(transfer)
        return None if expected is None else expected.inflow

    def inflow_complete(self, transfer: int) -> None:
        self._on_loop(self._deliver, transfer)

    # The bulk thread

    def _run(self) -> None:
        reason = TransferFailed("this process has closed its connections")
        try:
            self._move()
        except Exception as error:  # noqa: BLE001 - the edge of the thread: becomes every push's error
            reason = TransferFailed(f"no array can be sent from this process any more: {error!r}")
            reason.__cause__ = error
            report = {"message": "the thread that moves arrays failed", "exception": error}
            self._on_loop(self._loop.call_exception_handler, report)
        finally:
            self._ended = reason
            self._copier.close()
            self._sender.close()
            if self._receiver is not None:
                self._receiver.close()
            self._refuse_pushes(reason)

    def _move(self) -> None:
        self._watch(self._wakened.fileno(), self._wakened_now, False)
        ends = [end for end in (self._copier, self._sender, self._receiver) if end is not None]
        expiry_s = 0.0
        while not self._closed:
            while self._pushes:
                mover, push = self._pushes.popleft()
                mover.push(push)
                del push  # an idle thread must not keep the last arrays alive
            timeout_ms = 0 if self._copier.work() else None
            if timeout_ms is None and any(end.owed for end in ends):
                timeout_ms = _EXPIRE_MS
            for descriptor, events in self._poller.poll(timeout_ms):
                ready = self._watchers.get(descriptor)
                if ready is not None:  # what came before it may have closed it
                    # An error is read, like bytes.
                    ready(descriptor, events != select.POLLOUT, bool(events & select.POLLOUT))
            now_s = time.monotonic()
            if now_s >= expiry_s:
                expiry_s = now_s + _EXPIRE_MS / 1000
                for end in ends:
                    end.expire()

    def _wakened_now(self, descriptor: int, readable: bool, writable: bool) -> None:
        self._wakened.recv(4096)

    def _watch(self, descriptor: int, ready: Ready, writable: bool) -> None:
        self._watchers[descriptor] = ready
        self._poller.register(
            descriptor, select.POLLIN | select.POLLOUT if writable else select.POLLIN
        )

    def _unwatch(self, descriptor: int) -> None:
        del self._watchers[descriptor]
        self._poller.unregister(descriptor)

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # full: it is being wakened already
            self._waker.send(b"\0")

    def _refuse_pushes(self, reason: TransferFailed) -> None:
        while self._pushes:
            _, push = self._pushes.popleft()
            self._finish(push, reason)

    def _unshare(self, segment: Segment, safe: bool) -> None:
        self._on_loop(partial(self._pool.unshare, segment, safe=safe))

    def _finish(self, push: Push, error: Exception | None) -> None:
        if error is None:
            self.sent_bytes += push.size_bytes
            if push.shared is not None:
                self._shared_bytes += push.size_bytes
        elif push.shared is not None:
            self._unshare(push.shared, False)
        self._on_loop(push.done, error)

    def _on_loop(self, callback: Callable[..., object], *args: object) -> None:
        try:
            self._loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:
            if not self._loop.is_closed():
                raise
