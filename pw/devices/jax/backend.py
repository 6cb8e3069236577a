"""The devices of one host, driven with JAX.

`JaxBackend` sends each op to the part that runs it:

| part | ops | thread |
|---|---|---|
| `execution.py`, `enqueue.py` | `Execute`, `Move`, `View`, `RunFunction` | `pw-execute`, or the loop |
| `arrays_from_bytes.py` | `Build` | the loop; `pw-copy` for large arrays; `pw-execute` on accelerators |
| `arrays_from_bytes.py` | `Move` from a file | `pw-copy` |
| `answers.py` | `Watch`, `Read` | any thread that finds the values ready; `pw-watch-*` wait |
| `python_functions.py` | calls of Python functions | `pw-python` |
| `compile.py` | none: `install` and `forget` | `pw-compile`; `pw-compile-*` wait for other processes |
| `enqueue.py` | none: waits for the results of gangs | `pw-guard` |
| `device_tests.py` | none: `test` | `pw-test-*`; `pw-execute` enqueues |

Only the execute thread may be blocked by JAX. Its queue has what must keep its place: computations,
moves, calls, small builds on accelerators, and some watches.

Which thread writes the fields of a value:

- `payload`, `error`, `alone`: the thread that runs the op which makes the value. Later, the execute
  thread when it donates the buffers, and any thread that finds that the array has failed.
- `maker`, `is_joint`, `order`, `shared`, `is_given`, `heir`: the execute thread, or the loop in its place.
- `building`: set on the loop or the execute thread before another thread makes the value.
- The host's actors set `error`, `alone`, `shared` and `buffers` on the loop.
- `reads_begun`: the loop. `reads_ended` and `asked`: any thread, under the lock of `Answers`.
"""

from __future__ import annotations

import math
import warnings
from asyncio import AbstractEventLoop
from collections import deque
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from pw.core.messages import ThreadReport
from pw.core.recorder import Recorder
from pw.core.sharding import ArraySpec, Box, DeviceAddress, host_boxes
from pw.devices.host.backend import (
    Build,
    ClientCall,
    Execute,
    Move,
    Op,
    Read,
    RunFunction,
    Suspect,
    View,
    Watch,
)
from pw.devices.host.output import Output
from pw.devices.host.program import owner_of
from pw.devices.host.value import Value
from pw.devices.jax.answers import ResultAnswers, in_host_memory
from pw.devices.jax.arrays_from_bytes import Builds
from pw.devices.jax.callbacks import CallbackCalls
from pw.devices.jax.compile import Compiler, Executable
from pw.devices.jax.compile_processes import CompileProcesses
from pw.devices.jax.device_tests import DeviceTester
from pw.devices.jax.enqueue import Enqueuer
from pw.devices.jax.executables import ExecutableFiles
from pw.devices.jax.execution import Execution
from pw.devices.jax.layouts import Layouts, local_shards
from pw.devices.jax.python_functions import PythonFunctions
from pw.devices.jax.quick import Quick
from pw.devices.jax.threads import Completions, join_all
from pw.devices.jax.timing import Timing
from pw.devices.jax.values import Failures
from pw.devices.python.confining import NO_BOUNDS, ChildBounds

_CLOSE_TIMEOUT_S = 5.0


class JaxBackend:
    """Runs ops on this process's JAX devices (see `pw.devices.host.backend.Backend` for the promises).

    Args:
        loop: loop on which every `done` is called; methods are called there too.
        host: this host's name in device addresses.
        device: the JAX device at an address, for the whole island; called from several threads.
        allow_python: run clients' Python functions.
        python_bounds: bounds of what their processes may do.
        compile_apart: have what clients send parsed and compiled in processes beside this one; None
            does it in this process, which may crash. Called with a function that takes an exception.
        compile_cache: a folder that outlives this process, for executables; None for none.
        output: takes the lines that Python functions and compilations write.
        recorder: takes when computations begin and end, for timelines.
    """

    def __init__(
        self,
        loop: AbstractEventLoop,
        host: str,
        device: Callable[[DeviceAddress], jax.Device],
        *,
        allow_python: bool = False,
        python_bounds: ChildBounds = NO_BOUNDS,
        compile_apart: Callable[[Callable[[BaseException], None]], CompileProcesses] | None = None,
        compile_cache: Path | None = None,
        output: Output | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        # The client has asked for the donation, and the worker's log does not reach it.
        warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
        output = output or Output()
        self._host, self._device = host, device
        self._layouts = layouts = Layouts(host, device)
        self._completions = completions = Completions(loop)
        failures = Failures(host, lambda *news: completions.post(self._suspect, *news))
        quick = Quick()
        self._answers = answers = ResultAnswers(layouts, completions, failures)
        self._builds = Builds(layouts, completions, answers, failures)
        self._timing = timing = Timing(recorder or Recorder(), completions.fail)
        self._python = PythonFunctions(
            host,
            layouts,
            answers,
            failures,
            output,
            allow_python,
            completions.fail,
            timing,
            python_bounds,
        )
        self._executables = ExecutableFiles(compile_cache)
        self._calls = CallbackCalls(completions)
        self._processes = compile_apart(completions.fail) if compile_apart else None
        self.compiler = Compiler(
            host,
            layouts,
            completions,
            self._publish,
            self._executables,
            self._python,
            output,
            self._calls,
            self._processes,
        )
        self.install, self.forget = self.compiler.install, self.compiler.forget
        self.compile = self.compiler.examine
        self.enqueuer = Enqueuer(
            layouts, completions, answers, failures, self._python, quick, timing
        )
        handlers: dict[type, Callable[[Any], None]] = {
            Execute: self.enqueuer.execute,
            Move: self.enqueuer.move,
            View: self.enqueuer.view,
            Build: self._builds.finish,
            Watch: answers.look,
            RunFunction: lambda op: op.function(),
        }
        self.execution = Execution(handlers, self.enqueuer.enqueue, quick, completions.fail)
        self.run_now = self.execution.run_now
        """Runs a computation on the loop, if it is quick and the execute thread has nothing to do."""
        self._tests = DeviceTester(self._own, self.execution.append, completions)
        self._suspects: tuple[int, Suspect] = (0, lambda ordinals, word: None)
        self.test = self._tests.test

    def _publish(self, key: bytes, executable: Executable | None) -> None:
        self.execution.append(partial(self.enqueuer.publish, key, executable))

    def take_calls(self, handler: Callable[[ClientCall], None]) -> None:
        """Have `handler` called for each call of a client's function, on the loop."""
        self._calls.handled_by(handler)

    def submit(self, ops: list[Op]) -> None:
        """Run computations in order; build arrays and answer questions at once."""
        computing: deque[Op] = deque()
        asking: list[Watch | Read] = []
        urgent = False
        for op in ops:
            if isinstance(op, Execute):
                computing.append(op)
            elif isinstance(op, Build) and self._builds.overtakes(op):
                self._builds.begin(op)
            elif isinstance(op, Move) and op.source.is_in_file:
                self._builds.begin(op.source.payload.build(op))
            elif isinstance(op, Read):
                op.value.begin_read()  # before any of these ops may donate the value
                urgent = urgent or op.urgent
                asking.append(op)
            elif isinstance(op, Watch) and op.values and not _is_of_last(op, computing):
                asking.append(op)
            else:
                computing.append(op)
        ops.clear()
        nothing_comes = not computing and self.execution.is_idle
        for question in asking:
            self._answers.look(question, nothing_comes=nothing_comes)
        if computing:
            self.execution.submit(computing, urgent=urgent)

    def is_there(self, value: Value) -> bool:
        """Whether a value is ready, without an error, as far as that is known at once."""
        array = value.payload
        try:
            if array is None or array.is_deleted() or not array.is_ready():
                return False
            array.block_until_ready()
        except Exception:  # noqa: BLE001 - a computation may fail with anything
            return self._answers.failures.settled(value) is None
        return True

    def read_now(self, op: Read) -> list[np.ndarray[Any, Any]] | None:
        """Host views of a value that is there; None if they take time."""
        return self._answers.read_now(op)

    def snapshot(
        self, value: Value, spec: ArraySpec, devices: tuple[DeviceAddress, ...]
    ) -> list[tuple[Box, np.ndarray[Any, Any]]] | None:
        """Host views of a ready value; None if it is not ready. The execute thread may donate it
        meanwhile."""
        array = value.payload
        if array is None or value.error is not None or value.is_given:
            return None
        try:
            if array.is_deleted() or not array.is_ready():
                return None
            if value.is_in_file:
                return [
                    (box, array.shard(at[0])) for box, at in host_boxes(spec, devices, self._host)
                ]
            local = self._layouts.of(spec, devices).local
            shards = local_shards(array)
            boxes = [
                (box, shards[local[positions[0]]])
                for box, positions in host_boxes(spec, devices, self._host)
            ]
            if not in_host_memory(array):
                for _, shard in boxes:
                    shard.copy_to_host_async()
            return [(box, np.asarray(shard)) for box, shard in boxes]
        except Exception:  # noqa: BLE001 - it was donated meanwhile, or has failed
            return None

    def counters(self) -> dict[str, int]:
        """Computations enqueued, compiled and installed, donated arguments copied, live bytes."""
        return {
            "computations": self.enqueuer.enqueued,
            "compilations": self.compiler.compilations,
            "compile_us": int(self.compiler.compile_s * 1e6),
            "executables_loaded": self._executables.loaded,
            "executables_failed": self._executables.failed,
            "installed": len(self.compiler),
            "compilers_ended": self._processes.ended if self._processes else 0,
            "donations_copied": self.enqueuer.copied,
            "waiting": self._answers.watchers.waiting,
            "live_bytes": _live_bytes(),
        }

    def take_suspicions(self, devices: int, handler: Suspect) -> None:
        """Have `handler` called for each error that names some of so many devices, on the loop."""
        self._suspects = devices, handler

    def _suspect(self, devices: Collection[jax.Device], word: str) -> None:
        count, handler = self._suspects
        here = {self._own(ordinal): ordinal for ordinal in range(count)}
        handler([here[device] for device in devices if device in here], word)

    def _own(self, ordinal: int) -> jax.Device:
        return self._device(DeviceAddress(self._host, ordinal))

    def allocated_bytes(self, ordinal: int) -> tuple[int | None, int | None]:
        """Return the bytes in use on a device, and the most that were; CPU devices do not say."""
        stats = self._own(ordinal).memory_stats() or {}
        return stats.get("bytes_in_use"), stats.get("peak_bytes_in_use")

    def stage(self, value: Value) -> str:
        """How far the op that makes a value is; of a donated value, whether it was ready before."""
        is_donated = False
        while value.heir is not None:
            value, is_donated = value.heir, True
        array, doing = value.payload, self.execution.doing
        stage = "submitted"
        try:
            if value.error is not None or (array is not None and array.is_ready()):
                stage = "finished"
            elif array is not None:
                stage = "enqueued"
            elif isinstance(doing, Execute) and value in doing.results:
                stage = "submitted" if self.enqueuer.is_waiting else "entered"
        except Exception:  # noqa: BLE001 - it has failed, or is donated at this moment
            stage = "finished"
        return stage if stage == "finished" or not is_donated else "enqueued"

    def whereabouts(self) -> tuple[ThreadReport, ...]:
        """What the threads do that may hold up others, and where in the code."""
        op = self.execution.doing
        client = owner_of(op.key) if isinstance(op, Execute) else 0
        return (
            *self.execution.thread.whereabouts(self.enqueuer.described(op), client),
            *self._python.whereabouts(),
            *self._builds.thread.whereabouts("bytes that become an array"),
            *self.compiler.thread.whereabouts("a compilation"),
            *(self._processes.whereabouts() if self._processes else ()),
        )

    def close(self) -> None:
        """Stop all threads; one that a collective blocks is left behind after a few seconds."""
        self.execution.close()
        self._calls.close()
        self._completions.close()
        compiling = self._processes.close() if self._processes else []
        join_all(
            [
                self.execution.thread,
                self.compiler.thread,
                *self._answers.watchers.close(),
                *self._timing.watchers.close(),
                self.enqueuer.guard_thread,
                self._builds.thread,
                *self._python.close(),
                *self._tests.close(),
            ],
            _CLOSE_TIMEOUT_S,
        )
        for thread in compiling:
            thread.join(_CLOSE_TIMEOUT_S)
        self.enqueuer.executables.clear()


def _is_of_last(watch: Watch, before: deque[Op]) -> bool:
    """Whether it asks only for the result of the op before it, whose thread then answers."""
    maker = before[-1] if before else None
    return isinstance(maker, Execute) and watch.values == maker.results[-1:]


def _live_bytes() -> int:
    """Bytes of all live arrays on this process's devices; a ready buffer of several arrays counts once."""
    total = 0
    seen: set[tuple[jax.Device, int]] = set()
    for array in jax.live_arrays():
        if isinstance(array.sharding, jax.sharding.NamedSharding) and not array.is_deleted():
            shard = math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize
            buffers = _buffers(array)
            new = len(array.sharding.addressable_devices) - len(buffers & seen)
            seen |= buffers
            total += shard * new
    return total


def _buffers(array: Any) -> set[tuple[jax.Device, int]]:
    """The addresses of the shards of an array; none if it is not ready, or is donated meanwhile."""
    try:
        if not array.is_ready():
            return set()
        shards = local_shards(array).items()
        return {(device, shard.unsafe_buffer_pointer()) for device, shard in shards}
    except Exception:  # noqa: BLE001 - it was donated meanwhile, has failed, or has no address
        return set()
