"""The devices of one host, driven with JAX.

One thread enqueues: it takes what computes in the order of `submit`, so that hosts which submit alike enqueue
alike, and collectives pair up. JAX runs asynchronously behind it, but not always: on CPU it holds the caller of
a collective until the peers have come, and of a 33rd computation until one has ended, and runs what has few
operations in the thread that calls. All that holds up this thread, and so nothing else stands behind it:
questions about values are answered by whichever thread finds them ready (`pw.devices.jax.answers`), small
arrays are built on the loop and large ones on a thread that copies. While the execute thread has nothing to do,
the loop also runs computations that have proven quick (`pw.devices.jax.quick`). A third thread compiles.

Donation. A donated buffer is deleted while earlier ops may still want it. Who aliases it has marked the
value `shared`, who is going to read it is counted, and a copy is donated instead. A host view that
exists already needs no such care: it is a copy itself, or JAX sees it and does not donate. A `Watch`
that finds its array deleted follows the value's `heir`, a result of the computation that took the
buffer: when that is ready, so was this.

JAX's warning that a donated buffer was of no use is silenced: here donation is the client's wish,
and the worker's log is no place to tell it.
"""

from __future__ import annotations

import math
import threading
import time
import warnings
from asyncio import AbstractEventLoop
from collections import deque
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any
from weakref import ref

import jax
import jax.numpy as jnp
import msgspec
import numpy as np

from pw.core.errors import (
    ComputationFailed,
    Error,
    ErrorReport,
    HostLost,
    InternalError,
    OutOfDeviceMemory,
)
from pw.core.messages import ThreadReport
from pw.core.program import Computation
from pw.core.sharding import ArraySpec, Box, DeviceAddress, box_shape, host_boxes
from pw.devices.host.backend import (
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
from pw.devices.host.output import Output
from pw.devices.host.program import owner_of
from pw.devices.jax import python_functions
from pw.devices.jax.answers import Answers, in_host_memory, is_donated, is_ready, may_give
from pw.devices.jax.compile import SUB_BYTE, Compiler, Executable
from pw.devices.jax.executables import Executables
from pw.devices.jax.layouts import (
    Layouts,
    assemble,
    bytes_to_copy,
    host_shards,
    local_shards,
    put,
    whole,
)
from pw.devices.jax.python_functions import PythonFunction
from pw.devices.jax.quick import Quick
from pw.devices.jax.threads import Completions, QueueThread, join_all

_INLINE_BYTES = 64 * 1024
"""Builds that copy less than this cost less than a change of threads."""

_FEW_OPS = 8
"""The loop runs no more of them in one go."""

_CLOSE_TIMEOUT_S = 5.0

_GUARD_NAP_S = 0.001
"""How much later it may be known that a computation has failed whose results nobody watches."""

_COLLECTIVES = ("Gloo", "NCCL")
"""Who speaks in the error of a computation whose peers have died under it, if other processes take part: what
is computed from its results, on this host alone, fails with that same error."""


class JaxBackend:
    """Runs ops on this process's JAX devices (see `pw.devices.host.backend.Backend` for the promises).

    Args:
        loop: where every `done` is called; methods are called there too.
        host: this host's name in device addresses.
        device: the JAX device at an address, for the whole island; called from several threads.
        allow_python: run clients' Python functions (`pw.devices.jax.python_functions`).
        compile_cache: a folder that outlives this process, for what it compiles; None for none.
        output: takes what the threads write that run clients' Python functions, or compile.
    """

    def __init__(
        self,
        loop: AbstractEventLoop,
        host: str,
        device: Callable[[DeviceAddress], jax.Device],
        *,
        allow_python: bool = False,
        compile_cache: Path | None = None,
        output: Output | None = None,
    ) -> None:
        warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
        self._host = host
        self._device = device
        self._layouts = Layouts(host, device)
        self._completions = Completions(loop)
        self._allow_python = allow_python
        self._output = output or Output()
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
        self._closed = False
        self._doing: Op | None = None
        self._awaiting = False  # it waits for the host bytes of an argument
        self._calling_name = ""  # written by the thread of Python functions only
        self._answers = Answers(host, self._layouts, self._completions, self._report)
        self._handlers: dict[type, Callable[[Any], None]] = {
            Execute: self._execute,
            Move: self._move,
            Build: self._finish_build,
            Watch: self._answers.look,
            Call: lambda op: op.function(),
        }
        fail = self._completions.fail
        kept = self._executables_kept = Executables(compile_cache)
        self._compiler = Compiler(host, self._layouts, self._completions, self._publish, kept)
        self._copying: QueueThread[Build] = QueueThread("pw-copy", self._finish_build, fail)
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
        install = self._load_python if computation.python else self._compiler.install
        self._compiling.put(
            partial(self._install, install, key, computation, artifact, devices, done)
        )

    def forget(self, key: bytes) -> None:
        """Drop the computation installed as `key`."""
        self._compiling.put(partial(self._compiler.forget, key))
        self._compiling.put(partial(self._forget_python, key))

    def submit(self, ops: Sequence[Op]) -> None:
        """Run what computes on the execute thread, or here if that takes no time; the rest has no queue."""
        computing: deque[Op] = deque()
        asking: list[Watch | Read] = []
        for op in ops:
            if isinstance(op, Execute):
                computing.append(op)
            elif isinstance(op, Build) and self._goes_ahead(op):
                self._build(op)
            elif isinstance(op, Read):
                op.value.reads_begun += 1  # before any of these is run that might give it away
                asking.append(op)
            elif isinstance(op, Watch) and op.values and not _is_in_passing(op, computing):
                asking.append(op)
            else:
                computing.append(op)
        nothing_comes = not computing and self._handed == self._ended
        for question in asking:
            self._answers.look(question, nothing_comes=nothing_comes)
        if computing:
            self._submit(computing)

    def _submit(self, ops: deque[Op]) -> None:
        with self._handing:
            if self._handed == self._ended and not self._closed and self._pays_here(ops):
                self._run_here(ops)
            if ops:
                self._handed += 1
                self._executing.put(ops)

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
        if len(ops) > _FEW_OPS or not self._takes_no_time(ops[0]):
            return False
        return isinstance(ops[0], Watch) or self._quick.comes_alone(time.monotonic())

    def _run_here(self, ops: deque[Op]) -> None:
        """Run `ops` on the loop thread as far as they take no time, and take those out.

        The execute thread has nothing to do and is given nothing meanwhile, so whatever holds on that thread
        holds here. Nothing that runs here submits anything.
        """
        with jax.enable_x64(True):
            while ops and self._takes_no_time(ops[0]):
                op = ops.popleft()
                began_s = time.monotonic()
                self._work(deque((op,)))
                if isinstance(op, Execute):
                    self._quick.took(op.key, time.monotonic() - began_s)

    def _takes_no_time(self, op: Op) -> bool:
        if not isinstance(op, Execute):
            return isinstance(op, Watch)
        try:
            return (
                op.key in self._quick.proven
                and op.failed is None
                and self._has_room(self._executables[op.key].device)
                and all(is_ready(value) for value in op.args)
            )
        except Exception:  # noqa: BLE001 - something has failed: the execute thread will find out
            return False

    def _has_room(self, device: int | None) -> bool:
        """Whether JAX takes one more computation at once: it has so many places, and the newest had one."""
        for where in (device, None):
            newest = self._newest.get(where)
            if newest is None:
                continue
            value = newest()
            if value is None or not is_ready(value):
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
        if array is None or value.error is not None or value.given:
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
            if not in_host_memory(array):
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
            "waiting": self._answers.waiting,
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
            return "nothing" if op is None else f"the {type(op).__name__.lower()} of an array"
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
                *self._answers.close(),
                self._guarding,
                self._copying,
                self._calling,
            ],
            _CLOSE_TIMEOUT_S,
        )
        self._executables.clear()

    # On the compile thread.

    def _install(self, install: Callable[..., None], key: bytes, *what: Any) -> None:
        with self._output.on_behalf_of(owner_of(key)):
            install(key, *what)

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
        self._enqueue(op)
        for value in op.results:
            if value.asked:
                self._answers.tell(value)

    def _enqueue(self, op: Execute) -> None:
        """The hot path: every line here is paid once for each computation on each host."""
        try:
            call, donated, name, device, _ = self._executables[op.key]
            if type(call) is PythonFunction:
                self._expect(op)
                return self._calling.put((call, op))
            arrays = []
            for value in op.args:
                array = value.payload
                if array is None:
                    self._awaiting = True
                    array = self._awaited(value)
                    self._awaiting = False
                    if array is None:
                        report = value.error or self._answers.unmade
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
        order = self._executed
        for value, array in zip(op.results, outputs, strict=True):
            value.maker, value.joint, value.order, value.payload = name, joint, order, array
        if self._quick.proven and op.results:
            newest: Any = outputs[-1]
            self._newest[device] = None if newest.is_ready() else ref(op.results[-1])
        if op.failed is not None and op.guarded and op.results:
            self._guarding.put((op.results[-1], op.failed))
        for position in donated:
            value = op.args[position]
            value.error, value.payload = self._answers.deleted, None
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
            words = (
                f"host {self._host} stopped, as others may go on where it failed: {report.message}"
            )
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
            if position not in copied and may_give(value, heir):
                given.append(position)
            else:
                arrays[position] = _copy(arrays[position])
                self._copied += 1
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
            _fail((op.result,), op.source.error or self._answers.unmade)
        else:
            try:
                op.result.order = self._executed
                op.result.payload = self._moved(op, array)
            except Exception as error:  # noqa: BLE001 - the failure belongs to the result
                op.result.alone = True
                _fail((op.result,), self._report(error))
        self._answers.tell(op.result)

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

    # On the loop, or the thread that copies.

    def _build(self, op: Build) -> None:
        if self._takes_a_while(op):
            op.result.building = threading.Event()
            self._copying.put(op)
        else:
            with jax.enable_x64(True):
                self._finish_build(op)

    def _goes_ahead(self, op: Build) -> bool:
        """Whether it is not for the execute thread, which copies a small argument to a device in passing."""
        return self._shares_memory or op.done is not None or op.size_bytes > _INLINE_BYTES

    def _takes_a_while(self, op: Build) -> bool:
        """Whether to build an array takes longer than a change of threads."""
        if not self._shares_memory:
            return True
        if op.size_bytes <= _INLINE_BYTES:
            return False
        try:
            return op.spec.dtype in SUB_BYTE or bytes_to_copy(op.spec, op.parts) > _INLINE_BYTES
        except Exception:  # noqa: BLE001 - parts that fit nowhere: assembling them reports it
            return False

    def _finish_build(self, op: Build) -> None:
        """Make the array; also on the execute thread (see `_goes_ahead`)."""
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
        self._answers.tell(result)
        if op.done is not None:
            self._completions.post(op.done, result.error)

    # On the thread of Python functions.

    def _expect(self, op: Execute) -> None:
        """On the execute thread: the results of a call are under way, and its arguments in use."""
        called = threading.Event()
        for value in op.args:
            value.shared = True
        for value in op.results:
            value.building = called

    def _call_python(self, item: tuple[PythonFunction, Execute]) -> None:
        function, op = item
        self._calling_name = function.name
        try:
            for value in op.args:
                self._awaited(value)
            errors = [e for value in op.args if (e := self._answers.settled(value)) is not None]
            if errors:
                _fail(op.results, errors[0])
            else:
                arguments = [value.payload for value in op.args]
                with self._output.on_behalf_of(owner_of(op.key)):
                    python_functions.call(function, arguments, op.results, self._layouts)
        except BaseException as error:  # noqa: BLE001 - a user's function may raise anything
            _fail(op.results, self._report(error, function.name))
        finally:
            for value in op.results:
                value.building.set()
                self._answers.tell(value)

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
            if not is_donated(array, error):
                self._completions.post(failed, self._report(error, value.maker))

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


def _is_in_passing(watch: Watch, before: deque[Op]) -> bool:
    """Whether it asks about what is made right before it, and so is best looked at there."""
    maker = before[-1] if before else None
    return isinstance(maker, Execute) and watch.values == maker.results[-1:]


def _fail(results: Sequence[Value], report: ErrorReport) -> None:
    for value in results:
        value.error = report


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
