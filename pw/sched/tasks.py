"""What waits in a client's queue on an island."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from pw.core.errors import ErrorReport
from pw.core.ids import arrays_in
from pw.core.messages import Arguments, Copy, CopyFile
from pw.sched.admission import Request
from pw.sched.policy import Account
from pw.sched.window import Footprint


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


@dataclass(slots=True)
class ClientQueue:
    """A client's tasks in order, and its claim on the island."""

    client: int
    share: float
    priority: int
    tasks: deque[Task] = field(default_factory=deque)
    launched: int = 0
    """Segments that have been launched and have not ended."""

    @property
    def head_arrival(self) -> int:
        """Serial number of the oldest task."""
        return self.tasks[0].arrival

    @property
    def accounts(self) -> Sequence[Account]:
        """Of all devices that the oldest task, a segment, runs on."""
        head = self.tasks[0]
        return head.footprint.accounts if isinstance(head, SegmentTask) else ()

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
