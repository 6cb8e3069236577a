"""The pictures of docs/paper.md, from the results of the last run: the paper's figures on the paper's axes.

    python -m bench.paper                    # reads bench/results, writes docs/pictures

Each picture says which commit was measured, when, and at which load. A figure whose benchmark has not run
is left as it is, and named.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.report import RESULTS, Chart, Figure, Series, Span

PICTURES = RESULTS.parent.parent / "docs" / "pictures"
Written = Mapping[str, Any]
"""What a benchmark has written about its run, as JSON."""


def figures_of(result: Written) -> list[Figure]:
    """Return the figures that a benchmark has drawn."""
    return [
        Figure(**(one | {name: _points(one.get(name, {})) for name in ("series", "modelled")}))
        for one in result["figures"]
    ]


def _points(series: Mapping[str, Any]) -> Series:
    return {name: [(x, y) for x, y in points] for name, points in series.items()}


def throughput(result: Written) -> list[Figure]:
    """Figure 6: computations a second by their duration, and the smallest that hides the controller."""
    curves, smallest = figures_of(result)
    measured: Series = {}
    modelled: Series = {}
    for name, points in curves.series.items():
        hosts, _, kind = name.partition(" ")
        group = modelled if kind == "modelled" else measured
        rates = [(size_us / 1e3, part * 1e6 / size_us) for size_us, part in points]
        group[f"pw, {hosts} hosts"] = rates
    sizes_ms = [x for points in [*measured.values(), *modelled.values()] for x, _ in points]
    if sizes_ms:
        ends = [(size, 1e3 / size) for size in (min(sizes_ms), max(sizes_ms))]
        measured = {"JAX (as it keeps devices busy)": ends} | measured
    of_size = Figure(
        "throughput", "ms a computation", "computations per second", measured, True, True, modelled
    )
    real, model = (smallest.series.get(name, []) for name in ("real", "modelled"))
    return [of_size, replace(smallest, series={"pw": real}, modelled={"pw": model})]


def stages(result: Written) -> list[Figure]:
    """Figure 7: the pipelines without many in flight, and where the time goes."""
    figures = figures_of(result)
    return [*figures[:2], figures[-1]]


def clients(result: Written) -> list[Figure]:
    """Figure 8: the first figure of `concurrent`'s clients that work together."""
    return [one for one in figures_of(result) if one.x_label == "clients"]


FIGURES: dict[str, tuple[str, Callable[[Written], list[Figure]]]] = {
    "figure-5": ("dispatch", figures_of),
    "figure-6": ("smallest", throughput),
    "figure-7": ("pipeline", stages),
    "figure-8": ("concurrent", clients),
    "many": ("many", figures_of),
}
CHARTS = {
    "figure-9": "timeline",
    "figure-10": "traces",
    "figure-11": "timeline",
    "figure-12": "traces",
    "schedules": "pipeline-train",
}


def charts_of(result: Written, figure: str) -> list[Chart]:
    """Return the charts of one figure that a benchmark has drawn."""
    return [
        Chart(figure, one["title"], [Span(**span) for span in one["spans"]], {})
        for one in result["charts"]
        if one["figure"] == figure
    ]


def origin(result: Written) -> str:
    """One line that says when and where the result was measured."""
    machine = result["machine"]
    parts = [f"bench {result['name']}", machine.get("commit"), machine.get("day")]
    parts += [f"{machine.get('cores', '?')} cores, load {machine.get('load_before', ['?'])[0]}"]
    parts += ["A QUICK RUN: IT MEANS NOTHING"] if machine.get("quick") else []
    return ", ".join(filter(None, parts))


def main(arguments: list[str] | None = None) -> int:
    """Draw all figures whose results are there; returns 0 if none is missing."""
    from bench import plots

    parser = argparse.ArgumentParser(prog="python -m bench.paper", description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of results (%(default)s)")
    parser.add_argument("--to", type=Path, default=PICTURES, help="of pictures (%(default)s)")
    options = parser.parse_args(arguments)
    missing = []
    for figure, name in ({key: name for key, (name, _) in FIGURES.items()} | CHARTS).items():
        path = options.out / f"{name}.json"
        if not path.exists():
            missing.append(f"{figure}: run python -m bench {name}")
            continue
        result = json.loads(path.read_text())
        if figure in FIGURES:
            shown = FIGURES[figure][1](result)
            plots.draw(figure, shown, options.to, kinds=("png",), footer=origin(result))
        elif charts := charts_of(result, figure):
            plots.draw_charts(charts, options.to, kinds=("png",), footer=origin(result))
        else:
            missing.append(f"{figure}: the result of {name} has no such chart")
    print("\n".join(missing), file=sys.stderr)
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
