"""Clients that launch what they may not: under their own lease, and under that of another client.

With the profile's `trespasses`, a forged launch follows some launches of a holder. Either the holder names a
run, an array or a result of another client in it, or another client sends it. The monitor `leases` sees that a
host takes none of them, and that a lease goes on when it was another client that did wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from msgspec.structs import replace

from pw.core import messages as msg
from pw.core.ids import Address, client_id, client_of, executor_of, serial_of
from pw.core.messages.roles import CLIENT_PREFIX
from pw.testing.sim.world import World

if TYPE_CHECKING:
    from pw.testing.sim.cluster import SimCluster
    from pw.testing.sim.host import SimHost

OFTEN = 0.3
"""Share of the launches of holders that are followed by a forged one."""
SERIALS = 1 << 38
"""First serial number of what a forger makes; users do not make so much."""


class Forgeries:
    """Sends launches that no host may take."""

    def __init__(self, cluster: SimCluster) -> None:
        self._cluster = cluster
        self._world: World = cluster.world
        self._random = cluster.world.streams("forged launches")
        self._count = 0
        cluster.world.watch_handled(msg.LeasedLaunch, self._launched)

    def _launched(
        self, sender: Address, to: Address, message: msg.LeasedLaunch
    ) -> Callable[[], None] | None:
        """A host gets a launch; nothing is forged after a forged one."""
        is_own = serial_of(message.run) < SERIALS
        if is_own and sender.node.startswith(CLIENT_PREFIX) and self._random.random() < OFTEN:
            return partial(self._forge, sender, to.node, message)
        return None

    def _forge(self, sender: Address, host: str, message: msg.LeasedLaunch) -> None:
        hosts = {one.name: one for one in self._cluster.hosts if one.node is not None}
        lease = hosts[host].executor.leases.current if host in hosts else None
        if lease is None or lease.number != message.lease or not lease.is_open:
            return
        node, mine = sender.node, client_of(message.run)
        senders = [
            name
            for name, process in self._world.nodes.items()
            if name.startswith(CLIENT_PREFIX)
            and name != node
            and process.alive
            and not process.paused
        ]
        if senders and self._random.random() < 0.5:
            node = self._random.choice(senders)
        self._count += 1
        serial = SERIALS + (self._count << 10)
        results = tuple(client_id(mine, serial + 1 + at) for at in range(len(message.results)))
        forged = replace(
            message, index=lease.next_index, run=client_id(mine, serial), results=results, request=0
        )
        if node == sender.node:
            theirs = self._of_another(hosts[host], mine)
            what = self._random.choice(("run", "args", "results"))
            replaced = {
                "run": theirs,
                "args": tuple(theirs if isinstance(arg, int) else arg for arg in forged.args),
                "results": (theirs, *results[1:]),
            }[what]
            if replaced == getattr(forged, what):
                return
            forged = replace(forged, **{what: replaced})
        self._world.ledger.injected["forged launch"] += 1
        process = self._world.nodes[node]
        process.network.send(executor_of(host), Address(node, "session"), forged)
        process.request_turn()

    def _of_another(self, host: SimHost, client: int) -> int:
        """Return an array of another client, on this host if there is one."""
        arrays = sorted(one for one in host.store.arrays if client_of(one) != client)
        return self._random.choice(arrays) if arrays else client_id(client + 1, 1)
