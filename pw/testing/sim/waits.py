"""The monitor of forecasts: the table of `pw why --queue` begins with what the scheduler launches next.

At some turns of a scheduler it makes a forecast, as for a person who asks. If all queued launches are for the
same devices, and the scheduler launches one of them in this turn, then that is the first of the forecast.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any

from pw.sched.island.launch_states import LaunchState, SegmentTask
from pw.sched.island.scheduler import IslandScheduler
from pw.testing.sim.cluster import SimCluster
from pw.testing.sim.world import Violation

EVERY = 8
"""Turns with a choice among clients, of which one is looked at."""


def _is_admitted(task: SegmentTask | None) -> bool:
    """Whether a launch has the memory that it needs."""
    reservation = None if task is None else task.here.reservation
    return reservation is None or reservation.is_admitted


class WaitMonitor:
    """Compares forecasts with what schedulers do."""

    def __init__(self, cluster: SimCluster) -> None:
        self._world = cluster.world
        self._turns = count()
        cluster.on_start["scheduler"].append(self._watch)

    def _watch(self, scheduler: IslandScheduler) -> None:
        launcher: Any = scheduler._launcher
        launcher._next = partial(self._next, scheduler, launcher._next)

    def _next(
        self, scheduler: IslandScheduler, pick: Callable[[], SegmentTask | None]
    ) -> SegmentTask | None:
        busy = [queue for queue in scheduler.queues.busy.values() if queue.tasks]
        if len(busy) < 2 or next(self._turns) % EVERY:
            return pick()
        heads = {queue.stake.client: queue.oldest for queue in busy}
        turns = scheduler.reports.forecast().turns
        if not all(map(_is_admitted, heads.values())):
            return pick()
        task = pick()
        if task is None or not turns or not self._is_comparable([*heads.values()], turns[0]):
            return task
        client = turns[0].here.stake.client
        tasks = scheduler.queues.clients[client].tasks
        if task is not turns[0] and tasks and tasks[0] is turns[0]:
            words = (
                f"run {task.here.run:x} was launched on {scheduler.island}, and run "
                f"{turns[0].here.run:x} is the first in the table"
            )
            raise Violation("waits", words)
        self._world.checked["waits"] += 1
        return task

    def _is_comparable(self, heads: list[SegmentTask | None], first: SegmentTask) -> bool:
        """Whether the policy alone decides: all want one group of devices, and memory is no matter."""
        groups = {tuple(map(id, head.footprint.groups)) for head in heads if head is not None}
        return (
            first.state is LaunchState.READY
            and _is_admitted(first)
            and len(groups) == 1
            and len(groups.pop()) == 1
        )
