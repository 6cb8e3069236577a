"""The promise that no device has more of a tenant's bytes than the rights of the tenant say (in `quotas`).

The monitor follows the bounds as the controller tells schedulers of them, and looks at the scheduler's totals
after each run, upload or lease that adds to them. A bound that was lowered takes nothing away, so only what is
added is compared with it. The hosts are asked, too: what they hold for arrays of a tenant is counted for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Set
from functools import partial
from typing import Any

import numpy as np

from pw.core import messages as msg
from pw.core.ids import Address, client_of
from pw.core.sharding import DeviceAddress
from pw.testing.sim.cluster import SimCluster
from pw.testing.sim.shards import Shards
from pw.testing.sim.world import Violation


class TenantMemoryMonitor:
    """Watches what tenants have on devices."""

    def __init__(self, cluster: SimCluster) -> None:
        self._cluster = cluster
        self._world = world = cluster.world
        self._tenants: dict[int, str] = {}
        self._bounds: dict[tuple[str, str], int | None] = {}
        """Bytes on a device that the scheduler of each island was told, for each tenant."""
        self._is_back = False
        """True while an array is placed that recovery brings back: it counts whatever its tenant may have."""
        if world.profile.quotas:
            world.watch_handled(msg.AddClient, self._hear)
            world.watch_handled(msg.ArrayPlaced, self._placing)

    def watch(self, island: str) -> None:
        """Watch the memory of an island from now on."""
        scheduler: Any = self._cluster.schedulers.get(island)
        memory: Any = None if scheduler is None else scheduler.admission.memory
        if memory is None or not self._world.profile.quotas:
            return
        reserve, place = memory.reserve, memory.place
        set_aside, move = memory.set_aside, memory.move
        waiting: set[int] = set()  # uploads that wait for room, or are refused
        check = partial(self._check, island, memory, waiting)

        def reserved(program: int, args: Any, results: Any) -> Any:
            claim = reserve(program, args, results)
            if claim is not None and claim.needs is not None:
                adds = np.asarray(claim.peaks) > 0
                check(client_of(program), claim.devices[adds], "a run")
            return claim

        def placed(array: int, devices: Any, shard_bytes: int, totals: Any = None) -> Any:
            buffer = place(array, devices, shard_bytes, totals)
            if totals is not None:
                waiting.add(array)
            elif not self._is_back:
                check(client_of(array), buffer.on.devices, "an upload")
            return buffer

        def moved(buffer: Any, totals: Any) -> None:
            move(buffer, totals)
            arrays = [one for one, other in memory.buffers.items() if other is buffer]
            if not scheduler.admission.pending.are_read(arrays):
                return  # it is refused, and counts until its hosts have dropped it
            self._world.checked["uploads that waited"] += 1
            waiting.difference_update(arrays)
            check(client_of(arrays[0]), buffer.on.devices, "an upload that has waited")

        def aside(room: Any, size_bytes: int) -> None:
            set_aside(room, size_bytes)
            if size_bytes > 0:
                check(room.client, room.devices, "a lease")

        memory.reserve, memory.place = reserved, placed
        memory.move, memory.set_aside = moved, aside

    def _hear(self, sender: Address, to: Address, message: msg.AddClient) -> Callable[[], None]:
        island = to.actor.partition("/")[2]

        def note() -> None:
            self._tenants[message.client] = message.tenant
            self._bounds[island, message.tenant] = message.device_memory_bytes

        return note

    def _placing(self, sender: Address, to: Address, message: msg.ArrayPlaced) -> None:
        self._is_back = message.is_back

    def _check(
        self, island: str, memory: Any, waiting: Set[int], client: int, devices: Any, what: str
    ) -> None:
        """Compare what a client's tenant has with its bound, on the devices on which it has more now."""
        tenant = self._tenants[client]
        bound_bytes = self._bounds[island, tenant]
        self._world.checked["tenants' memory"] += 1
        memory.settle()
        total = memory.by_tenant[tenant]
        most_bytes = int(total.used[devices].max(initial=0))
        if bound_bytes is not None and most_bytes > bound_bytes:
            words = f"{most_bytes} bytes on a device of {island}, with {what}"
            raise Violation("quotas", f"{tenant} has {words}, and may have {bound_bytes}")
        for device, size_bytes in self._held(island, memory, waiting, tenant).items():
            if size_bytes > memory.used_of(total, (device,)):
                words = f"{device} has {size_bytes} bytes of {tenant}, and fewer are counted"
                raise Violation("quotas", words)

    def _held(
        self, island: str, memory: Any, waiting: Set[int], tenant: str
    ) -> Counter[DeviceAddress]:
        """Return what hosts hold on each device for arrays that count for a tenant."""
        sizes: Counter[DeviceAddress] = Counter()
        seen: set[int] = set()
        for name in self._cluster.schedulers[island].members.hosts:
            host = next(one for one in self._cluster.hosts if one.name == name)
            for number, entry in () if host.node is None else host.store.arrays.items():
                buffer, shards = memory.buffers.get(number), entry.value.payload
                is_there = buffer is not None and isinstance(shards, Shards)
                if not is_there or self._tenants.get(client_of(number)) != tenant:
                    continue
                if number in waiting:
                    continue
                if not all(part.is_counted for part in buffer.parts()):  # its run has not ended
                    continue
                for ordinal, shard in shards.items():
                    if id(shard) not in seen:
                        seen.add(id(shard))
                        sizes[DeviceAddress(name, ordinal)] += shard.nbytes
        return sizes
