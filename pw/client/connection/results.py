"""What threads ask about arrays: whether they are ready, and their values.

A thread that has waited for a result of a program's newest run will often wait for that of the next one. So the
next run carries the question, and another run of the program ends that if no thread has waited.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

from pw.client.connection.questions import Questions, counted
from pw.client.connection.run_credits import RunCredits
from pw.client.connection.session_thread import SessionThread
from pw.client.connection.waiting import Fetching, Waiting
from pw.client.session.thread_messages import Await, Get
from pw.core.sharding import ArraySpec
from pw.display.advice import LARGE_BYTES, WAITS, Habits
from pw.display.live import About

PROGRAMS = 1024
"""So many programs have a result that is asked for ahead."""
PARTS_COUNTED = 256
"""The line of a wait for more arrays does not count the ready ones."""
DRIVEN_BYTES = 1 << 16
"""Values up to this size come in a message; a thread that waits for one may do the session's work."""


@dataclass(slots=True)
class _Awaited:
    position: int
    """Among the results of its program."""
    spec: ArraySpec
    array: int = 0
    """The result of the newest run, if it was asked for with the run."""


class Results:
    """Waits for a session's arrays, and fetches them.

    Args:
        post: hands a note to the session. Raises Error when the session has ended.
        thread: where the session lives.
        ask: tells why a wait is long.
        credits: the runs in flight.
        lock: the session's.
        habits: told of waits and of large values.
        show_output: shows the output of host functions that belongs before a result.
    """

    def __init__(
        self,
        post: Callable[[object], None],
        thread: SessionThread,
        ask: Questions,
        credits: RunCredits,
        lock: threading.RLock,
        habits: Habits,
        show_output: Callable[[], None],
    ) -> None:
        self._post = post
        self._thread = thread
        self._ask = ask
        self._credits = credits
        self._lock = lock
        self._habits = habits
        self._show_output = show_output
        self._waits = 0
        self.awaited: dict[int, _Awaited] = {}
        """By program, the result of its newest run that a thread has waited for."""
        self._ahead: dict[int, Future[None]] = {}
        """The futures of results that were asked for with their runs, until a thread waits for them."""

    def fetch(self, array: int, spec: ArraySpec) -> Fetching:
        """Return the future of the whole value, which hosts send to this process."""
        about = partial(self._about, ((array, spec),))
        drive = partial(self._drive, array) if spec.size_bytes <= DRIVEN_BYTES else None
        came = self._habits.fetched if spec.size_bytes >= LARGE_BYTES else None
        future = Fetching(spec, self._ask.in_the_way, about, self._show_output, drive, came)
        self._post(Get(array, spec, future))
        return future

    def fetch_shards(self, array: int, spec: ArraySpec, positions: tuple[int, ...]) -> Future[Any]:
        """Return the future of the shards at these mesh positions, as (box, value) in any order."""
        future: Future[Any] = Waiting(about=partial(self._about, ((array, spec),)))
        self._post(Get(array, spec, future, positions))
        return future

    def wait(self, arrays: Sequence[tuple[int, ArraySpec]]) -> Future[None]:
        """Return a future that is settled when all arrays are ready; it fails with the first error."""
        wanted = tuple(arrays)
        if len(wanted) == 1:
            array, spec = wanted[0]
            ahead = self._ahead.pop(array, None)
            if ahead is not None and not (ahead.done() and ahead.exception()):
                return ahead
            with self._lock:
                if (place := self._credits.place(array)) is not None:
                    known = self.awaited.get(place[0])
                    if known is None or known.array not in self._ahead:
                        self.awaited[place[0]] = _Awaited(place[1], spec)
                    # Some were released before a thread waited.
                    if len(self.awaited) > PROGRAMS:
                        self.forget(next(iter(self.awaited)))
        future = self._future_of(wanted)
        self._post(Await(wanted, future))
        return future

    def ask_ahead(self, program: int, made: Sequence[int]) -> Await | None:
        """Ask for a result together with its run, as a thread has waited for that result of the last run.

        Needs the session's lock, and that the program is one of `awaited`.
        """
        known = self.awaited[program]
        if self._ahead.pop(known.array, None) is not None:  # no thread has waited for it
            del self.awaited[program]
            return None
        known.array = made[known.position]
        wanted = ((known.array, known.spec),)
        future = self._ahead[known.array] = self._future_of(wanted)
        return Await(wanted, future)

    def forget(self, program: int) -> None:
        """Forget a program that is released; needs the session's lock."""
        if (known := self.awaited.pop(program, None)) is not None:
            self._ahead.pop(known.array, None)

    def _future_of(self, wanted: tuple[tuple[int, ArraySpec], ...]) -> Future[None]:
        about = partial(self._about, wanted)
        drive = partial(self._drive, wanted[-1][0]) if wanted else None
        return Waiting(self._ask.in_the_way, about, self._show_output, drive)

    def _drive(self, array: int, future: Future[Any]) -> None:
        """A thread begins to wait for an array."""
        self._waits += 1
        if not self._waits % WAITS:
            is_newest = self._credits.is_newest(array) and not future.done()
            self._habits.waited(self._credits.sent, is_newest)
        self._thread.drive(future)

    def _about(self, arrays: tuple[tuple[int, ArraySpec], ...]) -> About:
        """Describe a wait for these arrays."""
        parts: Sequence[Future[None]] = ()
        if 1 < len(arrays) <= PARTS_COUNTED:
            parts = [self.wait([one]) for one in arrays]
        what = arrays[0][1].short if len(arrays) == 1 else counted(len(arrays))
        with self._lock:
            makers = self._credits.makers({array for array, _ in arrays})
        names = ", ".join(map(repr, makers[:3])) + (", ..." if len(makers) > 3 else "")
        return About(f"{what} of {names}" if names else what, self._ask.ask_why, parts)
