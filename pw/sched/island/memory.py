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
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

import numpy as np
import numpy.typing as npt

from pw.core.ids import client_of
from pw.core.programs.peak import IslandMemory, OutputMemory
from pw.core.sharding import DeviceAddress

Bytes = npt.NDArray[np.int64]


class Tier(Enum):
    """Memory in which a buffer lies.

    | tier | counts on the devices | `DeviceMemory.spill` | `spilled` | a run reads it |
    |---|---|---|---|---|
    | DEVICE | yes | LEAVING | | DEVICE |
    | LEAVING | yes | | HOST; STAYS if it was not copied | waits |
    | HOST | no | | | DEVICE, and its bytes are part of what the run needs |
    | STAYS | yes | | | STAYS |
    """

    DEVICE = "device"
    LEAVING = "leaving"
    """It is being copied to host memory."""
    HOST = "host"
    STAYS = "stays"
    """It could not be copied to host memory."""


@dataclass(slots=True, eq=False)
class _DeviceSet:
    """The devices that a buffer is on."""

    addresses: tuple[DeviceAddress, ...]
    devices: npt.NDArray[np.intp]
    unsettled_bytes: int = 0
    """Bytes on each of the devices that buffers have added or removed, and that `_used` does not count yet."""


@dataclass(slots=True, eq=False)
class Buffer:
    """The memory of an array, on each of its devices."""

    on: _DeviceSet
    shard_bytes: int
    names: int = 0
    """Number of arrays that have the buffer."""
    readers: int = 0
    """Number of runs in flight that read the buffer."""
    is_counted: bool = False
    """True if the buffer counts on its own; a result of a run in flight is part of the run's reservation."""
    tier: Tier = Tier.DEVICE
    used: int = 0
    """Number of the newest run that has read or made the buffer (`DeviceMemory.runs`)."""
    shards: dict[DeviceAddress, Buffer] | None = None
    """Buffers of a view, or of a buffer that is divided for one, by device. These are counted instead, and the
    divided buffer is one of their `names` until no array and no run has it any more."""

    @property
    def is_needed(self) -> bool:
        """Return whether an array or a run in flight has the buffer."""
        return bool(self.names or self.readers)

    def parts(self) -> Iterable[Buffer]:
        """Return the buffers that are counted for it: itself, or one for each device."""
        return (self,) if self.shards is None else self.shards.values()


@dataclass(slots=True, eq=False)
class Needs:
    """The memory that a run of a program needs."""

    name: str
    memory: IslandMemory
    devices: npt.NDArray[np.intp]
    group: npt.NDArray[np.intp]
    outputs: list[tuple[OutputMemory, _DeviceSet]]
    peaks: Bytes
    """Bytes that are reserved for the run itself on each device."""
    temporary_bytes: tuple[int, ...] = ()
    temporaries: Bytes | None = None
    """Bytes that the temporaries of the program add on each device; None if there are none."""
    runs: int = 0
    """Number of runs of the program that hold a reservation."""


@dataclass(slots=True, eq=False)
class Claim:
    """Reservation of one run, or of memory that is set aside for launches of a client."""

    client: int
    devices: npt.NDArray[np.intp]
    peaks: Bytes | int
    """Bytes on each device, or the same bytes on all of them."""
    on: _DeviceSet | None = None
    """Devices, if the bytes are the same on all."""
    needs: Needs | None = None
    read: list[Buffer] = field(default_factory=list)
    donated: list[tuple[int, Buffer]] = field(default_factory=list)
    results: list[tuple[int, Buffer]] = field(default_factory=list)


class DeviceMemory:
    """Counts the buffers and reservations on each device of an island."""

    def __init__(self, island: str, capacity_bytes: int, spill_bytes: int = 0) -> None:
        self.island = island
        self.capacity_bytes = capacity_bytes
        """Bytes of each device."""
        self.spill_bytes = spill_bytes
        """Bytes of memory of each host for arrays that leave the devices; 0 if they stay there."""
        self._numbers: dict[DeviceAddress, int] = {}
        self._used: Bytes = np.zeros(0, np.int64)
        self.temporaries: Bytes = np.zeros(0, np.int64)
        """Bytes of `_used` that are reserved for the temporaries of all runs in flight."""
        self._computing: set[Needs] = set()
        """Programs that need temporaries and have runs in flight."""
        self._device_sets: dict[tuple[DeviceAddress, ...], _DeviceSet] = {}
        self._unsettled: set[_DeviceSet] = set()
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
        self.off: set[Buffer] = set()
        """Buffers in host memory, or on their way there."""
        self.runs = 0
        """Number of runs that have been admitted or launched."""

    # --- programs ------------------------------------------------------------------------------------

    def install(self, program: int, name: str, memory: IslandMemory | None) -> None:
        """Remember the needs of a program; without `memory` it needs none."""
        if memory is None:
            self.programs.pop(program, None)
            return
        sizes = [len(group) for group in memory.groups]
        numbers = np.repeat(np.arange(len(sizes)), sizes)
        self.programs[program] = Needs(
            name,
            memory,
            self._numbered(device for group in memory.groups for device in group),
            numbers,
            [(output, self._device_set(output.devices)) for output in memory.outputs],
            np.array(memory.peaks(), np.int64)[numbers],
        )

    def add_temporaries(self, program: int, temporary_bytes: tuple[int, ...]) -> None:
        """A host has reported the temporaries of a program's computations."""
        needs = self.programs.get(program)
        if needs is not None and temporary_bytes:
            previous = needs.temporary_bytes or (0,) * len(temporary_bytes)
            needs.temporary_bytes = tuple(map(max, previous, temporary_bytes))
            peaks = np.array(needs.memory.peaks(needs.temporary_bytes), np.int64)[needs.group]
            if (peaks > needs.peaks).any():
                needs.temporaries = peaks - needs.peaks
                if needs.runs:
                    self._computing.add(needs)
                    self._share_temporaries()

    def uninstall(self, program: int) -> None:
        """Forget a program; its runs in flight keep their reservations."""
        self.programs.pop(program, None)

    # --- arrays --------------------------------------------------------------------------------------

    def place(self, array: int, devices: tuple[DeviceAddress, ...], shard_bytes: int) -> None:
        """Count an array that is uploaded, before it has arrived."""
        buffer = Buffer(self._device_set(devices), shard_bytes)
        self._name(array, buffer)
        self._count(buffer)
        self.arriving.add(array)

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

    def _count(self, buffer: Buffer) -> None:
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
        elif buffer.tier is Tier.HOST:
            buffer.tier = Tier.DEVICE
            self.off.remove(buffer)
        elif buffer.is_counted and buffer.tier is not Tier.LEAVING:
            self._uncount(buffer)
            self.frees += 1

    def _uncount(self, buffer: Buffer) -> None:
        buffer.is_counted = False
        buffer.on.unsettled_bytes -= buffer.shard_bytes
        self._unsettled.add(buffer.on)

    # --- tiers ---------------------------------------------------------------------------------------

    def spill(self, buffer: Buffer) -> None:
        """Hosts copy a buffer to their memory; nothing reads it meanwhile."""
        buffer.tier = Tier.LEAVING
        self.off.add(buffer)

    def keep_off(self, array: int) -> None:
        """An upload stays in host memory until a run reads it."""
        buffer = self.buffers[array]
        self._uncount(buffer)
        buffer.tier = Tier.HOST
        self.off.add(buffer)

    def spilled(self, buffer: Buffer, *, kept: bool) -> None:
        """A buffer does not lie on the devices any more, unless hosts have `kept` it there."""
        self.frees += 1
        if kept and buffer.is_needed:
            buffer.tier = Tier.STAYS
            self.off.remove(buffer)
            return
        self._uncount(buffer)
        if buffer.is_needed:
            buffer.tier = Tier.HOST
        else:  # it was deleted meanwhile
            buffer.tier = Tier.DEVICE
            self.off.remove(buffer)

    def _return(self, buffers: Iterable[Buffer | None]) -> None:
        """Count buffers on their devices again, because a run reads them."""
        for buffer in buffers:
            if buffer is not None and buffer.tier is Tier.HOST:
                buffer.tier = Tier.DEVICE
                self.off.remove(buffer)
                self._count(buffer)

    def returns(self, needs: Needs, args: Sequence[int | bytes]) -> Bytes | None:
        """Return the bytes on each device of what a run reads and is in host memory.

        None if some of it is on its way there.
        """
        total = np.zeros_like(self._used)
        for buffer in {self.buffer_of(args[index]) for index in needs.memory.inputs}:
            if buffer is not None and buffer.tier is Tier.LEAVING:
                return None
            if buffer is not None and buffer.tier is Tier.HOST:
                total[buffer.on.devices] += buffer.shard_bytes
        return total

    def shortage(self, program: int, args: Sequence[int | bytes]) -> Bytes:
        """Return how many bytes a run lacks on each device; none where it needs nothing more."""
        needs = self.programs[program]
        more = np.zeros_like(self._used)
        back = self.returns(needs, args)
        if back is not None:
            more += back
        more[needs.devices] += self.with_temporaries(needs, self.peaks_of(needs, args))
        short: Bytes = np.where(more > 0, self.settled() + more - self.capacity_bytes, 0)
        return short

    def off_bytes(self) -> Counter[str]:
        """Return the bytes of arrays in the memory of each host, or on their way there."""
        total: Counter[str] = Counter()
        for buffer in self.off:
            for device in buffer.on.addresses:
                total[device.host] += buffer.shard_bytes
        return total

    def has_off(self, client: int) -> bool:
        """Whether arrays of a client lie in host memory, or are on their way there."""
        return bool(self.off) and any(
            buffer in self.off and client_of(array) == client
            for array, buffer in self.buffers.items()
        )

    # --- views ---------------------------------------------------------------------------------------

    def _view(
        self, output: OutputMemory, on: _DeviceSet, arguments: Mapping[int, Buffer | None]
    ) -> Buffer:
        """Return the buffer of a view, which names shards of the arguments."""
        view = Buffer(on, output.shard_bytes, is_counted=True, shards={})
        assert view.shards is not None
        for device, source in zip(output.devices, output.shards, strict=True):
            buffer = arguments.get(source)
            if buffer is None:  # a small host value, which hosts make for this run
                shard = Buffer(self._device_set((device,)), output.shard_bytes)
                self._count(shard)
            else:
                shard = self._divided(buffer)[device]
            shard.names += 1
            view.shards[device] = shard
        return view

    def _divided(self, buffer: Buffer) -> dict[DeviceAddress, Buffer]:
        """Return the buffer on each device."""
        if buffer.shards is None:
            buffer.shards = {
                device: Buffer(self._device_set((device,)), buffer.shard_bytes, names=1)
                for device in buffer.on.addresses
            }
            if buffer.is_counted:
                self._uncount(buffer)
                for shard in buffer.shards.values():
                    self._count(shard)
        return buffer.shards

    # --- runs ----------------------------------------------------------------------------------------

    def reserve(
        self, program: int, args: Sequence[int | bytes], results: Sequence[int]
    ) -> Claim | None:
        """Reserve a run's peak. Return None if it does not fit."""
        needs = self.programs.get(program)
        if needs is None:
            claim = Claim(client_of(program), np.zeros(0, np.intp), np.zeros(0, np.int64))
            self.reserved.add(claim)
            return claim
        peaks = self.peaks_of(needs, args)
        more = self.with_temporaries(needs, peaks)
        used = self.settled()[needs.devices] + more
        if ((used > self.capacity_bytes) & (more > 0)).any():
            return None
        if self.off:
            back = self.returns(needs, args)
            if back is None:
                return None
            beyond = self._used + back
            beyond[needs.devices] += more
            if ((beyond > self.capacity_bytes) & (back > 0)).any():
                return None
        self._used[needs.devices] = used
        if needs.temporaries is not None and not needs.runs:
            self._computing.add(needs)
            self.temporaries[needs.devices] += more - peaks
        needs.runs += 1
        claim = Claim(client_of(program), needs.devices, peaks, needs=needs)
        self._name_all(claim, needs, args, results)
        return claim

    def _name_all(
        self, claim: Claim, needs: Needs, args: Sequence[int | bytes], results: Sequence[int]
    ) -> None:
        """A run reads, takes and makes arrays from now on."""
        self.reserved.add(claim)
        self.runs += 1
        arguments = {index: self.buffer_of(args[index]) for index in needs.memory.inputs}
        if self.off:
            self._return(arguments.values())
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
                        self._count(buffer)

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
            self._used[claim.devices] -= claim.peaks
        else:
            self.set_aside(claim, -int(claim.peaks))
        if claim.needs is not None:
            self.let_compute_no_more(claim.needs)
        for buffer in claim.read:
            buffer.readers -= 1
            self._let_go(buffer)

    # --- leases --------------------------------------------------------------------------------------

    def let_compute(self, needs: Needs) -> None:
        """Reserve the temporaries of a program, as for a run in flight."""
        needs.runs += 1
        if needs.runs == 1 and needs.temporaries is not None:
            self._computing.add(needs)
            self._share_temporaries()

    def let_compute_no_more(self, needs: Needs) -> None:
        """A run has ended, or `let_compute`."""
        needs.runs -= 1
        if not needs.runs and needs.temporaries is not None:
            self._computing.remove(needs)
            self._share_temporaries()

    def room(self, client: int, devices: Iterable[DeviceAddress]) -> Claim:
        """Return what `set_aside` makes larger, for launches of a client on these devices."""
        on = self._device_set(tuple(devices))
        return Claim(client, on.devices, 0, on)

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
        claim = Claim(room.client, room.devices, size_bytes, room.on, needs)
        self.reserved.add(claim)
        if needs is not None:
            self.let_compute(needs)
            self._name_all(claim, needs, args, results)
        return claim

    def free_bytes(self, room: Claim) -> int:
        """Return how much is free on each device of a room."""
        return self.capacity_bytes - int(self.settled()[room.devices].max(initial=0))

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

    def with_temporaries(self, needs: Needs, peaks: Bytes) -> Bytes:
        """Return what a run adds to `_used`: its peak, and temporaries beyond those reserved already."""
        if needs.temporaries is None or needs.runs:
            return peaks
        beyond = needs.temporaries - self.temporaries[needs.devices]
        more: Bytes = peaks + np.maximum(beyond, 0)
        return more

    def _share_temporaries(self) -> None:
        """Reserve on each device the largest temporaries of the runs in flight."""
        largest = np.zeros_like(self.temporaries)
        for needs in self._computing:
            assert needs.temporaries is not None
            largest[needs.devices] = np.maximum(largest[needs.devices], needs.temporaries)
        self._used += largest - self.temporaries
        self.temporaries = largest

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
        missing = len(self._numbers) - len(self._used)
        if missing:
            fresh = np.zeros(missing, np.int64)
            self._used = np.concatenate([self._used, fresh])
            self.temporaries = np.concatenate([self.temporaries, fresh])
        return np.array(numbers, np.intp)

    def _device_set(self, devices: tuple[DeviceAddress, ...]) -> _DeviceSet:
        on = self._device_sets.get(devices)
        if on is None:
            on = self._device_sets[devices] = _DeviceSet(devices, self._numbered(devices))
        return on

    def settled(self) -> Bytes:
        """Return the bytes of buffers and reservations on each device."""
        for on in self._unsettled:
            if on.unsettled_bytes:
                self._used[on.devices] += on.unsettled_bytes
                on.unsettled_bytes = 0
        self._unsettled.clear()
        return self._used

    def device_in_words(self, number: int) -> str:
        """Return the name of a device for an error."""
        device = list(self._numbers)[number]
        return f"device {device.ordinal} of host {device.host} (island {self.island})"
