"""``python -m bench [NAME ...] [--quick] [--out DIR]``, or ``python -m bench table [DIR ...]`` (`bars.py`).

One benchmark runs in this process. Several run one after the other, each in a process of its own,
so that clusters, compiled code and JAX's settings of one do not change the readings of the next. A
benchmark that crashes or hangs is one line of the summary.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from rich.console import Console

from bench import bars, machine, report

# The benchmarks that run without a name, in this order, and their limits in seconds.
SUITE = {
    "startup": 180,
    "latency": 300,
    "dispatch": 420,
    "pipeline": 300,
    "smallest": 300,
    "concurrent": 900,
    "many": 420,
    "events": 180,
    "dashboard": 240,
    "stragglers": 240,
    "transfer": 300,
    "exchange": 180,
    "sharing": 180,
    "spill": 240,
    "moving": 240,
    "feeding": 240,
    "train": 420,
    "gateway": 600,
    "timeline": 300,
    "pipeline-train": 600,
    "stages": 600,
    "islands": 1200,
    "traces": 300,
    "control": 180,
    "moe": 300,
    "security": 120,
    "scale": 300,
}
BY_NAME_ONLY = {"gpu": 1200, "floods": 300}
LIMITS_S = SUITE | BY_NAME_ONLY
console = Console(width=None if sys.stdout.isatty() else 160, highlight=False)


def main(arguments: list[str] | None = None) -> int:
    """Run the named benchmarks; returns 0 unless one of them did not run."""
    parser = argparse.ArgumentParser(
        prog="python -m bench", description="Measure pw beside its baselines."
    )
    words = f"of: {', '.join(LIMITS_S)}; or table, and folders of results to store before"
    parser.add_argument("names", nargs="*", metavar="NAME", help=words)
    parser.add_argument(
        "--quick", action="store_true", help="a smoke run: its readings mean nothing"
    )
    parser.add_argument(
        "--out", type=Path, default=report.RESULTS, help="folder of the results (%(default)s)"
    )
    parser.add_argument(
        "--clients", type=int, help="the most clients of `concurrent`, in place of its own number"
    )
    options = parser.parse_args(arguments)
    if options.names[:1] == ["table"]:
        bars.write(list(map(Path, options.names[1:])))
        return 0
    for name in options.names:
        if name not in LIMITS_S:
            parser.error(f"there is no benchmark {name!r}; choose from {', '.join(LIMITS_S)}")
    if options.clients is not None and options.names != ["concurrent"]:
        parser.error("--clients is an option of `python -m bench concurrent`")
    names = options.names or list(SUITE)
    if len(names) == 1:
        module = importlib.import_module(f"bench.{names[0].replace('-', '_')}")
        more = {} if options.clients is None else {"clients": options.clients}
        console.print(f"  {duration(names[0], options.out)}; rows come as they are measured")
        run_and_write(partial(module.run, **more), quick=options.quick, out=options.out)
        return 0
    return run_each(names, quick=options.quick, out=options.out)


def duration(name: str, out: Path) -> str:
    """Say how long a benchmark takes: as the last time, or at most on the machine of the limits."""
    try:
        took_s = json.loads((out / f"{name}.json").read_text())["machine"]["took_s"]
    except (OSError, KeyError, ValueError):
        return f"{name} takes up to {LIMITS_S[name] / 60:.0f} minutes, and longer on a slow machine"
    return f"{name} took {took_s / 60:.1f} minutes the last time"


def run_and_write(run: Callable[[bool], report.Result], *, quick: bool, out: Path) -> None:
    """Run one benchmark in this process, print its result, and write NAME.json and its figures."""
    before, cores = machine.load(), machine.cores()
    units = machine.units()
    console.print(
        f"  here a bare zmq round trip takes {units['zmq_round_trip_us']:g} µs, and memory is copied at "
        f"{units['memcpy_gb_s']:g} GB/s"
    )
    described = machine.describe() | units | {"load_before": before}
    started = time.perf_counter()
    result = run(quick)
    described |= {"load_after": machine.load(), "took_s": round(time.perf_counter() - started, 1)}
    if quick:
        result.bars.clear()
        result.notes.append("a quick run: its readings mean nothing")
    if before[0] > cores / 2:
        result.notes.append(
            f"the load was {before[0]} on {cores} cores at the start: if not from the benchmark "
            "before this one, only ratios with narrow quartiles mean something"
        )
    report.show(result, console)
    report.write(result, described | {"quick": quick}, out)
    if result.figures or result.charts:
        try:
            from bench import plots
        except ImportError as error:
            console.print(f"  note: no figures, because {error}")
        else:
            plots.draw(result.name, result.figures, out)
            plots.draw_charts(result.charts, out)


def run_each(names: list[str], *, quick: bool, out: Path) -> int:
    """Run several benchmarks, each in a process of its own, and print all bars again at the end."""
    lines: list[str] = []
    failed = 0
    first = time.time()
    for name in names:
        began = time.time()
        error = _run_apart(name, quick=quick, out=out)
        console.print(f"  {name}: {time.time() - began:.0f} s\n")
        if error is not None:
            failed += 1
            lines.append(f"  {name} did not run: {error}")
            continue
        for bar in report.bars_of(json.loads((out / f"{name}.json").read_text())):
            lines.append(report.line(bar).replace(": ", f": {name}: ", 1))
    console.print("\n".join(["bars:", *lines]), markup=False)
    console.print(f"  all: {(time.time() - first) / 60:.0f} minutes")
    return 1 if failed else 0


def _run_apart(name: str, *, quick: bool, out: Path) -> str | None:
    """Run one benchmark in a process group of its own; returns an error text, or None."""
    command = [sys.executable, "-m", "bench", name, "--out", str(out)]
    process = subprocess.Popen([*command, *(["--quick"] if quick else [])], start_new_session=True)
    try:
        code = process.wait(LIMITS_S[name])
    except subprocess.TimeoutExpired:
        return f"it took more than {LIMITS_S[name]} s"
    finally:
        # Its baselines and workers too, since they would disturb the next benchmark.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return None if code == 0 else f"it ended with {code}"


if __name__ == "__main__":
    sys.exit(main())
