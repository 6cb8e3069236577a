"""The bulk plane: how large buffers go straight from process to process.

Control messages and buffers never share a socket. A receiver reserves a buffer and gets a
`Landing`; the landing travels to the sender in a control message; the sender pushes. Between
processes of one machine the bytes are copied once, into pages that the receiver then aliases
(`pw.transport.bulk.shared`); otherwise they go in chunks over tcp (`pw.transport.bulk.chunks`).

The chunks of a node come to the port of its links (`adopt`). A process that listens nowhere, a
client, dials the hosts that send to it.

    loop thread      land, cancel, push, deliver, done; the pool of blocks; `SharedReceiver`
    bulk thread      copying; connections for chunks; `SharedSender` (`pw.transport.bulk.thread`)
    helpers          pieces of long copies (`pw.transport.bulk.copying`)

Loop and bulk thread share the queue of pushes, the dictionary of expected transfers, of which the bulk thread
reads single entries, and `call_soon_threadsafe`.

One push is one transfer: it is complete when all parts of that push are in. Parts need not cover
the landing; the bytes between them are unspecified.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pw.core.errors import ConnectionFailed, OutOfHostMemory, TransferFailed
from pw.core.landing import Landing
from pw.transport.access.credentials import Credentials
from pw.transport.access.private import free_endpoint
from pw.transport.access.security import Security
from pw.transport.bulk.blocks import (
    NO_DESCRIPTORS,
    Block,
    BlockPool,
    Bytes,
    Mapping,
    aligned_buffer,
    machine_identity,
)
from pw.transport.bulk.chunk_receiver import Inflow
from pw.transport.bulk.chunk_sender import ChunkSender
from pw.transport.bulk.pieces import Push, checked
from pw.transport.bulk.shared import ON_SOCKET_BYTES, SHARE_BYTES, Malformed
from pw.transport.bulk.shared_receiver import SharedReceiver
from pw.transport.bulk.shared_sender import SharedSender
from pw.transport.bulk.thread import BulkThread
from pw.transport.links.network import StreamNetwork
from pw.transport.links.node import Node
from pw.transport.streams.stream import Stream

CHANNELS = ("auto", "shared", "tcp")
_SHARED_MEMORY = hasattr(os, "memfd_create")
_RECLAIM_S = 1.0
_WILDCARDS = ("", "*", "0.0.0.0", "::")


@dataclass(slots=True, eq=False)
class _Expected:
    """A landing that is not complete."""

    block: Block | None
    inflow: Inflow
    deliver: Callable[[Bytes], None]


class BulkPlane:
    """Moves buffers between processes without touching the control plane; one per process.

    All methods belong to the thread of `loop`; all callbacks are made on it.

    Args:
        loop: the process's event loop.
        bind_host: the address at which a plane that listens itself is reached over tcp.
        pool_bytes: how much idle shared memory is kept warm.
        folder: the private directory of the cluster, for unix sockets.
        credentials: for TLS on tcp. Without any, only processes of this user on this machine reach
            this plane and are reached, and with `insecure` every process, without TLS.
        insecure: whether tcp may be plain.
        endpoint: where the process's node listens, which hands connections over (`adopt`); empty if
            it listens nowhere. None: the plane listens itself.
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
        credentials: Credentials | None = None,
        insecure: bool = False,
        endpoint: str | None = None,
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
        self._pool = BlockPool(pool_bytes, self._dropped)

        security = Security(credentials, insecure)
        self._plane = secrets.token_hex(16) if endpoint == "" else ""
        self.thread = BulkThread(loop, self, self._plane, self._finish, self._unshare, security)
        self._endpoint = ""
        self._door: Node | None = None
        """A node without actors that accepts connections, if the process has no other."""
        if channel != "shared":
            self._endpoint = (
                self._listen(folder, bind_host, security) if endpoint is None else endpoint
            )
        self._receiver: SharedReceiver | None = None
        if channel != "tcp":
            try:
                self._receiver = SharedReceiver(loop, self, folder)
            except OSError:
                if channel == "shared" or endpoint is None:
                    raise
        self.thread.start()

    def _listen(self, folder: Path | None, host: str, security: Security) -> str:
        """Listen for chunks; where senders reach this plane, empty if it can listen nowhere."""
        wanted = free_endpoint(folder, "chunks", host)
        if folder is None and not security.takes_tcp:
            if sys.platform != "linux":
                return ""
            wanted = f"ipc://@pw-chunks-{os.getpid()}-{secrets.token_hex(8)}"
        try:
            network = StreamNetwork(
                self._loop,
                "chunks",
                1,
                bind=wanted,
                credentials=security.credentials,
                insecure=security.insecure,
            )
        except ConnectionFailed as error:
            raise ValueError(f"cannot listen at bind_host {host!r}: {error}") from error
        network.take_chunks = self.adopt
        self._door = Node("chunks", self._loop, network)
        return network.endpoint

    # Receiving

    def adopt(self, stream: Stream, head: bytes) -> None:
        """Take a connection for chunks that a node has accepted, and its first header."""
        if self._closed:
            stream.close()
        else:
            self.thread.adopt(stream, head)

    def land(self, size_bytes: int, deliver: Callable[[Bytes], None], sender: str = "") -> Landing:
        """Reserve a buffer for one transfer, and describe it for the sender.

        Args:
            size_bytes: the size of the transfer.
            deliver: called once, with a uint8 array of that size on a 64-byte boundary, when all
                bytes are in. Its memory is used again only after the array and everything that
                aliases it are garbage.
            sender: the endpoint of the process that will push; a plane that listens nowhere dials it.

        Raises:
            TransferFailed: there is no memory, no descriptor left, or the plane is closed.
        """
        if self._closed:
            raise TransferFailed(
                "this process has closed its connections, so no array can come here"
            )
        if size_bytes < 0:
            raise ValueError(f"a transfer cannot have {size_bytes} bytes")
        transfer = secrets.randbits(63) or 1
        block = None
        try:
            if size_bytes > ON_SOCKET_BYTES and _SHARED_MEMORY:
                block = self._lease(size_bytes, transfer)
            target = block.bytes[:size_bytes] if block else aligned_buffer(size_bytes)
        except (OSError, MemoryError) as error:
            words = f"this process has no memory for an array of {size_bytes} bytes to come here: {error}"
            raise OutOfHostMemory(words) from error
        self._expected[transfer] = _Expected(block, Inflow(transfer, target), deliver)
        receiver = self._receiver if block or size_bytes <= ON_SOCKET_BYTES else None
        plane = self._plane if sender and self._channel != "shared" else ""
        if plane:
            self.thread.dial(sender)
        return Landing(
            transfer=transfer,
            size_bytes=size_bytes,
            block=block.number if block else 0,
            machine=self._machine,
            socket=receiver.name if receiver else "",
            endpoint=self._endpoint,
            plane=plane,
        )

    @property
    def _takes_chunks(self) -> bool:
        return self._channel != "shared" and bool(self._endpoint or self._plane)

    def _lease(self, size_bytes: int, transfer: int) -> Block | None:
        """A block; None if descriptors are short and the bytes can come over tcp."""
        try:
            return self._pool.lease(size_bytes, transfer, sparing=self._takes_chunks)
        except OSError as error:
            if error.errno not in NO_DESCRIPTORS or not self._takes_chunks:
                raise
            return None

    def cancel(self, transfer: int, *, unused: bool = False) -> None:
        """Cancel a landing: later bytes are discarded. Unknown and delivered transfers stay as they are.

        A sender may be writing now, so the block is never used again; unless its landing is `unused`: the
        sender has said that it does not push.
        """
        expected = self._expected.pop(transfer, None)
        if expected is None:
            return
        expected.inflow.sealed = True
        if expected.block is not None and unused:
            self._pool.restore(expected.block)
        elif expected.block is not None:
            self._pool.retire(expected.block)

    def landed_bytes(self, transfer: int) -> int:
        """Return the bytes of a landing that have come in chunks; 0 for one in shared memory."""
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
            done: called once when the arrays are no longer needed: with None, TransferFailed, or
                ValueError or TypeError for parts that do not fit.
        """
        sender: SharedSender | ChunkSender
        try:
            push = checked(landing, parts, done)
            if self._channel != "tcp" and landing.socket and landing.machine == self._machine:
                sender = self.thread.by_memory
                push.shared = self._shareable(push)
            elif self._channel != "shared" and (landing.endpoint or landing.plane):
                sender = self.thread.by_chunks
            else:
                raise TransferFailed(
                    f"arrays travel by {self._channel!r} here, which the receiver does not do; set the same "
                    "PW_BULK on all machines"
                )
        except (ValueError, TypeError, TransferFailed) as error:
            self._loop.call_soon(done, error)
            return
        self.thread.push(sender, push)

    def _shareable(self, push: Push) -> Block | None:
        """The block of this process in which the pushed array lies, if sharing it pays."""
        if push.size_bytes < SHARE_BYTES or push.size_bytes != push.landing.size_bytes:
            return None
        (_, array), *rest = push.parts
        if rest or not array.flags.c_contiguous:
            return None
        return self._pool.share(array)

    # Housekeeping

    def counters(self) -> dict[str, int]:
        """Counters of transfers, blocks and refused peers."""
        self._pool.reclaim()
        door: dict[str, int] = {} if self._door is None else self._door.counters
        strangers = sum(door.get(f"connections_{how}", 0) for how in ("malformed", "refused"))
        return {
            "sent_bytes": self.sent_bytes,
            "received_bytes": self.received_bytes,
            "shared_bytes": self._shared_bytes,  # of those that were sent, not copied
            "live_blocks": self._pool.live_blocks,
            "lent_blocks": self._pool.lent_blocks,
            "pooled_bytes": self._pool.pooled_bytes,
            "expected_transfers": len(self._expected),
            "late_transfers": self._late,
            "rejected": self._rejected + strangers,
        }

    def close(self) -> None:
        """Stop the thread and close all connections; unfinished pushes fail, delivered arrays stay
        valid."""

        if self._closed:
            return
        self._closed = True
        if self._reclaiming is not None:
            self._reclaiming.cancel()
        if self._receiver is not None:
            self._receiver.close()
        self.thread.close()
        if self._door is not None:
            self._door.close()
        for inflow in self._expected.values():
            inflow.inflow.sealed = True
        self._expected.clear()
        self._pool.close()

    def _reclaim(self) -> None:
        self._pool.reclaim()
        self._reclaiming = None
        self._reclaim_later()

    def _reclaim_later(self) -> None:
        # A timer, because garbage collection only appends to a deque.
        if self._reclaiming is None and self._pool.lent_blocks and not self._closed:
            self._reclaiming = self._loop.call_later(_RECLAIM_S, self._reclaim)

    def _dropped(self, number: int) -> None:
        if self._receiver is not None and not self._closed:
            self._receiver.drop(number)

    # Called by the shared-memory receiver (loop thread)

    def block(self, number: int) -> Block | None:
        return self._pool.get(number)

    def arrived(self, transfer: int, block: int) -> bool:
        """Deliver a transfer; False if it does not belong to that block."""
        expected = self._expected.get(transfer)
        if expected is None:
            self._late += 1
            return True
        if expected.block is None or expected.block.number != block:
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
        """Deliver a transfer that lies in pages of the sender, which waits for their return."""
        expected = self._expected.get(transfer)
        if expected is None:
            self._late += 1
            give_back(True)
            return
        if expected.block is None or expected.inflow.target.size > mapping.capacity_bytes:
            raise Malformed("it shared other pages than those of this transfer")
        self._pool.restore(expected.block)
        expected.block, size_bytes = None, expected.inflow.target.size
        expected.inflow.target = self._pool.borrow(mapping, size_bytes, give_back)
        self._reclaim_later()
        self._deliver(transfer)

    def reject(self) -> None:
        self._rejected += 1

    def _deliver(self, transfer: int) -> None:
        expected = self._expected.pop(transfer, None)
        if expected is None:  # cancelled before the bulk thread's call arrived
            return
        buffer = expected.inflow.target
        if expected.block is not None:
            buffer = self._pool.lend(expected.block, buffer.size)
            self._reclaim_later()
        self.received_bytes += buffer.size
        try:
            expected.deliver(buffer)
        except Exception as error:  # noqa: BLE001 - one receiver's fault must not reach the others
            self._loop.call_exception_handler(
                {"message": f"the receiver of transfer {transfer} failed", "exception": error}
            )

    # Called by the chunk receiver (bulk thread)

    def inflow(self, transfer: int) -> Inflow | None:
        expected = self._expected.get(transfer)
        return None if expected is None else expected.inflow

    def inflow_complete(self, transfer: int) -> None:
        self.thread.on_loop(self._deliver, transfer)

    # Ends of pushes (bulk thread)

    def _unshare(self, block: Block, safe: bool) -> None:
        self.thread.on_loop(partial(self._pool.unshare, block, safe=safe))

    def _finish(self, push: Push, error: Exception | None) -> None:
        if error is None:
            self.sent_bytes += push.size_bytes
            if push.shared is not None:
                self._shared_bytes += push.size_bytes
        elif push.shared is not None:
            self._unshare(push.shared, False)
        self.thread.on_loop(push.done, error)
