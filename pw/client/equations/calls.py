"""Calls of `pw.jit` functions as equations: what a program looks like while JAX traces it.

JAX traces the function of a program as any other one. A call in it is JAX's own `jit` equation, which
`jax.grad`, `jax.vmap`, `jax.lax.cond` and the others know how to transform. What an equation of JAX has no
place for, such as the mesh, travels in its name: JAX hands names on to the equations that it derives.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.extend

from pw.client.arrays.array import Array
from pw.client.arrays.mesh import OwnMesh
from pw.client.arrays.of_jax import own_mesh, own_or_given, own_sharding
from pw.client.arrays.sharding import OwnSharding, PartitionSpec
from pw.client.arrays.transformed import traces_for_hosts
from pw.client.computations.export import tracing
from pw.client.computations.exported import Alike
from pw.client.equations.island_parts import sharding_of_result
from pw.client.equations.python_calls import mesh_of_python_call
from pw.core.jax_private.tracing import innermost

_thread = threading.local()


@dataclass(frozen=True, eq=False)
class CallKind:
    """A kind of calls of one function: what its equations do not say."""

    name: str
    mesh: OwnMesh
    check_nans: bool
    arguments: Any
    """Tree of the arguments."""
    avals: tuple[Any, ...]
    """Abstract values of the leaves of the arguments."""
    alike: Alike | None
    """Key of the calls that have the same module; None for a function of JAX."""
    body: list[Any] = field(default_factory=list)
    """The jaxpr of its equations, until JAX transforms them."""
    traced: dict[Any, Any] = field(default_factory=dict)
    """Computations of its equations, by `pw.client.programs.placing.place`."""


class EquationName(str):
    """The name of an equation that is a call. JAX keeps names for ever, so it does not hold the kind."""

    kind: weakref.ref[CallKind]


def equation_name(kind: CallKind) -> EquationName:
    """Return the name of equations for calls of a kind."""
    name = EquationName(kind.name)
    name.kind = weakref.ref(kind)
    return name


def kind_of(equation: Any) -> CallKind | None:
    """Return what an equation calls; None if it is no call of a `pw.jit` function."""
    if equation.primitive.name != "jit":
        return None
    kind = getattr(equation.params["name"], "kind", None)
    return None if kind is None else kind()


def mesh_of_call(equation: Any) -> OwnMesh | None:
    """Return where a `pw.jit` function or a host function runs; None if an equation is no call of one."""
    kind = kind_of(equation)
    return mesh_of_python_call(equation) if kind is None else kind.mesh


def bound(
    kind: CallKind,
    function: Callable[..., Any],
    shardings: Sequence[OwnSharding | PartitionSpec | None],
    out_shardings: Any,
    donated: Sequence[int],
) -> Callable[..., Any]:
    """Return a function of leaves whose calls under a trace are equations of this kind.

    Args:
        kind: kind of the calls.
        function: function of the arguments in their tree.
        shardings: sharding that the user asks for, for each leaf.
        out_shardings: shardings that the user asks for, a tree prefix of the results.
        donated: numbers of the leaves whose memory may be reused.
    """

    def flat(*leaves: Any) -> Any:
        args, kwargs = jax.tree_util.tree_unflatten(kind.arguments, leaves)
        with tracing(kind.mesh):
            return function(*args, **kwargs)

    def abstract(wanted: Any) -> Any:
        if isinstance(wanted, PartitionSpec):
            wanted = OwnSharding(kind.mesh, wanted)
        return None if wanted is None else own_or_given(wanted).abstract()

    flat.__name__ = equation_name(kind)
    function_ = jax.jit(
        flat,
        in_shardings=tuple(map(abstract, shardings)),
        out_shardings=jax.tree_util.tree_map(
            abstract, out_shardings, is_leaf=lambda entry: isinstance(entry, PartitionSpec)
        ),
        donate_argnums=tuple(donated),
    )

    with of_all_programs():
        closed, shapes = jax.make_jaxpr(function_, return_shape=True)(*kind.avals)
    # JAX's way to this equation takes three times as long.
    (equation,) = closed.eqns
    assert equation.invars == closed.jaxpr.invars
    assert equation.outvars == closed.jaxpr.outvars
    tree = jax.tree_util.tree_structure(shapes)
    kind.body.append(equation.params["jaxpr"])

    def call(*leaves: Any) -> Any:
        program = program_trace()
        if program is not None:
            program.kinds.append(kind)
        results = equation.primitive.bind(*leaves, **equation.params)
        return jax.tree_util.tree_unflatten(tree, results)

    return call


_which = jax.make_user_context(default_value=0)
"""The number of the program that is traced, for JAX's caches: a function may mean another mesh in each."""
_numbers = itertools.count(1)


class ProgramTrace:
    """A program while JAX traces it: where its values lie, as far as that is known by then."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.number = next(_numbers)
        self.kinds: list[CallKind] = []
        """Kinds of the calls so far; their functions may be gone before the program is placed."""
        self.unbounded: list[str] = []
        """Names of the bodies of loops without a bound, which have no gradient in reverse."""
        self._lies: dict[int, tuple[OwnSharding | None, Any]] = {}
        """The shardings of values by their identity, and the values, which have to stay."""
        self._alike: dict[int, tuple[Any, Any]] = {}
        """Pairs of a value and another that lies as it does, by the identity of the second."""
        self._meshes: dict[int, tuple[list[OwnMesh | None], Any]] = {}
        """Meshes of the results of equations, by the identity of the equation."""
        self.laid: dict[int, tuple[list[OwnSharding | None], Any]] = {}
        """Shardings of results, by the identity of the equation (`pw.client.programs.placing.shardings`)."""

    def say(self, value: Any, sharding: OwnSharding | None) -> None:
        """Say where an argument of the program lies."""
        self._lies[id(innermost(value))] = sharding, value

    def say_alike(self, value: Any, other: Any) -> None:
        """Say that an argument of a function in the program lies as another value."""
        if other is not value:
            self._alike[id(innermost(value))] = other, value

    def alike(self, value: Any) -> Any:
        """Return the value of the program that lies as this one: itself, unless something else was said."""
        while (pair := self._alike.get(id(innermost(value)))) is not None:
            value = pair[0]
        return value

    def sharding_of(self, value: Any) -> OwnSharding | None:
        """Return the sharding of an argument of the program; None for other values."""
        if isinstance(value, Array):
            return value._type.sharding
        return self._lies.get(id(innermost(value)), (None, None))[0]

    def mesh_of(self, value: Any) -> OwnMesh | None:
        """Return the mesh of a value; None for a host value."""
        value = self.alike(value)
        sharding = self.sharding_of(value)
        if sharding is not None:
            return sharding.mesh
        producer = self.producer_of(value)
        if producer is None:
            return None
        equation, at = producer
        left = self._meshes.get(id(equation))
        if left is None:
            operands = [self.mesh_of(operand) for operand in equation.in_tracers]
            left = self._meshes[id(equation)] = meshes_of_results(equation, operands), equation
        return left[0][at]

    def producer_of(self, value: Any) -> tuple[Any, int] | None:
        """Return the equation that makes a value, and the number of the result; None for other values."""
        value = innermost(value)
        equation = getattr(value, "parent", None)
        return None if equation is None else (equation, equation.outvars.index(value.val))


def meshes_of_results(equation: Any, operands: Sequence[OwnMesh | None]) -> list[OwnMesh | None]:
    """Return where an equation leaves its results, of the meshes of its operands."""
    params, results = equation.params, equation.outvars
    mesh = mesh_of_call(equation)
    if mesh is not None:
        return [mesh] * len(results)
    if equation.primitive.name == "device_put":
        pairs = zip(map(own_sharding, params["devices"]), operands, strict=True)
        return [own if to is None else to.mesh for to, own in pairs]
    named = meshes_named_by(equation)
    if named:
        return [next(iter(named))] * len(results)
    joining = sharding_of_result(equation)
    if joining is not None:
        return [None if sharding is None else sharding.mesh for sharding in joining]
    first = next((mesh for mesh in operands if mesh is not None), None)
    body = params.get("jaxpr") or params.get("call_jaxpr")
    if "branches" in params:
        body, operands = params["branches"][-1], operands[1:]
    elif "body_jaxpr" in params:
        body, operands = params["body_jaxpr"], operands[params["cond_nconsts"] :]
    if isinstance(body, jax.extend.core.ClosedJaxpr):
        body = body.jaxpr
    if not isinstance(body, jax.extend.core.Jaxpr) or len(body.invars) != len(operands):
        return [first] * len(results)
    own = meshes_of_body(body, operands)
    return [mesh or first for mesh in own[: len(results)]] + [first] * (len(results) - len(own))


def meshes_of_body(body: Any, arguments: Sequence[OwnMesh | None]) -> list[OwnMesh | None]:
    """Return where a jaxpr leaves its results, of the meshes of its arguments; None for host values."""
    meshes: dict[Any, OwnMesh | None] = dict(zip(body.invars, arguments, strict=True))
    for inner in body.eqns:
        own = [None if _is_literal(atom) else meshes.get(atom) for atom in inner.invars]
        meshes.update(zip(inner.outvars, meshes_of_results(inner, own), strict=True))
    return [None if _is_literal(atom) else meshes.get(atom) for atom in body.outvars]


def meshes_named_by(equation: Any) -> set[OwnMesh]:
    """Return the meshes of virtual devices that an equation of JAX names itself, not in its bodies."""
    params = equation.params
    if equation.primitive.name == "shard_map":
        mesh = own_mesh(params["mesh"])
        return set() if mesh is None else {mesh}
    named = [*params.get("devices", ()), params.get("sharding")]
    if equation.primitive.name == "jit":
        named = [*params["in_shardings"], *params["out_shardings"]]
    return {own.mesh for own in map(own_sharding, named) if own is not None}


def _is_literal(atom: Any) -> bool:
    return isinstance(atom, jax.extend.core.Literal)


def of_all_programs() -> Any:
    """Return a context in which JAX's caches serve all programs."""
    return _which(0)


def program_trace() -> ProgramTrace | None:
    """Return the program that JAX traces in this thread, if any, and outside of its `pw.jit` functions."""
    return getattr(_thread, "trace", None) if traces_for_hosts() is None else None


@contextlib.contextmanager
def tracing_program(trace: ProgramTrace) -> Iterator[None]:
    """In the block, JAX traces this program."""
    before = program_trace()
    _thread.trace = trace
    try:
        with _which(trace.number):
            yield
    finally:
        _thread.trace = before
