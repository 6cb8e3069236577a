"""`Carry`: the value that a loop passes from iteration to iteration, and where it lies.

The functions of a loop are traced on what the user gives, and on what the body makes of it, until the body
leaves every leaf where it has found it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from pw.client.arrays.mesh import Mesh, default_mesh
from pw.client.arrays.sharding import NamedSharding
from pw.client.arrays.signature import ArrayType, aval_of
from pw.client.trace.argument_errors import in_words
from pw.client.trace.function import signature_of_call, tree_flatten, tree_unflatten
from pw.client.trace.predicate import boolean, checked_predicate
from pw.client.trace.recorder import ProgramRecorder
from pw.client.trace.recording import Recording
from pw.client.trace.trial import Trial, trial
from pw.client.trace.wrapped import name_of
from pw.core.errors import ArgumentError, ShardingError


@dataclass(frozen=True, slots=True, eq=False)
class Loop:
    """The two functions of a loop, and the tree of its carry."""

    cond_fun: Callable[[Any], Any]
    body_fun: Callable[[Any], Any]
    tree: Any

    @property
    def name(self) -> str:
        """The name of its computations and programs."""
        return f"while_loop({name_of(self.body_fun)})"

    def goes_on(self, leaves: Sequence[Any]) -> Any:
        """Return the predicate for a carry. Raises ArgumentError if it is no scalar boolean."""
        said = (
            f"pw.while_loop: {name_of(self.cond_fun)!r} must return a scalar boolean, and returns"
        )
        return boolean(self.cond_fun(tree_unflatten(self.tree, leaves)), said)

    def step(self, leaves: Sequence[Any]) -> list[Any]:
        """Return the leaves of the carry after an iteration. Raises ArgumentError if these are others."""
        carry = tree_unflatten(self.tree, leaves)
        name, returned = name_of(self.body_fun), self.body_fun(carry)
        results, tree = tree_flatten(returned)
        if tree != self.tree:
            raise ArgumentError(
                f"pw.while_loop: {name!r} must return a carry of the tree that it takes, {in_words(carry)}, "
                f"and returns {in_words(returned)}"
            )
        for at, (result, before) in enumerate(zip(results, leaves, strict=True)):
            try:
                aval, wanted = map(aval_of, signature_of_call([result, before]))
            except ArgumentError:
                raise ArgumentError(
                    f"pw.while_loop: {name!r} returns {result!r} of type {type(result).__name__} as "
                    f"{self.path(at)}; a carry is a tree of arrays and numbers"
                ) from None
            if (tuple(aval.shape), aval.dtype) != (tuple(wanted.shape), wanted.dtype):
                raise ArgumentError(
                    f"pw.while_loop: the carry must keep its shapes and dtypes, but {name!r} takes "
                    f"{self.path(at)} as {wanted.str_short()} and returns {aval.str_short()}; convert it "
                    "there, as with astype or reshape, or begin with another first carry"
                )
        return results

    def path(self, at: int) -> str:
        """Return the user's name of a leaf of the carry."""
        whole = tree_unflatten(self.tree, range(self.tree.num_leaves))
        path, _ = jax.tree_util.tree_flatten_with_path(whole)[0][at]
        return f"carry{jax.tree_util.keystr(path)}"

    def moves(self, at: int, before: Any, after: Any) -> ShardingError:
        """Return the error of a leaf that the body leaves elsewhere each time."""
        return ShardingError(
            f"pw.while_loop: {name_of(self.body_fun)!r} takes {self.path(at)} as {before} and "
            f"returns it as {after}, and so on in each iteration; give its functions out_shardings"
        )


@dataclass(frozen=True, slots=True, eq=False)
class Carry:
    """Where the carry of a loop lies, as its functions leave it."""

    types: tuple[ArrayType, ...]
    predicate: NamedSharding
    mesh: Mesh | None
    """Where all of an iteration runs, if it can be one computation; None if it is a part of a program."""
    uses_program: bool
    """The functions use values of the program that is traced, besides the carry."""
    donated: frozenset[int]
    """The leaves that the functions donate."""
    varying: tuple[int, ...]
    """The leaves that the body does not return as they are."""


def learn(recorder: ProgramRecorder, loop: Loop, signature: Sequence[Any]) -> Carry:
    """Trace a loop's functions, and return where the carry lies.

    Args:
        recorder: of the program that is traced, which stays as it is.
        loop: the functions.
        signature: the type, or aval, of each leaf of the first carry.

    Raises:
        ArgumentError: the predicate is no scalar boolean, or the body changes the tree, a shape or a dtype.
        ShardingError: the body moves a leaf in each iteration.
    """
    given = tuple(signature)
    with Recording(recorder), trial(recorder) as trying:
        found = _tried(recorder, trying, loop, given)
    if found.types == given:
        return found
    given = _beside(found, given)
    for _ in range(2):
        with Recording(recorder), trial(recorder) as trying:
            found = _tried(recorder, trying, loop, given)
        if found.types == given:
            return found
        before, given = given, found.types
    moved = next(at for at, type_ in enumerate(given) if type_ is not before[at])
    raise loop.moves(moved, before[moved], given[moved])


def _beside(found: Carry, given: Sequence[Any]) -> tuple[ArrayType, ...]:
    """Return the types of a carry, with numbers of this machine beside the arrays, as a counter of iterations.

    Without this, Python's operators would compute them on a default slice, and the loop ran on two.
    """
    lie = [found.predicate, *[type_.sharding for type_ in found.types]]
    numbers = [at for at, before in enumerate(given) if not isinstance(before, ArrayType)]
    default = default_mesh() if numbers else None
    mesh = next((one.mesh for one in lie if one.mesh != default), default)
    types = list(found.types)
    for at in numbers:
        if types[at].sharding.mesh == default and mesh is not None:
            types[at] = types[at].with_sharding(NamedSharding.replicated(mesh))
    return tuple(types)


def _tried(recorder: ProgramRecorder, trying: Trial, loop: Loop, given: Sequence[Any]) -> Carry:
    leaves = [trying.leaf(at, type_) for at, type_ in enumerate(given)]
    identities = [leaf.identity for leaf in leaves]
    sharding = checked_predicate(recorder, loop.goes_on(leaves), "").sharding
    results = loop.step(leaves)
    types, varying = [], []
    for at, (result, before) in enumerate(zip(results, given, strict=True)):
        made, aval = recorder.lift(result), aval_of(before)
        where = made.sharding or (before.sharding if isinstance(before, ArrayType) else sharding)
        is_weak = bool(made.weak_type and aval.weak_type)
        whole = jax.core.ShapedArray(aval.shape, aval.dtype, weak_type=is_weak)
        types.append(ArrayType.of(whole, where or NamedSharding.replicated(default_mesh())))
        if made.identity is None or made.identity != identities[at]:
            varying.append(at)
    predicate = sharding or NamedSharding.replicated(
        types[0].sharding.mesh if types else default_mesh()
    )
    mesh = None if trying.uses_program() else trying.one_mesh()
    if any(one.mesh != mesh for one in (predicate, *[type_.sharding for type_ in types])):
        mesh = None  # the body moves the carry to where no computation of it runs
    return Carry(
        tuple(types),
        predicate,
        mesh,
        trying.uses_program(),
        trying.donated(),
        tuple(varying),
    )


def as_type(value: Any, type_: ArrayType) -> Any:
    """Return a traced leaf as the loop passes it on: not of Python's weak types, unless it stays so."""
    if type_.aval.weak_type or type_.key_impl is not None:
        return value
    return jax.lax.convert_element_type(jnp.asarray(value), type_.aval.dtype)
