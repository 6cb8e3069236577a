"""What it costs to have a small computation run: the paper's Figure 5.

A computation is one scalar all-reduce over all hosts, followed by a scalar addition. *Op by op* is a client
call for each, waiting for every result (*blocking*) or only for the last; *chained* is a call of a `pw.program`
with 128 of them; *fused* is one computation that loops 128 times. The same with a local addition instead of the
all-reduce (*local*) shows bare dispatch. Multi-controller JAX has no chains: its processes run the same loop op
by op.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
from jax.sharding import PartitionSpec as P

import pw
from bench import measure, report
from bench.baselines import jax_group, ray_actors, steps, xoscar_actors

CHAIN = 128
Step = Callable[[Any], Any]

CASES = (
    "op by op, blocking",
    "op by op",
    "chained",
    "fused",
    "local, op by op, blocking",
    "local, op by op",
    "local, chained",
)


def run(quick: bool) -> report.Result:
    """Measure on 1, 2 and 4 hosts; actor systems on 1 and 2."""
    result = report.Result(
        "dispatch", "computations per second, scalar all-reduce and addition (paper: Figure 5)"
    )
    for hosts in (1,) if quick else (1, 2, 4):
        with contextlib.ExitStack() as stack:
            samples = _measure(hosts, quick, stack, result.notes)
        result.rows += _rows(samples, hosts)
        result.bars += _bars(samples, hosts)
    for local, title in ((False, "with the all-reduce"), (True, "with a local addition")):
        result.figures.append(_figure(result.rows, title, local))
    return result


def ours(hosts: int) -> dict[str, Callable[[int], object]]:
    """The cases on the cluster that this process is connected to; a count is of computations."""
    mesh = pw.Mesh(pw.make_virtual_device_set().add_slice(devices=hosts).devices, (steps.AXIS,))
    split = pw.NamedSharding(mesh, P(steps.AXIS))

    def compiled(step: Step) -> Any:
        return pw.jit(steps.together(step), in_shardings=split, out_shardings=split)

    def chained(step: Step) -> Any:
        @pw.program
        def chain(x: Any) -> Any:
            for _ in range(CHAIN):
                x = step(x)
            return x

        return chain

    def case(step: Step, computations: int = 1, *, wait: bool = False) -> Callable[[int], object]:
        zeros = pw.put(np.zeros(hosts, np.float32), sharding=split)
        assert np.asarray(step(step(zeros)))[0] == 2 * computations, "it computes something else"
        state = [zeros]

        def work(count: int) -> None:
            x = state.pop()
            for _ in range(-(-count // computations)):
                x = step(x)
                if wait:
                    x.block_until_ready()
            state.append(x.block_until_ready())

        return work

    all_reduce, local = compiled(steps.all_reduce), compiled(steps.local)
    return {
        "op by op, blocking": case(all_reduce, wait=True),
        "op by op": case(all_reduce),
        "chained": case(chained(all_reduce), CHAIN),
        "fused": case(compiled(steps.all_reduce_fused), steps.FUSED),
        "local, op by op, blocking": case(local, wait=True),
        "local, op by op": case(local),
        "local, chained": case(chained(local), CHAIN),
    }


def _measure(
    hosts: int, quick: bool, stack: contextlib.ExitStack, notes: list[str]
) -> dict[str, measure.Sample]:
    """The readings of all contenders on so many hosts, by "contender: case"."""

    def sized(name: str, timed: Callable[[int], float]) -> Callable[[], float]:
        at_once = CHAIN if "chained" in name or "fused" in name else 1
        return measure.sized(timed, reading_s=0.01 if quick else 0.25, multiple_of=at_once)

    cases: dict[str, Callable[[], float]] = {}
    for start in (
        jax_group.start,
        *((ray_actors.start, xoscar_actors.start) if hosts <= 2 and not quick else ()),
    ):
        try:
            peer = stack.enter_context(start(hosts))
        except measure.GaveUp as error:
            notes.append(f"{hosts} hosts: {error}")
            continue
        for name in peer.cases:
            # "graph: ..." are the cases of Ray's compiled graphs.
            key = f"{peer.name} {name}" if ": " in name else f"{peer.name}: {name}"
            cases[key] = sized(name, peer.timed(name))
    stack.enter_context(pw.LocalCluster(hosts_per_island=hosts))
    for name, work in ours(hosts).items():
        cases[f"pw: {name}"] = sized(name, measure.timed(work))
    rounds, warm_up = (1, 0) if quick else (7, 1)
    return measure.alternate(cases, rounds=rounds, warm_up=warm_up, notes=notes)


def _rows(samples: dict[str, measure.Sample], hosts: int) -> list[report.Row]:
    """Each case beside multi-controller JAX doing the same."""
    rows = []
    for name in sorted(samples, key=_order):
        contender, case = name.split(": ")
        baseline = "JAX: " + case.replace("chained", "op by op")
        apart = contender != "JAX" and baseline in samples
        rows.append(
            report.Row(
                name=name,
                params={"hosts": hosts},
                sample=samples[name],
                unit="1/s",
                baseline=baseline if apart else None,
                ratio=samples[name].over(samples[baseline]) if apart else None,
            )
        )
    return rows


def _order(name: str) -> tuple[int, int]:
    contender, case = name.split(": ")
    return CASES.index(case), ("pw", "JAX", "Ray graph", "Ray", "xoscar").index(contender)


def _bars(samples: dict[str, measure.Sample], hosts: int) -> list[report.Bar]:
    def bar(bound: float, ours: str, contenders: list[str], theirs: str) -> list[report.Bar]:
        # Compare with their fastest way: on a small machine pipelining does not always help.
        ways = [f"{name}: {theirs}{how}" for name in contenders for how in ("", ", blocking")]
        known = [way for way in ways if way in samples]
        if not known:
            return []
        ratio, best = min((samples[f"pw: {ours}"].over(samples[way]).median, way) for way in known)
        where = "1 host" if hosts == 1 else f"{hosts} hosts"
        return [report.Bar(f"{where}: {ours}, to {best}", ratio, bound)]

    bars = bar(1.0, "local, op by op", ["Ray graph"], "local, op by op")
    if hosts > 1:
        bars += bar(0.95, "chained", ["JAX"], "op by op")
        bars += bar(0.98, "fused", ["JAX"], "fused")
        bars += bar(2.0, "op by op", ["Ray", "xoscar"], "op by op")
    return bars


def _figure(rows: list[report.Row], title: str, local: bool) -> report.Figure:
    series: report.Series = {}
    for row in rows:
        if ("local" in row.name) == local:
            label = row.name.replace("local, ", "")
            hosts = float(str(row.params["hosts"]))
            series.setdefault(label, []).append((hosts, row.sample.median))
    return report.Figure(title, "hosts", "computations per second", series, log_x=True, log_y=True)
