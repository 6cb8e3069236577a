"""The buffers of the arrays on one island, and on how many bytes of each device they lie.

A buffer is counted while an array has it (several may: a program can return its argument, or one value twice)
or a run in flight reads it. A delete or a donation takes the array away at once; the bytes are free when no run
in flight can touch them any more.

A view takes no memory: it names shards of other arrays. The first view of a buffer divides it into a buffer
for each device, so that each shard is free when the last array that names it is gone.

Buffers on the same devices are added up in one number until a total is needed. So an array costs an addition.

Where tenants are counted, what a client takes is in the total of its tenant, too; what lies on a slice that has
a bound is in the total of the slice (`memory_totals`). A buffer counts for the tenant whose client has made it,
and for the slice on which that was, whatever names it later.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import numpy.typing as npt

from pw.core.ids import client_of
from pw.core.programs.peak import OutputMemory
from pw.core.sharding import DeviceAddress
from pw.sched.island.buffers import Buffer, Tier
from pw.sched.island.memory_tiers import MemoryTiers
from pw.sched.island.memory_totals import Bytes, DeviceSet, IslandTotals, TenantBounds, Total


class DeviceBuffers:
    """Counts the buffers on each device of an island."""

    def __init__(
        self,
        island: str,
        capacity_bytes: int | None,
        tenants: TenantBounds | None = None,
        spill_bytes: int = 0,
        has_files: bool = False,
    ) -> None:
        self.island = island
        self.totals = IslandTotals(capacity_bytes, tenants or TenantBounds())
        self.total = self.totals.island
        """Bytes of all clients; its bound is the memory of a device."""
        self._numbers: dict[DeviceAddress, int] = {}
        self._device_sets: dict[tuple[Total, ...], dict[tuple[DeviceAddress, ...], DeviceSet]] = {}
        """Sets of devices that buffers are on, by the totals that count them there."""
        self._unsettled: set[DeviceSet] = set()
        self.buffers: dict[int, Buffer] = {}
        self.frees = 0
        """Count that goes up whenever memory may have become free."""
        self.arriving: set[int] = set()
        """Arrays whose uploads have not ended."""
        self.tiers = MemoryTiers(self, spill_bytes, has_files)

    # --- tenants and slices --------------------------------------------------------------------------

    def bound(self, tenant: str, bound_bytes: int | None) -> None:
        """Change what a tenant may have on each device."""
        self.frees += self.totals.bound_tenant(tenant, bound_bytes)

    def bound_slice(self, slice: int, bound_bytes: int) -> None:
        """Change what a slice may have on each device; 0 if that does not count any more."""
        total = self.totals.by_slice.get(slice)
        self.totals.bound_slice(slice, bound_bytes)
        if not bound_bytes:
            for totals in [totals for totals in self._device_sets if total in totals]:
                del self._device_sets[totals]
        self.frees += 1

    # --- arrays --------------------------------------------------------------------------------------

    def place(
        self,
        array: int,
        devices: tuple[DeviceAddress, ...],
        shard_bytes: int,
        totals: tuple[Total, ...] | None = None,
        *,
        off: bool = False,
    ) -> Buffer:
        """Count an array that is uploaded, before it has arrived: in its client's totals, or in others.

        With `off` it stays in host memory until a run reads it, and counts there.
        """
        totals = totals or self.totals.of(client_of(array))
        buffer = Buffer(self.device_set(devices, totals), shard_bytes)
        self._name(array, buffer)
        if off:
            self.tiers.keep_off(buffer)
        else:
            self.count(buffer)
        self.arriving.add(array)
        return buffer

    def move(self, buffer: Buffer, totals: tuple[Total, ...]) -> None:
        """Count a buffer in other totals."""
        for part in {buffer, *buffer.parts()}:
            is_counted = part.is_counted
            if is_counted:
                self.uncount(part)
            part.on = self.device_set(part.on.addresses, totals)
            if is_counted:
                self.count(part)

    def used_of(self, total: Total, devices: tuple[DeviceAddress, ...]) -> int:
        """Return the bytes of a total on that of some devices which has most."""
        numbers = self._numbered(devices)
        self.settle()
        return int(total.used[numbers].max(initial=0))

    def arrived(self, array: int) -> None:
        """The upload of an array has ended."""
        self.arriving.discard(array)
        self.frees += 1  # it may leave the devices now

    def release(self, array: int) -> None:
        """Remove an array; its bytes are free when no run in flight reads them."""
        self.arriving.discard(array)
        buffer = self.buffers.pop(array, None)
        if buffer is not None:
            buffer.names -= 1
            self._let_go(buffer)

    def forget(self, client: int) -> None:
        """Remove all arrays and slices of a client."""
        for array in [array for array in self.buffers if client_of(array) == client]:
            self.release(array)
        for slice in [slice for slice in self.totals.by_slice if client_of(slice) == client]:
            self.bound_slice(slice, 0)

    def _name(self, array: int, buffer: Buffer) -> None:
        buffer.names += 1
        self.release(array)
        self.buffers[array] = buffer

    def count(self, buffer: Buffer) -> None:
        """Count a buffer on its devices."""
        buffer.is_counted = True
        buffer.on.unsettled_bytes += buffer.shard_bytes
        self._unsettled.add(buffer.on)

    def _let_go(self, buffer: Buffer) -> None:
        if buffer.is_needed:
            return
        if buffer.shards is not None:
            for shard in buffer.shards.values():
                shard.names -= 1
                self._let_go(shard)
        elif buffer.tier is not Tier.DEVICE and buffer.tier.may_return:
            self.tiers.forget(buffer)
            self.frees += 1  # others may leave the devices now
        elif buffer.is_counted and buffer.tier is not Tier.LEAVING:
            self.uncount(buffer)
            self.frees += 1

    def uncount(self, buffer: Buffer) -> None:
        """Count it there no more."""
        buffer.is_counted = False
        buffer.on.unsettled_bytes -= buffer.shard_bytes
        self._unsettled.add(buffer.on)

    def buffer_of(self, arg: int | bytes) -> Buffer | None:
        """Return the buffer of an argument; None of a small value, or of an array that is not counted."""
        return self.buffers.get(arg) if isinstance(arg, int) else None

    # --- views ---------------------------------------------------------------------------------------

    def _view(
        self,
        output: OutputMemory,
        on: DeviceSet,
        arguments: Mapping[int, Buffer | None],
        fresh: list[Buffer],
    ) -> Buffer:
        """Return the buffer of a view, which names shards of the arguments.

        `fresh` ones are of small host values: the run makes them, and they count from its end.
        """
        view = Buffer(on, output.shard_bytes, is_counted=True, shards={})
        assert view.shards is not None
        for device, source in zip(output.devices, output.shards, strict=True):
            buffer = arguments.get(source)
            if buffer is None:
                shard = Buffer(self.device_set((device,), on.totals), output.shard_bytes)
                if source in arguments:  # a small host value, which hosts make for this run
                    fresh.append(shard)
            else:
                shard = self._divided(buffer)[device]
            shard.names += 1
            view.shards[device] = shard
        return view

    def _divided(self, buffer: Buffer) -> dict[DeviceAddress, Buffer]:
        """Return the buffer on each device."""
        if buffer.shards is None:
            buffer.shards = {
                device: Buffer(
                    self.device_set((device,), buffer.on.totals), buffer.shard_bytes, names=1
                )
                for device in buffer.on.addresses
            }
            if buffer.is_counted:
                self.uncount(buffer)
                for shard in buffer.shards.values():
                    self.count(shard)
        return buffer.shards

    # --- devices -------------------------------------------------------------------------------------

    @property
    def devices(self) -> tuple[DeviceAddress, ...]:
        """Devices on which anything was counted, in the order of their numbers."""
        return tuple(self._numbers)

    def used_bytes(self, device: DeviceAddress) -> int:
        """Return the bytes of buffers and reservations on a device."""
        number = self._numbers.get(device)
        return 0 if number is None else int(self.settled()[number])

    def _numbered(self, devices: Iterable[DeviceAddress]) -> npt.NDArray[np.intp]:
        numbers = [self._numbers.setdefault(device, len(self._numbers)) for device in devices]
        if len(self._numbers) > len(self.total.used):
            self.totals.grow(len(self._numbers))
        return np.array(numbers, np.intp)

    def device_set(
        self, devices: tuple[DeviceAddress, ...], totals: tuple[Total, ...]
    ) -> DeviceSet:
        """Return the set of these devices for buffers that these totals count."""
        sets = self._device_sets.setdefault(totals, {})
        on = sets.get(devices)
        if on is None:
            on = sets[devices] = DeviceSet(devices, self._numbered(devices), totals)
        return on

    def settle(self) -> None:
        """Add to the totals what buffers have added or removed."""
        for on in self._unsettled:
            on.settle()
        self._unsettled.clear()

    def settled(self) -> Bytes:
        """Return the bytes of buffers and reservations on each device."""
        self.settle()
        return self.total.used

    def device_in_words(self, number: int) -> str:
        """Return the name of a device for an error."""
        device = list(self._numbers)[number]
        return f"device {device.ordinal} of host {device.host} (island {self.island})"
