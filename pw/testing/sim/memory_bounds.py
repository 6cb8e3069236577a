"""The promise that no device has more bytes of a tenant or a slice than it may have (in `quotas` and `bounds`).

With the profile's `slice_memory`, users ask for slices with a bound. The monitor follows the bounds as the
controller tells schedulers of them, and looks at their totals after each run, upload or lease that adds to
them. A bound that was lowered takes nothing away, so only what is added is compared with it. The hosts are
asked, too: what they hold for arrays of a tenant, or on a slice, is counted for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Set
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
        self._is_back = False
        """True while an array is placed that recovery brings back: it counts whatever its tenant may have."""
        if world.profile.quotas or world.profile.slice_memory:
            world.watch_handled(msg.AddClient, self._hear)
            world.watch_handled(msg.BoundMemory, self._hear_of_slice)
            world.watch_handled(msg.ArrayPlaced, self._placing)

    def watch(self, island: str) -> None:
        """Watch the memory of an island from now on."""
        scheduler: Any = self._cluster.schedulers.get(island)
        memory: Any = None if scheduler is None else scheduler.admission.memory
        profile = self._world.profile
        is_watched = memory is None or self._watched.get(island) is memory
        if is_watched or not (profile.quotas or profile.slice_memory):
            return
        self._watched[island] = memory
        reserve, place = memory.reserve, memory.place
        set_aside, move = memory.set_aside, memory.move
        waiting: set[int] = set()  # uploads that wait for room, or are refused
        check = partial(self._check, island, memory, waiting)

        def reserved(program: int, args: Any, results: Any) -> Any:
            claim = reserve(program, args, results)
            for part in () if claim is None or claim.needs is None else claim.parts:
                adds = np.asarray(part.peaks) > 0
                check(part.totals, part.devices[adds], "a run")
            return claim

        def placed(
            array: int, devices: Any, shard_bytes: int, totals: Any = None, *, off: bool = False
        ) -> Any:
            buffer = place(array, devices, shard_bytes, totals, off=off)
            if off:
                return buffer
            slice_ = self._slice_of(array)
            if buffer.on.totals != memory.totals.of(client_of(array), slice_):
                waiting.add(array)
            elif not self._is_back:
                check(buffer.on.totals, buffer.on.devices, "an upload")
            return buffer

        def moved(buffer: Any, totals: Any) -> None:
            move(buffer, totals)
            arrays = [one for one, other in memory.buffers.items() if other is buffer]
            if not scheduler.admission.pending.are_read(arrays):
                return  # it is refused, and counts until its hosts have dropped it
            self._world.checked["uploads that waited"] += 1
            waiting.difference_update(arrays)
            check(buffer.on.totals, buffer.on.devices, "an upload that has waited")

        def aside(room: Any, size_bytes: int) -> None:
            set_aside(room, size_bytes)
            for part in room.parts if size_bytes > 0 else ():
                check(part.totals, part.devices, "a lease")

        memory.reserve, memory.place = reserved, placed
        memory.move, memory.set_aside = moved, aside

    def _slice_of(self, array: int) -> int:
        """Return the slice on which the controller has an array."""
        client = self._cluster.controller.sessions.owner(array)
        entry = None if client is None else client.arrays.find(array)
        return 0 if entry is None else int(entry.spec.placement.slice)

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

    def _placing(self, sender: Address, to: Address, message: msg.ArrayPlaced) -> None:
        self._is_back = message.is_back

    # --- checks ----------------------------------------------------------------------------------

    def _check(
        self, island: str, memory: Any, waiting: Set[int], totals: Iterable[Any], on: Any, what: str
    ) -> None:
        """Compare what tenants and slices have with their bounds, on the devices on which there is more now."""
        memory.settle()
        for total in totals:
            whose = total.slice or total.tenant
            if not whose:
                continue
            kind, monitor = ("slices", "bounds") if total.slice else ("tenants", "quotas")
            name = f"slice {whose:x}" if total.slice else whose
            bound_bytes = self._bounds[island, whose]
            self._world.checked[f"{kind}' memory"] += 1
            most_bytes = int(total.used[on].max(initial=0))
            if bound_bytes is not None and most_bytes > bound_bytes:
                words = f"{most_bytes} bytes on a device of {island}, with {what}"
                raise Violation(monitor, f"{name} has {words}, and may have {bound_bytes}")
            if total.slice and bound_bytes is None:
                continue  # it has been given back
            for device, size_bytes in self._held(island, memory, waiting, whose).items():
                if size_bytes > memory.used_of(total, (device,)):
                    words = f"{device} has {size_bytes} bytes of {name}, and fewer are counted"
                    raise Violation(monitor, words)

    def _held(
        self, island: str, memory: Any, waiting: Set[int], whose: str | int
    ) -> Counter[DeviceAddress]:
        """Return what hosts hold on each device for arrays that count for a tenant, or on a slice."""
        sizes: Counter[DeviceAddress] = Counter()
        seen: set[int] = set()
        for name in self._cluster.schedulers[island].members.hosts:
            host = next(one for one in self._cluster.hosts if one.name == name)
            for number, entry in () if host.node is None else host.store.arrays.items():
                buffer, shards = memory.buffers.get(number), entry.value.payload
                if buffer is None or not isinstance(shards, Shards) or number in waiting:
                    continue
                if isinstance(whose, int):  # shards of a view may be those of another slice
                    counts = entry.spec.placement.slice == whose and buffer.shards is None
                else:
                    counts = self._tenants.get(client_of(number)) == whose
                if not counts or not all(part.is_counted for part in buffer.parts()):
                    continue  # its run has not ended, or it is in host memory
                for ordinal, shard in shards.items():
                    if id(shard) not in seen:
                        seen.add(id(shard))
                        sizes[DeviceAddress(name, ordinal)] += shard.nbytes
        return sizes
