"""The cost of a small computation: the paper's Figure 5.

A computation is one scalar all-reduce over all hosts, followed by a scalar addition. *Op by op* is
a client call for each; the client waits for every result (*blocking*) or only for the last.
*Chained* is a call of a `pw.program` with 128 of them. *Fused* is one computation that loops 128
times. The *local* cases have an addition instead of the all-reduce and show dispatch alone.
Multi-controller JAX has no chains: its processes run the same loop op by op.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np

import pw
from bench import measure, report
from bench.baselines import jax_group, ray_actors, steps, xoscar_actors
from bench.placement import chain, new_mesh

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
        _add_rows(result, samples, hosts)
        _add_bars(result, samples, hosts)
    for local, title in ((False, "with the all-reduce"), (True, "with a local addition")):
        result.figures.append(_figure(result.rows, title, local))
    return result


def ours(hosts: int) -> dict[str, Callable[[int], object]]:
    """The cases on the current cluster; a count is of computations."""
    mesh = new_mesh(hosts, axis=steps.AXIS)
    split = pw.NamedSharding(mesh, pw.PartitionSpec(steps.AXIS))
    zeros = pw.put(np.zeros(hosts, np.float32), sharding=split)

    def compiled(step: Step) -> Any:
        return pw.jit(steps.together(step), in_shardings=split, out_shardings=split)

    def case(step: Step, computations: int = 1, *, wait: bool = False) -> Callable[[int], object]:
        assert np.asarray(step(step(zeros)))[0] == 2 * computations, "the result is wrong"
        return steps.calls(step, zeros, computations, wait=wait)

    all_reduce, local = compiled(steps.all_reduce), compiled(steps.local)
    return {
        "op by op, blocking": case(all_reduce, wait=True),
        "op by op": case(all_reduce),
        "chained": case(chain([all_reduce] * CHAIN), CHAIN),
        "fused": case(compiled(steps.all_reduce_fused), steps.FUSED),
        "local, op by op, blocking": case(local, wait=True),
        "local, op by op": case(local),
        "local, chained": case(chain([local] * CHAIN), CHAIN),
    }


def _measure(
    hosts: int, quick: bool, stack: contextlib.ExitStack, notes: list[str]
) -> dict[str, measure.Sample]:
    """The readings of all contenders, by "contender: case"."""

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
            # The cases of Ray's compiled graphs are called "graph: ...".
            key = f"{peer.name} {name}" if ": " in name else f"{peer.name}: {name}"
            cases[key] = sized(name, peer.timed(name))
    stack.enter_context(pw.LocalCluster(hosts_per_island=hosts))
    for name, work in ours(hosts).items():
        cases[f"pw: {name}"] = sized(name, measure.timed(work))
    rounds, warm_up = (1, 0) if quick else (7, 1)
    return measure.alternate(cases, rounds=rounds, warm_up=warm_up, notes=notes)


def _add_rows(result: report.Result, samples: dict[str, measure.Sample], hosts: int) -> None:
    """Add each case beside the same of multi-controller JAX."""
    for name in sorted(samples, key=_order):
        contender, case = name.split(": ")
        baseline = "JAX: " + case.replace("chained", "op by op")
        reference = samples.get(baseline) if contender != "JAX" else None
        result.add(name, {"hosts": hosts}, samples[name], "1/s", baseline, reference)


def _order(name: str) -> tuple[int, int]:
    contender, case = name.split(": ")
    return CASES.index(case), ("pw", "JAX", "Ray graph", "Ray", "xoscar").index(contender)


def _add_bars(result: report.Result, samples: dict[str, measure.Sample], hosts: int) -> None:
    def bar(bound: float, ours: str, contenders: list[str], theirs: str) -> None:
        # Compare with their fastest way: on a small machine pipelining does not always help.
        ways = [f"{name}: {theirs}{how}" for name in contenders for how in ("", ", blocking")]
        known = [way for way in ways if way in samples]
        if known:
            ratio, best = min(
                (samples[f"pw: {ours}"].over(samples[way]).median, way) for way in known
            )
            where = "1 host" if hosts == 1 else f"{hosts} hosts"
            result.at_least(bound, ratio, f"{where}: {ours}, to {best}")

    bar(1.0, "local, op by op", ["Ray graph"], "local, op by op")
    if hosts > 1:
        bar(0.95, "chained", ["JAX"], "op by op")
        bar(0.98, "fused", ["JAX"], "fused")
        bar(2.0, "op by op", ["Ray", "xoscar"], "op by op")


def _figure(rows: list[report.Row], title: str, local: bool) -> report.Figure:
    series: report.Series = {}
    for row in rows:
        if ("local" in row.name) == local:
            label = row.name.replace("local, ", "")
            hosts = float(str(row.params["hosts"]))
            series.setdefault(label, []).append((hosts, row.sample.median))
    return report.Figure(title, "hosts", "computations per second", series, log_x=True, log_y=True)
