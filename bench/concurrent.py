"""Many clients on one cluster: their work together, and their shares (the paper's figures 8 and 9).

- *together*: each client is a process that calls `x = f(x)` on the same device, with many calls in
  flight. The computations take as long as the paper's. If the gang scheduler lost time when
  it switches between clients, many clients would do less than one, and less than plain JAX in a process
  that has the device to itself. `--clients` takes more of them, for machines with more memory.
- *shares*: clients with weights and priorities want the same device (`bench.shares`).
- *neighbours*: a client has a device of its own. Another client uses another device of that host,
  or waits there for results from another island.
- *reads*: a client asks for arrays that are ready, while another client keeps their device busy.
  No computation delays the answers.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np

import pw
from bench import shares
from bench.baselines.peer import Peer
from bench.baselines.steps import local
from bench.clients import sizes_to, started
from bench.measure import Sample, alternate, seconds
from bench.placement import new_mesh, put
from bench.report import Figure, Result, Series
from pw import LocalCluster

DURATIONS_MS = (0.04, 0.33, 1.04, 2.4)
OVER_JAX_MS = (0.33, 2.4)
"""Durations with a bar beside JAX: shorter ones are bound by the client's calls, and JAX makes none."""
CLIENTS = 64
BESIDE_ONE = 16
"""Clients whose work is compared with one client's."""
READY_S = 300.0
"""For the start of all of them."""
LEAST_CALLS = 16
"""Calls of each client in a reading."""
ALONE = "JAX alone"
READING_S = 0.5
"""About how long a reading takes."""
LONG_MS = 100.0
"""A computation of a neighbour on another device."""
OWN_CALLS = 500
FLOOD_MS = 28.0
"""A computation of a neighbour on the same device."""
FLOOD_CALLS = 60
READS = 40
"""Questions about ready arrays in a reading."""
PAUSE_S = 0.01
"""The time between two reads, so that they meet the neighbour's computations at all stages."""
WORDS = {"1 KB": 256, "1 MB": 262_144}


def run(quick: bool, clients: int = CLIENTS) -> Result:
    """Measure up to so many clients in alternation, then shares, neighbours and reads."""
    result = Result("concurrent", "many clients on one device (paper: figures 8 and 9)")
    durations_ms = DURATIONS_MS[:1] if quick else DURATIONS_MS
    needed_ms = (*durations_ms, shares.SHARE_MS, *shares.WAITING_MS)
    steps = calibrated(tuple(dict.fromkeys(needed_ms)))
    sizes = sizes_to(2 if quick else clients)
    _together(result, {ms: steps[ms] for ms in durations_ms}, sizes, quick)
    shares.enqueuing(result, steps, quick=quick)
    shares.waiting(result, steps, quick=quick)
    _neighbours(result, 1 if quick else 4)
    _reads(result, quick)
    result.notes += [
        "every client is a process; one host with one device, because the device is shared",
        f"'{ALONE}' is one process that has the device to itself, without a runtime",
    ]
    return result


def calibrated(durations_ms: tuple[float, ...]) -> dict[float, int]:
    """The number of steps of a computation of each duration on this machine, in plain JAX."""
    few, many = 1_000, 100_000
    with Peer(ALONE, "bench.clients", [["alone", str(few), str(many)]]) as alone:
        best = {n: min(alone.seconds(str(n), 200) / 200 for _ in range(3)) for n in (few, many)}
    per_step_s = (best[many] - best[few]) / (many - few)
    overhead_s = best[few] - few * per_step_s
    return {ms: max(1, round((ms * 1e-3 - overhead_s) / per_step_s)) for ms in durations_ms}


def _together(result: Result, steps: dict[float, int], sizes: Sequence[int], quick: bool) -> None:
    numbers = [str(number) for number in steps.values()]
    with ExitStack() as stack:
        alone = stack.enter_context(Peer(ALONE, "bench.clients", [["alone", *numbers]]))
        cluster = stack.enter_context(LocalCluster(connect=False))
        arguments = ["crowd", cluster.address, str(sizes[-1]), *numbers]
        crowd = stack.enter_context(Peer("clients", "bench.clients", [arguments], ready_s=READY_S))
        series: Series = {}
        for ms, number in zip(steps, numbers, strict=True):
            count = max(64, min(4096, round(READING_S / ms * 1e3)))
            cases: dict[str, Callable[[], float]] = {ALONE: partial(alone.rate, number, count)}
            for size in sizes:
                each = max(LEAST_CALLS, count // size)
                cases[_name(size)] = partial(crowd.rate, f"{size} {number}", size * each)
            samples = alternate(cases, rounds=1 if quick else 4)
            result.compare(samples, unit="calls/s", params={"ms": ms}, baseline=ALONE)
            _add_bars(result, samples, ms, sizes)
            series[f"pw, {ms} ms"] = [(float(n), samples[_name(n)].median) for n in sizes]
            series[f"JAX, {ms} ms"] = [(float(n), samples[ALONE].median) for n in sizes]
    result.figures.append(
        Figure(
            "all clients together, and JAX in one process",
            "clients",
            "computations per second",
            series,
            log_x=True,
            log_y=True,
        )
    )


def _add_bars(result: Result, samples: dict[str, Sample], ms: float, sizes: Sequence[int]) -> None:
    text = f"computations of {ms} ms"
    if BESIDE_ONE in sizes:
        ratio = samples[_name(BESIDE_ONE)].over(samples[_name(1)]).median
        result.at_least(1.0, ratio, f"{BESIDE_ONE} clients over one, {text}")
    if ms in OVER_JAX_MS:
        for size in sorted({BESIDE_ONE, sizes[-1]} & set(sizes)):
            ratio = samples[_name(size)].over(samples[ALONE]).median
            result.at_least(1.0, ratio, f"{size} clients over {ALONE}, {text}")


def _name(clients: int) -> str:
    return f"{clients} client{'s' * (clients > 1)}"


# --- neighbours ----------------------------------------------------------------------------------


def _neighbours(result: Result, rounds: int) -> None:
    """Calls on a device of the client's own, while another client uses the same host."""
    with ExitStack() as stack:
        cluster = stack.enter_context(LocalCluster(islands=2, devices_per_host=2, connect=False))
        arguments = [["own", cluster.address], ["beside", cluster.address, str(LONG_MS)]]
        mine, theirs = started(stack, arguments)
        pool = stack.enter_context(ThreadPoolExecutor(1))

        def reading() -> float:
            # With the warm-up of the peer, since a neighbour delays the first calls most.
            return 1.1 * OWN_CALLS / seconds(lambda: mine.seconds("calls", OWN_CALLS))

        def beside(work: str) -> float:
            busy = pool.submit(theirs.seconds, work, 10)
            time.sleep(LONG_MS * 1e-3)
            found = reading()
            busy.result()
            return found

        cases: dict[str, Callable[[], float]] = {
            "alone on the host": reading,
            "beside long calls": partial(beside, "long calls"),
            "beside stages that wait": partial(beside, "stages"),
        }
        samples = alternate(cases, rounds=rounds)
    alone, *others = samples
    result.compare(samples, unit="calls/s", baseline=alone)
    for name in others:
        ratio = samples[name].over(samples[alone]).median
        result.at_least(0.5, ratio, f"calls on a device of the client's own {name}, over {alone}")


# --- reads of ready arrays -----------------------------------------------------------------------


Ask = tuple[Callable[[], Sequence[Any]], Callable[[Any], object]]
"""Makes objects, while the host has no other work; and a question about one of them."""


def _median_ms(ask: Ask, beside: Callable[[], Future[float]] | None = None) -> float:
    """The median time of a question, while the work of `beside` lasts."""
    make, question = ask
    objects = make()
    work = beside() if beside else None
    took_s = []
    for each in objects:
        took_s.append(seconds(partial(question, each)))
        time.sleep(PAUSE_S)
        if work and work.done():
            break
    if work:
        work.result()
    return statistics.median(took_s) * 1e3


def _reads(result: Result, quick: bool) -> None:
    """Waits for ready arrays, reads and puts, beside a client that floods their device."""
    with ExitStack() as stack:
        cluster = stack.enter_context(LocalCluster())
        (neighbour,) = started(stack, [["flood", cluster.address, str(FLOOD_MS)]])
        pool = stack.enter_context(ThreadPoolExecutor(1))

        def flooded(work: str) -> Future[float]:
            future = pool.submit(neighbour.seconds, work, FLOOD_CALLS)
            # Until the neighbour's warm-up is over and many of its other calls are in flight.
            time.sleep((FLOOD_CALLS / 10 + 10) * FLOOD_MS * 1e-3)
            return future

        long_calls, in_line = partial(flooded, "long calls"), partial(flooded, "calls in line")
        asks = _asks()
        cases: dict[str, Callable[[], float]] = {}
        for name, ask in asks.items():
            cases[f"{name}, alone"] = partial(_median_ms, ask)
            cases[f"{name}, beside long calls"] = partial(_median_ms, ask, long_calls)
        cases["wait, beside calls in line"] = partial(_median_ms, asks["wait"], in_line)
        samples = alternate(cases, rounds=1 if quick else 3, warm_up=0 if quick else 1)
    for what in asks:
        mine = {name: sample for name, sample in samples.items() if name.startswith(f"{what}, ")}
        result.compare(mine, unit="ms, median", baseline=f"{what}, alone")
        for name in list(mine)[1:]:
            result.at_most(2.0, samples[name].median, f"of ready arrays: {name}, in ms")


def _asks() -> dict[str, Ask]:
    mesh = new_mesh()
    add = pw.jit(local, mesh=mesh)

    def ready(words: int) -> list[pw.Array]:
        """Arrays that are ready, of which this client has not heard."""
        start = put(np.zeros(words, np.float32), mesh)
        made = [add(start) for _ in range(READS)]
        add(made[-1]).block_until_ready()  # the device computes in order
        return made

    asks: dict[str, Ask] = {"wait": (partial(ready, 256), lambda array: array.block_until_ready())}
    for size, words in WORDS.items():
        asks[f"value of {size}"] = partial(ready, words), np.asarray
    numbers = [np.float32(number) for number in range(READS)]
    asks["put"] = lambda: numbers, lambda number: put(number, mesh).block_until_ready()
    return asks
