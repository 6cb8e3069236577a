"""What tracing costs, and the paper's pictures of devices over time, drawn from timelines (`pw.trace`).

- *cost*: calls of the smallest computation, one after the other, with and without a timeline. Small
  computations have the most records for each millisecond. The processor time of the client and the
  cluster is read as well, because other load hardly changes it.
- *shares* (figure 9): four clients of weights 1:1:1:1 and 1:2:4:8 on one device.
- *concurrency* (figure 11): 1 to 16 clients on one device. Each waits for a result before its next call, and
  its computations are so short that one client leaves the device idle.

`traces` draws figures 10 and 12.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import numpy as np

import pw
from bench.baselines.steps import calls, local
from bench.clients import started
from bench.concurrent import calibrated
from bench.measure import GaveUp, Sample, alternate
from bench.pictures import middle
from bench.placement import new_mesh, put
from bench.processor import client_and_cluster_s
from bench.report import Chart, Result, Span
from pw.operating.timeline.timeline import Timeline

SHARES_MS = 2.4
CONCURRENT_MS = 0.33
"""A computation in the pictures of figures 9 and 11."""
SHOWN_S = 0.1
CONCURRENT_SHOWN_S = 0.02
"""The lengths of these pictures."""
WATCHED_S = 2.0
"""The length of a timeline; the picture is from its middle."""
TENTHS = 40
"""How long the clients of a picture work, in tenths of a second, after a warm-up of a tenth of that."""
SETTLED_S = 1.5
"""When all of them are at work."""
WEIGHTS = ((1, 1, 1, 1), (1, 2, 4, 8))
CLIENTS = (1, 4, 8, 16)
SMALL_CALLS = 3000
WARM_UP = 1


def run(quick: bool) -> Result:
    """Measure the cost of tracing, then draw the pictures."""
    result = Result("timeline", "tracing on and off; timelines of clients (paper: figures 9, 11)")
    _cost(result, quick)
    steps = calibrated((SHARES_MS, CONCURRENT_MS))
    few = 2 if quick else max(map(len, (CLIENTS, *WEIGHTS)))
    pictures: tuple[Callable[[], None], ...] = (
        *(partial(_shares, result, steps[SHARES_MS], weights[:few]) for weights in WEIGHTS),
        lambda: _concurrency(result, steps[CONCURRENT_MS], CLIENTS[:few]),
    )
    for draw in pictures:
        try:
            draw()
        except GaveUp as error:
            result.notes.append(f"a picture is left out: {error}")
    return result


# --- the cost ------------------------------------------------------------------------------------


def _cost(result: Result, quick: bool) -> None:
    count = 200 if quick else SMALL_CALLS
    used_us: dict[str, list[float]] = {"off": [], "on": []}
    with pw.LocalCluster() as cluster:
        mesh = new_mesh()
        work = calls(pw.jit(local, mesh=mesh), put(np.zeros(4, np.float32), mesh))
        work(count)
        pids = cluster.pids

        def reading(name: str) -> float:
            before_s, began_s = client_and_cluster_s(pids), time.perf_counter()
            work(count)
            took_s = time.perf_counter() - began_s
            used_us[name].append((client_and_cluster_s(pids) - before_s) / count * 1e6)
            return count / took_s

        def traced() -> float:
            with pw.trace(None) as timeline:
                found = reading("on")
            if len(timeline.computations) < count or timeline.notes:
                raise GaveUp(f"the timeline is not whole: {timeline!r}")
            return found

        cases: dict[str, Callable[[], float]] = {"off": lambda: reading("off"), "on": traced}
        samples = alternate(cases, rounds=2 if quick else 16, warm_up=WARM_UP)
    used = {name: Sample(tuple(values[WARM_UP:])) for name, values in used_us.items()}
    result.compare(samples, unit="calls/s", baseline="off", params={"of": "calls"})
    result.compare(used, unit="µs/call", baseline="off", params={"of": "processor time"})
    calls_ratio = samples["on"].over(samples["off"]).median
    result.at_least(0.97, calls_ratio, "small computations a second, with a timeline over without")
    used_ratio = used["on"].over(used["off"]).median
    result.at_most(1.03, used_ratio, "processor time of a call, with a timeline over without")


# --- the pictures --------------------------------------------------------------------------------


def _shares(result: Result, steps: int, weights: Sequence[int]) -> None:
    with _tenants(steps, weights, "enqueue") as watch:
        timeline = watch(len(weights))
    name = ":".join(map(str, weights))
    clients = [f"client {at}" for at in range(len(weights))]
    spans = _of_clients(timeline, clients)
    whole_s = sum(span.length_s for span in spans)
    parts = []
    for client, weight in zip(clients, weights, strict=True):
        own_s = sum(span.length_s for span in spans if span.kind == client)
        parts.append(own_s / whole_s)
        ideal = Sample((weight / sum(weights),))
        params = {"of": f"{client}, weight {weight} of {name}"}
        result.add("part of the device", params, Sample((parts[-1],)), "", "its weight", ideal)
    shown = middle(spans, SHOWN_S)
    rows = [span.in_row("device") for span in shown]
    rows += [span.in_row(span.kind) for client in clients for span in shown if span.kind == client]
    title = f"weights {name}: of the device {', '.join(f'{part:.1%}' for part in parts)}"
    stem = "-".join(map(str, weights))
    result.charts.append(Chart("figure-9", title, rows, {f"weights-{stem}": timeline}))


def _concurrency(result: Result, steps: int, sizes: Sequence[int]) -> None:
    with _tenants(steps, (1,) * sizes[-1], "wait-1") as watch:
        timelines = {size: watch(size) for size in sizes}
    for size, timeline in timelines.items():
        found = _of_clients(timeline, [f"client {at}" for at in range(size)])
        lasted_s = max(s.end_s for s in found) - min(s.start_s for s in found)
        used = sum(span.length_s for span in found) / lasted_s
        name = f"{size} client{'s' * (size > 1)}"
        params = {"of": f"{name}, computations of {CONCURRENT_MS} ms"}
        result.add("device in use", params, Sample((used,)), "of the time")
        chart = Chart(
            "figure-11",
            f"{name}: the device is in use for {used:.1%} of the time",
            middle(found, CONCURRENT_SHOWN_S),
            {name.replace(" ", "-"): timeline},
        )
        result.charts.append(chart)


@contextmanager
def _tenants(steps: int, weights: Sequence[int], kind: str) -> Iterator[Callable[[int], Timeline]]:
    """Start clients that share a device; their numbers are in the order of weights.

    The function that it yields lets so many of them work, and returns a timeline of that.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        cluster = stack.enter_context(pw.LocalCluster(policy="share"))
        pool = stack.enter_context(ThreadPoolExecutor(len(weights)))
        arguments = [
            ["tenant", cluster.address, str(weight), "0", str(folder / f"{index}.npy"), str(steps)]
            for index, weight in enumerate(weights)
        ]
        peers = [started(stack, [one])[0] for one in arguments]  # one after the other: in order

        def watch(size: int) -> Timeline:
            ends = [pool.submit(peer.seconds, f"{kind} {steps}", TENTHS) for peer in peers[:size]]
            time.sleep(SETTLED_S)
            with pw.trace(None) as timeline:
                time.sleep(WATCHED_S)
            for end in ends:
                end.result()
            return timeline

        yield watch


def _of_clients(timeline: Timeline, names: Sequence[str]) -> list[Span]:
    """Return the computations while all clients were at work; `names` are in the order of clients."""
    numbers = sorted({one.client for one in timeline.computations})
    if len(numbers) != len(names):
        raise GaveUp(f"{len(numbers)} of {len(names)} clients were at work in the timeline")
    known = dict(zip(numbers, names, strict=True))
    ones = timeline.computations
    began_s = max(min(c.start_s for c in ones if c.client == number) for number in numbers)
    ended_s = min(max(c.end_s for c in ones if c.client == number) for number in numbers)
    shown = [
        Span("device", known[c.client], c.start_s, c.end_s)
        for c in ones
        if c.start_s >= began_s and c.end_s <= ended_s
    ]
    if not shown:
        raise GaveUp(f"the {len(names)} clients were not at work at the same time")
    return shown
