"""The gain of dispatching ahead of the data: the paper's Figure 7.

A pipeline is a chain of stages, each a small computation on the host of another island. With more stages than
islands, hosts have several stages, and neighbours are on different hosts as before. *Parallel*
dispatch is one call of a `pw.program`: all hosts get their part at once. *Sequential* dispatch is a
client that calls each stage when the one before has ended, as it must in a runtime that learns from
a stage the needs of the next. Both run one pipeline after the other (1 in flight), and several at a
time.

The paper's curve has three phases: more stages first share the client's fixed costs, then transfers weigh
more, then the fixed costs of scheduling are shared. Where the time goes is shown by the processor time of a
computation, of the client, of controller and schedulers, and of the hosts, which also transfer.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import pw
from bench import measure, report
from bench.baselines import ray_pipeline
from bench.baselines.steps import local
from bench.placement import chain, new_mesh
from bench.processor import busy_s

FLIGHT = (1, 4, 64)
CLUSTERS = {4: (2, 4), 16: (8, 16, 32, 64, 128)}
"""Islands of each cluster, and the numbers of stages that are measured on it."""
WATCHED_S = 0.7
"""How long the processor time of pipelines is read."""
PARTS = ("client", "controller and schedulers", "hosts")
Case = Callable[[int], object]
Found = dict[tuple[str, int, int], measure.Sample]
"""Readings, by dispatch, stages and pipelines in flight."""


def run(quick: bool) -> report.Result:
    """Measure 2 to 16 stages; Ray's compiled graphs with 2 and 4."""
    result = report.Result("pipeline", "pipelines of small stages per second (paper: Figure 7)")
    found: Found = {}
    parts: report.Series = {part: [] for part in (*PARTS, "time on a clock")}
    for islands, counts in {2: (2, 4)}.items() if quick else CLUSTERS.items():
        with contextlib.ExitStack() as stack:
            found |= _measure(islands, counts, quick, stack, result.notes, parts)
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
                series.setdefault(how, []).append((stages, stages * sample.median))
        title = f"{in_flight} in flight"
        result.figures.append(
            report.Figure(title, "stages", "computations per second", series, True, True)
        )
    for part, points in parts.items():
        for count, took_us in points:
            sample = measure.Sample((took_us,))
            result.add(f"parallel, {part}", {"stages": count, "in flight": 1}, sample, "µs/stage")
    title = "parallel, 1 in flight: where the time goes"
    result.figures.append(report.Figure(title, "stages", "µs of a computation", parts, True, True))
    result.notes.append(
        f"more than {max(CLUSTERS)} stages: several on each of {max(CLUSTERS)} hosts; "
        "'client', 'controller and schedulers' and 'hosts' are processor time"
    )
    return result


def stages_on_islands(stages: int, islands: int) -> list[Any]:
    """The functions of a pipeline: each on the island after that of the one before."""
    meshes = [new_mesh(island=f"island-{at}") for at in range(min(stages, islands))]
    functions = [pw.jit(local, devices=list(mesh.devices)) for mesh in meshes]
    return [functions[stage % len(functions)] for stage in range(stages)]


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
    islands: int,
    counts: Sequence[int],
    quick: bool,
    stack: contextlib.ExitStack,
    notes: list[str],
    parts: report.Series,
) -> Found:
    """The readings on one cluster; `parts` gets where the time goes."""
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
    cluster = stack.enter_context(pw.LocalCluster(islands=islands))
    for count in counts:
        functions = stages_on_islands(count, islands)
        for in_flight in FLIGHT[:2] if quick or count > islands else FLIGHT:
            for how, make in (("parallel", parallel), ("sequential", sequential)):
                timed[how, count, in_flight] = measure.timed(make(functions, in_flight))
    keys = {f"{key[0]}, {key[1]} stages, {key[2]} in flight": key for key in timed}
    cases = {
        name: measure.sized(timed[key], reading_s=0.02 if quick else 0.3)
        for name, key in keys.items()
    }
    rounds, warm_up = (1, 0) if quick else (5, 1)
    samples = measure.alternate(cases, rounds=rounds, warm_up=warm_up, notes=notes)
    for count in counts:
        rate = samples[f"parallel, {count} stages, 1 in flight"].median
        pipelines = max(1, round(rate * (0.05 if quick else WATCHED_S)))
        took = _parts_s(cluster, timed["parallel", count, 1], pipelines)
        for part, took_s in took.items():
            parts[part].append((count, took_s / (pipelines * count) * 1e6))
    return {keys[name]: sample for name, sample in samples.items()}


def _parts_s(
    cluster: pw.LocalCluster, timed: Callable[[int], float], pipelines: int
) -> dict[str, float]:
    """The processor time of each part of the system for some pipelines, and the time on a clock."""
    controller, *hosts = cluster.pids

    def used_s() -> tuple[float, float, float]:
        return time.process_time(), busy_s([controller]), busy_s(hosts)

    before_s, begun_s = used_s(), time.perf_counter()
    timed(pipelines)
    took_s = time.perf_counter() - begun_s
    after_s = used_s()
    # `timed` runs a tenth more, its warm-up.
    share = pipelines / (pipelines + max(1, pipelines // 10))
    spent = (share * (after - before) for after, before in zip(after_s, before_s, strict=True))
    return dict(zip(PARTS, spent, strict=True)) | {"time on a clock": share * took_s}


def _add_bars(result: report.Result, found: Found) -> None:
    for in_flight, bound in ((1, 0.8), (4, 1.2)):
        if (ray := found.get(("Ray graph", 4, in_flight))) is not None:
            ratio = found["parallel", 4, in_flight].over(ray).median
            text = f"4 stages, {in_flight} in flight, to Ray's compiled graphs with as many"
            result.at_least(bound, ratio, text)
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
