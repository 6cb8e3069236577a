"""Methods and indexing of arrays and tracers: computed where the array lies, as JAX's are.

Each is a compiled function of one node, like an operator. What is an array among the arguments is an
operand; everything else is part of the function, so that equal calls share one compilation. Integers in
an index are operands as well, and so is where a slice of consecutive elements begins: reading element after
element, or batch after batch, compiles once. How many elements a mask selects has to be known to compile:
masks of this machine become the integers that they stand for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from operator import index as as_integer
from typing import Any, NamedTuple

import jax
import numpy as np

from pw.client.operators import Operators, apply_built, no_attribute
from pw.core.errors import ArgumentError

METHODS = frozenset(
    (
        "all",
        "any",
        "argmax",
        "argmin",
        "argsort",
        "astype",
        "clip",
        "conj",
        "copy",
        "cumprod",
        "cumsum",
        "diagonal",
        "dot",
        "flatten",
        "max",
        "mean",
        "min",
        "prod",
        "ravel",
        "repeat",
        "reshape",
        "round",
        "searchsorted",
        "sort",
        "squeeze",
        "std",
        "sum",
        "swapaxes",
        "take",
        "trace",
        "transpose",
        "var",
    )
)
PROPERTIES = frozenset({"T", "mT", "real", "imag"})

_INT32_MAX = 2**31 - 1

UNSTACKED_AT_ONCE = 256
"""Arrays with more elements along the first axis are iterated over element by element."""


class _Operand:
    """Marks the place of an array in a call."""

    def __repr__(self) -> str:
        return "<operand>"


_OPERAND = _Operand()


def attribute(handle: Operators, name: str) -> Any:
    """The method or property `name` of the array behind `handle`.

    Raises:
        AttributeError: it has none, or it has to be called in a pw.jit function.
    """
    if name in METHODS:
        return partial(_call, handle, name)
    if name in PROPERTIES:
        return apply_built(name, partial(_property, name), handle)
    raise AttributeError(no_attribute(handle, name))


def _property(name: str) -> Callable[..., Any]:
    return lambda x: getattr(x, name)


def _call(handle: Operators, name: str, *args: Any, **kwargs: Any) -> Any:
    if name == "repeat":
        kwargs = _with_length(handle, args, kwargs)
    operands: list[Any] = []
    given = tuple(_template(arg, operands) for arg in args)
    named = tuple((key, _template(value, operands)) for key, value in sorted(kwargs.items()))
    # Types as well: 3 and 3.0 are equal, but make results of different dtypes.
    types = tuple(map(type, given)), tuple(type(value) for _, value in named)
    key = (name, given, named, types)
    try:
        hash(key)
    except TypeError:
        raise ArgumentError(
            f"an argument of {name}() is neither an array nor can be hashed"
        ) from None
    return apply_built(key, partial(_method, name, given, named), handle, *operands)


def _with_length(handle: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """What is named in a call of `repeat`: of counts that become an operand, the sum has to be known."""
    named = dict(zip(("repeats", "axis"), args, strict=False)) | kwargs
    counts, axis = named.get("repeats"), named.get("axis")
    if not isinstance(counts, (np.ndarray, jax.Array)) or "total_repeat_length" in kwargs:
        return kwargs
    size = handle.size if axis is None else handle.shape[axis]
    total = int(np.broadcast_to(np.ravel(counts), (size,)).sum())
    return {**kwargs, "total_repeat_length": total}


def _template(arg: Any, operands: list[Any]) -> Any:
    """`arg` with a mark where it is an array, which goes to `operands`."""
    if isinstance(arg, (Operators, jax.Array, np.ndarray)):
        operands.append(arg)
        return _OPERAND
    return tuple(arg) if isinstance(arg, list) else arg


def _method(name: str, given: tuple[Any, ...], named: tuple[Any, ...]) -> Callable[..., Any]:
    def method(x: Any, *operands: Any) -> Any:
        rest = iter(operands)
        args = [next(rest) if arg is _OPERAND else arg for arg in given]
        kwargs = {key: next(rest) if arg is _OPERAND else arg for key, arg in named}
        return getattr(x, name)(*args, **kwargs)

    method.__name__ = name
    return method


# --- indexing ----------------------------------------------------------------------------------------


def item_at(handle: Any, index: Any) -> Any:
    """`handle[index]`, computed where the array lies.

    Raises:
        IndexError: the index is out of bounds, has too many dimensions, or is a mask of another shape.
        ArgumentError: it has a boolean array that lies on devices.
    """
    parts = tuple(map(_known, index if isinstance(index, tuple) else (index,)))
    if any(isinstance(part, (Operators, jax.Array, np.ndarray)) for part in parts):
        parts = _without_masks(handle.shape, parts)
    else:
        # Numpy's own bounds and words, on an array without memory.
        np.broadcast_to(np.empty((), bool), handle.shape)[parts]
        if all(isinstance(part, slice) or _integer(part) for part in parts):
            parts = tuple(_window(handle, axis, part) for axis, part in enumerate(parts))
    operands: list[Any] = []
    template = tuple(_index_template(part, operands) for part in parts)
    key = ("__getitem__", template)
    return apply_built(key, partial(_indexing, template), handle, *operands)


def _known(part: Any) -> Any:
    """A slice between integers: its ends are part of the function, even if arrays say where they are.

    Lists become arrays.
    """
    if not isinstance(part, slice):
        return np.asarray(part) if isinstance(part, list) else part
    ends = (part.start, part.stop, part.step)
    return slice(*[None if end is None else as_integer(end) for end in ends])


def _without_masks(shape: tuple[int, ...], parts: tuple[Any, ...]) -> tuple[Any, ...]:
    """The index with the integers that its masks stand for, as numpy counts dimensions."""
    taken = [_dimensions(part) for part in parts]
    found: list[Any] = []
    for position, part in enumerate(parts):
        if getattr(part, "dtype", None) != np.bool_:
            found.append(part)
            continue
        if isinstance(part, Operators):
            raise ArgumentError(
                "an array of booleans that lies on devices cannot be an index: how many elements it "
                "selects is not known before it is computed. Bring it here, x[pw.get(mask)], or keep "
                "the shape, with jnp.where(mask, x, 0) in a pw.jit function"
            )
        mask = np.asarray(part)
        if mask.ndim == 0:
            found.append(part)
            continue
        is_behind = any(before is Ellipsis for before in parts[:position])
        axis = len(shape) - sum(taken[position:]) if is_behind else sum(taken[:position])
        if shape[axis : axis + mask.ndim] != mask.shape:
            raise IndexError(
                f"a mask of shape {mask.shape} cannot select from dimension {axis} on of an array of "
                f"shape {shape}"
            )
        found.extend(np.nonzero(mask))
    return tuple(found)


def _dimensions(part: Any) -> int:
    """How many dimensions of an array a part of its index is about."""
    if part is None or part is Ellipsis or isinstance(part, bool):
        return 0
    return part.ndim if getattr(part, "dtype", None) == np.bool_ else 1


class _Window(NamedTuple):
    """Consecutive elements of an axis, from somewhere inside of it on."""

    start: int
    length: int


def _window(handle: Any, axis: int, part: Any) -> Any:
    """`part`, as a window if it is one; at either end of an axis, each has a length of its own anyway."""
    if not isinstance(part, slice):
        return part
    size = handle.shape[axis]
    start, stop, step = part.indices(size)
    if step != 1 or not 0 < start < stop < size or size > _INT32_MAX:
        return part
    sharding = handle.sharding
    if sharding is not None and any(sharding.core.spec[axis : axis + 1]):
        return part  # where an axis is split, hosts would have to gather it to begin anywhere
    return _Window(start, stop - start)


def _integer(part: Any) -> bool:
    return isinstance(part, (int, np.integer)) and not isinstance(part, bool)


def _index_template(part: Any, operands: list[Any]) -> Any:
    if isinstance(part, _Window):
        operands.append(np.int32(part.start))
        return ("window", part.length)
    if isinstance(part, slice):
        return ("slice", part.start, part.stop, part.step)
    if _integer(part):
        operands.append(np.int32(part))
        return _OPERAND
    if isinstance(part, (bool, np.bool_)):
        part = np.asarray(part)
    if isinstance(part, (Operators, jax.Array, np.ndarray)):
        operands.append(part)
        return _OPERAND
    return part


def _indexing(template: tuple[Any, ...]) -> Callable[..., Any]:
    def getitem(x: Any, *operands: Any) -> Any:
        rest = iter(operands)
        index: list[Any] = []
        for axis, part in enumerate(template):
            if part is _OPERAND:
                index.append(next(rest))
            elif not isinstance(part, tuple):
                index.append(part)
            elif part[0] == "slice":
                index.append(slice(*part[1:]))
            else:
                x = jax.lax.dynamic_slice_in_dim(x, next(rest), part[1], axis)
                index.append(slice(None))
        return x[tuple(index)]

    return getitem


def elements(handle: Any) -> Iterator[Any]:
    """The elements along the first axis, as arrays; one computation for all where they are few."""
    if not handle.shape:
        raise TypeError("iteration over a 0-d array")
    length = handle.shape[0]
    if not 0 < length <= UNSTACKED_AT_ONCE:
        return (item_at(handle, index) for index in range(length))
    unstack = partial(_unstacking, length)
    return iter(apply_built(("unstack", length), unstack, handle))


def _unstacking(length: int) -> Callable[..., Any]:
    def unstack(x: Any) -> Any:
        return tuple(x[index] for index in range(length))

    return unstack
