"""Adds both branches of a `cond`, or of an iteration of a loop, and the merges of their results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from pw.client.arrays.mesh import default_mesh
from pw.client.arrays.sharding import NamedSharding
from pw.client.arrays.signature import ArrayType
from pw.client.trace.branch import Branch
from pw.client.trace.cond_errors import name_of_both
from pw.client.trace.counted import counts_of
from pw.client.trace.recorder import ProgramRecorder
from pw.client.trace.tracer import JoinedTracer, ProgramTracer
from pw.client.trace.wrapped import name_of
from pw.core.programs.program import ValueRef


def chosen(
    recorder: ProgramRecorder,
    predicate: ProgramTracer,
    functions: tuple[Callable[[], Sequence[Any]], Callable[[], Sequence[Any]]],
    is_iteration: bool,
) -> list[ProgramTracer]:
    """Return the results of one of two functions, as a predicate says.

    Args:
        recorder: the program.
        predicate: a scalar boolean, computed in the branch around.
        functions: for a true predicate, and for a false one; with results of the same avals.
        is_iteration: they are an iteration of a loop, and what stays if there is none.
    """
    true, false = (
        Branch(name_of(fun), predicate, unless, recorder.branch, is_iteration)
        for fun, unless in zip(functions, (False, True), strict=True)
    )
    true.other, false.other = false, true
    made: list[list[ProgramTracer]] = []
    for branch, fun in zip((true, false), functions, strict=True):
        with recorder.within(branch):
            made.append([recorder.lift(result) for result in fun()])
    types = [_type(one, other, predicate) for one, other in zip(*made, strict=True)]
    values, counted = [], []
    for branch, results in zip((true, false), made, strict=True):
        with recorder.within(branch):
            own: list[ValueRef] = []
            needed: list[ValueRef | None] = []
            for result, type_ in zip(results, types, strict=True):
                for part, its in _parts(recorder, result, type_):
                    value = recorder.place(part, its, branch.name)
                    own.append(value)
                    is_counted = result.counts is not None and not type_.parts
                    needed.append(
                        counts_of(recorder, value, its.spec, result.counts) if is_counted else None
                    )
            values.append(own)
            counted.append(needed)
    flat = [part for type_ in types for part in type_.parts or (type_,)]
    both, theirs = list(zip(*values, strict=True)), list(zip(*counted, strict=True))
    parts = iter(recorder.merge(name_of_both(functions), (true, false), both, flat, theirs))
    return [
        recorder.joined(type_, [next(parts) for _ in type_.parts]) if type_.parts else next(parts)
        for type_ in types
    ]


def _type(true: ProgramTracer, false: ProgramTracer, predicate: ProgramTracer) -> ArrayType:
    """Return the type of a result: it lies where the true branch leaves it."""
    sharding = true.sharding or false.sharding
    if sharding is None:
        mesh = default_mesh() if predicate.sharding is None else predicate.sharding.mesh
        sharding = NamedSharding.replicated(mesh)
    is_weak = true.weak_type and false.weak_type
    aval = jax.core.ShapedArray(true.aval.shape, true.aval.dtype, weak_type=is_weak)
    return ArrayType.of(aval, sharding)


def _parts(
    recorder: ProgramRecorder, result: ProgramTracer, type_: ArrayType
) -> list[tuple[ProgramTracer, ArrayType]]:
    """Return a result as `type_` wants it: one value, or one for each island."""
    if result.sharding != type_.sharding:
        result = recorder.reshard(result, type_.sharding)
    if isinstance(result, JoinedTracer):
        return list(zip(result.parts, type_.parts, strict=True))
    return [(result, type_)]
