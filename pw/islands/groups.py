"""Collectives: the groups of partitions that they work in, and how these lie over islands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from jax.extend.mlir import ir

from pw.islands.assignment import Assignment

Groups = tuple[tuple[int, ...], ...]

PERMUTE = "stablehlo.collective_permute"
REDUCE = "stablehlo.all_reduce"
NAMES = {
    REDUCE,
    PERMUTE,
    "stablehlo.all_gather",
    "stablehlo.all_to_all",
    "stablehlo.reduce_scatter",
    "stablehlo.collective_broadcast",
}
"""The collectives of StableHLO."""


def groups_of(operation: Any) -> Groups:
    """Return the groups of a collective; of a permutation, the pairs of source and target."""
    name = "source_target_pairs" if operation.name == PERMUTE else "replica_groups"
    dense = np.array(ir.DenseIntElementsAttr(operation.attributes[name]))
    return tuple(tuple(int(one) for one in row if one >= 0) for row in dense)


def is_crossing(operation: Any, assignment: Assignment) -> bool:
    """Whether an operation is a collective over devices of several islands."""
    return operation.name in NAMES and any(map(assignment.crosses, groups_of(operation)))


@dataclass(frozen=True)
class Aligned:
    """Groups that are the same on each of their islands: at the same positions, in the same order."""

    islands: tuple[tuple[int, ...], ...]
    """Islands of the groups of each island, itself included, in the order of the groups."""
    inner: tuple[Groups, ...]
    """Positions of each group, by island."""
    order: tuple[tuple[tuple[int, int], ...], ...]
    """Index of the island, and index on it, of each member of a group, by island."""

    @cached_property
    def width(self) -> int:
        """Return the number of a group's members on an island."""
        return len(self.inner[0][0])

    @cached_property
    def spread(self) -> int:
        """Return the number of islands of a group."""
        return len(self.islands[0])


def aligned(groups: Groups, assignment: Assignment) -> Aligned | None:
    """Return how groups lie over islands, if they lie the same way on all."""
    islands: dict[int, tuple[int, ...]] = {}
    inner: dict[int, list[tuple[int, ...]]] = {}
    order: dict[int, tuple[tuple[int, int], ...]] = {}
    for group in groups:
        by_island: dict[int, list[int]] = {}
        for one in group:
            by_island.setdefault(assignment.islands[one], []).append(assignment.position[one])
        own = tuple(sorted(by_island))
        if len({tuple(positions) for positions in by_island.values()}) != 1:
            return None
        positions = tuple(by_island[own[0]])
        pattern = tuple(
            (own.index(assignment.islands[one]), positions.index(assignment.position[one]))
            for one in group
        )
        for island in own:
            if (
                islands.setdefault(island, own) != own
                or order.setdefault(island, pattern) != pattern
            ):
                return None
            inner.setdefault(island, []).append(positions)
    every = range(assignment.count)
    if len(islands) != assignment.count:
        return None
    result = Aligned(
        tuple(islands[at] for at in every),
        tuple(tuple(inner[at]) for at in every),
        tuple(order[at] for at in every),
    )
    widths = {len(positions) for own in result.inner for positions in own}
    return result if len(widths) == 1 and len({len(one) for one in result.islands}) == 1 else None


def dense(groups: Sequence[Sequence[int]]) -> Any:
    """Return the attribute of groups, or of pairs."""
    width = max(map(len, groups), default=2)
    padded = [[*row, *[-1] * (width - len(row))] for row in groups]
    array: Any = np.array(padded, np.int64).reshape(len(groups), width)
    kind = ir.IntegerType.get_signless(64)
    return ir.DenseElementsAttr.get(array, type=kind, shape=array.shape)
