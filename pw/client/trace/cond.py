"""`pw.cond`: one of two functions of a program runs, as a predicate says.

Both functions are traced, and each of their computations gets a guard (`pw.core.programs.guards`): it has
its place in the order of launches, and its hosts skip it if the predicate says so. The results are merges.
If one `cond` lies in another, its predicate is computed in the outer branch, so all of the inner one is
skipped with it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import jax

from pw.client.trace.branches import PREDICATE, name_of_both, recorded
from pw.client.trace.function import tree_unflatten, under_jax_trace
from pw.client.trace.predicate import check_is_one_value
from pw.client.trace.program import ProgramFunction, program
from pw.client.trace.recording import recording
from pw.client.trace.tracebacks import leave_out_runtime
from pw.core.errors import ArgumentError

PROGRAMS_KEPT = 128
"""Pairs of functions that were called outside of a program, and whose programs are kept."""


def cond(
    pred: Any,
    true_fun: Callable[..., Any],
    false_fun: Callable[..., Any],
    *operands: Any,
    out_shardings: Any = None,
) -> Any:
    """Return `true_fun(*operands)` if `pred` is true, else `false_fun(*operands)`; only one of them runs.

    In a `pw.program`, both functions are traced, and call `pw.jit` functions on any devices. The hosts of the
    branch that is not taken skip its computations: nothing runs, and nothing is sent. Called alone, it is a
    program of its own, kept for these two functions: define them once. In a `pw.jit` function it is
    `jax.lax.cond`.

    Args:
        pred: a scalar boolean, on any devices or on this machine.
        true_fun, false_fun: functions of the operands, with results of the same tree, shapes and dtypes.
        operands: trees of arrays and numbers.
        out_shardings: a tree prefix of the results, with `pw.NamedSharding`s, or `PartitionSpec`s on the mesh
            where the true branch leaves a result. By default, the results lie where the true branch leaves
            them.

    Raises:
        ArgumentError: the predicate is no scalar boolean; or the results of the functions differ in their tree,
            a shape or a dtype. Nothing has been launched then.
        TracerError: a value that a branch has made is used outside of it.
    """
    try:
        for fun in (true_fun, false_fun):
            if not callable(fun):
                raise TypeError(f"pw.cond takes two functions, and was given {fun!r}")
        check_is_one_value(pred, PREDICATE)
        if under_jax_trace(jax.tree_util.tree_leaves((pred, operands))):
            if out_shardings is not None:
                raise ArgumentError(
                    "pw.cond is jax.lax.cond in a pw.jit function, and takes no out_shardings there; use "
                    "jax.lax.with_sharding_constraint"
                )
            return jax.lax.cond(pred, true_fun, false_fun, *operands)
        recorder = recording()
        if recorder is not None:
            return recorded(recorder, pred, (true_fun, false_fun), operands, out_shardings)
        entries, tree = jax.tree_util.tree_flatten(
            out_shardings, is_leaf=lambda entry: entry is None
        )
        key = (true_fun, false_fun, tuple(entries), tree)
        try:
            alone = _kept(*key)
        except TypeError:  # something cannot be hashed
            alone = _program(*key)
        return alone(pred, *operands)
    except Exception as error:
        leave_out_runtime(error)
        raise


def _program(
    true_fun: Callable[..., Any], false_fun: Callable[..., Any], entries: Any, tree: Any
) -> ProgramFunction[..., Any]:
    def alone(pred: Any, *operands: Any) -> Any:
        out_shardings = tree_unflatten(tree, entries)
        return cond(pred, true_fun, false_fun, *operands, out_shardings=out_shardings)

    alone.__name__ = name_of_both((true_fun, false_fun))
    return program(alone)


_kept = lru_cache(PROGRAMS_KEPT)(_program)
