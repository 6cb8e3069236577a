"""`Schedule`: a table of tasks that can be checked, printed and drawn, and that says what to expect of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from pw.core.errors import ArgumentError
from pw.pipelines.plot import draw
from pw.pipelines.table import Kind, Table, Task
from pw.pipelines.timing import Timetable


class Schedule(Table):
    """The order in which each device group does the tasks of a pipeline.

    Args:
        rows: one row for each device group, of `Task`s or (stage, microbatch, kind) tuples. An update may be
            written `(stage, -1, "U")`; a stage without one gets it at the end of its row.
        name: shown where the schedule is printed.

    Raises:
        ArgumentError: a row has something that is no task, or the schedule has none.
    """

    def check(self) -> None:
        """Raise ArgumentError, in one sentence, if the schedule cannot be carried out.

        Each stage belongs to one group and has each of its tasks once; no group waits for itself.
        """
        counts = Counter(self)
        for task, count in counts.items():
            if count > 1:
                raise ArgumentError(f"{self.named} has {task.named} {count} times")
        groups: dict[int, int] = {}
        for group, row in enumerate(self.rows):
            for task in row:
                if groups.setdefault(task.stage, group) != group:
                    raise ArgumentError(
                        f"{self.named} has tasks of stage {task.stage} in the rows of device groups "
                        f"{groups[task.stage]} and {group}; a stage belongs to one group"
                    )
        for stage in range(self.stages):
            kinds: tuple[Kind, ...] = ("F", "B", "W") if stage in self.split else ("F", "B")
            for microbatch in range(self.microbatches):
                for kind in kinds:
                    task = Task(stage, microbatch, kind)
                    if task not in counts:
                        raise ArgumentError(f"{self.named} lacks {task.named}")
        self.timetable()

    def timetable(
        self, times: Mapping[Any, float] | None = None, transfer: float = 0.0
    ) -> Timetable:
        """Return when each task begins and ends, if each group starts its tasks as early as it can.

        Args:
            times: the duration of tasks: keys are kinds ("F"), or (stage, kind) for one stage; the unit is
                the caller's. Without it, each task takes one unit, and updates none.
            transfer: the time from the end of a task to when another group has its result.

        Raises:
            ArgumentError: the groups wait for each other in a circle.
        """
        return Timetable.of(self, times, transfer)

    def bubble(self, times: Mapping[Any, float] | None = None, transfer: float = 0.0) -> float:
        """Return the fraction of time that the groups are expected to wait; arguments as `timetable`.

        The time counts from the first task to the last, without updates.
        """
        return self.timetable(times, transfer).bubble

    def activations(self, times: Mapping[Any, float] | None = None) -> list[list[int]]:
        """Return how many microbatches' activations each stage keeps at each step, `[stage][step]`.

        A stage keeps what its backward pass needs from the start of `F` to the end of `B`, or of `W`. Steps are
        those at which some task begins (`timetable`); the largest number of a stage is what its
        memory has to hold.
        """
        return self.timetable(times).activations()

    def __str__(self) -> str:
        """Return the table: one line for each group, one column for each step of equal tasks."""
        return self.timetable().text()

    def plot(self, path: Any = None, times: Mapping[Any, float] | None = None) -> Any:
        """Draw the schedule with matplotlib; returns the figure, and writes it to `path` if there is one.

        Raises:
            ImportError: matplotlib is not installed.
        """
        return draw(self, self.timetable(times), path, "one task" if times is None else "")

    def __repr__(self) -> str:
        return f"<pw.Schedule {self.name}: {self.stages} stages, {self.microbatches} microbatches>"


def task_times(schedule: Schedule) -> dict[str, float]:
    """Return usual durations: each gradient takes as long as the forward pass."""
    return {"F": 1.0, "B": 1.0 if schedule.split else 2.0, "W": 1.0}
