"""`Measured`: what a timeline shows of a pipeline: its bubble, its tasks' times, and what its stages kept."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import median

from pw.building.pipelines.schedule import Schedule
from pw.building.pipelines.table import Kind
from pw.core.errors import ArgumentError
from pw.operating.timeline.timeline import Computation, Timeline

SHOWN = 4
"""Most computations of another timeline that an error names."""

Names = Mapping[str, tuple[int, Kind]]
"""The stage and the kind of task of each computation of a pipeline that is a task."""


@dataclass(frozen=True)
class Measured:
    """The steps of a pipeline in a timeline; returned by `Pipeline.measured`.

    A step counts from the start of its first task to the end of its last one, without updates, as for
    `Schedule.bubble`. A group waits while its devices do neither a task nor work of other programs.
    """

    bubble: float
    """The fraction of the steps that the groups waited for other stages, over all of them."""
    groups: tuple[float, ...]
    """Bubble of each device group: the mean of its devices."""
    expected_bubble: float
    """`Schedule.bubble(times)`: what is left of the bubble if transfers and launches take no time."""
    times: Mapping[tuple[int, Kind], float]
    """The median duration in seconds, by stage and kind; 0 for tasks that are a part of others."""
    activations: tuple[int, ...]
    """The most microbatches at a time whose activations each stage kept, as in `Schedule.activations`."""
    steps: int
    """Number of whole steps in the timeline."""
    step_s: float
    """The mean length of a step, in seconds."""

    def __str__(self) -> str:
        several = "s" if self.steps > 1 else ""
        groups = ", ".join(f"{one:.1%}" for one in self.groups)
        return (
            f"bubble {self.bubble:.1%} measured, {self.expected_bubble:.1%} expected from the tasks' times; "
            f"{self.steps} step{several} of {self.step_s:.3f} s, groups wait {groups}"
        )


def measured(schedule: Schedule, names: Names, timeline: Timeline) -> Measured:
    """Return what the whole steps in a timeline show; a step is a run with all tasks.

    Raises:
        ArgumentError: there is no whole step.
    """
    tasks: defaultdict[int, list[Computation]] = defaultdict(list)
    for one in timeline.computations:
        if one.name in names:
            tasks[one.run].append(one)
    # Updates and empty sums are no tasks, and count as waiting as they do in what is expected.
    work: defaultdict[tuple[str, str], list[Computation]] = defaultdict(list)
    for one in timeline.computations:
        if one.name in names or one.run not in tasks:
            work[one.host, one.device].append(one)
    steps = [ones for ones in tasks.values() if _is_complete(ones, names, schedule.microbatches)]
    if not steps:
        raise ArgumentError(_no_step(schedule, bool(tasks), timeline))
    waited_s = [0.0] * len(schedule.rows)
    steps_s = 0.0
    for ones in steps:
        begin_s, end_s = min(one.start_s for one in ones), max(one.end_s for one in ones)
        steps_s += end_s - begin_s
        devices: defaultdict[int, set[tuple[str, str]]] = defaultdict(set)
        for one in ones:
            devices[schedule.group_of[names[one.name][0]]].add((one.host, one.device))
        for group, places in devices.items():
            busy_s = [_busy_s(work[place], begin_s, end_s) for place in places]
            waited_s[group] += end_s - begin_s - sum(busy_s) / len(busy_s)
    fractions = tuple(one_s / steps_s if steps_s else 0.0 for one_s in waited_s)
    times = _times(schedule, names, steps)
    return Measured(
        bubble=sum(fractions) / len(fractions),
        groups=fractions,
        expected_bubble=schedule.bubble(times),
        times=times,
        activations=tuple(
            max(_kept(ones, names, stage) for ones in steps) for stage in range(schedule.stages)
        ),
        steps=len(steps),
        step_s=steps_s / len(steps),
    )


def _no_step(schedule: Schedule, has_tasks: bool, timeline: Timeline) -> str:
    """Return why a timeline has no whole step, as words for users."""
    names = list(dict.fromkeys(repr(one.name) for one in timeline.computations))
    if not names:
        why = "the timeline is empty: it has no computation, and is filled when the block of pw.trace ends"
    elif not has_tasks:
        shown = ", ".join(names[:SHOWN]) + ", ..." * (len(names) > SHOWN)
        why = f"the timeline is not of this pipeline: it shows no task of {schedule.named}, but {shown}"
    else:
        why = f"the timeline shows no whole step of {schedule.named}"
    return (
        f"{why}; call a step inside of the block of pw.trace, wait there for the state that it returns, and "
        "measure behind the block"
    )


def _is_complete(ones: Sequence[Computation], names: Names, microbatches: int) -> bool:
    """Whether these are all tasks of a step: each device of a stage has done each task of all microbatches."""
    counts = Counter((one.name, one.host, one.device) for one in ones if not one.is_open)
    return {name for name, *_ in counts} == set(names) and set(counts.values()) == {microbatches}


def _busy_s(ones: Sequence[Computation], begin_s: float, end_s: float) -> float:
    """Return how long a device worked between two moments; its computations do not overlap."""
    return sum(max(0.0, min(one.end_s, end_s) - max(one.start_s, begin_s)) for one in ones)


def _kept(ones: Sequence[Computation], names: Names, stage: int) -> int:
    """Return the most microbatches at a time between the first and the last task of a stage."""
    kinds = sorted((kind for at, kind in names.values() if at == stage), key="FBW".index)
    changes: defaultdict[tuple[str, str], list[tuple[float, int]]] = defaultdict(list)
    for one in ones:
        at, kind = names[one.name]
        if at == stage and kind == kinds[0]:
            changes[one.host, one.device].append((one.start_s, 1))
        if at == stage and kind == kinds[-1]:
            changes[one.host, one.device].append((one.end_s, -1))
    return max(max(accumulate(count for _, count in sorted(own))) for own in changes.values())


def _times(
    schedule: Schedule, names: Names, steps: Sequence[Sequence[Computation]]
) -> dict[tuple[int, Kind], float]:
    durations_s: defaultdict[tuple[int, Kind], list[float]] = defaultdict(list)
    for ones in steps:
        for one in ones:
            durations_s[names[one.name]].append(one.end_s - one.start_s)
    kinds = {(task.stage, task.kind): 0.0 for task in schedule if task.kind != "U"}
    return kinds | {key: median(values) for key, values in durations_s.items()}
