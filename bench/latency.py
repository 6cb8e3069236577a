"""How long a user waits for the smallest thing there is: from a call to its result, of a computation that does
nothing. The paper has no such table; it is what the blocking calls of its Figure 5 are made of.

A call travels client → controller → host → client: three hops on a cluster, and two where the controller
lives in the client's process. The yardstick is a bare zmq round trip between two processes on this machine,
measured in the same rounds, for each hop: a message there, and whatever must be woken before the next can
leave. What the messages alone could do, half a round trip for each hop, is told beside it.
"""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

import pw
from bench import measure, report
from bench.baselines.echo import Echo

HOPS = {"cluster": 3, "embedded": 2}
ZMQ, JAX = "zmq round trip", "JAX in this process"


def run(quick: bool) -> report.Result:
    """Measure embedded and on a local cluster of one host, beside zmq and JAX; embedded only if quick."""
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
        local = jax.jit(lambda x: x)
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
        samples = measure.alternate(cases, rounds=rounds, warm_up=0 if quick else 1)
    result.rows = report.rows(samples, unit="µs, median", baseline=ZMQ)
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
    return result


def percentile(values: list[float], percent: float) -> float:
    """The smallest of `values` that at least `percent` of them do not exceed."""
    return sorted(values)[max(0, math.ceil(len(values) * percent / 100) - 1)]


def _placed() -> tuple[Callable[[Any], Any], Any]:
    """A function that does nothing and an argument for it, on the cluster that is current."""
    devices = pw.make_virtual_device_set().add_slice(devices=1).devices
    mesh = pw.Mesh(devices, ("devices",))
    function = pw.jit(lambda x: x, mesh=mesh)
    x = pw.put(np.float32(1), sharding=pw.NamedSharding.replicated(mesh))
    return function, x


def _calls(where: str, function: Callable[[Any], Any], x: Any) -> dict[str, Callable[[], object]]:
    return {
        f"pw, {where}": lambda: function(x).block_until_ready(),
        f"pw, {where}, value": lambda: np.asarray(function(x)),
    }
