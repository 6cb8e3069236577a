"""A `pw.while_loop` that JAX traces.

In a program, a loop with a bound is a `jax.lax.scan` of choices whether it goes on, which JAX can
differentiate in reverse; `pw.client.programs.placing.place` makes guarded iterations of it, or one computation
on one mesh. Without a bound, and in a `pw.jit` function, it is `jax.lax.while_loop`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pw.client.arrays.mesh import OwnMesh
from pw.client.arrays.signature import aval_of
from pw.client.equations.calls import ProgramTrace
from pw.client.equations.counted_rows import with_counts
from pw.client.equations.jax_calls import with_calls
from pw.client.equations.meshes import first_mesh, is_on_several
from pw.client.functions.wrapped import name_of
from pw.client.loops.loop import Loop
from pw.client.programs.passes.unrolled import LOOP
from pw.core.errors import ArgumentError


def in_function(loop: Loop, limit: int | None, leaves: Sequence[Any]) -> Sequence[Any]:
    """Add a loop to a `pw.jit` function; returns the leaves of the last carry."""

    def goes_on(state: Any) -> Any:
        number, carry = state
        more = loop.goes_on(carry)
        return more if limit is None else jnp.logical_and(number < limit, more)

    def step(state: Any) -> Any:
        return state[0] + 1, loop.step(state[1])

    last: Sequence[Any] = jax.lax.while_loop(goes_on, step, (0, list(leaves)))[1]
    return last


def in_program(
    program: ProgramTrace, loop: Loop, limit: int | None, leaves: Sequence[Any]
) -> Sequence[Any]:
    """Add a loop to a program; returns the leaves of the last carry."""
    like, jaxpr = _settled(program, loop, leaves)
    if limit is not None:
        return iterated(program, loop, limit, like, [loop.goes_on(leaves), *leaves])[1:]
    if is_on_several(jaxpr.eqns):
        raise ArgumentError(
            f"pw.while_loop in a pw.program: {name_of(loop.cond_fun)!r} and {name_of(loop.body_fun)!r} "
            "cannot run as one computation on one mesh, so each iteration is recorded; give "
            "max_iterations, or call the loop outside of the program"
        )

    def step(carry: Sequence[Any]) -> Sequence[Any]:
        return loop.step(_lying(program, carry, like))

    step.__name__ = loop.name
    program.unbounded.append(name_of(loop.body_fun))
    last: Sequence[Any] = jax.lax.while_loop(
        lambda carry: loop.goes_on(_lying(program, carry, like)), step, list(leaves)
    )
    return last


def iterated(
    program: ProgramTrace, loop: Loop, count: int, like: Sequence[Any], state: Sequence[Any]
) -> Sequence[Any]:
    """Return the predicate and the leaves of the carry after `count` iterations, or after the last one.

    Args:
        program: program that JAX traces.
        loop: functions of the loop.
        count: number of iterations.
        like: values that lie as the carry does.
        state: the first predicate, and the leaves of the first carry.
    """

    def iterate(state: Any, _: None) -> Any:
        more, leaves = state
        _lying(program, leaves, like)

        def step() -> Any:
            after = with_counts(loop.step(leaves), loop.tree)
            return loop.goes_on(after), after

        def stay() -> Any:
            return False, leaves

        step.__name__ = name_of(loop.body_fun)
        with jax.named_scope(LOOP):
            return jax.lax.cond(more, step, stay), None

    with jax.named_scope(LOOP):
        (more, last), _ = jax.lax.scan(iterate, (state[0], list(state[1:])), None, length=count)
    return [more, *last]


def _settled(program: ProgramTrace, loop: Loop, leaves: Sequence[Any]) -> tuple[Sequence[Any], Any]:
    """Return values that lie as the body leaves the carry, and the jaxpr of an iteration on these meshes.

    Raises:
        ArgumentError: the predicate is no scalar boolean, or the body changes the tree, a shape or a dtype.
        ShardingError: the body moves a leaf in each iteration.
    """
    avals = [aval_of(signature) for signature in loop.signature(leaves)]
    like = leaves
    after = [program.mesh_of(leaf) for leaf in leaves]
    for _ in range(3):
        before = after
        closed, like = traced(program, loop, avals, like)
        after = [program.mesh_of(leaf) for leaf in like]
        if after == before:
            return like, closed.jaxpr
    moved = next(at for at, mesh in enumerate(after) if mesh != before[at])
    raise loop.moves(moved, before[moved], after[moved])


def traced(
    program: ProgramTrace, loop: Loop, avals: Sequence[Any], like: Sequence[Any]
) -> tuple[Any, Sequence[Any]]:
    """Return the jaxpr of a predicate and an iteration after it, and values that lie as this leaves the carry.

    Args:
        program: program that JAX traces.
        loop: functions of the loop.
        avals: abstract values of the leaves of the carry.
        like: values that lie as the carry does before the iteration.
    """
    after: Sequence[Any] = ()

    def once(*leaves: Any) -> Any:
        nonlocal after
        _lying(program, leaves, like)
        more, results = loop.goes_on(leaves), loop.step(leaves)
        pairs = zip(results, like, strict=True)
        after = [before if program.mesh_of(one) is None else one for one, before in pairs]
        return more, *results

    closed = jax.make_jaxpr(once)(*avals)
    return with_calls(closed, program.kinds), after


def one_mesh_of(jaxpr: Any, meshes: Sequence[OwnMesh]) -> OwnMesh | None:
    """Return the mesh of an iteration and of its carry, if the loop can be one computation there."""
    if is_on_several(jaxpr.eqns):
        return None
    mesh = first_mesh(jaxpr.eqns) or meshes[0]
    return mesh if all(one == mesh for one in meshes) else None


def _lying(program: ProgramTrace, leaves: Sequence[Any], like: Sequence[Any]) -> Sequence[Any]:
    """Say that leaves of a carry lie as other values do; returns them."""
    for leaf, other in zip(leaves, like, strict=True):
        program.say_alike(leaf, other)
    return leaves
