"""The promises of a move that is prepared while its client computes.

| monitor | promise |
|---|---|
| compiled ahead | a client leaves its devices when the hosts of the new ones have compiled what it runs |
| copies ahead | hosts drop what was copied for a move when its client has its arrays again |

That what was compiled and copied ahead changes no value, the oracle shows.
"""

from __future__ import annotations

from typing import Any

from pw.core import messages as msg
from pw.core.ids import Address, client_of
from pw.testing.sim.world import Violation

SETTLED_S = 2.0
"""Seconds after which hosts have dropped what a client needs no more."""
LOOKS, AGAIN_S = 3, 0.6
"""Number of looks at copies that the controller is still to drop, and the seconds between them."""


class MigrationMonitor:
    """Watches the preparations of each controller."""

    def __init__(self, cluster: Any) -> None:
        self._cluster = cluster
        self._world = world = cluster.world
        if not (world.profile.suspensions or world.profile.rebalances):
            return
        self._compiling: dict[int, Any] = {}
        """Moves for which compilations ahead have not ended, by request; some were given up."""
        self._copied: set[int] = set()
        """Arrays that were copied ahead, and for nothing else since."""
        self._seen: set[int] = set()
        """Identities of suspensions that have begun."""
        world.watch_sent(msg.CompileAhead, self._asking)
        world.watch_handled(msg.CompiledAhead, self._compiled)
        world.watch_handled(msg.EpochEnded, self._ended)
        world.watch_handled(msg.Attach, self._attaching)
        world.watch_handled(msg.HoldLaunches, self._leaving)
        world.watch_handled(msg.CopyArrays, self._copying)
        world.watch_handled(msg.Install, self._installing)
        world.watch_handled(msg.SliceBound, self._bound)

    def _asking(self, sender: Address, to: Address, message: msg.CompileAhead) -> None:
        under_way = self._cluster.controller.migrations.under_way
        self._compiling[message.request] = under_way[message.client]

    def _compiled(self, sender: Address, to: Address, message: msg.CompiledAhead) -> None:
        if self._compiling.pop(message.request, None) is not None:
            self._world.checked["compilations ahead"] += 1

    def _ended(self, sender: Address, to: Address, message: msg.EpochEnded) -> None:
        """Hosts may not answer any more; what their next incarnations have is for recovery."""
        self._compiling.clear()
        self._copied.clear()

    def _attaching(self, sender: Address, to: Address, message: msg.Attach) -> None:
        """Another controller counts anew."""
        if message.resume:
            self._compiling.clear()
            self._copied.clear()

    def _leaving(self, sender: Address, to: Address, message: msg.HoldLaunches) -> None:
        client = self._client(message.client)
        suspension = None if client is None else client.suspension
        if suspension is None or not suspension.target or id(suspension) in self._seen:
            return
        self._seen.add(id(suspension))
        self._world.checked["compiled ahead"] += 1
        if any(move.asked in suspension.asked for move in self._compiling.values()):
            words = f"{client.name} leaves before its programs are compiled elsewhere"
            raise Violation("compiled ahead", words)

    def _copying(self, sender: Address, to: Address, message: msg.CopyArrays) -> None:
        is_ahead = message.client in self._cluster.controller.migrations.under_way
        arrays = {copy.array for _, copy in message.copies}
        self._world.checked["copied ahead"] += len(arrays) if is_ahead else 0
        self._copied = self._copied | arrays if is_ahead else self._copied - arrays
        if is_ahead:
            self._look_later(message.client)

    def _installing(self, sender: Address, to: Address, message: msg.Install) -> None:
        """Programs share what was compiled ahead."""
        host = next((one for one in self._cluster.members() if one.name == to.node), None)
        client = self._client(client_of(message.program))
        if host is None or client is None:
            return
        kept = {artifact for artifact, _ in host.backend.artifacts.values()}
        shared = [one for one in message.artifacts if one.blob in kept]
        self._world.checked["installed from ahead"] += len(shared)

    def _bound(self, sender: Address, to: Address, message: msg.SliceBound) -> None:
        if self._copied:
            self._look_later(client_of(message.slice))

    def _look_later(self, number: int) -> None:
        client = self._client(number)
        if client is not None:
            self._world.after(SETTLED_S, self._check, client)

    def _client(self, number: int) -> Any:
        node = self._cluster.node
        return self._cluster.controller.sessions.get(number) if node.alive else None

    def _check(self, client: Any, looks: int = 1) -> None:
        """Hosts have no copies of arrays that their client has on devices."""
        if self._client(client.number) is not client:
            return
        controller = self._cluster.controller
        # A host does not say that it keeps a copy before its supervisor has it.
        supervisors_s = max(host.stopped_until_s for host in self._cluster.hosts)
        processes_s = self._cluster.stopped_until_s()
        stopped_s = max(self._world.held_until_s, processes_s, supervisors_s)
        is_busy = (
            client.suspension is not None
            or client.recovering
            or client.number in controller.migrations.under_way
            or controller.checkpoints.count(client)
            or any(array.restored for _, array in client.arrays.arriving())
        )
        if is_busy or self._world.now_s < stopped_s + SETTLED_S:
            return  # a slice that is bound again has it looked at again
        self._world.checked["copies ahead"] += 1
        left = self._left(client)
        if (
            left
            and looks < LOOKS
            and left <= controller.migrations.copies.get(client.number, {}).keys()
        ):
            self._world.after(AGAIN_S, self._check, client, looks + 1)
        elif left:
            words = f"hosts have copies of {sorted(left)} of {client.name}, which has moved"
            raise Violation("copies ahead", words)

    def _left(self, client: Any) -> set[int]:
        """Return the arrays of which hosts have copies, and which nothing but a move has asked for."""
        origins = client.lineage.origins
        return {
            one.array
            for host in self._cluster.members()
            for one in host.store.replicas.memory.all()
            if one.array in self._copied
            and client_of(one.array) == client.number
            and one.array in origins
            and not origins[one.array].replicated
        }
