"""The device memory of one island as its scheduler counts it, before anything is launched.

Two things take memory: buffers of live arrays, and reservations of admitted runs. A run that is
admitted reserves its peak on every device (`pw.core.programs.peak`). When it ends, its results are counted as
buffers instead (`device_buffers`).

Temporaries are reserved once for all runs in flight, as much as the run that needs most: a device
computes one thing after the other, and reuses the temporaries. So a program with large temporaries is
still launched ahead. A run's peak is therefore kept in two parts: the reservation of the run itself,
and what its temporaries add to that.

So a launch can always allocate: an admission never takes buffers and reservations of a device beyond
its capacity. Uploads are not admitted; they only reduce the free memory.

A run costs a few vector operations over the devices of its program, for each total that counts it: those of the
island, of its tenant, and of its slices with a bound (`memory_totals`). So runs never take a tenant or a slice
beyond what it may have on a device. An upload that would do so is counted for the island alone until it fits
(`pending_uploads`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
import numpy.typing as npt

from pw.core.ids import client_of
from pw.core.programs.peak import IslandMemory
from pw.core.sharding import DeviceAddress
from pw.sched.island.buffers import Buffer
from pw.sched.island.device_buffers import DeviceBuffers
from pw.sched.island.memory_tiers import Returns
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
    fresh: list[Buffer] = field(default_factory=list)
    """Buffers that the run makes: of results that are no other array's, and of small host values in views."""
    slices: tuple[Claim, ...] = ()
    """Part of the claim on each slice that has a bound."""

    @property
    def parts(self) -> tuple[Claim, ...]:
        """What is counted for the claim: its part on each slice that has a bound, and all of it."""
        return (*self.slices, self)


class DeviceMemory(DeviceBuffers):
    """Counts the buffers and reservations on each device of an island."""

    def __init__(
        self,
        island: str,
        capacity_bytes: int | None,
        tenants: TenantBounds | None = None,
        spill_bytes: int = 0,
        has_files: bool = False,
    ) -> None:
        super().__init__(island, capacity_bytes, tenants, spill_bytes, has_files)
        self.programs: dict[int, Needs] = {}
        self.reserved: set[Claim] = set()
        """Reservations of runs."""
        self.aside: set[Claim] = set()
        """Reservations that are set aside for launches that clients may send."""
        self.runs = 0
        """Number of runs that have been admitted or launched."""

    # --- programs ------------------------------------------------------------------------------------

    def install(self, program: int, name: str, memory: IslandMemory | None) -> None:
        """Remember the needs of a program; without `memory` it needs none."""
        if memory is None:
            self.programs.pop(program, None)
            return
        client, by_slice = client_of(program), self.totals.by_slice
        parts = [(part, by_slice.get(part.slice)) for part in memory.slices]
        self.programs[program] = needs = self._needs(name, memory, client, self.totals.of(client))
        needs.slices = tuple(
            self._needs(name, part, client, (total,)) for part, total in parts if total is not None
        )

    def _needs(
        self, name: str, memory: IslandMemory, client: int, totals: tuple[Total, ...]
    ) -> Needs:
        sizes = [len(group) for group in memory.groups]
        numbers = np.repeat(np.arange(len(sizes)), np.array(sizes, np.intp))
        outputs = [
            (output, self.device_set(output.devices, self.totals.of(client, output.slice)))
            for output in memory.outputs
        ]
        devices = self._numbered(device for group in memory.groups for device in group)
        needs = Needs(
            *(name, memory, devices, numbers, outputs),
            np.array(memory.peaks(), np.int64)[numbers],
            totals,
        )
        for value in memory.host_values:
            there = np.isin(devices, self._numbered(value.devices)) * value.shard_bytes
            needs.host_values[value.input] = there + needs.host_values.get(value.input, 0)
        return needs

    def add_temporaries(self, program: int, temporary_bytes: tuple[int, ...]) -> None:
        """A host has reported the temporaries of a program's computations."""
        needs = self.programs.get(program)
        if needs is not None and temporary_bytes:
            previous = needs.temporary_bytes or (0,) * len(temporary_bytes)
            needs.temporary_bytes = tuple(map(max, previous, temporary_bytes))
            for part in needs.parts:
                peaks = np.array(part.memory.peaks(needs.temporary_bytes), np.int64)[part.group]
                if (peaks > part.peaks).any():
                    part.need_temporaries(peaks)

    def uninstall(self, program: int) -> None:
        """Forget a program; its runs in flight keep their reservations."""
        self.programs.pop(program, None)

    def forget(self, client: int) -> None:
        """Remove all arrays, programs and slices of a client."""
        super().forget(client)
        for program in [program for program in self.programs if client_of(program) == client]:
            del self.programs[program]

    # --- runs ----------------------------------------------------------------------------------------

    def reserve(
        self, program: int, args: Sequence[int | bytes], results: Sequence[int]
    ) -> Claim | None:
        """Reserve a run's peak. Return None if it does not fit."""
        needs, client = self.programs.get(program), client_of(program)
        if needs is None:
            nothing = np.zeros(0, np.intp), np.zeros(0, np.int64)
            claim = Claim(client, *nothing, self.totals.of(client))
            self.reserved.add(claim)
            return claim
        self.settle()
        back = self.returns(needs, args)
        counted: list[tuple[Total, Needs, Bytes, Bytes]] = []
        for part in needs.slices:
            if not self._has_room(part, self.peaks_of(part, args), back, counted):
                return None
        peaks = self.peaks_of(needs, args)
        if not self._has_room(needs, peaks, back, counted):
            return None
        claim = Claim(client, needs.devices, peaks, needs.totals, needs=needs)
        if needs.slices:
            claim.slices = tuple(
                Claim(client, part.devices, self.peaks_of(part, args), part.totals)
                for part in needs.slices
            )
        for total, part, used, temporaries in counted:
            total.reserve(part, used, temporaries)
        needs.runs += 1
        for part in needs.slices:
            part.runs += 1
        self._name_all(claim, needs, args, results)
        return claim

    @staticmethod
    def _has_room(
        part: Needs,
        peaks: Bytes,
        back: Returns | None,
        counted: list[tuple[Total, Needs, Bytes, Bytes]],
    ) -> bool:
        """Whether a part of a run has room in all totals that count it; note what they reserve then."""
        for total in part.totals:
            more = total.with_temporaries(part, peaks)
            used = total.used[part.devices] + more
            if total.has_no_room(used, more) or (back and back.has_no_room(total, part, more)):
                return False
            counted.append((total, part, used, more - peaks))
        return True

    def returns(self, needs: Needs, args: Sequence[int | bytes]) -> Returns | None:
        """Return what a run reads and is not on the devices; None if all is."""
        if not self.tiers.off:
            return None
        return self.tiers.returns(self.buffer_of(args[index]) for index in needs.memory.inputs)

    def without_room(self, program: int, args: Sequence[int | bytes]) -> Total:
        """Return the total in which a run has no room: of a slice, of its tenant, or of the island."""
        needs = self.programs[program]
        back = self.returns(needs, args)
        if back is not None and back.is_moving:
            return self.total
        for part in needs.parts:
            peaks = self.peaks_of(part, args)
            for total in part.totals:
                more = total.with_temporaries(part, peaks)
                no_room = total.has_no_room(total.used[part.devices] + more, more)
                if no_room or (back and back.has_no_room(total, part, more)):
                    return total
        return self.total

    def shortage(self, total: Total, program: int, args: Sequence[int | bytes]) -> Bytes:
        """Return the bytes that a run lacks on each device, as a total counts."""
        needs, back = self.programs[program], self.returns(self.programs[program], args)
        self.settle()
        more = np.zeros_like(total.used) if back is None else back.bytes_in(total)
        part = needs.of(total)
        more[part.devices] += total.with_temporaries(part, self.peaks_of(part, args))
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
                buffer = self._view(output, on, arguments, claim.fresh)
            else:
                same = outputs.get(output.same_as_output) or arguments.get(output.same_as_input)
                buffer = same or Buffer(on, output.shard_bytes, used=self.runs)
                if same is None:
                    claim.fresh.append(buffer)
            outputs[output.output] = buffer
            self._name(results[output.output], buffer)
            claim.results.append((results[output.output], buffer))

    def end(self, claim: Claim) -> None:
        """A run has ended: count its results instead of its reservation."""
        self._close(claim)
        for result in claim.fresh:
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
            for part in claim.slices:
                for total in part.totals:
                    total.used[part.devices] -= part.peaks
        else:
            self.set_aside(claim, -int(claim.peaks))
        if claim.needs is not None:
            claim.needs.let_compute_no_more()
        for buffer in claim.read:
            buffer.readers -= 1
            self._let_go(buffer)

    # --- leases --------------------------------------------------------------------------------------

    def room(self, client: int, needs: Iterable[Needs]) -> Claim:
        """Return what `set_aside` makes larger, for launches of a client that need these devices."""
        everywhere: dict[DeviceAddress, None] = {}
        slices: dict[tuple[Total, ...], dict[DeviceAddress, None]] = {}
        for one in needs:
            for part in one.parts:
                devices = everywhere if part is one else slices.setdefault(part.totals, {})
                devices.update(dict.fromkeys(chain.from_iterable(part.memory.groups)))
        parts = [
            Claim(client, on.devices, 0, on.totals, on)
            for totals, devices in (*slices.items(), (self.totals.of(client), everywhere))
            for on in (self.device_set(tuple(devices), totals),)
        ]
        parts[-1].slices = tuple(parts[:-1])
        return parts[-1]

    def set_aside(self, room: Claim, size_bytes: int) -> None:
        """Reserve more on each device of a room; less if it is below zero."""
        for part in room.parts:
            assert part.on is not None
            part.peaks += size_bytes
            part.on.unsettled_bytes += size_bytes
            self._unsettled.add(part.on)
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
        needs = self.programs.get(program)
        for part in room.parts:
            part.peaks -= size_bytes
        *slices, claim = (
            Claim(room.client, part.devices, size_bytes, part.totals, part.on)
            for part in room.parts
        )
        claim.needs, claim.slices = needs, tuple(slices)
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
            else total.bound_bytes - int(total.used[part.devices].max(initial=0))
            for part in room.parts
            for total in part.totals
        )

    # --- what a run needs ----------------------------------------------------------------------------

    def peaks_of(self, needs: Needs, args: Sequence[int | bytes]) -> Bytes:
        """Return the program's peak, plus donated buffers that stay because another array has them, plus host
        values that are donated or returned.
        """
        peaks = needs.peaks
        for index in needs.memory.donated:
            buffer = self.buffer_of(args[index])
            if buffer is not None and (buffer.names > 1 or buffer.shards is not None):
                # Hosts donate a copy.
                shared = np.isin(needs.devices, buffer.on.devices)
                peaks = peaks + shared * buffer.shard_bytes
        for index, more in needs.host_values.items():
            if not isinstance(args[index], int):
                peaks = peaks + more
        return peaks

    @property
    def claims(self) -> int:
        """Number of runs that hold a reservation."""
        return len(self.reserved)

    def has_claims(self, total: Total) -> bool:
        """Whether runs that a total counts, or may come under a lease, hold a reservation."""
        claims = (*self.reserved, *self.aside)
        return any(total in part.totals for claim in claims for part in claim.parts)
