"""Notices that what is under way does not go on.

An actor says when something went on (`went_on`) and that something is under way (`watch`). One timer runs while
anything is, however much that may be; when it ends, the actor gets a `Look` and asks `stalled`.
Nothing happens on the way of a message but the reading of a clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pw.core.ticker import Ticker

if TYPE_CHECKING:  # the command line wants the constant, and nothing heavy
    from pw.core.actor import Env

STALL_S = 30.0
"""After so long without any progress somebody shall be told why."""


@dataclass(frozen=True, slots=True)
class Look:
    """Note of a watchdog to its actor: it is time to look."""


class Watchdog:
    """Says once for every stall that there is one.

    Args:
        env: of the actor that handles the `Look`s.
        stall_s: for how long nothing has to happen, in seconds.
    """

    def __init__(self, env: Env, stall_s: float) -> None:
        self._env = env
        self._stall_s = stall_s
        self._looks = Ticker(env, stall_s, Look())
        self.progress_s = env.now_s()
        """When something went on last."""
        self._told_s = -1.0

    def went_on(self) -> None:
        """Something has begun, moved or ended."""
        self.progress_s = self._env.now_s()

    @property
    def quiet_s(self) -> float:
        """How long ago anything went on."""
        return self._env.now_s() - self.progress_s

    def watch(self) -> None:
        """Something is under way: have it looked after."""
        self._looks.start()

    def stalled(self, under_way: bool) -> bool:
        """Whether there is a stall that nobody was told of; to be asked at every `Look`."""
        self._looks.ticked(more=False)
        if not under_way:
            return False
        left_s = self._stall_s - self.quiet_s
        if left_s > 0:
            self._looks.start(left_s)
            return False
        self._looks.start()
        is_new, self._told_s = self._told_s != self.progress_s, self.progress_s
        return is_new
