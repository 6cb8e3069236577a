"""What waits in a client's queue on an island."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from pw.core.errors import ErrorReport
from pw.core.ids import arrays_in
from pw.core.messages import Arguments, Copy, CopyFile
from pw.sched.island.admission import Request
from pw.sched.island.habits import Habit
from pw.sched.island.names import Names
from pw.sched.island.policy import Account
from pw.sched.island.window import Footprint, Part


@dataclass(slots=True)
class RunHere:
    """What the segments of one run share on an island."""

    run: int
    program: int
    arguments: Arguments
    request: Request | None
    """Its place in the order of admission; None where memory does not matter to it."""
    is_timed: bool = False
    """The controller is to hear of its first launch."""
    names: Names = field(default_factory=Names)
    """What its parts are called, also when its program is let go before it has ended."""
    introduced: set[str] = field(default_factory=set)
    last_segment: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class SegmentTask:
    """One queued or launched gang."""

    here: RunHere
    segment: int
    hosts: tuple[str, ...]
    footprint: Footprint
    notify: tuple[str, ...]
    unlaunched: set[int]
    """Producer segments on other islands that have not been launched (G4)."""
    unfinished: set[int]
    """Producer segments on other islands that have not ended (G3)."""
    awaits: set[int]
    """Uploads that have not ended."""
    arrival: int
    reporters: int
    """How many of the hosts, the first ones, are to say that it has ended, or have not said so yet."""
    estimate_us: float = 0.0
    device_time_us: int = 0
    """The longest that a host has told."""
    lost: ErrorReport | None = None
    """What a host has told: it has no value there because another host was lost."""
    ended_on: tuple[str, ...] = ()
    """Hosts that have said that it has ended."""
    held_on: frozenset[str] = frozenset()
    """Hosts where it waits for inputs, and others have passed it."""
    launched_s: float = -1.0
    """When it was launched; negative while it is queued."""

    def under_way(self) -> Iterable[str]:
        """Hosts that may be at it, or wait for who is."""
        if not (self.ended_on or self.held_on):
            return self.hosts
        return set(self.hosts).difference(self.ended_on, self.held_on)


@dataclass(slots=True)
class DiscardTask:
    """Arrays or a program to drop after the client's earlier work."""

    arrays: tuple[int, ...]
    hosts: tuple[tuple[str, ...], ...]
    program: int
    arrival: int


@dataclass(slots=True)
class CopyTask:
    """Arrays to copy to host memory or to disk, after the client's earlier work and before its later work."""

    copies: tuple[tuple[str, Copy], ...]
    files: tuple[tuple[str, CopyFile], ...]
    arrival: int


Task = SegmentTask | DiscardTask | CopyTask


LAST = 1 << 62
"""Arrival of what has not come yet."""


@dataclass(slots=True, eq=False)
class ClientQueue:
    """A client's tasks in order, and its claim on the island."""

    client: int
    share: float
    priority: int
    tasks: deque[Task] = field(default_factory=deque)
    launched: int = 0
    """Segments that have been launched and have not ended."""
    came_s: float = -math.inf
    """When it submitted something last."""
    waits_since_s: float = math.inf
    """When something of it was launched last, or came when nothing was queued; inf if nothing is."""
    habit: Habit = field(default_factory=Habit)

    @property
    def head_arrival(self) -> int:
        """Serial number of the oldest task."""
        return self.tasks[0].arrival if self.tasks else LAST

    @property
    def oldest(self) -> SegmentTask | None:
        """The oldest segment."""
        for task in self.tasks:
            if isinstance(task, SegmentTask):
                return task
        return None

    @property
    def place(self) -> Footprint | None:
        """Where the oldest segment runs; if there is none, where the client is expected again."""
        return self.habit.where if (oldest := self.oldest) is None else oldest.footprint

    @property
    def accounts(self) -> Sequence[Account]:
        """Of all devices there."""
        return () if (place := self.place) is None else place.accounts

    @property
    def expected_until_s(self) -> float:
        """Until when a place may be kept for it while nothing of it can be launched there."""
        return self.habit.expected_until_s(self.place)

    def wants(self, now_s: float) -> Sequence[Part]:
        """Where its oldest segment runs; if there is none, where it is expected back just now."""
        if (oldest := self.oldest) is not None:
            return oldest.footprint.parts
        where = self.habit.where
        if where is None or now_s >= self.habit.expected_until_s(where):
            return ()
        return where.parts

    def submitted(self, tasks: Sequence[SegmentTask], now_s: float) -> None:
        """The client wants a run."""
        is_new = self.oldest is None
        self.habit.came(now_s, is_new and bool(self.launched))
        if is_new:
            self.waits_since_s = now_s
        self.came_s = now_s
        self.tasks.extend(tasks)

    def insert(self, discard: DiscardTask) -> None:
        """Queue it behind the last task that may use its arrays; what is behind may need their memory."""
        arrays = frozenset(discard.arrays)
        place = len(self.tasks)
        while place and not _may_use(self.tasks[place - 1], arrays):
            place -= 1
        self.tasks.insert(place, discard)


def _may_use(task: Task, arrays: frozenset[int]) -> bool:
    if isinstance(task, SegmentTask):
        given = task.here.arguments
        return not (arrays.isdisjoint(arrays_in(given.args)) and arrays.isdisjoint(given.results))
    return isinstance(task, CopyTask)


@dataclass(slots=True)
class Drops:
    """What the hosts of a gang are to drop, collected during a turn and sent behind the turn's launches."""

    arrays: list[int] = field(default_factory=list)
    programs: list[int] = field(default_factory=list)
    clients: list[int] = field(default_factory=list)
