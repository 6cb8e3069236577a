"""Rows that count, from island to island, beside the same arrays without counts.

A computation on one island makes an array with room for many rows, of which some count. A
computation on the other island takes it, once as a `pw.Ragged` and once as a plain array. Like
tokens that are sent to experts, each of 8 cells has a count of its own, and all cells together are
filled in part.

- Bytes are those that hosts have sent over the bulk plane, divided by the bytes of the rows that count.
- Time is that of the two computations and the transfer between them, several in flight.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np

import pw
from bench.measure import alternate, seconds
from bench.report import Result

CELLS, WIDTH = 8, 1024
BOUND = 1.1
WHOLE = "whole arrays"
PARTS = {"an eighth counts": 1 / 8, "half counts": 1 / 2, "three quarters count": 3 / 4}
WHAT = "rows that count from island to island: bytes and time, beside whole arrays"


def run(quick: bool) -> Result:
    """Exchange rows between two islands of one host, in turns with whole arrays."""
    capacity = 64 if quick else 2048
    times = 2 if quick else 8
    result = Result("exchange", WHAT)
    with pw.LocalCluster(islands=2):
        virtual = pw.make_virtual_device_set()
        first, second = (pw.Mesh(virtual.add_slice(devices=1).devices, ("x",)) for _ in range(2))
        drawn = np.random.default_rng(0).dirichlet([4.0] * CELLS) * CELLS

        def rows(seed: Any) -> Any:
            return jnp.full((CELLS, capacity, WIDTH), seed, jnp.float32)

        def corner(array: Any) -> Any:
            return array[0, 0, 0] + array[-1, -1, -1]

        steps = {WHOLE: _step(pw.jit(rows, mesh=first), pw.jit(corner, mesh=second))}
        useful: dict[str, int] = {}
        for name, part in PARTS.items():
            counts = np.minimum(drawn * part * capacity, capacity).astype(np.int32)
            useful[name] = int(counts.sum()) * WIDTH * 4

            def ragged(seed: Any, counts: Any = counts) -> Any:
                return pw.Ragged(rows(seed), jnp.array(counts) + 0 * seed)

            take = pw.jit(lambda r: corner(r.rows), mesh=second)
            steps[name] = _step(pw.jit(ragged, mesh=first), take)
        sent = {name: _sent_bytes(step, times) for name, step in steps.items()}
        samples = alternate(
            {name: partial(_reading, step, times) for name, step in steps.items()},
            rounds=1 if quick else 7,
            warm_up=1,
        )
    for name, sample in samples.items():
        reference = samples[WHOLE] if name != WHOLE else None
        result.add(name, {}, sample, "ms", WHOLE, reference)
    for name, useful_bytes in useful.items():
        words = f"{name}: bytes sent / bytes of the rows that count"
        result.at_most(BOUND, sent[name] / useful_bytes, words)
    moved = ", ".join(f"{size / 2**20:.2f} MiB ({name})" for name, size in sent.items())
    result.notes += [f"{CELLS} cells of {capacity} rows of {WIDTH * 4} bytes; sent: {moved}"]
    return result


def _step(make: Any, take: Any) -> Callable[[Any], Any]:
    step: Callable[[Any], Any] = pw.program(lambda seed: take(make(seed)))
    return step


def _reading(step: Callable[[Any], Any], times: int) -> float:
    """Return the milliseconds of one step, of several in flight."""

    def all_of_them() -> None:
        pw.block_until_ready([step(np.int32(number)) for number in range(times)])

    return seconds(all_of_them) * 1e3 / times


def _sent_bytes(step: Callable[[Any], Any], times: int) -> float:
    """Return the bytes that all hosts send in one step."""

    def total() -> int:
        return sum(
            own["bulk_sent_bytes"] for own in pw.stats().values() if "bulk_sent_bytes" in own
        )

    pw.block_until_ready(step(np.int32(0)))
    before = total()
    for number in range(times):
        pw.block_until_ready(step(np.int32(number)))
    return (total() - before) / times
