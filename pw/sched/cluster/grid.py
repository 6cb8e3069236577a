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
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from pw.core.coordinates import Coordinate, times

Position = tuple[int, int]
"""Rank and ordinal of a device of an island; the position outlives the host that has the rank."""


class Way(NamedTuple):
    """A way in which a shape may lie in a grid."""

    extent: Coordinate
    """Number of devices of the block along each axis of the grid."""
    axes: tuple[int, ...]
    """Axis of the grid along which each axis of the shape lies; -1 for an axis of one device."""


@dataclass(frozen=True, eq=False)
class Grid:
    """Devices at their coordinates."""

    cells: Mapping[Coordinate, Position]
    wraps: Coordinate
    """For each axis the number of devices after which it wraps around; 0 where it does not."""

    @classmethod
    def of_hosts(cls, hosts: int, devices: int) -> Grid:
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

    def ways(self, shape: Sequence[int]) -> list[Way]:
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
        return [Way(extent, lies) for extent, lies in ways.items()]

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
        cells = {
            cell: weights[position] for cell, position in self.cells.items() if position in weights
        }
        least: tuple[int, int, Coordinate] | None = None
        ways = self.ways(shape)
        for number, way in enumerate(ways):
            for origin, weight in self._sums(cells, way.extent).items():
                if least is None or (weight, number, origin) < least:
                    least = weight, number, origin
        return None if least is None else self._block(shape, ways[least[1]], least[2])

    def is_block(self, shape: Sequence[int], positions: Sequence[Position]) -> bool:
        """Whether these devices, in this order, are a block of a shape as `best` returns it."""
        origin = self.at.get(positions[0]) if positions else None
        return origin is not None and any(
            self._block(shape, way, origin) == tuple(positions) for way in self.ways(shape)
        )

    def _block(
        self, shape: Sequence[int], way: Way, origin: Coordinate
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

    def _step(self, cell: Coordinate, axis: int, by: int) -> Coordinate:
        """Return the coordinates of a place that lies so far along an axis."""
        wrap, at = self.wraps[axis], cell[axis] + by
        return (*cell[:axis], at % wrap if wrap else at, *cell[axis + 1 :])

    def _sums(self, cells: dict[Coordinate, int], extent: Coordinate) -> dict[Coordinate, int]:
        """Return the weight of each box of this extent without a hole, by its first cell."""
        for axis, length in enumerate(extent):
            cells = self._sums_along(cells, axis, length)
        return cells

    def _sums_along(
        self, cells: dict[Coordinate, int], axis: int, length: int
    ) -> dict[Coordinate, int]:
        """Return the weight of each line of this length along an axis.

        The sums of 1, 2, 4, ... cells are put together, so that long lines cost little more.
        """
        lines, reach = dict.fromkeys(cells, 0), 0
        powers, width = cells, 1
        while True:
            if length & width:
                lines = self._joined(lines, powers, axis, reach)
                reach += width
            if width * 2 > length:
                return lines
            powers = self._joined(powers, powers, axis, width)
            width *= 2

    def _joined(
        self, first: dict[Coordinate, int], second: dict[Coordinate, int], axis: int, by: int
    ) -> dict[Coordinate, int]:
        """Return the weights of lines, each of the first with the one of the second that lies behind it."""
        return {
            cell: weight + second[behind]
            for cell, weight in first.items()
            if (behind := self._step(cell, axis, by)) in second
        }

    # --- free blocks --------------------------------------------------------------------------------

    def blocks_of(self, positions: Collection[Position]) -> tuple[Coordinate, ...]:
        """Divide devices into few blocks without a hole; return their extents, the largest first."""
        left = {cell for cell, position in self.cells.items() if position in positions}
        extents = []
        for cell in sorted(left):
            while cell in left:  # on a ring, the box may begin before the cell, and not have it
                box, extent = self._largest_from(cell, left)
                left.difference_update(box)
                extents.append(extent)
        return tuple(sorted(extents, key=lambda extent: (-math.prod(extent), extent)))

    def _largest_from(
        self, cell: Coordinate, cells: set[Coordinate]
    ) -> tuple[set[Coordinate], Coordinate]:
        """Return a large box of these cells at this one, and its extent."""
        axes = range(len(cell))
        for axis, wrap in enumerate(self.wraps):  # it may begin before the end of a ring
            start = cell
            for _ in range(wrap):
                before = self._step(start, axis, -1)
                if before not in cells:
                    cell = start
                    break
                start = before
        best: tuple[set[Coordinate], Coordinate] = ({cell}, (1,) * len(axes))
        for first in axes:
            box, extent = {cell}, [1] * len(axes)
            for axis in (*axes[first:], *axes[:first]):
                face = box
                while not self.wraps[axis] or extent[axis] < self.wraps[axis]:
                    face = {self._step(each, axis, 1) for each in face}
                    if not face <= cells or face & box:
                        break
                    box = box | face
                    extent[axis] += 1
            if len(box) > len(best[0]):
                best = box, tuple(extent)
        return best
