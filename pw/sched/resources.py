"""The resource manager: which hosts exist, which islands they form, and what slices are bound to.

An island is `waiting` for hosts, `forming` under a new epoch, then `ready`. Any host that is lost, or
fails to join, ends the epoch: the remaining hosts are told to leave, come back as new incarnations, and
the island is formed again under the next epoch. Each host takes the rank again that it had; the rank of one
that is lost goes to a spare host, or to whoever comes first. Slices survive that: their virtual devices are
bound to the same ranks, and the controller lowers programs again.

A host that is drained leaves in the same way, but its rank goes to a spare at once, and its next
incarnation takes no place: it stays until the controller has had all that it held copied elsewhere.
Where no spare can take over, the island's slices move to islands that have room.

A controller that is started again knows nothing. Hosts tell it of the epoch that they are in, which is all it
takes to know an island's form and who has which rank; from there on it is an epoch that ends as any other.
Clients tell it of their slices, which wait for their islands.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

import msgspec

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
    WaitingHost,
)
from pw.core.sharding import DeviceAddress

RETRY_S = 0.5
"""How long to wait before an island is formed again whose epoch could not begin."""
REJOIN_S = 15.0
"""How long the rank of a host that was told to leave is kept for it."""
RESTART_S = 2.0
"""How long the rank of a host that died is kept for it, if there is a spare."""
MOVE_S = 30.0
"""How long slices wait for their island before they move to another one."""
RESUME_S = 60.0
"""How long slices of an earlier controller wait for any island that has room."""
SETTLING_S = 30.0
"""How long hosts that an earlier controller had may take to show up."""


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
    newest: int = 0
    """The last epoch under any controller."""
    state: str = "waiting"
    hosts: dict[str, _Host] = field(default_factory=dict)
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
class _NotRestarted:
    """Note to oneself: a host that died should have been started again by now."""

    island: str
    epoch: int
    node: str


@dataclass(frozen=True, slots=True)
class _Move:
    """Note to oneself: an island that left this epoch should have been formed by now."""

    island: str
    epoch: int


@dataclass(frozen=True, slots=True)
class _Patience:
    """Note to oneself: this slice has waited for its former island, or for any."""

    slice: int
    is_over: bool


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
        self._settling_until_s = 0.0
        """Until then hosts that an earlier controller had may show up."""

    # --- hosts ---------------------------------------------------------------------------------------

    @handles(RegisterHost)
    def _register(self, sender: Address, message: RegisterHost) -> None:
        node = sender.node
        for island in self._islands.values():
            if node in island.hosts and island.state != "waiting":
                self._end_epoch(island, f"host {node} registered again", node, True)
                island.awaited.discard(node)  # here it is
        self.env.introduce(node, message.endpoint)
        if message.epoch:
            self._recall(sender, message)
            return
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
        if not message.island_hosts and own is None and message.island not in self._islands:
            self._wait_as_spare(host, f"island {message.island} is not there yet")
            return
        known = own or self._islands.get(message.island)
        if known is None or self._is_abandoned(known, message):
            known = self._islands[message.island] = _Island(
                message.island,
                message.island_hosts,
                message.platform,
                message.local_devices,
                *((known.epoch, known.newest) if known else ()),
            )
        if (error := self._objection(known, node, message)) is not None:
            self.env.log("warning", "host rejected", host=node, reason=str(error))
            self.env.send(sender, HostRejected(ErrorReport.of(error)))
        elif self._has_place(known, node):
            if message.island_hosts and known.name != message.island:
                self._remember_home(message)
            self._seat(known, host)
        else:
            self._wait_as_spare(host, f"island {known.name} has its hosts, or waits for them")

    def _recall(self, sender: Address, message: RegisterHost) -> None:
        """A host is in an epoch that is not one of ours: it is as if that epoch had just been ended."""
        name, node = message.island, sender.node
        self._settling_until_s = self.env.now_s() + SETTLING_S
        known = self._islands.get(name)
        if known is None or not known.formed:
            here = known.hosts if known else {}
            island = self._islands[name] = _Island(
                name, len(message.members), message.platform, message.local_devices
            )
            island.formed, island.ranks = True, list(message.members)
            for early in here.values():
                if early.node in island.ranks:
                    island.hosts[early.node] = early
                else:
                    self._spares[early.node] = early
            island.awaited = set(island.ranks) - island.hosts.keys()
            island.epoch = message.epoch
            self.env.call_later(REJOIN_S, _Overdue(name, island.epoch))
            self.env.call_later(MOVE_S, _Move(name, island.epoch))
            self.env.log("info", "island found", island=name, epoch=message.epoch, host=node)
        else:
            island = known
            if island.state == "waiting" and node in island.ranks:
                island.awaited.add(node)
        island.newest = max(island.newest, message.epoch)
        reason = "its controller was started again, or lost sight of it"
        self.env.send(sender, LeaveIsland(name, message.epoch, reason))

    def _remember_home(self, message: RegisterHost) -> None:
        """A host sits elsewhere; only an earlier controller may have known its own island.

        None of those that come may name it as their place, so spares are to make it whole.
        """
        home = self._islands.get(message.island)
        if home is None:
            home = self._islands[message.island] = _Island(
                message.island, message.island_hosts, message.platform, message.local_devices
            )
        if not home.formed:
            self.env.call_later(REJOIN_S, _Overdue(home.name, home.epoch))

    def _is_abandoned(self, island: _Island, message: RegisterHost) -> bool:
        """Whether an island without hosts may be declared anew, in another form."""
        alike = (
            island.expected_hosts == message.island_hosts
            and island.platform == message.platform
            and island.local_devices == message.local_devices
        )
        deserted = island.state == "waiting" and not island.hosts and not island.awaited
        named = island.name == message.island  # its last host may be one from elsewhere
        return named and deserted and not alike and message.island_hosts > 0

    def _objection(self, island: _Island, node: str, message: RegisterHost) -> Exception | None:
        if message.island_hosts != island.expected_hosts and not message.spare:
            return IslandFull(
                f"island {island.name!r} was declared with {island.expected_hosts} hosts, this worker "
                f"says {message.island_hosts}; start it with --island-hosts {island.expected_hosts}"
            )
        # One with places that are kept for hosts to come back is not full.
        full = len(island.hosts) == island.expected_hosts
        if full and not self._has_place(island, node) and not message.spare:
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
            return
        self.env.send(executor_of(host.node), self._directory())  # it hears that we are here
        if island.formed:
            self._fill(island)

    def _wait_as_spare(self, host: _Host, reason: str) -> None:
        self._spares[host.node] = host
        self.env.log("info", "host waits as a spare", host=host.node, reason=reason)
        self._announce()
        for island in list(self._islands.values()):
            self._fill(island)

    def _fill(self, island: _Island) -> None:
        """Give free places of an island that waits to spare hosts."""
        while island.state == "waiting" and self._takes_spares(island):
            spare = self._spare_for(island)
            if spare is None:
                return
            self._seat(island, spare)

    def _takes_spares(self, island: _Island) -> bool:
        if island.formed:
            return self._free_rank(island) is not None
        lacking = island.expected_hosts - len(island.hosts)
        return island.is_open and 0 < lacking <= len(self._spares_for(island))

    def _spare_for(self, island: _Island) -> _Host | None:
        return next(iter(self._spares_for(island)), None)

    def _spares_for(self, island: _Island) -> list[_Host]:
        """Hosts that wait and can take a place in the island, first those that belong there.

        Where a host from elsewhere sits in an island, the one that it has replaced can go anywhere in its
        stead: or each crash of a runtime would cost the cluster a spare.
        """
        belonging: list[_Host] = []
        others: list[_Host] = []
        for host in self._spares.values():
            name = host.registration.island
            home = self._islands.get(name)
            guests = home is not None and any(
                member.registration.island != name for member in home.hosts.values()
            )
            if _alike(island, host.registration):
                if name == island.name:
                    belonging.append(host)
                elif not name or guests:
                    others.append(host)
        return [*belonging, *others]

    def _form(self, island: _Island) -> None:
        if None in self._draining.values():
            return  # what that host held is to be had when the island is formed
        if not island.formed:
            island.formed = True
            island.ranks = sorted(island.hosts)
        else:
            self._announce()  # hosts that have come back may have copies that others need
        island.epoch = island.newest = max(island.epoch, island.newest) + 1
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
        island.invited = True
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
        for other in self._all():
            self._fill(other)
        self._retry_parked()

    def _directory(self) -> Directory:
        """Who is here, also those that only have copies to give."""
        members = {
            node
            for island in self._islands.values()
            if island.state == "ready"
            for node in island.hosts
        }
        here = [host for island in self._islands.values() for host in island.hosts.values()]
        here += self._spares.values()
        here += [host for host in self._draining.values() if host is not None]
        return Directory(
            tuple(
                Peer(host.node, host.registration.endpoint, host.node in members) for host in here
            )
        )

    def _announce(self) -> None:
        """Tell hosts and clients who is here."""
        directory = self._directory()
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
                words = f"host {node} was lost: {message.reason}"
                self._end_epoch(island, words, node, message.may_return)
            elif node in island.awaited and message.reason != "closed":
                # It did not leave, it died, which another host has noticed first.
                self._await_restart(island, node, message.may_return)

    def _end_epoch(self, island: _Island, reason: str, lost: str, may_return: bool = False) -> None:
        """The island leaves its epoch; every host but `lost` is asked to come back anew."""
        self.env.log("warning", "island left its epoch", island=island.name, reason=reason)
        if island.state == "waiting" or not island.invited:
            self._stay(island, lost)
            return
        was_ready = island.state == "ready"
        remaining = [node for node in island.hosts if node != lost]
        island.state = "waiting"
        island.invited = False
        island.hosts.clear()
        island.awaited = {node for node in remaining if node not in self._draining}
        if lost:
            self._await_restart(island, lost, may_return)
        for node in remaining:
            self.env.send(executor_of(node), LeaveIsland(island.name, island.epoch, reason))
        if island.expected_hosts > 1:
            self.env.send(SERVICES, StopCoordination(island.name, island.epoch))
        if was_ready:
            error = HostLost(f"island {island.name} left epoch {island.epoch}: {reason}")
            report = ErrorReport.of(error)
            self.env.send(CONTROL, IslandLost(island.name, island.epoch, report, lost))
        self._announce()
        self.env.call_later(REJOIN_S, _Overdue(island.name, island.epoch))
        self.env.call_later(MOVE_S, _Move(island.name, island.epoch))
        self._fill(island)

    def _stay(self, island: _Island, lost: str) -> None:
        """The hosts know of no epoch yet, so all but `lost` can stay as they are."""
        if island.state == "forming" and island.expected_hosts > 1:
            self.env.send(SERVICES, StopCoordination(island.name, island.epoch))
        island.state = "waiting"
        island.hosts.pop(lost, None)
        for node in [node for node in island.hosts if node in self._draining]:
            self._draining[node] = island.hosts.pop(node)
            self._tell_draining()
        self._announce()
        self._fill(island)
        if len(island.hosts) == island.expected_hosts and island.state == "waiting":
            self.env.call_later(RETRY_S, _Overdue(island.name, island.epoch))

    def _await_restart(self, island: _Island, node: str, may_return: bool) -> None:
        """Keep the rank of a host that has died for a moment, if its supervisor may start it again.

        It has its programs compiled, and copies of what it kept; a spare has not.
        """
        if may_return:
            island.awaited.add(node)
            self.env.call_later(RESTART_S, _NotRestarted(island.name, island.epoch, node))
        else:
            island.awaited.discard(node)
            self._fill(island)

    @handles(_NotRestarted)
    def _not_restarted(self, sender: Address, note: _NotRestarted) -> None:
        island = self._islands.get(note.island)
        if island is not None and island.state == "waiting" and island.epoch == note.epoch:
            island.awaited.discard(note.node)
            self._fill(island)

    @handles(_Overdue)
    def _overdue(self, sender: Address, note: _Overdue) -> None:
        """Hosts that were told to leave have not come back: others may have their ranks."""
        island = self._islands.get(note.island)
        if island is not None and island.state == "waiting" and island.epoch == note.epoch:
            island.awaited.clear()
            island.is_open = True
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
            if self.env.now_s() < self._settling_until_s:
                self.env.call_later(1.0, message)
                return
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
            replaced = self._spare_for(island) is not None
            self._end_epoch(island, f"host {node} is drained", "")
            if not replaced:
                self._move_slices(island)
        self.env.log("info", "host is drained", host=node)

    def _cannot_do_without(self, island: _Island, node: str) -> Error | None:
        """Why a host cannot be drained."""
        if self._spare_for(island) is not None:
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
        if message.resumed:
            self._settling_until_s = self.env.now_s() + SETTLING_S
            self.env.call_later(MOVE_S, _Patience(message.slice, False))
            self.env.call_later(RESUME_S, _Patience(message.slice, True))
        self._place(message)
        if not message.resumed and message in self._parked:
            self.env.call_later(MOVE_S, _Patience(message.slice, True))

    def _place(self, request: AllocateSlice) -> None:
        island = self._roomiest(request)
        if request.formerly:
            home = self._islands.get(request.formerly)
            is_back = home is not None and home.state == "ready" and self._fits(home, request)
            island = home if is_back else None
        if island is not None:
            request = msgspec.structs.replace(request, resumed=False, formerly="")
            self._bind(request.slice, request, island)
        elif request.resumed or any(
            i.formed and i.state != "ready" and self._fits(i, request) for i in self._all()
        ):
            self._parked.append(request)
        else:
            self._refuse(request)

    @handles(_Patience)
    def _patience(self, sender: Address, note: _Patience) -> None:
        """A slice's own island does not come back, or none that could have it."""
        for request in [request for request in self._parked if request.slice == note.slice]:
            self._parked.remove(request)
            home = self._islands.get(request.formerly)
            if home is not None and not home.formed:
                home.is_open = True
                self._fill(home)
            request = msgspec.structs.replace(request, formerly="")
            if note.is_over and self._roomiest(request) is None:
                self._refuse(request)
            else:
                self._place(request)

    def _all(self) -> list[_Island]:
        return list(self._islands.values())

    def _retry_parked(self) -> None:
        """An island is ready again, or will not be: requests that waited for it have their answer."""
        parked, self._parked = self._parked, []
        for request in parked:
            self._place(request)

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
        devices = island.located(places)
        bound = SliceBound(number, island.name, island.platform, island.kind, devices, island.epoch)
        self.env.send(CONTROL, bound)

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
                tuple(node for node in island.ranks if node not in island.hosts),
            )
            for island in sorted(self._islands.values(), key=lambda island: island.name)
        )

    def waiting_hosts(self) -> tuple[WaitingHost, ...]:
        """Describe all hosts that are here and have no place in an island."""
        waiting = [("spare", host) for host in self._spares.values()]
        waiting += [("draining", host) for host in self._draining.values() if host is not None]
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


def _alike(island: _Island, registration: RegisterHost) -> bool:
    return (
        registration.local_devices == island.local_devices
        and registration.platform == island.platform
    )


def _block(topology: tuple[int, ...]) -> tuple[int, int]:
    """Rows (hosts) and columns (devices of one host) that a topology asks for."""
    if len(topology) < 2:
        return 1, 1
    return topology[0], math.prod(topology[1:])


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"
