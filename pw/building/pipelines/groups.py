"""A function in which scans over layers are taken apart: into groups of iterations, or into all of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
from jax.extend.source_info_util import user_context

from pw.building.pipelines.marks import mark
from pw.building.pipelines.units import Place
from pw.client.equations.graph import Graph, Literal


def with_marks(graph: Graph, places: Sequence[Place]) -> Graph:
    """Return a function with a mark at each of these places; scans are divided into groups there."""
    inside: defaultdict[int, list[int]] = defaultdict(list)
    for place in places:
        inside[place.equation].append(place.iteration)
    (alone,) = jax.make_jaxpr(mark.bind)().eqns
    instead: dict[int, list[Any]] = {}
    for at, starts in inside.items():
        eqn = graph.equations[at]
        groups = [start for start in starts if start]
        instead[at] = [alone] if 0 in starts else []
        instead[at].append(_apart(graph, eqn, groups, is_cut=True) if groups else eqn)
    return _changed(graph, instead)


def unrolled(graph: Graph, scans: Collection[int]) -> Graph:
    """Return a function without some of its scans: with the operations of each of their iterations."""

    def iterations(eqn: Any) -> Any:
        return _apart(graph, eqn, range(1, eqn.params["length"]), is_cut=False)

    return _changed(graph, {at: [iterations(graph.equations[at])] for at in scans})


def _changed(graph: Graph, instead: Mapping[int, Sequence[Any]]) -> Graph:
    """Return a function with other equations instead of some."""
    equations = [one for at, eqn in enumerate(graph.equations) for one in instead.get(at, [eqn])]
    jaxpr = graph.jaxpr.replace(
        constvars=list(graph.constants), outvars=list(graph.results.values()), eqns=equations
    )
    closed = jax.extend.core.ClosedJaxpr(jaxpr, list(graph.constants.values()))
    return Graph(closed, list(graph.arguments.values()), list(graph.results))


def _apart(graph: Graph, eqn: Any, starts: Sequence[int], *, is_cut: bool) -> Any:
    """Return a scan as a call of a function that scans group after group.

    A parameter that is cast before the scan is cast after its rows were taken, so that stages need no others.

    Args:
        graph: the function that has the equation.
        eqn: the equation of the scan.
        starts: the first iteration of each group but the first.
        is_cut: put marks between the groups. Otherwise, a group is an iteration, and no scan.
    """
    params = eqn.params
    length, consts, carries = params["length"], params["num_consts"], params["num_carry"]
    stacks = eqn.invars[consts + carries :]
    invars = [*eqn.invars[: consts + carries], *(_uncast(graph, x) for x in stacks)]
    body = jax.extend.core.jaxpr_as_fun(params["jaxpr"])

    def iteration(operands: Sequence[Any], xs: Sequence[Any]) -> list[Any]:
        results = body(*operands, *(x.reshape(x.shape[1:]) for x in xs))
        return [*results[:carries], *(y[None] for y in results[carries:])]

    def groups(*operands: Any) -> list[Any]:
        first, carry = operands[:consts], list(operands[consts : consts + carries])
        pieces: list[Any] = []
        for begin, end in pairwise([0, *starts, length]):
            if begin and is_cut:
                mark.bind()
            rows = (length - end, length - begin) if params["reverse"] else (begin, end)
            xs = [jax.lax.slice_in_dim(x, *rows) for x in operands[consts + carries :]]
            dtypes = [x.aval.dtype for x in stacks]
            xs = [x if x.dtype == d else x.astype(d) for x, d in zip(xs, dtypes, strict=True)]
            if is_cut:
                own = {**params, "length": end - begin}
                results = eqn.primitive.bind(*first, *carry, *xs, **own)
            else:
                results = iteration([*first, *carry], xs)
            carry, ys = results[:carries], results[carries:]
            pieces.insert(0 if params["reverse"] else len(pieces), ys)
        return [*carry, *map(jnp.concatenate, zip(*pieces, strict=True))]

    shapes = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in invars]
    source = eqn.source_info
    with user_context(source.traceback, name_stack=source.name_stack), eqn.ctx.manager:
        (call,) = jax.make_jaxpr(jax.jit(groups))(*shapes).eqns
    return call.replace(invars=invars, outvars=eqn.outvars)


def _uncast(graph: Graph, atom: Any) -> Any:
    """Return the argument of which an atom is another dtype, or the atom."""
    at = None if isinstance(atom, Literal) else graph.position.get(atom)
    if at is not None and graph.equations[at].primitive.name == "convert_element_type":
        (before,) = graph.equations[at].invars
        return atom if isinstance(before, Literal) or before not in graph.arguments else before
    return atom
