"""Knows the island's epoch and hosts, and numbers everything that hosts are sent.

Each host takes launches, discards and copies strictly in the order of their numbers
(`pw.devices.host.lanes` says what it may enqueue earlier), so any two collectives meet in the same
order everywhere (G1). A host that misses a number, or cannot do the
same as the rest of its gang, reports it, and the island leaves its epoch.

An order to a large gang is one message for all hosts, and goes down a tree (`pw.core.messages.trees`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from pw.core import messages as msg
from pw.core.actors.actor import Env, Part, handles
from pw.core.ids import CONTROL, RESOURCES, Address, client_of, executor_of
from pw.core.recorder import LAUNCHED
from pw.sched.island.launch_states import RunHere, SegmentTask
from pw.sched.island.lease_states import LeaseTable
from pw.sched.island.numbers import Gang, Numbers


@dataclass(slots=True)
class GangDiscard:
    """Arrays that all hosts of a gang may drop."""

    arrays: list[int] = field(default_factory=list)
    programs: list[int] = field(default_factory=list)
    clients: list[int] = field(default_factory=list)


@dataclass(eq=False, repr=False)
class Members(Part):
    """The hosts of one island, in its epoch."""

    env: Env
    island: str
    trees: msg.Trees = msg.TREES
    epoch: int = field(default=0, init=False)
    hosts: tuple[str, ...] = field(default=(), init=False)
    compiles_apart: bool = field(default=False, init=False)
    """True if other processes compile for these hosts."""
    _number: int = field(default=-1, init=False)
    """Number of the island's name at the recorder; -1 before it is needed."""
    _numbers: Numbers = field(default_factory=Numbers, init=False)
    drops: dict[tuple[str, ...] | Gang, GangDiscard] = field(default_factory=dict, init=False)
    """Arrays that each gang may drop, collected during a turn; a large gang is one key, without a step for each
    host."""

    @handles(msg.IslandFormed)
    def _formed(self, sender: Address, message: msg.IslandFormed) -> None:
        self.epoch = message.epoch
        self.compiles_apart = message.compiles_apart
        self._set_hosts(message.hosts)

    @handles(msg.EpochEnded)
    def _epoch_ended(self, sender: Address, message: msg.EpochEnded) -> None:
        self._set_hosts(())
        self.drops.clear()

    def _set_hosts(self, hosts: tuple[str, ...]) -> None:
        self.hosts = hosts
        self._numbers = Numbers(hosts)

    @property
    def has_trees(self) -> bool:
        """Whether orders to large gangs here go down a tree."""
        return len(self.hosts) > self.trees.over

    def include(self, hosts: tuple[str, ...]) -> bool:
        """Whether all these hosts are members; messages of an earlier epoch name others."""
        if len(hosts) > self.trees.over:
            return self._numbers.gang(hosts) is not None
        return self._numbers.include(hosts)

    def is_current(self, epoch: int, sender: Address) -> bool:
        """Return whether a message is from a member in this epoch; count it as stale if not."""
        if epoch == self.epoch and sender.node in self._numbers:
            return True
        self.env.count("messages_stale")
        return False

    def next_number(self, host: str) -> int:
        """Take a host's next number."""
        return self._numbers.take(host)

    def send_launch(
        self, here: RunHere, segment: int, hosts: tuple[str, ...], reporters: int
    ) -> list[int]:
        """Send each host of a gang its launch, and return the numbers of the first `reporters`.

        The launches that are alike are made and encoded once.
        """
        gang = self._large(hosts) if len(hosts) > self.trees.over else None
        if gang is not None:
            spans = self._send_all(gang, self._launch(here, segment, gang), reporters)
            return [msg.at_position(spans, position)[1] for position in range(reporters)]
        numbers: list[int] = []
        alike: dict[tuple[int, bool, bool], msg.Launch] = {}
        for index, host in enumerate(hosts):
            sequence = self._numbers.take(host)
            is_first = host not in here.introduced
            report = index < reporters
            if report:
                numbers.append(sequence)
            key = (sequence, is_first, report)
            launch = alike.get(key)
            if launch is None:
                launch = alike[key] = self._launch(here, segment, host, sequence, report)
            elif is_first:
                here.introduced.add(host)
            self.env.send(executor_of(host), launch)
        return numbers

    def _launch(
        self, here: RunHere, segment: int, to: str | Gang, sequence: int = 0, report: bool = False
    ) -> msg.Launch:
        """Return a launch for a host or a large gang; the first one of a run has its arguments."""
        arguments = None
        if segment != msg.CANCELLED and to not in here.introduced:
            here.introduced.add(to)
            arguments = here.arguments
        return msg.Launch(self.epoch, sequence, here.run, here.program, segment, arguments, report)

    def _large(self, hosts: tuple[str, ...]) -> Gang | None:
        """Return the gang of these hosts, if orders to it go down a tree."""
        return self._numbers.gang(hosts) if len(hosts) > self.trees.over else None

    def _send_all(
        self, gang: Gang, order: msg.Launch | msg.Discard, reporters: int = 0
    ) -> tuple[msg.Span, ...]:
        """Send an order to the first hosts of a large gang, which pass it on; return all numbers."""
        fan, spans = self.trees.fan, self._numbers.take_all(gang)
        message = msg.GangOrder(self.epoch, spans, fan, reporters, order)
        for position in msg.children_of(-1, fan, len(gang.hosts)):
            self.env.send(executor_of(gang.hosts[position]), message)
        return spans

    def drop_on(self, hosts: tuple[str, ...]) -> GangDiscard:
        """Return what these hosts are told at the end of this turn to drop, for more to be added."""
        gang = self._large(hosts) or hosts
        drop = self.drops.get(gang)
        if drop is None:
            drop = self.drops[gang] = GangDiscard()
        return drop

    def send_drops(self, leases: LeaseTable) -> None:
        """Send each host one message; hosts that drop the same share it, encoded once.

        The known launches of a lease come before it. Gangs with a lease that is being closed wait. A large gang
        without leases gets a message of its own.
        """
        of_hosts: defaultdict[str, list[GangDiscard]] = defaultdict(list)
        waiting: dict[tuple[str, ...] | Gang, GangDiscard] = {}
        behind: dict[str, int] = {}
        for gang, drop in self.drops.items():
            hosts = gang.hosts if isinstance(gang, Gang) else gang
            launches = leases.behind(hosts) if leases.holders else {}
            if launches is None:
                waiting[gang] = drop
                continue
            if not launches and isinstance(gang, Gang):
                self._send_all(gang, self._discard([drop]))
                continue
            behind |= launches
            for host in hosts:
                of_hosts[host].append(drop)
        self.drops = waiting
        alike: dict[tuple[int, ...], msg.Discard] = {}
        for host, drops in of_hosts.items():
            if host not in self._numbers:
                continue
            sequence, after = self.next_number(host), behind.get(host, 0)
            key = (sequence, after, *map(id, drops))
            discard = alike.get(key)
            if discard is None:
                discard = alike[key] = self._discard(drops, sequence, after)
            self.env.send(executor_of(host), discard)

    def _discard(
        self, drops: Sequence[GangDiscard], sequence: int = 0, after: int = 0
    ) -> msg.Discard:
        return msg.Discard(
            self.epoch,
            sequence,
            tuple([array for drop in drops for array in drop.arrays]),
            tuple([program for drop in drops for program in drop.programs]),
            tuple([client for drop in drops for client in drop.clients]),
            after,
        )

    def record(self, task: SegmentTask, ended_s: float = 0.0) -> None:
        """Record a launch, ended or not; call it only while the recorder is on."""
        recorder = self.env.recorder
        if self._number < 0:
            self._number = recorder.name(self.island)
        here = task.here
        recorder.add(
            LAUNCHED,
            here.queued_s,
            ended_s,
            here.run,
            task.segment,
            self._number,
            task.launched_s,
            task.device_time_us,
        )

    def end_epoch(self, reason: str, run: int = 0) -> None:
        """Have the island leave its epoch, for a reason that may name the function of a run."""
        client = client_of(run)
        self.env.send(RESOURCES, msg.EndEpoch(self.island, self.epoch, reason, client))

    @handles(msg.CallEnded)
    def _call_ended(self, sender: Address, message: msg.CallEnded) -> None:
        """Pass a host's message on to the rest of its gang."""
        if self.is_current(message.epoch, sender):
            for host in message.gang:
                if host != sender.node and host in self._numbers:
                    self.env.send(executor_of(host), message)

    @handles(msg.LaunchGap)
    def _gap(self, sender: Address, message: msg.LaunchGap) -> None:
        """A host missed a number, so its gangs can no longer keep one order."""
        self.env.count("launch_gaps")
        if self.is_current(message.epoch, sender):
            self.end_epoch(f"host {sender.node} has not got all the work that it was sent")

    @handles(msg.GangBroken)
    def _gang_broken(self, sender: Address, message: msg.GangBroken) -> None:
        """A host cannot do the same as its gang, so the epoch ends before the hosts diverge."""
        self.env.count("gangs_broken")
        if self.is_current(message.epoch, sender):
            if message.error is not None:
                refused = msg.RunRefused(message.run, message.error, message.results)
                self.env.send(CONTROL, refused)
            words = f"host {sender.node} cannot go on with the others: {message.reason}"
            self.end_epoch(words, message.run)
