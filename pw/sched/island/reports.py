"""Reports the state of an island's scheduler, and notices that it makes no progress."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice

from pw.core import messages as msg
from pw.core.actors.actor import Env, Part, handles
from pw.core.actors.watchdog import LookForStall, Watchdog
from pw.core.ids import CONTROL, Address
from pw.sched.island.admission import Admission
from pw.sched.island.forecast import Forecast, WaitingLaunch, obstacles
from pw.sched.island.in_flight import InFlight
from pw.sched.island.launch_states import LaunchState, SegmentTask
from pw.sched.island.lease_states import LeaseTable
from pw.sched.island.members import Members
from pw.sched.island.policy import Policy
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
    policy: Policy
    admission: Admission
    leases: LeaseTable

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

    def forecast(self) -> Forecast:
        """Forecast in which order the launches that wait go on."""
        return Forecast(
            self.policy, self.admission, self.in_flight, self.queues, self.leases, self.env.now_s()
        )

    @handles(msg.ListWaits)
    def _list_waits(self, sender: Address, message: msg.ListWaits) -> None:
        forecast = self.forecast()
        waits = tuple(map(self._wait, forecast.places))
        answer = msg.IslandWaits(message.request, self.island, waits, forecast.clients_left_out)
        self.env.send(sender, answer)

    def _wait(self, place: WaitingLaunch) -> msg.LaunchWait:
        task = place.task
        return msg.LaunchWait(
            task.here.run,
            task.here.installed.names.program,
            task.state is LaunchState.IN_FLIGHT,
            place.reasons,
            tuple(place.in_front.items()),
            place.unit,
            self.env.now_s() - task.here.queued_s,
            place.left_s,
            place.more,
        )

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
    if reasons := obstacles(head):
        return tuple(reasons)
    launched = max((group.launched for group in head.footprint.groups), default=0)
    ahead = f"work that was launched before where it runs, some of which must end first ({launched} there)"
    return (ahead if launched else "its turn; nothing is in flight where it runs",)
