"""How clients divide one device that all of them want: by weights and by priorities.

Every client is a process that calls one function on the same device. A client that only enqueues
has as many calls in flight as the runtime lets it. Clients that wait have 1 or 200 calls in flight,
and wait for the oldest before the next. A client's part is counted from the ends of its own calls,
as it sees them; all of them together are compared with the fastest client alone.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from bench.baselines.peer import Peer
from bench.clients import started
from bench.measure import GaveUp, Sample
from bench.report import Figure, Params, Result, Series
from pw import LocalCluster

SHARE_MS = 1.04
"""A computation of the clients that only enqueue, as in the paper's figure 9."""
WAITING_MS = (0.33, 2.4, 28.0)
WINDOW_S = 2.0
STEP_S = 0.1
SETTLE_S = 0.3
"""The time after the start of the last client that is not counted."""
TOGETHER_TENTHS = 40
"""How long clients work side by side, in tenths of a second."""
ALONE_TENTHS = 12

Moments = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Claims:
    """Clients that share a device: their weights and priorities, and the part due to each."""

    name: str
    policy: str
    weights: tuple[int, ...]
    priorities: tuple[int, ...]
    due: tuple[float, ...]

    @classmethod
    def by_weight(cls, *weights: int) -> Self:
        """Clients of these weights and equal priorities."""
        due = tuple(weight / sum(weights) for weight in weights)
        name = f"weights {':'.join(map(str, weights))}"
        return cls(name, "share", weights, (0,) * len(weights), due)


ENQUEUING = (Claims.by_weight(1, 1, 1, 1), Claims.by_weight(1, 2, 4, 8))
WAITING = (
    Claims.by_weight(1, 4),
    Claims.by_weight(1, 2, 4, 8),
    Claims("priorities 0, 9", "priority", (1, 1), (0, 9), (0.0, 1.0)),
)
KINDS = ("wait-1", "wait-200", "enqueue")
WAYS: dict[str, Callable[[int], tuple[str, ...]]] = {
    "1 in flight": lambda clients: ("wait-1",) * clients,
    "200 in flight": lambda clients: ("wait-200",) * clients,
    "the first only enqueues": lambda clients: ("enqueue",) + ("wait-1",) * (clients - 1),
}
"""The kind of each client (see `bench.clients.tenant`), for a number of clients."""


class Tenants:
    """The processes of some claims, on a cluster of one host with one device."""

    def __init__(self, claims: Claims, steps: Sequence[int], stack: ExitStack) -> None:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        cluster = stack.enter_context(LocalCluster(policy=claims.policy, connect=False))
        self._files = [folder / f"{index}.npy" for index in range(len(claims.weights))]
        own = zip(claims.weights, claims.priorities, self._files, strict=True)
        numbers = list(map(str, steps))
        self._peers: list[Peer] = started(
            stack,
            [["tenant", cluster.address, *map(str, arguments), *numbers] for arguments in own],
        )

    def together(self, kinds: Sequence[str], steps: int, tenths: int) -> list[Moments]:
        """The times at which the calls of each client ended."""
        with ThreadPoolExecutor(len(kinds)) as pool:
            cases = [f"{kind} {steps}" for kind in kinds]
            clients = zip(self._peers, cases, strict=False)
            list(pool.map(lambda client: client[0].seconds(client[1], tenths), clients))
        return [np.load(file) for file in self._files[: len(kinds)]]

    def alone(self, kind: str, steps: int) -> float:
        """Calls a second of the first client alone."""
        (ends_s,) = self.together([kind], steps, ALONE_TENTHS)
        return float((len(ends_s) - 1) / (ends_s[-1] - ends_s[0]))


def enqueuing(result: Result, steps: dict[float, int], *, quick: bool) -> None:
    """Add rows and figures of clients that only enqueue; `steps` has those of a duration in ms."""
    for claims in (Claims.by_weight(1, 2),) if quick else ENQUEUING:
        with ExitStack() as stack:
            tenants = Tenants(claims, [steps[SHARE_MS]], stack)
            kinds = ("enqueue",) * len(claims.weights)
            ends_s = tenants.together(kinds, steps[SHARE_MS], 10 if quick else TOGETHER_TENTHS)
        start_s, end_s = _side_by_side(ends_s)
        if end_s <= start_s:
            raise GaveUp("the clients with shares did not run side by side")
        params: Params = {"clients": claims.name, "ms": SHARE_MS}
        _add_parts(result, claims, params, "part of the device", [_parts(ends_s, start_s, end_s)])
        series: Series = {}
        for index, (weight, moments) in enumerate(zip(claims.weights, ends_s, strict=True)):
            within = moments[(moments >= start_s) & (moments <= end_s)]
            some = range(0, len(within), max(1, len(within) // 50))
            points = [((within[at] - start_s) * 1e3, float(at)) for at in some]
            series[f"client {index}, weight {weight}"] = points
        result.figures.append(Figure(claims.name, "ms", "calls done", series))


def waiting(result: Result, steps: dict[float, int], *, quick: bool) -> None:
    """Add rows of clients that wait for their results; `steps` has those of a duration in ms."""
    durations_ms = WAITING_MS[1:2] if quick else WAITING_MS
    for claims in WAITING[:1] if quick else WAITING:
        with ExitStack() as stack:
            tenants = Tenants(claims, [steps[ms] for ms in durations_ms], stack)
            for ms in durations_ms:
                alone = {kind: tenants.alone(kind, steps[ms]) for kind in KINDS}
                for way, kinds_of in WAYS.items():
                    kinds = kinds_of(len(claims.weights))
                    ends_s = tenants.together(kinds, steps[ms], TOGETHER_TENTHS)
                    fastest = max(alone[kind] for kind in kinds)
                    _add_way(result, claims, ms, way, ends_s, fastest)


def _add_way(
    result: Result, claims: Claims, ms: float, way: str, ends_s: Sequence[Moments], alone: float
) -> None:
    start_s, end_s = _side_by_side(ends_s)
    start_s += SETTLE_S
    if claims.policy == "priority":  # the client of low priority may end no call for a second
        end_s = max(end_s, max(moments[-1] for moments in ends_s) - 1.0)
    about = f"{claims.name}, {way}, computations of {ms} ms"
    if end_s < start_s + WINDOW_S:
        result.notes.append(f"{about}: they did not work side by side for long enough")
        return
    starts_s = np.arange(start_s, end_s - WINDOW_S, STEP_S)
    parts = [_parts(ends_s, at, at + WINDOW_S) for at in starts_s]
    params: Params = {"clients": claims.name, "way": way, "ms": ms}
    name = "part of the device in 2 s"
    worst = _add_parts(result, claims, params, name, parts or [_parts(ends_s, start_s, end_s)])
    result.at_most(0.05, worst, f"the largest error of a client's part in any 2 s: {about}")
    done = sum(int(count) for count in _counts(ends_s, start_s, end_s)) / (end_s - start_s)
    whole, fastest = Sample((done,)), Sample((alone,))
    result.add("all together", params, whole, "calls/s", "the fastest alone", fastest)
    result.at_least(0.9, done / alone, f"all together over the fastest alone: {about}")


def _add_parts(
    result: Result, claims: Claims, params: Params, name: str, parts: Sequence[Moments]
) -> float:
    """Add a row for each client; returns the largest difference from the part due to a client."""
    worst = 0.0
    for index, due in enumerate(claims.due):
        part = Sample(tuple(float(clients[index]) for clients in parts))
        worst = max(worst, *(abs(value - due) for value in part.values))
        own = {**params, "client": index, "ideal": f"{due:.3f}"}
        ideal = Sample((due,) * len(parts)) if due else None
        result.add(name, own, part, "", "ideal", ideal)
    return worst


def _side_by_side(ends_s: Sequence[Moments]) -> tuple[float, float]:
    """From the first end of the last client's calls to the last end of the first client's calls."""
    start_s = max(moments[0] for moments in ends_s)
    return float(start_s), float(min(moments[-1] for moments in ends_s))


def _counts(ends_s: Sequence[Moments], start_s: float, end_s: float) -> Moments:
    return np.array([((at >= start_s) & (at < end_s)).sum() for at in ends_s], float)


def _parts(ends_s: Sequence[Moments], start_s: float, end_s: float) -> Moments:
    """Each client's part of the calls that ended in a window."""
    counts = _counts(ends_s, start_s, end_s)
    if not counts.any():
        raise GaveUp("no call ended within two seconds")
    parts: Moments = counts / counts.sum()
    return parts
