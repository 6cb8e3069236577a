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
from pw.client.computations.export import trace
from pw.client.computations.exported import Call
from pw.client.computations.joined import JoinedTraced, trace_joined
from pw.client.programs.writing.values import JoinedValue, PlacedValue
from pw.core.sharding import Box


def divided(builder: Any, value: PlacedValue, type_: ArrayType) -> list[PlacedValue]:
    """Return the parts of a value for the islands of `type_`, wherever it is; edges move them."""
    source = value.type
    assert source is not None
    if not isinstance(value, JoinedValue):
        return _split(builder, value, type_.islands)
    own = [_alike(value, part, at) for at, part in enumerate(type_.islands)]
    if None not in own:
        return [part for part in own if part is not None]
    if source.sharding.mesh == type_.sharding.mesh:
        (moved,) = builder.call(_move(source, type_), [value])
        return list(moved.parts)
    shardings = [OwnSharding.replicated(part.sharding.mesh) for part in type_.islands]
    return [
        _split(builder, _put_together(builder, value, lies), [part])[0]
        for part, lies in zip(type_.islands, shardings, strict=True)
    ]


def gathered(builder: Any, value: JoinedValue, type_: ArrayType) -> PlacedValue:
    """Return a value over several islands for a computation on one of them, or on another mesh."""
    assert value.type is not None
    mesh = type_.sharding.mesh
    wholes = [
        part
        for part, island in zip(value.parts, value.type.islands, strict=True)
        if island.is_whole
    ]
    if wholes:
        own = (part for part in wholes if part.sharding and part.sharding.mesh == mesh)
        return next(own, wholes[0])
    return _put_together(builder, value, type_.sharding)


def _alike(value: JoinedValue, wanted: IslandPart, number: int) -> PlacedValue | None:
    """Return a part with the same elements, if possible one on the same slice; `number` spreads the others."""
    assert value.type is not None
    pairs = zip(value.type.islands, value.parts, strict=True)
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

    function: JoinedTraced = mesh.slice.compiled.get_or_make(("move", source, target), make)
    return function


def _split(builder: Any, value: PlacedValue, islands: Sequence[IslandPart]) -> list[PlacedValue]:
    """Take parts out of a value where it is."""
    assert value.type is not None
    wanted = list(dict.fromkeys(part for part in islands if not part.is_whole))
    lies = value.type.sharding

    def parts(x: Any) -> Any:
        return tuple(_in_numbers(lambda x, part=part: _part(x, part), x) for part in wanted)

    results: list[PlacedValue] = []
    if wanted:
        results = applied(
            builder,
            parts,
            "split over islands",
            lies.mesh,
            [value],
            [value.type],
            [lies.fitting(part.shape) for part in wanted],
        )
    return [value if part.is_whole else results[wanted.index(part)] for part in islands]


def _put_together(builder: Any, value: JoinedValue, sharding: OwnSharding) -> PlacedValue:
    """Put the parts of all islands together on a mesh."""
    assert value.type is not None
    blocks, shape = sources(value.type.islands), tuple(value.aval.shape)
    used = list(dict.fromkeys(at for at, _ in blocks))
    parts = [value.parts[at] for at in used]
    replicated = OwnSharding.replicated(sharding.mesh)

    def together(*values: Any) -> Any:
        pieces = [(used.index(at), block.in_part, block.in_array) for at, block in blocks]
        return (_in_numbers(lambda *values: _copied(values, pieces, shape), *values),)

    (result,) = applied(
        builder,
        together,
        "gather from islands",
        sharding.mesh,
        parts,
        [ArrayType.of(part.aval, replicated) for part in parts],
        [sharding],
    )
    return result


def _in_numbers(function: Callable[..., Any], *values: Any) -> Any:
    """Apply a function that moves elements; to typed keys as the integers that they are."""
    if not is_key(values[0].dtype):
        return function(*values)
    result = function(*map(jax.random.key_data, values))
    return jax.random.wrap_key_data(result, impl=jax.random.key_impl(values[0]))


def _part(x: Any, part: IslandPart) -> Any:
    if len(part.blocks) == 1:
        return _at(x, part.blocks[0].in_array)
    return _copied([x], [(0, block.in_array, block.in_part) for block in part.blocks], part.shape)


def _copied(
    values: Sequence[Any], pieces: Sequence[tuple[int, Box, Box]], shape: tuple[int, ...]
) -> Any:
    """Return an array of pieces of `values`: of which one, from where, and to where."""
    result = jnp.zeros((*shape, *values[0].shape[len(shape) :]), values[0].dtype)
    for at, source, target in pieces:
        starts = [start for start, _ in target] + [0] * (result.ndim - len(shape))
        result = jax.lax.dynamic_update_slice(result, _at(values[at], source), starts)
    return result


def _at(x: Any, box: Box) -> Any:
    return x[tuple(slice(start, stop) for start, stop in box)]


def applied(
    builder: Any,
    function: Callable[..., Any],
    name: str,
    mesh: OwnMesh,
    arguments: Sequence[PlacedValue],
    types: Sequence[ArrayType],
    shardings: Sequence[OwnSharding] | None = None,
) -> list[PlacedValue]:
    """Record a small computation."""
    function.__name__ = name.replace(" ", "_")

    def lie(_: Any, avals: Sequence[Any]) -> Sequence[OwnSharding]:
        return shardings or [types[0].sharding] * len(avals)

    traced = trace(Call(function, name, mesh, tuple(types), lie))
    results: list[PlacedValue] = builder.call(traced, arguments)
    return results
