"""*Residuals* in branches: what a branch of a `cond` keeps for the same branch of the backward half.

JAX makes two `cond` equations with one predicate. A branch of the first and the same branch of the second are
here one jaxpr for a moment: there the residuals pass sees both halves of a call, and branches in them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.extend

from pw.client.equations.choices import is_variable, kept_apart
from pw.client.programs.passes.renamed import replaced, with_own_variables

Var = jax.extend.core.Var


@dataclass(frozen=True)
class _Both:
    """One branch of both halves."""

    before: list[Any]
    """The equations of the forward half."""
    results: list[Any]
    """What the forward half returns besides residuals."""
    behind: list[Any]
    """The equations of the backward half."""
    returned: list[Any]
    """What it returns."""
    arguments: list[Any]
    """The variables of the forward half for its operands."""
    own: list[Any]
    """Those of the backward half for its operands that are no residuals."""

    @cached_property
    def uses(self) -> set[Any]:
        """What the backward half uses and does not make itself."""
        atoms = [atom for equation in self.behind for atom in equation.invars]
        results = {variable for equation in self.behind for variable in equation.outvars}
        return _variables([*atoms, *self.returned]) - results

    @cached_property
    def residuals(self) -> list[Any]:
        """What the forward half makes for it."""
        uses = self.uses
        return [one for equation in self.before for one in equation.outvars if one in uses]


def with_fewer_in_branches(jaxpr: Any, fewer: Callable[[Any], Any]) -> Any:
    """Return a jaxpr in which branches of backward halves take less from those of forward ones.

    Args:
        jaxpr: of a program, or of a branch.
        fewer: the residuals pass. It replaces equations and keeps their order.
    """
    changed: dict[int, Any] = {}
    # In order: a backward half may take over operands of its forward half, which others have made.
    for at, numbers in sorted(kept_apart(jaxpr).items()):
        kept = {jaxpr.eqns[at].outvars[number] for number in numbers}
        users = [n for n, equation in enumerate(jaxpr.eqns) if kept & _variables(equation.invars)]
        if len(users) == 1:
            (user,) = users
            halves = changed.get(at, jaxpr.eqns[at]), changed.get(user, jaxpr.eqns[user])
            pair = _rewritten(*halves, kept, fewer)
            if pair is not None:
                changed |= zip((at, user), pair, strict=True)
    if not changed:
        return jaxpr
    return jaxpr.replace(eqns=[changed.get(n, eqn) for n, eqn in enumerate(jaxpr.eqns)])


def _rewritten(
    forward: Any, backward: Any, kept: Collection[Any], fewer: Callable[[Any], Any]
) -> tuple[Any, Any] | None:
    """Return both `cond` equations anew; None if they stay."""
    pairs = list(zip(forward.params["branches"], backward.params["branches"], strict=True))
    if any(closed.consts for pair in pairs for closed in pair):
        return None
    branches = [_fewer_in(forward, backward, *pair, kept, fewer) for pair in pairs]
    both = [one for one, _ in branches]
    if not any(is_changed for _, is_changed in branches):
        return None
    results = [variable for variable in forward.outvars if variable not in kept]
    slots = [[Var(one.aval) for one in branch.residuals] for branch in both]
    operands_used = [
        number
        for number in range(len(forward.invars) - 1)
        if any(branch.arguments[number] in branch.uses for branch in both)
    ]
    own = [atom for atom in backward.invars[1:] if not (is_variable(atom) and atom in kept)]
    first, second = [], []
    for at, branch in enumerate(both):
        empty, zeros = _empty([slot for n, more in enumerate(slots) if n != at for slot in more])
        rest = iter(zeros)
        sent = [
            atom
            for n, more in enumerate(slots)
            for atom in (branch.residuals if n == at else [next(rest) for _ in more])
        ]
        first.append(
            _closed(
                forward.params["branches"][at],
                branch.arguments,
                [*branch.before, *empty],
                [*branch.results, *sent],
            )
        )
        received = [
            variable
            for n, more in enumerate(slots)
            for variable in (branch.residuals if n == at else [Var(one.aval) for one in more])
        ]
        passed = [branch.arguments[number] for number in operands_used]
        second.append(
            _closed(
                backward.params["branches"][at],
                [*received, *passed, *branch.own],
                branch.behind,
                branch.returned,
            )
        )
    everything = [slot for more in slots for slot in more]
    operands = [*everything, *[forward.invars[1 + number] for number in operands_used], *own]
    return (
        forward.replace(
            outvars=[*results, *everything], params=forward.params | {"branches": tuple(first)}
        ),
        backward.replace(
            invars=[backward.invars[0], *operands],
            params=backward.params | {"branches": tuple(second)},
        ),
    )


def _fewer_in(
    forward: Any,
    backward: Any,
    first: Any,
    second: Any,
    kept: Collection[Any],
    fewer: Callable[[Any], Any],
) -> tuple[_Both, bool]:
    """Return a branch of both halves after the pass, and whether the pass has changed it."""
    before, behind = with_own_variables(first.jaxpr), with_own_variables(second.jaxpr)
    sources = dict(zip(forward.outvars, before.outvars, strict=True))
    operands = list(zip(backward.invars[1:], behind.invars, strict=True))
    again = {
        variable: sources[atom] for atom, variable in operands if is_variable(atom) and atom in kept
    }
    own = [variable for _, variable in operands if variable not in again]
    results = [sources[variable] for variable in forward.outvars if variable not in kept]
    returned = [replaced(atom, again) for atom in behind.outvars]
    # The stack of names tells a backward half, and begins anew in a branch.
    around = backward.source_info.name_stack
    equations = [
        equation.replace(
            invars=[replaced(atom, again) for atom in equation.invars],
            source_info=equation.source_info.replace(
                name_stack=around + equation.source_info.name_stack
            ),
        )
        for equation in behind.eqns
    ]
    joined = before.replace(
        invars=[*before.invars, *own],
        outvars=[*results, *returned],
        eqns=[*before.eqns, *equations],
        debug_info=before.debug_info._replace(arg_names=None, result_paths=None),
    )
    jaxpr = fewer(joined)
    count = len(before.eqns)
    names = [equation.source_info for equation in behind.eqns]
    rest = [
        equation.replace(source_info=name)
        for equation, name in zip(jaxpr.eqns[count:], names, strict=True)
    ]
    both = _Both(list(jaxpr.eqns[:count]), results, rest, returned, list(before.invars), own)
    return both, jaxpr is not joined


def _empty(slots: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Return equations that make what a branch that is not taken returns, as JAX does, and their results."""
    zeros = jax.make_jaxpr(
        lambda: [jax.lax.full(slot.aval.shape, 0, slot.aval.dtype) for slot in slots]
    )().jaxpr
    return list(zeros.eqns), list(zeros.outvars)


def _closed(like: Any, arguments: list[Any], equations: list[Any], results: list[Any]) -> Any:
    jaxpr = like.jaxpr.replace(
        invars=arguments,
        eqns=equations,
        outvars=results,
        debug_info=like.jaxpr.debug_info._replace(arg_names=None, result_paths=None),
    )
    return like.replace(jaxpr=jaxpr)


def _variables(atoms: Sequence[Any]) -> set[Any]:
    return set(filter(is_variable, atoms))
