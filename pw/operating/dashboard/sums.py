"""Sums over the answers of a cluster: counters that only grow, device time of clients, rates of transfers."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Mapping
from typing import Any

from pw.core.messages import Status

CLIENTS_DRAWN = 8
"""Clients with a colour of their own in the strip of the last minute."""
LEAST_S = 1e-3
"""Device time of other clients that is worth a colour."""
PAIRS = 1024
"""Pairs of hosts in the matrix of transfers: those that send most."""


class Totals:
    """Sums of counters over processes that are started again, and clients that leave: they only grow."""

    def __init__(self) -> None:
        self._last: dict[tuple[Any, str], float] = {}
        self.sums: defaultdict[tuple[Any, str], float] = defaultdict(float)

    def take(self, source: Any, group: Any, counters: Mapping[str, float]) -> None:
        """Take the counters of a process or client now; a smaller value means that it began again."""
        for name, value in counters.items():
            before = self._last.get((source, name), 0.0)
            self.sums[group, name] += value - before if value >= before else value
            self._last[source, name] = value

    def of(self, group: Any) -> dict[str, float]:
        """Return the sums of a group."""
        return {name: value for (other, name), value in self.sums.items() if other == group}


def work_between(before: Status, now: Status) -> tuple[tuple[int, float], ...]:
    """Return the device seconds of clients from one status to the next; one sum for all others."""
    former = {client.number: client.use.device_s for client in before.clients}
    spent = {c.number: c.use.device_s - former.get(c.number, 0.0) for c in now.clients}
    most = sorted(spent.items(), key=lambda one: -one[1])[:CLIENTS_DRAWN]
    drawn = [(number, seconds) for number, seconds in most if seconds > 0.0]
    islands = {island.name: island.device_s for island in before.islands}
    all_s = sum(max(0.0, island.device_s - islands.get(island.name, 0.0)) for island in now.islands)
    others_s = all_s - sum(seconds for _, seconds in drawn)
    return (*sorted(drawn), *([(0, others_s)] if others_s > LEAST_S else ()))


def transfer_rates(
    samples: deque[tuple[float, dict[tuple[str, str], int]]],
) -> tuple[tuple[str, str, float], ...]:
    """Return the bytes a second between pairs of hosts, of samples with their seconds and bytes."""
    length_s = max(1e-9, sum(seconds for seconds, _ in samples))
    sums: Counter[tuple[str, str]] = Counter()
    for _, sent in samples:
        sums.update(sent)
    most = sums.most_common(PAIRS)
    return tuple((source, target, size / length_s) for (source, target), size in most)
