"""Types of arrays and of host values: the keys of traces.

A call finds its trace by the types of its arguments. Every array has an interned `ArrayType` that
compares by identity; a host value has a signature that is cheap to compute. JAX's configuration is
part of the key too, because traces depend on it.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
import numpy as np

from pw.client.arrays.island_parts import IslandPart, parts_of
from pw.client.arrays.operators import Operators
from pw.client.arrays.sharding import OwnSharding, space_of
from pw.core.errors import ArgumentError
from pw.core.jax_private.tracing import debug_nans, trace_context
from pw.core.sharding import ArraySpec, dtype_of


def tracing_configuration() -> Hashable:
    """Return the part of JAX's configuration that traces depend on, with thread-local overrides."""
    return (trace_context(), True) if debug_nans.value else trace_context()


def checks_nans() -> bool:
    """Whether JAX's configuration asks for results without NaNs (`jax_debug_nans`)."""
    return bool(debug_nans.value)


AVALS_KEPT = 4096
_SCALARS = (bool, int, float, complex)


@dataclass(slots=True, weakref_slot=True, eq=False, repr=False)
class ArrayType:
    """Shape, dtype and sharding of a logical array; equal types are one object.

    Users and traces see `aval`, the runtime sees `spec`: a typed PRNG key is an array of unsigned
    integers there, whose extra dimensions are not split.
    """

    aval: Any
    sharding: OwnSharding
    spec: ArraySpec
    key_impl: str | None
    numpy_dtype: np.dtype[Any]
    size_bytes: int
    islands: tuple[IslandPart, ...] = ()
    """Part of the array on each island, if the mesh joins islands."""
    parts: tuple[ArrayType, ...] = ()
    """Type of the part on each island, if the mesh joins islands."""

    @staticmethod
    def of(aval: Any, sharding: OwnSharding) -> ArrayType:
        """Return the type of arrays of `aval` with `sharding`. Raises ShardingError if there is none."""
        key = (tuple(aval.shape), aval.dtype, bool(aval.weak_type), sharding)
        types = sharding.mesh.slice.types
        with _interning:
            type_: ArrayType | None = types.get(key)
            if type_ is None:
                type_ = types[key] = _new_type(aval, sharding)
            return type_

    def with_sharding(self, sharding: OwnSharding) -> ArrayType:
        """Return the type of the same values with `sharding`."""
        return ArrayType.of(self.aval, sharding)

    def __repr__(self) -> str:
        return f"{self.aval.str_short()} on {self.sharding}"


_interning = threading.RLock()


def _new_type(aval: Any, sharding: OwnSharding) -> ArrayType:
    shape = tuple(aval.shape)
    sharding.core.check(shape)
    space, is_weak = space_of(sharding.memory), bool(aval.weak_type)
    aval = jax.core.ShapedArray(shape, aval.dtype, weak_type=is_weak, memory_space=space)
    key_impl = key_impl_of(aval.dtype)
    if key_impl is None:
        name = str(aval.dtype.name)
    else:
        data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(shape, aval.dtype))
        shape, name = tuple(data.shape), str(data.dtype.name)
    spec = ArraySpec(shape, name, sharding.core, sharding.placement, sharding.memory)
    numpy_dtype = dtype_of(name)
    size_bytes = math.prod(shape) * numpy_dtype.itemsize
    islands = parts_of(sharding, aval.shape) if sharding.mesh.parts else ()
    parts = tuple(ArrayType.of(aval.update(shape=one.shape), one.sharding) for one in islands)
    return ArrayType(aval, sharding, spec, key_impl, numpy_dtype, size_bytes, islands, parts)


def is_key(dtype: Any) -> bool:
    """Whether `dtype` is one of typed PRNG keys."""
    return bool(jax.numpy.issubdtype(dtype, jax.dtypes.prng_key))


def key_impl_of(dtype: Any) -> str | None:
    """Name of the generator of keys of `dtype`; None for plain numbers."""
    return str(dtype._impl.name) if is_key(dtype) else None


def signature_of(leaf: Any) -> Any:
    """Return a cheap description of a host value that determines its aval.

    Raises:
        ArgumentError: a computation cannot take the value.
    """
    kind = type(leaf)
    if kind in _SCALARS:
        return kind
    if isinstance(leaf, (np.ndarray, np.generic)):
        return (leaf.shape, leaf.dtype)
    if isinstance(leaf, jax.Array):
        return _without_sharding(leaf.aval)
    for scalar in _SCALARS:
        if isinstance(leaf, scalar):
            return scalar
    raise ArgumentError(
        f"{leaf!r} of type {kind.__name__} is neither an array nor a number; computations take pw "
        "arrays, jax arrays, numpy arrays and Python numbers. Mark it with static_argnums or "
        "static_argnames if the function depends on it while it is traced"
    )


@lru_cache(maxsize=AVALS_KEPT)
def _without_sharding(aval: Any) -> Any:
    return jax.core.ShapedArray(
        aval.shape, aval.dtype, weak_type=aval.weak_type, memory_space=aval.memory_space
    )


def aval_of(signature: Any) -> Any:
    """Return the abstract value of a signature, under JAX's present configuration."""
    if isinstance(signature, ArrayType):
        return signature.aval
    if isinstance(signature, type):
        return jax.typeof(signature())
    if isinstance(signature, tuple):
        shape, dtype = signature
        try:
            narrowed = jax.typeof(np.zeros((), dtype)).dtype
        except TypeError as error:
            raise ArgumentError(
                f"arrays of dtype {dtype} cannot be computed with: {error}"
            ) from None
        return jax.core.ShapedArray(shape, narrowed)
    return signature


def host_value(leaf: Any, type_: ArrayType) -> np.ndarray[Any, Any]:
    """Return `leaf` as a numpy array in C order, with the dtype of `type_`."""
    if type_.key_impl is not None:
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf, dtype=type_.numpy_dtype, order="C")


def describe_leaf(arguments: tuple[Any, Mapping[str, Any]], index: int) -> str:
    """Return the user's name of the `index`-th leaf of a call's arguments."""
    paths = jax.tree_util.tree_flatten_with_path(arguments)[0]
    position, *rest = paths[index][0][1:]
    name = getattr(position, "key", None)
    first = f"argument {position.idx}" if name is None else f"argument {name!r}"
    return first + jax.tree_util.keystr(tuple(rest))


class Statics:
    """Which parameters of a function are static or donated, by position and by name.

    JAX's rules: naming a positional parameter one way names it the other way too.
    """

    def __init__(
        self,
        signature: Any,
        static_argnums: int | Sequence[int] | None,
        static_argnames: str | Sequence[str] | None,
    ) -> None:
        self.nums, self.names = both_ways(signature, static_argnums, static_argnames)

    def __bool__(self) -> bool:
        return bool(self.nums or self.names)

    def dynamic(self, count: int) -> list[int]:
        """Positions of the arguments that are not static, in a call with `count` positional ones."""
        static = {num if num >= 0 else num + count for num in self.nums}
        return [num for num in range(count) if num not in static]

    def split(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[tuple[Any, ...], dict[str, Any]], tuple[Any, ...]]:
        """Replace static arguments by None. Returns the other arguments, and the key of the static ones."""
        dynamic_nums = set(self.dynamic(len(args)))
        statics: list[Any] = [
            (num, value) for num, value in enumerate(args) if num not in dynamic_nums
        ]
        statics += [(name, value) for name, value in sorted(kwargs.items()) if name in self.names]
        for where, value in statics:
            if any(isinstance(leaf, Operators) for leaf in jax.tree_util.tree_leaves(value)):
                raise ArgumentError(
                    f"static argument {where!r} has an array in it; static arguments are part of what "
                    "is compiled, so pass a number, int(x), or do not make the argument static"
                )
            try:
                hash(value)
            except TypeError:
                raise ArgumentError(
                    f"static argument {where!r} is {value!r}, which cannot be hashed; static arguments "
                    "are part of the key of a trace, so use a tuple or a frozen dataclass, or pass "
                    "it as an array"
                ) from None
        dynamic = tuple(value if num in dynamic_nums else None for num, value in enumerate(args))
        rest = {name: value for name, value in kwargs.items() if name not in self.names}
        return (dynamic, rest), tuple((where, type(value), value) for where, value in statics)

    @staticmethod
    def restore(
        arguments: tuple[tuple[Any, ...], dict[str, Any]], statics: tuple[Any, ...]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Put static arguments back where `split` took them from."""
        if not statics:
            return arguments
        positional, named = list(arguments[0]), dict(arguments[1])
        for where, _, value in statics:
            if isinstance(where, int):
                positional[where] = value
            else:
                named[where] = value
        return tuple(positional), named


def both_ways(
    signature: Any, nums: int | Sequence[int] | None, names: str | Sequence[str] | None
) -> tuple[frozenset[int], frozenset[str]]:
    """Positions and names of the same parameters, each inferred from the other."""
    positions = {nums} if isinstance(nums, int) else set(nums or ())
    named = {names} if isinstance(names, str) else set(names or ())
    if signature is not None:
        parameters = list(signature.parameters.values())
        positional = [
            p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        ]
        numbers = set(positions)
        positions |= {index for index, p in enumerate(positional) if p.name in named}
        for num in numbers:
            index = num if num >= 0 else num + len(positional)
            if 0 <= index < len(positional):
                named.add(positional[index].name)
        unknown = named - {p.name for p in parameters}
        if unknown and not any(p.kind is p.VAR_KEYWORD for p in parameters):
            raise ValueError(f"the function has no parameters named {sorted(unknown)}")
    return frozenset(positions), frozenset(named)
