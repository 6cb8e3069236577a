"""The bubbles of schedules as they are if each stage has a device of its own, on any machine.

Four stages on two cores cannot compute at the same time: what one waits, another uses, and a measured bubble
measures the cores. So here the *duration* of tasks is modelled: each task is a `pw.host_function` that sleeps
for as long as the task would take. All else is real: a `pw.program` in the order of the schedule, its
launches, and the activations that travel from host to host. A host does one task at a time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

import pw
from bench.pictures import of_hosts, window
from bench.placement import new_mesh, put
from bench.report import Span
from pw.building.pipelines.measured import Measured, Names, measured
from pw.building.pipelines.schedules import named
from pw.building.pipelines.table import Kind, Task
from pw.operating.timeline.timeline import Computation, Timeline

TASK_S = 0.06
"""A forward pass of a stage, and each of its two gradients."""
WORDS = 1 << 16
"""Float32 numbers that a stage passes on: 256 KiB."""
KINDS = {"F": "forward", "B": "backward", "W": "weights' gradient"}


class Waiting:
    """A schedule of tasks that wait, on the current cluster; with two stages a mesh if it is interleaved."""

    def __init__(self, name: str, meshes: list[pw.Mesh], microbatches: int) -> None:
        each = 2 if name == "interleaved" else 1
        stages = each * len(meshes)
        schedule = named(name, [stage % len(meshes) for stage in range(stages)], microbatches)
        kinds: dict[Kind, int] = {"F": 1, "B": 1, "W": 1} if schedule.split else {"F": 1, "B": 2}
        self._times = {kind: count * TASK_S / each for kind, count in kinds.items()}
        self._schedule = schedule
        self._names: Names = {
            f"stage_{s}_{kind}": (s, kind) for s in range(stages) for kind in kinds
        }
        tasks = {
            (stage, kind): _task(function, self._times[kind], meshes[stage % len(meshes)])
            for function, (stage, kind) in self._names.items()
        }
        order = [task for task in schedule.timetable(self._times).order if task.kind != "U"]

        @pw.program
        def step(x: Any) -> list[Any]:
            made: dict[Task, Any] = {}
            for task in order:
                given = [made[needed] for needed in schedule.needs(task)] or [x]
                made[task] = tasks[task.stage, task.kind](*given)
            # The last one of each row: with them all others have ended.
            return [made[[task for task in row if task.kind != "U"][-1]] for row in schedule.rows]

        self._step = step
        self._x = put(np.zeros(WORDS, np.float32), meshes[0])
        self.step()

    @property
    def expected(self) -> float:
        """The bubble that is expected if transfers and launches take no time."""
        return self._schedule.bubble(self._times)

    def step(self) -> None:
        """Do a step, and wait for its end."""
        for end in self._step(self._x):
            end.block_until_ready()

    def traced(self) -> tuple[Timeline, Measured]:
        """Do a step; returns its timeline, and what that shows."""
        with pw.trace(None) as timeline:
            self.step()
        return timeline, measured(self._schedule, self._names, timeline)

    def picture(self, timeline: Timeline) -> list[Span]:
        """Return a step of a timeline."""

        def kind(one: Computation) -> str:
            return KINDS[self._names[one.name][1]]

        spans = of_hosts(timeline, kind)
        return window(spans, min(s.start_s for s in spans), max(s.end_s for s in spans))


def four_stages() -> list[pw.Mesh]:
    """Return a mesh for each of four hosts of two islands, in this order."""
    return [new_mesh(1, f"island-{at // 2}") for at in range(4)]


def _task(name: str, takes_s: float, mesh: pw.Mesh) -> Callable[..., Any]:
    def task(*given: Any) -> Any:
        time.sleep(takes_s)
        return given[0]

    task.__name__ = name
    return pw.host_function(task, jax.ShapeDtypeStruct((WORDS,), np.float32), mesh=mesh)
