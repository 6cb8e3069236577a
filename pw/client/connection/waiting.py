"""Futures of a session: a long wait shows a line, and a timeout says why the wait took so long."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, InvalidStateError
from operator import attrgetter
from typing import Any, Protocol, TypeVar

import numpy as np

from pw.client.display.live import QUIET_S, About, patiently
from pw.client.session.thread_messages import LOCKED_S, Part
from pw.core.errors import ArgumentError
from pw.core.sharding import ArraySpec, box_slices, dtype_of

T = TypeVar("T")

_LOG = logging.getLogger(__name__)

POLL_S = 0.5
"""Seconds below which a timeout is a poll: its error comes at once, without an explanation."""


def seconds(timeout_s: float | None) -> float | None:
    """Return a user's timeout, None for no limit. Raises ArgumentError if it is no number of seconds."""
    if timeout_s is None or timeout_s == math.inf:
        return None
    try:
        fits = timeout_s >= 0
    except TypeError:
        fits = False
    if not fits:
        raise ArgumentError(
            f"a timeout is a number of seconds, 0 or more, or None for no limit; not {timeout_s!r}"
        )
    return timeout_s


def time_left(
    timeout_s: float | None, clock: Callable[[], float] = time.monotonic
) -> Callable[[], float | None]:
    """Return what tells how much of a timeout that begins now is left, in seconds; None for no timeout.

    Raises ArgumentError if it is no number of seconds.
    """
    limit_s = seconds(timeout_s)
    if limit_s is None:
        return lambda: None
    end_s = clock() + limit_s
    return lambda: max(0.0, end_s - clock())


class _Condition(threading.Condition):
    """A condition that a signal's handler cannot leave locked.

    The handler may raise between any two steps of Python, so also in `Condition.__enter__`, when the lock is
    taken and no `with` knows of it. Here a `with` calls the lock's own methods, which are no steps of Python.
    """

    __enter__: Any = property(attrgetter("_lock.__enter__"))
    __exit__: Any = property(attrgetter("_lock.__exit__"))


class Answers(Protocol):
    """The answers of hosts, which a thread that waits for one may handle itself."""

    def drive(self, future: Waiting[Any], timeout_s: float) -> None:
        """Handle them in this thread until the future is settled, for at most so long, if it can."""

    def wake(self) -> None:
        """The future is settled, and a thread may be in `drive`."""

    def look(self) -> None:
        """Handle those that have come, if this thread can."""

    def watch(self) -> None:
        """Have another thread handle them."""


class Waiting(Future[T]):
    """A future whose long wait shows a line (see `pw.client.display.live`).

    `concurrent.futures.wait` and `as_completed` do not know it: it is settled without their lock.

    Args:
        explain: returns in about a second why the cluster does not go on; empty if it cannot tell.
        about: describes the wait for the line.
        before: called in the waiting thread, before it gets the result.
        answers: settle the future; None if a thread does that, whatever others do.
    """

    array = 0
    """The array that hosts answer for, or the last one."""

    _lock_of_threads: _Condition | None = None

    def __init__(
        self,
        explain: Callable[[], str] | None = None,
        about: Callable[[], About] | None = None,
        before: Callable[[], None] = lambda: None,
        answers: Answers | None = None,
    ) -> None:
        # All that a `Future` has but its lock, which most waits do not need.
        self._state = "PENDING"
        self._result: Any = None
        self._exception: BaseException | None = None
        self._waiters: list[Any] = []
        self._done_callbacks: list[Any] = []
        self.explain = explain
        self.about = about
        self._before = before
        self._answers = answers
        self.is_settled = False
        """True if there is a result or an error; `done` looks at what has come, too."""

    @property
    def _condition(self) -> Any:  # type: ignore[override]
        """The lock of a `Future`, made for the first thread that needs it."""
        lock = self._lock_of_threads
        return lock or self.__dict__.setdefault("_lock_of_threads", _Condition())

    def done(self) -> bool:
        """Return whether there is a result or an error; looks at what has come."""
        if self._state == "PENDING" and self._answers is not None:
            self._answers.look()
        return self._state != "PENDING"

    def cancelled(self) -> bool:
        """Return whether it was cancelled; needs no lock."""
        return self._state.startswith("CANCELLED")

    def add_done_callback(self, fn: Callable[[Future[T]], object]) -> None:
        """Call `fn` with the future when it is settled."""
        super().add_done_callback(fn)
        if self._answers is not None:
            self._answers.watch()

    def set_result(self, result: T | None, exception: BaseException | None = None) -> None:
        """Settle the future with a result; threads that wait hear of it soon if its lock is not free.

        Raises InvalidStateError if it is settled, or was cancelled.
        """
        if self._state != "PENDING":
            raise InvalidStateError(f"{self._state}: {self!r}")
        self._result, self._exception = result, exception
        self._state = "FINISHED"
        self.is_settled = True
        # A thread that makes the lock from now on sees the state.
        if (lock := self._lock_of_threads) is not None:
            if lock.acquire(timeout=LOCKED_S):
                lock.release()
                self._tell()
            else:
                threading.Thread(target=self._tell, name="pw-settle", daemon=True).start()
        if self._answers is not None:
            self._answers.wake()

    def set_exception(self, exception: BaseException | None) -> None:
        """Settle the future with an error; see `set_result`."""
        self.set_result(None, exception)

    def _tell(self) -> None:
        """Wake the threads that wait, and make the calls that do."""
        with self._condition:
            self._condition.notify_all()
        for call in self._done_callbacks:
            try:
                call(self)
            except Exception:  # noqa: BLE001 - as of `Future`
                _LOG.exception("a call at the end of %r has failed", self)

    def result(self, timeout: float | None = None, asked_s: float | None = None) -> T:
        """Return the result within `timeout` seconds. Raises the future's error, or TimeoutError.

        The error says `asked_s` if that is given: several waits share what the user asked for.
        """
        try:
            if not self.is_settled:
                self._wait(timeout)
            if self._state != "FINISHED":
                return self._at_most(timeout if asked_s is None else asked_s)
            if self._exception is None:
                result: T = self._result
                return result
            return super().result(0)
        finally:
            self._before()

    def _wait(self, timeout: float | None) -> None:
        shortly_s = QUIET_S if timeout is None else min(timeout, QUIET_S)
        until_s = time.monotonic() + shortly_s
        if self._answers is not None:
            self._answers.drive(self, shortly_s)
            if self.is_settled:
                return
        if not self.settles(max(0.0, until_s - time.monotonic())):
            if self.about is None:
                self.settles(None if timeout is None else max(0.0, timeout - QUIET_S))
            elif timeout is None or timeout > QUIET_S:
                patiently(self.settles, self.about, timeout, waited_s=QUIET_S)

    def settles(self, timeout_s: float | None) -> bool:
        """Wait at most so long; return whether there is a result or an error."""
        if self._answers is not None:
            self._answers.watch()
        try:
            self.exception(timeout_s)
        except TimeoutError:
            return self.done()
        except CancelledError:
            pass
        return True

    def _at_most(self, asked_s: float | None) -> T:
        try:
            return super().result(0)
        except TimeoutError:
            if self.done():  # the future failed with TimeoutError, or was settled just now
                return super().result(0)
            raise TimeoutError(self._in_vain(asked_s)) from None

    def _in_vain(self, timeout_s: float | None) -> str:
        words = f"not within {timeout_s or 0:g} s"
        if self.explain is None or timeout_s is None:
            return words
        if timeout_s < POLL_S:
            return f"{words}; pw.why() says why, and so does a timeout of {POLL_S:g} s"
        return f"{words}. {self.explain()}".rstrip(". ")


class Fetching(Waiting[Any]):
    """The future of a value; the first thread that asks for the result puts its parts together.

    Args:
        spec: spec of the value.
        explain, about, before, answers: see `Waiting`.
        came: called with the value when it was put together.
    """

    def __init__(
        self,
        spec: ArraySpec,
        explain: Callable[[], str] | None = None,
        about: Callable[[], About] | None = None,
        before: Callable[[], None] = lambda: None,
        answers: Answers | None = None,
        came: Callable[[np.ndarray[Any, Any]], None] | None = None,
    ) -> None:
        super().__init__(explain, about, before, answers)
        self._spec = spec
        self._came = came
        self._value: np.ndarray[Any, Any] | None = None
        self._parts: list[Part] = []

    def set_result(self, result: Any, exception: BaseException | None = None) -> None:
        """Take the parts of the value."""
        self._parts = result
        super().set_result(None, exception)

    def result(
        self, timeout: float | None = None, asked_s: float | None = None
    ) -> np.ndarray[Any, Any]:
        """Return the whole value, read-only; see `Waiting.result`."""
        super().result(timeout, asked_s)
        parts = self._parts  # read before `_value`: another thread sets that first
        if self._value is None:
            self._value = _assembled(self._spec, parts)
            self._parts = []
            if self._came is not None:
                self._came(self._value)
        return self._value


def _assembled(spec: ArraySpec, parts: list[Part]) -> np.ndarray[Any, Any]:
    if len(parts) == 1 and parts[0][0] == tuple((0, size) for size in spec.shape):
        value = parts[0][1]
    else:
        value = np.empty(spec.shape, dtype_of(spec.dtype))
        for box, part in parts:
            value[box_slices(box)] = part
    value.flags.writeable = False
    return value
