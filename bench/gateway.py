"""Plain JAX on the gateway beside `pw.jit` and, for training, beside plain JAX on its own devices.

The paper's users write plain JAX. Here the same small computation, training step and transfer run in
each way, in processes of their own, with a cluster of one device beside each. They take turns.

*Dispatch* is the time of a call that returns before its result is there. A *chain* calls a function with
the result of the last call and waits for the last one. *Blocking* calls wait for every result.

A script of eager operations, small transfers and functions that are new runs beside plain JAX. Its bars in
seconds are for a quiet machine.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from typing import NamedTuple

import pw
from bench.baselines import eager, two_ways
from bench.baselines.one_process import GATEWAY as PLATFORM
from bench.baselines.one_process import PlainJax
from bench.baselines.two_ways import BLOCKING, CHAIN, DISPATCH, GATEWAY, JIT, THERE_AND_BACK
from bench.measure import Sample, alternate, sized
from bench.processor import resident_bytes
from bench.report import Result
from bench.training import TASKS, farthest

CALLS = (DISPATCH, CHAIN, BLOCKING)
MIB = 1 << 20
LARGE_MIB = two_ways.LARGE_BYTES / MIB
DISPATCH_US, CHAIN_RATIO, BLOCKING_RATIO = 60.0, 1.3, 1.5
TRAINING_RATIO, TRANSFER_RATIO = 0.97, 0.5


class Everyday(NamedTuple):
    """What a script of plain JAX does, and the bar of the gateway."""

    times: int
    """In one reading."""
    unit: str
    units: float
    """In a second."""
    most: float | None
    """The longest time, in the unit; None for a bar of `ratio` alone."""
    ratio: float | None
    """The longest time, to that of plain JAX."""


EVERYDAY: Mapping[str, Everyday] = {
    eager.CHAIN: Everyday(400, "µs", 1e6, 100.0, None),
    eager.BLOCKING: Everyday(100, "µs", 1e6, 600.0, None),
    eager.STEP: Everyday(50, "ms", 1e3, None, 1.1),
    eager.STEP_AND_LOSS: Everyday(50, "ms", 1e3, None, 1.3),
    eager.PUT: Everyday(30, "ms", 1e3, 1.5, None),
    eager.READ: Everyday(5, "ms", 1e3, 25.0, None),
    eager.SCALARS: Everyday(1000, "µs", 1e6, 100.0, None),
    eager.GOTTEN: Everyday(1000, "µs", 1e6, 100.0, None),
    eager.NEW: Everyday(160, "ms", 1e3, None, 1.5),
    eager.LAYER: Everyday(10, "ms", 1e3, None, 1.5),
}
READING_S, TRAINING_S = 0.25, 1.2
LEAST_STEPS = 6
TRAINED: Mapping[int, tuple[str, ...]] = {
    1: ("lm-small", "lm-medium", "t5-medium"),
    2: ("lm-small",),
}
EXECUTABLES = 100
CYCLES = 6
GROWTH_RATIO = 1.05
"""The memory of all processes after the last cycles, to that after the first ones; malloc keeps some."""
SETTLED_S = 20.0


def run(quick: bool) -> Result:
    """Measure calls, transfers, training steps, and that deleted things leave nothing."""
    result = Result("gateway", "plain JAX on the gateway, beside pw.jit and plain JAX")
    _calls(result, quick)
    _everyday(result, quick)
    for devices, names in {1: ("lm-tiny",)}.items() if quick else TRAINED.items():
        for name in names:
            _training(result, name, devices, quick)
    _growth(result, quick)
    return result


# --- calls and transfers ---------------------------------------------------------------------------


def _calls(result: Result, quick: bool) -> None:
    with contextlib.ExitStack() as stack:
        peers = [stack.enter_context(two_ways.start(way)) for way in (JIT, GATEWAY)]
        reading_s = 0.02 if quick else READING_S
        rounds, warm_up = (1, 0) if quick else (9, 1)
        cases = {
            f"{case}, {peer.name}": sized(peer.timed(case), reading_s=reading_s)
            for case in (*CALLS, THERE_AND_BACK)
            for peer in peers
        }
        samples = alternate(cases, rounds=rounds, warm_up=warm_up)
    for case in CALLS:
        us = {way: _microseconds(samples[f"{case}, {way}"]) for way in (JIT, GATEWAY)}
        for way, sample in us.items():
            result.add(f"{case}, {way}", {}, sample, "µs", JIT, us[JIT] if way != JIT else None)
        ratio = us[GATEWAY].over(us[JIT]).median
        if case == DISPATCH:
            result.at_most(DISPATCH_US, us[GATEWAY].median, "dispatch of a small function, µs")
        elif case == CHAIN:
            result.at_most(CHAIN_RATIO, ratio, "a dependent chain read at the end, to pw.jit")
        else:
            result.at_most(BLOCKING_RATIO, ratio, "a blocking call, to pw.jit")
    speeds = {
        way: Sample(tuple(LARGE_MIB * rate for rate in samples[f"{THERE_AND_BACK}, {way}"].values))
        for way in (JIT, GATEWAY)
    }
    name = f"{LARGE_MIB:.0f} MiB put and get"
    for way, sample in speeds.items():
        reference = speeds[JIT] if way != JIT else None
        result.add(f"{name}, {way}", {}, sample, "MiB/s", JIT, reference)
    ratio = speeds[GATEWAY].over(speeds[JIT]).median
    result.at_least(TRANSFER_RATIO, ratio, f"{name}, to pw.put and np.asarray")


def _microseconds(rates: Sample) -> Sample:
    return Sample(tuple(1e6 / rate for rate in rates.values))


# --- eager operations ------------------------------------------------------------------------------


def _everyday(result: Result, quick: bool) -> None:
    """Run a script on the gateway and in plain JAX, in turns, and add the rows."""
    with contextlib.ExitStack() as stack:
        peers = [stack.enter_context(eager.start(way)) for way in (eager.PLAIN, eager.GATEWAY)]
        for name, one in EVERYDAY.items():
            count = max(1, one.times // 10) if quick else one.times
            cases = {
                peer.name: lambda peer=peer, name=name, count=count, one=one: (
                    peer.seconds(name, count) / count * one.units
                )
                for peer in peers
            }
            rounds, warm_up = (1, 0) if quick else (5, 1)
            samples = alternate(cases, rounds=rounds, warm_up=warm_up, notes=result.notes)
            if len(samples) < len(peers):
                continue
            plain, ours = samples[eager.PLAIN], samples[eager.GATEWAY]
            result.add(f"{name}, {eager.PLAIN}", {}, plain, one.unit)
            result.add(f"{name}, {eager.GATEWAY}", {}, ours, one.unit, eager.PLAIN, plain)
            if one.most is not None:
                result.at_most(one.most, ours.median, f"{name}, {one.unit}")
            if one.ratio is not None:
                result.at_most(one.ratio, ours.over(plain).median, f"{name}, to plain JAX")


# --- training --------------------------------------------------------------------------------------


def _training(result: Result, name: str, devices: int, quick: bool) -> None:
    """Train on the gateway and in plain JAX, in turns, and add the rows."""
    task = TASKS[name]
    with PlainJax(name, devices) as plain, PlainJax(name, devices, PLATFORM) as ours:
        step_s = plain.seconds(name, 5) / 5
        steps = 5 if quick else max(LEAST_STEPS, round(TRAINING_S / step_s))
        tokens = steps * task.tokens_per_step
        cases = {
            peer.name: lambda peer=peer: tokens / peer.seconds(name, steps)
            for peer in (ours, plain)
        }
        samples = alternate(cases, rounds=1 if quick else 5)
        (left,), (right,) = ours.losses(), plain.losses()
    for side, sample in samples.items():
        reference = None if side == plain.name else samples[plain.name]
        params = {"model": name, "devices": devices}
        result.add(f"training, {side}", params, sample, "tokens/s", plain.name, reference)
    ratio = samples[ours.name].over(samples[plain.name]).median
    result.at_least(TRAINING_RATIO, ratio, f"{name}, {devices} device(s), to plain JAX")
    result.at_most(0.0, farthest(left, right), f"{name}, {devices} device(s): difference of losses")


# --- growth ----------------------------------------------------------------------------------------


def _growth(result: Result, quick: bool) -> None:
    """Make and delete arrays and executables; measure what is left."""
    with pw.LocalCluster() as cluster, two_ways.start(GATEWAY, cluster.address) as peer:
        before = _counters()
        resident, most, left = [], {}, {}
        for _ in range(1 if quick else CYCLES):
            peer.seconds(two_ways.FILL, 2 if quick else EXECUTABLES)
            most = _counters()
            peer.seconds(two_ways.DROP, 1)
            left = _settled(before)
            resident.append(resident_bytes([*cluster.pids, *peer.pids]) / MIB)
    counted = {name: Sample((float(most[name] - before[name]),)) for name in before}
    result.compare(counted, unit="at the most")
    for name in before:
        result.at_most(0, left[name] - before[name], f"{name}, after all were deleted")
    result.add("memory of all processes", {}, Sample(tuple(resident)), "MiB, after each cycle")
    if not quick:
        # The first cycle warms up; the least of several leaves out what is freed a moment later.
        early, late = resident[1 : 1 + CYCLES // 2], resident[1 + CYCLES // 2 :]
        ratio = min(late) / min(early)
        result.at_most(
            GROWTH_RATIO, ratio, "memory of all processes, last cycles to the first ones"
        )


def _counters() -> dict[str, int]:
    """What the controller and the host have of all clients."""
    stats = dict(pw.stats())
    controller = stats.pop("controller")
    del stats["client"]
    ((_, host),) = stats.items()
    return {
        "arrays at the controller": controller["live_arrays"],
        "programs at the controller": controller["programs"],
        "arrays on the host": host["live_arrays"],
        "bytes on the host": host["live_bytes"],
    }


def _settled(wanted: Mapping[str, int]) -> dict[str, int]:
    """The counters when they are as wanted, or after some time; deletions are asynchronous."""
    deadline_s = time.monotonic() + SETTLED_S
    while (counters := _counters()) != wanted and time.monotonic() < deadline_s:
        time.sleep(0.1)
    return counters
