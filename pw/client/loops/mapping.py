"""`pw.map`: a function of one element, for all elements along the leading axis.

In a program it is `jax.lax.map`. On one mesh that is one computation. On several, each element has computations
of its own, so elements follow each other through the slices as in a pipeline. The rows of a `Ragged` that do
not count are skipped, by `jax.lax.cond`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pw.client.arrays import jax_arrays
from pw.client.arrays.array import Array
from pw.client.arrays.ragged import Ragged, check_pairs, is_ragged
from pw.client.arrays.sharding import OwnSharding
from pw.client.arrays.signature import aval_of, tracing_configuration
from pw.client.connection import current, jax_backend
from pw.client.equations.calls import ProgramTrace, program_trace, tracing_program
from pw.client.equations.counted_rows import with_counts
from pw.client.equations.jax_calls import with_calls
from pw.client.equations.meshes import first_mesh, is_on_several, meshes_in
from pw.client.functions.argument_errors import path_of_leaf
from pw.client.functions.function import signature_of_call
from pw.client.functions.jit import jit
from pw.client.functions.program import program
from pw.client.functions.tracebacks import leave_out_runtime
from pw.client.functions.traced_errors import in_words_of
from pw.client.functions.wrapped import name_of, tree_flatten, tree_unflatten, under_jax_trace
from pw.core.errors import ArgumentError

ELEMENTS = 32
"""Elements in one program of a map that is called alone, and runs on several meshes."""

RECORDED = 256
"""Elements that a user's program may have on several meshes."""

PROGRAMS_KEPT = 128
"""Functions that were mapped outside of a program, and whose programs are kept."""


def map(fun: Callable[[Any], Any], xs: Any) -> Any:
    """Return `fun` of each element of `xs` along the leading axis, stacked along a new leading axis.

    It is `jax.lax.map`, except that `fun` calls `pw.jit` functions on any devices. If all of them run on one
    mesh, it is one computation. Otherwise each element runs through them on its own, one behind another, so
    slices work on different elements at the same time. Called alone, it is a program that is kept for this
    function, or one for each 32 elements on several meshes. It does not wait.

    The elements of a `Ragged` whose counts are a scalar are its rows. Those behind the count are not computed,
    and each result is a `Ragged` with the same counts, and with zeros behind them.

    Args:
        fun: a function of a tree like `xs` without the leading axis. If it returns a `Ragged`, so does the map,
            with a cell more for each element.
        xs: a tree of arrays with leading axes of one size. If it has several `Ragged`s with scalar counts,
            their counts are the same object.

    Raises:
        ArgumentError: `xs` has no arrays, or their leading axes or their counts differ; or a program maps more
            than 256 elements over several meshes. Nothing has been launched then.
    """
    try:
        if not callable(fun):
            raise TypeError(f"pw.map takes a function, and was given {fun!r}")
        elements, counts = _rows_and_counts(fun, xs)
        leaves, tree = tree_flatten(elements)
        trace = program_trace()
        if trace is not None:
            return _as_ragged(_in_program(trace, fun, tree, leaves, counts), counts)
        if under_jax_trace([*leaves, *counts]):
            return _as_ragged(_in_jax(fun, elements, counts), counts)
        _check_leaves(fun, tree, leaves, "xs")
        if jax_backend.client() is not None:
            leaves, counts = jax_arrays.from_jax(leaves), jax_arrays.from_jax(counts)
        try:
            alone = _kept(fun)
        except TypeError:  # it cannot be hashed
            alone = _Alone(fun)
        return _as_ragged(alone(leaves, counts, tree), counts)
    except Exception as error:
        leave_out_runtime(error)
        raise


def _rows_and_counts(fun: Callable[[Any], Any], xs: Any) -> tuple[Any, list[Any]]:
    """Return a tree with rows in place of `Ragged`s of one cell, and their counts, if there are any."""
    counts: list[Any] = []

    def rows_of(leaf: Any) -> Any:
        if not is_ragged(leaf) or np.ndim(leaf.counts):
            return leaf
        if counts and leaf.counts is not counts[0]:
            raise ArgumentError(
                f"pw.map of {name_of(fun)!r} takes several pw.Ragged only if their counts are the same object; "
                "where they are equal, pass pw.Ragged(b.rows, a.counts) in place of b"
            )
        counts[:] = [leaf.counts]
        return leaf.rows

    return jax.tree_util.tree_map(rows_of, xs, is_leaf=is_ragged), counts


def _as_ragged(results: Any, counts: Sequence[Any]) -> Any:
    """Return results as `Ragged`s with these counts, if there are any."""
    if not counts:
        return results
    return jax.tree_util.tree_map(
        lambda leaf: leaf if is_ragged(leaf) else Ragged(leaf, counts[0]),
        results,
        is_leaf=is_ragged,
    )


def _in_jax(fun: Callable[[Any], Any], xs: Any, counts: Sequence[Any]) -> Any:
    """Map in a function that JAX traces."""
    if not counts:
        return jax.lax.map(fun, xs)

    def element(numbered: tuple[Any, Any]) -> Any:
        number, x = numbered
        like = jax.eval_shape(fun, x)

        def nothing(_: Any) -> Any:
            return jax.tree_util.tree_map(lambda one: jax.lax.full(one.shape, 0, one.dtype), like)

        return jax.lax.cond(number < counts[0], fun, nothing, x)

    size = jax.tree_util.tree_leaves(xs)[0].shape[0]
    return jax.lax.map(element, (jnp.arange(size), xs))


def _in_program(
    trace: ProgramTrace,
    fun: Callable[[Any], Any],
    tree: Any,
    leaves: Sequence[Any],
    counts: Sequence[Any],
    first: Any = 0,
) -> Any:
    """Map in a program that JAX traces; the first element has the number `first`."""
    _check_leaves(fun, tree, leaves, "xs")
    size = _size(fun, tree, signature_of_call(leaves), signature_of_call(counts))
    element = _Element(trace, fun, tree, leaves)
    if size > RECORDED and element.is_on_several:
        raise ArgumentError(
            f"pw.map of {name_of(fun)!r} in a pw.program runs on several meshes, where it takes at "
            f"most {RECORDED} elements, and was given {size}; call it outside of the program"
        )
    if not counts:
        return _scanned(fun, lambda leaves: element.apply(*leaves), leaves)

    def nothing() -> Any:
        return jax.tree_util.tree_map(lambda one: jnp.zeros(one.shape, one.dtype), element.result)

    def choose(numbered: Any) -> Any:
        is_counted, leaves = numbered

        def compute() -> Any:
            results, out_tree = tree_flatten(element.apply(*element.copied(leaves)))
            return tree_unflatten(out_tree, with_counts(results, out_tree))

        compute.__name__ = name_of(fun)
        return jax.lax.cond(is_counted, compute, nothing)

    are_counted = first + jnp.arange(size) < jnp.asarray(counts[0], jnp.int32)
    return _scanned(fun, choose, (are_counted, leaves))


def _scanned(fun: Callable[[Any], Any], element: Callable[[Any], Any], xs: Any) -> Any:
    """Return what `jax.lax.map` does, with the name of the user's function."""

    def step(_: None, x: Any) -> Any:
        return None, element(x)

    step.__name__ = f"map({name_of(fun)})"
    return jax.lax.scan(step, None, xs)[1]


class _Element:
    """A function of one element in a program that JAX traces."""

    def __init__(
        self, trace: ProgramTrace, fun: Callable[[Any], Any], tree: Any, leaves: Sequence[Any]
    ) -> None:
        self._trace, self._fun, self._tree = trace, fun, tree
        self._meshes = [trace.mesh_of(leaf) for leaf in leaves]
        stacked = [aval_of(type_) for type_ in signature_of_call(leaves)]
        avals = [jax.core.ShapedArray(aval.shape[1:], aval.dtype) for aval in stacked]
        closed, self.result = jax.make_jaxpr(self.apply, return_shape=True)(*avals)
        self._jaxpr = with_calls(closed, trace.kinds).jaxpr
        self.is_on_several = is_on_several(self._jaxpr.eqns)

    def apply(self, *leaves: Any) -> Any:
        """Return the result for an element. Raises ArgumentError if it is no tree of arrays."""
        for leaf, mesh in zip(leaves, self._meshes, strict=True):
            if mesh is not None:
                self._trace.say(leaf, OwnSharding.replicated(mesh))
        result = self._fun(tree_unflatten(self._tree, leaves))
        parts, tree = tree_flatten(result)
        _check_leaves(self._fun, tree, parts, "its result")
        return result

    def copied(self, leaves: Sequence[Any]) -> list[Any]:
        """Return an element with copies of what it takes elsewhere.

        In a branch, these copies are sent, so that what does not count is not.
        """
        first = first_mesh(self._jaxpr.eqns)
        element = []
        for leaf, variable, mesh in zip(leaves, self._jaxpr.invars, self._meshes, strict=True):
            users = [eqn for eqn in self._jaxpr.eqns if any(one is variable for one in eqn.invars)]
            is_moved = any(used != (mesh or first) for used, _ in meshes_in(users))
            element.append(jnp.copy(leaf) if is_moved else leaf)
        return element


def _size(
    fun: Callable[[Any], Any], tree: Any, signature: Sequence[Any], counts: Sequence[Any]
) -> int:
    """Return the number of elements."""
    avals = [aval_of(type_) for type_ in signature]
    sizes = {aval.shape[0] if aval.shape else None for aval in avals}
    if len(sizes) != 1 or None in sizes:
        name = name_of(fun)
        words = [
            f"xs{path_of_leaf(tree, at)} is {aval.str_short()}" for at, aval in enumerate(avals)
        ]
        for at, aval in enumerate(avals):
            if not aval.shape:
                raise ArgumentError(
                    f"pw.map of {name!r} takes arrays with a leading axis, of one entry for each element, and "
                    f"{words[at]}; make one array of single values first, as with jnp.stack"
                )
        if not avals:
            raise ArgumentError(f"pw.map of {name!r} takes a tree of arrays, and xs has none")
        other = next(at for at, aval in enumerate(avals) if aval.shape[0] != avals[0].shape[0])
        raise ArgumentError(
            f"pw.map of {name!r} takes arrays with leading axes of one size, but {words[0]} and {words[other]}"
        )
    for one in counts:
        check_pairs(((0, 1),), (avals[0], aval_of(one)), f"pw.map of {name_of(fun)!r}")
    return int(sizes.pop() or 0)


def _check_leaves(fun: Callable[[Any], Any], tree: Any, leaves: Sequence[Any], what: str) -> None:
    """Raise ArgumentError if a leaf is no array."""
    for at, leaf in enumerate(leaves):
        try:
            signature_of_call([leaf])
        except ArgumentError:
            raise ArgumentError(
                f"pw.map of {name_of(fun)!r} takes and returns trees of arrays and numbers, but "
                f"{what}{path_of_leaf(tree, at)} is {leaf!r} of type {type(leaf).__name__}"
            ) from None


@jit
def _join(*parts: Any) -> Any:
    return jnp.concatenate(parts)


class _Alone:
    """A function that is mapped outside of a program."""

    def __init__(self, fun: Callable[[Any], Any]) -> None:
        self._fun = fun
        self._name = f"map({name_of(fun)})"
        self._is_on_several: dict[Any, bool] = {}

        def mapped(
            leaves: list[Any],
            starts: list[Any],
            counts: list[Any],
            first: Any,
            size: int,
            tree: Any,
        ) -> Any:
            trace = program_trace()
            assert trace is not None
            own = [
                leaf if start is None else jax.lax.dynamic_slice_in_dim(leaf, start, size)
                for leaf, start in zip(leaves, starts, strict=True)
            ]
            return _in_program(trace, fun, tree, own, counts, first)

        mapped.__name__ = self._name
        self._run = program(mapped, static_argnums=(4, 5))

    def __call__(self, leaves: list[Any], counts: list[Any], tree: Any) -> Any:
        signature = signature_of_call(leaves)
        size = _size(self._fun, tree, signature, signature_of_call(counts))
        if size <= ELEMENTS or not self._runs_on_several(leaves, signature, tree):
            return self._run(leaves, [None] * len(leaves), counts, 0, size, tree)
        parts = []
        for start in range(0, size, ELEMENTS):
            count = min(ELEMENTS, size - start)
            own = [
                leaf if isinstance(leaf, Array) else leaf[start : start + count] for leaf in leaves
            ]
            starts = [start if isinstance(leaf, Array) else None for leaf in leaves]
            parts.append(self._run(own, starts, counts, start, count, tree))
        return jax.tree_util.tree_map(_join, *parts)

    def _runs_on_several(self, leaves: Sequence[Any], signature: Any, tree: Any) -> bool:
        key = (tree, signature, current.runtime(), tracing_configuration())
        is_on_several = self._is_on_several.get(key)
        if is_on_several is None:
            trace = ProgramTrace(self._name)
            with tracing_program(trace), in_words_of(self._name):
                is_on_several = _Element(trace, self._fun, tree, leaves).is_on_several
            for stale in [other for other in self._is_on_several if not other[2].alive]:
                del self._is_on_several[stale]
            self._is_on_several[key] = is_on_several
        return is_on_several


_kept = lru_cache(PROGRAMS_KEPT)(_Alone)
