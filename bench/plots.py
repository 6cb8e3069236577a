"""The figures of a result."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("agg")

from matplotlib import pyplot as plt
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter

from bench.report import Chart, Figure

MARKERS = "osD^vP*Xh<>"
KINDS = ("png", "svg")
DOTS = 90
"""Of an inch."""
COLOURS = plt.get_cmap("tab20")


def _colour(position: int) -> Any:
    """Return one of twenty colours, the strong ones first."""
    return COLOURS((2 * position + position // 10) % 20)


def draw(
    name: str,
    figures: Sequence[Figure],
    directory: Path,
    kinds: Sequence[str] = KINDS,
    footer: str = "",
) -> None:
    """Draw all figures of one result beside each other, as NAME.png and NAME.svg, above a line of text."""
    if not figures:
        return
    directory.mkdir(parents=True, exist_ok=True)
    canvas, axes = plt.subplots(
        1, len(figures), figsize=(5.2 * len(figures), 5.2), squeeze=False, layout="constrained"
    )
    for axis, figure in zip(axes[0], figures, strict=True):
        for position, label in enumerate(figure.series | figure.modelled):
            style = {"marker": MARKERS[position % len(MARKERS)], "color": _colour(position)}
            measured = sorted(figure.series.get(label, []))
            if measured:
                axis.plot(*zip(*measured, strict=True), label=label, **style)
            if modelled := sorted(figure.modelled.get(label, [])):
                # The line of a model begins at the last measured point, which keeps its own mark.
                joined = [point for point in measured[-1:] if point[0] < modelled[0][0]] + modelled
                marked = slice(len(joined) - len(modelled), None)
                axis.plot(
                    *zip(*joined, strict=True),
                    label=f"{label}, modelled",
                    linestyle="--",
                    markerfacecolor="white",
                    markevery=marked,
                    **style,
                )
        axis.set_title(figure.title, fontsize=10)
        axis.set_xlabel(figure.x_label)
        axis.set_ylabel(figure.y_label)
        if figure.log_x:
            axis.set_xscale("log", base=2)
            axis.xaxis.set_major_formatter(
                FuncFormatter(lambda value, _: f"{value:.4g}" if value >= 1 else f"{value:.2g}")
            )
        if figure.log_y:
            axis.set_yscale("log")
        else:
            axis.set_ylim(bottom=0)
        axis.grid(visible=True, alpha=0.3)
        if figure.series or figure.modelled:
            axis.legend(fontsize=7, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.15))
    _save(canvas, directory / name, kinds, footer)


def draw_charts(
    charts: Sequence[Chart], directory: Path, kinds: Sequence[str] = KINDS, footer: str = ""
) -> None:
    """Draw the charts of each figure below each other, as FIGURE.png and FIGURE.svg, above a line of text."""
    directory.mkdir(parents=True, exist_ok=True)
    for figure in dict.fromkeys(chart.figure for chart in charts):
        own = [chart for chart in charts if chart.figure == figure]
        _save(_chart(own), directory / figure, kinds, footer)


def _save(canvas: Any, stem: Path, kinds: Sequence[str], footer: str) -> None:
    if footer:
        canvas.supxlabel(footer, fontsize=7, color="grey")
    for kind in kinds:
        canvas.savefig(f"{stem}.{kind}", dpi=DOTS)
    plt.close(canvas)


def _chart(charts: Sequence[Chart]) -> Any:
    """Return a canvas with these charts below each other."""
    rows = [list(dict.fromkeys(span.row for span in chart.spans)) for chart in charts]
    heights = [0.7 + 0.3 * len(names) for names in rows]
    canvas, axes = plt.subplots(
        len(charts),
        1,
        figsize=(12, 0.8 + sum(heights)),
        squeeze=False,
        sharex=True,
        layout="constrained",
        height_ratios=heights,
    )
    kinds = sorted({span.kind for chart in charts for span in chart.spans})
    for axis, chart, names in zip(axes[:, 0], charts, rows, strict=True):
        whole_s = max(span.end_s for span in chart.spans)
        for index, kind in enumerate(kinds):
            ones = [span for span in chart.spans if span.kind == kind]
            # White edges would hide short bars, and in their own colour these have some width.
            edges = ["white" if o.length_s > whole_s / 100 else _colour(index) for o in ones]
            axis.barh(
                [names.index(span.row) for span in ones],
                [span.length_s * 1e3 for span in ones],
                left=[span.start_s * 1e3 for span in ones],
                height=0.8,
                color=_colour(index),
                edgecolor=edges,
                linewidth=0.5,
            )
        axis.set_yticks(range(len(names)), names, fontsize=8)
        axis.invert_yaxis()
        axis.set_title(chart.title, fontsize=10, loc="left")
        axis.margins(x=0, y=0.02)
    axes[-1, 0].set_xlim(left=0)
    axes[-1, 0].set_xlabel("ms")
    handles = [Patch(color=_colour(index), label=kind) for index, kind in enumerate(kinds)]
    canvas.legend(handles=handles, fontsize=8, ncols=len(kinds), loc="outside upper right")
    return canvas
