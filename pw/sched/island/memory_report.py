"""Reports on the memory of an island: what is reserved on its devices, and why a run has no room."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import nlargest

import numpy as np

from pw.core.errors import OutOfDeviceMemory
from pw.core.ids import client_of
from pw.core.messages import CountedMemory
from pw.core.sizes import size_in_words
from pw.sched.island.memory import Buffer, Bytes, DeviceMemory

HOLDERS_NAMED = 4
"""Number of arrays that an error names: the largest ones."""


@dataclass(frozen=True, slots=True)
class NoRoom:
    """Why a run does not fit, and the largest arrays where it does not."""

    error: OutOfDeviceMemory
    holders: tuple[tuple[int, int], ...]
    """Arrays on the device, with their bytes there."""


def counted(memory: DeviceMemory) -> tuple[CountedMemory, ...]:
    """Return the bytes on each device; takes one step for each reservation and each device."""
    reserved: defaultdict[int, Bytes] = defaultdict(lambda: np.zeros_like(memory.temporaries))
    arrays = memory.settled() - memory.temporaries
    for claim in memory.reserved | memory.aside:
        reserved[claim.client][claim.devices] += claim.peaks
        arrays[claim.devices] -= claim.peaks
    return tuple(
        CountedMemory(
            device,
            int(arrays[number]),
            tuple((client, int(each[number])) for client, each in reserved.items() if each[number]),
            int(memory.temporaries[number]),
        )
        for number, device in enumerate(memory.devices)
    )


def never_fits(memory: DeviceMemory, program: int, args: Sequence[int | bytes]) -> NoRoom | None:
    """Return why a run would not even fit alone with its arguments; None if it would."""
    needs = memory.programs[program]
    peaks = memory.peaks_of(needs, args)
    inputs = np.zeros_like(memory.temporaries)
    arguments = [args[index] for index in needs.memory.inputs]
    for shard in _buffers(memory.buffer_of(arg) for arg in arguments):
        inputs[shard.on.devices] += shard.shard_bytes
    if needs.temporaries is not None:
        peaks = peaks + needs.temporaries
    alone = peaks + inputs[needs.devices]
    worst = int(alone.argmax()) if alone.size else 0
    if not alone.size or alone[worst] <= memory.capacity_bytes:
        return None
    number = int(needs.devices[worst])
    error = OutOfDeviceMemory(
        f"program {needs.name!r} needs {size_in_words(int(alone[worst]))} on "
        f"{memory.device_in_words(number)}, {size_in_words(int(inputs[number]))} of it for "
        f"its arguments, and the device has {size_in_words(memory.capacity_bytes)}. Divide its arrays over "
        "more devices, donate arguments that are not used again, or make it smaller"
    )
    arrays = dict.fromkeys(arg for arg in arguments if isinstance(arg, int))
    return NoRoom(error, _largest(_on_device(memory, number, arrays)))


def no_room(memory: DeviceMemory, program: int, args: Sequence[int | bytes], client: int) -> NoRoom:
    """Return why a run does not fit beside the arrays that there are."""
    needs = memory.programs[program]
    peaks = memory.with_temporaries(needs, memory.peaks_of(needs, args))
    used = memory.settled()[needs.devices] + peaks
    worst = int(np.where(peaks > 0, used, -1).argmax())
    number = int(needs.devices[worst])
    held = list(_on_device(memory, number, memory.buffers))
    own = [size_bytes for array, size_bytes in held if client_of(array) == client]
    foreign = [size_bytes for array, size_bytes in held if client_of(array) != client]
    error = OutOfDeviceMemory(
        f"program {needs.name!r} needs {size_in_words(int(peaks[worst]))} more on "
        f"{memory.device_in_words(number)}, which has {size_in_words(memory.capacity_bytes)}: "
        f"{size_in_words(sum(own))} are held by {len(own)} live arrays of "
        f"this client, {size_in_words(sum(foreign))} by {len(foreign)} arrays of other clients, and nothing is "
        "running there that would free any. Delete arrays that are not used any more, donate "
        f"arguments, or move arrays to other devices or to host memory{_spill(memory, number)}"
    )
    return NoRoom(error, _largest(held))


def _spill(memory: DeviceMemory, number: int) -> str:
    """Return why no array leaves a device for host memory by itself."""
    if not memory.spill_bytes:
        return "; pw-worker --spill lets arrays leave for host memory by themselves"
    used_bytes = memory.off_bytes()[memory.devices[number].host]
    return (
        f". {size_in_words(used_bytes)} of {size_in_words(memory.spill_bytes)} on its host hold arrays that "
        "have left (pw-worker --spill), and the others do not make enough room, share their bytes, or find no "
        "place there"
    )


def _buffers(buffers: Iterable[Buffer | None]) -> set[Buffer]:
    return {one for buffer in buffers if buffer is not None for one in buffer.parts()}


def _on_device(
    memory: DeviceMemory, number: int, arrays: Iterable[int]
) -> Iterator[tuple[int, int]]:
    """Return which of these arrays are counted on a device, with their bytes; a shared buffer once."""
    seen: set[Buffer] = set()
    for array in arrays:
        named = memory.buffers.get(array)
        for buffer in () if named is None else named.parts():
            if buffer.is_counted and buffer not in seen and number in buffer.on.devices:
                seen.add(buffer)
                yield array, buffer.shard_bytes


def _largest(held: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    return tuple(nlargest(HOLDERS_NAMED, held, key=lambda one: one[1]))
