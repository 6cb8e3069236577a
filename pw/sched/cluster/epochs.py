"""Seats hosts in islands, and forms islands under epochs.

An island is `waiting` for hosts, `forming` under a new epoch, then `ready`. Any host that is lost,
or fails to join, ends the epoch: the remaining hosts are told to leave, come back as new
incarnations, and the island is formed again under the next epoch. Each host takes its former rank
again; the rank of a lost host goes to a spare, or to the first host that registers. Slices survive:
their virtual devices are bound to the same ranks (`pw.sched.cluster.slices`), and the controller
lowers programs again. A drained host (`pw.sched.cluster.draining`) leaves in the same way, but for
good, and one that says that it is to end gets no seat.

A controller that is started again knows no hosts. Each host tells it of the epoch that it is in,
which gives the form of its island and the host of each rank; that epoch is then ended as any other.
Clients tell it of their slices, which wait for their islands.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from pw.core import messages as msg
from pw.core.actors.actor import Env, Part, handles
from pw.core.errors import AccessRefused, ArgumentError, Error, ErrorReport, HostLost
from pw.core.ids import CONTROL, SERVICES, Address, executor_of
from pw.core.platforms import platform_of
from pw.core.tenants import Claims
from pw.sched.cluster.inventory import SETTLING_S, Host, Inventory, Island, failed_in_words
from pw.sched.cluster.slices import SliceTable, WaitedEnough

RETRY_S = 0.5
"""Seconds before an island is formed again whose epoch could not begin."""
REJOIN_S = 15.0
"""Seconds for which the rank of a host that was told to leave is kept for the host."""
RESTART_S = 2.0
"""Seconds for which the rank of a host that died is kept for the host, if there is a spare."""

_LOST_SIGHT = "its controller was started again, or lost sight of it"


@dataclass(frozen=True, slots=True)
class Overdue:
    """Timer: hosts of this epoch should have come back."""

    island: str
    epoch: int


def not_allowed(host: Host) -> str:
    """Why a host may not join the island that it asks for."""
    return (
        f"the certificate of {host.node} does not allow the island {host.registration.island!r}, only "
        f"{', '.join(host.allowed)}; use another --island, or issue a certificate with `pw keys issue worker "
        f"{host.node.partition('/')[0]} --island {host.registration.island}`"
    )


@dataclass(eq=False, repr=False)
class Epochs(Part):
    """Which host is in which island, and the epochs of islands."""

    env: Env
    inventory: Inventory
    slices: SliceTable
    tickets: bytes
    """Public key with which hosts check the tickets of clients."""
    claims: Claims
    names_python_on: Callable[[str], bool]
    """Whether the rights of tenants say whose Python functions a host runs."""

    # --- hosts ---------------------------------------------------------------------------------------

    @handles(msg.RegisterHost)
    def _register(self, sender: Address, message: msg.RegisterHost) -> None:
        node = sender.node
        host = Host(node, message, self.env.islands_of(node))
        if message.island and not host.may_join(message.island):
            self.env.audit("refused", node=node, reason=not_allowed(host))
            self._reject(host, AccessRefused(not_allowed(host)))
            return
        if message.python_tenants and self.names_python_on(node):
            twice = ArgumentError(
                f"pw-worker --python-tenants and pw-controller --tenants both say whose Python functions host "
                f"{node} runs; start it with --allow-python instead"
            )
            self._reject(host, twice)
            return
        for island in self.inventory.islands.values():
            if node in island.hosts and island.state != "waiting":
                self.end_epoch(island, f"host {node} registered again", node, True)
                island.awaited.discard(node)
        self.env.introduce(node, message.endpoint)
        if message.epoch:
            self._recall(sender, message)
            return
        if node in self.inventory.draining or message.is_to_end:
            self.inventory.draining[node] = host
            for island in self.inventory.islands.values():
                if node in island.awaited:
                    island.awaited.discard(node)
                    self._fill(island)
            self._greet(host)
            self.announce()
            self.tell_draining()
            self._form_complete()
            return
        own = self.inventory.island_with_rank_of(node)
        if own is not None and not host.may_join(own.name):
            own = None
        if not message.island and own is None:
            self._wait_as_spare(host, "it takes any island's free seat")
            return
        if (
            not message.island_hosts
            and own is None
            and message.island not in self.inventory.islands
        ):
            self._wait_as_spare(host, f"island {message.island} is not there yet")
            return
        former = own or self.inventory.islands.get(message.island)
        if former is None or former.is_abandoned(message):
            home = self.inventory.declare(message, message.island_hosts)
            if former is not None:
                home.epoch, home.newest = former.epoch, former.newest
                home.is_late = former.is_late
        else:
            home = former
        if (error := home.objection(node, message)) is not None:
            self._reject(host, error)
        elif home.has_seat(node) and not home.misplaced(node, message):
            if message.island_hosts and home.name != message.island:
                self._remember_home(message)
            self._greet(host)
            self._seat(home, host)
        else:
            self._wait_as_spare(host, f"island {home.name} has its hosts, or waits for them")

    def _reject(self, host: Host, error: Error) -> None:
        self.env.log("warning", "host rejected", host=host.node, reason=str(error))
        self.env.send(executor_of(host.node), msg.HostRejected(ErrorReport.of(error)))

    def _recall(self, sender: Address, message: msg.RegisterHost) -> None:
        """End the epoch that a host was in under an earlier controller."""
        name, node = message.island, sender.node
        self.inventory.settling_until_s = self.env.now_s() + SETTLING_S
        former = self.inventory.islands.get(name)
        if former is None or not former.formed:
            here = former.hosts if former else {}
            island = self.inventory.declare(message, len(message.members))
            island.formed, island.ranks = True, list(message.members)
            for early in here.values():
                if early.node in island.ranks:
                    island.seat(early)
                else:
                    self.inventory.spares[early.node] = early
            island.awaited = set(island.ranks) - island.hosts.keys()
            island.epoch = message.epoch
            self.env.call_later(REJOIN_S, Overdue(name, island.epoch))
            self.env.call_later(self.slices.move_s, partial(self._move, name, island.epoch))
            self.env.log("info", "island found", island=name, epoch=message.epoch, host=node)
        else:
            island = former
            if island.state == "waiting" and node in island.ranks:
                island.awaited.add(node)
        island.newest = max(island.newest, message.epoch)
        self.env.send(sender, msg.LeaveIsland(name, message.epoch, _LOST_SIGHT))

    def _remember_home(self, message: msg.RegisterHost) -> None:
        """Declare the own island of a host that has a seat elsewhere.

        Only an earlier controller may have known that island. Perhaps no host that registers names
        it, so spares fill it.
        """
        home = self.inventory.islands.get(message.island)
        if home is None:
            home = self.inventory.declare(message, message.island_hosts)
        if not home.formed:
            self.env.call_later(REJOIN_S, Overdue(home.name, home.epoch))

    def _seat(self, island: Island, host: Host) -> None:
        """Give a host its seat, and form the island when it is the last one."""
        self.inventory.spares.pop(host.node, None)
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
        island.seat(host)
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
        if island.formed:
            self._fill(island)

    def _greet(self, host: Host) -> None:
        """Tell a host that this controller is here; who else is here it hears with all (`announce`).

        When thousands of hosts start, each would be told of all before it.
        """
        key = self.claims.key_of(host.node)
        self.env.send(executor_of(host.node), msg.HostRegistered(key))

    def _wait_as_spare(self, host: Host, reason: str) -> None:
        self.inventory.spares[host.node] = host
        self._greet(host)
        self.env.log("info", "host waits as a spare", host=host.node, reason=reason)
        self.announce()
        for island in list(self.inventory.islands.values()):
            self._fill(island)

    def _fill(self, island: Island) -> None:
        """Give the free seats of an island that waits to spares."""
        while island.state == "waiting" and self.inventory.takes_spares(island):
            spare = self.inventory.spare_for(island)
            if spare is None:
                return
            self._seat(island, spare)

    def _form(self, island: Island) -> None:
        if None in self.inventory.draining.values():
            return  # a drained host has yet to come back, with replicas that the island needs
        if not island.formed:
            island.formed = True
            island.ranks = sorted(island.hosts)
        else:
            self.announce()  # hosts that have come back may have replicas that others need
        island.epoch = island.newest = max(island.epoch, island.newest) + 1
        island.state = "forming"
        if island.expected_hosts > 1:
            self.env.send(
                SERVICES, msg.StartCoordination(island.name, island.epoch, island.expected_hosts)
            )
        else:
            self._invite(island, "")

    def _form_complete(self) -> None:
        """Form the islands that have all their hosts, and waited for a host that is drained."""
        for island in self.inventory.islands.values():
            if island.state == "waiting" and island.is_complete:
                self._form(island)

    @handles(msg.CoordinationStarted)
    def _coordination_started(self, sender: Address, message: msg.CoordinationStarted) -> None:
        island = self.inventory.islands.get(message.island)
        if island is None or island.epoch != message.epoch or island.state != "forming":
            self.env.send(SERVICES, msg.StopCoordination(message.island, message.epoch))
        elif message.error:
            self.end_epoch(island, f"no coordination service: {message.error}")
        else:
            self._invite(island, message.address)

    def _invite(self, island: Island, group_address: str) -> None:
        island.invited = True
        hosts = tuple(host.node for host in island.ranked())
        for rank, node in enumerate(hosts):
            self.env.send(
                executor_of(node),
                msg.FormIsland(island.name, island.epoch, hosts, rank, group_address, self.tickets),
            )

    @handles(msg.IslandJoined)
    def _joined(self, sender: Address, message: msg.IslandJoined) -> None:
        island = self._current(sender, message.island, message.epoch)
        if island is None:  # it may not know that it was lost here, and would wait for ever
            self.env.send(sender, msg.LeaveIsland(message.island, message.epoch, _LOST_SIGHT))
            return
        if island.state != "forming":
            self.env.count("messages_stale")
            return
        if message.devices != island.local_devices:
            self.end_epoch(
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
        island.lay_out()
        hosts = tuple(host.node for host in island.ranked())
        self.env.log(
            "info", "island ready", island=island.name, epoch=island.epoch, hosts=",".join(hosts)
        )
        self.announce()
        memory = [host.joined.memory_bytes for host in island.hosts.values() if host.joined]
        limits = [limit for limit in memory if limit is not None]
        island.memory_bytes = min(limits, default=None)
        formed = msg.IslandFormed(
            island.name,
            island.epoch,
            hosts,
            island.memory_bytes,
            platform_of(island.platform).is_host,
            island.device_count - len(island.failed_positions()),
            min(host.joined.spill_bytes for host in island.hosts.values() if host.joined),
            all(host.joined.spill_files for host in island.hosts.values() if host.joined),
        )
        self.env.send(CONTROL, formed)
        self.slices.bind_again(island)
        for other in list(self.inventory.islands.values()):
            self._fill(other)
        self.slices.retry_parked()
        for other in self.inventory.islands.values():
            if other.is_late and other.state == "waiting":
                self.slices.move(other)

    def announce(self) -> None:
        """Tell hosts and clients which hosts are registered."""
        directory = self.inventory.directory()
        for peer in directory.peers:
            self.env.send(executor_of(peer.node), directory)
        self.env.send(CONTROL, directory)

    def tell_draining(self) -> None:
        """Tell the controller which hosts are registered only to be emptied."""
        here = tuple(node for node, host in self.inventory.draining.items() if host is not None)
        self.env.send(CONTROL, msg.Draining(here))

    @handles(msg.IslandJoinFailed)
    def _join_failed(self, sender: Address, message: msg.IslandJoinFailed) -> None:
        island = self._current(sender, message.island, message.epoch)
        if island is not None:
            self.end_epoch(island, f"host {sender.node} could not join: {message.error.message}")

    def leave_out(self, island: Island, node: str) -> None:
        """Have an island go on without the failed devices of a host; those that are well again may be used.

        The island is formed again only if slices have such a device: they get others (`SliceTable.bind_again`).
        """
        island.devices_changed()
        failed = self.inventory.failed_devices.get(node, {})
        for ordinal, words in failed.items():
            self.env.log("warning", "device is left out", host=node, device=ordinal, reason=words)
        if island.state != "ready":
            return  # its slices are bound when it is
        in_use = {
            ordinal
            for piece in self.slices.on(island)
            for rank, ordinal in piece.positions
            if island.ranks[rank] == node and ordinal in failed
        }
        if in_use:
            self.end_epoch(island, failed_in_words(node, {at: failed[at] for at in in_use}))
        else:
            self.slices.retry_parked()

    @handles(msg.EndEpoch)
    def _epoch_broken(self, sender: Address, message: msg.EndEpoch) -> None:
        island = self.inventory.islands.get(message.island)
        if island is not None and island.epoch == message.epoch and island.state == "ready":
            self.end_epoch(island, message.reason, client=message.client)

    def _current(self, sender: Address, name: str, epoch: int) -> Island | None:
        island = self.inventory.islands.get(name)
        if island is None or island.epoch != epoch or sender.node not in island.hosts:
            self.env.count("messages_stale")
            return None
        return island

    @handles(msg.PeerLost)
    def _peer_lost(self, sender: Address, message: msg.PeerLost) -> None:
        node = message.node
        if self.inventory.spares.pop(node, None) is not None:
            self.announce()
        for island in self.inventory.islands.values():
            if node in island.hosts:
                words = f"host {node} was lost: {message.words}"
                self.end_epoch(island, words, node, message.may_return)
            elif node in island.awaited and message.reason != "closed":
                # It died, and another host reported that first.
                self._await_restart(island, node, message.may_return)

    def end_epoch(
        self, island: Island, reason: str, lost: str = "", may_return: bool = False, client: int = 0
    ) -> None:
        """Have an island leave its epoch; each host but `lost` comes back as a new incarnation.

        The reason may name the work of `client`.
        """
        self.env.log("warning", "island left its epoch", island=island.name, reason=reason)
        if island.state == "waiting" or not island.invited:
            self._stay(island, lost)
            return
        # A spare may form the next epoch before the end of this one is told.
        was_ready, epoch = island.state == "ready", island.epoch
        remaining = [node for node in island.hosts if node != lost]
        island.state = "waiting"
        island.invited = False
        island.hosts.clear()
        island.awaited = {node for node in remaining if node not in self.inventory.draining}
        if lost:
            self._await_restart(island, lost, may_return)
        for node in remaining:
            self.env.send(executor_of(node), msg.LeaveIsland(island.name, epoch, reason))
        if island.expected_hosts > 1:
            self.env.send(SERVICES, msg.StopCoordination(island.name, epoch))
        if was_ready:
            error = HostLost(f"island {island.name!r} stopped: {reason}")
            report = ErrorReport.of(error)
            self.env.send(CONTROL, msg.EpochEnded(island.name, epoch, report, lost, client))
        self.announce()
        self.env.call_later(REJOIN_S, Overdue(island.name, epoch))
        self.env.call_later(self.slices.move_s, partial(self._move, island.name, epoch))
        self._fill(island)

    def _stay(self, island: Island, lost: str) -> None:
        """Keep all hosts but `lost`: they have not been told of the epoch."""
        if island.state == "forming" and island.expected_hosts > 1:
            self.env.send(SERVICES, msg.StopCoordination(island.name, island.epoch))
        island.state = "waiting"
        island.hosts.pop(lost, None)
        for node in [node for node in island.hosts if node in self.inventory.draining]:
            self.inventory.draining[node] = island.hosts.pop(node)
            self.tell_draining()
        self.announce()
        self._fill(island)
        if island.is_complete and island.state == "waiting":
            self.env.call_later(RETRY_S, Overdue(island.name, island.epoch))

    def _await_restart(self, island: Island, node: str, may_return: bool) -> None:
        """Keep the rank of a host that has died for a moment, if its supervisor may start it again.

        Unlike a spare, that host has compiled programs and kept replicas.
        """
        if may_return:
            island.awaited.add(node)
            self.env.call_later(
                RESTART_S, partial(self._not_restarted, island.name, island.epoch, node)
            )
        else:
            island.awaited.discard(node)
            self._fill(island)

    def _not_restarted(self, name: str, epoch: int, node: str) -> None:
        """Do not wait any more for a host that died and should have been started again."""
        if (island := self.inventory.away(name, epoch)) is not None:
            island.awaited.discard(node)
            self._fill(island)

    @handles(Overdue)
    def _overdue(self, sender: Address, timer: Overdue) -> None:
        """Give the ranks of hosts that have not come back to others."""
        if (island := self.inventory.away(timer.island, timer.epoch)) is not None:
            island.awaited.clear()
            island.is_open = True
            self._fill(island)
            self._form_complete()

    def _move(self, name: str, epoch: int) -> None:
        """Move the slices of an island that does not come back."""
        if (island := self.inventory.away(name, epoch)) is not None:
            self.announce()  # hosts that have come back may have replicas to give
            island.is_late = True
            self.slices.move(island)

    @handles(WaitedEnough)
    def _waited_enough(self, sender: Address, timer: WaitedEnough) -> None:
        """Give the seats of a slice's former island to spares, if it has not been formed."""
        for piece in self.slices.parked:
            home = self.inventory.islands.get(piece.request.formerly)
            if piece.request.slice == timer.slice and home is not None and not home.formed:
                home.is_open = True
                self._fill(home)
