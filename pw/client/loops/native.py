"""A `pw.while_loop` in a program that JAX traces.

With a bound it is a `jax.lax.scan` of choices whether it goes on, which JAX can differentiate in reverse;
`pw.client.trace.place` makes guarded iterations of it, or one computation on one mesh. Without a bound it is
`jax.lax.while_loop`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from pw.client.arrays.mesh import Mesh
from pw.client.arrays.signature import aval_of
from pw.client.loops.carry import Loop
from pw.client.trace.equations import ProgramTrace
from pw.client.trace.function import signature_of_call
from pw.client.trace.meshes import is_on_several
from pw.client.trace.unrolled import LOOP
from pw.client.trace.wrapped import name_of
from pw.core.errors import ArgumentError


def in_program(
    program: ProgramTrace, loop: Loop, limit: int | None, leaves: Sequence[Any]
) -> Sequence[Any]:
    """Add a loop to a program; returns the leaves of the last carry."""
    meshes, jaxpr = _settled(program, loop, leaves)

    def known(leaves: Sequence[Any]) -> Sequence[Any]:
        for leaf, mesh in zip(leaves, meshes, strict=True):
            program.say(leaf, mesh)
        return leaves

    if limit is None:
        if is_on_several(jaxpr.eqns):
            raise ArgumentError(
                f"pw.while_loop in a pw.program: {name_of(loop.cond_fun)!r} and {name_of(loop.body_fun)!r} "
                "cannot run as one computation on one mesh, so each iteration is recorded; give "
                "max_iterations, or call the loop outside of the program"
            )
        made: Sequence[Any] = jax.lax.while_loop(
            lambda carry: loop.goes_on(known(carry)),
            lambda carry: loop.step(known(carry)),
            list(leaves),
        )
        return made

    def iterate(state: Any, _: None) -> Any:
        more, leaves = state
        known(leaves)

        def step() -> Any:
            made = loop.step(leaves)
            return loop.goes_on(made), made

        def stay() -> Any:
            return False, leaves

        step.__name__ = name_of(loop.body_fun)
        with jax.named_scope(LOOP):
            return jax.lax.cond(more, step, stay), None

    first = loop.goes_on(leaves), list(leaves)
    with jax.named_scope(LOOP):
        (_, made), _ = jax.lax.scan(iterate, first, None, length=limit)
    return made


def _settled(
    program: ProgramTrace, loop: Loop, leaves: Sequence[Any]
) -> tuple[Sequence[Mesh | None], Any]:
    """Return where the body finds the carry and leaves it, and the jaxpr of an iteration."""
    avals = [aval_of(signature) for signature in signature_of_call(leaves)]
    meshes: list[Mesh | None] = []
    after = [program.mesh_of(leaf) for leaf in leaves]

    def once(*values: Any) -> Any:
        nonlocal after
        for value, mesh in zip(values, meshes, strict=True):
            program.say(value, mesh)
        more, made = loop.goes_on(values), loop.step(values)
        after = [program.mesh_of(one) or mesh for one, mesh in zip(made, meshes, strict=True)]
        return more, made

    for _ in range(3):
        meshes = after
        jaxpr = jax.make_jaxpr(once)(*avals).jaxpr
        if after == meshes:
            return meshes, jaxpr
    moved = next(at for at, mesh in enumerate(meshes) if mesh != after[at])
    raise loop.moves(moved, meshes[moved], after[moved])
