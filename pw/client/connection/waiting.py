"""Futures that say what holds up a wait: during a long wait, and after a time-out."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from typing import TypeVar

from pw.client.show.live import QUIET_S, About, patiently

T = TypeVar("T")

POLL_S = 0.5
"""Who waits for less than this looks again and again, and is not kept up with an explanation."""


class Waiting(Future[T]):
    """A future that shows why it takes long (see `pw.client.show.live`), and whose timeout says so.

    Args:
        explain: tells in a second or so why it does not go on; empty if it cannot tell.
        about: describes the wait, for the line of a long one.
        before: called by the thread that waits, before it is given the result.
    """

    def __init__(
        self,
        explain: Callable[[], str] | None = None,
        about: Callable[[], About] | None = None,
        before: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__()
        self._explain = explain
        self.about = about
        self._before = before

    def result(self, timeout: float | None = None) -> T:
        """The result, after at most `timeout` seconds. Raises what it failed with, or TimeoutError."""
        try:
            return self._outcome(timeout)
        finally:
            self._before()

    def _outcome(self, timeout: float | None) -> T:
        if self.about is None or (timeout is not None and timeout <= QUIET_S):
            return self._at_most(timeout, timeout)
        if not self._settles(QUIET_S):
            patiently(self._settles, self.about, timeout, waited_s=QUIET_S)
        return self._at_most(0, timeout)

    def _settles(self, timeout_s: float | None) -> bool:
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
            if self.done():  # it has failed with that, or was settled at this moment
                return super().result(0)
            raise TimeoutError(self._in_vain(asked_s)) from None

    def _in_vain(self, timeout_s: float | None) -> str:
        words = f"not within {timeout_s or 0:g} s"
        if self._explain is None or timeout_s is None or timeout_s < POLL_S:
            return words
        return f"{words}. {self._explain()}".rstrip(". ")
