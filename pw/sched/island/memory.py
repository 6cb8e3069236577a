"""The device memory of one island as its scheduler counts it, before anything is launched.

Three things take memory: buffers of live arrays, reservations of admitted runs, and nothing else. A
run that is admitted reserves its peak on every device (`pw.core.peak`). When it has ended, the
reservation goes and what it made is counted as buffers. A buffer is counted as long as an array has
it (several may: a program can return its argument, or one value twice) or a run in flight reads it:
a delete or a donation takes the name away at once, and the bytes come back when nobody in flight
can touch them any more.

Temporaries are reserved once for all runs in flight, as much as the one that needs most of them: a
device computes one thing after the other, and what one has used is there for the next. So a program
with large temporaries is still launched ahead. A run's peak is therefore kept in two parts: what it
reserves for itself, and what its computations add to that for temporaries.

What is launched can therefore always allocate: on each device buffers and reservations together
never exceed the capacity by an admission. Uploads are not admitted; they only take away from what
is left.

All buffers on the same devices are counted as one number until somebody looks, so that an array
costs an addition, and a run a few vector operations over the devices that its program touches.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from pw.core.errors import OutOfDeviceMemory
from pw.core.ids import client_of
from pw.core.peak import IslandMemory, OutputMemory
from pw.core.sharding import DeviceAddress

_Bytes = npt.NDArray[np.int64]


@dataclass(slots=True, eq=False)
class _Place:
    """A set of devices that buffers share."""

    devices: npt.NDArray[np.intp]
    unsettled_bytes: int = 0
    """What has come and gone on each of the devices since somebody looked."""


@dataclass(slots=True, eq=False)
class _Buffer:
    place: _Place
    shard_bytes: int
    names: int = 0
    """Arrays that have it."""
    readers: int = 0
    """Runs in flight that read it."""
    is_counted: bool = False
    """It has bytes of its own; what a run in flight makes is in that run's reservation."""


@dataclass(slots=True, eq=False)
class _Needs:
    """What a run of a program takes."""

    name: str
    memory: IslandMemory
    devices: npt.NDArray[np.intp]
    group: npt.NDArray[np.intp]
    outputs: list[tuple[OutputMemory, _Place]]
    peaks: _Bytes
    """What a run reserves for itself on each of the devices."""
    temporary_bytes: tuple[int, ...] = ()
    temporaries: _Bytes | None = None
    """What its computations add to that; None for nothing."""
    runs: int = 0
    """Runs that hold a reservation."""


@dataclass(slots=True, eq=False)
class Claim:
    """A reservation of one run."""

    devices: npt.NDArray[np.intp]
    peaks: _Bytes
    needs: _Needs | None = None
    read: list[_Buffer] = field(default_factory=list)
    donated: list[tuple[int, _Buffer]] = field(default_factory=list)
    results: list[tuple[int, _Buffer]] = field(default_factory=list)


class DeviceMemory:
    """Counts what is held and reserved on each device of an island."""

    def __init__(self, island: str, capacity_bytes: int) -> None:
        self._island = island
        self._capacity_bytes = capacity_bytes
        self._numbers: dict[DeviceAddress, int] = {}
        self._used: _Bytes = np.zeros(0, np.int64)
        self._temporaries: _Bytes = np.zeros(0, np.int64)
        """What of it is reserved for temporaries, for whichever run in flight computes."""
        self._computing: set[_Needs] = set()
        """Programs that take temporaries and have runs in flight."""
        self._places: dict[tuple[DeviceAddress, ...], _Place] = {}
        self._unsettled: set[_Place] = set()
        self._buffers: dict[int, _Buffer] = {}
        self._programs: dict[int, _Needs] = {}
        self.claims = 0
        """Runs that hold a reservation."""
        self.frees = 0
        """Goes up whenever memory may have come back."""
        self.arriving: set[int] = set()
        """Arrays that are on their way to their devices."""

    # --- programs ------------------------------------------------------------------------------------

    def install(self, program: int, name: str, memory: IslandMemory | None) -> None:
        """Remember what a run of a program takes; without `memory` it takes nothing."""
        if memory is None:
            self._programs.pop(program, None)
            return
        sizes = [len(group) for group in memory.groups]
        numbers = np.repeat(np.arange(len(sizes)), sizes)
        self._programs[program] = _Needs(
            name,
            memory,
            self._numbered(device for group in memory.groups for device in group),
            numbers,
            [(output, self._place(output.devices)) for output in memory.outputs],
            np.array(memory.peaks(), np.int64)[numbers],
        )

    def add_temporaries(self, program: int, temporary_bytes: tuple[int, ...]) -> None:
        """A host has said what the computations of a program take besides arguments and results."""
        needs = self._programs.get(program)
        if needs is not None and temporary_bytes:
            known = needs.temporary_bytes or (0,) * len(temporary_bytes)
            needs.temporary_bytes = tuple(map(max, known, temporary_bytes))
            peaks = np.array(needs.memory.peaks(needs.temporary_bytes), np.int64)[needs.group]
            if (peaks > needs.peaks).any():
                needs.temporaries = peaks - needs.peaks
                if needs.runs:
                    self._computing.add(needs)
                    self._share_temporaries()

    def uninstall(self, program: int) -> None:
        """Forget a program; its runs in flight keep what they have."""
        self._programs.pop(program, None)

    # --- arrays --------------------------------------------------------------------------------------

    def place(self, array: int, devices: tuple[DeviceAddress, ...], shard_bytes: int) -> None:
        """An array that no run makes takes memory from now on, before it has arrived."""
        buffer = _Buffer(self._place(devices), shard_bytes)
        self._name(array, buffer)
        self._count(buffer)
        self.arriving.add(array)

    def arrived(self, array: int) -> None:
        """The array is on all its devices, or will not come."""
        self.arriving.discard(array)

    def release(self, array: int) -> None:
        """The array is gone; its bytes come back when no run in flight reads them."""
        self.arriving.discard(array)
        buffer = self._buffers.pop(array, None)
        if buffer is not None:
            buffer.names -= 1
            self._let_go(buffer)

    def forget(self, client: int) -> None:
        """All that a client has is gone."""
        for array in [array for array in self._buffers if client_of(array) == client]:
            self.release(array)
        for program in [program for program in self._programs if client_of(program) == client]:
            del self._programs[program]

    def _name(self, array: int, buffer: _Buffer) -> None:
        buffer.names += 1
        self.release(array)
        self._buffers[array] = buffer

    def _count(self, buffer: _Buffer) -> None:
        buffer.is_counted = True
        buffer.place.unsettled_bytes += buffer.shard_bytes
        self._unsettled.add(buffer.place)

    def _let_go(self, buffer: _Buffer) -> None:
        if buffer.is_counted and not buffer.names and not buffer.readers:
            buffer.is_counted = False
            buffer.place.unsettled_bytes -= buffer.shard_bytes
            self._unsettled.add(buffer.place)
            self.frees += 1

    # --- runs ----------------------------------------------------------------------------------------

    def reserve(
        self, program: int, args: Sequence[int | bytes], results: Sequence[int]
    ) -> Claim | None:
        """Reserve a run's peak beside all that is held and reserved; None if it does not fit."""
        self.claims += 1
        needs = self._programs.get(program)
        if needs is None:
            return Claim(np.zeros(0, np.intp), np.zeros(0, np.int64))
        peaks = self._peaks(needs, args)
        more = self._with_temporaries(needs, peaks)
        used = self._settled()[needs.devices] + more
        if ((used > self._capacity_bytes) & (more > 0)).any():
            self.claims -= 1
            return None
        self._used[needs.devices] = used
        if needs.temporaries is not None and not needs.runs:
            self._computing.add(needs)
            self._temporaries[needs.devices] += more - peaks
        needs.runs += 1
        claim = Claim(needs.devices, peaks, needs)
        given = {index: self._given(args[index]) for index in needs.memory.inputs}
        for buffer in given.values():
            if buffer is not None:
                buffer.readers += 1
                claim.read.append(buffer)
        for index in needs.memory.donated:
            array = args[index]
            if isinstance(array, int) and (donated := self._buffers.pop(array, None)) is not None:
                donated.names -= 1
                claim.donated.append((array, donated))
        made: dict[int, _Buffer] = {}
        for output, place in needs.outputs:
            same = made.get(output.same_as_output) or given.get(output.same_as_input)
            made[output.output] = buffer = same or _Buffer(place, output.shard_bytes)
            self._name(results[output.output], buffer)
            claim.results.append((results[output.output], buffer))
        return claim

    def end(self, claim: Claim) -> None:
        """The run has ended: what is left of it are its results."""
        self._close(claim)
        for _, buffer in claim.results:
            if not buffer.is_counted and (buffer.names or buffer.readers):
                self._count(buffer)

    def withdraw(self, claim: Claim) -> None:
        """The run will not start: nothing of it is, and what it would have taken is still there."""
        for array, buffer in claim.results:
            if self._buffers.get(array) is buffer:
                self.release(array)
        for array, buffer in claim.donated:
            if array not in self._buffers:
                self._name(array, buffer)
        self._close(claim)

    def _close(self, claim: Claim) -> None:
        self.claims -= 1
        self.frees += 1
        self._used[claim.devices] -= claim.peaks
        needs = claim.needs
        if needs is not None:
            needs.runs -= 1
            if not needs.runs and needs.temporaries is not None:
                self._computing.remove(needs)
                self._share_temporaries()
        for buffer in claim.read:
            buffer.readers -= 1
            self._let_go(buffer)

    def _given(self, arg: int | bytes) -> _Buffer | None:
        return self._buffers.get(arg) if isinstance(arg, int) else None

    def _peaks(self, needs: _Needs, args: Sequence[int | bytes]) -> _Bytes:
        """The program's peak; a donated buffer that another array has as well does not come back."""
        peaks = needs.peaks
        for index in needs.memory.donated:
            buffer = self._given(args[index])
            if buffer is not None and buffer.names > 1:
                shared = np.isin(needs.devices, buffer.place.devices)
                peaks = peaks + shared * buffer.shard_bytes
        return peaks

    def _with_temporaries(self, needs: _Needs, peaks: _Bytes) -> _Bytes:
        """What a run adds to what is used: of its temporaries, what is not reserved for others."""
        if needs.temporaries is None or needs.runs:
            return peaks
        beyond = needs.temporaries - self._temporaries[needs.devices]
        more: _Bytes = peaks + np.maximum(beyond, 0)
        return more

    def _share_temporaries(self) -> None:
        """Reserve on each device the largest temporaries of the runs in flight."""
        largest = np.zeros_like(self._temporaries)
        for needs in self._computing:
            assert needs.temporaries is not None
            largest[needs.devices] = np.maximum(largest[needs.devices], needs.temporaries)
        self._used += largest - self._temporaries
        self._temporaries = largest

    # --- refusals ------------------------------------------------------------------------------------

    def never_fits(self, program: int, args: Sequence[int | bytes]) -> OutOfDeviceMemory | None:
        """Why a run could not even have the island to itself, with its arguments; None if it could."""
        needs = self._programs[program]
        peaks = self._peaks(needs, args)
        inputs = np.zeros_like(self._used)
        for buffer in {self._given(args[index]) for index in needs.memory.inputs} - {None}:
            assert buffer is not None
            inputs[buffer.place.devices] += buffer.shard_bytes
        if needs.temporaries is not None:
            peaks = peaks + needs.temporaries
        alone = peaks + inputs[needs.devices]
        worst = int(alone.argmax()) if alone.size else 0
        if not alone.size or alone[worst] <= self._capacity_bytes:
            return None
        return OutOfDeviceMemory(
            f"program {needs.name!r} needs {_size(alone[worst])} on "
            f"{self._device(needs.devices[worst])}, {_size(inputs[needs.devices[worst]])} of it for "
            f"its arguments, and the device has {_size(self._capacity_bytes)}. Divide its arrays over "
            "more devices, donate arguments that are not used again, or make it smaller"
        )

    def no_room(self, program: int, args: Sequence[int | bytes], client: int) -> OutOfDeviceMemory:
        """Why a run does not fit beside the arrays that are alive: who has how much of the memory."""
        needs = self._programs[program]
        peaks = self._with_temporaries(needs, self._peaks(needs, args))
        used = self._settled()[needs.devices] + peaks
        worst = int(np.where(peaks > 0, used, -1).argmax())
        number = needs.devices[worst]
        own_bytes = other_bytes = 0
        own = others = 0
        seen: set[int] = set()
        for array, buffer in self._buffers.items():
            if not buffer.is_counted or id(buffer) in seen or number not in buffer.place.devices:
                continue
            seen.add(id(buffer))
            if client_of(array) == client:
                own, own_bytes = own + 1, own_bytes + buffer.shard_bytes
            else:
                others, other_bytes = others + 1, other_bytes + buffer.shard_bytes
        return OutOfDeviceMemory(
            f"program {needs.name!r} needs {_size(peaks[worst])} more on {self._device(number)}, which "
            f"has {_size(self._capacity_bytes)}: {_size(own_bytes)} are held by {own} live arrays of "
            f"this client, {_size(other_bytes)} by {others} arrays of other clients, and nothing is "
            "running there that would free any. Delete arrays that are not used any more, donate "
            "arguments, or move arrays to other devices or to host memory"
        )

    # --- devices -------------------------------------------------------------------------------------

    def used_bytes(self, device: DeviceAddress) -> int:
        """What is held and reserved on a device."""
        number = self._numbers.get(device)
        return 0 if number is None else int(self._settled()[number])

    def _numbered(self, devices: Iterable[DeviceAddress]) -> npt.NDArray[np.intp]:
        numbers = [self._numbers.setdefault(device, len(self._numbers)) for device in devices]
        missing = len(self._numbers) - len(self._used)
        if missing:
            fresh = np.zeros(missing, np.int64)
            self._used = np.concatenate([self._used, fresh])
            self._temporaries = np.concatenate([self._temporaries, fresh])
        return np.array(numbers, np.intp)

    def _place(self, devices: tuple[DeviceAddress, ...]) -> _Place:
        place = self._places.get(devices)
        if place is None:
            place = self._places[devices] = _Place(self._numbered(devices))
        return place

    def _settled(self) -> _Bytes:
        for place in self._unsettled:
            if place.unsettled_bytes:
                self._used[place.devices] += place.unsettled_bytes
                place.unsettled_bytes = 0
        self._unsettled.clear()
        return self._used

    def _device(self, number: int) -> str:
        device = list(self._numbers)[number]
        return f"device {device.ordinal} of host {device.host} (island {self._island})"


def _size(size_bytes: int) -> str:
    """Bytes as a person reads them."""
    for unit, one in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size_bytes >= one:
            return f"{size_bytes / one:.2f} {unit}"
    return f"{size_bytes} B"
