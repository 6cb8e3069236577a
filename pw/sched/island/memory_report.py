"""Reports on the memory of an island: what is reserved on its devices, and why work has no room there."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import nlargest

import numpy as np

from pw.core.errors import OutOfDeviceMemory, QuotaExceeded
from pw.core.ids import client_of, serial_of
from pw.core.messages import CountedMemory
from pw.core.sharding import DeviceAddress
from pw.core.sizes import size_in_words
from pw.sched.island.buffers import Buffer
from pw.sched.island.memory import DeviceMemory
from pw.sched.island.memory_totals import Bytes, DeviceSet, Total
from pw.sched.island.pending_uploads import PendingUpload

HOLDERS_NAMED = 4
"""Number of arrays that an error names: the largest ones."""


@dataclass(frozen=True, slots=True)
class NoRoom:
    """Why a run or an upload does not fit, and the largest arrays where it does not."""

    error: OutOfDeviceMemory | QuotaExceeded
    holders: tuple[tuple[int, int], ...] = ()
    """Arrays on the device, with their bytes there."""


def counted(memory: DeviceMemory) -> tuple[CountedMemory, ...]:
    """Return the bytes on each device; takes one step for each reservation and each device."""
    temporaries = memory.total.temporaries
    reserved: defaultdict[int, Bytes] = defaultdict(lambda: np.zeros_like(temporaries))
    arrays = memory.settled() - temporaries
    for claim in memory.reserved | memory.aside:
        reserved[claim.client][claim.devices] += claim.peaks
        arrays[claim.devices] -= claim.peaks
    slices = memory.totals.by_slice
    return tuple(
        CountedMemory(
            device,
            int(arrays[number]),
            tuple((client, int(each[number])) for client, each in reserved.items() if each[number]),
            int(temporaries[number]),
            tuple((slice, int(used)) for slice in slices if (used := slices[slice].used[number])),
        )
        for number, device in enumerate(memory.devices)
    )


def held_by_clients(memory: DeviceMemory) -> dict[DeviceAddress, Counter[int]]:
    """Return the bytes that runs and arrays of each client have on each device; a step for each array."""
    held = {one.device: Counter(dict(one.reserved)) for one in counted(memory)}
    arrays: Counter[tuple[int, DeviceSet]] = Counter()
    seen: set[Buffer] = set()
    for array, buffer in memory.buffers.items():
        for part in buffer.parts():
            if part.is_counted and part not in seen:
                seen.add(part)
                arrays[client_of(array), part.on] += part.shard_bytes
    devices = memory.devices
    for (client, on), size_bytes in arrays.items():
        for number in on.devices:
            held[devices[number]][client] += size_bytes
    return held


def most_bytes(memory: DeviceMemory) -> Iterator[tuple[str, int]]:
    """Yield each tenant that is counted, with its bytes on the device where it has most."""
    memory.settle()
    totals = memory.totals.by_tenant.values()
    return ((total.tenant, int(total.used.max(initial=0))) for total in totals)


def never_fits(memory: DeviceMemory, program: int, args: Sequence[int | bytes]) -> NoRoom | None:
    """Return why a run would not even fit alone with its arguments; None if it would."""
    parts = memory.programs[program].parts
    totals = (total for part in parts for total in part.totals)
    whys = (_never_fits(memory, total, program, args) for total in totals)
    return next(filter(None, whys), None)


def _never_fits(
    memory: DeviceMemory, total: Total, program: int, args: Sequence[int | bytes]
) -> NoRoom | None:
    arguments = [args[index] for index in memory.programs[program].memory.inputs]
    needs = memory.programs[program].of(total)
    peaks = memory.peaks_of(needs, args)
    inputs = np.zeros_like(total.temporaries)
    for shard in _buffers(memory.buffer_of(arg) for arg in arguments):
        if total in shard.on.totals:
            inputs[shard.on.devices] += shard.shard_bytes
    if needs.temporaries is not None:
        peaks = peaks + needs.temporaries
    alone = peaks + inputs[needs.devices]
    worst = int(alone.argmax()) if alone.size else 0
    if not alone.size or total.bound_bytes is None or alone[worst] <= total.bound_bytes:
        return None
    number = int(needs.devices[worst])
    run = (
        f"program {needs.name!r} needs {size_in_words(int(alone[worst]))} on "
        f"{memory.device_in_words(number)}, {size_in_words(int(inputs[number]))} of it for its arguments"
    )
    bound = size_in_words(total.bound_bytes)
    error: OutOfDeviceMemory | QuotaExceeded
    if total.slice:
        error = OutOfDeviceMemory(
            f"{run}, and {slice_in_words(total)} may have {bound} on each device. Divide its arrays over more "
            f"devices, donate arguments that are not used again, make it smaller, {_LARGER}"
        )
    elif total.tenant:
        has = size_in_words(memory.used_of(total, (memory.devices[number],)))
        error = QuotaExceeded(
            f"{run}, and tenant {total.tenant!r} has {has} there and may have {bound} on each device. "
            "Divide its arrays over more devices, donate arguments that are not used again, make it "
            f"smaller, {_HIGHER}"
        )
    else:
        error = OutOfDeviceMemory(
            f"{run}, and the device has {bound}. Divide its arrays over more devices, donate arguments that "
            "are not used again, or make it smaller"
        )
    arrays = dict.fromkeys(arg for arg in arguments if isinstance(arg, int))
    return NoRoom(error, _largest(_on_device(memory, total, number, arrays)))


def no_room(
    memory: DeviceMemory, total: Total, program: int, args: Sequence[int | bytes], client: int
) -> NoRoom:
    """Return why a run does not fit beside the arrays that a total has."""
    needs = memory.programs[program].of(total)
    peaks = total.with_temporaries(needs, memory.peaks_of(needs, args))
    memory.settle()
    used = total.used[needs.devices]
    worst = int(np.where(peaks > 0, used + peaks, -1).argmax())
    number = int(needs.devices[worst])
    held = list(_on_device(memory, total, number, memory.buffers))
    run = (
        f"program {needs.name!r} needs {size_in_words(int(peaks[worst]))} more on "
        f"{memory.device_in_words(number)}"
    )
    if total.tenant or total.slice:
        return NoRoom(_exceeded(memory, total, number, run), _largest(held))
    own = [size_bytes for array, size_bytes in held if client_of(array) == client]
    foreign = [size_bytes for array, size_bytes in held if client_of(array) != client]
    error = OutOfDeviceMemory(
        f"{run}, which has {size_in_words(total.bound_bytes or 0)}: "
        f"{size_in_words(sum(own))} are held by {len(own)} live arrays of "
        f"this client, {size_in_words(sum(foreign))} by {len(foreign)} arrays of other clients, and nothing is "
        "running there that would free any. Delete arrays that are not used any more, donate "
        f"arguments, or move arrays to other devices or to host memory{_spill(memory, number)}"
    )
    return NoRoom(error, _largest(held))


def _spill(memory: DeviceMemory, number: int) -> str:
    """Return why no array leaves a device for host memory by itself."""
    if not memory.tiers.spill_bytes:
        return "; pw-worker --spill lets arrays leave for host memory by themselves"
    used = size_in_words(memory.tiers.used_bytes[memory.devices[number].host])
    files = "" if memory.tiers.has_files else "; pw-worker --spill-files lets those go to files"
    return (
        f". {used} of {size_in_words(memory.tiers.spill_bytes)} on its host hold arrays that have left "
        f"(pw-worker --spill{files}), and the others do not make enough room, share their bytes, or find no "
        "place there"
    )


def no_room_for_upload(memory: DeviceMemory, upload: PendingUpload) -> NoRoom:
    """Return why an upload does not fit beside what its tenant has, or beside what lies on its slice."""
    used = {device: memory.used_of(upload.total, (device,)) for device in upload.devices}
    device = max(used, key=used.__getitem__)
    number = memory.devices.index(device)
    array = (
        f"an array that is put there needs {size_in_words(upload.buffer.shard_bytes)} on "
        f"{memory.device_in_words(number)}"
    )
    held = _on_device(memory, upload.total, number, memory.buffers)
    return NoRoom(_exceeded(memory, upload.total, number, array), _largest(held))


_HIGHER = "or have the operator raise device_memory in pw-controller --tenants"
_LARGER = "or ask for a slice with more memory"


def slice_in_words(total: Total) -> str:
    """Return the name of a slice for an error."""
    return f"slice {serial_of(total.slice)} of this client (add_slice(memory=))"


def _exceeded(
    memory: DeviceMemory, total: Total, number: int, what: str
) -> OutOfDeviceMemory | QuotaExceeded:
    """Return the error of something that has no room in the total of a slice, or of a tenant, on a device."""
    memory.settle()
    used_bytes = int(total.used[number])
    if total.slice:
        return OutOfDeviceMemory(
            f"{what}, where {slice_in_words(total)} has {size_in_words(used_bytes)} and may have "
            f"{size_in_words(total.bound_bytes or 0)}, and nothing of this client is running there that would "
            "free any. Delete arrays that are not used any more, donate arguments, move arrays to other "
            f"devices or to host memory, {_LARGER}{_spill(memory, number)}"
        )
    return QuotaExceeded(
        f"{what}, where tenant {total.tenant!r} has {size_in_words(used_bytes)} and may have "
        f"{size_in_words(total.bound_bytes or 0)}, and nothing of the tenant is running there that would free "
        "any. Delete arrays that are not used any more, donate arguments, divide arrays over more devices, "
        f"{_HIGHER}"
    )


def _buffers(buffers: Iterable[Buffer | None]) -> set[Buffer]:
    return {one for buffer in buffers if buffer is not None for one in buffer.parts()}


def _on_device(
    memory: DeviceMemory, total: Total, number: int, arrays: Iterable[int]
) -> Iterator[tuple[int, int]]:
    """Return which of these arrays a total counts on a device, with their bytes; a shared buffer once."""
    seen: set[Buffer] = set()
    for array in arrays:
        named = memory.buffers.get(array)
        for buffer in () if named is None else named.parts():
            is_there = buffer.is_counted and number in buffer.on.devices
            if is_there and total in buffer.on.totals and buffer not in seen:
                seen.add(buffer)
                yield array, buffer.shard_bytes


def _largest(held: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    return tuple(nlargest(HOLDERS_NAMED, held, key=lambda one: one[1]))
