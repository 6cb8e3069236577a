"""A world of actors without sockets, threads or clocks: one seed decides everything that may vary.

Links deliver in order for each pair of nodes and in no order otherwise; a node empties its mailbox and
then ends its turn, as in production. Devices compute with numpy. A computation over several hosts
waits until all of them have reached it, and two that meet out of order fail the test (G1).
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from pw.core import messages as msg
from pw.core.accounts import AccountSink
from pw.core.actors.actor import Actor
from pw.core.errors import ErrorReport
from pw.core.ids import CONTROL, CONTROLLER, RESOURCES, SERVICES, Address
from pw.core.recorder import Recorder as Recordings
from pw.core.rights import NO_BOUNDS, TenantRights
from pw.core.tenants import OPERATOR
from pw.core.tickets import Tickets
from pw.devices.host.coordinator import ShardCoordinator
from pw.devices.host.executor import HostExecutor
from pw.devices.host.replica_memory import Replica
from pw.devices.host.store import ObjectStore
from pw.sched.cluster.manager import ResourceManager
from pw.sched.control.clients import Client
from pw.sched.control.controller import Controller
from pw.sched.island.policy import POLICIES
from pw.sched.island.scheduler import IslandScheduler
from tests.stages.fake_devices import FakeBackend, FakeBulk

TICKETS = Tickets(b"secret")


class Alarm:
    """A note in waiting."""

    def __init__(self, due_s: float, address: Address, note: object) -> None:
        self.due_s, self.address, self.note = due_s, address, note
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class FakeEnv:
    """One actor's door to the world."""

    def __init__(self, world: World, address: Address) -> None:
        self.world, self.address = world, address
        self.recorder = world.recorders[address.node]

    def send(self, to: Address, message: object) -> None:
        self.world.post(self.address, to, message)

    def now_s(self) -> float:
        return self.world.now_s

    def call_later(self, delay_s: float, note: object) -> Alarm:
        alarm = Alarm(self.world.now_s + delay_s, self.address, note)
        self.world.alarms.append(alarm)
        return alarm

    def introduce(self, node: str, endpoint: str) -> None:
        self.world.counters[f"introduced {node}"] += 1

    def tenant_of(self, node: str) -> str:
        return self.world.tenants.get(node, OPERATOR)

    def islands_of(self, node: str) -> tuple[str, ...]:
        return self.world.islands.get(node, ())

    def forget(self, node: str) -> None:
        self.world.counters[f"forgotten {node}"] += 1

    def log(self, level: str, event: str, **fields: object) -> None:
        self.world.logged.append((level, event))

    def audit(self, event: str, **fields: object) -> None:
        self.world.audited.append((event, fields))

    def count(self, counter: str, amount: int = 1) -> None:
        self.world.counters[counter] += amount


class Recorder(Actor):
    """Keeps what it receives."""

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        self.received: list[Any] = []

    def receive(self, sender: Address, message: object) -> None:
        self.received.append(message)

    def of(self, kind: type) -> list[Any]:
        return [message for message in self.received if type(message) is kind]


class Services(Recorder):
    """Coordination services that are up at once."""

    def receive(self, sender: Address, message: object) -> None:
        super().receive(sender, message)
        if isinstance(message, msg.StartCoordination):
            started = msg.CoordinationStarted(message.island, message.epoch, "here:1", "")
            self.env.send(RESOURCES, started)


class World:
    """All nodes, the links between them, and a seed."""

    def __init__(self, seed: int = 0) -> None:
        self.random = random.Random(seed)
        self.ways = random.Random(seed)
        """Chooses which of two equal ways a launch goes."""
        self.now_s = 0.0
        self.actors: dict[str, dict[str, Actor]] = {}
        self.dead: set[str] = set()
        self.stale: set[tuple[str, str]] = set()
        """Links to a process that has ended, of which the first node has not heard yet: what goes there
        reaches no process, whichever has the name by then."""
        self.mailboxes: defaultdict[str, deque[tuple[Address, Address, object]]] = defaultdict(
            deque
        )
        self.links: defaultdict[tuple[str, str], deque[tuple[Address, Address, object]]]
        self.links = defaultdict(deque)
        self.sent: list[tuple[Address, Address, Any]] = []
        self.alarms: list[Alarm] = []
        self.happenings: defaultdict[str, deque[Callable[[], None]]] = defaultdict(deque)
        """What will happen on a node, in this order: completions of its devices and transfers."""
        self.backends: dict[str, FakeBackend] = {}
        self.counters: Counter[str] = Counter()
        self.recorders: defaultdict[str, Recordings] = defaultdict(Recordings)
        self.logged: list[tuple[str, str]] = []
        self.audited: list[tuple[str, dict[str, object]]] = []
        self.tenants: dict[str, str] = {}
        """The tenants of nodes that are not the operator's."""
        self.islands: dict[str, tuple[str, ...]] = {}
        """The only islands that certificates of nodes allow."""
        self.bulk: dict[int, FakeBulk] = {}
        self.trees = msg.TREES
        """Which gangs have trees, for schedulers and hosts that are added later."""

    # --- nodes and messages --------------------------------------------------------------------------

    def add(self, address: Address, make: Callable[[Any], Any]) -> Any:
        actor = make(FakeEnv(self, address))
        self.actors.setdefault(address.node, {})[address.actor] = actor
        self.dead.discard(address.node)
        return actor

    def post(self, sender: Address, to: Address, message: object) -> None:
        self.sent.append((sender, to, message))
        if to.node == sender.node:
            self.mailboxes[to.node].append((sender, to, message))
        elif (sender.node, to.node) in self.stale or (
            to.node in self.dead and to.node != CONTROLLER  # it is dialled until a process answers
        ):
            self.counters["messages_lost"] += 1
        else:
            self.links[sender.node, to.node].append((sender, to, message))

    def to(self, address: Address, kind: type = object) -> list[Any]:
        """Every message of this kind sent to an address so far."""
        return [m for _, to, m in self.sent if to == address and isinstance(m, kind)]

    def drain(self, node: str) -> None:
        """Handle all of a node's mailbox, in turns."""
        mailbox = self.mailboxes[node]
        while mailbox:
            touched: dict[str, Actor] = {}
            while mailbox:
                sender, to, message = mailbox.popleft()
                target = self.actors.get(node, {}).get(to.actor)
                if target is None:
                    self.counters["messages_undeliverable"] += 1
                    continue
                touched[to.actor] = target
                target.receive(sender, message)
            for target in touched.values():
                target.turn_ended()

    def kill(self, node: str, reason: str = "killed") -> None:
        """A process dies: its last words may be lost, and every node hears of its end."""
        self.actors.pop(node, None)
        self.dead.add(node)
        self.stale = {link for link in self.stale if link[0] != node}
        self.mailboxes.pop(node, None)
        self.happenings.pop(node, None)
        self.backends.pop(node, None)
        self.alarms = [alarm for alarm in self.alarms if alarm.address.node != node]
        if CONTROLLER in self.dead:
            self.links.pop((node, CONTROLLER), None)  # it was still being dialled
        for other in list(self.actors):
            self.links.pop((other, node), None)
            if node == CONTROLLER and (other, node) in self.stale:
                continue  # it has not called that one: it still believes in the one before
            self.stale.add((other, node))
            link = self.links[node, other]
            while link and self.random.random() < 0.5:
                link.pop()
            for actor in self.actors[other]:
                link.append(
                    (Address(other, actor), Address(other, actor), msg.PeerLost(node, reason))
                )

    # --- time ----------------------------------------------------------------------------------------

    def step(self) -> bool:
        """Let one thing happen; False if nothing can."""
        ready: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        for (source, node), link in self.links.items():
            if link and node in self.actors:
                ready.append((self.deliver, (source, node)))
        ready += [(self._happen, (node,)) for node, queue in self.happenings.items() if queue]
        ready += [(self._work, (backend,)) for backend in self.backends.values() if backend.can_go]
        if not ready:
            return False
        action, args = self.random.choice(ready)
        action(*args)
        return True

    def deliver(self, source: str, node: str) -> None:
        link = self.links[source, node]
        for _ in range(min(len(link), self.random.choice((1, 1, 2, 5, 100)))):
            news = link.popleft()
            if isinstance(news[2], msg.PeerLost):
                self.stale.discard((node, news[2].node))
            self.mailboxes[node].append(news)
        self.drain(node)

    def _happen(self, node: str) -> None:
        self.happenings[node].popleft()()
        self.drain(node)

    def _work(self, backend: FakeBackend) -> None:
        backend.step()

    def settle(self, limit: int = 200_000) -> None:
        """Go on until nothing more can happen (alarms stay)."""
        for node in list(self.actors):
            self.drain(node)
        while self.step():
            limit -= 1
            assert limit, "the world does not come to rest"

    def steps(self, count: int) -> None:
        """Let some things happen."""
        for node in list(self.actors):
            self.drain(node)
        while count and self.step():
            count -= 1

    def wait(self, seconds: float) -> None:
        """Let time pass, and what it brings happen."""
        self.now_s += seconds
        due = [alarm for alarm in self.alarms if alarm.due_s <= self.now_s]
        self.alarms = [alarm for alarm in self.alarms if alarm.due_s > self.now_s]
        for alarm in due:
            if not alarm.cancelled:
                self.mailboxes[alarm.address.node].append(
                    (alarm.address, alarm.address, alarm.note)
                )
        self.settle()

    # --- the cluster ---------------------------------------------------------------------------------

    def controller(
        self,
        policy: str = "fifo",
        first_client: int = 1,
        credits_at_once: int = 1,
        island_status: Callable[[], tuple[msg.IslandInfo, ...]] = tuple,
        rights: TenantRights = NO_BOUNDS,
        account_sink: AccountSink | None = None,
    ) -> Controller:
        """The actors of a controller process; it keeps no credits, or no world would come to rest."""
        tickets = TICKETS if first_client == 1 else Tickets(first_client.to_bytes(4, "big"))
        self.resources = self.add(RESOURCES, lambda env: ResourceManager(env, tickets.public))
        self.services = self.add(SERVICES, Services)
        self.schedulers: dict[str, IslandScheduler] = {}

        def spawn(island: str) -> None:
            address = Address(CONTROLLER, f"scheduler/{island}")
            make = lambda env: IslandScheduler(  # noqa: E731
                env, island, POLICIES[policy](), trees=self.trees, counts_tenants=rights.have_file
            )
            self.schedulers[island] = self.add(address, make)

        versions = ("0", "0")
        self.control: Controller = self.add(
            CONTROL,
            lambda env: Controller(
                env,
                tickets,
                versions,
                policy,
                spawn,
                island_status,
                lambda: dict(self.counters),
                first_client=first_client,
                credits_at_once=credits_at_once,
                rights=rights,
                tenants_memory=lambda: (
                    one
                    for scheduler in self.schedulers.values()
                    for one in scheduler.tenants_memory()
                ),
                take_spent=lambda client: (
                    one
                    for scheduler in self.schedulers.values()
                    for one in scheduler.spending.take(client)
                ),
                account_sink=account_sink,
                destinations=self.resources.destinations,
            ),
        )
        return self.control

    def client(self, number: int) -> Client:
        """What the controller knows of a client."""
        client = self.control.sessions.get(number)
        assert client is not None
        return client

    def host(
        self, name: str, island: str, hosts: int = 1, devices: int = 1, **flags: bool
    ) -> FakeHost:
        """A host that registers and joins; the old one of that name must have been killed.

        `flags` are `spare` and `draining`, as in `RegisterHost`.
        """
        host = FakeHost(self, name, msg.RegisterHost(island, hosts, devices, "cpu", "", 1, **flags))
        host.executor.register()
        return host


class FakeAside:
    """A thread beside a host: what it does happens when the world likes."""

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name

    def call(self, work: Callable[[], Any], done: Callable[[Any], None]) -> None:
        """Work some time, and tell some time later."""
        happenings = self.world.happenings[self.name]

        def act() -> None:
            try:
                result = work()
            except Exception as error:  # noqa: BLE001 - as threads do
                result = error
            happenings.append(lambda: done(result))

        happenings.append(act)


class FakeHost:
    """The actors of one host over a fake device and bulk plane."""

    def __init__(
        self,
        world: World,
        name: str,
        registration: msg.RegisterHost,
        replicas: Sequence[Replica] = (),
    ) -> None:
        self.world, self.name, self.registration = world, name, registration
        self.stopped: list[str] = []
        self.finished: list[str] = []
        self.handed_over: list[Replica] = []
        self.keeps = True
        """The supervisor takes at once what it is sent; otherwise when `take` is called."""
        self._sent: list[tuple[list[Replica], Callable[[ErrorReport | None], None]]] = []
        self.backend = world.backends[name] = FakeBackend(world, name)
        self.bulk = FakeBulk(world, name)
        backend, bulk = self.backend, self.bulk
        self.store: ObjectStore = world.add(
            Address(name, "store"),
            lambda env: ObjectStore(
                env, backend, bulk, dict, replicas, FakeAside(world, name), self.keep
            ),
        )
        self.coordinator: ShardCoordinator = world.add(
            Address(name, "coordinator"), lambda env: ShardCoordinator(env, backend, bulk)
        )
        self.executor: HostExecutor = world.add(
            Address(name, "executor"),
            lambda env: HostExecutor(
                env,
                registration,
                self,
                backend,
                self.store,
                self.coordinator,
                tree_over=world.trees.over,
            ),
        )
        self.executor.direct.may = lambda: world.ways.random() < 0.5

    def join(self, form: msg.FormIsland, joined: Callable[[Any], None]) -> None:
        devices = self.registration.local_devices
        joined(msg.IslandJoined(form.island, form.epoch, "fake", devices, None))

    def stop(self, reason: str, error: ErrorReport | None) -> None:
        self.stopped.append(reason)

    def keep(self, replicas: Sequence[Replica], kept: Callable[[ErrorReport | None], None]) -> None:
        assert not self._sent, "one time after the other"
        self._sent.append((list(replicas), kept))
        if self.keeps:
            self.take()

    def take(self, error: ErrorReport | None = None) -> None:
        """The supervisor takes what it was sent, or it will not get it."""
        replicas, kept = self._sent.pop()
        if error is None:
            self.hand_over(replicas)
        kept(error)

    def hand_over(self, replicas: Iterable[Replica]) -> None:
        self.handed_over = [one._replace(data=one.data.copy()) for one in replicas]

    def finish(self, reason: str) -> None:
        self.finished.append(reason)

    def restart(self, **flags: bool) -> FakeHost:
        """The next incarnation, with what this one has handed over."""
        self.world.kill(self.name, "it is being restarted")
        registration = msgspec.structs.replace(self.registration, **flags)
        host = FakeHost(self.world, self.name, registration, self.handed_over)
        host.executor.register()
        return host

    def census(self) -> dict[str, int]:
        """All that a host may hold, which must be nothing in the end."""
        mine = {"installed": len(self.backend.installed), "landings": len(self.bulk.landings)}
        actors = self.executor.census() | self.store.census() | self.coordinator.census()
        return actors | mine
