"""The smallest computation that keeps the devices as busy as multi-controller JAX would (the paper's figure 6).

A single controller pays for every launch; a computation that takes longer than that hides it. On one to four
real hosts, the computation (a loop of a given length on every device, then a scalar all-reduce) is made longer
until pw, one client call each and many in flight, gets done 95 % of what JAX does with one process a host. Its
size is what JAX needs for it.

For 16 to 512 hosts the devices are modelled, and nothing else is left out on the controller's side: the real
daemon launches over its real sockets, to hosts that say when a device that takes so long would have ended (see
`bench.modelled`). Longer and longer computations are tried until the modelled devices work 95 % of the time.
"""

from __future__ import annotations

import math
from contextlib import ExitStack
from functools import partial

from bench.baselines import jax_busy
from bench.baselines.peer import Peer
from bench.clients import per_second
from bench.measure import Sample, alternate
from bench.modelled import ModelledCluster
from bench.report import Bar, Figure, Result, Row, Series
from pw import LocalCluster

ENOUGH = 0.95
STEPS = (1_000, 3_000, 10_000, 30_000, 100_000, 300_000)
REAL_HOSTS = (1, 2, 4)
MODELLED_HOSTS = (16, 64, 128, 256, 512)
DEVICES = 4
BARS_MS = {16: 2.3, 512: 10.0}
READING_S = 0.4
FIRST_US_A_HOST = 4.0
GROWTH = 1.5
LONGEST_US = 100_000.0

Point = tuple[float, float]
"""Size of the computation in microseconds, and what is got done of what could be."""


def run(quick: bool) -> Result:
    """Real hosts first, then modelled ones."""
    result = Result("smallest", "the smallest computation at JAX's throughput (paper: figure 6)")
    curves: Series = {}
    smallest: list[Point] = []
    for hosts in (1,) if quick else REAL_HOSTS:
        points = _real(result, hosts, STEPS[-2:] if quick else STEPS, 1 if quick else 3)
        curves[f"{hosts} real"] = points
        if (size_us := reached(points)) is not None:
            smallest.append((hosts, size_us / 1e3))
            _tell(result, "real hosts", hosts, size_us)
        else:
            result.notes.append(f"not reached on {hosts} real hosts within {points[-1][0]:.0f} µs")
    real, smallest = smallest, []
    for hosts in (4,) if quick else MODELLED_HOSTS:
        points = _modelled(hosts, 100 if quick else 500)
        curves[f"{hosts} modelled"] = points
        if (size_us := reached(points)) is None:
            size_us = LONGEST_US
            result.notes.append(f"not reached at {hosts} modelled hosts")
        smallest.append((hosts, size_us / 1e3))
        _tell(result, "modelled hosts", hosts, size_us)
        if hosts in BARS_MS:
            text = f"ms, {hosts} modelled hosts (paper: {2.3 if hosts == 16 else 35} ms)"
            result.bars.append(Bar(text, size_us / 1e3, BARS_MS[hosts], at_least=False))
    result.figures += [
        Figure("throughput against size", "µs a computation", "part of JAX's", curves, log_x=True),
        Figure(
            "smallest computation",
            "hosts",
            "ms",
            {"real": real, "modelled": smallest},
            log_x=True,
            log_y=True,
        ),
    ]
    result.notes += [
        f"'reached' is {ENOUGH:.0%} of the throughput; between two sizes that were tried it is interpolated",
        "modelled: one client, 4 devices a host; hosts and client are one process beside the daemon; what a "
        "real client or executor does for a call is not in it, as it happens elsewhere at the same time",
    ]
    return result


def reached(points: list[Point]) -> float | None:
    """The size from which on the throughput stays at ENOUGH, interpolated; None if it never does."""
    last_below = max((i for i, (_, part) in enumerate(points) if part < ENOUGH), default=-1)
    if last_below == len(points) - 1:
        return None
    if last_below == -1:
        return points[0][0]
    (size_a, a), (size_b, b) = points[last_below : last_below + 2]
    weight = (ENOUGH - a) / (b - a)
    return math.exp(math.log(size_a) * (1 - weight) + math.log(size_b) * weight)


def _tell(result: Result, name: str, hosts: int, size_us: float) -> None:
    params: dict[str, object] = {"hosts": hosts}
    result.rows.append(Row(f"smallest, {name}", params, Sample((size_us / 1e3,)), "ms"))


def _real(result: Result, hosts: int, steps: tuple[int, ...], rounds: int) -> list[Point]:
    """Throughput beside JAX's on real hosts, by what JAX needs for a computation."""
    points = []
    with ExitStack() as stack:
        cluster = stack.enter_context(LocalCluster(hosts_per_island=hosts, connect=False))
        arguments = ["gang", cluster.address, str(hosts), *map(str, steps)]
        ours = stack.enter_context(Peer("pw", "bench.clients", [arguments]))
        theirs = stack.enter_context(jax_busy.start(hosts, steps))
        for number in map(str, steps):
            once_s = theirs.seconds(number, 20) / 20
            count = max(20, min(4000, round(READING_S / once_s)))
            cases = {
                "pw": partial(per_second, ours, number, count),
                "JAX": partial(per_second, theirs, number, count),
            }
            samples = alternate(cases, rounds=rounds)
            size_us, ratio = 1e6 / samples["JAX"].median, samples["pw"].over(samples["JAX"])
            params: dict[str, object] = {"hosts": hosts, "µs": f"{size_us:.0f}"}
            name = "calls of a computation of this size"
            result.rows.append(Row(name, params, samples["pw"], "1/s", "JAX", ratio))
            points.append((size_us, ratio.median))
    return sorted(points)


def _modelled(hosts: int, count: int) -> list[Point]:
    """How busy modelled devices are kept, by how long a computation takes them."""
    points = []
    with ModelledCluster(hosts, DEVICES) as cluster:
        cluster.launch(count)
        size_us = FIRST_US_A_HOST * hosts
        enough = 0
        while enough < 2 and size_us < LONGEST_US:
            part = cluster.busy(count, size_us)
            points.append((size_us, part))
            enough = enough + 1 if part >= ENOUGH else 0
            size_us *= GROWTH
    return points
