"""The gain of dispatching ahead of the data: the paper's Figure 7.

A pipeline is a chain of stages, each a small computation on the host of another island. *Parallel*
dispatch is one call of a `pw.program`: all hosts get their part at once. *Sequential* dispatch is a
client that calls each stage when the one before has ended, as it must in a runtime that learns from
a stage the needs of the next. Both run one pipeline after the other (1 in flight), and several at a
time.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import pw
from bench import measure, report
from bench.baselines import ray_pipeline
from bench.baselines.steps import local
from bench.placement import chain, new_mesh

FLIGHT = (1, 4, 64)
CLUSTERS = ((2, 4), (8, 16))
"""Numbers of stages that are measured on one cluster; it has as many islands as the largest."""
Case = Callable[[int], object]
Found = dict[tuple[str, int, int], measure.Sample]
"""Readings, by dispatch, stages and pipelines in flight."""


def run(quick: bool) -> report.Result:
    """Measure 2 to 16 stages; Ray's compiled graphs with 2 and 4."""
    result = report.Result("pipeline", "pipelines of small stages per second (paper: Figure 7)")
    found: Found = {}
    for counts in ((2,),) if quick else CLUSTERS:
        with contextlib.ExitStack() as stack:
            found |= _measure(counts, quick, stack, result.notes)
    for how, stages, flying in sorted(found, key=lambda key: key[1:]):
        reference = found.get(("sequential", stages, flying)) if how != "sequential" else None
        params = {"stages": stages, "in flight": flying}
        sample = found[how, stages, flying]
        result.add(how, params, sample, "1/s", "sequential", reference)
    _add_bars(result, found)
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
    """A function on each island, in the order of the islands' names."""
    meshes = (new_mesh(island=f"island-{stage}") for stage in range(stages))
    return [pw.jit(local, devices=list(mesh.devices)) for mesh in meshes]


def parallel(stages: Sequence[Any], in_flight: int) -> Case:
    """One program for all stages, with `in_flight` calls in flight; a count is of pipelines."""

    pipeline = chain(stages)

    def work(count: int) -> None:
        measure.in_flight(
            count, in_flight, lambda: pipeline(_zero()), lambda x: x.block_until_ready()
        )

    assert np.asarray(pipeline(_zero()))[0] == len(stages)
    return work


def sequential(stages: Sequence[Any], in_flight: int) -> Case:
    """A call for each stage when the one before has ended, `in_flight` pipelines side by side."""

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
) -> Found:
    """The readings on one cluster."""
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


def _add_bars(result: report.Result, found: Found) -> None:
    # Compare with Ray's fastest way: on a small machine more in flight does not always help.
    ray = [key for key in found if key[:2] == ("Ray graph", 4)]
    if ray:
        ratio, best = min((found["parallel", 4, 4].over(found[key]).median, key) for key in ray)
        text = f"4 stages, 4 in flight, to Ray's compiled graphs with {best[2]} in flight"
        result.at_least(1.0, ratio, text)
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
        result.at_least(1.0, gain[many] / gain[few], text)


def _zero() -> Any:
    return np.zeros(1, np.float32)
