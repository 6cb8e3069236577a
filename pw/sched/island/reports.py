"""Reports the state of an island's scheduler, and notices that it makes no progress."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice

from pw.core import messages as msg
from pw.core.actors.actor import Env, Part, handles
from pw.core.actors.watchdog import LookForStall, Watchdog
from pw.core.ids import CONTROL, Address, serial_of
from pw.sched.island.in_flight import InFlight
from pw.sched.island.launch_states import LaunchState, SegmentTask
from pw.sched.island.members import Members
from pw.sched.island.programs import IslandPrograms
from pw.sched.island.queues import Queues

WORK_TOLD = 8
"""Number of launches and programs of a kind that a report has: those that have waited longest."""


@dataclass(eq=False, repr=False)
class Reports(Part):
    """Reports on one island."""

    env: Env
    island: str
    members: Members
    programs: IslandPrograms
    in_flight: InFlight
    queues: Queues
    watchdog: Watchdog

    @handles(LookForStall)
    def _look(self, sender: Address, timer: LookForStall) -> None:
        if self.watchdog.stalled(bool(self.in_flight.launches or self.queues.runs)):
            self.env.send(CONTROL, msg.Stalled(self.island))

    @handles(msg.ExplainIsland)
    def _explain(self, sender: Address, message: msg.ExplainIsland) -> None:
        launched = [
            task
            for index, task in enumerate(self.in_flight.launches.values())
            if index < WORK_TOLD or task.here.run == message.run
        ]
        heads = [queue.tasks[0] for queue in self.queues.busy.values() if queue.tasks]
        waiting = [task for task in heads if isinstance(task, SegmentTask)]
        report = msg.IslandReport(
            message.request,
            self.island,
            self.members.hosts,
            self.watchdog.quiet_s,
            len(self.in_flight.launches),
            self.queues.count,
            tuple(map(self._work, launched)),
            tuple(map(self._work, waiting[:WORK_TOLD])),
            tuple(
                msg.InstallReport(number, program.names.program, tuple(sorted(program.compiling)))
                for number, program in islice(self.programs.compiling(), WORK_TOLD)
            ),
        )
        self.env.send(sender, report)

    def _work(self, task: SegmentTask) -> msg.WorkReport:
        """Report on a launch that is in flight, or next of its client."""
        names = task.here.installed.names
        shards = names.shards.get(task.segment, {})
        is_launched = task.state is LaunchState.IN_FLIGHT
        return msg.WorkReport(
            task.here.run,
            task.segment,
            names.program,
            names.segments.get(task.segment, ()),
            task.hosts,
            tuple(shards.get(host, ()) for host in task.hosts),
            self.env.now_s() - task.launched_s if is_launched else -1.0,
            () if is_launched else waits_for(task),
            tuple(sorted(task.awaits)),
        )


def waits_for(head: SegmentTask) -> tuple[str, ...]:
    """Return what the launch at the head of a client's queue waits for."""
    reasons = []
    reservation = head.here.reservation
    if head.awaits:
        arrays = ", ".join(str(serial_of(array)) for array in sorted(head.awaits))
        reasons.append(f"the upload of its arguments (array {arrays})")
    if head.unlaunched:
        producers = ", ".join(map(str, sorted(head.unlaunched)))
        reasons.append(f"part {producers} of the same program to be launched on another island")
    if head.state is LaunchState.REFUSED:
        reasons.append("its end: its program is in quarantine")
    if reservation is not None and not reservation.is_admitted:
        if reservation.short is not None and reservation.short.tenant:
            reasons.append(f"device memory that its tenant {reservation.short.tenant!r} may have")
        elif reservation.tried_at >= 0:
            reasons.append("device memory that others hold")
        elif reservation.islands:
            names = ", ".join(reservation.islands)
            reasons.append(f"all of its islands ({names}) to have room for it")
    if not reasons:
        launched = max((group.launched for group in head.footprint.groups), default=0)
        ahead = f"work that was launched before where it runs, some of which must end first ({launched} there)"
        reasons.append(ahead if launched else "its turn; nothing is in flight where it runs")
    return tuple(reasons)
