"""`pw.map`: a function of one element, for all elements along the leading axis.

On one mesh it is `jax.lax.map` in one computation. On several, each element has computations of its own in a
program, so elements follow each other through the slices as in a pipeline. The rows of a `Ragged` that do not
count are skipped: by `jax.lax.cond` in one computation, and by `pw.cond` in a program.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pw.client.arrays import jax_arrays
from pw.client.arrays.array import Array
from pw.client.arrays.mesh import Mesh, default_mesh
from pw.client.arrays.ragged import Ragged, check_pairs, is_ragged, pairs_of
from pw.client.arrays.sharding import NamedSharding
from pw.client.arrays.signature import (
    ArrayType,
    aval_of,
    tracing_configuration,
)
from pw.client.connection import current, jax_backend
from pw.client.trace.cond import cond
from pw.client.trace.equations import ProgramTrace, needs_recorder, program_trace
from pw.client.trace.function import (
    signature_of_call,
    tree_flatten,
    tree_unflatten,
    under_jax_trace,
)
from pw.client.trace.jit import jit
from pw.client.trace.meshes import first_mesh, is_on_several, meshes_in
from pw.client.trace.program import recorded_program
from pw.client.trace.recorder import ProgramRecorder
from pw.client.trace.recording import Recording, recording
from pw.client.trace.tracebacks import leave_out_runtime
from pw.client.trace.trial import Trial, trial
from pw.client.trace.wrapped import name_of
from pw.client.trace.zeros import zeros
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
        whole, counts = _taken_apart(fun, xs)
        leaves, tree = tree_flatten(whole)
        program = program_trace()
        if program is not None:
            return _together(_in_program(program, fun, tree, leaves, counts), counts)
        if under_jax_trace([*leaves, *counts]):
            return _together(_in_jax(fun, whole, counts), counts)
        _check_leaves(fun, tree, leaves, "xs")
        recorder = recording()
        if recorder is not None:
            leaves = [recorder.lift(leaf) for leaf in leaves]
            counts = [recorder.lift(one) for one in counts]
            signature = [leaf.signature for leaf in leaves]
            size = _size(fun, tree, signature, [one.signature for one in counts])
            with trial(recorder) as trying:
                places = _tried(recorder, trying, fun, tree, signature)
            if places.mesh is None and size > RECORDED:
                raise ArgumentError(
                    f"pw.map of {name_of(fun)!r} in a pw.program runs on several meshes, where it takes at "
                    f"most {RECORDED} elements, and was given {size}; call it outside of the program"
                )
            made = _recorded(places, fun, tree, leaves, [0] * len(leaves), counts, 0, size)
            return _together(made, counts)
        if jax_backend.client() is not None:
            leaves, counts = jax_arrays.taken(leaves), jax_arrays.taken(counts)
        try:
            alone = _kept(fun)
        except TypeError:  # it cannot be hashed
            alone = _Alone(fun)
        return _together(alone(leaves, counts, tree), counts)
    except Exception as error:
        leave_out_runtime(error)
        raise


def _taken_apart(fun: Callable[[Any], Any], xs: Any) -> tuple[Any, list[Any]]:
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


def _together(made: Any, counts: Sequence[Any]) -> Any:
    """Return results as `Ragged`s with these counts, if there are any."""
    if not counts:
        return made
    return jax.tree_util.tree_map(
        lambda leaf: leaf if is_ragged(leaf) else Ragged(leaf, counts[0]), made, is_leaf=is_ragged
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
    program: ProgramTrace,
    fun: Callable[[Any], Any],
    tree: Any,
    leaves: Sequence[Any],
    counts: Sequence[Any],
) -> Any:
    """Map in a program that JAX traces."""
    _check_leaves(fun, tree, leaves, "xs")
    signature = signature_of_call(leaves)
    size = _size(fun, tree, signature, signature_of_call(counts))
    meshes = [program.mesh_of(leaf) for leaf in leaves]

    def apply(*element: Any) -> Any:
        for value, mesh in zip(element, meshes, strict=True):
            program.say(value, mesh)
        made = fun(tree_unflatten(tree, element))
        leaves, made_tree = tree_flatten(made)
        _check_leaves(fun, made_tree, leaves, "its result")
        return made

    whole = [aval_of(type_) for type_ in signature]
    avals = [jax.core.ShapedArray(aval.shape[1:], aval.dtype) for aval in whole]
    closed, like = jax.make_jaxpr(apply, return_shape=True)(*avals)
    equations = closed.jaxpr.eqns
    if size > RECORDED and is_on_several(equations):
        raise ArgumentError(
            f"pw.map of {name_of(fun)!r} in a pw.program runs on several meshes, where it takes at "
            f"most {RECORDED} elements, and was given {size}; call it outside of the program"
        )
    if not counts:
        return jax.lax.map(lambda element: apply(*element), leaves)
    if pairs_of(jax.tree_util.tree_structure(like)):
        needs_recorder()  # of rows only those that count move
    first = first_mesh(equations)
    moved = [
        any(
            any(atom is variable for atom in equation.invars)
            and any(used != (mesh or first) for used, _ in meshes_in([equation]))
            for equation in equations
        )
        for variable, mesh in zip(closed.jaxpr.invars, meshes, strict=True)
    ]

    def choose(numbered: Any) -> Any:
        is_counted, element = numbered

        def taken() -> Any:
            # Copied in the branch, so that what does not count is not sent.
            for value, mesh in zip(element, meshes, strict=True):
                program.say(value, mesh)
            pairs = zip(element, moved, strict=True)
            return apply(*[jnp.copy(value) if is_moved else value for value, is_moved in pairs])

        def nothing() -> Any:
            return jax.tree_util.tree_map(lambda one: jnp.zeros(one.shape, one.dtype), like)

        taken.__name__ = name_of(fun)
        return jax.lax.cond(is_counted, taken, nothing)

    return jax.lax.map(choose, (jnp.arange(size) < counts[0], leaves))


@dataclass(frozen=True, slots=True, eq=False)
class _Places:
    """Where a function of one element runs."""

    mesh: Mesh | None
    """The mesh of all its computations, if they can be one."""
    first: Mesh
    """The mesh of the first one."""
    moved: frozenset[int]
    """Leaves of an element that computations take elsewhere than where they are cut from the whole."""
    results: Sequence[Any]
    """The type of each result that devices make, and the aval of the others."""
    tree: Any
    """The tree of the results."""


def _tried(
    recorder: ProgramRecorder,
    trying: Trial,
    fun: Callable[[Any], Any],
    tree: Any,
    signature: Sequence[Any],
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
    made, made_tree = tree_flatten(fun(tree_unflatten(tree, leaves)))
    _check_leaves(fun, made_tree, made, "its result")
    mesh = None if trying.uses_program() else trying.one_mesh()
    first = trying.first_mesh() or default_mesh()
    lies = [type_.sharding.mesh if isinstance(type_, ArrayType) else first for type_ in signature]
    moved = frozenset(at for at, mesh in enumerate(lies) if trying.takes_elsewhere(at, mesh))
    results = [recorder.lift(leaf).signature for leaf in made]
    return _Places(mesh, first, moved, results, made_tree)


def _size(
    fun: Callable[[Any], Any], tree: Any, signature: Sequence[Any], counts: Sequence[Any]
) -> int:
    """Return the number of elements."""
    avals = [aval_of(type_) for type_ in signature]
    sizes = {aval.shape[0] if aval.shape else None for aval in avals}
    if len(sizes) != 1 or None in sizes:
        name, words = (
            name_of(fun),
            [f"{_path(tree, at)} is {aval.str_short()}" for at, aval in enumerate(avals)],
        )
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


def _path(tree: Any, at: int) -> str:
    """Return the user's name of a leaf of `xs`."""
    whole = tree_unflatten(tree, range(tree.num_leaves))
    path, _ = jax.tree_util.tree_flatten_with_path(whole)[0][at]
    return f"xs{jax.tree_util.keystr(path)}"


def _check_leaves(fun: Callable[[Any], Any], tree: Any, leaves: Sequence[Any], what: str) -> None:
    """Raise ArgumentError if a leaf is no array."""
    for at, leaf in enumerate(leaves):
        try:
            signature_of_call([leaf])
        except ArgumentError:
            where = what + _path(tree, at).removeprefix("xs")
            raise ArgumentError(
                f"pw.map of {name_of(fun)!r} takes and returns trees of arrays and numbers, but {where} is "
                f"{leaf!r} of type {type(leaf).__name__}"
            ) from None


def _recorded(
    places: _Places,
    fun: Callable[[Any], Any],
    tree: Any,
    leaves: Sequence[Any],
    starts: Sequence[Any],
    counts: Sequence[Any],
    first: Any,
    size: int,
) -> Any:
    """Record `size` elements, which begin at a place in each leaf; the first one has the number `first`."""
    if places.mesh is not None or size == 0:

        def whole(leaves: Any) -> Any:
            rows = [leaf.rows if is_ragged(leaf) else leaf for leaf in leaves]
            own = [leaf.counts for leaf in leaves if is_ragged(leaf)][:1]
            return _in_jax(fun, tree_unflatten(tree, rows), own)

        whole.__name__ = f"map({name_of(fun)})"
        given = [Ragged(leaf, counts[0]) if counts else leaf for leaf in leaves]
        return jit(whole, mesh=places.mesh or places.first)(given)
    elements: list[list[Any]] = [[] for _ in range(size)]
    for leaf, start in zip(leaves, starts, strict=True):
        cut = jit(_elements, mesh=None if leaf.sharding else places.first, static_argnums=2)
        for element, value in zip(elements, cut(leaf, start, size), strict=True):
            element.append(value)
    if counts:
        results = _guarded(places, fun, tree, elements, counts[0], first)
    else:
        results = [fun(tree_unflatten(tree, element)) for element in elements]
    return jax.tree_util.tree_map(lambda *made: _stack(*made), *results)


def _guarded(
    places: _Places,
    fun: Callable[[Any], Any],
    tree: Any,
    elements: Sequence[Sequence[Any]],
    counts: Any,
    first: Any,
) -> list[Any]:
    """Record elements, of which those whose number is beyond the count are skipped."""
    empty = tree_unflatten(places.tree, [_zeros(type_) for type_ in places.results])

    def apply(*element: Any) -> Any:
        # Made in the branch, so that what does not count is not sent.
        own = [_send(leaf) if at in places.moved else leaf for at, leaf in enumerate(element)]
        return fun(tree_unflatten(tree, own))

    def nothing(*_: Any) -> Any:
        return empty

    apply.__name__ = name_of(fun)
    number = jit(_counting, mesh=None if counts.sharding else places.first, static_argnums=2)
    predicates = number(counts, first, len(elements))
    pairs = zip(predicates, elements, strict=True)
    return [cond(predicate, apply, nothing, *element) for predicate, element in pairs]


def _zeros(type_: Any) -> Any:
    is_array = isinstance(type_, ArrayType)
    return zeros(type_) if is_array else np.zeros(type_.shape, type_.dtype)


def _counting(counts: Any, first: Any, size: int) -> list[Any]:
    """Return whether each of some elements counts."""
    return [counts.astype(jnp.int32) > first + at for at in range(size)]


def _elements(whole: Any, start: Any, size: int) -> list[Any]:
    return [jax.lax.dynamic_index_in_dim(whole, start + at, keepdims=False) for at in range(size)]


def _stacked(*elements: Any) -> Any:
    return jnp.stack(elements)


def _joined(*parts: Any) -> Any:
    return jnp.concatenate(parts)


def _copied(element: Any) -> Any:
    return jnp.copy(element)


_stack, _join, _send = jit(_stacked), jit(_joined), jit(_copied)


class _Alone:
    """A function that is mapped outside of a program."""

    def __init__(self, fun: Callable[[Any], Any]) -> None:
        self._fun = fun
        self._places: dict[Any, _Places] = {}

        def mapped(
            leaves: list[Any],
            starts: list[Any],
            counts: list[Any],
            first: Any,
            size: int,
            tree: Any,
            places: _Places,
        ) -> Any:
            recorder = recording()
            assert recorder is not None
            lifted, own = ([recorder.lift(leaf) for leaf in some] for some in (leaves, counts))
            return _recorded(places, fun, tree, lifted, starts, own, first, size)

        mapped.__name__ = f"map({name_of(fun)})"
        self._run = recorded_program(mapped, static_argnums=(4, 5, 6))

    def __call__(self, leaves: list[Any], counts: list[Any], tree: Any) -> Any:
        signature, counted = signature_of_call(leaves), signature_of_call(counts)
        size = _size(self._fun, tree, signature, counted)
        key = (tree, signature, current.runtime(), tracing_configuration())
        places = self._places.get(key)
        if places is None:
            recorder = ProgramRecorder(f"map({name_of(self._fun)})")
            with Recording(recorder), trial(recorder) as trying:
                places = _tried(recorder, trying, self._fun, tree, signature)
            for stale in [known for known in self._places if not known[2].alive]:
                del self._places[stale]
            self._places[key] = places
        if places.mesh is not None or size <= ELEMENTS:
            return self._run(leaves, [0] * len(leaves), counts, 0, size, tree, places)
        parts = []
        for start in range(0, size, ELEMENTS):
            count = min(ELEMENTS, size - start)
            own = [
                leaf if isinstance(leaf, Array) else leaf[start : start + count] for leaf in leaves
            ]
            starts = [start if isinstance(leaf, Array) else 0 for leaf in leaves]
            parts.append(self._run(own, starts, counts, start, count, tree, places))
        return jax.tree_util.tree_map(_join, *parts)


_kept = lru_cache(PROGRAMS_KEPT)(_Alone)
