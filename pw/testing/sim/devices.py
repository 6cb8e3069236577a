"""Simulated devices of one host: the promises of `pw.devices.host.backend`, after modelled delays.

Computations and moves run strictly in order, one at a time; builds and questions do not wait for
them. A computation over several hosts starts when all of them have reached it (see `gangs`), and
computes a digest of its inputs (see `digests`). The backend checks for values that are read before
they are made or after they were donated, values that are made twice, different copies of one shard,
and buffers that are never dropped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from random import Random
from typing import Any, Protocol

import numpy as np

from pw.core.errors import ArrayDeleted, CompileError, ComputationFailed, ErrorReport, InternalError
from pw.core.messages import Detail, DeviceOutcome, DeviceTest, ThreadReport
from pw.core.programs.program import Computation
from pw.core.sharding import ArraySpec, Box, DeviceAddress, box_slices, dtype_of, host_boxes
from pw.devices.host import backend as ops
from pw.devices.host.value import Value
from pw.testing.sim.compilers import Compilers
from pw.testing.sim.digests import DOES_NOT_COMPILE, examined, lasts_s, module_of
from pw.testing.sim.ledger import A_READ
from pw.testing.sim.node import SimNode
from pw.testing.sim.shards import Buffers, Shards, SimInstalled, SimLayout, empty, write_parts
from pw.testing.sim.world import Violation

OP_S = 4e-6
COMPUTE_S = 150e-6
BUILD_BYTES_PER_S = 4e9
COPY_BYTES_PER_S = 1e9
"""Rate of copies between the memories of devices and hosts."""
_DONATED = Shards()
"""Shards in the place of buffers that a computation has taken over."""


class Rendezvous(Protocol):
    """Brings the hosts of a computation together (`pw.testing.sim.gangs`)."""

    def layout(self, computation: Computation, devices: tuple[DeviceAddress, ...]) -> SimLayout:
        """Return where a computation's shards lie."""

    def reach(self, backend: SimBackend, installed: SimInstalled, op: ops.Execute) -> None:
        """Start a computation when all its hosts have reached it."""

    def left(self, backend: SimBackend) -> None:
        """Remove a host from its group."""


class _Assembly:
    """Values that are assembled beside the queue of ops."""

    def __init__(self) -> None:
        self.waiting: list[Callable[[], None]] = []
        """Functions to call when the values are filled."""

    def set(self) -> None:
        """Let go on what waits."""
        for then in self.waiting:
            then()

    def wait(self) -> object:
        """There is one thread only, which cannot wait."""
        raise Violation("the loop waits for nothing", "a value is assembled")


def no_outcome(host: str, ordinal: int, random: Random) -> DeviceTest:
    """Return that a device is well."""
    return DeviceTest(ordinal, DeviceOutcome.OK)


class SimBackend:
    """The devices of one incarnation of a host (see `pw.devices.host.backend.Backend`)."""

    def __init__(self, node: SimNode, gangs: Rendezvous) -> None:
        self.node = node
        self.host = node.name
        self.epoch = 0
        """Epoch of the group that the host has joined."""
        self.meeting: SimInstalled | None = None
        """Computation of several hosts that waits for other hosts."""
        self.closed = False
        self.feeds: Any = None  # the Python processes of the host (`pw.testing.sim.feeding`)
        self._buffers = Buffers(self.host, node.world.profile.device_memory_bytes)
        self._world = node.world
        self._gangs = gangs
        self._random = node.world.streams(f"devices/{node.name}")
        self._reads = node.world.streams(f"reads/{node.name}")
        self._queue: deque[ops.Op] = deque()
        self.programs: dict[bytes, SimInstalled] = {}
        self.artifacts: dict[bytes, tuple[bytes, tuple[DeviceAddress, ...]]] = {}
        """Artifacts that were compiled for programs which may come, with their devices, by key."""
        self.broken: ErrorReport | None = None
        """Error of a failed computation of several hosts: this host joins no further ones."""
        self._running = False
        self._pump_planned = False
        self._pumping = False
        self._quick = node.world.streams(f"quick/{node.name}")
        self.in_turn = False
        """True if what is submitted now is computed at once, before `submit` returns."""
        self._tests = node.world.streams(f"device tests/{node.name}")
        self.suspect: ops.Suspect = lambda devices, word: None
        self.test_outcome: Callable[[str, int, Random], DeviceTest] = no_outcome
        """Function that returns the outcome of a test of a host's device (`pw.testing.sim.sick`)."""
        self.compilers = Compilers(node, self._random, self._awake, self.answer)

    # --- what actors ask for -------------------------------------------------------------------------

    def install(
        self,
        key: bytes,
        computation: Computation,
        artifact: bytes,
        devices: tuple[DeviceAddress, ...],
        done: ops.Done,
    ) -> None:
        """Compile a computation."""

        def make() -> SimInstalled:
            if artifact.startswith(DOES_NOT_COMPILE):
                raise CompileError(f"the computation {computation.name!r} does not compile")
            layout = self._gangs.layout(computation, devices)
            return SimInstalled(computation.name, artifact, computation, layout, lasts_s(artifact))

        def compiled(result: SimInstalled | ErrorReport) -> None:
            if isinstance(result, ErrorReport):
                done(result)
                return
            self.submit([ops.RunFunction(lambda: self.programs.update({key: result}))])
            done(None)

        is_there = self.has_kept(artifact, devices)
        self.compilers.put(key, artifact, make, compiled, is_there=is_there)

    def compile(
        self,
        key: bytes,
        artifact: bytes,
        devices: tuple[DeviceAddress, ...],
        detail: Detail,
        done: ops.DoneCompiling,
    ) -> None:
        """Compile a StableHLO artifact, and keep it."""

        def compiled(answer: Any) -> None:
            if not isinstance(answer, ErrorReport):
                self.artifacts[key] = artifact, devices
            done(answer)

        module = module_of(artifact)
        self.compilers.put(key, module, lambda: examined(artifact, detail), compiled)

    def forget(self, key: bytes) -> None:
        """Drop an installed computation after everything submitted so far, or end its compilation."""
        if not self.compilers.fail(lambda other: other == key, "it was released"):
            self.submit([ops.RunFunction(lambda: self._forget(key))])

    def _forget(self, key: bytes) -> None:
        self.programs.pop(key, None)
        self.artifacts.pop(key, None)

    def has_kept(self, artifact: bytes, devices: tuple[DeviceAddress, ...]) -> bool:
        """Return whether an artifact was compiled for these devices before its program came."""
        return (artifact, devices) in self.artifacts.values()

    def take_calls(self, handler: Callable[[ops.ClientCall], None]) -> None:
        """Take nothing: no computation calls its client."""

    def submit(self, batch: list[ops.Op]) -> None:
        """Run what computes after all that was submitted before; the rest at once."""
        asked: list[ops.Watch | ops.Read] = []
        is_alone = self.idle and not self._pump_planned
        for op in batch:
            if isinstance(op, ops.Build):
                self._build(op)
            elif isinstance(op, ops.Move) and op.source.is_in_file:
                self._move(op)
            elif isinstance(op, ops.Read) or (isinstance(op, ops.Watch) and op.values):
                asked.append(op)
            else:
                self._queue.append(op)
            del op
        batch.clear()
        for question in asked:
            self._look(question)
        if is_alone and self._queue and self._takes_no_time(self._queue[0]):
            self.in_turn = True
            self._pump()
            self.in_turn = False
        self._plan_pump()

    def run_now(self, op: ops.Execute) -> bool:
        """Compute at once, as the loop computes some ops itself."""
        if not self.idle or self._pump_planned or not self._takes_no_time(op):
            return False
        self._queue.append(op)
        self.in_turn = True
        self._pump()
        self.in_turn = False
        self._plan_pump()
        return True

    def _takes_no_time(self, op: ops.Op) -> bool:
        """Whether the loop computes this op itself (see `pw.devices.jax.execution`); decided anew for each."""
        if not isinstance(op, ops.Execute):
            return False
        installed = self.programs.get(op.key)
        return (
            installed is not None
            and len(installed.layout.hosts) == 1
            and installed.lasts_s is None
            and self._quick.random() < self._world.profile.quick
        )

    def is_there(self, value: Value) -> bool:
        """Whether a value is made, without an error."""
        shards = value.payload
        return value.error is None and isinstance(shards, Shards) and shards is not _DONATED

    def read_now(self, op: ops.Read) -> list[np.ndarray[Any, Any]] | None:
        """Host copies of what a read asks for, or None."""
        if self._reads.random() < 0.3 or not self.is_there(op.value):
            return None
        views = self._read(op)
        return None if isinstance(views, ErrorReport) else views

    def snapshot(
        self, value: Value, spec: ArraySpec, devices: tuple[DeviceAddress, ...]
    ) -> list[tuple[Box, np.ndarray[Any, Any]]] | None:
        """Host copies of the boxes here, if the value is ready now."""
        shards = value.payload
        if value.error is not None or value.building is not None or not isinstance(shards, Shards):
            return None
        if shards is _DONATED:
            return None
        return [
            (box, shards[devices[positions[0]].ordinal])
            for box, positions in host_boxes(spec, devices, self.host)
        ]

    def counters(self) -> dict[str, int]:
        """Return the bytes of all buffers."""
        return {"device_bytes": sum(self._buffers.live_bytes.values())}

    def allocated_bytes(self, ordinal: int) -> tuple[int | None, int | None]:
        """Return the bytes of the buffers on a device."""
        return self._buffers.live_bytes[ordinal], None

    def test(self, ordinal: int, done: Callable[[DeviceTest], None]) -> None:
        """Test a device."""
        delay_s = self._tests.uniform(0.005, 0.3) * self.node.slowness

        def ended() -> None:
            outcome = self.test_outcome(self.host, ordinal, self._tests)
            self.answer(lambda: done(outcome))

        self._world.after(delay_s, self._awake, ended)

    def take_suspicions(self, devices: int, handler: ops.Suspect) -> None:
        """Have errors that name devices handled."""
        self.suspect = handler

    def stage(self, value: Value) -> str:
        """Return the stage of a value."""
        if value.error is None and value.payload is None:
            return "submitted"
        return "finished"

    def whereabouts(self) -> tuple[ThreadReport, ...]:
        """There are no threads."""
        return ()

    def close(self) -> None:
        """Stop; no `done` is called afterwards."""
        if not self.closed:
            self.closed = True
            self._queue.clear()
            self.programs.clear()
            self._gangs.left(self)

    @property
    def installed(self) -> int:
        """Computations that can be run."""
        return len(self.programs) + len(self.artifacts)

    @property
    def buffers(self) -> int:
        """Values whose buffers are still referenced."""
        return len(self._buffers)

    @property
    def idle(self) -> bool:
        """Whether nothing is queued or running."""
        return not self._queue and not self._running

    # --- the queue -----------------------------------------------------------------------------------

    def _awake(self, action: Callable[[], None]) -> None:
        """Call a function now, or when the paused process wakes."""
        if self.closed or not self.node.alive:
            return
        if self.node.paused:
            self._world.at(self.node.paused_until_s, self._awake, action)
        else:
            action()

    def answer(self, function: Callable[[], None]) -> None:
        """Call a function on the node's loop, unless this incarnation has ended."""
        if not self.closed:
            self.node.call(lambda: None if self.closed else function())

    def _plan_pump(self) -> None:
        if not self._pump_planned and not self._running and not self.closed:
            self._pump_planned = True
            self._world.after(OP_S * self.node.enqueue_slowness, self._awake, self._pump)

    def _pump(self) -> None:
        self._pump_planned = False
        if not self._pumping:  # ops that fail at once end within the loop
            self._pumping = True
            self._run_queue()
            self._pumping = False

    def _run_queue(self) -> None:
        queue = self._queue
        while queue and not self._running and not self.closed:
            op = queue[0]
            if self.in_turn and isinstance(op, ops.RunFunction):
                return
            if isinstance(op, ops.Execute):
                if any(self._is_building(arg) for arg in op.args):
                    return
                queue.popleft()
                self._running = True
                self._execute(op)
            elif isinstance(op, ops.Move):
                if self._is_building(op.source):
                    return
                queue.popleft()
                self._move(op)
            elif isinstance(op, ops.View):
                if any(self._is_building(source.value) for source in op.sources):
                    return
                queue.popleft()
                self._view(op)
            else:
                queue.popleft()
                if isinstance(op, ops.RunFunction):
                    op.function()
                else:
                    assert isinstance(op, ops.Watch)
                    self._answer_none(op.done)

    def _is_building(self, value: Value) -> bool:
        """Whether a value is still assembled; if so, it goes on afterwards."""
        if not isinstance(value.building, _Assembly):
            return False
        value.building.waiting.append(self._pump)
        return True

    # --- questions -----------------------------------------------------------------------------------

    def _look(self, op: ops.Watch | ops.Read) -> None:
        """Answer a question, or look at it again when the first missing value exists."""
        for value in op.values if isinstance(op, ops.Watch) else (op.value,):
            if value.payload is None and value.error is None:
                if self.idle and value.building is None:
                    raise Violation("values are made before they are used", f"on {self.host}")
                value.ask(op)
                return
        reply = self._watched(op) if isinstance(op, ops.Watch) else self._read(op)
        done: Callable[[Any], None] = op.done
        answer = partial(self.answer, partial(done, reply))
        self._world.after(OP_S * self.node.slowness, self._awake, answer)

    def _tell(self, value: Value) -> None:
        """Answer the questions that have waited for a value."""
        while value.questions:
            self._look(value.questions.popleft())

    # --- ops -----------------------------------------------------------------------------------------

    def _execute(self, op: ops.Execute) -> None:
        if op.noted is not None:
            op.noted.called_s = self.node.now_s()
        installed = self.programs.get(op.key)
        if any(value.is_away for value in op.args):
            raise Violation("memory", f"a computation reads host memory of {self.host}")
        for value in op.results:
            if value.payload is not None:
                raise Violation("a value is made once", f"{op.key!r} on {self.host} runs again")
        if installed is None:
            raise Violation(
                "computations are installed before they run", f"{op.key!r} on {self.host}"
            )
        if installed.computation.traits.keeps_state:
            self._running = False
            self.feeds.make(installed, op)
        else:
            self._gangs.reach(self, installed, op)

    def executed(self, op: ops.Execute, error: ErrorReport | None, results: list[Shards]) -> None:
        """A computation that this host has reached has ended; `results` is empty afterwards."""
        if self.closed:
            return
        self._running = False
        self._take(op, error, results)
        # What nothing reads any more can be freed, although callers may still refer to the op and its results.
        op.args = op.results = ()
        self._awake(self._pump)

    def _take(self, op: ops.Execute, error: ErrorReport | None, results: list[Shards]) -> None:
        """Put the results of a computation, or its error, into their values."""
        outputs = self.programs[op.key].computation.outputs if results else ()
        for value, shards, spec in zip(op.results, results, outputs, strict=False):
            self._fill(value, shards, by_run=True, on_devices=not spec.memory)
        results.clear()
        if error is not None:
            for value in op.results:
                value.fail(error)
                self._tell(value)

    def poison(self, op: ops.Execute) -> ErrorReport | None:
        """Return the error of the first failed argument, if there is one."""
        for value in op.args:
            if (failure := self._failure(value)) is not None:
                return failure
        return None

    def arguments(self, installed: SimInstalled, op: ops.Execute) -> list[Shards]:
        """The buffers that a computation reads; those that it takes over are gone afterwards."""
        buffers: list[Shards] = [value.payload for value in op.args]
        computation = installed.computation
        for position in computation.donated:
            value = op.args[position]
            kept = position in op.copied or op.args.count(value) > 1
            if not kept and not value.shared:
                self._buffers.donate(value.payload)
                value.fill(_DONATED)
        return buffers

    def _move(self, op: ops.Move) -> None:
        failure = self._failure(op.source)
        if failure is not None:
            op.result.fail(failure, alone=op.source.alone)
            self._tell(op.result)
            return
        if (op.spec, op.devices) == (op.source_spec, op.source_devices):
            raise Violation("memory", f"{self.host} moves an array to where its client has it")
        source: Shards = op.source.payload
        shards = empty(op.spec, op.devices, self.host)
        for piece in op.pieces:
            held = source[op.source_devices[piece.source_device].ordinal]
            data = held[box_slices(piece.source_box)]
            for position in piece.destination_devices:
                shards[op.devices[position].ordinal][box_slices(piece.destination_box)] = data
        if op.spec.memory == op.source_spec.memory:
            self._fill(op.result, shards, by_run=True, on_devices=not op.spec.memory)
            return
        self._world.checked["moves between memories"] += 1
        shards.is_upload = source.is_upload and not op.spec.memory
        total = sum(shard.nbytes for shard in shards.values())
        delay_s = self._random.uniform(0.5, 20.0) * total / COPY_BYTES_PER_S * self.node.slowness
        self.fill_after(delay_s, [op.result], [shards], on_devices=not op.spec.memory)

    def _view(self, op: ops.View) -> None:
        shards = Shards()
        shape, dtype = op.spec.sharding.shard_shape(op.spec.shape), dtype_of(op.spec.dtype)
        for source in op.sources:
            if (failure := self._failure(source.value)) is not None:
                op.result.fail(failure, alone=source.value.alone)
                self._tell(op.result)
                return
            for position, _ in source.shards:
                ordinal = op.devices[position].ordinal
                shards[ordinal] = shard = source.value.payload[ordinal]
                if (shard.shape, shard.dtype) != (shape, dtype):
                    raise Violation("views", f"a shard of {shard.shape} in a view of {shape}")
        self._world.checked["views"] += 1
        self._fill(op.result, shards, by_run=True, on_devices=not op.spec.memory)

    def _build(self, op: ops.Build) -> None:
        total = write_parts(shards := empty(op.spec, op.devices, self.host), op, self.host)
        on_devices, shards.is_upload = not op.spec.memory, True
        if total <= 4096:
            self._fill(op.result, shards, on_devices=on_devices)
            if op.done is not None:
                self._answer_none(op.done)
            return
        delay_s = total / BUILD_BYTES_PER_S * self.node.slowness
        self.fill_after(delay_s, [op.result], [shards], done=op.done, on_devices=on_devices)

    def fill_after(
        self,
        delay_s: float,
        values: Sequence[Value],
        shards: Sequence[Shards],
        error: ErrorReport | None = None,
        done: ops.Done | None = None,
        *,
        on_devices: bool = True,
    ) -> None:
        """Fill values later, or give them an error; without `done`, a run has made them."""
        assembly = _Assembly()
        for value in values:
            value.begin(assembly)

        def built() -> None:
            for index, value in enumerate(values):
                value.building = None
                if error is not None:
                    value.fail(error)
                filled = shards[index] if shards else Shards()
                self._fill(value, filled, by_run=done is None, on_devices=on_devices)
            assembly.set()
            if done is not None:
                self._answer_none(done)

        self._world.after(delay_s, self._awake, built)

    def _answer_none(self, done: ops.Done) -> None:
        self.answer(lambda: done(None))

    def _watched(self, op: ops.Watch) -> ErrorReport | None:
        failures = (self._failure(value) for value in op.values if value.payload is not _DONATED)
        return next((failure for failure in failures if failure is not None), None)

    def _read(self, op: ops.Read) -> ErrorReport | list[np.ndarray[Any, Any]]:
        failure = self._failure(op.value)
        if failure is not None:
            return failure
        rate = 0.0 if self._world.calm else self._world.profile.read_failure
        if rate and self._random.random() < rate:
            words = self._world.ledger.failure(A_READ)
            return ErrorReport.of(ComputationFailed(words), self.host)
        shards: Shards = op.value.payload
        wanted = [(op.devices[position].ordinal, box) for position, box in op.boxes]
        if any(ordinal not in shards for ordinal, _ in wanted):
            elsewhere = InternalError("the read names a device that does not hold the value")
            return ErrorReport.of(elsewhere, self.host)
        return [shards[ordinal][box_slices(box)] for ordinal, box in wanted]

    # --- values --------------------------------------------------------------------------------------

    def _failure(self, value: Value) -> ErrorReport | None:
        if value.error is not None:
            return value.error
        if value.payload is None:
            raise Violation("values are made before they are used", f"on {self.host}")
        if value.payload is _DONATED:
            return ErrorReport.of(ArrayDeleted("the buffers were donated"), self.host)
        return None

    def _fill(
        self, value: Value, shards: Shards, *, by_run: bool = False, on_devices: bool = True
    ) -> None:
        if value.error is not None:
            self._tell(value)
            return
        if value.payload is not None:
            raise Violation("a value is made once", f"on {self.host}")
        value.fill(shards)
        self._tell(value)
        if on_devices:
            self._buffers.fill(shards, by_run=by_run and not shards.is_upload)
