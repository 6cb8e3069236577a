"""What it is worth to dispatch ahead of the data: the paper's Figure 7.

A pipeline is a chain of stages, each a small computation on the host of another island. *Parallel* dispatch is
one call of a `pw.program`: all hosts hear of their part at once. *Sequential* dispatch is a client that calls
each stage when the one before has ended, as a runtime must that learns what a stage needs from its predecessor.
Both with one pipeline after the other (1 in flight), and with several at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import pw
from bench import measure, report
from bench.baselines import ray_pipeline

FLIGHT = (1, 4, 64)
CLUSTERS = ((2, 4), (8, 16))
"""The numbers of stages that are measured on one cluster, which has as many hosts as the last."""
Case = Callable[[int], object]


def run(quick: bool) -> report.Result:
    """Measure 2 to 16 stages; Ray's compiled graphs with 2 and 4."""
    result = report.Result("pipeline", "pipelines of small stages per second (paper: Figure 7)")
    found: dict[tuple[str, int, int], measure.Sample] = {}
    for counts in ((2,),) if quick else CLUSTERS:
        with contextlib.ExitStack() as stack:
            found |= _measure(counts, quick, stack, result.notes)
    result.rows = [_row(found, *key) for key in sorted(found, key=lambda key: key[1:])]
    result.bars = _bars(found)
    for in_flight in FLIGHT:
        series: report.Series = {}
        for (how, stages, flying), sample in sorted(found.items()):
            if flying == in_flight:
                series.setdefault(how, []).append((stages, sample.median))
        result.figures.append(
            report.Figure(
                f"{in_flight} in flight", "stages", "pipelines per second", series, True, True
            )
        )
    return result


def stages_on_islands(stages: int) -> list[Any]:
    """As many functions, each on an island of its own, in the order of the islands' names."""
    placed = []
    for stage in range(stages):
        devices = pw.make_virtual_device_set().add_slice(devices=1, island=f"island-{stage}")
        placed.append(pw.jit(lambda x: x + 1, devices=devices.devices))
    return placed


def parallel(stages: Sequence[Any], in_flight: int) -> Case:
    """One program for all stages, so many calls of it in flight; a count is of pipelines."""

    @pw.program
    def pipeline(x: Any) -> Any:
        for stage in stages:
            x = stage(x)
        return x

    def work(count: int) -> None:
        flying: deque[Any] = deque()
        for _ in range(count):
            if len(flying) >= in_flight:
                flying.popleft().block_until_ready()
            flying.append(pipeline(_zero()))
        while flying:
            flying.popleft().block_until_ready()

    assert np.asarray(pipeline(_zero()))[0] == len(stages)
    return work


def sequential(stages: Sequence[Any], in_flight: int) -> Case:
    """A call for each stage when the one before has ended, so many pipelines side by side."""

    def one() -> None:
        x: Any = _zero()
        for stage in stages:
            x = stage(x).block_until_ready()

    async def lane(count: int) -> None:
        for _ in range(count):
            x: Any = _zero()
            for stage in stages:
                x = await stage(x)

    async def lanes(count: int) -> None:
        shares = [count // in_flight + (lane < count % in_flight) for lane in range(in_flight)]
        await asyncio.gather(*(lane(share) for share in shares))

    def work(count: int) -> None:
        if in_flight == 1:
            for _ in range(count):
                one()
        else:
            asyncio.run(lanes(count))

    one()
    return work


def _measure(
    counts: Sequence[int], quick: bool, stack: contextlib.ExitStack, notes: list[str]
) -> dict[tuple[str, int, int], measure.Sample]:
    """The readings on one cluster, by how, stages and in flight."""
    timed: dict[tuple[str, int, int], Callable[[int], float]] = {}
    if not quick and set(counts) & set(ray_pipeline.STAGES):
        try:
            ray = stack.enter_context(ray_pipeline.start())
        except measure.GaveUp as error:
            notes.append(str(error))
        else:
            for stages in ray_pipeline.STAGES:
                for in_flight in ray_pipeline.IN_FLIGHT:
                    name = ray_pipeline.case_name(stages, in_flight)
                    timed[ray.name, stages, in_flight] = ray.timed(name)
    stack.enter_context(pw.LocalCluster(islands=max(counts)))
    for count in counts:
        functions = stages_on_islands(count)
        for in_flight in FLIGHT[:2] if quick else FLIGHT:
            for how, make in (("parallel", parallel), ("sequential", sequential)):
                timed[how, count, in_flight] = measure.timed(make(functions, in_flight))
    keys = {f"{key[0]}, {key[1]} stages, {key[2]} in flight": key for key in timed}
    cases = {
        name: measure.sized(timed[key], reading_s=0.02 if quick else 0.3)
        for name, key in keys.items()
    }
    rounds, warm_up = (1, 0) if quick else (7, 1)
    samples = measure.alternate(cases, rounds=rounds, warm_up=warm_up, notes=notes)
    return {keys[name]: sample for name, sample in samples.items()}


def _row(
    found: dict[tuple[str, int, int], measure.Sample], how: str, stages: int, in_flight: int
) -> report.Row:
    sample = found[how, stages, in_flight]
    other = found.get(("sequential", stages, in_flight))
    apart = how != "sequential" and other is not None
    return report.Row(
        name=how,
        params={"stages": stages, "in flight": in_flight},
        sample=sample,
        unit="1/s",
        baseline="sequential" if apart else None,
        ratio=sample.over(other) if apart and other is not None else None,
    )


def _bars(found: dict[tuple[str, int, int], measure.Sample]) -> list[report.Bar]:
    bars = []
    # Compare with its fastest way: on a small machine more in flight does not always help.
    ray = [key for key in found if key[:2] == ("Ray graph", 4)]
    if ray:
        ratio, best = min((found["parallel", 4, 4].over(found[key]).median, key) for key in ray)
        text = f"4 stages, 4 in flight, to Ray's compiled graphs with {best[2]} in flight"
        bars.append(report.Bar(text, ratio, 1.0))
    for in_flight in FLIGHT:
        gain = {
            stages: sample.over(found["sequential", stages, in_flight]).median
            for (how, stages, flying), sample in found.items()
            if how == "parallel" and flying == in_flight
        }
        if len(gain) < 2:
            continue
        few, many = min(gain), max(gain)
        text = f"{in_flight} in flight: gain over sequential with {many} stages, to that with {few}"
        bars.append(report.Bar(text, gain[many] / gain[few], 1.0))
    return bars


def _zero() -> Any:
    return np.zeros(1, np.float32)
