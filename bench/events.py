"""What publishing events costs: launches a second with a reader, and without events.

Two clusters of one host each take turns: one publishes no events, the other publishes all to a reader
that never reads, the worst one. Each call is a launch of a computation that adds one, and two events.
Processor time of client and cluster hardly depends on other load, so it has the bar.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
import zmq

import pw
from bench import measure, report
from bench.baselines import steps
from bench.placement import new_mesh, put
from bench.processor import client_and_cluster_s
from pw.client.connection import current
from pw.client.connection.runtime import Runtime
from pw.client.connection.threads import remote

OFF, ON = "events off", "events on, a reader that never reads"
PROCESSOR = "processor time, enqueued ahead"
LAUNCHES = 5000
"""Launches of a reading of processor time, which has steps of ten milliseconds."""
READING_S = 0.5
"""About how long a reading takes."""


def run(quick: bool) -> report.Result:
    """Measure calls that are enqueued ahead, and calls that wait for their results."""
    result = report.Result("events", "launches a second, with and without events")
    with contextlib.ExitStack() as stack:
        cases: dict[str, dict[str, Callable[[], float]]] = {}
        for name, has_events in ((OFF, False), (ON, True)):
            cluster = stack.enter_context(pw.LocalCluster(events=has_events, connect=False))
            if has_events:
                stack.callback(_idle_reader(cluster.events))
            for kind, case in cases_on(cluster, stack, quick).items():
                cases.setdefault(kind, {})[name] = case
        for kind, both in cases.items():
            samples = measure.alternate(both, rounds=1 if quick else 15, warm_up=1)
            unit = "µs" if kind == PROCESSOR else "1/s"
            result.compare(samples, unit=unit, baseline=OFF, params={"calls": kind})
            if kind == PROCESSOR:
                ratio = samples[ON].over(samples[OFF]).median
                words = "processor time of a launch with events, to that without"
                result.at_most(1.05, ratio, words)
        current.use(None)
    return result


def cases_on(
    cluster: pw.LocalCluster, stack: contextlib.ExitStack, quick: bool
) -> dict[str, Callable[[], float]]:
    """Return readings on one cluster: rates of launches for each kind of call, and processor time."""
    reading_s = 0.05 if quick else READING_S
    session = Runtime(remote(cluster.address), 1.0, 0)
    stack.callback(session.close)
    current.use(session)
    mesh = new_mesh()
    function, x = pw.jit(steps.local, mesh=mesh), put(np.float32(1), mesh)
    count = 200 if quick else LAUNCHES

    def processor_us() -> float:
        current.use(session)
        ahead = steps.calls(function, x)
        ahead(count // 10)
        before_s = client_and_cluster_s(cluster.pids)
        ahead(count)
        return (client_and_cluster_s(cluster.pids) - before_s) / count * 1e6

    return {
        PROCESSOR: processor_us,
        "enqueued ahead": _on(session, function, x, reading_s, wait=False),
        "one by one": _on(session, function, x, reading_s, wait=True),
    }


def _on(
    session: Runtime, function: Callable[[Any], Any], x: Any, reading_s: float, *, wait: bool
) -> Callable[[], float]:
    rate = measure.sized(measure.timed(steps.calls(function, x, wait=wait)), reading_s=reading_s)

    def case() -> float:
        current.use(session)
        return rate()

    return case


def _idle_reader(endpoint: str) -> Callable[[], None]:
    """Connect a reader that never reads; return how to end it."""
    context = zmq.Context()
    socket = context.socket(zmq.SUB)
    socket.setsockopt(zmq.RCVHWM, 1)
    socket.connect(endpoint)
    socket.subscribe("pw.1.")
    return lambda: context.destroy(linger=0)
