"""What branches cost the hosts: a computation with a guard that is taken, and one that is skipped.

The paper has no such table. A program of 64 computations that each add one runs without guards, behind a guard
that all of them share, and as 64 iterations, each of which makes the predicate of the next one. A reading is
the time of many runs in flight together, divided by their computations: it includes client and controller.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

import pw
from bench import measure, report
from bench.placement import new_mesh, put

NODES = 64
RUNS = 20
UNGUARDED, TAKEN, SKIPPED = "no guard", "one guard, taken", "one guard, skipped"
EACH_UNGUARDED = "no guard, with a predicate each"
EACH_TAKEN, EACH_SKIPPED = "a guard each, taken", "a guard each, skipped"
SKIPPED_US = 50.0
"""The bar for a computation that a host skips."""


def run(quick: bool) -> report.Result:
    """Measure on a cluster of one host; quick: one round."""
    rounds, runs = (1, 2) if quick else (15, RUNS)
    result = report.Result("control", "microseconds for each computation, with and without guards")
    with pw.LocalCluster():
        cases = {
            name: _timed(program, x, limit, runs)
            for name, (program, x, limit) in _programs().items()
        }
        samples = measure.alternate(
            cases, rounds=rounds, warm_up=0 if quick else 1, notes=result.notes
        )
    result.compare(samples, unit="µs", baseline=UNGUARDED)
    result.at_most(SKIPPED_US, samples[SKIPPED].median, f"{SKIPPED}: µs for each computation")
    return result


def _programs() -> dict[str, tuple[Callable[..., Any], Any, Any]]:
    """Each case: a program, and its arguments."""
    mesh = new_mesh()
    increment = pw.jit(lambda x: x + 1, mesh=mesh)
    is_below = pw.jit(lambda x, limit: x < limit, mesh=mesh)
    step = pw.jit(lambda x, limit: (x + 1, x < limit), mesh=mesh)

    def chain(x: Any) -> Any:
        for _ in range(NODES):
            x = increment(x)
        return x

    def keep(x: Any) -> Any:
        return x

    @pw.program
    def unguarded(x: Any, limit: Any) -> Any:
        return chain(x)

    @pw.program
    def one_guard(x: Any, limit: Any) -> Any:
        return pw.cond(is_below(x, limit), chain, keep, x)

    @pw.program
    def with_predicates(x: Any, limit: Any) -> Any:
        for _ in range(NODES):
            x, _ = step(x, limit)
        return x

    @pw.program
    def guarded(x: Any, limit: Any) -> Any:
        more = is_below(x, limit)
        for _ in range(NODES):
            x, more = pw.cond(more, lambda x: step(x, limit), lambda x: (x, False), x)
        return x

    zero, low, high = (put(np.float32(value), mesh) for value in (0, -1, 1e9))
    return {
        UNGUARDED: (unguarded, zero, high),
        TAKEN: (one_guard, zero, high),
        SKIPPED: (one_guard, zero, low),
        EACH_UNGUARDED: (with_predicates, zero, high),
        EACH_TAKEN: (guarded, zero, high),
        EACH_SKIPPED: (guarded, zero, low),
    }


def _timed(program: Callable[..., Any], x: Any, limit: Any, runs: int) -> Callable[[], float]:
    pw.block_until_ready(program(x, limit))

    def reading() -> float:
        began_s = time.perf_counter()
        pw.block_until_ready([program(x, limit) for _ in range(runs)])
        return (time.perf_counter() - began_s) / (runs * NODES) * 1e6

    return reading
