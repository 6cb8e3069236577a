"""Futures that say what is in the way when somebody has waited for them in vain."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")

POLL_S = 0.5
"""Who waits for less than this looks again and again, and is not kept up with an explanation."""


class Waiting(Future[T]):
    """A future whose timeout comes with an explanation.

    Args:
        explain: tells in a second or so why it does not go on; empty if it cannot tell.
    """

    def __init__(self, explain: Callable[[], str] | None = None) -> None:
        super().__init__()
        self._explain = explain

    def result(self, timeout: float | None = None) -> T:
        """The result, after at most `timeout` seconds. Raises what it failed with, or TimeoutError."""
        try:
            return super().result(timeout)
        except TimeoutError:
            if self.done():  # it has failed with that, or was settled at this moment
                return super().result(0)
            raise TimeoutError(self._in_vain(timeout)) from None

    def _in_vain(self, timeout_s: float | None) -> str:
        words = f"not within {timeout_s or 0:g} s"
        if self._explain is None or timeout_s is None or timeout_s < POLL_S:
            return words
        return f"{words}. {self._explain()}".rstrip(". ")
