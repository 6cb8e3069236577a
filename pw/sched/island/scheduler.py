"""The gang scheduler of one island: one total order of launches for all its hosts.

Theory of operation. Every client has a FIFO queue of tasks on the island; a policy picks among clients
whose head may go, and what is picked is sent to all hosts of its gang with the host's next launch
number. Hosts enqueue strictly in that order, so any two collectives meet in the same order everywhere
(G1). A segment may go when all producers of its remote inputs have been *launched* (G4: launched work
waits only for work launched before it); it is *ready* when they have *ended*. Ready work is preferred to
merely eligible work (G3). Launched work that has not ended is bounded: by count when one client is
alone, by estimated device time when several want the island, so that the policy decides and not the
queue (G2). Of a segment whose device time is not known only a few are launched until one has ended: a
launch too many may be minutes, for others and for its own deadline. Where devices have a limit, a run
goes only when it has been admitted (G5, `pw.sched.island.admission`).

The cost of a launch does not depend on the number of shards: one send per host of the gang.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice

import msgspec

from pw.core.actor import Actor, Env, handles
from pw.core.compact import Compact
from pw.core.copying import orders
from pw.core.errors import Error, ErrorReport
from pw.core.ids import CONTROL, RESOURCES, Address, client_of, executor_of, scheduler_of
from pw.core.messages import (
    CANCELLED,
    AddClient,
    Arguments,
    ArrayPlaced,
    CallEnded,
    CancelRun,
    Copy,
    CopyArrays,
    CopyFile,
    Discard,
    EndEpoch,
    ExplainIsland,
    Finished,
    GangBroken,
    Held,
    Install,
    Installed,
    InstallProgram,
    InstallReport,
    IslandFormed,
    IslandLost,
    IslandReport,
    Launch,
    LaunchGap,
    ProgramInstalled,
    Progress,
    Release,
    RemoveClient,
    ReserveRun,
    RunAdmitted,
    RunAtHead,
    RunRefused,
    RunStarted,
    SegmentDone,
    SegmentLaunched,
    Stalled,
    Submit,
    UninstallProgram,
    UploadEnded,
    WorkReport,
)
from pw.core.watchdog import STALL_S, Look, Watchdog
from pw.sched.control.explain.why import WORK_TOLD, waited_for
from pw.sched.island.admission import Admission, Request
from pw.sched.island.names import Names
from pw.sched.island.policy import Policy
from pw.sched.island.quarantine import Suspects
from pw.sched.island.tasks import (
    ClientQueue,
    CopyTask,
    DiscardTask,
    Drops,
    RunHere,
    SegmentTask,
    Task,
)
from pw.sched.island.window import Footprint, Part, Window, places_of

UNKNOWN_US = 100.0
"""Device time of a segment that has never run."""
UNKNOWN_AT_ONCE = 2
"""Launches of such a segment that have not ended: enough to keep devices busy if it is short."""

NEVER = -1
"""A producer that will not be launched: what waits for it stays where it is until it is cancelled."""
HEAD_S = 1.0
"""How often to look whether a run that is to end has come to its turn on the devices."""
TIMER_S = 0.5e-3
"""Timers may come so much too early."""
AROUND_S = 1.0
"""A client that submitted something so recently is one of several that want the island."""


Alike = dict[tuple[int, bool, bool, bool], Launch]
"""Launches of one gang by what they differ in, so that each is made and encoded once."""


@dataclass(frozen=True, slots=True)
class _Overdue:
    """Note to oneself: this run should have ended by itself by now."""

    run: int
    epoch: int
    reason: str
    had_turn: bool
    """It was next on its devices already when this note was written."""


@dataclass(frozen=True, slots=True)
class _LookAgain:
    """Note to oneself: a place has been kept for long enough."""


@dataclass(slots=True)
class _Program:
    """An installed program."""

    names: Names
    footprints: dict[int, Footprint]
    """Where each of its segments runs."""
    install: int
    """Its newest installing; hosts may answer for an earlier one."""
    compiling: set[str]
    """Hosts that have not answered for that one."""
    estimates_us: dict[int, float]
    """Device time of its segments, as far as one has ended."""


_UNKNOWN = _Program(Names(), {}, 0, set(), {})


class IslandScheduler(Actor):
    """Orders the work of all clients on one island."""

    def __init__(self, env: Env, island: str, policy: Policy, stall_s: float = STALL_S) -> None:
        super().__init__(env)
        self.island = island
        self.policy = policy
        self.epoch = 0
        self.hosts: tuple[str, ...] = ()
        self._members: frozenset[str] = frozenset()
        """Who is here; what names others has come too late."""
        self._next_sequence: dict[str, int] = {}
        self._clients: dict[int, ClientQueue] = {}
        self._runs: dict[int, list[SegmentTask]] = {}
        self._in_flight: dict[tuple[str, int], SegmentTask] = {}
        """By its first host and that one's launch number, in the order in which they have their turn there."""
        self._reporting: dict[tuple[str, int], tuple[str, int]] = {}
        """The other hosts that are to say when one of these has ended, and their launch numbers."""
        self._window = Window()
        self._waiting_uploads: dict[int, list[SegmentTask]] = {}
        self._programs: dict[int, _Program] = {}
        """In the order in which they are compiled."""
        self._watchdog = Watchdog(env, stall_s)
        self._drops: defaultdict[tuple[str, ...], Drops] = defaultdict(Drops)
        """By gang: what all its hosts are to drop when the turn has ended."""
        self._arrivals = 0
        self._look_again_s = math.inf
        """When a note will come that a place has been kept for long enough."""
        self._admission = Admission(env, island)
        self._suspects = Suspects()

    @property
    def queued(self) -> int:
        """Segments that wait to be launched."""
        return sum(len(tasks) for tasks in self._runs.values())

    @property
    def launched(self) -> int:
        """Segments that have been launched and have not ended."""
        return len(self._in_flight)

    # --- membership ----------------------------------------------------------------------------------

    @handles(IslandFormed)
    def _formed(self, sender: Address, message: IslandFormed) -> None:
        self.epoch = message.epoch
        self.hosts = message.hosts
        self._members = frozenset(message.hosts)
        self._next_sequence = dict.fromkeys(message.hosts, 0)
        self._admission.reset(message.device_memory_bytes)

    @handles(IslandLost)
    def _lost(self, sender: Address, message: IslandLost) -> None:
        """Nothing launched or queued here will ever end; the controller has told the clients."""
        if message.host:
            compiling = {n: known.compiling for n, known in self._programs.items()}
            self._suspects.host_lost(message.host, compiling, self._at_work(message.host))
        self.hosts = ()
        self._members = frozenset()
        self._next_sequence = {}
        self._runs.clear()
        self._in_flight.clear()
        self._reporting.clear()
        self._window = Window()
        self._waiting_uploads.clear()
        for known in self._programs.values():
            known.compiling.clear()
        self._drops.clear()
        self._admission.reset(None)
        for queue in self._clients.values():
            for task in queue.tasks:
                if isinstance(task, DiscardTask):
                    self._programs.pop(task.program, None)
                    self._suspects.uninstall(task.program)
            queue.tasks.clear()
            queue.launched = 0
            queue.habit.forget_place()

    def _at_work(self, host: str) -> list[int]:
        """Programs that it may have been working at: on each device one, what had its turn last first."""
        first: dict[Part, int] = {}
        for task in self._in_flight.values():
            if host in task.under_way():
                for part in task.footprint.parts:
                    first.setdefault(part, task.here.program)
        return [first[part] for part in sorted(first, key=lambda part: -part.turn_s)]

    @handles(AddClient)
    def _add_client(self, sender: Address, message: AddClient) -> None:
        self._clients[message.client] = ClientQueue(message.client, message.share, message.priority)

    @handles(RemoveClient)
    def _remove_client(self, sender: Address, message: RemoveClient) -> None:
        queue = self._clients.pop(message.client, None)
        if queue is None:
            return
        for run in [run for run in self._runs if client_of(run) == message.client]:
            self._give_up(self._runs.pop(run))
        if self._admission.memory is not None:
            self._admission.memory.forget(message.client)
        for known in (self._waiting_uploads, self._programs):
            for number in [number for number in known if client_of(number) == message.client]:
                del known[number]
        self._suspects.forget(message.client)
        self.policy.forget(message.client, self._window.accounts())
        if self.hosts:
            self._drops[self.hosts].clients.append(message.client)

    # --- programs ------------------------------------------------------------------------------------

    @handles(InstallProgram)
    def _install(self, sender: Address, message: InstallProgram) -> None:
        if not self.hosts or not self._members.issuperset(plan.host for plan in message.plans):
            self.env.count("messages_stale")
            return
        if self._admission.memory is not None:
            self._admission.memory.install(message.program, message.body.name, message.memory)
        if (refusal := self._suspects.install(message.program, message.body)) is not None:
            refused = ProgramInstalled(self.island, message.program, refusal, message.install)
            self.env.send(CONTROL, refused)
            return
        self._keep(message.program)
        earlier = self._programs.pop(message.program, None)
        program = self._programs[message.program] = _Program(
            Names.of(message),
            {at: self._window.footprint(where) for at, where in places_of(message).items()},
            message.install,
            {plan.host for plan in message.plans},
            {} if earlier is None else earlier.estimates_us,
        )
        body = Compact.of(message.body)
        try:
            for plan in message.plans:
                what = (message.program, body, Compact.of(plan), message.artifacts, message.install)
                self.env.send(executor_of(plan.host), Install(self.epoch, *what))
        except (
            Error
        ) as error:  # no message holds it: its runs are to say so, and nothing waits for it
            program.compiling.clear()
            report = ErrorReport.of(error)
            words = f"{message.body.name!r} cannot be sent to its hosts: {report.message}"
            report = msgspec.structs.replace(report, message=words)
            refused = ProgramInstalled(self.island, message.program, report, message.install)
            self.env.send(CONTROL, refused)

    def _keep(self, program: int) -> None:
        """It was to be dropped, and is needed again: a drop must not follow the new installation."""
        queue = self._clients.get(client_of(program))
        if queue is not None:
            queue.tasks = deque(
                task
                for task in queue.tasks
                if not isinstance(task, DiscardTask) or task.program != program
            )
        for drops in self._drops.values():
            if program in drops.programs:
                drops.programs.remove(program)

    @handles(Installed)
    def _installed(self, sender: Address, message: Installed) -> None:
        program = self._programs.get(message.program, _UNKNOWN)
        is_old = message.epoch != self.epoch or message.install != program.install
        if is_old or not program.compiling:
            self.env.count("messages_stale")
            return
        program.compiling.discard(sender.node)
        if self._admission.memory is not None:
            self._admission.memory.add_temporaries(message.program, message.temporary_bytes)
        if message.error is not None or not program.compiling:
            program.compiling.clear()
            self._suspects.compiled(message.program)
            answer = ProgramInstalled(self.island, message.program, message.error, message.install)
            self.env.send(CONTROL, answer)

    @handles(UninstallProgram)
    def _uninstall(self, sender: Address, message: UninstallProgram) -> None:
        self._enqueue(
            client_of(message.program),
            DiscardTask((), (message.hosts,), message.program, self._arrival()),
        )

    # --- the queue -----------------------------------------------------------------------------------

    @handles(Submit)
    def _submit(self, sender: Address, message: Submit) -> None:
        queue = self._clients.get(client_of(message.run))
        if queue is None or not all(map(self._members.issuperset, message.hosts)):
            self.env.count("messages_stale")
            return
        program = self._programs.get(message.program, _UNKNOWN)
        here = RunHere(
            message.run,
            message.program,
            Arguments(message.args, message.results),
            self._admission.request(message),
            message.is_timed,
            names=program.names,
        )
        tasks = []
        for index, segment in enumerate(message.segments):
            depends = {producer for _, producer in message.depends[index]}
            tasks.append(
                SegmentTask(
                    here,
                    segment,
                    message.hosts[index],
                    program.footprints.get(segment) or self._window.footprint(message.hosts[index]),
                    message.notify[index],
                    depends,
                    set(depends),
                    set(message.awaits) if index == 0 else set(),
                    self._arrival(),
                    message.reporters[index],
                )
            )
            for host in message.hosts[index]:
                here.last_segment[host] = segment
        for array in message.awaits:
            self._waiting_uploads.setdefault(array, []).append(tasks[0])
        if self._suspects and (refusal := self._suspects.refusal(message.program)) is not None:
            tasks[0].unlaunched.add(NEVER)
            self.env.send(CONTROL, RunRefused(message.run, refusal))
        if not self._runs and not self._in_flight:
            self._watchdog.went_on()
        now_s = self.env.now_s()
        if self.policy.keeps_accounts:
            self._settle_accounts(queue, tasks, now_s)
        self._runs[message.run] = list(tasks)
        queue.submitted(tasks, now_s)

    def _settle_accounts(
        self, queue: ClientQueue, tasks: Sequence[SegmentTask], now_s: float
    ) -> None:
        """Before these are queued: whoever was alone or idle where they run, the past does not count."""
        parts = {part: None for task in tasks for part in task.footprint.parts}
        kept = queue.wants(now_s)
        quiet = [part for part in parts if not part.launched and part not in kept]
        if quiet:
            others = (other.wants(now_s) for other in self._clients.values() if other is not queue)
            wanted = {part for place in others for part in place}
            self.policy.idle([part.account for part in quiet if part not in wanted])
        if queue.oldest is None:
            self.policy.rejoin(queue.client, [part.account for part in parts if part not in kept])

    @handles(ArrayPlaced)
    def _placed(self, sender: Address, message: ArrayPlaced) -> None:
        if self._admission.memory is not None:
            self._admission.memory.place(message.array, message.devices, message.shard_bytes)

    @handles(CopyArrays)
    def _copy_arrays(self, sender: Address, message: CopyArrays) -> None:
        self._enqueue(message.client, CopyTask(message.copies, message.files, self._arrival()))

    @handles(SegmentLaunched)
    def _producer_launched(self, sender: Address, message: SegmentLaunched) -> None:
        for task in self._runs.get(message.run, ()):
            task.unlaunched.discard(message.segment)

    @handles(SegmentDone)
    def _producer_done(self, sender: Address, message: SegmentDone) -> None:
        for task in self._runs.get(message.run, ()):
            task.unfinished.discard(message.segment)

    @handles(UploadEnded)
    def _upload_ended(self, sender: Address, message: UploadEnded) -> None:
        if self._admission.memory is not None:
            self._admission.memory.arrived(message.array)
        for task in self._waiting_uploads.pop(message.array, ()):
            task.awaits.discard(message.array)

    @handles(Release)
    def _release(self, sender: Address, message: Release) -> None:
        task = DiscardTask(message.arrays, message.hosts, 0, self._arrival())
        if not message.late:
            self._enqueue(message.client, task)
        elif (queue := self._clients.get(message.client)) is not None:
            queue.insert(task)

    @handles(CancelRun)
    def _cancel(self, sender: Address, message: CancelRun) -> None:
        """Forget what is queued, and tell the hosts that wait for it that it will not come."""
        if message.reason:
            self._end_soon(message)
        dropped = self._runs.pop(message.run, ())
        if not dropped:
            return
        here = dropped[0].here
        alike: Alike = {}
        for host in dict.fromkeys(host for task in dropped for host in task.hosts):
            self._send_launch(host, here, CANCELLED, None, last=True, report=False, alike=alike)
        for task in dropped:
            for array in task.awaits:
                waiting = self._waiting_uploads.get(array, [])
                if task in waiting:
                    waiting.remove(task)
        self._give_up(dropped)
        queue = self._clients[client_of(message.run)]
        queue.tasks = deque(
            task
            for task in queue.tasks
            if not isinstance(task, SegmentTask) or task.here.run != message.run
        )

    def _end_soon(self, message: CancelRun) -> None:
        """See to it that what is launched of a run ends; only with its epoch can it be stopped."""
        turn = self._turn_of(message.run)
        if turn is None:
            return
        if turn and not message.grace_s:
            self.env.send(RESOURCES, EndEpoch(self.island, self.epoch, message.reason))
            return
        delay_s = message.grace_s or HEAD_S
        self.env.call_later(
            delay_s, _Overdue(message.run, self.epoch, message.reason, had_turn=turn)
        )

    @handles(_Overdue)
    def _overdue(self, sender: Address, note: _Overdue) -> None:
        turn = self._turn_of(note.run) if note.epoch == self.epoch else None
        if turn and note.had_turn:
            self.env.send(RESOURCES, EndEpoch(self.island, self.epoch, note.reason))
        elif turn is not None:
            again = _Overdue(note.run, note.epoch, note.reason, had_turn=turn)
            self.env.call_later(HEAD_S, again)

    def _turn_of(self, run: int) -> bool | None:
        """Whether a run is what its devices work at: nothing launched before it is unfinished there.

        None if nothing of it is launched. Other clients' work is not ended for a run that only waits
        behind it.
        """
        before: set[str] = set()
        for task in self._in_flight.values():
            if task.here.run == run:
                return before.isdisjoint(task.hosts)
            before.update(task.under_way())
        return None

    def _give_up(self, tasks: Sequence[SegmentTask]) -> None:
        """These, which are all that is left of a run here, will not be launched."""
        if (request := tasks[0].here.request) is not None:
            self._admission.give_up(request, len(tasks))

    def _arrival(self) -> int:
        self._arrivals += 1
        return self._arrivals

    def _enqueue(self, client: int, task: Task) -> None:
        queue = self._clients.get(client)
        if queue is not None:
            queue.tasks.append(task)

    # --- launching -----------------------------------------------------------------------------------

    def turn_ended(self) -> None:
        """Launch all that may go, then send what hosts may drop."""
        while (task := self._next()) is not None:
            self._launch(task)
        if self._in_flight or self._runs:
            self._watchdog.watch()
        if self._drops:
            self._send_drops()
        if not self._programs:
            self._window.tidy()

    def _next(self) -> SegmentTask | None:
        """Take the task that goes next, if one may go now."""
        now_s = self.env.now_s()
        ready: list[ClientQueue] = []
        eligible: list[ClientQueue] = []
        absent: list[ClientQueue] = []
        footprints: list[Footprint] = []
        wanting = 0
        if self._admission.memory is not None:  # what is dropped may make room for any of them
            for queue in self._clients.values():
                self._order(queue.tasks)
        for queue in self._clients.values():
            tasks = queue.tasks
            if tasks and not isinstance(tasks[0], SegmentTask):
                self._order(tasks)
            wanting += bool(tasks or queue.launched or now_s < queue.came_s + AROUND_S)
            head = tasks[0] if tasks else None
            assert head is None or isinstance(head, SegmentTask)
            request = None if head is None or head.awaits else head.here.request
            if request is not None and not self._admission.may_be_chosen(request):
                continue
            if head is None or head.awaits or head.unlaunched:
                absent.append(queue)
                continue
            (eligible if head.unfinished else ready).append(queue)
            footprints.append(head.footprint)
        if not ready and not eligible:
            if self._admission.memory is not None:
                self._admission.refuse_if_stuck()
            return None
        may_go = partial(self._window.is_open, contended=wanting > 1)
        if len(footprints) > 1 and not any(map(may_go, footprints)):
            return None
        expected = self._expected(absent, now_s) if self.policy.keeps_places else absent[:0]
        taken: set[Part] = set()
        kept_until_s = math.inf
        for contenders in (ready + expected if expected else ready, eligible):
            for queue in self.policy.order(contenders, now_s):
                if expected and queue in expected:
                    # What it is about to bring goes before what comes after it here.
                    taken.update(queue.place.parts if queue.place is not None else ())
                    kept_until_s = min(kept_until_s, queue.expected_until_s)
                    continue
                task = queue.tasks[0]
                assert isinstance(task, SegmentTask)
                where = task.footprint
                if taken and not taken.isdisjoint(where.parts):
                    continue
                known = self._programs.get(task.here.program, _UNKNOWN).estimates_us
                untried = task.segment not in known and self._alike(task) >= UNKNOWN_AT_ONCE
                if untried or not may_go(where):
                    # To launch another's there would be against the policy.
                    taken.update(where.parts)
                    continue
                request = task.here.request
                if request is None or request.is_admitted or self._admission.admit(request):
                    task.estimate_us = known.get(task.segment, UNKNOWN_US)
                    self.policy.launched(queue, task.estimate_us)
                    queue.tasks.popleft()
                    queue.launched += 1
                    queue.waits_since_s = math.inf if queue.oldest is None else now_s
                    queue.habit.launched(where)
                    return task
        if kept_until_s == math.inf:
            self._admission.refuse_if_stuck()
        elif kept_until_s < self._look_again_s:
            self._look_again_s = kept_until_s
            self.env.call_later(kept_until_s - now_s + TIMER_S, _LookAgain())
        return None

    def _expected(self, absent: Sequence[ClientQueue], now_s: float) -> list[ClientQueue]:
        """Those of these clients that are about to come back."""
        expected = []
        for queue in absent:
            if now_s < queue.expected_until_s:
                expected.append(queue)
            else:
                queue.habit.stayed_away()
        return expected

    @handles(_LookAgain)
    def _kept_long_enough(self, sender: Address, note: _LookAgain) -> None:
        """The end of this turn sees to what goes there instead."""
        self._look_again_s = math.inf

    def _order(self, tasks: deque[Task]) -> None:
        """See to what is no gang, and has come to the head of its queue."""
        while tasks and not isinstance(task := tasks[0], SegmentTask):
            tasks.popleft()
            if isinstance(task, CopyTask):
                self._replicate(task)
            else:
                self._drop(task)

    def _alike(self, task: SegmentTask) -> int:
        """Launches of the same part of the same program that have not ended."""
        program, segment = task.here.program, task.segment
        in_flight = self._in_flight.values()
        return sum(one.segment == segment and one.here.program == program for one in in_flight)

    def _launch(self, task: SegmentTask) -> None:
        here = task.here
        if here.request is not None:
            here.request.was_launched = True
        if here.is_timed:
            here.is_timed = False
            self.env.send(CONTROL, RunStarted(here.run))
        key: tuple[str, int] | None = None
        alike: Alike = {}
        for index, host in enumerate(task.hosts):
            first = host not in here.introduced
            here.introduced.add(host)
            sequence = self._send_launch(
                host,
                here,
                task.segment,
                here.arguments if first else None,
                last=here.last_segment[host] == task.segment,
                report=index < task.reporters,
                alike=alike,
            )
            if key is None:
                key = (host, sequence)
                self._in_flight[key] = task
            elif index < task.reporters:
                self._reporting[host, sequence] = key
        self._watchdog.went_on()
        task.launched_s = self._watchdog.progress_s
        self._window.launched(task.footprint, task.estimate_us, task.launched_s)
        self.env.count("launches")
        waiting = self._runs[here.run]
        waiting.remove(task)
        if not waiting:
            del self._runs[here.run]
        for island in task.notify:
            self.env.send(scheduler_of(island), SegmentLaunched(here.run, task.segment))

    def _send_launch(
        self,
        host: str,
        here: RunHere,
        segment: int,
        arguments: Arguments | None,
        *,
        last: bool,
        report: bool,
        alike: Alike,
    ) -> int:
        """Send one host its launch, in `alike` if others of the gang get the same: it is encoded once."""
        sequence = self._sequence(host)
        key = (sequence, arguments is None, last, report)
        launch = alike.get(key)
        if launch is None:
            launch = alike[key] = Launch(
                self.epoch, sequence, here.run, here.program, segment, last, arguments, report
            )
        self.env.send(executor_of(host), launch)
        return sequence

    def _sequence(self, host: str) -> int:
        sequence = self._next_sequence[host]
        self._next_sequence[host] = sequence + 1
        return sequence

    def _drop(self, task: DiscardTask) -> None:
        memory = self._admission.memory
        if task.program:
            self._programs.pop(task.program, None)
            self._suspects.uninstall(task.program)
            if memory is not None:
                memory.uninstall(task.program)
            self._drops[task.hosts[0]].programs.append(task.program)
        for array, hosts in zip(task.arrays, task.hosts, strict=False):
            if memory is not None:
                memory.release(array)
            self._drops[hosts].arrays.append(array)

    def _send_drops(self) -> None:
        """One frame for each host, encoded once for all that get the same."""
        of_hosts: dict[str, list[Drops]] = {}
        for gang, drops in self._drops.items():
            for host in gang:
                of_hosts.setdefault(host, []).append(drops)
        self._drops.clear()
        alike: dict[tuple[int, ...], Discard] = {}
        for host, several in of_hosts.items():
            if host not in self._next_sequence:
                continue
            sequence = self._sequence(host)
            key = (sequence, *map(id, several))
            discard = alike.get(key)
            if discard is None:
                discard = alike[key] = Discard(
                    self.epoch,
                    sequence,
                    tuple([array for drops in several for array in drops.arrays]),
                    tuple([program for drops in several for program in drops.programs]),
                    tuple([client for drops in several for client in drops.clients]),
                )
            self.env.send(executor_of(host), discard)

    def _replicate(self, task: CopyTask) -> None:
        """Sent at once, and not with the turn's drops: a later launch may take the arrays over."""
        copies: dict[str, list[Copy]] = {}
        files: dict[str, list[CopyFile]] = {}
        for host, copy in task.copies:
            copies.setdefault(host, []).append(copy)
        for host, file in task.files:
            files.setdefault(host, []).append(file)
        for host in dict.fromkeys((*copies, *files)):
            if host not in self._next_sequence:
                self.env.count("messages_stale")
                continue
            mine = copies.get(host, ()), files.get(host, ())
            for order in orders(self.epoch, partial(self._sequence, host), *mine):
                self.env.send(executor_of(host), order)

    # --- admission -----------------------------------------------------------------------------------

    def _request(self, run: int) -> Request | None:
        tasks = self._runs.get(run)
        request = tasks[0].here.request if tasks else None
        if request is None:
            self.env.count("messages_stale")
        return request

    @handles(RunAtHead)
    def _at_head_elsewhere(self, sender: Address, message: RunAtHead) -> None:
        if (request := self._request(message.run)) is not None:
            self._admission.is_at_head(request)

    @handles(ReserveRun)
    def _turn_to_reserve(self, sender: Address, message: ReserveRun) -> None:
        if (request := self._request(message.run)) is not None:
            request.has_turn = True

    @handles(RunAdmitted)
    def _admitted(self, sender: Address, message: RunAdmitted) -> None:
        if (request := self._request(message.run)) is not None:
            request.is_admitted = True

    # --- why it does not go on -----------------------------------------------------------------------

    @handles(Look)
    def _look(self, sender: Address, note: Look) -> None:
        if self._watchdog.stalled(bool(self._in_flight or self._runs)):
            self.env.send(CONTROL, Stalled(self.island))

    @handles(ExplainIsland)
    def _explain(self, sender: Address, message: ExplainIsland) -> None:
        launched = [
            task
            for index, task in enumerate(self._in_flight.values())
            if index < WORK_TOLD or task.here.run == message.run
        ]
        tasks = [queue.tasks[0] for queue in self._clients.values() if queue.tasks]
        compiling = ((n, known) for n, known in self._programs.items() if known.compiling)
        heads = [self._work(task) for task in tasks if isinstance(task, SegmentTask)]
        report = IslandReport(
            message.request,
            self.island,
            self.hosts,
            self._watchdog.quiet_s,
            self.launched,
            self.queued,
            tuple(map(self._work, launched)),
            tuple(heads[:WORK_TOLD]),
            tuple(
                InstallReport(number, program.names.program, tuple(sorted(program.compiling)))
                for number, program in islice(compiling, WORK_TOLD)
            ),
        )
        self.env.send(sender, report)

    def _work(self, task: SegmentTask) -> WorkReport:
        """A segment that is launched, or next of its client."""
        names = task.here.names
        shards = names.shards.get(task.segment, {})
        is_launched = task.launched_s >= 0
        return WorkReport(
            task.here.run,
            task.segment,
            names.program,
            names.segments.get(task.segment, ()),
            task.hosts,
            tuple(shards.get(host, ()) for host in task.hosts),
            self.env.now_s() - task.launched_s if is_launched else -1.0,
            () if is_launched else waited_for(task),
            tuple(sorted(task.awaits)),
        )

    # --- progress ------------------------------------------------------------------------------------

    @handles(Progress)
    def _progress(self, sender: Address, message: Progress) -> None:
        if message.epoch != self.epoch:
            self.env.count("messages_stale")
            return
        self._watchdog.went_on()
        for finished in message.finished:
            self._ended(sender.node, finished)

    def _ended(self, host: str, finished: Finished) -> None:
        key = (host, finished.sequence)
        if self._reporting:
            key = self._reporting.pop(key, key)
        task = self._in_flight.get(key)
        if task is None:
            self.env.count("messages_stale")
            return
        task.reporters -= 1
        task.device_time_us = max(task.device_time_us, finished.device_time_us)
        task.lost = task.lost or finished.lost
        if task.reporters:
            task.ended_on += (host,)
            return
        del self._in_flight[key]
        device_time_us = task.device_time_us
        self._window.ended(task.footprint, task.estimate_us, self._watchdog.progress_s)
        if task.here.request is not None:
            self._admission.segments_ended(task.here.request)
        queue = self._clients.get(client_of(task.here.run))
        if queue is not None:
            queue.launched -= 1
            queue.habit.ended(device_time_us, self._watchdog.progress_s)
            if self.policy.keeps_accounts:
                more_us = device_time_us - task.estimate_us
                self.policy.measured(queue.client, queue.share, task.footprint.accounts, more_us)
        if self._suspects:
            self._suspects.ran(task.here.program)
        program = self._programs.get(task.here.program)
        if program is not None:
            estimates_us = program.estimates_us
            known = estimates_us.get(task.segment, float(device_time_us))
            estimates_us[task.segment] = 0.8 * known + 0.2 * device_time_us
        done = SegmentDone(task.here.run, task.segment, device_time_us, task.lost)
        for island in task.notify:
            self.env.send(scheduler_of(island), done)
        self.env.send(CONTROL, done)

    @handles(Held)
    def _on_held(self, sender: Address, message: Held) -> None:
        """What has been passed is not at work; after that it comes behind what has passed it."""
        if message.epoch != self.epoch:
            self.env.count("messages_stale")
            return
        passed, handed_over = set(message.passed), set(message.handed_over)
        for key, task in list(self._in_flight.items()):
            name = (task.here.run, task.segment)
            if name in passed:
                task.held_on |= {sender.node}
            if name in handed_over:
                task.held_on -= {sender.node}
                self._in_flight[key] = self._in_flight.pop(key)

    @handles(CallEnded)
    def _call_ended(self, sender: Address, message: CallEnded) -> None:
        """A host tells the others of its gang."""
        if message.epoch != self.epoch:
            self.env.count("messages_stale")
            return
        for host in message.gang:
            if host != sender.node and host in self._members:
                self.env.send(executor_of(host), message)

    @handles(LaunchGap)
    def _gap(self, sender: Address, message: LaunchGap) -> None:
        """A host missed a launch: the order of its gang can no longer be kept, the epoch must end."""
        self.env.count("launch_gaps")
        if message.epoch == self.epoch:
            reason = f"host {sender.node} has not got all the work that it was sent"
            self.env.send(RESOURCES, EndEpoch(self.island, self.epoch, reason))

    @handles(GangBroken)
    def _broken(self, sender: Address, message: GangBroken) -> None:
        """Hosts of a gang would go different ways, so the epoch must end before any does."""
        self.env.count("gangs_broken")
        if message.epoch == self.epoch:
            if message.error is not None:
                refused = RunRefused(message.run, message.error, message.results)
                self.env.send(CONTROL, refused)
            reason = f"host {sender.node} cannot go on with the others: {message.reason}"
            self.env.send(RESOURCES, EndEpoch(self.island, self.epoch, reason))
