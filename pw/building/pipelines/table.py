"""`TaskTable`: the tasks of a pipeline, and their order on each device group.

A model has stages 0 to S - 1, and a batch has microbatches 0 to M - 1. A *device group* (a slice) has one
or several stages. A table has one row for each group: its tasks in the order in which the group does
them. There are four kinds of tasks:

- `F`: the forward pass of a microbatch through a stage. In the last stage it gives the loss.
- `B`: the backward pass. If the stage has no `W` tasks, it adds to the gradient of the parameters too.
- `W`: the gradient of the parameters, where `B` computes the gradient of the stage's input only.
- `U`: the optimizer's update of a stage; it has no microbatch.

`F` needs the `F` of the stage before, `B` the `F` of its own stage and the `B` of the next stage, `W` its
own `B`, and `U` all tasks of its stage. The groups wait for nothing else, so the rows and the durations
of the tasks give the time of each task (`pw.building.pipelines.timing`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

from pw.core.errors import ArgumentError

Kind = Literal["F", "B", "W", "U"]
UPDATE = -1
"""The microbatch of an update."""


class Task(NamedTuple):
    """One cell of a schedule, such as `Task(2, 0, "F")`: stage 2, microbatch 0, forward."""

    stage: int
    microbatch: int
    kind: Kind

    def __str__(self) -> str:
        return self.kind if self.kind == "U" else f"{self.kind}{self.microbatch}"

    @property
    def named(self) -> str:
        """The task in words."""
        if self.kind == "U":
            return f"U of stage {self.stage}"
        return f"{self.kind} of stage {self.stage}, microbatch {self.microbatch}"


@dataclass(frozen=True, init=False, repr=False)
class TaskTable:
    """The tasks of each device group, in order.

    Args:
        rows: one row for each device group, of `Task`s or (stage, microbatch, kind) tuples. An update may be
            written `(stage, -1, "U")`; a stage without one gets it at the end of its row.
        name: shown where the schedule is printed.

    Raises:
        ArgumentError: a row has something that is no task, or the schedule has none.
    """

    rows: tuple[tuple[Task, ...], ...]
    name: str = "schedule"

    def __init__(self, rows: Iterable[Iterable[Any]], name: str = "schedule") -> None:
        read = [[_task(entry, group) for entry in row] for group, row in enumerate(rows)]
        if not any(read):
            raise ArgumentError(f"the schedule {name!r} has no tasks")
        updated = {task.stage for row in read for task in row if task.kind == "U"}
        for row in read:
            own = sorted({task.stage for task in row} - updated)
            row += [Task(stage, UPDATE, "U") for stage in own]
            updated.update(own)
        object.__setattr__(self, "rows", tuple(map(tuple, read)))
        object.__setattr__(self, "name", name)

    @cached_property
    def stages(self) -> int:
        """Return the number of stages."""
        return 1 + max(task.stage for task in self)

    @cached_property
    def microbatches(self) -> int:
        """Return the number of microbatches."""
        return 1 + max(task.microbatch for task in self)

    @cached_property
    def group_of(self) -> dict[int, int]:
        """The device group of each stage."""
        return {task.stage: group for group, row in enumerate(self.rows) for task in row}

    @cached_property
    def split(self) -> frozenset[int]:
        """The stages whose weight gradients are tasks of their own (`W`)."""
        return frozenset(task.stage for task in self if task.kind == "W")

    def __iter__(self) -> Iterator[Task]:
        return (task for row in self.rows for task in row)

    def needs(self, task: Task) -> tuple[Task, ...]:
        """Return the tasks whose results `task` takes, without those that they imply."""
        stage, microbatch, kind = task
        if kind == "F":
            return (Task(stage - 1, microbatch, "F"),) if stage else ()
        if kind == "B":
            own = Task(stage, microbatch, "F")
            last = stage == self.stages - 1
            return (own,) if last else (own, Task(stage + 1, microbatch, "B"))
        if kind == "W":
            return (Task(stage, microbatch, "B"),)
        done: Kind = "W" if stage in self.split else "B"
        return tuple(Task(stage, each, done) for each in range(self.microbatches))

    @property
    def named(self) -> str:
        """The schedule in words."""
        return f"the schedule {self.name!r}"


def _task(entry: Any, group: int) -> Task:
    """Read one cell of a user's table."""
    try:
        stage, microbatch, kind = entry
        if kind == "U":
            microbatch = UPDATE
        valid = kind in ("F", "B", "W", "U") and int(stage) == stage and stage >= 0
        if valid and int(microbatch) == microbatch and microbatch >= (UPDATE if kind == "U" else 0):
            return Task(int(stage), int(microbatch), kind)
    except (TypeError, ValueError):
        pass
    raise ArgumentError(
        f"row {group} of a schedule has {entry!r}; a task is (stage, microbatch, kind) with kind 'F', 'B', "
        "'W' or 'U'"
    )
