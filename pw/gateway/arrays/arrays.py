"""The arrays of one client of the gateway, and what they consist of.

The client names an array by a handle. What it consists of is one of:

- `Stored`: all shards of one array of the runtime;
- a host value that is not uploaded yet: small ones travel inside the first run that uses them;
- pieces: single shards of other arrays of this client. So taking an array apart, and putting shards
  together, costs no message. A run that needs them gets a view, which the runtime makes
  (`pw.core.programs.program.Kind.VIEW`);
- an error, which every later use raises.

Deleting: an array that was deleted or donated is `gone`, and its shards are dead in all arrays that
have them, as in JAX. A handle that is destructed only forgets the name. The runtime's array is
released when nothing refers to its `Stored` any more.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pw.client.connection.runtime import Runtime
from pw.core.sharding import ArraySpec
from pw.gateway.protocol import statuses, tiles
from pw.gateway.protocol.tiles import Tiles

DEFAULT_MEMORY = "device"
"""JAX's name for the devices' own memory."""
AHEAD_BYTES = 1024
"""Results up to this size are fetched before the script asks, if it has read the one of the last run."""


class ReadHabits:
    """The habits of the script with results of an executable, by their positions.

    Args:
        small: those that can be fetched before the script asks.
    """

    def __init__(self, small: Iterable[int] = ()) -> None:
        self.read: set[int] = set()
        """Results of the last run that the script has read; those of the next run are fetched ahead."""
        self.has_waited = False
        """Whether the script has read a result of the last run, or waited for one, before the next run."""
        self._small = set(small)

    def reads(self, position: int) -> None:
        """Remember that the script has read this result."""
        self.has_waited = True
        if position in self._small:
            self.read.add(position)

    def donates(self, position: int) -> None:
        """Fetch this result no more before the script asks: what a fetch reads cannot be donated."""
        self._small.discard(position)
        self.read.discard(position)


class Stored:
    """An array of the runtime; released when nothing refers to it any more."""

    __slots__ = (
        "__weakref__",
        "_runtime",
        "ahead",
        "holders",
        "number",
        "origin",
        "reads",
        "spec",
        "was_read",
    )

    def __init__(self, runtime: Runtime, number: int, spec: ArraySpec) -> None:
        self._runtime = runtime
        self.number = number
        self.spec = spec
        self.holders = 0
        """Arrays of the client that consist of it."""
        self.reads = 0
        """Fetches in flight."""
        self.origin: tuple[ReadHabits, int] | None = None
        """Habits of the script with results of its executable, and the position among them."""
        self.was_read = False
        self.ahead: Future[Any] | None = None
        """The fetch of its first shard that began before the script asked."""

    def is_read(self) -> None:
        """Remember that the script reads this result of its executable."""
        self.was_read = True
        if self.origin is not None:
            habits, position = self.origin
            habits.reads(position)

    def is_awaited(self) -> None:
        """Remember that the script waits for a result of its executable."""
        if self.origin is not None:
            self.origin[0].has_waited = True

    def is_donated(self) -> None:
        """Remember that the script donates this result of its executable."""
        if self.origin is not None:
            habits, position = self.origin
            habits.donates(position)

    def __del__(self) -> None:
        if self.origin is not None and self.ahead is not None and not self.was_read:
            habits, position = self.origin
            habits.read.discard(position)  # it was fetched in vain
        self._runtime.release(self.number, self.spec.size_bytes)

    @property
    def may_be_donated(self) -> bool:
        """Whether one array only consists of it, and nothing reads it."""
        return self.holders == 1 and not self.reads


class ProxyConstant:
    """The value that several arrays of one small host value share."""

    __slots__ = ("is_recent", "stored", "was_used")

    def __init__(self) -> None:
        self.stored: Stored | None = None
        """The value on its devices, once a second run has used it."""
        self.was_used = False
        self.is_recent = False
        """Whether a run has used it lately."""

    def keep(self, stored: Stored) -> None:
        """Consist of this array of the runtime, which is not donated then."""
        stored.holders += 1
        self.stored = stored

    def release(self) -> None:
        """Let go of the array of the runtime."""
        if self.stored is not None:
            self.stored.holders -= 1
            self.stored = None


@dataclass(slots=True, eq=False)
class ProxyArray:
    """An array of the client."""

    dtype: str
    shape: tuple[int, ...]
    shard_shape: tuple[int, ...]
    devices: tuple[int, ...]
    """JAX's numbers; shards have the order of their devices."""
    memory: str
    is_replicated: bool
    _stored: Stored | None = None
    value: np.ndarray[Any, Any] | None = None
    """Value in the form of its spec: one shard if it is replicated, else all shards side by side."""
    pieces: tuple[tuple[ProxyArray, int], ...] = ()
    parts: tuple[ProxyArray, ...] = ()
    """Shards on each island, if there are several, once a run has needed or made them."""
    error: BaseException | None = None
    gone: bool = False
    dead: set[int] = field(default_factory=set)
    """Positions of shards that were deleted as shards of another array."""
    used: bool = False
    """Whether the value has travelled inside a run."""
    constant: ProxyConstant | None = None
    """Small value that this array shares with equal ones; None if it shares none."""
    views: dict[ArraySpec, Stored] = field(default_factory=dict)
    """Arrays of the runtime that have the same shards under other specs."""
    sharding: bytes | None = None
    """Serialized `xla.OpSharding`; None if it is not known which part of the array each shard is."""

    @property
    def stored(self) -> Stored | None:
        """All shards of this array of the runtime, in order."""
        return self._stored

    def consist_of(self, stored: Stored) -> None:
        """Consist of this array of the runtime from now on."""
        stored.holders += 1
        self._stored = stored

    def __del__(self) -> None:
        if self._stored is not None:
            self._stored.holders -= 1

    @property
    def tiles(self) -> Tiles:
        """Which part of it each device has. Raises Status if that is not known."""
        return tiles.of(
            self.shape, len(self.devices), self.sharding, is_replicated=self.is_replicated
        )

    @property
    def is_deleted(self) -> bool:
        """Whether it, or one of its shards, was deleted or donated, also as part of another array."""
        return (
            self.gone
            or bool(self.dead)
            or any(source.is_dead(position) for source, position in self.pieces)
        )

    def is_dead(self, position: int) -> bool:
        """Whether one shard was deleted or donated."""
        if self.gone or position in self.dead:
            return True
        if not self.pieces:
            return False
        source, there = self.pieces[position]
        return source.is_dead(there)

    def delete(self) -> None:
        """Let go of what it consists of; its shards are deleted in other arrays, too."""
        self.gone = True
        for source, position in self.pieces:
            source.dead.add(position)
        if self._stored is not None:
            self._stored.holders -= 1
        self._stored = self.value = self.constant = None
        self.pieces = self.parts = ()
        self.views.clear()

    def check(self) -> None:
        """Raise the array's error, or that it is deleted."""
        if self.error is not None:
            raise self.error
        if self.is_deleted:
            raise statuses.deleted()
        for source, _ in self.pieces:
            if source.error is not None:
                raise source.error

    def root(self, position: int) -> tuple[ProxyArray, int]:
        """Return the array that has the shard at this position, and the position there."""
        array = self
        while array.pieces:
            array, position = array.pieces[position]
        return array, position

    def roots(self) -> Iterator[ProxyArray]:
        """Yield the arrays that its shards belong to, each once."""
        if not self.pieces:
            yield self
            return
        seen: set[int] = set()
        for position in range(len(self.pieces)):
            array, _ = self.root(position)
            if id(array) not in seen:
                seen.add(id(array))
                yield array

    def part(
        self, positions: Sequence[int], pieces: Iterable[tuple[ProxyArray, int]]
    ) -> ProxyArray:
        """Return the array of the shards at these positions, which `pieces` are."""
        devices = tuple(self.devices[position] for position in positions)
        shape = self.shard_shape
        part = ProxyArray(self.dtype, shape, shape, devices, self.memory, self.is_replicated)
        part.pieces = tuple(pieces)
        return part

    def host_shard(self, position: int) -> np.ndarray[Any, Any] | None:
        """Return a shard that lies in this process still; None if it is on its device."""
        value = self.value
        if value is None or self.is_replicated or len(self.devices) == 1 or not self.shard_shape:
            return value
        rows = self.shard_shape[0]
        return value[position * rows : (position + 1) * rows]


class ProxyArrays(dict[int, ProxyArray]):
    """The client's arrays by their handles."""

    def __init__(self) -> None:
        super().__init__()
        self._next = 1 << 63

    def name(self, array: ProxyArray, handle: int = 0) -> int:
        """Add an array under the client's handle, or a new one; return the handle."""
        if not handle:
            handle, self._next = self._next, self._next + 1
        self[handle] = array
        return handle

    def fail(self, handle: int, error: BaseException) -> None:
        """Let later uses of this handle raise `error`."""
        self[handle] = ProxyArray("bool", (), (), (), "", True, error=error)

    def find(self, handle: int) -> ProxyArray:
        """Return an array, deleted or not. Raises Status, or the array's error."""
        array = self.get(handle)
        if array is None:
            raise statuses.not_found(f"there is no array {handle:#x}")
        if array.error is not None:
            raise array.error
        return array

    def usable(self, handle: int) -> ProxyArray:
        """Return an array that has a value. Raises Status, or the array's error."""
        array = self.find(handle)
        array.check()
        return array


def memory_of(kind: str) -> str:
    """Return the name in a spec of one of JAX's kinds of memory."""
    return "" if kind == DEFAULT_MEMORY else kind
