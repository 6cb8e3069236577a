"""What a benchmark hands back, and how it is told: a table, the bars it is held to, JSON and figures.

A bar that does not hold is said, and nothing more: a benchmark tells, it does not fail.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.measure import Sample

Series = dict[str, list[tuple[float, float]]]


@dataclass(frozen=True)
class Row:
    """One line of the table: what was measured, with which parameters, and how it stands to its baseline.

    `ratio` is taken per round, to the baseline's reading of the same round.
    """

    name: str
    params: dict[str, object]
    sample: Sample
    unit: str
    baseline: str | None = None
    ratio: Sample | None = None


@dataclass(frozen=True)
class Bar:
    """Something the runtime is held to: `value` is at least, or else at most, `bound`."""

    text: str
    value: float
    bound: float
    at_least: bool = True

    @property
    def holds(self) -> bool:
        """Whether the bar is met."""
        return self.value >= self.bound if self.at_least else self.value <= self.bound


@dataclass(frozen=True)
class Figure:
    """One plot: named series of points."""

    title: str
    x_label: str
    y_label: str
    series: Series
    log_x: bool = False
    log_y: bool = False


@dataclass
class Result:
    """All that one benchmark has to say. `what` says what is measured, and where in the paper that is."""

    name: str
    what: str
    rows: list[Row] = field(default_factory=list)
    bars: list[Bar] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)


def rows(
    samples: dict[str, Sample],
    *,
    unit: str,
    params: dict[str, object] | None = None,
    baseline: str | None = None,
) -> list[Row]:
    """One row for each case of `measure.alternate`, with its ratio to the case named `baseline`."""
    reference = samples.get(baseline) if baseline is not None else None
    return [
        Row(
            name=name,
            params=params or {},
            sample=sample,
            unit=unit,
            baseline=baseline if reference is not None and name != baseline else None,
            ratio=sample.over(reference) if reference is not None and name != baseline else None,
        )
        for name, sample in samples.items()
    ]


def show(result: Result, console: Console) -> None:
    """Print the table, the bars and the notes."""
    table = Table(title=f"{result.name}: {result.what}", title_justify="left", title_style="bold")
    table.add_column("")
    params = list(dict.fromkeys(key for row in result.rows for key in row.params))
    for key in params:
        table.add_column(key, justify="right")
    for column in ("median", "quartiles", "unit", "ratio", "quartiles"):
        table.add_column(column, justify="left" if column == "unit" else "right")
    table.add_column("to")
    for row in result.rows:
        table.add_row(
            row.name,
            *(str(row.params.get(key, "")) for key in params),
            number(row.sample.median),
            f"{number(row.sample.low)} – {number(row.sample.high)}",
            row.unit,
            f"{row.ratio.median:.3g}" if row.ratio else "",
            f"{row.ratio.low:.3g} – {row.ratio.high:.3g}" if row.ratio else "",
            row.baseline or "",
        )
    console.print(table)
    for bar in result.bars:
        console.print(tell(bar), style="green" if bar.holds else "yellow", highlight=False)
    for note in result.notes:
        console.print(f"  note: {note}", highlight=False, markup=False)


def tell(bar: Bar) -> str:
    """One line about a bar."""
    verdict = "holds         " if bar.holds else "does not hold "
    sign = "≥" if bar.at_least else "≤"
    return f"  {verdict} {number(bar.value)} {sign} {number(bar.bound)}: {bar.text}"


def number(value: float) -> str:
    """Three significant digits, and never an exponent for what a reader can read without one."""
    if value and (abs(value) >= 1e6 or abs(value) < 1e-3):
        return f"{value:.3g}"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def write(result: Result, machine: dict[str, object], directory: Path) -> Path:
    """Write NAME.json, with the machine it was measured on, into `directory`, and return its path."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{result.name}.json"
    content = {
        "name": result.name,
        "what": result.what,
        "machine": machine,
        "rows": [_row(row) for row in result.rows],
        "bars": [asdict(bar) | {"holds": bar.holds} for bar in result.bars],
        "notes": result.notes,
        "figures": [asdict(figure) for figure in result.figures],
    }
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False, default=str) + "\n")
    return path


def _row(row: Row) -> dict[str, object]:
    return {
        "name": row.name,
        "params": row.params,
        "unit": row.unit,
        "median": row.sample.median,
        "low": row.sample.low,
        "high": row.sample.high,
        "values": row.sample.values,
        "baseline": row.baseline,
        "ratio": row.ratio
        and {"median": row.ratio.median, "low": row.ratio.low, "high": row.ratio.high},
    }
