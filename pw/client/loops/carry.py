"""`Carry`: where the value lies that a loop passes from iteration to iteration, if it is called alone.

An iteration is placed for the first carry, and then for what the body makes of it, until the body leaves every
leaf where it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from pw.client.arrays.mesh import OwnMesh, default_mesh
from pw.client.arrays.sharding import OwnSharding
from pw.client.arrays.signature import ArrayType, aval_of
from pw.client.equations.calls import ProgramTrace, meshes_of_body, tracing_program
from pw.client.functions.traced_errors import check_constants, in_words_of
from pw.client.loops.loop import Loop
from pw.client.loops.native import one_mesh_of, traced
from pw.client.programs.placing.place import Placement
from pw.client.programs.writing.builder import ProgramBuilder
from pw.client.programs.writing.values import PlacedValue


@dataclass(frozen=True, slots=True, eq=False)
class Carry:
    """Where the carry of a loop lies, as its functions leave it."""

    types: tuple[ArrayType, ...]
    """Types of the leaves of the carry."""
    predicate: OwnSharding
    """Sharding of the predicate."""
    mesh: OwnMesh | None
    """Mesh of an iteration that can be one computation; None if an iteration is a part of a program."""
    donated: frozenset[int]
    """Positions of the leaves that the functions donate."""
    varying: tuple[int, ...]
    """Positions of the leaves that the body does not return as they are."""


def learn(loop: Loop, signature: Sequence[Any]) -> Carry:
    """Trace a loop's functions, and return where the carry lies.

    Args:
        loop: the functions.
        signature: type or abstract value of each leaf of the first carry.

    Raises:
        ArgumentError: the predicate is no scalar boolean, or the body changes the tree, a shape or a dtype.
        ShardingError: the body moves a leaf in each iteration.
    """
    types = tuple(signature)
    for _ in range(3):
        carry = _place(loop, types)
        if carry.types == types:
            return carry
        before, types = types, carry.types
    moved = next(at for at, type_ in enumerate(types) if type_ is not before[at])
    raise loop.moves(moved, before[moved], types[moved])


def _place(loop: Loop, signature: Sequence[Any]) -> Carry:
    """Place an iteration in a program that is not kept."""
    builder = ProgramBuilder(loop.name)
    leaves = [builder.leaf(at, type_) for at, type_ in enumerate(signature)]
    program = ProgramTrace(loop.name)
    for leaf in leaves:
        program.say(leaf, leaf.sharding)
    with tracing_program(program), in_words_of(loop.name):
        closed, _ = traced(program, loop, list(map(aval_of, signature)), leaves)
    check_constants(loop.name, closed.consts)
    lie = [None if leaf.sharding is None else leaf.sharding.mesh for leaf in leaves]
    meshes = meshes_of_body(closed.jaxpr, lie)
    beside = next((mesh for mesh in meshes if mesh is not None), None)
    placement = Placement(builder)
    results = placement.add(closed.jaxpr, closed.consts, leaves)
    more, *after = [placement.on(result, beside) for result in results]
    types = tuple(map(_type, leaves, after, [more] * len(after)))
    lies = types[0].sharding.mesh if types else default_mesh()
    predicate = more.sharding or OwnSharding.replicated(lies)
    where = [predicate.mesh, *[type_.sharding.mesh for type_ in types]]
    return Carry(
        types,
        predicate,
        one_mesh_of(closed.jaxpr, where),
        frozenset(at for at, leaf in enumerate(leaves) if builder.is_given(leaf)),
        tuple(
            at
            for at, (leaf, result) in enumerate(zip(leaves, after, strict=True))
            if result.identity is None or result.identity != leaf.identity
        ),
    )


def _type(before: PlacedValue, after: PlacedValue, more: PlacedValue) -> ArrayType:
    """Return the type of a leaf as an iteration leaves it."""
    where = after.sharding or before.sharding or more.sharding
    is_weak = bool(after.aval.weak_type and before.aval.weak_type)
    aval = jax.core.ShapedArray(before.aval.shape, before.aval.dtype, weak_type=is_weak)
    return ArrayType.of(aval, where or OwnSharding.replicated(default_mesh()))


def as_type(value: Any, type_: ArrayType) -> Any:
    """Return a traced leaf as the loop passes it on: not of Python's weak types, unless it stays so."""
    if type_.aval.weak_type or type_.key_impl is not None:
        return value
    return jax.lax.convert_element_type(jnp.asarray(value), type_.aval.dtype)
