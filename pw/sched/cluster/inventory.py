"""Which hosts there are, and where each is: in an island, waiting as a spare, or here only to be emptied.

Plain state, and questions about it, shared by those that change it: `ResourceManager` seats hosts and forms
islands, `Drains` has hosts emptied, `Slices` looks for room.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from pw.core.errors import Error, IslandFull, PlacementError
from pw.core.messages import (
    Directory,
    HostStatus,
    IslandJoined,
    IslandStatus,
    Peer,
    RegisterHost,
    WaitingHost,
)
from pw.core.sharding import DeviceAddress

SETTLING_S = 30.0
"""How long hosts that an earlier controller had may take to show up."""

Place = tuple[int, int]
"""A device of an island by rank and ordinal: it outlives the host that has the rank."""


@dataclass(slots=True)
class Host:
    """A host that is here."""

    node: str
    registration: RegisterHost
    joined: IslandJoined | None = None


@dataclass(slots=True)
class Island:
    """An island as it was declared, and who has its ranks."""

    name: str
    expected_hosts: int
    platform: str
    local_devices: int
    epoch: int = 0
    newest: int = 0
    """The last epoch under any controller."""
    state: str = "waiting"
    hosts: dict[str, Host] = field(default_factory=dict)
    """Those that are here."""
    ranks: list[str] = field(default_factory=list)
    """Who has each rank, or had it and may take it again."""
    awaited: set[str] = field(default_factory=set)
    """Hosts that were told to leave and are about to come back."""
    invited: bool = False
    """Its hosts know of the epoch: they can only leave it as other incarnations."""
    formed: bool = False
    """Ranks were given out: they are kept from now on."""
    is_open: bool = False
    """Though no ranks were given out, its own hosts have had their time: spares may have its places."""
    is_late: bool = False
    """It has been away for so long that its slices go to any island that has room."""
    kind: str = ""
    load: Counter[Place] = field(default_factory=Counter)
    """Virtual devices bound to each physical one, as `Slices` counts them."""

    @property
    def is_complete(self) -> bool:
        """Whether all its hosts are here."""
        return len(self.hosts) == self.expected_hosts

    @property
    def device_count(self) -> int:
        """Devices of all its hosts."""
        return self.expected_hosts * self.local_devices

    def ranked(self) -> list[Host]:
        """Hosts that are here, in the order of their ranks."""
        order = self.ranks if self.formed else sorted(self.hosts)
        return [self.hosts[node] for node in order if node in self.hosts]

    def places(self) -> list[Place]:
        """All places in rank order."""
        return [
            (rank, ordinal)
            for rank in range(self.expected_hosts)
            for ordinal in range(self.local_devices)
        ]

    def located(self, places: tuple[Place, ...]) -> tuple[DeviceAddress, ...]:
        """The devices at these places, in an island that is ready."""
        return tuple(DeviceAddress(self.ranks[rank], ordinal) for rank, ordinal in places)

    def free_rank(self) -> int | None:
        """A rank whose host is gone and not expected back."""
        for rank, node in enumerate(self.ranks):
            if node not in self.hosts and node not in self.awaited:
                return rank
        return None

    def has_place(self, node: str) -> bool:
        """Whether a host may be seated here."""
        if node in self.hosts or (self.formed and node in self.ranks):
            return True
        if self.formed:
            return self.free_rank() is not None
        return len(self.hosts) < self.expected_hosts

    def is_like(self, registration: RegisterHost) -> bool:
        """Whether a host has what each host of the island has."""
        return (
            registration.local_devices == self.local_devices
            and registration.platform == self.platform
        )

    def is_abandoned(self, registration: RegisterHost) -> bool:
        """Whether the island has no hosts, and may be declared anew by one that wants another form."""
        wanted = registration.island_hosts
        alike = self.expected_hosts == wanted and self.is_like(registration)
        deserted = self.state == "waiting" and not self.hosts and not self.awaited
        named = self.name == registration.island  # its last host may be one from elsewhere
        return named and deserted and not alike and wanted > 0

    def objection(self, node: str, registration: RegisterHost) -> Error | None:
        """Why a host can neither have a place here nor wait for one."""
        if registration.island_hosts != self.expected_hosts and not registration.spare:
            return IslandFull(
                f"island {self.name!r} was declared with {self.expected_hosts} hosts, this worker "
                f"says {registration.island_hosts}; start it with --island-hosts {self.expected_hosts}"
            )
        # One with places that are kept for hosts to come back is not full.
        if self.is_complete and not self.has_place(node) and not registration.spare:
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
        return None

    def describe(self) -> str:
        """One line for error messages."""
        hosts = counted(self.expected_hosts, "host")
        devices = counted(self.device_count, "device")
        text = f"{self.name} ({self.platform}, {devices} on {hosts}"
        if self.state == "ready":
            return text + ")"
        return text + f", {self.state}: {len(self.hosts)} of {self.expected_hosts} hosts are here)"


@dataclass(slots=True)
class Inventory:
    """All hosts and islands."""

    islands: dict[str, Island] = field(default_factory=dict)
    spares: dict[str, Host] = field(default_factory=dict)
    draining: dict[str, Host | None] = field(default_factory=dict)
    """Hosts to be emptied; None until they have come back without a place."""
    settling_until_s: float = 0.0
    """Until then hosts that an earlier controller had may show up."""

    def declare(self, registration: RegisterHost, expected_hosts: int) -> Island:
        """A new island of hosts like this one; it takes the place of one with the same name."""
        name = registration.island
        island = Island(name, expected_hosts, registration.platform, registration.local_devices)
        self.islands[name] = island
        return island

    def island_of(self, node: str) -> Island | None:
        """Where a host sits."""
        return next((i for i in self.islands.values() if node in i.hosts), None)

    def island_with_rank_of(self, node: str) -> Island | None:
        """Where a rank is kept for a host, or is its."""
        return next((i for i in self.islands.values() if i.formed and node in i.ranks), None)

    def spare_for(self, island: Island) -> Host | None:
        """Who is to have the next free place of an island."""
        return next(iter(self._spares_for(island)), None)

    def takes_spares(self, island: Island) -> bool:
        """Whether an island has a place that nobody else is to have, and is served by filling it."""
        if island.formed:
            return island.free_rank() is not None
        lacking = island.expected_hosts - len(island.hosts)
        return island.is_open and 0 < lacking <= len(self._spares_for(island))

    def _spares_for(self, island: Island) -> list[Host]:
        """Hosts that wait and can take a place in the island, first those that belong there.

        Where a host from elsewhere sits in an island, the one that it has replaced can go anywhere in its
        stead: or each crash of a runtime would cost the cluster a spare.
        """
        belonging: list[Host] = []
        others: list[Host] = []
        for host in self.spares.values():
            name = host.registration.island
            home = self.islands.get(name)
            guests = home is not None and any(
                member.registration.island != name for member in home.hosts.values()
            )
            if island.is_like(host.registration):
                if name == island.name:
                    belonging.append(host)
                elif not name or guests:
                    others.append(host)
        return [*belonging, *others]

    # --- reports -------------------------------------------------------------------------------------

    def directory(self) -> Directory:
        """Who is here, also those that only have copies to give."""
        members = {
            node
            for island in self.islands.values()
            if island.state == "ready"
            for node in island.hosts
        }
        here = [host for island in self.islands.values() for host in island.hosts.values()]
        here += self.spares.values()
        here += [host for host in self.draining.values() if host is not None]
        return Directory(
            tuple(
                Peer(host.node, host.registration.endpoint, host.node in members) for host in here
            )
        )

    def status(
        self, bound: Mapping[str, int], queued: Mapping[str, tuple[int, int]]
    ) -> tuple[IslandStatus, ...]:
        """Describe all islands.

        Args:
            bound: how many slices are bound to each.
            queued: the (queued, launched) segments of each.
        """
        return tuple(
            IslandStatus(
                island.name,
                island.epoch,
                island.state,
                island.platform,
                island.kind,
                tuple(
                    HostStatus(
                        host.node,
                        host.registration.process,
                        host.registration.local_devices,
                        host.registration.endpoint,
                        host.joined is not None,
                    )
                    for host in island.ranked()
                ),
                island.expected_hosts,
                bound.get(island.name, 0),
                *queued.get(island.name, (0, 0)),
                tuple(node for node in island.ranks if node not in island.hosts),
            )
            for island in sorted(self.islands.values(), key=lambda island: island.name)
        )

    def waiting_hosts(self) -> tuple[WaitingHost, ...]:
        """Describe all hosts that are here and have no place in an island."""
        waiting = [("spare", host) for host in self.spares.values()]
        waiting += [("draining", host) for host in self.draining.values() if host is not None]
        return tuple(
            WaitingHost(
                host.node,
                state,
                host.registration.island,
                host.registration.process,
                host.registration.local_devices,
                host.registration.endpoint,
            )
            for state, host in waiting
        )


def counted(count: int, noun: str) -> str:
    """A number of things in words."""
    return f"{count} {noun}{'' if count == 1 else 's'}"
