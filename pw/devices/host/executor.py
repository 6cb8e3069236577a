"""The host executor: runs its part of every gang, in launch order.

Theory of operation. Launches carry contiguous numbers; a gap means that the gang's order is lost, and
the host stops and says so. Each launch names a segment of an installed program; its instructions are
turned into ops for the device backend, in order, and handed over at once: control runs ahead of the data.
The one thing that holds a launch is an instruction that reads a value which comes from another host and has
not arrived. What its client wants behind it waits as well, and so do gangs, which must meet in the same order
on all hosts (DESIGN G1, `pw.devices.host.lanes`); G4 and the scheduler see to it that such a wait always ends.

A *run* lives from its first launch on this host to its last; its values are in numbered slots. Results
are also in the object store, under the ids that the client gave them.

Errors. What goes wrong on all hosts of a gang alike is an error of the values that should have been made,
and of all that is made of them; hosts and gangs live on. That is so when a program does not compile, when
its producer, on one host, has raised, and when its hosts have agreed on it (`pw.devices.host.verdicts`). What
may have gone wrong here only must not get into a gang of several hosts: the others have the value and
already wait in the collective. The host stops and says so, and the island is formed anew. If the reason
was that a host or a transfer was lost (INFRASTRUCTURE), the run is run again; if it was one that would come
again (no memory here, a computation that failed here), the run is refused with it. On a gang of one host
both are errors like any other, and the scheduler hears that what was *lost* may be run again.

Launches wait for edges, so their errors are known before anything is handed over, and what the backend makes of
a lost value is marked here as lost too. What goes wrong later, the backend tells (`Execute.failed`). (What
a cancelled run has not made is lost on all hosts alike.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from weakref import ReferenceType, ref

import numpy as np
from msgspec.structs import replace

from pw.core.actor import Env, handles
from pw.core.copying import unpacked
from pw.core.errors import (
    INFRASTRUCTURE,
    ArrayLost,
    CompileError,
    ErrorReport,
    HostLost,
)
from pw.core.ids import Address, client_id, client_of
from pw.core.messages import (
    CANCELLED,
    CallEnded,
    Copy,
    CopyFile,
    Discard,
    ExplainHost,
    Finished,
    GangBroken,
    Held,
    HostReport,
    Install,
    Installed,
    Launch,
    LaunchGap,
    LaunchReport,
    Progress,
    RegisterHost,
    Replicate,
)
from pw.core.plan import Execute, Free, Instruction, Receive, Send
from pw.core.ticker import Ticker
from pw.core.watchdog import STALL_S, Look, Watchdog
from pw.devices.host import backend as ops
from pw.devices.host.backend import Backend, Op, Part, Value
from pw.devices.host.coordinator import ShardCoordinator
from pw.devices.host.lanes import Lanes
from pw.devices.host.membership import RECONNECT_S, HostMember, HostProcess
from pw.devices.host.program import NO_SEGMENT, HostProgram, Inline, Segment
from pw.devices.host.store import ObjectStore
from pw.devices.host.verdicts import Verdicts
from pw.devices.host.why import Account, launch_report, told


@dataclass(slots=True)
class _Run:
    """One run of a program on this host."""

    run: int
    program: HostProgram
    slots: dict[int, Value]
    results: tuple[int, ...]
    began: int
    """Its place among the runs of this host."""
    made: set[int] = field(default_factory=set)
    """Slots of results whose making op has been handed over."""
    launched: int = -1
    """Its newest segment here; segments are launched in their order."""


@dataclass(slots=True)
class _Launched:
    """A launch, and how far it has got."""

    launch: Launch
    run: _Run
    segment: Segment
    position: int = 0
    last: tuple[ReferenceType[Value], ...] = ()
    """The last values that it has made on each device; the plan says for how long they are held."""
    made: tuple[Value, ...] = ()
    """One that is to be watched as soon as it is on its way to where it is sent."""
    awaited: int = 1
    """What has to end before it can be reported: the handing over, with what comes from elsewhere, and the last
    computations on its devices."""
    handed_s: float = 0.0
    """When all of it was handed over, and had come that comes from elsewhere."""
    lost: ErrorReport | None = None
    """It reads a value that was lost on its way here."""
    began_s: float | None = None
    """When the first computation was handed over whose results are held; None if there is none."""
    busy_s: float = 0.0
    """The time of its devices that it has been charged with."""


@dataclass(frozen=True, slots=True)
class _Forget:
    """A place in a lane: the backend may forget these computations, and these runs go no further."""

    keys: tuple[bytes, ...]
    runs: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class _Copying:
    """A place in a lane: shards are copied to host memory or to disk, from these values."""

    client: int
    copies: tuple[tuple[Copy, Value | None], ...]
    files: tuple[tuple[CopyFile, tuple[Value | None, ...]], ...]

    def values(self) -> Iterator[Value | None]:
        """All that is read."""
        yield from (value for _, value in self.copies)
        yield from (value for _, values in self.files for value in values)


_Work = _Launched | _Forget | _Copying

PROGRESS_S = 0.005
"""How long the end of a launch may be kept from the scheduler while it has enough others under way here."""
PROGRESS_SHARE = 4
"""One in so many of the launches under way has to end before the scheduler is told at once."""


@dataclass(frozen=True, slots=True)
class _SendProgress:
    """Note to oneself: send what has ended, now or because it has waited long enough."""

    late: bool = False


class HostExecutor(HostMember):
    """Turns launches into ops for the device backend, in launch order."""

    def __init__(
        self,
        env: Env,
        registration: RegisterHost,
        process: HostProcess,
        backend: Backend,
        store: ObjectStore,
        coordinator: ShardCoordinator,
        stall_s: float = STALL_S,
        reconnect_s: float = RECONNECT_S,
    ) -> None:
        super().__init__(env, registration, process, store, coordinator, reconnect_s)
        self._backend = backend
        self._scheduler: Address | None = None
        self._expected = 0
        self._cut_short = ErrorReport.of(
            HostLost("another island that the run needed was lost"), self._host
        )
        self._programs: dict[int, HostProgram] = {}
        self._runs: dict[int, _Run] = {}
        self._arriving: dict[Value, list[Callable[[], None]]] = {}
        """Values that are still on their way from another host, whatever run they belong to, and
        what is to be done when they are there."""
        self._lanes: Lanes[_Work] = Lanes(self._go, self._passed)
        self._held: set[tuple[int, int]] = set()
        """Launches that others have passed, by run and segment."""
        self._news: tuple[list[tuple[int, int]], list[tuple[int, int]]] = ([], [])
        """Those that the scheduler has to hear of: passed, and handed over after that."""
        self._ops: list[Op] = []
        self._announced: list[tuple[int, Value]] = []
        self._finished: list[Finished] = []
        self._reported = 0
        """Launches under way of which the scheduler wants to hear the end."""
        self._telling = False
        self._late = Ticker(env, PROGRESS_S, _SendProgress(late=True))
        self._under_way: dict[int, dict[int, _Launched]] = {}
        """Launches on each device, by their numbers, in the order in which they were handed over."""
        self._busy_until_s: dict[int, float] = {}
        """Until when the time of each device has been charged."""
        self._verdicts = Verdicts(self._host, env.send)
        self._unsettled: dict[Value, str] = {}
        """Values that nobody may use before there is a verdict, and the computations that make them."""
        self._watchdog = Watchdog(env, stall_s)
        self._account = Account(backend)

    # --- programs ------------------------------------------------------------------------------------

    @handles(Install)
    def _install(self, sender: Address, message: Install) -> None:
        if message.epoch != self._epoch:
            self.env.count("messages_stale")
            return
        self._scheduler = sender
        body, plan = message.body.whole(), message.plan.whole()
        program = HostProgram.of(message.program, message.install, body, plan)
        earlier = self._programs.get(message.program)
        if earlier is not None:
            program.superseded = earlier.compiled
        self._programs[message.program] = program
        blobs = {artifact.digest: artifact.blob for artifact in message.artifacts}
        waiting = {key for key in program.keys if key is not None}
        failures: list[ErrorReport] = []
        takes: dict[bytes | None, int] = {}

        def answer(error: ErrorReport | None) -> None:
            sizes = tuple([takes.get(key, 0) for key in program.keys]) if takes else ()
            self.env.send(
                sender, Installed(message.epoch, message.program, error, sizes, message.install)
            )

        def compiled(key: bytes, told: ErrorReport | int | None) -> None:
            waiting.discard(key)
            if isinstance(told, ErrorReport):
                failures.append(told)
            elif told:
                takes[key] = told
            if not waiting:
                answer(failures[0] if failures else None)

        if not waiting:
            answer(None)
        for key, computation in zip(program.keys, body.computations, strict=True):
            if key is None:
                continue
            blob = blobs.get(computation.artifact)
            if blob is None:
                missing = CompileError(
                    f"the code of {computation.name!r} has not reached this host; make the pw.jit function anew"
                )
                compiled(key, ErrorReport.of(missing, self._host))
                continue
            devices = program.at(computation.placement)
            self._backend.install(key, computation, blob, devices, partial(compiled, key))

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
            self._decline(message, run)
            self._coordinator.drop_run(message.run)
            if run is None:
                return
        if run is None:
            self._broken = True
            self.env.log("error", "launch of an unknown run", program=message.program)
            self.env.send(sender, LaunchGap(self._epoch, message.sequence, message.sequence))
            return
        segment = run.program.segments.get(message.segment, NO_SEGMENT)
        if not self._lanes:
            self._watchdog.went_on()
        # An edge may fail at once and set work going: all are expected before the launch is among it.
        for receive in segment.receives:
            self._expect(run, receive)
        run.launched = message.segment
        work = _Launched(message, run, segment)
        self._put(client_of(message.run), work, segment.together)

    def _begin(self, message: Launch, program: HostProgram) -> None:
        """A run's first launch here: bind its arguments and announce its results."""
        assert message.arguments is not None
        arguments, results = message.arguments.args, message.arguments.results
        body = program.body
        run = _Run(message.run, program, {}, results, self._coordinator.runs.begin(message.run))
        self._runs[message.run] = run
        for index in program.plan.inputs:
            arg = arguments[index]
            if isinstance(arg, bytes):
                run.slots[index] = self._inline(arg, program.inline(index))
                continue
            value = self._store.value(arg)
            if value is None:
                lost = ArrayLost(
                    f"argument {index} of {body.name!r}, {body.inputs[index].short}, is not on this host "
                    "any more"
                )
                value = Value(ErrorReport.of(lost, self._host))
                value.alone = True
            run.slots[index] = value
        if body.donated:
            why = f"donated to {body.name!r}"
            for index in body.donated:
                if isinstance(arg := arguments[index], int):
                    self._store.drop(arg, why)
        for output, slot, spec, devices in program.results:
            value = run.slots.get(slot)
            if value is None:
                value = run.slots[slot] = Value()
            else:  # it is an argument, or another result as well
                value.shared = True
            self._store.expect(results[output], value, spec, devices)

    def _inline(self, data: bytes, inline: Inline) -> Value:
        spec, devices, dtype, boxes = inline
        array = np.frombuffer(data, np.uint8).view(dtype).reshape(spec.shape)
        parts: list[Part] = [(positions, box, array[where]) for positions, box, where in boxes]
        value = Value()
        self._ops.append(ops.Build(value, spec, devices, parts))
        return value

    def _expect(self, run: _Run, receive: Receive) -> None:
        """Tell the coordinator where the bytes of an edge shall go, long before they are needed."""
        value = run.slots.setdefault(receive.slot, Value())
        if receive.edge in run.program.local_edges:
            return
        self._arriving[value] = []

        def arrived(build: ops.Build | None) -> None:
            if build is not None:
                self._ops.append(build)
            self._made(run, receive.slot)
            for act in self._arriving.pop(value):
                act()
            self._advance()

        devices = run.program.devices(receive.spec)
        self._coordinator.receiving.expect(run.run, receive, value, devices, arrived)

    def _decline(self, message: Launch, run: _Run | None) -> None:
        """The rest of a run will not come: tell who sends to it, and may have been launched already."""
        program = self._programs.get(message.program) if run is None else run.program
        launched = -1 if run is None else run.launched
        segments = {} if program is None else program.segments
        for index, segment in segments.items():
            if index > launched:
                for receive in segment.receives:
                    self._coordinator.receiving.decline(message.run, receive)

    # --- what is next --------------------------------------------------------------------------------

    def _put(self, client: int, work: _Work, together: bool = False) -> None:
        """It is to be done after all that this client has wanted before."""
        if self._lanes.put(client, work, together):
            self._watchdog.went_on()
        self._flush()

    def _passed(self, work: _Work) -> None:
        """It waits, and others have gone before it."""
        if isinstance(work, _Launched):
            name = (work.run.run, work.launch.segment)
            self._held.add(name)
            self._news[0].append(name)

    def _advance(self) -> None:
        """Hand over all that can go."""
        if self._lanes.go_on():
            self._watchdog.went_on()
        self._flush()

    def _go(self, work: _Work) -> bool:
        """Hand over as much of this as can go; whether that was all."""
        if isinstance(work, _Forget):
            self._flush()
            for key in work.keys:
                self._backend.forget(key)
            for number in work.runs:
                self._coordinator.runs.end(number)
            return True
        if isinstance(work, _Copying):
            if any(value in self._arriving for value in work.values()):
                return False
            reads = (self._store.replicas.copy(copy, value) for copy, value in work.copies)
            self._ops += [read for read in reads if read is not None]
            for job, values in work.files:
                self._ops += self._store.files.write(job, values)
            return True
        instructions = work.segment.instructions
        while work.position < len(instructions):
            if not self._step(work, instructions[work.position]):
                return False
            if work.made and work.position in work.segment.watch_after:
                self._watch_made(work)
            work.position += 1
        self._end(work)
        if self._held and (name := (work.run.run, work.launch.segment)) in self._held:
            self._held.remove(name)
            self._news[1].append(name)
        return True

    def _step(self, head: _Launched, instruction: Instruction) -> bool:
        """Do one instruction; False if it must wait for an edge."""
        run = head.run
        if isinstance(instruction, Execute):
            slots = run.slots
            if self._arriving and any(slots[slot] in self._arriving for slot in instruction.args):
                return False
            for slot in instruction.results:
                if slot not in slots:
                    slots[slot] = Value()
            results = tuple([slots[slot] for slot in instruction.results])
            key = run.program.keys[instruction.computation]
            assert key is not None
            args = tuple([slots[slot] for slot in instruction.args])
            together = instruction.computation in run.program.gangs
            for value in args:
                if value.error is None:
                    continue
                lost = value.error.kind in INFRASTRUCTURE
                if together and (value.alone or lost) and value.error is not self._cut_short:
                    self._break_gang(run, value.error)
                    return False
                if lost:
                    self._lose(head, value.error, results)
            failed = partial(self._break_gang, run) if together else None
            kept = head.segment.kept.get(head.position, ())
            is_last = head.position in head.segment.watched
            watched = is_last and head.launch.report
            guarded = not watched and head.position in head.segment.unread
            self._ops.append(ops.Execute(key, args, results, kept, failed, guarded))
            if is_last:
                head.last += (ref(results[-1]),)
            if results and instruction.computation in run.program.judged:
                self._hold(head, instruction, results)
            else:
                for slot in instruction.results:
                    self._made(run, slot)
            if watched:
                # All results of a computation are there at once; the last is least often donated.
                head.made = results[-1:]
        elif isinstance(instruction, Send):
            value = run.slots[instruction.slot]
            if value in self._arriving:
                return False
            devices = run.program.devices(instruction.spec)
            op = self._coordinator.sending.send_op(run.run, run.began, instruction, value, devices)
            self._ops.append(op)
        elif isinstance(instruction, Receive):
            if run.slots.get(instruction.source_slot) in self._arriving:
                return False
            self._receive(head, instruction)
        else:
            self._free(run, instruction)
        return True

    def _hold(self, head: _Launched, instruction: Execute, results: tuple[Value, ...]) -> None:
        """Nobody sees these results, or uses them, before it is known what became of them."""
        run, computation = head.run, head.run.program.body.computations[instruction.computation]
        assert self._scheduler is not None
        for value in results:
            self._arriving[value] = []
            self._unsettled[value] = computation.name
        if head.began_s is None:
            head.began_s = self.env.now_s()

        def judged(error: ErrorReport | None) -> None:
            if error is not None:
                for value in results:
                    value.fail(error)
                if error.kind in INFRASTRUCTURE:
                    head.lost = error
            for slot in instruction.results:
                self._made(run, slot)
            for value in results:
                del self._unsettled[value]
                for act in self._arriving.pop(value):
                    act()
            self._advance()

        if computation.python:
            devices = run.program.at(computation.placement)
            call = (run.run, instruction.results[0])
            gang = tuple(dict.fromkeys(device.host for device in devices))
            verdict = self._verdicts.called(
                self._epoch, self._scheduler, call, gang, results, judged
            )
        else:
            devices = run.program.devices(computation.outputs[-1])
            verdict = self._verdicts.checked(computation, devices, results, judged)
        self._ops.append(verdict)

    @handles(CallEnded)
    def _call_ended(self, sender: Address, message: CallEnded) -> None:
        if message.epoch == self._epoch and not self._broken:
            self._verdicts.ended(message)
        else:
            self.env.count("messages_stale")

    def _break_gang(self, run: _Run, error: ErrorReport) -> None:
        """The gang's other hosts may have what failed here: neither skip nor go on."""
        if self._broken:
            return
        self._broken = True
        name = run.program.body.name
        broken = GangBroken(
            self._epoch, f"an input of {name!r} was lost on host {self._host}: {error.message}"
        )
        if error.kind not in INFRASTRUCTURE:
            reason = (
                f"{name!r} failed on host {self._host}, and perhaps only there: {error.message}"
            )
            broken = GangBroken(self._epoch, reason, run.run, error, run.results)
        self.env.log("error", "gang broken", reason=broken.reason)
        if self._scheduler is not None:
            self.env.send(self._scheduler, broken)

    def _lose(self, head: _Launched, error: ErrorReport, results: tuple[Value, ...]) -> None:
        """What the backend will find out, later launches have to know now."""
        head.lost = error
        for value in results:
            value.error = error

    def _receive(self, head: _Launched, receive: Receive) -> None:
        """The local part of an edge: all of it, or what this host adds to what others send."""
        run = head.run
        source = run.slots.get(receive.source_slot)
        if source is None:
            return
        devices = run.program.devices(receive.source)
        if run.slots[receive.slot] in self._arriving:
            op = self._coordinator.receiving.local_read(run.run, receive, source, devices)
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
            if source.error is not None and source.error.kind in INFRASTRUCTURE:
                self._lose(head, source.error, (result,))
            self._made(run, receive.slot)

    def _cut_off(self, run: _Run) -> None:
        """The rest of a run will not come: what it has not made here it never will make."""
        for slot in run.program.outputs_of_slot:
            value = run.slots[slot]
            if slot not in run.made and value not in self._arriving:
                value.error = value.error or self._cut_short
                self._made(run, slot)

    def _free(self, run: _Run, free: Free) -> None:
        for slot in free.slots:
            run.slots.pop(slot, None)

    def _made(self, run: _Run, slot: int) -> None:
        """The op that makes this slot's value has been handed over."""
        outputs = run.program.outputs_of_slot.get(slot)
        if outputs is not None:
            run.made.add(slot)
            value = run.slots[slot]
            self._announced += [(run.results[output], value) for output in outputs]

    def _end(self, head: _Launched) -> None:
        """All instructions of a launch have been handed over."""
        launch, run = head.launch, head.run
        self._account.handed(run.run, launch.segment, run.program, head.last)
        coming: list[Value] = []
        if launch.arguments is not None:
            for slot in run.program.passed_on:
                coming.append(run.slots[slot])
                self._when_there(coming[-1:], partial(self._made, run, slot))
        if launch.report:
            coming += [
                run.slots[receive.slot]
                for receive in head.segment.receives
                if receive.slot in run.program.outputs_of_slot
            ]
            if coming:
                self._when_there(coming, partial(self._handed, head, tuple(coming)))
            else:
                self._handed(head, ())
        if launch.segment == CANCELLED:
            self._cut_off(run)
        if launch.last:
            self._runs.pop(launch.run, None)
            self._coordinator.runs.end(launch.run)

    def _when_there(self, values: Sequence[Value], act: Callable[[], None]) -> None:
        """Do something as soon as no value is still on its way from another host."""
        missing = [value for value in dict.fromkeys(values) if value in self._arriving]
        if not missing:
            act()
            return

        def arrived(value: Value) -> None:
            missing.remove(value)
            if not missing:
                act()

        for value in missing:
            self._arriving[value].append(partial(arrived, value))

    def _watch_made(self, head: _Launched) -> None:
        """Watch it now, and not at the end of the launch: nothing may hold its memory until then."""
        made, head.made = head.made, ()
        head.awaited += 1
        if made[0] in self._arriving:
            self._arriving[made[0]].append(partial(self._watch, head, made, True))
        else:
            self._watch(head, made, True)

    def _handed(self, head: _Launched, come: tuple[Value, ...]) -> None:
        """All of a launch has been handed over, and these have come from elsewhere."""
        head.handed_s = self.env.now_s()
        is_all = not come and head.awaited > 1
        if not is_all:  # if nothing is watched yet: what was handed over has to be done
            self._watch(head, come, False)
        self._reported += 1
        for device in head.segment.devices:
            self._under_way.setdefault(device, {})[head.launch.sequence] = head
        if is_all:
            self._ended(head)

    def _watch(self, head: _Launched, values: tuple[Value, ...], made: bool) -> None:
        """Wait until these are ready, or one has failed; of a value `made` here the others may know nothing."""

        def done(error: ErrorReport | None) -> None:
            if error is not None and made and values[0].alone:
                self._break_gang(head.run, error)
            if error is not None and error.kind in INFRASTRUCTURE:
                head.lost = head.lost or error
            self._ended(head)

        self._ops.append(ops.Watch(values, done, hurried=self._reported < PROGRESS_SHARE))

    def _ended(self, head: _Launched) -> None:
        """Something of a launch has ended; report it if that was all."""
        head.awaited -= 1
        if head.awaited:
            return
        now_s = self.env.now_s()
        for device in head.segment.devices:
            under_way = self._under_way[device]
            first = next(iter(under_way.values()))
            if first is not head:
                # A device computes in order, but its news does not come in order: the time was the first one's.
                self._charge(first, now_s)
            del under_way[head.launch.sequence]
            if not under_way:
                del self._under_way[device]
        self._charge(head, now_s)
        self._report(Finished(head.launch.sequence, int(head.busy_s * 1e6), head.lost))

    def _charge(self, head: _Launched, now_s: float) -> None:
        """Charge a launch with the time of its devices until now that no other has been charged with."""
        started_s = head.handed_s if head.began_s is None else head.began_s
        busy = self._busy_until_s
        for device in head.segment.devices:
            started_s = max(started_s, busy.get(device, 0.0))
            busy[device] = now_s
        head.busy_s += now_s - started_s

    def _flush(self) -> None:
        if self._lanes:
            self._watchdog.watch()
        if any(self._news):
            passed, handed_over = map(tuple, self._news)
            self._news = ([], [])
            if self._scheduler is not None:
                self.env.send(self._scheduler, Held(self._epoch, passed, handed_over))
        if self._ops:
            batch, self._ops = self._ops, []
            self._backend.submit(batch)
        if self._announced:
            announced, self._announced = self._announced, []
            for array, value in announced:
                self._store.submitted(array, value)

    def _report(self, finished: Finished) -> None:
        """Tell the scheduler, with others: it has nothing to launch in their place before many have ended."""
        self._reported -= 1
        self._finished.append(finished)
        if finished.lost is None and len(self._finished) * PROGRESS_SHARE < self._reported:
            self._late.start()
        elif not self._telling:  # in this turn, with what else ends in it
            self._telling = True
            self.env.send(self.env.address, _SendProgress())

    @handles(_SendProgress)
    def _send_progress(self, sender: Address, message: _SendProgress) -> None:
        if message.late:
            self._late.ticked(more=False)
        else:
            self._telling = False
        finished, self._finished = tuple(self._finished), []
        if self._scheduler is not None and finished:
            self.env.send(self._scheduler, Progress(self._epoch, finished))

    # --- a controller that was started again --------------------------------------------------------

    def when_ended(self, act: Callable[[], None]) -> bool:
        """Call `act` when all that was launched has ended; false while not all of it is handed over."""
        if self._lanes:
            return False

        def enqueued(_: ErrorReport | None) -> None:
            values = self._store.values_under_way()
            self._backend.submit([ops.Watch(values, lambda error: act())])

        self._backend.submit([ops.Watch((), enqueued)])
        return True

    # --- why it does not go on -----------------------------------------------------------------------

    @handles(ExplainHost)
    def _explain(self, sender: Address, message: ExplainHost) -> None:
        self.env.send(sender, self._described(message.request, frozenset(message.work)))

    @handles(Look)
    def _look(self, sender: Address, note: Look) -> None:
        if self._watchdog.stalled(bool(self._lanes)):
            self.env.count("stalls")
            for line in told(self._described(0, frozenset())):
                self.env.log("warning", "stalled", why=line)

    def _described(self, request: int, work: frozenset[tuple[int, int]]) -> HostReport:
        """Where this host is: what is next of each client first, then these launches."""
        launches = [self._head(head) for head in self._lanes.heads()]
        for queued in self._lanes.others():
            if isinstance(queued, _Launched):
                run, segment = queued.run, queued.launch.segment
                if (run.run, segment) in work:
                    launches.append(launch_report(run.run, segment, run.program, "queued"))
        launches += self._account.reports(work)
        found = {(launch.run, launch.segment) for launch in launches}
        launches += [LaunchReport(*one, "", (), "missing") for one in sorted(work - found)]
        state = "" if self._epoch else "it waits to be told of its island"
        if self._broken:
            state = "it has left its island, and waits until that is formed again"
        return HostReport(
            request,
            self._host,
            state,
            self._watchdog.quiet_s,
            len(self._lanes),
            tuple(launches),
            self._coordinator.edges(),
            self._backend.whereabouts(),
        )

    def _head(self, head: _Work) -> LaunchReport:
        """What is next of a client, and the values that it waits for."""
        values: list[Value | None] = []
        if isinstance(head, _Copying):
            values = list(head.values())
        elif isinstance(head, _Launched) and head.position < len(head.segment.instructions):
            instruction = head.segment.instructions[head.position]
            slots: tuple[int, ...] = ()
            if isinstance(instruction, Execute):
                slots = instruction.args
            elif isinstance(instruction, Send):
                slots = (instruction.slot,)
            elif isinstance(instruction, Receive):
                slots = (instruction.source_slot,)
            values = [head.run.slots.get(slot) for slot in slots]
        awaited = [value for value in values if value is not None and value in self._arriving]
        edges = tuple(
            self._coordinator.receiving.edge_of(v) for v in awaited if v not in self._unsettled
        )
        names = [self._unsettled[value] for value in awaited if value in self._unsettled]
        unsettled = tuple(dict.fromkeys(names))
        if not isinstance(head, _Launched):
            whose = client_id(head.client, 0) if isinstance(head, _Copying) else 0
            return LaunchReport(whose, 0, "copies", (), "waiting", edges, unsettled)
        run = head.run
        state = "waiting" if awaited else "queued"
        report = launch_report(run.run, head.launch.segment, head.run.program, state)
        return replace(report, waits_for=edges, unsettled=unsettled)

    # --- copies and drops ---------------------------------------------------------------------------

    @handles(Replicate)
    def _replicate(self, sender: Address, message: Replicate) -> None:
        if self._in_sequence(message.epoch, message.sequence, sender):
            value, order = self._store.value, unpacked(message)
            copies = tuple((copy, value(copy.array)) for copy in order.copies)
            files = tuple((j, tuple([value(c.array) for c in j.copies])) for j in order.files)
            named = (*order.copies, *(copy for file in order.files for copy in file.copies))
            client = next((client_of(copy.array) for copy in named), 0)  # the same of all
            self._put(client, _Copying(client, copies, files))

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
            runs = tuple(run for run in self._runs if client_of(run) == client)
            for run in runs:
                del self._runs[run]
            self._put(client, _Forget((), runs))
            for program in [p for p in self._programs if client_of(p) == client]:
                self._uninstall(program)

    def _uninstall(self, number: int) -> None:
        """Forget a program once the launches before have been handed over."""
        installed = self._programs.pop(number, None)
        if installed is not None:
            self._put(client_of(number), _Forget(installed.compiled))
