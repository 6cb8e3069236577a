"""The device memory of one island as its scheduler counts it, before anything is launched.

Two things take memory: buffers of live arrays, and reservations of admitted runs. A run that is
admitted reserves its peak on every device (`pw.core.programs.peak`). When it ends, its results are counted as
buffers instead. A buffer is counted while an array has it (several may: a program can return its
argument, or one value twice) or a run in flight reads it. A delete or a donation takes the array away
at once; the bytes are free when no run in flight can touch them any more.

A view takes no memory: it names shards of other arrays. The first view of a buffer divides it into a buffer
for each device, so that each shard is free when the last array that names it is gone.

Temporaries are reserved once for all runs in flight, as much as the run that needs most: a device
computes one thing after the other, and reuses the temporaries. So a program with large temporaries is
still launched ahead. A run's peak is therefore kept in two parts: the reservation of the run itself,
and what its temporaries add to that.

So a launch can always allocate: an admission never takes buffers and reservations of a device beyond
its capacity. Uploads are not admitted; they only reduce the free memory.

Buffers on the same devices are added up in one number until a total is needed. So an array costs an
addition, and a run a few vector operations over the devices of its program.

Where tenants are counted, what a client takes is in the total of its tenant, too (`memory_totals`). A buffer
counts for the tenant whose client has made it, whatever names it later. So runs never take a tenant beyond
what it may have on a device. An upload that would do so is counted for the island alone until it fits
(`pending_uploads`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from pw.core.ids import client_of
from pw.core.programs.peak import IslandMemory, OutputMemory
from pw.core.sharding import DeviceAddress
from pw.sched.island.buffers import Buffer, Tier
from pw.sched.island.memory_tiers import MemoryTiers, Returns
from pw.sched.island.memory_totals import Bytes, DeviceSet, Needs, TenantBounds, Total

UNBOUNDED_BYTES = 1 << 62
"""Free bytes of devices that nothing bounds."""


@dataclass(slots=True, eq=False)
class Claim:
    """Reservation of one run, or of memory that is set aside for launches of a client."""

    client: int
    devices: npt.NDArray[np.intp]
    peaks: Bytes | int
    """Bytes on each device, or the same bytes on all of them."""
    totals: tuple[Total, ...]
    on: DeviceSet | None = None
    """Devices, if the bytes are the same on all."""
    needs: Needs | None = None
    read: list[Buffer] = field(default_factory=list)
    donated: list[tuple[int, Buffer]] = field(default_factory=list)
    results: list[tuple[int, Buffer]] = field(default_factory=list)


class DeviceMemory:
    """Counts the buffers and reservations on each device of an island."""

    def __init__(
        self,
        island: str,
        capacity_bytes: int | None,
        tenants: TenantBounds | None = None,
        spill_bytes: int = 0,
        has_files: bool = False,
    ) -> None:
        self.island = island
        self.total = Total(capacity_bytes)
        """Bytes of all clients; its bound is the memory of a device."""
        self.by_tenant: dict[str, Total] = {}
        """Bytes of each tenant that is counted, by name."""
        self._bounds = tenants or TenantBounds()
        self._numbers: dict[DeviceAddress, int] = {}
        self._device_sets: dict[tuple[Total, tuple[DeviceAddress, ...]], DeviceSet] = {}
        self._unsettled: set[DeviceSet] = set()
        self.buffers: dict[int, Buffer] = {}
        self.programs: dict[int, Needs] = {}
        self.reserved: set[Claim] = set()
        """Reservations of runs."""
        self.aside: set[Claim] = set()
        """Reservations that are set aside for launches that clients may send."""
        self.frees = 0
        """Count that goes up whenever memory may have become free."""
        self.arriving: set[int] = set()
        """Arrays whose uploads have not ended."""
        self.tiers = MemoryTiers(self, spill_bytes, has_files)
        self.runs = 0
        """Number of runs that have been admitted or launched."""

    # --- tenants -------------------------------------------------------------------------------------

    def totals_of(self, client: int) -> tuple[Total, ...]:
        """Return the totals that count what a client takes, that of the island last."""
        tenant = self._bounds.tenants.get(client)
        if tenant is None:
            return (self.total,)
        total = self.by_tenant.get(tenant)
        if total is None:
            total = Total(self._bounds.bounds_bytes.get(tenant), tenant)
            total.grow(len(self._numbers))
            self.by_tenant[tenant] = total
        return total, self.total

    def bound(self, tenant: str, bound_bytes: int | None) -> None:
        """Change what a tenant may have on each device."""
        total = self.by_tenant.get(tenant)
        if total is not None and total.bound_bytes != bound_bytes:
            total.bound_bytes = bound_bytes
            self.frees += 1

    def has_claims(self, total: Total) -> bool:
        """Whether runs that a total counts, or may come under a lease, hold a reservation."""
        return any(total in claim.totals for claim in (*self.reserved, *self.aside))

    # --- programs ------------------------------------------------------------------------------------

    def install(self, program: int, name: str, memory: IslandMemory | None) -> None:
        """Remember the needs of a program; without `memory` it needs none."""
        if memory is None:
            self.programs.pop(program, None)
            return
        sizes = [len(group) for group in memory.groups]
        numbers = np.repeat(np.arange(len(sizes)), sizes)
        totals = self.totals_of(client_of(program))
        self.programs[program] = Needs(
            name,
            memory,
            self._numbered(device for group in memory.groups for device in group),
            numbers,
            [(output, self.device_set(output.devices, totals)) for output in memory.outputs],
            np.array(memory.peaks(), np.int64)[numbers],
            totals,
        )

    def add_temporaries(self, program: int, temporary_bytes: tuple[int, ...]) -> None:
        """A host has reported the temporaries of a program's computations."""
        needs = self.programs.get(program)
        if needs is not None and temporary_bytes:
            previous = needs.temporary_bytes or (0,) * len(temporary_bytes)
            needs.temporary_bytes = tuple(map(max, previous, temporary_bytes))
            peaks = np.array(needs.memory.peaks(needs.temporary_bytes), np.int64)[needs.group]
            if (peaks > needs.peaks).any():
                needs.need_temporaries(peaks)

    def uninstall(self, program: int) -> None:
        """Forget a program; its runs in flight keep their reservations."""
        self.programs.pop(program, None)

    # --- arrays --------------------------------------------------------------------------------------

    def place(
        self,
        array: int,
        devices: tuple[DeviceAddress, ...],
        shard_bytes: int,
        totals: tuple[Total, ...] | None = None,
    ) -> Buffer:
        """Count an array that is uploaded, before it has arrived: in its client's totals, or in others."""
        totals = totals or self.totals_of(client_of(array))
        buffer = Buffer(self.device_set(devices, totals), shard_bytes)
        self._name(array, buffer)
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
        """Remove all arrays and programs of a client."""
        for array in [array for array in self.buffers if client_of(array) == client]:
            self.release(array)
        for program in [program for program in self.programs if client_of(program) == client]:
            del self.programs[program]

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

    # --- views ---------------------------------------------------------------------------------------

    def _view(
        self, output: OutputMemory, on: DeviceSet, arguments: Mapping[int, Buffer | None]
    ) -> Buffer:
        """Return the buffer of a view, which names shards of the arguments."""
        view = Buffer(on, output.shard_bytes, is_counted=True, shards={})
        assert view.shards is not None
        for device, source in zip(output.devices, output.shards, strict=True):
            buffer = arguments.get(source)
            if buffer is None:  # a small host value, which hosts make for this run
                shard = Buffer(self.device_set((device,), on.totals), output.shard_bytes)
                self.count(shard)
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

    # --- runs ----------------------------------------------------------------------------------------

    def reserve(
        self, program: int, args: Sequence[int | bytes], results: Sequence[int]
    ) -> Claim | None:
        """Reserve a run's peak. Return None if it does not fit."""
        needs, client = self.programs.get(program), client_of(program)
        if needs is None:
            nothing = np.zeros(0, np.intp), np.zeros(0, np.int64)
            claim = Claim(client, *nothing, self.totals_of(client))
            self.reserved.add(claim)
            return claim
        peaks = self.peaks_of(needs, args)
        self.settle()
        back = self.returns(needs, args)
        counted = []
        for total in needs.totals:
            more = total.with_temporaries(needs, peaks)
            used = total.used[needs.devices] + more
            if total.has_no_room(used, more) or (back and back.has_no_room(total, needs, more)):
                return None
            counted.append((total, used, more - peaks))
        for total, used, temporaries in counted:
            total.reserve(needs, used, temporaries)
        needs.runs += 1
        claim = Claim(client, needs.devices, peaks, needs.totals, needs=needs)
        self._name_all(claim, needs, args, results)
        return claim

    def returns(self, needs: Needs, args: Sequence[int | bytes]) -> Returns | None:
        """Return what a run reads and is not on the devices; None if all is."""
        if not self.tiers.off:
            return None
        return self.tiers.returns(self.buffer_of(args[index]) for index in needs.memory.inputs)

    def without_room(self, program: int, args: Sequence[int | bytes]) -> Total:
        """Return the total in which a run has no room: that of its tenant, or else that of the island."""
        needs = self.programs[program]
        peaks, back = self.peaks_of(needs, args), self.returns(needs, args)
        if back is not None and back.is_moving:
            return self.total
        for total in needs.totals:
            more = total.with_temporaries(needs, peaks)
            no_room = total.has_no_room(total.used[needs.devices] + more, more)
            if no_room or (back and back.has_no_room(total, needs, more)):
                return total
        return self.total

    def shortage(self, total: Total, program: int, args: Sequence[int | bytes]) -> Bytes:
        """Return the bytes that a run lacks on each device, as a total counts."""
        needs, back = self.programs[program], self.returns(self.programs[program], args)
        self.settle()
        more = np.zeros_like(total.used) if back is None else back.bytes_in(total)
        more[needs.devices] += total.with_temporaries(needs, self.peaks_of(needs, args))
        return total.shortage(more)

    def shortage_of_upload(self, total: Total, buffer: Buffer) -> Bytes:
        """Return the bytes that an upload lacks on each device, as a total counts."""
        self.settle()
        more = np.zeros_like(total.used)
        more[buffer.on.devices] = buffer.shard_bytes
        return total.shortage(more)

    def _name_all(
        self, claim: Claim, needs: Needs, args: Sequence[int | bytes], results: Sequence[int]
    ) -> None:
        """A run reads, takes and makes arrays from now on."""
        self.reserved.add(claim)
        self.runs += 1
        arguments = {index: self.buffer_of(args[index]) for index in needs.memory.inputs}
        if self.tiers.off:
            self.tiers.bring_back(arguments.values())
        for buffer in arguments.values():
            if buffer is not None:
                buffer.readers += 1
                buffer.used = self.runs
                claim.read.append(buffer)
        for index in needs.memory.donated:
            array = args[index]
            if isinstance(array, int) and (donated := self.buffers.pop(array, None)) is not None:
                donated.names -= 1
                claim.donated.append((array, donated))
        outputs: dict[int, Buffer] = {}
        for output, on in needs.outputs:
            if output.shards:
                buffer = self._view(output, on, arguments)
            else:
                same = outputs.get(output.same_as_output) or arguments.get(output.same_as_input)
                buffer = same or Buffer(on, output.shard_bytes, used=self.runs)
            outputs[output.output] = buffer
            self._name(results[output.output], buffer)
            claim.results.append((results[output.output], buffer))

    def end(self, claim: Claim) -> None:
        """A run has ended: count its results instead of its reservation."""
        self._close(claim)
        for _, result in claim.results:
            if not result.is_counted:
                for buffer in result.parts():
                    if not buffer.is_counted and buffer.is_needed:
                        self.count(buffer)

    def withdraw(self, claim: Claim) -> None:
        """A run was cancelled before it began: give its donated arrays back."""
        for array, buffer in claim.results:
            if self.buffers.get(array) is buffer:
                self.release(array)
        for array, buffer in claim.donated:
            if array not in self.buffers:
                self._name(array, buffer)
        self._close(claim)

    def _close(self, claim: Claim) -> None:
        self.reserved.discard(claim)
        self.frees += 1
        if claim.on is None:
            for total in claim.totals:
                total.used[claim.devices] -= claim.peaks
        else:
            self.set_aside(claim, -int(claim.peaks))
        if claim.needs is not None:
            claim.needs.let_compute_no_more()
        for buffer in claim.read:
            buffer.readers -= 1
            self._let_go(buffer)

    # --- leases --------------------------------------------------------------------------------------

    def room(self, client: int, devices: Iterable[DeviceAddress]) -> Claim:
        """Return what `set_aside` makes larger, for launches of a client on these devices."""
        on = self.device_set(tuple(devices), self.totals_of(client))
        return Claim(client, on.devices, 0, on.totals, on)

    def set_aside(self, room: Claim, size_bytes: int) -> None:
        """Reserve more on each device of a room; less if it is below zero."""
        assert room.on is not None
        room.peaks += size_bytes
        room.on.unsettled_bytes += size_bytes
        self._unsettled.add(room.on)
        if size_bytes <= 0:
            self.frees += 1

    def claim(
        self,
        room: Claim,
        size_bytes: int,
        program: int,
        args: Sequence[int | bytes],
        results: Sequence[int],
    ) -> Claim:
        """Reserve so much of a room for a run that has been launched."""
        room.peaks -= size_bytes
        needs = self.programs.get(program)
        claim = Claim(room.client, room.devices, size_bytes, room.totals, room.on, needs)
        self.reserved.add(claim)
        if needs is not None:
            needs.let_compute()
            self._name_all(claim, needs, args, results)
        return claim

    def free_bytes(self, room: Claim) -> int:
        """Return how much is free on each device of a room."""
        self.settle()
        return min(
            UNBOUNDED_BYTES
            if total.bound_bytes is None
            else total.bound_bytes - int(total.used[room.devices].max(initial=0))
            for total in room.totals
        )

    # --- what a run needs ----------------------------------------------------------------------------

    def buffer_of(self, arg: int | bytes) -> Buffer | None:
        """Return the buffer of an argument; None of a small value, or of an array that is not counted."""
        return self.buffers.get(arg) if isinstance(arg, int) else None

    def peaks_of(self, needs: Needs, args: Sequence[int | bytes]) -> Bytes:
        """Return the program's peak, plus donated buffers that stay because another array has them."""
        peaks = needs.peaks
        for index in needs.memory.donated:
            buffer = self.buffer_of(args[index])
            if buffer is not None and (buffer.names > 1 or buffer.shards is not None):
                # Hosts donate a copy.
                shared = np.isin(needs.devices, buffer.on.devices)
                peaks = peaks + shared * buffer.shard_bytes
        return peaks

    @property
    def claims(self) -> int:
        """Number of runs that hold a reservation."""
        return len(self.reserved)

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
            for total in (self.total, *self.by_tenant.values()):
                total.grow(len(self._numbers))
        return np.array(numbers, np.intp)

    def device_set(
        self, devices: tuple[DeviceAddress, ...], totals: tuple[Total, ...]
    ) -> DeviceSet:
        """Return the set of these devices for buffers that these totals count."""
        on = self._device_sets.get((totals[0], devices))
        if on is None:
            on = DeviceSet(devices, self._numbered(devices), totals)
            self._device_sets[totals[0], devices] = on
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
