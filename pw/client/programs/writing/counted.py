"""Counts for edges: where a `Ragged` has to move, its counts go with its rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from pw.client.arrays.ragged import check_counts
from pw.client.arrays.sharding import OwnSharding
from pw.client.arrays.signature import ArrayType
from pw.client.programs.writing.constant import Constant
from pw.client.programs.writing.moving import applied
from pw.client.programs.writing.values import JoinedValue, PlacedValue
from pw.core.programs.program import ValueRef
from pw.core.sharding import ArraySpec


def counts_of(
    builder: Any, rows: ValueRef, wanted: ArraySpec, counts: PlacedValue
) -> ValueRef | None:
    """Return the counts of rows that have to move, replicated where the rows are; None if they stay.

    Each host that sends rows needs all counts. A small computation replicates counts that lie elsewhere,
    or are split.

    Args:
        builder: the program.
        rows: a value of the program.
        wanted: the spec that its consumer wants.
        counts: its counts, wherever they are.
    """
    type_: ArrayType = builder.type_of(rows)
    if type_.spec == wanted or isinstance(counts, JoinedValue):
        return None
    there = ArrayType.of(counts.aval, OwnSharding.replicated(type_.sharding.mesh))
    value: ValueRef = builder.place(counts, there, "counts")
    spec = builder.type_of(value).spec
    is_whole = max(spec.sharding.partitions(len(spec.shape)), default=1) == 1
    if spec.placement == type_.spec.placement and is_whole:
        return value
    (copied,) = applied(
        builder,
        lambda counts: (counts,),
        "replicate counts",
        type_.sharding.mesh,
        [counts],
        [there],
    )
    return copied.ref


class GivenCounts(NamedTuple):
    """Counts that each call of a program gets from this process, and that are checked there."""

    leaf: int
    """The position among the leaves of the call."""
    rows: Any
    """The abstract value of the rows."""
    consumer: str

    def check(self, leaves: Sequence[Any]) -> None:
        """Raise ArgumentError if the counts of a call are impossible."""
        check_counts(leaves[self.leaf], self.rows, self.consumer)


def given_counts(
    pairs: Sequence[tuple[int, int]], arguments: Sequence[PlacedValue], consumer: str
) -> list[GivenCounts]:
    """Return the counts among the arguments of a computation that calls give; checks constants at once.

    Raises:
        ArgumentError: counts that the program has made or closed over are impossible.
    """
    checks = []
    for rows, counts in pairs:
        source, aval = arguments[counts].source, arguments[rows].aval
        if isinstance(source, Constant):
            check_counts(source.value, aval, consumer)
        elif source is not None:
            checks.append(GivenCounts(source, aval, consumer))
    return checks
