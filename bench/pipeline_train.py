"""One decoder LM trained in several ways on the same devices (the paper's Table 2, Fig. 12).

- *SPMD*: one island of four hosts, data parallel, one `pw.jit` function.
- *two islands*: the whole model on each of two islands of two hosts, which exchange gradients: one
  `pw.program`, without a word about transfers.
- *by hand*: four stages over two islands, a stage for each host, as a `pw.program` that calls a function for
  each task: all forwards before all backwards, stages computed again in the backward pass.
- *gpipe, recompute*: the same by `pw.pipeline`. And its four schedules, which keep what the backward pass
  needs; the interleaved one has eight stages, two for each host.

All compute the same: the same first parameters, the same batches, AdamW. So the losses agree except for
the order of sums; the benchmark checks it.

On a machine with fewer cores than devices, a pipeline's bubble costs nothing, since the other
devices use the core. The readings show the cost of the runtime and of small microbatches. Activations are
counted in a timeline. So is the bubble, but there it is that of the cores. The bubbles of the schedules are
therefore measured once more with tasks that wait instead of computing (`bench.waiting`): `schedules.png`.
"""

from __future__ import annotations

import statistics
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

import pw
from bench import machine
from bench.measure import Sample, alternate
from bench.models import Params, Shape, cross_entropy, lm_init, lm_loss, lm_stage
from bench.placement import new_mesh
from bench.processor import client_and_cluster_s
from bench.report import Chart, Result
from bench.train import on_pw
from bench.training import SEED, Optimizer, Task, Trainer, apply, farthest
from bench.waiting import Waiting, four_stages
from pw.building.pipelines.measured import Measured
from pw.building.pipelines.schedules import NAMES
from pw.operating.timeline.timeline import Timeline

BOUND = 0.95
PIPELINE_BOUND = 0.97
TOLERANCE = 1e-3
DEVICES = 4
MICRO_BATCHES_PER_STAGE = 4
READING_S = 1.5
TRACED_STEPS = 2
WHAT = "tokens/s of one decoder LM: SPMD, two islands, pipelines (Table 2, Fig. 12)"

_WHOLE, _ROWS = P(), P("data")
State = Any
"""Parameters and the optimizer's state."""


OPTIMIZER: Optimizer = optax.adamw(1e-3, b2=0.95, weight_decay=0.01)
FULL = Task("full", "lm", Shape(128, 4, 8, 128, recompute=True), 32, lambda: OPTIMIZER)
QUICK = Task("quick", "lm", Shape(32, 2, 4, 16, recompute=True), 32, lambda: OPTIMIZER)


def run(quick: bool) -> Result:
    """Train in all ways, in turns; quick: on half of the devices, with two stages."""
    work = QUICK if quick else FULL
    devices = DEVICES // 2 if quick else DEVICES
    result = Result("pipeline-train", WHAT)
    plans: dict[str, pw.Pipeline] = {}
    kept_bytes: dict[str, int] = {}
    shown: dict[str, Measured] = {}
    with ExitStack() as clusters:
        pids: dict[int, list[int]] = {}

        def cluster_of(islands: int) -> None:
            cluster = pw.LocalCluster(islands=islands, hosts_per_island=devices // islands)
            pids[islands] = clusters.enter_context(cluster).pids

        def stages_of(name: str, schedule: str, recompute: bool = False) -> Trainer:
            pipe, params = by_pipeline(work, stages, schedule, recompute)
            plans[name] = pipe
            batch = work.batch(0)
            kept_bytes[name] = max(pipe.activation_bytes(params, batch[:, :-1], batch[:, 1:]))
            return Trainer(partial(on_stages, pipe), pipe.init(params), work.batch)

        cluster_of(1)
        one = new_mesh(devices, "island-0")
        cluster_of(2)
        halves = [new_mesh(devices // 2, f"island-{at}") for at in range(2)]
        stages = [new_mesh(1, f"island-{at // (devices // 2)}") for at in range(devices)]
        trainers = {
            "SPMD": (on_pw(work, one), 1),
            "two islands": (two_islands(work, halves), 2),
            "by hand": (by_hand(work, stages), 2),
            "gpipe, recompute": (stages_of("gpipe, recompute", "gpipe", recompute=True), 2),
        }
        trainers |= {name: (stages_of(name, name), 2) for name in NAMES}
        step_s = {name: _step_s(trainer) for name, (trainer, _) in trainers.items()}
        steps = 1 if quick else max(2, round(READING_S / step_s["SPMD"]))
        spent_s: dict[str, list[float]] = {name: [] for name in trainers}

        def reading(name: str) -> float:
            trainer, islands = trainers[name]
            before_s = client_and_cluster_s(pids[islands])
            took_s = trainer.run(steps)
            spent_s[name].append(client_and_cluster_s(pids[islands]) - before_s)
            return steps * work.tokens_per_step / took_s

        samples = alternate(
            {name: partial(reading, name) for name in trainers},
            rounds=1 if quick else 5,
            warm_up=0,  # all have run three steps
        )
        for name, pipe in plans.items():
            with pw.trace(
                None
            ) as timeline:  # the last step may not have ended when its loss is there
                trainers[name][0].run(TRACED_STEPS)
            shown[name] = pipe.measured(timeline)
    for name, sample in samples.items():
        busy_ms = statistics.median(spent_s[name]) / steps * 1e3
        params = {"processor ms a step": f"{busy_ms:.0f}"}
        if name in plans:
            params["activations: microbatches"] = str(max(shown[name].activations))
            params["MiB"] = f"{kept_bytes[name] / 2**20:.2f}"
            params["bubble of the cores"] = f"{shown[name].bubble:.1%}"
        reference = samples["SPMD"] if name != "SPMD" else None
        result.add(name, params, sample, "tokens/s", "SPMD", reference)
    ratio = samples["two islands"].over(samples["SPMD"]).median
    text = "two islands / one island of twice the size: tokens/s"
    result.at_least(BOUND, ratio, text)
    ratio = samples["gpipe, recompute"].over(samples["by hand"]).median
    result.at_least(PIPELINE_BOUND, ratio, "pw.pipeline / the same by hand: tokens/s")
    ratio = max(shown["1f1b"].activations) / max(shown["gpipe"].activations)
    result.at_most(0.5, ratio, "1f1b / gpipe: the most microbatches that a stage kept, counted")
    _bubbles(result, quick)
    losses = trainers["SPMD"][0].losses
    apart = max(farthest(trainer.losses, losses) for trainer, _ in trainers.values())
    result.at_most(TOLERANCE, apart, "largest relative difference of a loss from SPMD's")
    result.notes += [
        f"{devices} hosts of one device each, all on the cores of one machine; "
        f"{work.tokens_per_step} tokens a step, {steps} steps a reading, "
        f"{MICRO_BATCHES_PER_STAGE * devices} microbatches",
        f"losses differ by up to {apart:.1e}; from {losses[0]:.3f} to {losses[-1]:.3f} nats",
        "activations: counted in a timeline, and their size by the stage's jaxpr; bubble of the cores: "
        f"measured in the timeline, where {devices} devices share {machine.cores()} cores",
        "bubble: the duration of tasks is modelled, they sleep; order, launches and transfers are real",
    ]
    return result


def _bubbles(result: Result, quick: bool) -> None:
    """Measure the bubbles of schedules whose tasks wait, and draw the median step of each."""
    microbatches = 4 if quick else 8
    with pw.LocalCluster(islands=2, hosts_per_island=2, allow_python=True):
        meshes = four_stages()
        cases = {name: Waiting(name, meshes, microbatches) for name in NAMES}
        steps: dict[str, list[tuple[float, Timeline]]] = {name: [] for name in NAMES}

        def reading(name: str) -> float:
            timeline, found = cases[name].traced()
            steps[name].append((found.bubble, timeline))
            return found.bubble

        samples = alternate(
            {name: partial(reading, name) for name in NAMES}, rounds=1 if quick else 3, warm_up=0
        )
    for name, sample in samples.items():
        expected = cases[name].expected
        ideal = Sample((expected,) * len(sample.values))
        result.add(f"{name}, tasks wait", {}, sample, "bubble", f"{expected:.1%} expected", ideal)
        ordered = sorted(steps[name], key=lambda step: step[0])
        bubble, timeline = ordered[len(ordered) // 2]
        title = f"{name}: bubble {bubble:.1%} measured, {expected:.1%} expected"
        spans = cases[name].picture(timeline)
        result.charts.append(Chart("schedules", title, spans, {name: timeline}))
    ratio = samples["zero-bubble"].over(samples["1f1b"]).median
    result.at_most(0.75, ratio, "zero-bubble / 1f1b: bubble measured, tasks wait")
    apart = max(sample.median - cases[name].expected for name, sample in samples.items())
    result.at_most(0.05, apart, "the most that a bubble is larger than expected, tasks wait")


def on_stages(pipe: pw.Pipeline, state: Any, batch: Any) -> tuple[Any, Any]:
    """One step of a pipeline, of a batch int32 `[rows, context + 1]`."""
    return pipe(state, batch[:, :-1], batch[:, 1:])


def by_pipeline(
    work: Task,
    meshes: list[pw.Mesh],
    schedule: str,
    recompute: bool,
    microbatches: int | None = None,
) -> tuple[pw.Pipeline, list[Params]]:
    """A `pw.pipeline` of one stage a mesh, or of two if they are interleaved, and its parameters."""
    stages = len(meshes) * (2 if schedule == "interleaved" else 1)
    kept = replace(work.shape, recompute=False)

    def stage(params: Params, x: Any) -> Any:
        return lm_stage(kept, params, x)

    def last(params: Params, x: Any, targets: Any) -> Any:
        return cross_entropy(lm_stage(kept, params, x), targets)

    pipe = pw.pipeline(
        [*[stage] * (stages - 1), last],
        meshes=meshes,
        in_shardings=(_WHOLE, _ROWS),
        microbatches=microbatches or MICRO_BATCHES_PER_STAGE * len(meshes),
        schedule=schedule,
        optimizer=OPTIMIZER,
        recompute=recompute,
    )
    make = [partial(lm_init, work.shape, stage=at, stages=stages) for at in range(stages)]
    return pipe, [jax.jit(one)(SEED) for one in make]


def _step_s(trainer: Trainer) -> float:
    """How long a step takes after it is compiled."""
    trainer.run(1)
    return trainer.run(2) / 2


def update(state: State, gradients: Params, count: int) -> State:
    """The state after an update with the mean of `count` gradients; `gradients` is their sum."""
    mean = jax.tree.map(lambda total: total / count, gradients)
    return apply(OPTIMIZER, state, mean)


def two_islands(work: Task, meshes: list[pw.Mesh]) -> Trainer:
    """Each island has the model and half of the batch; each adds the gradients of both."""

    def gradients(params: Params, batch: Any) -> tuple[Params, Any]:
        loss, found = jax.value_and_grad(partial(lm_loss, work.shape))(params, batch)
        return found, loss

    def exchanged(state: State, first: Params, second: Params) -> State:
        return update(state, jax.tree.map(jnp.add, first, second), 2)

    grads = [pw.jit(gradients, mesh=mesh, in_shardings=(_WHOLE, _ROWS)) for mesh in meshes]
    updates = [pw.jit(exchanged, mesh=mesh, donate_argnums=(0,)) for mesh in meshes]
    mean = pw.jit(lambda first, second: (first + second) / 2, mesh=meshes[0])

    @pw.program
    def step(states: list[State], halves: list[Any]) -> tuple[list[State], Any]:
        found = [
            grad(state[0], half) for grad, state, half in zip(grads, states, halves, strict=True)
        ]
        (first, first_loss), (second, second_loss) = found
        after = [
            change(state, first, second) for change, state in zip(updates, states, strict=True)
        ]
        return after, mean(first_loss, second_loss)

    init = [pw.jit(work.initial_state, mesh=mesh)(SEED) for mesh in meshes]
    return Trainer(step, init, lambda number: np.split(work.batch(number), 2))


def by_hand(work: Task, meshes: list[pw.Mesh]) -> Trainer:
    """The layers cut into one stage a mesh, as in GPipe."""
    stages, shape = len(meshes), work.shape
    micro_batches = MICRO_BATCHES_PER_STAGE * stages
    # A stage's backward computes its whole forward again, so its blocks need not do it too.
    kept = replace(shape, recompute=False)

    def forward(params: Params, x: Any) -> Any:
        return lm_stage(kept, params, x)

    def backward(params: Params, total: Params, x: Any, y_gradient: Any) -> tuple[Params, Any]:
        if "tokens" in params:
            found = jax.vjp(lambda params: lm_stage(kept, params, x), params)[1](y_gradient)[0]
            return jax.tree.map(jnp.add, total, found), None
        found, x_gradient = jax.vjp(partial(lm_stage, kept), params, x)[1](y_gradient)
        return jax.tree.map(jnp.add, total, found), x_gradient

    def loss_and_backward(
        params: Params, total: tuple[Params, Any], x: Any, targets: Any
    ) -> tuple[tuple[Params, Any], Any]:
        def loss_of(params: Params, x: Any) -> Any:
            return cross_entropy(lm_stage(shape, params, x), targets)

        loss, (found, x_gradient) = jax.value_and_grad(loss_of, argnums=(0, 1))(params, x)
        return (jax.tree.map(jnp.add, total[0], found), total[1] + loss), x_gradient

    def split(batch: Any) -> tuple[Any, ...]:
        return tuple(batch[index] for index in range(micro_batches))

    def zeros(params: Params) -> tuple[Params, Any]:
        return jax.tree.map(jnp.zeros_like, params), jnp.float32(0)

    def on(mesh: pw.Mesh, function: Any, inputs: Any, outputs: Any = None, **more: Any) -> Any:
        return pw.jit(function, mesh=mesh, in_shardings=inputs, out_shardings=outputs, **more)

    forwards = [on(mesh, forward, (_WHOLE, _ROWS), _ROWS) for mesh in meshes[:-1]]
    backwards = [
        on(
            mesh,
            backward,
            (_WHOLE, _WHOLE, _ROWS, _ROWS),
            (_WHOLE, _ROWS if stage else None),
            donate_argnums=(1,),
        )
        for stage, mesh in enumerate(meshes[:-1])
    ]
    last = on(
        meshes[-1],
        loss_and_backward,
        (_WHOLE, _WHOLE, _ROWS, _ROWS),
        (_WHOLE, _ROWS),
        donate_argnums=(1,),
    )
    splits = [on(meshes[end], split, (P(None, "data"),), _ROWS) for end in (0, -1)]
    empty = [on(mesh, zeros, (_WHOLE,)) for mesh in meshes]
    updates = [
        on(mesh, partial(update, count=micro_batches), (_WHOLE, _WHOLE), donate_argnums=(0,))
        for mesh in meshes
    ]
    mean = on(meshes[-1], lambda total: total / micro_batches, None)

    @pw.program
    def step(states: list[State], batch: tuple[Any, Any]) -> tuple[list[State], Any]:
        inputs, targets = (cut(part) for cut, part in zip(splits, batch, strict=True))
        params = [state[0] for state in states]
        totals: list[Any] = [zero(own) for zero, own in zip(empty, params, strict=True)]
        seen: list[list[Any]] = []  # for each micro-batch the inputs of each stage
        gradients = []
        for x, target in zip(inputs, targets, strict=True):
            given = [x]
            for stage, run_forward in enumerate(forwards):
                given.append(run_forward(params[stage], given[-1]))
            totals[-1], gradient = last(params[-1], totals[-1], given[-1], target)
            seen.append(given)
            gradients.append(gradient)
        for given, gradient in zip(seen, gradients, strict=True):
            for stage in reversed(range(stages - 1)):
                total, loss = totals[stage]
                total, gradient = backwards[stage](params[stage], total, given[stage], gradient)
                totals[stage] = total, loss
        after = [
            change(state, total[0])
            for change, state, total in zip(updates, states, totals, strict=True)
        ]
        return after, mean(totals[-1][1])

    def batch(number: int) -> tuple[Any, Any]:
        whole = work.batch(number).reshape(micro_batches, -1, shape.context + 1)
        return whole[..., :-1], whole[..., 1:]

    def initial(seed: Any, stage: int) -> State:
        params = lm_init(shape, seed, stage, stages)
        return params, OPTIMIZER.init(params)

    states = [
        pw.jit(partial(initial, stage=stage), mesh=mesh)(SEED) for stage, mesh in enumerate(meshes)
    ]
    return Trainer(step, states, batch)
