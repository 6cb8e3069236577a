"""Turns the instructions of launches into ops for the devices.

The ops of a launch are submitted at once: control runs ahead of the data. A launch stops
only at an instruction that reads a value which has not arrived (`Arriving`). Later work of the client
waits behind it, and a gang waits for all earlier work (`pw.devices.host.lanes`).

Errors. An error that all hosts of a gang have alike belongs to the values that are not made, and to
all that is computed from them. An error that this host may have alone must not get into a gang of
several hosts, because the others already wait in the collective: the host stops
(`LaunchOrder.break_gang`). Errors of the INFRASTRUCTURE count as alone. Exception: a run that was cut
short fails alike on all hosts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from weakref import ref

from pw.core.actors.actor import Env, Part, handles
from pw.core.actors.watchdog import Watchdog
from pw.core.errors import INFRASTRUCTURE, ErrorReport, HostLost
from pw.core.ids import Address
from pw.core.messages import CANCELLED, CallEnded, PassedLaunches
from pw.core.programs.guards import is_skipped
from pw.core.programs.plan import Execute, Free, Receive, Send
from pw.core.programs.program import Computation
from pw.devices.host import backend as ops
from pw.devices.host.backend import Backend, Op
from pw.devices.host.coordinator import ShardCoordinator
from pw.devices.host.guards import Guards
from pw.devices.host.lanes import Lanes
from pw.devices.host.launch_end import LaunchEnds
from pw.devices.host.launch_order import LaunchOrder
from pw.devices.host.outcomes import Outcomes
from pw.devices.host.pace import Pace
from pw.devices.host.store import ObjectStore
from pw.devices.host.tiers import Spilling
from pw.devices.host.value import Value
from pw.devices.host.views import view_op
from pw.devices.host.work import (
    Arriving,
    Forgetting,
    HostLaunch,
    HostRun,
    OpQueue,
    RecentLaunch,
    Work,
)

RECENT = 512
"""Enqueued launches that `pw why` remembers; on a host with many devices more may be in flight."""


@dataclass(frozen=True, slots=True)
class _Advance:
    """All values of this turn have arrived: go on with the work that waits for them."""


@dataclass(eq=False, repr=False)
class Interpreter(Part):
    """Does the work of this host in the order of its lanes."""

    _env: Env
    _backend: Backend
    _store: ObjectStore
    _coordinator: ShardCoordinator
    _order: LaunchOrder
    _watchdog: Watchdog
    _passed: set[tuple[int, int]] = field(default_factory=set, init=False)
    """Waiting launches that others have passed, by run and segment."""
    _news: tuple[list[tuple[int, int]], list[tuple[int, int]]] = field(
        default_factory=lambda: ([], []), init=False
    )
    """News for the scheduler: launches that were passed, and passed ones that are enqueued now."""

    _is_advancing: bool = field(default=False, init=False)
    """An `_Advance` is on its way."""

    def __post_init__(self) -> None:
        host = self._order.host
        self._recorder = self._env.recorder
        self._cut_short = ErrorReport.of(
            HostLost("another island that the run needed was lost"), host
        )
        self._elsewhere = Value()
        """Stand-in for arguments of which this host has no shard."""
        self.runs: dict[int, HostRun] = {}
        self.lanes: Lanes[Work] = Lanes(self._go, self._on_pass)
        self.arriving = Arriving()
        self.queue = OpQueue(self._backend, self._store)
        self.pace = Pace(self._env, self._order)
        self.ends = LaunchEnds(self._env, self._order, self.queue, self.arriving, self.pace)
        self.recent: deque[RecentLaunch] = deque(maxlen=RECENT)
        self._outcomes = Outcomes(host, self._env.send)
        self.guards = Guards(
            host,
            self._backend,
            self.queue,
            self.arriving,
            self.ends,
            lambda launch, instruction: self._execute(launch, instruction),
            self.note_result,
            self._break_gang,
            self.advance,
        )

    def put(self, client: int, work: Work, together: bool = False) -> None:
        """Do a piece of work after all earlier work of its client."""
        if self.lanes.put(client, work, together):
            self._watchdog.went_on()
        self._flush()

    def advance(self) -> None:
        """Do all work that can be done now."""
        if self.lanes.go_on():
            self._watchdog.went_on()
        self._flush()

    def advance_soon(self) -> None:
        """Do all work that can be done when the values that arrive in this turn are here."""
        if not self._is_advancing:
            self._is_advancing = True
            self._env.send(self._env.address, _Advance())

    @handles(_Advance)
    def _advance_together(self, sender: Address, note: _Advance) -> None:
        self._is_advancing = False
        self.advance()

    def _flush(self) -> None:
        if self.lanes:
            self._watchdog.watch()
        if any(self._news):
            passed, enqueued = map(tuple, self._news)
            self._news = ([], [])
            if self._order.scheduler is not None:
                self._env.send(
                    self._order.scheduler, PassedLaunches(self._order.epoch, passed, enqueued)
                )
        self.queue.flush()

    def _on_pass(self, work: Work) -> None:
        """A piece of work waits, and another client's later work has passed it."""
        if isinstance(work, HostLaunch):
            self._passed.add(work.name)
            self._news[0].append(work.name)

    def when_ended(self, act: Callable[[], None]) -> bool:
        """Call `act` when all launches have ended; return False while some work waits in a lane."""
        if self.lanes:
            return False

        def enqueued(_: ErrorReport | None) -> None:
            values = self._store.values_under_way()
            self._backend.submit([ops.Watch(values, lambda error: act())])

        self._backend.submit([ops.Watch((), enqueued)])
        return True

    def _go(self, work: Work) -> bool:
        """Do as much of a piece of work as possible; return whether all of it is done."""
        if isinstance(work, HostLaunch):
            return self._go_on(work)
        if isinstance(work, Forgetting):
            self._flush()
            for key in work.keys:
                self._backend.forget(key)
            for number in work.runs:
                self._coordinator.runs.end(number)
            return True
        if isinstance(work, Spilling):
            if any(self._store.value(array) in self.arriving for array in work.arrays):
                return False
            if work.to_files:
                self._store.tiers.write(work)
            else:
                self.queue.ops += self._store.tiers.leave(work)
            return True
        if any(value in self.arriving for value in work.values()):
            return False
        reads = (self._store.replicas.copy(copy, value) for copy, value in work.copies)
        self.queue.ops += [read for read in reads if read is not None]
        for job, values in work.files:
            self.queue.ops += self._store.files.write(job, values)
        return True

    def _go_on(self, launch: HostLaunch) -> bool:
        instructions = launch.segment.instructions
        execute = self.guards.go if launch.segment.skips else self._execute
        while launch.position < len(instructions):
            instruction = instructions[launch.position]
            if isinstance(instruction, Execute):
                is_done = execute(launch, instruction)
            else:
                is_done = self._step(launch, instruction)
            if not is_done:
                self.pace.waits(launch, for_stream=bool(self.arriving.of_functions))
                return False
            if launch.to_watch and launch.position in launch.segment.watch_after:
                self.ends.watch_results(launch)
            launch.position += 1
        if self.pace.waiting is launch:
            self.pace.goes_on()
        self._end(launch)
        if self._passed and launch.name in self._passed:
            self._passed.remove(launch.name)
            self._news[1].append(launch.name)
        return True

    def _step(self, launch: HostLaunch, instruction: Send | Receive | Free) -> bool:
        """Do one instruction; return False if a value that it reads has not arrived."""
        run = launch.run
        if isinstance(instruction, Send):
            value = run.slots[instruction.slot]
            counts = instruction.counts
            if value in self.arriving:
                return False
            sending = self._coordinator.sending
            if value.error is not None and is_skipped(value.error):
                sending.fail(run.run, run.began, instruction, value)
                return True
            devices = run.program.devices(instruction.spec)
            if counts is not None:
                if run.slots[counts.slot] in self.arriving:
                    return False
                self.queue.ops += sending.counted_ops(
                    run.run, run.began, instruction, run.slots, devices
                )
                return True
            op = sending.send_op(run.run, run.began, instruction, value, devices)
            self.queue.ops.append(op)
        elif isinstance(instruction, Receive):
            counts = instruction.counts
            if run.slots.get(instruction.source_slot) in self.arriving:
                return False
            if counts is not None and run.slots.get(counts.slot) in self.arriving:
                return False
            self._receive(launch, instruction)
        else:
            for slot in instruction.slots:
                freed = run.slots.pop(slot, None)
                if freed is not None and launch.segment.skips:
                    self.guards.freed(launch, freed)
        return True

    def _execute(self, launch: HostLaunch, instruction: Execute) -> bool:
        run, slots = launch.run, launch.run.slots
        if run.program.views:
            return self._view(launch, instruction)
        if self.arriving and any(slots[slot] in self.arriving for slot in instruction.args):
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
            if is_skipped(value.error):
                return self.guards.poison(launch, instruction, value.error)
            lost = value.error.kind in INFRASTRUCTURE
            if together and (value.alone or lost) and self._break_gang(run, value.error):
                return False
            if lost:
                self._lose(launch, value.error, results)
        failed = partial(self._order.break_gang, run) if together else None
        kept = launch.segment.kept.get(launch.position, ())
        is_last = launch.position in launch.segment.watched
        watched = is_last and launch.is_watched
        guarded = not watched and launch.position in launch.segment.unread
        op = ops.Execute(key, args, results, kept, failed, guarded)
        if self._recorder.on:
            op.origin = self._origin(launch, instruction.computation)
        if launch.noted is not None and not launch.noted.is_called:
            launch.noted.is_called, op.noted = True, launch.noted
        self.queue.ops.append(op)
        if is_last:
            launch.last += (ref(results[-1]),)
        if results and instruction.computation in run.program.unsettled:
            computation = run.program.body.computations[instruction.computation]
            devices = run.program.at(computation.placement)
            gang = tuple(dict.fromkeys(device.host for device in devices))
            self._await_outcome(launch, computation, instruction.results, gang)
        else:
            for slot in instruction.results:
                self.note_result(run, slot)
        if watched:
            # All results of a computation are ready at once; the last is least often donated.
            launch.to_watch = results[-1:]
        return True

    def do(
        self, launch: HostLaunch, op: ops.Execute, index: int, arrays: Sequence[tuple[int, Value]]
    ) -> bool:
        """Do a launch that is one computation, before which nothing waits (`pw.devices.host.direct`).

        Returns whether its results are there.

        Args:
            launch: the launch.
            op: its computation.
            index: index of the computation in the program.
            arrays: ids and values of the arrays among its results.
        """
        self._watchdog.progress_s = self._env.now_s()
        if self._recorder.on:
            op.origin = self._origin(launch, index)
        queue, result = self.queue, op.results[-1]
        is_here = not queue.ops and self._backend.run_now(op)
        if not is_here:
            queue.ops.append(op)
        is_there = is_here and self._backend.is_there(result)
        if launch.is_watched:
            self.ends.follow(launch, result, is_there)
        if queue.ops or queue.arrays:
            queue.arrays += arrays
            queue.flush()
        else:
            for array, value in arrays:
                self._store.requests.submitted(array, value)
        return is_there

    def _origin(self, launch: HostLaunch, index: int) -> tuple[int, ...]:
        """Return what a record says of computation `index` of a launch (`pw.core.recorder`)."""
        run = launch.run
        what = run.program.recorded.get(index)
        if what is None:
            computation = run.program.body.computations[index]
            place, tenant = f"{run.program.place(index)} ", run.program.tenant
            what = run.program.recorded[index] = self._recorder.name(
                computation.name, tenant, place
            )
        return run.run, launch.message.segment, what

    def _view(self, launch: HostLaunch, view: Execute) -> bool:
        """Make the results of a view; return False if a value that it reads has not arrived."""
        run, slots = launch.run, launch.run.slots
        needed = [view.args[source] for part in run.program.views for source, _ in part.sources]
        if any(slots[slot] in self.arriving for slot in needed):
            return False
        args = [slots.get(slot, self._elsewhere) for slot in view.args]
        results = []
        for part in run.program.views:
            slot = view.results[part.output]
            result = slots.setdefault(slot, Value())
            op = view_op(part, args, result)
            self.queue.ops.append(op)
            errors = [source.value.error for source in op.sources]
            lost = next((e for e in errors if e is not None and e.kind in INFRASTRUCTURE), None)
            if lost is not None:
                self._lose(launch, lost, (result,))
            if part.gang:
                computation = run.program.body.computations[view.computation]
                self._await_outcome(launch, computation, (slot,), part.gang)
            else:
                self.note_result(run, slot)
            results.append(result)
        launch.last += (ref(results[-1]),)
        if launch.is_watched:
            launch.to_watch = tuple(results)
        return True

    def _break_gang(self, run: HostRun, error: ErrorReport) -> bool:
        """Stop the host, unless all hosts of a gang have the error; return whether it stops."""
        if error is self._cut_short:
            return False
        self._order.break_gang(run, error)
        return True

    def _lose(self, launch: HostLaunch, error: ErrorReport, results: tuple[Value, ...]) -> None:
        """Mark results as lost now: later launches must know before the backend finds out."""
        launch.lost = error
        for value in results:
            value.fail(error)

    def _await_outcome(
        self,
        launch: HostLaunch,
        computation: Computation,
        slots: tuple[int, ...],
        gang: tuple[str, ...],
    ) -> None:
        """Let no op use these results before their outcome is known, on the hosts of the gang."""
        run = launch.run
        results = tuple([run.slots[slot] for slot in slots])
        assert self._order.scheduler is not None
        for value in results:
            self.arriving[value] = []
            self.arriving.unsettled[value] = computation.name
        if computation.traits.runs_on_host:
            self.arriving.of_functions.update(results)
        if launch.began_s is None:
            launch.began_s = self._env.now_s()

        def settle(error: ErrorReport | None) -> None:
            if error is not None:
                for value in results:
                    value.fail(error)
                if error.kind in INFRASTRUCTURE:
                    launch.lost = error
            for slot in slots:
                self.note_result(run, slot)
            self.arriving.of_functions.difference_update(results)
            for value in results:
                del self.arriving.unsettled[value]
                self.arriving.arrive(value)
            self.advance()

        op: Op
        if computation.checks:
            devices = run.program.devices(computation.outputs[-1])
            op = self._outcomes.of_check(computation, devices, results, settle)
        elif len(gang) > 1:
            call = (run.run, slots[0])
            op = self._outcomes.of_call(
                self._order.epoch, self._order.scheduler, call, gang, results, settle
            )
        else:
            op = ops.Watch(results, settle)
        self.queue.ops.append(op)

    @handles(CallEnded)
    def _call_ended(self, sender: Address, message: CallEnded) -> None:
        if message.epoch == self._order.epoch and not self._order.is_broken:
            self._outcomes.ended(message)
        else:
            self._env.count("messages_stale")

    def _receive(self, launch: HostLaunch, receive: Receive) -> None:
        """Do the local part of an edge: all of it, or this host's pieces."""
        run = launch.run
        source = run.slots.get(receive.source_slot)
        if source is None:
            return
        devices, result = run.program.devices(receive.source), run.slots[receive.slot]
        if result in self.arriving and receive.counts is not None:
            self.queue.ops += self._coordinator.receiving.counted_reads(
                run.run, receive, run.slots, devices
            )
        elif result in self.arriving:
            op = self._coordinator.receiving.local_read(run.run, receive, source, devices)
            if op is not None:
                self.queue.ops.append(op)
        elif receive.edge in run.program.local_edges:
            pieces = tuple(piece for route in receive.routes for piece in route.pieces)
            here = run.program.devices(receive.spec)
            if source.error is not None and is_skipped(source.error):
                result.fail(source.error)
                return
            move = ops.Move(source, receive.source, devices, result, receive.spec, here, pieces)
            self.queue.ops.append(move)
            if source.error is not None and source.error.kind in INFRASTRUCTURE:
                self._lose(launch, source.error, (result,))
            self.note_result(run, receive.slot)

    def arrived(self, run: HostRun, slot: int, value: Value, build: ops.Build) -> None:
        """Have a received value made; one that only branches read may not be needed."""
        if slot in run.program.predicates or slot in run.program.held:
            self.guards.arrived(run, slot, value, build)
        else:
            self.queue.ops.append(build)

    def note_result(self, run: HostRun, slot: int) -> None:
        """Note that the op that makes the value of a slot is in the queue."""
        outputs = run.program.outputs_of_slot.get(slot)
        if outputs is not None:
            run.slots_with_op.add(slot)
            value = run.slots[slot]
            self.queue.arrays += [(run.results[output], value) for output in outputs]

    def _end(self, launch: HostLaunch) -> None:
        """All instructions of a launch have become ops."""
        message, run = launch.message, launch.run
        awaited = self.guards.end(launch) if launch.segment.skips else []
        self.recent.append((run.run, message.segment, run.program, launch.last))
        if message.arguments is not None:
            for slot in run.program.passed_on:
                awaited.append(run.slots[slot])
                self.arriving.when_here(awaited[-1:], partial(self.note_result, run, slot))
        if launch.is_watched:
            awaited += [
                run.slots[receive.slot]
                for receive in launch.segment.receives
                if receive.slot in run.program.outputs_of_slot
            ]
            self.ends.enqueued(launch, awaited)
        if message.segment == CANCELLED:
            self._cut_off(run)
        if message.segment in (CANCELLED, run.program.last_segment):
            self.runs.pop(message.run, None)
            self._coordinator.runs.end(message.run)
            if self.arriving:  # what is awaited holds the run, which must not hold the rest
                slots = run.slots.items()
                run.slots = {slot: value for slot, value in slots if value in self.arriving}

    def _cut_off(self, run: HostRun) -> None:
        """Fail the results that a cancelled run has not made here."""
        for slot in run.program.outputs_of_slot:
            value = run.slots[slot]
            if slot not in run.slots_with_op and value not in self.arriving:
                value.fail(self._cut_short)
                self.note_result(run, slot)
