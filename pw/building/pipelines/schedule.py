"""`Schedule`: a table of tasks that can be checked, printed and drawn, and that says what to expect of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from pw.building.pipelines.table import Kind, Task, TaskTable
from pw.building.pipelines.timing import Timetable
from pw.core.errors import ArgumentError

_COLOURS = {"F": "#7aa6d8", "B": "#e0a458", "W": "#8fbf7f", "U": "#b0b0b0"}
_UPDATE_WIDTH = 0.3


class Schedule(TaskTable):
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
        return _drawn(self, self.timetable(times), path, "one task" if times is None else "")

    def __repr__(self) -> str:
        return f"<pw.Schedule {self.name}: {self.stages} stages, {self.microbatches} microbatches>"


def task_times(schedule: Schedule) -> dict[str, float]:
    """Return usual durations: each gradient takes as long as the forward pass."""
    return {"F": 1.0, "B": 1.0 if schedule.split else 2.0, "W": 1.0}


def _drawn(schedule: Schedule, table: Timetable, path: Any, unit: str) -> Any:
    """Return a matplotlib figure with one bar for each task; write it to `path` if there is one."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise ImportError(
            "Schedule.plot() needs matplotlib: pip install matplotlib, or print(schedule)"
        ) from error
    groups = len(schedule.rows)
    figure = Figure(figsize=(max(6.0, len(table.steps) * 0.4), 1.2 + 0.5 * groups))
    axes = figure.add_subplot()
    several = groups < schedule.stages
    for group, row in enumerate(schedule.rows):
        for task in row:
            begin, width = table.begins[task], table.ends[task] - table.begins[task]
            shown = width or (_UPDATE_WIDTH if task.kind == "U" else 0.0)
            axes.barh(group, shown, 0.8, begin, color=_COLOURS[task.kind], edgecolor="white")
            if task.kind != "U":
                text = f"{task.stage}:{task.microbatch}" if several else str(task.microbatch)
                axes.text(begin + width / 2, group, text, ha="center", va="center", fontsize=7)
    axes.set_yticks(range(groups), [f"group {group}" for group in range(groups)])
    axes.invert_yaxis()
    axes.set_xlabel(f"time, in units of {unit}" if unit else "time")
    axes.set_title(f"{schedule.name}: bubble {table.bubble:.0%}")
    kinds = [kind for kind in _COLOURS if any(task.kind == kind for task in schedule)]
    axes.legend(handles=[Patch(color=_COLOURS[kind], label=kind) for kind in kinds], ncols=4)
    figure.tight_layout()
    if path is not None:
        figure.savefig(path)
    return figure
