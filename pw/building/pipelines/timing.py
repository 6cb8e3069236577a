"""`Timetable`: when each task of a schedule begins and ends, given the tasks' durations."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from pw.building.pipelines.table import Kind, Task, TaskTable
from pw.core.errors import ArgumentError


@dataclass(frozen=True)
class Timetable:
    """The time of each task."""

    schedule: TaskTable
    order: tuple[Task, ...]
    """The tasks by the time at which they begin; each after what it needs."""
    begins: Mapping[Task, float]
    ends: Mapping[Task, float]

    @staticmethod
    def of(schedule: TaskTable, times: Mapping[Any, float] | None, transfer: float) -> Timetable:
        """Start each task when its group is free and its inputs are there.

        Raises:
            ArgumentError: the groups wait for each other in a circle.
        """
        rows = [deque(row) for row in schedule.rows]
        free = [0.0] * len(rows)
        begins: dict[Task, float] = {}
        ends: dict[Task, float] = {}
        group_of = schedule.group_of
        placed: list[tuple[float, int, int, Task]] = []
        moved = True
        while moved:
            moved = False
            for group, row in enumerate(rows):
                while row and all(needed in ends for needed in schedule.needs(row[0])):
                    task = row.popleft()
                    begin = free[group]
                    for needed in schedule.needs(task):
                        late = transfer if group_of[needed.stage] != group else 0.0
                        begin = max(begin, ends[needed] + late)
                    begins[task] = begin
                    ends[task] = free[group] = begin + duration(task, times)
                    placed.append((begin, len(placed), group, task))
                    moved = True
        if any(rows):
            raise ArgumentError(_circle(schedule, [row[0] for row in rows if row], ends))
        placed.sort(key=lambda entry: entry[:2])
        return Timetable(schedule, tuple(task for *_, task in placed), begins, ends)

    @cached_property
    def span(self) -> float:
        """The time from the first task to the end of the last one that is no update."""
        return max((end for task, end in self.ends.items() if task.kind != "U"), default=0.0)

    @property
    def bubble(self) -> float:
        """The fraction of `span` that the groups wait, over all of them."""
        busy = sum(self.ends[task] - self.begins[task] for task in self.order if task.kind != "U")
        total = self.span * len(self.schedule.rows)
        return 1 - busy / total if total else 0.0

    @cached_property
    def steps(self) -> list[float]:
        """The times at which some task begins, without updates."""
        return sorted({self.begins[task] for task in self.order if task.kind != "U"})

    def activations(self) -> list[list[int]]:
        """Return the microbatches whose activations are kept, `[stage][step]`."""
        schedule, kept = self.schedule, []
        for stage in range(schedule.stages):
            last: Kind = "W" if stage in schedule.split else "B"
            lives = [
                (self.begins[Task(stage, each, "F")], self.ends[Task(stage, each, last)])
                for each in range(schedule.microbatches)
            ]
            kept.append([sum(begin <= now < end for begin, end in lives) for now in self.steps])
        return kept

    def text(self) -> str:
        """Return the table, one line for each group, one column for each step."""
        schedule = self.schedule
        several = len(schedule.rows) < schedule.stages
        column = {begin: index for index, begin in enumerate(self.steps)}
        names = {task: f"{task.stage}{task}" if several else str(task) for task in self.order}
        width = max(len(names[task]) for task in self.order if task.kind != "U") + 1
        peaks = [max(row) for row in self.activations()]
        lines = [
            f"{schedule.name}: {schedule.stages} stages on {len(schedule.rows)} device groups, "
            f"{schedule.microbatches} microbatches; bubble {self.bubble:.0%} if all tasks take equally "
            f"long; activations of at most {', '.join(map(str, peaks))} microbatches"
        ]
        for group, row in enumerate(schedule.rows):
            cells = ["."] * len(column)
            for task in row:
                if task.kind != "U":
                    cells[column[self.begins[task]]] = names[task]
            updates = " ".join(names[task] for task in row if task.kind == "U")
            line = "".join(cell.ljust(width) for cell in cells)
            lines.append(f"  group {group}  {line} {updates}")
        return "\n".join(lines)


def duration(task: Task, times: Mapping[Any, float] | None) -> float:
    """Return how long a task takes; `times` has kinds, or (stage, kind) for one stage."""
    if times is None:
        return 0.0 if task.kind == "U" else 1.0
    for key in ((task.stage, task.kind), task.kind):
        if key in times:
            return float(times[key])
    if task.kind == "U":
        return 0.0
    raise ArgumentError(f"times= has no duration for {task.kind!r} of stage {task.stage}")


def _circle(schedule: TaskTable, heads: list[Task], ends: Mapping[Task, float]) -> str:
    """Return an error text for tasks that all wait."""
    waits = []
    for task in heads:
        missing = next(needed for needed in schedule.needs(task) if needed not in ends)
        waits.append(f"{task.named} waits for {missing.named}")
    return f"{schedule.named} cannot go on: {'; '.join(waits)}"
