"""Blocks of a shape in a grid, compared with a search of all of them."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from typing import Any

import pytest

from pw.sched.cluster.grid import DeviceGrid, Position

SHAPES: tuple[tuple[int, ...], ...] = (
    *((1,), (2,), (3,), (4,), (1, 1), (1, 2), (2, 1), (2, 2), (2, 3), (3, 2), (4, 1), (1, 4)),
    *((2, 4), (4, 2), (2, 2, 2), (2, 1, 2), (4, 2, 1), (3, 3), (2, 2, 3), (2, 2, 1, 2)),
)


def grid_of(
    sizes: tuple[int, ...], wraps: tuple[int, ...] = (), holes: int = 0, seed: int = 0
) -> DeviceGrid:
    cells = list(itertools.product(*map(range, sizes)))
    for hole in random.Random(seed).sample(cells[1:], holes):
        cells.remove(hole)
    return DeviceGrid({cell: (0, at) for at, cell in enumerate(cells)}, wraps or (0,) * len(sizes))


def all_blocks(grid: DeviceGrid, shape: tuple[int, ...]) -> Iterator[tuple[Position, ...]]:
    """Yield each block: shape axes along grid axes in any order, several on one only where it must be."""
    axes = range(len(grid.wraps))
    long = [axis for axis, size in enumerate(shape) if size > 1]
    for lies in itertools.product(axes, repeat=len(long)):
        if len(long) <= len(axes) and len(set(lies)) < len(lies):
            continue
        along = dict(zip(long, lies, strict=True))
        extent = [math.prod(shape[a] for a in long if along[a] == axis) for axis in axes]
        if any(length > size for length, size in zip(extent, grid.sizes, strict=True)):
            continue
        for origin in itertools.product(*(range(max(c[a] for c in grid.cells) + 1) for a in axes)):
            block = []
            for indices in itertools.product(*map(range, shape)):
                cell = []
                for axis in axes:
                    step = 0
                    for own in (a for a in long if along[a] == axis):
                        step = step * shape[own] + indices[own]
                    at = origin[axis] + step
                    cell.append(at % grid.wraps[axis] if grid.wraps[axis] else at)
                block.append(grid.cells.get(tuple(cell)))
            places = [position for position in block if position is not None]
            if len(places) == len(block):
                yield tuple(places)


GRIDS = [
    grid_of((4,)),
    grid_of((6,), (6,)),
    grid_of((6,), (6,), holes=1),
    grid_of((2, 4)),
    grid_of((4, 4), (4, 0)),
    grid_of((4, 4), (4, 4), holes=3),
    grid_of((3, 5), holes=4, seed=2),
    grid_of((2, 2, 3), (0, 0, 3)),
    grid_of((2, 3, 2), (0, 3, 0), holes=2),
    DeviceGrid({(5, 7): (0, 0), (5, 8): (0, 1), (6, 7): (1, 0), (6, 8): (1, 1)}, (0, 0)),
]


@pytest.mark.parametrize("grid", GRIDS, ids=[f"{g.words} with {len(g.cells)}" for g in GRIDS])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_best_block_is_that_of_a_search(grid: DeviceGrid, shape: tuple[int, ...]) -> None:
    draw = random.Random(f"{grid.words} {shape}")
    every = set(all_blocks(grid, shape))
    for share in (1.0, 0.8, 0.5):
        weights = {p: draw.randrange(4) for p in grid.cells.values() if draw.random() < share}
        block = grid.best(shape, weights)
        usable = [one for one in every if all(position in weights for position in one)]
        if block is None:
            assert not usable
            continue
        assert block in usable
        assert grid.is_block(shape, block)
        assert sum(weights[p] for p in block) == min(sum(weights[p] for p in one) for one in usable)


@pytest.mark.parametrize("grid", GRIDS, ids=[f"{g.words} with {len(g.cells)}" for g in GRIDS])
def test_other_devices_are_no_block(grid: DeviceGrid) -> None:
    draw = random.Random(grid.words)
    for shape in SHAPES:
        count = math.prod(shape)
        if count > len(grid.cells):
            continue
        every = set(all_blocks(grid, shape))
        for _ in range(20):
            some = tuple(draw.sample(list(grid.cells.values()), count))
            assert some in every or not grid.is_block(shape, some)


def test_a_block_may_lie_turned_and_its_axes_follow() -> None:
    grid = DeviceGrid.of_hosts(2, 4)
    assert grid.best((4, 2), dict.fromkeys(grid.cells.values(), 0)) == tuple(
        (host, device) for device in range(4) for host in range(2)
    )
    assert grid.best((4, 1), dict.fromkeys(grid.cells.values(), 0)) == tuple(
        (0, device) for device in range(4)
    )


def test_a_shape_with_more_axes_than_the_grid_has_several_on_one() -> None:
    grid = DeviceGrid.of_hosts(2, 4)
    everywhere = dict.fromkeys(grid.cells.values(), 0)
    assert grid.best((2, 2, 2), everywhere) == tuple(grid.cells.values())
    assert grid.best((2, 2), dict.fromkeys([(0, n) for n in range(4)], 0)) is None


@pytest.mark.parametrize(
    ("wraps", "free", "blocks"),
    [
        ((0, 0), [(a, b) for a in range(4) for b in range(4)], ((4, 4),)),
        ((0, 0), [(0, 0), (0, 1), (1, 0), (1, 1), (3, 0)], ((2, 2), (1, 1))),
        ((0, 0), [(0, 0), (3, 0)], ((1, 1), (1, 1))),
        ((4, 0), [(0, 0), (3, 0)], ((2, 1),)),
        ((4, 0), [(a, 2) for a in range(4)], ((4, 1),)),
        ((0, 0), [], ()),
    ],
)
def test_free_devices_are_divided_into_blocks(
    wraps: tuple[int, ...], free: list[tuple[int, int]], blocks: tuple[tuple[int, ...], ...]
) -> None:
    cells = itertools.product(range(4), range(4))
    grid = DeviceGrid({cell: cell for cell in cells}, wraps)
    assert grid.blocks_of(set(free)) == blocks


def test_all_devices_are_in_one_block_each() -> None:
    draw = random.Random(1)
    for grid in GRIDS:
        for _ in range(20):
            free = {p for p in grid.cells.values() if draw.random() < 0.6}
            assert sum(map(math.prod, grid.blocks_of(free))) == len(free)


class CountedSizes(tuple[int, ...]):
    """Sizes of a grid, of which each is asked for once in a step of a search; `steps` counts down."""

    steps: int

    def __getitem__(self, axis: Any) -> Any:
        self.steps -= 1
        assert self.steps >= 0, "the search takes too many steps"
        return super().__getitem__(axis)


def test_a_shape_of_many_axes_takes_few_steps() -> None:
    """The ways in which 18 axes may lie are many, 3**18, and the extents of blocks few, 7**3."""
    grid = DeviceGrid({(0, 0, 0): (0, 0)}, (64, 64, 64))
    sizes = grid.__dict__["sizes"] = CountedSizes(grid.sizes)
    sizes.steps = 3 * 7**3
    assert len(grid.ways((2,) * 18)) == 1
    assert sizes.steps < 3 * 7**3, "steps were counted"


def test_a_free_block_goes_around_a_ring_that_has_a_hole() -> None:
    cells = [(at,) for at in range(8) if at != 3]
    grid = DeviceGrid({cell: (0, *cell) for cell in cells}, (8,))
    assert grid.blocks_of({(0, 0), (0, 1), (0, 7), (0, 5)}) == ((3,), (1,))
