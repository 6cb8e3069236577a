"""`JitFunction`: a function that runs on virtual devices.

A call finds its program by the tree of its arguments, their types and JAX's configuration, passes
the ids of its arguments, and returns futures. It takes tens of microseconds and does not wait. The
first call of a kind traces and exports the function in the caller's thread, so errors of the
function are raised there. All calls and programs with the same types share one computation.

Inside `@pw.program` a call becomes a node. In a function that is traced for another `pw.jit` (also
under `jax.grad` or a loop there) the function is simply applied. Under any other JAX
transformation, only shapes are computed (`pw.client.arrays.transformed`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pw.client.arrays.array import Array
from pw.client.arrays.mesh import OwnMesh, default_mesh, distinct_words
from pw.client.arrays.of_jax import given_mesh, own_sharding
from pw.client.arrays.operators import compile_with
from pw.client.arrays.ragged import check_pairs, pairs_of
from pw.client.arrays.sharding import OwnSharding
from pw.client.arrays.signature import (
    ArrayType,
    Statics,
    aval_of,
    checks_nans,
    describe_leaf,
    signature_of,
    tracing_configuration,
)
from pw.client.arrays.transformed import only_shapes, traces_for_hosts
from pw.client.computations.export import Traced
from pw.client.computations.exported import Alike, Call, without_devices
from pw.client.computations.joined import JoinedTraced, trace_on
from pw.client.equations.calls import CallKind, ProgramTrace, bound, of_all_programs, program_trace
from pw.client.equations.counted_rows import with_counts
from pw.client.functions.lowered import Lowered
from pw.client.functions.parameters import Donated, donated_leaves
from pw.client.functions.prefixes import mesh_in, on_mesh, spread
from pw.client.functions.tracebacks import leave_out_runtime
from pw.client.functions.wrapped import P, R, Wrapped, tree_flatten, tree_unflatten
from pw.client.programs.writing.builder import ProgramBuilder
from pw.core.errors import ArgumentError, PlacementError, ShardingError


def signature_of_call(leaves: Sequence[Any]) -> tuple[Any, ...]:
    """Return the types of a call's leaves; the cheapest test first."""
    types = []
    for leaf in leaves:
        types.append(leaf._type if type(leaf) is Array else _signature(leaf))
    return tuple(types)


def _signature(leaf: Any) -> Any:
    leaf_type = type(leaf)
    if leaf_type is float or leaf_type is int:
        return leaf_type
    if leaf_type is np.ndarray:
        return leaf.shape, leaf.dtype
    if isinstance(leaf, Array):
        return leaf._type
    return signature_of(leaf)


def _signature_of_described(leaf: Any) -> Any:
    """Return the type of a leaf that may be a `jax.ShapeDtypeStruct`."""
    if not isinstance(leaf, jax.ShapeDtypeStruct):
        return _signature(leaf)
    aval = jax.core.ShapedArray(leaf.shape, leaf.dtype)
    sharding = own_sharding(leaf.sharding)
    return aval if sharding is None else ArrayType.of(aval, sharding)


class JitFunction(Wrapped[P, R]):
    """A function that runs on virtual devices; made by `pw.jit`."""

    _kind = "pw.jit function"

    def __init__(
        self,
        fun: Callable[P, R],
        mesh: Any,
        in_shardings: Any = None,
        out_shardings: Any = None,
        statics: Statics | None = None,
        donated: Donated = (frozenset(), frozenset()),
        check_nans: bool | None = None,
        timeout: float | None = None,
    ) -> None:
        super().__init__(fun, statics or Statics(None, None, None), timeout)
        self._in_shardings = in_shardings
        self._out_shardings = out_shardings
        self._mesh = mesh_in(in_shardings, out_shardings) if mesh is None else given_mesh(mesh)
        self._donated = donated
        self._check_nans = check_nans
        self._by_types: dict[Any, Traced | JoinedTraced] = {}
        self._by_equation: dict[Any, Any] = {}
        self._tracing = threading.RLock()

    def _under_trace(
        self, args: Any, kwargs: Any, tree: Any, leaves: Sequence[Any], statics: tuple[Any, ...]
    ) -> Any:
        program = program_trace()
        if program is not None:
            return self._bound(program, tree, leaves, statics)
        if traces_for_hosts() is None:
            arguments = tree_unflatten(tree, only_shapes(leaves, self._transformed()))
            args, kwargs = Statics.restore(arguments, statics)
        return self._inlined(*args, **kwargs)

    def _key(self, tree: Any, leaves: Sequence[Any], statics: tuple[Any, ...]) -> Any:
        try:
            signature = signature_of_call(leaves)
        except ArgumentError:
            signature = self._signature_of(tree, leaves)  # names the argument
        mesh = self._mesh or self._mesh_of_call(tree, signature)
        return tree, signature, statics, mesh, tracing_configuration()

    def _signature_of(self, tree: Any, leaves: Sequence[Any]) -> tuple[Any, ...]:
        """Return the types of a call's leaves. Raises ArgumentError, which names the argument."""
        try:
            return signature_of_call(leaves)
        except ArgumentError:
            raise self._bad_argument(tree_unflatten(tree, leaves), leaves) from None

    def lower(self, *args: Any, **kwargs: Any) -> Lowered:
        """Return the lowered function for these arguments, or for `jax.ShapeDtypeStruct`s.

        Raises:
            ArgumentError: an argument is no array or number, nor described as one.
        """
        arguments, statics = self._statics.split(args, kwargs)
        leaves, tree = tree_flatten(arguments)
        signature = tuple([_signature_of_described(leaf) for leaf in leaves])
        mesh = self._mesh or self._mesh_of_call(tree, signature)
        key = (tree, signature, statics, mesh, tracing_configuration())
        try:
            return Lowered(self._trace(key))
        except Exception as error:
            leave_out_runtime(error)
            raise

    def _bound(
        self, program: ProgramTrace, tree: Any, leaves: Sequence[Any], statics: tuple[Any, ...]
    ) -> Any:
        """Add an equation to a program that JAX traces; returns the results in their tree."""
        key = self._key_in(program, tree, leaves, statics)
        call = self._by_equation.get(key)
        if call is None:
            with self._tracing:
                self._forget_closed()
                call = self._by_equation[key] = self._equation(key)
        return call(*with_counts(leaves, tree))

    def _key_in(
        self, program: ProgramTrace, tree: Any, leaves: Sequence[Any], statics: tuple[Any, ...]
    ) -> Any:
        """Return the kind of a call in a program that JAX traces; values have shapes, and no shardings."""
        signature = self._signature_of(tree, leaves)
        mesh = self._mesh or self._mesh_in(program, tree, signature, leaves)
        with of_all_programs():
            configuration = tracing_configuration()
        return tree, tuple(map(aval_of, signature)), statics, mesh, configuration

    def _mesh_in(
        self, program: ProgramTrace, tree: Any, signature: Sequence[Any], leaves: Sequence[Any]
    ) -> OwnMesh:
        """Return the mesh for a call in a program: that of its arguments."""
        types = [
            signature_
            if mesh is None
            else ArrayType.of(aval_of(signature_), OwnSharding.replicated(mesh))
            for leaf, signature_ in zip(leaves, signature, strict=True)
            for mesh in [program.mesh_of(leaf)]
        ]
        return self._mesh_of_call(tree, types)

    def _equation(self, key: Any) -> Callable[..., Any]:
        call = self._call_of(key, "an equation")  # it has no tree of results
        tree, avals, _, mesh, _ = key
        kind = CallKind(self._name, mesh, call.check_nans, tree, avals, call.alike)
        wanted = self._input_shardings(tree, avals, mesh)
        return bound(kind, call.function, wanted, self._asked_out_shardings(), call.donated)

    def _asked_out_shardings(self) -> Any:
        """Return the shardings that the user asks for, a tree prefix of the results."""
        return self._out_shardings

    def _inlined(self, *args: Any, **kwargs: Any) -> Any:
        return self.__wrapped__(*args, **kwargs)

    def _transformed(self) -> str:
        """Return the error text of a call under a JAX transformation outside of pw."""
        name = self._name if self._name.isidentifier() else "f"
        return (
            f"{self!r} was called by a function that JAX transforms outside of pw.jit, which would compute "
            f"in this process. Transform it inside: pw.jit(jax.grad({name})), pw.jit(jax.vmap({name})), or, "
            f"for a loop, pw.jit(lambda carry, xs: jax.lax.scan({name}, carry, xs)); pw.grad differentiates "
            "functions on several slices"
        )

    def _bad_argument(self, arguments: Any, leaves: Sequence[Any]) -> ArgumentError:
        for index, leaf in enumerate(leaves):
            try:
                signature_of_call([leaf])
            except ArgumentError as error:
                return ArgumentError(f"{self._name}: {describe_leaf(arguments, index)}: {error}")
        raise AssertionError("no argument is wrong after all")

    def _recorded(self, key: Any) -> Any:
        _, signature, _, _, _ = key
        builder = ProgramBuilder(self._name, self._timeout_s)
        leaves = [builder.leaf(index, leaf) for index, leaf in enumerate(signature)]
        traced = self._trace(key)
        return builder.finish(builder.call(traced, leaves), traced.tree)

    def _mesh_of_call(self, tree: Any, signature: Sequence[Any]) -> OwnMesh:
        mesh: OwnMesh | None = None
        for leaf in signature:
            if isinstance(leaf, ArrayType):
                own = leaf.sharding.mesh
                if own is not mesh and mesh is not None and own != mesh:
                    raise PlacementError(
                        f"the arguments of {self._name!r} lie on different devices "
                        f"({' and '.join(distinct_words(mesh, own))}) and it names none to run on; say "
                        "where with pw.jit(..., devices=) or mesh=, and the arguments move there by themselves"
                    )
                mesh = own
        return mesh or default_mesh()

    # --- tracing -------------------------------------------------------------------------------------

    def _trace(self, key: Any) -> Traced | JoinedTraced:
        with self._tracing:
            call = self._call_of(key, "alone")
            tree, _, *rest = key
            types = tree, call.types, *rest
            traced = self._by_types.get(types)
            if traced is None:
                self._forget_closed()
                traced = self._by_types[types] = trace_on(call)
            return traced

    def _how(self) -> Any:
        """Return the options that are a part of the function's module, without devices."""
        return without_devices(self._out_shardings)

    def _call_of(self, key: Any, way: str) -> Call:
        """Return what to trace for a kind of calls; `way` says how they are made. Raises ShardingError."""
        tree, signature, statics, mesh, configuration = key
        avals = [aval_of(leaf) for leaf in signature]
        check_pairs(pairs_of(tree), avals, self._name)
        wanted = self._input_shardings(tree, avals, mesh)
        types = []
        for index, (leaf, aval, sharding) in enumerate(zip(signature, avals, wanted, strict=True)):
            try:
                types.append(ArrayType.of(aval, self._input_sharding(leaf, sharding, mesh)))
            except ShardingError as error:
                arguments = tree_unflatten(tree, range(len(avals)))
                where = describe_leaf(arguments, index)
                raise ShardingError(f"{self._name}: {where}: {error}") from None
        check_nans = checks_nans() if self._check_nans is None else self._check_nans
        how = way, type(self), self._name, tree, statics, configuration, check_nans, self._how()
        return Call(
            self._named(self._body(tree, statics, mesh, types)),
            self._name,
            mesh,
            tuple(types),
            lambda out, results: self._output_shardings(out, results, mesh, types),
            tree,
            tuple(donated_leaves(tree, self._donated)),
            check_nans,
            Alike(self.__wrapped__, how),
        )

    def _forget_closed(self) -> None:
        for stale in [k for k in self._by_types if not k[3].runtime.alive]:
            del self._by_types[stale]
        for stale in [k for k in self._by_equation if not k[3].runtime.alive]:
            del self._by_equation[stale]

    def _flat(self, tree: Any, statics: tuple[Any, ...]) -> Callable[..., Any]:
        """Return the user's function as a function of leaves."""

        def flat(*leaves: Any) -> Any:
            args, kwargs = Statics.restore(tree_unflatten(tree, leaves), statics)
            return self.__wrapped__(*args, **kwargs)

        return flat

    def _named(self, body: Callable[..., Any]) -> Callable[..., Any]:
        """Return `body` as a function of the call's arguments, with the user's name for JAX's errors."""

        def named(*args: Any, **kwargs: Any) -> Any:
            return body(*jax.tree_util.tree_leaves((args, kwargs)))

        named.__name__, named.__wrapped__ = self._name, self.__wrapped__  # type: ignore[attr-defined]
        return named

    def _body(
        self, tree: Any, statics: tuple[Any, ...], mesh: OwnMesh, inputs: Sequence[ArrayType]
    ) -> Callable[..., Any]:
        """Return the function to trace."""
        return self._flat(tree, statics)

    def _by_leaf(self, wanted: Any, named: Any, tree: Any, count: int, what: str) -> list[Any]:
        """Spread a tree prefix of the positional arguments over all leaves; `named` for keywords."""
        args, kwargs = tree_unflatten(tree, range(count))
        if isinstance(wanted, (tuple, list)):
            dynamic = self._statics.dynamic(len(args))
            if len(wanted) == len(dynamic):
                by_position = dict(zip(dynamic, wanted, strict=True))
                wanted = tuple(by_position.get(num) for num in range(len(args)))
            elif len(wanted) != len(args):
                raise ArgumentError(
                    f"{what} of {self._name!r} has {len(wanted)} entries, but the call has "
                    f"{len(dynamic)} positional arguments"
                )
            wanted = tuple(wanted)
        keywords = len(jax.tree_util.tree_leaves(kwargs))
        return [*spread(wanted, args, f"{what} of {self._name!r}"), *([named] * keywords)]

    def _input_shardings(self, tree: Any, avals: Sequence[Any], mesh: OwnMesh) -> list[Any]:
        """Return the user's sharding of every leaf, or None."""
        return self._by_leaf(self._in_shardings, None, tree, len(avals), "in_shardings")

    def _input_sharding(self, leaf: Any, wanted: Any, mesh: OwnMesh) -> OwnSharding:
        own = leaf.sharding if isinstance(leaf, ArrayType) else None
        if wanted is not None:
            asked = on_mesh(mesh, wanted)
            if own is not None and own.memory_kind != asked.memory_kind:
                raise ShardingError(
                    f"it lies in the memory {own.memory_kind!r}, and in_shardings says {asked.memory_kind!r}; "
                    "as jax.jit, a call moves no argument between memories. Move it first, with "
                    f"pw.put(x, x.sharding.with_memory_kind({asked.memory_kind!r})), or in the function, with "
                    "jax.device_put"
                )
            return asked
        if own is not None and own.mesh == mesh:
            return own
        replicated = OwnSharding.replicated(mesh)
        return replicated if own is None else replicated.with_memory_kind(own.memory_kind)

    def _output_shardings(
        self, tree: Any, avals: Sequence[Any], mesh: OwnMesh, inputs: Sequence[ArrayType]
    ) -> Sequence[OwnSharding | None]:
        numbers = tree_unflatten(tree, range(len(avals)))
        wanted = spread(self._out_shardings, numbers, f"out_shardings of {self._name!r}")
        return [None if sharding is None else on_mesh(mesh, sharding) for sharding in wanted]


class _Operator(JitFunction[..., Any]):
    """One of Python's operators on arrays."""

    def _transformed(self) -> str:
        return (
            f"{self._name!r} of a pw.Array was called in a function that JAX transforms outside of pw.jit, "
            "which would compute in this process. Transform it inside, as in pw.jit(jax.grad(f)), or "
            "take the value of the array with np.asarray(x)"
        )

    def _mesh_of_call(self, tree: Any, signature: Sequence[Any]) -> OwnMesh:
        for leaf in signature:
            if isinstance(leaf, ArrayType):
                return leaf.sharding.mesh
        return default_mesh()


def _operator(named: str | Callable[..., Any]) -> JitFunction[..., Any]:
    """Compile a function, or the one of `jax.numpy` with this name, as an operator."""
    if not isinstance(named, str):
        return _Operator(named, None)
    function: Any = getattr(jnp, named)

    def apply(*operands: Any) -> Any:
        return function(*operands)

    apply.__name__ = named
    return _Operator(apply, None)


compile_with(_operator)
