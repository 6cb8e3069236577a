"""Many clients on one cluster: what they get done together, and in which shares (the paper's figures 8 and 9).

Each client is a process of its own that calls `x = f(x)` on the same device, with many calls in flight; the
computations take about as long as the paper's. If the gang scheduler lost time in switching between clients, 16
of them would get less done than one. Under `--policy share`, clients of other weights run side by side, and
what counts is what each got done while all of them wanted the device; then clients that wait for their
results do the same, with weights and with priorities (`bench.waiting`). Then a client has a device of its own
on a host where others work as well: on another device, or on what comes from another island. Last, a client
asks for what has been ready for long, on a host whose only device another client keeps busy: no computation is
in its way.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import pw
from bench.baselines.peer import Peer
from bench.clients import per_second
from bench.measure import GaveUp, Sample, alternate, seconds
from bench.report import Bar, Figure, Result, Row, Series, rows
from bench.waiting import WAITING_MS, tell_waiting
from pw import LocalCluster

DURATIONS_MS = (0.04, 0.33, 2.4)
CLIENTS = (1, 2, 4, 8, 16)
READING_S = 0.5
"""About how long a reading takes."""
WEIGHTS: dict[str, tuple[int, ...]] = {"1:1:1:1": (1, 1, 1, 1), "1:2:4:8": (1, 2, 4, 8)}
SHARE_MS = 1.04
LONG_MS = 100.0
"""A computation of a neighbour's, on another device."""
OWN_CALLS = 500
CALLS = 600
"""Calls of a client of weight 1."""
FLOOD_MS = 28.0
"""A computation of a neighbour's, on the same device."""
FLOOD_CALLS = 60
READS = 40
"""How often a client asks for what is ready, in a reading."""
PAUSE_S = 0.01
"""Between two of them, so that they meet the neighbour's computations at all stages."""
WORDS = {"1 KB": 256, "1 MB": 262_144}


def run(quick: bool) -> Result:
    """Measure 1 to 16 clients in alternation, then four clients with weights."""
    result = Result("concurrent", "many clients on one device (paper: figures 8 and 9)")
    durations = DURATIONS_MS[:1] if quick else DURATIONS_MS
    steps = calibrated(tuple(dict.fromkeys((*durations, SHARE_MS, *WAITING_MS))))
    _tell_together(result, steps, durations, (1, 2) if quick else CLIENTS, 1 if quick else 4)
    weights: dict[str, tuple[int, ...]] = {"1:2": (1, 2)} if quick else WEIGHTS
    _tell_shares(result, steps[SHARE_MS], weights, CALLS)
    tell_waiting(result, steps, _started, quick=quick)
    _tell_neighbours(result, 1 if quick else 4)
    _tell_reads(result, quick)
    result.notes += [
        "every client is a process; one host with one device, because the device is what they share",
        "'JAX alone' is one process that has the device to itself, with no runtime in between",
    ]
    return result


def calibrated(durations_ms: tuple[float, ...]) -> dict[float, int]:
    """How many steps a computation needs to take so long here, in plain JAX."""
    few, many = 1_000, 100_000
    with Peer("JAX alone", "bench.clients", [["alone", str(few), str(many)]]) as alone:
        best = {n: min(alone.seconds(str(n), 200) / 200 for _ in range(3)) for n in (few, many)}
    per_step_s = (best[many] - best[few]) / (many - few)
    overhead_s = best[few] - few * per_step_s
    return {ms: max(1, round((ms * 1e-3 - overhead_s) / per_step_s)) for ms in durations_ms}


def _tell_together(
    result: Result,
    steps: dict[float, int],
    durations: tuple[float, ...],
    clients: tuple[int, ...],
    rounds: int,
) -> None:
    numbers = [str(steps[ms]) for ms in durations]
    with ExitStack() as stack:
        alone = stack.enter_context(Peer("JAX alone", "bench.clients", [["alone", *numbers]]))
        cluster = stack.enter_context(LocalCluster(connect=False))
        arguments = ["compute", cluster.address, *numbers]
        peers = _started(stack, [arguments] * clients[-1])
        pool = stack.enter_context(ThreadPoolExecutor(clients[-1]))
        series: Series = {}
        for ms, number in zip(durations, numbers, strict=True):
            count = max(64, min(4096, round(READING_S / ms * 1e3)))

            def together(case: str, size: int, count: int) -> float:
                share = -(-count // size)
                started = time.perf_counter()
                done = list(pool.map(lambda peer: peer.seconds(case, share), peers[:size]))
                with_first = share + max(1, share // 10)  # those that a peer does not count
                return with_first * len(done) / (time.perf_counter() - started)

            cases: dict[str, Callable[[], float]] = {
                "JAX alone": partial(per_second, alone, number, count)
            }
            for size in clients:
                cases[_name(size)] = partial(together, number, size, count)
            samples = alternate(cases, rounds=rounds)
            params: dict[str, object] = {"ms": ms}
            result.rows += rows(samples, unit="calls/s", params=params, baseline=_name(1))
            most = samples[_name(clients[-1])].over(samples[_name(1)]).median
            text = f"{clients[-1]} clients over one, computations of {ms} ms"
            result.bars.append(Bar(text, most, 1.0))
            series[f"{ms} ms"] = [(float(n), samples[_name(n)].median) for n in clients]
    result.figures.append(
        Figure("all clients together", "clients", "calls/s", series, log_x=True, log_y=True)
    )


def _name(clients: int) -> str:
    return f"{clients} client{'s' * (clients > 1)}"


def _started(stack: ExitStack, processes: list[list[str]]) -> list[Peer]:
    """Client processes, started two by two, since each imports JAX and compiles."""

    def start(arguments: list[str]) -> Peer:
        return Peer("a client", "bench.clients", [arguments])

    with ThreadPoolExecutor(2) as starters:
        return [stack.enter_context(peer) for peer in starters.map(start, processes)]


# --- neighbours -----------------------------------------------------------------------------------------


def _tell_neighbours(result: Result, rounds: int) -> None:
    """Calls on a device of one's own, while another client uses others of its host."""
    with ExitStack() as stack:
        cluster = stack.enter_context(LocalCluster(islands=2, devices_per_host=2, connect=False))
        arguments = [["own", cluster.address], ["beside", cluster.address, str(LONG_MS)]]
        mine, theirs = _started(stack, arguments)
        pool = stack.enter_context(ThreadPoolExecutor(1))

        def reading() -> float:
            started = time.perf_counter()
            mine.seconds("calls", OWN_CALLS)
            # With those that a peer does not count: they are the ones that would be held up.
            return 1.1 * OWN_CALLS / (time.perf_counter() - started)

        def beside(work: str) -> float:
            busy = pool.submit(theirs.seconds, work, 10)
            time.sleep(LONG_MS * 1e-3)
            found = reading()
            busy.result()
            return found

        cases: dict[str, Callable[[], float]] = {
            "alone on the host": reading,
            "beside long calls": partial(beside, "long calls"),
            "beside stages that wait": partial(beside, "stages"),
        }
        samples = alternate(cases, rounds=rounds)
    alone, *others = samples
    result.rows += rows(samples, unit="calls/s", baseline=alone)
    for name in others:
        ratio = samples[name].over(samples[alone]).median
        text = f"calls on a device of one's own {name}, over {alone}"
        result.bars.append(Bar(text, ratio, 0.5))


# --- what is ready --------------------------------------------------------------------------------------


class _Ask(NamedTuple):
    """Something that a client asks for again and again."""

    objects: Callable[[], Sequence[Any]]
    """What it asks about; made while the host has nothing else to do."""
    ask: Callable[[Any], object]

    def median_ms(self, objects: Sequence[Any], is_over: Callable[[], bool]) -> float:
        """How long one of them takes, among those that were asked about before it was over."""
        took_s = []
        for each in objects:
            took_s.append(seconds(partial(self.ask, each)))
            time.sleep(PAUSE_S)
            if is_over():
                break
        return statistics.median(took_s) * 1e3


def _tell_reads(result: Result, quick: bool) -> None:
    """Waits for ready arrays, reads of them, and puts, beside a client that floods their device."""
    with ExitStack() as stack:
        cluster = stack.enter_context(LocalCluster())
        (neighbour,) = _started(stack, [["flood", cluster.address, str(FLOOD_MS)]])
        pool = stack.enter_context(ThreadPoolExecutor(1))

        def alone(ask: _Ask) -> float:
            return ask.median_ms(ask.objects(), lambda: False)

        def beside(work: str, ask: _Ask) -> float:
            objects = ask.objects()
            busy = pool.submit(neighbour.seconds, work, FLOOD_CALLS)
            # Until those are over that a peer does not count, and many of the others are under way.
            time.sleep((FLOOD_CALLS / 10 + 10) * FLOOD_MS * 1e-3)
            found = ask.median_ms(objects, busy.done)
            busy.result()
            return found

        asks = _asks()
        cases: dict[str, Callable[[], float]] = {}
        for name, ask in asks.items():
            cases[f"{name}, alone"] = partial(alone, ask)
            cases[f"{name}, beside long calls"] = partial(beside, "long calls", ask)
        cases["wait, beside calls in line"] = partial(beside, "calls in line", asks["wait"])
        samples = alternate(cases, rounds=1 if quick else 3, warm_up=0 if quick else 1)
    for what in asks:
        mine = {name: sample for name, sample in samples.items() if name.startswith(f"{what}, ")}
        result.rows += rows(mine, unit="ms, median", baseline=f"{what}, alone")
        for name in list(mine)[1:]:
            text = f"of what is ready: {name}, in ms"
            result.bars.append(Bar(text, samples[name].median, 2.0, at_least=False))


def _asks() -> dict[str, _Ask]:
    mesh = pw.Mesh(pw.make_virtual_device_set().add_slice(devices=1).devices, ("x",))
    whole = pw.NamedSharding(mesh, pw.PartitionSpec())
    add = pw.jit(lambda x: x + 1, mesh=mesh)

    def ready(words: int) -> list[pw.Array]:
        """Arrays that exist, of which this client has heard nothing."""
        start = pw.put(np.zeros(words, np.float32), sharding=whole)
        made = [add(start) for _ in range(READS)]
        add(made[-1]).block_until_ready()  # the device computes in order
        return made

    return {
        "wait": _Ask(partial(ready, 256), lambda array: array.block_until_ready()),
        **{
            f"value of {size}": _Ask(partial(ready, words), np.asarray)
            for size, words in WORDS.items()
        },
        "put": _Ask(
            lambda: [np.float32(number) for number in range(READS)],
            lambda number: pw.put(number, sharding=whole).block_until_ready(),
        ),
    }


# --- shares ---------------------------------------------------------------------------------------------


def _tell_shares(
    result: Result, steps: int, weights: dict[str, tuple[int, ...]], calls: int
) -> None:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        cluster = stack.enter_context(LocalCluster(policy="share", connect=False))
        for name, shares in weights.items():
            with ExitStack() as clients:
                files = [folder / f"{name}-{index}.npy" for index in range(len(shares))]
                arguments = [
                    ["share", cluster.address, str(share), str(steps), str(file)]
                    for share, file in zip(shares, files, strict=True)
                ]
                peers = _started(clients, arguments)
                with ThreadPoolExecutor(len(peers)) as pool:
                    # Those of little weight are not waited for longer than the others take.
                    counts = [calls * share for share in shares]
                    list(pool.map(lambda peer, count: peer.seconds("calls", count), peers, counts))
            _tell_share(result, name, shares, [np.load(file) for file in files])


def _tell_share(
    result: Result, name: str, shares: tuple[int, ...], ends_s: list[np.ndarray[Any, Any]]
) -> None:
    """What each client got while all were there: from when the last came until the first had no more."""
    start_s = max(moments[0] for moments in ends_s)
    end_s = min(moments[-1] for moments in ends_s)
    within = [moments[(moments >= start_s) & (moments <= end_s)] for moments in ends_s]
    total = sum(map(len, within))
    if not total or end_s <= start_s:
        raise GaveUp("the clients with shares did not run side by side")
    for index, (share, moments) in enumerate(zip(shares, within, strict=True)):
        ideal = share / sum(shares)
        params: dict[str, object] = {"shares": name, "client": index, "ideal": f"{ideal:.3f}"}
        got = Sample((len(moments) / total,))
        result.rows.append(
            Row("part of the device", params, got, "", "ideal", got.over(Sample((ideal,))))
        )
    series: Series = {}
    for index, (share, moments) in enumerate(zip(shares, within, strict=True)):
        some = range(0, len(moments), max(1, len(moments) // 50))
        points = [((moments[i] - start_s) * 1e3, float(i)) for i in some]
        series[f"client {index}, weight {share}"] = points
    result.figures.append(Figure(f"weights {name}", "ms", "calls done", series))
