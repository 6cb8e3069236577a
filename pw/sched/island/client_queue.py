"""One client's queue on an island: its tasks in order, and what the policy knows about the client."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from pw.core.accounts import Spent
from pw.core.ids import arrays_in
from pw.core.messages import ArrayCopy, ClientUse, CopyFile
from pw.sched.island.launch_states import SegmentTask
from pw.sched.island.think_time import Habit
from pw.sched.island.window import Account, Footprint, SiteGroup, Stake


@dataclass(slots=True)
class DiscardTask:
    """Arrays, or a program, that hosts drop after the client's earlier work."""

    arrays: tuple[int, ...]
    hosts: tuple[tuple[str, ...], ...]
    """Hosts that have each array, or the program."""
    program: int
    install: int
    """Number of the program's installation at that time; a later one is kept."""
    arrival: int


@dataclass(slots=True)
class CopyTask:
    """Arrays to copy to host memory or to disk, between the client's earlier and later work."""

    copies: tuple[tuple[str, ArrayCopy], ...]
    files: tuple[tuple[str, CopyFile], ...]
    arrival: int

    @property
    def arrays(self) -> set[int]:
        """The arrays that are copied or written."""
        files = (copy for _, file in self.files for copy in file.copies)
        return {copy.array for copy in (*(copy for _, copy in self.copies), *files)}

    @property
    def hosts(self) -> tuple[str, ...]:
        """The hosts that copy or write."""
        return tuple(dict.fromkeys(host for host, _ in (*self.copies, *self.files)))


Task = SegmentTask | DiscardTask | CopyTask

LAST = 1 << 62
"""Arrival number of work that has not come yet."""


@dataclass(slots=True, eq=False)
class ClientQueue:
    """A client's tasks in order, and its claim on the island."""

    stake: Stake
    priority: int
    tasks: deque[Task] = field(default_factory=deque)
    launched: int = 0
    """Number of launches in flight."""
    came_s: float = -math.inf
    """Time at which the client last submitted a run, in seconds."""
    waits_since_s: float = math.inf
    """Time at which the queue last changed from empty, or had a launch, in seconds; inf while no launch is
    queued."""
    habit: Habit = field(default_factory=Habit)
    ended_launches: int = 0
    waited_s: float = 0.0
    """Seconds for which the launches that have ended were queued, in all."""
    device_s: float = 0.0
    """Device time of these launches, in seconds: of each device, in all."""
    held_but: frozenset[int] | None = None
    """Runs that may be launched while the client is to leave its devices; None while it is not."""
    account: Spent = field(default_factory=Spent)
    """Part of `device_s` and `ended_launches` that the accounts have."""

    @property
    def head_arrival(self) -> int:
        """The arrival of the oldest task."""
        return self.tasks[0].arrival if self.tasks else LAST

    @property
    def oldest(self) -> SegmentTask | None:
        """The oldest queued launch."""
        for task in self.tasks:
            if isinstance(task, SegmentTask):
                return task
        return None

    @property
    def footprint(self) -> Footprint | None:
        """Footprint of the oldest launch; without a launch, of the one with which the client is expected
        again.
        """
        return self.habit.footprint if (oldest := self.oldest) is None else oldest.footprint

    def holds(self, task: Task) -> bool:
        """Whether a launch is held because the client is to leave its devices."""
        held_but = self.held_but
        return (
            held_but is not None and isinstance(task, SegmentTask) and task.here.run not in held_but
        )

    @property
    def accounts(self) -> Sequence[Account]:
        """The fair-share accounts of all devices of `footprint`."""
        return () if (footprint := self.footprint) is None else footprint.accounts

    @property
    def expected_until_s(self) -> float:
        """Until when devices may be kept for the client while none of its launches can go."""
        return self.habit.expected_until_s(self.footprint)

    def wants(self, now_s: float) -> Sequence[SiteGroup]:
        """Return where the oldest launch runs; without one, where the client is expected now."""
        if (oldest := self.oldest) is not None:
            return oldest.footprint.groups
        footprint = self.habit.footprint
        if footprint is None or now_s >= self.habit.expected_until_s(footprint):
            return ()
        return footprint.groups

    def submitted(self, tasks: Sequence[SegmentTask], now_s: float) -> None:
        """Queue the launches of a run."""
        was_empty = self.oldest is None
        self.habit.came(now_s, was_empty and bool(self.launched))
        if was_empty:
            self.waits_since_s = now_s
        self.came_s = now_s
        self.tasks.extend(tasks)

    def take(self, now_s: float) -> None:
        """Take out the head, which is launched."""
        head = self.tasks.popleft()
        assert isinstance(head, SegmentTask)
        self.launched += 1
        self.waits_since_s = math.inf if self.oldest is None else now_s
        self.habit.launched(head.footprint)

    def ended(self, task: SegmentTask, now_s: float) -> None:
        """A launch has ended."""
        self.launched -= 1
        self.habit.ended(task.device_time_us, now_s)
        self.ended_launches += 1
        self.waited_s += task.launched_s - task.here.queued_s
        self.device_s += task.device_s

    def use(self, now_s: float) -> ClientUse:
        """Describe what the client waits for and has had here."""
        queued = sum(isinstance(task, SegmentTask) for task in self.tasks)
        waiting_s = max(0.0, now_s - self.waits_since_s) if queued else 0.0
        return ClientUse(queued, waiting_s, self.ended_launches, self.waited_s, self.device_s)

    def launched_itself(self, tasks: Sequence[SegmentTask], now_s: float) -> None:
        """The client has launched a run under a lease."""
        self.habit.came(now_s, bool(self.launched))
        self.came_s = now_s
        self.launched += len(tasks)
        self.habit.launched(tasks[-1].footprint)

    def insert(self, discard: DiscardTask) -> None:
        """Queue it behind the last task that may use its arrays: later ones may need the memory."""
        arrays = frozenset(discard.arrays)
        at = len(self.tasks)
        while at and not _may_use(self.tasks[at - 1], arrays):
            at -= 1
        self.tasks.insert(at, discard)

    def cancel(self, run: int) -> None:
        """Remove the launches of a run."""
        self.tasks = deque(
            task for task in self.tasks if not isinstance(task, SegmentTask) or task.here.run != run
        )

    def clear(self) -> None:
        """The island has left its epoch."""
        self.tasks.clear()
        self.launched = 0
        self.habit.forget_footprint()


def _may_use(task: Task, arrays: frozenset[int]) -> bool:
    if isinstance(task, SegmentTask):
        names = task.here.arguments
        return not (arrays.isdisjoint(arrays_in(names.args)) and arrays.isdisjoint(names.results))
    return isinstance(task, CopyTask) and not arrays.isdisjoint(task.arrays)
