"""Sixteen clients of three kinds on one device, of which four are killed with SIGKILL in the middle.

- *Training*: six clients always have work, one step after the other. Their parts of the device are looked at in
  all windows of two seconds.
- *Serving*: six clients get requests at random times (Poisson), at 0.9 of what their share of the device pays
  for. Each request has a deadline, from the moment at which it was due. Later answers count as missed.
- *Notebooks*: four clients call a few times at once, and do nothing in between.

Under `share` all get their shares, under `priority` clients that serve go first. The duration of computations
is modelled (`bench.many_clients`), because sixteen clients on two cores would measure the cores.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np

import pw
from bench.many_clients import Call, Client, ClientProcess, Work
from bench.measure import GaveUp, Sample
from bench.processor import busy_s, descendants, processes
from bench.report import Figure, Result, Series

TAKES_S = 0.01
"""Seconds of a computation."""
TRAINING = (1.0, 2.0, 2.0, 3.0, 1.0, 3.0)
SERVING = (2.0,) * 6
NOTEBOOKS = (1.0,) * 4
"""Shares of the clients of each kind. Some of the last ones are killed."""
KILLED = {"training": 2, "serving": 1, "notebook": 1}
LOAD = 0.9
DEADLINE_S = 1.0
DURATION_S = 30.0
IDLE_S = 10.0
CAPACITY_S = 4.0
WINDOW_S = 2.0
STEP_S = 0.1
SETTLE_S = 0.5
"""Seconds after the start that are not counted."""
NOTICE_S = 60.0
SHARE_BOUND, MET_BOUND, STARVED_BOUND_S, IDLE_BOUND = 0.05, 0.95, 1.25, 0.002

SETTLED_S = 5.0
"""Seconds after the start of the clients in which they are not idle yet."""
SAMPLE_S = 0.2

ON_HOSTS = ("live_bytes", "live_arrays", "requests_waiting", "uploads_arriving", "waiting")
AT_CONTROLLER = ("live_arrays", "runs_in_flight")
"""Counts of `pw.stats` that are 0 without clients."""

Amounts = Mapping[str, int]
Charges = tuple[float, dict[str, float]]
"""Moment of the monotonic clock, and the device time of each client so far, both in seconds."""


def run(quick: bool) -> Result:
    """Measure under each policy; quick: for a few seconds, under one."""
    result = Result("many", "sixteen clients: training, serving with deadlines, notebooks; kills")
    answers: Series = {}
    for policy in ("share",) if quick else ("share", "priority"):
        with ExitStack() as stack:
            answers[policy] = _under(result, policy, stack, quick)
    result.figures.append(
        Figure(
            "serving: requests answered, by policy",
            "s after they were due",
            "part of requests",
            answers,
        )
    )
    result.notes += [
        f"computations of {TAKES_S * 1e3:.0f} ms, which sleep on one device; requests at {LOAD} of the share "
        f"of the clients that serve, deadlines of {DEADLINE_S:g} s",
        "a computation that lasts for much longer has waited for a core; if one lasts for 0.1 s, no scheduler "
        "can divide two seconds within 0.05",
    ]
    return result


def _under(result: Result, policy: str, stack: ExitStack, quick: bool) -> list[tuple[float, float]]:
    """Measure under a policy; returns which part of requests had an answer after how many seconds."""
    lock = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "device"
    lock.touch()
    cluster = stack.enter_context(pw.LocalCluster(policy=policy, allow_python=True))
    idle_s, duration_s = (1.0, 6.0) if quick else (IDLE_S, DURATION_S)
    params = {"policy": policy}
    before, own_s = _amounts(cluster), _processor(cluster.pids, idle_s)
    rest = _rest(cluster)
    clients = _started(stack, str(cluster.address), policy, str(lock))
    full = _amounts(cluster)
    time.sleep(0.0 if quick else SETTLED_S)
    for what, roots, less in (
        ("an idle client: the cluster", cluster.pids, own_s),
        ("an idle client: its process", [one.process.pid for one in clients], 0.0),
    ):
        each = max(0.0, (_processor(roots, idle_s) - less) / len(clients))
        result.add(what, params, Sample((each,)), "of a core")
        result.at_most(IDLE_BOUND, each, f"{policy}: {what}, parts of a core")

    trainers = [one for one in clients if one.client.kind == "training"]
    capacity_s = 1.0 if quick else CAPACITY_S
    calls = _work(trainers, {}, capacity_s)
    per_s = sum(map(len, calls)) / capacity_s
    total = sum(one.client.share for one in clients)
    rates = {
        one: LOAD * per_s * one.client.share / total
        for one in clients
        if one.client.kind == "serving"
    }
    result.add("computations, training alone", params, Sample((per_s,)), "1/s")

    for one in clients:
        one.send(Work(time.monotonic() + duration_s, rates.get(one, 0.0)))
    start_s = time.monotonic()
    charged = _charged(start_s + duration_s / 2)
    killed = [one for kind, count in KILLED.items() for one in _of_kind(clients, kind)[-count:]]
    for one in killed:
        one.process.kill()
    left = [one for one in clients if one not in killed]
    noticed_s = _until(
        lambda: _amounts(cluster),
        {
            name: count + (full[name] - count) * len(left) // len(clients)
            for name, count in before.items()
        },
    )
    charged += _charged(start_s + duration_s)
    answered = {one: one.answer() for one in left}
    result.add("seconds until killed clients have left nothing", params, Sample((noticed_s,)), "s")
    if policy == "share":
        training = {one: answered[one] for one in left if one in trainers}
        add_shares(result, charged, training, duration_s / 2)
    _starvation(result, policy, start_s, answered)
    longest_s = max(call.lasted_s for calls in answered.values() for call in calls)
    result.add(f"longest computation, of {TAKES_S:g} s", params, Sample((longest_s,)), "s")
    took_s = [call.ended_s - call.due_s for one in rates if one in left for call in answered[one]]
    met = sum(one_s <= DEADLINE_S for one_s in took_s) / len(took_s)
    result.add("requests that meet their deadline", params | {"load": LOAD}, Sample((met,)), "")
    result.at_least(MET_BOUND, met, f"{policy}: part of the requests that meet their deadline")
    for one in left:
        one.send(None)
    _until(lambda: _amounts(cluster), before)
    left_behind = sum(abs(count - rest[name]) for name, count in _rest(cluster).items())
    result.at_most(0, left_behind, f"{policy}: bytes, arrays and requests of clients that are gone")
    took_s.sort()
    return [(s, (at + 1) / len(took_s)) for at, s in enumerate(took_s)][
        :: max(1, len(took_s) // 60)
    ]


def _started(stack: ExitStack, address: str, policy: str, lock: str) -> list[ClientProcess]:
    kinds = {"training": TRAINING, "serving": SERVING, "notebook": NOTEBOOKS}
    clients: list[ClientProcess] = []
    for kind, shares in kinds.items():
        for share in shares:
            priority = int(kind == "serving" and policy == "priority")
            client = Client(kind, share, priority, address, lock, TAKES_S, len(clients))
            clients.append(stack.enter_context(ClientProcess(client)))
    for one in clients:
        one.answer()
    return clients


def _of_kind(clients: Sequence[ClientProcess], kind: str) -> list[ClientProcess]:
    return [one for one in clients if one.client.kind == kind]


def _work(
    clients: Sequence[ClientProcess], rates: Mapping[ClientProcess, float], seconds: float
) -> list[list[Call]]:
    """Have clients work for so long; returns the calls of each."""
    until_s = time.monotonic() + seconds
    for one in clients:
        one.send(Work(until_s, rates.get(one, 0.0)))
    return [one.answer() for one in clients]


def _processor(pids: Sequence[int | None], seconds: float) -> float:
    """Return the part of a core that processes use while nothing happens."""
    roots = [pid for pid in pids if pid is not None]
    before_s = busy_s(roots)
    time.sleep(seconds)
    return (busy_s(roots) - before_s) / seconds


def _amounts(cluster: pw.LocalCluster) -> dict[str, int]:
    """Return what the cluster has of its clients, without the one that asks."""
    clients = [one for one in pw.status().clients if not one.is_me]
    stats = pw.stats()
    hosts = [counts for name, counts in stats.items() if name.startswith("island-")]
    owners = {owner.client for device in pw.memory().devices for owner in device.owners}
    return {
        "clients": len(clients),
        "slices": sum(one.slices for one in clients),
        "programs": stats["controller"]["programs"],
        "installed programs": sum(counts["installed"] for counts in hosts),
        "owners of memory": len(owners),
        "MiB of arrays": sum(counts["live_bytes"] for counts in hosts) >> 20,
        "processes": len(descendants(cluster.pids, processes())),
    }


def _rest(cluster: pw.LocalCluster) -> dict[str, int]:
    """Return what changes while clients work, and is 0 without clients."""
    stats = pw.stats()
    hosts = [counts for name, counts in stats.items() if name.startswith("island-")]
    held = {name: sum(counts[name] for counts in hosts) for name in ON_HOSTS}
    return held | {f"controller's {name}": stats["controller"][name] for name in AT_CONTROLLER}


def _until(amounts: Callable[[], Amounts], wanted: Amounts) -> float:
    """Wait until these amounts are there; returns the seconds. Raises GaveUp if they do not come."""
    start_s = time.monotonic()
    while (there := amounts()) != wanted:
        if time.monotonic() > start_s + NOTICE_S:
            apart = {n: (there[n], wanted[n]) for n in wanted if there[n] != wanted[n]}
            raise GaveUp(f"clients are gone, and there is more or less than should be: {apart}")
        time.sleep(0.05)
    return time.monotonic() - start_s


def _charged(until_s: float) -> list[Charges]:
    """Return, for moments until then, the device time that each client was charged with so far."""
    moments = []
    while (now_s := time.monotonic()) < until_s:
        moments.append((now_s, {one.name: one.use.device_s for one in pw.status().clients}))
        time.sleep(SAMPLE_S)
    return moments


def add_shares(
    result: Result,
    charged: Sequence[Charges],
    trainers: Mapping[ClientProcess, Sequence[Call]],
    killed_s: float,
) -> None:
    """Add the part of each client that trains of what all of them get, in any two seconds.

    Once of the device time that the scheduler has measured, and once of the calls that clients see end.
    """
    start_s, last_s = charged[0][0] + SETTLE_S, charged[-1][0]
    ends_s = {one: np.array([call.ended_s for call in calls]) for one, calls in trainers.items()}
    windows = [
        (first, next((other for other in charged if other[0] >= first[0] + WINDOW_S), charged[-1]))
        for first in charged
        if start_s <= first[0] <= last_s - WINDOW_S
    ]
    measured, seen = [], []
    for (first_s, before), (end_s, after) in windows:
        names = {one: _name_in(after, one.process.pid) for one in trainers}
        measured.append([after[name] - before[name] for name in names.values()])
        seen.append([((ends >= first_s) & (ends < end_s)).sum() for ends in ends_s.values()])
    dues = np.array([one.client.share for one in trainers])
    dues /= dues.sum()
    for what, amounts in (("device time", measured), ("calls", seen)):
        counts = np.array(amounts, float)
        parts = counts / counts.sum(axis=1, keepdims=True)
        for number, due in enumerate(map(float, dues)):
            params = {"client": number, "ideal": f"{due:.3f}"}
            ideal = Sample((due,) * len(parts))
            name = f"part of the {what} of all who train, in 2 s"
            result.add(name, params, Sample(tuple(parts[:, number].tolist())), "", "ideal", ideal)
        worst = float(np.abs(parts - dues).max())
        result.at_most(
            SHARE_BOUND, worst, f"share: largest error of a part of the {what} in any 2 s"
        )
        series = {
            f"client {number}, {due:.3f} is due": [
                (window[1][0] - charged[0][0], float(part[number]))
                for window, part in zip(windows, parts, strict=True)
            ]
            for number, due in enumerate(dues)
        }
        title = f"training: parts of the {what}; four clients killed at {killed_s:.0f} s"
        result.figures.append(Figure(title, "end of 2 s, in s", "part", series))


def _name_in(names: Iterable[str], pid: int | None) -> str:
    """Return the name of a client of this process."""
    return next(name for name in names if str(pid) in name)


def _starvation(
    result: Result, policy: str, start_s: float, answered: Mapping[ClientProcess, Sequence[Call]]
) -> None:
    """Add the longest time in which a client with calls in flight got no result, for each kind."""
    longest_s: dict[str, float] = {}
    for one, calls in answered.items():
        kind, before_s = one.client.kind, start_s
        for due_s, end_s, _ in calls:
            if due_s > start_s + SETTLE_S:
                waited_s = end_s - max(due_s, before_s)
                longest_s[kind] = max(longest_s.get(kind, 0.0), waited_s)
            before_s = end_s
    for kind, waited_s in longest_s.items():
        params = {"policy": policy, "kind": kind}
        result.add("longest time without progress", params, Sample((waited_s,)), "s")
    words = f"{policy}: longest time without progress of a client that has work, s"
    result.at_most(STARVED_BOUND_S, max(longest_s.values()), words)
