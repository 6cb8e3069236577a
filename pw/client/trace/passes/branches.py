"""Adds both branches of a `cond`, or of an iteration of a loop, and the merges of their results."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import jax
from jax.extend.core import Literal

from pw.client.arrays.mesh import default_mesh
from pw.client.arrays.sharding import OwnSharding
from pw.client.arrays.signature import ArrayType
from pw.client.trace.branch import Branch
from pw.client.trace.cond_errors import name_of_both
from pw.client.trace.counted import counts_of
from pw.client.trace.passes.deferred import Apart
from pw.client.trace.passes.meshes import first_mesh
from pw.client.trace.recorder import ProgramRecorder
from pw.client.trace.tracer import JoinedTracer, ProgramTracer
from pw.core.programs.program import ValueRef


def kept_apart(jaxpr: Any) -> dict[int, list[int]]:
    """Return for each `cond`, by its position, the results that only such with the same predicate take.

    These are residuals: what a branch keeps for the same branch of the backward half.
    """
    conds: defaultdict[Any, list[int]] = defaultdict(list)
    for at, equation in enumerate(jaxpr.eqns):
        if is_choice(equation):
            conds[equation.invars[0]].append(at)
    several = {at for same in conds.values() for at in same if len(same) > 1}
    if not several:
        return {}
    users: defaultdict[Any, list[Any]] = defaultdict(list)
    # The predicates of those that take a variable; None for others than such a `cond`.
    for at, equation in enumerate(jaxpr.eqns):
        predicate = equation.invars[0] if at in several else None
        for number, atom in enumerate(equation.invars):
            if is_variable(atom):
                users[atom].append(predicate if number else None)
    given = set(filter(is_variable, jaxpr.outvars))
    return {
        at: [
            number
            for number, variable in enumerate(jaxpr.eqns[at].outvars)
            if variable not in given
            and users[variable]
            and all(predicate is jaxpr.eqns[at].invars[0] for predicate in users[variable])
        ]
        for at in several
    }


def kept_in_loop(jaxpr: Any, carried: int) -> dict[int, list[int]]:
    """Return for each `cond` of a loop's body the results that are no part of the carry, nor used in it."""
    used = {atom for equation in jaxpr.eqns for atom in equation.invars if is_variable(atom)}
    used |= set(filter(is_variable, jaxpr.outvars[:carried]))
    return {
        at: [number for number, variable in enumerate(equation.outvars) if variable not in used]
        for at, equation in enumerate(jaxpr.eqns)
        if is_choice(equation)
    }


def is_variable(atom: Any) -> bool:
    """Whether an operand is the result of an equation, or an argument."""
    return not isinstance(atom, Literal)


def is_choice(equation: Any) -> bool:
    """Whether an equation is a `cond` of two branches with calls in them."""
    return (
        equation.primitive.name == "cond"
        and len(equation.params["branches"]) == 2
        and is_variable(equation.invars[0])
        and first_mesh([equation]) is not None
    )


def branches_of(
    recorder: ProgramRecorder, predicate: ProgramTracer, names: Sequence[str], is_iteration: bool
) -> tuple[Branch, Branch]:
    """Return branches for a true predicate and for a false one.

    Args:
        recorder: the program.
        predicate: a scalar boolean, computed in the branch around.
        names: of the branches.
        is_iteration: they are an iteration of a loop, and what stays if there is none.
    """
    true, false = (
        Branch(name, predicate, unless, recorder.branch, is_iteration)
        for name, unless in zip(names, (False, True), strict=True)
    )
    true.other, false.other = false, true
    return true, false


def chosen(
    recorder: ProgramRecorder,
    branches: tuple[Branch, Branch],
    functions: tuple[Callable[[], Sequence[Any]], Callable[[], Sequence[Any]]],
    apart: Collection[int] = (),
    index: Any = None,
    is_backward: bool = False,
) -> list[Any]:
    """Return the results of one of two functions, as a predicate says.

    Args:
        recorder: the program.
        branches: in which the functions add what they do.
        functions: for a true predicate, and for a false one; with results of the same avals.
        apart: the numbers of results that are not merged.
        index: what chooses, for these.
        is_backward: a cotangent that one branch only passes on stays where it is. Others, as all results, lie
            where the true branch leaves them.
    """
    sides: list[Sequence[Any]] = []
    for branch, fun in zip(branches, functions, strict=True):
        with recorder.within(branch):
            sides.append(fun())
    pairs = list(zip(*sides, strict=True))
    together = [at for at in range(len(pairs)) if at not in apart]
    made = [[recorder.lift(side[at]) for at in together] for side in sides]
    counts = _with_counts_of_rows(made)
    name = name_of_both(functions)
    merged: list[Any] = _merged(recorder, branches, name, made, is_backward)
    for rows, own in counts.items():
        both = merged[own] if isinstance(own, int) else own
        merged[rows] = replace(merged[rows], counts=both)
    results: list[Any] = [Apart(index, branches, pair) for pair in pairs]
    for at, one in zip(together, merged, strict=False):
        results[at] = one
    return results


def _with_counts_of_rows(made: list[list[ProgramTracer]]) -> dict[int, int | ProgramTracer]:
    """Let counts of rows be results too, if branches have different ones.

    Returns:
        By the numbers of rows: the numbers of their counts, or the counts that both branches have.
    """
    found: dict[int, int | ProgramTracer] = {}
    numbers = {
        pair: at for at, pair in enumerate(zip(*(map(id, side) for side in made), strict=True))
    }
    for at, (one, other) in enumerate(list(zip(*made, strict=True))):
        if one.counts is None or other.counts is None:
            continue
        if one.counts is other.counts:
            found[at] = one.counts
            continue
        pair = id(one.counts), id(other.counts)
        if pair not in numbers:
            numbers[pair] = len(made[0])
            made[0].append(one.counts)
            made[1].append(other.counts)
        found[at] = numbers[pair]
    return found


def _merged(
    recorder: ProgramRecorder,
    branches: tuple[Branch, Branch],
    name: str,
    made: Sequence[Sequence[ProgramTracer]],
    is_backward: bool,
) -> list[ProgramTracer]:
    predicate = branches[0].predicate
    types = []
    for pair in zip(*made, strict=True):
        new = [recorder.is_of_branch(*one) for one in zip(pair, branches, strict=True)]
        first, second = reversed(pair) if is_backward and new == [True, False] else pair
        types.append(_type(first, second, predicate))
    values, counted = [], []
    for branch, results in zip(branches, made, strict=True):
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
    parts = iter(recorder.merge(name, branches, both, flat, theirs))
    return [
        recorder.joined(type_, [next(parts) for _ in type_.parts]) if type_.parts else next(parts)
        for type_ in types
    ]


def _type(first: ProgramTracer, second: ProgramTracer, predicate: ProgramTracer) -> ArrayType:
    """Return the type of a result: it lies where the first of both sides does."""
    sharding = first.sharding or second.sharding
    if sharding is None:
        mesh = default_mesh() if predicate.sharding is None else predicate.sharding.mesh
        sharding = OwnSharding.replicated(mesh)
    is_weak = first.weak_type and second.weak_type
    aval = jax.core.ShapedArray(first.aval.shape, first.aval.dtype, weak_type=is_weak)
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
