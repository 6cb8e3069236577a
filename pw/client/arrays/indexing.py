"""Indexing of arrays: computed where the array lies, as JAX's is.

Each use is a compiled function of one node, like an operator. Integers in an index, and the start of a slice
of consecutive elements, are operands: reading element after element, or batch after batch, compiles once. The
number of elements that a mask selects must be known to compile, so a host mask becomes indices.
`x.at[index]` makes a changed copy, with JAX's methods.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from operator import index as as_integer
from typing import Any, NamedTuple

import jax
import numpy as np

from pw.client.arrays.operators import Operators, apply_to
from pw.core.errors import ArgumentError

_INT32_MAX = 2**31 - 1

UNSTACKED_AT_ONCE = 256
"""Arrays with more elements along the first axis are iterated over element by element."""


def item_at(handle: Any, index: Any) -> Any:
    """`handle[index]`, computed where the array lies.

    Raises:
        IndexError: the index is out of bounds, has too many dimensions, or is a mask of another shape.
        ArgumentError: it has a boolean array that lies on devices.
    """
    parts = tuple(map(_plain, index if isinstance(index, tuple) else (index,)))
    if any(isinstance(part, (Operators, jax.Array, np.ndarray)) for part in parts):
        parts = _without_masks(handle.shape, parts)
    else:
        # Numpy's own bounds and words, on an array without memory.
        np.broadcast_to(np.empty((), bool), handle.shape)[parts]
        if all(isinstance(part, slice) or _integer(part) for part in parts):
            parts = tuple(_window(handle, axis, part) for axis, part in enumerate(parts))
    return apply_to(handle, "getitem", _getitem, tuple(map(_portable, parts)))


class At:
    """Makes changed copies of an array: `x.at[index]`."""

    __slots__ = ("_handle",)

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    def __getitem__(self, index: Any) -> AtIndex:
        return AtIndex(self._handle, index)


def _change(how: str, doc: str) -> Callable[..., Any]:
    """Return the method of `AtIndex` that calls JAX's method of this name."""

    def method(self: AtIndex, values: Any, **kwargs: Any) -> Any:
        return self._changed(how, values, **kwargs)

    method.__name__, method.__doc__ = how, doc
    return method


class AtIndex:
    """The elements of an array that are to be changed; each method returns a changed copy."""

    __slots__ = ("_handle", "_index")

    def __init__(self, handle: Any, index: Any) -> None:
        parts = tuple(map(_plain, index if isinstance(index, tuple) else (index,)))
        self._handle = handle
        self._index = tuple(map(_portable, _without_masks(handle.shape, parts)))

    def _changed(self, how: str, *args: Any, **kwargs: Any) -> Any:
        def change(x: Any, index: Any, *args: Any, **kwargs: Any) -> Any:
            return getattr(x.at[tuple(map(_meant, index))], how)(*args, **kwargs)

        return apply_to(self._handle, f"at_{how}", change, (self._index, *args), kwargs)

    def get(self, **kwargs: Any) -> Any:
        """The elements themselves, by JAX's rules for indices that are out of bounds."""
        return self._changed("get", **kwargs)

    set = _change("set", "Return a copy in which they are `values`.")

    def apply(self, function: Callable[[Any], Any], **kwargs: Any) -> Any:
        """A copy in which `function`, which JAX can trace, was applied to them."""
        return self._changed("apply", function, **kwargs)

    add = _change("add", "Return a copy in which `values` are added to them.")
    subtract = _change("subtract", "Return a copy in which `values` are subtracted from them.")
    multiply = mul = _change("multiply", "Return a copy in which they are multiplied by `values`.")
    divide = _change("divide", "Return a copy in which they are divided by `values`.")
    power = _change("power", "Return a copy in which they are raised to the powers `values`.")
    min = _change("min", "Return a copy in which smaller `values` replace them.")
    max = _change("max", "Return a copy in which larger `values` replace them.")


def _plain(part: Any) -> Any:
    """Return a part of an index with a list as an array, and the ends of a slice as integers."""
    if not isinstance(part, slice):
        return np.asarray(part) if isinstance(part, list) else part
    ends = (part.start, part.stop, part.step)
    return slice(*[None if end is None else as_integer(end) for end in ends])


def _without_masks(shape: tuple[int, ...], parts: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the index with its masks as integers, with numpy's rules for dimensions."""
    dimensions = [_dimensions(part) for part in parts]
    index: list[Any] = []
    for position, part in enumerate(parts):
        if getattr(part, "dtype", None) != np.bool_:
            index.append(part)
            continue
        if isinstance(part, Operators):
            raise ArgumentError(
                "an array of booleans that lies on devices cannot be an index: how many elements it "
                "selects is not known before it is computed. Bring it here, x[pw.get(mask)], or keep "
                "the shape, with jnp.where(mask, x, 0) in a pw.jit function"
            )
        mask = np.asarray(part)
        if mask.ndim == 0:
            index.append(part)
            continue
        is_behind = any(before is Ellipsis for before in parts[:position])
        axis = sum(dimensions[:position])
        if is_behind:
            axis = len(shape) - sum(dimensions[position:])
        if shape[axis : axis + mask.ndim] != mask.shape:
            raise IndexError(
                f"a mask of shape {mask.shape} cannot select from dimension {axis} on of an array of "
                f"shape {shape}"
            )
        index.extend(np.nonzero(mask))
    return tuple(index)


def _dimensions(part: Any) -> int:
    """Return the number of dimensions that a part of an index takes."""
    if part is None or part is Ellipsis or isinstance(part, bool):
        return 0
    return part.ndim if getattr(part, "dtype", None) == np.bool_ else 1


class _Window(NamedTuple):
    """Consecutive elements of an axis, from somewhere inside of it on."""

    start: Any
    """An operand."""
    length: int


class _Slice(NamedTuple):
    """A slice, which cannot be hashed before Python 3.12."""

    start: int | None
    stop: int | None
    step: int | None


def _window(handle: Any, axis: int, part: Any) -> Any:
    """Return a slice inside of an axis as a window; at either end each length compiles for itself."""
    if not isinstance(part, slice):
        return part
    size = handle.shape[axis]
    start, stop, step = part.indices(size)
    if step != 1 or not 0 < start < stop < size or size > _INT32_MAX:
        return part
    if any(handle._type.sharding.core.spec[axis : axis + 1]):
        return part  # where an axis is split, hosts would have to gather it to begin anywhere
    return _Window(np.asarray(start, np.int32), stop - start)


def _integer(part: Any) -> bool:
    return isinstance(part, (int, np.integer)) and not isinstance(part, bool)


def _portable(part: Any) -> Any:
    """Return a part of an index as an operand, or as a hashable value."""
    if isinstance(part, slice):
        return _Slice(part.start, part.stop, part.step)
    if _integer(part):
        return np.asarray(part, np.int32)
    return np.asarray(part) if isinstance(part, (bool, np.bool_)) else part


def _meant(part: Any) -> Any:
    return slice(*part) if isinstance(part, _Slice) else part


def _getitem(x: Any, *parts: Any) -> Any:
    index: list[Any] = []
    for axis, part in enumerate(parts):
        if isinstance(part, _Window):
            x = jax.lax.dynamic_slice_in_dim(x, part.start, part.length, axis)
            part = slice(None)
        index.append(_meant(part))
    return x[tuple(index)]


def elements(handle: Any) -> Iterator[Any]:
    """The elements along the first axis, as arrays; one computation for all where they are few."""
    if not handle.shape:
        raise TypeError("iteration over a 0-d array")
    length = handle.shape[0]
    if not 0 < length <= UNSTACKED_AT_ONCE:
        return (item_at(handle, index) for index in range(length))
    return iter(apply_to(handle, "unstack", _unstack, (length,)))


def _unstack(x: Any, length: int) -> Any:
    return tuple(x[index] for index in range(length))
