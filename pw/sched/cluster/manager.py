"""The resource manager: seats hosts in islands, and forms islands under epochs.

An island is `waiting` for hosts, `forming` under a new epoch, then `ready`. Any host that is lost, or
fails to join, ends the epoch: the remaining hosts are told to leave, come back as new incarnations, and
the island is formed again under the next epoch. Each host takes the rank again that it had; the rank of
a lost host goes to a spare host, or to the first host that registers. Slices survive: their virtual
devices are bound to the same ranks (`pw.sched.cluster.slices`), and the controller lowers programs
again. A drained host (`pw.sched.cluster.draining`) leaves in the same way, but for good.

A controller that is started again knows nothing. Hosts tell it of the epoch that they are in, which is all it
takes to know an island's form and who has which rank; from there on it is an epoch that ends as any other.
Clients tell it of their slices, which wait for their islands.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pw.core.actor import Actor, Env, handles
from pw.core.errors import ErrorReport, HostLost
from pw.core.ids import CONTROL, SERVICES, Address, executor_of
from pw.core.messages import (
    AllocateSlice,
    CoordinationStarted,
    DrainHost,
    EndEpoch,
    FormIsland,
    HostEmptied,
    HostRejected,
    IslandFormed,
    IslandJoined,
    IslandJoinFailed,
    IslandLost,
    IslandStatus,
    LeaveIsland,
    PeerLost,
    RegisterHost,
    ReleaseSlice,
    StartCoordination,
    StopCoordination,
    WaitingHost,
)
from pw.sched.cluster.draining import Drains
from pw.sched.cluster.inventory import SETTLING_S, Host, Inventory, Island
from pw.sched.cluster.slices import MOVE_S, Slices, WaitedEnough

RETRY_S = 0.5
"""How long to wait before an island is formed again whose epoch could not begin."""
REJOIN_S = 15.0
"""How long the rank of a host that was told to leave is kept for it."""
RESTART_S = 2.0
"""How long the rank of a host that died is kept for it, if there is a spare."""


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


class ResourceManager(Actor):
    """Owns all devices of all islands and maps virtual ones to them."""

    def __init__(self, env: Env, secret: bytes) -> None:
        super().__init__(env)
        self._secret = secret
        inventory = self.inventory = Inventory()
        self._islands = inventory.islands
        self._spares = inventory.spares
        self._draining = inventory.draining
        self._slices = Slices(env, inventory, self._fill)
        self._drains = Drains(env, inventory, self._slices, self._end_epoch, self._announce)

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
        host = Host(node, message)
        if node in self._draining:
            self._draining[node] = host
            self._announce()
            self._drains.tell()
            self._form_complete()
            return
        own = self.inventory.island_with_rank_of(node)
        if not message.island and own is None:
            self._wait_as_spare(host, "it takes any island's free place")
            return
        if not message.island_hosts and own is None and message.island not in self._islands:
            self._wait_as_spare(host, f"island {message.island} is not there yet")
            return
        known = own or self._islands.get(message.island)
        if known is None or known.is_abandoned(message):
            former = known
            known = self.inventory.declare(message, message.island_hosts)
            if former is not None:
                known.epoch, known.newest = former.epoch, former.newest
                known.is_late = former.is_late
        if (error := known.objection(node, message)) is not None:
            self.env.log("warning", "host rejected", host=node, reason=str(error))
            self.env.send(sender, HostRejected(ErrorReport.of(error)))
        elif known.has_place(node):
            if message.island_hosts and known.name != message.island:
                self._remember_home(message)
            self._seat(known, host)
        else:
            self._wait_as_spare(host, f"island {known.name} has its hosts, or waits for them")

    def _recall(self, sender: Address, message: RegisterHost) -> None:
        """A host is in an epoch that is not one of ours: it is as if that epoch had just been ended."""
        name, node = message.island, sender.node
        self.inventory.settling_until_s = self.env.now_s() + SETTLING_S
        known = self._islands.get(name)
        if known is None or not known.formed:
            here = known.hosts if known else {}
            island = self.inventory.declare(message, len(message.members))
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
            home = self.inventory.declare(message, message.island_hosts)
        if not home.formed:
            self.env.call_later(REJOIN_S, _Overdue(home.name, home.epoch))

    def _seat(self, island: Island, host: Host) -> None:
        """Give a host its place, and form the island when it is the last one."""
        self._spares.pop(host.node, None)
        if island.formed and host.node not in island.ranks:
            rank = island.free_rank()
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
        if island.is_complete:
            self._form(island)
            return
        # It hears that we are here.
        self.env.send(executor_of(host.node), self.inventory.directory())
        if island.formed:
            self._fill(island)

    def _wait_as_spare(self, host: Host, reason: str) -> None:
        self._spares[host.node] = host
        self.env.log("info", "host waits as a spare", host=host.node, reason=reason)
        self._announce()
        for island in list(self._islands.values()):
            self._fill(island)

    def _fill(self, island: Island) -> None:
        """Give free places of an island that waits to spare hosts."""
        while island.state == "waiting" and self.inventory.takes_spares(island):
            spare = self.inventory.spare_for(island)
            if spare is None:
                return
            self._seat(island, spare)

    def _form(self, island: Island) -> None:
        if self._drains.is_waiting:
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

    def _form_complete(self) -> None:
        """Form the islands that have all their hosts: they may have waited for one that is drained."""
        for island in self._islands.values():
            if island.state == "waiting" and island.is_complete:
                self._form(island)

    @handles(CoordinationStarted)
    def _coordination_started(self, sender: Address, message: CoordinationStarted) -> None:
        island = self._islands.get(message.island)
        if island is None or island.epoch != message.epoch or island.state != "forming":
            self.env.send(SERVICES, StopCoordination(message.island, message.epoch))
        elif message.error:
            self._end_epoch(island, f"no coordination service: {message.error}")
        else:
            self._invite(island, message.address)

    def _invite(self, island: Island, group_address: str) -> None:
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

    def _ready(self, island: Island, kind: str) -> None:
        island.state = "ready"
        island.is_late = False
        island.kind = kind
        hosts = tuple(host.node for host in island.ranked())
        self.env.log(
            "info", "island ready", island=island.name, epoch=island.epoch, hosts=",".join(hosts)
        )
        self._announce()
        memory = [host.joined.memory_bytes for host in island.hosts.values() if host.joined]
        limits = [limit for limit in memory if limit is not None]
        formed = IslandFormed(island.name, island.epoch, hosts, min(limits) if limits else None)
        self.env.send(CONTROL, formed)
        self._slices.bind_again(island)
        for other in list(self._islands.values()):
            self._fill(other)
        self._slices.retry_parked()
        for other in self._islands.values():
            if other.is_late and other.state == "waiting":
                self._slices.move(other)

    def _announce(self) -> None:
        """Tell hosts and clients who is here."""
        directory = self.inventory.directory()
        for peer in directory.peers:
            self.env.send(executor_of(peer.node), directory)
        self.env.send(CONTROL, directory)

    @handles(IslandJoinFailed)
    def _join_failed(self, sender: Address, message: IslandJoinFailed) -> None:
        island = self._current(sender, message.island, message.epoch)
        if island is not None:
            self._end_epoch(island, f"host {sender.node} could not join: {message.error.message}")

    @handles(EndEpoch)
    def _epoch_broken(self, sender: Address, message: EndEpoch) -> None:
        island = self._islands.get(message.island)
        if island is not None and island.epoch == message.epoch and island.state == "ready":
            self._end_epoch(island, message.reason)

    def _current(self, sender: Address, name: str, epoch: int) -> Island | None:
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
        self._drains.host_lost(node)
        for island in self._islands.values():
            if node in island.hosts:
                words = f"host {node} was lost: {message.words}"
                self._end_epoch(island, words, node, message.may_return)
            elif node in island.awaited and message.reason != "closed":
                # It did not leave, it died, which another host has noticed first.
                self._await_restart(island, node, message.may_return)

    def _end_epoch(
        self, island: Island, reason: str, lost: str = "", may_return: bool = False
    ) -> None:
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
            error = HostLost(f"island {island.name!r} stopped: {reason}")
            report = ErrorReport.of(error)
            self.env.send(CONTROL, IslandLost(island.name, island.epoch, report, lost))
        self._announce()
        self.env.call_later(REJOIN_S, _Overdue(island.name, island.epoch))
        self.env.call_later(MOVE_S, _Move(island.name, island.epoch))
        self._fill(island)

    def _stay(self, island: Island, lost: str) -> None:
        """The hosts know of no epoch yet, so all but `lost` can stay as they are."""
        if island.state == "forming" and island.expected_hosts > 1:
            self.env.send(SERVICES, StopCoordination(island.name, island.epoch))
        island.state = "waiting"
        island.hosts.pop(lost, None)
        for node in [node for node in island.hosts if node in self._draining]:
            self._draining[node] = island.hosts.pop(node)
            self._drains.tell()
        self._announce()
        self._fill(island)
        if island.is_complete and island.state == "waiting":
            self.env.call_later(RETRY_S, _Overdue(island.name, island.epoch))

    def _await_restart(self, island: Island, node: str, may_return: bool) -> None:
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
            self._drains.give_up(island.name)
            self._fill(island)
            self._form_complete()

    @handles(_Move)
    def _move(self, sender: Address, note: _Move) -> None:
        """The island does not come back: its slices go where there is room."""
        island = self._islands.get(note.island)
        if island is not None and island.state == "waiting" and island.epoch == note.epoch:
            self._announce()  # whoever has come back may have copies to give
            island.is_late = True
            self._slices.move(island)

    # --- draining ------------------------------------------------------------------------------------

    @handles(DrainHost)
    def _drain(self, sender: Address, message: DrainHost) -> None:
        self._drains.begin(message)

    @handles(HostEmptied)
    def _emptied(self, sender: Address, message: HostEmptied) -> None:
        self._drains.emptied(message.node)

    # --- slices --------------------------------------------------------------------------------------

    @handles(AllocateSlice)
    def _allocate(self, sender: Address, message: AllocateSlice) -> None:
        self._slices.allocate(message)

    @handles(WaitedEnough)
    def _waited_enough(self, sender: Address, note: WaitedEnough) -> None:
        self._slices.waited_enough(note)

    @handles(ReleaseSlice)
    def _release(self, sender: Address, message: ReleaseSlice) -> None:
        self._slices.release(message.slice)

    # --- status --------------------------------------------------------------------------------------

    def status(self, queued: Mapping[str, tuple[int, int]]) -> tuple[IslandStatus, ...]:
        """Describe all islands; `queued` has the (queued, launched) segments of each."""
        return self.inventory.status(self._slices.counts(), queued)

    def waiting_hosts(self) -> tuple[WaitingHost, ...]:
        """Describe all hosts that are here and have no place in an island."""
        return self.inventory.waiting_hosts()
