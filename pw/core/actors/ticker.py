"""A timer that an actor sets again and again, while there is a reason to.

Every reason calls `start`, and there is still only one timer. Otherwise each reason that comes while a
timer runs would begin a chain of timers of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the command line needs a constant of the watchdog, and nothing heavy
    from pw.core.actors.actor import Env


class Ticker:
    """Calls a method of an actor once a period, from `start` until the method returns False.

    Args:
        env: of the actor.
        period_s: time between two calls, in seconds.
        act: the method; returns whether to call it once more.
    """

    def __init__(self, env: Env, period_s: float, act: Callable[[], bool]) -> None:
        self._env = env
        self._period_s = period_s
        self._act = act
        self.is_running = False
        """True while the timer is set."""

    def start(self, delay_s: float | None = None) -> None:
        """Set the timer unless it is set, for a period or once for `delay_s`."""
        if not self.is_running:
            self.is_running = True
            self._env.call_later(self._period_s if delay_s is None else delay_s, self)

    def __call__(self) -> None:
        """The timer has ended: call the method, and set the timer again if it says so."""
        self.is_running = False
        if self._act():
            self.start()

    def __repr__(self) -> str:
        return self._act.__qualname__
