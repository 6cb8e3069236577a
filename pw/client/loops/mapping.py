"""`pw.map`: a function of one element, for all elements along the leading axis.

On one mesh it is `jax.lax.map` in one computation. On several, each element has computations of its own in a
program, so elements follow each other through the slices as in a pipeline.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp

from pw.client.arrays import jax_arrays
from pw.client.arrays.array import Array
from pw.client.arrays.mesh import Mesh, default_mesh
from pw.client.arrays.sharding import NamedSharding
from pw.client.arrays.signature import ArrayType, aval_of, tracing_configuration
from pw.client.connection import current, jax_backend
from pw.client.trace.function import (
    signature_of_call,
    tree_flatten,
    tree_unflatten,
    under_jax_trace,
)
from pw.client.trace.jit import jit
from pw.client.trace.program import program
from pw.client.trace.recorder import Recorder, Recording, recording
from pw.client.trace.tracebacks import leave_out_runtime
from pw.client.trace.trial import Trial, trial
from pw.client.trace.wrapped import name_of
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

    Args:
        fun: a function of a tree like `xs` without the leading axis.
        xs: a tree of arrays with leading axes of one size.

    Raises:
        ArgumentError: `xs` has no arrays, or their leading axes differ; or a program maps more than 256
            elements over several meshes. Nothing has been launched then.
    """
    try:
        if not callable(fun):
            raise TypeError(f"pw.map takes a function, and was given {fun!r}")
        leaves, tree = tree_flatten(xs)
        if under_jax_trace(leaves):
            return jax.lax.map(fun, xs)
        recorder = recording()
        if recorder is not None:
            leaves = [recorder.lift(leaf) for leaf in leaves]
            signature = [leaf.signature for leaf in leaves]
            size = _size(fun, tree, signature)
            with trial(recorder) as trying:
                places = _tried(trying, fun, tree, signature)
            if places.mesh is None and size > RECORDED:
                raise ArgumentError(
                    f"pw.map of {name_of(fun)!r} in a pw.program runs on several meshes, where it takes at "
                    f"most {RECORDED} elements, and was given {size}; call it outside of the program"
                )
            return _recorded(places, fun, tree, leaves, [0] * len(leaves), size)
        if jax_backend.client() is not None:
            leaves = jax_arrays.taken(leaves)
        try:
            alone = _kept(fun)
        except TypeError:  # it cannot be hashed
            alone = _Alone(fun)
        return alone(leaves, tree)
    except Exception as error:
        leave_out_runtime(error)
        raise


@dataclass(frozen=True, slots=True, eq=False)
class _Places:
    """Where a function of one element runs."""

    mesh: Mesh | None
    """The mesh of all its computations, if they can be one."""
    first: Mesh
    """The mesh of the first one."""


def _tried(
    trying: Trial, fun: Callable[[Any], Any], tree: Any, signature: Sequence[Any]
) -> _Places:
    leaves = []
    for at, type_ in enumerate(signature):
        whole = aval_of(type_)
        aval = jax.core.ShapedArray(whole.shape[1:], whole.dtype)
        if isinstance(type_, ArrayType):
            element: Any = ArrayType.of(aval, NamedSharding.replicated(type_.sharding.mesh))
        else:
            element = aval
        leaves.append(trying.leaf(at, element))
    fun(tree_unflatten(tree, leaves))
    mesh = None if trying.uses_program() else trying.one_mesh()
    return _Places(mesh, trying.first_mesh() or default_mesh())


def _size(fun: Callable[[Any], Any], tree: Any, signature: Sequence[Any]) -> int:
    """Return the number of elements."""
    shapes = [tuple(aval_of(type_).shape) for type_ in signature]
    sizes = {shape[0] if shape else None for shape in shapes}
    if len(sizes) != 1 or None in sizes:
        whole = tree_unflatten(tree, [str(list(shape)) for shape in shapes])
        raise ArgumentError(
            f"pw.map of {name_of(fun)!r} takes arrays with leading axes of one size, and was given {whole}"
        )
    return int(sizes.pop() or 0)


def _recorded(
    places: _Places,
    fun: Callable[[Any], Any],
    tree: Any,
    leaves: Sequence[Any],
    starts: Sequence[Any],
    size: int,
) -> Any:
    """Record `size` elements, which begin at a place in each leaf."""
    if places.mesh is not None or size == 0:

        def whole(*leaves: Any) -> Any:
            return jax.lax.map(fun, tree_unflatten(tree, leaves))

        whole.__name__ = f"map({name_of(fun)})"
        return jit(whole, mesh=places.mesh or places.first)(*leaves)
    elements: list[list[Any]] = [[] for _ in range(size)]
    for leaf, start in zip(leaves, starts, strict=True):
        cut = jit(_elements, mesh=None if leaf.sharding else places.first, static_argnums=2)
        for element, value in zip(elements, cut(leaf, start, size), strict=True):
            element.append(value)
    results = [fun(tree_unflatten(tree, element)) for element in elements]
    return jax.tree_util.tree_map(lambda *made: _stack(*made), *results)


def _elements(whole: Any, start: Any, size: int) -> list[Any]:
    return [jax.lax.dynamic_index_in_dim(whole, start + at, keepdims=False) for at in range(size)]


def _stacked(*elements: Any) -> Any:
    return jnp.stack(elements)


def _joined(*parts: Any) -> Any:
    return jnp.concatenate(parts)


_stack, _join = jit(_stacked), jit(_joined)


class _Alone:
    """A function that is mapped outside of a program."""

    def __init__(self, fun: Callable[[Any], Any]) -> None:
        self._fun = fun
        self._places: dict[Any, _Places] = {}

        def mapped(
            leaves: list[Any], starts: list[Any], size: int, tree: Any, places: _Places
        ) -> Any:
            recorder = recording()
            assert recorder is not None
            lifted = [recorder.lift(leaf) for leaf in leaves]
            return _recorded(places, fun, tree, lifted, starts, size)

        mapped.__name__ = f"map({name_of(fun)})"
        self._run = program(mapped, static_argnums=(2, 3, 4))

    def __call__(self, leaves: list[Any], tree: Any) -> Any:
        signature = signature_of_call(leaves)
        size = _size(self._fun, tree, signature)
        key = (tree, signature, current.runtime(), tracing_configuration())
        places = self._places.get(key)
        if places is None:
            recorder = Recorder(f"map({name_of(self._fun)})")
            with Recording(recorder), trial(recorder) as trying:
                places = _tried(trying, self._fun, tree, signature)
            for stale in [known for known in self._places if not known[2].alive]:
                del self._places[stale]
            self._places[key] = places
        if places.mesh is not None or size <= ELEMENTS:
            return self._run(leaves, [0] * len(leaves), size, tree, places)
        parts = []
        for start in range(0, size, ELEMENTS):
            count = min(ELEMENTS, size - start)
            own = [
                leaf if isinstance(leaf, Array) else leaf[start : start + count] for leaf in leaves
            ]
            starts = [start if isinstance(leaf, Array) else 0 for leaf in leaves]
            parts.append(self._run(own, starts, count, tree, places))
        return jax.tree_util.tree_map(_join, *parts)


_kept = lru_cache(PROGRAMS_KEPT)(_Alone)
