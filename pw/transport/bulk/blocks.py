"""Blocks of shared memory: the receiver's pool of warm pages, which senders write and JAX aliases.

A block is an anonymous memfd. The receiver makes it, and a sender maps it by descriptor. Its pages
are freed with the last process that has it mapped, even after SIGKILL. Writing to fresh pages costs
ten times as much as to warm ones, so blocks have power-of-two sizes and are reused, the most
recently used first.

A block is in one of three states:

    idle     in the pool, warm
    leased   reserved for one transfer; a sender may be writing
    lent     delivered; an array (or a JAX array that aliases one) reads it, here or in
             the processes that it is shared with

    idle -lease-> leased -lend-> lent -the last alias dies, all shares come back-> idle
                  leased -restore-> idle        leased -retire-> gone
                  idle -too much is idle-> gone

Four rules keep delivered bytes from changing:

1. A cancelled lease is *retired*, never made idle: a sender that has the pages mapped may still be
   copying. The pages live until that sender unmaps them.
2. Each block ends in one page that holds the number of the transfer it is leased to, or 0. A
   sender reads it before each piece, so it does not write for a cancelled or replayed landing.
3. No process writes to a lent block: JAX treats aliased memory as immutable, even when it is
   donated. So the pages may be shared with other processes. A process that ends without returning its share may
   have readers left, so that block is never used again.
4. A process that is forked while a block is lent may read its pages without a sign. Such a block
   is never used again.

A weak reference to the *exporter*, at the bottom of an array's chain of bases, notices the end of a
lent block; numpy shortens that chain, so an intermediate array may die before its views. The
callback can run in any thread, so it only appends to a deque.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import resource
import sys
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from pw.core.sharding import ALIGNMENT_BYTES

Array = npt.NDArray[np.generic]
Bytes = npt.NDArray[np.uint8]

PAGE_BYTES = mmap.PAGESIZE
SMALLEST_BYTES = 64 * 1024
NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)
SHARE = 1 / 2
"""The part of a process's descriptors that blocks may use; each block has one while it lives."""

# Python's mmap keeps a duplicate of the descriptor open, which would double the descriptors of a pool.
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_MAP_FAILED = ctypes.c_void_p(-1).value
_MADV_HUGEPAGE = 14
_F_ADD_SEALS, _F_GET_SEALS = 1033, 1034
_SEAL_SEAL, _SEAL_SHRINK, _SEAL_GROW = 1, 2, 4


def machine_identity() -> str:
    """Equal in processes that can send each other descriptors over abstract sockets."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        boot = file.read().strip()
    return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}/{os.getuid()}"


def aligned_buffer(size_bytes: int) -> Bytes:
    """Private memory that JAX can alias."""
    raw: Bytes = np.empty(size_bytes + ALIGNMENT_BYTES, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT_BYTES
    return raw[start : start + size_bytes]


class _Exporter:
    """The bottom of an array's chain of bases; keeps the mapping alive."""

    __slots__ = ("__array_interface__", "__weakref__", "mapping")

    def __init__(self, mapping: Mapping) -> None:
        self.mapping = mapping
        self.__array_interface__: dict[str, Any] = {
            "data": (mapping.address, not mapping.writable),
            "shape": (mapping.size_bytes,),
            "typestr": "|u1",
            "version": 3,
        }


class Mapping:
    """The pages of a block in this process; unmapped with the last array over them."""

    def __init__(self, descriptor: int, capacity_bytes: int, *, writable: bool = True) -> None:
        self.address = 0
        self.writable = writable
        self.size_bytes = capacity_bytes + PAGE_BYTES
        self.capacity_bytes = capacity_bytes
        address = _libc.mmap(
            None,
            self.size_bytes,
            mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0),
            mmap.MAP_SHARED,
            descriptor,
            0,
        )
        if address is None or address == _MAP_FAILED:
            code = ctypes.get_errno()
            raise OSError(code, f"mmap of {self.size_bytes} bytes: {os.strerror(code)}")
        self.address = address
        # Only advice: it fails on kernels without huge pages for shared memory.
        _libc.madvise(address, capacity_bytes, _MADV_HUGEPAGE)

    def export(self) -> tuple[_Exporter, Bytes]:
        exporter = _Exporter(self)
        return exporter, np.asarray(exporter)

    def views(self) -> tuple[Bytes, npt.NDArray[np.uint64]]:
        """The bytes, and the word with the number of the transfer they are leased to."""
        _, everything = self.export()
        word = everything[self.capacity_bytes : self.capacity_bytes + 8].view(np.uint64)
        return everything[: self.capacity_bytes], word

    # Bound as a default because a mapping may outlive this module's globals at exit.
    def __del__(self, munmap: Callable[[int, int], int] = _libc.munmap) -> None:
        if self.address:
            munmap(self.address, self.size_bytes)


def map_received(descriptor: int, capacity_bytes: int, *, writable: bool = True) -> Mapping:
    """Map a descriptor that a peer sent.

    Raises:
        ValueError: the descriptor is not a sealed block of that capacity. Without the seal,
            the peer could cut the file, and an access would kill this process with SIGBUS.
        OSError: the kernel refused the mapping.
    """
    actual_bytes = os.fstat(descriptor).st_size
    if capacity_bytes < SMALLEST_BYTES or actual_bytes != capacity_bytes + PAGE_BYTES:
        raise ValueError(f"a block of {capacity_bytes} bytes came as {actual_bytes} bytes")
    if not fcntl.fcntl(descriptor, _F_GET_SEALS) & _SEAL_SHRINK:
        raise ValueError("the block is not sealed against shrinking")
    return Mapping(descriptor, capacity_bytes, writable=writable)


class Block:
    """One memfd and this process's mapping of it."""

    def __init__(self, number: int, capacity_bytes: int) -> None:
        self.number = number
        self.shares = 0  # transfers that other processes read it for
        self.unsafe = False  # a process may read it that will never say so
        self.capacity_bytes = capacity_bytes
        self.descriptor = os.memfd_create("pw-bulk", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.descriptor, capacity_bytes + PAGE_BYTES)
            fcntl.fcntl(self.descriptor, _F_ADD_SEALS, _SEAL_SEAL | _SEAL_SHRINK | _SEAL_GROW)
            self.mapping = Mapping(self.descriptor, capacity_bytes)
        except OSError:
            os.close(self.descriptor)
            raise
        self.bytes, self.word = self.mapping.views()


def _most_descriptors() -> int:
    """Return the most descriptors that this process may have."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft


class _Alias(weakref.ref[_Exporter]):
    """A weak reference whose callback reports that no array aliases the pages any more."""

    __slots__ = ("safe", "unaliased")
    safe: bool
    """Whether no forked process aliases the pages either."""
    unaliased: Callable[[bool], None]


def size_class(size_bytes: int) -> int:
    """The capacity that a transfer of that many bytes is given."""
    return max(SMALLEST_BYTES, 1 << (size_bytes - 1).bit_length())


_pools: set[weakref.ref[BlockPool]] = set()


class BlockPool:
    """Leases warm blocks; belongs to one thread, except for what garbage collection does.

    Args:
        keep_bytes: the bound on idle memory.
        on_drop: called with the number of each block that leaves the pool, so that senders unmap
        it.
    """

    def __init__(self, keep_bytes: int, on_drop: Callable[[int], None]) -> None:
        self.pooled_bytes = 0
        self._keep_bytes = keep_bytes
        descriptors = _most_descriptors()
        self._most = int(descriptors * SHARE)
        self._on_drop = on_drop
        self._blocks: dict[int, Block] = {}
        self._idle: dict[int, deque[Block]] = {}
        self._order: dict[int, Block] = {}  # idle blocks, the longest idle first
        self._lent: dict[int, Block] = {}  # by the address at which it begins
        self._aliases: set[_Alias] = set()
        self._unaliased: deque[weakref.ref[_Exporter]] = deque()
        self._last_number = 0
        _pools.add(weakref.ref(self, _pools.discard))

    @property
    def live_blocks(self) -> int:
        return len(self._blocks)

    @property
    def lent_blocks(self) -> int:
        return len(self._aliases)

    def get(self, number: int) -> Block | None:
        return self._blocks.get(number)

    def lease(self, size_bytes: int, transfer: int, *, sparing: bool = False) -> Block:
        """A block of at least that size that only this transfer may write.

        Args:
            size_bytes: of the transfer.
            transfer: its number.
            sparing: raise rather than use more than `SHARE` of the descriptors.

        Raises:
            OSError: out of memory or descriptors (`NO_DESCRIPTORS`).
        """
        self.reclaim()
        capacity_bytes = size_class(size_bytes)
        stack = self._idle.get(capacity_bytes)
        if stack:
            block = stack.pop()
            del self._order[block.number]
            self.pooled_bytes -= capacity_bytes
        else:
            block = self._make(capacity_bytes, sparing)
        block.word[0] = transfer
        return block

    def _make(self, capacity_bytes: int, sparing: bool) -> Block:
        if sparing and len(self._blocks) >= self._most:
            if not self._order:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            self._drop_oldest()
        number = self._last_number + 1
        try:
            block = Block(number, capacity_bytes)
        except OSError as error:
            if error.errno not in NO_DESCRIPTORS or not self._order:
                raise
            while self._order:
                self._drop_oldest()
            block = Block(number, capacity_bytes)
        self._last_number = number
        self._blocks[number] = block
        return block

    def lend(self, block: Block, size_bytes: int) -> Bytes:
        """Make an array of a completed lease; the block is idle again when its aliases die."""
        block.word[0] = 0
        self._lent[block.mapping.address] = block
        return self.borrow(block.mapping, size_bytes, partial(self._unlent, block))

    def borrow(self, mapping: Mapping, size_bytes: int, unaliased: Callable[[bool], None]) -> Bytes:
        """An array over a mapping.

        `reclaim` calls `unaliased` when its aliases are dead: with False if a forked process may
        still read it.
        """
        exporter, everything = mapping.export()
        alias = _Alias(exporter, self._unaliased.append)
        alias.safe, alias.unaliased = True, unaliased
        self._aliases.add(alias)
        return everything[:size_bytes]

    def restore(self, block: Block) -> None:
        """Take back a lease that no sender has written to, or will."""
        block.word[0] = 0
        self._rest(block)

    def share(self, array: Array) -> Block | None:
        """The lent block that begins where an array does; it is lent until `unshare` at least."""
        block = self._lent.get(array.__array_interface__["data"][0])
        if block is not None:
            block.shares += 1
        return block

    def unshare(self, block: Block, *, safe: bool) -> None:
        """Take back a share; not `safe` if a process may still read it."""
        block.shares -= 1
        block.unsafe = block.unsafe or not safe
        if block.mapping.address not in self._lent and block.number in self._blocks:
            self._rest(block)
            self.reclaim()

    def forked(self) -> None:
        """Mark all lent blocks as read by a forked process; from any thread."""
        for alias in tuple(self._aliases):
            alias.safe = False

    def _unlent(self, block: Block, safe: bool) -> None:
        del self._lent[block.mapping.address]
        block.unsafe = block.unsafe or not safe
        self._rest(block)

    def _rest(self, block: Block) -> None:
        if block.shares:
            return
        if block.unsafe:
            self.retire(block)
            return
        self._idle.setdefault(block.capacity_bytes, deque()).append(block)
        self._order[block.number] = block
        self.pooled_bytes += block.capacity_bytes

    def retire(self, block: Block) -> None:
        """Release a block that a sender may still be writing to; it is never used again."""
        block.word[0] = 0
        del self._blocks[block.number]
        os.close(block.descriptor)
        self._on_drop(block.number)

    def reclaim(self) -> None:
        """Make blocks idle whose aliases died, and drop the longest idle beyond the bound."""
        while self._unaliased:
            alias = self._unaliased.popleft()
            assert isinstance(alias, _Alias)
            self._aliases.discard(alias)
            alias.unaliased(alias.safe)
        while self.pooled_bytes > self._keep_bytes or (
            self._order and len(self._blocks) > self._most
        ):
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        block = self._order.pop(next(iter(self._order)))
        self._idle[block.capacity_bytes].popleft()
        self.pooled_bytes -= block.capacity_bytes
        self.retire(block)

    def close(self) -> None:
        """Close every descriptor; arrays that were lent stay valid as long as they live."""
        for block in self._blocks.values():
            block.word[0] = 0
            os.close(block.descriptor)
        self._blocks.clear()
        self._idle.clear()
        self._order.clear()
        self._lent.clear()
        self._aliases.clear()
        self.pooled_bytes = 0


def _fork() -> None:
    for reference in tuple(_pools):  # a copy: other threads may make pools meanwhile
        pool = reference()
        if pool is not None:
            pool.forked()


# Afterwards as well: another thread may have lent a block between the call and the fork.
os.register_at_fork(before=_fork, after_in_parent=_fork)
