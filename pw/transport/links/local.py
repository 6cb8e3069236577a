"""Nodes inside one process: messages travel by a direct call in the next turn of one event loop.

A `LocalHub` joins `LocalNetwork`s, one for each node. All messages pass through one queue, so they
are FIFO for every pair, and a `PeerLost` comes after all messages of that node. With `codec=True`
every message is encoded and decoded, as if it crossed to another process.
"""

from __future__ import annotations

import asyncio
from collections import deque

from pw.core.ids import Address
from pw.core.messages import PeerLost
from pw.transport.access.credentials import Identity
from pw.transport.links import codec
from pw.transport.links.interface import Mailroom


class LocalHub:
    """Connects the nodes of one event loop; `cut` takes one away as a crash would."""

    def __init__(self, loop: asyncio.AbstractEventLoop, codec: bool = False) -> None:
        self.loop = loop
        self.codec = codec
        self._networks: dict[str, LocalNetwork] = {}
        self._queue: deque[tuple[LocalNetwork, Address, Address, object] | PeerLost] = deque()
        self._requested = False

    def network(self, name: str) -> LocalNetwork:
        """A network for the node that will be called `name`; it replaces one of the same name."""
        return LocalNetwork(self, name)

    def cut(self, name: str, reason: str = "killed") -> None:
        """Remove a node as if it had crashed: its undelivered messages are lost."""
        network = self._networks.pop(name, None)
        if network is not None:
            self._queue = deque(
                item for item in self._queue if isinstance(item, PeerLost) or item[0] is not network
            )
            self._put(PeerLost(name, reason))

    def _join(self, network: LocalNetwork) -> None:
        self.cut(network.name, "replaced by a newer incarnation")
        self._networks[network.name] = network

    def _leave(self, network: LocalNetwork) -> None:
        if self._networks.get(network.name) is network:
            del self._networks[network.name]
            self._put(PeerLost(network.name, "closed"))

    def _put(self, item: tuple[LocalNetwork, Address, Address, object] | PeerLost) -> None:
        self._queue.append(item)
        if not self._requested:
            self._requested = True
            self.loop.call_soon(self._deliver)

    def _deliver(self) -> None:
        self._requested = False
        queue, self._queue = self._queue, deque()
        for item in queue:
            if isinstance(item, PeerLost):
                for network in list(self._networks.values()):
                    if network.name != item.node:
                        network.mailroom.tell_all(item.node, item)
                continue
            origin, to, sender, message = item
            target = self._networks.get(to.node)
            if target is None:
                origin.unreachable(to.node)
            else:
                target.mailroom.counters["messages_received"] += 1
                target.mailroom.deliver(to.actor, message, sender)


class LocalNetwork:
    """One node's access to a `LocalHub` (see `pw.transport.links.interface.Network`)."""

    def __init__(self, hub: LocalHub, name: str) -> None:
        self.hub = hub
        self.name = name
        self._introduced: set[str] = set()
        self._reported: set[str] = set()

    def attach(self, node: Mailroom) -> None:
        """Deliver to this node from now on."""
        self.mailroom = node
        self.hub._join(self)

    def send(self, to: Address, sender: Address, message: object) -> None:
        """Take a message; it arrives in the next loop turn."""
        if self.hub._networks.get(self.name) is not self:
            self.mailroom.counters["messages_unroutable"] += 1
            return
        if self.hub.codec:
            data = codec.encode_frame(0, [(to.actor, sender.actor, message)])  # type: ignore[list-item]
            message = codec.decode(data).envelopes[0][2]
        self.hub._put((self, to, sender, message))

    def flush(self) -> None:
        """Do nothing: nothing is held back."""

    def introduce(self, node: str, endpoint: str) -> None:
        """Expect `node`; the hub finds it by name."""
        self._introduced.add(node)
        self._reported.discard(node)

    def forget(self, node: str) -> None:
        """Do not expect `node` any more."""
        self._introduced.discard(node)

    def resume(self, node: str) -> None:
        """Do nothing: no peer is held."""

    def heard_s(self, node: str) -> float | None:
        """Return None: there are no links here."""
        return None

    def identity_of(self, node: str) -> Identity | None:
        """Return None: no peer has a certificate here."""
        return None

    def trouble_of(self, node: str) -> str:
        """All nodes are of this process."""
        return ""

    def tenant_of(self, node: str) -> str:
        """All nodes are of this process."""
        return "operator"

    def islands_of(self, node: str) -> tuple[str, ...]:
        """No peer has a certificate here."""
        return ()

    def close(self) -> None:
        """Leave the hub; the others get a PeerLost after all messages."""
        self.hub._leave(self)

    def unreachable(self, node: str) -> None:
        """Count a message to an absent node; the first time, report the loss of an introduced node."""
        self.mailroom.counters["messages_unroutable"] += 1
        if node in self._introduced and node not in self._reported:
            self._reported.add(node)
            self.mailroom.tell_all(node, PeerLost(node, "could not be reached"))
