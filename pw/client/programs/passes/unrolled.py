"""JAX's loops and choices over calls of a program, as equations that a program has a form for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.extend

from pw.client.equations.choices import is_number_of_predicate
from pw.core.errors import ArgumentError

jex = jax.extend.core

ITERATIONS = 256
"""Iterations of a `jax.lax.scan` that calls `pw.jit` functions: each has computations of its own."""

LOOP = "pw.while_loop"
"""The scope of the equations of a loop with a bound, and of those that JAX derives from them.

It is a `scan` over a `cond`: whether the predicate still holds. JAX can differentiate that in reverse.
"""

as_function = jex.jaxpr_as_fun


def is_of_loop(equation: Any) -> bool:
    """Whether a `scan` is that of a `pw.while_loop`, or a `cond` chooses whether one goes on."""
    return LOOP in str(equation.source_info.name_stack)


def check_length(equation: Any) -> None:
    """Raise ArgumentError if a `scan` has too many iterations for a program."""
    length = equation.params["length"]
    if length > ITERATIONS and not is_of_loop(equation):
        raise ArgumentError(
            f"a jax.lax.scan over calls of pw.jit functions has {length} iterations, and a program takes at "
            f"most {ITERATIONS}; scan inside of a pw.jit function, or use pw.while_loop"
        )


def ends_early(equation: Any) -> bool:
    """Whether all that a `scan` does is a choice: once it is made against going on, nothing changes."""
    params = equation.params
    body, at = params["jaxpr"].jaxpr, params["num_consts"]
    carry = body.invars[at : at + params["num_carry"]]
    if len(body.eqns) != 2 or not len(carry) == len(body.outvars) == len(body.invars) - at:
        return False
    index, choice = body.eqns
    more = index.invars[0]
    if choice.primitive.name != "cond" or choice.invars[0] not in index.outvars:
        return False
    if not any(more is one for one in carry) or not is_number_of_predicate(index):
        return False
    stay = choice.params["branches"][0].jaxpr
    operand_of = dict(zip(stay.invars, choice.invars[1:], strict=True))
    kept: dict[Any, Any] = {}
    for result, atom in zip(choice.outvars, stay.outvars, strict=True):
        if not isinstance(atom, jex.Literal):
            kept[result] = operand_of.get(atom)
        elif not atom.val:
            kept[result] = more  # it is false then
    return all(
        not isinstance(result, jex.Literal) and kept.get(result, result) is before
        for result, before in zip(body.outvars, carry, strict=True)
    )


def bounded(equation: Any, operands: Sequence[Any]) -> Sequence[Any]:
    """Return the results of a `scan` that ends early, as those of a `while` which does end then."""
    params = equation.params
    at, length, body = params["num_consts"], params["length"], params["jaxpr"].jaxpr
    _, choice = body.eqns
    step = as_function(choice.params["branches"][1])
    more = body.invars.index(body.eqns[0].invars[0]) - at

    def goes_on(state: Any) -> Any:
        number, carry = state
        return (number < length) & carry[more]

    def iterate(state: Any) -> Any:
        number, carry = state
        values = dict(zip(body.invars, [*operands[:at], *carry], strict=True))
        results = step(*[_read(values, atom) for atom in choice.invars[1:]])
        values.update(zip(choice.outvars, results, strict=True))
        return number + 1, [_read(values, atom) for atom in body.outvars]

    iterate.__name__ = f"while_loop({choice.params['branches'][1].jaxpr.debug_info.func_name})"
    results: Sequence[Any] = jax.lax.while_loop(goes_on, iterate, (0, list(operands[at:])))[1]
    return results


def _read(values: dict[Any, Any], atom: Any) -> Any:
    return atom.val if isinstance(atom, jex.Literal) else values[atom]


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
