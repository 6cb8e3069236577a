"""The order in which a host does its work: each client's in its order, gangs after all work before them.

Launches come in one order for the whole host. Two things depend on it. A client's work reads the
results of its earlier work, and donates arrays that the earlier work reads. And gangs of several
hosts must meet in the same order on all of them (G1): each holds a device, or even the
execute thread, until its other hosts have come. So each client has a lane, and its work is done in
the order of the lane. A gang waits for all work that came before it, of any client. All other work
passes the work of other clients that waits for a value.

This causes no deadlock. Work waits only for work that was launched before: for its inputs (G4), for
the work before it in its lane, or, as a gang, for all work before. And an enqueued gang waits for
other hosts, where its own part or earlier work is next. If gangs could pass work, that work might
be the one that another host needs to come to the gang. A run that never ends is ended by its
`timeout=`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count, islice
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")


class _LaneEntry(NamedTuple, Generic[T]):
    number: int
    work: T
    together: bool


@dataclass(slots=True)
class _Lane(Generic[T]):
    entries: deque[_LaneEntry[T]] = field(default_factory=deque)
    passed: int = 0
    """Number of the first entries that later work has passed."""


class Lanes(Generic[T]):
    """The work that waits on a host.

    Args:
        go: does as much of a piece of work as possible, and returns whether all of it is done.
            It is called only with work that is next.
        on_pass: called once for work that waits, when later work of another client is done.
    """

    def __init__(self, go: Callable[[T], bool], on_pass: Callable[[T], None]) -> None:
        self._go = go
        self._on_pass = on_pass
        self._numbers = count()
        self.of_clients: dict[int, _Lane[T]] = {}

    def __len__(self) -> int:
        return sum(len(lane.entries) for lane in self.of_clients.values())

    def __bool__(self) -> bool:
        return bool(self.of_clients)

    def put(self, client: int, work: T, together: bool = False) -> bool:
        """Add a piece of work, and do it if it is next and can be done.

        Returns whether the oldest work has gone on, as `go_on` does. `together`: it is a gang's.
        """
        number = next(self._numbers)
        lane = self.of_clients.get(client)
        if lane is None:
            is_next = not (together and self.of_clients)
            if is_next and self._go(work):
                self._pass(number)
                return not self.of_clients
            lane = self.of_clients[client] = _Lane()
        lane.entries.append(_LaneEntry(number, work, together))
        return False

    def go_on(self) -> bool:
        """Do all work that can be done; return whether the oldest work was."""
        oldest = self._oldest
        again = True
        while again:
            again = False
            for client in list(self.of_clients):
                again = self._clear(client) or again
        return self._oldest != oldest

    @property
    def _oldest(self) -> int:
        return min((lane.entries[0].number for lane in self.of_clients.values()), default=-1)

    def _clear(self, client: int) -> bool:
        """Do the work of one lane that can be done; return whether there was any."""
        lane = self.of_clients[client]
        entries, done = lane.entries, -1
        while entries:
            head = entries[0]
            if (head.together and head.number != self._oldest) or not self._go(head.work):
                break
            done = entries.popleft().number
            lane.passed = max(lane.passed - 1, 0)
        if not entries:
            del self.of_clients[client]
        if done >= 0:
            self._pass(done)
        return done >= 0

    def _pass(self, number: int) -> None:
        """Report the waiting work that this work has passed."""
        for lane in self.of_clients.values():
            entries = lane.entries
            while lane.passed < len(entries) and entries[lane.passed].number < number:
                self._on_pass(entries[lane.passed].work)
                lane.passed += 1

    def heads(self) -> Iterator[T]:
        """Return the next work of each client, the oldest first."""
        heads = [lane.entries[0] for lane in self.of_clients.values()]
        return (entry.work for entry in sorted(heads, key=lambda entry: entry.number))

    def rest(self) -> Iterator[T]:
        """Return all other work."""
        lanes = self.of_clients.values()
        return (entry.work for lane in lanes for entry in islice(lane.entries, 1, None))
