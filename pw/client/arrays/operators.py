"""Python's operators for arrays.

Each operator is a compiled function of one node on the mesh of its first array operand; the
compiler chooses the sharding of the result. Operators that were not used for long are forgotten.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import index
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pw.core.errors import ArgumentError

POWERS = 64
"""Largest magnitude of an integer exponent that always is a computation of its own."""
EXACT = 1 << 24
"""Largest magnitude of an exponent that is an operand: float32 holds all integers up to it."""

_compile: Callable[[str | Callable[..., Any]], Callable[..., Any]]
"""Compiles a small function, or the one of jax.numpy with this name."""


def compile_with(compiler: Callable[[str | Callable[..., Any]], Callable[..., Any]]) -> None:
    """Set the compiler of operators; `pw.client.functions.function` calls this."""
    global _compile
    _compile = compiler


def apply(name: str, *operands: Any) -> Any:
    """Run the operator called `name` (a function of jax.numpy)."""
    return apply_built(name, None, *operands)


def apply_built(key: Any, build: Callable[[], Callable[..., Any]] | None, *operands: Any) -> Any:
    """Run a small function on the mesh of its first array operand.

    `build` makes the function when `key` is seen first; without it, `key` names one of jax.numpy.
    """
    first: Any = None
    for first in operands:
        if isinstance(first, Operators):
            break
    table = first._type.sharding.mesh.slice.compiled
    kinds = (key, *[_kind(operand) for operand in operands])
    function = table.get(kinds)
    if function is None:
        function = table.add(kinds, _compile(key if build is None else build()))
    return function(*operands)


def apply_to(
    handle: Any,
    name: str,
    function: Callable[..., Any],
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
) -> Any:
    """Run `function(x, *args, **kwargs)` on the array `x` behind `handle`.

    Arrays among the arguments, at any depth, are operands. All other arguments, and `name`, identify the
    function: equal calls share one compilation.

    Raises:
        ArgumentError: an argument is neither an array nor can be hashed.
    """
    leaves, tree = jax.tree_util.tree_flatten((args, kwargs or {}))
    are_operands = [isinstance(leaf, (Operators, jax.Array, np.ndarray)) for leaf in leaves]
    fixed = tuple(
        None if is_operand else leaf for leaf, is_operand in zip(leaves, are_operands, strict=True)
    )
    # With types: 3 and 3.0 are equal, but make results of different dtypes.
    key = (name, tree, fixed, tuple(map(type, fixed)))
    try:
        hash(key)
    except TypeError:
        raise ArgumentError(
            f"an argument of {name}() is neither an array nor can be hashed"
        ) from None

    def build() -> Callable[..., Any]:
        def applied(x: Any, *operands: Any) -> Any:
            rest = iter(operands)
            leaves = [
                next(rest) if is_operand else leaf
                for leaf, is_operand in zip(fixed, are_operands, strict=True)
            ]
            args, kwargs = jax.tree_util.tree_unflatten(tree, leaves)
            return function(x, *args, **kwargs)

        applied.__name__ = name
        return applied

    operands = [leaf for leaf, is_op in zip(leaves, are_operands, strict=True) if is_op]
    return apply_built(key, build, handle, *operands)


def _kind(operand: Any) -> Any:
    """Return an operand's part of the key; the function itself follows JAX's rules."""
    operand_type = type(operand)
    if issubclass(operand_type, Operators):
        return operand._type
    if operand_type is float or operand_type is int:
        return operand_type
    return operand_type, getattr(operand, "shape", None), getattr(operand, "dtype", None)


def _unary(name: str) -> Callable[[Any], Any]:
    def method(self: Any) -> Any:
        return apply(name, self)

    return method


def _binary(name: str) -> Callable[[Any, Any], Any]:
    def method(self: Any, other: Any) -> Any:
        return apply(name, self, other) if _operand(other) else NotImplemented

    return method


def _reflected(name: str) -> Callable[[Any, Any], Any]:
    def method(self: Any, other: Any) -> Any:
        return apply(name, other, self) if _operand(other) else NotImplemented

    return method


def _power(self: Any, exponent: Any) -> Any:
    """JAX has rules of its own for an integer that is known while it traces: it multiplies, exactly.

    Each such integer is another computation, so large ones are operands, where that makes no
    difference.
    """
    if isinstance(exponent, (int, np.integer)) and not isinstance(exponent, bool):
        number = index(exponent)
        if POWERS < abs(number) <= EXACT and _holds_exactly(self.dtype):
            return apply("power", self, number)
        return apply_built(("power", number), partial(_to_the_power_of, number), self)
    return apply("power", self, exponent) if _operand(exponent) else NotImplemented


def _holds_exactly(dtype: Any) -> bool:
    finfo: Any = jnp.finfo
    return bool(jnp.issubdtype(dtype, jnp.inexact) and finfo(dtype).nmant >= 23)


def _to_the_power_of(exponent: int) -> Callable[[Any], Any]:
    def power(x: Any) -> Any:
        return jnp.power(x, exponent)

    return power


def _operand(other: Any) -> bool:
    return isinstance(other, (int, float, complex, Operators)) or hasattr(other, "__array__")


class Operators:
    """The operators that JAX arrays have."""

    __slots__ = ()
    __array_priority__ = 200  # numpy leaves its operators to us
    __hash__: Any = None

    __neg__ = _unary("negative")
    __pos__ = _unary("positive")
    __abs__ = _unary("abs")
    __invert__ = _unary("invert")
    __add__, __radd__ = _binary("add"), _reflected("add")
    __sub__, __rsub__ = _binary("subtract"), _reflected("subtract")
    __mul__, __rmul__ = _binary("multiply"), _reflected("multiply")
    __truediv__, __rtruediv__ = _binary("true_divide"), _reflected("true_divide")
    __floordiv__, __rfloordiv__ = _binary("floor_divide"), _reflected("floor_divide")
    __divmod__, __rdivmod__ = _binary("divmod"), _reflected("divmod")
    __mod__, __rmod__ = _binary("mod"), _reflected("mod")
    __pow__, __rpow__ = _power, _reflected("power")
    __matmul__, __rmatmul__ = _binary("matmul"), _reflected("matmul")
    __and__, __rand__ = _binary("bitwise_and"), _reflected("bitwise_and")
    __or__, __ror__ = _binary("bitwise_or"), _reflected("bitwise_or")
    __xor__, __rxor__ = _binary("bitwise_xor"), _reflected("bitwise_xor")
    __lshift__, __rlshift__ = _binary("left_shift"), _reflected("left_shift")
    __rshift__, __rrshift__ = _binary("right_shift"), _reflected("right_shift")
    __lt__ = _binary("less")
    __le__ = _binary("less_equal")
    __gt__ = _binary("greater")
    __ge__ = _binary("greater_equal")
    __eq__ = _binary("equal")
    __ne__ = _binary("not_equal")
