"""Which part of an array each island has, if its mesh joins islands.

If the mesh has factors (see `factors`), an island's part is the array at the island's position along the
crossing ones: one block, or several side by side. Its own sharding is over the inner factors. Otherwise the
part is *stacked*: the shards of the island's devices side by side in the first dimension, or the one shard
that all of them have.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import PartitionSpec

from pw.client.arrays.factors import Factors
from pw.client.arrays.sharding import OwnSharding
from pw.core.sharding import Box, box_slices


class ArrayBlock(NamedTuple):
    """Elements of an array that an island has."""

    in_array: Box
    """Place of the elements in the array."""
    in_part: Box
    """Place of the elements in the island's part of the array."""


@dataclass(frozen=True)
class IslandPart:
    """The part of an array that an island has; parts with equal elements are equal."""

    shape: tuple[int, ...]
    blocks: tuple[ArrayBlock, ...]
    is_whole: bool
    """Whether the part is the array."""
    sharding: OwnSharding = field(compare=False)
    """Sharding of the part over the island's mesh."""

    def of(self, value: Any) -> Any:
        """Return the part of a host value, which may have further dimensions."""
        if self.is_whole:
            return value
        if len(self.blocks) == 1:
            return value[box_slices(self.blocks[0].in_array)]
        if isinstance(value, jax.Array) and jax.numpy.issubdtype(value.dtype, jax.dtypes.prng_key):
            data = self.of(np.asarray(jax.random.key_data(value)))
            return jax.random.wrap_key_data(data, impl=jax.random.key_impl(value))
        part = np.empty((*self.shape, *value.shape[len(self.shape) :]), value.dtype)
        for block in self.blocks:
            part[box_slices(block.in_part)] = value[box_slices(block.in_array)]
        return part


def parts_of(sharding: OwnSharding, shape: Sequence[int]) -> tuple[IslandPart, ...]:
    """Return the parts of an array of `shape` on the islands of its mesh."""
    mesh, shape = sharding.mesh, tuple(shape)
    if mesh.factors is not None:
        return tuple(_factored(sharding, shape, at, mesh.factors) for at in range(len(mesh.parts)))
    boxes: dict[Any, Box] = {
        device: sharding.core.box(shape, position) for position, device in enumerate(mesh._devices)
    }
    return tuple(
        _stacked(part, shape, [boxes[device] for device in part._devices], sharding.memory)
        for part in mesh.parts
    )


def sources(parts: Iterable[IslandPart]) -> list[tuple[int, ArrayBlock]]:
    """Return the blocks that make an array, each with the number of an island that has it."""
    every = list(parts)
    for at, part in enumerate(every):
        if part.is_whole:
            return [(at, part.blocks[0])]
    first: dict[Box, tuple[int, ArrayBlock]] = {}
    for at, part in enumerate(every):
        for block in part.blocks:
            first.setdefault(block.in_array, (at, block))
    return list(first.values())


def put_together(
    parts: Sequence[IslandPart], values: dict[int, Any], shape: tuple[int, ...]
) -> np.ndarray[Any, Any]:
    """Return the host value of `shape` with these parts, by island; those of `sources` are needed."""
    array = np.empty(shape, next(iter(values.values())).dtype)
    for at, block in sources(parts):
        array[box_slices(block.in_array)] = values[at][box_slices(block.in_part)]
    return array


def is_divided(parts: Sequence[IslandPart], shape: Sequence[int]) -> bool:
    """Whether each element is on one island, and there once."""
    return sum(math.prod(part.shape) for part in parts) == math.prod(shape)


def _factored(
    sharding: OwnSharding, shape: tuple[int, ...], island: int, factors: Factors
) -> IslandPart:
    axes: list[tuple[str, ...]] = []
    along: list[list[tuple[int, int]]] = []
    spec = sharding.core.spec
    for size, names in itertools.zip_longest(shape, spec, fillvalue=()):
        assert isinstance(size, int)
        starts, width = [0], size
        own: list[str] = []
        for name in names:
            place = factors.places[island][name]
            for factor, at in zip(factors.of_axis[name], place, strict=True):
                width //= factor.size
                steps = range(factor.size) if factor.name else (at,)
                starts = [start + step * width for start in starts for step in steps]
                own += [factor.name] if factor.name else []
        axes.append(tuple(own))
        along.append(_merged([(start, start + width) for start in starts]))
    inside = [_side_by_side(intervals) for intervals in along]
    pairs = zip(itertools.product(*along), itertools.product(*inside), strict=True)
    blocks = tuple(itertools.starmap(ArrayBlock, pairs))
    own_shape = tuple(intervals[-1][1] for intervals in inside)
    mesh = sharding.mesh.parts[island]
    lies = OwnSharding(
        mesh, PartitionSpec(*(names or None for names in axes)), sharding.memory or None
    )
    return IslandPart(own_shape, blocks, own_shape == shape, lies)


def _stacked(mesh: Any, shape: tuple[int, ...], boxes: Sequence[Box], memory: str) -> IslandPart:
    first = tuple(stop - start for start, stop in boxes[0])
    if len(set(boxes)) == 1:
        block = ArrayBlock(boxes[0], tuple((0, size) for size in first))
        lies = OwnSharding.over(mesh, PartitionSpec(), memory or None)
        return IslandPart(first, (block,), first == shape, lies)
    blocks = [
        ArrayBlock(box, ((at * first[0], (at + 1) * first[0]), *((0, size) for size in first[1:])))
        for at, box in enumerate(boxes)
    ]
    own = (len(boxes) * first[0], *first[1:])
    lies = OwnSharding(mesh, PartitionSpec(mesh.axis_names), memory or None)
    return IslandPart(own, tuple(blocks), False, lies)


def _merged(intervals: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return intervals of which no one begins where another ends."""
    merged = [intervals[0]]
    for start, stop in intervals[1:]:
        if start == merged[-1][1]:
            merged[-1] = (merged[-1][0], stop)
        else:
            merged.append((start, stop))
    return merged


def _side_by_side(intervals: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    ends = list(itertools.accumulate(stop - start for start, stop in intervals))
    return list(zip([0, *ends[:-1]], ends, strict=True))
