"""`JoinedTraced`: a function over a mesh that joins islands, as `pw.islands` cuts it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax._src.interpreters import mlir  # a context that knows all of JAX's dialects
from jax.extend.mlir import ir
from jax.sharding import PartitionSpec

from pw.client.arrays.array import Array
from pw.client.arrays.mesh import OwnMesh
from pw.client.arrays.ragged import pairs_of
from pw.client.arrays.sharding import OwnSharding
from pw.client.arrays.signature import ArrayType
from pw.client.trace.export import Traced, export, trace
from pw.client.trace.exported import Call, Made
from pw.client.trace.stablehlo import divide_results, parsed
from pw.client.trace.tracer import ProgramTracer
from pw.core.errors import TracingError
from pw.core.programs.program import Computation
from pw.islands.assignment import Assignment
from pw.islands.cut import cut
from pw.islands.errors import CannotCut
from pw.islands.plan import Code, Lies, Plan
from pw.islands.running import run
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
    """Of the explicit arguments and the captured arrays."""
    plan: Plan
    counted: tuple[tuple[int, int], ...] = ()
    """The positions of the rows and of the counts of each argument that is a `Ragged`."""
    _on: dict[tuple[Code, int], Traced] = field(default_factory=dict)

    @property
    def pieces(self) -> tuple[Traced, ...]:
        """The computations of one island."""
        return tuple(self._traced(code, 0) for code in self.plan.computations)

    def record(self, recorder: Any, arguments: Sequence[ProgramTracer]) -> list[ProgramTracer]:
        """Add all computations to a program; returns the results."""
        parts = [
            recorder.divided(argument, type_)
            for argument, type_ in zip(arguments, self.types, strict=True)
        ]
        made = run(
            self.plan,
            parts,
            _constant,
            lambda code, island, given: recorder.call(self._traced(code, island), given),
        )
        for number in self.plan.unused:
            for part in parts[number]:
                recorder.give(part, self.name)
        return [
            recorder.joined(type_, values) for values, type_ in zip(made, self.outputs, strict=True)
        ]

    def _traced(self, code: Code, island: int) -> Traced:
        """Return a computation for the devices of an island."""
        known = self._on.get((code, island))
        if known is None:
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
            known = Traced(computation, code.artifact, mesh, inputs, (), outputs, None)
            self._on[code, island] = known
        return known


def _constant(number: Any, island: int) -> Any:
    """Return a number as an argument of a computation that is recorded, on any island."""
    return number


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
    made = export(call)
    try:
        with mlir.make_ir_context(), ir.Location.unknown():
            planned = _planned(call, made)
    except CannotCut as error:
        raise TracingError(
            f"{name!r} cannot run on the islands {mesh.slice.island} together: {error.why}{error.where}"
        ) from None
    return JoinedTraced(
        name,
        mesh,
        call.types,
        made.captured,
        made.outputs,
        made.tree,
        made.inputs,
        planned,
        pairs_of(call.tree),
    )


def _planned(call: Call, made: Made) -> Plan:
    module, mesh = parsed(made.module), call.mesh
    divide_results(module, [type_.spec for type_ in made.outputs])
    islands = {device: at for at, part in enumerate(mesh.parts) for device in part.devices.flat}
    sides = Sides(
        tuple(dict(part.shape) for part in mesh.parts),
        tuple(map(_lies, made.inputs)),
        tuple(map(_lies, made.outputs)),
    )
    assignment = Assignment([islands[device] for device in mesh.devices.flat])
    return cut(module, assignment, lambda _: sides, call.name, call.donated)


def _lies(type_: ArrayType) -> tuple[Lies, ...]:
    """Return how the part of each island lies."""
    return tuple(
        Lies(part.spec.shape, part.numpy_dtype, part.spec.sharding.spec) for part in type_.parts
    )
