"""Training through the runtime beside the same step in plain JAX (the paper's Table 1).

There, T5 models of four sizes train exactly as fast on Pathways as on multi-controller JAX. Here an
encoder-decoder in the style of T5 and a decoder LM train on one host with one and two devices, as a user
would write it: a `pw.jit` function with donated state, fed with numpy batches, a few steps in flight. Plain
JAX does the same in a process with the same devices and thread pools. Both have all cores of the machine, in
turns, so what the runtime's own processes use is taken from the step.
"""

from __future__ import annotations

from jax.sharding import PartitionSpec as P

import pw
from bench.baselines.one_process import PlainJax
from bench.measure import Sample, alternate
from bench.report import Bar, Figure, Result, rows
from bench.training import SEED, STEPS_IN_FLIGHT, TASKS, Task, Trainer, farthest

BOUND = 0.98
TOLERANCE = 1e-5
"""How far losses may be apart, relatively: XLA may fuse the exported step in another order."""
READING_S = 1.5
LEAST_STEPS = 6
FULL: dict[int, tuple[str, ...]] = {
    1: ("lm-small", "lm-medium", "t5-small", "t5-medium"),
    2: ("lm-small", "lm-medium", "t5-small", "t5-medium"),
}
QUICK: dict[int, tuple[str, ...]] = {1: ("lm-tiny",), 2: ("t5-tiny",)}
WHAT = "tokens/s of training steps through the runtime and in plain JAX, one host (Table 1)"


def run(quick: bool) -> Result:
    """Train each model on one and on two devices."""
    result = Result("train", WHAT)
    ratios: dict[str, list[tuple[float, float]]] = {}
    apart = 0.0
    for devices, names in (QUICK if quick else FULL).items():
        with pw.LocalCluster(devices_per_host=devices):
            for name in names:
                task = TASKS[name]
                samples, step_s, difference = compare(task, devices, quick)
                params: dict[str, object] = {"model": name, "devices": devices}
                result.rows += rows(samples, unit="tokens/s", params=params, baseline="JAX")
                ratio = samples["pw"].over(samples["JAX"]).median
                text = f"{name}, {devices} device(s), {step_s * 1e3:.0f} ms a step: pw / JAX"
                result.bars.append(Bar(text, ratio, BOUND))
                label = f"{task.model}, {devices} device(s)"
                ratios.setdefault(label, []).append((step_s * 1e3, ratio))
                apart = max(apart, difference)
    text = "greatest relative difference of a loss from the one of plain JAX"
    result.bars.append(Bar(text, apart, TOLERANCE, at_least=False))
    result.notes += [
        "losses are equal bit for bit" if apart == 0 else f"losses differ by up to {apart:.1e}",
        f"{STEPS_IN_FLIGHT} steps in flight on both sides; a reading ends when its last loss is read",
        "decoder LM with optax's AdamW, encoder-decoder with optax's Adafactor, float32",
    ]
    result.figures.append(
        Figure("tokens/s, pw / JAX", "milliseconds a step", "ratio", ratios, log_x=True)
    )
    return result


def on_pw(task: Task, mesh: pw.Mesh) -> Trainer:
    """The task, placed on a mesh with axis "data"."""
    step = pw.jit(task.step, mesh=mesh, in_shardings=(P(), P("data")), donate_argnums=(0,))
    return Trainer(step, pw.jit(task.initial_state, mesh=mesh)(SEED), task.batch)


def compare(task: Task, devices: int, quick: bool) -> tuple[dict[str, Sample], float, float]:
    """Tokens/s of both sides, the seconds of a step in plain JAX, and how far losses are apart."""
    device_set = pw.make_virtual_device_set()
    mesh = pw.Mesh(device_set.add_slice(devices=devices).devices, ("data",))
    with PlainJax(task.name, devices) as plain:
        trainer = on_pw(task, mesh)
        trainer.run(3)
        step_s = plain.seconds(task.name, 5) / 5
        steps = 5 if quick else max(LEAST_STEPS, round(READING_S / step_s))
        tokens = steps * task.tokens_per_step
        samples = alternate(
            {
                "pw": lambda: tokens / trainer.run(steps),
                "JAX": lambda: tokens / plain.seconds(task.name, steps),
            },
            rounds=1 if quick else 5,
        )
        (losses,) = plain.losses()
        step_s = task.tokens_per_step / samples["JAX"].median
        return samples, step_s, farthest(trainer.losses, losses)
