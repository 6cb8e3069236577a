"""The figures of a result."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("agg")

from matplotlib import pyplot as plt
from matplotlib.ticker import FuncFormatter

from bench.report import Chart, Figure

MARKERS = "osD^vP*Xh<>"
COLOURS = plt.get_cmap("tab20")


def draw(name: str, figures: Sequence[Figure], directory: Path) -> None:
    """Draw all figures of one result beside each other, as NAME.png and NAME.svg."""
    if not figures:
        return
    directory.mkdir(parents=True, exist_ok=True)
    canvas, axes = plt.subplots(
        1, len(figures), figsize=(5.2 * len(figures), 5.2), squeeze=False, layout="constrained"
    )
    for axis, figure in zip(axes[0], figures, strict=True):
        for position, (label, points) in enumerate(figure.series.items()):
            marker = MARKERS[position % len(MARKERS)]
            colour = COLOURS((2 * position + position // 10) % 20)  # the strong colours first
            xs, ys = [x for x, _ in sorted(points)], [y for _, y in sorted(points)]
            axis.plot(xs, ys, marker=marker, color=colour, label=label)
        axis.set_title(figure.title, fontsize=10)
        axis.set_xlabel(figure.x_label)
        axis.set_ylabel(figure.y_label)
        if figure.log_x:
            axis.set_xscale("log", base=2)
            axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        if figure.log_y:
            axis.set_yscale("log")
        else:
            axis.set_ylim(bottom=0)
        axis.grid(visible=True, alpha=0.3)
        if figure.series:
            axis.legend(fontsize=7, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.15))
    for kind in ("png", "svg"):
        canvas.savefig(directory / f"{name}.{kind}", dpi=120)
    plt.close(canvas)


def draw_charts(name: str, charts: Sequence[Chart], directory: Path) -> None:
    """Draw all charts of one result below each other, as NAME-charts.png and NAME-charts.svg."""
    if not charts:
        return
    directory.mkdir(parents=True, exist_ok=True)
    rows = [list(dict.fromkeys(span.row for span in chart.spans)) for chart in charts]
    heights = [1.2 + 0.35 * len(names) for names in rows]
    canvas, axes = plt.subplots(
        len(charts),
        1,
        figsize=(11, sum(heights)),
        squeeze=False,
        layout="constrained",
        height_ratios=heights,
    )
    for axis, chart, names in zip(axes[:, 0], charts, rows, strict=True):
        kinds = sorted({span.kind for span in chart.spans})
        for index, kind in enumerate(kinds):
            ones = [span for span in chart.spans if span.kind == kind]
            axis.barh(
                [names.index(span.row) for span in ones],
                [span.length_s * 1e3 for span in ones],
                left=[span.start_s * 1e3 for span in ones],
                height=0.8,
                color=COLOURS((2 * index + index // 10) % 20),
                edgecolor="white",
                linewidth=0.3,
                label=kind,
            )
        axis.set_yticks(range(len(names)), names)
        axis.set_xlim(left=0)
        axis.set_title(chart.title, fontsize=10)
        axis.set_xlabel("ms")
        axis.legend(fontsize=7, ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.22))
    for kind in ("png", "svg"):
        canvas.savefig(directory / f"{name}-charts.{kind}", dpi=120)
    plt.close(canvas)
