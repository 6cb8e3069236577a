"""The threads behind the JAX backend, and their way back to the loop.

JAX blocks where an event loop must not: a collective holds its caller until the peers have come, a
compilation takes seconds, an array only offers to be waited for. Each kind of waiting therefore
has a thread with a queue. Results return in batches: threads append to one deque, and whoever
finds the loop not yet called wakes it.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from asyncio import AbstractEventLoop
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

import jax

from pw.core.errors import InternalError
from pw.core.messages import ThreadReport

Item = TypeVar("Item")

DOZE_S = 0.001
"""How long something may wait for the loop that nobody waits for."""

STACK_FRAMES = 12
"""Calls shown of a thread that is asked where it is."""


class Completions:
    """Calls made on the loop thread on behalf of other threads."""

    def __init__(self, loop: AbstractEventLoop) -> None:
        self._loop = loop
        self._calls: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._woken = False
        self._unhurried = False
        self._dozing = False
        """The loop looks by itself before long."""
        self._loop_ident = 0
        """Of the loop's thread, which need not be woken by itself; known when it has looked once."""
        self._closed = False

    def post(self, function: Callable[..., None], *args: Any) -> None:
        """Call `function(*args)` on the loop, after what was posted before; from any thread.

        The append comes before the look at `_woken`, and `_drain` clears it before it looks at the
        deque: a call is never left behind, at worst the loop is woken twice.
        """
        if self._closed:
            return
        self._calls.append((function, args))
        self._wake()

    def post_unhurried(self, function: Callable[..., None], *args: Any) -> None:
        """The same, but it may wait for `DOZE_S`, so that many of them wake the loop once.

        The first one wakes the loop, which looks again when it has dozed, for as long as it finds something.
        What was said of `_woken` is true of `_dozing`: it is cleared before the deque is looked at.
        """
        if self._closed:
            return
        self._calls.append((function, args))
        self._unhurried = True
        if not self._dozing:
            self._wake()

    def _wake(self) -> None:
        if not self._woken:
            self._woken = True
            try:
                if threading.get_ident() == self._loop_ident:
                    self._loop.call_soon(self._drain)
                else:
                    self._loop.call_soon_threadsafe(self._drain)
            except RuntimeError:
                if not self._loop.is_closed():
                    raise
                self._closed = True

    def fail(self, error: BaseException) -> None:
        """Raise `error` on the loop, whose exception handler reports it."""
        if not isinstance(error, Exception):  # it might end the loop
            told = InternalError(f"{type(error).__name__}: {error}")
            told.__cause__ = error
            error = told
        self.post(_raise, error)

    def close(self) -> None:
        """Drop what has not been called yet, and all that is posted later."""
        self._closed = True
        self._calls.clear()

    def _look_again(self) -> None:
        self._dozing = False
        if self._calls and not self._closed:
            self._drain()

    def _drain(self) -> None:
        self._woken = False
        self._loop_ident = threading.get_ident()
        if self._unhurried and not self._dozing:
            self._unhurried, self._dozing = False, True
            self._loop.call_later(DOZE_S, self._look_again)
        try:
            for _ in range(len(self._calls)):
                if not self._calls:
                    return
                function, args = self._calls.popleft()
                function(*args)
        finally:
            # A callback that raises must not take those behind it along.
            if self._calls and not self._woken:
                self._woken = True
                self._loop.call_soon(self._drain)


class QueueThread(Generic[Item]):
    """A daemon thread that handles items in the order in which they were put.

    It runs with 64-bit types enabled, whatever the process default: what a client has traced is
    not for a worker to narrow.

    Args:
        name: of the thread.
        handle: called with each item.
        failed: called with what `handle` raises.
        nap_s: how long it may sleep when it has nothing to do, before it lets itself be woken: who puts
            something for each of a thousand computations a second then wakes it a few times.
    """

    def __init__(
        self,
        name: str,
        handle: Callable[[Item], None],
        failed: Callable[[BaseException], None],
        nap_s: float = 0.0,
    ) -> None:
        self._queue: SimpleQueue[Item | None] = SimpleQueue()
        self.put: Callable[[Item], None] = self._queue.put
        self._handle = handle
        self._failed = failed
        self._nap_s = nap_s
        self._busy_since_s = 0.0
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ask the thread to end after what is in its queue."""
        self._queue.put(None)

    def join(self, timeout_s: float) -> bool:
        """Wait for the end of the thread, and say whether it came (a collective may hold it)."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def whereabouts(self, doing: str) -> list[ThreadReport]:
        """Where the thread is in the code, for how long with one item; empty if it has nothing to do."""
        since_s, ident = self._busy_since_s, self._thread.ident
        frame = sys._current_frames().get(ident) if since_s and ident is not None else None
        if frame is None:
            return []
        calls = traceback.extract_stack(frame)
        own = [index for index, call in enumerate(calls) if call.filename == __file__]
        stack = calls[own[-1] + 1 :][-STACK_FRAMES:] if own else calls[-STACK_FRAMES:]
        lines = [
            f"{os.sep.join(call.filename.split(os.sep)[-2:])}:{call.lineno} in {call.name}"
            for call in stack
        ]
        busy_s = time.monotonic() - since_s
        return [ThreadReport(self._thread.name, doing, busy_s, tuple(lines))]

    def _run(self) -> None:
        with jax.enable_x64(True):
            while (item := self._queue.get()) is not None:
                self._busy_since_s = time.monotonic()
                try:
                    self._handle(item)
                except BaseException as error:  # noqa: BLE001 - the loop reports it
                    self._failed(error)
                self._busy_since_s = 0.0
                del item  # an idle thread must not keep the last buffers alive
                if self._nap_s and self._queue.empty():
                    time.sleep(self._nap_s)


def join_all(threads: list[QueueThread[Any]], timeout_s: float) -> bool:
    """Stop all `threads`, and say whether they ended within `timeout_s` altogether."""
    deadline_s = time.monotonic() + timeout_s
    for thread in threads:
        thread.stop()
    held = [t for t in threads if not t.join(max(0.0, deadline_s - time.monotonic()))]
    return not held


def _raise(error: BaseException) -> None:
    raise error
