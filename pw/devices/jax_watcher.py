"""A thread that waits for the arrays of one device."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from pw.devices.backend import Read, Watch
from pw.devices.jax_threads import QueueThread
from pw.devices.python_functions import Ending

Aside = tuple[Watch | Read, Ending]
"""What is left to wait for, and the end of the call of a Python function that is to come before."""


class Watcher(QueueThread[Watch | Read]):
    """Answers one op after the other; others are not to wait for a Python function.

    An op that does comes straight back here when the function has returned, since a collective may hold the
    execute thread by then.

    Args:
        name: of the thread.
        answer: answers an op, or says what to put aside.
        failed: called with what `answer` raises.
    """

    def __init__(
        self,
        name: str,
        answer: Callable[[Watch | Read], Aside | None],
        failed: Callable[[BaseException], None],
    ) -> None:
        self.begun = 0
        """Ops that it was given; written as on the execute thread."""
        self.ended = 0
        """Those that it has answered; written by its own thread only."""
        self._answer = answer
        super().__init__(name, self._handle_one, failed)

    def _handle_one(self, op: Watch | Read) -> None:
        aside = None
        try:
            aside = self._answer(op)
        finally:
            if aside is None:
                self.ended += 1
        if aside is not None:
            rest, ending = aside
            ending.then(partial(self.put, rest))
