"""*Place*: from the jaxpr of a program to computations on meshes, and values that move between them.

Each equation that is a call becomes a node on the mesh of its function. Ordinary equations between calls are
collected (`pw.client.trace.ordinary`), and become one computation when a call, a move or a result needs one
of their values.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import jax.extend
import numpy as np
from jax.sharding import PartitionSpec

from pw.client.arrays.mesh import Mesh, default_mesh
from pw.client.arrays.sharding import NamedSharding
from pw.client.arrays.signature import ArrayType
from pw.client.trace import unrolled
from pw.client.trace.branches import recorded
from pw.client.trace.equations import CallKind, bodies, kind_of
from pw.client.trace.joined.traced import trace_on
from pw.client.trace.ordinary import Group, Pending
from pw.client.trace.python_calls import is_python_call, mesh_of_python_call
from pw.client.trace.recorder import ProgramRecorder
from pw.client.trace.tracer import ProgramTracer
from pw.core.errors import TracingError

jex = jax.extend.core

_BODIES = {
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "remat2": "jaxpr",
    "checkpoint": "jaxpr",
    "closed_call": "call_jaxpr",
    "jit": "jaxpr",
}
"""The parameter with the body of equations that only apply it."""
_BRANCHES = "branches"
_SAME = ("reshard", "reshape")
"""Equations that change nothing if the shape stays: JAX makes some for shardings of abstract meshes."""


class Floating:
    """A result of an ordinary equation without operands on devices: it is computed where it is needed."""

    __slots__ = ("__weakref__", "aval", "equation", "index", "operands")

    def __init__(self, equation: Any, operands: Sequence[Any], index: int) -> None:
        self.equation = equation
        self.operands = operands
        self.index = index
        self.aval = equation.outvars[index].aval


class Placement:
    """Adds the equations of a jaxpr to a program."""

    def __init__(self, recorder: ProgramRecorder) -> None:
        self._recorder = recorder
        self._groups: dict[Mesh, Group] = {}
        self._landed: dict[tuple[int, Mesh], tuple[list[weakref.ref[Pending]], Any]] = {}
        """The results of equations of floating values on a mesh, by the identity of the equation."""
        self._taken: dict[tuple[int, Mesh], tuple[NamedSharding, ProgramTracer]] = {}
        """How a mesh takes a host value, by its identity: as the first call there does."""
        self._booleans: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        """The boolean that an integer is made of: the predicate of a `cond`."""

    def add(self, jaxpr: Any, constants: Sequence[Any], arguments: Sequence[Any]) -> list[Any]:
        """Add all equations; returns the results, some of which may be pending."""
        values: dict[Any, Any] = dict(zip(jaxpr.constvars, constants, strict=True))
        values.update(zip(jaxpr.invars, arguments, strict=True))
        del arguments
        ends = _last_uses(jaxpr)
        for number, equation in enumerate(jaxpr.eqns):
            operands = [self._read(values, atom) for atom in equation.invars]
            results = self._equation(equation, operands)
            values.update(zip(equation.outvars, results, strict=True))
            del operands, results
            for variable in ends[number]:
                values.pop(variable, None)
        return [self._read(values, atom) for atom in jaxpr.outvars]

    def on(self, value: Any, mesh: Mesh | None = None) -> ProgramTracer:
        """Return a value of the program, wherever it is; one that floats is computed on a mesh."""
        if isinstance(value, Floating):
            value = self._landing(value, mesh or default_mesh())
        if isinstance(value, Pending):
            if value.made is None:
                self._finish(value.group)
            assert value.made is not None
            return value.made
        return self._recorder.lift(value)

    def _read(self, values: dict[Any, Any], atom: Any) -> Any:
        return atom.val if isinstance(atom, jex.Literal) else values[atom]

    def _equation(self, equation: Any, operands: list[Any]) -> Sequence[Any]:
        kind = kind_of(equation)
        if kind is not None:
            return self._call(kind, equation, operands)
        if is_python_call(equation):
            function, key = equation.params["function"], equation.params["key"]
            own = [self.on(operand, mesh_of_python_call(equation)) for operand in operands]
            return self._recorder.call(function._trace(key), own)
        name = equation.primitive.name
        if name in _SAME and equation.invars[0].aval.shape == equation.outvars[0].aval.shape:
            return operands
        if name == "device_put":
            return self._moved(equation, operands)
        if not _has_calls(equation):
            return self._ordinary(equation, operands)
        if name == "cond":
            return self._cond(equation, operands)
        if name in ("scan", "while"):
            mesh = _mesh_of_all(equation)
            if mesh is not None:
                return self._on_mesh(equation, operands, mesh)
        if name == "scan":
            return self._rewritten(equation, operands, unrolled.scan)
        if name not in _BODIES:
            raise TracingError(
                f"{name} over calls of pw.jit functions cannot be a part of a program; use pw.while_loop "
                "with max_iterations, or a loop of Python"
            )
        body = equation.params[_BODIES[name]]
        closed = isinstance(body, jex.ClosedJaxpr)
        jaxpr, constants = (body.jaxpr, body.consts) if closed else (body, ())
        return self.add(jaxpr, constants, operands)

    # --- calls ---------------------------------------------------------------------------------------

    def _call(self, kind: CallKind, equation: Any, operands: list[Any]) -> Sequence[Any]:
        params = equation.params
        own = [self.on(operand, kind.mesh) for operand in operands]
        types = tuple(
            self._type(value, variable.aval, wanted, kind.mesh)
            for value, variable, wanted in zip(
                own, equation.invars, params["in_shardings"], strict=True
            )
        )
        stack = str(equation.source_info.name_stack)
        is_backward = "transpose(" in stack
        # A call whose arguments have a gradient donates nothing: the backward computation needs them.
        donated = () if "jvp(" in stack else tuple(_positions(params["donated_invars"]))
        key = (params["jaxpr"], types, params["out_shardings"], donated, is_backward)
        traced = kind.traced.get(key)
        if traced is None:
            traced = kind.traced[key] = self._traced(kind, equation, types, donated, is_backward)
        return self._recorder.call(traced, own)

    def _traced(
        self,
        kind: CallKind,
        equation: Any,
        types: Sequence[ArrayType],
        donated: Sequence[int],
        is_backward: bool,
    ) -> Any:
        name = f"{kind.name}_backward" if is_backward else kind.name
        params = equation.params
        evaluate = jex.jaxpr_as_fun(params["jaxpr"])
        tree = kind.arguments
        if is_backward or tuple(type_.aval for type_ in types) != kind.avals:
            tree = jax.tree_util.tree_structure((tuple(types), {}))

        def function(*args: Any, **kwargs: Any) -> Any:
            return evaluate(*jax.tree_util.tree_leaves((args, kwargs)))

        function.__name__ = name
        outs = [_concrete(wanted, kind.mesh) for wanted in params["out_shardings"]]
        return trace_on(
            function,
            tree,
            name,
            kind.mesh,
            types,
            lambda _, results: outs,
            donated,
            kind.check_nans,
        )

    def _type(self, value: ProgramTracer, aval: Any, wanted: Any, mesh: Mesh) -> ArrayType:
        sharding = _concrete(wanted, mesh)
        if sharding is None:
            lies = value.sharding or self._taken.get((id(value), mesh), (None,))[0]
            sharding = lies if lies and lies.mesh == mesh else NamedSharding.replicated(mesh)
        if value.sharding is None:
            self._taken.setdefault((id(value), mesh), (sharding, value))
        return ArrayType.of(aval, sharding)

    def _moved(self, equation: Any, operands: list[Any]) -> Sequence[Any]:
        made = []
        for value, target in zip(operands, equation.params["devices"], strict=True):
            if isinstance(target, NamedSharding):
                value = self._recorder.reshard(self.on(value, target.mesh), target)
            elif target is not None:
                raise TracingError(
                    f"jax.device_put to {target} cannot be a part of a program: its values lie on virtual "
                    "devices; name these, as in jax.sharding.Mesh(np.array(slice.devices), names)"
                )
            made.append(value)
        return made

    def _rewritten(
        self, equation: Any, operands: list[Any], rule: Callable[..., Any]
    ) -> Sequence[Any]:
        """Add an equation as others that compute the same."""
        avals = [variable.aval for variable in equation.invars]
        closed = jax.make_jaxpr(lambda *values: rule(equation, values))(*avals)
        return self.add(closed.jaxpr, closed.consts, operands)

    # --- ordinary equations --------------------------------------------------------------------------

    def _ordinary(self, equation: Any, operands: list[Any]) -> Sequence[Any]:
        if equation.effects:
            raise TracingError(
                f"the program {self._recorder.name!r} has {equation.primitive.name} between its calls, with a "
                "side effect. Callbacks into this process (jax.debug.print, io_callback) cannot travel: "
                "return such values and print them here"
            )
        mesh = next((found for one in operands if (found := _mesh_of(one)) is not None), None)
        if mesh is None:
            made: list[Any] = [
                Floating(equation, operands, index) for index in range(len(equation.outvars))
            ]
        else:
            made = self._on_mesh(equation, operands, mesh)
        if equation.primitive.name == "convert_element_type":
            (source,) = operands
            if equation.invars[0].aval.dtype == np.bool_:
                self._booleans[made[0]] = source
        return made

    def _on_mesh(self, equation: Any, operands: Sequence[Any], mesh: Mesh) -> list[Pending]:
        own = []
        for operand in operands:
            if isinstance(operand, Floating):
                operand = self._landing(operand, mesh)
            elif isinstance(operand, Pending):
                if operand.made is None and operand.group is not self._groups.get(mesh):
                    self._finish(operand.group)
            else:
                operand = self._recorder.lift(operand)
            own.append(operand)
        group = self._groups.get(mesh)
        if group is None:
            group = self._groups[mesh] = Group(mesh, self._recorder.name)
        return group.add(equation, own)

    def _landing(self, value: Floating, mesh: Mesh) -> Pending:
        key = (id(value.equation), mesh)
        known = self._landed.get(key)
        landed = None if known is None else known[0][value.index]()
        if landed is None:
            made = self._on_mesh(value.equation, value.operands, mesh)
            self._landed[key] = [weakref.ref(one) for one in made], value.equation
            landed = made[value.index]
        return landed

    def _finish(self, group: Group) -> None:
        """Make a computation of the equations of a group."""
        del self._groups[group.mesh]
        group.finish(
            lambda value, mesh: self._type(value, value.aval, None, mesh), self._recorder.call
        )

    # --- branches ------------------------------------------------------------------------------------

    def _cond(self, equation: Any, operands: list[Any]) -> Sequence[Any]:
        if len(equation.params[_BRANCHES]) != 2:
            return self._rewritten(equation, operands, unrolled.switch)
        index, *rest = operands
        predicate = self._booleans.get(index) if isinstance(index, (Pending, Floating)) else None
        if predicate is None and isinstance(index, (Pending, Floating, ProgramTracer)):
            closed = jax.make_jaxpr(lambda number: number != 0)(index.aval)
            (predicate,) = self.add(closed.jaxpr, closed.consts, [index])
        elif predicate is None:
            predicate = bool(index)
        own = [self.on(one) if isinstance(one, Pending) else one for one in rest]
        no, yes = equation.params[_BRANCHES]
        given = self.on(predicate)
        with self._inside():
            made: Sequence[Any] = recorded(
                self._recorder,
                given,
                (self._branch(yes, own), self._branch(no, own)),
                (),
                None,
            )
            return made

    def _branch(self, closed: Any, operands: Sequence[Any]) -> Any:
        def branch() -> Any:
            with self._inside():
                made = self.add(closed.jaxpr, closed.consts, operands)
                return tuple(
                    self.on(one) if isinstance(one, (Pending, Floating)) else one for one in made
                )

        branch.__name__ = getattr(closed.jaxpr.debug_info, "func_name", "branch")
        return branch

    @contextmanager
    def _inside(self) -> Iterator[None]:
        """In the block, ordinary equations make computations of their own."""
        before = self._groups, self._landed
        self._groups, self._landed = {}, {}
        try:
            yield
        finally:
            self._groups, self._landed = before


def _mesh_of(value: Any) -> Mesh | None:
    if isinstance(value, Pending):
        return value.group.mesh
    sharding = getattr(value, "sharding", None) if not isinstance(value, jax.Array) else None
    return None if sharding is None else sharding.mesh


def _concrete(wanted: Any, mesh: Mesh) -> NamedSharding | None:
    """Return the sharding of an equation over a mesh of virtual devices; None if it has none."""
    if not isinstance(wanted, jax.sharding.NamedSharding):
        return None
    spec = (None if part is PartitionSpec.UNCONSTRAINED else part for part in wanted.spec)
    return NamedSharding(mesh, PartitionSpec(*spec))


def _positions(flags: Sequence[bool]) -> list[int]:
    return [at for at, is_set in enumerate(flags) if is_set]


def _last_uses(jaxpr: Any) -> list[list[Any]]:
    """Return for each equation the variables that nothing behind it uses."""
    ends: list[list[Any]] = [[] for _ in jaxpr.eqns]
    seen = {atom for atom in jaxpr.outvars if not isinstance(atom, jex.Literal)}
    for number in range(len(jaxpr.eqns) - 1, -1, -1):
        equation = jaxpr.eqns[number]
        for variable in (*equation.invars, *equation.outvars):
            if not isinstance(variable, jex.Literal) and variable not in seen:
                seen.add(variable)
                ends[number].append(variable)
    return ends


def _has_calls(equation: Any) -> bool:
    """Whether an equation has calls of `pw.jit` functions, or moves between meshes, in it."""
    return any(
        kind_of(inner) is not None or _is_move(inner) or is_python_call(inner) or _has_calls(inner)
        for body in bodies(equation)
        for inner in body.eqns
    )


def _mesh_of_all(equation: Any) -> Mesh | None:
    """Return the mesh of all calls in an equation, if it can be one computation there."""
    meshes: set[Mesh | None] = set()
    todo = list(bodies(equation))
    while todo:
        for inner in todo.pop().eqns:
            kind = kind_of(inner)
            if kind is not None:
                meshes.add(None if kind.check_nans or kind.mesh.parts else kind.mesh)
            elif is_python_call(inner):
                meshes.add(None)
            elif _is_move(inner):
                meshes |= {target.mesh for target in inner.params["devices"] if target is not None}
            else:
                todo += bodies(inner)
    return meshes.pop() if len(meshes) == 1 else None


def _is_move(equation: Any) -> bool:
    return equation.primitive.name == "device_put" and any(
        isinstance(target, NamedSharding) for target in equation.params["devices"]
    )
