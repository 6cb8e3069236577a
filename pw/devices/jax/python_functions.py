"""Runs clients' Python functions on a host, if the host's owner allows them.

A function takes and returns numpy arrays. It runs on a thread of its own, so neither the loop nor
the execute thread waits for it; its results are `building` until it has returned.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cloudpickle
import numpy as np

from pw.core.errors import CompileError, ComputationFailed
from pw.core.messages import ThreadReport
from pw.core.program import Computation
from pw.core.sharding import ArraySpec, DeviceAddress, dtype_of
from pw.devices.host.backend import Execute
from pw.devices.host.output import Output
from pw.devices.host.program import owner_of
from pw.devices.jax.answers import Answers
from pw.devices.jax.layouts import Layouts, host_shards, local_shards, put
from pw.devices.jax.threads import QueueThread
from pw.devices.jax.values import Failures, awaited, fail


@dataclass(frozen=True, slots=True)
class PythonFunction:
    """An unpickled function and the layout of its results."""

    name: str
    flat: Callable[..., list[Any]]
    outputs: tuple[ArraySpec, ...]
    devices: tuple[DeviceAddress, ...]


@dataclass(eq=False)
class PythonFunctions:
    """Loads and calls Python functions."""

    _layouts: Layouts
    _answers: Answers
    _failures: Failures
    _output: Output
    _allowed: bool
    _failed: Callable[[BaseException], None]
    _calling: str = ""

    def __post_init__(self) -> None:
        self.thread = QueueThread("pw-python", self._call, self._failed)

    def load(
        self, computation: Computation, artifact: bytes, devices: tuple[DeviceAddress, ...]
    ) -> PythonFunction:
        """Unpickle a function. Raises CompileError if this host does not allow that, or it fails."""
        if not self._allowed:
            raise CompileError(
                f"{computation.name!r} is a Python function, and this host runs none from clients; its "
                "owner can start it with pw-worker --allow-python"
            )
        try:
            flat = cloudpickle.loads(artifact)
        except BaseException as error:  # a client's code may raise anything; the host goes on
            raise CompileError(
                f"the Python function {computation.name!r} cannot be loaded here: "
                f"{type(error).__name__}: {error}. What it imports must be installed on the host"
            ) from error
        return PythonFunction(computation.name, flat, computation.outputs, devices)

    def call(self, function: PythonFunction, op: Execute) -> None:
        """Have a function called on the thread; on the execute thread."""
        called = threading.Event()
        for value in op.args:
            value.shared = True
        for value in op.results:
            value.building = called
        self.thread.put((function, op))

    def whereabouts(self) -> list[ThreadReport]:
        """What the thread does now."""
        return self.thread.whereabouts(f"the Python function {self._calling!r}")

    def _call(self, item: tuple[PythonFunction, Execute]) -> None:
        function, op = item
        self._calling = function.name
        try:
            for value in op.args:
                awaited(value)
            errors = [e for value in op.args if (e := self._failures.settled(value)) is not None]
            if errors:
                fail(op.results, errors[0])
            else:
                with self._output.on_behalf_of(owner_of(op.key)):
                    self._fill(function, op)
        except BaseException as error:  # noqa: BLE001 - a user's function may raise anything
            fail(op.results, self._failures.report(error, function.name))
        finally:
            for value in op.results:
                value.building.set()
                self._answers.tell(value)

    def _fill(self, function: PythonFunction, op: Execute) -> None:
        """Run the function and fill the results. Raises what the function raises."""
        shards = [next(iter(local_shards(value.payload).values())) for value in op.args]
        made = function.flat(*[np.asarray(shard) for shard in shards])
        arrays = []
        for index, (result, spec) in enumerate(zip(made, function.outputs, strict=True)):
            host_array = np.asarray(result)
            if host_array.shape != spec.shape or host_array.dtype != dtype_of(spec.dtype):
                raise ComputationFailed(
                    f"result {index} of the host function {function.name!r} is "
                    f"{host_array.dtype}{list(host_array.shape)}, but result_shape_dtypes says "
                    f"{spec.dtype}{list(spec.shape)}"
                )
            layout = self._layouts.of(spec, function.devices)
            positions = tuple(layout.local)
            box = tuple((0, size) for size in spec.shape)
            # A copy: the function may keep its result, and change it.
            parts = [(positions, box, host_array.copy())]
            arrays.append(put(spec, layout, host_shards(spec, positions, parts)))
        for value, array in zip(op.results, arrays, strict=True):
            value.payload = array
