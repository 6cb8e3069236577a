"""The line of a long wait: its purpose, how long it takes, how much is left, and what holds it up.

The line appears on standard error if that is a terminal, or in the cell of a notebook; elsewhere nothing does.
Where something is counted there is a bar as well: of futures that are ready, or of what the controller counts
for this client (`Explanation.left`), such as hosts that compile, replicas of a checkpoint and lost arrays.
The waiting thread writes it between two polls of its future, so a short wait costs nothing. If several threads
wait, one of them has the line, and then the next. After other output the line is written again below.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from html import escape
from typing import Any, NamedTuple, Protocol

from pw.client.display.tables import bar, is_notebook
from pw.core.errors import Error

QUIET_S = 3.0
"""Seconds of a wait before it shows a line."""

TICK_S = 0.25
"""Seconds between two updates of the line."""

ASK_S = 5.0
"""Seconds between an answer of the controller and the next question."""

IDLE = "Nothing is under way"
"""The controller's answer if no run is in flight; the line does not show it."""

STEADY_S = 1.0
"""Seconds of progress before the line says when it will end."""

Parts = Sequence[Future[Any]]


class Count(NamedTuple):
    """How much of a wait is over."""

    done: int
    total: int
    what: str = "are ready"
    """Words for the parts that are done."""


@dataclass(frozen=True, slots=True)
class About:
    """The description of a wait."""

    what: str
    """Purpose of the wait."""
    ask: Callable[[], Future[Any]] | None = None
    """Question to the controller what holds up the wait; the answer has the text."""
    parts: Parts = ()
    """Futures of the parts, if there are several."""
    progress: Callable[[], Count] | None = None
    """Count of the parts that are ready, if there are no futures of them."""


class Screen(Protocol):
    """A place that shows one line."""

    def show(self, line: str, part: float | None = None) -> None:
        """Replace the shown line; `part` of the wait is over, from 0 to 1."""

    def clear(self) -> None:
        """Remove the line."""


# --- the text ----------------------------------------------------------------------------------------


@dataclass(eq=False)
class WaitLine:
    """One wait's line: its text, and its questions to the controller."""

    _about: About
    _screen: Screen
    _began_s: float
    _clock: Callable[[], float]
    _asked: Future[Any] | None = None
    _ask_at_s: float = -math.inf
    _why: str = ""
    _left: Sequence[tuple[str, int]] = ()
    """Words and numbers of the parts that are left by the controller's count."""
    _most: dict[str, int] = field(default_factory=dict)
    """Largest number of each of these parts during this wait."""
    _first: tuple[float, Count] | None = None
    """Time of the first count in seconds, and the count."""
    _shown: tuple[str, float | None] = ("", None)

    def tick(self) -> None:
        """Update the line, and ask the controller from time to time."""
        self._look_why()
        shown = self.content()
        if shown != self._shown:
            with _writing:
                _lines[:] = [self]
                self._shown = shown
                self._screen.show(*shown)

    def hide(self) -> None:
        """Remove the line for other output."""
        self._screen.clear()

    def again(self) -> None:
        """Show the line again."""
        self._screen.show(*self._shown)

    def content(self) -> tuple[str, float | None]:
        """Return the line as it is now, and the part of the wait that is over if that is known."""
        # The reason is first: a terminal cuts the line at its edge.
        reason = f": {self._why};" if self._why else ""
        words = f"waiting {self._clock() - self._began_s:.0f} s{reason} for {self._about.what}"
        count = self._count()
        if count is not None:
            words += f": {count.done} of {count.total} {count.what}{self._rest(count)}"
        part = None if count is None or not count.total else count.done / count.total
        return words, part

    def _count(self) -> Count | None:
        about = self._about
        if about.parts:
            return Count(sum(part.done() for part in about.parts), len(about.parts))
        if about.progress is not None:
            return about.progress()
        for what, left in self._left:
            return Count(self._most[what] - left, self._most[what], what)
        return None

    def _rest(self, count: Count) -> str:
        """Return in words how long the rest takes, if it goes on as it did during this wait."""
        now_s = self._clock()
        if self._first is None or self._first[1][1:] != count[1:]:
            self._first = now_s, count
        first_s, first = self._first
        done, took_s = count.done - first.done, now_s - first_s
        if done <= 0 or took_s < STEADY_S or count.done == count.total:
            return ""
        return f", about {(count.total - count.done) * took_s / done:.0f} s left"

    def _look_why(self) -> None:
        if self._asked is not None and self._asked.done():
            if not self._asked.cancelled() and self._asked.exception() is None:
                answer = self._asked.result()
                self._why, self._left = _first_sentence(answer.text), answer.left
                for what, left in self._left:
                    self._most[what] = max(left, self._most.get(what, 0))
            self._asked = None
            self._ask_at_s = self._clock() + ASK_S
        if self._asked is None and self._about.ask is not None and self._clock() >= self._ask_at_s:
            self._asked = self._about.ask()

    def close(self) -> None:
        """Remove the line for good."""
        with _writing:
            _lines.clear()
            self._screen.clear()


def _first_sentence(text: str) -> str:
    lines = text.splitlines()
    sentence = lines[0].partition(". ")[0] if lines else ""
    return "" if sentence == IDLE else sentence


# --- the wait ----------------------------------------------------------------------------------------

_turn = threading.Lock()
"""Lock of the wait that has the line."""

_writing = threading.RLock()
"""Lock of a thread that writes to the screen."""

_lines: list[WaitLine] = []
"""The shown line, if there is one."""

_here = threading.local()


@contextlib.contextmanager
def aside() -> Iterator[None]:
    """Remove the line for the block, which may write whole lines; show it again below them."""
    with _writing:
        for line in _lines:
            with contextlib.suppress(OSError, ValueError):
                line.hide()
        yield
        for line in _lines:
            with contextlib.suppress(OSError, ValueError):
                line.again()


class Together:
    """In the block, this thread waits for these futures one by one; the line counts them."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts if len(parts) > 1 else ()

    def __enter__(self) -> None:
        _here.parts = self._parts

    def __exit__(self, *exc: object) -> None:
        _here.parts = ()


def patiently(
    settles: Callable[[float | None], bool],
    about: Callable[[], About],
    timeout_s: float | None = None,
    *,
    waited_s: float = 0.0,
    find_screen: Callable[[], Screen | None] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Return when `settles` returns True, or after `timeout_s`; show a line if that takes long.

    Args:
        settles: waits for at most so many seconds (None: without end), and returns whether the wait is over.
        about: describes the wait; called only if it takes long.
        timeout_s: how long to wait.
        waited_s: how long the wait has taken already.
        find_screen: returns the screen, if there is one.
        clock: the time in seconds.
    """
    began_s = clock() - waited_s
    quiet_s = (QUIET_S if timeout_s is None else min(QUIET_S, timeout_s)) - waited_s
    if quiet_s > 0 and settles(quiet_s):
        return
    screen = (find_screen or screen_here)()
    line: WaitLine | None = None
    mine = False
    try:
        while True:
            rest_s = None if timeout_s is None else timeout_s - (clock() - began_s)
            if rest_s is not None and rest_s <= 0:
                return
            if screen is None:
                settles(rest_s)
                return
            try:
                mine = mine or _turn.acquire(blocking=False)
                if mine and line is None:
                    line = WaitLine(_grouped(about()), screen, began_s, clock)
                if line is not None:
                    line.tick()
            except (Error, OSError, ValueError):  # the session or the screen is gone
                screen = None
            if settles(TICK_S if rest_s is None else min(TICK_S, rest_s)):
                return
    finally:
        if mine:
            try:
                if line is not None:
                    line.close()
            except (OSError, ValueError):
                pass
            finally:
                _turn.release()


def _grouped(about: About) -> About:
    parts = about.parts or getattr(_here, "parts", ())
    return About(about.what, about.ask, parts, about.progress) if parts else about


# --- the screen --------------------------------------------------------------------------------------


def screen_here() -> Screen | None:
    """Return the terminal or notebook of this process; None if there is none, or with `PW_PROGRESS=0`."""
    if os.environ.get("PW_PROGRESS") == "0":
        return None
    if is_notebook():
        return Cell()
    if sys.stderr is None or not sys.stderr.isatty():
        return None
    terminal = Terminal()
    return terminal if terminal.can_erase else None


class Terminal:
    """The last line of standard error."""

    def __init__(self, **how: Any) -> None:
        from rich.console import Console

        self._console = Console(stderr=True, highlight=False, **how)

    @property
    def can_erase(self) -> bool:
        """Whether a line can be taken back."""
        return self._console.is_terminal and not self._console.is_dumb_terminal

    def show(self, line: str, part: float | None = None) -> None:
        """Write over the line, cut at the edge."""
        from rich.text import Text

        text = Text(line, style="dim")
        if part is not None and self._console.encoding.startswith("utf"):
            text = Text.assemble((bar(part), "green"), " ", text)
        text.truncate(self._console.width - 1, overflow="ellipsis")
        with self._console:  # all of it in one go
            self.clear()
            self._console.print(text, end="", soft_wrap=True)

    def clear(self) -> None:
        """Erase it."""
        from rich.control import Control
        from rich.segment import ControlType

        self._console.control(Control(ControlType.CARRIAGE_RETURN, (ControlType.ERASE_IN_LINE, 2)))


class Cell:
    """An output of the notebook's cell that is running."""

    def __init__(self) -> None:
        self._handle: Any = None

    def show(self, line: str, part: float | None = None) -> None:
        """Change the output, or make it."""
        drawn = "" if part is None else f'<progress value="{part:.3f}" max="1"></progress> '
        self._put({"text/plain": line, "text/html": f"<div>{drawn}{escape(line)}</div>"})

    def clear(self) -> None:
        """Leave it empty."""
        if self._handle is not None:
            self._put({"text/plain": "", "text/html": ""})

    def _put(self, shown: dict[str, str]) -> None:
        if self._handle is not None:
            self._handle.update(shown, raw=True)
            return
        ipython: Any = importlib.import_module("IPython.display")
        self._handle = ipython.display(shown, raw=True, display_id=True)
