"""Uploads that would take their tenant or their slice beyond what it may have on a device.

The bytes of an upload come to its hosts whatever the scheduler says. So an upload without room is counted for
the island at once, and for its tenant and its slice when it fits both; the runs that read it wait until then.
If nothing of the tenant, or on the slice, can free memory any more, the upload is refused: its hosts drop it.

A launch under a lease may have read it already, and have returned its bytes as a result. Then these count for
the tenant and the slice as soon as the upload waits no more: when it fits, is refused, or is deleted.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from pw.core.ids import arrays_in, client_of
from pw.core.messages import ArrayPlaced
from pw.core.sharding import DeviceAddress
from pw.sched.island.buffers import Buffer
from pw.sched.island.memory import DeviceMemory
from pw.sched.island.memory_totals import Total


@dataclass(slots=True, eq=False)
class PendingUpload:
    """An upload that is not counted for its tenant and its slice yet."""

    array: int
    buffer: Buffer
    devices: tuple[DeviceAddress, ...]
    totals: tuple[Total, ...]
    """Totals that count it when it fits, that of the island last."""
    total: Total
    """Total in which it has no room: that of its slice, or that of its tenant."""
    passed: int = 0
    """Number of runs of this total, or of the client, that were admitted while the upload waited."""
    hopes: frozenset[int] | None = None
    """Uploads in flight when nothing else of the total could free memory for the first time."""
    spilled_at: int = -1
    """Value of `DeviceMemory.frees` when arrays were last looked for that could leave for it."""

    def count(self, memory: DeviceMemory) -> None:
        """Count its bytes in all totals; results may have them when the upload is deleted."""
        memory.move(self.buffer, self.totals)


@dataclass(eq=False, repr=False)
class PendingUploads:
    """The uploads of one island that wait for room, the oldest first."""

    _uploads: dict[int, PendingUpload] = field(default_factory=dict)
    _tried_at: int = -1
    """Value of `DeviceMemory.frees` when none of them fitted."""

    def __bool__(self) -> bool:
        return bool(self._uploads)

    def __iter__(self) -> Iterator[PendingUpload]:
        return iter(self._uploads.values())

    def place(self, memory: DeviceMemory, placed: ArrayPlaced) -> PendingUpload | None:
        """Count an array that no run makes; return it if it has no room."""
        devices, shard_bytes = placed.devices, placed.shard_bytes
        totals = memory.totals.of(client_of(placed.array), placed.slice)
        short = None if placed.is_back else self._short(memory, totals, devices, shard_bytes)
        if short is None:
            memory.place(placed.array, devices, shard_bytes, totals)
            return None
        buffer = memory.place(placed.array, devices, shard_bytes, totals[-1:])
        upload = PendingUpload(placed.array, buffer, devices, totals, short)
        self._uploads[placed.array] = upload
        return upload

    def _short(
        self,
        memory: DeviceMemory,
        totals: tuple[Total, ...],
        devices: tuple[DeviceAddress, ...],
        shard_bytes: int,
    ) -> Total | None:
        """Return the first total, besides that of the island, in which shards of this size have no room."""
        for total in totals[:-1]:
            if not self.fits(memory, total, devices, shard_bytes):
                return total
        return None

    @staticmethod
    def fits(
        memory: DeviceMemory, total: Total, devices: tuple[DeviceAddress, ...], shard_bytes: int
    ) -> bool:
        """Whether a tenant or a slice may have shards of this size on devices, beside what it has there."""
        bound_bytes = total.bound_bytes
        return bound_bytes is None or memory.used_of(total, devices) + shard_bytes <= bound_bytes

    def try_again(self, memory: DeviceMemory) -> bool:
        """Count the uploads for which there is room now; return whether any waits no more."""
        if self._tried_at == memory.frees:
            return False
        before = len(self._uploads)
        full: set[Total] = set()  # those in which an older upload has no room
        for array, upload in list(self._uploads.items()):
            if memory.buffers.get(array) is upload.buffer:  # else it was deleted, or donated
                if not full.isdisjoint(upload.totals):
                    continue
                short = self._short(
                    memory, upload.totals, upload.devices, upload.buffer.shard_bytes
                )
                if short is not None:
                    upload.total = short
                    full.add(short)
                    continue
            upload.count(memory)
            del self._uploads[array]
        self._tried_at = memory.frees
        return len(self._uploads) < before

    def drop(self, array: int) -> None:
        """Let an upload wait no more, because it is refused."""
        self._uploads.pop(array, None)

    def clear(self) -> None:
        """Forget all: the island has left its epoch."""
        self._uploads.clear()
        self._tried_at = -1

    # --- runs beside them ----------------------------------------------------------------------------

    def are_read(self, args: Sequence[int | bytes]) -> bool:
        """Whether a run reads one of them."""
        return not self._uploads.keys().isdisjoint(arrays_in(args))

    def passed_by(self, client: int, totals: Collection[Total]) -> None:
        """A run of a client, which these totals count, was admitted."""
        for upload in self._uploads.values():
            upload.passed += upload.total in totals or client_of(upload.array) == client

    def of(self, total: Total) -> Iterator[PendingUpload]:
        """Yield the uploads that have no room in a total, the oldest first."""
        return (upload for upload in self._uploads.values() if upload.total is total)

    def totals(self) -> Iterator[Total]:
        """Yield the totals in which an upload has no room."""
        return (upload.total for upload in self._uploads.values())
