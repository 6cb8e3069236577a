"""The result of a benchmark: a table, bars, notes and figures, printed and written as JSON.

A bar that does not hold is reported and changes no exit code.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.measure import Sample
from pw.operating.timeline import chrome
from pw.operating.timeline.timeline import Timeline

RESULTS = Path(__file__).resolve().parent / "results"
"""Where results are written if no other folder is named."""

Params = Mapping[str, object]
Series = dict[str, list[tuple[float, float]]]


@dataclass(frozen=True)
class Row:
    """One line of the table: a sample, its parameters, and its ratio to a baseline."""

    name: str
    params: Params
    sample: Sample
    unit: str
    baseline: str | None = None
    ratio: Sample | None = None

    def __str__(self) -> str:
        where = "".join(f", {key} {value}" for key, value in self.params.items())
        ratio = f", {self.ratio.median:.3g} of {self.baseline}" if self.ratio else ""
        return f"{self.name}{where}: {number(self.sample.median)} {self.unit}{ratio}"


@dataclass(frozen=True)
class Bar:
    """A requirement on the runtime: `value` is at least, or else at most, `bound`."""

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
    modelled: Series = field(default_factory=dict)
    """Points that a model gives; those of a name continue the measured series of the same name."""


@dataclass(frozen=True)
class Span:
    """One bar of a chart: in a row, of a kind that has a colour, from a moment to another, in seconds."""

    row: str
    kind: str
    start_s: float
    end_s: float

    @property
    def length_s(self) -> float:
        """How long it is."""
        return self.end_s - self.start_s

    def moved(self, by_s: float) -> Span:
        """Return the same at another time."""
        return replace(self, start_s=self.start_s + by_s, end_s=self.end_s + by_s)

    def between(self, first_s: float, last_s: float) -> Span:
        """Return the part of it between two moments."""
        return replace(self, start_s=max(self.start_s, first_s), end_s=min(self.end_s, last_s))

    def in_row(self, row: str) -> Span:
        """Return the same in another row."""
        return replace(self, row=row)


@dataclass(frozen=True)
class Chart:
    """Rows of bars over time; the charts of one `figure`, which is a file's name, are drawn together."""

    figure: str
    title: str
    spans: list[Span]
    timelines: Mapping[str, Timeline]
    """What it was drawn from, by the names of files for Perfetto."""


@dataclass
class Result:
    """The result of one benchmark; `what` names the quantity, and its place in the paper."""

    name: str
    what: str
    rows: list[Row] = field(default_factory=list)
    bars: list[Bar] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)
    charts: list[Chart] = field(default_factory=list)

    def add(
        self,
        name: str,
        params: Params,
        sample: Sample,
        unit: str,
        baseline: str | None = None,
        reference: Sample | None = None,
    ) -> None:
        """Add a row, and print it, for a run that is ended; with `reference`, also the ratio to it."""
        row = Row(name, params, sample, unit)
        if reference is not None:
            row = replace(row, baseline=baseline, ratio=sample.over(reference))
        self.rows.append(row)
        print(f"  {self.name}: {row}", file=sys.stderr, flush=True)

    def compare(
        self,
        samples: Mapping[str, Sample],
        *,
        unit: str,
        baseline: str | None = None,
        params: Params | None = None,
    ) -> None:
        """Add a row for each case of `measure.alternate`, with its ratio to the case `baseline`."""
        for name, sample in samples.items():
            reference = samples.get(baseline) if baseline and name != baseline else None
            self.add(name, params or {}, sample, unit, baseline, reference)

    def at_least(self, bound: float, value: float, text: str) -> None:
        """Add a bar: `value` is at least `bound`."""
        self.bars.append(Bar(text, value, bound))

    def at_most(self, bound: float, value: float, text: str) -> None:
        """Add a bar: `value` is at most `bound`."""
        self.bars.append(Bar(text, value, bound, at_least=False))


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
        console.print(line(bar), style="green" if bar.holds else "yellow", highlight=False)
    for note in result.notes:
        console.print(f"  note: {note}", highlight=False, markup=False)


def bars_of(written: Mapping[str, Any]) -> list[Bar]:
    """The bars of a result as `write` has written it."""
    return [
        Bar(bar["text"], bar["value"], bar["bound"], bar["at_least"]) for bar in written["bars"]
    ]


def line(bar: Bar) -> str:
    """One line that reports a bar."""
    verdict = "holds         " if bar.holds else "does not hold "
    sign = "≥" if bar.at_least else "≤"
    return f"  {verdict} {number(bar.value)} {sign} {number(bar.bound)}: {bar.text}"


def number(value: float) -> str:
    """A number in three significant digits, with an exponent only if it is very large or small."""
    if value and (abs(value) >= 1e6 or abs(value) < 1e-3):
        return f"{value:.3g}"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def write(result: Result, machine: dict[str, object], directory: Path) -> Path:
    """Write the result and its machine to NAME.json in `directory`, and its timelines; returns the path."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{result.name}.json"
    content = {
        "name": result.name,
        "what": result.what,
        "machine": machine,
        "rows": [
            {
                "name": row.name,
                "params": row.params,
                "unit": row.unit,
                **_quartiles(row.sample),
                "values": row.sample.values,
                "baseline": row.baseline,
                "ratio": row.ratio and _quartiles(row.ratio),
            }
            for row in result.rows
        ],
        "bars": [asdict(bar) | {"holds": bar.holds} for bar in result.bars],
        "notes": result.notes,
        "figures": [asdict(figure) for figure in result.figures],
        "charts": [
            {"figure": chart.figure, "title": chart.title, "spans": list(map(asdict, chart.spans))}
            for chart in result.charts
        ],
    }
    for chart in result.charts:
        for name, timeline in chart.timelines.items():
            chrome.write(timeline, directory / f"{chart.figure}-{name}.trace.json")
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False, default=str) + "\n")
    return path


def _quartiles(sample: Sample) -> dict[str, float]:
    return {"median": sample.median, "low": sample.low, "high": sample.high}
