"""The promise that no device has more bytes of a tenant or a slice than it may have (in `quotas` and `bounds`).

With the profile's `slice_memory`, users ask for slices with a bound. The monitor follows the bounds as the
controller tells schedulers of them, and looks at their totals after each run, upload or lease that adds to
them. A bound that was lowered takes nothing away, so only what is added is compared with it. The hosts are
asked, too: what they hold for arrays of a tenant, or on a slice, is counted for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

import numpy as np
from msgspec.structs import replace

from pw.core import messages as msg
from pw.core.ids import Address, client_of
from pw.core.sharding import DeviceAddress
from pw.testing.sim.cluster import SimCluster
from pw.testing.sim.shards import Shards
from pw.testing.sim.world import Violation

SIZES = (1 << 14, 1 << 16, 1 << 17, 1 << 18)
"""Bounds of slices that users ask for, in bytes; a large array has 32 KiB."""


def random_bound(random: Random, request: msg.AllocateSlice, share: float) -> msg.AllocateSlice:
    """Return a request, of a share of all with a bound of memory."""
    if random.random() >= share:
        return request
    return replace(request, memory_bytes=random.choice(SIZES))


def profile_counts(profile: Any) -> bool:
    """Whether bounds are looked at: those of slices where no loss has more come back than there was."""
    return bool(profile.quotas or (profile.slice_memory and not profile.crashes))


class MemoryBoundsMonitor:
    """Watches what tenants and slices have on devices."""

    def __init__(self, cluster: SimCluster) -> None:
        self._cluster = cluster
        self._world = world = cluster.world
        self._tenants: dict[int, str] = {}
        self._bounds: dict[tuple[str, str | int], int | None] = {}
        """Bytes on a device that the scheduler of each island was told, for each tenant and slice."""
        self._watched: dict[str, Any] = {}
        """Memory of each island that is watched."""
        self._placing: msg.ArrayPlaced | None = None
        """Message of the array that is placed now."""
        self._over: set[int] = set()
        """Slices that count too much, because of such an array, or of a refused or donated one."""
        self._is_on = profile_counts(world.profile)
        if self._is_on:
            world.watch_handled(msg.AddClient, self._hear)
            world.watch_handled(msg.BoundMemory, self._hear_of_slice)
            world.watch_handled(msg.ArrayPlaced, self._hear_of_array)

    def watch(self, island: str) -> None:
        """Watch the memory of an island from now on."""
        scheduler: Any = self._cluster.schedulers.get(island)
        memory: Any = None if scheduler is None else scheduler.admission.memory
        is_watched = memory is None or self._watched.get(island) is memory
        if is_watched or not self._is_on:
            return
        self._watched[island] = memory
        reserve, end, place = memory.reserve, memory.end, memory.place
        set_aside, move = memory.set_aside, memory.move
        pending: Any = scheduler.admission.pending
        check = partial(self._check, island, memory, pending)

        def reserved(program: int, args: Any, results: Any) -> Any:
            claim = reserve(program, args, results)
            if claim is not None and claim.needs is not None:
                adds = np.asarray(claim.peaks) > 0
                check(client_of(program), claim.devices[adds], "a run")
            return claim

        def ended(claim: Any) -> None:
            # A donated array counts beside the result that has its bytes until earlier readers, or its maker,
            # have ended.
            for _, buffer in claim.donated:
                if buffer.readers > 1 or not buffer.is_counted:
                    self._over.update(total.slice for total in buffer.on.totals)
            end(claim)
            self._check_slices(island, memory, pending, "results of a run")

        def placed(
            array: int, devices: Any, shard_bytes: int, totals: Any = None, *, off: bool = False
        ) -> Any:
            buffer, message = place(array, devices, shard_bytes, totals, off=off), self._placing
            assert message is not None
            if off or buffer.on.totals != memory.totals.of(client_of(array), message.slice):
                return buffer  # it counts later
            if message.is_back:
                self._over.add(message.slice)
            else:
                check(client_of(array), buffer.on.devices, "an upload")
            return buffer

        def moved(buffer: Any, totals: Any) -> None:
            move(buffer, totals)
            arrays = [one for one, other in memory.buffers.items() if other is buffer]
            if not pending.are_read(arrays):
                # It is refused or deleted, and counts until its hosts have dropped it.
                self._over.update(total.slice for total in totals)
                return
            self._world.checked["uploads that waited"] += 1
            check(client_of(arrays[0]), buffer.on.devices, "an upload that has waited")

        def aside(room: Any, size_bytes: int) -> None:
            set_aside(room, size_bytes)
            if size_bytes > 0:
                check(room.client, room.devices, "a lease")

        memory.reserve, memory.end, memory.place = reserved, ended, placed
        memory.move, memory.set_aside = moved, aside

    def _hear(self, sender: Address, to: Address, message: msg.AddClient) -> Callable[[], None]:
        island = to.actor.partition("/")[2]

        def note() -> None:
            self._tenants[message.client] = message.tenant
            self._bounds[island, message.tenant] = message.device_memory_bytes

        return note

    def _hear_of_slice(
        self, sender: Address, to: Address, message: msg.BoundMemory
    ) -> Callable[[], None]:
        island = to.actor.partition("/")[2]

        def note() -> None:
            self._bounds[island, message.slice] = message.memory_bytes or None
            self.watch(island)

        return note

    def _hear_of_array(self, sender: Address, to: Address, message: msg.ArrayPlaced) -> None:
        self._placing = message

    # --- checks ----------------------------------------------------------------------------------

    def _check(
        self, island: str, memory: Any, pending: Any, client: int, devices: Any, what: str
    ) -> None:
        """Compare what a client's tenant has with its bound, on the devices on which it has more now."""
        self._check_slices(island, memory, pending, what)
        if not self._world.profile.quotas:
            return
        tenant = self._tenants[client]
        bound_bytes = self._bounds[island, tenant]
        self._world.checked["tenants' memory"] += 1
        memory.settle()
        total = memory.totals.by_tenant[tenant]
        most_bytes = int(total.used[devices].max(initial=0))
        if bound_bytes is not None and most_bytes > bound_bytes:
            words = f"{most_bytes} bytes on a device of {island}, with {what}"
            raise Violation("quotas", f"{tenant} has {words}, and may have {bound_bytes}")
        for device, size_bytes in self._held(island, memory, pending, tenant).items():
            if size_bytes > memory.used_of(total, (device,)):
                words = f"{device} has {size_bytes} bytes of {tenant}, and fewer are counted"
                raise Violation("quotas", words)

    def _check_slices(self, island: str, memory: Any, pending: Any, what: str) -> None:
        """Compare what lies on each slice with its bound."""
        memory.settle()
        for slice_ in memory.totals.by_slice:
            if self._bounds.get((island, slice_)) is None:
                raise Violation("bounds", f"slice {slice_:x} has a bound, and was given back")
        for (where, slice_), bound_bytes in self._bounds.items():
            if where != island or not isinstance(slice_, int) or bound_bytes is None:
                continue
            self._world.checked["slices' memory"] += 1
            total = memory.totals.by_slice.get(slice_)
            most_bytes = 0 if total is None else int(total.used.max(initial=0))
            if most_bytes <= bound_bytes:
                self._over.discard(slice_)
            elif slice_ not in self._over:
                words = f"{most_bytes} bytes on a device of {island}, with {what}"
                raise Violation(
                    "bounds", f"slice {slice_:x} has {words}, and may have {bound_bytes}"
                )
            least = self._held(island, memory, pending, slice_) + self._reserved(memory, slice_)
            for device, size_bytes in least.items():
                if total is None or size_bytes > memory.used_of(total, (device,)):
                    words = f"{device} has {size_bytes} bytes of slice {slice_:x}, and fewer count"
                    raise Violation("bounds", words)

    @staticmethod
    def _reserved(memory: Any, slice_: int) -> Counter[DeviceAddress]:
        """Return what runs in flight may take on a slice, by their programs, temporaries left out."""
        sizes: Counter[DeviceAddress] = Counter()
        for claim in memory.reserved:
            for part in () if claim.needs is None else claim.needs.memory.slices:
                for group, peak in zip(part.groups, part.peak_bytes, strict=True):
                    sizes.update(dict.fromkeys(group if part.slice == slice_ else (), peak))
        return sizes

    def _held(
        self, island: str, memory: Any, pending: Any, whose: str | int
    ) -> Counter[DeviceAddress]:
        """Return what hosts hold on each device for arrays that count for a tenant, or on a slice.

        An upload without room counts later. So does the result of a leased launch that is the same bytes.
        """
        sizes: Counter[DeviceAddress] = Counter()
        later = {part for upload in pending for part in upload.buffer.parts()}
        seen: set[int] = set()
        for name in self._cluster.schedulers[island].members.hosts:
            host = next(one for one in self._cluster.hosts if one.name == name)
            for number, entry in () if host.node is None else host.store.arrays.items():
                buffer, shards = memory.buffers.get(number), entry.value.payload
                if buffer is None or not isinstance(shards, Shards):
                    continue
                if isinstance(whose, int):
                    # The bytes of a result or a view may be those of another slice.
                    own = {total.slice for total in buffer.on.totals}
                    is_here = entry.spec.placement.slice == whose
                    counts = is_here and whose in own and buffer.shards is None
                else:
                    counts = self._tenants.get(client_of(number)) == whose
                parts = buffer.parts() if counts else ()
                if not (counts and later.isdisjoint(parts)):
                    continue
                if not all(part.is_counted for part in parts):
                    continue  # its run has not ended, or it is in host memory
                for ordinal, shard in shards.items():
                    if id(shard) not in seen:
                        seen.add(id(shard))
                        sizes[DeviceAddress(name, ordinal)] += shard.nbytes
        return sizes
