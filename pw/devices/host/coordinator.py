"""The shard coordinator of a host: the edges of programs, host to host (the paper's Plaque role).

Its parts: edges in, edges out, and the messages that came before their launch. The states of an
edge stand in `pw.devices.host.edge_states`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from pw.core.actors.actor import Actor, Env, handles
from pw.core.ids import Address, client_of
from pw.core.landing import Bulk
from pw.core.messages import EdgeReport, PeerLost
from pw.devices.host.backend import Backend
from pw.devices.host.early_edges import EarlyMessages
from pw.devices.host.edges_in import EdgesIn
from pw.devices.host.edges_out import EdgesOut
from pw.devices.host.observing import Observing
from pw.devices.host.run_table import RunTable

ORPHAN_S = 30.0
"""Seconds that edges of a client that has left stay without a receiver."""

EDGES_TOLD = 64
"""Open edges in one report."""


class ShardCoordinator(Actor):
    """Moves the pieces of edges between this host and others."""

    def __init__(
        self, env: Env, backend: Backend, bulk: Bulk, counters: Callable[[], dict[str, int]] = dict
    ) -> None:
        super().__init__(env)
        observing = Observing(env, counters)
        self.runs = RunTable()
        self.early = EarlyMessages(env, self.runs)
        self.sending = EdgesOut(env, bulk, self.runs, self.early)
        self.receiving = EdgesIn(env, backend, bulk, self.runs, self.early, observing)
        self.compose(self.sending, self.receiving, self.early, observing)

    def drop_client(self, client: int) -> None:
        """Drop a client that has left: launches on both ends complete, the rest is void after a while.

        A receiver sends its credit when its launch arrives. So an edge without a credit after
        `ORPHAN_S` has no receiver: its launch was queued when the client left.
        """
        self.runs.client_left(client)
        self.env.call_later(ORPHAN_S, partial(self._drop_orphans, client, 0))

    def drop_run(self, run: int) -> None:
        """Drop the edges from launched segments of a run to those that are not launched any more."""
        self.env.call_later(ORPHAN_S, partial(self._drop_orphans, 0, run))

    def _drop_orphans(self, client: int, run: int) -> None:
        """Drop the edges of this client, or run, that found no other end."""
        self.sending.drop_orphans(lambda key: key[0] == run or client_of(key[0]) == client, client)

    @handles(PeerLost)
    def _peer_lost(self, sender: Address, message: PeerLost) -> None:
        self._lose(message.node, message.words)

    def hosts_are(self, nodes: frozenset[str]) -> None:
        """Take the controller's list of hosts; edges from and to the others fail.

        Launches come behind this list on the same link. So an edge from a host that has left
        fails at once, even if there never was a link to it.
        """
        for node in self.runs.hosts_are(nodes):
            self._lose(node, "it left its island")
            self.sending.left(node)

    def _lose(self, node: str, reason: str) -> None:
        self.runs.link_lost(node)
        self.receiving.lose(node, reason)
        self.sending.lose(node)
        self.early.drop_host(node)

    def edges(self) -> tuple[EdgeReport, ...]:
        """Describe the edges that are open here, the oldest first."""
        reports = [*self.receiving.reports(), *self.sending.reports()]
        reports.sort(key=lambda report: -report.open_s)
        reports += [EdgeReport(*key, False, "credit early") for key in self.early.credits()]
        return tuple(reports[:EDGES_TOLD])

    def census(self) -> dict[str, int]:
        """Count the edges under way on this host."""
        return {
            "edges_incoming": len(self.receiving),
            "edges_outgoing": len(self.sending),
            "edges_parked": len(self.early),
        }
