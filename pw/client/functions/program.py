"""`pw.program`: a block of Python that calls many computations becomes one dataflow program.

The function runs once, on tracers; every call of a `pw.jit` or `pw.pmap` function in it is a node,
and later calls send one message, ahead of the data. Leaves of its arguments that are neither arrays
nor numbers, and static arguments, are part of the trace's key.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypedDict, Unpack, overload

import jax

from pw.client.arrays import jax_arrays
from pw.client.arrays.array import Array
from pw.client.arrays.devices import VirtualDevice
from pw.client.arrays.mesh import default_mesh
from pw.client.arrays.sharding import OwnSharding
from pw.client.arrays.signature import (
    ArrayType,
    Statics,
    aval_of,
    both_ways,
    describe_leaf,
    signature_of,
    tracing_configuration,
)
from pw.client.computations.like_arguments import like_arguments
from pw.client.connection import current
from pw.client.equations.calls import ProgramTrace, tracing_program
from pw.client.equations.jax_calls import with_calls
from pw.client.functions.function import signature_of_call
from pw.client.functions.lowered import LoweredProgram
from pw.client.functions.parameters import Donated, donated_leaves, parameters_of
from pw.client.functions.tracebacks import leave_out_runtime
from pw.client.functions.traced_errors import check_constants, in_words_of, naming_mapped_axes
from pw.client.functions.wrapped import P, R, Wrapped, tree_flatten, tree_unflatten
from pw.client.keywords import checks_keywords
from pw.client.programs.placing.place import Placement
from pw.client.programs.writing.builder import ProgramBuilder
from pw.client.programs.writing.launch import Launch
from pw.client.programs.writing.values import PlacedValue
from pw.core.errors import ArgumentError, ArrayDeleted
from pw.core.jax_private.tables import forget_devices


class _StaticLeaf:
    """A leaf that is no array: part of the trace's key."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, _StaticLeaf)
            and type(self.value) is type(other.value)
            and bool(self.value == other.value)
        )

    def __hash__(self) -> int:
        return hash((type(self.value), self.value))


def _leaf_signature(leaf: Any) -> Any:
    if isinstance(leaf, Array):
        return leaf._type
    try:
        return signature_of(leaf)
    except ArgumentError:
        try:
            hash(leaf)
        except TypeError:
            raise ArgumentError(
                f"{leaf!r} of type {type(leaf).__name__} is neither an array nor a number, and cannot "
                "be hashed, so a program cannot be traced for it"
            ) from None
        return _StaticLeaf(leaf)


class ProgramFunction(Wrapped[P, R]):
    """A function that runs as one program; made by `pw.program`."""

    _kind = "pw.program"

    def __init__(
        self,
        fun: Callable[P, R],
        statics: Statics,
        timeout: float | None,
        donated: Donated = (frozenset(), frozenset()),
    ) -> None:
        super().__init__(fun, statics, timeout)
        self._donated = donated

    def _under_trace(
        self, args: Any, kwargs: Any, tree: Any, leaves: Sequence[Any], statics: tuple[Any, ...]
    ) -> Any:
        return self.__wrapped__(*args, **kwargs)

    def _key(self, tree: Any, leaves: Sequence[Any], statics: tuple[Any, ...]) -> Any:
        signature = tuple(
            [leaf._type if type(leaf) is Array else _leaf_signature(leaf) for leaf in leaves]
        )
        return tree, signature, statics, current.runtime(), tracing_configuration()

    def lower(self, *args: Any, **kwargs: Any) -> LoweredProgram:
        """Return the program for these arguments, to print what the passes make of it. Nothing is sent."""
        arguments, statics = self._statics.split(args, kwargs)
        leaves, tree = tree_flatten(arguments)
        signature = tuple([_leaf_signature(leaf) for leaf in jax_arrays.from_jax(leaves)])
        try:
            return LoweredProgram(*self._placed(tree, signature, statics))
        except Exception as error:
            leave_out_runtime(error)
            raise

    def _recorded(self, key: Any) -> Launch:
        tree, signature, statics, _, _ = key
        _, builder, outputs, out_tree = self._placed(tree, signature, statics)
        return builder.finish(outputs, out_tree)

    def _placed(
        self, tree: Any, signature: Sequence[Any], statics: tuple[Any, ...]
    ) -> tuple[Any, ProgramBuilder, list[PlacedValue], Any]:
        """Return the jaxpr, the program that it became, its results, and their tree."""
        builder = ProgramBuilder(self._name, self._timeout_s)
        arguments = tree_unflatten(tree, range(len(signature)))
        builder.describe = partial(describe_leaf, arguments)
        program = ProgramTrace(self._name)
        out_tree = None

        def flat(*values: Any) -> list[Any]:
            nonlocal out_tree
            rest = iter(values)
            leaves = []
            for leaf in signature:
                leaves.append(leaf.value if isinstance(leaf, _StaticLeaf) else next(rest))
                if isinstance(leaf, ArrayType):
                    program.say(leaves[-1], leaf.sharding)
            args, kwargs = Statics.restore(tree_unflatten(tree, leaves), statics)
            with naming_mapped_axes():
                results, out_tree = tree_flatten(self.__wrapped__(*args, **kwargs))
            for result in results:
                self._check_result(result)
            return results

        arrays = [one for one in signature if not isinstance(one, _StaticLeaf)]
        with tracing_program(program), in_words_of(self._name):
            closed = jax.make_jaxpr(flat)(*map(aval_of, arrays))
        check_constants(self._name, closed.consts)
        before, closed = closed, with_calls(closed, program.kinds)
        if closed is not before:
            forget_devices(VirtualDevice)
        placement = Placement(builder)
        leaves = [
            leaf if isinstance(leaf, _StaticLeaf) else builder.leaf(index, leaf)
            for index, leaf in enumerate(signature)
        ]
        values = [leaf for leaf in leaves if isinstance(leaf, PlacedValue)]
        results = placement.add(closed.jaxpr, closed.consts, values)
        none: list[OwnSharding | None] = [None] * len(results)
        likes = like_arguments(closed.jaxpr, tree, signature, out_tree, none)
        pairs = zip(results, likes, strict=True)
        outputs = [self._result(builder, placement.result(*pair)) for pair in pairs]
        self._give(builder, tree, leaves)
        return closed, builder, outputs, out_tree

    def _give(self, builder: ProgramBuilder, tree: Any, leaves: Sequence[Any]) -> None:
        """Donate arguments that no computation has taken."""
        for at in donated_leaves(tree, self._donated):
            if isinstance(leaves[at], PlacedValue):
                with suppress(ArrayDeleted):
                    builder.give(leaves[at], self._name)

    def _check_result(self, result: Any) -> None:
        try:
            signature_of_call([result])
        except ArgumentError:
            raise ArgumentError(
                f"the program {self._name!r} returns {result!r} of type {type(result).__name__}; "
                "programs return trees of arrays and numbers"
            ) from None

    def _result(self, builder: ProgramBuilder, value: PlacedValue) -> PlacedValue:
        if value.sharding is not None:
            return value
        # a host value that no computation has placed
        type_ = ArrayType.of(value.aval, OwnSharding.replicated(default_mesh()))
        return PlacedValue(value.aval, type_, builder.place(value, type_, "return"), None)


class _Options(TypedDict, total=False):
    static_argnums: int | Sequence[int] | None
    static_argnames: str | Sequence[str] | None
    donate_argnums: int | Sequence[int] | None
    donate_argnames: str | Sequence[str] | None
    timeout: float | None


@overload
def program(fun: Callable[P, R], **options: Unpack[_Options]) -> ProgramFunction[P, R]: ...


@overload
def program(
    fun: None = None, **options: Unpack[_Options]
) -> Callable[[Callable[P, R]], ProgramFunction[P, R]]: ...


@checks_keywords
def program(
    fun: Callable[..., Any] | None = None,
    *,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Sequence[str] | None = None,
    donate_argnums: int | Sequence[int] | None = None,
    donate_argnames: str | Sequence[str] | None = None,
    timeout: float | None = None,
) -> Any:
    """Make one program of a function that calls several `pw.jit` or `pw.pmap` functions.

    It is traced once for each kind of arguments (tree, shapes, dtypes, shardings, static values); a
    call then costs one message, however many computations there are. Its results are `pw.Array`s, also of
    arguments that are `jax.Array`s on virtual devices (`pw.jax.to_jax` makes such arrays of them).

    Args:
        fun: a function of trees of arrays and numbers; other leaves (strings, None, functions) are
            static. It may use Python freely, except for decisions on the values of arrays.
        static_argnums, static_argnames: numbers it decides on, such as a count of steps.
        donate_argnums, donate_argnames: arguments whose arrays are gone after a call; their memory is free
            when the program has used them.
        timeout: seconds that a run may take once its first part is launched, as for `pw.jit`; those of the
            functions it calls do not count.

    Raises:
        TracerError: at the first call, a value was needed that does not exist while tracing.
        ArrayDeleted: at the first call, a value is used after it was donated.
    """

    def wrap(fun: Callable[..., Any]) -> ProgramFunction[..., Any]:
        if not callable(fun):
            raise TypeError(f"pw.program takes a function, not {fun!r}")
        parameters = parameters_of(fun)
        statics = Statics(parameters, static_argnums, static_argnames)
        donated = both_ways(parameters, donate_argnums, donate_argnames)
        return ProgramFunction(fun, statics, timeout, donated=donated)

    return wrap if fun is None else wrap(fun)
