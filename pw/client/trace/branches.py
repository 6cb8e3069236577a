"""Records both functions of a `pw.cond`, or an iteration of a loop, and merges their results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pw.client.arrays.mesh import Mesh, default_mesh
from pw.client.arrays.operators import apply_built
from pw.client.arrays.ragged import pairs_of
from pw.client.arrays.sharding import NamedSharding
from pw.client.arrays.signature import ArrayType
from pw.client.trace.argument_errors import in_words
from pw.client.trace.branch import Branch
from pw.client.trace.counted import counts_of
from pw.client.trace.function import tree_unflatten
from pw.client.trace.predicate import checked_predicate
from pw.client.trace.prefixes import on_mesh, spread
from pw.client.trace.recorder import ProgramRecorder
from pw.client.trace.tracer import JoinedTracer, ProgramTracer
from pw.client.trace.wrapped import name_of
from pw.core.errors import ArgumentError
from pw.core.programs.program import ValueRef

PREDICATE = "pw.cond takes a scalar boolean as its predicate, and was given"


def name_of_both(functions: Sequence[Callable[..., Any]]) -> str:
    """Return the name of a `cond` of two functions, for the user."""
    return f"cond({', '.join(map(name_of, functions))})"


def unequal_trees(names: Sequence[str], returned: Sequence[str]) -> ArgumentError:
    """Return the error of branches with different trees; both for the true and the false branch, in words."""
    return ArgumentError(
        f"the branches of a pw.cond must return the same tree: the true branch {names[0]!r} returns "
        f"{returned[0]}, and the false branch {names[1]!r} returns {returned[1]}"
    )


def unequal_results(names: Sequence[str], path: str, avals: Sequence[Any]) -> ArgumentError:
    """Return the error of a result with two shapes or dtypes; both for the true and the false branch."""
    true, false = (aval.str_short() for aval in avals)
    return ArgumentError(
        f"the branches of a pw.cond must return the same shapes and dtypes: {path} is "
        f"{true} from the true branch {names[0]!r}, and {false} "
        f"from the false branch {names[1]!r}; convert one of them there, as with astype or reshape"
    )


def no_result(name: str, which: str, leaf: Any) -> ArgumentError:
    """Return the error of a branch, the "true" or "false" one, that returns something else than arrays."""
    return ArgumentError(
        f"{name!r}, the {which} branch of a pw.cond, returns "
        f"{leaf!r} of type {type(leaf).__name__}; branches return trees of arrays and numbers"
    )


def recorded(
    recorder: ProgramRecorder,
    pred: Any,
    functions: tuple[Callable[..., Any], Callable[..., Any]],
    operands: Sequence[Any],
    out_shardings: Any,
    *,
    is_iteration: bool = False,
) -> Any:
    """Record both functions of a `cond`, or an iteration of a loop, and the merges of their results."""
    predicate = _predicate(recorder, pred)
    branches = tuple(
        Branch(name_of(fun), predicate, unless, recorder.branch, is_iteration)
        for fun, unless in zip(functions, (False, True), strict=True)
    )
    branches[0].other, branches[1].other = branches[1], branches[0]
    made: list[list[ProgramTracer]] = []
    returned: list[Any] = []
    trees: list[Any] = []
    paths: list[list[str]] = []
    for branch, fun in zip(branches, functions, strict=True):
        with recorder.within(branch):
            results = fun(*operands)
            returned.append(results)
            pairs, tree = jax.tree_util.tree_flatten_with_path(results)
            made.append([_lifted(recorder, leaf, branch) for _, leaf in pairs])
            trees.append(tree)
            paths.append([f"result{jax.tree_util.keystr(path)}" for path, _ in pairs])
    names = [branch.name for branch in branches]
    if trees[0] != trees[1]:
        raise unequal_trees(names, list(map(in_words, returned)))
    whole = tree_unflatten(trees[0], range(trees[0].num_leaves))
    wanted = spread(out_shardings, whole, "out_shardings of pw.cond")
    types = []
    for at, path in enumerate(paths[0]):
        pair = made[0][at], made[1][at] = _alike(recorder, made[0][at], made[1][at], names, path)
        types.append(_type(pair, wanted[at], predicate))
    pairs_of_rows = dict(pairs_of(trees[0]))
    counts = [
        [
            side[pairs_of_rows[at]] if at in pairs_of_rows else one.counts
            for at, one in enumerate(side)
        ]
        for side in made
    ]
    outputs = merged(
        recorder, name_of_both(functions), (branches[0], branches[1]), made, counts, types
    )
    return tree_unflatten(trees[0], outputs)


def merged(
    recorder: ProgramRecorder,
    name: str,
    branches: tuple[Branch, Branch],
    made: Sequence[Sequence[ProgramTracer]],
    counts: Sequence[Sequence[ProgramTracer | None]],
    types: Sequence[ArrayType],
) -> list[ProgramTracer]:
    """Return merges of the results of two branches.

    Args:
        recorder: the program.
        name: for the user.
        branches: for a true predicate, and for a false one.
        made: the results of each.
        counts: of those that are rows of a `Ragged`: if they have to move, only those that count do.
        types: of the results.
    """
    values, counted = [], []
    for branch, results, rows_of in zip(branches, made, counts, strict=True):
        with recorder.within(branch):
            own: list[ValueRef] = []
            needed: list[ValueRef | None] = []
            for result, rows, type_ in zip(results, rows_of, types, strict=True):
                for part, its in _parts(recorder, result, type_):
                    value = recorder.place(part, its, branch.name)
                    own.append(value)
                    if rows is None or type_.parts:
                        needed.append(None)
                    else:
                        needed.append(counts_of(recorder, value, its.spec, rows))
            values.append(own)
            counted.append(needed)
    flat = [part for type_ in types for part in type_.parts or (type_,)]
    both, theirs = list(zip(*values, strict=True)), list(zip(*counted, strict=True))
    parts = iter(recorder.merge(name, branches, both, flat, theirs))
    outputs = [
        recorder.joined(type_, [next(parts) for _ in type_.parts]) if type_.parts else next(parts)
        for type_ in types
    ]
    if recorder.tape is not None:
        recorder.tape.merge(branches, made, outputs)
    return outputs


def _predicate(recorder: ProgramRecorder, pred: Any) -> ProgramTracer:
    """Return the predicate of both branches."""
    tracer = checked_predicate(recorder, pred, PREDICATE)
    if recorder.branch is None or recorder.is_of_branch(tracer):
        return tracer
    computed: ProgramTracer = apply_built("pw.cond", lambda: _copied, tracer)
    return computed


def _copied(predicate: Any) -> Any:
    return jnp.copy(predicate)


def _lifted(recorder: ProgramRecorder, leaf: Any, branch: Branch) -> ProgramTracer:
    try:
        return recorder.lift(leaf)
    except ArgumentError:
        raise no_result(branch.name, "false" if branch.unless else "true", leaf) from None


def _alike(
    recorder: ProgramRecorder,
    true: ProgramTracer,
    false: ProgramTracer,
    names: Sequence[str],
    path: str,
) -> tuple[ProgramTracer, ProgramTracer]:
    """Return a result of both branches, a Python number with the dtype of the other one."""
    pair = [true, false]
    for at, other in ((0, 1), (1, 0)):
        constant = recorder.constant_of(pair[at])
        if isinstance(constant, (int, float, complex)) and pair[at].weak_type:
            dtype = pair[other].aval.dtype
            if dtype != pair[at].aval.dtype and jnp.result_type(constant, dtype) == dtype:
                pair[at] = recorder.lift(np.asarray(constant, dtype))
    found = [(tuple(one.aval.shape), one.aval.dtype) for one in pair]
    if found[0] != found[1]:
        raise unequal_results(names, path, [one.aval for one in pair])
    return pair[0], pair[1]


def _type(
    pair: tuple[ProgramTracer, ProgramTracer], wanted: Any, predicate: ProgramTracer
) -> ArrayType:
    """Return the type of a result."""
    true, false = pair
    sharding = true.sharding or false.sharding
    if sharding is None:
        mesh: Mesh = default_mesh() if predicate.sharding is None else predicate.sharding.mesh
        sharding = NamedSharding.replicated(mesh)
    if wanted is not None:
        is_whole = isinstance(wanted, NamedSharding)
        sharding = wanted if is_whole else on_mesh(sharding.mesh, wanted)
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
