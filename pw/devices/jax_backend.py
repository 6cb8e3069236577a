"""The devices of one host, driven with JAX.

One thread enqueues: it takes ops in the order of `submit`, so that hosts which submit alike enqueue
alike, and collectives pair up. JAX runs asynchronously behind it (on CPU up to 32 computations, then
the call blocks, which holds up this thread and nobody else). While it has nothing to do, the loop
thread runs in its place what takes a few microseconds: small arrays, and computations without loops
that concern no other host, once they have been seen to end so fast. A second thread compiles. A third
waits for arrays, in the order in which that was asked; where everything is ready already and nobody
waits, the execute thread answers at once. A fourth assembles large arrays from host bytes.

Donation. A donated buffer is deleted while earlier ops may still want it. Who aliases it, or is
going to read it, has marked the value `shared`, and a copy is donated instead. A host view that
exists already needs no such care: JAX sees it and does not donate. A `Watch` that finds its array
deleted follows the value's `heir`, a result of the computation that took the buffer: when that is
ready, so was this.

JAX's warning that a donated buffer was of no use is silenced: here donation is the client's wish,
and the worker's log is no place to tell it.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
import warnings
from asyncio import AbstractEventLoop
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np

from pw.core.errors import (
    ArrayDeleted,
    ComputationFailed,
    Error,
    ErrorReport,
    HostLost,
    InternalError,
    OutOfDeviceMemory,
)
from pw.core.messages import ThreadReport
from pw.core.program import Computation
from pw.core.sharding import ArraySpec, Box, DeviceAddress, box_shape, box_slices, host_boxes
from pw.devices import python_functions
from pw.devices.backend import Build, Call, Done, Execute, Move, Op, Read, Value, Watch
from pw.devices.executables import Executables
from pw.devices.jax_compile import Compiler, Executable
from pw.devices.jax_layouts import (
    Layouts,
    assemble,
    bytes_to_copy,
    host_shards,
    local_shards,
    put,
    whole,
)
from pw.devices.jax_threads import Completions, QueueThread, join_all
from pw.devices.python_functions import PythonFunction

_INLINE_BYTES = 64 * 1024
"""Builds that copy less than this cost less than a change of threads."""

_QUICK_S = 60e-6
"""What a computation takes that costs less than a change of threads there and back."""

_TRIALS = 16
"""Calls after which it is known whether an executable is quick."""

_FEW_OPS = 8
"""The loop runs no more of them in one go."""

_SOON_S = 100e-6
"""Computations that come after one another faster than this keep the execute thread awake."""

_CLOSE_TIMEOUT_S = 5.0

_GUARD_NAP_S = 0.001
"""How much later it may be known that a computation has failed whose results nobody watches."""

_COLLECTIVES = ("Gloo", "NCCL")
"""Who speaks in the error of a computation whose peers have died under it."""


@dataclass(slots=True)
class _Trial:
    """What the calls of an executable were like so far."""

    calls: int = 0
    ended: int = 0
    """Calls whose results were there when they returned."""
    best_s: float = math.inf
    """The least processor time of a call."""


class JaxBackend:
    """Runs ops on this process's JAX devices (see `pw.devices.backend.Backend` for the promises).

    Args:
        loop: where every `done` is called; methods are called there too.
        host: this host's name in device addresses.
        device: the JAX device at an address, for the whole island; called from several threads.
        allow_python: run clients' Python functions (`pw.devices.python_functions`).
        compile_cache: a folder that outlives this process, for what it compiles; None for none.
    """

    def __init__(
        self,
        loop: AbstractEventLoop,
        host: str,
        device: Callable[[DeviceAddress], jax.Device],
        *,
        allow_python: bool = False,
        compile_cache: Path | None = None,
    ) -> None:
        warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
        self._host = host
        self._deleted = ErrorReport(
            ArrayDeleted.__name__, "the array was donated to a computation before this use", host
        )
        self._layouts = Layouts(host, device)
        self._completions = Completions(loop)
        self._allow_python = allow_python
        self._python_keys: set[bytes] = set()
        self._executables: dict[bytes, Executable] = {}
        self._handing = threading.RLock()
        self._handed = 0
        """Batches that the execute thread was given; under the lock."""
        self._ended = 0
        """Those that it is done with; written by it only."""
        self._here: deque[Op] | None = None
        """What the loop thread runs itself at this moment; under the lock."""
        self._trials: dict[bytes, _Trial] = {}
        """Executables that may turn out to be quick."""
        self._quick: set[bytes] = set()
        """Executables that have ended when their call returns, after microseconds, and always will have."""
        self._asked_s = 0.0
        """When the last computation came that the loop could have run."""
        self._executed = 0
        self._copied = 0
        self._gang_broken: ErrorReport | None = None
        """Why nothing is enqueued any more that other hosts take part in."""
        self._waits_begun = 0  # written by the execute thread only
        self._waits_ended = 0  # written by the watcher only
        self._closed = False
        self._doing: Op | None = None  # written by the execute thread only
        self._awaiting = False  # it waits for the host bytes of an argument
        self._calling_name = ""  # written by the thread of Python functions only
        self._handlers: dict[type, Callable[[Any], None]] = {
            Execute: self._execute,
            Move: self._move,
            Build: self._build,
            Watch: self._watch,
            Read: self._read,
            Call: lambda op: op.function(),
        }
        fail = self._completions.fail
        kept = self._executables_kept = Executables(compile_cache)
        self._compiler = Compiler(host, self._layouts, self._completions, self._publish, kept)
        self._copying: QueueThread[Build] = QueueThread("pw-copy", self._finish_build, fail)
        self._watching: QueueThread[Watch | Read] = QueueThread("pw-watch", self._wait, fail)
        self._calling: QueueThread[tuple[PythonFunction, Execute]] = QueueThread(
            "pw-python", self._call_python, fail
        )
        self._guarding: QueueThread[tuple[Value, Callable[[ErrorReport], None]]] = QueueThread(
            "pw-guard", self._guard, fail, _GUARD_NAP_S
        )
        self._compiling: QueueThread[Callable[[], None]] = QueueThread(
            "pw-compile", lambda job: job(), fail
        )
        self._executing: QueueThread[deque[Op]] = QueueThread("pw-execute", self._run, fail)

    def install(
        self,
        key: bytes,
        computation: Computation,
        artifact: bytes,
        devices: tuple[DeviceAddress, ...],
        done: Done,
    ) -> None:
        """Compile `artifact` on the compile thread; equal computations share one executable."""
        if computation.python:
            self._compiling.put(
                partial(self._load_python, key, computation, artifact, devices, done)
            )
            return
        self._compiling.put(
            partial(self._compiler.install, key, computation, artifact, devices, done)
        )

    def forget(self, key: bytes) -> None:
        """Drop the computation installed as `key`."""
        self._compiling.put(partial(self._compiler.forget, key))
        self._compiling.put(partial(self._forget_python, key))

    def submit(self, ops: Sequence[Op]) -> None:
        """Run `ops` here if that takes no time and nothing is before them, or on the execute thread."""
        with self._handing:
            rest = deque(ops)
            if self._handed == self._ended and not self._closed and self._pays_here(rest):
                self._run_here(rest)
            if rest:
                self._hand_over(rest)

    def _hand_over(self, ops: deque[Op]) -> None:
        """Let `ops` follow all that was submitted before; from any thread."""
        with self._handing:
            if self._here is not None:
                self._here.extend(ops)
                return
            self._handed += 1
            self._executing.put(ops)

    def _pays_here(self, ops: deque[Op]) -> bool:
        """Whether it costs less to run `ops` than to change threads for them.

        The execute thread stays awake, and works at the same time, if much comes at once or one thing after
        the other.
        """
        if not 0 < len(ops) <= _FEW_OPS or not self._takes_no_time(ops[0]):
            return False
        if isinstance(ops[0], Read | Watch):
            return True
        before_s, self._asked_s = self._asked_s, time.monotonic()
        return self._asked_s - before_s > _SOON_S

    def _run_here(self, ops: deque[Op]) -> None:
        """Run `ops` on the loop thread as far as they take no time, and take those out.

        The execute thread has nothing to do and is given nothing meanwhile, so whatever holds on that thread
        holds here.
        """
        self._here = ops
        with jax.enable_x64(True), self._completions.on_loop():
            while ops and self._takes_no_time(ops[0]):
                self._do(ops.popleft())
        self._here = self._doing = None

    def _takes_no_time(self, op: Op) -> bool:
        if isinstance(op, Execute):
            try:
                return op.key in self._quick and all(_is_ready(value) for value in op.args)
            except Exception:  # noqa: BLE001 - an argument has failed, or is taken away at this moment
                return False
        if isinstance(op, Build):
            size_bytes = sum([data.nbytes for _, _, data in op.parts])
            return size_bytes <= _INLINE_BYTES and self._shares_memory
        return isinstance(op, Read | Watch)  # they leave it to the watcher to wait

    @cached_property
    def _shares_memory(self) -> bool:
        """Whether the devices compute on host memory."""
        device: Any = jax.local_devices()[0]
        return bool(device.platform == "cpu")

    def snapshot(
        self, value: Value, spec: ArraySpec, devices: tuple[DeviceAddress, ...]
    ) -> list[tuple[Box, np.ndarray[Any, Any]]] | None:
        """Views of what is ready; the execute thread may take the value away under our hands."""
        array = value.payload
        if array is None or value.error is not None:
            return None
        try:
            if array.is_deleted() or not array.is_ready():
                return None
            local = self._layouts(spec.sharding, devices).local
            shards = local_shards(array)
            boxes = [
                (box, shards[local[positions[0]]])
                for box, positions in host_boxes(spec, devices, self._host)
            ]
            if not _in_host_memory(array):
                for _, shard in boxes:
                    shard.copy_to_host_async()
            return [(box, np.asarray(shard)) for box, shard in boxes]
        except Exception:  # noqa: BLE001 - donated meanwhile, or ready because it has failed
            return None

    def counters(self) -> dict[str, int]:
        """Computations enqueued, compiled and installed, donated arguments copied, live bytes."""
        return {
            "computations": self._executed,
            "compilations": self._compiler.compilations,
            "executables_loaded": self._executables_kept.loaded,
            "executables_failed": self._executables_kept.failed,
            "installed": len(self._compiler),
            "donations_copied": self._copied,
            "waiting": self._waits_begun - self._waits_ended,
            "live_bytes": _live_bytes(),
        }

    def stage(self, value: Value) -> str:
        """How far a value is; of one that was given away, whether it was there when that happened."""
        given = False
        while value.heir is not None:
            value, given = value.heir, True
        array, doing = value.payload, self._doing
        stage = "handed over"
        try:
            if value.error is not None or (array is not None and array.is_ready()):
                stage = "finished"
            elif array is not None:
                stage = "enqueued"
            elif isinstance(doing, Execute) and value in doing.results and not self._awaiting:
                stage = "entered"
        except Exception:  # noqa: BLE001 - it has failed, or is taken away at this moment
            stage = "finished"
        return stage if stage == "finished" or not given else "enqueued"

    def whereabouts(self) -> tuple[ThreadReport, ...]:
        """The threads that may hold up others, where they are at work."""
        called = f"the Python function {self._calling_name!r}"
        return (
            *self._executing.whereabouts(self._described(self._doing)),
            *self._calling.whereabouts(called),
            *self._copying.whereabouts("bytes that become an array"),
            *self._compiling.whereabouts("a compilation"),
        )

    def _described(self, op: Op | None) -> str:
        if not isinstance(op, Execute):
            return "nothing" if op is None else f"an op of kind {type(op).__name__}"
        found = self._executables.get(op.key)
        name = op.key.decode() if found is None else found.name
        return f"the arguments of {name!r}" if self._awaiting else f"the computation {name!r}"

    def close(self) -> None:
        """Stop all threads; one that a collective holds is left behind after a few seconds."""
        self._closed = True
        self._completions.close()
        join_all(
            [
                self._executing,
                self._compiling,
                self._watching,
                self._guarding,
                self._copying,
                self._calling,
            ],
            _CLOSE_TIMEOUT_S,
        )
        self._executables.clear()

    # On the compile thread.

    def _load_python(
        self,
        key: bytes,
        computation: Computation,
        artifact: bytes,
        devices: tuple[DeviceAddress, ...],
        done: Done,
    ) -> None:
        try:
            function = python_functions.load(computation, artifact, devices, self._allow_python)
        except Exception as error:  # noqa: BLE001 - the asker is to know
            self._completions.post(done, self._report(error))
            return
        self._python_keys.add(key)
        self._publish(key, Executable(function, (), computation.name))
        self._completions.post(done, None)

    def _forget_python(self, key: bytes) -> None:
        if key in self._python_keys:
            self._python_keys.discard(key)
            self._publish(key, None)

    def _publish(self, key: bytes, executable: Executable | None) -> None:
        def change() -> None:
            self._quick.discard(key)
            self._trials.pop(key, None)
            if executable is None:
                self._executables.pop(key, None)
                return
            self._executables[key] = executable
            if executable.is_straight and not executable.donated:
                self._trials[key] = _Trial()

        self._hand_over(deque([Call(change)]))

    # On the execute thread.

    def _run(self, ops: deque[Op]) -> None:
        while ops and not self._closed:
            # Taken out, so that what it has read can be freed while others of the batch run.
            self._do(ops.popleft())
        self._doing = None
        self._ended += 1

    def _do(self, op: Op) -> None:
        self._doing = op
        try:
            self._handlers[type(op)](op)
        except Exception as error:  # noqa: BLE001 - the thread lives on
            self._completions.fail(error)

    def _execute(self, op: Execute) -> None:
        """The hot path: every line here is paid once for each computation on each host."""
        try:
            call, donated, name, _ = self._executables[op.key]
            if type(call) is PythonFunction:
                python_functions.expect(op)
                return self._calling.put((call, op))
            arrays = []
            for value in op.args:
                array = value.payload
                if array is None:
                    self._awaiting = True
                    array = self._awaited(value)
                    self._awaiting = False
                    if array is None:
                        report = value.error or self._unmade()
                        if value.alone and op.failed is not None:
                            self._break_gang(op.failed, report)
                        return _fail(op.results, report)
                arrays.append(array)
            if op.failed is not None and self._gang_broken is not None:
                return _fail(op.results, self._gang_broken)
            if donated:
                donated = self._donate(op, arrays, donated)
            if op.key in self._trials:
                outputs = self._tried(op, call, arrays)
            else:
                outputs = call(*arrays)
        except Exception as error:  # noqa: BLE001 - it belongs to the results
            report = self._failure(op, error)
            if op.failed is not None:
                self._break_gang(op.failed, report)
            return _fail(op.results, report)
        for value, array in zip(op.results, outputs, strict=True):
            value.payload, value.maker = array, name
        if op.failed is not None and op.results:
            for value in op.results:
                value.joint = True
            if op.guarded:
                self._guarding.put((op.results[-1], op.failed))
        for position in donated:
            value = op.args[position]
            value.payload, value.error = None, self._deleted
        self._executed += 1
        return None

    def _tried(self, op: Execute, call: Any, arrays: list[jax.Array]) -> Sequence[jax.Array]:
        """Call an executable, and see whether it is quick."""
        began_s = time.thread_time()
        outputs: Sequence[Any] = call(*arrays)
        taken_s = time.thread_time() - began_s
        trial = self._trials[op.key]
        trial.calls += 1
        # The first calls set it up, others are unlucky: its own time is that of the luckiest.
        trial.best_s = min(trial.best_s, taken_s)
        trial.ended += all(array.is_ready() for array in outputs)
        if trial.calls == _TRIALS or op.failed is not None:
            del self._trials[op.key]
            if op.failed is None and trial.best_s < _QUICK_S and trial.ended == _TRIALS:
                self._quick.add(op.key)
        return outputs

    def _break_gang(self, failed: Callable[[ErrorReport], None], report: ErrorReport) -> None:
        """The other hosts of a gang may wait for this one from now on, so they must not meet it elsewhere."""
        if self._gang_broken is None:
            words = f"{self._host} could not go on with its gang: {report.message}"
            self._gang_broken = ErrorReport.of(HostLost(words), self._host)
            self._completions.post(failed, report)

    def _donate(
        self, op: Execute, arrays: list[jax.Array], donated: tuple[int, ...]
    ) -> tuple[int, ...]:
        """Copy what is still needed, and return the positions of what is given away."""
        given = []
        args, copied = op.args, set(op.copied)
        if len(set(args)) < len(args):
            copied |= {at for at, value in enumerate(args) if args.count(value) > 1}
        heir = op.results[0] if op.results else None
        for position in donated:
            value = args[position]
            if position in copied or value.shared:
                arrays[position] = _copy(arrays[position])
                self._copied += 1
            else:
                # Before the call: a watcher may find the array deleted while the call still runs.
                value.heir = heir
                given.append(position)
        return tuple(given)

    def _awaited(self, value: Value) -> Any:
        """The array of a value that has none yet: None unless a build is under way."""
        building = value.building
        if building is not None:
            building.wait()
        return value.payload

    def _move(self, op: Move) -> None:
        array = self._awaited(op.source)
        if array is None:
            op.result.alone = op.source.alone
            return _fail((op.result,), op.source.error or self._unmade())
        try:
            op.result.payload = self._moved(op, array)
        except Exception as error:  # noqa: BLE001 - the failure belongs to the result
            op.result.alone = True
            _fail((op.result,), self._report(error))
        return None

    def _moved(self, op: Move, array: jax.Array) -> jax.Array:
        source = self._layouts(op.source_spec.sharding, op.source_devices)
        layout = self._layouts(op.spec.sharding, op.devices)
        shards = local_shards(array)
        shape = op.spec.sharding.shard_shape(op.spec.shape)
        source_shape = op.source_spec.sharding.shard_shape(op.source_spec.shape)
        made: dict[int, jax.Array] = {}
        for piece in op.pieces:
            home = source.local[piece.source_device]
            shard = shards[home]
            if box_shape(piece.source_box) != shape:
                raise InternalError(f"a piece of {piece.source_box} moves into shards of {shape}")
            aliased = whole(piece.source_box, source_shape)
            if not aliased:
                shard = _cut(shard, piece.source_box)
            for position in piece.destination_devices:
                device = layout.local.get(position)
                if device is None:
                    continue
                if device == home:
                    made[position] = shard
                    if aliased:
                        op.source.shared = op.result.shared = True
                else:
                    made[position] = jax.device_put(shard, device)
        if not math.prod(shape):  # nothing to cover, so there may be no piece
            empty = np.zeros(shape, array.dtype)
            for position, device in layout.local.items():
                made.setdefault(position, jax.device_put(empty, device))
        return assemble(op.spec, layout, made)

    def _build(self, op: Build) -> None:
        try:
            large = (
                sum([data.nbytes for _, _, data in op.parts]) > _INLINE_BYTES
                and bytes_to_copy(op.spec, op.parts) > _INLINE_BYTES
            )
        except Exception:  # noqa: BLE001 - parts that fit nowhere: assembling them reports it
            large = False
        if large:
            op.result.building = threading.Event()
            self._copying.put(op)
        else:
            self._finish_build(op)

    def _finish_build(self, op: Build) -> None:
        """On the copy thread when large."""
        result = op.result
        try:
            layout = self._layouts(op.spec.sharding, op.devices)
            shards = host_shards(op.spec, tuple(layout.local), op.parts)
            result.payload = put(op.spec, layout, shards)
        except Exception as error:  # noqa: BLE001 - the failure belongs to the result
            result.alone = True
            result.error = self._report(error)
        if result.building is not None:
            result.building.set()
        if op.done is not None:
            self._completions.post(op.done, result.error)

    def _watch(self, op: Watch) -> None:
        if self._waits_begun == self._waits_ended and all(_is_ready(value) for value in op.values):
            self._answer_watch(op)
        else:
            self._waits_begun += 1
            self._watching.put(op)

    def _read(self, op: Read) -> None:
        value = op.value
        if (
            self._waits_begun == self._waits_ended
            and _is_ready(value)
            and _in_host_memory(value.payload)
        ):
            self._answer_read(op)
            return
        value.shared = True  # until the views exist, nobody may be given the buffers
        self._waits_begun += 1
        self._watching.put(op)

    # On the thread of Python functions.

    def _call_python(self, item: tuple[PythonFunction, Execute]) -> None:
        function, op = item
        self._calling_name = function.name
        try:
            errors = [error for value in op.args if (error := self._settled(value)) is not None]
            if errors:
                _fail(op.results, errors[0])
            else:
                arguments = [value.payload for value in op.args]
                python_functions.call(function, arguments, op.results, self._layouts)
        except Exception as error:  # noqa: BLE001 - a user's function may raise anything
            _fail(op.results, self._report(error, function.name))
        finally:
            for value in op.results:
                value.building.set()

    # On the guard.

    def _guard(self, item: tuple[Value, Callable[[ErrorReport], None]]) -> None:
        """Wait for what was enqueued together with other hosts, and tell if it fails here."""
        value, failed = item
        array = value.payload
        if array is None:
            return
        try:
            array.block_until_ready()
        except Exception as error:  # noqa: BLE001 - a computation may fail with anything
            if not array.is_deleted():
                self._completions.post(failed, self._report(error, value.maker))

    # On the watcher (or the execute thread, when nothing is to be waited for).

    def _wait(self, op: Watch | Read) -> None:
        try:
            if isinstance(op, Watch):
                self._answer_watch(op)
            else:
                self._answer_read(op)
        finally:
            self._waits_ended += 1

    def _answer_watch(self, op: Watch) -> None:
        heirs: dict[Value, None] = {}
        for value in op.values:
            error = self._settled(value)
            if error is self._deleted:
                if value.heir is not None:
                    heirs[value.heir] = None
            elif error is not None:
                self._completions.post(op.done, error)
                return
        if heirs:
            # They may be about to be made: the execute thread knows when they have been.
            self._hand_over(deque([Watch(tuple(heirs), op.done, op.hurried)]))
        elif op.hurried:
            self._completions.post(op.done, None)
        else:
            self._completions.post_unhurried(op.done, None)

    def _answer_read(self, op: Read) -> None:
        answer: list[np.ndarray[Any, Any]] | ErrorReport | None = self._settled(op.value)
        if answer is None:
            try:
                answer = self._views(op)
            except Exception as error:  # noqa: BLE001 - the asker is to know
                answer = self._report(error)
        self._completions.post(op.done, answer)

    def _settled(self, value: Value) -> ErrorReport | None:
        """Wait for `value`, and return what went wrong with it."""
        self._awaited(value)
        array = value.payload
        if array is None:
            return value.error or self._unmade()
        try:
            array.block_until_ready()
        except Exception as error:  # noqa: BLE001 - a computation may fail with anything
            if array.is_deleted():
                return self._deleted
            value.alone = value.joint
            value.error, value.payload = self._report(error, value.maker), None
            return value.error
        return None

    def _views(self, op: Read) -> list[np.ndarray[Any, Any]]:
        layout = self._layouts(op.spec.sharding, op.devices)
        shards = local_shards(op.value.payload)
        shape = op.spec.sharding.shard_shape(op.spec.shape)
        if not _in_host_memory(op.value.payload):
            for position in {position for position, _ in op.boxes}:
                shards[layout.local[position]].copy_to_host_async()
        seen: dict[int, np.ndarray[Any, Any]] = {}
        views = []
        for position, box in op.boxes:
            if position not in seen:
                seen[position] = np.asarray(shards[layout.local[position]])
            # An array without dimensions, indexed, would be a scalar.
            views.append(seen[position] if whole(box, shape) else seen[position][box_slices(box)])
        return views

    # Errors.

    def _report(self, error: Exception, computation: str = "") -> ErrorReport:
        words = str(error)
        kind: type[Error] = ComputationFailed
        if "RESOURCE_EXHAUSTED" in words:
            kind = OutOfDeviceMemory
        elif any(library in words for library in _COLLECTIVES):
            kind = HostLost
        report = ErrorReport.of(error, self._host, kind)
        if not computation:
            return report
        return msgspec.structs.replace(
            report, message=f"the computation {computation!r} failed: {report.message}"
        )

    def _failure(self, op: Execute, error: Exception) -> ErrorReport:
        found = self._executables.get(op.key)
        if found is None:
            error = InternalError(f"the computation {op.key.hex()} is not installed on this host")
        return self._report(error, "" if found is None else found.name)

    def _unmade(self) -> ErrorReport:
        return ErrorReport(
            InternalError.__name__, "a value was used before the op that makes it", self._host
        )


def _fail(results: Sequence[Value], report: ErrorReport) -> None:
    for value in results:
        value.error = report


def _is_ready(value: Value) -> bool:
    array = value.payload
    return array is not None and not array.is_deleted() and array.is_ready()


def _in_host_memory(array: jax.Array) -> bool:
    devices: Any = array.sharding.device_set
    return all(device.platform == "cpu" for device in itertools.islice(devices, 1))


def _copy(array: jax.Array) -> jax.Array:
    """A copy made shard by shard, so that it concerns no other host."""
    shards = [jnp.copy(shard) for shard in local_shards(array).values()]
    return jax.make_array_from_single_device_arrays(
        array.shape, array.sharding, shards, dtype=array.dtype
    )


def _cut(shard: jax.Array, box: Box) -> jax.Array:
    cut: jax.Array = _slice(shard, tuple(start for start, _ in box), tuple(stop for _, stop in box))
    return cut


@partial(jax.jit, static_argnums=(1, 2))
def _slice(shard: jax.Array, starts: tuple[int, ...], stops: tuple[int, ...]) -> jax.Array:
    return jax.lax.slice(shard, starts, stops)


def _live_bytes() -> int:
    """Bytes of logical arrays on this process's devices (their shards, as arrays, do not count)."""
    total = 0
    for array in jax.live_arrays():
        if isinstance(array.sharding, jax.sharding.NamedSharding) and not array.is_deleted():
            shard = math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize
            total += shard * len(array.sharding.addressable_devices)
    return total
