"""A `pw.while_loop` that JAX traces.

In a program, a loop with a bound is a `jax.lax.scan` of choices whether it goes on, which JAX can differentiate
in reverse; `pw.client.trace.place` makes guarded iterations of it, or one computation on one mesh. Without a
bound, and in a `pw.jit` function, it is `jax.lax.while_loop`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pw.client.arrays.mesh import Mesh, default_mesh
from pw.client.arrays.ragged import pairs_of
from pw.client.arrays.signature import aval_of
from pw.client.loops.loop import Loop
from pw.client.trace.equations import ProgramTrace, needs_recorder
from pw.client.trace.function import signature_of_call
from pw.client.trace.meshes import first_mesh, is_on_several
from pw.client.trace.unrolled import LOOP
from pw.client.trace.wrapped import name_of
from pw.core.errors import ArgumentError

Meshes = Sequence[Mesh | None]
"""Where each leaf of a carry lies; None for host values."""


def in_function(loop: Loop, limit: int | None, leaves: Sequence[Any]) -> Sequence[Any]:
    """Add a loop to a `pw.jit` function; returns the leaves of the last carry."""

    def goes_on(state: Any) -> Any:
        number, carry = state
        more = loop.goes_on(carry)
        return more if limit is None else jnp.logical_and(number < limit, more)

    def step(state: Any) -> Any:
        return state[0] + 1, loop.step(state[1])

    made: Sequence[Any] = jax.lax.while_loop(goes_on, step, (0, list(leaves)))[1]
    return made


def in_program(
    program: ProgramTrace, loop: Loop, limit: int | None, leaves: Sequence[Any]
) -> Sequence[Any]:
    """Add a loop to a program; returns the leaves of the last carry."""
    avals = [aval_of(signature) for signature in signature_of_call(leaves)]
    meshes, jaxpr = settled(program, loop, avals, [program.mesh_of(leaf) for leaf in leaves])
    if limit is not None:
        return iterated(program, loop, limit, meshes, [loop.goes_on(leaves), *leaves])[1:]
    if is_on_several(jaxpr.eqns):
        raise needs_bound(loop)

    def step(carry: Sequence[Any]) -> Sequence[Any]:
        return loop.step(_known(program, carry, meshes))

    step.__name__ = name_of(loop.body_fun)
    program.unbounded.append(step.__name__)
    made: Sequence[Any] = jax.lax.while_loop(
        lambda carry: loop.goes_on(_known(program, carry, meshes)), step, list(leaves)
    )
    return made


def iterated(
    program: ProgramTrace, loop: Loop, count: int, meshes: Meshes, state: Sequence[Any]
) -> Sequence[Any]:
    """Return the predicate and the leaves of the carry after `count` iterations, or after the last one."""

    def iterate(state: Any, _: None) -> Any:
        more, leaves = state
        _known(program, leaves, meshes)

        def step() -> Any:
            made = loop.step(leaves)
            return loop.goes_on(made), made

        def stay() -> Any:
            return False, leaves

        step.__name__ = name_of(loop.body_fun)
        with jax.named_scope(LOOP):
            return jax.lax.cond(more, step, stay), None

    with jax.named_scope(LOOP):
        (more, made), _ = jax.lax.scan(iterate, (state[0], list(state[1:])), None, length=count)
    return [more, *made]


def settled(
    program: ProgramTrace, loop: Loop, avals: Sequence[Any], meshes: Meshes
) -> tuple[Meshes, Any]:
    """Return where the body finds the carry as it leaves it, and the jaxpr of an iteration there.

    Raises:
        ArgumentError: the predicate is no scalar boolean, or the body changes the tree, a shape or a dtype.
        ShardingError: the body moves a leaf in each iteration.
    """
    for _ in range(3):
        before = meshes
        closed, meshes = traced(program, loop, avals, before)
        if meshes == before:
            return meshes, closed.jaxpr
    moved = next(at for at, mesh in enumerate(meshes) if mesh != before[at])
    raise loop.moves(moved, before[moved], meshes[moved])


def traced(
    program: ProgramTrace, loop: Loop, avals: Sequence[Any], meshes: Meshes
) -> tuple[Any, Meshes]:
    """Return the jaxpr of a predicate and an iteration after it, and where this leaves the carry."""
    after: Meshes = ()

    def once(*values: Any) -> Any:
        nonlocal after
        leaves = _known(program, values, meshes)
        more, made = loop.goes_on(leaves), loop.step(leaves)
        after = [program.mesh_of(one) or mesh for one, mesh in zip(made, meshes, strict=True)]
        return more, *made

    closed = jax.make_jaxpr(once)(*avals)
    if pairs_of(loop.tree) and is_on_several(closed.jaxpr.eqns):
        needs_recorder()  # of rows only those that count move
    return closed, after


def one_mesh_of(jaxpr: Any, meshes: Meshes) -> Mesh | None:
    """Return the mesh of an iteration and of its carry, if the loop can be one computation there."""
    if is_on_several(jaxpr.eqns):
        return None
    known = [mesh for mesh in (first_mesh(jaxpr.eqns), *meshes) if mesh is not None]
    mesh = known[0] if known else default_mesh()
    return mesh if all(one == mesh for one in known) else None


def needs_bound(loop: Loop) -> ArgumentError:
    """Return the error of a loop over several meshes in a program."""
    return ArgumentError(
        f"pw.while_loop in a pw.program: {name_of(loop.cond_fun)!r} and {name_of(loop.body_fun)!r} "
        "cannot run as one computation on one mesh, so each iteration is recorded; give "
        "max_iterations, or call the loop outside of the program"
    )


def _known(program: ProgramTrace, leaves: Sequence[Any], meshes: Meshes) -> Sequence[Any]:
    """Say where leaves of a carry lie; returns them."""
    for leaf, mesh in zip(leaves, meshes, strict=True):
        program.say(leaf, mesh)
    return leaves
