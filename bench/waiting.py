"""Clients that wait for their results, beside one another and beside one that only enqueues: what each gets.

Every client is a process that calls one function again and again on the same device. One that waits has 1 or
200 calls in flight and waits for the oldest before the next; one that only enqueues has as many as the runtime
lets in. What counts is what each got in every 2 s, as it sees the ends of its own calls, and what all got
together beside the fastest of them alone.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.baselines.peer import Peer
from bench.measure import GaveUp, Sample
from bench.report import Bar, Result, Row
from pw import LocalCluster

WAITING_MS = (0.33, 2.4, 28.0)
WINDOW_S = 2.0
STEP_S = 0.1
SETTLE_S = 0.3
"""After the last client has begun, before anything counts."""
TOGETHER_TENTHS = 40
"""How long clients work side by side, in tenths of a second."""
ALONE_TENTHS = 12

Moments = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Claims:
    """Clients that share a device: their weights and priorities, and what is due to each."""

    name: str
    policy: str
    weights: tuple[int, ...]
    priorities: tuple[int, ...]
    due: tuple[float, ...]


CLAIMS = (
    Claims("weights 1:4", "share", (1, 4), (0, 0), (0.2, 0.8)),
    Claims("weights 1:2:4:8", "share", (1, 2, 4, 8), (0,) * 4, (1 / 15, 2 / 15, 4 / 15, 8 / 15)),
    Claims("priorities 0, 9", "priority", (1, 1), (0, 9), (0.0, 1.0)),
)
WAYS: dict[str, Callable[[int], tuple[str, ...]]] = {
    "1 in flight": lambda clients: ("wait-1",) * clients,
    "200 in flight": lambda clients: ("wait-200",) * clients,
    "the first only enqueues": lambda clients: ("enqueue",) + ("wait-1",) * (clients - 1),
}
"""What each of so many clients does (see `bench.clients.tenant`)."""


def tell_waiting(
    result: Result,
    steps: dict[float, int],
    start: Callable[[ExitStack, list[list[str]]], list[Peer]],
    *,
    quick: bool,
) -> None:
    """Add the rows; `start` starts client processes, `steps` are those of a computation by its ms."""
    for claims in CLAIMS[:1] if quick else CLAIMS:
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            cluster = stack.enter_context(LocalCluster(policy=claims.policy, connect=False))
            durations = WAITING_MS[1:2] if quick else WAITING_MS
            numbers = {ms: str(steps[ms]) for ms in durations}
            files = [folder / f"{index}.npy" for index in range(len(claims.weights))]
            who = zip(claims.weights, claims.priorities, files, strict=True)
            arguments = [
                [
                    "tenant",
                    cluster.address,
                    str(weight),
                    str(priority),
                    str(file),
                    *numbers.values(),
                ]
                for weight, priority, file in who
            ]
            peers = start(stack, arguments)
            for ms, number in numbers.items():
                alone = {}
                for kind in ("wait-1", "wait-200", "enqueue"):
                    peers[0].seconds(f"{kind} {number}", ALONE_TENTHS)
                    moments = np.load(files[0])
                    alone[kind] = (len(moments) - 1) / (moments[-1] - moments[0])
                for way, kinds in WAYS.items():
                    cases = [f"{kind} {number}" for kind in kinds(len(peers))]
                    with ThreadPoolExecutor(len(peers)) as pool:
                        asked = [
                            pool.submit(peer.seconds, case, TOGETHER_TENTHS)
                            for peer, case in zip(peers, cases, strict=True)
                        ]
                        for one in asked:
                            one.result()
                    fastest = max(alone[kind] for kind in kinds(len(peers)))
                    _tell(result, claims, ms, way, [np.load(file) for file in files], fastest)


def _tell(
    result: Result, claims: Claims, ms: float, way: str, ends_s: Sequence[Moments], alone: float
) -> None:
    start_s = max(moments[0] for moments in ends_s) + SETTLE_S
    end_s = min(moments[-1] for moments in ends_s)
    if claims.policy == "priority":  # the least important one may end with nothing for a second
        end_s = max(end_s, max(moments[-1] for moments in ends_s) - 1.0)
    about = f"{claims.name}, {way}, computations of {ms} ms"
    if end_s < start_s + WINDOW_S:
        result.notes.append(f"{about}: they were not side by side for long enough")
        return
    windows = [
        _shares(ends_s, at, at + WINDOW_S) for at in np.arange(start_s, end_s - WINDOW_S, STEP_S)
    ] or [_shares(ends_s, start_s, end_s)]
    params: dict[str, object] = {"clients": claims.name, "way": way, "ms": ms}
    worst = 0.0
    for index, due in enumerate(claims.due):
        got = Sample(tuple(float(shares[index]) for shares in windows))
        worst = max(worst, *(abs(value - due) for value in got.values))
        own = params | {"client": index, "ideal": f"{due:.3f}"}
        result.rows.append(Row("part of the device in 2 s", own, got, ""))
    result.bars.append(
        Bar(f"the furthest from its ideal part in any 2 s: {about}", worst, 0.05, at_least=False)
    )
    done = sum(int(((at >= start_s) & (at < end_s)).sum()) for at in ends_s) / (end_s - start_s)
    whole = Sample((done,))
    ratio = whole.over(Sample((alone,)))
    result.rows.append(Row("all together", params, whole, "calls/s", "the fastest alone", ratio))
    result.bars.append(Bar(f"all together over the fastest alone: {about}", ratio.median, 0.9))


def _shares(ends_s: Sequence[Moments], start_s: float, end_s: float) -> Moments:
    counts = np.array([((at >= start_s) & (at < end_s)).sum() for at in ends_s], float)
    if not counts.any():
        raise GaveUp("nothing was done for two seconds")
    shares: Moments = counts / counts.sum()
    return shares
