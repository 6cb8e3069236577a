"""The gang scheduler of one island: one total order of launches for all its hosts.

Theory of operation. Each client has a queue of tasks on the island (`queues`). At the end of each
turn the scheduler launches all that may go (`launching`): a policy picks among the clients whose
oldest launch may go, and that launch is sent to all hosts of its gang with the host's next number
(`members`). Hosts take launches strictly in that order, and a gang of several hosts passes nothing,
so any two collectives meet in the same order everywhere (G1). The states of a launch, and what it
waits for (G3, G4), are in `launch_states`.
Launches in flight are bounded, so that the policy decides and not the queue (G2, `window`). Where
devices have a memory limit, a run goes only when it is admitted (G5, `admission`).

The cost of a launch does not depend on the number of shards: one send for each host of the gang, and for
a gang of many hosts one for each of a few, which pass it on (`pw.core.messages.trees`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from pw.core.actors.actor import Actor, Env, handles
from pw.core.actors.watchdog import STALL_S, Watchdog
from pw.core.ids import Address
from pw.core.messages import (
    TREES,
    CancelRun,
    ClientUse,
    EpochEnded,
    IslandWork,
    RemoveClient,
    Submit,
    Trees,
)
from pw.core.sharding import DeviceAddress
from pw.sched.island.admission import Admission
from pw.sched.island.in_flight import InFlight
from pw.sched.island.launch_holds import LaunchHolds
from pw.sched.island.launching import Launcher
from pw.sched.island.lease_states import LeaseTable
from pw.sched.island.leases import LENDING, LaunchLeases, Lending
from pw.sched.island.members import Members
from pw.sched.island.memory_report import most_bytes
from pw.sched.island.policy import Policy
from pw.sched.island.programs import IslandPrograms
from pw.sched.island.quarantine import Quarantine
from pw.sched.island.queues import Queues
from pw.sched.island.reports import Reports
from pw.sched.island.residency import Residency
from pw.sched.island.spending import Spending
from pw.sched.island.stragglers import Stragglers
from pw.sched.island.window import Window


class IslandScheduler(Actor):
    """Orders the work of all clients on one island."""

    def __init__(
        self,
        env: Env,
        island: str,
        policy: Policy,
        stall_s: float = STALL_S,
        lending: Lending = LENDING,
        trees: Trees = TREES,
        *,
        counts_tenants: bool = False,
        replace_factor: float = math.inf,
    ) -> None:
        super().__init__(env)
        self.island = island
        self.policy = policy
        self._was_busy = False
        self._watchdog = watchdog = Watchdog(env, stall_s)
        self.window = window = Window()
        self.members = members = Members(env, island, trees)
        self.quarantine = quarantine = Quarantine()
        self.admission = admission = Admission(env, island, counts_tenants)
        self.programs = programs = IslandPrograms(
            env, island, members, window, admission, quarantine
        )
        self.queues = queues = Queues(env, members, policy, window, quarantine, admission, programs)
        self._lent = table = LeaseTable()
        self.spending = spending = Spending(queues)
        self.in_flight = in_flight = InFlight(
            env, members, policy, window, quarantine, admission, queues, watchdog, table, spending
        )
        self.residency = residency = Residency(env, members, admission, queues, table)
        admission.keeps_off = residency.keeps_off
        self._launcher = launcher = Launcher(
            env,
            members,
            policy,
            window,
            admission,
            programs,
            in_flight,
            queues,
            watchdog,
            table,
            residency,
        )
        self.leases = leases = LaunchLeases(
            env, members, admission, programs, in_flight, queues, launcher, table, lending
        )
        self._holds = holds = LaunchHolds(env, island, queues, leases)
        self.stragglers = stragglers = Stragglers(env, island, members, programs, replace_factor)
        reports = self.reports = Reports(
            *(env, island, members, programs, in_flight, queues, watchdog),
            *(policy, admission, table),
        )
        self.compose(
            *(
                members,
                in_flight,
                queues,
                admission,
                programs,
                quarantine,
                launcher,
                leases,
                reports,
                spending,
                residency,
                holds,
                stragglers,
            ),
            order={
                Submit: (LaunchLeases, Queues),
                CancelRun: (InFlight, Queues),  # which removes the launches
                RemoveClient: (
                    Spending,
                    LaunchLeases,
                    Queues,
                    Admission,
                ),  # which forgets what they have reserved
                EpochEnded: (InFlight, Queues, LaunchLeases),
            },
        )
        env.recorder.unfinished[env.address.actor] = self._record_unfinished

    @property
    def queued(self) -> int:
        """Number of queued launches."""
        return self.queues.count

    @property
    def launched(self) -> int:
        """Number of launches in flight."""
        return len(self.in_flight.launches)

    @property
    def device_s(self) -> float:
        """Device time of all launches that have ended, in seconds: of each device, in all."""
        return self.in_flight.device_s

    @property
    def work(self) -> IslandWork:
        """What the island does, for its status."""
        slow = {one.host: one for one in self.stragglers.slow()}
        return IslandWork(self.queued, self.launched, self.device_s, slow)

    def tenants_memory(self) -> Iterator[tuple[str, int]]:
        """Yield each tenant that is counted, with its bytes on the device of the island where it has most."""
        memory = self.admission.memory
        return iter(()) if memory is None else most_bytes(memory)

    def busy(self) -> dict[DeviceAddress, float]:
        """Return the device time of the last minute of each device that has some, in seconds."""
        in_flight = self.in_flight
        return in_flight.load.of_devices(in_flight.launches.values(), self.env.now_s())

    def uses(self) -> Iterator[tuple[int, ClientUse]]:
        """Yield what each client waits for and has had on this island."""
        now_s = self.env.now_s()
        return ((client, queue.use(now_s)) for client, queue in self.queues.clients.items())

    @handles(EpochEnded)
    def _host_lost(self, sender: Address, message: EpochEnded) -> None:
        """Handled before the parts forget what the host was doing."""
        self.window.clear()
        if message.host:
            compiling = [n for n, p in self.programs.compiling() if message.host in p.compiling]
            running = self.in_flight.programs_on(message.host)
            compiles_apart = self.members.compiles_apart
            self.quarantine.host_lost(compiling, running, compiles_apart=compiles_apart)

    def _record_unfinished(self) -> None:
        """Record the launches that have not ended, for a timeline that ends now."""
        for tasks in (self.in_flight.launches.values(), *self.queues.runs.values()):
            for task in tasks:
                self.members.record(task)

    def turn_ended(self) -> None:
        """Launch all that may go, then send what hosts may drop; then lend."""
        self._launcher.launch_all()
        is_busy = bool(self.in_flight.launches or self.queues.runs)
        if is_busy:
            if not self._was_busy:
                self._watchdog.went_on()
            self._watchdog.watch()
        self._was_busy = is_busy
        if self.members.drops:
            self.members.send_drops(self._lent)
        self.leases.turn_ended()
        if self._holds.asked:
            self._holds.turn_ended()
        if not self.programs.installed:  # then no footprint refers to a group any more
            self.window.tidy()
