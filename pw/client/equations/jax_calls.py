"""Calls of JAX's own functions over virtual devices, as calls of `pw.jit` functions.

A mesh of JAX can have virtual devices. In the jaxpr of a program, the equations of `jax.jit`, `jax.pmap` and
`jax.shard_map` functions name such meshes. They become what calls of `pw.jit` functions are: `jit`
equations with a kind, over abstract meshes. `jax.device_put` becomes a move to a sharding of pw.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend

from pw.client.arrays.mesh import OwnMesh
from pw.client.arrays.of_jax import abstract, own_or_given, own_sharding
from pw.client.arrays.sharding import OwnSharding
from pw.client.arrays.signature import checks_nans
from pw.client.equations.calls import CallKind, equation_name, mesh_of_call, meshes_named_by
from pw.client.equations.graph import bodies
from pw.core.errors import PlacementError

jex = jax.extend.core

_JIT = jax.make_jaxpr(jax.jit(lambda x: x + 1))(1.0).eqns[0]
_PUT = jax.make_jaxpr(jax.device_put)(1.0).eqns[0]
"""Equations whose parameters others of JAX begin with."""
_NAMES = {"_fun": "pmap"}
"""Names for those that JAX gives to functions: it does not say which function `jax.pmap` maps."""

_calls: weakref.WeakKeyDictionary[Any, dict[Any, tuple[CallKind, Any]]] = (
    weakref.WeakKeyDictionary()
)
"""Kinds of calls by the jaxpr of the function, each with the jaxpr over its abstract mesh."""


def with_calls(closed: Any, kinds: list[CallKind]) -> Any:
    """Return the jaxpr of a program with calls over virtual devices in the form of pw; adds their kinds."""

    def change(equation: Any) -> Any:
        if mesh_of_call(equation) is not None:
            return equation
        name = equation.primitive.name
        if name == "sharding_constraint":
            target = own_sharding(equation.params["sharding"])
            if target is None:
                return equation
            (result,) = equation.outvars  # a constraint moves to no other memory
            target = target.in_space(result.aval.memory_space)
            return _like(_PUT, equation, devices=(target,))
        if name in ("jit", "shard_map"):
            mesh = _mesh_of(equation)
            if mesh is not None:
                return _call(equation, mesh, kinds)
        return _with_params(equation, change, own_or_given if name == "device_put" else _same)

    return _changed(closed, change)


def _same(value: Any) -> Any:
    return value


def _changed(value: Any, change: Callable[[Any], Any], leaf: Callable[[Any], Any] = _same) -> Any:
    """Return a parameter of an equation with all equations in it changed, and all other values."""
    if isinstance(value, jex.ClosedJaxpr):
        jaxpr = _changed(value.jaxpr, change, leaf)
        return value if jaxpr is value.jaxpr else jex.ClosedJaxpr(jaxpr, value.consts)
    if isinstance(value, jex.Jaxpr):
        equations = [change(equation) for equation in value.eqns]
        return value if _are_same(equations, value.eqns) else value.replace(eqns=equations)
    if type(value) is tuple:
        entries = tuple(_changed(entry, change, leaf) for entry in value)
        return value if _are_same(entries, value) else entries
    return leaf(value)


def _are_same(values: Sequence[Any], before: Sequence[Any]) -> bool:
    return all(value is other for value, other in zip(values, before, strict=True))


def _with_params(
    equation: Any, change: Callable[[Any], Any], leaf: Callable[[Any], Any] = _same
) -> Any:
    before = equation.params
    params = {name: _changed(value, change, leaf) for name, value in before.items()}
    is_same = _are_same(tuple(params.values()), tuple(before.values()))
    return equation if is_same else equation.replace(params=params)


def _over_abstract(equation: Any) -> Any:
    return _with_params(equation, _over_abstract, abstract)


def _like(first: Any, equation: Any, **params: Any) -> Any:
    """Return an equation as `first` with these parameters, in the place of another one."""
    return equation.replace(primitive=first.primitive, params={**first.params, **params})


def _mesh_of(equation: Any) -> OwnMesh | None:
    """Return the one mesh that an equation names anywhere; None if there are several, or calls of pw."""
    own = meshes_named_by(equation)
    if len(own) > 1:
        raise PlacementError(
            f"the shardings of the function {equation.params['name']!r} of jax.jit are over several meshes: "
            f"{', '.join(map(repr, own))}. One call runs on one mesh; move values with jax.device_put"
        )
    meshes, todo = set(own), [*bodies(equation)]
    while todo:
        for inner in todo.pop().eqns:
            if mesh_of_call(inner) is not None:
                return None
            meshes |= meshes_named_by(inner)
            todo += bodies(inner)
    return meshes.pop() if len(meshes) == 1 else None


def _call(equation: Any, mesh: OwnMesh, kinds: list[CallKind]) -> Any:
    """Return an equation as a call on a mesh."""
    if equation.primitive.name == "shard_map":
        equation = _as_jit(equation)
    params = equation.params
    closed, name = params["jaxpr"], _NAMES.get(params["name"], params["name"])
    by_kind = _calls.setdefault(closed, {})
    key = name, mesh, checks_nans()
    if key not in by_kind:
        tree = jax.tree_util.tree_structure(((), {}))
        own = jex.ClosedJaxpr(closed.jaxpr, closed.consts)  # the table does not hold its key
        by_kind[key] = CallKind(*key, tree, (), None), _changed(own, _over_abstract)
    kind, jaxpr = by_kind[key]
    kinds.append(kind)
    split = {
        id(atom): spec
        for inner in closed.jaxpr.eqns
        if inner.primitive.name == "shard_map"
        for atom, spec in zip(inner.invars, inner.params["in_specs"], strict=True)
    }

    def of_argument(variable: Any, wanted: Any) -> Any:
        """Return the sharding of an argument: the wanted one, or that of a `shard_map`."""
        if own_sharding(wanted) is None and id(variable) in split:
            wanted = OwnSharding(mesh, split[id(variable)])
        return abstract(wanted)

    return _like(
        equation,
        equation,
        name=equation_name(kind),
        jaxpr=jaxpr,
        in_shardings=tuple(map(of_argument, closed.jaxpr.invars, params["in_shardings"])),
        out_shardings=tuple(map(abstract, params["out_shardings"])),
    )


def _as_jit(equation: Any) -> Any:
    """Return an equation as a call of a function with this equation."""
    arguments = [jex.Var(atom.aval) for atom in equation.invars]
    results = [jex.Var(variable.aval) for variable in equation.outvars]
    named = equation.params["jaxpr"].debug_info
    jaxpr = jex.Jaxpr(
        [],
        arguments,
        results,
        [equation.replace(invars=arguments, outvars=results)],
        debug_info=named,
    )
    shardings = _JIT.params["in_shardings"][:1]
    return _like(
        _JIT,
        equation,
        name=named.func_name,
        jaxpr=jex.ClosedJaxpr(jaxpr, ()),
        in_shardings=shardings * len(arguments),
        out_shardings=shardings * len(results),
        in_layouts=(None,) * len(arguments),
        out_layouts=(None,) * len(results),
        donated_invars=(False,) * len(arguments),
    )
