"""Devices and a bulk plane for the world of `tests.stages.actors`: numpy instead of accelerators.

Ops of one host are done in order, one whenever the world picks the host. A computation over several
hosts is done when all of them have reached it; two that meet out of order fail the test (G1).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from pw.core.errors import (
    CompileError,
    ComputationFailed,
    ErrorReport,
    HostLost,
    InternalError,
    OutOfDeviceMemory,
    OutOfHostMemory,
    TransferFailed,
)
from pw.core.landing import Landing
from pw.core.messages import Detail, DeviceOutcome, DeviceTest, ThreadReport
from pw.core.programs.program import Computation
from pw.core.sharding import ArraySpec, Box, DeviceAddress, box_slices, dtype_of, host_boxes
from pw.devices.host import backend as ops
from pw.devices.host.program import owner_of
from pw.devices.host.value import Value
from pw.testing.sim.digests import examined

if TYPE_CHECKING:
    from tests.stages.actors import World


class FakeBulk:
    """A bulk plane whose transfers end whenever the world likes."""

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name
        self.landings: dict[int, tuple[int, Callable[[Any], None]]] = {}
        self.full = False

    def land(self, size_bytes: int, deliver: Callable[[Any], None], sender: str = "") -> Landing:
        if self.full:
            raise OutOfHostMemory("no room")
        transfer = len(self.world.bulk) + 1
        self.landings[transfer] = (size_bytes, deliver)
        self.world.bulk[transfer] = self
        return Landing(transfer, size_bytes, 0, self.name, "", "")

    def cancel(self, transfer: int, *, unused: bool = False) -> None:
        self.landings.pop(transfer, None)

    def landed_bytes(self, transfer: int) -> int:
        return 0

    def push(
        self,
        landing: Landing,
        parts: Sequence[tuple[int, np.ndarray[Any, Any]]],
        done: Callable[[Exception | None], None],
    ) -> None:
        buffer = np.zeros(landing.size_bytes, np.uint8)
        for offset, array in parts:
            flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            buffer[offset : offset + flat.size] = flat
        there = self.world.bulk[landing.transfer]

        def arrive() -> None:
            waiting = there.landings.pop(landing.transfer, None)
            if waiting is not None:
                waiting[1](buffer)
            self.world.happenings[self.name].append(lambda: done(None))

        if there.name in self.world.actors:
            self.world.happenings[there.name].append(arrive)
        else:
            gone = TransferFailed(f"{there.name} is gone")
            self.world.happenings[self.name].append(lambda: done(gone))


class FakeBackend:
    """Devices that compute with numpy: output i of an artifact b"k" is the sum of its inputs + k + i.

    The artifact b"raise" raises, b"forever" never ends. The last output of a checked computation says which of
    the others has a negative number in it.
    """

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name
        self.queue: deque[ops.Op] = deque()
        self.installed: dict[bytes, tuple[Computation, bytes, tuple[DeviceAddress, ...]]] = {}
        self.kept: set[bytes] = set()
        self.executed: list[bytes] = []
        self.full_for: str | None = None
        """The computation of several hosts that this host alone cannot enqueue."""
        self.gang_broken: ErrorReport | None = None
        self.raises = False
        """Whether Python functions raise on this host."""
        self.outcomes: dict[int, DeviceOutcome | None] = {}
        """Outcomes of the tests of devices; None for one that does not end."""
        self.held: list[tuple[int, Callable[[DeviceTest], None]]] = []
        """Tests that do not end."""
        self.suspect: ops.Suspect = lambda devices, word: None

    def install(
        self,
        key: bytes,
        computation: Computation,
        artifact: bytes,
        devices: tuple[DeviceAddress, ...],
        done: ops.Done,
    ) -> None:
        error = None
        if artifact == b"nocompile":
            error = ErrorReport.of(CompileError("no such thing"), self.name)
        else:  # behind what was forgotten before, as on a device thread
            entry = (computation, artifact, devices)
            self.queue.append(ops.RunFunction(lambda: self.installed.update({key: entry})))
        self.world.happenings[self.name].append(lambda: done(error))

    def compile(
        self,
        key: bytes,
        artifact: bytes,
        devices: tuple[DeviceAddress, ...],
        detail: Detail,
        done: ops.DoneCompiling,
    ) -> None:
        told: Any
        try:
            told = examined(artifact, detail)
            self.queue.append(ops.RunFunction(lambda: self.kept.add(key)))
        except CompileError as error:
            told = ErrorReport.of(error, self.name)
        self.world.happenings[self.name].append(lambda: done(told))

    def forget(self, key: bytes) -> None:
        self.queue.append(ops.RunFunction(lambda: self.kept.discard(key)))
        self.queue.append(ops.RunFunction(lambda: self.installed.pop(key, None) and None))

    def take_calls(self, handler: Callable[[ops.ClientCall], None]) -> None:
        """Take nothing: no computation calls its client."""

    def submit(self, batch: Sequence[ops.Op]) -> None:
        self.queue += batch

    def run_now(self, op: ops.Execute) -> bool:
        return False

    def is_there(self, value: Value) -> bool:
        return False

    def snapshot(
        self, value: Value, spec: ArraySpec, devices: tuple[DeviceAddress, ...]
    ) -> list[tuple[Box, np.ndarray[Any, Any]]] | None:
        if value.payload is None or value.error is not None:
            return None
        boxes = host_boxes(spec, devices, self.name)
        return [(box, value.payload[positions[0]]) for box, positions in boxes]

    def counters(self) -> dict[str, int]:
        return {}

    def allocated_bytes(self, ordinal: int) -> tuple[int | None, int | None]:
        return None, None

    def test(self, ordinal: int, done: Callable[[DeviceTest], None]) -> None:
        outcome = self.outcomes.get(ordinal, DeviceOutcome.OK)
        if outcome is None:
            self.held.append((ordinal, done))
            return
        words = "" if outcome is DeviceOutcome.OK else "as the test says"
        self.world.happenings[self.name].append(lambda: done(DeviceTest(ordinal, outcome, words)))

    def take_suspicions(self, devices: int, handler: ops.Suspect) -> None:
        self.suspect = handler

    def stage(self, value: Value) -> str:
        if value.error is not None or value.payload is not None:
            return "finished"
        head = self.queue[0] if self.queue else None
        met = isinstance(head, ops.Execute) and value in head.results
        return "entered" if met else "submitted"

    def whereabouts(self) -> tuple[ThreadReport, ...]:
        head = self.queue[0] if self.queue else None
        if not isinstance(head, ops.Execute):
            return ()
        name = self.installed[head.key][0].name
        stack, client = ("fake.py:1",), owner_of(head.key)
        return (ThreadReport("pw-execute", f"the computation {name!r}", 0.0, stack, client),)

    def close(self) -> None:
        self.queue.clear()

    def gang(self) -> list[FakeBackend]:
        """The backends that the computation at the head of the queue runs on."""
        head = self.queue[0]
        assert isinstance(head, ops.Execute)
        computation, _, devices = self.installed[head.key]
        if computation.traits.runs_on_host:
            return [self]  # each host calls it for itself
        return [self.world.backends[h] for h in dict.fromkeys(d.host for d in devices)]

    @property
    def can_go(self) -> bool:
        """Whether the head of the queue can be done, which for a gang takes all its hosts."""
        if not self.queue:
            return False
        head = self.queue[0]
        if not isinstance(head, ops.Execute) or head.key not in self.installed:
            return True
        _, _, devices = self.installed[head.key]
        if self.installed[head.key][1] == b"forever":
            return False
        if any(device.host not in self.world.backends for device in devices):
            return False
        gang = self.gang()
        if len(gang) == 1 or self._fails_alone(head):
            return True
        heads = [member.queue[0] if member.queue else None for member in gang]
        for other, member in zip(heads, gang, strict=True):
            if member.gang_broken or (
                isinstance(other, ops.Execute) and member._fails_alone(other)
            ):
                return False
        met = [o for o in heads if isinstance(o, ops.Execute) and o.key == head.key]
        for other, member in zip(heads, gang, strict=True):
            if isinstance(other, ops.Execute) and len(member.gang()) > 1:
                assert other.key == head.key, f"{other.key!r} met {head.key!r}: G1 is broken"
        return len(met) == len(heads)

    def step(self) -> None:
        """Do what is at the head of the queue."""
        head = self.queue[0]
        if isinstance(head, ops.Execute):
            if self._fails_alone(head):
                self._fail_alone(head)
            elif head.key in self.installed:
                self._execute(self.gang())
            else:
                self.queue.popleft()
                _fail(head.results, ErrorReport.of(InternalError("not installed")))
            return
        self.queue.popleft()
        post = self.world.happenings[self.name].append
        if isinstance(head, ops.RunFunction):
            head.function()
        elif isinstance(head, ops.Watch):
            error = next((e for e in map(_failure, head.values) if e is not None), None)
            post(lambda: head.done(error))
        elif isinstance(head, ops.Read):
            failed = _failure(head.value)
            views = failed or [
                head.value.payload[at][box_slices(box)].copy() for at, box in head.boxes
            ]
            post(lambda: head.done(views))
        elif isinstance(head, ops.Build):
            head.result.payload = _shards(head.spec, head.devices, self.name)
            for positions, box, data in head.parts:
                for at in positions:
                    head.result.payload[at][box_slices(box)] = data
            if (done := head.done) is not None:
                post(lambda: done(None))
        elif isinstance(head, ops.View):
            self._view(head)
        else:
            self._move(head)

    def _fails_alone(self, head: ops.Execute) -> bool:
        if head.failed is None or head.key not in self.installed:
            return False
        alone = any(value.alone and value.error is not None for value in head.args)
        computation, _, _ = self.installed[head.key]
        return bool(self.gang_broken) or alone or self.full_for == computation.name

    def _fail_alone(self, head: ops.Execute) -> None:
        """The gang's other hosts wait for ever, unless they have not come there."""
        self.queue.popleft()
        if self.gang_broken is not None:
            return _fail(head.results, self.gang_broken)
        error = next((value.error for value in head.args if value.error is not None), None)
        error = error or ErrorReport.of(OutOfDeviceMemory("no room here"), self.name)
        self.gang_broken = ErrorReport.of(HostLost("it has left its gang"), self.name)
        _fail(head.results, error)
        assert head.failed is not None
        self.world.happenings[self.name].append(partial(head.failed, error))
        return None

    def _move(self, op: ops.Move) -> None:
        if (error := _failure(op.source)) is not None:
            return _fail((op.result,), error)
        op.result.payload = _shards(op.spec, op.devices, self.name)
        for piece in op.pieces:
            data = op.source.payload[piece.source_device][box_slices(piece.source_box)]
            for at in piece.destination_devices:
                op.result.payload[at][box_slices(piece.destination_box)] = data
        return None

    def _view(self, op: ops.View) -> None:
        for source in op.sources:
            if (error := _failure(source.value)) is not None:
                return _fail((op.result,), error)
        pairs = [(s.value.payload, *pair) for s in op.sources for pair in s.shards]
        op.result.payload = {at: payload[there] for payload, at, there in pairs}
        return None

    def _execute(self, gang: list[FakeBackend]) -> None:
        heads: list[Any] = [member.queue.popleft() for member in gang]
        computation, artifact, _ = self.installed[heads[0].key]
        for member in gang:
            member.executed.append(heads[0].key)
        error = next((e for op in heads for e in map(_failure, op.args) if e is not None), None)
        raised = artifact == b"raise" or (computation.traits.runs_on_host and self.raises)
        if error is None and raised:
            error = ErrorReport.of(ComputationFailed("it raised"), self.name)
        if error is not None:
            for op in heads:
                _fail(op.results, error)
            return
        total: Any = int(artifact)
        for index, spec in enumerate(computation.inputs):
            whole = np.zeros(spec.shape, dtype_of(spec.dtype))
            for op in heads:
                for at, shard in op.args[index].payload.items():
                    whole[box_slices(spec.box(at))] = shard
            total = total + whole
        made = len(computation.outputs) - bool(computation.checks)
        for index, spec in enumerate(computation.outputs[made:]):
            flags = [(total + number < 0).any() for number in range(made)]
            for op, member in zip(heads, gang, strict=True):
                shards = _shards(spec, self.installed[op.key][2], member.name)
                op.results[made + index].payload = {at: np.array(flags) for at in shards}
        for index, spec in enumerate(computation.outputs[:made]):
            for op, member in zip(heads, gang, strict=True):
                devices = self.installed[op.key][2]
                shards = _shards(spec, devices, member.name)
                for at in shards:
                    shards[at][...] = (total + index)[box_slices(spec.box(at))]
                op.results[index].payload = shards


def _failure(value: Value) -> ErrorReport | None:
    if value.error is not None or value.payload is not None:
        return value.error
    return ErrorReport.of(InternalError("a value was used before it was made"))


def _fail(results: Sequence[Value], error: ErrorReport) -> None:
    for value in results:
        value.error = error


def _shards(spec: ArraySpec, devices: tuple[DeviceAddress, ...], host: str) -> dict[int, Any]:
    shape = spec.sharding.shard_shape(spec.shape)
    return {
        at: np.zeros(shape, dtype_of(spec.dtype))
        for at, device in enumerate(devices)
        if device.host == host
    }
