"""Notices that an actor's work in flight makes no progress.

The actor reports progress (`went_on`) and that work is in flight (`watch`). One timer runs while work is
in flight, whatever its amount; when it ends, the actor gets a `LookForStall` and asks `stalled`. A message
costs the reading of a clock, no more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the command line needs the constant, and nothing heavy
    from pw.core.actors.actor import Env

STALL_S = 30.0
"""Seconds without progress after which a stall is reported."""


@dataclass(frozen=True, slots=True)
class LookForStall:
    """Timer of a watchdog: look for a stall."""


class Watchdog:
    """Reports each stall once.

    Args:
        env: of the actor that handles the `LookForStall`s.
        stall_s: how long without progress is a stall, in seconds.
    """

    def __init__(self, env: Env, stall_s: float) -> None:
        self._env = env
        self._stall_s = stall_s
        self._is_set = False
        self.progress_s = env.now_s()
        """Time of the last progress, in seconds."""
        self._told_s = -1.0

    def went_on(self) -> None:
        """Something has begun, moved or ended."""
        self.progress_s = self._env.now_s()

    @property
    def quiet_s(self) -> float:
        """Seconds since there was progress."""
        return self._env.now_s() - self.progress_s

    def watch(self) -> None:
        """Work is in flight: set the timer unless it is set."""
        self._set(self._stall_s)

    def _set(self, delay_s: float) -> None:
        if not self._is_set:
            self._is_set = True
            self._env.call_later(delay_s, LookForStall())

    def stalled(self, in_flight: bool) -> bool:
        """Return whether there is a stall that was not reported; call it at every `LookForStall`."""
        self._is_set = False
        if not in_flight:
            return False
        left_s = self._stall_s - self.quiet_s
        if left_s > 0:
            self._set(left_s)
            return False
        self._set(self._stall_s)
        is_new, self._told_s = self._told_s != self.progress_s, self.progress_s
        return is_new
