"""The resource manager: which hosts exist, which islands they form, and what slices are bound to.

An island is `waiting` for hosts, `forming` under a new epoch, then `ready`. Any host that is lost, or
fails to join, ends the epoch: the remaining hosts are told to leave, come back as new incarnations, and
the island is formed again under the next epoch. Each host takes the rank again that it had; the rank of one
that is lost goes to a spare host, or to whoever comes first. Slices survive that: their virtual devices are
bound to the same ranks, and the controller lowers programs again.

A host that is drained leaves in the same way, but its rank goes to a spare at once, and its next
incarnation takes no place: it stays until the controller has had all that it held copied elsewhere.
Where no spare can take over, the island's slices move to islands that have room.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

from pw.core.actor import Actor, Env, handles
from pw.core.errors import (
    ArgumentError,
    Error,
    ErrorReport,
    HostLost,
    InsufficientDevices,
    IslandFull,
    PlacementError,
)
from pw.core.ids import CONTROL, SERVICES, Address, executor_of, session_of
from pw.core.messages import (
    AllocateSlice,
    Answered,
    CoordinationStarted,
    Directory,
    DrainHost,
    Draining,
    EndEpoch,
    FormIsland,
    HostEmptied,
    HostRejected,
    HostStatus,
    IslandFormed,
    IslandJoined,
    IslandJoinFailed,
    IslandLost,
    IslandStatus,
    Leave,
    LeaveIsland,
    Peer,
    PeerLost,
    RegisterHost,
    ReleaseSlice,
    SliceBound,
    SliceRefused,
    StartCoordination,
    StopCoordination,
)
from pw.core.sharding import DeviceAddress

REJOIN_S = 15.0
"""How long the rank of a host that was told to leave is kept for it."""
MOVE_S = 30.0
"""How long slices wait for their island before they move to another one."""


Place = tuple[int, int]
"""A device of an island by rank and ordinal: it outlives the host that has the rank."""


@dataclass(slots=True)
class _Host:
    node: str
    registration: RegisterHost
    joined: IslandJoined | None = None


@dataclass(slots=True)
class _Island:
    name: str
    expected_hosts: int
    platform: str
    local_devices: int
    epoch: int = 0
    state: str = "waiting"
    hosts: dict[str, _Host] = field(default_factory=dict)
    """Those that are here."""
    ranks: list[str] = field(default_factory=list)
    """Who has each rank, or had it and may take it again."""
    awaited: set[str] = field(default_factory=set)
    """Hosts that were told to leave and are about to come back."""
    formed: bool = False
    """Ranks were given out: they are kept from now on."""
    kind: str = ""
    load: Counter[Place] = field(default_factory=Counter)
    """Virtual devices bound to each physical one."""

    def ranked(self) -> list[_Host]:
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

    def describe(self) -> str:
        """One line for error messages."""
        hosts = _counted(self.expected_hosts, "host")
        devices = _counted(self.expected_hosts * self.local_devices, "device")
        text = f"{self.name} ({self.platform}, {devices} on {hosts}"
        if self.state == "ready":
            return text + ")"
        return text + f", {self.state}: {len(self.hosts)} of {self.expected_hosts} hosts are here)"


@dataclass(frozen=True, slots=True)
class _Overdue:
    """Note to oneself: hosts of this epoch should have come back by now."""

    island: str
    epoch: int


@dataclass(frozen=True, slots=True)
class _Move:
    """Note to oneself: an island that left this epoch should have been formed by now."""

    island: str
    epoch: int


@dataclass(slots=True)
class _SliceEntry:
    request: AllocateSlice
    island: str
    places: tuple[Place, ...]


class ResourceManager(Actor):
    """Owns all devices of all islands and maps virtual ones to them."""

    def __init__(self, env: Env, secret: bytes) -> None:
        super().__init__(env)
        self._secret = secret
        self._islands: dict[str, _Island] = {}
        self._slices: dict[int, _SliceEntry] = {}
        self._spares: dict[str, _Host] = {}
        self._parked: list[AllocateSlice] = []
        """Requests that only an island can satisfy which is being formed again."""
        self._draining: dict[str, _Host | None] = {}
        """Hosts to be emptied; None until they have come back without a place."""
        self._drains: dict[str, list[DrainHost]] = {}
        """Who wants to hear when a host has been drained."""

    # --- hosts ---------------------------------------------------------------------------------------

    @handles(RegisterHost)
    def _register(self, sender: Address, message: RegisterHost) -> None:
        node = sender.node
        for island in self._islands.values():
            if node in island.hosts and island.state != "waiting":
                self._end_epoch(island, f"host {node} registered again", node)
        self.env.introduce(node, message.endpoint)
        host = _Host(node, message)
        if node in self._draining:
            self._draining[node] = host
            self._announce()
            self._tell_draining()
            for island in self._islands.values():
                if island.state == "waiting" and len(island.hosts) == island.expected_hosts:
                    self._form(island)
            return
        own = next((i for i in self._islands.values() if i.formed and node in i.ranks), None)
        if not message.island and own is None:
            self._wait_as_spare(host, "it takes any island's free place")
            return
        known = own or self._islands.get(message.island)
        if known is None or self._is_abandoned(known, message):
            known = self._islands[message.island] = _Island(
                message.island,
                message.island_hosts,
                message.platform,
                message.local_devices,
                known.epoch if known else 0,
            )
        if (error := self._objection(known, node, message)) is not None:
            self.env.log("warning", "host rejected", host=node, reason=str(error))
            self.env.send(sender, HostRejected(ErrorReport.of(error)))
        elif self._has_place(known, node):
            self._seat(known, host)
        else:
            self._wait_as_spare(host, f"island {known.name} is full")

    def _is_abandoned(self, island: _Island, message: RegisterHost) -> bool:
        """Whether an island without hosts may be declared anew, in another form."""
        alike = (
            island.expected_hosts == message.island_hosts
            and island.platform == message.platform
            and island.local_devices == message.local_devices
        )
        return island.state == "waiting" and not island.hosts and not island.awaited and not alike

    def _objection(self, island: _Island, node: str, message: RegisterHost) -> Exception | None:
        if message.island_hosts != island.expected_hosts and not message.spare:
            return IslandFull(
                f"island {island.name!r} was declared with {island.expected_hosts} hosts, this worker "
                f"says {message.island_hosts}; start it with --island-hosts {island.expected_hosts}"
            )
        if not self._has_place(island, node) and not message.spare:
            return IslandFull(
                f"island {island.name!r} already has all its {island.expected_hosts} hosts "
                f"({', '.join(sorted(island.hosts))}); use another --island, raise --island-hosts, or "
                "add it as a spare with --spare"
            )
        if not _alike(island, message):
            return PlacementError(
                f"hosts of island {island.name!r} have {island.local_devices} {island.platform} devices "
                f"each, this worker has {message.local_devices} {message.platform} devices; all hosts of "
                "an island must be alike"
            )
        return None

    def _has_place(self, island: _Island, node: str) -> bool:
        if node in island.hosts or (island.formed and node in island.ranks):
            return True
        if island.formed:
            return self._free_rank(island) is not None
        return len(island.hosts) < island.expected_hosts

    def _free_rank(self, island: _Island) -> int | None:
        """A rank whose host is gone and not expected back."""
        for rank, node in enumerate(island.ranks):
            if node not in island.hosts and node not in island.awaited:
                return rank
        return None

    def _seat(self, island: _Island, host: _Host) -> None:
        """Give a host its place, and form the island when it is the last one."""
        self._spares.pop(host.node, None)
        if island.formed and host.node not in island.ranks:
            rank = self._free_rank(island)
            assert rank is not None
            self.env.log(
                "info",
                "host replaced",
                island=island.name,
                rank=rank,
                lost=island.ranks[rank],
                host=host.node,
            )
            island.ranks[rank] = host.node
        island.hosts[host.node] = host
        island.awaited.discard(host.node)
        self.env.log(
            "info",
            "host registered",
            host=host.node,
            island=island.name,
            hosts=f"{len(island.hosts)}/{island.expected_hosts}",
        )
        if len(island.hosts) == island.expected_hosts:
            self._form(island)
        elif island.formed:
            self._fill(island)

    def _wait_as_spare(self, host: _Host, reason: str) -> None:
        self._spares[host.node] = host
        self.env.log("info", "host waits as a spare", host=host.node, reason=reason)
        self._announce()
        for island in list(self._islands.values()):
            self._fill(island)

    def _fill(self, island: _Island) -> None:
        """Give free ranks of an island that waits to spare hosts."""
        while island.state == "waiting" and island.formed and self._free_rank(island) is not None:
            spare = next(
                (host for host in self._spares.values() if _can_replace(island, host)),
                None,
            )
            if spare is None:
                return
            self._seat(island, spare)

    def _form(self, island: _Island) -> None:
        if None in self._draining.values():
            return  # what that host held is to be had when the island is formed
        if not island.formed:
            island.formed = True
            island.ranks = sorted(island.hosts)
        else:
            self._announce()  # hosts that have come back may have copies that others need
        island.epoch += 1
        island.state = "forming"
        if island.expected_hosts > 1:
            self.env.send(
                SERVICES, StartCoordination(island.name, island.epoch, island.expected_hosts)
            )
        else:
            self._invite(island, "")

    @handles(CoordinationStarted)
    def _coordination_started(self, sender: Address, message: CoordinationStarted) -> None:
        island = self._islands.get(message.island)
        if island is None or island.epoch != message.epoch or island.state != "forming":
            self.env.send(SERVICES, StopCoordination(message.island, message.epoch))
        elif message.error:
            self._end_epoch(island, f"no coordination service: {message.error}", "")
        else:
            self._invite(island, message.address)

    def _invite(self, island: _Island, group_address: str) -> None:
        hosts = tuple(host.node for host in island.ranked())
        for rank, node in enumerate(hosts):
            self.env.send(
                executor_of(node),
                FormIsland(island.name, island.epoch, hosts, rank, group_address, self._secret),
            )

    @handles(IslandJoined)
    def _joined(self, sender: Address, message: IslandJoined) -> None:
        island = self._current(sender, message.island, message.epoch)
        if island is None:
            return
        if island.state != "forming":
            self.env.count("messages_stale")
            return
        if message.devices != island.local_devices:
            self._end_epoch(
                island,
                f"host {sender.node} announced {island.local_devices} devices and has "
                f"{message.devices}",
                sender.node,
            )
            return
        island.hosts[sender.node].joined = message
        if all(host.joined for host in island.hosts.values()):
            self._ready(island, message.kind)

    def _ready(self, island: _Island, kind: str) -> None:
        island.state = "ready"
        island.kind = kind
        island.load.clear()
        hosts = tuple(host.node for host in island.ranked())
        self.env.log(
            "info", "island ready", island=island.name, epoch=island.epoch, hosts=",".join(hosts)
        )
        self._announce()
        memory = [host.joined.memory_bytes for host in island.hosts.values() if host.joined]
        limits = [limit for limit in memory if limit is not None]
        formed = IslandFormed(island.name, island.epoch, hosts, min(limits) if limits else None)
        self.env.send(CONTROL, formed)
        for number, entry in list(self._slices.items()):
            if entry.island != island.name:
                continue
            if self._fits(island, entry.request):
                self._bind(number, entry.request, island, entry.places)
            else:  # the island came back smaller, or as another platform
                del self._slices[number]
                self._refuse(entry.request)
        self._retry_parked()

    def _announce(self) -> None:
        """Tell hosts and clients who is here: also those that only have copies to give."""
        members = {
            node
            for island in self._islands.values()
            if island.state == "ready"
            for node in island.hosts
        }
        here = [host for island in self._islands.values() for host in island.hosts.values()]
        here += self._spares.values()
        here += [host for host in self._draining.values() if host is not None]
        directory = Directory(
            tuple(
                Peer(host.node, host.registration.endpoint, host.node in members) for host in here
            )
        )
        for peer in directory.peers:
            self.env.send(executor_of(peer.node), directory)
        self.env.send(CONTROL, directory)

    @handles(IslandJoinFailed)
    def _join_failed(self, sender: Address, message: IslandJoinFailed) -> None:
        island = self._current(sender, message.island, message.epoch)
        if island is not None:
            self._end_epoch(
                island, f"host {sender.node} could not join: {message.error.message}", ""
            )

    @handles(EndEpoch)
    def _epoch_broken(self, sender: Address, message: EndEpoch) -> None:
        island = self._islands.get(message.island)
        if island is not None and island.epoch == message.epoch and island.state == "ready":
            self._end_epoch(island, message.reason, "")

    def _current(self, sender: Address, name: str, epoch: int) -> _Island | None:
        island = self._islands.get(name)
        if island is None or island.epoch != epoch or sender.node not in island.hosts:
            self.env.count("messages_stale")
            return None
        return island

    @handles(PeerLost)
    def _peer_lost(self, sender: Address, message: PeerLost) -> None:
        node = message.node
        if self._spares.pop(node, None) is not None:
            self._announce()
        if self._draining.get(node) is not None:
            self._drained(node, None)
        for island in self._islands.values():
            if node in island.hosts:
                self._end_epoch(island, f"host {node} was lost: {message.reason}", node)

    def _end_epoch(self, island: _Island, reason: str, lost: str) -> None:
        """The island leaves its epoch; every host but `lost` is asked to come back anew."""
        self.env.log("warning", "island left its epoch", island=island.name, reason=reason)
        if island.state == "waiting":
            island.hosts.pop(lost, None)
            self._announce()
            self._fill(island)
            return
        was_ready = island.state == "ready"
        remaining = [node for node in island.hosts if node != lost]
        island.state = "waiting"
        island.hosts.clear()
        island.awaited = {node for node in remaining if node not in self._draining}
        for node in remaining:
            self.env.send(executor_of(node), LeaveIsland(island.name, island.epoch, reason))
        if island.expected_hosts > 1:
            self.env.send(SERVICES, StopCoordination(island.name, island.epoch))
        if was_ready:
            error = HostLost(f"island {island.name} left epoch {island.epoch}: {reason}")
            self.env.send(CONTROL, IslandLost(island.name, island.epoch, ErrorReport.of(error)))
        self._announce()
        self.env.call_later(REJOIN_S, _Overdue(island.name, island.epoch))
        self.env.call_later(MOVE_S, _Move(island.name, island.epoch))
        self._fill(island)

    @handles(_Overdue)
    def _overdue(self, sender: Address, note: _Overdue) -> None:
        """Hosts that were told to leave have not come back: others may have their ranks."""
        island = self._islands.get(note.island)
        if island is not None and island.state == "waiting" and island.epoch == note.epoch:
            island.awaited.clear()
            for node in [node for node, host in self._draining.items() if host is None]:
                self._drained(node, HostLost(f"host {node} did not come back to be emptied"))
            self._fill(island)
            if len(island.hosts) == island.expected_hosts and island.state == "waiting":
                self._form(island)

    @handles(_Move)
    def _move(self, sender: Address, note: _Move) -> None:
        """The island does not come back: its slices go where there is room."""
        island = self._islands.get(note.island)
        if island is not None and island.state == "waiting" and island.epoch == note.epoch:
            self._announce()  # whoever has come back may have copies to give
            self._move_slices(island)
            parked, self._parked = self._parked, []
            for request in parked:
                self._refuse(request)

    def _move_slices(self, island: _Island) -> None:
        for number, entry in list(self._slices.items()):
            if entry.island != island.name:
                continue
            target = self._roomiest(entry.request)
            if target is not None:
                island.load.subtract(entry.places)
                self._bind(number, entry.request, target)

    # --- draining ------------------------------------------------------------------------------------

    @handles(DrainHost)
    def _drain(self, sender: Address, message: DrainHost) -> None:
        node = message.node
        if (spare := self._spares.pop(node, None)) is not None:
            self._draining[node] = spare
            self._tell_draining()
        island = next((i for i in self._islands.values() if node in i.hosts), None)
        if node not in self._draining and island is None:
            known = sorted(n for i in self._islands.values() for n in i.hosts)
            error = ArgumentError(f"there is no host {node!r}; there are {', '.join(known)}")
            self._answer_drain(message, error)
            return
        if island is not None and (objection := self._cannot_do_without(island, node)) is not None:
            self._answer_drain(message, objection)
            return
        self._drains.setdefault(node, []).append(message)
        if island is not None:
            self._draining[node] = None
            self._end_epoch(island, f"host {node} is drained", "")
            if not any(_can_replace(island, host) for host in self._spares.values()):
                self._move_slices(island)
        self.env.log("info", "host is drained", host=node)

    def _cannot_do_without(self, island: _Island, node: str) -> Error | None:
        """Why a host cannot be drained."""
        if any(_can_replace(island, host) for host in self._spares.values()):
            return None
        stuck = [
            entry.request
            for entry in self._slices.values()
            if entry.island == island.name and self._roomiest(entry.request, island) is None
        ]
        if not stuck:
            return None
        return InsufficientDevices(
            f"host {node} cannot be drained: no spare host can take its place in island {island.name}, and "
            f"no other island has room for {_counted(len(stuck), 'slice')} on it; add a worker with --spare"
        )

    def _answer_drain(self, message: DrainHost, error: Error | None) -> None:
        report = ErrorReport.of(error) if error is not None else None
        self.env.send(session_of(message.client), Answered(message.request, report))

    def _tell_draining(self) -> None:
        here = tuple(node for node, host in self._draining.items() if host is not None)
        self.env.send(CONTROL, Draining(here))

    @handles(HostEmptied)
    def _emptied(self, sender: Address, message: HostEmptied) -> None:
        """The controller needs nothing any more that is on this host."""
        if self._draining.get(message.node) is not None:
            self.env.send(executor_of(message.node), Leave("it was drained"))
            self._drained(message.node, None)

    def _drained(self, node: str, error: Error | None) -> None:
        del self._draining[node]
        for message in self._drains.pop(node, ()):
            self._answer_drain(message, error)
        self._tell_draining()
        self._announce()

    # --- slices --------------------------------------------------------------------------------------

    @handles(AllocateSlice)
    def _allocate(self, sender: Address, message: AllocateSlice) -> None:
        island = self._roomiest(message)
        if island is not None:
            self._bind(message.slice, message, island)
        elif any(i.formed and i.state != "ready" and self._fits(i, message) for i in self._all()):
            self._parked.append(message)
        else:
            self._refuse(message)

    def _all(self) -> list[_Island]:
        return list(self._islands.values())

    def _retry_parked(self) -> None:
        """An island is ready again, or will not be: requests that waited for it have their answer."""
        parked, self._parked = self._parked, []
        for request in parked:
            self._allocate(CONTROL, request)

    def _roomiest(self, request: AllocateSlice, but: _Island | None = None) -> _Island | None:
        """The island on which a slice would share its devices the least."""
        fitting = [
            island
            for island in self._islands.values()
            if island.state == "ready" and island is not but and self._fits(island, request)
        ]
        return min(
            fitting,
            key=lambda island: (
                (sum(island.load.values()) + request.devices) / len(island.places()),
                island.name,
            ),
            default=None,
        )

    def _refuse(self, request: AllocateSlice) -> None:
        error = ErrorReport.of(self._insufficient(request))
        self.env.send(CONTROL, SliceRefused(request.slice, error))

    def _fits(self, island: _Island, request: AllocateSlice) -> bool:
        if request.island is not None and request.island != island.name:
            return False
        if request.kind is not None and request.kind.lower() not in (
            island.platform.lower(),
            island.kind.lower(),
        ):
            return False
        if request.topology is not None:
            extent = math.prod(request.topology)
            if extent != request.devices or any(size < 1 for size in request.topology):
                return False
            rows, columns = _block(request.topology)
            if rows > island.expected_hosts or columns > island.local_devices:
                return False
        return request.devices <= len(island.places())

    def _bind(
        self,
        number: int,
        request: AllocateSlice,
        island: _Island,
        places: tuple[Place, ...] = (),
    ) -> None:
        """Bind a slice, to the places that it had in this island if it had any."""
        if not places or not set(places) <= set(island.places()):
            places = self._choose(island, request)
        island.load.update(places)
        self._slices[number] = _SliceEntry(request, island.name, places)
        self.env.send(
            CONTROL,
            SliceBound(number, island.name, island.platform, island.kind, island.located(places)),
        )

    def _choose(self, island: _Island, request: AllocateSlice) -> tuple[Place, ...]:
        """The least loaded devices; with a topology, the least loaded block of that form."""
        devices = island.places()
        if request.topology is None or len(request.topology) < 2:
            chosen = sorted(devices, key=lambda place: (island.load[place], place))
            return tuple(sorted(chosen[: request.devices]))
        rows, columns = _block(request.topology)
        width = island.local_devices
        blocks = [
            tuple(
                devices[(row + r) * width + column + c] for r in range(rows) for c in range(columns)
            )
            for row in range(island.expected_hosts - rows + 1)
            for column in range(width - columns + 1)
        ]
        return min(blocks, key=lambda block: sum(island.load[place] for place in block))

    def _insufficient(self, request: AllocateSlice) -> InsufficientDevices:
        asked = _counted(request.devices, "device")
        for name in ("kind", "island", "topology"):
            value = getattr(request, name)
            if value is not None:
                asked += f" with {name}={value!r}"
        there = "; ".join(island.describe() for island in self._islands.values())
        return InsufficientDevices(
            f"no island has {asked} for one slice. There are: {there or 'no islands yet'}"
        )

    @handles(ReleaseSlice)
    def _release(self, sender: Address, message: ReleaseSlice) -> None:
        self._parked = [request for request in self._parked if request.slice != message.slice]
        entry = self._slices.pop(message.slice, None)
        if entry is not None:
            self._islands[entry.island].load.subtract(entry.places)

    # --- status --------------------------------------------------------------------------------------

    def status(self, queued: dict[str, tuple[int, int]]) -> tuple[IslandStatus, ...]:
        """Describe all islands; `queued` has the (queued, launched) segments of each."""
        bound = Counter(entry.island for entry in self._slices.values())
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
                bound[island.name],
                *queued.get(island.name, (0, 0)),
            )
            for island in sorted(self._islands.values(), key=lambda island: island.name)
        )


def _alike(island: _Island, registration: RegisterHost) -> bool:
    return (
        registration.local_devices == island.local_devices
        and registration.platform == island.platform
    )


def _can_replace(island: _Island, host: _Host) -> bool:
    return host.registration.island in ("", island.name) and _alike(island, host.registration)


def _block(topology: tuple[int, ...]) -> tuple[int, int]:
    """Rows (hosts) and columns (devices of one host) that a topology asks for."""
    if len(topology) < 2:
        return 1, 1
    return topology[0], math.prod(topology[1:])


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"
