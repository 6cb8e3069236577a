"""The devices of one host, driven with JAX.

One thread enqueues: it takes ops in the order of `submit`, so that hosts which submit alike enqueue
alike, and collectives pair up. JAX runs asynchronously behind it (on CPU up to 32 computations, then
the call blocks, which holds up this thread and nobody else). While it has nothing to do, the loop
thread runs in its place what takes a few microseconds: small arrays, and computations that have
proven quick (`pw.devices.quick`). A second thread compiles. A third assembles large arrays from host bytes.

Each device has a watcher, a thread that waits for arrays in the order in which that was asked, so that a
device that computes for long holds up nobody who asks for what is on another; an array on several is waited
for by the watcher of one of them. Who watches what is no array yet goes to a common watcher. They all put
aside who asks for what a Python function is still to make. Where everything is ready already, and the
watcher of its device has nothing to do, the execute thread answers at once.

Donation. A donated buffer is deleted while earlier ops may still want it. Who aliases it has marked the
value `shared`, who is going to read it is counted, and a copy is donated instead. A host view that
exists already needs no such care: it is a copy itself, or JAX sees it and does not donate. A `Watch`
that finds its array deleted follows the value's `heir`, a result of the computation that took the
buffer: when that is ready, so was this.

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
from functools import cached_property, partial
from operator import attrgetter
from pathlib import Path
from typing import Any
from weakref import ref

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
from pw.devices.backend import (
    Build,
    Call,
    DoneInstalling,
    Execute,
    Move,
    Op,
    Read,
    Value,
    Watch,
)
from pw.devices.executables import Executables
from pw.devices.jax_compile import SUB_BYTE, Compiler, Executable
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
from pw.devices.jax_watcher import Aside, Watcher
from pw.devices.python_functions import PythonFunction
from pw.devices.quick import Quick

_INLINE_BYTES = 64 * 1024
"""Builds that copy less than this cost less than a change of threads."""

_FEW_OPS = 8
"""The loop runs no more of them in one go."""

_FEW_VALUES = 64
"""The loop looks at no more of them in one go."""

_CLOSE_TIMEOUT_S = 5.0

_GUARD_NAP_S = 0.001
"""How much later it may be known that a computation has failed whose results nobody watches."""

_device_id = attrgetter("id")

_COLLECTIVES = ("Gloo", "NCCL")
"""Who speaks in the error of a computation whose peers have died under it, if other processes take part: what
is computed from its results, on this host alone, fails with that same error."""


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
        self._device = device
        self._deleted = ErrorReport(
            ArrayDeleted.__name__, "the array was donated to a computation before this use", host
        )
        self._layouts = Layouts(host, device)
        self._completions = Completions(loop)
        self._allow_python = allow_python
        self._python_keys: set[bytes] = set()
        self._executables: dict[bytes, Executable] = {}
        self._handing = threading.Lock()
        self._handed = 0
        """Batches that the execute thread was given; under the lock."""
        self._ended = 0
        """Those that it is done with; written by it only."""
        self._quick = Quick()
        self._newest: dict[int | None, ref[Value] | None] = {}
        """What was enqueued last on each device alone, or on several (None); None if it has ended.

        Kept while anything is quick. What has just proven quick on a device has ended there, and had a place
        after all that came before."""
        self._executed = 0
        self._copied = 0
        self._gang_broken: ErrorReport | None = None
        """Why nothing is enqueued any more that other hosts take part in."""
        self._busy: set[Watcher] = set()
        """Those who had something to do when they were last looked at; changed as on the execute thread."""
        self._closed = False
        self._doing: Op | None = None
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
        self._watchers: dict[Any, Watcher] = {None: Watcher("pw-watch", self._wait, fail)}
        """By device, each made when it is first needed; None for the common one."""
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
        done: DoneInstalling,
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
        rest = deque(ops)
        with self._handing:
            if self._handed == self._ended and not self._closed and self._pays_here(rest):
                self._run_here(rest)
            if rest:
                self._handed += 1
                self._executing.put(rest)

    def _hand_over(self, op: Op) -> None:
        """Let an op follow all that was submitted before; from other threads than the loop."""
        with self._handing:
            self._handed += 1
            self._executing.put(deque([op]))

    def _pays_here(self, ops: deque[Op]) -> bool:
        """Whether it costs less to run `ops` than to change threads for them.

        The execute thread stays awake, and works at the same time, if much comes at once or one thing after
        the other.
        """
        if not 0 < len(ops) <= _FEW_OPS or not self._takes_no_time(ops[0]):
            return False
        return isinstance(ops[0], Read | Watch) or self._quick.comes_alone(time.monotonic())

    def _run_here(self, ops: deque[Op]) -> None:
        """Run `ops` on the loop thread as far as they take no time, and take those out.

        The execute thread has nothing to do and is given nothing meanwhile, so whatever holds on that thread
        holds here. Nothing that runs here submits anything.
        """
        with jax.enable_x64(True), self._completions.on_loop():
            while ops and self._takes_no_time(ops[0]):
                op = ops.popleft()
                began_s = time.monotonic()
                self._work(deque((op,)))
                if isinstance(op, Execute):
                    self._quick.took(op.key, time.monotonic() - began_s)

    def _takes_no_time(self, op: Op) -> bool:
        try:
            if isinstance(op, Execute):
                return (
                    op.key in self._quick.proven
                    and op.failed is None
                    and self._has_room(self._executables[op.key].device)
                    and all(_is_ready(value) for value in op.args)
                )
            if isinstance(op, Build):
                return self._shares_memory and op.size_bytes <= _INLINE_BYTES
        except Exception:  # noqa: BLE001 - something has failed: the execute thread will find out
            return False
        if isinstance(op, Watch):
            return len(op.values) <= _FEW_VALUES
        return isinstance(op, Read)  # whatever takes time is the watcher's

    def _has_room(self, device: int | None) -> bool:
        """Whether JAX takes one more computation at once: it has so many places, and the newest had one."""
        for where in (device, None):
            newest = self._newest.get(where)
            if newest is None:
                continue
            value = newest()
            if value is None or not _is_ready(value):
                return False
            self._newest[where] = None
        return True

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
            "waiting": sum(each.begun - each.ended for each in list(self._watchers.values())),
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
                *self._watchers.values(),
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
        done: DoneInstalling,
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
            self._quick.forget(key)
            if executable is None:
                self._executables.pop(key, None)
                return
            self._executables[key] = executable
            if executable.is_straight and not executable.donated:
                self._quick.try_out(key)

        self._hand_over(Call(change))

    # On the execute thread.

    def _run(self, ops: deque[Op]) -> None:
        self._work(ops)
        self._ended += 1

    def _work(self, ops: deque[Op]) -> None:
        """Run `ops`. Between two collectives every microsecond counts ten times: their threads fall asleep."""
        handlers = self._handlers
        while ops and not self._closed:
            # Taken out, so that what it has read can be freed while others of the batch run.
            self._doing = op = ops.popleft()
            try:
                handlers[type(op)](op)
            except Exception as error:  # noqa: BLE001 - the thread lives on
                self._completions.fail(error)
        self._doing = None

    def _execute(self, op: Execute) -> None:
        """The hot path: every line here is paid once for each computation on each host."""
        try:
            call, donated, name, device, _ = self._executables[op.key]
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
            if op.key in self._quick.trials:
                outputs = self._try(op.key, call, arrays)
            else:
                outputs = call(*arrays)
        except Exception as error:  # noqa: BLE001 - it belongs to the results
            report = self._failure(op, error)
            if op.failed is not None:
                self._break_gang(op.failed, report)
            return _fail(op.results, report)
        joint = op.failed is not None
        for value, array in zip(op.results, outputs, strict=True):
            value.payload, value.maker, value.joint = array, name, joint
        if self._quick.proven and op.results:
            newest: Any = outputs[-1]
            self._newest[device] = None if newest.is_ready() else ref(op.results[-1])
        if op.failed is not None and op.guarded and op.results:
            self._guarding.put((op.results[-1], op.failed))
        for position in donated:
            value = op.args[position]
            value.payload, value.error = None, self._deleted
        self._executed += 1
        return None

    def _try(self, key: bytes, call: Any, arrays: list[jax.Array]) -> Sequence[jax.Array]:
        """Call an executable, and see whether it is quick."""
        began_s, processor_s = time.monotonic(), time.thread_time()
        outputs: Sequence[Any] = call(*arrays)
        processor_s, clock_s = time.thread_time() - processor_s, time.monotonic() - began_s
        ended = all(array.is_ready() for array in outputs)
        if not self._quick.proven:
            self._newest.clear()
        self._quick.tried(key, processor_s, clock_s, ended=ended)
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
            if position in copied or value.shared or value.reads_begun != value.reads_ended:
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
            large = op.size_bytes > _INLINE_BYTES
            large = large and bytes_to_copy(op.spec, op.parts) > _INLINE_BYTES
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
        if all(_is_ready(value) for value in op.values):
            if not self._busy or not op.values or self._is_free(op.values[0]):
                self._answer_watch(op)
                return
            device = _home(op.values[0].payload)
        else:
            late = (value.payload for value in op.values if not _is_ready(value))
            device = next((_home(array) for array in late if array is not None), None)
        self._wait_on(device, op)

    def _read(self, op: Read) -> None:
        value = op.value
        array = value.payload  # a watcher may find that it has failed, and take it away
        if (
            _is_ready(value)
            and array is not None
            and _in_host_memory(array)
            and op.spec.dtype not in SUB_BYTE  # numpy would unpack it
            and (not self._busy or self._is_free(value))
        ):
            self._answer_read(op)
            return
        value.reads_begun += 1  # until the views exist, nobody may be given the buffers
        self._wait_on(self._home_of_read(op), op)

    def _is_free(self, value: Value) -> bool:
        """Whether nobody who has asked before waits for the device of this ready value."""
        self._busy -= {each for each in self._busy if each.begun == each.ended}
        return not self._busy or self._watchers.get(_home(value.payload)) not in self._busy

    def _wait_on(self, device: Any, op: Watch | Read) -> None:
        watcher = self._watchers.get(device)
        if watcher is None:
            watcher = Watcher(f"pw-watch-{device.id}", self._wait, self._completions.fail)
            self._watchers[device] = watcher
            if self._closed:  # `close` may not have seen it
                watcher.stop()
        watcher.begun += 1
        self._busy.add(watcher)
        watcher.put(op)

    def _home_of_read(self, op: Read) -> Any:
        """The same device for all reads of a value, so that one thread counts those that have ended."""
        array = op.value.payload
        if array is not None:
            return _home(array)
        try:
            here = [self._device(each) for each in op.devices if each.host == self._host]
        except Exception:  # noqa: BLE001 - the read itself finds out, and tells
            return None
        return min(here, key=_device_id, default=None)

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
        except BaseException as error:  # noqa: BLE001 - a user's function may raise anything
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

    # On a watcher (or the execute thread, when nothing is to be waited for).

    def _wait(self, op: Watch | Read) -> Aside | None:
        return self._answer_watch(op) if isinstance(op, Watch) else self._answer_read(op)

    def _answer_watch(self, op: Watch) -> Aside | None:
        """Answer, or say what is to be put aside; what is ready already never is."""
        heirs: dict[Value, None] = {}
        rest: tuple[Value, ...] = ()
        for at, value in enumerate(op.values):
            ending = python_functions.under_way(value)
            if ending is not None:
                rest = op.values[at:]
                if not heirs:
                    return Watch(rest, op.done, op.hurried), ending
                break
            error = self._settled(value)
            if error is self._deleted:
                if value.heir is not None:
                    heirs[value.heir] = None
            elif error is not None:
                self._completions.post(op.done, error)
                return None
        if heirs:
            # They may be about to be made: the execute thread knows when they have been.
            self._hand_over(Watch((*heirs, *rest), op.done, op.hurried))
        elif op.hurried:
            self._completions.post(op.done, None)
        else:
            self._completions.post_unhurried(op.done, None)
        return None

    def _answer_read(self, op: Read) -> Aside | None:
        """The same for a read."""
        ending = python_functions.under_way(op.value)
        if ending is not None:
            return op, ending
        answer: list[np.ndarray[Any, Any]] | ErrorReport | None = self._settled(op.value)
        if answer is None:
            try:
                answer = self._views(op)
                if not _in_host_memory(op.value.payload):
                    op.value.reads_ended += 1
            except Exception as error:  # noqa: BLE001 - the asker is to know
                answer = self._report(error)
        self._completions.post(op.done, answer)
        return None

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

    def _report(self, error: BaseException, computation: str = "") -> ErrorReport:
        words = str(error)
        kind: type[Error] = ComputationFailed
        if "RESOURCE_EXHAUSTED" in words:
            kind = OutOfDeviceMemory
        elif jax.process_count() > 1 and any(library in words for library in _COLLECTIVES):
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


def _home(array: jax.Array | None) -> Any:
    """The device whose watcher waits for an array: the first of those on this host."""
    if array is None:  # another watcher has found that it failed
        return None
    here: Any = array.sharding.addressable_devices
    return min(here, key=_device_id, default=None)


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
