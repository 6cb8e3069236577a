"""The grid of an island's devices, and the blocks of a shape in it.

A device has a place on the interconnect: its coordinates. Coordinates without a device are holes. An axis may
wrap around: after its last device comes the first one. A block of a shape is a box of neighbours without a
hole. Each axis of the shape lies along an axis of the grid of its own, in any order: a block of (2, 4) may lie
turned, as 4 x 2. Axes of one device lie anywhere. A shape with more axes than the grid may have several along
one axis of the grid, as (2, 2, 2) in a grid of 2 x 4.

Pure functions of a grid. Weights say which devices a block may have, and how busy they are.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from pw.core.coordinates import Coordinate, times

Position = tuple[int, int]
"""Rank and ordinal of a device of an island; the position outlives the host that has the rank."""


class Orientation(NamedTuple):
    """A way in which a shape may lie in a grid."""

    extent: Coordinate
    """Number of devices of the block along each axis of the grid."""
    axes: tuple[int, ...]
    """Axis of the grid along which each axis of the shape lies; -1 for an axis of one device."""


@dataclass(frozen=True, eq=False)
class DeviceGrid:
    """Devices at their coordinates."""

    cells: Mapping[Coordinate, Position]
    wraps: Coordinate
    """For each axis the number of devices after which it wraps around; 0 where it does not."""

    @classmethod
    def of_hosts(cls, hosts: int, devices: int) -> DeviceGrid:
        """Return the grid of an island without coordinates: hosts x devices of a host."""
        places = itertools.product(range(hosts), range(devices))
        return cls({place: place for place in places}, (0, 0))

    @cached_property
    def at(self) -> Mapping[Position, Coordinate]:
        """Coordinates by position."""
        return {position: cell for cell, position in self.cells.items()}

    @cached_property
    def sizes(self) -> Coordinate:
        """Number of places along each axis."""
        spans = [max(along) - min(along) + 1 for along in zip(*self.cells, strict=True)]
        return tuple(wrap or span for wrap, span in zip(self.wraps, spans, strict=True))

    @property
    def words(self) -> str:
        """The sizes, and which axes wrap around, in words."""
        rings = [str(axis) for axis, wrap in enumerate(self.wraps) if wrap]
        which = f"axis {rings[0]} wraps" if len(rings) == 1 else f"axes {', '.join(rings)} wrap"
        return times(self.sizes) + f" ({which} around)" * bool(rings)

    # --- blocks -----------------------------------------------------------------------------------

    def ways(self, shape: Sequence[int]) -> list[Orientation]:
        """Return the ways in which a shape may lie, unturned ones first."""
        axes = range(len(self.sizes))
        share = sum(size > 1 for size in shape) > len(axes)
        ways: dict[Coordinate, tuple[int, ...]] = {(1,) * len(axes): ()}
        for size in shape:
            longer: dict[Coordinate, tuple[int, ...]] = {}
            for extent, lies in ways.items():
                if size == 1:
                    longer.setdefault(extent, (*lies, -1))
                    continue
                for axis in axes:
                    length = extent[axis] * size
                    if length <= self.sizes[axis] and (share or extent[axis] == 1):
                        wider = (*extent[:axis], length, *extent[axis + 1 :])
                        longer.setdefault(wider, (*lies, axis))
            ways = longer
        return [Orientation(extent, lies) for extent, lies in ways.items()]

    def best(
        self, shape: Sequence[int], weights: Mapping[Position, int]
    ) -> tuple[Position, ...] | None:
        """Return the block of a shape with the least weight, its devices in the order of the shape.

        Args:
            shape: number of devices along each axis.
            weights: weight of each device that the block may have.

        Returns:
            None if there is no such block.
        """
        everywhere = [weights.get(self.cells[cell], -1) for cell in self._order]
        least: tuple[int, int, int] | None = None
        ways = self.ways(shape)
        for number, way in enumerate(ways):
            boxes = self._sums([*everywhere, -1], way.extent)
            for origin, weight in enumerate(boxes):
                if weight >= 0 and (least is None or weight < least[0]):
                    least = weight, number, origin
        if least is None:
            return None
        return self._block(shape, ways[least[1]], self._order[least[2]])

    def blocks(self, shape: Sequence[int]) -> Iterator[tuple[Position, ...]]:
        """Yield all blocks of a shape, the devices of each in the order of the shape."""
        for way in self.ways(shape):
            for origin in self._order:
                block = self._block(shape, way, origin)
                if block is not None:
                    yield block

    def is_block(self, shape: Sequence[int], positions: Sequence[Position]) -> bool:
        """Whether these devices, in this order, are a block of a shape as `best` returns it."""
        origin = self.at.get(positions[0]) if positions else None
        return origin is not None and any(
            self._block(shape, way, origin) == tuple(positions) for way in self.ways(shape)
        )

    def _block(
        self, shape: Sequence[int], way: Orientation, origin: Coordinate
    ) -> tuple[Position, ...] | None:
        """Return the devices of a block in the order of the shape; None if there is a hole."""
        positions = []
        for indices in itertools.product(*map(range, shape)):
            offset = [0] * len(origin)
            for size, index, axis in zip(shape, indices, way.axes, strict=True):
                if axis >= 0:
                    offset[axis] = offset[axis] * size + index
            position = self.cells.get(self._moved(origin, offset))
            if position is None:
                return None
            positions.append(position)
        return tuple(positions)

    def _moved(self, cell: Coordinate, offset: Sequence[int]) -> Coordinate:
        """Return the coordinates of a place at an offset from another one."""
        return tuple(
            [
                (at + by) % wrap if wrap else at + by
                for at, by, wrap in zip(cell, offset, self.wraps, strict=True)
            ]
        )

    # --- lines and boxes ----------------------------------------------------------------------------

    @cached_property
    def _order(self) -> list[Coordinate]:
        """Coordinates of the devices in order; below, a device is its number here, and -1 is none."""
        return sorted(self.cells)

    @cached_property
    def _behind(self) -> list[list[list[int]]]:
        """Number of the device that lies 1, 2, 4, ... places along an axis; the last one is that behind -1."""
        numbers = {cell: number for number, cell in enumerate(self._order)}
        tables = []
        for axis, size in enumerate(self.sizes):
            step = [int(axis == each) for each in range(len(self.sizes))]
            table = [numbers.get(self._moved(cell, step), -1) for cell in self._order]
            tables.append([[*table, -1]])
            while 2 ** len(tables[-1]) <= size:
                last = tables[-1][-1]
                tables[-1].append([last[number] for number in last])
        return tables

    @cached_property
    def _before(self) -> list[dict[int, int]]:
        """Number of the device that lies one place before another one, along each axis."""
        steps = (tables[0] for tables in self._behind)
        return [{other: number for number, other in enumerate(step[:-1])} for step in steps]

    def _sums(self, weights: list[int], extent: Coordinate) -> list[int]:
        """Return the weight of each box of this extent without a hole, by its first device; -1 for none."""
        for axis, length in enumerate(extent):
            if length > 1:
                weights = self._sums_along(weights, axis, length)
        return weights

    def _sums_along(self, weights: list[int], axis: int, length: int) -> list[int]:
        """Return the weight of each line of this length along an axis; -1 for one with a hole.

        The sums of 1, 2, 4, ... devices are put together, so that long lines cost little more.
        """
        lines, ends = [0] * len(weights), [*range(len(weights) - 1), -1]
        for power, behind in enumerate(self._behind[axis]):
            if length >> power & 1:
                lines = _joined(lines, weights, ends)
                ends = [behind[end] for end in ends]
            if length >> power <= 1:
                break
            weights = _joined(weights, weights, behind)
        return lines

    # --- free blocks --------------------------------------------------------------------------------

    def blocks_of(self, positions: Collection[Position]) -> tuple[Coordinate, ...]:
        """Divide devices into few blocks without a hole; return their extents, the largest first."""
        devices = [n for n, cell in enumerate(self._order) if self.cells[cell] in positions]
        left = set(devices)
        extents = []
        for device in devices:
            while device in left:  # on a ring, the box may begin before the device, and not have it
                box, extent = self._largest_from(device, left)
                left -= box
                extents.append(extent)
        return tuple(sorted(extents, key=lambda extent: (-math.prod(extent), extent)))

    def _largest_from(self, device: int, devices: set[int]) -> tuple[set[int], Coordinate]:
        """Return a large box of these devices at this one, and its extent."""
        axes = range(len(self.sizes))
        for axis, wrap in enumerate(self.wraps):  # it may begin before the end of a ring
            start = device
            for _ in range(wrap):
                before = self._before[axis].get(start, -1)
                if before not in devices:
                    device = start
                    break
                start = before
        best: tuple[set[int], Coordinate] = ({device}, (1,) * len(axes))
        for first in axes:
            box, extent = {device}, [1] * len(axes)
            for axis in (*axes[first:], *axes[:first]):
                behind, face, box = self._behind[axis][0], box, set(box)
                while not self.wraps[axis] or extent[axis] < self.wraps[axis]:
                    face = {behind[each] for each in face}
                    if not face <= devices:
                        break
                    box |= face
                    extent[axis] += 1
            if len(box) > len(best[0]):
                best = box, tuple(extent)
        return best


def _joined(first: list[int], second: list[int], behind: list[int]) -> list[int]:
    """Return the weights of lines, each of the first with the one of the second that lies behind it."""
    return [
        weight + more if weight >= 0 and (more := second[other]) >= 0 else -1
        for weight, other in zip(first, behind, strict=True)
    ]
