"""`JoinedTraced`: a function over a mesh that joins islands, as `pw.islands` cuts it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.extend.mlir import ir
from jax.interpreters import mlir
from jax.sharding import PartitionSpec

from pw.client.arrays.array import Array
from pw.client.arrays.mesh import OwnMesh
from pw.client.arrays.ragged import pairs_of
from pw.client.arrays.sharding import OwnSharding
from pw.client.arrays.signature import ArrayType
from pw.client.computations.export import Traced, export, trace
from pw.client.computations.exported import Call, Export
from pw.client.computations.stablehlo import divide_results
from pw.core.errors import TracingError
from pw.core.jax_private.stablehlo import parsed
from pw.core.programs.program import Computation
from pw.islands.assignment import Assignment
from pw.islands.cut import cut
from pw.islands.errors import CannotCut
from pw.islands.plan import Code, Lies, Plan
from pw.islands.writing import Sides


@dataclass(frozen=True, eq=False)
class JoinedTraced:
    """A function over a mesh that joins islands."""

    name: str
    mesh: OwnMesh
    inputs: tuple[ArrayType, ...]
    captured: tuple[Array, ...]
    outputs: tuple[ArrayType, ...]
    tree: Any
    types: tuple[ArrayType, ...]
    """Types of the explicit arguments and the captured arrays."""
    plan: Plan
    counted: tuple[tuple[int, int], ...] = ()
    """Positions of the rows and of the counts of each argument that is a `Ragged`."""
    _on: dict[tuple[Code, int], Traced] = field(default_factory=dict)

    @property
    def pieces(self) -> tuple[Traced, ...]:
        """The computations of one island."""
        return tuple(self.on_island(code, 0) for code in self.plan.computations)

    def on_island(self, code: Code, island: int) -> Traced:
        """Return a computation for the devices of an island."""
        traced = self._on.get((code, island))
        if traced is None:
            mesh = self.mesh.parts[island]
            inputs = tuple(_type_on(mesh, lies) for lies in code.inputs)
            outputs = tuple(_type_on(mesh, lies) for lies in code.outputs)
            computation = Computation(
                code.name,
                hashlib.sha256(code.artifact).digest(),
                mesh.placement,
                tuple(type_.spec for type_ in inputs),
                tuple(type_.spec for type_ in outputs),
                code.donated,
            )
            traced = Traced(computation, code.artifact, mesh, inputs, (), outputs, None)
            self._on[code, island] = traced
        return traced


def _type_on(mesh: OwnMesh, lies: Lies) -> ArrayType:
    spec = PartitionSpec(*(names or None for names in lies.axes))
    aval = jax.core.ShapedArray(lies.shape, lies.dtype)
    return ArrayType.of(aval, OwnSharding(mesh, spec))


def trace_on(call: Call) -> Traced | JoinedTraced:
    """Trace the function of a call on one island, or on several: see `trace` and `trace_joined`."""
    return trace_joined(call) if call.mesh.parts else trace(call)


def trace_joined(call: Call) -> JoinedTraced:
    """Trace a function for a mesh that joins islands, and cut it at the collectives between islands.

    Raises:
        TracingError: the function cannot be cut this way.
        Exception: the function's own errors.
    """
    name, mesh = call.name, call.mesh
    if call.check_nans:
        raise TracingError(
            f"{name!r} runs on several islands, where check_nans (jax_debug_nans) does not work; use it on "
            "one island"
        )
    result = export(call)
    try:
        with mlir.make_ir_context(), ir.Location.unknown():
            plan = _plan(call, result)
    except CannotCut as error:
        raise TracingError(
            f"{name!r} cannot run on the islands {mesh.slice.island} together: {error.why}{error.where}"
        ) from None
    return JoinedTraced(
        name,
        mesh,
        call.types,
        result.captured,
        result.outputs,
        result.tree,
        result.inputs,
        plan,
        pairs_of(call.tree),
    )


def _plan(call: Call, result: Export) -> Plan:
    module, mesh = parsed(result.module), call.mesh
    divide_results(module, [type_.spec for type_ in result.outputs])
    islands = {device: at for at, part in enumerate(mesh.parts) for device in part.devices.flat}
    sides = Sides(
        tuple(dict(part.shape) for part in mesh.parts),
        tuple(map(_lies, result.inputs)),
        tuple(map(_lies, result.outputs)),
    )
    assignment = Assignment([islands[device] for device in mesh.devices.flat])
    return cut(module, assignment, lambda _: sides, call.name, call.donated)


def _lies(type_: ArrayType) -> tuple[Lies, ...]:
    """Return how the part of each island lies."""
    return tuple(
        Lies(part.spec.shape, part.numpy_dtype, part.spec.sharding.spec) for part in type_.parts
    )
