"""Moves values between meshes that join islands and meshes on one island, inside of a program.

A part that an island has already moves by edges alone. On one mesh, a function that returns its argument
is cut like any other. Between meshes, a small computation takes parts out of a value where it is, or puts a
value together where it goes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pw.client.arrays.island_parts import IslandPart, sources
from pw.client.arrays.mesh import OwnMesh
from pw.client.arrays.sharding import OwnSharding
from pw.client.arrays.signature import ArrayType, is_key
from pw.client.trace.export import trace
from pw.client.trace.exported import Call
from pw.client.trace.joined.traced import JoinedTraced, trace_joined
from pw.client.trace.tracer import JoinedTracer, ProgramTracer
from pw.core.sharding import Box


def divided(recorder: Any, tracer: ProgramTracer, type_: ArrayType) -> list[ProgramTracer]:
    """Return the parts of a value for the islands of `type_`, wherever it is; edges move them."""
    source = tracer._type
    assert source is not None
    if not isinstance(tracer, JoinedTracer):
        return _split(recorder, tracer, type_.islands)
    own = [_alike(tracer, part, at) for at, part in enumerate(type_.islands)]
    if None not in own:
        return [part for part in own if part is not None]
    if source.sharding.mesh == type_.sharding.mesh:
        (moved,) = recorder.call(_move(source, type_), [tracer])
        return list(moved.parts)
    whole = [OwnSharding.replicated(part.sharding.mesh) for part in type_.islands]
    return [
        _split(recorder, _put_together(recorder, tracer, lies), [part])[0]
        for part, lies in zip(type_.islands, whole, strict=True)
    ]


def gathered(recorder: Any, tracer: JoinedTracer, type_: ArrayType) -> ProgramTracer:
    """Return a value over several islands for a computation on one of them, or on another mesh."""
    assert tracer._type is not None
    mesh = type_.sharding.mesh
    wholes = [
        part
        for part, island in zip(tracer.parts, tracer._type.islands, strict=True)
        if island.is_whole
    ]
    if wholes:
        own = (part for part in wholes if part.sharding and part.sharding.mesh == mesh)
        return next(own, wholes[0])
    return _put_together(recorder, tracer, type_.sharding)


def _alike(tracer: JoinedTracer, wanted: IslandPart, number: int) -> ProgramTracer | None:
    """Return a part with the same elements, if possible one on the same slice; `number` spreads the others."""
    assert tracer._type is not None
    pairs = zip(tracer._type.islands, tracer.parts, strict=True)
    same = [(island.sharding.mesh.slice, part) for island, part in pairs if island == wanted]
    here = (part for slice_, part in same if slice_ is wanted.sharding.mesh.slice)
    return next(here, same[number % len(same)][1] if same else None)


def _move(source: ArrayType, target: ArrayType) -> JoinedTraced:
    """Return the function over several islands that changes how a value lies."""
    mesh = target.sharding.mesh

    def moved(x: Any) -> Any:
        return x

    def make() -> JoinedTraced:
        wanted = [target.sharding]
        return trace_joined(Call(moved, "move over islands", mesh, (source,), lambda *_: wanted))

    made: JoinedTraced = mesh.slice.compiled.made(("move", source, target), make)
    return made


def _split(
    recorder: Any, tracer: ProgramTracer, islands: Sequence[IslandPart]
) -> list[ProgramTracer]:
    """Take parts out of a value where it is."""
    assert tracer._type is not None
    wanted = list(dict.fromkeys(part for part in islands if not part.is_whole))
    lies = tracer._type.sharding

    def parts(x: Any) -> Any:
        return tuple(_in_numbers(lambda x, part=part: _part(x, part), x) for part in wanted)

    made: list[ProgramTracer] = []
    if wanted:
        made = applied(
            recorder,
            parts,
            "split over islands",
            lies.mesh,
            [tracer],
            [tracer._type],
            [lies.fitting(part.shape) for part in wanted],
        )
    return [tracer if part.is_whole else made[wanted.index(part)] for part in islands]


def _put_together(recorder: Any, tracer: JoinedTracer, sharding: OwnSharding) -> ProgramTracer:
    """Put the parts of all islands together on a mesh."""
    assert tracer._type is not None
    blocks, shape = sources(tracer._type.islands), tuple(tracer.shape)
    used = list(dict.fromkeys(at for at, _ in blocks))
    parts = [tracer.parts[at] for at in used]
    whole = OwnSharding.replicated(sharding.mesh)

    def together(*values: Any) -> Any:
        pieces = [(used.index(at), block.own, block.whole) for at, block in blocks]
        return (_in_numbers(lambda *values: _copied(values, pieces, shape), *values),)

    (made,) = applied(
        recorder,
        together,
        "gather from islands",
        sharding.mesh,
        parts,
        [ArrayType.of(part.aval, whole) for part in parts],
        [sharding],
    )
    return made


def _in_numbers(function: Callable[..., Any], *values: Any) -> Any:
    """Apply a function that moves elements; to typed keys as the integers that they are."""
    if not is_key(values[0].dtype):
        return function(*values)
    made = function(*map(jax.random.key_data, values))
    return jax.random.wrap_key_data(made, impl=jax.random.key_impl(values[0]))


def _part(x: Any, part: IslandPart) -> Any:
    if len(part.blocks) == 1:
        return _at(x, part.blocks[0].whole)
    return _copied([x], [(0, block.whole, block.own) for block in part.blocks], part.shape)


def _copied(
    values: Sequence[Any], pieces: Sequence[tuple[int, Box, Box]], shape: tuple[int, ...]
) -> Any:
    """Return an array of pieces of `values`: of which one, from where, and to where."""
    made = jnp.zeros((*shape, *values[0].shape[len(shape) :]), values[0].dtype)
    for at, source, target in pieces:
        starts = [start for start, _ in target] + [0] * (made.ndim - len(shape))
        made = jax.lax.dynamic_update_slice(made, _at(values[at], source), starts)
    return made


def _at(x: Any, box: Box) -> Any:
    return x[tuple(slice(start, stop) for start, stop in box)]


def applied(
    recorder: Any,
    function: Callable[..., Any],
    name: str,
    mesh: OwnMesh,
    arguments: Sequence[ProgramTracer],
    types: Sequence[ArrayType],
    shardings: Sequence[OwnSharding] | None = None,
) -> list[ProgramTracer]:
    """Record a small computation."""
    function.__name__ = name.replace(" ", "_")

    def lie(_: Any, avals: Sequence[Any]) -> Sequence[OwnSharding]:
        return shardings or [types[0].sharding] * len(avals)

    traced = trace(Call(function, name, mesh, tuple(types), lie))
    made: list[ProgramTracer] = recorder.call(traced, arguments)
    return made
