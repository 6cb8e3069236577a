"""Which computations are over so soon that to change threads for them costs more than they do.

A computation is *straight* if it runs on one device alone and has no loops, branches or native calls: it
takes as long in one call as in another. When it is installed it is on trial. It proves quick if every call
of the trial had ended when it returned, and the luckiest took less than a change of threads there and back,
in processor time of the caller as well as on the clock (which sees what other threads did for it).

Everything here is told what happened and when; it looks at no clock itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

CALLS = 16
"""Calls of a trial."""

PROCESSOR_S = 60e-6
CLOCK_S = 150e-6
"""What the luckiest call of a trial may take."""

LONG_S = 1e-3
"""A quick computation that takes longer than this is on trial again."""

SOON_S = 100e-6
"""Computations that come after one another faster than this keep another thread awake."""


@dataclass(slots=True)
class _Trial:
    """What the calls were like so far."""

    calls: int = 0
    ended: int = 0
    """Calls whose results were there when they returned."""
    processor_s: float = math.inf
    clock_s: float = math.inf
    """The least that a call took: the first ones set it up, others are unlucky."""


class Quick:
    """The quick computations of a host, by their keys.

    `trials` and `proven` are for others to look into, on the hot path.
    """

    def __init__(self) -> None:
        self.trials: dict[bytes, _Trial] = {}
        """Those on trial, whose calls are to be timed (`tried`)."""
        self.proven: set[bytes] = set()
        self._came_s = -math.inf

    def try_out(self, key: bytes) -> None:
        """A straight computation has been installed."""
        self.proven.discard(key)
        self.trials[key] = _Trial()

    def forget(self, key: bytes) -> None:
        """A computation is not installed any more."""
        self.proven.discard(key)
        self.trials.pop(key, None)

    def tried(self, key: bytes, processor_s: float, clock_s: float, *, ended: bool) -> None:
        """A call of one on trial took so long, and had `ended` when it returned, or not."""
        trial = self.trials[key]
        trial.calls += 1
        trial.ended += ended
        trial.processor_s = min(trial.processor_s, processor_s)
        trial.clock_s = min(trial.clock_s, clock_s)
        if trial.calls == CALLS:
            del self.trials[key]
            if trial.ended == CALLS and trial.processor_s < PROCESSOR_S and trial.clock_s < CLOCK_S:
                self.proven.add(key)

    def took(self, key: bytes, clock_s: float) -> None:
        """A call of one that is quick took so long."""
        if clock_s > LONG_S:
            self.try_out(key)

    def comes_alone(self, now_s: float) -> bool:
        """A computation comes now: whether the one before it came some time ago."""
        before_s, self._came_s = self._came_s, now_s
        return now_s - before_s > SOON_S
