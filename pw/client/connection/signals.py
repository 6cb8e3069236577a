"""Handlers of signals are called when the main thread is between two turns of an actor's.

A handler may raise between any two steps of the main thread, in the middle of an actor's. So while the main
thread handles messages, signals are noted, and their handlers called afterwards.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import select
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

NUMBERS = tuple(number for number in signal.valid_signals() if number < 32)
handler_of: Callable[[int], Any] = _signal.getsignal
set_handler: Callable[[int, Any], Any] = _signal.signal
"""Those of `signal` make an enumeration of each number, which takes 2 µs."""


class _SignalCame(BaseException):
    """A signal has come while the main thread waited for messages."""


class Signals:
    """Keeps handlers of signals from raising in the middle of a turn of the main thread."""

    def __init__(self) -> None:
        self.is_waiting = False
        """The main thread only waits, so a signal may end that."""
        self._noted: dict[int, FrameType | None] = {}
        self._note = self._came

    def begin(self, usual: dict[int, Any]) -> None:
        """Note signals from now on that have a handler in Python; `usual` gets the handlers."""
        for number in NUMBERS:
            handler = handler_of(number)
            if callable(handler) and handler is not self._note:
                usual[number] = handler
                set_handler(number, self._note)

    def _came(self, number: int, frame: FrameType | None) -> None:
        self._noted[number] = frame
        if self.is_waiting:
            self.is_waiting = False
            raise _SignalCame

    def wait(self, poll: select.poll, timeout_s: float) -> list[tuple[int, int]] | None:
        """Wait for descriptors; None if a signal has come to this thread, whose handler `end` calls."""
        try:
            self.is_waiting = threading.get_ident() == threading.main_thread().ident
            ready = poll.poll(timeout_s * 1e3)
            self.is_waiting = False
        except _SignalCame:
            return None
        return ready

    def end(self, usual: dict[int, Any]) -> None:
        """Give the signals their handlers back, and call those of the noted ones.

        Handlers may do turns of their own, also those that are called here or in `begin`, where others'
        are not in place.
        """
        raised: BaseException | None = None
        while True:
            try:
                for number, handler in list(usual.items()):
                    if handler_of(number) is self._note:  # else a handler has set another one
                        set_handler(number, handler)
                    del usual[number]  # afterwards: a handler may have been called, and raise
                for number in list(self._noted):
                    handler = handler_of(number)
                    if handler is self._note:  # the turn that this one is in calls it
                        continue
                    frame = self._noted.pop(number, None)
                    if callable(handler):
                        handler(number, frame)
                    elif handler == signal.SIG_DFL:  # set by the handler of another one
                        signal.raise_signal(number)
                break
            except BaseException as error:  # noqa: BLE001 - the other handlers have to come back first
                raised = error
        if raised is not None:
            raise raised
