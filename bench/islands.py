"""Functions over two islands, cut by the runtime, each beside the same on one island of as many hosts.

The paper trains over two pods at 97 % of one (§5.3). Here one `pw.jit` function runs on a mesh with the axes
"island" and "data", once on one island of four hosts and once over two islands of two hosts
(`bench.over_islands`). It is the same function; the runtime cuts it, and hosts of the islands
exchange values.

- The bytes that a host sends are counted by its bulk plane. The least that any algorithm needs to add
  gradients up is 2 (N - 1) / N times their size over N islands, divided by the hosts of an island.
- Cutting takes time in the client; it is compared with XLA's compilation for one island (`bench.cutting_time`).

All hosts share the cores of one machine, so nothing is gained by overlap, and the network is memory: the
ratios show what the runtime costs. `traces` draws a step (figure 12).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import jax
import numpy as np

import pw
from bench.baselines.one_process import GATEWAY, PlainJax
from bench.cutting_time import lower_s, plain_jax
from bench.measure import Sample, alternate
from bench.models import Shape, lm_init
from bench.over_islands import (
    BOTH,
    Experts,
    language_model,
    replicated,
    small_calls,
    split_features,
    split_layers,
    tasks,
)
from bench.pipeline_train import OPTIMIZER
from bench.report import Result
from bench.training import SEED, TASKS, Task, Trainer, farthest

BOUND, FSDP_BOUND = 0.95, 0.8
BYTES_BOUND = 1.05
CUTTING_BOUND = 2.0
TOLERANCE = 1e-3
HOSTS = 4
ISLANDS = 2
READING_S = 2.0
LAYERS = 24
SMALL_CALLS = 300
SETTLED_S = 0.5
SHAPE, SHORT = Shape(128, 4, 8, 128, recompute=True), Shape(128, 4, 2, 128, recompute=True)
ONE, TWO = "one island", "two islands"
WHAT = "functions over two islands, and the same on one; bytes that a host sends; time to cut"


def run(quick: bool) -> Result:
    """Run all functions, in turns; quick: small ones."""
    hosts, rounds = HOSTS, 1 if quick else 5
    result = Result("islands", WHAT)
    lm, scan = tasks(*((Shape(32, 2, 2, 16), 8) if quick else (SHAPE, 32)), OPTIMIZER)
    short, _ = tasks(*((Shape(32, 2, 1, 16), 8) if quick else (SHORT, 32)), OPTIMIZER)
    experts = Experts(64, 16) if quick else Experts(4096, 256)
    with ExitStack() as stack:
        meshes, clusters = {}, {}
        for name, islands in ((ONE, 1), (TWO, ISLANDS)):
            cluster = pw.LocalCluster(islands=islands, hosts_per_island=hosts // islands)
            clusters[name] = stack.enter_context(cluster)
            meshes[name] = mesh_over(hosts, islands)

        def compare(name: str, make: Callable[[pw.Mesh], Trainer], of: Any) -> dict[str, Trainer]:
            trainers = {place: make(mesh) for place, mesh in meshes.items()}
            least_s = min(trainer.run(2) / 2 for trainer in trainers.values())
            steps = 1 if quick else max(3, round(READING_S / least_s))
            samples = alternate(
                {
                    place: partial(rate, trainer, steps, of.tokens_per_step)
                    for place, trainer in trainers.items()
                },
                rounds=rounds,
            )
            add(result, name, samples, "rows/s" if of is experts else "tokens/s")
            apart = farthest(trainers[TWO].losses, trainers[ONE].losses)
            result.at_most(TOLERANCE, apart, f"{name}: largest relative difference of a loss")
            return trainers

        trainers = compare("data-parallel", partial(language_model, lm, specs=replicated), lm)
        result.at_least(BOUND, ratio(result, "data-parallel"), f"data-parallel: {TWO} / {ONE}")
        sent, size = sent_bytes(trainers[TWO], 4), gradient_bytes(lm)
        least = 2 * (ISLANDS - 1) / ISLANDS * size / (hosts // ISLANDS)
        result.at_most(BYTES_BOUND, sent / least, "data-parallel: bytes that a host sends / least")

        trainers = compare("FSDP", partial(language_model, scan, specs=split_layers), scan)
        result.at_least(FSDP_BOUND, ratio(result, "FSDP"), f"FSDP: {TWO} / {ONE}")
        note_bytes(result, "FSDP", trainers[TWO])

        make = partial(language_model, short, specs=split_features, rows="data")
        trainers = compare("tensor-parallel", make, short)
        note_bytes(result, "tensor-parallel", trainers[TWO])

        trainers = compare("experts", experts.trainer, experts)
        sent, least = sent_bytes(trainers[TWO], 4), experts.least_bytes(hosts)
        result.at_most(BYTES_BOUND, sent / least, "experts: bytes that a host sends / least")

        calls = {place: small_calls(mesh) for place, mesh in meshes.items()}
        count = 20 if quick else SMALL_CALLS
        samples = alternate(
            {place: partial(lambda call: count / call(count), calls[place]) for place in meshes},
            rounds=rounds,
        )
        add(result, "small", samples, "calls/s")
        in_plain_jax(result, {place: str(one.address) for place, one in clusters.items()}, quick)
        cutting(result, 2 if quick else LAYERS, meshes[TWO], 1 if quick else 2)
    result.notes.append(
        f"{hosts} hosts of one device each, all on the cores of one machine; {lm.tokens_per_step} tokens a "
        f"step, {experts.rows} rows of {experts.width} numbers for experts"
    )
    return result


def mesh_over(hosts: int, islands: int) -> pw.Mesh:
    """A mesh of two axes over the current cluster, of which "island" crosses islands if there are several."""
    virtual = pw.make_virtual_device_set()
    if islands == 1:
        devices = virtual.add_slice(devices=hosts).devices
    else:
        devices = virtual.add_slice(devices=hosts, islands=islands).devices
    return pw.Mesh(np.array(devices).reshape(ISLANDS, -1), BOTH)


def rate(trainer: Trainer, steps: int, tokens: int) -> float:
    """Return how many tokens a trainer takes in a second."""
    return steps * tokens / trainer.run(steps)


def add(result: Result, name: str, samples: dict[str, Sample], unit: str) -> None:
    """Add the rows of a function."""
    for place, sample in samples.items():
        reference = samples[ONE] if place != ONE else None
        result.add(f"{name}, {place}", {}, sample, unit, ONE, reference)


def ratio(result: Result, name: str) -> float:
    """Return the ratio of a row over two islands."""
    found = next(row.ratio for row in result.rows if row.name == f"{name}, {TWO}")
    assert found is not None
    return found.median


def note_bytes(result: Result, name: str, trainer: Trainer) -> None:
    """Add a note of what a host sends."""
    sent = sent_bytes(trainer, 4) / 2**20
    result.notes.append(f"{name}: a host sends {sent:.2f} MiB to the other island in a step")


def in_plain_jax(result: Result, addresses: dict[str, str], quick: bool) -> None:
    """Train a language model in plain JAX, through a gateway to each cluster."""
    task = TASKS["lm-tiny" if quick else "lm-long"]
    with ExitStack() as stack:
        peers = {
            place: stack.enter_context(PlainJax(task.name, HOSTS, GATEWAY, address=address))
            for place, address in addresses.items()
        }
        steps = 1 if quick else max(3, round(READING_S / (peers[ONE].seconds(task.name, 3) / 3)))

        def tokens_per_s(peer: PlainJax) -> float:
            return steps * task.tokens_per_step / peer.seconds(task.name, steps)

        cases = {place: partial(tokens_per_s, peer) for place, peer in peers.items()}
        samples = alternate(cases, rounds=1 if quick else 5)
        (left,), (right,) = (peers[place].losses() for place in (TWO, ONE))
    name = "data-parallel, plain JAX"
    add(result, name, samples, "tokens/s")
    result.at_least(BOUND, ratio(result, name), f"{name}: {TWO} / {ONE}")
    result.at_most(
        TOLERANCE, farthest(left, right), f"{name}: largest relative difference of a loss"
    )


def cutting(result: Result, layers: int, mesh: pw.Mesh, rounds: int) -> None:
    """Compare the time to cut a function with XLA's."""
    counted: list[int] = []
    with plain_jax(mesh.size) as compiled:
        taken: list[Any] = []

        def cut() -> float:
            took_s, pieces = lower_s(layers, mesh)
            counted.append(pieces)
            return took_s

        def compile_() -> float:
            taken.append(compiled(layers))
            return float(taken[-1].compiling_s)

        samples = alternate({"cut": cut, "compile": compile_}, rounds=rounds)
    lowering = Sample(tuple(one.lowering_s for one in taken[1:]))
    added = samples["cut"].minus(lowering)
    result.add("XLA compiles for one island", {}, samples["compile"], "s")
    result.add("pw.jit lowers for two", {"computations": counted[-1]}, samples["cut"], "s")
    result.add("beyond JAX's lowering", {}, added, "s", "XLA compiles", samples["compile"])
    found = added.over(samples["compile"]).median
    text = f"cutting a decoder of {layers} layers / XLA's compilation"
    result.at_most(CUTTING_BOUND, found, text)


def sent_bytes(trainer: Trainer, steps: int) -> float:
    """The bytes that a host sends in a step, of the host that sends most."""
    trainer.run(1)
    before = _sent()
    trainer.run(steps)
    after = _sent()
    return max(after[host] - before[host] for host in after) / steps


def _sent() -> dict[str, int]:
    """Return what each host has sent, when that has not changed for a while: hosts count late."""
    before: dict[str, int] = {}
    sent = _counted()
    while sent != before:
        time.sleep(SETTLED_S)
        before, sent = sent, _counted()
    return sent


def _counted() -> dict[str, int]:
    found = pw.stats()
    return {
        name: own["bulk_sent_bytes"] for name, own in found.items() if name.startswith("island-")
    }


def gradient_bytes(task: Task) -> int:
    """The size of all gradients of a task."""
    shapes: Any = jax.eval_shape(partial(lm_init, task.shape), SEED)
    return sum(math.prod(one.shape) * one.dtype.itemsize for one in jax.tree.leaves(shapes))
