"""Adds both branches of a `cond`, or of an iteration of a loop, and the merges of their results."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import jax

from pw.client.arrays.mesh import default_mesh
from pw.client.arrays.sharding import OwnSharding
from pw.client.arrays.signature import ArrayType
from pw.client.programs.placing.deferred import Apart
from pw.client.programs.writing.branch import Branch
from pw.client.programs.writing.builder import ProgramBuilder
from pw.client.programs.writing.counted import counts_of
from pw.client.programs.writing.values import JoinedValue, PlacedValue
from pw.core.programs.program import ValueRef


def name_of_cond(names: Sequence[str]) -> str:
    """Return the name of a `cond` of two functions, for the user."""
    return f"cond({', '.join(names)})"


def branches_of(
    builder: ProgramBuilder, predicate: PlacedValue, names: Sequence[str], is_iteration: bool
) -> tuple[Branch, Branch]:
    """Return branches for a true predicate and for a false one.

    Args:
        builder: the program.
        predicate: a scalar boolean, computed in the branch around.
        names: of the branches.
        is_iteration: they are an iteration of a loop, and what stays if there is none.
    """
    true, false = (
        Branch(name, predicate, unless, builder.branch, is_iteration)
        for name, unless in zip(names, (False, True), strict=True)
    )
    true.other, false.other = false, true
    return true, false


def chosen(
    builder: ProgramBuilder,
    branches: tuple[Branch, Branch],
    functions: tuple[Callable[[], Sequence[Any]], Callable[[], Sequence[Any]]],
    apart: Collection[int] = (),
    index: Any = None,
    is_backward: bool = False,
) -> list[Any]:
    """Return the results of one of two functions, as a predicate says.

    Args:
        builder: the program.
        branches: in which the functions add what they do.
        functions: for a true predicate, and for a false one; with results of the same avals.
        apart: the numbers of results that are not merged.
        index: what chooses, for these.
        is_backward: a cotangent that one branch only passes on stays where it is. Others, as all results, lie
            where the true branch leaves them.
    """
    sides: list[Sequence[Any]] = []
    for branch, fun in zip(branches, functions, strict=True):
        with builder.within(branch):
            sides.append(fun())
    pairs = list(zip(*sides, strict=True))
    together = [at for at in range(len(pairs)) if at not in apart]
    values = [[builder.lift(side[at]) for at in together] for side in sides]
    counts = _with_counts_of_rows(values)
    name = name_of_cond([fun.__name__ for fun in functions])
    merged: list[Any] = _merged(builder, branches, name, values, is_backward)
    for rows, own in counts.items():
        both = merged[own] if isinstance(own, int) else own
        merged[rows] = replace(merged[rows], counts=both)
    results: list[Any] = [Apart(index, branches, pair) for pair in pairs]
    for at, one in zip(together, merged, strict=False):
        results[at] = one
    return results


def _with_counts_of_rows(results: list[list[PlacedValue]]) -> dict[int, int | PlacedValue]:
    """Let counts of rows be results too, if branches have different ones.

    Returns:
        By the numbers of rows: the numbers of their counts, or the counts that both branches have.
    """
    counts_of_rows: dict[int, int | PlacedValue] = {}
    numbers = {
        pair: at for at, pair in enumerate(zip(*(map(id, side) for side in results), strict=True))
    }
    for at, (one, other) in enumerate(list(zip(*results, strict=True))):
        if one.counts is None or other.counts is None:
            continue
        if one.counts is other.counts:
            counts_of_rows[at] = one.counts
            continue
        pair = id(one.counts), id(other.counts)
        if pair not in numbers:
            numbers[pair] = len(results[0])
            results[0].append(one.counts)
            results[1].append(other.counts)
        counts_of_rows[at] = numbers[pair]
    return counts_of_rows


def _merged(
    builder: ProgramBuilder,
    branches: tuple[Branch, Branch],
    name: str,
    sides: Sequence[Sequence[PlacedValue]],
    is_backward: bool,
) -> list[PlacedValue]:
    predicate = branches[0].predicate
    types = []
    for pair in zip(*sides, strict=True):
        new = [builder.is_of_branch(*one) for one in zip(pair, branches, strict=True)]
        first, second = reversed(pair) if is_backward and new == [True, False] else pair
        types.append(_type(first, second, predicate))
    values, counted = [], []
    for branch, results in zip(branches, sides, strict=True):
        with builder.within(branch):
            own: list[ValueRef] = []
            needed: list[ValueRef | None] = []
            for result, type_ in zip(results, types, strict=True):
                for part, its in _parts(builder, result, type_):
                    value = builder.place(part, its, branch.name)
                    own.append(value)
                    rows = None if type_.parts else result.counts
                    needed.append(
                        None if rows is None else counts_of(builder, value, its.spec, rows)
                    )
            values.append(own)
            counted.append(needed)
    flat = [part for type_ in types for part in type_.parts or (type_,)]
    both, theirs = list(zip(*values, strict=True)), list(zip(*counted, strict=True))
    parts = iter(builder.merge(name, branches, both, flat, theirs))
    return [
        builder.joined(type_, [next(parts) for _ in type_.parts]) if type_.parts else next(parts)
        for type_ in types
    ]


def _type(first: PlacedValue, second: PlacedValue, predicate: PlacedValue) -> ArrayType:
    """Return the type of a result: it lies where the first of both sides does."""
    sharding = first.sharding or second.sharding
    if sharding is None:
        mesh = default_mesh() if predicate.sharding is None else predicate.sharding.mesh
        sharding = OwnSharding.replicated(mesh)
    is_weak = bool(first.aval.weak_type and second.aval.weak_type)
    aval = jax.core.ShapedArray(first.aval.shape, first.aval.dtype, weak_type=is_weak)
    return ArrayType.of(aval, sharding)


def _parts(
    builder: ProgramBuilder, result: PlacedValue, type_: ArrayType
) -> list[tuple[PlacedValue, ArrayType]]:
    """Return a result as `type_` wants it: one value, or one for each island."""
    if result.sharding != type_.sharding:
        result = builder.reshard(result, type_.sharding)
    if isinstance(result, JoinedValue):
        return list(zip(result.parts, type_.parts, strict=True))
    return [(result, type_)]
