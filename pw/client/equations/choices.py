"""Choices in a jaxpr: each `cond` over calls, and which of its results only its other halves take."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
from jax.extend.core import Literal

from pw.client.equations.meshes import first_mesh


def kept_apart(jaxpr: Any) -> dict[int, list[int]]:
    """Return for each `cond`, by its position, the results that only such with the same predicate take.

    These are residuals: what a branch keeps for the same branch of the backward half.
    """
    conds: defaultdict[Any, list[int]] = defaultdict(list)
    for at, equation in enumerate(jaxpr.eqns):
        if is_choice(equation):
            conds[equation.invars[0]].append(at)
    several = {at for same in conds.values() for at in same if len(same) > 1}
    if not several:
        return {}
    users: defaultdict[Any, list[Any]] = defaultdict(list)
    # The predicates of those that take a variable; None for others than such a `cond`.
    for at, equation in enumerate(jaxpr.eqns):
        predicate = equation.invars[0] if at in several else None
        for number, atom in enumerate(equation.invars):
            if is_variable(atom):
                users[atom].append(predicate if number else None)
    results = set(filter(is_variable, jaxpr.outvars))
    return {
        at: [
            number
            for number, variable in enumerate(jaxpr.eqns[at].outvars)
            if variable not in results
            and users[variable]
            and all(predicate is jaxpr.eqns[at].invars[0] for predicate in users[variable])
        ]
        for at in several
    }


def kept_in_loop(jaxpr: Any, carried: int) -> dict[int, list[int]]:
    """Return for each `cond` of a loop's body the results that are no part of the carry, nor used in it."""
    used = {atom for equation in jaxpr.eqns for atom in equation.invars if is_variable(atom)}
    used |= set(filter(is_variable, jaxpr.outvars[:carried]))
    return {
        at: [number for number, variable in enumerate(equation.outvars) if variable not in used]
        for at, equation in enumerate(jaxpr.eqns)
        if is_choice(equation)
    }


def is_variable(atom: Any) -> bool:
    """Whether an operand is the result of an equation, or an argument."""
    return not isinstance(atom, Literal)


def is_choice(equation: Any) -> bool:
    """Whether an equation is a `cond` of two branches with calls in them."""
    return (
        equation.primitive.name == "cond"
        and len(equation.params["branches"]) == 2
        and is_variable(equation.invars[0])
        and first_mesh([equation]) is not None
    )


def is_number_of_predicate(equation: Any) -> bool:
    """Whether an equation makes a number of a boolean, as JAX does for `cond`."""
    source = equation.invars[0].aval if equation.primitive.name == "convert_element_type" else None
    return source is not None and source.dtype == np.bool_ and not source.shape
