"""The line that a long wait shows: what it is for, since when, how far it is, and what holds it up.

The line appears on standard error if that is a terminal, in the cell of a notebook, and nowhere else. The
waiting thread writes it between two polls of its future; there is no thread for that, and a short wait costs
nothing. If several threads wait, one has the line, and the next one gets it afterwards. Other output may come
in between: the line is then written again below it.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

from pw.client.show.tables import is_notebook
from pw.core.errors import Error

QUIET_S = 3.0
"""How long a wait may take before it is worth a word."""

TICK_S = 0.25
"""How often the line is looked after."""

ASK_S = 5.0
"""How long after an answer the controller is asked again why it does not go on."""

IDLE = "Nothing is under way"
"""What the controller says if nothing waits for it; that is no news to who waits for something else."""

Parts = Sequence[Future[Any]]


@dataclass(frozen=True, slots=True)
class About:
    """What can be said of a wait."""

    what: str
    """What it is for."""
    ask: Callable[[], Future[Any]] | None = None
    """Asks the controller why it does not go on; the answer has the text."""
    parts: Parts = ()
    """One future for each thing that is waited for, if there are several."""
    progress: Callable[[], str] | None = None
    """How far it is, if there are no parts to be counted."""


class Screen(Protocol):
    """Where one line can be shown, and shown anew."""

    def show(self, line: str) -> None:
        """Put this in the place of what was shown."""

    def clear(self) -> None:
        """Leave nothing behind."""


# --- what is said ------------------------------------------------------------------------------------


class Line:
    """One wait's line; what to say, and when to ask."""

    def __init__(
        self, about: About, screen: Screen, began_s: float, clock: Callable[[], float]
    ) -> None:
        self._about = about
        self._screen = screen
        self._began_s = began_s
        self._clock = clock
        self._asked: Future[Any] | None = None
        self._ask_at_s = began_s
        self._why = ""
        self._shown = ""

    def tick(self) -> None:
        """Show how it stands now, and ask why from time to time."""
        self._look_why()
        line = self.text()
        if line != self._shown:
            with _writing:
                _lines[:] = [self]
                self._shown = line
                self._screen.show(line)

    def hide(self) -> None:
        """Be out of the way of something else."""
        self._screen.clear()

    def again(self) -> None:
        """Come back below it."""
        self._screen.show(self._shown)

    def text(self) -> str:
        """The line as it is now."""
        about = self._about
        words = f"waiting {self._clock() - self._began_s:.0f} s for {about.what}"
        if about.parts:
            ready = sum(part.done() for part in about.parts)
            words += f": {ready} of {len(about.parts)} are ready"
        elif about.progress is not None:
            words += f": {about.progress()}"
        return f"{words}. {self._why}" if self._why else words

    def _look_why(self) -> None:
        if self._asked is not None and self._asked.done():
            if not self._asked.cancelled() and self._asked.exception() is None:
                self._why = _first_sentence(self._asked.result().text)
            self._asked = None
            self._ask_at_s = self._clock() + ASK_S
        if self._asked is None and self._about.ask is not None and self._clock() >= self._ask_at_s:
            self._asked = self._about.ask()

    def close(self) -> None:
        """The wait is over."""
        with _writing:
            _lines.clear()
            self._screen.clear()


def _first_sentence(text: str) -> str:
    lines = text.splitlines()
    sentence = lines[0].partition(". ")[0] if lines else ""
    return "" if sentence == IDLE else sentence


# --- when it is said ---------------------------------------------------------------------------------

_turn = threading.Lock()
"""Held by the wait that has the line."""

_writing = threading.RLock()
"""Held while something is written to the screen."""

_lines: list[Line] = []
"""That which is shown, if one is."""

_here = threading.local()


@contextlib.contextmanager
def aside() -> Iterator[None]:
    """In the block, whole lines may be written: the line is out of their way, and comes back below."""
    with _writing:
        for line in _lines:
            with contextlib.suppress(OSError, ValueError):
                line.hide()
        yield
        for line in _lines:
            with contextlib.suppress(OSError, ValueError):
                line.again()


class Together:
    """In the block, this thread waits for one after the other of these."""

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
    """Return when `settles` says that it is over, or after `timeout_s`.

    Args:
        settles: waits for so many seconds at most (None: without end), and says whether it is over.
        about: what the wait is about; asked only if it takes long.
        timeout_s: how long to wait.
        waited_s: for how long it was waited for already.
        find_screen: where the line can be shown, if anywhere.
        clock: the time in seconds.
    """
    began_s = clock() - waited_s
    quiet_s = (QUIET_S if timeout_s is None else min(QUIET_S, timeout_s)) - waited_s
    if quiet_s > 0 and settles(quiet_s):
        return
    screen = (find_screen or screen_here)()
    line: Line | None = None
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
                    line = Line(_grouped(about()), screen, began_s, clock)
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


# --- where it is shown -------------------------------------------------------------------------------


def screen_here() -> Screen | None:
    """The terminal or notebook of this process; None if there is none, or `PW_PROGRESS=0` says so."""
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

    def show(self, line: str) -> None:
        """Write over the line, cut at the edge."""
        from rich.text import Text

        text = Text(line, style="dim")
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

    def show(self, line: str) -> None:
        """Change the output, or make it."""
        shown = {"text/plain": line}
        if self._handle is not None:
            self._handle.update(shown, raw=True)
            return
        ipython: Any = importlib.import_module("IPython.display")
        self._handle = ipython.display(shown, raw=True, display_id=True)

    def clear(self) -> None:
        """Leave it empty."""
        if self._handle is not None:
            self._handle.update({"text/plain": ""}, raw=True)
