"""Calls of functions in this process, by computations of this session on hosts."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pw.client.session.thread_messages import AnswerCall, Called
from pw.core.errors import Error

Handler = Callable[[Called], None]


class Calls:
    """Passes calls to a handler, and answers to the session.

    Args:
        post: hands a note to the session. Raises Error when the session has ended.
    """

    def __init__(self, post: Callable[[object], None]) -> None:
        self._post = post
        self.handler: Handler | None = None
        """Takes each call, on the session's thread; it must not block."""

    def arrived(self, call: Called) -> None:
        """Take a call; called by the session."""
        if self.handler is None:
            self.fail(call, "this process has no functions for computations to call")
            return
        try:
            self.handler(call)
        except Exception as error:  # noqa: BLE001 - the session must go on
            self.fail(call, f"{type(error).__name__}: {error}")

    def answer(self, call: Called, results: Sequence[np.ndarray[Any, Any]]) -> None:
        """Give a call its results; from any thread. No other code may write to them afterwards."""
        self._tell(AnswerCall(call.key, tuple(results)))

    def fail(self, call: Called, words: str) -> None:
        """Have a computation fail with these words; from any thread."""
        self._tell(AnswerCall(call.key, error=words))

    def _tell(self, note: AnswerCall) -> None:
        with contextlib.suppress(Error):  # the session has ended, and so has the call
            self._post(note)
