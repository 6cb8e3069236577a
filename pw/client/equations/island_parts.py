"""Takes a value over several islands apart, and puts one together, as equations that JAX differentiates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching

from pw.client.arrays.island_parts import parts_of
from pw.client.arrays.sharding import OwnSharding
from pw.client.arrays.signature import ArrayType
from pw.core.errors import TracingError


def apart(value: Any, sharding: OwnSharding) -> list[Any]:
    """Return each island's part of a value of a program that gets a sharding over several islands."""
    parts: list[Any] = _apart.bind(value, sharding=sharding)
    return parts


def together(parts: Sequence[Any], sharding: OwnSharding, shape: Sequence[int]) -> Any:
    """Return the value of a program with these parts, one of each island, which has `shape`."""
    return _together.bind(*parts, sharding=sharding, shape=tuple(shape))


def is_apart(equation: Any) -> bool:
    """Whether an equation takes a value apart."""
    return equation.primitive is _apart


def is_together(equation: Any) -> bool:
    """Whether an equation puts a value together."""
    return equation.primitive is _together


def sharding_of_result(equation: Any) -> list[OwnSharding | None] | None:
    """Return how the results of one of these equations lie; None for other equations."""
    if not (is_apart(equation) or is_together(equation)):
        return None
    sharding: OwnSharding = equation.params["sharding"]
    if is_together(equation):
        return [sharding]
    return [part.sharding for part in parts_of(sharding, equation.invars[0].aval.shape)]


def _avals_of_parts(aval: Any, *, sharding: OwnSharding) -> list[Any]:
    return [part.aval for part in ArrayType.of(aval, sharding).parts]


def _aval_of_parts(*parts: Any, sharding: OwnSharding, shape: tuple[int, ...]) -> Any:
    return jax.core.ShapedArray(shape, parts[0].dtype)


def _put_together(cotangents: Any, value: Any, *, sharding: OwnSharding) -> list[Any]:
    own = [ad.instantiate_zeros(one) for one in cotangents]
    return [together(own, sharding, value.aval.shape)]


def _take_apart(
    cotangent: Any, *parts: Any, sharding: OwnSharding, shape: tuple[int, ...]
) -> list[Any]:
    return apart(ad.instantiate_zeros(cotangent), sharding)


def _refuse(values: Any, dimensions: Any, *, sharding: OwnSharding, **_: Any) -> NoReturn:
    raise TracingError(
        f"jax.vmap over a value that islands have parts of, as {sharding!r}, is not possible: call the "
        "function once for each value"
    )


_apart: Any = Primitive("parts_of_islands")
_apart.multiple_results = True
_apart.def_abstract_eval(_avals_of_parts)
_together: Any = Primitive("whole_of_islands")
_together.def_abstract_eval(_aval_of_parts)
ad.deflinear2(_apart, _put_together)
ad.deflinear2(_together, _take_apart)
batching.primitive_batchers[_apart] = batching.primitive_batchers[_together] = _refuse
