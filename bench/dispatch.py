"""The cost of a small computation: the paper's Figure 5.

A computation is one scalar all-reduce over all hosts, followed by a scalar addition. *Op by op* is
a client call for each; the client waits for every result (*blocking*) or only for the last.
*Chained* is a call of a `pw.program` with 128 of them. *Fused* is one computation that loops 128
times. The *local* cases have an addition instead of the all-reduce and show dispatch alone.
Multi-controller JAX has no chains: its processes run the same loop op by op.

For 16 to 512 hosts only the controller is measured: the daemon with modelled hosts (`bench.modelled`). The
model: clients, hosts and the all-reduce are as fast as they were on the most hosts that were measured, unless
the controller's event loop, which has more to do for more hosts, is slower.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

import pw
from bench import measure, report
from bench.baselines import jax_group, ray_actors, steps, xoscar_actors
from bench.modelled import ModelledCluster
from bench.placement import chain, new_mesh

CHAIN = 128
MODELLED_HOSTS = (16, 64, 256, 512)
MODELLED_DEVICES = 4
"""Of each modelled host, as in the paper's configuration A."""
MODELLED_CALLS = 600
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
MODELLED = {"pw: op by op": (1, 1), "pw: chained": (CHAIN, CHAIN), "pw: fused": (1, steps.FUSED)}
"""The nodes of a call's program, and the computations of a call."""


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
    # The samples of the most hosts are the last ones.
    modelled = _model(result, samples, hosts, (4, 8) if quick else MODELLED_HOSTS)
    with_all_reduce = _figure(result.rows, "with the all-reduce", local=False)
    result.figures = [
        replace(with_all_reduce, modelled=modelled),
        _figure(result.rows, "with a local addition", local=True),
    ]
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


def _model(
    result: report.Result,
    samples: Mapping[str, measure.Sample],
    measured: int,
    hosts: Sequence[int],
) -> report.Series:
    """Add rows of modelled hosts, and return their points; `samples` are those of the most measured hosts."""
    series: report.Series = {name: [] for name in MODELLED}
    for count in hosts:
        launch_s = {nodes: _launch_s(count, nodes) for nodes in (1, CHAIN)}
        for name, (nodes, computations) in MODELLED.items():
            rate = min(samples[name].median, computations / launch_s[nodes])
            params = {"hosts": count, "controller µs/call": round(launch_s[nodes] * 1e6)}
            baseline, reference = f"{measured} hosts", measure.Sample((samples[name].median,))
            result.add(
                f"{name}, modelled", params, measure.Sample((rate,)), "1/s", baseline, reference
            )
            series[name].append((count, rate))
    result.notes.append(
        f"modelled: {MODELLED_DEVICES} devices a host; the controller is the daemon itself, and its rate "
        "is that of the processor time of its event loop; all else is as fast as measured on "
        f"{measured} hosts"
    )
    return series


def _launch_s(hosts: int, nodes: int) -> float:
    """Processor time of the controller's event loop for a call, with many calls in flight."""
    with ModelledCluster(hosts, MODELLED_DEVICES, nodes=nodes) as cluster:
        cluster.launch(MODELLED_CALLS // 2)
        before = cluster.usage()
        cluster.launch(MODELLED_CALLS)
        return cluster.usage().since(before).loop_s / MODELLED_CALLS


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
    where = "1 host" if hosts == 1 else f"{hosts} hosts"

    def same(case: str, bounds: Mapping[str, float]) -> None:
        for name, bound in bounds.items():
            if (theirs := samples.get(f"{name}: {case}")) is not None:
                ratio = samples[f"pw: {case}"].over(theirs).median
                result.at_least(bound, ratio, f"{where}: {case}, to {name}")

    def bar(bound: float, ours: str, contenders: list[str], theirs: str) -> None:
        # Compare with their fastest way: on a small machine pipelining does not always help.
        ways = [f"{name}: {theirs}{how}" for name in contenders for how in ("", ", blocking")]
        known = [way for way in ways if way in samples]
        if known:
            ratio = min(samples[f"pw: {ours}"].over(samples[way]).median for way in known)
            result.at_least(bound, ratio, f"{where}: {ours}, to {' or '.join(contenders)}")

    bar(1.5 if hosts == 1 else 1.0, "local, op by op", ["Ray graph"], "local, op by op")
    if hosts > 1:
        bar(0.95 if hosts == 2 else 0.98, "chained", ["JAX"], "op by op")
        bar(0.98, "fused", ["JAX"], "fused")
        bar(2.0, "op by op", ["Ray", "xoscar"], "op by op")
    if hosts == 2:
        bar(0.7, "op by op", ["JAX"], "op by op")
        same("op by op, blocking", {"xoscar": 1.3, "JAX": 0.35})


def _figure(rows: Sequence[report.Row], title: str, *, local: bool) -> report.Figure:
    series: report.Series = {}
    for row in rows:
        if ("local" in row.name) == local and "modelled" not in row.name:
            label = row.name.replace("local, ", "")
            hosts = float(str(row.params["hosts"]))
            series.setdefault(label, []).append((hosts, row.sample.median))
    return report.Figure(title, "hosts", "computations per second", series, log_x=True, log_y=True)
