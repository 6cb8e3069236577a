"""A note that an actor sends itself again and again, while there is a reason to.

Whoever finds a reason calls `start`, as often as it likes: there is one timer, and never two. Otherwise every
reason that comes while an earlier timer runs would begin a chain of timers of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the command line wants a constant of the watchdog, and nothing heavy
    from pw.core.actor import Env


class Ticker:
    """Delivers a note once a period, from `start` until `ticked` is told that nothing is left to do.

    Args:
        env: of the actor that handles the note.
        period_s: time between two notes, in seconds.
        note: what is delivered; its handler calls `ticked`.
    """

    def __init__(self, env: Env, period_s: float, note: object) -> None:
        self._env = env
        self._period_s = period_s
        self._note = note
        self._running = False

    def start(self, delay_s: float | None = None) -> None:
        """Have the note delivered, unless it is on its way already; `delay_s` is for this time only."""
        if not self._running:
            self._running = True
            self._env.call_later(self._period_s if delay_s is None else delay_s, self._note)

    def ticked(self, more: bool) -> None:
        """The note has come; with `more` it comes again after another period."""
        self._running = False
        if more:
            self.start()
