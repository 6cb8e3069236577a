"""*Place*: from the jaxpr of a program to computations on meshes, and values that move between them.

Each equation that is a call becomes a node on the mesh of its function. Ordinary equations between calls
are collected (`pw.client.programs.placing.ordinary`), and become one computation when a call, a move or a
result needs one of their values.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import jax
import jax.extend
import jax.numpy as jnp

from pw.client.arrays.mesh import OwnMesh, default_mesh
from pw.client.arrays.sharding import OwnSharding
from pw.client.arrays.signature import ArrayType
from pw.client.equations.calls import CallKind, kind_of, meshes_of_body
from pw.client.equations.choices import is_number_of_predicate, kept_apart, kept_in_loop
from pw.client.equations.counted_rows import has_counts
from pw.client.equations.island_parts import is_apart, is_together
from pw.client.equations.meshes import first_mesh, one_mesh
from pw.client.equations.python_calls import mesh_of_python_call
from pw.client.programs.passes import unrolled
from pw.client.programs.passes.residuals import with_fewer_residuals
from pw.client.programs.placing.branches import branches_of, chosen
from pw.client.programs.placing.calls import traced_call, type_in_call
from pw.client.programs.placing.deferred import Apart, Floating, Stacked, mesh_of
from pw.client.programs.placing.ordinary import Group, Pending
from pw.client.programs.writing.builder import ProgramBuilder
from pw.client.programs.writing.values import JoinedValue, PlacedValue
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


class Placement:
    """Adds the equations of a jaxpr to a program."""

    def __init__(self, builder: ProgramBuilder) -> None:
        self._builder = builder
        self._groups: dict[OwnMesh, Group] = {}
        self._landed: dict[tuple[int, OwnMesh], tuple[list[weakref.ref[Pending]], Any]] = {}
        """The results of floating values on a mesh, by the identity of their operands.

        A loop adds the same equation in each iteration.
        """
        self._prepared: dict[int, tuple[Any, list[list[Any]], dict[int, list[int]], Any]] = {}
        """What `add` knows of a jaxpr, by its identity; and the jaxpr, which has to stay."""
        self._host_shardings: dict[tuple[int, OwnMesh], tuple[OwnSharding, PlacedValue]] = {}
        """How a mesh takes a host value, by its identity: as the first call there does."""
        self._stack = ""
        """The transformations of JAX that have made the equation that is added, and those around it."""

    def add(self, jaxpr: Any, constants: Sequence[Any], arguments: Sequence[Any]) -> list[Any]:
        """Add all equations; returns the results, some of which may be pending."""
        prepared = self._prepared.get(id(jaxpr))
        if prepared is None:
            own = with_fewer_residuals(jaxpr)
            prepared = self._prepared[id(jaxpr)] = own, _last_uses(own), kept_apart(own), jaxpr
        jaxpr, ends, apart, _ = prepared
        around = self._stack
        values: dict[Any, Any] = dict(zip(jaxpr.constvars, constants, strict=True))
        values.update(zip(jaxpr.invars, arguments, strict=True))
        del arguments
        for number, equation in enumerate(jaxpr.eqns):
            operands = [self._read(values, atom) for atom in equation.invars]
            for variable in ends[number]:
                values.pop(variable, None)
            self._stack = f"{around}/{equation.source_info.name_stack}"
            results = self._equation(equation, operands, apart.get(number, ()))
            values.update(
                (variable, result)
                for variable, result in zip(equation.outvars, results, strict=True)
                if variable not in ends[number]
            )
            del operands, results
        self._stack = around
        return [self._read(values, atom) for atom in jaxpr.outvars]

    def on(self, value: Any, mesh: OwnMesh | None = None) -> PlacedValue:
        """Return a value of the program, wherever it is; one that floats is computed on a mesh."""
        value = self._landed_on(value, mesh)
        if isinstance(value, Apart):
            return self._merged(value)
        if isinstance(value, Stacked):
            value = self._stacked(value)
        if isinstance(value, Pending):
            if value.value is None:
                self._finish(value.group)
            assert value.value is not None
            return value.value
        return self._builder.lift(value)

    def result(self, value: Any, like: OwnSharding | None) -> PlacedValue:
        """Return a result of the program; one that floats is computed as something that it looks like lies."""
        if isinstance(value, Floating) and like is not None and mesh_of(value) is None:
            value = self._landing(value, like.mesh)
            if value.value is None:
                value.wanted = like.in_space(value.aval.memory_space)
        return self.on(value)

    def _read(self, values: dict[Any, Any], atom: Any) -> Any:
        return atom.val if isinstance(atom, jex.Literal) else values[atom]

    def _equation(
        self, equation: Any, operands: list[Any], apart: Collection[int] = ()
    ) -> Sequence[Any]:
        kind = kind_of(equation)
        if kind is not None:
            return self._call(kind, equation, operands)
        if (mesh := mesh_of_python_call(equation)) is not None:
            function, key = equation.params["function"], equation.params["key"]
            own = [self.on(operand, mesh) for operand in operands]
            return self._builder.call(function._trace(key), own)
        if has_counts(equation):
            rows, counts = operands
            return [replace(self.on(rows), counts=self.on(counts))]
        if is_apart(equation):
            sharding = equation.params["sharding"]
            joined = cast(JoinedValue, self._builder.reshard(self.on(operands[0]), sharding))
            return [replace(part) for part in joined.parts]
        if is_together(equation):
            return [self._together(equation, operands)]
        name = equation.primitive.name
        if name in _SAME and equation.invars[0].aval.shape == equation.outvars[0].aval.shape:
            return operands
        if name == "device_put":
            return self._moved(equation, operands)
        is_loop = name in ("scan", "while")
        mesh = one_mesh([equation]) if is_loop else None
        if mesh is not None or first_mesh([equation]) is None:
            if name == "scan" and unrolled.ends_early(equation):
                return self._rewritten(equation, operands, unrolled.bounded)
            if mesh is not None:
                return self._on_mesh(equation, operands, mesh)
            return self._ordinary(equation, operands)
        if name == "cond":
            return self._cond(equation, operands, apart)
        if name == "scan":
            return self._scan(equation, operands)
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
        return self._builder.call(traced_call(kind, equation, types, self._stack), own)

    def _type(self, value: PlacedValue, aval: Any, wanted: Any, mesh: OwnMesh) -> ArrayType:
        lies = value.sharding or self._host_shardings.get((id(value), mesh), (None,))[0]
        type_ = type_in_call(aval, wanted, mesh, lies)
        if value.sharding is None:
            self._host_shardings.setdefault((id(value), mesh), (type_.sharding, value))
        return type_

    def _moved(self, equation: Any, operands: list[Any]) -> Sequence[Any]:
        values = []
        for value, target in zip(operands, equation.params["devices"], strict=True):
            if isinstance(target, OwnSharding):
                value = self._builder.reshard(self.on(value, target.mesh), target)
            elif isinstance(target, jax.memory.Space):
                value = self._in_space(value, target)
            elif target is not None:
                raise TracingError(
                    f"jax.device_put to {target} cannot be a part of a program: its values lie on virtual "
                    "devices; name these, as in jax.sharding.Mesh(np.array(slice.devices), names)"
                )
            values.append(value)
        return values

    def _in_space(self, value: Any, space: Any) -> Any:
        """Return a value in a memory of its devices; a host value, which has no devices, as it is."""
        if mesh_of(value) is None:
            return value
        placed = self.on(value)
        assert placed.sharding is not None
        return self._builder.reshard(placed, placed.sharding.in_space(space))

    def _together(self, equation: Any, operands: list[Any]) -> PlacedValue:
        type_ = ArrayType.of(equation.outvars[0].aval, equation.params["sharding"])
        pairs = zip(operands, type_.parts, strict=True)
        parts = [
            self._builder.reshard(self.on(part, to.sharding.mesh), to.sharding)
            for part, to in pairs
        ]
        return self._builder.joined(type_, parts)

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
                f"the program {self._builder.name!r} has {equation.primitive.name} between its calls, with a "
                "side effect. Callbacks into this process (jax.debug.print, io_callback) cannot travel: "
                "return such values and print them here"
            )
        mesh = next(filter(None, map(mesh_of, operands)), None)
        if mesh is None or is_number_of_predicate(equation):
            return [Floating(equation, operands, index) for index in range(len(equation.outvars))]
        return self._on_mesh(equation, operands, mesh)

    def _on_mesh(self, equation: Any, operands: Sequence[Any], mesh: OwnMesh) -> list[Pending]:
        own = []
        for operand in operands:
            if isinstance(operand, Floating):
                operand = self._landing(operand, mesh)
            elif isinstance(operand, (Apart, Stacked)):
                operand = self.on(operand)
            if isinstance(operand, Pending):
                if operand.value is None and operand.group is not self._groups.get(mesh):
                    self._finish(operand.group)
            else:
                operand = self._builder.lift(operand)
            own.append(operand)
        group = self._groups.get(mesh)
        if group is None:
            group = self._groups[mesh] = Group(mesh, self._builder.name)
        return group.add(equation, own)

    def _landed_on(self, value: Any, mesh: OwnMesh | None) -> Any:
        """Return a value; one that floats is computed where its operands are, or else on `mesh`."""
        if not isinstance(value, Floating):
            return value
        return self._landing(value, mesh_of(value) or mesh or default_mesh())

    def _landing(self, value: Floating, mesh: OwnMesh) -> Pending:
        key = (id(value.operands), mesh)
        landed_results = self._landed.get(key)
        landed = None if landed_results is None else landed_results[0][value.index]()
        if landed is None:
            results = self._on_mesh(value.equation, value.operands, mesh)
            self._landed[key] = [weakref.ref(one) for one in results], value.operands
            landed = results[value.index]
        return landed

    def _finish(self, group: Group) -> None:
        """Make a computation of the equations of a group."""
        del self._groups[group.mesh]
        group.finish(
            lambda value, aval, mesh: self._type(value, aval, None, mesh), self._builder.call
        )

    # --- branches and loops --------------------------------------------------------------------------

    def _cond(self, equation: Any, operands: list[Any], apart: Collection[int]) -> Sequence[Any]:
        if len(equation.params[_BRANCHES]) != 2:
            return self._rewritten(equation, operands, unrolled.switch)
        no, yes = equation.params[_BRANCHES]
        index, *rest = operands
        operands.clear()
        sides, branches = self._sides(rest, index)
        if isinstance(index, Floating) and is_number_of_predicate(index.equation):
            (predicate,) = index.operands
        elif isinstance(index, (Pending, Floating, PlacedValue)):
            closed = jax.make_jaxpr(lambda number: number != 0)(index.aval)
            (predicate,) = self.add(closed.jaxpr, closed.consts, [index])
        else:
            predicate = bool(index)
        pairs = zip(
            *(
                meshes_of_body(one.jaxpr, list(map(mesh_of, own)))
                for one, own in zip((yes, no), sides, strict=True)
            ),
            strict=True,
        )
        lie = [one or other for one, other in pairs]
        beside = mesh_of(predicate) or next((mesh for mesh in lie if mesh is not None), None)
        lie = [mesh or beside for mesh in lie]
        for at in apart:
            lie[at] = None
        functions = self._branch(yes, sides[0], lie), self._branch(no, sides[1], lie)
        if branches is None:
            predicate_there = self._of_branch(self.on(predicate, beside), beside)
            names = [fun.__name__ for fun in functions]
            is_iteration = unrolled.is_of_loop(equation)
            branches = branches_of(self._builder, predicate_there, names, is_iteration)
        with self._inside():
            is_backward = "transpose(" in self._stack
            given_index = index if apart else None
            return chosen(self._builder, branches, functions, apart, given_index, is_backward)

    def _sides(self, operands: Sequence[Any], index: Any) -> tuple[list[list[Any]], Any]:
        """Return the operands of both branches, and the branches if an earlier `cond` has them."""
        branches = None
        sides: list[list[Any]] = [[], []]
        for operand in operands:
            if isinstance(operand, Apart) and operand.index is index:
                branches, pair = operand.branches, operand.sides
            else:
                pair = (operand if mesh_of(operand) is None else self.on(operand),) * 2
            for side, one in zip(sides, pair, strict=True):
                side.append(one)
        return sides, branches

    def _merged(self, value: Apart) -> PlacedValue:
        """Return a result of both branches after all."""
        if value.merged is None:
            mesh = mesh_of(value)
            true, false = (lambda side=side: [self.on(side, mesh)] for side in value.sides)
            true.__name__, false.__name__ = (branch.name for branch in value.branches)
            with self._inside():
                (value.merged,) = chosen(self._builder, value.branches, (true, false))
        assert value.merged is not None
        return value.merged

    def _of_branch(self, predicate: PlacedValue, mesh: OwnMesh | None) -> PlacedValue:
        """Return a predicate that is computed in the branch around, so it is skipped with that one."""
        if isinstance(predicate, JoinedValue):
            predicate = predicate.parts[0]
        if self._builder.branch is None or self._builder.is_of_branch(
            predicate, self._builder.branch
        ):
            return predicate
        mesh = mesh_of(predicate) or mesh
        copies = self._computed(lambda one: [jnp.copy(one)], [predicate], [predicate.aval], mesh)
        return self.on(copies[0])

    def _branch(
        self, closed: Any, operands: Sequence[Any], lie: Sequence[OwnMesh | None]
    ) -> Callable[[], Any]:
        """Return a branch as a function; `lie` says where results are made that may be made anywhere."""

        def branch() -> Any:
            with self._inside():
                results = self.add(closed.jaxpr, closed.consts, operands)
                results = [
                    one if mesh is None else self._landed_on(one, mesh)
                    for one, mesh in zip(results, lie, strict=True)
                ]
                return tuple(
                    self.on(one) if isinstance(one, (Pending, Stacked)) else one for one in results
                )

        branch.__name__ = getattr(closed.jaxpr.debug_info, "func_name", "branch")
        return branch

    def _scan(self, equation: Any, operands: list[Any]) -> Sequence[Any]:
        """Add the iterations of a `scan`, one behind another."""
        unrolled.check_length(equation)
        params = equation.params
        length, body = params["length"], params["jaxpr"]
        at, end = params["num_consts"], params["num_consts"] + params["num_carry"]
        constants, carry = operands[:at], operands[at:end]
        mesh = first_mesh(body.eqns)
        pairs = zip(operands[end:], equation.invars[end:], strict=True)
        xs = [self._elements(value, variable.aval, length, mesh) for value, variable in pairs]
        operands.clear()
        if unrolled.is_of_loop(equation):
            own = with_fewer_residuals(body.jaxpr)
            apart = kept_in_loop(own, end - at)
            self._prepared[id(body.jaxpr)] = own, _last_uses(own), apart, body.jaxpr
        rows: list[Sequence[Any]] = [()] * length
        for number in reversed(range(length)) if params["reverse"] else range(length):
            own = [*constants, *carry, *[x[number] for x in xs]]
            results = self.add(body.jaxpr, body.consts, own)
            carry, rows[number] = results[: end - at], results[end - at :]
        avals = [variable.aval for variable in equation.outvars[end - at :]]
        if not length:
            closed = jax.make_jaxpr(lambda: [jnp.zeros(aval.shape, aval.dtype) for aval in avals])()
            return [*carry, *self.add(closed.jaxpr, closed.consts, [])]
        columns = zip(*rows, strict=True)
        return [*carry, *[Stacked(*pair) for pair in zip(avals, columns, strict=True)]]

    def _elements(self, value: Any, aval: Any, length: int, mesh: OwnMesh | None) -> Sequence[Any]:
        """Return the elements along the leading axis of a value; those of a host value lie on `mesh`."""
        if isinstance(value, Stacked):
            return value.parts

        def elements(array: Any) -> list[Any]:
            return [jax.lax.index_in_dim(array, at, keepdims=False) for at in range(length)]

        return self._computed(elements, [value], [aval], mesh_of(value) or mesh)

    def _stacked(self, value: Stacked) -> Pending:
        """Return the array of the results of a loop."""
        if value.array is None:

            def stacked(*parts: Any) -> list[Any]:
                return [jnp.stack(parts)]

            mesh = mesh_of(value)
            aval = value.aval.update(shape=value.aval.shape[1:])
            (value.array,) = self._computed(stacked, value.parts, [aval] * len(value.parts), mesh)
        return value.array

    def _computed(
        self,
        function: Callable[..., Any],
        operands: Sequence[Any],
        avals: Sequence[Any],
        mesh: OwnMesh | None,
    ) -> list[Pending]:
        """Add a function of JAX to the computations on a mesh; returns its results."""
        jaxpr = jax.make_jaxpr(function)(*avals).jaxpr
        values = dict(zip(jaxpr.invars, operands, strict=True))
        for equation in jaxpr.eqns:
            own = [self._read(values, atom) for atom in equation.invars]
            results = self._on_mesh(equation, own, mesh or default_mesh())
            values.update(zip(equation.outvars, results, strict=True))
        return [values[variable] for variable in jaxpr.outvars]

    @contextmanager
    def _inside(self) -> Iterator[None]:
        """In the block, ordinary equations make computations of their own."""
        before = self._groups, self._landed
        self._groups, self._landed = {}, {}
        try:
            yield
        finally:
            self._groups, self._landed = before


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
