"""Takes what clients want from this island, and queues it until it can be launched.

Each client has one queue, in the order of its calls, so that it sees the effects of its own work in
that order. Other islands, and hosts by way of the controller, report the inputs that launches wait
for.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from pw.core import messages as msg
from pw.core.actors.actor import Env, Part, handles
from pw.core.ids import CONTROL, Address, client_of
from pw.sched.island.admission import Admission
from pw.sched.island.client_queue import ClientQueue, CopyTask, DiscardTask, Task
from pw.sched.island.launch_states import LaunchEvent, RunHere, SegmentTask
from pw.sched.island.members import Members
from pw.sched.island.policy import Policy
from pw.sched.island.programs import IslandPrograms
from pw.sched.island.quarantine import Quarantine
from pw.sched.island.window import SiteGroup, Stake, Window


@dataclass(eq=False, repr=False)
class Queues(Part):
    """The queues of all clients of one island."""

    env: Env
    members: Members
    policy: Policy
    window: Window
    quarantine: Quarantine
    admission: Admission
    programs: IslandPrograms
    clients: dict[int, ClientQueue] = field(default_factory=dict, init=False)
    busy: dict[int, ClientQueue] = field(default_factory=dict, init=False)
    """Clients that have work here, had some a moment ago, or are expected; most names have none."""
    runs: dict[int, list[SegmentTask]] = field(default_factory=dict, init=False)
    """Queued launches of each run."""
    _uploads: dict[int, list[SegmentTask]] = field(default_factory=dict, init=False)
    """Launches that wait for each upload."""
    _arrivals: int = field(default=0, init=False)
    # --- clients -------------------------------------------------------------------------------------

    @handles(msg.AddClient)
    def _client_added(self, sender: Address, message: msg.AddClient) -> None:
        stake = Stake(message.client, message.share, message.tenant, message.tenant_share)
        queue = self.clients.get(message.client)
        if queue is None:
            self.clients[message.client] = ClientQueue(stake, message.priority)
        else:
            queue.stake, queue.priority = stake, message.priority

    @handles(msg.RemoveClient)
    def _client_removed(self, sender: Address, message: msg.RemoveClient) -> None:
        queue = self.clients.pop(message.client, None)
        if queue is None:
            return
        self.busy.pop(message.client, None)
        for run in [run for run in self.runs if client_of(run) == message.client]:
            self._withdraw(self.runs.pop(run))
        for array in [array for array in self._uploads if client_of(array) == message.client]:
            del self._uploads[array]
        self.policy.forget(queue.stake, self.window.accounts())
        if self.members.hosts:
            self.members.drop_on(self.members.hosts).clients.append(message.client)

    @handles(msg.EpochEnded)
    def _epoch_ended(self, sender: Address, message: msg.EpochEnded) -> None:
        """Nothing that is queued can be launched; the controller has told the clients."""
        for tasks in self.runs.values():
            for task in tasks:
                task.happened(LaunchEvent.LOSE)
                if self.env.recorder.on:
                    self.members.record(task)
        self.runs.clear()
        self._uploads.clear()
        for queue in self.clients.values():
            for queued in queue.tasks:
                if isinstance(queued, DiscardTask):
                    self.programs.uninstall(queued.program, queued.install)
            queue.clear()

    # --- runs ----------------------------------------------------------------------------------------

    @handles(msg.Submit)
    def submit(self, sender: Address, message: msg.Submit) -> None:
        """Queue the launches of a run."""
        now_s = self.env.now_s()
        queue, tasks = self._launches_of(message, now_s)
        if queue is None:
            return
        for array in tasks[0].awaits:
            self._uploads.setdefault(array, []).append(tasks[0])
        if self.quarantine.strikes:
            refusal = self.quarantine.refusal(message.program)
            if refusal is not None:
                tasks[0].happened(LaunchEvent.REFUSE)
                self.env.send(CONTROL, msg.RunRefused(message.run, refusal))
        if self.policy.keeps_accounts:
            self._settle_accounts(queue, tasks, now_s)
        self.runs[message.run] = list(tasks)
        self.busy[queue.stake.client] = queue
        queue.submitted(tasks, now_s)

    def leased(self, message: msg.Submit) -> list[SegmentTask]:
        """Return the launches of a run that its client has launched; none if it has left."""
        now_s = self.env.now_s()
        queue, tasks = self._launches_of(message, now_s)
        if queue is not None:
            if self.policy.keeps_accounts:
                self._settle_accounts(queue, tasks, now_s)
            self._launched_itself(queue, tasks, now_s)
        return tasks

    def take_run(self, run: int) -> list[SegmentTask]:
        """Take a run out of its queue, because its client has launched it; it may have been cancelled."""
        tasks = self.runs.pop(run, [])
        queue = self.clients.get(client_of(run))
        if queue is not None and tasks:
            queue.cancel(run)
            self._launched_itself(queue, tasks, self.env.now_s())
        return tasks

    def _launched_itself(
        self, queue: ClientQueue, tasks: Sequence[SegmentTask], now_s: float
    ) -> None:
        for task in tasks:
            task.estimate_us = task.here.installed.estimates_us.get(task.segment, 0.0)
            if self.policy.keeps_accounts:
                self.policy.launched(queue.stake, task.footprint.accounts, task.estimate_us)
        self.busy[queue.stake.client] = queue
        queue.launched_itself(tasks, now_s)

    def _launches_of(
        self, message: msg.Submit, now_s: float
    ) -> tuple[ClientQueue | None, list[SegmentTask]]:
        """Return the queue of a run's client, and its launches; None if its client is not here."""
        queue = self.clients.get(client_of(message.run))
        if queue is None or not all(map(self.members.include, message.hosts)):
            self.env.count("messages_stale")
            return None, []
        program = self.programs[message.program]
        here = RunHere(
            message.run,
            message.program,
            queue.stake,
            msg.Arguments(message.args, message.results),
            self.admission.reservation(message),
            now_s,
            message.is_timed,
            program,
        )
        tasks = []
        for index, segment in enumerate(message.segments):
            hosts = message.hosts[index]
            producers = {producer for _, producer in message.depends[index]}
            task = SegmentTask(
                here,
                segment,
                hosts,
                program.footprints.get(segment) or self.window.footprint(hosts),
                message.notify[index],
                producers,
                set(producers),
                set(message.awaits) if index == 0 else set(),
                self._arrival(),
                message.reporters[index],
            )
            tasks.append(task)
        return queue, tasks

    def _settle_accounts(
        self, queue: ClientQueue, tasks: Sequence[SegmentTask], now_s: float
    ) -> None:
        """Before these launches are queued, settle the past of the devices that they use."""
        groups = {group: None for task in tasks for group in task.footprint.groups}
        kept = queue.wants(now_s)
        fresh = [group for group in groups if group not in kept]
        if not fresh:
            return
        wanted: defaultdict[SiteGroup, set[str]] = defaultdict(set)
        for other in self.busy.values():
            if other is not queue:
                for group in other.wants(now_s):
                    wanted[group].add(other.stake.tenant)
        self.policy.idle(
            [group.account for group in fresh if not group.launched and group not in wanted]
        )
        if queue.oldest is None:
            for group in fresh:
                only = queue.stake.tenant not in wanted[group]
                self.policy.rejoin(queue.stake, group.account, only_of_tenant=only)

    @handles(msg.SegmentLaunched)
    def _producer_launched(self, sender: Address, message: msg.SegmentLaunched) -> None:
        for task in self.runs.get(message.run, ()):
            task.producer_launched(message.segment)

    @handles(msg.SegmentDone)
    def _producer_ended(self, sender: Address, message: msg.SegmentDone) -> None:
        for task in self.runs.get(message.run, ()):
            task.producer_ended(message.segment)

    @handles(msg.UploadEnded)
    def _upload_ended(self, sender: Address, message: msg.UploadEnded) -> None:
        for task in self._uploads.pop(message.array, ()):
            task.upload_ended(message.array)

    @property
    def count(self) -> int:
        """Number of queued launches."""
        return sum(len(tasks) for tasks in self.runs.values())

    def launched(self, task: SegmentTask) -> None:
        """A launch has been sent to its hosts: it is not queued any more."""
        run = task.here.run
        waiting = self.runs[run]
        waiting.remove(task)
        if not waiting:
            del self.runs[run]

    @handles(msg.CancelRun)
    def _cancel(self, sender: Address, message: msg.CancelRun) -> None:
        """Remove the queued launches of a run; tell the hosts that wait for their values."""
        tasks = self.runs.pop(message.run, ())
        if not tasks:
            return
        hosts = tuple(dict.fromkeys(host for task in tasks for host in task.hosts))
        self.members.send_launch(tasks[0].here, msg.CANCELLED, hosts, reporters=0)
        for task in tasks:
            for array in task.awaits:
                self._uploads[array].remove(task)
        self._withdraw(tasks)
        self.clients[client_of(message.run)].cancel(message.run)

    def _withdraw(self, tasks: Sequence[SegmentTask]) -> None:
        """Cancel the launches that are left of a run here."""
        for task in tasks:
            task.happened(LaunchEvent.CANCEL)
            if self.env.recorder.on:
                self.members.record(task)
        if (reservation := tasks[0].here.reservation) is not None:
            self.admission.withdraw(reservation, len(tasks))

    # --- discards and copies -------------------------------------------------------------------------

    @handles(msg.UninstallProgram)
    def _uninstall(self, sender: Address, message: msg.UninstallProgram) -> None:
        number = message.program
        install = self.programs[number].install
        task = DiscardTask((), (message.hosts,), number, install, self._arrival())
        self._enqueue(client_of(number), task)

    @handles(msg.CopyArrays)
    def _copy_arrays(self, sender: Address, message: msg.CopyArrays) -> None:
        task = CopyTask(message.copies, message.files, self._arrival())
        self._enqueue(message.client, task, first=message.first)

    @handles(msg.Release)
    def _release(self, sender: Address, message: msg.Release) -> None:
        task = DiscardTask(message.arrays, message.hosts, 0, 0, self._arrival())
        if not message.late:
            self._enqueue(message.client, task)
        elif (queue := self.clients.get(message.client)) is not None:
            self.busy[message.client] = queue
            queue.insert(task)

    def _enqueue(self, client: int, task: Task, *, first: bool = False) -> None:
        if (queue := self.clients.get(client)) is not None:
            self.busy[client] = queue
            (queue.tasks.appendleft if first else queue.tasks.append)(task)

    def rest(self, queue: ClientQueue) -> None:
        """Nothing is left to do for a client until its next task."""
        queue.habit.stayed_away()
        del self.busy[queue.stake.client]

    def _arrival(self) -> int:
        self._arrivals += 1
        return self._arrivals
