"""JAX's loops and choices over calls of a program, as equations that a program has a form for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp

from pw.core.errors import ArgumentError

ITERATIONS = 256
"""Iterations of a `jax.lax.scan` that calls `pw.jit` functions: each has computations of its own."""

as_function = jax.extend.core.jaxpr_as_fun


def scan(equation: Any, operands: Sequence[Any]) -> list[Any]:
    """Return the results of a `scan`: its iterations, one behind another. Raises ArgumentError."""
    params = equation.params
    length, body = params["length"], as_function(params["jaxpr"])
    if length > ITERATIONS:
        raise ArgumentError(
            f"a jax.lax.scan over calls of pw.jit functions has {length} iterations, and a program takes at "
            f"most {ITERATIONS}; scan inside of a pw.jit function, or use pw.while_loop"
        )
    at, carried = params["num_consts"], params["num_carry"]
    constants, carry, xs = (
        operands[:at],
        list(operands[at : at + carried]),
        operands[at + carried :],
    )
    made: list[Any] = [None] * length
    for number in reversed(range(length)) if params["reverse"] else range(length):
        results = body(*constants, *carry, *[x[number] for x in xs])
        carry, made[number] = results[:carried], results[carried:]
    if not length:
        return [
            *carry,
            *[jnp.zeros(v.aval.shape, v.aval.dtype) for v in equation.outvars[carried:]],
        ]
    return [*carry, *[jnp.stack(column) for column in zip(*made, strict=True)]]


def switch(equation: Any, operands: Sequence[Any]) -> Any:
    """Return the results of a `cond` with other than two branches: one choice behind another."""
    index, *rest = operands
    branches = [as_function(branch) for branch in equation.params["branches"]]
    if len(branches) == 1:
        return branches[0](*rest)

    def choose(number: int, *operands: Any) -> Any:
        if number == len(branches) - 1:
            return branches[number](*operands)

        def later(*operands: Any) -> Any:
            return choose(number + 1, *operands)

        return jax.lax.cond(index == number, branches[number], later, *operands)

    return choose(0, *rest)
