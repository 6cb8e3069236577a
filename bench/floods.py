"""What one client's calls cost while another client floods the cluster with requests.

The victim calls a function that adds one and waits for each result. The flooder (`bench.flooder`)
sends requests of one kind as fast as the controller and the host read them. Readings with and
without a flood alternate. With no more processors than processes, the flooder also takes processor
time from the cluster, so the bar is on the median of a machine that has some to spare.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable, Iterator

import numpy as np

import pw
from bench import measure, report
from bench.baselines import steps
from bench.baselines.peer import ROOT, environment
from bench.flooder import KINDS
from bench.placement import new_mesh, put

ALONE = "alone"
CALLS = 200
"""Calls of one reading."""
TIMES_AS_LONG = 2.0


def run(quick: bool) -> report.Result:
    """Measure calls alone, and beside each kind of flood."""
    calls, rounds = (20, 1) if quick else (CALLS, 5)
    result = report.Result("floods", "a client's blocking call while another floods the cluster")
    with contextlib.ExitStack() as stack:
        cluster = stack.enter_context(pw.LocalCluster(devices_per_host=2))
        mesh = new_mesh()
        function, x = pw.jit(steps.local), put(np.float32(1), mesh)
        flood = stack.enter_context(_flooder(cluster.address))

        def call() -> None:
            np.asarray(function(x))

        tails: dict[str, list[float]] = {}

        def reading(kind: str) -> Callable[[], float]:
            def read() -> float:
                flood(kind)
                try:
                    taken = [measure.seconds(call) * 1e6 for _ in range(calls)]
                finally:
                    flood("")
                for _ in range(5):
                    call()
                tails.setdefault(kind, []).append(measure.percentile(taken, 99))
                return measure.percentile(taken, 50)

            return read

        call()
        cases = {kind or ALONE: reading(kind) for kind in ("", *KINDS)}
        samples = measure.alternate(cases, rounds=rounds, warm_up=0 if quick else 1)
    result.compare(samples, unit="µs, median", baseline=ALONE)
    slow = {
        kind or ALONE: measure.Sample(tuple(values[-rounds:])) for kind, values in tails.items()
    }
    result.compare(slow, unit="µs, p99", baseline=ALONE)
    for kind in KINDS:
        ratio = samples[kind].over(samples[ALONE]).median
        result.at_most(TIMES_AS_LONG, ratio, f"a call beside a flood of {kind}, to one alone")
    return result


@contextlib.contextmanager
def _flooder(address: str) -> Iterator[Callable[[str], None]]:
    """Start the flooder; yields a function that has it send requests of one kind, or none."""
    command = [sys.executable, "-m", "bench.flooder", address]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, cwd=ROOT, env=environment())
    assert process.stdin is not None
    assert process.stdout is not None
    asked, answers = process.stdin, process.stdout

    def flood(kind: str) -> None:
        asked.write(f"{kind}\n".encode())
        asked.flush()
        answers.readline()

    try:
        if answers.readline() != b"ready\n":
            raise measure.GaveUp("the flooder could not attach")
        yield flood
    finally:
        asked.close()
        process.kill()
        process.wait()
        answers.close()
