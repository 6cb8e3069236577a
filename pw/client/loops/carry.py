"""`Carry`: where the value lies that a loop passes from iteration to iteration, if it is called alone.

An iteration is placed for what the user gives, and for what the body makes of it, until the body leaves
every leaf where it has found it.
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
from pw.client.loops.loop import Loop
from pw.client.loops.native import one_mesh_of, traced
from pw.client.trace.equations import ProgramTrace, meshes_of_body, tracing_program
from pw.client.trace.passes.place import Placement
from pw.client.trace.recorder import ProgramRecorder
from pw.client.trace.traced_errors import check_constants, in_words_of
from pw.client.trace.tracer import ProgramTracer


@dataclass(frozen=True, slots=True, eq=False)
class Carry:
    """Where the carry of a loop lies, as its functions leave it."""

    types: tuple[ArrayType, ...]
    predicate: OwnSharding
    mesh: OwnMesh | None
    """Where all of an iteration runs, if it can be one computation; None if it is a part of a program."""
    donated: frozenset[int]
    """The leaves that the functions donate."""
    varying: tuple[int, ...]
    """The leaves that the body does not return as they are."""


def learn(loop: Loop, signature: Sequence[Any]) -> Carry:
    """Trace a loop's functions, and return where the carry lies.

    Args:
        loop: the functions.
        signature: the type, or aval, of each leaf of the first carry.

    Raises:
        ArgumentError: the predicate is no scalar boolean, or the body changes the tree, a shape or a dtype.
        ShardingError: the body moves a leaf in each iteration.
    """
    given = tuple(signature)
    for _ in range(3):
        found = _placed(loop, given)
        if found.types == given:
            return found
        before, given = given, found.types
    moved = next(at for at, type_ in enumerate(given) if type_ is not before[at])
    raise loop.moves(moved, before[moved], given[moved])


def _placed(loop: Loop, given: Sequence[Any]) -> Carry:
    """Place an iteration in a program that is not kept."""
    recorder = ProgramRecorder(loop.name)
    leaves = [recorder.leaf(at, type_) for at, type_ in enumerate(given)]
    program = ProgramTrace(loop.name)
    for leaf in leaves:
        program.say(leaf, leaf.sharding)
    avals = [aval_of(type_) for type_ in given]
    with tracing_program(program), in_words_of(loop.name):
        closed, _ = traced(program, loop, avals, leaves)
    check_constants(loop.name, closed.consts)
    lie = [None if leaf.sharding is None else leaf.sharding.mesh for leaf in leaves]
    made_on = meshes_of_body(closed.jaxpr, lie)
    beside = next((mesh for mesh in made_on if mesh is not None), None)
    placement = Placement(recorder)
    made = placement.add(closed.jaxpr, closed.consts, leaves)
    results = [placement.on(one, beside) for one in made]
    more, *after = results
    types = tuple(map(_type, leaves, after, [more] * len(after)))
    lies = types[0].sharding.mesh if types else default_mesh()
    predicate = more.sharding or OwnSharding.replicated(lies)
    where = [predicate.mesh, *[type_.sharding.mesh for type_ in types]]
    return Carry(
        types,
        predicate,
        one_mesh_of(closed.jaxpr, where),
        frozenset(at for at, leaf in enumerate(leaves) if recorder.is_given(leaf)),
        tuple(
            at
            for at, (leaf, made) in enumerate(zip(leaves, after, strict=True))
            if made.identity is None or made.identity != leaf.identity
        ),
    )


def _type(before: ProgramTracer, after: ProgramTracer, more: ProgramTracer) -> ArrayType:
    """Return the type of a leaf as an iteration leaves it."""
    where = after.sharding or before.sharding or more.sharding
    is_weak = after.weak_type and before.weak_type
    aval = jax.core.ShapedArray(before.aval.shape, before.aval.dtype, weak_type=is_weak)
    return ArrayType.of(aval, where or OwnSharding.replicated(default_mesh()))


def as_type(value: Any, type_: ArrayType) -> Any:
    """Return a traced leaf as the loop passes it on: not of Python's weak types, unless it stays so."""
    if type_.aval.weak_type or type_.key_impl is not None:
        return value
    return jax.lax.convert_element_type(jnp.asarray(value), type_.aval.dtype)
