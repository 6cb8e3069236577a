"""Training through the runtime beside the same step in plain JAX (the paper's Table 1).

There, T5 models of four sizes train exactly as fast on Pathways as on multi-controller JAX. Here an
encoder-decoder in the style of T5 and a decoder LM train on one host with one and two devices, as a user
would write it: a `pw.jit` function with donated state, fed with numpy batches, a few steps in flight. Plain
JAX does the same in a process with the same devices and thread pools. Both have all cores of the machine, in
turns, so what the runtime's own processes use is taken from the step.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

from jax.sharding import PartitionSpec as P

import pw
from bench.baselines.one_process import PlainJax
from bench.measure import Sample, alternate
from bench.processor import busy_s
from bench.report import Bar, Figure, Result, Row
from bench.training import SEED, STEPS_IN_FLIGHT, TASKS, Task, Trainer, farthest

BOUND = 0.98
TOLERANCE = 1e-5
"""How far losses may be apart, relatively: XLA may fuse the exported step in another order."""
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
                found = compare(TASKS[name], devices, cluster, quick)
                result.rows += found.rows(name, devices)
                ratio = found.samples["pw"].over(found.samples["JAX"]).median
                text = f"{name}, {devices} device(s), {found.step_s * 1e3:.0f} ms a step: pw / JAX"
                result.bars.append(Bar(text, ratio, BOUND))
                label = f"{TASKS[name].model}, {devices} device(s)"
                ratios.setdefault(label, []).append((found.step_s * 1e3, ratio))
                apart = max(apart, found.apart)
    text = "greatest relative difference of a loss from the one of plain JAX"
    result.bars.append(Bar(text, apart, TOLERANCE, at_least=False))
    result.notes += [
        "losses are equal bit for bit" if apart == 0 else f"losses differ by up to {apart:.1e}",
        f"{STEPS_IN_FLIGHT} steps in flight on both sides; a reading ends when its last loss is read",
        "processor time a step is that of all processes of a side: client, controller, worker",
        "decoder LM with optax's AdamW, encoder-decoder with optax's Adafactor, float32",
    ]
    result.figures.append(
        Figure("tokens/s, pw / JAX", "milliseconds a step", "ratio", ratios, log_x=True)
    )
    return result


@dataclass(frozen=True, slots=True)
class Comparison:
    """What was found for one task: tokens/s, processor time, and how far losses are apart, relatively."""

    samples: dict[str, Sample]
    step_s: float
    busy_s: dict[str, float]
    apart: float

    def rows(self, name: str, devices: int) -> list[Row]:
        """Lines of the table."""
        return [
            Row(
                side,
                {
                    "model": name,
                    "devices": devices,
                    "processor ms a step": f"{self.busy_s[side] * 1e3:.1f}",
                },
                sample,
                "tokens/s",
                *((None, None) if side == "JAX" else ("JAX", sample.over(self.samples["JAX"]))),
            )
            for side, sample in self.samples.items()
        ]


def on_pw(task: Task, mesh: pw.Mesh) -> Trainer:
    """The task, placed on a mesh with axis "data"; it has run a few steps."""
    step = pw.jit(task.step, mesh=mesh, in_shardings=(P(), P("data")), donate_argnums=(0,))
    trainer = Trainer(step, pw.jit(task.initial_state, mesh=mesh)(SEED), task.batch)
    trainer.run(3)
    return trainer


def compare(task: Task, devices: int, cluster: pw.LocalCluster, quick: bool) -> Comparison:
    """Train the task on both sides, in turns."""
    device_set = pw.make_virtual_device_set()
    mesh = pw.Mesh(device_set.add_slice(devices=devices).devices, ("data",))
    with PlainJax(task.name, devices) as plain:
        trainer = on_pw(task, mesh)
        step_s = plain.seconds(task.name, 5) / 5
        steps = 5 if quick else max(LEAST_STEPS, round(READING_S / step_s))
        tokens = steps * task.tokens_per_step
        spent: dict[str, list[float]] = {"pw": [], "JAX": []}

        def ours() -> float:
            trainer.run(max(1, steps // 10))  # as the peer does after it was idle
            daemons_s, own_s = busy_s(cluster.pids), time.process_time()
            took_s = trainer.run(steps)
            own_s = time.process_time() - own_s
            spent["pw"].append(own_s + busy_s(cluster.pids) - daemons_s)
            return tokens / took_s

        def theirs() -> float:
            before, begun_s = len(plain.losses()[0]), plain.busy_s()
            took_s = plain.seconds(task.name, steps)
            done = len(plain.losses()[0]) - before
            spent["JAX"].append((plain.busy_s() - begun_s) * steps / done)
            return tokens / took_s

        samples = alternate({"pw": ours, "JAX": theirs}, rounds=1 if quick else 5)
        (losses,) = plain.losses()
    return Comparison(
        samples,
        task.tokens_per_step / samples["JAX"].median,
        {side: statistics.median(readings) / steps for side, readings in spent.items()},
        farthest(trainer.losses, losses),
    )
