"""How a chosen cut becomes marks in a function: between equations, or between groups of a scan's iterations."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
from jax._src.source_info_util import user_context

from pw.client.gradients.graph import Graph, Literal
from pw.client.pipeline.choosing import Cuts
from pw.client.pipeline.marks import mark


def with_marks(graph: Graph, cuts: Cuts) -> Any:
    """Return the function of a graph with a mark at each cut, as a `ClosedJaxpr`."""
    inside: defaultdict[int, list[int]] = defaultdict(list)
    for place in cuts.places:
        inside[place.equation].append(place.iteration)
    (alone,) = jax.make_jaxpr(mark.bind)().eqns
    equations: list[Any] = []
    for at, eqn in enumerate(graph.equations):
        starts = inside[at]
        if 0 in starts:
            equations.append(alone)
        groups = [start for start in starts if start]
        equations.append(_in_groups(graph, eqn, groups) if groups else eqn)
    jaxpr = graph.jaxpr.replace(
        constvars=list(graph.constants),
        outvars=list(graph.results.values()),
        eqns=equations,
    )
    return jax.extend.core.ClosedJaxpr(jaxpr, list(graph.constants.values()))


def _in_groups(graph: Graph, eqn: Any, starts: Sequence[int]) -> Any:
    """Return a scan as a call of a function that scans group after group, with a mark between them.

    A parameter that is cast before the scan is cast after its rows were taken, so that stages need no others.

    Args:
        graph: the function that has the equation.
        eqn: the equation of the scan.
        starts: the first iteration of each group but the first.
    """
    params = eqn.params
    length, consts, carries = params["length"], params["num_consts"], params["num_carry"]
    invars = [
        *eqn.invars[: consts + carries],
        *(_uncast(graph, x) for x in eqn.invars[consts + carries :]),
    ]
    dtypes = [x.aval.dtype for x in eqn.invars[consts + carries :]]

    def groups(*operands: Any) -> list[Any]:
        first, carry = operands[:consts], list(operands[consts : consts + carries])
        made: list[Any] = []
        for begin, end in pairwise([0, *starts, length]):
            if begin:
                mark.bind()
            rows = (length - end, length - begin) if params["reverse"] else (begin, end)
            xs = [jax.lax.slice_in_dim(x, *rows) for x in operands[consts + carries :]]
            xs = [x if x.dtype == d else x.astype(d) for x, d in zip(xs, dtypes, strict=True)]
            own = {**params, "length": end - begin}
            results = eqn.primitive.bind(*first, *carry, *xs, **own)
            carry, ys = results[:carries], results[carries:]
            made.insert(0 if params["reverse"] else len(made), ys)
        return [*carry, *map(jnp.concatenate, zip(*made, strict=True))]

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
