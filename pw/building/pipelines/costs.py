"""The cost of equations, in floating-point operations: what `pw.pipeline` balances the stages by.

Matrix products and convolutions count their operations. Of all else the bytes that it makes count (of a
reduction, those that it reads), each as `FLOPS_PER_BYTE` operations. Forward passes are counted only: backward
passes take about twice as long, in each stage.
"""

from __future__ import annotations

import math
from typing import Any

from pw.client.equations.graph import bodies, size_bytes

FLOPS_PER_BYTE = 30
"""Operations in the time in which memory takes a byte of a fused elementwise operation."""

FREE = frozenset(
    ["broadcast_in_dim", "expand_dims", "reshape", "slice", "squeeze", "stop_gradient"]
)
"""Primitives that take no time: XLA makes them a part of their users."""


def cost_of(eqn: Any) -> float:
    """Return the cost of an equation; of a branch the largest, of a loop without a bound one iteration."""
    name, params = eqn.primitive.name, eqn.params
    if name == "dot_general":
        ((contracted, _), _) = params["dimension_numbers"]
        shape = eqn.invars[0].aval.shape
        inner = math.prod(shape[axis] for axis in contracted)
        return float(2 * inner * math.prod(eqn.outvars[0].aval.shape))
    if name == "conv_general_dilated":
        kernel = eqn.invars[1].aval.shape
        features = kernel[params["dimension_numbers"].rhs_spec[0]]
        size = math.prod(eqn.outvars[0].aval.shape)
        return float(2 * size * math.prod(kernel) // features)
    if name == "cond":
        return max(map(cost_of_jaxpr, bodies(eqn)))
    if inside := list(bodies(eqn)):
        grid = getattr(params.get("grid_mapping"), "grid", ())  # of a Pallas kernel
        times = params.get("length", 1) * math.prod(grid)
        return float(times * sum(map(cost_of_jaxpr, inside)))
    if name in FREE:
        return 0.0
    reads = name.startswith(("reduce_", "arg"))
    touched = eqn.invars if reads else eqn.outvars
    return float(FLOPS_PER_BYTE * sum(size_bytes(atom.aval) for atom in touched))


def cost_of_jaxpr(jaxpr: Any) -> float:
    """Return the cost of all equations of a jaxpr."""
    return sum(map(cost_of, jaxpr.eqns))
