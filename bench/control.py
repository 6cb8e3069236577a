"""What control flow costs: guards that are taken or skip, and loops whose hosts decide when they end.

The paper has no such table. A program of 64 computations that each add one runs without guards, behind a guard
that all of them share, and as 64 iterations, each of which makes the predicate of the next one. A reading is
the time of many runs in flight together, divided by their computations: it includes client and controller.

A loop of steps of 1 ms, each with an all-reduce over two hosts, runs as `pw.while_loop`, and in one computation
as `jax.lax.while_loop`. With steps of 50 µs it also runs as a loop of the client, which reads the predicate of
each step.

A branch on another island takes an operand of 16 MiB. The bytes are those that hosts send over the bulk plane
in one run, if the branch is not taken and if it is.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

import pw
from bench import measure, report
from bench.baselines.steps import AXIS, busy_together, together
from bench.clients import busy_steps
from bench.placement import new_mesh, put

NODES = 64
RUNS = 20
UNGUARDED, TAKEN, SKIPPED = "no guard", "one guard, taken", "one guard, skipped"
EACH_UNGUARDED = "no guard, with a predicate each"
EACH_TAKEN, EACH_SKIPPED = "a guard each, taken", "a guard each, skipped"
SKIPPED_US = 50.0
"""The bar for a computation that a host skips."""
IN_PORTIONS, IN_ONE, BY_CLIENT = "pw.while_loop", "one computation", "the client's loop"
LONG_US, SHORT_US = 1000, 50
OF_ONE, OF_CLIENT = 0.8, 5.0
"""The bars for loops: of the rate of one computation with long steps, and of the client's with short ones."""
OPERAND_BYTES = 16 << 20
AWAY_TAKEN, AWAY_SKIPPED = (
    "a branch on another island, taken",
    "a branch on another island, skipped",
)
UNTAKEN = 0.001
"""The bar for the bytes of a branch that is not taken, of those of one that is."""


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
    _compare_loops(result, rounds, quick)
    result.at_most(SKIPPED_US, samples[SKIPPED].median, f"{SKIPPED}: µs for each computation")
    _compare_operands(result, rounds, quick)
    return result


def _compare_operands(result: report.Result, rounds: int, quick: bool) -> None:
    """Add the bytes and the time of a branch that takes a large operand on another island."""
    runs = 2 if quick else 10
    with pw.LocalCluster(islands=2, devices_per_host=1):
        here, there = (new_mesh(island=f"island-{n}") for n in range(2))
        x = put(np.zeros(OPERAND_BYTES // 4, np.float32), here)
        is_positive = pw.jit(lambda limit: limit > 0, mesh=here)
        first = pw.jit(lambda x: x[:1], mesh=here)
        last = pw.jit(lambda x: x[-1:], mesh=there)

        @pw.program
        def step(x: Any, limit: Any) -> Any:
            return first(pw.cond(is_positive(limit), lambda x: first(last(x)), first, x))

        def calls(limit: float) -> None:
            for _ in range(runs):
                pw.block_until_ready(step(x, np.float32(limit)))

        limits = {AWAY_TAKEN: 1.0, AWAY_SKIPPED: -1.0}
        sent = {}
        for name, limit in limits.items():
            calls(limit)
            before = _sent_bytes()
            calls(limit)
            sent[name] = (_sent_bytes() - before) / runs
        cases = {
            name: lambda limit=limit: measure.seconds(lambda: calls(limit)) * 1e3 / runs
            for name, limit in limits.items()
        }
        samples = measure.alternate(cases, rounds=rounds, warm_up=0 if quick else 1)
    result.compare(samples, unit="ms", baseline=AWAY_TAKEN)
    moved = ", ".join(f"{name}: {size:.0f}" for name, size in sent.items())
    result.notes.append(f"bytes between the hosts in a run with an operand of 16 MiB: {moved}")
    ratio = sent[AWAY_SKIPPED] / sent[AWAY_TAKEN]
    result.at_most(UNTAKEN, ratio, "bytes of a branch that is not taken / of the same one, taken")


def _sent_bytes() -> int:
    """Return the bytes that all hosts have sent."""
    return sum(own.get("bulk_sent_bytes", 0) for own in pw.stats().values())


def _compare_loops(result: report.Result, rounds: int, quick: bool) -> None:
    """Add the rates of loops on two hosts."""
    reading_s = 0.05 if quick else 1.0
    with pw.LocalCluster(hosts_per_island=2, devices_per_host=1):
        mesh = new_mesh(2, axis=AXIS)
        x = pw.put(np.zeros(2, np.float32), sharding=pw.NamedSharding(mesh, P(AXIS)))
        for step_us in (LONG_US, SHORT_US):
            loops = _loops(mesh, x, busy_steps(step_us * 1e-3, np.float32(0)))
            if step_us == LONG_US:
                del loops[BY_CLIENT]
            cases = {
                name: measure.sized(measure.timed(loop), reading_s=reading_s)
                for name, loop in loops.items()
            }
            samples = measure.alternate(
                cases, rounds=rounds, warm_up=0 if quick else 1, notes=result.notes
            )
            step = f"{step_us} µs"
            result.compare(samples, unit="steps/s", baseline=IN_ONE, params={"step": step})
            ours = samples[IN_PORTIONS]
            if step_us == LONG_US:
                ratio, bound, other = ours.over(samples[IN_ONE]).median, OF_ONE, IN_ONE
            else:
                ratio, bound, other = ours.over(samples[BY_CLIENT]).median, OF_CLIENT, BY_CLIENT
            result.at_least(bound, ratio, f"{IN_PORTIONS} over {other}, steps of {step}")


def _loops(mesh: pw.Mesh, x: Any, steps: int) -> dict[str, Callable[[int], object]]:
    """Loops of so many steps, in the three ways."""
    work = together(busy_together(steps))

    def body(carry: Any) -> Any:
        number, limit, x = carry
        return number + 1, limit, work(x)

    def goes_on(carry: Any) -> Any:
        return carry[0] < carry[1]

    on_hosts = pw.jit(body, mesh=mesh)
    in_one = pw.jit(lambda carry: jax.lax.while_loop(goes_on, body, carry), mesh=mesh)

    @pw.jit(mesh=mesh)
    def by_client(carry: Any) -> Any:
        made = body(carry)
        return made, goes_on(made)

    def driven(count: int) -> None:
        carry, more = (np.int32(0), np.int32(count), x), True
        while more:
            carry, predicate = by_client(carry)
            more = bool(predicate)

    def first(count: int) -> Any:
        return np.int32(0), np.int32(count), x

    return {
        IN_ONE: lambda count: pw.block_until_ready(in_one(first(count))),
        IN_PORTIONS: lambda count: pw.while_loop(goes_on, on_hosts, first(count)),
        BY_CLIENT: driven,
    }


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
