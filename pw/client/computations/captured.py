"""Turns the values that a traced function closes over into arguments, at any depth.

JAX keeps such a value as a constant of the innermost jaxpr that uses it, and a jit inside the
function has constants of its own, also in a loop or a branch. So this module passes a value down:
every equation on the way gets further operands, and the jaxpr inside it further variables. They
come first in both, where loops and custom derivatives expect loop-invariant operands; each
primitive gets a count of them.

Primitives that are not in the table keep their constants, which become part of the artifact.

JAX can trace shardings over virtual devices, but not lower them. They become shardings over the
abstract mesh.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend
import numpy as np
from jax.sharding import PartitionSpec

from pw.client.arrays.of_jax import abstract


class _Rule(NamedTuple):
    """How a primitive calls a jaxpr."""

    body: str
    counter: str = ""
    """The parameter with the number of operands that are constants of the body."""
    offset: Callable[[dict[str, Any]], int] = lambda params: 0
    """The position of the body's first operand."""
    for_each: dict[str, Any] = {}  # noqa: RUF012 - never changed
    """Parameters with an entry for each operand, and the entry of a new one."""


UNSPECIFIED: Any = jax.make_jaxpr(jax.jit(lambda x: x + 1))(1.0).eqns[0].params["in_shardings"][0]
"""Entry of an argument for which a `jit` equation names no sharding."""

_RULES: dict[str, tuple[_Rule, ...]] = {
    "jit": (
        _Rule(
            "jaxpr",
            for_each={"in_shardings": UNSPECIFIED, "in_layouts": None, "donated_invars": False},
        ),
    ),
    "remat2": (_Rule("jaxpr"),),
    "shard_map": (_Rule("jaxpr", for_each={"in_specs": PartitionSpec()}),),
    "scan": (_Rule("jaxpr", "num_consts"),),
    "while": (
        _Rule("cond_jaxpr", "cond_nconsts"),
        _Rule("body_jaxpr", "body_nconsts", lambda params: int(params["cond_nconsts"])),
    ),
    "cond": (_Rule("branches", offset=lambda params: 1),),
    "custom_jvp_call": (_Rule("call_jaxpr", "num_consts"),),
    "custom_vjp_call": (_Rule("call_jaxpr", "num_consts"),),
}


class _Opened(NamedTuple):
    """A jaxpr before its lifted constants get variables."""

    jaxpr: Any
    kept: list[tuple[Any, Any]]
    """Variables of the constants that stay, each with its value."""
    lifted: dict[int, tuple[Any, Any]]
    """Variables of the lifted constants, each with its value, by the identity of the value."""
    is_new: bool
    """Whether the jaxpr has changed."""

    def taking(self, values: Sequence[Any], at: int) -> Any:
        """Return the jaxpr with variables for `values`, from position `at` of its arguments."""
        variables = [_variable(value, self.lifted) for value in values]
        jaxpr = self.jaxpr
        names = jaxpr.debug_info.arg_names
        described = jaxpr.debug_info
        if names is not None:
            captured = ["captured"] * len(values)
            described = described._replace(arg_names=(*names[:at], *captured, *names[at:]))
        return jaxpr.replace(
            constvars=[variable for variable, _ in self.kept],
            invars=[*jaxpr.invars[:at], *variables, *jaxpr.invars[at:]],
            debug_info=described,
        )

    def constants(self) -> list[Any]:
        """Return the constants that stay."""
        return [value for _, value in self.kept]


def lift(closed: Any, must_lift: Callable[[Any], bool]) -> tuple[Any, list[Any], list[Any]]:
    """Turn the constants of `closed` that `must_lift` chooses into arguments.

    Returns:
        The jaxpr, the constants that remain, and the values of the new last arguments.
    """
    opened = _open(closed.jaxpr, closed.consts, must_lift)
    values = [value for _, value in opened.lifted.values()]
    return opened.taking(values, len(closed.jaxpr.invars)), opened.constants(), values


def _open(jaxpr: Any, constants: Sequence[Any], must_lift: Callable[[Any], bool]) -> _Opened:
    lifted: dict[int, tuple[Any, Any]] = {}
    renamed: dict[Any, Any] = {}
    kept: list[tuple[Any, Any]] = []
    for variable, value in zip(jaxpr.constvars, constants, strict=True):
        if must_lift(value):
            renamed[variable] = lifted.setdefault(id(value), (variable, value))[0]
        else:
            kept.append((variable, np.asarray(value) if isinstance(value, jax.Array) else value))

    def current(atom: Any) -> Any:
        return atom if isinstance(atom, jax.extend.core.Literal) else renamed.get(atom, atom)

    equations = []
    is_new = bool(lifted)
    for equation in jaxpr.eqns:
        before = equation.params
        for rule in _RULES.get(equation.primitive.name, ()):
            equation = _handed_down(equation, rule, lifted, must_lift)
        params = {name: _of_jax(value) for name, value in equation.params.items()}
        is_new = is_new or any(params[name] is not before[name] for name in before)
        invars = [current(atom) for atom in equation.invars]
        equations.append(equation.replace(invars=invars, params=params))
    outvars = [current(atom) for atom in jaxpr.outvars]
    return _Opened(jaxpr.replace(eqns=equations, outvars=outvars), kept, lifted, is_new)


def _of_jax(param: Any) -> Any:
    """Return a parameter of an equation without virtual devices."""
    if type(param) is tuple and any(isinstance(entry, jax.sharding.Sharding) for entry in param):
        return tuple(map(abstract, param))
    return abstract(param)


def _handed_down(
    equation: Any, rule: _Rule, lifted: dict[int, tuple[Any, Any]], must_lift: Callable[[Any], bool]
) -> Any:
    """Return the equation with the captured values of its body as further operands."""
    params = dict(equation.params)
    several = isinstance(params[rule.body], tuple)
    bodies = params[rule.body] if several else (params[rule.body],)
    opened = [_open(*_parts(body), must_lift) for body in bodies]
    if not any(body.is_new for body in opened):
        return equation
    values = list({k: value for body in opened for k, (_, value) in body.lifted.items()}.values())
    bodies = tuple(
        _closed(before, after.taking(values, 0), after.constants())
        for before, after in zip(bodies, opened, strict=True)
    )
    params[rule.body] = bodies if several else bodies[0]
    for field, entry in rule.for_each.items():
        params[field] = (*([entry] * len(values)), *params[field])
    if rule.counter:
        params[rule.counter] += len(values)
    at = rule.offset(params)
    operands = [_variable(value, lifted) for value in values]
    invars = [*equation.invars[:at], *operands, *equation.invars[at:]]
    return equation.replace(invars=invars, params=params)


def _variable(value: Any, lifted: dict[int, tuple[Any, Any]]) -> Any:
    """Return the variable of `value`; make one if it has none."""
    if id(value) not in lifted:
        lifted[id(value)] = (jax.extend.core.Var(jax.typeof(value)), value)
    return lifted[id(value)][0]


def _parts(body: Any) -> tuple[Any, Sequence[Any]]:
    """Return a jaxpr and its constants."""
    if isinstance(body, jax.extend.core.ClosedJaxpr):
        return body.jaxpr, body.consts
    return body, ()


def _closed(before: Any, jaxpr: Any, constants: list[Any]) -> Any:
    """Return `jaxpr` in the form of the body before."""
    if isinstance(before, jax.extend.core.ClosedJaxpr):
        return jax.extend.core.ClosedJaxpr(jaxpr, constants)
    return jaxpr
