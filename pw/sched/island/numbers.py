"""The next number of each host of an island, one host at a time or all hosts of a large gang at once.

A gang of many hosts costs a few steps over arrays, and not one step of Python for each host.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from pw.core.messages import Span

_KNOWN = 1024
"""Number of gangs that are remembered."""


@dataclass(slots=True, eq=False)
class Gang:
    """The hosts of a large gang."""

    hosts: tuple[str, ...]
    ranks: slice | np.ndarray[Any, np.dtype[np.int64]]
    """Ranks of the gang's hosts in the island, in the gang's order."""
    firsts: tuple[int, ...]
    """Positions after the first one where the ranks do not go on by one."""
    by_position: list[int]
    """Rank of each host, by its position in the gang."""


class Numbers:
    """The numbers that the hosts of an island get next, in one epoch."""

    def __init__(self, hosts: tuple[str, ...] = ()) -> None:
        self._rank = {host: rank for rank, host in enumerate(hosts)}
        self._next = array("q", bytes(8 * len(hosts)))
        self._all = np.frombuffer(self._next, np.int64) if hosts else np.empty(0, np.int64)
        self._gangs: dict[tuple[str, ...], Gang] = {}
        self._by_id: dict[int, tuple[tuple[str, ...], Gang]] = {}
        """Gangs by the identity of their tuple of hosts, a key that takes no step for each host."""

    def __contains__(self, host: str) -> bool:
        return host in self._rank

    def include(self, hosts: Iterable[str]) -> bool:
        """Whether the island has all these hosts."""
        return all(map(self._rank.__contains__, hosts))

    def take(self, host: str) -> int:
        """Take a host's next number."""
        rank = self._rank[host]
        number = self._next[rank]
        self._next[rank] = number + 1
        return number

    def gang(self, hosts: tuple[str, ...]) -> Gang | None:
        """Return the gang of these hosts; None if one is not in the island."""
        entry = self._by_id.get(id(hosts))
        if entry is not None and entry[0] is hosts:
            return entry[1]
        gang = self._gangs.get(hosts)
        if gang is None:
            if not self.include(hosts):
                return None
            if len(self._gangs) >= _KNOWN:
                self._gangs.clear()
            gang = self._gangs[hosts] = self._new_gang(hosts)
        if len(self._by_id) >= _KNOWN:
            self._by_id.clear()
        self._by_id[id(hosts)] = (hosts, gang)
        return gang

    def _new_gang(self, hosts: tuple[str, ...]) -> Gang:
        ranks = np.array([self._rank[host] for host in hosts], np.int64)
        firsts = tuple((np.flatnonzero(np.diff(ranks) != 1) + 1).tolist())
        where = ranks if firsts else slice(int(ranks[0]), int(ranks[-1]) + 1)
        return Gang(hosts, where, firsts, ranks.tolist())

    def take_all(self, gang: Gang) -> tuple[Span, ...]:
        """Take the next number of each host of a gang."""
        numbers = self._all[gang.ranks].copy()
        self._all[gang.ranks] += 1
        changes = np.flatnonzero(numbers[1:] != numbers[:-1])
        if not (gang.firsts or len(changes)):
            return (Span(gang.by_position[0], len(numbers), int(numbers[0])),)
        starts = [0, *sorted({*gang.firsts, *(changes + 1).tolist()})]
        ends = [*starts[1:], len(numbers)]
        return tuple(
            Span(gang.by_position[start], end - start, int(numbers[start]))
            for start, end in zip(starts, ends, strict=True)
        )
