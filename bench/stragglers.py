"""How long a cluster takes to name a slow host, and how slow it says that the host is.

Two hosts of an island compute in one gang after the other. The process of one host is stopped for a part of
each tenth of a second, as if another program took its processor. The scheduler names the host, from what hosts
report once a second; the benchmark only asks for the status.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

import pw
from bench import measure, report
from bench.placement import new_mesh

PARTS = (0.3, 0.5)
"""Parts of the time in which the process of the slow host is stopped."""
PERIOD_S = 0.1
LIMIT_S = 60.0
NAMED_S = 10.0
"""Seconds in which a host should be named, on a machine with a processor for each process."""
LEAST_FACTOR = 1.1
CALLS = 200
SIZE = 128


def run(quick: bool) -> report.Result:
    """Slow a host down by each part, and wait until it is named."""
    result = report.Result("stragglers", "a slow host is named by the cluster itself")
    with pw.LocalCluster(hosts_per_island=2):
        step = _Steps()
        rates = measure.Sample(tuple(step.rate() for _ in range(2 if quick else 7)))
        result.compare({"all hosts": rates}, unit="calls/s")
        for part in PARTS[: 1 if quick else None]:
            _until(step, lambda: not _slow())
            name, pid = next((host.name, host.pid) for host in pw.status().hosts[1:])
            with stopped(pid, part):
                began_s = time.monotonic()
                _until(step, lambda at=name: at in _slow())
                named_s = time.monotonic() - began_s
                slowed = measure.Sample((step.rate(),))
                slow = _slow().get(name)
            factor = 0.0 if slow is None else slow.factor
            words = f"stopped for {part:.0%} of the time"
            result.add("time until it is named", {"stopped": part}, measure.Sample((named_s,)), "s")
            result.add("factor that is named", {"stopped": part}, measure.Sample((factor,)), "×")
            took = measure.Sample((rates.median / slowed.median,))
            result.add("time of a call, to before", {"stopped": part}, took, "×")
            result.at_most(NAMED_S, named_s, f"{words}: seconds until it is named")
            result.at_least(LEAST_FACTOR, factor, f"{words}: its factor, as the cluster says")
            if slow is not None:
                result.notes.append(slow.words)
    return result


class _Steps:
    """A function with a collective on both hosts, called again and again."""

    def __init__(self) -> None:
        mesh = new_mesh(2, axis="x")

        def step(y: Any) -> Any:
            for _ in range(4):
                y = jax.numpy.tanh(y @ y * 0.01)
            return y + jax.lax.pmean(y, "x")

        self._step = pw.jit(lambda x: jax.shard_map(step, in_specs=P("x"), out_specs=P("x"))(x))
        ones = np.full((2 * SIZE, SIZE), 0.01, np.float32)
        self._x = pw.put(ones, sharding=pw.NamedSharding(mesh, P("x")))
        self.call(4)

    def call(self, count: int) -> None:
        """Call it so often, four calls ahead of the results."""
        for number in range(count):
            self._x = self._step(self._x)
            if number % 4 == 3:
                self._x.block_until_ready()

    def rate(self) -> float:
        """Return calls a second."""
        return CALLS / measure.seconds(lambda: self.call(CALLS))


def _slow() -> dict[str, Any]:
    return {host.name: host.slow for host in pw.status().hosts if host.slow is not None}


def _until(step: _Steps, condition: Any) -> None:
    """Call until a condition is true, at most for `LIMIT_S`."""
    until_s = time.monotonic() + LIMIT_S
    while not condition() and time.monotonic() < until_s:
        step.call(20)


@contextlib.contextmanager
def stopped(pid: int, part: float) -> Iterator[None]:
    """Stop a process for a part of each period, while the block runs, or until it ends."""
    ends = threading.Event()

    def stop() -> None:
        with contextlib.suppress(ProcessLookupError):
            while not ends.is_set():
                os.kill(pid, signal.SIGSTOP)
                ends.wait(part * PERIOD_S)
                os.kill(pid, signal.SIGCONT)
                ends.wait((1.0 - part) * PERIOD_S)

    thread = threading.Thread(target=stop)
    thread.start()
    try:
        yield
    finally:
        ends.set()
        thread.join()
