"""Zeros of a type, as a value of a program."""

from __future__ import annotations

from typing import Any

import jax

from pw.client.arrays.signature import ArrayType
from pw.client.trace.jit import jit
from pw.client.trace.tracer import ProgramTracer


def zeros(type_: ArrayType) -> ProgramTracer:
    """Return zeros of a type, which its devices make."""
    mesh = type_.sharding.mesh

    def make_zeros() -> Any:
        return jax.lax.full(type_.aval.shape, 0, type_.aval.dtype)

    def make() -> Any:
        return jit(make_zeros, mesh=mesh, out_shardings=type_.sharding)

    made: ProgramTracer = mesh.slice.compiled.made(("zeros", type_), make)()
    return made
