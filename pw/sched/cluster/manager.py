"""The resource manager: the actor that owns the hosts, islands and slices of the cluster."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from pw.core.actors.actor import Actor, Env
from pw.core.messages import AllocateSlice, HostInfo, IslandInfo, IslandWork, PeerLost, RegisterHost
from pw.core.sharding import DeviceAddress
from pw.core.tenants import NO_SECRET, Claims
from pw.core.waits import MOVE_S
from pw.sched.cluster.draining import Drains
from pw.sched.cluster.epochs import Epochs, Overdue
from pw.sched.cluster.inventory import Inventory
from pw.sched.cluster.moves import Destination, MovePlanner, PlannedMove
from pw.sched.cluster.slices import Busy, SliceTable, WaitedEnough


class ResourceManager(Actor):
    """Owns all devices of all islands and maps virtual devices to them."""

    def __init__(
        self,
        env: Env,
        tickets: bytes,
        claims: Claims = NO_SECRET,
        expected_islands: int = 1,
        move_s: float = MOVE_S,
        names_python_on: Callable[[str], bool] = lambda host: False,
        busy: Busy = lambda island: {},
    ) -> None:
        super().__init__(env)
        self.inventory = Inventory(expected_islands=expected_islands)
        self.slices = SliceTable(env, self.inventory, move_s, busy)
        self.planner = MovePlanner(self.slices, self.inventory)
        epochs = Epochs(env, self.inventory, self.slices, tickets, claims, names_python_on)
        drains = Drains(env, self.inventory, self.slices, epochs)
        self.compose(
            *(drains, epochs, self.slices),
            order={
                # Drained hosts are given up before their islands go on without them.
                PeerLost: (Drains, Epochs),
                # A new host with the name of one that was to end gets a seat.
                RegisterHost: (Drains, Epochs),
                Overdue: (Drains, Epochs),
                # A parked slice's former island gets spares before the slice is placed.
                WaitedEnough: (Epochs, SliceTable),
            },
        )

    def status(self, work: Mapping[str, IslandWork]) -> tuple[IslandInfo, ...]:
        """Return the status of all islands (see `Inventory.status`)."""
        return self.inventory.status(self.slices.counts(), work)

    def waiting_hosts(self) -> tuple[HostInfo, ...]:
        """Return all registered hosts that have no seat in an island."""
        return self.inventory.waiting_hosts()

    def plan_moves(
        self, wanted: AllocateSlice | None, sizes: Mapping[int, int]
    ) -> tuple[PlannedMove, ...]:
        """Return the slices that should move (see `MovePlanner.plan`). Raises InsufficientDevices."""
        return self.planner.plan(wanted, sizes)

    def destinations(
        self, slices: Collection[int], island: str, devices: tuple[DeviceAddress, ...] = ()
    ) -> tuple[Destination, ...]:
        """Return the devices that slices would have on an island (see `MovePlanner.destinations`)."""
        return self.planner.destinations(slices, island, devices)
