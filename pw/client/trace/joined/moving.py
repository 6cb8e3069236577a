"""Moves values between meshes that join islands and meshes on one island, inside of a program.

A part that each island has whole moves by edges alone. To split a value over islands, or to put
parts together, takes a small computation where the value is, or where it goes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from pw.client.arrays.mesh import Mesh
from pw.client.arrays.sharding import NamedSharding
from pw.client.arrays.signature import ArrayType
from pw.client.trace.export import trace
from pw.client.trace.tracer import JoinedTracer, ProgramTracer


def divided(recorder: Any, tracer: ProgramTracer, type_: ArrayType) -> list[ProgramTracer]:
    """Return the parts of a value for the islands of `type_`, wherever it is; edges move them."""
    if tracer._type is None:
        return list(recorder.blocks(tracer, type_))
    along = type_.sharding.crossing_dimension
    count = len(type_.parts)
    if not isinstance(tracer, JoinedTracer):
        if along is None:
            return [tracer] * count
        return list(_split(recorder, tracer, along, count))
    before = tracer._type.sharding.crossing_dimension
    if before == along and len(tracer.parts) == count:
        return list(tracer.parts)
    if before is None:
        owners = [tracer.parts[at % len(tracer.parts)] for at in range(count)]
        if along is None:
            return owners
        return [_split(recorder, owner, along, count)[at] for at, owner in enumerate(owners)]
    wholes = [
        _put_together(recorder, tracer, before, to.sharding.mesh, _replicated) for to in type_.parts
    ]
    if along is None:
        return wholes
    return [_split(recorder, whole, along, count)[at] for at, whole in enumerate(wholes)]


def gathered(recorder: Any, tracer: JoinedTracer, type_: ArrayType) -> ProgramTracer:
    """Return a value over several islands for a computation on one of them, or on another mesh."""
    assert tracer._type is not None
    along = tracer._type.sharding.crossing_dimension
    mesh = type_.sharding.mesh
    if along is None:
        own = (part for part in tracer.parts if part.sharding and part.sharding.mesh == mesh)
        return next(own, tracer.parts[0])
    return _put_together(recorder, tracer, along, mesh, lambda _: type_.sharding)


def _replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def _split(recorder: Any, tracer: ProgramTracer, along: int, count: int) -> list[ProgramTracer]:
    """Cut a value into blocks where it is."""
    assert tracer._type is not None
    return applied(
        recorder,
        lambda x: tuple(jnp.split(x, count, along)),
        "split over islands",
        tracer._type.sharding.mesh,
        [tracer],
        [tracer._type],
    )


def _put_together(
    recorder: Any,
    tracer: JoinedTracer,
    along: int,
    mesh: Mesh,
    sharding: Callable[[Mesh], NamedSharding],
) -> ProgramTracer:
    """Concatenate the blocks of all islands on a mesh."""
    types = [ArrayType.of(part.aval, _replicated(mesh)) for part in tracer.parts]
    (whole,) = applied(
        recorder,
        lambda *blocks: (jnp.concatenate(blocks, along),),
        "gather from islands",
        mesh,
        tracer.parts,
        types,
        [sharding(mesh)],
    )
    return whole


def applied(
    recorder: Any,
    function: Callable[..., Any],
    name: str,
    mesh: Mesh,
    arguments: Sequence[ProgramTracer],
    types: Sequence[ArrayType],
    shardings: Sequence[NamedSharding] | None = None,
) -> list[ProgramTracer]:
    """Record a small computation."""
    function.__name__ = name.replace(" ", "_")
    _, tree = jax.tree_util.tree_flatten((tuple(types), {}))
    traced = trace(
        function,
        tree,
        name,
        mesh,
        types,
        lambda _, avals: shardings or [types[0].sharding] * len(avals),
        (),
    )
    made: list[ProgramTracer] = recorder.call(traced, arguments)
    return made
