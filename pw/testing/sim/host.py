"""A simulated host: its supervisor, and the runtime child that the supervisor starts again and again.

The child has the production actors of a host over simulated devices. The supervisor keeps the
replicas that a child gives it, for the next child; a crash of the machine loses them. A supervisor
may be slow, or stopped: its child goes on, and after the child's end the next one has to wait.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from pw.core.errors import ErrorReport
from pw.core.functions.prefetch import Ahead
from pw.core.ids import CONTROLLER, client_of
from pw.core.messages import TREES, FormIsland, IslandJoined, IslandJoinFailed, RegisterHost, Trees
from pw.devices.host.coordinator import ShardCoordinator
from pw.devices.host.executor import HostExecutor
from pw.devices.host.leases import EARLY_BYTES
from pw.devices.host.replica_memory import Replica
from pw.devices.host.store import ObjectStore
from pw.testing.sim.bulk import SimBulk
from pw.testing.sim.census import held
from pw.testing.sim.devices import SimBackend
from pw.testing.sim.feeding import Feeds
from pw.testing.sim.gangs import Gangs
from pw.testing.sim.node import SimNode
from pw.testing.sim.sick import Sickness
from pw.testing.sim.spill_files import SimFiles
from pw.testing.sim.world import World

_Kept = Callable[[ErrorReport | None], None]
_Joined = Callable[[IslandJoined | IslandJoinFailed], None]

SUPERVISOR_STOPPED = "supervisor stopped"
"""Name of a fault; checkpoints may fail because of it."""


DIRECT = 0.5
"""Share of the launches that may go the short way, and do (`pw.devices.host.direct`)."""

SMALL_TREES = (Trees(1, 1), Trees(1, 2), Trees(2, 1))
"""Trees of simulated islands, which have few hosts."""


class Site:
    """The parts that all hosts of a cluster share."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.gangs = Gangs(world)
        self.groups = Groups(self)
        self.hosts: list[SimHost] = []
        self.sickness = Sickness(world, lambda: self.hosts)
        self.gangs.sickness = self.sickness
        self.planes: dict[int, SimBulk] = {}
        self.streams: dict[bytes, Ahead[Any]] = {}
        """Streams of users, with how far they are, by their artifacts (`pw.testing.sim.feeding`)."""
        self.have_files: dict[str, bool] = {}
        """Whether the hosts of each island write arrays to files."""
        self.trees = world.streams("trees").choice((TREES, *SMALL_TREES))
        self.on_start: dict[str, list[Callable[[Any], None]]] = defaultdict(list)
        """Functions of each new `host`'s incarnation, `scheduler` or `controller` before it sends anything."""


@dataclass(eq=False)
class SimHost:
    """One host of an island (see `pw.devices.host.membership.HostProcess`)."""

    cluster: Site
    name: str
    island: str
    island_hosts: int
    devices: int
    spare: bool = False
    coords: tuple[tuple[int, ...], ...] = ()
    """Coordinates of the devices; empty if it says none."""
    wraps: tuple[int, ...] = ()
    incarnation: int = 0
    node: SimNode | None = None
    replicas: list[Replica] = field(default_factory=list)
    """Replicas that the supervisor has taken last; each child begins with them."""
    _sent: list[tuple[SimNode, list[Replica], _Kept | None]] = field(default_factory=list)
    """Replicas on their way to the supervisor, which takes them even if the child has ended."""
    stopped_until_s: float = 0.0
    """Time at which the supervisor goes on, if it is stopped, in seconds."""
    finished: bool = False
    """True if the host has left for good."""
    back_s: float | None = None
    """Seconds after which another worker begins with its files, once it is told to end."""
    _leaving: bool = False

    def __post_init__(self) -> None:
        self.world = self.cluster.world
        self._random = self.world.streams(f"host/{self.name}")
        self._keeping = self.world.streams(f"keeping/{self.name}")
        self._early = self.world.streams(f"early launches/{self.name}")
        self._direct = self.world.streams(f"direct/{self.name}")
        self._tiers = self.world.streams(f"tiers/{self.name}")
        slow = self._random.random() < self.world.profile.slow_hosts
        self.slowness = self._random.uniform(3.0, 30.0) if slow else 1.0
        if slow:
            self.world.ledger.injected["slow host"] += 1
        self._fixed_port = self._random.random() < 0.3
        spill_bytes = self.world.profile.spill_bytes
        self.spill_bytes = spill_bytes and self._tiers.choice((spill_bytes, spill_bytes, 64 << 10))
        files = self.world.streams(f"files/{self.island}").random() < self.world.profile.spill_files
        self.has_files = self.cluster.have_files.setdefault(self.island, files)

    # --- the supervisor ------------------------------------------------------------------------------

    def start(self) -> None:
        """Start a runtime child, unless one lives."""
        if self.node is not None or self.finished:
            return
        if self.stopped_until_s > self.world.now_s:
            self.world.at(self.stopped_until_s, self.start)
            return
        self._take()
        self.incarnation += 1
        self._leaving = False
        endpoint = self.name if self._fixed_port else f"{self.name}#{self.incarnation}"
        node = SimNode(self.world, self.name, self.incarnation, endpoint, self.slowness)
        self.node = node
        node.network.introduce(CONTROLLER, CONTROLLER)
        self.backend = backend = SimBackend(node, self.cluster.gangs)
        backend.feeds = Feeds(backend, self.cluster.streams)
        backend.test_outcome = self.cluster.sickness.outcome
        self.bulk = bulk = SimBulk(node, self.cluster.planes)
        registration = RegisterHost(
            self.island,
            self.island_hosts,
            self.devices,
            "sim",
            endpoint,
            self.incarnation,
            spare=self.spare or self.incarnation > 1,
            coords=self.coords,
            wraps=self.wraps,
            is_to_end=self.back_s is not None,
        )
        self.files = SimFiles(node, backend)
        counters: Callable[[], dict[str, int]] = lambda: dict(node.counters)  # noqa: E731
        replicas = list(self.replicas)
        self.store = node.add(
            "store",
            lambda env: ObjectStore(
                env,
                *(backend, bulk, counters, replicas),
                keep=self.keep,
                spill_bytes=self.spill_bytes,
                spill_files=self.files if self.has_files else None,
            ),
        )
        self.store.tiers.small_bytes = 0
        self.coordinator = node.add("coordinator", lambda env: ShardCoordinator(env, backend, bulk))
        self.executor = node.add(
            "executor",
            lambda env: HostExecutor(
                env,
                registration,
                self,
                backend,
                self.store,
                self.coordinator,
                tree_over=self.cluster.trees.over,
            ),
        )
        self.executor.direct.may = lambda: self._direct.random() < DIRECT
        self.executor.leases.room_bytes = self._early.choice((EARLY_BYTES, EARLY_BYTES, 0))
        for act in self.cluster.on_start["host"]:
            act(self)
        self.executor.register()
        if self.back_s is not None:
            self.executor.ask_to_leave()

    def restart_later(self, delay_s: float) -> None:
        """Start a child after a while."""
        self.world.after(delay_s, self.start)

    def crash(self, *, machine: bool) -> None:
        """Kill the child; with the machine, the supervisor's replicas are lost too."""
        if machine:
            self.replicas = []
            self._sent.clear()
        node, self.node = self.node, None
        if node is not None:
            node.die(seen=not machine)
            self.backend.close()

    def stop_supervisor(self, length_s: float) -> None:
        """The supervisor alone does nothing for a while."""
        self.stopped_until_s = max(self.stopped_until_s, self.world.now_s + length_s)

    def tell_to_end(self, within_s: float, back_s: float) -> None:
        """The host is to end; another one, with what it leaves in files, comes after a while."""
        self.back_s = back_s
        if self.node is not None and self.stopped_until_s <= self.world.now_s:
            self.executor.ask_to_leave()
        self.world.after(within_s, self._end_at_last)

    def _end_at_last(self) -> None:
        """The time to end is over: the supervisor kills the child."""
        if self.back_s is not None and not self.finished:
            self.world.ledger.note("notice too short", self.name)
            self.crash(machine=False)
            self._come_back()

    def _come_back(self) -> None:
        assert self.back_s is not None
        self.world.after(self.back_s, self._begin_anew)
        self.back_s, self.finished = None, True

    def _begin_anew(self) -> None:
        self.finished = False
        self.start()

    def _take(self) -> None:
        """The supervisor takes the replicas that were sent."""
        if self.stopped_until_s > self.world.now_s:
            self.world.at(self.stopped_until_s, self._take)
            return
        sent, self._sent = self._sent, []
        for node, replicas, kept in sent:
            self.replicas = replicas
            if kept is not None and self.node is node:
                node.call(partial(kept, None))

    # --- from the child ------------------------------------------------------------------------------

    def join(self, form: FormIsland, joined: _Joined) -> None:
        """Join the epoch's group; all its hosts must come."""
        self.cluster.groups.join(self, form, joined)

    def keep(self, replicas: Sequence[Replica], kept: _Kept) -> None:
        """Write copies of arrays, send them when they are written, and say when they were taken."""
        assert self.node is not None
        written_s = self._keeping.uniform(0.0005, 0.02) * self.slowness
        self.world.after(written_s, self._written, self.node, list(replicas), kept)

    def _written(self, node: SimNode, replicas: list[Replica], kept: _Kept) -> None:
        if self.node is not node or self._leaving:
            return
        if node.paused:
            self.world.at(node.paused_until_s, self._written, node, replicas, kept)
            return
        self._send(node, replicas, kept)

    def hand_over(self, replicas: Iterable[Replica]) -> None:
        """Keep replicas for the next child; this one is about to end."""
        assert self.node is not None
        self._send(self.node, replicas, None)

    def _send(self, node: SimNode, replicas: Iterable[Replica], kept: _Kept | None) -> None:
        copied = [one._replace(data=one.data.copy()) for one in replicas]
        self._sent.append((node, copied, kept))
        self.world.after(self._keeping.uniform(0.0001, 0.01), self._take)

    def stop(self, reason: str, error: ErrorReport | None) -> None:
        """End this incarnation; a new one is started after a moment."""
        self._leave(reason, self._random.uniform(0.05, 0.6))

    def finish(self, reason: str) -> None:
        """End for good."""
        self.finished = True
        self._leave(reason, 0.0)
        if self.back_s is not None:
            self._come_back()

    def _leave(self, reason: str, restart_s: float) -> None:
        node = self.node
        if node is None or self._leaving:
            return
        self._leaving = True
        self.world.trace.add((self.world.now_s, self.name, None, f"leaves: {reason}"))
        self.world.after(1e-3, self._end, node, restart_s)

    def _end(self, node: SimNode, restart_s: float) -> None:
        if self.node is not node:
            return  # it has crashed meanwhile
        if node.paused:
            self.world.at(node.paused_until_s, self._end, node, restart_s)
            return
        node.close()
        self.node = None
        self.backend.close()
        self.restart_later(restart_s)

    def held_by(self, client: int) -> list[int]:
        """Arrays of a client in this host's store."""
        arrays = list(self.store.arrays) if self.node is not None else []
        return [array for array in arrays if client_of(array) == client]

    def census(self) -> dict[str, int]:
        """Return the number of objects that this host holds, by kind; all must be 0 in the end."""
        if self.node is None:
            return {}
        counts = held("store", self.store) + held("executor", self.executor)
        counts += held("coordinator", self.coordinator)
        counts["landings"] += self.bulk.landings
        counts["installed"] += self.backend.installed
        counts["buffers"] += self.backend.buffers
        counts["files"] += len(self.files)
        return dict(counts)


class Groups:
    """Forms the group of an epoch (the role of jax.distributed)."""

    def __init__(self, cluster: Site) -> None:
        self._cluster = cluster
        self._world = cluster.world
        self._waiting: dict[tuple[str, int], list[tuple[SimHost, SimNode, FormIsland, _Joined]]]
        self._waiting = {}
        self._random = self._world.streams("groups")

    def join(self, host: SimHost, form: FormIsland, joined: _Joined) -> None:
        """Wait for all hosts of the epoch, or for too long."""
        key = (form.island, form.epoch)
        members = self._waiting.setdefault(key, [])
        assert host.node is not None
        members.append((host, host.node, form, joined))
        if len(members) == len(form.hosts):
            del self._waiting[key]
            delay_s = self._random.uniform(0.005, 0.1)
            fails = self._random.random() < self._world.profile.join_failures
            fails = fails and not self._world.calm
            if fails:
                self._world.ledger.note("join failed", *form.hosts)
            for member in members:
                self._world.after(delay_s, self._joined, *member, fails)
        else:
            self._world.after(10.0, self._give_up, key, host, host.node, form, joined)

    def _joined(
        self, host: SimHost, node: SimNode, form: FormIsland, joined: _Joined, failed: bool
    ) -> None:
        if not node.alive:
            return
        if failed:
            error = ErrorReport("PlacementError", "the group could not be joined", host.name)
            node.call(lambda: joined(IslandJoinFailed(form.island, form.epoch, error)))
            return
        self._cluster.gangs.joined(host.backend, form.epoch)
        memory_bytes = self._world.profile.device_memory_bytes or None
        answer = IslandJoined(
            *(form.island, form.epoch, "simulated", host.devices, memory_bytes, ()),
            *(host.spill_bytes, host.has_files),
        )
        node.call(lambda: joined(answer))

    def _give_up(
        self, key: tuple[str, int], host: SimHost, node: SimNode, form: FormIsland, joined: _Joined
    ) -> None:
        members = self._waiting.get(key)
        if members is not None and any(member[1] is node for member in members):
            members[:] = [member for member in members if member[1] is not node]
            self._joined(host, node, form, joined, True)
