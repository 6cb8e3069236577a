"""Functions that computations call in their client's process.

XLA calls a Python function of this process, by its index, in whatever thread the computation runs.
The function asks the loop to send the operands to the client, and waits for the results.

jaxlib copies results into XLA's buffers without a look at their sizes, so they are checked here.
Nothing of the client is unpickled: its process finds the function by the artifact and the index.

An error of a function ends only the part of the device that called it: other devices of the computation
would wait for that one in the next collective, until XLA ends the process. So a computation over several
devices gets NaNs and zeros in place of what could not be computed, goes on to its end, and fails then
(`Raised`). No comparison with a NaN holds, so most loops that wait for results end.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from jax.extend.mlir import ir

from pw.core.dtypes import BY_MLIR, PACKED
from pw.core.errors import CompileError, ComputationFailed
from pw.core.packing import ArrayType
from pw.core.programs.stablehlo import CALLS
from pw.core.sharding import dtype_of
from pw.devices.host.backend import ClientCall
from pw.devices.jax.threads import Completions

Results = tuple[ArrayType | None, ...]
"""The results of a call; None is a token, which keeps calls in order."""


def calls_in(module: Any, declared: int) -> dict[int, Results]:
    """The results of each function that an MLIR module calls, by its index.

    Raises CompileError for an index that is not below `declared`, and for results that cannot be
    checked.
    """
    calls: dict[int, Results] = {}
    refused: list[str] = []

    def look(operation: Any) -> Any:
        if operation.name == "stablehlo.custom_call":
            target = ir.StringAttr(operation.attributes["call_target_name"]).value
            if target in CALLS:
                try:
                    index, results = _call(operation, target, declared)
                    if calls.setdefault(index, results) != results:
                        refused.append(f"the callback {index} has results of several types")
                except (KeyError, ValueError, CompileError) as error:
                    refused.append(str(error))
        return ir.WalkResult.ADVANCE

    module.operation.walk(look)
    if refused:
        raise CompileError(refused[0])
    return calls


def _call(operation: Any, target: str, declared: int) -> tuple[int, Results]:
    config = ir.DictAttr(operation.attributes["mhlo.backend_config"])
    index = ir.IntegerAttr(config["index"]).value
    if not 0 <= index < declared:
        raise CompileError(
            f"the function calls back function {index} of its client through {target!r}, and declares "
            f"{declared}; functions that call back need the process that has made them"
        )
    results = tuple(_type(result.type) for result in operation.results)
    if "partitioned" in target and any(results):
        raise CompileError(
            f"the callback {index} is called for each shard, and must return nothing"
        )
    return index, results


def _type(mlir_type: Any) -> ArrayType | None:
    if str(mlir_type) == "!stablehlo.token":
        return None
    tensor = ir.RankedTensorType(mlir_type)
    dtype = BY_MLIR.get(str(tensor.element_type))
    if dtype is None or dtype in PACKED or not tensor.has_static_shape:
        raise CompileError(
            f"a callback returns {mlir_type}, which cannot come from another process"
        )
    return dtype, tuple(tensor.shape)


_AFTER_ERROR = 1000
"""Calls after an error that get no results of their function. The next one raises: the computation may be a
loop that waits for other results."""


class Raised:
    """The error of a function in a computation over several devices; one computation at a time."""

    def __init__(self) -> None:
        self._words = ""
        self._filled = 0

    @property
    def is_set(self) -> bool:
        """Whether no function is called any more."""
        return bool(self._words)

    def filled(self, words: str, types: Sequence[ArrayType]) -> Sequence[np.ndarray[Any, Any]]:
        """Keep the first error, and return results for XLA. Raises RuntimeError after many of them."""
        self._words = self._words or words
        self._filled += 1
        if self._filled > _AFTER_ERROR:
            raise RuntimeError(self._words)
        return [_filler(np.dtype(dtype_of(dtype)), shape) for dtype, shape in types]

    def check(self) -> None:
        """Raise ComputationFailed with the first error of the computation that is over, if there was one."""
        words, self._words, self._filled = self._words, "", 0
        if words:
            raise ComputationFailed(f"CpuCallback error calling callback: {words}")


class CallbackCalls:
    """Calls the clients of this host's computations."""

    def __init__(self, completions: Completions) -> None:
        self._completions = completions
        self._handler: Callable[[ClientCall], None] | None = None
        self._waiting: set[_Wait] = set()
        self._lock = threading.Lock()
        self._closed = False

    def handled_by(self, handler: Callable[[ClientCall], None]) -> None:
        """Have calls go to `handler`, on the loop."""
        self._handler = handler

    def functions(
        self,
        client: int,
        artifact: bytes,
        declared: int,
        called: Mapping[int, Results],
        raised: Raised | None,
    ) -> list[Callable[..., Any]]:
        """The functions for XLA, by index. They raise where there is no `raised`."""
        return [
            self._function(client, artifact, index, called.get(index, ()), raised)
            for index in range(declared)
        ]

    def _function(
        self, client: int, artifact: bytes, index: int, results: Results, raised: Raised | None
    ) -> Callable[..., Any]:
        types = tuple(one for one in results if one is not None)

        def answered(operands: Sequence[Any]) -> Sequence[np.ndarray[Any, Any]]:
            # Copies: if the client is lost, this call returns while its bytes may still be sent.
            arrays = [np.array(operand) for operand in operands if operand is not None]
            wait = _Wait()
            call = ClientCall(client, artifact, index, arrays, types, wait.returned, wait.raised)
            self._begin(wait, call)
            wait.over.wait()
            with self._lock:
                self._waiting.discard(wait)
            if wait.error:
                raise RuntimeError(wait.error)
            return _checked(wait.results, types)

        def function(*operands: Any) -> tuple[Any, ...]:
            if raised is not None and raised.is_set:
                arrays = raised.filled("", types)
            else:
                try:
                    arrays = answered(operands)
                except RuntimeError as error:
                    if raised is None:
                        raise
                    arrays = raised.filled(str(error), types)
            values = iter(arrays)
            return tuple(None if one is None else next(values) for one in results)

        return function

    def _begin(self, wait: _Wait, call: ClientCall) -> None:
        with self._lock:
            self._waiting.add(wait)
            if self._closed or self._handler is None:
                wait.raised("the host ends")
        if self._handler is not None:
            self._completions.post(self._handler, call)

    def close(self) -> None:
        """End all calls."""
        with self._lock:
            self._closed = True
            for wait in self._waiting:
                wait.raised("the host ends")


class _Wait:
    """A thread of XLA's waits for a client."""

    def __init__(self) -> None:
        self.over = threading.Event()
        self.results: Sequence[np.ndarray[Any, Any]] = ()
        self.error = ""

    def returned(self, results: Sequence[np.ndarray[Any, Any]]) -> None:
        if not self.over.is_set():
            self.results = results
            self.over.set()

    def raised(self, words: str) -> None:
        if not self.over.is_set():
            self.error = words
            self.over.set()


def _filler(dtype: np.dtype[Any], shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    return np.zeros(shape, dtype) if dtype.kind in "biu" else np.full(shape, np.nan, dtype)


def _checked(
    results: Sequence[np.ndarray[Any, Any]], types: Sequence[ArrayType]
) -> Sequence[np.ndarray[Any, Any]]:
    """The results, if they are of these types. Raises RuntimeError."""
    actual = [(array.dtype, array.shape) for array in results]
    if actual != [(dtype_of(dtype), shape) for dtype, shape in types]:
        raise RuntimeError(f"a callback returned {actual}, but the computation takes {list(types)}")
    return results
