"""An equation that is a call, as a computation on its mesh: of what types its arguments and results are."""

from __future__ import annotations

from typing import Any

import jax
import jax.extend
from jax.sharding import PartitionSpec

from pw.client.arrays.mesh import OwnMesh
from pw.client.arrays.sharding import OwnSharding
from pw.client.arrays.signature import ArrayType
from pw.client.computations.export import Traced
from pw.client.computations.exported import Call
from pw.client.computations.joined import JoinedTraced, trace_on
from pw.client.equations.calls import CallKind


def type_in_call(aval: Any, wanted: Any, mesh: OwnMesh, lies: OwnSharding | None) -> ArrayType:
    """Return the type of an argument of a call; one that lies in another memory moves.

    Args:
        aval: of the argument, as JAX traced the call.
        wanted: what the equation says of it.
        mesh: of the call.
        lies: where the argument lies; None for a host value.
    """
    sharding = _concrete(wanted, mesh)
    if sharding is None:
        sharding = lies if lies and lies.mesh == mesh else OwnSharding.replicated(mesh)
        sharding = sharding.in_space(aval.memory_space)
    return ArrayType.of(aval, sharding)


def traced_call(
    kind: CallKind, equation: Any, types: tuple[ArrayType, ...], stack: str
) -> Traced | JoinedTraced:
    """Return the computation of an equation that is a call, for arguments of these types.

    `stack` names the transformations that have made it, as "transpose(jvp())".
    """
    params = equation.params
    is_backward = "transpose(" in stack
    # A call whose arguments have a gradient donates nothing: the backward computation needs them.
    flags = () if "jvp(" in stack else params["donated_invars"]
    donated = tuple(at for at, is_set in enumerate(flags) if is_set)
    key = params["jaxpr"], types, params["out_shardings"], donated, is_backward
    traced: Traced | JoinedTraced | None = kind.traced.get(key)
    if traced is None:
        traced = kind.traced[key] = _traced(kind, equation, types, donated, is_backward)
    return traced


def _traced(
    kind: CallKind,
    equation: Any,
    types: tuple[ArrayType, ...],
    donated: tuple[int, ...],
    is_backward: bool,
) -> Traced | JoinedTraced:
    name = f"{kind.name}_backward" if is_backward else kind.name
    params = equation.params
    jaxpr = params["jaxpr"]
    evaluate = jax.extend.core.jaxpr_as_fun(jaxpr)
    is_as_called = not is_backward and tuple(type_.aval for type_ in types) == kind.avals

    def function(*args: Any, **kwargs: Any) -> Any:
        leaves = jax.tree_util.tree_leaves((args, kwargs))
        return evaluate(*map(_in_space, leaves, jaxpr.in_avals))

    function.__name__ = name
    outs = [_concrete(wanted, kind.mesh) for wanted in params["out_shardings"]]
    return trace_on(
        Call(
            function,
            name,
            kind.mesh,
            types,
            lambda _, results: outs,
            kind.arguments if is_as_called else None,
            donated,
            kind.check_nans,
            kind.alike if jaxpr in kind.body else None,
        )
    )


def _concrete(wanted: Any, mesh: OwnMesh) -> OwnSharding | None:
    """Return the sharding of an equation over a mesh of virtual devices; None if it has none."""
    if not isinstance(wanted, jax.sharding.NamedSharding):
        return None
    spec = (None if part is PartitionSpec.UNCONSTRAINED else part for part in wanted.spec)
    return OwnSharding(mesh, PartitionSpec(*spec), wanted.memory_kind)


def _in_space(value: Any, aval: Any) -> Any:
    """Return an argument in the memory for which JAX traced the function."""
    space = aval.memory_space
    return value if jax.typeof(value).memory_space is space else jax.device_put(value, space)
