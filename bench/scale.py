"""The controller's cost of a launch, from 16 to 4,096 hosts (the paper's figures 5 and 6).

The controller daemon is the real one, on its real sockets; its hosts are modelled (see
`bench.modelled`). A launch is one call of a function over all devices of one island, `x = f(x)`:
the controller gets a `Run` and a `Delete`, and every host a `Launch` and a `Discard`. *Pipelined*:
up to 512 calls are in flight, and messages to one host leave in few frames. *One at a time*: every
call waits for the one before, and each launch is one frame for every host, the most that it can
cost.

With 512 hosts and more, of eight devices each, launches go down a tree: each such cluster is measured
alone. What it takes includes the heartbeats of all its hosts in that time.

The readings are processor time of the daemon's event loop, which runs controller and schedulers,
and not time on a clock: other load on the machine hardly changes them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

from bench.measure import Sample, alternate
from bench.modelled import ModelledCluster, Usage
from bench.report import Figure, Params, Result, Series

SLOPE_US = 15.0
FLAT = 1.15
MEMORY_BYTES = 300e6
HELD_ARRAYS = 20_000
"""More than the runs in the controller's lineage, so that the lineage is full."""
MODES = {"pipelined": 512, "one at a time": 1}

Size = tuple[int, int, int]
"""Hosts, devices of each host, and arrays that the function takes and returns."""
MANY_ARRAYS = 64
"""About the arrays of a training step: parameters and the optimizer's state."""
THOUSANDS = (512, 2048, 4096)
TREE_LAUNCHES = 2_000
TREE_GROWTH = 2.0
"""With eight times the hosts a tree has one step more."""


def run(quick: bool) -> Result:
    """Measure all sizes in alternation, then let one client hold many arrays on the largest."""
    hosts = (4, 8) if quick else (16, 32, 64, 128, 256, 512)
    middle = 8 if quick else 128
    sizes = [(count, 4, 1) for count in hosts] + [(middle, count, 1) for count in (1, 8)]
    sizes += [(middle, count, MANY_ARRAYS) for count in (1, 8)]
    result = Result(
        "scale", "processor time of controller and scheduler for a launch (paper: figures 5 and 6)"
    )
    with ExitStack() as stack:
        by_size = {size: stack.enter_context(ModelledCluster(*size)) for size in sizes}
        last: dict[tuple[Size, str], tuple[int, Usage]] = {}
        samples = _launches(by_size, last, rounds=1 if quick else 3)
        _add_launches(result, samples, last)
        _add_installs(result, by_size)
        _add_memory(result, by_size[hosts[-1], 4, 1], HELD_ARRAYS // (100 if quick else 1))
    _add_bars(result, samples, hosts, middle)
    _add_trees(result, (4, 8) if quick else THOUSANDS, 32 if quick else TREE_LAUNCHES)
    result.notes += [
        "one process models hosts, devices and client, with real sockets and the real codec; "
        "the controller is the daemon itself",
        "'loop' is the thread of controller, schedulers and transport; other threads are separate",
    ]
    return result


def _launches(
    clusters: dict[Size, ModelledCluster],
    last: dict[tuple[Size, str], tuple[int, Usage]],
    rounds: int,
) -> dict[tuple[Size, str], Sample]:
    """Microseconds of the loop for a launch, by size and mode; `last` gets the last usage."""

    def case(size: Size, mode: str) -> float:
        cluster = clusters[size]
        count = few = 32 if rounds == 1 else max(32, 5_000 // size[0])
        if MODES[mode] > 1 and size[2] == 1 and rounds > 1:
            count = max(600, 6 * few)
        before = cluster.usage()
        cluster.launch(count, window=MODES[mode])
        used = cluster.usage().since(before)
        last[size, mode] = count, used
        return used.loop_s / count * 1e6

    cases: dict[str, Callable[[], float]] = {}
    keys = {f"{size} {mode}": (size, mode) for size in clusters for mode in MODES}
    for name, key in keys.items():
        cases[name] = partial(case, *key)
    return {keys[name]: sample for name, sample in alternate(cases, rounds=rounds).items()}


def _add_launches(
    result: Result,
    samples: dict[tuple[Size, str], Sample],
    last: dict[tuple[Size, str], tuple[int, Usage]],
) -> None:
    for ((hosts, devices, arrays), mode), sample in samples.items():
        count, used = last[(hosts, devices, arrays), mode]
        params: Params = {
            "hosts": hosts,
            "devices": devices,
            "arrays": arrays,
            "µs/host": f"{sample.median / hosts:.1f}",
            "other threads µs": round(used.other_s / count * 1e6),
            "messages": f"{used.messages_sent / count:.1f}",
            "frames": f"{used.frames_sent / count:.1f}",
            "bytes": round(used.bytes_sent / count),
        }
        result.add(f"loop, {mode}", params, sample, "µs/launch")
    series: Series = {
        mode: [
            (hosts, s.median)
            for ((hosts, devices, arrays), m), s in samples.items()
            if m == mode and devices == 4 and arrays == 1
        ]
        for mode in MODES
    }
    result.figures.append(
        Figure("controller's event loop", "hosts", "µs a launch", series, log_x=True, log_y=True)
    )


def _add_installs(result: Result, clusters: dict[Size, ModelledCluster]) -> None:
    for (hosts, devices, arrays), cluster in clusters.items():
        sample = Sample((cluster.install_s * 1e3,))
        params = {"hosts": hosts, "devices": devices, "arrays": arrays}
        result.add("loop, slice and two programs", params, sample, "ms once")


def _add_memory(result: Result, cluster: ModelledCluster, arrays: int) -> None:
    params = {"hosts": cluster.hosts, "devices": cluster.devices}
    before = Sample((cluster.resident_bytes() / 1e6,))
    cluster.hold(arrays)
    after = Sample((cluster.resident_bytes() / 1e6,))
    result.add("memory after the launches", params, before, "MB")
    result.add(f"memory with {arrays} arrays held", params, after, "MB")
    most = max(before.median, after.median)
    result.at_most(MEMORY_BYTES / 1e6, most, "MB of the controller, 512 hosts")


def _add_bars(
    result: Result, samples: dict[tuple[Size, str], Sample], hosts: tuple[int, ...], middle: int
) -> None:
    least, most = hosts[0], hosts[-1]
    for mode in MODES:
        low, high = samples[(least, 4, 1), mode], samples[(most, 4, 1), mode]
        growth = high.over(low).median / (most / least)
        text = f"growth from {least} to {most} hosts over that of hosts, {mode}"
        result.at_most(1.0, growth, text)
        slope = high.minus(low).median / (most - least)
        result.at_most(SLOPE_US, slope, f"µs a launch and host, {mode}")
        for arrays in (1, MANY_ARRAYS):
            ratio = samples[(middle, 8, arrays), mode].over(samples[(middle, 1, arrays), mode])
            text = f"8 devices a host over 1, {arrays} array{'s' * (arrays > 1)}, {mode}"
            result.at_most(FLAT, ratio.median, text)


def _add_trees(result: Result, hosts: tuple[int, ...], count: int) -> None:
    """Measure clusters with trees, one after the other: launches, and the memory of the controller."""
    taken_us = []
    for size in hosts:
        with ModelledCluster(size, 8) as cluster:
            cluster.launch(count)
            before = cluster.usage()
            cluster.launch(count)
            used = cluster.usage().since(before)
            memory = cluster.resident_bytes() / 1e6
        taken_us.append(used.loop_s / count * 1e6)
        params = {"hosts": size, "devices": 8, "messages": f"{used.messages_sent / count:.1f}"}
        result.add("loop, pipelined, alone", params, Sample((taken_us[-1],)), "µs/launch")
        result.add("memory after the launches", params, Sample((memory,)), "MB")
    growth = taken_us[-1] / taken_us[0]
    result.at_most(TREE_GROWTH, growth, f"launch with {hosts[-1]} hosts over {hosts[0]}, pipelined")
