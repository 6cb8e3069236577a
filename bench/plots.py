"""The figures of a result, as NAME.png and NAME.svg."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("agg")

from matplotlib import pyplot as plt

from bench.report import Figure

MARKERS = "osD^vP*Xh<>"


def draw(name: str, figures: Sequence[Figure], directory: Path) -> list[Path]:
    """Draw all figures of one result beside each other, and return the paths of the files."""
    if not figures:
        return []
    directory.mkdir(parents=True, exist_ok=True)
    canvas, axes = plt.subplots(
        1, len(figures), figsize=(5.2 * len(figures), 4.2), squeeze=False, layout="constrained"
    )
    for axis, figure in zip(axes[0], figures, strict=True):
        for position, (label, points) in enumerate(figure.series.items()):
            marker = MARKERS[position % len(MARKERS)]
            axis.plot(
                *zip(*sorted(points), strict=True), marker=marker, label=label
            ) if points else None
        axis.set_title(figure.title, fontsize=10)
        axis.set_xlabel(figure.x_label)
        axis.set_ylabel(figure.y_label)
        if figure.log_x:
            axis.set_xscale("log", base=2)
        if figure.log_y:
            axis.set_yscale("log")
        else:
            axis.set_ylim(bottom=0)
        axis.grid(visible=True, alpha=0.3)
        if figure.series:
            axis.legend(fontsize=7)
    paths = [directory / f"{name}.png", directory / f"{name}.svg"]
    for path in paths:
        canvas.savefig(path, dpi=120)
    plt.close(canvas)
    return paths
