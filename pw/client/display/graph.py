"""A program as a graph: its calls by slice and by level, and the values that move between slices.

A call is one level below the lowest of the calls whose results it takes. Calls of one function on one level
of one slice are drawn as one.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from html import escape

from pw.client.display.grid import COLOURS
from pw.client.display.tables import Shown, Table
from pw.core.programs.program import Program
from pw.core.sizes import size_in_words

LEVELS = 40
"""A program with more levels is drawn in part."""
WIDTH, HEIGHT, GAP = 190, 26, 22
"""Width and height of a box in a notebook, and the space below it, in pixels."""

Place = tuple[int, int]
"""A level and a column."""
Box = tuple[Place, str]
"""The calls of one function at one place."""


@dataclass(frozen=True, slots=True)
class DrawnMove:
    """Values that go from one slice to another."""

    value: str
    source: str
    destination: str
    type: str
    size_bytes: int
    count: int


@dataclass(frozen=True, slots=True, repr=False)
class ProgramDrawing(Shown):
    """The graph of a program; prints as tables, and is a drawing in notebooks."""

    name: str
    slices: tuple[str, ...]
    calls: int
    levels: int
    boxes: tuple[tuple[Box, int], ...]
    """Boxes of the drawing, each with the number of calls that it stands for."""
    arrows: tuple[tuple[Box, Box], ...]
    moves: tuple[DrawnMove, ...]

    @classmethod
    def of(cls, program: Program, island: Callable[[int], str]) -> ProgramDrawing:
        """Return the graph of a program; `island` returns the name of a slice's island."""
        slices = list(dict.fromkeys(one.placement.slice for one in program.computations))
        level: list[int] = []
        boxes: list[Box] = []
        arrows: dict[tuple[Box, Box], None] = {}
        moves: Counter[tuple[str, str, str, str, int]] = Counter()
        labels = {number: f"{island(number) or 'slice'} #{at}" for at, number in enumerate(slices)}
        for node in program.nodes:
            computation = program.computations[node.computation]
            values = node.args if node.guard is None else (*node.args, node.guard)
            makers = [value.node for value in values if value.node >= 0]
            level.append(1 + max((level[at] for at in makers), default=-1))
            here = (level[-1], slices.index(computation.placement.slice)), computation.name
            boxes.append(here)
            arrows |= dict.fromkeys((boxes[at], here) for at in makers)
            for value, wanted in zip(node.args, computation.inputs, strict=True):
                spec = program.spec_of(value)
                source, target = spec.placement.slice, wanted.placement.slice
                if source != target:
                    maker = f"input {value.index}" if value.node < 0 else boxes[value.node][1]
                    ends = labels.get(source, "another slice"), labels[target]
                    words = f"{maker} → {computation.name}"
                    moves[words, *ends, spec.short, spec.size_bytes] += 1
        return cls(
            program.name,
            tuple(labels.values()),
            len(boxes),
            1 + max(level, default=-1),
            tuple(Counter(boxes).items()),
            tuple(arrows),
            tuple(DrawnMove(*key, count) for key, count in moves.items()),
        )

    @property
    def head(self) -> str:
        """One line about the program."""
        moved = sum(move.count for move in self.moves)
        return (
            f"program {self.name}: {self.calls} call{'s' * (self.calls != 1)} on {len(self.slices)} "
            f"slice{'s' * (len(self.slices) != 1)}, {moved} value{'s' * (moved != 1)} "
            f"{'move' if moved != 1 else 'moves'} between them"
        )

    def tables(self) -> tuple[Table, ...]:
        """Return the table of calls, and that of moves if there are any."""
        cells: defaultdict[Place, list[str]] = defaultdict(list)
        for (place, name), count in self._drawn():
            cells[place].append(_counted(name, count))
        rows = [
            (number, *(", ".join(cells[number, column]) for column in range(len(self.slices))))
            for number in range(min(self.levels, LEVELS))
        ]
        if self.levels > LEVELS:
            rows.append((f"… {self.levels - LEVELS} more", *("",) * len(self.slices)))
        calls = Table("Calls", ("level", *self.slices), tuple(rows))
        moves = {
            "value": lambda m: m.value,
            "from": lambda m: m.source,
            "to": lambda m: m.destination,
            "type": lambda m: m.type,
            "bytes": lambda m: size_in_words(m.size_bytes),
            "count": lambda m: m.count,
        }
        moved = Table.of("Moves", ((move,) for move in self.moves[:LEVELS]), moves)
        return (calls, moved) if self.moves else (calls,)

    def _drawn(self) -> Iterator[tuple[Box, int]]:
        return (one for one in self.boxes if one[0][0][0] < LEVELS)

    def _repr_html_(self) -> str:
        at: dict[Box, tuple[float, float]] = {}
        row_y, y = 26.0, 26.0
        parts: list[str] = []
        stacked: Counter[Place] = Counter()
        last = 0
        for ((level, column), name), count in sorted(self._drawn()):
            if level != last:
                row_y, last = y + GAP, level
            x = 10.0 + column * (WIDTH + 60)
            top = row_y + stacked[level, column] * (HEIGHT + 6)
            stacked[level, column] += 1
            y = max(y, top + HEIGHT)
            at[(level, column), name] = x, top
            colour = COLOURS[column % len(COLOURS)][1]
            parts.append(
                f'<rect x="{x}" y="{top}" width="{WIDTH}" height="{HEIGHT}" rx="5" fill="{colour}" '
                f'stroke="#8889"/>'
                + _text(x + WIDTH / 2, top + 17, _short(_counted(name, count)), "#222")
            )
        lines = [_arrow(at[a], at[b]) for a, b in self.arrows if a in at and b in at]
        titles = [
            _text(10 + column * (WIDTH + 60) + WIDTH / 2, 16, name, "currentColor")
            for column, name in enumerate(self.slices)
        ]
        more = f"<div>… {self.levels - LEVELS} more levels</div>" if self.levels > LEVELS else ""
        width = len(self.slices) * (WIDTH + 60)
        return (
            f"<div>{escape(self.head)}</div>"
            f'<svg width="{width}" height="{y + 8}" xmlns="http://www.w3.org/2000/svg" '
            f'font-family="sans-serif" font-size="12">{"".join([*titles, *lines, *parts])}</svg>{more}'
        )


def _counted(name: str, count: int) -> str:
    return name if count == 1 else f"{name} × {count}"


def _short(text: str, most: int = 26) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def _text(x: float, y: float, words: str, colour: str) -> str:
    return f'<text x="{x}" y="{y}" text-anchor="middle" fill="{colour}">{escape(words)}</text>'


def _arrow(start: tuple[float, float], end: tuple[float, float]) -> str:
    """Return a curve from below one box to above another; one between slices is red."""
    (x, y), (to_x, to_y) = start, end
    x, to_x, y = x + WIDTH / 2, to_x + WIDTH / 2, y + HEIGHT
    colour = "#8889" if x == to_x else "#c0392b"
    middle = (y + to_y) / 2
    return (
        f'<path d="M{x} {y}C{x} {middle} {to_x} {middle} {to_x} {to_y}" fill="none" '
        f'stroke="{colour}" stroke-width="1.5"/>'
        f'<circle cx="{to_x}" cy="{to_y}" r="2.5" fill="{colour}"/>'
    )
