"""A simulated cluster: the production actors of a controller and of all hosts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

from pw.core.actors.actor import Actor, Env, handles
from pw.core.ids import CONTROLLER, RESOURCES, Address, run_name
from pw.core.messages import (
    CoordinationStarted,
    GangOrder,
    IslandInfo,
    StartCoordination,
    StopCoordination,
    at_position,
    size_of,
)
from pw.core.rights import NO_BOUNDS, Rights, TenantRights
from pw.core.tenants import Claims
from pw.core.tickets import Tickets
from pw.sched.cluster.manager import ResourceManager
from pw.sched.control.controller import Controller
from pw.sched.island.policy import POLICIES
from pw.sched.island.residency import IDLE_S
from pw.sched.island.scheduler import IslandScheduler
from pw.testing.sim.accounts import SimAccounts
from pw.testing.sim.census import held
from pw.testing.sim.events import EventLog
from pw.testing.sim.host import SimHost, Site
from pw.testing.sim.looping import LENDING
from pw.testing.sim.names import Editions
from pw.testing.sim.node import SimNode
from pw.testing.sim.quotas import INJECTED, random_rights
from pw.testing.sim.shapes import lay_out
from pw.testing.sim.world import World

SECRET = b"simulated"
CLIENT_NUMBERS = 1000
"""Distance between the first client numbers of two starts of the controller."""
STARTS = 0.25
"""Share of clusters whose controller expects islands."""


class _Services(Actor):
    """Coordination services that are up after a moment."""

    def __init__(self, env: Env, node: SimNode) -> None:
        super().__init__(env)
        self._node = node
        self._random = node.world.streams("services")

    @handles(StartCoordination)
    def _start(self, sender: Address, message: StartCoordination) -> None:
        answer = CoordinationStarted(message.island, message.epoch, "simulated:1", "")
        send: Callable[[], None] = lambda: self.env.send(RESOURCES, answer)  # noqa: E731
        self._node.world.after(self._random.uniform(1e-3, 3e-2), self._node.call, send)

    @handles(StopCoordination)
    def _stop(self, sender: Address, message: StopCoordination) -> None:
        """There is nothing to give back."""


IDLE_TIMES_S = (0.2, 2.0, IDLE_S)
"""Times after which idle arrays go to files, in seconds."""


class SimCluster(Site):
    """Controller and hosts; clients are made by the workload."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        random = world.streams("cluster")
        self.policy = random.choice(sorted(POLICIES))
        self.rights = NO_BOUNDS
        if world.profile.divided or world.profile.many:
            self.policy = "share"
        if world.profile.divided:
            shares = {"single": 2.0, "visitor": 16.0}
            self.rights = TenantRights(named={n: Rights(share=s) for n, s in shares.items()})
        if world.profile.quotas:
            self.rights = random_rights(world.streams("quotas"))
            world.ledger.injected[INJECTED] += 1
        self.schedulers: dict[str, IslandScheduler] = {}
        self.numbers_apart = CLIENT_NUMBERS
        self.claims = Claims(SECRET)
        self.given_up: set[int] = set()
        """Numbers of slices whose island clients have given up."""
        self.deals: dict[int, Any] = {}
        """Handovers by which users came to their imported arrays (`pw.testing.sim.handovers`), by array."""
        self.editions = Editions()
        """What users have published under names, and seen of it."""
        self.editions.watch(self)
        self.launched: list[tuple[float, int, int]] = []
        """Time, run and segment of each launch, if users record timelines."""
        self.accounts = SimAccounts(self)
        self.users: list[Any] = []
        """Users, for those that hand arrays to each other."""
        self.expected_islands = 0
        """Number of islands that each controller waits for at first."""
        self.starts = 0
        """Number of starts of the controller."""
        if world.profile.device_memory_bytes or world.profile.slice_memory:
            world.ledger.injected["memory is short"] += 1
        self.islands: dict[str, list[SimHost]] = {}
        self._spares: dict[int, list[str]] = {}
        left = world.profile.hosts
        while left:
            size = min(left, random.choice((1, 2, 2, 3, 4)))
            left -= size
            island = f"island-{len(self.islands)}"
            devices = random.choice((1, 2, 2, 4))
            members = [
                SimHost(self, f"{island}-h{rank}", island, size, devices) for rank in range(size)
            ]
            self.islands[island] = members
            self.hosts += members
            spare = None
            if random.random() < world.profile.spares:
                anywhere = random.random() < 0.5
                spare = SimHost(
                    self, f"spare-of-{island}", "" if anywhere else island, 0, devices, spare=True
                )
                self.hosts.append(spare)
                self._spares.setdefault(devices, []).append(spare.name)
            if world.profile.shapes:
                lay_out(world.streams("grids"), members, spare)
        start = world.streams("beginning")
        if start.random() < STARTS:
            self.expected_islands = start.randint(1, len(self.islands))
        self._start_controller()
        for host in self.hosts:
            world.after(random.uniform(0.0, 0.05), host.start)

    def kill_controller(self) -> None:
        """Kill the controller; only its address stays."""
        if self.node.alive:
            self.node.die(seen=True)
            self.schedulers.clear()

    def restart_controller(self) -> None:
        """Start another controller at the address of the last one, unless that lives."""
        if not self.node.alive:
            self.world.trace.add((self.world.now_s, CONTROLLER, None, "is started again"))
            self._start_controller()

    def _start_controller(self) -> None:
        self.starts += 1
        self.node = node = SimNode(self.world, CONTROLLER, self.starts, CONTROLLER)
        tickets = Tickets(SECRET + bytes((self.starts,)))
        schedulers = self.schedulers = {}

        def spawn(island: str) -> None:
            schedulers[island] = node.add(
                f"scheduler/{island}",
                lambda env: IslandScheduler(
                    env,
                    island,
                    POLICIES[self.policy](),
                    lending=LENDING,
                    trees=self.trees,
                    counts_tenants=self.rights.have_file,
                    replace_factor=self.world.profile.replace_stragglers or math.inf,
                ),
            )
            schedulers[island].residency.small_bytes = 0
            schedulers[island].residency.idle_s = self.world.streams("idle").choice(IDLE_TIMES_S)
            for act in self.on_start["scheduler"]:
                act(schedulers[island])

        resources = node.add(
            "resources",
            lambda env: ResourceManager(
                env,
                tickets.public,
                self.claims,
                self.expected_islands,
                busy=lambda island: schedulers[island].busy() if island in schedulers else {},
            ),
        )
        node.add("services", lambda env: _Services(env, node))

        def status() -> tuple[IslandInfo, ...]:
            return resources.status({n: s.work for n, s in schedulers.items()})

        self.status = status
        self.resources = resources

        def in_flight() -> set[str]:
            return {run_name(number) for number in self.controller.runs.in_flight}

        self.events = EventLog(self.world, in_flight) if self.world.profile.events else None
        self.controller = node.add(
            "controller",
            lambda env: Controller(
                env,
                tickets,
                ("sim", "sim"),
                self.policy,
                spawn,
                status,
                lambda: dict(node.counters),
                first_client=1 + (self.starts - 1) * self.numbers_apart,
                events=self.events,
                claims=self.claims,
                rights=self.rights,
                take_spent=lambda client: (
                    one for each in schedulers.values() for one in each.spending.take(client)
                ),
                account_sink=self.accounts,
                plan_moves=resources.plan_moves,
                destinations=resources.destinations,
            ),
        )
        for act in self.on_start["controller"]:
            act(self.controller)

    def receivers(self, sender: Address, to: Address, order: GangOrder) -> list[str]:
        """Return the gang of an order that leaves the scheduler, once for all of its hosts."""
        island = sender.actor.partition("/")[2]
        if sender.node != CONTROLLER or island not in self.schedulers:
            return []
        hosts = self.schedulers[island].members.hosts
        gang = [hosts[at_position(order.spans, at)[0]] for at in range(size_of(order.spans))]
        return gang if to.node == gang[0] else []

    def hosts_of(self, island: str) -> list[str]:
        """Return the names of an island's hosts and of the spares that may join it."""
        members = self.islands[island]
        return [host.name for host in members] + self._spares.get(members[0].devices, [])

    def formed(self) -> bool:
        """Whether all islands are ready, but for those that a host has left for good."""
        if not self.node.alive:
            return False
        ready = {status.name for status in self.status() if status.state == "ready"}
        expected = {
            island
            for island, members in self.islands.items()
            if not any(host.finished for host in members)
        }
        return ready >= expected

    def members(self) -> list[SimHost]:
        """Return the running hosts that are in the epoch that the controller knows."""
        epochs = {
            host: scheduler.members.epoch
            for scheduler in self.schedulers.values()
            for host in scheduler.members.hosts
        }
        return [
            host
            for host in self.hosts
            if host.node is not None
            and not host.node.paused
            and host.executor.order.epoch == epochs.get(host.name)
        ]

    def stopped_until_s(self) -> float:
        """Return when the last process that was stopped goes on, in simulated seconds."""
        nodes = [self.node, *(host.node for host in self.hosts if host.node)]
        return max(node.paused_until_s for node in nodes)

    def census(self) -> Counter[str]:
        """Count what all actors hold; it must be nothing when all clients have left."""
        counts: Counter[str] = Counter()
        for host in self.hosts:
            for what, count in host.census().items():
                counts[f"{host.name} {what}"] += count
        for actor in (self.controller, self.resources, *self.schedulers.values()):
            name = getattr(actor, "island", type(actor).__name__)
            counts += held(name, actor)
        return +counts
