"""The comparison for people: a table on the terminal, and Markdown for the documentation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tests.jax_suite.compare import Comparison, Group

BEGIN, END = "<!-- table: jax-suite -->", "<!-- end of table: jax-suite -->"
HEADINGS = ("file", "plain JAX passes", "pass", "fail", "skip", "%")
SHOWN_GROUPS = 40


def rows(comparisons: Sequence[Comparison]) -> list[tuple[str, ...]]:
    """One row for each file, and one for all."""
    lines = [(c.file, c.base, c.passed, c.failed, c.skipped) for c in comparisons]
    if len(lines) > 1:
        base, passed, failed, skipped = (
            sum(numbers) for numbers in zip(*(line[1:] for line in lines), strict=True)
        )
        lines.append(("all", base, passed, failed, skipped))
    return [
        (file, *map(str, (base, passed, *others)), f"{100 * passed / base if base else 100:.1f}")
        for file, base, passed, *others in lines
    ]


def table(comparisons: Sequence[Comparison]) -> str:
    """The table as text, and the reasons under it."""
    lines = [HEADINGS, *rows(comparisons)]
    widths = [max(len(line[at]) for line in lines) for at in range(len(HEADINGS))]
    text = [
        "  ".join(
            cell.ljust(width) if at == 0 else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    ]
    for comparison in comparisons:
        groups = [*described(comparison.failures), *described(comparison.skips, "skipped: ")]
        note = [f"       {comparison.note}"] if comparison.note else []
        text += ["", comparison.file, *note, *groups] if note or groups else []
    return "\n".join(text)


def described(groups: Sequence[Group], prefix: str = "") -> list[str]:
    """One line for each reason: how many tests, the reason, an example."""
    lines = [
        f"{len(group.tests):5}  {prefix}{group.reason[:200]}  (e.g. {group.tests[0]})"
        for group in groups[:SHOWN_GROUPS]
    ]
    if len(groups) > SHOWN_GROUPS:
        more = sum(len(group.tests) for group in groups[SHOWN_GROUPS:])
        lines.append(f"{more:5}  {prefix}other reasons; all are in the json file")
    return lines


def markdown(comparisons: Sequence[Comparison]) -> str:
    """The table and the reasons as Markdown."""
    text = [
        f"| {' | '.join(HEADINGS)} |",
        f"|---|{'---:|' * (len(HEADINGS) - 1)}",
        *(f"| {' | '.join(row)} |" for row in rows(comparisons)),
    ]
    reasons = [
        f"| {comparison.file} | {len(group.tests)} | {kind}{cell(group.reason)} | `{group.tests[0]}` |"
        for comparison in comparisons
        for kind, groups in (("", comparison.failures), ("skipped: ", comparison.skips))
        for group in groups
    ]
    if reasons:
        text += ["", "| file | tests | reason | example |", "|---|---:|---|---|", *reasons]
    return "\n".join(text) + "\n"


def cell(reason: str) -> str:
    """A reason that fits in a cell of a Markdown table."""
    return reason[:160].replace("|", "\\|").replace("<", "&lt;").replace("`", "'")


def write_markdown(path: Path, comparisons: Sequence[Comparison]) -> None:
    """Write the tables to a file, between the marks if the file has them."""
    text = markdown(comparisons)
    old = path.read_text() if path.exists() else ""
    if BEGIN in old and END in old:
        before, rest = old.split(BEGIN, 1)
        text = f"{before}{BEGIN}\n{text}{END}{rest.split(END, 1)[1]}"
    path.write_text(text)
