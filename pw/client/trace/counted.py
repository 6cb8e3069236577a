"""Counts for edges: where a `Ragged` has to move, its counts go with its rows."""

from __future__ import annotations

from typing import Any

from pw.client.arrays.sharding import NamedSharding
from pw.client.arrays.signature import ArrayType
from pw.client.trace.joined.moving import applied
from pw.client.trace.tracer import JoinedTracer, ProgramTracer
from pw.core.program import Value
from pw.core.sharding import ArraySpec


def counts_of(recorder: Any, rows: Value, wanted: ArraySpec, counts: ProgramTracer) -> Value | None:
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
    there = ArrayType.of(counts.aval, NamedSharding.replicated(made.sharding.mesh))
    value: Value = recorder.place(counts, there, "counts")
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
