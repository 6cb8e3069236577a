"""The runs that a session has in flight: how many, what was uploaded for them, and their names.

The controller gives a session credits, one for each run in flight. A call without a credit waits.
So does a call that uploads a large host value while `AHEAD_BYTES` of such values belong to runs in
flight.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Set
from itertools import islice

from pw.client.session.thread_messages import LOCKED_S

AHEAD_BYTES = 1 << 30
"""Uploads for runs in flight that a call does not wait for: the hosts hold the inputs of every step ahead.
It has room for some large batches, so that hosts receive the next one while they compute."""
RECENT = 64
"""Newest runs that are searched for the one that makes an array."""
CALLS_NAMED = 1024
"""Newest runs that keep their names: more than may be in flight."""


class RunCredits:
    """Counts runs and their uploads; methods need the session's lock, but for those that the session calls."""

    def __init__(self, lock: threading.RLock) -> None:
        self._lock = lock
        self._uncounted: deque[int] = deque()
        """Counts of runs that have ended, one for each time that the session was told."""
        self.changed = threading.Condition(lock)
        """Notified when runs have ended, or the session."""
        self.granted = 0
        """Number of runs that may be in flight."""
        self.closed = False
        """The session has ended: waits are over."""
        self._waiting: list[Callable[[], object]] = []
        self.sent = 0
        """Number of runs that were sent."""
        self._ended = 0
        self._effects = 0
        """The newest run that calls Python functions, counted as `sent`."""
        self._inputs: deque[tuple[int, int]] = deque()
        """Number of the run that needs each upload, and the upload's size in bytes."""
        self.inputs_bytes = 0
        self._calls: deque[tuple[int, int, int, str, bool]] = deque(maxlen=CALLS_NAMED)
        """Number, count of results, program, name of the program and effects of each of the newest runs."""

    def started(self, run: int, results: int, program: int, name: str, has_effects: bool) -> None:
        """Count a run that was sent."""
        self.sent += 1
        if has_effects:
            self._effects = self.sent
        self._calls.append((run, results, program, name, has_effects))

    def grant(self, count: int) -> None:
        """Give back the credits of runs that have ended; called by the session."""
        self._uncounted.append(count)
        self.count_ended()

    def count_ended(self) -> None:
        """Count runs that have ended, and wake waiting calls; the next tick does it if the lock is not free."""
        self.unless_locked(self._count_ended)

    def unless_locked(self, act: Callable[[], None]) -> None:
        """Do something of the session that needs the lock, unless a thread keeps that for `LOCKED_S`."""
        if self._lock.acquire(timeout=LOCKED_S):
            try:
                act()
            finally:
                self._lock.release()

    def _count_ended(self) -> None:
        while self._uncounted:
            self._ended += self._uncounted.popleft()
            self._notify()

    def when_credit(self, call: Callable[[], object]) -> None:
        """Call `call` once, when another run may be sent; now, if that is so already."""
        if self.has_credit():
            call()
        else:
            self._waiting.append(call)

    def _notify(self) -> None:
        self.changed.notify_all()
        if self._waiting and self.has_credit():
            waiting, self._waiting = self._waiting, []
            for call in waiting:
                call()

    def close(self) -> None:
        """The session has ended; wake waiting calls."""
        self.closed = True
        self._notify()

    def has_credit(self) -> bool:
        """Whether another run may be sent."""
        return self.sent - self._ended < self.granted or self.closed

    def uploaded(self, size_bytes: int) -> None:
        """Count an upload for the next run."""
        self._inputs.append((self.sent + 1, size_bytes))
        self.inputs_bytes += size_bytes

    def has_no_effects(self) -> bool:
        """Whether no run in flight calls Python functions, where runs end in the order of their calls."""
        return self._ended >= self._effects or self.closed

    def with_effects(self, runs: Collection[int]) -> dict[int, str]:
        """Return those of these runs that call Python functions, with the names of their programs."""
        return {run: name for run, _, _, name, effects in self._calls if effects and run in runs}

    def has_room(self) -> bool:
        """Whether another upload may be sent. Assumes that runs end in the order of their calls."""
        while self._inputs and self._inputs[0][0] <= self._ended:
            self.inputs_bytes -= self._inputs.popleft()[1]
        is_idle = self.sent <= self._ended or self.closed
        return self.inputs_bytes < AHEAD_BYTES or is_idle

    def is_newest(self, array: int) -> bool:
        """Return whether the newest run makes this array."""
        run, results, *_ = self._calls[-1] if self._calls else (0, 0)
        return run - results <= array < run

    def place(self, array: int) -> tuple[int, int] | None:
        """Return the program that makes an array, and its position among the results; None for other arrays.

        One of the `RECENT` newest runs makes it, and calls no Python functions.
        """
        for run, results, program, _, has_effects in islice(reversed(self._calls), RECENT):
            position = array - (run - results)
            if 0 <= position < results:
                return None if has_effects else (program, position)
        return None

    def makers(self, arrays: Set[int]) -> list[str]:
        """Return the names of the programs that make these arrays, if they are among the newest runs."""
        names = (
            name
            for run, results, _, name, _ in list(self._calls)
            if any(array in arrays for array in range(run - results, run))
        )
        return list(dict.fromkeys(filter(None, names)))
