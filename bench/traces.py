"""Training over islands, over time: the paper's figures 10 and 12, drawn from timelines (`pw.trace`).

- *pipeline* (figure 10): a decoder LM in four stages on four islands of a host each, beside the same on one
  island of four hosts. The schedule is GPipe's.
- *data-parallel* (figure 12): one function over two islands of two hosts, which add their gradients up,
  beside the same on one island of four hosts.

Both are small, so that steps take a fraction of a second on a few cores. All hosts share these cores, so a
device that waits costs nothing, and one that computes delays the others: the pictures show the order of the
work and the transfers, and not the bubble. `stages`, `pipeline-train` and `islands` measure throughput.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

import pw
from bench.islands import mesh_over, rate
from bench.measure import GaveUp, alternate
from bench.models import Shape
from bench.over_islands import language_model, replicated
from bench.pictures import hidden, of_hosts, window
from bench.pipeline_train import OPTIMIZER, by_pipeline, on_stages
from bench.placement import new_mesh
from bench.report import Chart, Result, Span
from bench.training import Task, Trainer, farthest
from bench.waiting import KINDS
from pw.client.connection import current
from pw.client.connection.runtime import Runtime
from pw.operating.timeline.timeline import Timeline

HOSTS = 4
ISLANDS = 2
"""Those of figure 12; in figure 10 each host is an island."""
MICROBATCHES = 16
STEPS = 3
ROUNDS = 5
BOUND = 0.95
TOLERANCE = 1e-3
ONE = "one island"
PIPELINE = Task("pipeline", "lm", Shape(128, 4, 4, 64), 64, lambda: OPTIMIZER)
PARALLEL = Task("parallel", "lm", Shape(128, 4, 2, 64), 32, lambda: OPTIMIZER)
QUICK = Task("quick", "lm", Shape(32, 2, 4, 16), 16, lambda: OPTIMIZER)


def run(quick: bool) -> Result:
    """Train both ways, over islands and on one, in turns; then draw a step of each."""
    result = Result("traces", "training over islands, over time (paper: figures 10, 12)")
    pipeline, parallel = (QUICK, QUICK) if quick else (PIPELINE, PARALLEL)
    rounds = 1 if quick else ROUNDS
    with ExitStack() as clusters:
        four = _cluster(clusters, HOSTS)
        apart = [new_mesh(1, f"island-{at}") for at in range(HOSTS)]
        one = _cluster(clusters, 1)
        together = [pw.Mesh([device], ("data",)) for device in new_mesh(HOSTS).devices]
        places = {
            f"{HOSTS} islands": (four, partial(_pipeline, pipeline, apart)),
            ONE: (one, partial(_pipeline, pipeline, together)),
        }
        _compare(result, "figure-10", pipeline, places, rounds)
    with ExitStack() as clusters:
        two = _cluster(clusters, ISLANDS)
        halves = mesh_over(HOSTS, ISLANDS)
        one = _cluster(clusters, 1)
        whole = mesh_over(HOSTS, 1)
        places = {
            f"{ISLANDS} islands": (two, partial(language_model, parallel, halves, replicated)),
            ONE: (one, partial(language_model, parallel, whole, replicated)),
        }
        _compare(result, "figure-12", parallel, places, rounds)
    result.notes.append(
        f"{HOSTS} hosts of one device each, all on the cores of one machine; a step of figure 10 has "
        f"{pipeline.tokens_per_step} tokens in {MICROBATCHES} microbatches, one of figure 12 "
        f"{parallel.tokens_per_step} tokens"
    )
    return result


def _cluster(clusters: ExitStack, islands: int) -> Runtime:
    """Start a cluster of so many islands until the end of a block; returns this process's session with it."""
    place = pw.LocalCluster(islands=islands, hosts_per_island=HOSTS // islands)
    clusters.enter_context(place)
    return pw.connect()


def _pipeline(task: Task, meshes: list[pw.Mesh]) -> Trainer:
    pipe, params = by_pipeline(task, meshes, "gpipe", recompute=False, microbatches=MICROBATCHES)
    trainer = Trainer(partial(on_stages, pipe), pipe.init(params), task.batch)
    trainer.run(STEPS)
    return trainer


def _compare(
    result: Result,
    figure: str,
    task: Task,
    places: Mapping[str, tuple[Runtime, Callable[[], Trainer]]],
    rounds: int,
) -> None:
    """Add rows, bars and the charts of one figure; the first place is over several islands."""
    trainers = {where: make() for where, (_, make) in places.items()}
    samples = alternate(
        {where: partial(rate, own, STEPS, task.tokens_per_step) for where, own in trainers.items()},
        rounds=rounds,
    )
    result.compare(samples, unit="tokens/s", baseline=ONE, params={"of": figure})
    (over, _) = places
    ratio = samples[over].over(samples[ONE]).median
    result.at_least(BOUND, ratio, f"{figure}: {over} / {ONE}: tokens/s")
    apart = farthest(trainers[over].losses, trainers[ONE].losses)
    result.at_most(TOLERANCE, apart, f"{figure}: largest relative difference of a loss")
    for where, (session, _) in places.items():
        before = current.use(session)  # whose processes are traced
        with pw.trace(None) as timeline:
            trainers[where].run(STEPS)
        current.use(before)
        spans = step_of(timeline)
        title = f"{where}: {samples[where].median:,.0f} tokens/s"
        if where == over:
            title += f", {ratio:.2f} × {ONE}"
        if any(span.kind == "transfer" for span in spans):
            title += f"; hosts compute during {hidden(spans):.0%} of the time of transfers to them"
        result.charts.append(Chart(figure, title, spans, {where.replace(" ", "-"): timeline}))


def step_of(timeline: Timeline) -> list[Span]:
    """Return the middle one of the steps in a timeline: what hosts compute, and what comes to them."""
    runs = sorted({one.run for one in timeline.computations})
    if not runs:
        raise GaveUp("the timeline shows no computations")
    run = runs[len(runs) // 2]
    step = replace(
        timeline,
        computations=[one for one in timeline.computations if one.run == run],
        transfers=[one for one in timeline.transfers if one.run == run],
    )
    spans = of_hosts(step, lambda one: KINDS.get(one.name.rpartition("_")[2], "computation"))
    return window(spans, min(span.start_s for span in spans), max(span.end_s for span in spans))
