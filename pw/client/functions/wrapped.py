"""`Wrapped`: takes the place of a user's function, as `pw.jit` and `pw.program` functions do."""

from __future__ import annotations

import functools
import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from html import escape
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar, overload

import jax

from pw.client.arrays import jax_arrays
from pw.client.arrays.array import Array
from pw.client.arrays.signature import Statics
from pw.client.connection import jax_backend
from pw.client.display.graph import ProgramDrawing
from pw.client.functions.argument_errors import naming_argument
from pw.client.functions.tracebacks import leave_out_runtime
from pw.client.programs.writing.launch import Launch, Launches
from pw.core.errors import ArgumentError, ArrayDeleted
from pw.core.jax_private.tracing import outside_traces

tree_flatten = jax.tree_util.tree_flatten
tree_unflatten = jax.tree_util.tree_unflatten

P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R")


class Wrapped(Generic[P, R]):
    """Takes the place of a user's function: has its name and metadata, and can be a method."""

    _kind: str

    def __init__(self, fun: Callable[P, R], statics: Statics, timeout: float | None) -> None:
        functools.update_wrapper(self, fun)
        self.__wrapped__: Callable[..., Any] = fun
        self._name: str = getattr(fun, "__name__", type(fun).__name__)
        self._statics = statics
        self._has_statics = bool(statics)
        self._timeout_s = timeout_s_of(timeout)
        self._launches = Launches()

    def __repr__(self) -> str:
        return f"<{self._kind} {self._name}>"

    def _repr_html_(self) -> str:
        if self.newest_launch() is None:
            return f"<div>{escape(repr(self))}: not called yet</div>"
        return self._drawing()._repr_html_()

    def _drawing(self) -> ProgramDrawing:
        """Return the graph of its newest kind of call. Raises ArgumentError if there was none."""
        launch = self.newest_launch()
        if launch is None or launch.program is None:
            raise ArgumentError(f"{self!r} has no graph to show: call it once, and show it then")
        return ProgramDrawing.of(launch.runtime.programs.of(launch.program), launch.runtime.island)

    @overload
    def __get__(self, instance: None, owner: Any = None) -> Self: ...

    @overload
    def __get__(
        self: Wrapped[Concatenate[Any, Q], R], instance: object, owner: Any = None
    ) -> Callable[Q, R]: ...

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else functools.partial(self, instance)

    def newest_launch(self) -> Launch | None:
        """Return the launch of its newest kind of call."""
        return self._launches.newest()

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            arguments: Any = args, kwargs
            statics: tuple[Any, ...] = ()
            if self._has_statics:
                arguments, statics = self._statics.split(args, kwargs)
            leaves, tree = tree_flatten(arguments)
            results: R
            if under_jax_trace(leaves):
                results = self._under_trace(args, kwargs, tree, leaves, statics)
                return results
            if jax_backend.client() is not None:
                leaves = jax_arrays.from_jax(leaves)
            key = self._key(tree, leaves, statics)
            launch = self._launches.get(key)
            if launch is None:
                with self._launches.lock:
                    launch = self._launches.get(key) or self._launches.add(key, self._recorded(key))
            results = tree_unflatten(launch.tree, launch(leaves))
            return results
        except ArrayDeleted as error:
            error = naming_argument(error, self._name, arguments, leaves)
            leave_out_runtime(error)
            raise error from None
        except Exception as error:
            leave_out_runtime(error)
            raise

    @abstractmethod
    def _under_trace(
        self, args: Any, kwargs: Any, tree: Any, leaves: Sequence[Any], statics: tuple[Any, ...]
    ) -> Any:
        """Call the function while JAX traces another one; `tree` and `leaves` are without static arguments."""

    @abstractmethod
    def _key(self, tree: Any, leaves: Sequence[Any], statics: tuple[Any, ...]) -> Any:
        """Return the kind of a call."""

    @abstractmethod
    def _recorded(self, key: Any) -> Launch:
        """Trace the function for a kind of calls."""


def under_jax_trace(leaves: Sequence[Any]) -> bool:
    """Whether a call happens inside a JAX transformation."""
    if not outside_traces():
        return True
    for leaf in leaves:  # noqa: SIM110 - `any` would be a function more for each call
        if type(leaf) is not Array and isinstance(leaf, jax.core.Tracer):
            return True
    return False


def name_of(function: Any) -> str:
    """Return the user's name of a function, also of a partial one."""
    while isinstance(function, functools.partial):
        function = function.func
    return str(getattr(function, "__name__", type(function).__name__))


def timeout_s_of(timeout: float | None) -> float:
    """A user's timeout in seconds, 0 for none."""
    if timeout is None:
        return 0.0
    try:
        fits = 0 < timeout < math.inf
    except TypeError:
        fits = False
    if not fits:
        raise ValueError(f"a timeout is a positive number of seconds, not {timeout!r}")
    return float(timeout)
