"""A grid of cells with colours: the shards of an array by device, and a mesh by island."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from pw.client.display.tables import terminal_text
from pw.core.sharding import Sharding

if TYPE_CHECKING:  # it loads slowly, and most scripts do not need it
    from rich.console import Group

COLOURS = (
    ("blue", "#bfd7f5"),
    ("green", "#c3ecd0"),
    ("yellow", "#fbe6b0"),
    ("magenta", "#ecd2f3"),
    ("cyan", "#bfe9ee"),
    ("red", "#f7cdc8"),
    ("bright_blue", "#dcd9f7"),
    ("bright_green", "#dfeab8"),
)
"""Colours of cells in terminals and in notebooks; cells with larger numbers begin again."""
ROWS, COLUMNS = 16, 8
"""Largest grid that is drawn in full."""


_INK = "color:#222;background:"

Device = tuple[str, int]
"""The island of a virtual device, and its number in its slice."""


@dataclass(frozen=True, slots=True)
class GridCell:
    """One cell: its text, and the number of its colour."""

    text: str
    colour: int


@dataclass(frozen=True, slots=True, repr=False)
class Grid:
    """Rows of cells, with a line above and words about the colours below."""

    head: str
    rows: tuple[tuple[GridCell, ...], ...]
    legend: tuple[GridCell, ...] = ()
    """Meaning of each colour."""

    def __repr__(self) -> str:
        return terminal_text(self.__rich__())

    def __rich__(self) -> Group:
        from rich import box
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        table = Table(box=box.SQUARE, show_header=False, show_lines=True)
        for row in self._drawn():
            table.add_row(*(Text(cell.text, style=_style(cell)) for cell in row))
        legend = Text("  ").join(Text(f"■ {one.text}", style=_style(one)) for one in self.legend)
        return Group(Text(self.head), table, *([legend] if self.legend else []))

    def _repr_html_(self) -> str:
        style = (
            f"border:1px solid #8889;padding:0.35em 0.8em;text-align:center;white-space:pre;{_INK}"
        )
        rows = "".join(
            "<tr>" + "".join(_html("td", style, cell) for cell in row) + "</tr>"
            for row in self._drawn()
        )
        legend = " ".join(_html("span", f"padding:0.1em 0.5em;{_INK}", one) for one in self.legend)
        return (
            f"<div>{escape(self.head)}</div>"
            f'<table style="border-collapse:collapse;margin:0.3em 0">{rows}</table>'
            f"<div>{legend}</div>"
        )

    def _drawn(self) -> Iterator[Sequence[GridCell]]:
        """Yield the rows that are drawn, cut on the right and at the bottom."""
        for row in self.rows[:ROWS]:
            more = len(row) - COLUMNS
            yield (*row[:COLUMNS], GridCell(f"… {more} more", -1)) if more > 0 else row
        if len(self.rows) > ROWS:
            yield (GridCell(f"… {len(self.rows) - ROWS} more rows", -1),)


def _style(cell: GridCell) -> str:
    return "dim" if cell.colour < 0 else COLOURS[cell.colour % len(COLOURS)][0]


def _html(tag: str, style: str, cell: GridCell) -> str:
    colour = "none" if cell.colour < 0 else COLOURS[cell.colour % len(COLOURS)][1]
    return f'<{tag} style="{style}{colour}">{escape(cell.text)}</{tag}>'


def of_shards(
    head: str, sharding: Sharding, shape: tuple[int, ...], devices: Sequence[Device]
) -> Grid:
    """Return a cell for each distinct shard of an array, with the devices that have it.

    The rows are the parts of the first dimension that is split, the columns those of all others. If only one
    dimension is split, and it is not the first of several, there is one row.

    Args:
        head: the line above.
        sharding: how the array is split.
        shape: shape of the array.
        devices: devices at the positions of the mesh.
    """
    parts = sharding.partitions(len(shape))
    split = [at for at, count in enumerate(parts) if count > 1]
    has_rows = len(split) > 1 or (split == [0] and len(parts) > 1)
    rows = parts[split[0]] if has_rows else 1
    columns = math.prod(parts) // rows
    holders: defaultdict[int, list[Device]] = defaultdict(list)
    for position, device in enumerate(devices):
        at = 0
        for (start, stop), count in zip(sharding.box(shape, position), parts, strict=True):
            at = at * count + start // max(1, stop - start)
        holders[at].append(device)
    islands = list(dict.fromkeys(island for island, _ in devices))

    def cell(at: int) -> GridCell:
        own: defaultdict[str, list[int]] = defaultdict(list)
        for island, number in holders[at]:
            own[island].append(number)
        words = [
            (f"{island}: " if len(islands) > 1 else "") + ranges(sorted(numbers))
            for island, numbers in own.items()
        ]
        colour = at if len(islands) == 1 else islands.index(holders[at][0][0])
        return GridCell("\n".join(words), colour)

    grid = tuple(
        tuple(cell(row * columns + column) for column in range(columns)) for row in range(rows)
    )
    return Grid(head, grid)


def of_mesh(head: str, sizes: tuple[int, ...], devices: Sequence[Device]) -> Grid:
    """Return a cell for each device of a mesh: rows for the first axis, columns for the others."""
    islands = list(dict.fromkeys(island for island, _ in devices))
    cells = [GridCell(str(number), islands.index(island)) for island, number in devices]
    rows = sizes[0] if len(sizes) > 1 else 1
    width = len(cells) // rows
    grid = tuple(tuple(cells[row * width : (row + 1) * width]) for row in range(rows))
    return Grid(head, grid, tuple(GridCell(island, at) for at, island in enumerate(islands)))


def ranges(numbers: Sequence[int]) -> str:
    """Return numbers in words, neighbours as a range: "0–3, 8"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ", ".join("–".join(map(str, run)) for run in runs)
