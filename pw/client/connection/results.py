"""What threads ask about arrays: whether they are ready, and their values.

A thread that has waited for a result of a recent run of a program will often wait for that of the next one, at
once or some runs later. So the next run carries the question, and another run of the program ends that if no
thread has waited for such a result since.
A thread that waits handles the answers of hosts itself, if it can (`SessionThread.drive`).
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
from pw.client.display.advice import LARGE_BYTES, WAITS, Habits
from pw.client.display.live import About
from pw.client.session.thread_messages import AskedAhead, Await, Get
from pw.core.messages import INLINE_BYTES
from pw.core.sharding import ArraySpec

PROGRAMS = 1024
"""Programs, at most, of which a result is asked for ahead."""
MOST_AHEAD = 128
"""Results, at most, that are asked for ahead."""
PARTS_COUNTED = 256
"""The line of a wait for more arrays does not count the ready ones."""


@dataclass(slots=True)
class _Awaited:
    position: int
    """Among the results of its program."""
    spec: ArraySpec
    is_value: bool
    """True if a thread has read the value of such a result, and not only waited for it."""
    is_wanted: bool = True
    """True if a thread has waited for such a result since the last run."""
    open: int = 0
    """Number of results that were asked for with their runs, and for which no thread has waited."""


class Results:
    """Waits for a session's arrays, and fetches them.

    Args:
        check_alive: raises Error when the session has ended, or is that of another process.
        thread: thread of the session.
        ask: tells why a wait is long.
        credits: the runs in flight.
        lock: the session's.
        habits: told of waits and of large values.
        show_output: shows the output of host functions that belongs before a result.
    """

    def __init__(
        self,
        check_alive: Callable[[], None],
        thread: SessionThread,
        ask: Questions,
        credits: RunCredits,
        lock: threading.RLock,
        habits: Habits,
        show_output: Callable[[], None],
    ) -> None:
        self._check_alive = check_alive
        self._thread = thread
        self._ask = ask
        self._credits = credits
        self._lock = lock
        self._habits = habits
        self.show_output = show_output
        self.look, self.watch, self.wake = thread.look, thread.watch, thread.wake
        self._waits = 0
        self.awaited: dict[int, _Awaited] = {}
        """Result that threads wait for of the runs of each program."""
        self._ahead: dict[int, tuple[Waiting[Any], _Awaited, AskedAhead]] = {}
        """Results that were asked for with their runs, until a thread waits for them."""

    def fetch(self, array: int, spec: ArraySpec) -> Fetching:
        """Return the future of the whole value, which hosts send to this process."""
        if spec.size_bytes <= INLINE_BYTES:
            with self._lock:
                asked = self._asked_ahead(array, spec, is_value=True)
            if isinstance(asked, Fetching):
                return asked
        future = self._make_fetching(array, spec)
        self._ask_hosts(Get(array, spec, future))
        return future

    def _make_fetching(self, array: int, spec: ArraySpec) -> Fetching:
        about = partial(self._about, ((array, spec),))
        came = self._habits.fetched if spec.size_bytes >= LARGE_BYTES else None
        future = Fetching(spec, self._ask.in_the_way, about, self.show_output, self, came)
        future.array = array
        return future

    def fetch_shards(self, array: int, spec: ArraySpec, positions: tuple[int, ...]) -> Future[Any]:
        """Return the future of the shards at these mesh positions, as (box, value) in any order."""
        future: Future[Any] = Waiting(about=partial(self._about, ((array, spec),)))
        self._ask_hosts(Get(array, spec, future, positions))
        return future

    def wait(self, arrays: Sequence[tuple[int, ArraySpec]]) -> Future[None]:
        """Return a future that is settled when all arrays are ready; it fails with the first error."""
        wanted = tuple(arrays)
        if len(wanted) == 1:
            with self._lock:
                asked = self._asked_ahead(*wanted[0], is_value=False)
            if asked is not None:
                return asked
        future = self.make_future(wanted)
        self._ask_hosts(Await(wanted, future))
        return future

    def _asked_ahead(self, array: int, spec: ArraySpec, *, is_value: bool) -> Waiting[Any] | None:
        """Return the future of a result that was asked for with its run, if it serves this thread.

        Notes that a thread waits for it, or reads its value, so that the next run asks. Needs the lock.
        """
        if (question := self._ahead.get(array)) is not None:
            future, asking, ahead = question
            asking.is_wanted, asking.is_value = True, is_value
            has_value = isinstance(future, Fetching)
            if is_value or not has_value:
                del self._ahead[array]
                asking.open -= 1
            if future.is_settled:
                serves = future.exception() is None and (has_value or not is_value)
            else:
                serves = not future.cancelled() if has_value else not is_value
            if not serves:
                return None
            ahead.is_waited_for = True
            return future
        if (place := self._credits.place(array)) is not None:
            program, position = place
            awaited = self.awaited.get(program)
            if awaited is None or not awaited.open:
                self.awaited[program] = _Awaited(position, spec, is_value)
            elif awaited.position == position:
                awaited.is_wanted, awaited.is_value = True, is_value
            # Some were released before a thread waited.
            if len(self.awaited) > PROGRAMS:
                self.forget(next(iter(self.awaited)))
        return None

    def ask(self, array: tuple[int, ArraySpec]) -> Future[None]:
        """Do as `wait` for one array, but do not take it for what a thread reads after each run."""
        future = self.make_future((array,))
        self._ask_hosts(Await((array,), future))
        return future

    def _ask_hosts(self, note: Await | Get) -> None:
        with self._lock:
            self._check_alive()
            self._thread.ask(note)

    def ask_ahead(self, program: int, results: Sequence[int]) -> Await | Get | None:
        """Ask for a result together with its run, if a thread has waited for such a result since the last one.

        Needs the session's lock, and that the program is one of `awaited`.
        """
        awaited = self.awaited[program]
        if not awaited.is_wanted:
            del self.awaited[program]
            return None
        awaited.is_wanted = False
        awaited.open += 1
        array, spec = results[awaited.position], awaited.spec
        ahead = AskedAhead()
        future: Waiting[Any]
        note: Await | Get
        if awaited.is_value:
            future = self._make_fetching(array, spec)
            note = Get(array, spec, future, ahead=ahead)
        else:
            future = self.make_future(((array, spec),))
            note = Await(((array, spec),), future, ahead)
        self._ahead[array] = future, awaited, ahead
        if len(self._ahead) > MOST_AHEAD:
            self._ahead.pop(next(iter(self._ahead)))[1].open -= 1
        return note

    def forget(self, program: int) -> None:
        """Forget a program that is released; needs the session's lock."""
        if (gone := self.awaited.pop(program, None)) is not None and gone.open:
            for array in [array for array, one in self._ahead.items() if one[1] is gone]:
                del self._ahead[array]

    def make_future(self, wanted: tuple[tuple[int, ArraySpec], ...]) -> Waiting[None]:
        """Return a future for what is wanted, which asks nothing itself."""
        about = partial(self._about, wanted)
        answers = self if wanted else None
        future: Waiting[None] = Waiting(self._ask.in_the_way, about, self.show_output, answers)
        if wanted:
            future.array = wanted[-1][0]
        return future

    def drive(self, future: Waiting[Any], timeout_s: float) -> None:
        """A thread begins to wait for an array (`pw.client.connection.waiting.Answers`)."""
        self._waits += 1
        if not self._waits % WAITS:
            is_newest = self._credits.is_newest(future.array) and not future.is_settled
            self._habits.waited(self._credits.sent, is_newest)
        self._thread.drive(future, timeout_s)

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
