"""Moves arrays between the devices of this host, its memory and its files, as the scheduler of the island says.

Theory of operation. The scheduler decides (`pw.sched.island.residency`). `Spill` comes in launch order, so
launches before it read the array on the devices. The array's value is replaced by a copy in host memory when
the copy is complete; then its bytes on the devices are free, and the scheduler hears of it. A launch that reads
such an array brings it back, in front of its own ops: its memory was reserved with the run.

Large uploads stay in host memory until a run reads them, because they are not admitted.

From host memory an array goes to a file in the same way. The value is replaced when the file is complete; until
then, and if it cannot be written, the array stays where it is. The file stays as long as the array, which never
changes: if the array leaves again, nothing is written. The files are `pw.devices.host.spill_files`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from msgspec.structs import replace

from pw.core.actors.actor import Env
from pw.core.errors import ErrorReport
from pw.core.ids import Address
from pw.core.messages import SMALL_UPLOAD_BYTES, Spilled
from pw.core.programs.plan import BoxCopy
from pw.core.sharding import ArraySpec
from pw.devices.host.arrays import Arrays, Entry
from pw.devices.host.backend import Backend, Move, Op, Read, Watch, relative
from pw.devices.host.spill_files import SpillFiles
from pw.devices.host.value import AwayValue, FileValue, Value

HOST_MEMORY = "pinned_host"
"""JAX's name of the memory in which arrays are kept that have left the devices."""


@dataclass(frozen=True, slots=True)
class Spilling:
    """Work: arrays of one client leave the devices, or the memory of the host."""

    epoch: int
    arrays: tuple[int, ...]
    scheduler: Address
    to_files: bool = False


@dataclass(eq=False, repr=False)
class Tiers:
    """The arrays of a host that lie in its memory and its files, and their way there and back.

    Args:
        env: the environment of the store.
        backend: devices of the host.
        arrays: the table of arrays.
        files: where arrays go that leave host memory; None if they stay there.
        spill_bytes: host memory for arrays that leave the devices; 0 if they stay there.
        small_bytes: size of a shard below which an upload goes to the devices at once.
    """

    env: Env
    backend: Backend
    arrays: Arrays
    files: SpillFiles | None = None
    spill_bytes: int = 0
    small_bytes: int = SMALL_UPLOAD_BYTES
    _has_warned: bool = field(default=False, init=False)
    """True if a file could not be written, and the log says so."""

    def value_of_upload(self, spec: ArraySpec) -> Value:
        """Return a new value for an array that is made from bytes in host memory."""
        if self.spill_bytes and not spec.memory and spec.shard_bytes >= self.small_bytes:
            return AwayValue()
        return Value()

    @staticmethod
    def lies(spec: ArraySpec, value: Value) -> ArraySpec:
        """Return the spec of an array with the memory in which a value of it lies."""
        return replace(spec, memory=HOST_MEMORY) if value.is_away else spec

    def leave(self, work: Spilling) -> list[Op]:
        """Return ops that copy arrays to host memory; the scheduler hears when they have left the devices."""
        ops: list[Op] = []
        missing = 0
        kept: list[int] = []

        def copied(entry: Entry, value: Value, away: Value, error: ErrorReport | None) -> None:
            nonlocal missing
            if error is None and entry.value is value:
                entry.value = away
                self.env.count("bytes_spilled", self._size_bytes(entry))
            elif error is not None and value.error is None:
                kept.append(entry.array)
            missing -= 1
            if not missing:
                answer()

        def answer() -> None:
            gone = tuple([array for array in work.arrays if array not in kept])
            self.env.send(work.scheduler, Spilled(work.epoch, gone, tuple(kept)))

        for array in work.arrays:
            entry = self.arrays.get(array)
            if entry is None or entry.value.is_away or entry.value.error is not None:
                continue  # nothing of it is on the devices
            away = AwayValue()
            missing += 1
            done = partial(copied, entry, entry.value, away)
            ops += (self._move(entry, entry.value, away), Watch((away,), done))
        if not missing:
            answer()
        return ops

    def write(self, work: Spilling) -> None:
        """Write arrays from host memory to files, one after the other; the scheduler hears of each."""
        arrays = deque(work.arrays)

        def go_on() -> None:
            while arrays:
                entry = self.arrays.get(arrays[0])
                if entry is not None and self._is_in_memory(entry.value):
                    if entry.file is None:
                        self._write(entry, written)
                        return
                    entry.value = FileValue(entry.file)
                answer(kept=False)

        def written(*, kept: bool) -> None:
            answer(kept=kept)
            go_on()

        def answer(*, kept: bool) -> None:
            array = arrays.popleft()
            gone, stays = ((), (array,)) if kept else ((array,), ())
            self.env.send(work.scheduler, Spilled(work.epoch, gone, stays))

        go_on()

    @staticmethod
    def _is_in_memory(value: Value) -> bool:
        """Whether a value lies in host memory, and belongs on devices."""
        return value.is_away and not value.is_in_file and value.error is None

    def _write(self, entry: Entry, done: Callable[..., None]) -> None:
        """Write an array to a file; `done` says whether it was `kept` in host memory."""
        files, value, boxes = self.files, entry.value, self.arrays.boxes(entry)
        if files is None:
            done(kept=True)
            return

        def read(views: list[np.ndarray[Any, Any]] | ErrorReport) -> None:
            if isinstance(views, ErrorReport):
                done(kept=value.error is None)
                return
            parts = [
                (positions, relative(box), view)
                for (box, positions), view in zip(boxes, views, strict=True)
            ]
            files.write(parts, entry.devices, written)

        def written(file: Any) -> None:
            if isinstance(file, ErrorReport):
                self.env.count("files_of_arrays_failed")
                if not self._has_warned:
                    self._has_warned = True
                    self.env.log("warning", "arrays stay in host memory", why=file.message)
            elif self.arrays.get(entry.array) is not entry or entry.value is not value:
                files.delete(file)  # the array was deleted meanwhile
            else:
                entry.file, entry.value = file, FileValue(file)
                self.env.count("file_bytes_written", self._size_bytes(entry))
            done(kept=isinstance(file, ErrorReport))

        wanted = [(positions[0], relative(box)) for box, positions in boxes]
        lies = self.lies(entry.spec, value)
        self.backend.submit([Read(value, wanted, lies, entry.devices, read)])

    def bring_back(self, entry: Entry) -> Move:
        """Return the op that moves an array to its devices again; its new value may be read by later ops."""
        away, entry.value = entry.value, Value()
        self.env.count("bytes_returned", self._size_bytes(entry))
        if away.is_in_file:
            self.env.count("file_bytes_read", self._size_bytes(entry))
        return self._move(entry, away, entry.value)

    def _move(self, entry: Entry, source: Value, result: Value) -> Move:
        """Return the op that copies each shard of an array to the other memory beside its device."""
        spec, devices = entry.spec, entry.devices
        box = tuple([(0, size) for size in spec.sharding.shard_shape(spec.shape)])
        host = self.env.address.node
        pieces = tuple(
            [
                BoxCopy(position, box, (position,), box)
                for position, device in enumerate(devices)
                if device.host == host
            ]
        )
        lies, goes = self.lies(spec, source), self.lies(spec, result)
        return Move(source, lies, devices, result, goes, devices, pieces)

    def _size_bytes(self, entry: Entry) -> int:
        """Return the bytes of an array on this host."""
        host = self.env.address.node
        return entry.spec.shard_bytes * sum(device.host == host for device in entry.devices)
