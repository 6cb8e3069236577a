"""Empties hosts that are to be taken away, so that nothing on them is lost.

    asked -> its island leaves the epoch -> it is back, without a seat -> copied elsewhere -> told to leave

A host leaves its island as any does, but its rank goes to a spare at once, and its next incarnation
gets no seat: it stays until the controller has had all that it held copied elsewhere
(`HostEmptied`). Where no spare can take over, the island's slices move to islands that have room, as soon as
its hosts are back with what they held; where there are none, the host cannot be drained.

A host that is told to end has no choice (`AskToLeave`). Where nothing can take its slices, their clients leave
first: the controller suspends them (`HostMustEnd`), and they go on where there is room again.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pw.core import messages as msg
from pw.core.actors.actor import Env, Part, handles
from pw.core.errors import ArgumentError, Error, ErrorReport, HostLost, InsufficientDevices
from pw.core.ids import CONTROL, Address, executor_of, session_of
from pw.sched.cluster.epochs import Epochs, Overdue
from pw.sched.cluster.inventory import Inventory, Island, counted
from pw.sched.cluster.slices import SliceTable

AGAIN_S = 1.0
"""Seconds between two looks for a host that is restarting, or that an earlier controller may have had."""


@dataclass(frozen=True, slots=True)
class _LookWhoIsBack:
    """A host has come or gone: perhaps all hosts of an island are back whose slices are to move."""

    island: str


@dataclass(eq=False, repr=False)
class Drains(Part):
    """Drains hosts."""

    env: Env
    inventory: Inventory
    slices: SliceTable
    epochs: Epochs
    _asked: dict[str, list[msg.DrainHost]] = field(default_factory=dict, init=False)
    """Requests to answer when a host is drained, by the host."""
    _left: dict[str, str] = field(default_factory=dict, init=False)
    """Islands that drained hosts have left, by the host."""
    _to_move: set[str] = field(default_factory=set, init=False)
    """Names of islands whose slices move when their hosts are back."""
    _to_end: set[str] = field(default_factory=set, init=False)
    """Names of hosts that have asked to leave."""

    @handles(msg.DrainHost)
    def _drain(self, sender: Address, message: msg.DrainHost) -> None:
        """Empty a host, and tell the client when that is done, or why it cannot be."""
        node, inventory = message.node, self.inventory
        island = inventory.island_of(node)
        if island is None and not (node in inventory.draining or node in inventory.spares):
            if self._is_restarting(node) or self.env.now_s() < inventory.settling_until_s:
                self.env.call_later(AGAIN_S, message)
                return
            names = sorted(n for i in inventory.islands.values() for n in i.hosts)
            error = ArgumentError(f"there is no host {node!r}; there are {', '.join(names)}")
            self._answer(message, error)
            return
        if island is not None and (objection := self._objection(island, node)) is not None:
            self._answer(message, objection)
            return
        self._asked.setdefault(node, []).append(message)
        self._empty(node, island)

    def _empty(self, node: str, island: Island | None) -> None:
        inventory = self.inventory
        if (spare := inventory.spares.pop(node, None)) is not None:
            inventory.draining[node] = spare
            self.epochs.tell_draining()
        if island is not None:
            inventory.draining[node] = None
            self._left[node] = island.name
            is_replaced = inventory.spare_for(island) is not None
            self.epochs.end_epoch(island, f"host {node} is drained")
            if not is_replaced:
                self._to_move.add(island.name)
                # Between epochs the host has been let go at once, and no message need come any more.
                self._look_soon()
        self.env.log("info", "host is drained", host=node)

    @handles(_LookWhoIsBack)
    def _look_who_is_back(self, sender: Address, note: _LookWhoIsBack) -> None:
        """Move the slices of an island when its hosts are back: what lay on them is copied, not made again."""
        island = self.inventory.islands[note.island]
        if island.state != "waiting":
            self._to_move.discard(island.name)
            return
        draining = [node for node, name in self._left.items() if name == island.name]
        is_back = all(self.inventory.draining.get(node) is not None for node in draining)
        if is_back and not island.awaited:
            self._to_move.discard(island.name)
            self.slices.move(island)

    def _look_soon(self) -> None:
        """Look at the islands whose slices are to move, when the message that came now was handled."""
        for name in self._to_move:
            self.env.send(self.env.address, _LookWhoIsBack(name))

    @handles(msg.AskToLeave)
    def _ask_to_leave(self, sender: Address, message: msg.AskToLeave) -> None:
        """Empty the host that asks, and have it end; clients leave before if nothing can take their slices."""
        node, island = sender.node, self.inventory.island_of(sender.node)
        self._to_end.add(node)
        objection = None if island is None else self._objection(island, node)
        if island is not None and objection is not None:
            self.env.log(
                "info", "host must end", host=node, meaning="its clients leave", why=objection
            )
            self.env.send(CONTROL, msg.HostMustEnd(node, island.name))
        elif island is not None or node in self.inventory.spares:
            self._empty(node, island)
        elif node not in self.inventory.draining and not self._is_restarting(node):
            self.env.send(sender, msg.Leave("it is told to end, and it has no place", keeps=True))

    def _is_restarting(self, node: str) -> bool:
        """Whether a host has left an epoch: its next incarnation says that it is to end."""
        return any(node in island.awaited for island in self.inventory.islands.values())

    @handles(msg.ClientsLeft)
    def _clients_left(self, sender: Address, message: msg.ClientsLeft) -> None:
        """Empty a host whose clients have left."""
        island = self.inventory.island_of(message.node)
        if island is not None and message.node in self._to_end:
            self._empty(message.node, island)

    @handles(msg.RegisterHost)
    def _registered(self, sender: Address, message: msg.RegisterHost) -> None:
        """Another worker with the name of a host that was to end is a new host."""
        node, draining = sender.node, self.inventory.draining
        self._look_soon()
        if message.is_to_end:
            self._to_end.add(node)
        elif node in self._to_end and node in draining:
            self._end(node, None)
        elif node in self._to_end:
            self._has_ended(node)

    @handles(msg.ReplaceHost)
    def _replace_slow(self, sender: Address, message: msg.ReplaceHost) -> None:
        """Empty a host that is slow if a spare can take its place."""
        island = self.inventory.island_of(message.node)
        if island is not None and message.node not in self.inventory.draining:
            self._replace(island, message.node, f"it {message.reason}")

    @handles(msg.DevicesFailed)
    def _devices_failed(self, sender: Address, message: msg.DevicesFailed) -> None:
        """Empty the host if a well spare can take its place; else its island goes on without the devices."""
        node, inventory = message.node, self.inventory
        inventory.failed_devices.pop(node, None)
        if message.devices:
            inventory.failed_devices[node] = {one.device: one.words for one in message.devices}
        island = inventory.island_of(node)
        if island is None or node in inventory.draining:
            return
        if not message.devices or not self._replace(island, node, "it has a sick device"):
            self.epochs.leave_out(island, node)

    def _replace(self, island: Island, node: str, why: str) -> bool:
        """Empty a host if a spare without failed devices can take its place; return whether one can."""
        objection, spare = self._objection(island, node), self.inventory.spare_for(island)
        if (
            objection is None
            and spare is not None
            and spare.node not in self.inventory.failed_devices
        ):
            self.env.log("warning", "host is replaced", host=node, why=why)
            self._empty(node, island)
            return True
        reason = "there is no spare host for it" if objection is None else str(objection)
        self.env.log("warning", "host is not replaced", host=node, why=why, reason=reason)
        return False

    def _objection(self, island: Island, node: str) -> Error | None:
        """Return why an island cannot do without a host."""
        if named := self.slices.naming(node):
            return InsufficientDevices(
                f"host {node} cannot be drained: {counted(named, 'slice')} may be on no other host "
                "(hosts=). Their clients can use other slices and delete what lies on these"
            )
        if (spare := self.inventory.spare_for(island)) is not None:
            displaced = self.slices.displaced_by(spare, node, island)
            if not displaced:
                return None
            return InsufficientDevices(
                f"host {node} cannot be drained: spare host {spare.node} has other coordinates, without which "
                f"{counted(displaced, 'slice')} with a topology would have no block; give a spare the --coords "
                "of the host that it is to replace"
            )
        stuck = self.slices.stuck_on(island)
        if not stuck:
            return None
        return InsufficientDevices(
            f"host {node} cannot be drained: no spare host can take its place in island {island.name}, and "
            f"no other island has room for {counted(stuck, 'slice')} on it; add a worker with --spare"
        )

    @handles(msg.HostEmptied)
    def _emptied(self, sender: Address, message: msg.HostEmptied) -> None:
        """The controller needs nothing any more that is on a host."""
        if self.inventory.draining.get(message.node) is not None:
            reason = (
                "it was drained, and no host took all it has" if message.keeps else "it was drained"
            )
            self.env.send(executor_of(message.node), msg.Leave(reason, message.keeps))
            self._end(message.node, None)

    @handles(msg.PeerLost)
    def _peer_lost(self, sender: Address, message: msg.PeerLost) -> None:
        """A host that is lost while it is emptied counts as drained."""
        self._look_soon()
        if self.inventory.draining.get(message.node) is not None:
            self._end(message.node, None)
        elif message.node not in self.inventory.draining:
            self._has_ended(message.node)

    @handles(Overdue)
    def _overdue(self, sender: Address, timer: Overdue) -> None:
        """Give up drained hosts that have left this epoch and have not come back."""
        if self.inventory.away(timer.island, timer.epoch) is None:
            return
        for node in [node for node, host in self.inventory.draining.items() if host is None]:
            if self._left.get(node) == timer.island:
                self._end(node, HostLost(f"host {node} did not come back to be emptied"))

    def _end(self, node: str, error: Error | None) -> None:
        del self.inventory.draining[node]
        self._left.pop(node, None)
        self._look_soon()
        for message in self._asked.pop(node, ()):
            self._answer(message, error)
        self._has_ended(node)
        self.epochs.tell_draining()
        self.epochs.announce()

    def _has_ended(self, node: str) -> None:
        if node in self._to_end:
            self._to_end.remove(node)
            self.env.send(CONTROL, msg.HostEnded(node))

    def _answer(self, message: msg.DrainHost, error: Error | None) -> None:
        report = ErrorReport.of(error) if error is not None else None
        self.env.send(session_of(message.client), msg.Answered(message.request, report))
