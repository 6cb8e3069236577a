"""Picks the launch that goes next, and sends it to its hosts.

The policy orders the clients whose oldest launch may go (`pw.sched.island.policy`), ready launches
before eligible ones (G3). A launch goes if the window has room on all its devices (G2) and its run
is admitted to device memory (G5). If a launch has no room, no later one may go on the same devices.
A segment that has never run may take minutes, so at most `UNKNOWN_AT_ONCE` of its launches are in
flight.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from pw.core.actors.actor import Env, Part
from pw.core.actors.watchdog import Watchdog
from pw.core.ids import CONTROL, executor_of, scheduler_of
from pw.core.messages import ArrayCopy, CopyFile, RunStarted, SegmentLaunched
from pw.core.messages.copying import orders
from pw.sched.island.admission import Admission
from pw.sched.island.client_queue import ClientQueue, CopyTask, DiscardTask, Task
from pw.sched.island.in_flight import InFlight
from pw.sched.island.launch_states import LaunchState, SegmentTask
from pw.sched.island.lease_states import LeaseTable
from pw.sched.island.members import Members
from pw.sched.island.policy import Policy
from pw.sched.island.programs import IslandPrograms
from pw.sched.island.queues import Queues
from pw.sched.island.residency import Residency
from pw.sched.island.window import Footprint, SiteGroup, Window

UNKNOWN_US = 100.0
"""Expected device time of a segment that has never run, in microseconds."""
UNKNOWN_AT_ONCE = 2
"""Number of launches of such a segment in flight: enough to keep devices busy if it is short."""
TIMER_S = 0.5e-3
"""Seconds by which timers may fire early."""
AROUND_S = 1.0
"""Seconds after its last run for which a client counts as one that wants the island."""


@dataclass(eq=False, repr=False)
class Launcher(Part):
    """Launches the queued work of one island."""

    env: Env
    members: Members
    policy: Policy
    window: Window
    admission: Admission
    programs: IslandPrograms
    in_flight: InFlight
    queues: Queues
    watchdog: Watchdog
    leases: LeaseTable
    residency: Residency
    _look_again_s: float = field(default=math.inf, init=False)
    """Time at which the earliest timer comes, in seconds."""
    _lacks_memory: bool = field(default=False, init=False)
    """True if nothing goes until there is more memory, as far as is known."""

    def launch_all(self) -> None:
        """Launch all that may go, and make room for what does not fit."""
        while True:
            self._lacks_memory = False
            while (task := self._next()) is not None:
                self._launch(task)
            is_bound_short = self.admission.are_bounds_short
            if not (self._lacks_memory or is_bound_short) or self.residency.make_room():
                return
            # A client that is to leave its devices will make room.
            leave = any(queue.held_but is not None for queue in self.queues.busy.values())
            if self._lacks_memory and not leave:
                self.admission.refuse_if_stuck()
            if not (is_bound_short and self.admission.go_on(self._able)):
                return

    def _able(self) -> set[int]:
        """Return the clients with work at the head of a queue that may go some time, and then free memory."""
        return {
            client
            for client, queue in self.queues.busy.items()
            if queue.tasks and not queue.holds(queue.tasks[0]) and self._may_go(queue.tasks[0])
        }

    def _may_go(self, task: Task) -> bool:
        if not isinstance(task, SegmentTask):
            return True
        is_due = task.state in (LaunchState.READY, LaunchState.ELIGIBLE) and not task.awaits
        return is_due and self.admission.may_go(task.here.reservation)

    @staticmethod
    def _keep_free(closed: set[SiteGroup], groups: Iterable[SiteGroup]) -> None:
        """Hold later launches back from devices on which an earlier one has no room yet."""
        closed.update(groups)

    # --- picking -------------------------------------------------------------------------------------

    def _next(self) -> SegmentTask | None:
        """Take the launch that goes next, if one may go now."""
        now_s = self.env.now_s()
        ready: list[ClientQueue] = []
        eligible: list[ClientQueue] = []
        footprints: list[Footprint] = []
        absent: list[ClientQueue] = []  # clients without a launch that may go
        wanting = 0  # clients that want the island
        idle: list[ClientQueue] = []
        queues, admission = self.queues.busy.values(), self.admission
        if admission.memory is not None:  # a discard may make room for any client
            for queue in queues:
                self._order(queue.tasks)
        for queue in queues:
            tasks = queue.tasks
            if tasks and not isinstance(tasks[0], SegmentTask):
                self._order(tasks)
            if tasks or queue.launched or now_s < queue.came_s + AROUND_S:
                wanting += 1
            elif now_s >= queue.expected_until_s:
                idle.append(queue)
                continue
            if not tasks:
                absent.append(queue)
                continue
            head = tasks[0]
            if not isinstance(head, SegmentTask) or not self.leases.are_free(head.hosts):
                continue
            if queue.held_but is not None and queue.holds(head):
                continue
            reservation = None if head.awaits else head.here.reservation
            if reservation is not None and not admission.may_be_chosen(reservation):
                continue
            if head.state is LaunchState.READY:
                ready.append(queue)
            elif head.state is LaunchState.ELIGIBLE:
                eligible.append(queue)
            else:
                absent.append(queue)
                continue
            footprints.append(head.footprint)
        for queue in idle:
            self.queues.rest(queue)
        if not footprints:
            self._lacks_memory = True
            return None
        is_open = partial(self.window.is_open, contended=wanting > 1)
        if len(footprints) > 1 and not any(map(is_open, footprints)):
            return None
        expected = self._expected(absent, now_s) if self.policy.keeps_devices else absent[:0]
        closed: set[SiteGroup] = set()  # where a client that goes first has no room, or is expected
        kept_until_s = math.inf
        for contenders in (ready + expected if expected else ready, eligible):
            for queue in self.policy.order(contenders, now_s):
                if expected and queue in expected:
                    closed.update(queue.footprint.groups if queue.footprint is not None else ())
                    kept_until_s = min(kept_until_s, queue.expected_until_s)
                    continue
                task = queue.tasks[0]
                assert isinstance(task, SegmentTask)
                groups = task.footprint.groups
                if closed and not closed.isdisjoint(groups):
                    continue
                estimates_us = task.here.installed.estimates_us
                untried = task.segment not in estimates_us and (
                    self.in_flight.like(task) >= UNKNOWN_AT_ONCE
                )
                if untried or not is_open(task.footprint):
                    self._keep_free(closed, groups)
                    continue
                reservation = task.here.reservation
                if reservation is None or reservation.is_admitted or admission.admit(reservation):
                    task.estimate_us = estimates_us.get(task.segment, UNKNOWN_US)
                    if self.policy.keeps_accounts:
                        accounts = task.footprint.accounts
                        self.policy.launched(queue.stake, accounts, task.estimate_us)
                    queue.take(now_s)
                    return task
        if kept_until_s == math.inf:
            self._lacks_memory = True
        elif kept_until_s < self._look_again_s:
            self._look_again_s = kept_until_s
            self.env.call_later(kept_until_s - now_s + TIMER_S, self._kept_long_enough)
        return None

    def _expected(self, absent: Sequence[ClientQueue], now_s: float) -> list[ClientQueue]:
        """Return the clients that are about to come back."""
        expected = []
        for queue in absent:
            if now_s < queue.expected_until_s:
                expected.append(queue)
            else:
                queue.habit.stayed_away()
        return expected

    def _kept_long_enough(self) -> None:
        """The end of this turn launches other work where devices were kept for a client."""
        self._look_again_s = math.inf

    # --- sending -------------------------------------------------------------------------------------

    def _launch(self, task: SegmentTask) -> None:
        here = task.here
        if here.reservation is not None:
            here.reservation.was_launched = True
        if here.is_timed:
            here.is_timed = False
            self.env.send(CONTROL, RunStarted(here.run))
        numbers = self.members.send_launch(here, task.segment, task.hosts, task.reporters)
        self.launched(task, numbers)
        self.queues.launched(task)
        for island in task.notify:
            self.env.send(scheduler_of(island), SegmentLaunched(here.run, task.segment))

    def launched(self, task: SegmentTask, numbers: Sequence[int]) -> None:
        """Note a launch that was sent; `numbers` are those of the hosts that report its end."""
        self.in_flight.add(task, numbers)
        self.watchdog.went_on()
        task.launch(self.watchdog.progress_s)
        self.window.launched(task.footprint, task.estimate_us, task.launched_s)
        self.env.count("launches")

    def _order(self, tasks: deque[Task]) -> None:
        """Carry out the discards and copies at the head of a queue."""
        while tasks and not isinstance(task := tasks[0], SegmentTask):
            if isinstance(task, CopyTask) and not self.leases.are_free(task.hosts):
                return
            tasks.popleft()
            if isinstance(task, CopyTask):
                self._copy(task)
            else:
                self._discard(task)

    def _discard(self, task: DiscardTask) -> None:
        if task.program and self.programs.uninstall(task.program, task.install):
            self.members.drop_on(task.hosts[0]).programs.append(task.program)
        memory = self.admission.memory
        for array, hosts in zip(task.arrays, task.hosts, strict=False):
            if memory is not None:
                memory.release(array)
            self.members.drop_on(hosts).arrays.append(array)

    def _copy(self, task: CopyTask) -> None:
        """Send hosts their copies at once: a later launch may overwrite the arrays."""
        copies: defaultdict[str, list[ArrayCopy]] = defaultdict(list)
        files: defaultdict[str, list[CopyFile]] = defaultdict(list)
        for host, copy in task.copies:
            copies[host].append(copy)
        for host, file in task.files:
            files[host].append(file)
        for host in dict.fromkeys((*copies, *files)):
            if not self.members.include((host,)):
                self.env.count("messages_stale")
                continue
            number = partial(self.members.next_number, host)
            for order in orders(self.members.epoch, number, copies[host], files[host]):
                self.env.send(executor_of(host), order)
