"""Lends hosts to the client that is alone there, so that its launches do not pass the scheduler.

Theory of operation. A client that waits for each result needs the scheduler for nothing: no other client
wants its hosts. After some such runs the scheduler lends them: from its place in their launch order on, the
client numbers its launches there. It sends them to the hosts itself, and tells the controller of each run as
always, a little later. Here such a run is in flight at once, with the numbers that it has.

The scheduler alone ends a lease, and asks the hosts, never the client (`lease_states`). The answers of the
hosts say what was launched. What one of them has taken, or the client has told of, the others get from here, so
also a client that dies between two sends leaves whole gangs. Later launches of the client reach no host: its
runs come from the controller as always, and are queued. Only then the scheduler goes on with its own
launches on these hosts, so there is one order on each of them (G1).

- G2: a lease has a window like that of a client that is alone. It slides with what has ended.
- G3, G4: only runs that stay on the lent hosts and read nothing that is under way are lent. While islands of
  a client are away, it gets no lease: what its earlier runs make may come later than its later runs.
- G5: where memory is limited, room for launches is set aside before (`lent_memory`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from pw.core import messages as msg
from pw.core.actors.actor import Env, Part, handles
from pw.core.ids import Address, client_of, executor_of, session_of
from pw.core.sharding import DeviceAddress
from pw.sched.island.admission import Admission
from pw.sched.island.client_queue import ClientQueue
from pw.sched.island.in_flight import InFlight
from pw.sched.island.launch_states import SegmentTask
from pw.sched.island.launching import Launcher
from pw.sched.island.lease_states import LaunchLease, LeaseEvent, LeaseState, LeaseTable
from pw.sched.island.lent_memory import LentMemory, can_be_lent, shared_arrays
from pw.sched.island.members import Members
from pw.sched.island.memory import DeviceMemory
from pw.sched.island.programs import IslandPrograms
from pw.sched.island.queues import Queues
from pw.sched.island.window import SEGMENTS, TIME_US

SHORT_US = 10_000.0
"""Device time of the longest run that is lent, in microseconds: the hop that it saves is a tenth of a
millisecond."""
PROGRAMS = 256
"""Number of programs of a lease, at most."""
AHEAD = 4
"""Number of launched runs from which on a client pipelines, which the scheduler's frames make cheap."""
FEW = 64
"""Number of launches below which a lease has not been worth it."""
DOUBLED = 7
"""Number of times that the count of runs before a lease is doubled, at most."""


class Lending(NamedTuple):
    """Conditions under which hosts are lent."""

    after: int = 8
    """Number of runs of a client, one after the other, before its lease."""
    alone_s: float = 20e-3
    """Seconds for which no other client has wanted the hosts: one that comes more often would close each
    lease."""
    ahead: int = SEGMENTS
    """Number of runs for which memory is set aside, at most."""


LENDING = Lending()


@dataclass(slots=True)
class _Habit:
    """The newest runs of a client, as far as they could have been launched under a lease."""

    hosts: tuple[str, ...] = ()
    count: int = 0
    programs: dict[int, msg.Submit] = field(default_factory=dict)
    last_run: int = 0
    doubled: int = 0
    """Number of leases in a row that have not been worth it."""
    rest: int = 0
    """Number of these runs that come before the next lease, in a row or not."""


@dataclass(eq=False, repr=False)
class LaunchLeases(Part):
    """The launch leases of one island."""

    env: Env
    members: Members
    admission: Admission
    programs: IslandPrograms
    in_flight: InFlight
    queues: Queues
    launcher: Launcher
    table: LeaseTable
    lending: Lending
    _numbers: int = 0
    indices: int = 0
    """Index of the next lease's first launch: launches of one epoch have different numbers."""
    _habits: dict[int, _Habit] = field(default_factory=dict)
    _nodes: dict[int, str] = field(default_factory=dict)
    """Nodes of the sessions of clients, by number."""
    _lines: dict[int, str] = field(default_factory=dict)
    """Nodes of the lines of clients that have lines, by number."""
    _due: set[int] = field(default_factory=set)
    """Numbers of clients that may get a lease at the end of this turn."""

    # --- lending -------------------------------------------------------------------------------------

    @handles(msg.AddClient)
    def _client_added(self, sender: Address, message: msg.AddClient) -> None:
        self._nodes[message.client] = message.node
        if message.line:
            self._lines[message.client] = message.line

    @handles(msg.Submit)
    def _submitted(self, sender: Address, message: msg.Submit) -> None:
        """Handled before it is queued: close the leases that are in its way, and note what the client does."""
        client = client_of(message.run)
        for hosts in message.hosts:
            self.close_on(hosts, client)
        queue = self.queues.clients.get(client)
        if queue is None or client not in self._lines:
            return
        habit = self._habits.get(client)
        if habit is None:
            habit = self._habits[client] = _Habit()
        habit.last_run = message.run
        if queue.tasks or queue.launched > AHEAD or not self.is_simple(message):
            habit.count = 0
            return
        hosts = tuple(dict.fromkeys(host for hosts in message.hosts for host in hosts))
        if len(hosts) > msg.TREES.over:
            habit.count = 0
            return
        if habit.hosts != hosts:
            habit.hosts, habit.count = hosts, 0
            habit.programs.clear()
        habit.count += 1
        habit.programs[message.program] = message
        if len(habit.programs) > PROGRAMS:
            del habit.programs[next(iter(habit.programs))]
        habit.rest -= 1
        if habit.count >= self.lending.after and habit.rest <= 0:
            self._due.add(client)

    def is_simple(self, submit: msg.Submit) -> bool:
        """Whether such a run can be launched without the scheduler."""
        program = self.programs[submit.program]
        return (
            submit.is_whole
            and not submit.is_timed
            and not submit.has_gaps
            and program.is_plain
            and not program.compiling
            and program.error is None
            and all(len(hosts) <= msg.TREES.over for hosts in submit.hosts)
            and len(submit.segments) <= msg.STEPS
            and self._time_us(submit) <= SHORT_US
        )

    def _time_us(self, submit: msg.Submit) -> float:
        """Return the device time of a run; infinite while it is not known."""
        estimates_us = self.programs[submit.program].estimates_us
        return sum(estimates_us.get(segment, float("inf")) for segment in submit.segments)

    def turn_ended(self) -> None:
        """Lend hosts to clients that are alone there, and let holders launch more; after hosts were told
        what to drop, because that makes room.
        """
        unwanted, self.table.unwanted = self.table.unwanted, []
        for lease in unwanted:
            self._close(lease, "spill")
        if self.admission.memory is not None:
            if self.table.holders and self.admission.are_bounds_short:
                self._close_short()
            self._widen()
        if self.table.sliding:
            self._slide()
        if self._due:
            self._lend_all()

    def _lend_all(self) -> None:
        due, self._due = self._due, set()
        for client in due:
            queue, habit = self.queues.clients.get(client), self._habits.get(client)
            if queue is None or habit is None or habit.count < self.lending.after:
                continue
            if queue.held_but is not None:
                continue
            if queue.tasks:  # the run waits for an upload that it reads
                self._due.add(client)
                continue
            if not self.members.include(habit.hosts) or not self.table.are_free(habit.hosts):
                continue
            if self.admission.are_bounds_short and self.admission.is_short(client):
                continue
            if self._is_alone(queue, habit.hosts):
                self._lend(client, habit)

    def _is_alone(self, mine: ClientQueue, hosts: tuple[str, ...]) -> bool:
        """Whether no other client wants one of these hosts."""
        now_s = self.env.now_s()
        for queue in self.queues.busy.values():
            if queue is mine or not (
                queue.tasks or queue.launched or now_s < queue.came_s + self.lending.alone_s
            ):
                continue
            footprint = queue.footprint
            if footprint is None or not hosts_of(footprint.sites).isdisjoint(hosts):
                return False
        return True

    def _lend(self, client: int, habit: _Habit) -> None:
        programs = {
            number: submit for number, submit in habit.programs.items() if self.is_simple(submit)
        }
        if not programs:
            return
        longest_us = max(1.0, *map(self._time_us, programs.values()))
        window = max(2, min(SEGMENTS, int(TIME_US / longest_us)))
        memory, room = self.admission.memory, None
        if memory is not None and (room := self._room(memory, client, programs, window)) is None:
            habit.count = 0
            return
        self._numbers += 1
        lease = LaunchLease(
            self._numbers,
            client,
            habit.hosts,
            {
                number: msg.LentProgram(
                    number,
                    self.programs[number].on_hosts,
                    tuple(msg.steps_of(submit, host) for host in habit.hosts),
                    0 if room is None else room.charges[number],
                )
                for number, submit in programs.items()
            },
            self.indices,
            window,
            memory=room,
        )
        room_bytes = 0 if room is None else room.granted_bytes
        self.table.numbered[lease.number] = lease
        epoch, node, line = self.members.epoch, self._nodes[client], self._lines[client]
        for at, host in enumerate(lease.hosts):
            self.table.holders[host] = lease
            number = self.members.next_number(host)
            own = tuple(one.on(at) for one in lease.programs.values())
            lend = msg.Lend(epoch, number, lease.number, client, line, own, lease.first, room_bytes)
            self.env.send(executor_of(host), lend)
        lent = msg.Lent(
            lease.number,
            epoch,
            lease.hosts,
            tuple(lease.programs.values()),
            lease.first,
            lease.until,
            habit.last_run,
            room_bytes,
            () if memory is None else shared_arrays(memory, client),
        )
        self.env.send(session_of(node), lent)
        self.env.count("leases")

    def _room(
        self, memory: DeviceMemory, client: int, programs: Collection[int], window: int
    ) -> LentMemory | None:
        """Set memory aside for a lease; None if that cannot be."""
        if memory.tiers.have(client) or not can_be_lent(memory, programs):
            return None
        room = LentMemory(memory, client, programs, min(window, self.lending.ahead))
        room.widen()
        if not room.is_enough:
            room.end()
            return None
        return room

    # --- launches of clients -------------------------------------------------------------------------

    @handles(msg.SubmitLeased)
    def _launched(self, sender: Address, message: msg.SubmitLeased) -> None:
        """A client has launched a run; if no host has taken it, queue it."""
        submit, lease = message.submit, self.table.numbered.get(message.lease)
        if lease is None or lease.client != client_of(submit.run):
            self._queue(submit)
            return
        if submit.program not in lease.programs:  # no host takes it
            self._close(lease, "own_run")
        is_over = lease.state is LeaseState.OVER
        if lease.state is LeaseState.OPEN or (is_over and message.index < lease.final):
            tasks = self.queues.leased(submit)
            self._take(lease, message, tasks)
        else:
            self._queue(submit)
            if not is_over:
                lease.waiting.append(message)
        if is_over and lease.noticed >= lease.final:
            self.end(lease)

    def _queue(self, submit: msg.Submit) -> None:
        """Queue a run like those that the controller sends."""
        self.env.count("leased_runs_queued")
        self._submitted(self.env.address, submit)
        self.queues.submit(self.env.address, submit)

    def _take(
        self, lease: LaunchLease, message: msg.SubmitLeased, tasks: Sequence[SegmentTask]
    ) -> None:
        """Count a launched run as in flight."""
        submit, index = message.submit, message.index
        lease.noticed = max(lease.noticed, index + 1)
        if not tasks:  # the client has left, or the run was cancelled
            self.table.forget_early()
            return
        program = lease.programs[submit.program]
        launch = msg.LeasedLaunch(
            self.members.epoch,
            lease.number,
            index,
            submit.run,
            submit.program,
            program.install,
            (),
            submit.args,
            submit.results,
        )
        lease.launched(launch, len(tasks))
        if lease.memory is not None and (reservation := tasks[0].here.reservation) is not None:
            claim = lease.memory.launched(submit.program, submit.args, submit.results)
            self.admission.launched_itself(reservation, claim)
        tasks[0].here.lease = lease
        steps: Counter[str] = Counter()
        early: list[tuple[str, int]] = []
        for task in tasks:
            numbers = []
            for at, host in enumerate(task.hosts):
                number = msg.number_of(index, steps[host])
                steps[host] += 1
                if at < task.reporters:
                    numbers.append(number)
                    early.append((host, number))
            self.launcher.launched(task, numbers)
        for key in early:
            finished = self.table.early.pop(key, None)
            if finished is not None:
                self.in_flight.finished(key, finished)

    def _slide(self) -> None:
        """Launches have ended, so clients may launch more."""
        for lease in dict.fromkeys(self.table.sliding):
            node = self._nodes.get(lease.client)
            if lease.state is LeaseState.OPEN and node is not None:
                lease.until = lease.first + lease.ended + lease.window
                room_bytes = 0 if lease.memory is None else lease.memory.granted_bytes
                window = msg.LeaseWindow(lease.number, lease.until, room_bytes)
                self.env.send(session_of(node), window)
        self.table.sliding.clear()

    def _widen(self) -> None:
        """Memory may be free, so clients may launch more."""
        for lease in dict.fromkeys(self.table.holders.values()):
            if lease.state is LeaseState.OPEN and lease.memory is not None and lease.memory.widen():
                room_bytes = lease.memory.granted_bytes
                for host in lease.hosts:
                    number = self.members.next_number(host)
                    wider = msg.WidenLease(self.members.epoch, number, lease.number, room_bytes)
                    self.env.send(executor_of(host), wider)
                self.table.sliding.append(lease)

    # --- closing -------------------------------------------------------------------------------------

    def close_on(self, hosts: Iterable[str], client: int) -> None:
        """Close the leases of these hosts: a client has sent a run."""
        if self.table.holders:
            for host in hosts:
                lease = self.table.holders.get(host)
                if lease is not None:
                    self._close(lease, "own_run" if lease.client == client else "other_client")

    def close_of(self, client: int, cause: str) -> None:
        """Close the leases of a client."""
        for lease in list(self.table.holders.values()):
            if lease.client == client:
                self._close(lease, cause)

    def _close(self, lease: LaunchLease, cause: str) -> None:
        if lease.state is not LeaseState.OPEN:
            return
        lease.happened(LeaseEvent.CLOSE)
        self.env.count(f"leases_ended_by_{cause}")
        close = msg.CloseLease(self.members.epoch, lease.number, lease.noticed)
        for host in lease.hosts:
            self.env.send(executor_of(host), close)

    def _close_short(self) -> None:
        """Close the leases of clients whose tenant or slice has other work that waits for memory."""
        for lease in list(self.table.holders.values()):
            if self.admission.is_short(lease.client):
                self._close(lease, "memory")

    @handles(msg.LeaseClosed)
    def _closed(self, sender: Address, message: msg.LeaseClosed) -> None:
        if not self.members.is_current(message.epoch, sender):
            return
        lease = self.table.numbered.get(message.lease)
        if lease is None or lease.state is LeaseState.OVER or sender.node not in lease.hosts:
            self.env.count("messages_stale")
        elif lease.state is LeaseState.OPEN:
            self._close(lease, "host")  # the host answers once more, now that the others do
        else:
            lease.answers[sender.node] = message.taken
            for launch in message.launches:
                lease.launches.setdefault(launch.index, launch)
            if len(lease.answers) == len(lease.hosts):
                self.agree(lease)

    def agree(self, lease: LaunchLease) -> None:
        """Close a lease: all hosts take the launches that one host has taken or the client has told of."""
        lease.happened(LeaseEvent.AGREE)
        lease.final = max(lease.noticed, *lease.answers.values())
        epoch = self.members.epoch
        for at, host in enumerate(lease.hosts):
            for index in range(lease.answers[host], lease.final):
                launch = lease.launches.get(index)
                program = None if launch is None else lease.programs.get(launch.program)
                if launch is None or program is None:
                    self.members.end_epoch(f"host {host} has not got all launches of a lease")
                    return
                self.env.count("leased_launches_passed_on")
                full = msgspec.structs.replace(launch, steps=program.steps[at])
                self.env.send(executor_of(host), full)
            number = self.members.next_number(host)
            end = msg.EndLease(epoch, number, lease.number, lease.final)
            self.env.send(executor_of(host), end)
            del self.table.holders[host]
        self.indices = max(self.indices, lease.final)
        if lease.memory is not None:
            unknown = range(lease.noticed, lease.final)
            lease.memory.keep([lease.program_of(index) for index in unknown])
        habit = self._habits.get(lease.client)
        if habit is not None:
            is_short = lease.final - lease.first < FEW
            habit.doubled = min(habit.doubled + 1, DOUBLED) if is_short else 0
            habit.count, habit.rest = 0, self.lending.after << habit.doubled
        for message in lease.waiting:
            if message.index < lease.final:
                self._take(lease, message, self.queues.take_run(message.submit.run))
        lease.waiting.clear()
        if lease.is_left:
            self._forget(lease)
        elif lease.noticed >= lease.final:
            self.end(lease)

    def _forget(self, lease: LaunchLease) -> None:
        """The client will not tell of any more launches."""
        self.end(lease)
        self.table.forget_early()

    def end(self, lease: LaunchLease) -> None:
        """End a lease of which all launches are known."""
        self.table.numbered.pop(lease.number, None)
        if lease.memory is not None:
            lease.memory.end()

    @handles(msg.RemoveClient)
    def _client_removed(self, sender: Address, message: msg.RemoveClient) -> None:
        """Handled before the queue of the client is dropped."""
        self._nodes.pop(message.client, None)
        self._lines.pop(message.client, None)
        self._habits.pop(message.client, None)
        for lease in [one for one in self.table.numbered.values() if one.client == message.client]:
            lease.is_left = True
            if lease.state is LeaseState.OVER:
                self._forget(lease)
            else:
                self._close(lease, "leaving")

    @handles(msg.HolderCutOff)
    def _cut_off(self, sender: Address, message: msg.HolderCutOff) -> None:
        """The host may not know that there was a link, so it does not close the lease."""
        lease = self.table.holders.get(message.host)
        if lease is not None and lease.client == message.client:
            self._close(lease, "lost_line")

    @handles(msg.PeerSilent)
    def _holder_silent(self, sender: Address, message: msg.PeerSilent) -> None:
        """Close the leases of a client that is stopped: it may have sent a launch to some hosts only."""
        for lease in list(self.table.holders.values()):
            if self._nodes.get(lease.client) == message.node:
                self._close(lease, "silence")

    @handles(msg.CopyArrays)
    def _copied(self, sender: Address, message: msg.CopyArrays) -> None:
        """Copies have their place among the launches of the scheduler."""
        hosts = {host for host, _ in (*message.copies, *message.files)}
        for host, lease in list(self.table.holders.items()):
            if lease.client == message.client or host in hosts:
                self._close(lease, "copy")

    @handles(msg.InstallProgram)
    def _installed(self, sender: Address, message: msg.InstallProgram) -> None:
        """Other devices, or other code."""
        if message.again:
            return
        if (habit := self._habits.get(client_of(message.program))) is not None:
            habit.programs.pop(message.program, None)  # its runs may have other launches now
        for lease in list(self.table.holders.values()):
            if message.program in lease.programs:
                self._close(lease, "install")

    @handles(msg.EpochEnded)
    def _epoch_ended(self, sender: Address, message: msg.EpochEnded) -> None:
        self.table.clear()
        self.indices = 0
        self._due.clear()
        for habit in self._habits.values():
            habit.count = 0
            habit.programs.clear()


def hosts_of(sites: Iterable[object]) -> set[str]:
    """Return the hosts of sites, which are devices or hosts."""
    return {site.host if isinstance(site, DeviceAddress) else str(site) for site in sites}
