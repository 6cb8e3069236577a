"""The host executor: runs its part of every gang strictly in launch order.

Theory of operation. Launches carry contiguous numbers; a gap means that the gang's order is lost, and
the host stops and says so. Each launch names a segment of an installed program; its instructions are
turned into ops for the device backend, in order, and handed over at once: control runs ahead of the data.
The one thing that holds the head of the queue is an instruction that reads a value which comes from another
host and has not arrived. Everything behind it waits as well, so that collectives meet in the same order on all
hosts (DESIGN G1); G4 and the scheduler see to it that such a wait always ends.

A *run* lives from its first launch on this host to its last; its values are in numbered slots. Results
are also in the object store, under the ids that the client gave them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from pw.core.actor import Actor, Env, handles
from pw.core.errors import ArrayLost, CompileError, ConnectionFailed, ErrorReport, HostLost
from pw.core.ids import RESOURCES, Address, client_of
from pw.core.messages import (
    CANCELLED,
    Directory,
    Discard,
    Finished,
    FormIsland,
    HostRejected,
    Install,
    Installed,
    IslandJoined,
    IslandJoinFailed,
    Launch,
    LaunchGap,
    LeaveIsland,
    PeerLost,
    PeerRefused,
    Progress,
    RegisterHost,
)
from pw.core.plan import Execute, Free, HostPlan, Instruction, Receive, Send
from pw.core.program import Program
from pw.core.sharding import ArraySpec, Binding, DeviceAddress, Placement, dtype_of, host_boxes
from pw.core.sharding import box_slices as slices_of
from pw.devices import backend as ops
from pw.devices.backend import Backend, Op, Part, Value
from pw.devices.coordinator import ShardCoordinator, is_local
from pw.devices.store import ObjectStore, relative


class HostProcess(Protocol):
    """What only the process around the actors can do."""

    def join(
        self, form: FormIsland, joined: Callable[[IslandJoined | IslandJoinFailed], None]
    ) -> None:
        """Join the epoch's group; `joined` is called on the loop thread."""

    def stop(self, reason: str, error: ErrorReport | None) -> None:
        """End this incarnation; with an error, for good."""


@dataclass(slots=True)
class _Installed:
    """A program as this host runs it."""

    body: Program
    plan: HostPlan
    keys: tuple[bytes | None, ...]
    """The backend's name of each computation; None for those that do not run here."""
    segments: dict[int, tuple[Instruction, ...]]
    bindings: dict[int, Binding]
    located: dict[Placement, tuple[DeviceAddress, ...]] = field(default_factory=dict)
    outputs_of_slot: dict[int, list[int]] = field(default_factory=dict)
    local_edges: set[int] = field(default_factory=set)
    """Edges that this host completes by itself, without waiting."""

    def devices(self, spec: ArraySpec) -> tuple[DeviceAddress, ...]:
        """The physical device at every position of the mesh of `spec`."""
        placement = spec.placement
        if placement not in self.located:
            self.located[placement] = self.bindings[placement.slice].located(placement)
        return self.located[placement]


@dataclass(slots=True)
class _Run:
    """One run of a program on this host."""

    run: int
    program: _Installed
    slots: dict[int, Value]
    results: tuple[int, ...]


@dataclass(slots=True)
class _Launched:
    """A launch in the queue, and how far it has got."""

    launch: Launch
    run: _Run
    instructions: tuple[Instruction, ...]
    position: int = 0
    last_results: tuple[Value, ...] = ()


@dataclass(frozen=True, slots=True)
class _Forget:
    """A place in the queue: the backend may forget these computations."""

    keys: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class _SendProgress:
    """Note to oneself: send what has ended in this turn."""


class HostExecutor(Actor):
    """Turns launches into ops for the device backend, in launch order."""

    def __init__(
        self,
        env: Env,
        registration: RegisterHost,
        process: HostProcess,
        backend: Backend,
        store: ObjectStore,
        coordinator: ShardCoordinator,
    ) -> None:
        super().__init__(env)
        self._registration = registration
        self._process = process
        self._backend = backend
        self._store = store
        self._coordinator = coordinator
        self._host = env.address.node
        self._epoch = 0
        self._scheduler: Address | None = None
        self._expected = 0
        self._broken = False
        self._programs: dict[int, _Installed] = {}
        self._runs: dict[int, _Run] = {}
        self._arriving: dict[Value, list[int]] = {}
        """Values that are still on their way from another host, whatever run they belong to, and
        the arrays of later runs that are to be announced when they are there."""
        self._queue: deque[_Launched | _Forget] = deque()
        self._ops: list[Op] = []
        self._announced: list[int] = []
        self._finished: list[Finished] = []
        self._busy_until_s = 0.0

    # --- membership ----------------------------------------------------------------------------------

    def register(self) -> None:
        """Ask the resource manager for a place in the island."""
        self.env.send(RESOURCES, self._registration)

    @handles(HostRejected)
    def _rejected(self, sender: Address, message: HostRejected) -> None:
        self._process.stop("rejected by the controller", message.error)

    @handles(PeerRefused)
    def _refused(self, sender: Address, message: PeerRefused) -> None:
        if message.node == RESOURCES.node:
            self._process.stop("refused by the controller", message.error)

    @handles(FormIsland)
    def _form(self, sender: Address, message: FormIsland) -> None:
        if self._epoch:
            self._process.stop(f"asked to join epoch {message.epoch} of {message.island}", None)
            return
        self._epoch = message.epoch
        self._store.admit_tickets_of(message.secret)

        def joined(answer: IslandJoined | IslandJoinFailed) -> None:
            told = "could not join" if isinstance(answer, IslandJoinFailed) else "joined"
            place = f"{message.rank + 1}/{len(message.hosts)}"
            self.env.log("info", told, island=message.island, epoch=message.epoch, host=place)
            self.env.send(RESOURCES, answer)

        self._process.join(message, joined)

    @handles(Directory)
    def _directory(self, sender: Address, message: Directory) -> None:
        for peer in message.peers:
            if peer.node != self._host:
                self.env.introduce(peer.node, peer.endpoint)
        self._coordinator.hosts_are(frozenset(peer.node for peer in message.peers))

    @handles(LeaveIsland)
    def _leave(self, sender: Address, message: LeaveIsland) -> None:
        if message.epoch == self._epoch:
            self._process.stop(f"island {message.island} is formed anew: {message.reason}", None)

    @handles(PeerLost)
    def _peer_lost(self, sender: Address, message: PeerLost) -> None:
        if message.node != RESOURCES.node:
            return
        error = None
        if not self._epoch:
            error = ErrorReport.of(ConnectionFailed(f"the controller {message.reason}"))
        self._process.stop(f"the controller was lost: {message.reason}", error)

    # --- programs ------------------------------------------------------------------------------------

    @handles(Install)
    def _install(self, sender: Address, message: Install) -> None:
        if message.epoch != self._epoch:
            self.env.count("messages_stale")
            return
        self._scheduler = sender
        body, plan = message.body, message.plan
        bindings = {binding.slice: binding for binding in plan.bindings}
        segments = {part.segment: part.instructions for part in plan.segments}
        used = {
            instruction.computation
            for instructions in segments.values()
            for instruction in instructions
            if isinstance(instruction, Execute)
        }
        blobs = {artifact.digest: artifact.blob for artifact in message.artifacts}
        keys: list[bytes | None] = []
        waiting = set(used)
        failures: list[ErrorReport] = []

        def compiled(index: int, error: ErrorReport | None) -> None:
            waiting.discard(index)
            if error is not None:
                failures.append(error)
            if not waiting:
                answer = Installed(
                    message.epoch, message.program, failures[0] if failures else None
                )
                self.env.send(sender, answer)

        installed = _Installed(body, plan, (), segments, bindings)
        for output, slot in plan.outputs:
            installed.outputs_of_slot.setdefault(slot, []).append(output)
        for instructions in segments.values():
            for instruction in instructions:
                if isinstance(instruction, Receive):
                    devices = installed.devices(instruction.spec)
                    if is_local(instruction, devices, self._host):
                        installed.local_edges.add(instruction.edge)
        for index, computation in enumerate(body.computations):
            key = f"{message.program}/{index}".encode() if index in used else None
            keys.append(key)
            if key is None:
                continue
            blob = blobs.get(computation.artifact)
            if blob is None:
                missing = CompileError(f"the artifact of {computation.name!r} did not come")
                compiled(index, ErrorReport.of(missing, self._host))
                continue
            self._backend.install(
                key,
                computation,
                blob,
                bindings[computation.placement.slice].located(computation.placement),
                lambda error, index=index: compiled(index, error),  # type: ignore[misc]
            )
        installed.keys = tuple(keys)
        self._programs[message.program] = installed
        if not used:
            self.env.send(sender, Installed(message.epoch, message.program, None))

    # --- launches ------------------------------------------------------------------------------------

    def _in_sequence(self, epoch: int, sequence: int, sender: Address) -> bool:
        if epoch != self._epoch or self._broken:
            self.env.count("messages_stale")
            return False
        if sequence != self._expected:
            self._broken = True
            self.env.log("error", "launch gap", expected=self._expected, got=sequence)
            self.env.send(sender, LaunchGap(self._epoch, self._expected, sequence))
            return False
        self._expected += 1
        self._scheduler = sender
        return True

    @handles(Launch)
    def _launch(self, sender: Address, message: Launch) -> None:
        if not self._in_sequence(message.epoch, message.sequence, sender):
            return
        self.env.count("launches")
        if message.arguments is not None and message.program in self._programs:
            self._begin(message, self._programs[message.program])
        run = self._runs.get(message.run)
        if message.segment == CANCELLED:
            self._coordinator.drop_run(message.run)
            if run is None:
                return
        if run is None:
            self._broken = True
            self.env.log("error", "launch of an unknown run", program=message.program)
            self.env.send(sender, LaunchGap(self._epoch, message.sequence, message.sequence))
            return
        instructions = run.program.segments.get(message.segment, ())
        # An edge may fail at once and set the queue going: all are expected before the launch is in it.
        for instruction in instructions:
            if isinstance(instruction, Receive):
                self._expect(run, instruction)
        self._queue.append(_Launched(message, run, instructions))
        self._advance()

    def _begin(self, message: Launch, program: _Installed) -> None:
        """A run's first launch here: bind its arguments and announce its results."""
        assert message.arguments is not None
        arguments, results = message.arguments.args, message.arguments.results
        body = program.body
        run = _Run(message.run, program, {}, results)
        self._runs[message.run] = run
        for index in program.plan.inputs:
            arg = arguments[index]
            spec = body.inputs[index]
            if isinstance(arg, bytes):
                run.slots[index] = self._inline(arg, spec, program.devices(spec))
                continue
            value = self._store.value(arg)
            if value is None:
                lost = ArrayLost(f"argument {index} of {body.name!r} is not on this host any more")
                value = Value(ErrorReport.of(lost, self._host))
            run.slots[index] = value
        for index in body.donated:
            if isinstance(arg := arguments[index], int):
                self._store.drop(arg, f"donated to {body.name!r}")
        for output, slot in program.plan.outputs:
            spec = body.outputs[output].spec
            value = run.slots.get(slot)
            if value is None:
                value = run.slots[slot] = Value()
            elif slot < len(body.inputs) or len(program.outputs_of_slot[slot]) > 1:
                value.shared = True
            shards = sum(device.host == self._host for device in program.devices(spec))
            self._store.expect(results[output], value, spec, shards)
            if slot < len(body.inputs):
                self._arriving.get(value, self._announced).append(results[output])

    def _inline(self, data: bytes, spec: ArraySpec, devices: tuple[DeviceAddress, ...]) -> Value:
        array = np.frombuffer(data, np.uint8).view(dtype_of(spec.dtype)).reshape(spec.shape)
        parts: list[Part] = [
            (positions, relative(box), array[slices_of(box)])
            for box, positions in host_boxes(spec, devices, self._host)
        ]
        value = Value()
        self._ops.append(ops.Build(value, spec, devices, parts))
        return value

    def _expect(self, run: _Run, receive: Receive) -> None:
        """Tell the coordinator where the bytes of an edge shall go, long before they are needed."""
        value = run.slots.setdefault(receive.slot, Value())
        if receive.edge in run.program.local_edges:
            return
        self._arriving[value] = []

        def arrived() -> None:
            self._announced += self._arriving.pop(value)
            self._made(run, receive.slot)
            self._advance()

        devices = run.program.devices(receive.spec)
        self._coordinator.expect(run.run, receive, value, devices, arrived)

    # --- the queue -----------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Hand over as much of the queue as can go, strictly in order."""
        while self._queue:
            head = self._queue[0]
            if isinstance(head, _Forget):
                self._flush()
                for key in head.keys:
                    self._backend.forget(key)
                self._queue.popleft()
                continue
            while head.position < len(head.instructions):
                if not self._step(head, head.instructions[head.position]):
                    self._flush()
                    return
                head.position += 1
            self._queue.popleft()
            self._end(head)
        self._flush()

    def _step(self, head: _Launched, instruction: Instruction) -> bool:
        """Do one instruction; False if it must wait for an edge."""
        run = head.run
        if isinstance(instruction, Execute):
            slots = run.slots
            if self._arriving and any(slots[slot] in self._arriving for slot in instruction.args):
                return False
            results = tuple([slots.setdefault(slot, Value()) for slot in instruction.results])
            key = run.program.keys[instruction.computation]
            assert key is not None
            args = tuple([slots[slot] for slot in instruction.args])
            self._ops.append(ops.Execute(key, args, results, self._kept(run, instruction)))
            head.last_results = results or head.last_results
            for slot in instruction.results:
                self._made(run, slot)
        elif isinstance(instruction, Send):
            value = run.slots[instruction.slot]
            if value in self._arriving:
                return False
            devices = run.program.devices(instruction.spec)
            self._ops.append(self._coordinator.send_op(run.run, instruction, value, devices))
        elif isinstance(instruction, Receive):
            if run.slots.get(instruction.source_slot) in self._arriving:
                return False
            self._receive(run, instruction)
        else:
            self._free(run, instruction)
        return True

    def _kept(self, run: _Run, instruction: Execute) -> tuple[int, ...]:
        """Positions that the computation would take over, but that the plan still needs."""
        donated = run.program.body.computations[instruction.computation].donated
        return tuple([index for index in donated if index not in instruction.donated])

    def _receive(self, run: _Run, receive: Receive) -> None:
        """The local part of an edge: all of it, or what this host adds to what others send."""
        source = run.slots.get(receive.source_slot)
        if source is None:
            return
        devices = run.program.devices(receive.source)
        if run.slots[receive.slot] in self._arriving:
            op = self._coordinator.local_read(run.run, receive, source, devices)
            if op is not None:
                self._ops.append(op)
        elif receive.edge in run.program.local_edges:
            pieces = tuple(piece for route in receive.routes for piece in route.pieces)
            here = run.program.devices(receive.spec)
            result = run.slots[receive.slot]
            self._ops.append(
                ops.Move(
                    source=source,
                    source_spec=receive.source,
                    source_devices=devices,
                    result=result,
                    spec=receive.spec,
                    devices=here,
                    pieces=pieces,
                )
            )
            self._made(run, receive.slot)

    def _give_up(self, run: _Run) -> None:
        """The rest of a run will not come: what it has not made here it never will make."""
        error = ErrorReport.of(HostLost("another island that the run needed was lost"), self._host)
        for output, slot in run.program.plan.outputs:
            value = run.slots[slot]
            if value not in self._arriving and not self._store.is_submitted(run.results[output]):
                value.error = value.error or error
                self._announced.append(run.results[output])

    def _free(self, run: _Run, free: Free) -> None:
        for slot in free.slots:
            run.slots.pop(slot, None)

    def _made(self, run: _Run, slot: int) -> None:
        """The op that makes this slot's value has been handed over."""
        for output in run.program.outputs_of_slot.get(slot, ()):
            self._announced.append(run.results[output])

    def _end(self, head: _Launched) -> None:
        """All instructions of a launch have been handed over."""
        launch = head.launch
        if launch.report:
            started_s = self.env.now_s()

            def done(error: ErrorReport | None) -> None:
                now_s = self.env.now_s()
                busy_s = now_s - max(started_s, self._busy_until_s)
                self._busy_until_s = now_s
                self._report(Finished(launch.sequence, int(busy_s * 1e6)))

            self._ops.append(ops.Watch(head.last_results, done))
        if launch.segment == CANCELLED:
            self._give_up(head.run)
        if launch.last:
            self._runs.pop(launch.run, None)

    def _flush(self) -> None:
        if self._ops:
            batch, self._ops = self._ops, []
            self._backend.submit(batch)
        if self._announced:
            announced, self._announced = self._announced, []
            for array in announced:
                self._store.submitted(array)

    def _report(self, finished: Finished) -> None:
        self._finished.append(finished)
        if len(self._finished) == 1:
            self.env.send(self.env.address, _SendProgress())

    @handles(_SendProgress)
    def _send_progress(self, sender: Address, message: _SendProgress) -> None:
        finished, self._finished = tuple(self._finished), []
        if self._scheduler is not None:
            self.env.send(self._scheduler, Progress(self._epoch, finished))

    # --- drops ---------------------------------------------------------------------------------------

    @handles(Discard)
    def _discard(self, sender: Address, message: Discard) -> None:
        if not self._in_sequence(message.epoch, message.sequence, sender):
            return
        for array in message.arrays:
            self._store.drop(array)
        for program in message.programs:
            self._uninstall(program)
        for client in message.clients:
            self._store.drop_client(client)
            self._coordinator.drop_client(client)
            for run in [run for run in self._runs if client_of(run) == client]:
                del self._runs[run]
            for program in [p for p in self._programs if client_of(p) == client]:
                self._uninstall(program)

    def _uninstall(self, number: int) -> None:
        """Forget a program once the launches before have been handed over."""
        installed = self._programs.pop(number, None)
        if installed is not None:
            self._queue.append(_Forget(tuple(key for key in installed.keys if key is not None)))
            self._advance()
