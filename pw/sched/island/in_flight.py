"""Follows the launches in flight on an island: their turn on the devices, and their end.

A launch cannot be taken back from the devices. If an overdue run has its turn on its devices, the
epoch ends at once; for a cancelled run, after a grace period. If the run only waits behind other
work, the scheduler looks again every `HEAD_S`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from pw.core import messages as msg
from pw.core.actors.actor import Env, Part, handles
from pw.core.actors.watchdog import Watchdog
from pw.core.ids import CONTROL, Address, scheduler_of
from pw.sched.island.admission import Admission
from pw.sched.island.device_load import DeviceLoad
from pw.sched.island.installed_program import UNKNOWN
from pw.sched.island.launch_states import LaunchEvent, SegmentTask
from pw.sched.island.lease_states import LeaseTable
from pw.sched.island.members import Members
from pw.sched.island.policy import Policy
from pw.sched.island.quarantine import Quarantine
from pw.sched.island.queues import Queues
from pw.sched.island.spending import Spending
from pw.sched.island.window import SiteGroup, Window

HEAD_S = 1.0
"""Seconds between two looks whether a run that is to end has its turn on the devices."""

LATE_S = 30.0
"""Seconds that a withdrawn run may go on where orders go down trees. One that came after a host of another
island had left, and come back, waits for ever for what that host would have sent."""

Key = tuple[str, int]
"""Name of a host and number of a launch there."""


@dataclass(eq=False, repr=False)
class InFlight(Part):
    """Finds launches in flight by what hosts report, and says what hosts work at."""

    env: Env
    members: Members
    policy: Policy
    window: Window
    quarantine: Quarantine
    admission: Admission
    queues: Queues
    watchdog: Watchdog
    leases: LeaseTable
    spending: Spending
    launches: dict[Key, SegmentTask] = field(default_factory=dict, init=False)
    """Launches in flight by the first host of the gang, the oldest first."""
    device_s: float = field(default=0.0, init=False)
    """Device time of all launches that have ended, in seconds: of each device, in all."""
    load: DeviceLoad = field(default_factory=DeviceLoad, init=False)
    _reporting: dict[Key, Key] = field(default_factory=dict, init=False)
    """Key on the first host of the gang, for each other host that reports the end."""

    def add(self, task: SegmentTask, numbers: Sequence[int]) -> None:
        """Add a launch that was sent; `numbers` are those of the hosts that report its end."""
        key = (task.hosts[0], numbers[0])
        self.launches[key] = task
        for at in range(1, len(numbers)):
            self._reporting[task.hosts[at], numbers[at]] = key

    def like(self, task: SegmentTask) -> int:
        """Return how many launches in flight are of the same segment of the same program."""
        program, segment = task.here.program, task.segment
        return sum(
            one.segment == segment and one.here.program == program for one in self.launches.values()
        )

    def programs_on(self, host: str) -> list[int]:
        """Return the programs of each device of a host, first the one that began last."""
        first: dict[SiteGroup, int] = {}
        for task in self.launches.values():
            if host in task.at_work_on():
                for group in task.footprint.groups:
                    first.setdefault(group, task.here.program)
        return [first[group] for group in sorted(first, key=lambda group: -group.turn_s)]

    def _has_turn(self, run: int) -> bool | None:
        """Whether a run's devices work at it: no earlier launch is in flight on its hosts.

        None if no launch of the run is in flight.
        """
        before: set[str] = set()
        for task in self.launches.values():
            if task.here.run == run:
                return before.isdisjoint(task.hosts)
            before.update(task.at_work_on())
        return None

    @handles(msg.PassedLaunches)
    def _passed(self, sender: Address, message: msg.PassedLaunches) -> None:
        """A passed launch is not at work; when enqueued, it is behind those that passed it."""
        if not self.members.is_current(message.epoch, sender):
            return
        passed, enqueued = set(message.passed), set(message.enqueued)
        for key, task in list(self.launches.items()):
            name = (task.here.run, task.segment)
            if name in passed:
                task.passed_on |= {sender.node}
            if name in enqueued:
                task.passed_on -= {sender.node}
                self.launches[key] = self.launches.pop(key)

    @handles(msg.Progress)
    def _progress(self, sender: Address, message: msg.Progress) -> None:
        if not self.members.is_current(message.epoch, sender):
            return
        self.watchdog.went_on()
        for finished in message.finished:
            self.finished((sender.node, finished.sequence), finished)

    def finished(self, reporter: Key, finished: msg.Finished) -> None:
        """A host has ended a launch."""
        key = self._reporting.pop(reporter, reporter) if self._reporting else reporter
        task = self.launches.get(key)
        if task is None:
            if finished.sequence < 0 and self.leases.may_be_told_of(*reporter):
                self.leases.early[reporter] = finished
            else:
                self.env.count("messages_stale")
        elif task.reported(reporter[0], finished.device_time_us, finished.lost):
            del self.launches[key]
            self._ended(task)

    def _ended(self, task: SegmentTask) -> None:
        here, time_us, now_s = task.here, task.device_time_us, self.watchdog.progress_s
        self.window.ended(task.footprint, task.estimate_us, now_s)
        if here.reservation is not None:
            self.admission.segments_ended(here.reservation)
        if here.lease is not None and here.lease.segment_ended(here.run):
            self.leases.sliding.append(here.lease)
        queue = self.queues.clients.get(here.stake.client)
        if queue is not None:
            queue.ended(task, now_s)
        else:
            self.spending.ended_late(task)
        self.device_s += task.device_s
        self.load.ended(task.footprint.sites, time_us, now_s)
        if self.policy.keeps_accounts:
            more_us = time_us - task.estimate_us
            self.policy.measured(here.stake, task.footprint.accounts, more_us)
        if self.quarantine.strikes:
            self.quarantine.ran(here.program)
        if here.installed is not UNKNOWN:
            here.installed.measured(task.segment, time_us)
        if self.env.recorder.on:
            self.members.record(task, now_s)
        done = msg.SegmentDone(here.run, task.segment, time_us, task.lost)
        for island in task.notify:
            self.env.send(scheduler_of(island), done)
        self.env.send(CONTROL, done)

    @handles(msg.CancelRun)
    def _cancelled(self, sender: Address, message: msg.CancelRun) -> None:
        reason, grace_s = message.reason, message.grace_s
        if not reason and self.members.has_trees:
            reason, grace_s = (
                "a launch waits for a host that was lost before its order came",
                LATE_S,
            )
        has_turn = self._has_turn(message.run) if reason else None
        if has_turn and not grace_s:
            self.members.end_epoch(reason, message.run)
        elif has_turn is not None:
            again = partial(self._overdue, message.run, self.members.epoch, reason, has_turn)
            self.env.call_later(grace_s or HEAD_S, again)

    def _overdue(self, run: int, epoch: int, reason: str, had_turn: bool) -> None:
        """A run should have ended; `had_turn` if its devices worked at it when this was planned."""
        if epoch != self.members.epoch:
            return
        has_turn = self._has_turn(run)
        if has_turn and had_turn:
            self.members.end_epoch(reason, run)
        elif has_turn is not None:
            self.env.call_later(HEAD_S, partial(self._overdue, run, epoch, reason, has_turn))

    @handles(msg.EpochEnded)
    def _epoch_ended(self, sender: Address, message: msg.EpochEnded) -> None:
        for task in self.launches.values():
            task.happened(LaunchEvent.LOSE)
            if self.env.recorder.on:
                self.members.record(task)
        self.launches.clear()
        self._reporting.clear()
