"""In what order a host does what it was told: each client's work in its order, and gangs after all before them.

Launches come in one order for the whole host, and two things depend on it. What a client does reads what it
has done before, and gives away what that still reads. And what several hosts compute together must meet in the
same order on all of them (DESIGN G1), and holds a device, or even the thread that enqueues, until they have
come. So work stands in one lane for each client, and goes in its order there; what has a part in a gang of
several hosts waits for everything that came before it, whoever it belongs to. All else passes what waits for
values that are on their way here, if that is another client's.

No circle of waiting can come of that. What a host computes alone holds nobody up, if it ends (a run that hangs
is ended by its `timeout=`). So everything still waits only for what was launched before it: for its inputs
(G4), for what is before it in its lane, or as a gang for everything; and what a gang that has been handed over
waits for on other hosts was launched before it, or is its own part there. Were a gang to pass anything, that
might be what another host needs to come to the gang.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count, islice
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")


class _Entry(NamedTuple, Generic[T]):
    number: int
    work: T
    together: bool


@dataclass(slots=True)
class _Lane(Generic[T]):
    entries: deque[_Entry[T]] = field(default_factory=deque)
    passed: int = 0
    """So many of them, the first ones, have been passed by what came later."""


class Lanes(Generic[T]):
    """Work that has not been done.

    Args:
        go: does as much of a piece of work as can be done now; whether that was all of it. It is only called
            with work that is next, and again when it may be able to go on.
        passed: told once of work that waits, when another client's that came later is done.
    """

    def __init__(self, go: Callable[[T], bool], passed: Callable[[T], None]) -> None:
        self._go = go
        self._on_pass = passed
        self._numbers = count()
        self._lanes: dict[int, _Lane[T]] = {}

    def __len__(self) -> int:
        return sum(len(lane.entries) for lane in self._lanes.values())

    def __bool__(self) -> bool:
        return bool(self._lanes)

    def put(self, client: int, work: T, together: bool = False) -> bool:
        """Take in a piece of work, `together` with other hosts or not, and do it if it is next and can be done.

        Returns as `go_on` does.
        """
        number = next(self._numbers)
        lane = self._lanes.get(client)
        if lane is None:
            is_next = not (together and self._lanes)
            if is_next and self._go(work):
                self._pass(number)
                return not self._lanes
            lane = self._lanes[client] = _Lane()
        lane.entries.append(_Entry(number, work, together))
        return False

    def go_on(self) -> bool:
        """Do what can be done; whether what has waited for longest was."""
        oldest = self._oldest
        again = True
        while again:
            again = False
            for client in list(self._lanes):
                again = self._clear(client) or again
        return self._oldest != oldest

    @property
    def _oldest(self) -> int:
        return min((lane.entries[0].number for lane in self._lanes.values()), default=-1)

    def _clear(self, client: int) -> bool:
        """Do what can be done of one lane; whether any of it was."""
        lane = self._lanes[client]
        entries, done = lane.entries, -1
        while entries and self._is_next(entries[0]) and self._go(entries[0].work):
            done = entries.popleft().number
            lane.passed = max(lane.passed - 1, 0)
        if not entries:
            del self._lanes[client]
        if done >= 0:
            self._pass(done)
        return done >= 0

    def _is_next(self, entry: _Entry[T]) -> bool:
        """Whether nothing before it, that it has to wait for, is in another lane."""
        return not entry.together or entry.number == self._oldest

    def _pass(self, number: int) -> None:
        """This has been done: tell of what came before it and has not."""
        for lane in self._lanes.values():
            entries = lane.entries
            while lane.passed < len(entries) and entries[lane.passed].number < number:
                self._on_pass(entries[lane.passed].work)
                lane.passed += 1

    def heads(self) -> Iterator[T]:
        """What is next of each client, the oldest first."""
        heads = [lane.entries[0] for lane in self._lanes.values()]
        return (entry.work for entry in sorted(heads, key=lambda entry: entry.number))

    def others(self) -> Iterator[T]:
        """What is behind these."""
        lanes = self._lanes.values()
        return (entry.work for lane in lanes for entry in islice(lane.entries, 1, None))
