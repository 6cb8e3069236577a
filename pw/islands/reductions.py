"""Reductions of which each device takes a part: XLA writes them as an all-reduce and a slice.

With weights that are split over islands, XLA adds up a gradient over the islands, takes a device's part of
it, and adds up the rest over the devices of an island. Here that becomes one all-reduce over all these
devices and a slice; where each island takes one part, no island needs the others'.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from jax.extend.mlir import ir

from pw.islands.assignment import Assignment
from pw.islands.flat import shape_of, walk
from pw.islands.groups import REDUCE, Aligned, Groups, dense, groups_of, is_crossing
from pw.islands.tables import Tables

_SLICE = "stablehlo.dynamic_slice"


def merge(main: Any, assignment: Assignment) -> None:
    """Let an all-reduce of what another one has reduced be one over the devices of both; in place."""
    tables = Tables(assignment.partitions)
    for second in [one for one in walk(main) if _is_sum(one)]:
        cut = _only_maker(second.operands[0])
        if cut is not None and cut.name == _SLICE:
            first = _only_maker(cut.operands[0])
        else:
            cut, first = None, cut
        if first is None or not _is_sum(first) or first.parent != second.parent:
            continue
        if not (is_crossing(first, assignment) or is_crossing(second, assignment)):
            continue
        both = _product(groups_of(first), groups_of(second), assignment.partitions)
        if both is None or (cut is not None and not _is_same_in(cut, groups_of(second), tables)):
            continue
        first.attributes["replica_groups"] = dense(both)
        second.results[0].replace_all_uses_with(second.operands[0])
        second.erase()


def part_of_islands(cut: Any, lies: Aligned, assignment: Assignment, tables: Tables) -> int | None:
    """Return the dimension along which a slice of a sum takes an island's part; None if it takes another one.

    The parts of the islands of a group follow each other.
    """
    if cut.name != _SLICE:
        return None
    before, after = shape_of(cut.operands[0]), shape_of(cut.results[0])
    smaller = [at for at, pair in enumerate(zip(before, after, strict=True)) if pair[0] != pair[1]]
    if len(smaller) != 1 or before[smaller[0]] != after[smaller[0]] * lies.spread:
        return None
    (along,) = smaller
    for at, start in enumerate(list(cut.operands)[1:]):
        table = tables.of(start)
        if at != along:
            continue  # it takes all of this dimension, wherever it starts
        if table is None:
            return None
        for partition, island in enumerate(assignment.islands):
            rank = lies.islands[island].index(island)
            if int(table[partition]) != rank * after[along]:
                return None
    return along


def _is_sum(one: Any) -> bool:
    if one.name != REDUCE or len(one.operands) != 1:
        return False
    steps = [step.operation.name for step in one.regions[0].blocks[0].operations]
    return steps == ["stablehlo.add", "stablehlo.return"]


def _only_maker(value: Any) -> Any:
    """Return the operation that makes a value which has one use."""
    if isinstance(value.owner, ir.Block) or len(list(value.uses)) != 1:
        return None
    return value.owner.operation


def _product(first: Groups, second: Groups, partitions: int) -> Groups | None:
    """Return the groups over which values are added that are added in two ways, one after the other."""
    of_first = {one: group for group in first for one in group}
    of_second = {one: group for group in second for one in group}
    groups: dict[frozenset[int], tuple[int, ...]] = {}
    for one in range(partitions):
        if one not in of_first or one not in of_second:
            return None
        members = Counter(each for other in of_second[one] for each in of_first.get(other, ()))
        if set(members.values()) != {1}:
            return None
        groups.setdefault(frozenset(members), tuple(sorted(members)))
    if sum(map(len, groups)) != partitions:
        return None
    return tuple(sorted(groups.values()))


def _is_same_in(cut: Any, groups: Groups, tables: Tables) -> bool:
    """Whether all devices of a group take the same slice."""
    for start in list(cut.operands)[1:]:
        table = tables.of(start)
        if table is None or any(len({int(table[one]) for one in group}) > 1 for group in groups):
            return False
    return True
