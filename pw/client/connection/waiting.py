"""Futures of a session: a long wait shows a line, and a timeout says why the wait took so long."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, InvalidStateError
from contextlib import suppress
from operator import attrgetter
from typing import Any, TypeVar

import numpy as np

from pw.client.session.thread_messages import Part
from pw.core.errors import ArgumentError
from pw.core.sharding import ArraySpec, box_slices, dtype_of
from pw.display.live import QUIET_S, About, patiently

T = TypeVar("T")

POLL_S = 0.5
"""A timeout shorter than this is a poll: its error comes at once, without an explanation."""
LOCKED_S = 5e-3
"""How long the session waits for a future's lock. The handler of a signal may have come in the midst of a wait
that has it, and wait for the session."""


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
    whole_s = seconds(timeout_s)
    if whole_s is None:
        return lambda: None
    end_s = clock() + whole_s
    return lambda: max(0.0, end_s - clock())


class _Condition(threading.Condition):
    """A condition that a signal's handler cannot leave locked.

    The handler may raise between any two steps of Python, so also in `Condition.__enter__`, when the lock is
    taken and no `with` knows of it. Here a `with` calls the lock's own methods, which are no steps of Python.
    """

    __enter__: Any = property(attrgetter("_lock.__enter__"))
    __exit__: Any = property(attrgetter("_lock.__exit__"))


class Waiting(Future[T]):
    """A future whose long wait shows a line (see `pw.display.live`).

    Args:
        explain: returns in about a second why the cluster does not go on; empty if it cannot tell.
        about: describes the wait for the line.
        before: called in the waiting thread, before it gets the result.
        drive: called in the waiting thread, to settle the future there if that is quicker.
    """

    def __init__(
        self,
        explain: Callable[[], str] | None = None,
        about: Callable[[], About] | None = None,
        before: Callable[[], None] = lambda: None,
        drive: Callable[[Future[Any]], None] | None = None,
    ) -> None:
        super().__init__()
        self._condition.__class__ = _Condition  # cheaper than another condition
        self.explain = explain
        self.about = about
        self._before = before
        self._drive = drive

    def set_result(self, result: T) -> None:
        """Settle the future with a result, soon if its lock is not free."""
        self._settle(super().set_result, result)

    def set_exception(self, exception: BaseException | None) -> None:
        """Settle the future with an error, soon if its lock is not free."""
        self._settle(super().set_exception, exception)

    def _settle(self, settle: Callable[[Any], None], outcome: Any) -> None:
        if self._condition.acquire(timeout=LOCKED_S):
            try:
                settle(outcome)
            finally:
                self._condition.release()
            return

        def settle_later() -> None:
            with suppress(InvalidStateError):
                settle(outcome)

        threading.Thread(target=settle_later, name="pw-settle", daemon=True).start()

    def result(self, timeout: float | None = None, asked_s: float | None = None) -> T:
        """Return the result within `timeout` seconds. Raises the future's error, or TimeoutError.

        The error says `asked_s` if that is given: several waits share what the user asked for.
        """
        try:
            return self._outcome(timeout, timeout if asked_s is None else asked_s)
        finally:
            self._before()

    def _outcome(self, timeout: float | None, asked_s: float | None) -> T:
        if self._drive is not None and (timeout is None or timeout > QUIET_S):
            self._drive(self)
            if self.done():
                return self._at_most(0, asked_s)
        if self.about is None or (timeout is not None and timeout <= QUIET_S):
            return self._at_most(timeout, asked_s)
        if not self.settles(QUIET_S):
            patiently(self.settles, self.about, timeout, waited_s=QUIET_S)
        return self._at_most(0, asked_s)

    def settles(self, timeout_s: float | None) -> bool:
        """Wait at most so long; return whether there is a result or an error."""
        try:
            self.exception(timeout_s)
        except TimeoutError:
            return self.done()
        except CancelledError:
            pass
        return True

    def _at_most(self, timeout: float | None, asked_s: float | None) -> T:
        try:
            return super().result(timeout)
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
        spec: of the value.
        explain, about, before, drive: see `Waiting`.
        came: called with the value when it was put together.
    """

    def __init__(
        self,
        spec: ArraySpec,
        explain: Callable[[], str] | None = None,
        about: Callable[[], About] | None = None,
        before: Callable[[], None] = lambda: None,
        drive: Callable[[Future[Any]], None] | None = None,
        came: Callable[[np.ndarray[Any, Any]], None] | None = None,
    ) -> None:
        super().__init__(explain, about, before, drive)
        self._spec = spec
        self._came = came
        self._whole: np.ndarray[Any, Any] | None = None
        self._parts: list[Part] = []

    def set_result(self, result: list[Part]) -> None:
        """Take the parts of the value."""
        self._parts = result
        super().set_result(None)

    def result(
        self, timeout: float | None = None, asked_s: float | None = None
    ) -> np.ndarray[Any, Any]:
        """Return the whole value, read-only; see `Waiting.result`."""
        super().result(timeout, asked_s)
        parts = self._parts  # read before `_whole`: another thread sets that first
        if self._whole is None:
            self._whole = _assembled(self._spec, parts)
            self._parts = []
            if self._came is not None:
                self._came(self._whole)
        return self._whole


def _assembled(spec: ArraySpec, parts: list[Part]) -> np.ndarray[Any, Any]:
    whole_box = tuple((0, size) for size in spec.shape)
    if len(parts) == 1 and parts[0][0] == whole_box:
        whole = parts[0][1]
    else:
        whole = np.empty(spec.shape, dtype_of(spec.dtype))
        for box, part in parts:
            whole[box_slices(box)] = part
    whole.flags.writeable = False
    return whole
