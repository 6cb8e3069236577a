"""From a client's call to its result, of a computation that adds one.

The paper has no such table; the blocking calls of its Figure 5 consist of such calls. A call
travels client → controller → host → client: three hops on a cluster, and two where the controller
runs in the client's process. The unit of comparison is a round trip over bare zmq between two
processes of this machine, measured in the same rounds, for each hop. A note compares with half a
round trip for each hop, the time of the messages alone.

Actor systems need one hop: their caller names the process that computes, and no scheduler is asked.
Calls of xoscar and Ray, and of Ray's compiled graphs, take turns with those of pw. So do those of a model
(`bench.baselines.line`), which has a runtime's duties and nothing between the calling thread and the hosts.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

import pw
from bench import measure, report
from bench.baselines import line, ray_actors, steps, xoscar_actors
from bench.baselines.echo import Echo
from bench.baselines.peer import Peer
from bench.other_clusters import over_tls, session
from bench.placement import new_mesh, put
from pw.client.connection import current

HOPS = {"cluster": 3, "embedded": 2}
ZMQ, JAX = "zmq round trip", "JAX in this process"
EXECUTE_THREAD = "on the execute thread"
ONE_BY_ONE = {
    "xoscar": (xoscar_actors.start, "local, op by op, blocking", 1.3),
    "Ray": (ray_actors.start, "local, op by op, blocking", 1.0),
    "Ray graph": (ray_actors.start, "graph: local, op by op, blocking", 0.3),
}
"""How each actor system starts, its case of calls that wait for their results, and the bar beside it."""
CALLS = "calls one by one"
LIMITED, SECURE, TWO = "device memory limited", "TLS on tcp", "two clients in turns"
"""A cluster of one host on which runs are admitted to memory, as on accelerators; one over TLS; and two clients
of one cluster, of which each makes `TURN` calls before it is the other's turn."""
VARIANTS = {LIMITED: 1.1, SECURE: 1.4, TWO: 1.5}
"""The bar on a call there, in parts of a call on a cluster."""
TURN = 100
READING_S = 0.25
"""About how long a reading of such calls takes."""
MODEL = {"blocking": 1.7, "pipelined": 2.0}
"""The cases of the model, and the bar on a call of pw in parts of the model's."""
MODEL_HOSTS = (1, 2, 4)
MODEL_ROUNDS = 7

Placed = tuple[Callable[[Any], Any], Any]
"""A function that adds one, and its argument, on a cluster."""


def run(quick: bool) -> report.Result:
    """Measure embedded and on a cluster of one host, beside others; quick: without the cluster."""
    calls, rounds = (20, 1) if quick else (300, 15)
    result = report.Result("latency", "microseconds from a client's call to its result")
    slow: dict[str, list[float]] = {}

    def case(name: str, call: Callable[[], object]) -> Callable[[], float]:
        call()
        slow[name] = []

        def reading() -> float:
            readings = [measure.seconds(call) * 1e6 for _ in range(calls)]
            slow[name].append(measure.percentile(readings, 99))
            return statistics.median(readings)

        return reading

    with contextlib.ExitStack() as stack:
        echo = stack.enter_context(Echo())
        placed = {"embedded": _placed()}  # before this process connects to another cluster
        stack.callback(pw.disconnect)
        if not quick:
            stack.enter_context(pw.LocalCluster())
            placed["cluster"] = _placed()
            variants = {TWO: [placed["cluster"], _second_client(stack)]}
            stack.enter_context(pw.LocalCluster(device_memory="1GiB"))
            variants[LIMITED] = [_placed()]
            stack.enter_context(over_tls())
            variants[SECURE] = [_placed()]
        local = jax.jit(steps.local)
        on_device = jax.device_put(np.float32(1))
        timed: dict[str, Callable[[], object]] = {
            ZMQ: echo.round_trip,
            JAX: lambda: local(on_device).block_until_ready(),
        }
        for where, (function, x) in placed.items():
            timed |= _calls(where, function, x)
        cases = {name: case(name, call) for name, call in timed.items()}
        blocking = {} if quick else _one_by_one(placed, variants, stack, result.notes)
        warm_up = 0 if quick else 1
        both = measure.alternate(
            cases | blocking, rounds=rounds, warm_up=warm_up, notes=result.notes
        )
    samples = {name: both[name] for name in cases}
    result.compare(samples, unit="µs, median", baseline=ZMQ)
    for where in placed:
        threaded = samples[f"pw, {where}, {EXECUTE_THREAD}"].over(samples[f"pw, {where}"])
        result.notes.append(
            f"{where}: {threaded.median:.3g} times as long on the host's execute thread"
        )
    tails = {name: measure.Sample(tuple(values[-rounds:])) for name, values in slow.items()}
    result.compare(tails, unit="µs, p99", baseline=ZMQ)
    for where in placed:
        hops = HOPS[where]
        ratio = samples[f"pw, {where}"].over(samples[ZMQ]).median / hops
        result.at_most(3.0, ratio, f"{where}: median over {hops} hops, a zmq round trip each")
        result.notes.append(
            f"{where}: {2 * ratio:.2g} times {hops} hops of half a zmq round trip each"
        )
    per_second = {name: both[name] for name in blocking if name in both}
    ours = f"{CALLS}, pw, cluster"
    result.compare(per_second, unit="1/s", baseline=ours)
    for name, (_, _, bound) in ONE_BY_ONE.items():
        if (theirs := f"{CALLS}, {name}") in per_second:
            ratio = per_second[ours].over(per_second[theirs]).median
            result.at_least(bound, ratio, f"cluster: {CALLS}, to those of {name}")
    if not quick:
        for name, bound in VARIANTS.items():
            ratio = per_second[ours].over(per_second[f"{CALLS}, pw, {name}"]).median
            result.at_most(bound, ratio, f"{name}: a call, to one of {CALLS} on a cluster")
        for hosts in MODEL_HOSTS:
            _beside_the_model(hosts, result)
    return result


def _beside_the_model(hosts: int, result: report.Result) -> None:
    """Calls of a function without a collective on as many hosts, here and in the model."""
    with line.start(hosts) as model, pw.LocalCluster(hosts_per_island=hosts, devices_per_host=1):
        mesh = new_mesh(hosts)
        split = pw.PartitionSpec("data")
        function = pw.jit(steps.local, mesh=mesh, in_shardings=split, out_shardings=split)
        x = pw.put(np.zeros(hosts, np.float32), sharding=pw.NamedSharding(mesh, split))
        timed: dict[str, Callable[[int], float]] = {}
        for kind in MODEL:
            timed[f"{kind}, model"] = model.timed(kind)
            timed[f"{kind}, pw"] = measure.timed(steps.calls(function, x, wait=kind == "blocking"))
        where = f"{hosts} host{'s' * (hosts > 1)}"
        cases = {
            f"{name}, {where}": measure.sized(each, reading_s=READING_S)
            for name, each in timed.items()
        }
        samples = measure.alternate(cases, rounds=MODEL_ROUNDS, notes=result.notes)
    for kind, bound in MODEL.items():
        theirs, ours = (f"{kind}, {whose}, {where}" for whose in ("model", "pw"))
        if theirs in samples:
            pair = {name: samples[name] for name in (theirs, ours)}
            result.compare(pair, unit="1/s", baseline=theirs)
            ratio = pair[theirs].over(pair[ours]).median
            result.at_most(bound, ratio, f"{where}: a {kind} call, to the model's")


def _one_by_one(
    placed: Mapping[str, Placed],
    variants: Mapping[str, list[Placed]],
    stack: contextlib.ExitStack,
    notes: list[str],
) -> dict[str, Callable[[], float]]:
    """Blocking calls a second: cases of pw, and of the actor systems that are installed."""
    peers: dict[Any, Peer] = {}
    timed: dict[str, Callable[[int], float]] = {}
    for name, (start, case, _) in ONE_BY_ONE.items():
        try:
            if start not in peers:
                peers[start] = stack.enter_context(start(1))
            timed[name] = peers[start].timed(case)
        except measure.GaveUp as error:
            notes.append(f"{name} was left out: {error}")
    for where, (function, x) in placed.items():
        timed[f"pw, {where}"] = measure.timed(steps.calls(function, x, wait=True))
    for name, clients in variants.items():
        timed[f"pw, {name}"] = measure.timed(
            _in_turns([steps.calls(*one, wait=True) for one in clients])
        )
    return {
        f"{CALLS}, {name}": measure.sized(each, reading_s=READING_S) for name, each in timed.items()
    }


def _in_turns(clients: list[Callable[[int], object]]) -> Callable[[int], object]:
    """A case of so many calls, `TURN` of each client in turn."""

    def case(count: int) -> None:
        for at in range(0, count, TURN):
            clients[at // TURN % len(clients)](min(TURN, count - at))

    return case


def _second_client(stack: contextlib.ExitStack) -> Placed:
    """The function and its argument in another session with the current cluster."""
    address = current.runtime().address
    assert address is not None
    stack.enter_context(session(address))
    return _placed()


def _placed() -> Placed:
    """The function and its argument on the current cluster."""
    mesh = new_mesh()
    return pw.jit(steps.local, mesh=mesh), put(np.float32(1), mesh)


def _calls(where: str, function: Callable[[Any], Any], x: Any) -> dict[str, Callable[[], object]]:
    # A host runs a computation with a branch on its execute thread, never on its event loop.
    branching = pw.jit(lambda y: jax.lax.cond(y < 0, jax.numpy.abs, steps.local, y))
    return {
        f"pw, {where}, {EXECUTE_THREAD}": lambda: branching(x).block_until_ready(),
        f"pw, {where}": lambda: function(x).block_until_ready(),
        f"pw, {where}, value": lambda: np.asarray(function(x)),
    }
