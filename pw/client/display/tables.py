"""Small tables, for terminals and for notebooks."""

from __future__ import annotations

import sys
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # it loads slowly, and most scripts do not need it
    from rich.console import Console, Group

WIDTH_WITHOUT_TERMINAL = 160
SHORT = 16
"""Cells of a notebook with no more characters have one line."""
BAR = 12
"""Characters of a bar."""

_TABLE = "border-collapse:collapse;margin:0.2em 0 0.8em 0"
_CELL = "border:1px solid #8886;padding:0.15em 0.6em;vertical-align:top;text-align:"


@dataclass(frozen=True, slots=True)
class Table:
    """Rows under named columns; numbers are aligned on the right."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]

    @classmethod
    def of(
        cls,
        title: str,
        things: Iterable[tuple[Any, ...]],
        columns: Mapping[str, Callable[..., Any]],
    ) -> Table:
        """Return a table with a row for each tuple; each column has a function from it to a cell."""
        rows = tuple(tuple(cell(*one) for cell in columns.values()) for one in things)
        return cls(title, tuple(columns), rows)

    def is_number(self, column: int) -> bool:
        """Whether a column has only numbers."""
        return all(isinstance(row[column], (int, float)) for row in self.rows)


def bar(part: float | None) -> str:
    """Return a bar of `BAR` characters, of which a part (0 to 1) is full."""
    full = round(BAR * min(1.0, part or 0.0))
    return "█" * full + "░" * (BAR - full)


def _text(cell: Any) -> str:
    return f"{cell:g}" if isinstance(cell, float) else str(cell)


class Shown:
    """An answer that shows as a line and tables, in terminals and notebooks."""

    __slots__ = ()

    @property
    @abstractmethod
    def head(self) -> str:
        """One line about all."""

    @abstractmethod
    def tables(self) -> tuple[Table, ...]:
        """Return the tables below it."""

    def foot(self) -> tuple[str, ...]:
        """Return lines below the tables."""
        return ()

    def __repr__(self) -> str:
        return terminal_text(self.__rich__())

    def __rich__(self) -> Group:
        return renderable(self.head, self.tables(), self.foot())

    def _repr_html_(self) -> str:
        foot = "".join(f"<div>{escape(line)}</div>" for line in self.foot())
        return html(self.head, self.tables()) + foot


# --- terminals ---------------------------------------------------------------------------------------


def renderable(head: str, tables: Iterable[Table], foot: Sequence[str] = ()) -> Group:
    """Return a line, tables and lines for rich; a table without rows is a sentence."""
    from rich import box
    from rich.console import Group
    from rich.table import Table as RichTable
    from rich.text import Text

    def shown(table: Table) -> RichTable | Text:
        if not table.rows:
            return Text(f"no {table.title.lower()}")
        drawn = RichTable(
            title=Text(table.title),
            title_justify="left",
            title_style="bold",
            box=box.SIMPLE_HEAD,
            show_edge=False,
            pad_edge=False,
        )
        for index, name in enumerate(table.columns):
            drawn.add_column(
                Text(name), justify="right" if table.is_number(index) else "left", overflow="fold"
            )
        for row in table.rows:
            drawn.add_row(*(Text(_text(cell)) for cell in row))
        return drawn

    spaced = (part for table in tables for part in (Text(), shown(table)))
    below = [Text(), *map(Text, foot)] if foot else []
    return Group(Text(head), *spaced, *below)


def show(shown: Any) -> None:
    """Print what rich prints of a value to standard output."""
    _console().print(shown)


def plain(head: str, tables: Iterable[Table]) -> str:
    """Return a line and tables as text without colours, as wide as the terminal if there is one."""
    return terminal_text(renderable(head, tables))


def terminal_text(shown: Any) -> str:
    """Return what rich prints of a value, without colours, as wide as the terminal if there is one."""
    console = _console(color_system=None)
    with console.capture() as printed:
        console.print(shown)
    return "\n".join(line.rstrip() for line in printed.get().splitlines())


def _console(**how: Any) -> Console:
    from rich.console import Console

    # In a notebook, rich would display the text instead of writing it.
    console = Console(highlight=False, force_jupyter=False, **how)
    if not console.is_terminal:
        console.width = WIDTH_WITHOUT_TERMINAL
    return console


# --- notebooks ---------------------------------------------------------------------------------------


def is_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return shell is not None and getattr(shell, "kernel", None) is not None


def html(head: str, tables: Iterable[Table]) -> str:
    """Return a line and tables as HTML."""
    return f"<div>{escape(head)}</div>" + "".join(map(_html_of, tables))


def link_to(dashboard: str) -> str:
    """Return the HTML of a link to a dashboard; empty if there is none."""
    where = escape(dashboard, quote=True)
    return where and f'<div><a href="{where}" target="_blank">dashboard</a></div>'


def _html_of(table: Table) -> str:
    if not table.rows:
        return f"<div>no {escape(table.title.lower())}</div>"
    aligned = ["right" if table.is_number(i) else "left" for i in range(len(table.columns))]
    head = _row("th", table.columns, aligned)
    body = "".join(_row("td", row, aligned) for row in table.rows)
    title = f'<div style="font-weight:bold">{escape(table.title)}</div>'
    return f'{title}<table style="{_TABLE}">{head}{body}</table>'


def facts(title: str, rows: Sequence[tuple[str, Any]]) -> str:
    """Return the HTML of one object: its name, and a table of facts; line breaks in values stay."""
    body = "".join(
        f'<tr><th style="{_CELL}left">{escape(name)}</th>'
        f'<td style="{_CELL}left;white-space:pre-wrap;font-family:monospace">{escape(_text(value))}</td></tr>'
        for name, value in rows
    )
    return (
        f'<div style="font-weight:bold">{escape(title)}</div><table style="{_TABLE}">{body}</table>'
    )


def _row(tag: str, cells: Iterable[Any], aligned: Sequence[str]) -> str:
    inside = ""
    for cell, side in zip(cells, aligned, strict=True):
        text = _text(cell)
        style = f"{side};white-space:nowrap" if len(text) <= SHORT else side
        inside += f'<{tag} style="{_CELL}{style}">{escape(text)}</{tag}>'
    return f"<tr>{inside}</tr>"
