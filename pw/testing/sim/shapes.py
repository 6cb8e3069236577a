"""Grids of devices, slices with a shape or a bound, exclusive ones, and the promises of their placement.

Hosts say coordinates, or none; axes may wrap around; spares are at the place of another host, at one of their
own, or nowhere. Users ask for shapes that may fit nowhere. The monitor (`shapes`) knows nothing of how the
resource manager finds blocks: it compares the coordinates of bound devices with the shape, and tries all
places.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from random import Random
from typing import Any

from pw.core import messages as msg
from pw.core.ids import RESOURCES, Address
from pw.testing.sim.host import SimHost
from pw.testing.sim.ledger import DISPLACED
from pw.testing.sim.world import Violation

_FORMS = {1: ((1, 1),), 2: ((1, 2), (2, 1)), 4: ((2, 2), (1, 4), (4, 1))}
"""Forms of the block of a host by its number of devices."""

Cell = tuple[int, ...]


def lay_out(random: Random, members: Sequence[SimHost], spare: SimHost | None) -> None:
    """Give the hosts of an island coordinates, or none."""
    if random.random() < 0.3:
        return
    form = random.choice(_FORMS[members[0].devices])
    rows = random.choice([n for n in range(1, len(members) + 1) if len(members) % n == 0])
    columns = len(members) // rows
    has_room = random.random() < 0.5
    sizes = (rows + has_room) * form[0], columns * form[1]
    wraps = tuple(size if random.random() < 0.5 else 0 for size in sizes)
    deep = (0,) if random.random() < 0.3 else ()

    def place(row: int, column: int) -> tuple[Cell, ...]:
        offsets = itertools.product(range(form[0]), range(form[1]))
        return tuple((*deep, row * form[0] + a, column * form[1] + b) for a, b in offsets)

    places = [place(row, column) for row in range(rows) for column in range(columns)]
    random.shuffle(places)
    for host, cells in zip(members, places, strict=True):
        host.coords, host.wraps = cells, (*deep, *wraps)
    if spare is not None and spare.island:
        own = [place(rows, 0)] if has_room else []
        spare.coords = random.choice([(), random.choice(places), *own])
        spare.wraps = (*deep, *wraps) if spare.coords else ()


def random_shape(random: Random, devices: int) -> tuple[int, ...]:
    """Return a shape of so many devices, of one to three axes."""
    shape = [1] * random.choice((1, 2, 2, 3))
    left = devices
    while left > 1:
        factor = next(n for n in range(2, left + 1) if left % n == 0)
        shape[random.randrange(len(shape))] *= factor
        left //= factor
    return tuple(shape)


def blocks(
    cells: Mapping[Cell, Any], wraps: Cell, shape: Sequence[int]
) -> Iterator[tuple[Any, ...]]:
    """Yield each block of a shape: all origins, and all ways to lay its axes along those of the grid."""
    axes = range(len(wraps))
    long = [axis for axis, size in enumerate(shape) if size > 1]
    for lies in itertools.product(axes, repeat=len(long)):
        if len(set(lies)) < len(lies) <= len(axes):
            continue
        along = dict(zip(long, lies, strict=True))
        extent = [math.prod(shape[own] for own in long if along[own] == axis) for axis in axes]
        if any(wrap and length > wrap for length, wrap in zip(extent, wraps, strict=True)):
            continue
        for origin in cells:
            block = []
            for indices in itertools.product(*map(range, shape)):
                offset = [0] * len(wraps)
                for own, axis in along.items():
                    offset[axis] = offset[axis] * shape[own] + indices[own]
                cell = tuple(
                    (at + by) % wrap if wrap else at + by
                    for at, by, wrap in zip(origin, offset, wraps, strict=True)
                )
                if cell not in cells:
                    break
                block.append(cells[cell])
            else:
                yield tuple(block)


def grid_of(cluster: Any, island: Any) -> tuple[dict[Cell, tuple[str, int]], Cell]:
    """Return the devices of an island's hosts by their coordinates, and where axes wrap around."""
    hosts = {host.name: host for host in cluster.hosts}
    members = [hosts[name] for name in island.ranks]
    placed = [host for host in members if host.coords and host.island == island.name]
    if placed:
        cells = {cell: (host.name, at) for host in placed for at, cell in enumerate(host.coords)}
        return cells, placed[0].wraps
    return {
        (rank, at): (host.name, at)
        for rank, host in enumerate(members)
        for at in range(host.devices)
    }, (0, 0)


class ShapeMonitor:
    """Watches what the resource manager binds and refuses."""

    def __init__(self, cluster: Any) -> None:
        self._cluster = cluster
        self._world = world = cluster.world
        if not world.profile.shapes:
            return
        self._requests: dict[int, msg.AllocateSlice] = {}
        self._were_bound: set[int] = set()
        world.watch_sent(msg.AllocateSlice, self._asked_for)
        world.watch_sent(msg.SliceBound, self._bound)
        world.watch_sent(msg.SliceRefused, self._refused)
        for kind in (msg.AllocateSlice, msg.ReleaseSlice, msg.IslandJoined, msg.DrainHost):
            world.watch_handled(kind, self._handling)

    def _asked_for(self, sender: Address, to: Address, message: msg.AllocateSlice) -> None:
        if to == RESOURCES:
            self._requests[message.slice] = message

    # --- grids --------------------------------------------------------------------------------------

    def _in_use(self, island: Any, exclusive: bool, but: int) -> set[tuple[str, int]]:
        """Return the devices of an island that slices keep from another one."""
        return {
            (island.ranks[rank], at)
            for piece in self._bound_on(island)
            if piece.request.slice != but and (exclusive or piece.request.exclusive)
            for rank, at in piece.positions
        }

    def _promised(self, island: Any, but: int) -> Counter[tuple[str, int]]:
        """Return the bytes that slices with a bound may have on each device of an island."""
        promised: Counter[tuple[str, int]] = Counter()
        for piece in self._bound_on(island):
            for rank, at in piece.positions if piece.request.slice != but else ():
                promised[island.ranks[rank], at] += piece.request.memory_bytes
        return promised

    def _without_memory(self, island: Any, request: msg.AllocateSlice) -> set[tuple[str, int]]:
        """Return the devices of an island that have not the memory of a slice left."""
        limit_bytes = self._world.profile.device_memory_bytes
        promised = self._promised(island, request.slice)
        devices = itertools.product(island.ranks, range(island.local_devices))
        return {
            device
            for device in devices
            if request.memory_bytes and promised[device] + request.memory_bytes > limit_bytes > 0
        }

    def _bound_on(self, island: Any) -> list[Any]:
        pieces: list[Any] = self._cluster.resources.slices.on(island)
        return pieces

    def _has_room(self, island: Any, request: msg.AllocateSlice) -> bool:
        """Whether an island that is ready has devices for a slice now."""
        cells, wraps = grid_of(self._cluster, island)
        in_use = self._in_use(island, request.exclusive, request.slice)
        in_use |= self._without_memory(island, request)
        if request.topology is None:
            everywhere = itertools.product(island.ranks, range(island.local_devices))
            return sum(device not in in_use for device in everywhere) >= request.devices
        free = {cell: device for cell, device in cells.items() if device not in in_use}
        return next(blocks(free, wraps, request.topology), None) is not None

    # --- what is bound and refused -------------------------------------------------------------------

    def _bound(self, sender: Address, to: Address, message: msg.SliceBound) -> None:
        if sender != RESOURCES:
            return
        self._were_bound.add(message.slice)
        request = self._requests.get(message.slice)
        if request is None or request.topology is None:
            return
        island = self._cluster.resources.inventory.islands[message.island]
        cells, wraps = grid_of(self._cluster, island)
        devices = tuple((device.host, device.ordinal) for device in message.devices)
        self._world.checked["shapes"] += 1
        if devices not in set(blocks(cells, wraps, request.topology)):
            what = f"slice {message.slice:x} has {devices}, no block of {request.topology}"
            raise Violation("shapes", f"{what} in {cells}, which wraps around after {wraps}")
        at = {device: cell for cell, device in cells.items()}
        if message.coords != tuple(at[device] for device in devices):
            raise Violation("shapes", f"slice {message.slice:x} is told of other coordinates")

    def _refused(self, sender: Address, to: Address, message: msg.SliceRefused) -> None:
        request = self._requests.get(message.slice)
        if sender != RESOURCES or request is None or request.like or request.hosts:
            return
        if message.slice in self._were_bound:
            self._world.ledger.injected[DISPLACED] += 1
        self._world.checked["refusals"] += 1
        self._check_room(request, "refused")

    def _check_room(self, request: msg.AllocateSlice, what: str) -> None:
        for island in self._cluster.resources.inventory.islands.values():
            home = request.formerly or request.island
            is_asked = home in (None, island.name)
            if is_asked and island.state == "ready" and self._has_room(island, request):
                words = f"slice {request.slice:x} is {what}, and {island.name} has room for it"
                raise Violation("shapes", words)

    # --- tables -----------------------------------------------------------------------------------------

    def _handling(self, sender: Address, to: Address, message: Any) -> Callable[[], None] | None:
        return self._check_tables if to == RESOURCES else None

    def _check_tables(self) -> None:
        """Exclusive slices share no device, devices are counted right, and no slice waits without a reason."""
        resources = self._cluster.resources
        for island in resources.inventory.islands.values():
            pieces = self._bound_on(island)
            if island.state == "ready":
                counted = Counter(position for one in pieces for position in one.positions)
                exclusive = {p for one in pieces if one.request.exclusive for p in one.positions}
                self._world.checked["tables"] += 1
                promised = self._promised(island, 0)
                promises = {(island.ranks[r], at): n for (r, at), n in island.promised.items() if n}
                if (+island.bound, island.exclusive, promises) != (counted, exclusive, +promised):
                    raise Violation(
                        "shapes", f"slices on the devices of {island.name} are miscounted"
                    )
                most_bytes = max(promised.values(), default=0)
                if most_bytes > (self._world.profile.device_memory_bytes or most_bytes):
                    words = f"slices may have {most_bytes} bytes of a device of {island.name}"
                    raise Violation("shapes", words)
            for one, other in itertools.permutations(pieces, 2):
                if not one.request.exclusive or other.request.like == one.request.slice:
                    continue
                self._world.checked["exclusive"] += 1
                if both := set(one.positions) & set(other.positions):
                    words = f"slice {one.request.slice:x} is exclusive, and shares {both}"
                    raise Violation("shapes", f"{words} with slice {other.request.slice:x}")
        for piece in resources.slices.parked:
            request = piece.request
            if not (request.like or request.hosts or request.apart or request.together):
                self._check_room(request, "parked")
