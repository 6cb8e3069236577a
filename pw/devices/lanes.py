"""In what order a host does what it was told: each client's work in its order, and gangs in one order.

Launches come in one order for the whole host. Two things depend on it. What a client does reads what it has
done before, and gives away what that still reads. And computations that several hosts do together must meet
in the same order on all of them (DESIGN G1). So work stands in one lane for each client, and what has a part in
gangs in one more line across all lanes. Nothing else holds up anybody: while one client's work waits for values
that are on their way here, what others want of this host alone goes on, and what they want of gangs if no gang
is before it.

No circle of waiting can come of that: everything waits for less than in a single queue, which had none.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Generic, TypeVar

T = TypeVar("T")


class Lanes(Generic[T]):
    """Work that has not been done.

    Args:
        go: does as much of a piece of work as can be done now; whether that was all of it. It is only called
            with work that is next, and again when it may be able to go on.
    """

    def __init__(self, go: Callable[[T], bool]) -> None:
        self._go = go
        self._lanes: dict[int, deque[tuple[T, bool]]] = {}
        """The one that has not been empty for longest comes first."""
        self._together: deque[T] = deque()
        """What has a part in gangs."""

    def __len__(self) -> int:
        return sum(map(len, self._lanes.values()))

    def put(self, client: int, work: T, together: bool = False) -> bool:
        """Take in a piece of work, `together` with other hosts or not, and do it if it is next and can be done.

        Returns as `go_on` does.
        """
        lane = self._lanes.get(client)
        if lane is None:
            is_next = not (together and self._together)
            if is_next and self._go(work):
                return not self._lanes
            lane = self._lanes[client] = deque()
        lane.append((work, together))
        if together:
            self._together.append(work)
        return False

    def go_on(self) -> bool:
        """Do what can be done; whether the lane that has waited for longest got on."""
        moved, again = False, bool(self._lanes)
        while again:
            again = False
            for place, client in enumerate(list(self._lanes)):
                done, together = self._clear(client)
                moved = moved or (done and not place)
                again = again or (together and bool(self._lanes))
        return moved

    def _clear(self, client: int) -> tuple[bool, bool]:
        """Do what can be done of one lane; whether any of it was, and any of that together with other hosts."""
        lane = self._lanes[client]
        done = done_together = False
        while lane:
            work, together = lane[0]
            if together and self._together[0] is not work:
                break
            if not self._go(work):
                break
            lane.popleft()
            done = True
            if together:
                self._together.popleft()
                done_together = True
        if not lane:
            del self._lanes[client]
        return done, done_together

    def heads(self) -> Iterator[T]:
        """What is next of each client, whoever has waited for longest first."""
        return (lane[0][0] for lane in self._lanes.values())

    def others(self) -> Iterator[T]:
        """What is behind these."""
        return (work for lane in self._lanes.values() for work, _ in islice(lane, 1, None))
