"""Device time of the last minute, of each device of an island: slices are placed where it is least.

The end of a launch adds one number, whatever the size of its gang; who asks adds them up.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Hashable, Iterable

from pw.core.sharding import DeviceAddress
from pw.sched.island.launch_states import SegmentTask

SPAN_S = 60.0
"""Seconds that are looked back."""
_PARTS = 6
"""Number of parts of that time; the oldest is forgotten as a whole."""


class DeviceLoad:
    """Counts the device time of launches by where they ran."""

    def __init__(self) -> None:
        self._ends_s = 0.0
        """Time at which the newest part ends, in seconds."""
        self._recent: deque[tuple[float, defaultdict[frozenset[Hashable], int]]] = deque(
            maxlen=_PARTS
        )
        """End of each part, in seconds, and microseconds of device time in it by devices."""
        self._sums = defaultdict[frozenset[Hashable], int](int)

    def ended(self, sites: frozenset[Hashable], time_us: int, now_s: float) -> None:
        """A launch has had these devices for so long."""
        if now_s >= self._ends_s:
            self._ends_s = now_s + SPAN_S / _PARTS
            self._sums = defaultdict(int)
            self._recent.append((self._ends_s, self._sums))
        self._sums[sites] += time_us

    def of_devices(
        self, in_flight: Iterable[SegmentTask], now_s: float
    ) -> dict[DeviceAddress, float]:
        """Return the device time of the last minute of each device that has some, in seconds.

        Args:
            in_flight: launches that have not ended, the oldest first; the first one of a device has it since
                the one before has ended.
            now_s: the time, in seconds.
        """
        busy_us: defaultdict[Hashable, float] = defaultdict(float)
        for ends_s, part in self._recent:
            if now_s < ends_s + SPAN_S:
                for sites, time_us in part.items():
                    for site in sites:
                        busy_us[site] += time_us
        working: set[Hashable] = set()
        for task in in_flight:
            since_s = max((group.turn_s for group in task.footprint.groups), default=now_s)
            for site in task.footprint.sites - working:
                busy_us[site] += (now_s - since_s) * 1e6
            working |= task.footprint.sites
        return {
            site: min(time_us * 1e-6, SPAN_S)
            for site, time_us in busy_us.items()
            if isinstance(site, DeviceAddress) and time_us
        }
