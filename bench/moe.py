"""A layer of experts on two islands: bytes and time of a training step, and what slices without rows cost.

The router is skewed, as routers are: each row goes to two of eight experts.

- Bytes are those that hosts send over the bulk plane in a step, divided by those of the rows that are chosen,
  four times: forwards and backwards, there and back.
- Two versions are written by hand: whole arrays of slots go to the experts and back. One brings rows to
  slots by masks and matrix products, as GShard does, the other by the same gathers as `pw.moe`. Experts
  compute as much in all.
- A slice without rows: layers of tiny experts on one island, with one slice that is used, and with one or
  with 17 that are not, on the same host. The difference of the processor time of that host is divided by 16.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pw
from bench.measure import Sample, alternate, seconds
from bench.processor import busy_s
from bench.report import Result
from pw.building.experts import routing

EXPERTS, TOP_K, FACTOR = 8, 2, 1.25
BYTES, RATIO, UNUSED_US = 1.1, 0.9, 50.0
UNUSED = 16
LAYER, MASKS, GATHERS = "pw.moe", "by hand, masks", "by hand, gathers"
Step = Callable[[], Any]


def run(quick: bool) -> Result:
    """Measure on three islands of one host each; quick: small sizes and one round."""
    rounds, times = (1, 2) if quick else (7, 4)
    result = Result("moe", "a layer of experts on two islands: milliseconds of a training step")
    with pw.LocalCluster(islands=3) as cluster:
        steps, useful = _steps(64 if quick else 1024, 32 if quick else 256)
        sent = {name: _sent_bytes(step, times) for name, step in steps.items()}
        samples = alternate(
            {name: partial(_milliseconds, step, times) for name, step in steps.items()},
            rounds=rounds,
        )
        pid = cluster.hosts[1].pid
        host = alternate(
            {
                name: partial(_host_microseconds, _layers(unused), pid, 4 if quick else 300)
                for name, unused in (("few", 1), ("many", 1 + UNUSED))
            },
            rounds=rounds,
        )
    result.compare(samples, unit="ms", baseline=GATHERS)
    each = Sample(tuple(value / UNUSED for value in host["many"].minus(host["few"]).values))
    result.add("slice without rows, its host", {}, each, "µs")
    result.at_most(BYTES, sent[LAYER] / useful, "bytes sent / bytes of the chosen rows")
    for name in (MASKS, GATHERS):
        ratio = samples[name].over(samples[LAYER]).median
        result.at_least(RATIO, ratio, f"steps by pw.moe / steps {name}")
    result.at_most(UNUSED_US, each.median, "µs of a host for a slice without rows")
    result.notes.append(
        f"a step sends {sent[LAYER] / 2**20:.1f} MiB, by hand {sent[GATHERS] / 2**20:.1f} MiB; chosen are "
        f"{useful / 2**20:.1f} MiB"
    )
    return result


def expert(params: Any, rows: Any) -> Any:
    """A feed-forward layer."""
    return jax.nn.gelu(rows @ params["up"]) @ params["down"]


def _steps(rows: int, width: int) -> tuple[dict[str, Step], float]:
    """Return the training step of both versions, and the bytes of chosen rows in a step."""
    draw = np.random.default_rng(0).standard_normal
    virtual = pw.make_virtual_device_set()
    near, *far = (virtual.add_slice(1, island=f"island-{at}") for at in range(3))
    params = {
        "up": (draw((EXPERTS, width, 2 * width)) / width**0.5).astype(np.float32),
        "down": (draw((EXPERTS, 2 * width, width)) / width**0.5).astype(np.float32),
    }
    x = draw((rows, width)).astype(np.float32)
    logits = (draw((rows, EXPERTS)) + np.linspace(0, 2, EXPERTS)).astype(np.float32)
    capacity = routing.capacity_of(rows, EXPERTS, TOP_K, FACTOR)
    chosen = int(np.sum(routing.assign(logits, TOP_K, capacity).counts))
    layer = pw.moe(expert, devices=far, top_k=TOP_K, capacity_factor=FACTOR)
    loss = pw.jit(lambda y, balance: (y**2).mean() + 0.01 * balance, devices=near)
    updates = [
        pw.jit(lambda p, g: jax.tree.map(lambda a, b: a - 0.1 * b, p, g), devices=one)
        for one in far
    ]
    given = layer.put(params), *pw.put((x, logits), near)

    def step(moe: Any) -> Step:
        @pw.program
        def train(params: Any, x: Any, logits: Any) -> Any:
            def total(params: Any, x: Any, logits: Any) -> Any:
                return loss(*moe(params, x, logits))

            value, found = pw.value_and_grad(total, (0, 1, 2))(params, x, logits)
            new = [update(*two) for update, *two in zip(updates, params, found[0], strict=True)]
            return value, new, found[1:]

        return lambda: train(*given)

    masks, gathers = _masks(capacity, len(far)), _gathers(capacity, len(far))
    steps = {
        LAYER: step(layer),
        MASKS: step(_by_hand(near, far, *masks)),
        GATHERS: step(_by_hand(near, far, *gathers)),
    }
    return steps, chosen * width * 4.0 * 4


def _by_hand(near: Any, far: list[Any], route: Any, combine: Any) -> Any:
    """Return the layer with whole arrays on all edges."""
    first, last = pw.jit(route, devices=near), pw.jit(combine, devices=near)
    apply = [pw.jit(jax.vmap(expert), devices=one) for one in far]

    def layer(params: Any, x: Any, logits: Any) -> Any:
        rows, kept, balance = first(x, logits)
        made = [one(*two) for one, *two in zip(apply, params, rows, strict=True)]
        return last(made, kept), balance

    return layer


def _masks(capacity: int, slices: int) -> tuple[Any, Any]:
    def route(x: Any, logits: Any) -> Any:
        gates = jax.nn.softmax(logits)
        weights, chosen = jax.lax.top_k(gates, TOP_K)
        weights = weights / weights.sum(1, keepdims=True)
        is_of = jax.nn.one_hot(chosen.T.reshape(-1), EXPERTS)
        places = jnp.cumsum(is_of, 0) * is_of - 1
        slots = jax.nn.one_hot(places.astype(jnp.int32), capacity)
        slots = slots.reshape(TOP_K, -1, EXPERTS, capacity)
        weighted = jnp.einsum("tk,ktec->tec", weights, slots)
        rows = jnp.einsum("ktec,td->ecd", slots, x)
        balance = EXPERTS * (is_of[: len(x)].mean(0) * gates.mean(0)).sum()
        return jnp.split(rows, slices), weighted, balance

    def combine(made: Any, weighted: Any) -> Any:
        return jnp.einsum("tec,ecd->td", weighted, jnp.concatenate(made))

    return route, combine


def _gathers(capacity: int, slices: int) -> tuple[Any, Any]:
    share = EXPERTS // slices

    def route(x: Any, logits: Any) -> Any:
        found = routing.assign(logits, TOP_K, capacity)
        rows = [routing.dispatch(x, found, at * share, share) for at in range(slices)]
        return rows, (found.slots, found.choices, found.weights), found.balance

    def combine(made: Any, kept: Any) -> Any:
        return routing.combine(jnp.concatenate(made), *kept)

    return route, combine


def _layers(unused: int) -> Step:
    """Return a call of a layer with one slice that all rows go to, and so many others."""
    virtual = pw.make_virtual_device_set()
    near = virtual.add_slice(1, island="island-0")
    far = [virtual.add_slice(1, island="island-1") for _ in range(1 + unused)]
    layer = pw.moe(lambda params, rows: rows * params, devices=far)
    logits = np.where(np.arange(1 + unused) == 0, 100, np.zeros((8, 1))).astype(np.float32)
    given = (
        layer.put(np.ones((1 + unused, 8), np.float32)),
        *pw.put((np.ones((8, 8), np.float32), logits), near),
    )
    return lambda: layer(*given)


def _milliseconds(step: Step, times: int) -> float:
    return seconds(lambda: pw.block_until_ready([step() for _ in range(times)])) * 1e3 / times


def _host_microseconds(step: Step, pid: int, times: int) -> float:
    """Return the processor time of a process for a call."""
    pw.block_until_ready(step())
    before = busy_s([pid])
    pw.block_until_ready([step() for _ in range(times)])
    return (busy_s([pid]) - before) / times * 1e6


def _sent_bytes(step: Step, times: int) -> float:
    """Return the bytes that all hosts send in one step."""

    def total() -> int:
        return sum(
            own["bulk_sent_bytes"] for own in pw.stats().values() if "bulk_sent_bytes" in own
        )

    pw.block_until_ready(step())
    before = total()
    for _ in range(times):
        pw.block_until_ready(step())
    return (total() - before) / times
