"""Other variables in the place of those of a jaxpr."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.extend

from pw.client.equations.graph import Literal


def with_own_variables(jaxpr: Any) -> Any:
    """Return a jaxpr with new variables: halves of one trace may share some."""
    variables = [*jaxpr.constvars, *jaxpr.invars, *(v for eqn in jaxpr.eqns for v in eqn.outvars)]
    own = {variable: jax.extend.core.Var(variable.aval) for variable in variables}

    def renamed(atoms: Sequence[Any]) -> list[Any]:
        return [replaced(atom, own) for atom in atoms]

    return jaxpr.replace(
        constvars=renamed(jaxpr.constvars),
        invars=renamed(jaxpr.invars),
        outvars=renamed(jaxpr.outvars),
        eqns=[
            eqn.replace(invars=renamed(eqn.invars), outvars=renamed(eqn.outvars))
            for eqn in jaxpr.eqns
        ],
    )


def replaced(atom: Any, again: dict[Any, Any]) -> Any:
    """Return what stands in the place of an operand now."""
    return atom if isinstance(atom, Literal) else again.get(atom, atom)
