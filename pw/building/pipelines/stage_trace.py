"""Stages of pipelines while JAX traces them: a layer of experts there is a part of the program.

A stage is traced as one computation, in which calls of `pw.jit` functions are put in line. The experts of a
`pw.moe` lie elsewhere, so its calls stay calls: for them the thread traces the program, not the stage.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

import jax

from pw.client.arrays.mesh import OwnMesh
from pw.client.arrays.transformed import for_hosts
from pw.client.computations.export import tracing
from pw.client.equations.calls import ProgramTrace, program_trace, tracing_program

_thread = threading.local()
_NO_MESH = jax.sharding.AbstractMesh((), ())


@contextlib.contextmanager
def tracing_stages(mesh: OwnMesh, now: Callable[[], OwnMesh] | None = None) -> Iterator[None]:
    """In the block, stages are traced for the hosts of a mesh.

    Where one function is several stages, `now` returns the devices of the one that is traced.
    """
    program = program_trace() or ProgramTrace("pw.pipeline")
    with tracing(mesh), _stage((program, now or (lambda: mesh))):
        yield


@contextlib.contextmanager
def outside_of_stage() -> Iterator[OwnMesh | None]:
    """In the block, calls are those of the program around a stage; yields the stage's devices, or None."""
    stage = getattr(_thread, "stage", None)
    if stage is None:
        yield None
        return
    program, now = stage
    with (
        _stage(None),
        for_hosts(None),
        jax.sharding.use_abstract_mesh(_NO_MESH),
        tracing_program(program),
    ):
        yield now()


@contextlib.contextmanager
def _stage(stage: tuple[ProgramTrace, Callable[[], OwnMesh]] | None) -> Iterator[None]:
    before = getattr(_thread, "stage", None)
    _thread.stage = stage
    try:
        yield
    finally:
        _thread.stage = before
