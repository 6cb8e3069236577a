"""Words of the errors that refuse a slice: what there is, and what stands in the way.

Pure functions of the inventory and a request.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace

from pw.core.coordinates import times, written
from pw.core.errors import Error, InsufficientDevices, PythonRefused
from pw.core.messages import AllocateSlice
from pw.core.sizes import size_in_words
from pw.sched.cluster.fitting import (
    allowed_ranks,
    fits,
    has_memory,
    is_asked_for,
    is_free,
    is_large_enough,
)
from pw.sched.cluster.grid import DeviceGrid, Position
from pw.sched.cluster.inventory import Inventory, Island, counted, failed_in_words

_FEW = 4
"""Number of devices, or of blocks, that an error names."""


def refusal(inventory: Inventory, request: AllocateSlice) -> Error:
    """Return why no island can have a slice, with what there is."""
    islands = inventory.islands.values()
    seated = {host.node: host for island in islands for host in island.hosts.values()}
    for node in request.hosts:
        if node not in seated:
            waiting = {host.name: host.state for host in inventory.waiting_hosts()}
            what = f"is {waiting[node]}" if node in waiting else "is not connected"
            return InsufficientDevices(
                f"host {node!r} has no place in an island: it {what} (see pw status). Hosts of islands "
                f"are: {', '.join(sorted(seated)) or 'none yet'}{_to_come(inventory)}"
            )
    if request.python and request.python_hosts:
        named_hosts = set(request.hosts) - set(request.python_hosts)
        if named_hosts or not seated.keys() & set(request.python_hosts):
            return PythonRefused(
                f"Python functions of your tenant run on {', '.join(request.python_hosts)} only (python in "
                f"pw-controller --tenants); hosts of islands are: {', '.join(sorted(seated)) or 'none yet'}"
            )
    if request.python:
        named = [seated[node] for node in request.hosts] or list(seated.values())
        willing = sorted(n for n, host in seated.items() if host.registration.python)
        refusing = [host.node for host in named if not host.registration.python]
        if refusing and (request.hosts or not willing):
            there = f". Hosts that do are: {', '.join(willing)}" if willing else ""
            return PythonRefused(
                f"host {refusing[0]!r} runs no Python functions of clients: its owner can start it with "
                f"pw-worker --allow-python, or LocalCluster(allow_python=True){there}"
            )
    there = "; ".join(island.describe() for island in islands) or "no islands yet"
    if request.host_count and not any(fits(island, request) for island in islands):
        willing = sorted(n for n, host in seated.items() if host.registration.python)
        return InsufficientDevices(
            f"no island has {counted(request.host_count, 'host')} that run Python functions of clients. "
            f"Islands are: {there}. Hosts that run Python functions are: {', '.join(willing) or 'none yet'}; "
            f"ask for as many of one island with hosts={_left_out(inventory, request)}"
        )
    besides = f" besides the {counted(len(request.apart), 'island')} of the other slices"
    reasons = "; ".join(filter(None, (_why_not(island, request) for island in islands)))
    return InsufficientDevices(
        f"no island{besides * bool(request.apart)} has {_in_words(request)} for one slice. There are: {there}"
        f"{_to_come(inventory)}{'. ' * bool(reasons)}{reasons}{_LESS * bool(reasons and request.memory_bytes)}"
        f"{_left_out(inventory, request)}"
    )


_LESS = ". Ask for less memory, or give back slices that have a bound (pw memory shows yours)"


def _in_words(request: AllocateSlice) -> str:
    asked = counted(request.devices, "device")
    if request.like:
        asked += ", those of another session's slice"
    for name in ("kind", "island", "topology"):
        value = getattr(request, name)
        if value is not None:
            asked += f" with {name}={value!r}"
    if request.memory_bytes:
        asked += f" with {size_in_words(request.memory_bytes)} of memory each"
    if request.exclusive:
        asked += " that no other slice has"
    if request.hosts:
        asked += f" on {', '.join(request.hosts)}{' together' * (len(request.hosts) > 1)}"
    if request.python:
        asked += ", on hosts that run Python functions"
    return asked


def _to_come(inventory: Inventory) -> str:
    """Return which islands and hosts a cluster that starts still waits for, and what to do."""
    if not inventory.awaited_islands:
        return ""
    waiting = [f"{host.name} ({host.state})" for host in inventory.waiting_hosts()]
    besides = f" Hosts without an island: {', '.join(waiting)}." if waiting else ""
    return (
        f".{besides} The cluster still waits for {counted(inventory.awaited_islands, 'island')}: start the "
        "missing workers (pw-worker), or see in their logs why they have not come; pw status shows the hosts "
        "that are here"
    )


# --- failed devices ---------------------------------------------------------------------------------------


def _left_out(inventory: Inventory, request: AllocateSlice) -> str:
    """Return which failed devices stand in the way of a slice, and what to do; empty if none does."""
    failed: dict[str, str] = {}
    for island in inventory.islands.values():
        if not request.like and fits(_as_if_well(island), request):
            nodes = [island.ranks[rank] for rank in allowed_ranks(island, request) if island.ranks]
            for node in nodes:
                if node in island.failed_devices:
                    failed[node] = failed_in_words(node, island.failed_devices[node])
    if not failed:
        return ""
    return (
        f". {'; '.join(failed.values())}. No slice gets a device that has failed: start a spare host "
        f"(pw-worker --spare) and drain {' and '.join(failed)} (pw drain), or have all devices tested again "
        "(pw doctor --devices)"
    )


def _as_if_well(island: Island) -> Island:
    """Return an island as it would be if all its devices were well."""
    return replace(island, failed_devices={})


# --- what stands in the way -------------------------------------------------------------------------------


def _why_not(island: Island, request: AllocateSlice) -> str:
    """Return why an island has no place for an exclusive slice, or one with a shape or a bound of memory."""
    grid, shape = island.grid, request.topology
    if request.like or not is_asked_for(island, request):
        return ""
    if not is_large_enough(island, request):
        return f"devices of {island.name} have {size_in_words(island.memory_bytes or 0)} each"
    ranks = allowed_ranks(island, request)
    if not fits(_as_if_well(island), request):
        return _misfit(island, grid, shape) if shape is not None and grid is not None else ""
    if not fits(island, request):
        return ""  # failed devices are in the way
    well = [position for position in island.positions() if not island.has_failed(position)]
    allowed = [position for position in well if position[0] in ranks]
    if not all(has_memory(island, request, position) for position in allowed):
        shared = [position for position in allowed if position not in island.exclusive]
        return _memory_left(island, shared or allowed)
    in_use = [position for position in allowed if not is_free(island, request, position)]
    if not in_use:
        return ""  # slices that are to be apart are in the way
    free = set(well) - set(in_use)
    where, in_the_way = "", in_use
    if shape is not None and grid is not None:
        block = grid.best(shape, {position: int(position not in free) for position in allowed})
        in_the_way = [position for position in block or () if position not in free]
        start = grid.at[block[0]] if block else ()
        where = f"in the block of {times(shape)} at {written(start)}, "
    slices = "slices" if request.exclusive else "exclusive slices"
    return (
        f"{island.name}: {_free_in_words(island, free)}; {where}{slices} have "
        f"{_devices_in_words(island, in_the_way)}"
    )


def _misfit(island: Island, grid: DeviceGrid, shape: tuple[int, ...]) -> str:
    """Return why no block of a shape lies in an island, whatever slices there are."""
    words = f"{island.name} is a grid of {grid.words}"
    if not grid.ways(shape):
        return f"{words}, which is too small for a block of {times(shape)}"
    without = island.device_count - len(grid.cells)
    holes = f" with {counted(without, 'device')} that have no coordinates" if without else ""
    return f"{words}{holes}, in which no block of {times(shape)} is without a hole"


def _memory_left(island: Island, positions: list[Position]) -> str:
    """Return how much of each device slices with a bound leave, the most first."""
    by_left: defaultdict[int, list[Position]] = defaultdict(list)
    for position in positions:
        by_left[island.left_bytes(position) or 0].append(position)
    words = [
        f"{size_in_words(left)} on {_devices_in_words(island, by_left[left])}"
        for left in sorted(by_left, reverse=True)
    ]
    return (
        f"of the {size_in_words(island.memory_bytes or 0)} of each device of {island.name}, slices with a "
        f"bound leave {', '.join(words[:_FEW])}{' and less on others' * (len(words) > _FEW)}"
    )


def _free_in_words(island: Island, free: set[Position]) -> str:
    """Return which blocks free devices are made of, in words."""
    blocks = Counter(map(times, island.grid.blocks_of(free) if island.grid else ()))
    if not blocks:
        return f"{len(free)} of {counted(island.device_count, 'device')} are free"
    words = [f"{count} of {form}" if count > 1 else form for form, count in blocks.items()]
    return f"free blocks are {', '.join(words[:_FEW])}{' and smaller ones' * (len(words) > _FEW)}"


def _devices_in_words(island: Island, positions: list[Position]) -> str:
    names = [f"device {at} of {island.ranks[rank]}" for rank, at in positions[:_FEW]]
    more = len(positions) - len(names)
    return ", ".join(names) + f" and {more} more" * bool(more > 0)
