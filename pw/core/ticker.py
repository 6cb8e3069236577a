"""A timer that an actor sets again and again, while there is a reason to.

Every reason calls `start`, and there is still only one timer. Otherwise each reason that comes while a
timer runs would begin a chain of timers of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the command line needs a constant of the watchdog, and nothing heavy
    from pw.core.actor import Env


class Ticker:
    """Delivers a message once a period, from `start` until `ticked(more=False)`.

    Args:
        env: of the actor that handles the message.
        period_s: time between two messages, in seconds.
        note: the message; its handler calls `ticked`.
    """

    def __init__(self, env: Env, period_s: float, note: object) -> None:
        self._env = env
        self._period_s = period_s
        self._note = note
        self._running = False

    def start(self, delay_s: float | None = None) -> None:
        """Set the timer unless it is set, for a period or once for `delay_s`."""
        if not self._running:
            self._running = True
            self._env.call_later(self._period_s if delay_s is None else delay_s, self._note)

    def ticked(self, more: bool) -> None:
        """The timer has ended; with `more`, set it again."""
        self._running = False
        if more:
            self.start()
