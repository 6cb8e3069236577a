"""One training step over two islands, cut by the runtime, beside one island of as many hosts.

The paper trains over two pods at 97 % of one (§5.3). Here a decoder LM trains with one `pw.jit`
function: on one island of four hosts, and on a mesh with an axis over two islands of two hosts. It
is the same function; the runtime cuts it, and the islands exchange gradients from host to host.

- *two islands* cuts the backward pass, so that the first gradients leave while the rest is
  computed; *two islands, one piece* does not. The difference is what cutting costs or brings.
- The bytes that a host sends are counted by its bulk plane. The least that any algorithm needs is
  2 (N - 1) / N times the gradients' size over N islands, divided by the hosts of an island.

A timeline of a step shows gradients on their way while hosts compute (figure 12). All hosts share the cores
of one machine, so nothing is gained by overlap: the ratio shows what the
runtime costs.
"""

from __future__ import annotations

import math
from contextlib import ExitStack
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

import pw
from bench.measure import alternate
from bench.models import lm_init
from bench.pictures import hidden, of_hosts, window
from bench.pipeline_train import FULL, QUICK
from bench.placement import new_mesh
from bench.report import Chart, Result
from bench.train import on_pw
from bench.training import SEED, Task, Trainer, farthest
from pw.islands import cutting

BOUND = 0.95
BYTES_BOUND = 1.05
TOLERANCE = 1e-3
HOSTS = 4
ISLANDS = 2
READING_S = 2.0
WHAT = "tokens/s of one jit function over two islands and over one; bytes that a host sends"


def run(quick: bool) -> Result:
    """Train in all ways, in turns; quick: on half of the hosts."""
    work = QUICK if quick else FULL
    hosts = HOSTS // 2 if quick else HOSTS
    result = Result("islands", WHAT)
    with ExitStack() as clusters:
        clusters.enter_context(pw.LocalCluster(hosts_per_island=hosts))
        trainers = {"one island": on_pw(work, new_mesh(hosts))}
        clusters.enter_context(pw.LocalCluster(islands=ISLANDS, hosts_per_island=hosts // ISLANDS))
        slices = pw.make_virtual_device_set().add_slice(devices=hosts, islands=ISLANDS)
        mesh = pw.Mesh(np.array(slices.devices).reshape(ISLANDS, -1), ("island", "data"))
        trainers["two islands"] = joined(work, mesh)
        whole = cutting.BUCKETS
        cutting.BUCKETS = 1
        trainers["two islands, one piece"] = joined(work, mesh)
        cutting.BUCKETS = whole
        step_s = trainers["one island"].run(2) / 2
        steps = 1 if quick else max(3, round(READING_S / step_s))

        def reading(name: str) -> float:
            return steps * work.tokens_per_step / trainers[name].run(steps)

        samples = alternate(
            {name: partial(reading, name) for name in trainers}, rounds=1 if quick else 5
        )
        sent, counted = (
            sent_bytes(trainers["two islands"], 4 if quick else 10),
            gradient_bytes(work),
        )
        result.charts.append(picture(trainers["two islands"]))
    for name, sample in samples.items():
        reference = samples["one island"] if name != "one island" else None
        result.add(name, {}, sample, "tokens/s", "one island", reference)
    ratio = samples["two islands"].over(samples["one island"]).median
    result.at_least(BOUND, ratio, "two islands / one island of as many hosts: tokens/s")
    bound = 2 * (ISLANDS - 1) / ISLANDS * counted / (hosts // ISLANDS)
    result.at_most(BYTES_BOUND, sent / bound, "bytes that a host sends in a step / the bound")
    losses = trainers["one island"].losses
    apart = max(farthest(trainer.losses, losses) for trainer in trainers.values())
    text = f"largest relative difference of a loss from one island's, {len(losses)} steps"
    result.at_most(TOLERANCE, apart, text)
    result.notes += [
        f"{hosts} hosts of one device each, all on the cores of one machine; "
        f"{work.tokens_per_step} tokens a step, {steps} steps a reading",
        f"gradients of {counted / 2**20:.2f} MiB; a host sends {sent / 2**20:.2f} MiB a step, and the least "
        f"is {bound / 2**20:.2f} MiB",
        f"losses differ by up to {apart:.1e}",
    ]
    return result


def joined(task: Task, mesh: pw.Mesh) -> Trainer:
    """A trainer of the task on a mesh over islands, which has run a few steps."""
    step = pw.jit(
        task.step,
        mesh=mesh,
        in_shardings=(P(), P(("island", "data"))),
        out_shardings=(P(), P()),
        donate_argnums=(0,),
    )
    trainer = Trainer(step, pw.jit(task.initial_state, mesh=mesh)(SEED), task.batch)
    trainer.run(3)
    return trainer


def picture(trainer: Trainer) -> Chart:
    """Return a picture of a step (figure 12)."""
    with pw.trace(None) as timeline:
        trainer.run(4)
    runs = sorted({one.run for one in timeline.computations})
    middle = [one for one in timeline.computations if one.run == runs[len(runs) // 2]]
    spans = of_hosts(timeline, lambda one: one.name)
    shown = window(spans, min(one.start_s for one in middle), max(one.end_s for one in middle))
    title = (
        f"a step over two islands: hosts compute during {hidden(shown):.0%} of the transfers' time"
    )
    return Chart("figure-12", title, shown, {"two-islands": timeline})


def sent_bytes(trainer: Trainer, steps: int) -> float:
    """The bytes that a host sends in a step, of the host that sends most."""
    trainer.run(1)
    before = _sent()
    trainer.run(steps)
    after = _sent()
    return max(after[host] - before[host] for host in after) / steps


def _sent() -> dict[str, int]:
    found = pw.stats()
    return {
        name: own["bulk_sent_bytes"] for name, own in found.items() if name.startswith("island-")
    }


def gradient_bytes(task: Task) -> int:
    """The size of all gradients of a task."""
    shapes: Any = jax.eval_shape(partial(lm_init, task.shape), SEED)
    return sum(math.prod(one.shape) * one.dtype.itemsize for one in jax.tree.leaves(shapes))
