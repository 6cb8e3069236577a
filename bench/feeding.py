"""Steps that a stream feeds, beside the same steps on arrays that are there; the paper has no such table.

A step takes about 20 ms on its device. The generator draws windows of a text of tokens, in a process
beside the host. A reading is the number of steps a second; the last step is waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

import pw
from bench import measure, report
from bench.placement import new_mesh

STEP_S = 0.020
STEPS = 60
ROWS, CONTEXT, TOKENS = 64, 512, 4 << 20
THERE, STREAM, CLIENT = "arrays there", "stream, hosts", "stream, client"


def windows() -> Iterator[Any]:
    """Elements: random windows of a text of tokens, int32 `[ROWS, CONTEXT]`."""
    draw = np.random.default_rng(0)
    tokens = draw.integers(0, 50_000, TOKENS, np.int32)
    while True:
        starts = draw.integers(0, len(tokens) - CONTEXT, ROWS).tolist()
        yield np.stack([tokens[start : start + CONTEXT] for start in starts])


def run(quick: bool) -> report.Result:
    """Measure streams on hosts and in the client, on a cluster of one worker."""
    result = report.Result("feeding", "steps a second that a stream feeds")
    with pw.LocalCluster(allow_python=True):
        mesh = new_mesh()
        step = _step(mesh)
        samples = measure.alternate(
            {
                THERE: _there(step, mesh, quick),
                STREAM: _streamed(step, mesh, quick, "hosts"),
                CLIENT: _streamed(step, mesh, quick, "client"),
            },
            rounds=1 if quick else 7,
        )
    result.compare(samples, unit="1/s", baseline=THERE)
    for name in (STREAM, CLIENT):
        ratio = samples[name].over(samples[THERE]).median
        result.at_least(0.98, ratio, f"a step of 20 ms, {name} beside arrays that are there")
    return result


def _step(mesh: pw.Mesh) -> Any:
    """A step of about `STEP_S` on one core."""

    def step(turns: Any, weights: Any, tokens: Any) -> Any:
        x = weights + tokens.sum() * 1e-9
        return jax.lax.fori_loop(0, turns, lambda _, x: jnp.tanh(x) + 1e-3, x)

    jitted = pw.jit(step, mesh=mesh, donate_argnums=1)
    tokens = pw.put(next(windows()), sharding=pw.NamedSharding(mesh, PartitionSpec()))

    def took_s(turns: int) -> float:
        weights = _fresh(mesh)
        return measure.seconds(lambda: jitted(turns, weights, tokens).block_until_ready())

    turns = 1024
    while (shortest_s := min(took_s(turns) for _ in range(6))) < 10 * STEP_S:
        turns *= 2
    turns = round(turns * STEP_S / shortest_s)
    return lambda weights, tokens: jitted(turns, weights, tokens)


def _fresh(mesh: pw.Mesh) -> Any:
    sharding = pw.NamedSharding(mesh, PartitionSpec())
    return pw.put(np.ones(4096, np.float32), sharding=sharding).block_until_ready()


def _there(step: Any, mesh: pw.Mesh, quick: bool) -> Callable[[], float]:
    source, sharding = windows(), pw.NamedSharding(mesh, PartitionSpec())
    batches = [pw.put(next(source), sharding=sharding) for _ in range(8)]
    pw.block_until_ready(batches)
    return lambda: _rate(step, _fresh(mesh), lambda number: batches[number % 8], quick)


def _streamed(step: Any, mesh: pw.Mesh, quick: bool, where: Any) -> Callable[[], float]:
    like = jax.ShapeDtypeStruct((ROWS, CONTEXT), jnp.int32)
    sharding = pw.NamedSharding(mesh, PartitionSpec())
    stream = pw.stream(windows, like, sharding=sharding, where=where)
    return lambda: _rate(step, _fresh(mesh), lambda number: next(stream), quick)


def _rate(step: Any, weights: pw.Array, batch: Callable[[int], Any], quick: bool) -> float:
    steps = 5 if quick else STEPS
    weights = step(weights, batch(0)).block_until_ready()

    def work() -> None:
        made = weights
        for number in range(steps):
            made = step(made, batch(number))
        made.block_until_ready()

    return steps / measure.seconds(work)
