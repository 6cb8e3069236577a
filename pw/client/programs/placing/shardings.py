"""How values of a program lie, while JAX traces it: as *place* will leave them.

What a call leaves is known when its computation is traced, which is kept for *place*.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from pw.client.arrays.array import Array
from pw.client.arrays.of_jax import own_sharding
from pw.client.arrays.sharding import OwnSharding
from pw.client.equations.calls import ProgramTrace, kind_of, program_trace
from pw.client.equations.island_parts import sharding_of_result
from pw.client.programs.placing.calls import traced_call, type_in_call


def sharding_of(value: Any) -> OwnSharding | None:
    """Return how an array, or a value of a program, lies on virtual devices; None for a host value."""
    trace = program_trace()
    if trace is not None:
        return sharding_in(trace, value)
    return value._type.sharding if isinstance(value, Array) else None


def sharding_in(trace: ProgramTrace, value: Any) -> OwnSharding | None:
    """Return how a value lies; None for a host value.

    Results of ordinary equations are taken to lie as the first operand of the same shape.
    """
    value = trace.alike(value)
    own = trace.sharding_of(value)
    producer = trace.producer_of(value)
    if own is not None or producer is None:
        return own
    equation, at = producer
    laid = trace.laid.get(id(equation))
    if laid is None:
        laid = _results(trace, equation), equation
        trace.laid[id(equation)] = laid
    sharding: OwnSharding | None = laid[0][at]
    mesh = trace.mesh_of(value)
    if mesh is None:
        return sharding
    lies = sharding if sharding and sharding.mesh == mesh else OwnSharding.replicated(mesh)
    return lies.in_space(jax.typeof(value).memory_space)


def _results(trace: ProgramTrace, equation: Any) -> list[OwnSharding | None]:
    operands, avals = equation.in_tracers, [variable.aval for variable in equation.outvars]
    lie = [sharding_in(trace, operand) for operand in operands]
    kind = kind_of(equation)
    if kind is not None:
        wanted = equation.params["in_shardings"]
        types = tuple(
            type_in_call(operand.aval, entry, kind.mesh, own)
            for operand, entry, own in zip(operands, wanted, lie, strict=True)
        )
        stack = str(equation.source_info.name_stack)
        return [type_.sharding for type_ in traced_call(kind, equation, types, stack).outputs]
    joining = sharding_of_result(equation)
    if joining is not None:
        return joining
    if equation.primitive.name == "device_put":
        targets = map(own_sharding, equation.params["devices"])
        return [
            to or (own and own.in_space(aval.memory_space))
            for to, own, aval in zip(targets, lie, avals, strict=True)
        ]
    shardings = []
    for aval in avals:
        alike = (
            own
            for operand, own in zip(operands, lie, strict=True)
            if own is not None and np.shape(operand) == aval.shape
        )
        first = next(alike, None)
        shardings.append(first and first.in_space(aval.memory_space))
    return shardings
