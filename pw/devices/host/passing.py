"""Passes the orders to large gangs on to other hosts, and gives this host its own (`pw.core.messages.trees`).

An order is passed on before this host takes it: what this host still waits for delays no other host. The
hosts behind a host that is lost hear of the end of the epoch from the resource manager. If only a link is
lost, its upper end reports it, because orders may be lost with it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from msgspec.structs import replace

from pw.core import messages as msg
from pw.core.actors.actor import Env, Part, handles
from pw.core.ids import CONTROLLER, Address, executor_of
from pw.devices.host.launch_order import LaunchOrder

LINK_S = 3.0
"""Seconds in which the scheduler may notice that the other host is lost, and not only the link."""


@dataclass(eq=False, repr=False)
class Passing(Part):
    """Takes orders to gangs from the host above in the tree, or from the scheduler."""

    env: Env
    order: LaunchOrder
    receive: Callable[[Address, Any], None]
    """Handles an order of the scheduler to this host."""
    _below: set[str] = field(default_factory=set)
    """Hosts to which orders were passed on in this epoch."""

    @handles(msg.GangOrder)
    def _ordered(self, sender: Address, message: msg.GangOrder) -> None:
        order = self.order
        if message.epoch != order.epoch or order.is_broken or order.scheduler is None:
            self.env.count("messages_stale")
            return
        place = msg.place_of(message.spans, order.rank)
        if place is None or sender.node != self._above(message, place[0]):
            self.env.count("messages_refused")
            return
        position, number = place
        self.pass_on(message, position)
        own = message.order
        if isinstance(own, msg.Launch):
            own = replace(own, sequence=number, report=position < message.reporters)
        else:
            own = replace(own, sequence=number)
        self.receive(order.scheduler, own)

    def pass_on(self, message: msg.GangOrder, position: int) -> None:
        """Send an order to the hosts below a position, which is this host's."""
        size = msg.size_of(message.spans)
        for child in msg.children_of(position, message.fan, size):
            host = self.order.hosts[msg.at_position(message.spans, child)[0]]
            self._below.add(host)
            self.env.send(executor_of(host), message)

    def _above(self, message: msg.GangOrder, position: int) -> str:
        """Return the node from which the host at a position gets an order; empty if there is none."""
        hosts = self.order.hosts
        if any(span.rank + span.count > len(hosts) for span in message.spans):
            return ""
        parent = msg.parent_of(position, message.fan)
        return CONTROLLER if parent < 0 else hosts[msg.at_position(message.spans, parent)[0]]

    @handles(msg.PeerLost)
    def _peer_lost(self, sender: Address, message: msg.PeerLost) -> None:
        if message.node in self._below and not self.order.is_broken:
            self.env.call_later(LINK_S, partial(self._link_lost, message.node))

    def _link_lost(self, node: str) -> None:
        if not self.order.is_broken:
            self.order.link_lost(node)
