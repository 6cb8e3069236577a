"""Methods and properties of arrays: computed where the array lies, as JAX's are.

Each is a compiled function of one node, like an operator. They have the parameters and the
documentation of those of `jax.Array`: completion, `help` and type checkers know them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, Self, TypeVar, cast

import jax
import numpy as np

from pw.client.arrays.indexing import At
from pw.client.arrays.operators import Operators, apply_to
from pw.core.errors import ArgumentError
from pw.core.jax_private.tracing import outside_traces

P = ParamSpec("P")
T = TypeVar("T")


class _Method(Generic[P]):
    """A method of JAX's arrays for pw's arrays."""

    def __init__(self, theirs: Callable[Concatenate[jax.Array, P], Any]) -> None:
        self._theirs = theirs

    def __set_name__(self, owner: type, name: str) -> None:
        @functools.wraps(self._theirs)
        def ours(self: Any, *args: Any, **kwargs: Any) -> Any:
            return _computed(self, name, *args, **kwargs)

        ours.__name__, ours.__qualname__ = name, f"{owner.__name__}.{name}"
        setattr(owner, name, ours)

    if TYPE_CHECKING:

        def __get__(self, instance: T, owner: type[T]) -> Callable[P, T]: ...


def _computed(handle: Any, name: str, *args: Any, **kwargs: Any) -> Any:
    if not outside_traces():
        return getattr(handle._as_jax_array(), name)(*args, **kwargs)

    def compute(x: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(x, name)(*args, **kwargs)

    return apply_to(handle, name, compute, args, kwargs)


def _read(handle: Any, name: str) -> Any:
    if not outside_traces():
        return getattr(handle._as_jax_array(), name)
    return apply_to(handle, name, lambda x: getattr(x, name))


class Methods(Operators):
    """The methods that JAX arrays have."""

    __slots__ = ()
    shape: Any
    dtype: Any
    size: Any
    _as_jax_array: Callable[[], Any]

    all = _Method(jax.Array.all)
    any = _Method(jax.Array.any)
    argmax = _Method(jax.Array.argmax)
    argmin = _Method(jax.Array.argmin)
    argpartition = _Method(jax.Array.argpartition)
    argsort = _Method(jax.Array.argsort)
    astype = _Method(jax.Array.astype)
    byteswap = _Method(jax.Array.byteswap)
    choose = _Method(jax.Array.choose)
    clip = _Method(jax.Array.clip)
    conj = _Method(jax.Array.conj)
    conjugate = _Method(jax.Array.conjugate)
    copy = _Method(jax.Array.copy)
    cumprod = _Method(jax.Array.cumprod)
    cumsum = _Method(jax.Array.cumsum)
    diagonal = _Method(jax.Array.diagonal)
    dot = _Method(jax.Array.dot)
    flatten = _Method(jax.Array.flatten)
    max = _Method(jax.Array.max)
    mean = _Method(jax.Array.mean)
    min = _Method(jax.Array.min)
    prod = _Method(jax.Array.prod)
    ptp = _Method(jax.Array.ptp)
    ravel = _Method(jax.Array.ravel)
    reshape = _Method(jax.Array.reshape)
    round = _Method(jax.Array.round)
    searchsorted = _Method(jax.Array.searchsorted)
    sort = _Method(jax.Array.sort)
    squeeze = _Method(jax.Array.squeeze)
    std = _Method(jax.Array.std)
    sum = _Method(jax.Array.sum)
    swapaxes = _Method(jax.Array.swapaxes)
    take = _Method(jax.Array.take)
    trace = _Method(jax.Array.trace)
    transpose = _Method(jax.Array.transpose)
    var = _Method(jax.Array.var)
    view = _Method(jax.Array.view)

    def repeat(
        self,
        repeats: Any,
        axis: int | None = None,
        *,
        total_repeat_length: int | None = None,
        out_sharding: Any = None,
    ) -> Self:
        """Construct an array from repeated elements."""
        if total_repeat_length is None and isinstance(repeats, (np.ndarray, jax.Array)):
            # An operand, whose sum has to be known.
            size = self.size if axis is None else self.shape[axis]
            total_repeat_length = int(np.broadcast_to(np.ravel(repeats), (size,)).sum())
        return cast(
            Self,
            _computed(
                self,
                "repeat",
                repeats,
                axis,
                total_repeat_length=total_repeat_length,
                out_sharding=out_sharding,
            ),
        )

    def compress(
        self, condition: Any, axis: int | None = None, *, size: int | None = None, **fill: Any
    ) -> Self:
        """Return selected slices of this array along given axis."""
        if size is None and isinstance(condition, Operators):
            raise _of_unknown_size("compress", "x.compress(np.asarray(condition))")
        if size is None:
            size = int(np.count_nonzero(condition))
        return cast(Self, _computed(self, "compress", condition, axis, size=size, **fill))

    def nonzero(self, *, size: int | None = None, fill_value: Any = None) -> tuple[Self, ...]:
        """Return indices of nonzero elements of an array."""
        if size is None and outside_traces():
            raise _of_unknown_size("nonzero", "np.nonzero(np.asarray(x))")
        indices = _computed(self, "nonzero", size=size, fill_value=fill_value)
        return cast(tuple[Self, ...], indices)

    def __round__(self, ndigits: int | None = None) -> Self:
        return self.round(ndigits or 0)

    @property
    def T(self) -> Self:  # noqa: N802 - JAX's name
        """The array with its axes in reverse order."""
        return cast(Self, _read(self, "T"))

    @property
    def mT(self) -> Self:  # noqa: N802 - JAX's name
        """The array with its last two axes exchanged."""
        return cast(Self, _read(self, "mT"))

    @property
    def real(self) -> Self:
        """The real part."""
        return cast(Self, _read(self, "real"))

    @property
    def imag(self) -> Self:
        """The imaginary part."""
        return cast(Self, _read(self, "imag"))

    @property
    def itemsize(self) -> int:
        """Size of one element in bytes."""
        return int(self.dtype.itemsize)

    @property
    def at(self) -> At:
        """Changed copies: `x.at[index].set(value)`, `.add`, `.max` and the others of JAX's."""
        return At(self) if outside_traces() else cast(At, self._as_jax_array().at)

    def __setitem__(self, index: Any, value: Any) -> None:
        raise TypeError("arrays cannot be changed; x = x.at[index].set(value) makes a changed copy")

    if not TYPE_CHECKING:  # type checkers know all attributes

        def __getattr__(self, name: str) -> Any:
            """Raise AttributeError, with a hint if JAX's arrays have this attribute."""
            raise AttributeError(_no_attribute(self, name), name=name, obj=self)


def _of_unknown_size(name: str, instead: str) -> ArgumentError:
    return ArgumentError(
        f"how many elements {name}() gives is not known before it is computed; say at most how many "
        f"with size=, or compute it on the value: {instead}"
    )


_INSTEAD = {
    "to_device": "pw.put(x, device) copies an array to other devices",
    "flat": "x.ravel() gives the elements in one dimension",
    "addressable_shards": "its shards lie on the hosts, and np.asarray(x) brings the whole value here",
}
_INSTEAD |= dict.fromkeys(
    ("addressable_data", "global_shards", "is_fully_addressable"), _INSTEAD["addressable_shards"]
)


def _no_attribute(handle: Any, name: str) -> str:
    message = f"{type(handle).__name__!r} object has no attribute {name!r}"
    if name.startswith("_") or not hasattr(jax.Array, name):
        return message
    return f"{message}: {_INSTEAD.get(name, 'np.asarray(x) brings its value here')}"
