"""Which hosts there are, and where each is: in an island, waiting as a spare, or being drained.

State and questions about it. `Epochs` changes the islands and spares, `Drains` the draining hosts,
and `SliceTable` counts the slices on devices.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pw.core import messages as msg
from pw.core.coordinates import Coordinate, written
from pw.core.errors import Error, IslandFull, PlacementError
from pw.core.sharding import DeviceAddress
from pw.sched.cluster.grid import DeviceGrid, Position

SETTLING_S = 30.0
"""Seconds that hosts of an earlier controller may take to register."""


@dataclass(slots=True)
class Host:
    """A registered host."""

    node: str
    registration: msg.RegisterHost
    allowed: tuple[str, ...] = ()
    """Names of the only islands that the certificate of the host allows; empty for all."""

    def may_join(self, island: str) -> bool:
        """Whether its certificate allows an island."""
        return not self.allowed or island in self.allowed

    joined: msg.IslandJoined | None = None


@dataclass(slots=True)
class Island:
    """An island as it was declared, and the hosts that have its ranks."""

    name: str
    expected_hosts: int
    platform: str
    local_devices: int
    epoch: int = 0
    newest: int = 0
    """Number of the island's last epoch under any controller."""
    state: str = "waiting"
    hosts: dict[str, Host] = field(default_factory=dict)
    """Registered hosts of the island, by name."""
    ranks: list[str] = field(default_factory=list)
    """Names of the hosts by rank: of each, the host that has the rank, or had it and may take it again."""
    awaited: set[str] = field(default_factory=set)
    """Names of hosts that have left the epoch and are expected back."""
    invited: bool = False
    """True while the hosts know of the epoch, so that each can only leave it as another incarnation."""
    formed: bool = False
    """True when ranks have been assigned; they are kept."""
    is_open: bool = False
    """True if spares may have seats although no ranks are assigned: the island's own hosts are overdue."""
    is_late: bool = False
    """True if the island has been away so long that its slices move to any island that has room."""
    kind: str = ""
    grid: DeviceGrid | None = None
    """Places of the devices on the interconnect, in the newest epoch; None before the first one."""
    bound: Counter[Position] = field(default_factory=Counter)
    """Number of virtual devices that are bound to each physical device."""
    exclusive: set[Position] = field(default_factory=set)
    """Devices of slices that are exclusive."""
    failed_devices: Mapping[str, Mapping[int, str]] = field(default_factory=dict)
    """Words for what is wrong with each device that has failed its test, by host and ordinal."""
    memory_bytes: int | None = None
    """Bytes of memory of each device in the newest epoch; None without a limit, or before the first epoch."""
    promised: Counter[Position] = field(default_factory=Counter)
    """Bytes that the slices with a bound may have on each device."""
    _places: dict[Coordinate, str] = field(default_factory=dict)
    """Name of the host that has said each of these coordinates last; it may be away."""
    _free_blocks: tuple[Coordinate, ...] | None = None
    """Extents of the blocks of devices without a slice; None until they are asked for."""

    @property
    def is_complete(self) -> bool:
        """Whether all its hosts are registered."""
        return len(self.hosts) == self.expected_hosts

    @property
    def device_count(self) -> int:
        """Number of devices of the island's hosts."""
        return self.expected_hosts * self.local_devices

    @property
    def machine(self) -> str:
        """The machine of all its hosts; empty if they are on several."""
        machines = {_machine_of(host.registration.endpoint) for host in self.hosts.values()}
        return machines.pop() if len(machines) == 1 else ""

    def ranked(self) -> list[Host]:
        """Return the registered hosts in the order of their ranks."""
        order = self.ranks if self.formed else sorted(self.hosts)
        return [self.hosts[node] for node in order if node in self.hosts]

    def positions(self) -> list[Position]:
        """Return all positions in rank order."""
        return [
            (rank, ordinal)
            for rank in range(self.expected_hosts)
            for ordinal in range(self.local_devices)
        ]

    def has_failed(self, position: Position) -> bool:
        """Whether the device at a position has failed its test."""
        rank, ordinal = position
        return 0 <= rank < len(self.ranks) and ordinal in self.failed_devices.get(
            self.ranks[rank], ()
        )

    def failed_positions(self) -> list[Position]:
        """Return the positions of the devices that have failed their test, in rank order."""
        if not self.failed_devices:
            return []
        return [
            (rank, ordinal)
            for rank, node in enumerate(self.ranks)
            for ordinal in sorted(self.failed_devices.get(node, ()))
        ]

    def devices_changed(self) -> None:
        """Devices of the island have failed, or are well again."""
        self._free_blocks = None

    def located(self, positions: tuple[Position, ...]) -> tuple[DeviceAddress, ...]:
        """Return the devices at these positions of an island that is ready."""
        return tuple(DeviceAddress(self.ranks[rank], ordinal) for rank, ordinal in positions)

    # --- devices and slices -------------------------------------------------------------------------

    def occupy(self, positions: Sequence[Position], request: msg.AllocateSlice) -> None:
        """A slice has these devices."""
        self.bound.update(positions)
        if request.exclusive:
            self.exclusive.update(positions)
        if request.memory_bytes:
            self.promised.update(dict.fromkeys(positions, request.memory_bytes))
        self._free_blocks = None

    def vacate(self, positions: Sequence[Position], request: msg.AllocateSlice) -> None:
        """A slice has these devices no more."""
        self.bound.subtract(positions)
        if request.exclusive:
            self.exclusive.difference_update(positions)
        if request.memory_bytes:
            self.promised.subtract(dict.fromkeys(positions, request.memory_bytes))
        self._free_blocks = None

    def vacate_all(self) -> None:
        """No slice has devices."""
        self.bound.clear()
        self.exclusive.clear()
        self.promised.clear()
        self._free_blocks = None

    def left_bytes(self, position: Position) -> int | None:
        """Return the bytes of a device that no slice with a bound may have; None where nothing limits them."""
        if self.memory_bytes is None:
            return None
        return self.memory_bytes - self.promised[position]

    def lay_out(self) -> None:
        """Place the devices of the hosts of a new epoch."""
        self.grid, self._free_blocks = self.grid_of(self.ranked()), None

    def grid_of(self, hosts: Sequence[Host]) -> DeviceGrid:
        """Return the grid that hosts have, in the order of their ranks.

        The coordinates are those that the hosts' operators say; else those that JAX has, if they differ; else
        hosts x devices of a host.
        """
        placed = (h.registration for h in hosts if self.coords_of(h.registration))
        wraps = next((registration.wraps for registration in placed), ())
        cells: dict[Coordinate, Position] = {}
        for rank, host in enumerate(hosts):
            for ordinal, cell in enumerate(self.coords_of(host.registration)):
                cells[cell] = (rank, ordinal)
        if not cells:
            places = [host.joined.coords if host.joined else () for host in hosts]
            by_jax = {
                cell: (rank, ordinal)
                for rank, place in enumerate(places)
                for ordinal, cell in enumerate(place)
            }
            differ = len(by_jax) == sum(map(len, places))
            if differ and len({len(cell) for cell in by_jax}) == 1:
                cells = by_jax
        if not cells:
            return DeviceGrid.of_hosts(self.expected_hosts, self.local_devices)
        return DeviceGrid(cells, wraps or (0,) * len(next(iter(cells))))

    def free_blocks(self) -> tuple[Coordinate, ...]:
        """Return the extents of the blocks that devices without a slice are made of."""
        if self._free_blocks is None and self.grid is not None:
            free = {position for position in self.positions() if not self.bound[position]}
            free.difference_update(self.failed_positions())
            self._free_blocks = self.grid.blocks_of(free)
        return self._free_blocks or ()

    def coords_of(self, registration: msg.RegisterHost) -> tuple[Coordinate, ...]:
        """Return the coordinates of a host's devices here; none if they are those in another island."""
        return registration.coords if registration.island == self.name else ()

    def misplaced(self, node: str, registration: msg.RegisterHost) -> str:
        """Return why the coordinates of a host do not go with those of the other hosts; empty if they do.

        It takes as long in an island of thousands of hosts.
        """
        coords, placed = self.coords_of(registration), self._placed(node)
        if not coords:
            if placed is None or registration.spare:
                return ""  # the devices of a spare without coordinates are in no block
            return f"host {placed.node} has coordinates and host {node} has none; give each its --coords"
        if placed is None:
            here = (host for host in self.hosts.values() if host.node != node)
            bare = next((host.node for host in here if not host.registration.spare), None)
            if bare is None:
                return ""
            return f"host {node} has coordinates and host {bare} has none; give each its --coords"
        there = placed.registration
        axes = len(there.coords[0]), len(coords[0])
        if axes[0] != axes[1]:
            return (
                f"coordinates of host {placed.node} have {counted(axes[0], 'number')}, and those of host "
                f"{node} have {axes[1]}"
            )
        if there.wraps != registration.wraps:
            return f"host {placed.node} has another --wrap than host {node}"
        for cell in coords:
            other = self.hosts.get(self._places.get(cell, ""))
            if other and other.node != node and cell in self.coords_of(other.registration):
                return f"hosts {other.node} and {node} both have a device at {written(cell)}"
        return ""

    def _placed(self, but: str) -> Host | None:
        """Return a host of the island, other than this one, that has coordinates."""
        for node in self._places.values():
            host = self.hosts.get(node)
            if host is not None and node != but and self.coords_of(host.registration):
                return host
        return None

    # --- seats --------------------------------------------------------------------------------------

    def seat(self, host: Host) -> None:
        """Give a host a seat."""
        self.hosts[host.node] = host
        self._places.update(dict.fromkeys(self.coords_of(host.registration), host.node))

    def free_rank(self) -> int | None:
        """Return a rank whose host is gone and not expected back."""
        for rank, node in enumerate(self.ranks):
            if node not in self.hosts and node not in self.awaited:
                return rank
        return None

    def has_seat(self, node: str) -> bool:
        """Whether the island has a seat for a host."""
        if node in self.hosts or (self.formed and node in self.ranks):
            return True
        if self.formed:
            return self.free_rank() is not None
        return len(self.hosts) < self.expected_hosts

    def is_like(self, registration: msg.RegisterHost) -> bool:
        """Whether a host has devices of the same platform, and as many, as each host of the island."""
        return (
            registration.local_devices == self.local_devices
            and registration.platform == self.platform
        )

    def is_abandoned(self, registration: msg.RegisterHost) -> bool:
        """Whether the island has no hosts, and a host declares it anew in another form."""
        wanted = registration.island_hosts
        alike = self.expected_hosts == wanted and self.is_like(registration)
        deserted = self.state == "waiting" and not self.hosts and not self.awaited
        named = self.name == registration.island  # not so if its last host came from elsewhere
        return named and deserted and not alike and wanted > 0

    def objection(self, node: str, registration: msg.RegisterHost) -> Error | None:
        """Return why a host can neither have a seat here nor wait for one."""
        if registration.island_hosts != self.expected_hosts and not registration.spare:
            return IslandFull(
                f"island {self.name!r} was declared with {self.expected_hosts} hosts, this worker "
                f"says {registration.island_hosts}; start it with --island-hosts {self.expected_hosts}"
            )
        # An island that keeps seats for hosts to come back is not full.
        if self.is_complete and not self.has_seat(node) and not registration.spare:
            return IslandFull(
                f"island {self.name!r} already has all its {self.expected_hosts} hosts "
                f"({', '.join(sorted(self.hosts))}); use another --island, raise --island-hosts, or "
                "add it as a spare with --spare"
            )
        if not self.is_like(registration):
            return PlacementError(
                f"hosts of island {self.name!r} have {self.local_devices} {self.platform} devices "
                f"each, this worker has {registration.local_devices} {registration.platform} devices; "
                "all hosts of an island must be alike"
            )
        if not registration.spare and (words := self.misplaced(node, registration)):
            return PlacementError(f"the devices of island {self.name!r} are in one grid: {words}")
        return None

    def describe(self) -> str:
        """Return one line for error messages."""
        hosts = counted(self.expected_hosts, "host")
        devices = counted(self.device_count, "device")
        text = f"{self.name} ({self.platform}, {devices} on {hosts}"
        if left_out := len(self.failed_positions()):
            text += f", {left_out} of them left out"
        if self.state == "ready":
            return text + ")"
        return text + f", {self.state}: {len(self.hosts)} of {self.expected_hosts} hosts are here)"


@dataclass(slots=True)
class Inventory:
    """Hosts and islands of the cluster."""

    islands: dict[str, Island] = field(default_factory=dict)
    spares: dict[str, Host] = field(default_factory=dict)
    draining: dict[str, Host | None] = field(default_factory=dict)
    """Hosts that are drained, by name; None until the host has come back without a seat."""
    failed_devices: dict[str, dict[int, str]] = field(default_factory=dict)
    """Words for what is wrong with each device that has failed its test, by host and ordinal."""
    settling_until_s: float = 0.0
    """Time until which hosts of an earlier controller may register, in seconds."""
    expected_islands: int = 1
    """Number of islands of the cluster when it has started."""

    @property
    def awaited_islands(self) -> int:
        """Number of islands that have yet to form for the first time, for the cluster to have started."""
        return max(0, self.expected_islands - sum(i.formed for i in self.islands.values()))

    def declare(self, registration: msg.RegisterHost, expected_hosts: int) -> Island:
        """Add an island of hosts like this one, in place of one with the same name."""
        name = registration.island
        island = Island(
            *(name, expected_hosts, registration.platform, registration.local_devices),
            failed_devices=self.failed_devices,
        )
        self.islands[name] = island
        return island

    def island_of(self, node: str) -> Island | None:
        """Return the island that has a host."""
        return next((i for i in self.islands.values() if node in i.hosts), None)

    def island_with_rank_of(self, node: str) -> Island | None:
        """Return the island where a host has a rank, or had it and may take it again."""
        return next((i for i in self.islands.values() if i.formed and node in i.ranks), None)

    def away(self, name: str, epoch: int) -> Island | None:
        """Return an island if it has not been formed again since it left this epoch."""
        island = self.islands.get(name)
        is_away = island is not None and island.state == "waiting" and island.epoch == epoch
        return island if is_away else None

    def spare_for(self, island: Island) -> Host | None:
        """Return the spare for the next free seat of an island."""
        return next(iter(self._spares_for(island)), None)

    def takes_spares(self, island: Island) -> bool:
        """Whether an island has a free seat, and gains from a spare in it."""
        if island.formed:
            return island.free_rank() is not None
        lacking = island.expected_hosts - len(island.hosts)
        return island.is_open and 0 < lacking <= len(self._spares_for(island))

    def _spares_for(self, island: Island) -> list[Host]:
        """Return the spares that fit the island, first those that belong there; last those with failed devices.

        Where a host from elsewhere has a seat in an island, the host that it replaced may go
        anywhere instead: or each crash of a runtime would cost the cluster a spare.
        """
        belonging: list[Host] = []
        elsewhere: list[Host] = []
        for host in self.spares.values():
            name = host.registration.island
            home = self.islands.get(name)
            guests = home is not None and any(
                member.registration.island != name for member in home.hosts.values()
            )
            fits = island.is_like(host.registration) and host.may_join(island.name)
            if fits and not island.misplaced(host.node, host.registration):
                if name == island.name:
                    belonging.append(host)
                elif not name or guests:
                    elsewhere.append(host)
        return sorted([*belonging, *elsewhere], key=lambda host: host.node in self.failed_devices)

    # --- reports -------------------------------------------------------------------------------------

    def directory(self) -> msg.Directory:
        """Return all registered hosts, also those that only have replicas to give."""
        members = {
            node
            for island in self.islands.values()
            if island.state == "ready"
            for node in island.hosts
        }
        here = [host for island in self.islands.values() for host in island.hosts.values()]
        here += self.spares.values()
        here += [host for host in self.draining.values() if host is not None]
        return msg.Directory(
            tuple(
                msg.Peer(host.node, host.registration.endpoint, host.node in members)
                for host in here
            )
        )

    def status(
        self, bound: Mapping[str, int], work: Mapping[str, msg.IslandWork]
    ) -> tuple[msg.IslandInfo, ...]:
        """Return the status of all islands.

        Args:
            bound: how many slices are bound to each.
            work: what the scheduler of each knows.
        """
        of = {name: work.get(name, msg.IslandWork()) for name in self.islands}
        return tuple(
            msg.IslandInfo(
                island.name,
                island.state,
                island.platform,
                island.kind,
                tuple(
                    _info(
                        host,
                        island.name,
                        "joining" if host.joined is None else "ready",
                        of[island.name].slow.get(host.node),
                    )
                    for host in island.ranked()
                ),
                island.expected_hosts,
                tuple(node for node in island.ranks if node not in island.hosts),
                island.epoch,
                bound.get(island.name, 0),
                *of[island.name][:3],
                island.is_late,
                () if island.grid is None else island.grid.sizes,
                () if island.grid is None else island.grid.wraps,
                island.free_blocks(),
                len(island.exclusive),
                max(island.promised.values(), default=0),
                sum(len(self.failed_devices.get(node, ())) for node in island.hosts),
            )
            for island in sorted(self.islands.values(), key=lambda island: island.name)
        )

    def waiting_hosts(self) -> tuple[msg.HostInfo, ...]:
        """Return all registered hosts that have no seat in an island."""
        waiting = [("spare", host) for host in self.spares.values()]
        waiting += [("draining", host) for host in self.draining.values() if host is not None]
        return tuple(_info(host, host.registration.island, state) for state, host in waiting)


def _info(host: Host, island: str, state: str, slow: msg.SlowHost | None = None) -> msg.HostInfo:
    place = host.registration
    return msg.HostInfo(
        host.node,
        island,
        state,
        place.process,
        place.local_devices,
        place.endpoint,
        place.python,
        slow=slow,
        notice=msg.Notice(place.grace_s) if place.grace_s else None,
    )


def _machine_of(endpoint: str) -> str:
    """Return the machine of an endpoint; unix sockets reach no other one."""
    scheme, _, place = endpoint.partition("://")
    return "this one" if scheme == "ipc" else place.rpartition(":")[0]


def failed_in_words(node: str, failed: Mapping[int, str]) -> str:
    """Return which devices of a host have failed their test, and why."""
    ordinals = ", ".join(map(str, sorted(failed)))
    why = "; ".join(dict.fromkeys(failed[at] for at in sorted(failed) if failed[at]))
    what = (
        "device {} of host {} has failed its"
        if len(failed) == 1
        else "devices {} of host {} have failed their"
    )
    return what.format(ordinals, node) + " test" + f" ({why})" * bool(why)


def counted(count: int, noun: str) -> str:
    """Return a number of things in words."""
    return f"{count} {noun}{'' if count == 1 else 's'}"
