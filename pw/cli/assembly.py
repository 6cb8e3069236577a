"""Puts actors together on nodes: the one place that knows all parts.

The daemons and the embedded cluster build the same actors from here. They differ in the network
and in the process around the actors. Each function imports the parts that it adds: a controller that
imported a host's parts, and a host that imported a controller's, would start 0.2 s later.
"""

from __future__ import annotations

import asyncio
import math
import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from pw.core import messages as msg
from pw.core.accounts import AccountSink
from pw.core.actors.actor import Actor, Env, handles
from pw.core.actors.watchdog import STALL_S
from pw.core.coordinates import Coordinate
from pw.core.events import Sink
from pw.core.ids import RESOURCES, Address
from pw.core.landing import Bulk
from pw.core.rights import NO_BOUNDS, TenantRights
from pw.core.tenants import NO_SECRET, Claims
from pw.core.tickets import Tickets
from pw.core.waits import MOVE_S, PREEMPT_S, RECONNECT_S, RECOVERY_S
from pw.transport.links.link import Versions
from pw.transport.links.node import Node
from pw.transport.log import recent

if TYPE_CHECKING:
    from pw.devices.host.backend import Backend
    from pw.devices.host.checkpoint_files import BlockingCalls
    from pw.devices.host.executor import HostExecutor
    from pw.devices.host.membership import HostProcess
    from pw.devices.host.output import Output
    from pw.devices.host.replica_memory import Replica
    from pw.devices.host.spill_files import SpillFiles
    from pw.devices.jax.coordination_service import CoordinationServices
    from pw.sched.island.scheduler import IslandScheduler


class CountedBulk(Bulk, Protocol):
    """A bulk plane with counters."""

    def counters(self) -> dict[str, int]:
        """Return the bytes that it has moved."""


class CoordinationActor(Actor):
    """Starts and stops coordination services for the resource manager."""

    def __init__(self, env: Env, services: CoordinationServices) -> None:
        super().__init__(env)
        self._services = services

    @handles(msg.StartCoordination)
    def _start(self, sender: Address, message: msg.StartCoordination) -> None:
        def started(address: str | None, error: str | None) -> None:
            self.env.send(
                RESOURCES,
                msg.CoordinationStarted(message.island, message.epoch, address or "", error or ""),
            )

        self._services.start(message.island, message.epoch, message.hosts, started)

    @handles(msg.StopCoordination)
    def _stop(self, sender: Address, message: msg.StopCoordination) -> None:
        self._services.stop(message.island, message.epoch)


def memory_of(devices: Sequence[Any], bound_bytes: int | None) -> int | None:
    """Return the memory of each of a host's JAX devices: the least that one has, at most `bound_bytes`.

    None if nothing limits it: CPU devices do not say how much they have.
    """
    limits = [(device.memory_stats() or {}).get("bytes_limit") for device in devices]
    return min((limit for limit in (*limits, bound_bytes) if limit is not None), default=None)


def coords_of(devices: Sequence[Any]) -> tuple[Coordinate, ...]:
    """Return the coordinates of JAX devices, with the core on the chip if chips have several; none without.

    JAX has coordinates of TPUs. What it has of others may not tell them apart, and is left out.
    """
    cells = [tuple(getattr(device, "coords", None) or ()) for device in devices]
    if len(set(cells)) < len(cells):
        cells = [
            (*cell, getattr(device, "core_on_chip", 0))
            for cell, device in zip(cells, devices, strict=True)
        ]
    is_usable = all(cells) and len(set(cells)) == len(cells) and len(set(map(len, cells))) == 1
    return tuple(cells) if is_usable and min(map(min, cells)) >= 0 else ()


def counters_of(node: Node, bulk: CountedBulk | None) -> dict[str, int]:
    """Return the counters of a process, with the bytes of its bulk plane if it has one."""
    counted = dict(node.counters)
    moved = {"sent_bytes": 0, "received_bytes": 0} if bulk is None else bulk.counters()
    return counted | {f"bulk_{name}": value for name, value in moved.items()}


def add_controller(
    node: Node,
    loop: asyncio.AbstractEventLoop,
    *,
    secret: bytes,
    claims: Claims = NO_SECRET,
    policy: str = "fifo",
    rights: TenantRights = NO_BOUNDS,
    bind_host: str = "127.0.0.1",
    recovery_s: float = RECOVERY_S,
    move_s: float = MOVE_S,
    preempt_s: float = PREEMPT_S,
    replace_factor: float = math.inf,
    stall_s: float = STALL_S,
    first_client: int = 1,
    events: Sink | None = None,
    expected_islands: int = 1,
    account_sink: AccountSink | None = None,
) -> CoordinationServices:
    """Give `node` the actors of a controller process.

    Args:
        node: the node called `controller`.
        loop: its event loop.
        secret: random bytes of this controller alone, with which it signs the tickets that its clients show
            to hosts.
        claims: of all controllers of this cluster, one after the other.
        policy: name of the scheduling policy of every island.
        rights: of all tenants.
        bind_host: address at which hosts reach the coordination services.
        recovery_s: how long work waits for a lost island before it fails, in seconds.
        move_s: how long slices wait for a lost island before they move to another one, in seconds.
        preempt_s: how long a slice waits before a client of lower priority leaves devices for it, in seconds.
        replace_factor: how much slower than its gangs a host is that a spare replaces.
        stall_s: after how long without progress the log says why, in seconds.
        first_client: number of the first client; another one for each start at an address.
        events: takes what happens in the cluster; None to publish nothing.
        expected_islands: how many islands the cluster has when it has started.
        account_sink: keeps what clients have used; None to keep it while the controller runs.

    Returns:
        The coordination services; close them when the node is closed.
    """
    from pw.devices.jax.coordination_service import CoordinationServices
    from pw.sched.cluster.manager import ResourceManager
    from pw.sched.control.controller import Controller
    from pw.sched.island.policy import POLICIES
    from pw.sched.island.scheduler import IslandScheduler

    services = CoordinationServices(loop, bind_host)
    schedulers: dict[str, IslandScheduler] = {}
    tickets = Tickets(secret)

    def spawn_scheduler(island: str) -> None:
        schedulers[island] = node.add(
            f"scheduler/{island}",
            lambda env: IslandScheduler(
                env,
                island,
                POLICIES[policy](),
                stall_s,
                counts_tenants=rights.have_file,
                replace_factor=replace_factor,
            ),
        )

    resources = node.add(
        "resources",
        lambda env: ResourceManager(
            *(env, tickets.public, claims, expected_islands, move_s),
            lambda host: control.usage.rights.bounds_python_on(host),
            lambda island: schedulers[island].busy() if island in schedulers else {},
        ),
    )
    node.add("services", lambda env: CoordinationActor(env, services))

    def island_status() -> tuple[msg.IslandInfo, ...]:
        return resources.status({n: s.work for n, s in schedulers.items()})

    def uses() -> dict[int, msg.ClientUse]:
        totals: defaultdict[int, msg.ClientUse] = defaultdict(msg.ClientUse)
        for scheduler in schedulers.values():
            for client, use in scheduler.uses():
                totals[client] += use
        return totals

    versions = Versions.installed()
    control = node.add(
        "controller",
        lambda env: Controller(
            env,
            tickets,
            (versions.pw, versions.jax),
            policy,
            spawn_scheduler,
            island_status,
            lambda: counters_of(node, None),
            recovery_s,
            heard_s=node.network.heard_s,
            first_client=first_client,
            waiting_hosts=resources.waiting_hosts,
            awaited_islands=lambda: resources.inventory.awaited_islands,
            events=events,
            claims=claims,
            rights=rights,
            uses=uses,
            tenants_memory=lambda: (
                one for scheduler in schedulers.values() for one in scheduler.tenants_memory()
            ),
            take_spent=lambda client: (
                one for scheduler in schedulers.values() for one in scheduler.spending.take(client)
            ),
            account_sink=account_sink,
            preempt_s=preempt_s,
            plan_moves=resources.plan_moves,
            destinations=resources.destinations,
            lines=lambda: recent.of(node.name),
            only_transfers=os.environ.get("PW_EDGES") == "transfers",
        ),
    )
    return services


def add_host(
    node: Node,
    registration: msg.RegisterHost,
    process: HostProcess,
    backend: Backend,
    bulk: CountedBulk,
    replicas: Sequence[Replica] = (),
    stall_s: float = STALL_S,
    aside: BlockingCalls | None = None,
    reconnect_s: float = RECONNECT_S,
    output: Output | None = None,
    checkpoint_root: str = "",
    spill_bytes: int = 0,
    spill_files: SpillFiles | None = None,
    test_devices_s: float = 0.0,
) -> HostExecutor:
    """Give `node` the actors of a host. `HostExecutor.register` then asks for a place in an island.

    `replicas` are those that the last incarnation of this host left (`HostProcess.keep`,
    `hand_over`). `aside` are threads for files; without them, the host has no checkpoints on disk.
    `output` takes the lines that clients' programs write. `checkpoint_root` is the only folder for
    checkpoints on disk. `spill_bytes` are host memory for arrays that leave the devices, and `spill_files` are
    files for those that leave host memory. An idle host tests its devices every `test_devices_s`; 0 for never.
    """
    from pw.devices.host.coordinator import ShardCoordinator
    from pw.devices.host.executor import HostExecutor
    from pw.devices.host.printing import Written
    from pw.devices.host.store import ObjectStore

    counters: Callable[[], dict[str, int]] = lambda: counters_of(node, bulk) | coordinator.census()  # noqa: E731
    keep = process.keep
    store = node.add(
        "store",
        lambda env: ObjectStore(
            env,
            *(backend, bulk, counters, replicas, aside, keep, output, checkpoint_root),
            lambda: recent.of(node.name),
            spill_bytes,
            spill_files,
            test_devices_s,
        ),
    )
    if output is not None:
        output.written = lambda: node.post_threadsafe("store", Written())
    coordinator = node.add(
        "coordinator",
        lambda env: ShardCoordinator(env, backend, bulk, lambda: counters_of(node, bulk)),
    )
    return node.add(
        "executor",
        lambda env: HostExecutor(
            env, registration, process, backend, store, coordinator, stall_s, reconnect_s
        ),
    )
