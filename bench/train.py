"""Training through the runtime beside the same step in plain JAX (the paper's Table 1).

In the paper, T5 models of four sizes train exactly as fast on Pathways as on multi-controller JAX.
Here an encoder-decoder in the style of T5 and a decoder LM train on one host with one and two
devices, as a user would write it: a `pw.jit` function with donated state, numpy batches, a few
steps in flight. Plain JAX does the same in a process with the same devices and thread pools. Both
have all cores of the machine, in turns, so the runtime's own processes take their time from the
step.
"""

from __future__ import annotations

import statistics

from jax.sharding import PartitionSpec as P

import pw
from bench.baselines.one_process import PlainJax
from bench.measure import alternate
from bench.placement import new_mesh
from bench.processor import client_and_cluster_s
from bench.report import Figure, Result
from bench.training import SEED, STEPS_IN_FLIGHT, TASKS, Task, Trainer, farthest

BOUND = 0.98
TOLERANCE = 1e-5
"""The largest relative difference of losses: XLA may fuse the exported step differently."""
READING_S = 1.2
LEAST_STEPS = 6
FULL: dict[int, tuple[str, ...]] = {
    1: ("lm-small", "lm-medium", "t5-small", "t5-medium"),
    2: ("lm-small", "t5-medium"),
}
QUICK: dict[int, tuple[str, ...]] = {1: ("lm-tiny",), 2: ("t5-tiny",)}
WHAT = "tokens/s of training steps through the runtime and in plain JAX, one host (Table 1)"


def run(quick: bool) -> Result:
    """Train each model on one and on two devices."""
    result = Result("train", WHAT)
    ratios: dict[str, list[tuple[float, float]]] = {}
    apart = 0.0
    for devices, names in (QUICK if quick else FULL).items():
        with pw.LocalCluster(devices_per_host=devices) as cluster:
            for name in names:
                step_s, ratio, difference = compare(result, TASKS[name], devices, cluster, quick)
                text = f"{name}, {devices} device(s): pw / JAX"
                result.at_least(BOUND, ratio, text)
                label = f"{TASKS[name].model}, {devices} device(s)"
                ratios.setdefault(label, []).append((step_s * 1e3, ratio))
                apart = max(apart, difference)
    text = "largest relative difference of a loss from that of plain JAX"
    result.at_most(TOLERANCE, apart, text)
    result.notes += [
        "losses are equal bit for bit" if not apart else f"losses differ by up to {apart:.1e}",
        f"{STEPS_IN_FLIGHT} steps in flight on both sides; a reading ends with its last loss",
        "processor time a step: of client, controller and worker together",
        "decoder LM with optax's AdamW, encoder-decoder with optax's Adafactor, float32",
    ]
    result.figures.append(
        Figure("tokens/s, pw / JAX", "milliseconds a step", "ratio", ratios, log_x=True)
    )
    return result


def on_pw(task: Task, mesh: pw.Mesh) -> Trainer:
    """A trainer of the task on a mesh with axis "data", which has run a few steps."""
    step = pw.jit(task.step, mesh=mesh, in_shardings=(P(), P("data")), donate_argnums=(0,))
    trainer = Trainer(step, pw.jit(task.initial_state, mesh=mesh)(SEED), task.batch)
    trainer.run(3)
    return trainer


def compare(
    result: Result, task: Task, devices: int, cluster: pw.LocalCluster, quick: bool
) -> tuple[float, float, float]:
    """Train the task on both sides, in turns, and add the rows.

    Returns JAX's seconds a step, the ratio of tokens/s, and the largest difference of a loss.
    """
    mesh = new_mesh(devices)
    with PlainJax(task.name, devices) as plain:
        trainer = on_pw(task, mesh)
        step_s = plain.seconds(task.name, 5) / 5
        steps = 5 if quick else max(LEAST_STEPS, round(READING_S / step_s))
        tokens = steps * task.tokens_per_step
        spent: dict[str, list[float]] = {"pw": [], "JAX": []}

        def ours() -> float:
            trainer.run(max(1, steps // 10))  # a warm-up, as in the peer
            before_s = client_and_cluster_s(cluster.pids)
            took_s = trainer.run(steps)
            spent["pw"].append(client_and_cluster_s(cluster.pids) - before_s)
            return tokens / took_s

        def theirs() -> float:
            before, begun_s = len(plain.losses()[0]), plain.busy_s()
            took_s = plain.seconds(task.name, steps)
            done = len(plain.losses()[0]) - before
            spent["JAX"].append((plain.busy_s() - begun_s) * steps / done)
            return tokens / took_s

        samples = alternate({"pw": ours, "JAX": theirs}, rounds=1 if quick else 5)
        (losses,) = plain.losses()
    for side, sample in samples.items():
        busy_ms = f"{statistics.median(spent[side]) / steps * 1e3:.1f}"
        params = {"model": task.name, "devices": devices, "processor ms a step": busy_ms}
        reference = None if side == "JAX" else samples["JAX"]
        result.add(side, params, sample, "tokens/s", "JAX", reference)
    step_s = task.tokens_per_step / samples["JAX"].median
    ratio = samples["pw"].over(samples["JAX"]).median
    return step_s, ratio, farthest(trainer.losses, losses)
