"""Counts for edges: where a `Ragged` has to move, its counts go with its rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from pw.client.arrays.ragged import check_counts
from pw.client.arrays.sharding import OwnSharding
from pw.client.arrays.signature import ArrayType
from pw.client.trace.constant import Constant
from pw.client.trace.joined.moving import applied
from pw.client.trace.tracer import JoinedTracer, ProgramTracer
from pw.core.programs.program import ValueRef
from pw.core.sharding import ArraySpec


def counts_of(
    recorder: Any, rows: ValueRef, wanted: ArraySpec, counts: ProgramTracer
) -> ValueRef | None:
    """Return the counts of rows that have to move, replicated where the rows are; None if they stay.

    Each host that sends rows needs all counts. A small computation replicates counts that lie elsewhere,
    or are split.

    Args:
        recorder: the program.
        rows: a value of the program.
        wanted: the spec that its consumer wants.
        counts: its counts, wherever they are.
    """
    made: ArrayType = recorder.made_as(rows)
    if made.spec == wanted or isinstance(counts, JoinedTracer):
        return None
    there = ArrayType.of(counts.aval, OwnSharding.replicated(made.sharding.mesh))
    value: ValueRef = recorder.place(counts, there, "counts")
    spec = recorder.made_as(value).spec
    is_whole = max(spec.sharding.partitions(len(spec.shape)), default=1) == 1
    if spec.placement == made.spec.placement and is_whole:
        return value
    (copied,) = applied(
        recorder,
        lambda counts: (counts,),
        "replicate counts",
        made.sharding.mesh,
        [counts],
        [there],
    )
    return copied._value


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
    pairs: Sequence[tuple[int, int]], arguments: Sequence[ProgramTracer], consumer: str
) -> list[GivenCounts]:
    """Return the counts among the arguments of a computation that calls give; checks constants at once.

    Raises:
        ArgumentError: counts that the program has made or closed over are impossible.
    """
    found = []
    for rows, counts in pairs:
        source, aval = arguments[counts]._leaf, arguments[rows].aval
        if isinstance(source, Constant):
            check_counts(source.value, aval, consumer)
        elif source is not None:
            found.append(GivenCounts(source, aval, consumer))
    return found
