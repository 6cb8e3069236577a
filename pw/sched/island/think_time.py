"""How soon a client comes back with more work, and how long a device is kept for it.

A client that waits for each result has nothing queued when its turn comes. So a device is *kept*
idle for the client whose turn it is, if that client usually comes back soon (Iyer and Druschel,
"Anticipatory scheduling", SOSP 2001).

A client's *think time* lasts from the end of its work to its next run, as the scheduler sees both.
A device is kept only for a client whose mean think time is within `bound_s`, and for no longer.
While another client's work runs on the device, keeping it costs nothing. A client that is late is
not expected again until it has had another launch, and not at all if it is often late.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from pw.sched.island.window import Footprint

KEPT_S = 4e-3
"""Seconds that a device may be idle for a client, whatever the client uses of it."""
KEPT_SHARE = 0.25
"""Seconds that a device may be idle besides, for each second of device time that the client uses."""
KEPT_TIMES = 4.0
"""Longest idle time, in multiples of the device time that the client uses."""
OVERDUE_TIMES = 3.0
"""Multiple of the expected time from which on a launch may itself be waiting for something."""
WEIGHT = 0.25
"""Weight of the newest reading in a mean."""


@dataclass(slots=True, eq=False)
class Habit:
    """Time in which one client comes back to one island, as measured."""

    footprint: Footprint | None = None
    """Footprint of the client's newest launch: where the client is expected again."""
    _is_expected: bool = False
    """True if the client has not been late since that launch."""
    bound_s: float = 0.0
    """Seconds that the client may take to come back."""
    _comes_back: bool = False
    """True if the client's mean think time is within the bound."""
    _think_s: float = math.inf
    """Mean think time, in seconds."""
    _work_s: float = 0.0
    """Mean device time between two thoughts, in seconds."""
    _worked_s: float = 0.0
    """Device time since the client's last run, in seconds."""
    _came_s: float = -math.inf
    """Time of the client's last run, in seconds."""
    _ended_s: float = -math.inf
    """Time at which a launch of the client last ended, in seconds."""

    def came(self, now_s: float, is_in_flight: bool) -> None:
        """The client submits a run; `is_in_flight` if all that it had queued is in flight."""
        if self._ended_s > self._came_s:
            self._work_s += (self._worked_s - self._work_s) * (WEIGHT if self._work_s else 1.0)
            self._worked_s = 0.0
            self.bound_s = min(KEPT_S + KEPT_SHARE * self._work_s, KEPT_TIMES * self._work_s)
            self._thought(now_s - self._ended_s)
        elif is_in_flight:
            self._thought(0.0)
        self._came_s = now_s

    def _thought(self, think_s: float) -> None:
        """Count one think time, as two bounds at most, so that one pause does not end a habit."""
        think_s = min(think_s, 2 * self.bound_s)
        if self._think_s == math.inf:
            self._think_s = think_s
        else:
            self._think_s += WEIGHT * (think_s - self._think_s)
        self._comes_back = self._think_s <= self.bound_s

    def launched(self, footprint: Footprint) -> None:
        """One of the client's launches goes."""
        self.footprint, self._is_expected = footprint, True

    def ended(self, device_time_us: float, now_s: float) -> None:
        """One of the client's launches has ended."""
        self._ended_s = now_s
        self._worked_s += device_time_us * 1e-6

    def forget_footprint(self) -> None:
        """The island has left its epoch: the client is expected nowhere."""
        self.footprint, self._is_expected = None, False

    def expected_until_s(self, footprint: Footprint | None) -> float:
        """Return until when these devices may be kept for the client; -inf if they may not."""
        if not (self._is_expected and self._comes_back and footprint and footprint.groups):
            return -math.inf
        return self.bound_s + min(
            [group.turn_s + OVERDUE_TIMES * 1e-6 * group.time_us for group in footprint.groups]
        )

    def stayed_away(self) -> None:
        """The client has not come in time."""
        self._is_expected = False
