"""``python -m bench [NAME ...] [--quick] [--out DIR]``.

A single benchmark runs here; several run one after the other, each in a process of its own: what one leaves
behind (clusters, compiled code, a JAX that was told how many devices it has) cannot touch the next one's
readings, and one that crashes or hangs is a line in the summary.
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
from pathlib import Path

from rich.console import Console

from bench import machine, report

# What runs without a name, in this order, and for how many seconds it may at most.
SUITE = {
    "startup": 180,
    "latency": 300,
    "dispatch": 420,
    "pipeline": 300,
    "smallest": 300,
    "concurrent": 600,
    "transfer": 300,
    "train": 420,
    "pipeline-train": 300,
    "scale": 300,
}
BY_NAME_ONLY = {"gpu": 1200}
LIMITS_S = SUITE | BY_NAME_ONLY
RESULTS = Path(__file__).resolve().parent / "results"


def main(arguments: list[str] | None = None) -> int:
    """Run what was asked for and tell; 0 unless a benchmark could not be run."""
    parser = argparse.ArgumentParser(
        prog="python -m bench", description="Measure pw beside its baselines."
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of: {', '.join(LIMITS_S)}")
    parser.add_argument(
        "--quick", action="store_true", help="a smoke run: the figures mean nothing"
    )
    parser.add_argument("--out", type=Path, default=RESULTS, help="where results go (%(default)s)")
    options = parser.parse_args(arguments)
    for name in options.names:
        if name not in LIMITS_S:
            parser.error(f"there is no benchmark {name!r}; choose from {', '.join(LIMITS_S)}")
    names = options.names or list(SUITE)
    console = Console(width=None if sys.stdout.isatty() else 160)
    if len(names) == 1:
        run_here(names[0], quick=options.quick, out=options.out, console=console)
        return 0
    return run_each(names, quick=options.quick, out=options.out, console=console)


def run_here(name: str, *, quick: bool, out: Path, console: Console) -> report.Result:
    """Run one benchmark in this process, print it, and write NAME.json, NAME.png and NAME.svg."""
    before, cores = machine.load(), machine.cores()
    described = machine.describe() | {"load_before": before}
    started = time.perf_counter()
    result: report.Result = importlib.import_module(f"bench.{name.replace('-', '_')}").run(quick)
    described |= {"load_after": machine.load(), "took_s": round(time.perf_counter() - started, 1)}
    if quick:
        result.bars.clear()
        result.notes.append("a quick run: the figures mean nothing")
    if before[0] > cores / 2:
        result.notes.append(
            f"the load was {before[0]} on {cores} cores when it began: unless that was the benchmark before "
            "this one, others used the machine, and only ratios with narrow quartiles mean something"
        )
    report.show(result, console)
    report.write(result, described | {"quick": quick}, out)
    try:
        from bench import plots
    except ImportError as error:
        console.print(f"  note: no figures, because {error}", highlight=False)
    else:
        plots.draw(result.name, result.figures, out)
    return result


def run_each(names: list[str], *, quick: bool, out: Path, console: Console) -> int:
    """Run several benchmarks, each in a process of its own, and print all bars once more at the end."""
    lines: list[str] = []
    failed = 0
    for name in names:
        began = time.time()
        error = _run_apart(name, quick=quick, out=out)
        console.print(f"  {name}: {time.time() - began:.0f} s\n", highlight=False)
        if error is not None:
            failed += 1
            lines.append(f"  could not be run {name}: {error}")
            continue
        content = json.loads((out / f"{name}.json").read_text())
        for bar in content["bars"]:
            bar.pop("holds")
            lines.append(report.tell(report.Bar(**bar)).replace(": ", f": {name}: ", 1))
    console.print("\n".join(["bars:", *lines]), highlight=False, markup=False)
    return 1 if failed else 0


def _run_apart(name: str, *, quick: bool, out: Path) -> str | None:
    """Run one benchmark in a process group of its own; returns what went wrong, or None."""
    command = [sys.executable, "-m", "bench", name, "--out", str(out)]
    process = subprocess.Popen([*command, *(["--quick"] if quick else [])], start_new_session=True)
    try:
        code = process.wait(LIMITS_S[name])
    except subprocess.TimeoutExpired:
        return f"it took more than {LIMITS_S[name]} s"
    finally:
        # Its baselines and workers too: whatever is left would be in the way of the next one.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return None if code == 0 else f"it ended with {code}"


if __name__ == "__main__":
    sys.exit(main())
