"""`Array`: the handle of a logical array, which is a future.

The client has one handle, whatever the number of shards. Shape, dtype and sharding are known at
once; reading the value waits for it and fetches it, once. When hosts are lost, the wait lasts until
the value is restored, or is lost for good. The last reference to a handle releases the array on all
hosts. A function may close over a handle.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Generator, Iterator
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, Any, NoReturn

import jax
import numpy as np

from pw.client.arrays.devices import VirtualDevice
from pw.client.arrays.indexing import elements, item_at
from pw.client.arrays.methods import Methods
from pw.client.arrays.operators import apply
from pw.client.arrays.signature import ArrayType
from pw.client.connection.waiting import Waiting
from pw.client.display.grid import Grid
from pw.client.display.tables import facts, is_notebook
from pw.core.errors import (
    ArgumentError,
    ArrayDeleted,
    ConnectionFailed,
    Disconnected,
    Error,
    HostLost,
    NotOwner,
    TransferFailed,
)
from pw.core.jax_private import array_types
from pw.core.jax_private.tracing import outside_traces

SHOWN_ELEMENTS = 1000
"""A notebook shows values up to this size: numpy prints as many elements without an ellipsis."""
LOOK_S = 0.1
"""Seconds that a notebook waits to learn whether an array exists."""

giving_up = threading.RLock()
"""Lock of a thread that deletes arrays, so that one of two threads wins. It is reentrant: the garbage collector
may run a finalizer in the same thread, which deletes other arrays."""


if TYPE_CHECKING:
    _Annotated = jax.Array  # functions annotated with jax.Array take these too
else:
    _Annotated = object


class Array(Methods, _Annotated):  # type: ignore[misc]
    """A logical array on virtual devices; made by computations and `pw.put`, never directly."""

    # By identity, as `asyncio.gather` needs of a future.
    __hash__ = object.__hash__

    __slots__ = ("__weakref__", "_fetching", "_gone", "_id", "_runtime", "_type", "_waiting")

    def __init__(self, session: Any, number: int, type_: ArrayType) -> None:
        self._id = number
        self._type = type_
        self._gone: str | None = None
        self._fetching: Waiting[Any] | None = None
        self._waiting: Future[Any] | None = None
        self._runtime = session

    def __del__(self) -> None:
        session = getattr(self, "_runtime", None)
        if session is not None and self._gone is None:
            session.release(self._id, self._type.size_bytes)

    # --- known at once -------------------------------------------------------------------------------

    @property
    def aval(self) -> Any:
        """Shape, dtype and weak type as JAX's abstract value."""
        return self._type.aval

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole array."""
        return tuple(self._type.aval.shape)

    @property
    def dtype(self) -> Any:
        """Dtype of the elements."""
        return self._type.aval.dtype

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self._type.aval.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return int(self._type.aval.size)

    @property
    def nbytes(self) -> int:
        """Size of one full copy in bytes."""
        return self._type.spec.size_bytes

    @property
    def weak_type(self) -> bool:
        """Whether the dtype yields to that of other operands, as a Python number's does."""
        return bool(self._type.aval.weak_type)

    @property
    def sharding(self) -> jax.sharding.NamedSharding:
        """The array's sharding."""
        return self._type.sharding.of_jax

    @property
    def device(self) -> VirtualDevice | jax.sharding.NamedSharding:
        """The array's virtual device; its sharding, if it has several."""
        devices = self._type.sharding.mesh.devices.flat
        return devices[0] if len(devices) == 1 else self.sharding

    def devices(self) -> set[VirtualDevice]:
        """Return the virtual devices of the array."""
        return set(self._type.sharding.mesh.devices.flat)

    @property
    def committed(self) -> bool:
        """True, as of JAX's arrays with a device: computations run on the devices of their arguments."""
        return True

    @property
    def is_fully_replicated(self) -> bool:
        """Whether each device has a full copy."""
        return not any(self._type.sharding.core.spec)

    @property
    def members(self) -> tuple[Array, ...]:
        """The arrays that the cluster knows for this one: itself, or its part on each island."""
        return (self,)

    # --- the future ----------------------------------------------------------------------------------

    def is_ready(self) -> bool:
        """Whether the value exists, or has failed."""
        return self.start_wait().done()

    @property
    def is_known_to_exist(self) -> bool:
        """Whether an earlier wait or fetch here has seen the value; sends no request."""
        asked = (self._waiting, self._fetching)
        return any(f and f.done() and not f.cancelled() and f.exception() is None for f in asked)

    def block_until_ready(self) -> Array:
        """Wait for the value to exist on its devices; raises the error it failed with."""
        self.start_wait().result()
        return self

    def __await__(self) -> Generator[Any, None, Array]:
        """Wait as a task of asyncio. Its cancellation ends the wait; `pw.cancel` ends the computation."""
        waiting = asyncio.wrap_future(self.start_wait())
        # A caller that was cancelled does not hear of an error any more.
        waiting.add_done_callback(lambda done: done.cancelled() or done.exception())
        # Shielded: other tasks that wait for this array are not cancelled with the caller's.
        yield from asyncio.shield(waiting).__await__()
        return self

    def delete(self) -> None:
        """Free the array on all hosts now, in order with the computations that use it."""
        with giving_up:
            if self._gone is not None:
                return
            self._gone = "it was deleted by delete(); delete it after its last use"
            self._fetching = None
        if self._runtime.alive:
            self._runtime.delete([self._id])

    def is_deleted(self) -> bool:
        """Whether the array was deleted or donated."""
        return self._gone is not None

    def _check_usable(self) -> None:
        """Raise ArrayDeleted, Disconnected or what ended the session unless the array can be used."""
        if self._gone is not None:
            raise ArrayDeleted(
                f"the array {self._type.aval.str_short()} cannot be used any more: {self._gone}"
            )
        if not self._runtime.alive:
            if self._runtime.forked or self._runtime.ended is not None:
                self._runtime.check_alive()
            raise Disconnected(
                f"the session that the array {self._type.aval.str_short()} belonged to is closed, and "
                "its arrays with it; fetch values that must outlive a session with pw.get()"
            )

    def _check_owner(self, session: Any) -> None:
        """Raise unless the array can be used in a computation of `session`."""
        self._check_usable()
        if self._runtime is not session:
            raise NotOwner(
                f"the array {self._type.aval.str_short()} belongs to another session; pass its value, "
                "pw.get(x), instead"
            )

    def copy_to_host_async(self) -> None:
        """Begin to fetch the value, for a later read."""
        self.start_fetch()

    def start_wait(self) -> Future[Any]:
        """Return the future of the value's existence; the first call begins the wait."""
        if self._gone is not None or not self._runtime.alive:
            self._check_usable()
        if self._waiting is None or _in_vain(self._waiting):
            if type(self) is Array:
                named = [(self._id, self._type.spec)]
            else:
                named = [(member._id, member._type.spec) for member in self.members]
            self._waiting = self._runtime.wait(named)
        return self._waiting

    def start_fetch(self) -> Waiting[Any]:
        """Return the future of the value here (integers for typed keys); the first call fetches it."""
        self._check_usable()
        if self._fetching is None or _in_vain(self._fetching):
            self._fetching = self._runtime.fetch(self._id, self._type.spec)
        return self._fetching

    def local(self, timeout: float | None = None, asked_s: float | None = None) -> Any:
        """The value on this machine: numpy, read-only, or for typed keys a jax.Array.

        Raises TimeoutError unless it comes within `timeout` seconds; see `Waiting.result`.
        """
        value = self.start_fetch().result(timeout, asked_s)
        if self._type.key_impl is not None:
            return jax.random.wrap_key_data(value, impl=self._type.key_impl)
        return value

    def _value(self) -> np.ndarray[Any, Any]:
        if self._type.key_impl is not None:
            raise TypeError(
                f"a pw.Array of dtype {self.dtype} cannot be converted to a NumPy array. Use "
                "jax.random.key_data inside a pw.jit function to get at the integers it consists of"
            )
        value: np.ndarray[Any, Any] = self.start_fetch().result()
        if value.flags.writeable:
            value = value.view()
            value.flags.writeable = False
        return value

    # --- the value -----------------------------------------------------------------------------------

    def __array__(  # type: ignore[override]
        self, dtype: Any = None, copy: bool | None = None
    ) -> np.ndarray[Any, Any]:
        value = self._value()
        if dtype is not None and np.dtype(dtype) != value.dtype:
            if copy is False:
                raise ValueError(f"a change of dtype from {value.dtype} to {dtype} needs a copy")
            return value.astype(dtype)
        return value.copy() if copy else value

    @property
    def __jax_array__(self) -> Any:
        """What JAX's functions call to make an array of their own of this."""
        if self._type.key_impl is not None and array_types.is_random_key():
            if outside_traces():
                refuse(self)
            raise ArgumentError(
                f"the keys {self._type.aval.str_short()} are used by a function that closes over them; "
                "jax.random takes keys that are arguments of the pw.jit function"
            )
        return self._as_jax_array

    def _as_jax_array(self) -> Any:
        if not outside_traces():
            return _identity(self)  # the handle becomes a constant of the trace
        if not array_types.is_operand():
            refuse(self)
        return self  # JAX's operator gives up, and Python calls our reflected one

    def __repr__(self) -> str:
        if self._gone is not None:
            return f"array(deleted, shape={self.shape}, dtype={self.dtype})"
        try:
            return self._described()
        except Error as error:  # a debugger that shows variables must not raise
            return f"array({type(error).__name__}: {error}, shape={self.shape}, dtype={self.dtype})"

    def _described(self) -> str:
        if self._type.key_impl is not None:
            return f"array({self.shape}, dtype={self.dtype}) overlaying:\n{self.start_fetch().result()}"
        if self.size == 0:
            return f"array([], shape={self.shape}, dtype={self.dtype})"
        weak = ", weak_type=True" if self.weak_type else ""
        text = np.array2string(self._value(), prefix="array(", separator=", ", suffix=",")
        return f"array({text}, dtype={self.dtype}{weak})"

    def _repr_html_(self) -> str:
        return self._html(self._facts())

    def _html(self, rows: list[tuple[str, Any]]) -> str:
        drawn = "" if self.is_fully_replicated else self._drawing()._repr_html_()
        return facts("pw.Array", rows) + drawn

    def _drawing(self) -> Grid:
        """Return the shards by device; waits for nothing."""
        return self._type.sharding._drawing(self._type.aval.str_short(), self.shape)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        # A notebook also asks for the text, which elsewhere is the value: it may take long to come.
        if not is_notebook():
            return {}
        rows = self._facts()
        text = ", ".join(f"{name}={value}" for name, value in rows if name != "value")
        return {"text/plain": f"<pw.Array: {text}>", "text/html": self._html(rows)}

    def _facts(self) -> list[tuple[str, Any]]:
        """Return the rows that a notebook shows."""
        state, value = self._state()
        rows = [
            ("shape", self.shape),
            ("dtype", self.dtype),
            ("sharding", self._type.sharding._words),
            ("state", state),
            ("on", self._type.sharding.mesh._where),
        ]
        return rows if value is None else [*rows, ("value", value)]

    def _state(self) -> tuple[str, str | None]:
        """Whether the array exists, and its value if it is small; takes at most `LOOK_S`."""
        is_small = self.size <= SHOWN_ELEMENTS
        try:
            future = self.start_fetch() if is_small else self.start_wait()
        except Error as error:
            return f"gone: {error}", None
        if not wait([future], LOOK_S).done:
            return "not known yet: it is being computed, or on its way", None
        if (failure := future.exception()) is not None:
            return f"failed: {type(failure).__name__}: {failure}", None
        return "ready", np.array2string(future.result(), separator=", ") if is_small else None

    def __str__(self) -> str:
        return repr(self) if self._type.key_impl is not None else str(self._value())

    def __format__(self, spec: str) -> str:
        return format(self._value()[()] if self.ndim == 0 else str(self), spec)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of unsized object")
        return self.shape[0]

    def __getitem__(self, index: Any) -> Any:
        return item_at(self, index) if outside_traces() else self._as_jax_array()[index]

    def __iter__(self) -> Iterator[Any]:
        return elements(self) if outside_traces() else iter(self._as_jax_array())

    def __bool__(self) -> bool:
        return bool(self._value())

    def __int__(self) -> int:
        return int(self._value())

    def __float__(self) -> float:
        return float(self._value())

    def __complex__(self) -> complex:
        return complex(self._value())

    def __index__(self) -> int:
        return self._value().__index__()

    def item(self, *index: int) -> Any:
        """One element as a Python number; of an array of one element, that one."""
        return self._value().item(*index)

    def tolist(self) -> Any:
        """The value as nested lists of Python numbers."""
        return self._value().tolist()

    @property
    def format(self) -> None:
        """JAX reads the layout: None, but an error before JAX computes with the array."""
        if array_types.is_computing():
            refuse(self)

    # --- copies --------------------------------------------------------------------------------------

    def __copy__(self) -> Any:
        return apply("copy", self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return apply("copy", self)

    def __reduce__(self) -> Any:
        raise ArgumentError(
            f"the array {self._type.aval.str_short()} cannot be pickled: it is the handle of a value "
            "that lies on devices. Fetch it first, with pw.get(x)"
        )


_identity = jax.jit(lambda x: x)


def _in_vain(future: Future[Any]) -> bool:
    """Whether the request has failed on its way to the hosts: another request may succeed."""
    return (
        future.done()
        and not future.cancelled()
        and isinstance(future.exception(), (HostLost, ConnectionFailed, TransferFailed))
    )


def refuse(array: Array) -> NoReturn:
    """Raise because JAX is about to compute with an array on this machine."""
    raise ArgumentError(
        f"the array {array._type.aval.str_short()} lies on virtual devices, and a function of jax was called "
        "with it outside of pw.jit, which would compute in this process. Wrap the function in pw.jit, or take "
        "the value with np.asarray(x) or pw.get(x)"
    )


array_types.register(Array, lambda array: array._type.aval, refuse)
