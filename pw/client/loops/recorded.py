"""A `pw.while_loop` in a program that the recorder traces."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from pw.client.arrays.mesh import Mesh
from pw.client.loops.loop import Loop
from pw.client.loops.native import in_function, needs_bound, one_mesh_of, settled
from pw.client.trace.branches import recorded
from pw.client.trace.equations import NeedsRecorder, ProgramTrace, tracing_program
from pw.client.trace.jit import jit
from pw.client.trace.recorder import ProgramRecorder
from pw.client.trace.tracer import ProgramTracer
from pw.client.trace.wrapped import name_of
from pw.core.errors import ArgumentError, TracerError


def in_recorder(
    recorder: ProgramRecorder, loop: Loop, limit: int | None, leaves: Sequence[ProgramTracer]
) -> Sequence[Any]:
    """Record a loop; returns the leaves of the last carry."""
    if recorder.tape_of(leaves) is None:
        mesh = _one_mesh(loop, leaves)
        if mesh is not None:

            def whole(*leaves: Any) -> Any:
                return in_function(loop, limit, leaves)

            whole.__name__ = loop.name
            made: Sequence[Any] = jit(whole, mesh=mesh)(*leaves)
            return made
    elif limit is None:
        raise ArgumentError(
            f"a gradient flows through the pw.while_loop of {name_of(loop.body_fun)!r}, which needs a bound "
            "for that; give max_iterations"
        )
    if limit is None:
        raise needs_bound(loop)
    if not limit:
        return leaves
    return iterated(recorder, loop, limit, [loop.goes_on(leaves), *leaves])[1:]


def iterated(recorder: ProgramRecorder, loop: Loop, count: int, state: Sequence[Any]) -> list[Any]:
    """Record `count` iterations, each behind the predicate that the one before has made."""
    more, *leaves = state
    varying: list[int] = []

    def step() -> list[Any]:
        made = loop.step(leaves)
        varying[:] = [at for at, leaf in enumerate(made) if leaf is not leaves[at]]
        return [loop.goes_on(made), *[made[at] for at in varying]]

    def stay() -> list[Any]:
        return [False, *[leaves[at] for at in varying]]

    step.__name__ = name_of(loop.body_fun)
    for _ in range(count):
        more, *changed = recorded(recorder, more, (step, stay), (), None, is_iteration=True)
        for at, leaf in zip(varying, changed, strict=True):
            leaves[at] = leaf
    return [more, *leaves]


def _one_mesh(loop: Loop, leaves: Sequence[ProgramTracer]) -> Mesh | None:
    """Return where the loop can be one computation; None if it uses values besides its carry."""
    program = ProgramTrace(loop.name)
    lie = [None if leaf.sharding is None else leaf.sharding.mesh for leaf in leaves]
    with suppress(NeedsRecorder, TracerError), tracing_program(program):
        meshes, jaxpr = settled(program, loop, [leaf.aval for leaf in leaves], lie)
        return one_mesh_of(jaxpr, meshes)
    return None
