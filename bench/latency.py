"""How long a user waits for the smallest thing there is: from a call to its result, of a computation that adds
one. The paper has no such table; it is what the blocking calls of its Figure 5 are made of.

A call travels client → controller → host → client: three hops on a cluster, and two where the controller
lives in the client's process. The yardstick is a bare zmq round trip between two processes on this machine,
measured in the same rounds, for each hop: a message there, and whatever must be woken before the next can
leave. What the messages alone could do, half a round trip for each hop, is told beside it.

Actor systems do the same in one hop: their caller names the process that computes, and no scheduler is asked.
xoscar's and Ray's calls, and Ray's compiled graphs, which skip what Ray does for a call, take turns with ours.
"""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

import pw
from bench import measure, report
from bench.baselines import ray_actors, steps, xoscar_actors
from bench.baselines.echo import Echo
from bench.baselines.peer import Peer

HOPS = {"cluster": 3, "embedded": 2}
ZMQ, JAX = "zmq round trip", "JAX in this process"
EXECUTE_THREAD = "on the execute thread"
ONE_BY_ONE = {
    "xoscar": (xoscar_actors.start, "local, op by op, blocking"),
    "Ray": (ray_actors.start, "local, op by op, blocking"),
    "Ray graph": (ray_actors.start, "graph: local, op by op, blocking"),
}
"""How each actor system is started, and its case of calls that wait for their results one after the other."""
CALLS = "calls one by one"
READING_S = 0.25
"""About how long a reading of such calls takes."""


def run(quick: bool) -> report.Result:
    """Measure embedded and on a local cluster of one host, beside others; embedded, zmq and JAX if quick."""
    calls, rounds = (20, 1) if quick else (300, 15)
    result = report.Result("latency", "microseconds from a client's call to its result")
    slow: dict[str, list[float]] = {}

    def case(name: str, call: Callable[[], object]) -> Callable[[], float]:
        call()
        slow[name] = []

        def reading() -> float:
            readings = [measure.seconds(call) * 1e6 for _ in range(calls)]
            slow[name].append(percentile(readings, 99))
            return statistics.median(readings)

        return reading

    with contextlib.ExitStack() as stack:
        echo = stack.enter_context(Echo())
        placed = {"embedded": _placed()}  # before there is another cluster to be connected to
        stack.callback(pw.disconnect)
        if not quick:
            stack.enter_context(pw.LocalCluster())
            placed["cluster"] = _placed()
        local = jax.jit(steps.local)
        on_device = jax.device_put(np.float32(1))
        cases = {
            ZMQ: case(ZMQ, echo.round_trip),
            JAX: case(JAX, lambda: local(on_device).block_until_ready()),
            **{
                name: case(name, call)
                for where, (function, x) in placed.items()
                for name, call in _calls(where, function, x).items()
            },
        }
        waited = {} if quick else _one_by_one(placed, stack, result.notes)
        warm_up = 0 if quick else 1
        both = measure.alternate(cases | waited, rounds=rounds, warm_up=warm_up, notes=result.notes)
    samples = {name: both[name] for name in cases}
    result.rows = report.rows(samples, unit="µs, median", baseline=ZMQ)
    for where in placed:
        threaded = samples[f"pw, {where}, {EXECUTE_THREAD}"].over(samples[f"pw, {where}"])
        words = f"{where}: {threaded.median:.3g} times as long where the host's loop does not compute itself"
        result.notes.append(words)
    tails = {name: measure.Sample(tuple(values[-rounds:])) for name, values in slow.items()}
    result.rows += report.rows(tails, unit="µs, p99", baseline=ZMQ)
    for where in placed:
        hops = HOPS[where]
        ratio = samples[f"pw, {where}"].over(samples[ZMQ]).median / hops
        text = f"{where}: median over {hops} hops, a zmq round trip each"
        result.bars.append(report.Bar(text, ratio, 3.0, at_least=False))
        words = (
            f"{where}: {2 * ratio:.2g} times what {hops} hops take at half a zmq round trip each"
        )
        result.notes.append(words)
    per_second = {name: both[name] for name in waited if name in both}
    if per_second:
        ours = f"{CALLS}, pw, cluster"
        result.rows += report.rows(per_second, unit="1/s", baseline=ours)
        for name in ONE_BY_ONE:
            if (theirs := f"{CALLS}, {name}") in per_second:
                ratio = per_second[ours].over(per_second[theirs]).median
                result.bars.append(report.Bar(f"cluster: {CALLS}, to those of {name}", ratio, 1.0))
    return result


def _one_by_one(
    placed: Mapping[str, tuple[Callable[[Any], Any], Any]],
    stack: contextlib.ExitStack,
    notes: list[str],
) -> dict[str, Callable[[], float]]:
    """Calls a second of a client that waits for each, of pw and of those actor systems that are installed."""
    peers: dict[Any, Peer] = {}
    timed: dict[str, Callable[[int], float]] = {}
    for name, (start, case) in ONE_BY_ONE.items():
        try:
            if start not in peers:
                peers[start] = stack.enter_context(start(1))
            timed[name] = peers[start].timed(case)
        except measure.GaveUp as error:
            notes.append(f"{name} was left out: {error}")
    for where, (function, x) in placed.items():

        def calls(count: int, function: Any = function, value: Any = x) -> None:
            for _ in range(count):
                value = function(value)
                value.block_until_ready()

        timed[f"pw, {where}"] = measure.timed(calls)
    return {
        f"{CALLS}, {name}": measure.sized(each, reading_s=READING_S) for name, each in timed.items()
    }


def percentile(values: list[float], percent: float) -> float:
    """The smallest of `values` that at least `percent` of them do not exceed."""
    return sorted(values)[max(0, math.ceil(len(values) * percent / 100) - 1)]


def _placed() -> tuple[Callable[[Any], Any], Any]:
    """A function that does next to nothing and an argument for it, on the cluster that is current."""
    devices = pw.make_virtual_device_set().add_slice(devices=1).devices
    mesh = pw.Mesh(devices, ("devices",))
    function = pw.jit(steps.local, mesh=mesh)
    x = pw.put(np.float32(1), sharding=pw.NamedSharding.replicated(mesh))
    return function, x


def _calls(where: str, function: Callable[[Any], Any], x: Any) -> dict[str, Callable[[], object]]:
    # A host's loop never runs a computation with a branch itself.
    branching = pw.jit(lambda y: jax.lax.cond(y < 0, jax.numpy.abs, steps.local, y))
    return {
        f"pw, {where}, {EXECUTE_THREAD}": lambda: branching(x).block_until_ready(),
        f"pw, {where}": lambda: function(x).block_until_ready(),
        f"pw, {where}, value": lambda: np.asarray(function(x)),
    }
