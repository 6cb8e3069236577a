"""What tracing costs, and the paper's pictures of devices over time, drawn from timelines (`pw.trace`).

- *cost*: calls of the smallest computation, one after the other, with and without a timeline. Small
  computations have the most records for each millisecond. The processor time of the client and the
  cluster is read as well, because other load hardly changes it.
- *shares* (figure 9): four clients of weights 1:2:4:8 on one device.
- *concurrency* (figure 11): 1 to 8 clients on one device.
- *pipeline* (figures 10 and 12): stages on islands of their own, with the transfers between them.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import numpy as np

import pw
from bench.baselines.steps import busy, calls, local
from bench.clients import started
from bench.concurrent import calibrated
from bench.measure import GaveUp, Sample, alternate, in_flight
from bench.placement import chain, new_mesh, put
from bench.processor import client_and_cluster_s
from bench.report import Chart, Result, Span
from pw.client.timeline.timeline import Timeline

CALL_MS = 2.4
"""A computation in the pictures."""
SHOWN_S = 0.1
"""The length of a picture."""
WATCHED_S = 2.0
"""The length of a timeline; the picture is from its middle."""
TENTHS = 40
"""How long the clients of a picture work, in tenths of a second, after a warm-up of a tenth of that."""
SETTLED_S = 1.5
"""When all of them are at work."""
WEIGHTS = (1, 2, 4, 8)
CLIENTS = (1, 4, 8)
STAGES = 4
WORDS = 1 << 18
"""Float32 numbers that a stage passes on: 1 MiB."""
SMALL_CALLS = 3000
WARM_UP = 1


def run(quick: bool) -> Result:
    """Measure the cost of tracing, then draw the pictures."""
    result = Result("timeline", "tracing on and off; timelines (paper: figures 9 to 12)")
    _cost(result, quick)
    steps = calibrated((CALL_MS,))[CALL_MS]
    pictures: tuple[Callable[[], None], ...] = (
        lambda: _shares(result, steps, WEIGHTS[:2] if quick else WEIGHTS),
        lambda: _concurrency(result, steps, CLIENTS[:1] if quick else CLIENTS),
        lambda: _pipeline(result, 2 if quick else STAGES),
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
    timeline = _tenants(steps, weights)
    name = ":".join(map(str, weights))
    spans = _of_clients(timeline, dict(enumerate(f"weight {weight}" for weight in weights)))
    result.charts.append(Chart(f"weights {name} (figure 9)", _shown(spans)))
    whole_s = sum(span.length_s for span in spans)
    for weight in weights:
        own_s = sum(span.length_s for span in spans if span.kind == f"weight {weight}")
        part = Sample((own_s / whole_s,))
        ideal = Sample((weight / sum(weights),))
        params = {"of": f"weight {weight} of {name}"}
        result.add("part of the device", params, part, "", "its weight", ideal)


def _concurrency(result: Result, steps: int, sizes: Sequence[int]) -> None:
    spans: list[Span] = []
    for size in sizes:
        timeline = _tenants(steps, (1,) * size)
        found = _of_clients(timeline, dict(enumerate(f"client {n + 1}" for n in range(size))))
        lasted_s = max(s.end_s for s in found) - min(s.start_s for s in found)
        used = Sample((sum(span.length_s for span in found) / lasted_s,))
        name = f"{size} client{'s' * (size > 1)}"
        result.add("device in use", {"of": name}, used, "of the time")
        spans += [span.in_row(name) for span in _shown(found)]
    result.charts.append(Chart("clients on one device (figure 11)", spans))


def _tenants(steps: int, weights: Sequence[int]) -> Timeline:
    """Return a timeline of clients that keep one device busy; their numbers are in the order of weights."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        cluster = stack.enter_context(pw.LocalCluster(policy="share"))
        pool = stack.enter_context(ThreadPoolExecutor(len(weights)))
        arguments = [
            ["tenant", cluster.address, str(weight), "0", str(folder / f"{index}.npy"), str(steps)]
            for index, weight in enumerate(weights)
        ]
        peers = [started(stack, [one])[0] for one in arguments]  # one after the other: in order
        ends = [pool.submit(peer.seconds, f"enqueue {steps}", TENTHS) for peer in peers]
        time.sleep(SETTLED_S)
        with pw.trace(None) as timeline:
            time.sleep(WATCHED_S)
        for end in ends:
            end.result()
    return timeline


def _pipeline(result: Result, stages: int) -> None:
    with pw.LocalCluster(islands=stages):
        functions = []
        for stage in range(stages):
            mesh = new_mesh(island=f"island-{stage}")
            functions.append(pw.jit(busy(20), devices=list(mesh.devices)))
        pipeline = chain(functions)
        start = np.zeros(WORDS, np.float32)
        pipeline(start).block_until_ready()
        with pw.trace(None) as timeline:
            in_flight(20, stages, lambda: pipeline(start), lambda x: x.block_until_ready())
    runs = {run: index for index, run in enumerate(sorted({c.run for c in timeline.computations}))}
    spans = [
        Span(f"{one.host}: device", f"run {runs[one.run] % 8}", one.start_s, one.end_s)
        for one in timeline.computations
    ]
    spans += [
        Span(f"{one.host}: in", f"run {runs[one.run] % 8}", one.start_s, one.end_s)
        for one in timeline.transfers
        if one.kind == "edge" and one.is_incoming and one.run in runs
    ]
    spans.sort(key=lambda span: span.row, reverse=True)
    title = f"a pipeline of {stages} stages on {stages} islands (figures 10, 12)"
    result.charts.append(Chart(title, _shown(spans)))
    for host in sorted({one.host for one in timeline.computations}):
        own_s = sum(c.end_s - c.start_s for c in timeline.computations if c.host == host)
        used = Sample((own_s / timeline.length_s,))
        result.add("device in use", {"of": f"stage on {host}"}, used, "of the time")


def _of_clients(timeline: Timeline, names: dict[int, str]) -> list[Span]:
    """Return the computations while all clients were at work; these names are in the order of clients."""
    numbers = sorted({one.client for one in timeline.computations})
    if len(numbers) != len(names):
        raise GaveUp(f"{len(numbers)} of {len(names)} clients were at work in the timeline")
    known = dict(zip(numbers, names.values(), strict=True))
    ones = timeline.computations
    began_s = max(min(c.start_s for c in ones if c.client == number) for number in numbers)
    ended_s = min(max(c.end_s for c in ones if c.client == number) for number in numbers)
    return [
        Span("device", known[c.client], c.start_s, c.end_s)
        for c in ones
        if c.start_s >= began_s and c.end_s <= ended_s
    ]


def _shown(spans: Sequence[Span]) -> list[Span]:
    """Return what is in the middle, for `SHOWN_S`."""
    if not spans:
        raise GaveUp("the timeline shows no computations")
    middle_s = (min(s.start_s for s in spans) + max(s.end_s for s in spans)) / 2
    first_s, last_s = middle_s - SHOWN_S / 2, middle_s + SHOWN_S / 2
    return [
        span.moved(-first_s) for span in spans if first_s < span.end_s and span.start_s < last_s
    ]
