"""Which runs are under way on this host, and which hosts and links were lost since they began.

An edge needs both: a message for a run that has not begun here is kept, and a run that began before
a host was lost has no receiver on the next incarnation of that host.
"""

from __future__ import annotations

from pw.core.ids import client_of
from pw.devices.host.edge_states import EdgeKey

SERIES_BITS = 39
"""Runs of one series begin in the order of their numbers. The bits above these name the series: its
client, and whether its runs are repeated ones."""


class RunTable:
    """The runs and the lost hosts of one coordinator."""

    def __init__(self) -> None:
        self.gone_clients: set[int] = set()
        """Clients that have left."""
        self._begun = 0
        self._began: dict[int, int] = {}
        """The place of each run under way here."""
        self._sent: dict[int, set[tuple[int, str]]] = {}
        """The routes that each run under way here has begun to send."""
        self._newest: dict[int, int] = {}
        """The newest run of each series that has begun here."""
        self._left_at: dict[str, int] = {}
        """Runs that had begun when a host left its island, by host: the next host of that name does not know
        them. An entry stays while one of them is under way."""
        self._lost_at: dict[str, int] = {}
        """Runs that had begun when the link to a host was lost, by host, which may still wait for an edge."""
        self.hosts: frozenset[str] = frozenset()
        """The hosts that exist, as the controller says."""
        self._absent: set[str] = set()

    def begin(self, run: int) -> int:
        """Add a run, and return its place among the runs of this host."""
        self._begun += 1
        self._began[run] = self._begun
        self._sent[run] = set()
        series = run >> SERIES_BITS
        self._newest[series] = max(run, self._newest.get(series, 0))
        return self._begun

    def passes(self, run: int) -> None:
        """Note a run without edges, which begins and ends in one go."""
        self._begun += 1
        series = run >> SERIES_BITS
        self._newest[series] = max(run, self._newest.get(series, 0))

    def end(self, run: int) -> None:
        """Remove a run: all its instructions have become ops, or never will."""
        self._sent.pop(run, None)
        self._began.pop(run, None)
        if self._left_at or self._lost_at:
            oldest = min(self._began.values(), default=self._begun + 1)
            for losses in (self._left_at, self._lost_at):
                for node in [node for node, begun in losses.items() if begun < oldest]:
                    del losses[node]

    def client_left(self, client: int) -> None:
        """Forget the series of a client that has left."""
        self.gone_clients.add(client)
        for series in [s for s in self._newest if client_of(s << SERIES_BITS) == client]:
            del self._newest[series]

    def sends(self, key: EdgeKey) -> None:
        """Note that a route of a run is being sent."""
        if (sent := self._sent.get(key[0])) is not None:
            sent.add(key[1:])

    def is_queued(self, key: EdgeKey) -> bool:
        """Whether the run of a route has begun here, and has still to send it."""
        return key[0] in self._sent and key[1:] not in self._sent[key[0]]

    def is_to_come(self, key: EdgeKey) -> bool:
        """Whether a route may still be sent: its run has not begun here, or is queued."""
        run = key[0]
        is_newer = run > self._newest.get(run >> SERIES_BITS, 0)
        return (is_newer and client_of(run) not in self.gone_clients) or self.is_queued(key)

    @property
    def losses(self) -> frozenset[str]:
        """The hosts and links that were lost since a run began that is still under way."""
        return frozenset(self._left_at) | frozenset(self._lost_at)

    def hosts_are(self, nodes: frozenset[str]) -> list[str]:
        """Take the controller's list of hosts, and return those that have left."""
        gone, self.hosts = self.hosts - nodes, nodes
        self._absent = (self._absent | gone) - nodes
        if self._began:
            self._left_at |= dict.fromkeys(gone, self._begun)
        return sorted(gone)

    def link_lost(self, node: str) -> None:
        """Note that the link to a host was lost."""
        if self._began:
            self._lost_at[node] = self._begun

    def is_absent(self, node: str) -> bool:
        """Whether a host has left its island and has not come back."""
        return node in self._absent

    def has_left(self, node: str, began: int) -> bool:
        """Whether a host left after the run with the place `began` had begun."""
        return node in self._absent or began <= self._left_at.get(node, 0)

    def was_cut_off(self, node: str, began: int) -> bool:
        """Whether the link to a host was lost after the run with the place `began` had begun."""
        return began <= self._lost_at.get(node, 0)
