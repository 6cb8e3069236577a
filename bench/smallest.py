"""The smallest computation that keeps devices as busy as multi-controller JAX (paper: figure 6).

A single controller needs some time for every launch; a longer computation hides it. On one to four
real hosts, the computation is a loop on every device and then a scalar all-reduce. It grows until
pw reaches 95 % of the calls a second of JAX with one process a host; pw makes one client call for
each and has many in flight. The size of a computation is the time that JAX needs for it.

For 16 to 4,096 hosts only the devices are modelled: the real controller daemon launches over its real
sockets, and the hosts report the end of a launch when a device would have ended it (see
`bench.modelled`). The computation grows until the modelled devices are busy for 95 % of the time.
"""

from __future__ import annotations

import math
from contextlib import ExitStack
from functools import partial

from bench.baselines import jax_group
from bench.baselines.peer import Peer
from bench.measure import Sample, alternate
from bench.modelled import ModelledCluster
from bench.report import Figure, Result, Series
from pw import LocalCluster

ENOUGH = 0.95
STEPS = (1_000, 3_000, 10_000, 30_000, 100_000, 300_000, 1_000_000, 3_000_000)
REAL_HOSTS = (1, 2, 4)
MODELLED_HOSTS = (16, 64, 128, 512, 2048, 4096)
DEVICES = 8
BARS_MS = {16: 2.3, 512: 1.0, 4096: 2.0}
PAPER_MS = {16: 2.3, 512: 35.0}
READING_S = 0.4
FIRST_US = 30.0
GROWTH = 1.5
LONGEST_US = 100_000.0

Point = tuple[float, float]
"""Size of the computation in microseconds, and the part of the possible throughput."""


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
            _add_smallest(result, "real hosts", hosts, size_us)
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
        _add_smallest(result, "modelled hosts", hosts, size_us)
        if hosts in BARS_MS:
            text = f"ms, {hosts} modelled hosts"
            if hosts in PAPER_MS:
                text += f" (paper: {PAPER_MS[hosts]:g} ms)"
            result.at_most(BARS_MS[hosts], size_us / 1e3, text)
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
        f"'reached' is {ENOUGH:.0%} of the throughput, interpolated between two measured sizes",
        f"modelled: one client, {DEVICES} devices a host; hosts and client are one process; "
        "the work of a real client and of real executors, which is elsewhere, is left out",
    ]
    return result


def reached(points: list[Point]) -> float | None:
    """The size from which the throughput stays at ENOUGH, interpolated; None if there is none."""
    last_below = max((i for i, (_, part) in enumerate(points) if part < ENOUGH), default=-1)
    if last_below == len(points) - 1:
        return None
    if last_below == -1:
        return points[0][0]
    (size_a, a), (size_b, b) = points[last_below : last_below + 2]
    weight = (ENOUGH - a) / (b - a)
    return math.exp(math.log(size_a) * (1 - weight) + math.log(size_b) * weight)


def _add_smallest(result: Result, name: str, hosts: int, size_us: float) -> None:
    result.add(f"smallest, {name}", {"hosts": hosts}, Sample((size_us / 1e3,)), "ms")


def _real(result: Result, hosts: int, steps: tuple[int, ...], rounds: int) -> list[Point]:
    """Throughput beside JAX's on real hosts, by the time that JAX needs for a computation."""
    points = []
    with ExitStack() as stack:
        cluster = stack.enter_context(LocalCluster(hosts_per_island=hosts, connect=False))
        arguments = ["gang", cluster.address, str(hosts), *map(str, steps)]
        ours = stack.enter_context(Peer("pw", "bench.clients", [arguments]))
        theirs = stack.enter_context(jax_group.start(hosts, steps))
        for number in map(str, steps):
            once_s = theirs.seconds(number, 20) / 20
            count = max(20, min(4000, round(READING_S / once_s)))
            cases = {
                "pw": partial(ours.rate, number, count),
                "JAX": partial(theirs.rate, number, count),
            }
            samples = alternate(cases, rounds=rounds)
            size_us, ratio = 1e6 / samples["JAX"].median, samples["pw"].over(samples["JAX"])
            params = {"hosts": hosts, "µs": f"{size_us:.0f}"}
            name = "calls of a computation of this size"
            result.add(name, params, samples["pw"], "1/s", "JAX", samples["JAX"])
            points.append((size_us, ratio.median))
    return sorted(points)


def _modelled(hosts: int, count: int) -> list[Point]:
    """The part of the time in which modelled devices are busy, by the size of the computation."""
    points = []
    with ModelledCluster(hosts, DEVICES) as cluster:
        cluster.launch(count)
        size_us = FIRST_US
        enough = 0
        while enough < 2 and size_us < LONGEST_US:
            part = cluster.busy(count, size_us)
            points.append((size_us, part))
            enough = enough + 1 if part >= ENOUGH else 0
            size_us *= GROWTH
    return points
