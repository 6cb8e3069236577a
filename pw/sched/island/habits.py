"""How soon a client comes back with more work when some of its work has ended, and how long to wait for it.

A client that waits for a result before its next call has nothing queued in between. A scheduler that gives
the device to another client in that moment gives it away for as long as the other's launch takes, so all
clients that wait would get the same, whatever their shares and priorities. Disk schedulers meet the same
problem with reads (Iyer and Druschel, "Anticipatory scheduling", SOSP 2001), and the remedy is theirs: the
device is *kept* for the client whose turn it is, if it is known to come back soon.

To keep a device costs its time, so that is bounded. A client's *think time*, from the end of its work to its
next run as the scheduler sees both, is learned all the time. A device is kept only for a client whose mean
think time is within `bound_s`, and is idle for that long at most: `KEPT_S` and a quarter of the device time
that the client uses between two thoughts, and never more than four times that. While another client's work
is under way there, nothing is lost. A client that has not come back in time is not waited for any more until
something of it has been launched again, and not at all if that happens often.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from pw.sched.island.window import Footprint

KEPT_S = 4e-3
"""How long a device may be idle for a client, beside what it earns by using it."""
KEPT_SHARE = 0.25
"""The same, for each second that it uses the device."""
KEPT_TIMES = 4.0
"""And never longer than so many times what it uses."""
OVERDUE_TIMES = 3.0
"""Work that takes so many times what was expected may be waiting for something itself."""
WEIGHT = 0.25
"""Of the newest reading in a mean."""


@dataclass(slots=True, eq=False)
class Habit:
    """One client's way of coming back to one island."""

    where: Footprint | None = None
    """Where its newest launch runs, or ran: where it is expected again."""
    _is_expected: bool = False
    """Nobody has waited for it in vain since that launch."""
    bound_s: float = 0.0
    """How long it may take to come back, in seconds."""
    _comes_back: bool = False
    """It does so, most of the time."""
    _think_s: float = math.inf
    _work_s: float = 0.0
    """Means of its think time, and of the device time that it uses in between."""
    _worked_s: float = 0.0
    """Device time that has been used since it came last."""
    _came_s: float = -math.inf
    _ended_s: float = -math.inf
    """When it came last with a run, and when work of its has ended last."""

    def came(self, now_s: float, is_under_way: bool) -> None:
        """The client wants a run; `is_under_way` if work of its that was launched has not ended."""
        if self._ended_s > self._came_s:
            self._work_s += (self._worked_s - self._work_s) * (WEIGHT if self._work_s else 1.0)
            self._worked_s = 0.0
            self.bound_s = min(KEPT_S + KEPT_SHARE * self._work_s, KEPT_TIMES * self._work_s)
            self._thought(now_s - self._ended_s)
        elif is_under_way:
            self._thought(0.0)
        self._came_s = now_s

    def _thought(self, think_s: float) -> None:
        """One pause counts for two bounds at most, so that a habit outlives it."""
        think_s = min(think_s, 2 * self.bound_s)
        if self._think_s == math.inf:
            self._think_s = think_s
        else:
            self._think_s += WEIGHT * (think_s - self._think_s)
        self._comes_back = self._think_s <= self.bound_s

    def launched(self, where: Footprint) -> None:
        """Work of its is launched there."""
        self.where, self._is_expected = where, True

    def ended(self, device_time_us: float, now_s: float) -> None:
        """Work of its has ended."""
        self._ended_s = now_s
        self._worked_s += device_time_us * 1e-6

    def forget_place(self) -> None:
        """The island has left its epoch: nothing is under way there."""
        self.where, self._is_expected = None, False

    def expected_until_s(self, place: Footprint | None) -> float:
        """How long a place may be kept for it, unless it comes; negative if it is not."""
        if not (self._is_expected and self._comes_back and place is not None and place.parts):
            return -math.inf
        return self.bound_s + min(
            [part.turn_s + OVERDUE_TIMES * 1e-6 * part.time_us for part in place.parts]
        )

    def stayed_away(self) -> None:
        """It has not come in time."""
        self._is_expected = False
