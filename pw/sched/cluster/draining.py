"""Empties hosts that are to be taken away, without anybody losing what is on them.

    asked -> its island leaves the epoch -> it is back, with no place -> copied elsewhere -> told to leave

A host leaves its island as any does, but its rank goes to a spare at once, and its next incarnation takes no
place: it stays until the controller has had all that it held copied elsewhere (`HostEmptied`). Where no spare
can take over, the island's slices move to islands that have room; where there are none, the host cannot be
drained.
"""

from __future__ import annotations

from collections.abc import Callable

from pw.core.actor import Env
from pw.core.errors import ArgumentError, Error, ErrorReport, HostLost, InsufficientDevices
from pw.core.ids import CONTROL, executor_of, session_of
from pw.core.messages import Answered, DrainHost, Draining, Leave
from pw.sched.cluster.inventory import Inventory, Island, counted
from pw.sched.cluster.slices import Slices

AGAIN_S = 1.0
"""How often to look for a host that is being started again, or that an earlier controller may have had."""


class Drains:
    """The resource manager's part that empties hosts; see the module.

    Args:
        env: of the resource manager.
        inventory: the hosts.
        slices: what is bound to them.
        leave_epoch: has an island leave its epoch, for this reason.
        announce: tells everybody who is here.
    """

    def __init__(
        self,
        env: Env,
        inventory: Inventory,
        slices: Slices,
        leave_epoch: Callable[[Island, str], None],
        announce: Callable[[], None],
    ) -> None:
        self._env = env
        self._inventory = inventory
        self._draining = inventory.draining
        self._slices = slices
        self._leave_epoch = leave_epoch
        self._announce = announce
        self._asked: dict[str, list[DrainHost]] = {}
        """Who wants to hear when a host has been drained."""
        self._left: dict[str, str] = {}
        """The islands that hosts have left to be emptied."""

    def begin(self, message: DrainHost) -> None:
        """Have a host emptied; the client that asks hears when that is done, or why it cannot be."""
        node, inventory = message.node, self._inventory
        if (spare := inventory.spares.pop(node, None)) is not None:
            self._draining[node] = spare
            self.tell()
        island = inventory.island_of(node)
        if node not in self._draining and island is None:
            may_come = any(node in known.awaited for known in inventory.islands.values())
            if may_come or self._env.now_s() < inventory.settling_until_s:
                self._env.call_later(AGAIN_S, message)
                return
            known = sorted(n for i in inventory.islands.values() for n in i.hosts)
            error = ArgumentError(f"there is no host {node!r}; there are {', '.join(known)}")
            self._answer(message, error)
            return
        if island is not None and (objection := self._objection(island, node)) is not None:
            self._answer(message, objection)
            return
        self._asked.setdefault(node, []).append(message)
        if island is not None:
            self._draining[node] = None
            self._left[node] = island.name
            replaced = inventory.spare_for(island) is not None
            self._leave_epoch(island, f"host {node} is drained")
            if not replaced:
                self._slices.move(island)
        self._env.log("info", "host is drained", host=node)

    def _objection(self, island: Island, node: str) -> Error | None:
        """Why an island cannot do without a host."""
        if self._inventory.spare_for(island) is not None:
            return None
        stuck = self._slices.stuck_on(island)
        if not stuck:
            return None
        return InsufficientDevices(
            f"host {node} cannot be drained: no spare host can take its place in island {island.name}, and "
            f"no other island has room for {counted(stuck, 'slice')} on it; add a worker with --spare"
        )

    def tell(self) -> None:
        """Tell the controller which hosts are here only to be emptied."""
        here = tuple(node for node, host in self._draining.items() if host is not None)
        self._env.send(CONTROL, Draining(here))

    @property
    def is_waiting(self) -> bool:
        """Whether a host that is to be emptied has not come back yet, with what it holds."""
        return None in self._draining.values()

    def emptied(self, node: str) -> None:
        """The controller needs nothing any more that is on this host."""
        if self._draining.get(node) is not None:
            self._env.send(executor_of(node), Leave("it was drained"))
            self._end(node, None)

    def host_lost(self, node: str) -> None:
        """A host that was being emptied is gone, which is what was asked for."""
        if self._draining.get(node) is not None:
            self._end(node, None)

    def give_up(self, island: str) -> None:
        """Hosts that have left this island and have not come back by now will not."""
        for node in [node for node, host in self._draining.items() if host is None]:
            if self._left[node] == island:
                self._end(node, HostLost(f"host {node} did not come back to be emptied"))

    def _end(self, node: str, error: Error | None) -> None:
        del self._draining[node]
        self._left.pop(node, None)
        for message in self._asked.pop(node, ()):
            self._answer(message, error)
        self.tell()
        self._announce()

    def _answer(self, message: DrainHost, error: Error | None) -> None:
        report = ErrorReport.of(error) if error is not None else None
        self._env.send(session_of(message.client), Answered(message.request, report))
