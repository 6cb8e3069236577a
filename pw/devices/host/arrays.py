"""The table of arrays that clients hold on a host.

An entry appears when the launch that makes the array arrives, when its client uploads it, or when
the controller restores it. It goes when a `Discard` says so, in launch order. A run that is
replayed, or an array that is restored, replaces the entry.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from pw.core.errors import ArrayDeleted, ErrorReport
from pw.core.ids import client_of, serial_of
from pw.core.landing import Bulk, Bytes
from pw.core.messages import ArrayMemory
from pw.core.sharding import ArraySpec, Box, DeviceAddress, host_boxes
from pw.devices.host.backend import Backend
from pw.devices.host.replica_memory import Replica
from pw.devices.host.replicas import Gathering, Replicas
from pw.devices.host.spill_files import SpillFiles
from pw.devices.host.value import Value

DROPPED_KEPT = 8192
"""Dropped arrays that are remembered, some 400 bytes each, so that a request that is on its way gets the
reason."""


class Entry(msgspec.Struct, eq=False):
    """An array's part on this host."""

    array: int
    value: Value
    spec: ArraySpec
    devices: tuple[DeviceAddress, ...]
    submitted: bool = False
    """The op that makes the value has been submitted, so that it can be watched."""
    arrived: bool = False
    """True if the array was uploaded or restored, and all of its part is here."""
    is_reported: bool = False
    """The controller knows that the value was lost."""
    landing: int | None = None
    """The bulk transfer of its upload."""
    gathering: Gathering | None = None
    """The search for its replicas."""
    file: Any = None
    """The array in a file, as `SpillFiles` has written it; it stays when the value comes back."""


class Arrays(dict[int, Entry]):
    """The entries of a host by their arrays."""

    def __init__(
        self,
        host: str,
        bulk: Bulk,
        replicas: Replicas,
        files: SpillFiles | None = None,
        dropped_kept: int = DROPPED_KEPT,
    ) -> None:
        super().__init__()
        self.files = files
        """Files of arrays that have left host memory; None if they stay there."""
        self.dropped_kept = dropped_kept
        """Of how many dropped arrays the reasons are remembered."""
        self._host = host
        self._bulk = bulk
        self._replicas = replicas
        self._dropped: OrderedDict[int, tuple[str, ArraySpec | None]] = OrderedDict()
        """Reason and spec of each dropped array; no spec if the array had none here."""

    def expect(
        self, array: int, value: Value, spec: ArraySpec, devices: tuple[DeviceAddress, ...]
    ) -> Entry:
        """Add an array that is going to be made, in place of an earlier entry."""
        if (old := self.get(array)) is not None:
            self._abandon(old)
        entry = self[array] = Entry(array, value, spec, devices)
        return entry

    def drop(self, array: int, why: str) -> None:
        """Remove an array, and remember why."""
        entry = self.pop(array, None)
        self._dropped[array] = (why, None if entry is None else entry.spec)
        if len(self._dropped) > self.dropped_kept:
            self._dropped.popitem(last=False)
        if entry is not None:
            self._abandon(entry)

    def _abandon(self, entry: Entry) -> None:
        """Stop the upload or the restore of an array, and delete its file."""
        if entry.landing is not None:
            self._bulk.cancel(entry.landing)
            entry.landing = None
        if entry.gathering is not None:
            self._replicas.cancel(entry.gathering)
            entry.gathering = None
        if self.files is not None and entry.file is not None:
            self.files.delete(entry.file)

    def why_missing(self, array: int) -> ErrorReport | None:
        """Return why an array was dropped, None if it may still come."""
        if array in self or array not in self._dropped:
            return None
        why, spec = self._dropped[array]
        what = "the array" if spec is None else f"the array {spec.short}"
        words = f"{what} was {why} before its value was asked for; keep a copy, copy.copy(x)"
        return ErrorReport.of(ArrayDeleted(words), self._host)

    def copies(self, array: int) -> Mapping[Box, Bytes]:
        """Return the boxes of an array of which this host has copies, as of a client that is suspended."""
        return self._replicas.memory.of(array)

    def boxes(self, entry: Entry) -> list[tuple[Box, tuple[int, ...]]]:
        """Return the boxes of an array on this host, each with its positions in the mesh."""
        return host_boxes(entry.spec, entry.devices, self._host)

    def size_bytes(self) -> int:
        """Return the size of all shards on this host; one that several arrays name counts once."""
        return sum(entry.spec.shard_bytes for entry, _ in self._shards())

    def on_devices(self) -> dict[int, list[ArrayMemory]]:
        """Return the arrays on each device of this host; a shard that several name counts for the first."""
        memory: defaultdict[int, list[ArrayMemory]] = defaultdict(list)
        for entry, ordinal in self._shards():
            spec = entry.spec
            if not spec.memory and not entry.value.is_away:
                whose = client_of(entry.array), serial_of(entry.array)
                memory[ordinal].append(ArrayMemory(*whose, spec.short, "", spec.shard_bytes))
        return memory

    def off_devices(self, *, in_files: bool) -> Counter[int]:
        """Return the bytes of each device's shards that lie in files, or else of those in host memory."""
        total: Counter[int] = Counter()
        for entry, ordinal in self._shards():
            is_off = bool(entry.spec.memory) or entry.value.is_away
            if is_off and entry.value.is_in_file == in_files:
                total[ordinal] += entry.spec.shard_bytes
        return total

    def _shards(self) -> Iterator[tuple[Entry, int]]:
        """Return each shard on this host: the array that names it, and its device."""
        seen: set[object] = set()
        for entry in self.values():
            value, buffers = entry.value, entry.value.buffers or {}
            for device in entry.devices:
                ordinal = device.ordinal
                if device.host != self._host:
                    continue
                shard = buffers.get(ordinal, (value, ordinal))
                if shard not in seen:
                    seen.add(shard)
                    yield entry, ordinal

    def snapshots(
        self, backend: Backend, held: set[tuple[int, Box]], room_bytes: int = 0
    ) -> Iterator[Replica]:
        """Return the boxes that are ready, except those that are `held` already.

        Those in files come last, as many as `room_bytes` of host memory have room for beside those there.
        """
        for array, entry in sorted(self.items(), key=lambda one: one[1].value.is_in_file):
            boxes, value = self.boxes(entry), entry.value
            if not entry.submitted:
                continue  # its value is not known, even if there is one already
            if all((array, box) in held for box, _ in boxes):
                continue
            size_bytes = entry.spec.shard_bytes * len(boxes) if value.is_away else 0
            if value.is_in_file and size_bytes > room_bytes:
                continue
            room_bytes -= size_bytes
            views = backend.snapshot(value, entry.spec, entry.devices) or ()
            yield from (
                Replica(array, box, view) for box, view in views if (array, box) not in held
            )
