"""`pw.cond`: one of two functions of a program runs, as a predicate says.

Both functions are traced, and each of their computations gets a guard (`pw.core.programs.guards`): it has
its place in the order of launches, and its hosts skip it if the predicate says so. The results are merges.
If one `cond` lies in another, its predicate is computed in the outer branch, so all of the inner one is
skipped with it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp

from pw.client.arrays.mesh import default_mesh
from pw.client.arrays.sharding import OwnSharding
from pw.client.equations.calls import ProgramTrace, program_trace
from pw.client.equations.counted_rows import with_counts
from pw.client.functions.argument_errors import in_words
from pw.client.functions.function import signature_of_call
from pw.client.functions.predicate import boolean, check_is_one_value
from pw.client.functions.prefixes import on_mesh, spread
from pw.client.functions.program import ProgramFunction, program
from pw.client.functions.tracebacks import leave_out_runtime
from pw.client.functions.wrapped import name_of, tree_unflatten, under_jax_trace
from pw.client.keywords import checks_keywords
from pw.client.programs.placing.branches import name_of_cond
from pw.core.errors import ArgumentError

PREDICATE = "pw.cond takes a scalar boolean as its predicate, and was given"
PROGRAMS_KEPT = 128
"""Pairs of functions that were called outside of a program, and whose programs are kept."""


@checks_keywords
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
        trace = program_trace()
        if trace is not None:
            return _in_program(trace, pred, (true_fun, false_fun), operands, out_shardings)
        if under_jax_trace(jax.tree_util.tree_leaves((pred, operands))):
            if out_shardings is not None:
                raise ArgumentError(
                    "pw.cond is jax.lax.cond in a pw.jit function, and takes no out_shardings there; use "
                    "jax.lax.with_sharding_constraint"
                )
            return jax.lax.cond(pred, true_fun, false_fun, *operands)
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

    alone.__name__ = name_of_cond([name_of(true_fun), name_of(false_fun)])
    return program(alone)


_kept = lru_cache(PROGRAMS_KEPT)(_program)


def _in_program(
    trace: ProgramTrace,
    pred: Any,
    functions: tuple[Callable[..., Any], Callable[..., Any]],
    operands: Sequence[Any],
    out_shardings: Any,
) -> Any:
    """Return the `jax.lax.cond` in a program that JAX traces, with the errors of `pw.cond`."""
    predicate = boolean(pred, PREDICATE)
    # The branches close over the operands, so that functions without devices know where these lie.
    true, false = (
        _Side(trace, which, fun, operands, out_shardings)
        for which, fun in zip(("true", "false"), functions, strict=True)
    )
    try:
        return jax.lax.cond(predicate, true, false)
    except TypeError:
        if not (true.is_traced and false.is_traced) or not _unify_dtypes(true, false):
            raise
    return jax.lax.cond(predicate, true, false)


class _Side:
    """One of the functions of a `cond`, and what it returned when it was traced."""

    def __init__(
        self,
        trace: ProgramTrace,
        which: str,
        fun: Callable[..., Any],
        operands: Sequence[Any],
        out_shardings: Any,
    ) -> None:
        functools.update_wrapper(self, fun)
        self.__name__ = self.name = name_of(fun)
        self.which = which
        self.is_traced = False
        self.tree: Any = None
        self.dtypes: dict[int, Any] = {}
        """Dtypes of the Python numbers among the results, by their position."""
        self._trace = trace
        self._fun = fun
        self._operands = operands
        self._out_shardings = out_shardings

    def __call__(self) -> Any:
        results = self._fun(*self._operands)
        pairs, self.tree = jax.tree_util.tree_flatten_with_path(results)
        self.returned = in_words(results)
        self.paths = [f"result{jax.tree_util.keystr(path)}" for path, _ in pairs]
        self.leaves = [self._array(leaf) for _, leaf in pairs]
        self.is_traced = True
        leaves = [
            leaf if at not in self.dtypes else jnp.asarray(leaf, self.dtypes[at])
            for at, leaf in enumerate(self.leaves)
        ]
        wanted = spread(self._out_shardings, results, "out_shardings of pw.cond")
        placed = list(map(self._placed, leaves, wanted))
        return tree_unflatten(self.tree, with_counts(placed, self.tree))

    def _array(self, leaf: Any) -> Any:
        try:
            signature_of_call([leaf])
        except ArgumentError:
            raise ArgumentError(
                f"{self.name!r}, the {self.which} branch of a pw.cond, returns {leaf!r} of type "
                f"{type(leaf).__name__}; branches return trees of arrays and numbers"
            ) from None
        return leaf

    def _placed(self, leaf: Any, wanted: Any) -> Any:
        if wanted is None:
            return leaf
        if not isinstance(wanted, OwnSharding):
            wanted = on_mesh(self._trace.mesh_of(leaf) or default_mesh(), wanted)
        return jax.device_put(leaf, wanted)


def _unify_dtypes(true: _Side, false: _Side) -> bool:
    """Give Python numbers the dtype of the other side. Raises ArgumentError if the results differ."""
    if true.tree != false.tree:
        raise ArgumentError(
            f"the branches of a pw.cond must return the same tree: the true branch {true.name!r} returns "
            f"{true.returned}, and the false branch {false.name!r} returns {false.returned}"
        )
    for at, path in enumerate(true.paths):
        pair = [jax.typeof(side.leaves[at]) for side in (true, false)]
        for side, own, other in ((true, *pair), (false, *reversed(pair))):
            number = side.leaves[at]
            is_number = isinstance(number, (int, float, complex))
            if is_number and own.dtype != other.dtype == jnp.result_type(number, other.dtype):
                side.dtypes[at] = other.dtype
        dtypes = [
            side.dtypes.get(at, one.dtype) for side, one in zip((true, false), pair, strict=True)
        ]
        if pair[0].shape != pair[1].shape or dtypes[0] != dtypes[1]:
            raise ArgumentError(
                f"the branches of a pw.cond must return the same shapes and dtypes: {path} is "
                f"{pair[0].str_short()} from the true branch {true.name!r}, and {pair[1].str_short()} from the "
                f"false branch {false.name!r}; convert one of them there, as with astype or reshape"
            )
    return bool(true.dtypes or false.dtypes)
