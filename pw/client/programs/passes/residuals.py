"""*Residuals*: what a forward half keeps for its backward half, in fewer bytes than JAX keeps it.

Reverse mode makes two `jit` equations of a call: the forward one returns residuals besides its results, and
the backward one takes them. JAX keeps what each operation wants, so an activation function keeps several
arrays of the size of its argument. Here the backward half computes again what follows cheaply from less
(`pw.client.equations.graph`): from arguments and results of the call, and from the residuals that stay.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.extend

from pw.client.computations.captured import UNSPECIFIED
from pw.client.equations.calls import kind_of
from pw.client.equations.choices import is_variable
from pw.client.equations.graph import Graph, Name, smallest
from pw.client.programs.passes.branch_halves import with_fewer_in_branches
from pw.client.programs.passes.renamed import replaced, with_own_variables

ClosedJaxpr = jax.extend.core.ClosedJaxpr

Source = tuple[str, int]
"""An operand of a backward half: ("argument", n) or ("result", n) of the forward half, or ("own", n)."""


@dataclass(frozen=True)
class _Halves:
    """The halves of a call, as they are now."""

    forward: Any
    """Its jaxpr."""
    results: tuple[int, ...]
    """The results of the forward half that stay; those that it has anew follow."""
    backward: tuple[tuple[Any, tuple[Source, ...]], ...]
    """For each backward half its jaxpr, and its operands."""


def with_fewer_residuals(jaxpr: Any) -> Any:
    """Return the jaxpr of a program in which backward halves take fewer bytes from forward ones."""
    jaxpr = with_fewer_in_branches(jaxpr, with_fewer_residuals)
    pairs = _pairs(jaxpr)
    if not pairs:
        return jaxpr
    changed: dict[int, Any] = {}
    for at, (residuals, users) in pairs.items():
        forward = changed.get(at, jaxpr.eqns[at])
        backward = [changed.get(user, jaxpr.eqns[user]) for user in users]
        rewritten = _rewritten(forward, residuals, backward)
        if rewritten is not None:
            changed |= zip((at, *users), rewritten, strict=True)
    equations = [changed.get(at, equation) for at, equation in enumerate(jaxpr.eqns)]
    return jaxpr.replace(eqns=equations)


def _pairs(jaxpr: Any) -> dict[int, tuple[list[int], list[int]]]:
    """Return the forward halves by their position: their residuals, and the positions of backward halves."""
    depths = [_depth(equation) for equation in jaxpr.eqns]
    if not any(depths):
        return {}
    users: defaultdict[Any, list[int]] = defaultdict(list)
    for at, equation in enumerate(jaxpr.eqns):
        for atom in equation.invars:
            if is_variable(atom):
                users[atom].append(at)
    outputs = set(filter(is_variable, jaxpr.outvars))
    kinds = [kind_of(equation) for equation in jaxpr.eqns]
    pairs = {}
    for at, equation in enumerate(jaxpr.eqns):
        if kinds[at] is None:
            continue
        residuals = [
            number
            for number, variable in enumerate(equation.outvars)
            if variable not in outputs
            and users[variable]
            and all(
                kinds[user] is kinds[at] and depths[user] > depths[at] for user in users[variable]
            )
        ]
        if residuals:
            backward = {user for number in residuals for user in users[equation.outvars[number]]}
            pairs[at] = residuals, sorted(backward)
    return pairs


def _depth(equation: Any) -> int:
    """Return how many times reverse mode has made an equation."""
    return str(equation.source_info.name_stack).count("transpose(")


def _rewritten(forward: Any, residuals: Sequence[int], backward: Sequence[Any]) -> list[Any] | None:
    """Return the equations of both halves anew; None if they stay."""
    kind = kind_of(forward)
    assert kind is not None
    sources_of: dict[Any, Source] = {}
    for where, atoms in (("argument", forward.invars), ("result", forward.outvars)):
        for number, atom in enumerate(atoms):
            if is_variable(atom):
                sources_of[atom] = where, number
    takes = [
        tuple(sources_of.get(atom) if is_variable(atom) else None for atom in one.invars)
        for one in backward
    ]
    bodies = [one.params["jaxpr"] for one in backward]
    key = "halves", forward.params["jaxpr"], tuple(residuals), tuple(bodies), tuple(takes)
    if key not in kind.traced:
        kind.traced[key] = _halves(forward.params["jaxpr"], residuals, bodies, takes)
    halves: _Halves | None = kind.traced[key]
    if halves is None:
        return None
    body = halves.forward
    kept = [forward.outvars[number] for number in halves.results]
    anew = [jax.extend.core.Var(aval) for aval in body.out_avals[len(kept) :]]
    equations = [_with_results(forward, body, halves.results, [*kept, *anew])]
    results = dict(enumerate(forward.outvars)) | {-1 - at: one for at, one in enumerate(anew)}
    for equation, (own, sources) in zip(backward, halves.backward, strict=True):
        operands_of = {"own": equation.invars, "argument": forward.invars, "result": results}
        operands = [operands_of[where][number] for where, number in sources]
        equations.append(_with_operands(equation, own, sources, operands, forward))
    return equations


def _halves(
    closed: Any,
    residuals: Sequence[int],
    bodies: Sequence[Any],
    takes: Sequence[Sequence[Source | None]],
) -> _Halves | None:
    arguments: list[Name] = [("argument", at) for at in range(len(closed.in_avals))]
    ends: list[Name] = [("result", at) for at in range(len(closed.out_avals))]
    graph = Graph(closed, arguments, ends)
    staying = [at for at in range(len(ends)) if at not in residuals]
    results = {at: graph.results["result", at] for at in staying}
    free = [one for one in filter(is_variable, results.values()) if one in graph.position]
    needed = list(filter(is_variable, [graph.results["result", at] for at in residuals]))
    chosen = smallest(graph, [one for one in needed if one in graph.position], free)
    if len(needed) == len(residuals) and set(chosen) >= set(needed):
        return None
    sources: dict[Any, Source] = {}
    for variable, (_, number) in graph.arguments.items():
        sources[variable] = "argument", number
    for at, atom in results.items():
        if is_variable(atom):
            sources.setdefault(atom, ("result", at))
    anew = [variable for variable in chosen if variable not in sources]
    sources |= {variable: ("result", -1 - at) for at, variable in enumerate(anew)}
    names = dict(graph.arguments)
    outputs: dict[Name, Any] = {("result", at): variable for at, variable in results.items()}
    outputs |= {("residual", at): variable for at, variable in enumerate(anew)}
    equations, _ = graph.before(outputs.values(), lambda variable: False)
    piece = graph.piece("", equations, outputs, names)
    # A piece takes what it uses; the equation has all operands as before.
    forward = ClosedJaxpr(
        piece.closed.jaxpr.replace(invars=list(graph.arguments)), piece.closed.consts
    )
    backward = [
        _backward(graph, sources, body, own) for body, own in zip(bodies, takes, strict=True)
    ]
    return _Halves(forward, tuple(staying), tuple(backward))


def _backward(
    graph: Graph, sources: dict[Any, Source], closed: Any, takes: Sequence[Source | None]
) -> tuple[Any, tuple[Source, ...]]:
    """Return a backward half that computes again what it took, and its operands."""
    body = with_own_variables(closed.jaxpr)
    named = {name: variable for variable, name in graph.arguments.items()} | graph.results
    again = {
        variable: named[source]
        for variable, source in zip(body.invars, takes, strict=True)
        if source is not None
    }
    equations, starts = graph.before(again.values(), lambda variable: variable in sources)
    own = [("own", at) for at, variable in enumerate(body.invars) if variable not in again]
    variables = [variable for variable in body.invars if variable not in again]
    constants = dict(zip(body.constvars, closed.consts, strict=True))
    for start in starts:
        if start in graph.constants:
            constants[start] = graph.constants[start]
        else:
            variables.append(start)
            own.append(sources[start])
    rest = [
        equation.replace(invars=[replaced(atom, again) for atom in equation.invars])
        for equation in body.eqns
    ]
    jaxpr = body.replace(
        constvars=list(constants),
        invars=variables,
        outvars=[replaced(atom, again) for atom in body.outvars],
        eqns=[*(graph.equations[at] for at in sorted(equations)), *rest],
        debug_info=body.debug_info._replace(arg_names=None, result_paths=None),
    )
    return ClosedJaxpr(jaxpr, list(constants.values())), tuple(own)


def _with_results(equation: Any, body: Any, stay: Sequence[int], results: list[Any]) -> Any:
    params = equation.params
    count = len(results) - len(stay)
    wanted = [params["out_shardings"][at] for at in stay] + [UNSPECIFIED] * count
    layouts = [params["out_layouts"][at] for at in stay] + [None] * count
    changed = {"jaxpr": body, "out_shardings": tuple(wanted), "out_layouts": tuple(layouts)}
    return equation.replace(outvars=results, params=params | changed)


def _with_operands(
    equation: Any, body: Any, sources: Sequence[Source], operands: list[Any], forward: Any
) -> Any:
    """Return a backward half with other operands; those of the forward half lie as that takes them.

    So they are moved once for both.
    """
    params = equation.params
    lie = {
        "own": params["in_shardings"],
        "argument": forward.params["in_shardings"],
        "result": forward.params["out_shardings"],
    }

    def of_own(name: str, otherwise: Any) -> tuple[Any, ...]:
        values = params[name]
        return tuple(values[at] if where == "own" else otherwise for where, at in sources)

    changed = {
        "jaxpr": body,
        "in_shardings": tuple(lie[where][at] if at >= 0 else UNSPECIFIED for where, at in sources),
        "in_layouts": of_own("in_layouts", None),
        "donated_invars": of_own("donated_invars", False),
    }
    return equation.replace(invars=operands, params=params | changed)
