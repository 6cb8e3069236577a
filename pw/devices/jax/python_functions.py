"""Runs clients' Python functions on a host, if the host's owner allows them.

A function takes and returns numpy arrays. It runs in a process of its own (`pw.devices.python`): one
for all functions of a client, and one for each stream. A thread for each process waits for it, so
neither the loop nor the execute thread does; results are `building` until the function has returned.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import jax
import msgspec
import numpy as np

from pw.core.errors import ErrorReport, PythonRefused
from pw.core.functions.parts import HostPart, share_of
from pw.core.messages import ThreadReport
from pw.core.programs.program import Computation
from pw.core.sharding import ArraySpec, Box, DeviceAddress, host_boxes
from pw.devices.host.backend import Execute, relative
from pw.devices.host.output import Output
from pw.devices.host.program import owner_of
from pw.devices.jax.answers import ResultAnswers
from pw.devices.jax.layouts import Layouts, aligned_empty, host_shards, local_shards, put
from pw.devices.jax.threads import QueueThread
from pw.devices.jax.timing import Timing
from pw.devices.jax.values import Failures, awaited, fail
from pw.devices.python.confining import NO_BOUNDS, ChildBounds
from pw.devices.python.process import FunctionRaised, ProcessEnded, PythonProcess
from pw.devices.python.wire import Load


@dataclass(eq=False)
class _Worker:
    """A Python process of a client, the thread that waits for it, and the keys of its functions."""

    client: int
    process: PythonProcess
    thread: QueueThread[Callable[[], None]]
    keys: set[bytes] = field(default_factory=set)
    calling: str = ""


@dataclass(frozen=True, slots=True)
class PythonFunction:
    """A function that a process knows, and the layout of its results on this host."""

    key: bytes
    share: HostPart
    outputs: tuple[ArraySpec, ...]
    devices: tuple[DeviceAddress, ...]
    is_repeatable: bool
    worker: _Worker


@dataclass(eq=False)
class PythonFunctions:
    """Loads and calls Python functions."""

    _host: str
    _layouts: Layouts
    _answers: ResultAnswers
    _failures: Failures
    _output: Output
    _allowed: bool
    _failed: Callable[[BaseException], None]
    _timing: Timing
    _bounds: ChildBounds = NO_BOUNDS

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._workers: dict[Hashable, _Worker] = {}

    def load(
        self,
        key: bytes,
        computation: Computation,
        artifact: bytes,
        devices: tuple[DeviceAddress, ...],
    ) -> PythonFunction:
        """Give a function to its process. Raises PythonRefused if this host does not allow that."""
        if not self._allowed:
            raise PythonRefused(
                f"{computation.name!r} is a Python function, and this host runs none from clients; its "
                "owner can start it with pw-worker --allow-python, or LocalCluster(allow_python=True)"
            )
        traits = computation.traits
        # The state differs by device, and not by the part of the data.
        counted = len(computation.outputs) - 1 if traits.keeps_state else None
        share = share_of(computation.name, computation.outputs, devices, self._host, counted)
        owner = owner_of(key)
        name: Hashable = owner
        if traits.keeps_state:
            name = owner, computation.artifact, share.index
        with self._lock:
            worker = self._workers.get(name)
            if worker is None:
                worker = self._workers[name] = _Worker(
                    owner,
                    PythonProcess(_environment, aligned_empty, self._bounds),
                    QueueThread("pw-python", lambda job: job(), self._failed),
                )
            worker.keys.add(key)
            worker.process.load(Load(key, artifact, share))
        return PythonFunction(
            key, share, computation.outputs, devices, traits.is_repeatable, worker
        )

    def forget(self, function: PythonFunction) -> None:
        """Drop a function after the calls so far; end its process after its last function."""
        worker = function.worker
        with self._lock:
            worker.keys.discard(function.key)
            is_last = not worker.keys
            if is_last:
                self._workers = {k: w for k, w in self._workers.items() if w is not worker}
        if is_last:
            worker.thread.put(worker.process.close)
            worker.thread.stop()
        else:
            worker.thread.put(lambda: worker.process.drop(function.key))

    def call(self, function: PythonFunction, op: Execute) -> None:
        """Have a function called on its thread; on the execute thread."""
        called = threading.Event()
        for value in op.args:
            value.shared = True
        for value in op.results:
            value.begin(called)
        function.worker.thread.put(lambda: self._call(function, op, called))

    def whereabouts(self) -> list[ThreadReport]:
        """What the threads do now."""
        with self._lock:
            workers = list(self._workers.values())
        reports = []
        for worker in workers:
            what = f"the Python function {worker.calling!r}"
            for report in worker.thread.whereabouts(what, worker.client):
                stack = worker.process.stack() or report.stack
                reports.append(msgspec.structs.replace(report, stack=stack))
        return reports

    def close(self) -> list[QueueThread[Any]]:
        """End all processes; return the threads, which end soon."""
        with self._lock:
            workers, self._workers = list(self._workers.values()), {}
        for worker in workers:
            worker.process.close()
        return [worker.thread for worker in workers]

    def _call(self, function: PythonFunction, op: Execute, called: threading.Event) -> None:
        name = function.worker.calling = function.share.name
        try:
            for value in op.args:
                awaited(value)
            errors = [e for value in op.args if (e := self._failures.settled(value)) is not None]
            if errors:
                fail(op.results, errors[0])
            else:
                called_s = time.monotonic()
                with self._output.on_behalf_of(owner_of(op.key)):
                    self._fill(function, op)
                if op.origin:
                    self._timing.called(op, called_s)
        except FunctionRaised as error:
            fail(op.results, self._reported(error.report, name))
        except BaseException as error:  # noqa: BLE001 - it belongs to the results
            fail(op.results, self._failures.report(error, name))
        finally:
            called.set()
            for value in op.results:
                self._answers.tell(value)

    def _reported(self, report: ErrorReport, name: str) -> ErrorReport:
        words = report.message
        if report.kind != PythonRefused.__name__:
            words = f"the computation {name!r} failed: {words}"
        return msgspec.structs.replace(report, message=words, where=self._host)

    def _fill(self, function: PythonFunction, op: Execute) -> None:
        """Run the function and fill the results. Raises what the function raises."""
        shards = [next(iter(local_shards(value.payload).values())) for value in op.args]
        arguments = [np.asarray(shard) for shard in shards]
        process, share = function.worker.process, function.share
        try:
            results = process.call(function.key, arguments, self._output.write)
        except ProcessEnded:
            if not function.is_repeatable:
                raise
            results = process.call(function.key, arguments, self._output.write)
        arrays = []
        for result, region, spec in zip(results, share.boxes, function.outputs, strict=True):
            layout = self._layouts.of(spec, function.devices)
            parts = [
                (positions, relative(box), result[_inside(box, region)])
                for box, positions in host_boxes(spec, function.devices, self._host)
            ]
            arrays.append(put(spec, layout, host_shards(spec, tuple(layout.local), parts)))
        for value, array in zip(op.results, arrays, strict=True):
            value.fill(array)


def _inside(box: Box, region: Box) -> tuple[slice, ...]:
    """Return a box as an index of the region that contains it."""
    return tuple(
        slice(start - first, stop - first)
        for (start, stop), (first, _) in zip(box, region, strict=True)
    )


def _environment() -> dict[str, str]:
    """What differs in a Python process: JAX has the host's CPU devices there, and no accelerator."""
    try:
        devices = len(jax.local_devices(backend="cpu"))
    except RuntimeError:
        devices = 1
    flags = os.environ.get("XLA_FLAGS", "").split()
    kept = [flag for flag in flags if "host_platform_device_count" not in flag]
    return {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(devices),
        "JAX_ENABLE_X64": "1",  # a host must not narrow the types that a client has declared
        "XLA_FLAGS": " ".join(kept),
    }
