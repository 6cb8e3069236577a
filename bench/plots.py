"""The figures of a result."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("agg")

from matplotlib import pyplot as plt
from matplotlib.ticker import FuncFormatter

from bench.report import Figure

MARKERS = "osD^vP*Xh<>"
COLOURS = plt.get_cmap("tab20")


def draw(name: str, figures: Sequence[Figure], directory: Path) -> None:
    """Draw all figures of one result beside each other, as NAME.png and NAME.svg."""
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
