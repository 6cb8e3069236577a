"""A decoder LM of 16 layers in 4, 8 and 16 stages, by microbatches, beside model-parallel SPMD (Table 2).

All train on the same devices, as in the paper, of which there are four, each of another host: with more stages
each device has several, which follow each other. *SPMD* is one `pw.jit` function, whose feed-forward layers
are split over two groups of hosts and whose rows are split within each. The first parameters, the batches
and the losses are the same.

The devices share the cores of this machine, so a bubble costs nothing here; what is seen is what stages,
microbatches and transfers cost the runtime. `pipeline-train` measures bubbles.
"""

from __future__ import annotations

from functools import partial

import numpy as np

import pw
from bench.measure import Sample, alternate
from bench.models import Shape
from bench.over_islands import BOTH, language_model, split_features
from bench.pipeline_train import OPTIMIZER, by_pipeline, on_stages
from bench.placement import new_mesh
from bench.report import Figure, Result, Series
from bench.training import Task, Trainer, farthest

HOSTS = 4
CASES = ((4, 16), (8, 16), (8, 32), (16, 16), (16, 64))
"""Stages and microbatches; those of the paper are four microbatches for each stage."""
PAPER = {(4, 16): 133.7 / 125.7, (8, 32): 132.7 / 125.7, (16, 64): 131.4 / 125.7}
"""The paper's tokens/s over those of SPMD."""
TOLERANCE = 1e-3
READING_S = 1.5
SPMD = "SPMD, model-parallel"
FULL = Task("stages", "lm", Shape(64, 4, 16, 32), 64, lambda: OPTIMIZER)
QUICK = Task("stages-quick", "lm", Shape(16, 2, 4, 8), 16, lambda: OPTIMIZER)


def run(quick: bool) -> Result:
    """Train in all ways, in turns; quick: one pipeline of four stages, on two devices."""
    work, cases, hosts = (QUICK, ((4, 4),), 2) if quick else (FULL, CASES, HOSTS)
    result = Result("stages", "tokens/s of one decoder LM in 4, 8 and 16 stages (Table 2)")
    with pw.LocalCluster(hosts_per_island=hosts):
        devices = new_mesh(hosts).devices
        one = pw.Mesh(np.array(devices).reshape(2, -1), BOTH)
        own = [pw.Mesh([device], ("data",)) for device in devices]
        trainers = {SPMD: language_model(work, one, split_features, rows="data")}
        for stages, microbatches in cases:
            trainers[name_of(stages, microbatches)] = pipeline(work, stages, microbatches, own)
        steps = 1 if quick else max(2, round(READING_S / (trainers[SPMD].run(2) / 2)))

        def reading(trainer: Trainer) -> float:
            return steps * work.tokens_per_step / trainer.run(steps)

        samples = alternate(
            {name: partial(reading, trainer) for name, trainer in trainers.items()},
            rounds=1 if quick else 4,
        )
    add_rows(result, samples, cases)
    losses = trainers[SPMD].losses
    apart = max(farthest(trainer.losses, losses) for trainer in trainers.values())
    result.at_most(TOLERANCE, apart, f"largest relative difference of a loss from that of {SPMD}")
    result.notes.append(
        f"{hosts} hosts of one device each, all on the cores of one machine; schedule gpipe; "
        f"{work.tokens_per_step} tokens a step"
    )
    return result


def name_of(stages: int, microbatches: int) -> str:
    """The name of a pipeline."""
    return f"{stages} stages, {microbatches} microbatches"


def pipeline(work: Task, stages: int, microbatches: int, devices: list[pw.Mesh]) -> Trainer:
    """A trainer of the task in stages, equally many on each device, which has run a step."""
    meshes = [devices[stage * len(devices) // stages] for stage in range(stages)]
    pipe, params = by_pipeline(work, meshes, "gpipe", recompute=False, microbatches=microbatches)
    trainer = Trainer(partial(on_stages, pipe), pipe.init(params), work.batch)
    trainer.run(1)
    return trainer


def add_rows(
    result: Result, samples: dict[str, Sample], cases: tuple[tuple[int, int], ...]
) -> None:
    """Add the rows and the picture."""
    spmd = samples[SPMD]
    result.add(SPMD, {}, spmd, "tokens/s")
    series: Series = {SPMD: [(stages, spmd.median) for stages, _ in cases]}
    for stages, microbatches in cases:
        sample = samples[name_of(stages, microbatches)]
        params: dict[str, object] = {"stages": stages, "microbatches": microbatches}
        if (theirs := PAPER.get((stages, microbatches))) is not None:
            params["ratio in the paper"] = f"{theirs:.3f}"
        result.add("pw.pipeline", params, sample, "tokens/s", SPMD, spmd)
        kind = "4 microbatches a stage" if microbatches == 4 * stages else f"{microbatches} in all"
        series.setdefault(kind, []).append((stages, sample.median))
    result.figures.append(Figure("Table 2", "stages", "tokens/s", series, log_x=True))
