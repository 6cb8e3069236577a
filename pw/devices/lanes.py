"""In what order a host does what it was told: each client's work in its order, and gangs after all before them.

Launches come in one order for the whole host, and two things depend on it. What a client does reads what it
has done before, and gives away what that still reads. And what several hosts compute together must meet in the
same order on all of them (DESIGN G1), and holds a device, or even the thread that enqueues, until they have
come. So work stands in one lane for each client, and goes in its order there; what has a part in a gang of
several hosts waits for everything that came before it, whoever it belongs to. All else passes what waits for
values that are on their way here, if that is another client's.

No circle of waiting can come of that. What a host computes alone holds nobody up. So everything still waits
only for what was launched before it: for its inputs (G4), for what is before it in its lane, or as a gang for
everything; and what a gang that has been handed over waits for on other hosts was launched before it, or is
its own part there. Were a gang to pass anything, that might be what another host needs to come to the gang.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from itertools import count, islice
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")


class _Entry(NamedTuple, Generic[T]):
    number: int
    work: T
    together: bool


class Lanes(Generic[T]):
    """Work that has not been done.

    Args:
        go: does as much of a piece of work as can be done now; whether that was all of it. It is only called
            with work that is next, and again when it may be able to go on.
    """

    def __init__(self, go: Callable[[T], bool]) -> None:
        self._go = go
        self._numbers = count()
        self._lanes: dict[int, deque[_Entry[T]]] = {}
        """The one that has not been empty for longest comes first."""

    def __len__(self) -> int:
        return sum(map(len, self._lanes.values()))

    def __bool__(self) -> bool:
        return bool(self._lanes)

    def put(self, client: int, work: T, together: bool = False) -> bool:
        """Take in a piece of work, `together` with other hosts or not, and do it if it is next and can be done.

        Returns as `go_on` does.
        """
        lane = self._lanes.get(client)
        if lane is None:
            is_next = not (together and self._lanes)
            if is_next and self._go(work):
                return not self._lanes
            lane = self._lanes[client] = deque()
        lane.append(_Entry(next(self._numbers), work, together))
        return False

    def go_on(self) -> bool:
        """Do what can be done; whether the lane that has waited for longest got on."""
        moved, again = False, True
        while again:
            again = False
            for place, client in enumerate(list(self._lanes)):
                if self._clear(client):
                    moved = moved or not place
                    again = True
        return moved

    def _clear(self, client: int) -> bool:
        """Do what can be done of one lane; whether any of it was."""
        lane = self._lanes[client]
        before = len(lane)
        while lane and self._is_next(lane[0]) and self._go(lane[0].work):
            lane.popleft()
        if not lane:
            del self._lanes[client]
        return len(lane) < before

    def _is_next(self, entry: _Entry[T]) -> bool:
        """Whether nothing before it, that it has to wait for, is in another lane."""
        if not entry.together:
            return True
        return all(entry.number <= lane[0].number for lane in self._lanes.values())

    def heads(self) -> Iterator[T]:
        """What is next of each client, whoever has waited for longest first."""
        return (lane[0].work for lane in self._lanes.values())

    def others(self) -> Iterator[T]:
        """What is behind these."""
        return (entry.work for lane in self._lanes.values() for entry in islice(lane, 1, None))
