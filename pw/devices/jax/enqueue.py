"""Enqueues computations on devices, and moves arrays between devices, in the order of the ops.

JAX is asynchronous, but not always. On CPU it blocks the caller of a collective until the peers
have come, blocks the caller of a 33rd computation until one has ended, and runs computations with
few operations in the calling thread.

Donation. A donated buffer is deleted while earlier ops may still need it. An op that aliases a
value marks it `shared`, and a read is counted; of such values a copy is donated. An existing host
view needs no copy: either it is one, or JAX knows it and does not donate. A `Watch` that finds its
array deleted follows the value's `heir`, a result of the computation that took the buffer.

Gangs. After this host has failed to enqueue a computation of several hosts, it enqueues no other
one: the peers could meet it in the wrong collective.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pw.core.errors import ComputationFailed, ErrorReport, InternalError
from pw.devices.host.backend import Execute, Move, View
from pw.devices.host.value import Value
from pw.devices.jax.answers import ResultAnswers
from pw.devices.jax.compile import Executable
from pw.devices.jax.layouts import Layouts, local_shards
from pw.devices.jax.modules import ClientCalling
from pw.devices.jax.moves import moved, viewed
from pw.devices.jax.python_functions import PythonFunction, PythonFunctions
from pw.devices.jax.quick import Quick
from pw.devices.jax.threads import Completions, QueueThread
from pw.devices.jax.timing import Timing
from pw.devices.jax.values import Failures, awaited, fail, is_donated, is_ready, local_devices

_GUARD_NAP_S = 0.001
"""Seconds by which the failure of a computation is reported later when no actor watches its results."""


class Enqueuer:
    """Runs `Execute`, `Move` and `View` ops; on the execute thread, or on the loop in its place."""

    def __init__(
        self,
        layouts: Layouts,
        completions: Completions,
        answers: ResultAnswers,
        failures: Failures,
        python: PythonFunctions,
        quick: Quick,
        timing: Timing,
    ) -> None:
        self.executables: dict[bytes, Executable] = {}
        """The installed computations, by key."""
        self.enqueued = 0
        """Computations enqueued."""
        self.copied = 0
        """Donated arguments that were copied."""
        self.is_waiting = False
        """True while the thread waits for the host bytes of an argument."""
        self._layouts = layouts
        self._completions = completions
        self._answers = answers
        self._failures = failures
        self._python = python
        self._quick = quick
        self._timing = timing
        self._gang_error: ErrorReport | None = None
        """Error for which no computation of several hosts is enqueued any more."""
        self.guard_thread: QueueThread[tuple[Value, Callable[[ErrorReport], None]]] = QueueThread(
            "pw-guard", self.guard, completions.fail, _GUARD_NAP_S
        )

    def publish(self, key: bytes, executable: Executable | None) -> None:
        """Make a computation known under `key`; None makes it unknown."""
        self._quick.forget(key)
        if executable is None:
            previous = self.executables.pop(key, None)
            if previous is not None and type(previous.call) is PythonFunction:
                self._python.forget(previous.call)
            return
        self.executables[key] = executable
        # On several devices of this host, XLA computes on threads, and has the caller wait for one.
        if executable.is_straight and not executable.donated and len(executable.devices) == 1:
            self._quick.try_out(key, executable.devices)

    def execute(self, op: Execute) -> None:
        """Enqueue a computation and fill its results, with errors if it fails."""
        self.enqueue(op)
        for value in op.results:
            if value.questions:
                self._answers.tell(value)

    def enqueue(self, op: Execute) -> None:
        """Do as `execute`, but tell nothing that waits for a result.

        The hot path: each line is paid for each computation on each host.
        """
        try:
            call, donated, name, devices, _ = self.executables[op.key]
            if type(call) is PythonFunction:
                return self._python.call(call, op)
            arrays = []
            for value in op.args:
                array = value.payload
                if array is None:
                    self.is_waiting = True
                    array = awaited(value)
                    self.is_waiting = False
                    if array is None:
                        report = value.error or self._failures.unmade
                        if value.alone and op.failed is not None:
                            self._break_gang(op.failed, report)
                        return fail(op.results, report)
                arrays.append(array)
            if op.failed is not None and self._gang_error is not None:
                return fail(op.results, self._gang_error)
            if donated:
                donated = self._donate(op, arrays, donated)
            called_s = time.monotonic() if op.origin else 0.0
            if op.noted is not None:
                op.noted.called_s = time.monotonic()
            if type(call) is ClientCalling:
                return self._call_aside(op, call.call, arrays, donated, name)
            if op.key in self._quick.trials:
                outputs = self._try(op.key, call, arrays)
            else:
                outputs = call(*arrays)
        except Exception as error:  # noqa: BLE001 - it belongs to the results
            report = self._failure(op, error)
            if op.failed is not None:
                self._break_gang(op.failed, report)
            return fail(op.results, report)
        joint = op.failed is not None
        order = self.enqueued
        for value, array in zip(op.results, outputs, strict=True):
            value.fill_by(array, name, order, joint)
        if called_s:
            self._timing.computed(op, called_s, outputs)
        if self._quick.proven and op.results:
            self._quick.enqueued(devices, op.results, outputs[-1])
        if op.failed is not None and op.guarded and op.results:
            last = op.results[-1], op.failed
            if is_ready(op.results[-1]):
                self.guard(last)
            else:
                self.guard_thread.put(last)
        for position in donated:
            op.args[position].fail(self._failures.deleted)
        self.enqueued += 1
        return None

    def _call_aside(
        self, op: Execute, call: Any, arrays: list[jax.Array], donated: tuple[int, ...], name: str
    ) -> None:
        """Enqueue a computation that calls its client, on a thread of its own.

        XLA runs it in the thread that enqueues it. No gang meets another order: a host does the
        later work of a gang when the results of this one are known (`pw.devices.host.outcomes`).
        """
        done = threading.Event()
        for value in op.results:
            value.begin(done, name, self.enqueued, joint=op.failed is not None)
        for position in donated:
            op.args[position].fail(self._failures.deleted)
        self.enqueued += 1

        called_s = time.monotonic() if op.origin else 0.0

        def run() -> None:
            try:
                with jax.enable_x64(True):
                    outputs = call(*arrays)
                for value, array in zip(op.results, outputs, strict=True):
                    value.fill(array)
                if called_s:
                    self._timing.computed(op, called_s, outputs)
                if op.failed is not None and op.results:
                    self.guard_thread.put((op.results[-1], op.failed))
            except Exception as error:  # noqa: BLE001 - it belongs to the results
                # Its client may have released the program meanwhile.
                report = self._failures.report(error, name)
                fail(op.results, report)
                is_at_its_end = isinstance(error, ComputationFailed)  # on all devices
                if op.failed is not None and not is_at_its_end:
                    self._break_gang(op.failed, report)
            finally:
                arrays.clear()
                done.set()
                for value in op.results:
                    self._answers.tell(value)

        threading.Thread(target=run, name="pw-callbacks", daemon=True).start()

    def _try(self, key: bytes, call: Any, arrays: list[jax.Array]) -> Sequence[jax.Array]:
        """Call an executable that is on trial."""
        began_s, processor_s = time.monotonic(), time.thread_time()
        outputs: Sequence[Any] = call(*arrays)
        processor_s, clock_s = time.thread_time() - processor_s, time.monotonic() - began_s
        ended = all(array.is_ready() for array in outputs)
        self._quick.tried(key, processor_s, clock_s, ended=ended)
        return outputs

    def _donate(
        self, op: Execute, arrays: list[jax.Array], donated: tuple[int, ...]
    ) -> tuple[int, ...]:
        """Copy the arguments that are still needed; the positions of those that are donated."""
        positions = []
        args, copied = op.args, set(op.copied)
        if len(set(args)) < len(args):
            copied |= {at for at, value in enumerate(args) if args.count(value) > 1}
        heir = op.results[0] if op.results else None
        for position in donated:
            if position not in copied and args[position].may_donate(heir):
                positions.append(position)
            else:
                arrays[position] = copy(arrays[position])
                self.copied += 1
        return tuple(positions)

    def _break_gang(self, failed: Callable[[ErrorReport], None], report: ErrorReport) -> None:
        if self._gang_error is None:
            self._gang_error = self._failures.of_stopped_gang(report)
            self._completions.post(failed, report)

    def _failure(self, op: Execute, error: Exception) -> ErrorReport:
        executable = self.executables.get(op.key)
        if executable is None:
            error = InternalError(f"the computation {op.key.hex()} is not installed on this host")
        name = "" if executable is None else executable.name
        return self._failures.report(error, name, partial(_devices_of, op))

    def move(self, op: Move) -> None:
        """Lay out a value on other devices of this host."""
        array = awaited(op.source)
        if array is None:
            op.result.fail_as(op.source, self._failures.unmade)
        else:
            try:
                op.result.fill_by(moved(op, array, self._layouts), "", self.enqueued, False)
            except Exception as error:  # noqa: BLE001 - the failure belongs to the result
                op.result.fail(self._failures.report(error), alone=True)
        self._answers.tell(op.result)

    def view(self, op: View) -> None:
        """Make a value of shards of other values."""
        result = op.result
        for source in op.sources:
            value = source.value
            if awaited(value) is None:
                result.fail_as(value, self._failures.unmade)
        if result.error is None:
            try:
                makers = {source.value.maker for source in op.sources}
                maker = makers.pop() if len(makers) == 1 else ""
                joint = any(source.value.is_joint for source in op.sources)
                result.fill_by(viewed(op, self._layouts), maker, self.enqueued, joint)
            except Exception as error:  # noqa: BLE001 - the failure belongs to the result
                result.fail(self._failures.report(error), alone=True)
        self._answers.tell(result)

    def guard(self, item: tuple[Value, Callable[[ErrorReport], None]]) -> None:
        """Wait for the result of a gang computation, and report its failure."""
        value, failed = item
        array = value.payload
        if array is None:
            return
        try:
            array.block_until_ready()
        except Exception as error:  # noqa: BLE001 - a computation may fail with anything
            if not is_donated(array, error):
                devices = partial(local_devices, array)
                report = self._failures.report(error, value.maker, devices)
                self._completions.post(failed, report)

    def described(self, op: object) -> str:
        """The name of an op, for a report about threads."""
        if not isinstance(op, Execute):
            return "nothing" if op is None else f"the {type(op).__name__.lower()} of an array"
        executable = self.executables.get(op.key)
        name = op.key.decode() if executable is None else executable.name
        return f"the arguments of {name!r}" if self.is_waiting else f"the computation {name!r}"


def _devices_of(op: Execute) -> set[jax.Device]:
    """Return the devices of this host on which a computation has its arguments."""
    arrays = (value.payload for value in op.args if value.payload is not None)
    return {device for array in arrays for device in local_devices(array)}


def copy(array: jax.Array) -> jax.Array:
    """A copy of an array, made shard by shard so that no other host takes part."""
    shards = []
    for device, shard in local_shards(array).items():
        if shard.sharding.memory_kind in (None, device.default_memory().kind):
            shards.append(jnp.copy(shard))
        else:
            shards.append(jax.device_put(shard, shard.sharding, may_alias=False))
    return jax.make_array_from_single_device_arrays(
        array.shape, array.sharding, shards, dtype=array.dtype
    )
