"""A pipeline schedule as data: the tasks of each stage, in order.

One forward, one backward ("1F1B"): stage 0 sends a few micro-batches ahead, then alternates between
the forward of a new micro-batch and the backward of the oldest. Stage 1 is the last stage, so
forward and backward are one task there. Stage 0 keeps the inputs of at most `ahead` micro-batches;
with all forwards before all backwards it would keep all.

The table has one row a stage. `merge` interleaves the rows so that every task comes after the task
that it needs. The pipeline's program calls its functions in that order.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """The kind of a task, with its letter in the printed table."""

    FORWARD = "F"
    LOSS = "L"
    BACKWARD = "B"


@dataclass(frozen=True, slots=True)
class Task:
    """One node of the training step."""

    stage: int
    kind: Kind
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.micro_batch}"

    def needs(self) -> Task | None:
        """The task of the other stage whose result this task takes."""
        match self.kind:
            case Kind.FORWARD:
                return None
            case Kind.LOSS:
                return Task(0, Kind.FORWARD, self.micro_batch)
            case Kind.BACKWARD:
                return Task(1, Kind.LOSS, self.micro_batch)


Schedule = tuple[tuple[Task, ...], tuple[Task, ...]]
"""Each stage's tasks, in the order in which the stage works on them."""


def one_forward_one_backward(micro_batches: int, ahead: int = 2) -> Schedule:
    """Plans a step of two stages; stage 0 has at most `ahead` micro-batches in flight."""
    stage0: list[Task] = []
    for tick in range(micro_batches + ahead):
        if tick >= ahead:
            stage0.append(Task(0, Kind.BACKWARD, tick - ahead))
        if tick < micro_batches:
            stage0.append(Task(0, Kind.FORWARD, tick))
    stage1 = [Task(1, Kind.LOSS, index) for index in range(micro_batches)]
    return tuple(stage0), tuple(stage1)


def merge(schedule: Schedule) -> list[list[Task]]:
    """Puts the tasks into ticks, at most one a stage, each after the task that it needs.

    Raises ValueError if the rows wait for each other.
    """
    rows = [list(row) for row in schedule]
    done: set[Task | None] = {None}
    ticks: list[list[Task]] = []
    while any(rows):
        ready = [row[0] for row in rows if row and row[0].needs() in done]
        if not ready:
            raise ValueError(f"the schedule's stages wait for each other: {schedule}")
        for task in ready:
            rows[task.stage].remove(task)
        done.update(ready)
        ticks.append(ready)
    return ticks


def table(schedule: Schedule) -> list[str]:
    """Prints a schedule: one line a stage, one column a tick."""
    ticks = merge(schedule)
    width = max(len(str(task)) for row in schedule for task in row) + 1
    lines = []
    for stage in range(len(schedule)):
        cells = [
            "".join(str(task) for task in tick if task.stage == stage) or "." for tick in ticks
        ]
        lines.append("".join(cell.ljust(width) for cell in cells).rstrip())
    return lines
