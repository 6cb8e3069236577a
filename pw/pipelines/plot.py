"""Draws a schedule with matplotlib, which is optional."""

from __future__ import annotations

from typing import Any

from pw.pipelines.table import Table
from pw.pipelines.timing import Timetable

_COLOURS = {"F": "#7aa6d8", "B": "#e0a458", "W": "#8fbf7f", "U": "#b0b0b0"}
_UPDATE_WIDTH = 0.3


def draw(schedule: Table, table: Timetable, path: Any, unit: str) -> Any:
    """Return a matplotlib figure with one bar for each task; write it to `path` if there is one."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise ImportError(
            "Schedule.plot() needs matplotlib: pip install matplotlib, or print(schedule)"
        ) from error
    groups = len(schedule.rows)
    figure = Figure(figsize=(max(6.0, len(table.steps) * 0.4), 1.2 + 0.5 * groups))
    axes = figure.add_subplot()
    several = groups < schedule.stages
    for group, row in enumerate(schedule.rows):
        for task in row:
            begin, width = table.begins[task], table.ends[task] - table.begins[task]
            shown = width or (_UPDATE_WIDTH if task.kind == "U" else 0.0)
            axes.barh(group, shown, 0.8, begin, color=_COLOURS[task.kind], edgecolor="white")
            if task.kind != "U":
                text = f"{task.stage}:{task.microbatch}" if several else str(task.microbatch)
                axes.text(begin + width / 2, group, text, ha="center", va="center", fontsize=7)
    axes.set_yticks(range(groups), [f"group {group}" for group in range(groups)])
    axes.invert_yaxis()
    axes.set_xlabel(f"time, in units of {unit}" if unit else "time")
    axes.set_title(f"{schedule.name}: bubble {table.bubble:.0%}")
    kinds = [kind for kind in _COLOURS if any(task.kind == kind for task in schedule)]
    axes.legend(handles=[Patch(color=_COLOURS[kind], label=kind) for kind in kinds], ncols=4)
    figure.tight_layout()
    if path is not None:
        figure.savefig(path)
    return figure
