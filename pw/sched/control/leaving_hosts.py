"""Has clients leave an island that loses a host for good, when nothing can take their slices.

A host that is told to end, as by a preemption notice, takes the devices of its island with it. Its clients are
suspended: their launched work ends, and what they have is copied to host memory. Then the host is emptied like
one that is drained. When it is gone, the clients ask for devices again, and wait for them however long.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

import msgspec

from pw.core import messages as msg
from pw.core.actors.actor import handles
from pw.core.ids import RESOURCES, Address
from pw.sched.control.clients import Client
from pw.sched.control.sessions import ControlPart
from pw.sched.control.suspension_states import Suspension
from pw.sched.control.suspensions import Suspensions

COUNTED_S = 10.0
"""Seconds for which the bytes of arrays on hosts are not counted anew."""


@dataclass(eq=False)
class LeavingHosts(ControlPart):
    """Suspends the clients of hosts that must end."""

    suspensions: Suspensions
    _awaited: dict[str, Collection[int]] = field(default_factory=dict, init=False)
    """Numbers of the clients that are to leave for each host."""
    _suspended: dict[str, list[tuple[Client, Suspension]]] = field(default_factory=dict, init=False)
    """Clients that were suspended for each host, and go on when it is gone."""
    _counted: tuple[float, Counter[str]] | None = None
    """Bytes of arrays on each host, and the time at which they were counted."""

    @handles(msg.HostMustEnd)
    def _must_end(self, sender: Address, message: msg.HostMustEnd) -> None:
        node = message.node
        clients = [
            client
            for client in self.sessions.calling
            if message.island in self.suspensions.islands_of(client)
        ]
        at_work = [client for client in clients if client.suspension is None]
        for client in at_work:
            self.suspensions.suspend(client, f"the end of host {node}")
        for client in at_work:
            if (suspension := client.suspension) is not None:
                # A later controller does not hear that the host is gone.
                suspension.outlasts = False
                self._suspended.setdefault(node, []).append((client, suspension))
        self._awaited[node] = [client.number for client in clients]

    def in_islands(self, islands: Iterable[msg.IslandInfo]) -> tuple[msg.IslandInfo, ...]:
        """Return islands whose hosts say what it takes to empty them."""
        return tuple(
            msgspec.structs.replace(one, hosts=tuple(map(self._with_notice, one.hosts)))
            if any(host.notice is not None for host in one.hosts)
            else one
            for one in islands
        )

    def _with_notice(self, host: msg.HostInfo) -> msg.HostInfo:
        if host.notice is None:
            return host
        size_bytes = self._bytes_on_hosts()[host.name]
        needs_s = size_bytes / self.suspensions.bytes_per_s
        notice = msg.Notice(host.notice.grace_s, size_bytes, needs_s)
        return msgspec.structs.replace(host, notice=notice)

    def _bytes_on_hosts(self) -> Counter[str]:
        """Return the bytes of the arrays on each host, as counted lately: there may be many arrays."""
        now_s = self._env.now_s()
        if self._counted is None or now_s > self._counted[0] + COUNTED_S:
            sizes: Counter[str] = Counter()
            for client in self.sessions.clients:
                for _, array in client.arrays.all():
                    if array.is_good and self._islands.is_bound(array.spec):
                        for device in self._islands.located(array.spec):
                            sizes[device.host] += array.spec.shard_bytes
            self._counted = now_s, sizes
        return self._counted[1]

    def go_on(self) -> None:
        """Say which hosts have no clients any more, at the end of a turn.

        A client that cannot leave keeps none: what it has on the host is lost as with any host.
        """
        for node, clients in list(self._awaited.items()):
            if self.suspensions.leaving.keys().isdisjoint(clients):
                del self._awaited[node]
                self._env.send(RESOURCES, msg.ClientsLeft(node))

    @handles(msg.HostEnded)
    def _ended(self, sender: Address, message: msg.HostEnded) -> None:
        """Let the clients go on."""
        self._awaited.pop(message.node, None)
        for client, suspension in self._suspended.pop(message.node, ()):
            is_here = self.sessions.get(client.number) is client
            if is_here and client.suspension is suspension:
                self.suspensions.resume(client)
