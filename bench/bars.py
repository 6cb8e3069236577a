"""`python -m bench table [FOLDER ...]`: write the bars and their newest medians into docs/performance.md.

The medians are stored in `readings.json` beside this file. A folder has the results of one run
(`python -m bench --out FOLDER`); the medians over the runs of all folders replace those of the same bars.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bench.report import Bar, bars_of, number

STORED = Path(__file__).with_name("readings.json")
PAGE = Path(__file__).resolve().parents[1] / "docs" / "performance.md"
SLOW_WAKES_US = 100.0
"""On a machine with slow wakes, a bare zmq round trip takes longer than that."""


@dataclass(frozen=True)
class Reading:
    """A bar, whose value is the median of several runs, and the machine of these runs."""

    bar: Bar
    machine: str


Readings = dict[tuple[str, str], Reading]
"""The readings by benchmark and the text of their bar."""


def stored() -> Readings:
    """Return the readings that are stored."""
    return {
        (one["benchmark"], bar.text): Reading(bar, one["machine"])
        for one in json.loads(STORED.read_text())
        for bar in bars_of({"bars": [one]})
    }


def store(readings: Readings) -> None:
    """Store readings, one a line."""
    lines = [
        json.dumps({"benchmark": name, **vars(one.bar), "machine": one.machine}, ensure_ascii=False)
        for (name, _), one in readings.items()
    ]
    STORED.write_text("[\n" + ",\n".join(lines) + "\n]\n")


def read(folders: Sequence[Path]) -> Readings:
    """Return the medians over the runs whose results are in these folders.

    Raises:
        FileNotFoundError: a folder has no results.
    """
    values: dict[tuple[str, str], list[float]] = {}
    readings: Readings = {}
    for folder in folders:
        files = [path for path in sorted(folder.glob("*.json")) if not path.match("*.trace.json")]
        if not files:
            raise FileNotFoundError(f"{folder} has no results of `python -m bench --out {folder}`")
        for result in (json.loads(path.read_text()) for path in files):
            for bar in bars_of(result):
                key = result["name"], bar.text
                values.setdefault(key, []).append(bar.value)
                median = replace(bar, value=statistics.median(values[key]))
                readings[key] = Reading(median, _machine(result["machine"]))
    return readings


def _machine(described: Mapping[str, float]) -> str:
    has_slow_wakes = described["zmq_round_trip_us"] > SLOW_WAKES_US
    return f"{described['cores']} cores" + ", slow wakes" * has_slow_wakes


def table(readings: Readings) -> str:
    """Return the table in Markdown."""
    lines = [
        "| benchmark | figure | bar | newest median | holds | machine |",
        "|---|---|---|---|---|---|",
    ]
    for (name, text), reading in readings.items():
        bar = reading.bar
        bound = f"{'≥' if bar.at_least else '≤'} {number(bar.bound)}"
        holds = "yes" if bar.holds else "no"
        lines.append(
            f"| {name} | {text} | {bound} | {number(bar.value)} | {holds} | {reading.machine} |"
        )
    held = sum(reading.bar.holds for reading in readings.values())
    return f"{held} of {len(readings)} bars hold.\n\n" + "\n".join(lines)


def stored_table() -> str:
    """Return the table of the stored readings in Markdown."""
    return table(stored())


def write(folders: Sequence[Path]) -> None:
    """Store the medians of these runs, and write the table of all stored readings into the page."""
    store(stored() | read(folders))
    part = re.compile(r"(<!-- made: bars -->\n).*?(<!-- end -->)", re.S)
    text = part.sub(lambda ends: f"{ends[1]}\n{stored_table()}\n{ends[2]}", PAGE.read_text())
    PAGE.write_text(text)
