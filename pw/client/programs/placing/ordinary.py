"""Ordinary JAX between the calls of a program: connected equations on one mesh become one computation."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend

from pw.client.arrays.mesh import OwnMesh
from pw.client.arrays.sharding import OwnSharding
from pw.client.arrays.signature import ArrayType
from pw.client.computations.exported import Call
from pw.client.computations.joined import trace_on
from pw.client.programs.writing.values import PlacedValue

jex = jax.extend.core


def _name(equations: Sequence[Any]) -> str:
    """Return the name of a computation of a few operations; nothing for one of many."""
    names = list(dict.fromkeys(_name_of(equation) for equation in equations))
    return "_".join(names) if len(names) <= 3 else ""


_UNNAMED = jax.api_util.debug_info("pw.program", _name, (), {})._replace(
    arg_names=None, result_paths=None
)
"""What JAX knows of the names in a computation of ordinary equations: nothing."""


class Pending:
    """A result of ordinary equations that no computation makes yet."""

    __slots__ = ("__weakref__", "aval", "group", "value", "variable", "wanted")

    def __init__(self, group: Group, variable: Any) -> None:
        self.group = group
        self.variable = variable
        self.aval = variable.aval
        self.value: PlacedValue | None = None
        self.wanted: OwnSharding | None = None
        """How it is to lie; None for the compiler's choice."""


class Group:
    """Equations on one mesh that become one computation."""

    def __init__(self, mesh: OwnMesh, program: str) -> None:
        self.mesh = mesh
        self._program = program
        self._inputs: dict[tuple[int, Any], tuple[Any, PlacedValue]] = {}
        self._equations: list[Any] = []
        self._key: list[Any] = []
        self._numbers: dict[Any, int] = {}
        self._results: list[weakref.ref[Pending]] = []

    def add(self, equation: Any, operands: Sequence[Any]) -> list[Pending]:
        """Add an equation on values of this group, and on values of the program."""
        atoms = [
            atom if isinstance(atom, jex.Literal) else self._variable(value, atom.aval)
            for atom, value in zip(equation.invars, operands, strict=True)
        ]
        results = [jex.Var(variable.aval) for variable in equation.outvars]
        self._equations.append(equation.replace(invars=atoms, outvars=results))
        pending = [Pending(self, variable) for variable in results]
        self._results += map(weakref.ref, pending)
        self._key.append(
            (
                equation.primitive,
                tuple(sorted(equation.params.items(), key=lambda item: item[0])),
                tuple(_key_of(atom, self._numbers) for atom in atoms),
            )
        )
        for variable in results:
            self._numbers[variable] = len(self._numbers)
        return pending

    def _variable(self, value: Any, traced: Any) -> Any:
        """Return the variable of a value; an equation reads it in the memory that JAX traced."""
        if isinstance(value, Pending) and value.value is not None:
            value = value.value
        if isinstance(value, Pending):
            return value.variable
        key = id(value), traced.memory_space
        entry = self._inputs.get(key)
        if entry is None:
            aval = value.aval.update(memory_space=traced.memory_space)
            entry = self._inputs[key] = jex.Var(aval), value
            self._numbers[entry[0]] = len(self._numbers)
        return entry[0]

    def finish(
        self,
        type_of: Callable[[PlacedValue, Any, OwnMesh], ArrayType],
        call: Callable[[Any, Sequence[PlacedValue]], list[PlacedValue]],
    ) -> None:
        """Make one computation of the equations; of its results those that may still be wanted."""
        wanted = [one for ref in self._results if (one := ref()) is not None]
        if not wanted:
            return
        values = [value for _, value in self._inputs.values()]
        inputs = [variable for variable, _ in self._inputs.values()]
        types = tuple(
            type_of(value, variable.aval, self.mesh)
            for value, variable in zip(values, inputs, strict=True)
        )
        outputs = [one.variable for one in wanted]
        used = _used(self._equations, outputs)
        name = _name(used) or self._program
        lies = tuple(one.wanted for one in wanted)
        key = (
            "ordinary",
            name,
            self.mesh,
            types,
            tuple(self._key),
            tuple(self._numbers[variable] for variable in outputs),
            lies,
        )

        def traced_now() -> Any:
            jaxpr = jex.Jaxpr([], inputs, outputs, used, debug_info=_UNNAMED)
            evaluate = jex.jaxpr_as_fun(jex.ClosedJaxpr(jaxpr, []))
            call = Call(
                lambda *leaves: evaluate(*leaves), name, self.mesh, types, lambda _, results: lies
            )
            return trace_on(call)

        try:
            traced = self.mesh.slice.compiled.get_or_make(key, traced_now)
        except TypeError:  # a parameter of an equation cannot be hashed
            traced = traced_now()
        for one, result in zip(wanted, call(traced, values), strict=True):
            one.value = result


def _key_of(atom: Any, numbers: dict[Any, int]) -> Any:
    if isinstance(atom, jex.Literal):
        return type(atom.val), str(atom.val), atom.aval
    return numbers[atom]


def _used(equations: Sequence[Any], outputs: Sequence[Any]) -> list[Any]:
    """Return the equations on which the outputs depend."""
    wanted = set(outputs)
    used = []
    for equation in reversed(equations):
        if any(variable in wanted for variable in equation.outvars):
            used.append(equation)
            wanted.update(atom for atom in equation.invars if not isinstance(atom, jex.Literal))
    return used[::-1]


_NAMES = {
    "add_any": "add",
    "sub": "subtract",
    "mul": "multiply",
    "div": "true_divide",
    "neg": "negative",
}
"""Names of `jax.numpy`, for those that JAX has shortened."""


def _name_of(equation: Any) -> str:
    body = equation.params.get("body_jaxpr") or equation.params.get("jaxpr")
    if equation.primitive.name in ("while", "scan") and body is not None:
        return str(body.jaxpr.debug_info.func_name)
    name = str(equation.params.get("name") or equation.primitive.name).strip("_")
    return _NAMES.get(name, name)
