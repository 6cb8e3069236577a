"""`python -m bench.bars FOLDER ...`: the bars of several runs side by side, as a table in Markdown.

Each folder has the results of one run (`python -m bench --out FOLDER`). The last column says in how many of the
runs a bar holds; the table of docs/performance.md is made of this, and adds the causes.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from bench.report import Bar, bars_of, number

LOADS = ("load_before", "load_after")

Readings = dict[tuple[str, str], list[Bar]]
"""The bars of each benchmark, by their text without what was measured."""


def read(folders: Sequence[Path]) -> tuple[Readings, list[str]]:
    """Return all bars of these runs, and the lowest and highest load of each run.

    Raises:
        FileNotFoundError: a folder has no results.
    """
    found: Readings = {}
    loads = []
    for folder in folders:
        files = [path for path in sorted(folder.glob("*.json")) if not path.match("*.trace.json")]
        results = [json.loads(path.read_text()) for path in files]
        if not results:
            raise FileNotFoundError(f"{folder} has no results of `python -m bench --out {folder}`")
        for result in results:
            for bar in bars_of(result):
                found.setdefault((result["name"], bar.text), []).append(bar)
        load = [result["machine"][when][0] for result in results for when in LOADS]
        loads.append(f"{min(load):.1f} to {max(load):.1f}")
    return found, loads


def table(found: Readings) -> list[str]:
    """Return the lines of the table."""
    lines = ["| benchmark | what | bar | readings | holds |", "|---|---|---|---|---|"]
    for (name, text), bars in found.items():
        sign = "≥" if bars[0].at_least else "≤"
        readings = ", ".join(number(bar.value) for bar in bars)
        held = sum(bar.holds for bar in bars)
        holds = "yes" if held == len(bars) else f"{held} of {len(bars)}" if held else "no"
        lines.append(f"| {name} | {text} | {sign} {number(bars[0].bound)} | {readings} | {holds} |")
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table of the bars in these folders."""
    parser = argparse.ArgumentParser(prog="python -m bench.bars", description=__doc__)
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER")
    found, loads = read(parser.parse_args(arguments).folders)
    print(f"Loads: {'; '.join(loads)}.\n")
    print("\n".join(table(found)))


if __name__ == "__main__":
    main()
