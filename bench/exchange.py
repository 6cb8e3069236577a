"""Rows that count, from island to island, beside the same arrays without counts.

A computation on one island makes an array with room for many rows, of which some count. A
computation on the other island takes it, once as a `pw.Ragged` and once as a plain array. The
counts are those of an exchange between experts: each of 8 cells has its own, a quarter of the room on
average.

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
WHAT = "rows that count from island to island: bytes and time, beside whole arrays"


def run(quick: bool) -> Result:
    """Exchange rows between two islands of one host, in turns with whole arrays."""
    capacity = 64 if quick else 2048
    times = 2 if quick else 8
    result = Result("exchange", WHAT)
    with pw.LocalCluster(islands=2):
        virtual = pw.make_virtual_device_set()
        first, second = (pw.Mesh(virtual.add_slice(devices=1).devices, ("x",)) for _ in range(2))
        drawn = np.random.default_rng(0).dirichlet([1.0] * CELLS)
        counts = np.minimum(drawn * CELLS * capacity / 4, capacity).astype(np.int32)
        useful = int(counts.sum()) * WIDTH * 4

        def rows(seed: Any) -> Any:
            return jnp.full((CELLS, capacity, WIDTH), seed, jnp.float32)

        def ragged(seed: Any) -> Any:
            return pw.Ragged(rows(seed), jnp.array(counts) + 0 * seed)

        def corner(array: Any) -> Any:
            return array[0, 0, 0] + array[-1, -1, -1]

        whole = _step(pw.jit(rows, mesh=first), pw.jit(corner, mesh=second))
        packed = _step(pw.jit(ragged, mesh=first), pw.jit(lambda r: corner(r.rows), mesh=second))
        steps = {"rows that count": packed, "whole arrays": whole}
        sent = {name: _sent_bytes(step, times) for name, step in steps.items()}
        samples = alternate(
            {name: partial(_reading, step, times) for name, step in steps.items()},
            rounds=1 if quick else 7,
            warm_up=1,
        )
    for name, sample in samples.items():
        reference = samples["whole arrays"] if name != "whole arrays" else None
        result.add(name, {}, sample, "ms", "whole arrays", reference)
    result.at_most(
        BOUND, sent["rows that count"] / useful, "bytes sent / bytes of the rows that count"
    )
    ratio = samples["rows that count"].over(samples["whole arrays"]).median
    result.at_most(1.0, ratio, "time with counts / time of whole arrays")
    result.notes += [
        f"{CELLS} cells of {capacity} rows of {WIDTH * 4} bytes; {counts.sum()} of {CELLS * capacity} count",
        f"sent: {sent['rows that count'] / 2**20:.2f} MiB with counts, of which {useful / 2**20:.2f} MiB are "
        f"rows that count; {sent['whole arrays'] / 2**20:.2f} MiB without",
    ]
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
