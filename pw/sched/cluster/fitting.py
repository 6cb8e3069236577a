"""Which devices of an island a slice may have: fits a request, and chooses positions.

Pure functions of an island and a request. A request may name hosts, or say on how many hosts its devices are:
then it gets as many devices of each of them. It may want hosts that run clients' Python functions. It may have
a shape: then it gets a block of the island's grid (`pw.sched.cluster.grid`). An exclusive slice gets devices
that no other slice has, and no other slice gets those of an exclusive one. A slice with a bound of memory gets
devices on which the slices with bounds may have no more together than there is. No slice gets a device that has
failed its test.

The least busy devices are chosen: those with the least device time of the last minute, in steps of `STEP_S`,
and of equal ones those that the fewest slices have.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from pw.core.messages import AllocateSlice
from pw.sched.cluster.grid import DeviceGrid, Position
from pw.sched.cluster.inventory import Island

STEP_S = 3.0
"""Seconds of device time in the last minute by which two devices differ at least that are not equally busy."""
_STEP = 1 << 32
"""Weight of a step; a slice on a device weighs 1."""


def fits(island: Island, request: AllocateSlice) -> bool:
    """Whether an island has the devices that a slice needs, or will have them when its hosts are back.

    Other slices may be exclusive on them.
    """
    if not is_asked_for(island, request) or not is_large_enough(island, request):
        return False
    ranks = allowed_ranks(island, request)
    failed = island.failed_positions()
    failed_on = Counter(rank for rank, _ in failed)
    if request.hosts or request.host_count:
        most = island.local_devices - _on_each(request)
        suitable = sum(failed_on[rank] <= most for rank in ranks)
        return suitable >= (len(request.hosts) or request.host_count)
    if request.devices > len(ranks) * island.local_devices - sum(failed_on[r] for r in ranks):
        return False
    if request.topology is None:
        return True
    if math.prod(request.topology) != request.devices or min(request.topology, default=0) < 1:
        return False
    return island.grid is None or has_block(island.grid, island, request, failed)


def has_block(
    grid: DeviceGrid, island: Island, request: AllocateSlice, failed: Collection[Position]
) -> bool:
    """Whether a grid has a block of a slice's shape without these failed devices, whatever slices there are."""
    ranks = allowed_ranks(island, request)
    is_whole = len(ranks) == island.expected_hosts and len(grid.cells) == math.prod(grid.sizes)
    if is_whole and not failed:
        return bool(grid.ways(request.topology or ()))  # no place is empty
    everywhere = dict.fromkeys(_positions(island, ranks), 0)
    for position in failed:
        everywhere.pop(position, None)
    return grid.best(request.topology or (), everywhere) is not None


def is_asked_for(island: Island, request: AllocateSlice) -> bool:
    """Whether a slice may be on an island by its name and its kind of device."""
    if request.island is not None and request.island != island.name:
        return False
    kinds = (island.platform.lower(), island.kind.lower())
    # Hosts tell the kind when they join.
    is_known = bool(island.kind) or island.state == "ready"
    return request.kind is None or not is_known or request.kind.lower() in kinds


def is_large_enough(island: Island, request: AllocateSlice) -> bool:
    """Whether devices of an island have the memory of a slice."""
    return island.memory_bytes is None or request.memory_bytes <= island.memory_bytes


def choose(
    island: Island, request: AllocateSlice, busy: Mapping[Position, float]
) -> tuple[Position, ...] | None:
    """Return the least busy devices that a slice may have now; with a shape, the least busy block.

    Args:
        island: an island that the request fits.
        request: how the client asks for the slice.
        busy: device time of the last minute, in seconds, of each device that has some.

    Returns:
        None if other slices have too many of them.
    """
    ranks = allowed_ranks(island, request)
    weights = dict.fromkeys(_positions(island, ranks), 0)
    for position in island.failed_positions():
        weights.pop(position, None)
    weights.update((at, count) for at, count in island.bound.items() if at in weights)
    for position, busy_s in busy.items():
        if position in weights:
            weights[position] += int(busy_s / STEP_S) * _STEP
    in_use = [*(island.bound if request.exclusive else island.exclusive)]
    in_use += island.promised if request.memory_bytes else ()
    for position in in_use:
        if position in weights and not is_free(island, request, position):
            del weights[position]
    if request.topology is not None and island.grid is not None:
        return island.grid.best(request.topology, weights)
    if not (request.hosts or request.host_count):
        return _lightest(weights, request.devices)
    parts = {
        rank: _lightest({p: w for p, w in weights.items() if p[0] == rank}, _on_each(request))
        for rank in ranks
    }
    have = {rank: part for rank, part in parts.items() if part is not None}
    if request.host_count:
        loads = {rank: sum(weights[position] for position in part) for rank, part in have.items()}
        lightest = sorted(loads, key=lambda rank: (loads[rank], rank))
        ranks = sorted(lightest[: request.host_count])
    if len(have) < len(ranks) or len(ranks) < request.host_count:
        return None
    return tuple(position for rank in ranks for position in have[rank])


def suits(island: Island, request: AllocateSlice, positions: Sequence[Position]) -> bool:
    """Whether these positions, which a slice had, are still right for it, whatever slices there are."""
    ranks = allowed_ranks(island, request)
    if any(island.has_failed(position) for position in positions):
        return False
    if request.hosts:
        return [rank for rank, _ in positions] == [
            rank for rank in ranks for _ in range(_on_each(request))
        ]
    if not all(rank in ranks and at < island.local_devices for rank, at in positions):
        return False
    if request.topology is None or island.grid is None:
        return True
    return island.grid.is_block(request.topology, positions)


def is_free(island: Island, request: AllocateSlice, position: Position) -> bool:
    """Whether a device is well, and no other slice keeps a slice from having it."""
    if island.has_failed(position) or not has_memory(island, request, position):
        return False
    if request.exclusive:
        return not island.bound[position]
    return position not in island.exclusive


def has_memory(island: Island, request: AllocateSlice, position: Position) -> bool:
    """Whether slices with a bound leave a slice so much memory of a device as it wants."""
    if not request.memory_bytes:
        return True
    left_bytes = island.left_bytes(position)
    return left_bytes is None or request.memory_bytes <= left_bytes


def allowed_ranks(island: Island, request: AllocateSlice) -> Sequence[int]:
    """Return the ranks of the hosts that a slice may be on, those of named hosts in that order."""
    if not request.hosts and not request.python:
        return range(island.expected_hosts)
    nodes = request.hosts or island.ranks
    return [
        island.ranks.index(node)
        for node in nodes
        if node in island.ranks
        and (not request.python or _runs_python(island, node, request.python_hosts))
    ]


def _runs_python(island: Island, node: str, only: Sequence[str]) -> bool:
    """Return whether a host runs Python functions; a host that is away may say so when it is back."""
    if only and node not in only:
        return False
    host = island.hosts.get(node)
    return host is None or host.registration.python


def _on_each(request: AllocateSlice) -> int:
    return request.devices // (len(request.hosts) or request.host_count)


def _positions(island: Island, ranks: Sequence[int]) -> list[Position]:
    return [(rank, ordinal) for rank in ranks for ordinal in range(island.local_devices)]


def _lightest(weights: Mapping[Position, int], count: int) -> tuple[Position, ...] | None:
    """Return so many devices with the least weight, in order; None if there are fewer."""
    if len(weights) < count:
        return None
    chosen = heapq.nsmallest(count, zip(weights.values(), weights.keys(), strict=True))
    return tuple(sorted(position for _, position in chosen))
