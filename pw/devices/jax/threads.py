"""The threads of the JAX backend, and their way back to the loop.

JAX blocks where an event loop must not: a collective blocks its caller until the peers have come, a
compilation takes seconds, and an array can only be waited for. So each kind of waiting has a thread
with a queue. Results return in batches: threads append to one deque, and wake the loop if no other
thread has done so.
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
"""Seconds that an unhurried call may wait for the loop."""

STACK_FRAMES = 12
"""Calls shown of a thread that is at work."""


class Completions:
    """Calls made on the loop thread on behalf of other threads.

    Args:
        loop: of the thread.
        doze_s: seconds that an unhurried call may wait for the loop.
    """

    def __init__(self, loop: AbstractEventLoop, doze_s: float = DOZE_S) -> None:
        self._loop = loop
        self._doze_s = doze_s
        self._calls: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._woken = False
        self._unhurried = False
        self._dozing = False
        """True if the loop will look again within `doze_s` without a wake-up."""
        self._loop_ident = 0
        """The loop's thread, which need not wake itself; known after its first look."""
        self._closed = False

    def post(self, function: Callable[..., None], *args: Any) -> None:
        """Call `function(*args)` on the loop, after what was posted before; from any thread.

        This appends before it reads `_woken`, and `_drain` clears `_woken` before it reads the
        deque. So no call is left behind; at worst the loop is woken twice.
        """
        if self._closed:
            return
        self._calls.append((function, args))
        self._wake()

    def post_unhurried(self, function: Callable[..., None], *args: Any) -> None:
        """Do as `post`, but within `doze_s`, so that many calls wake the loop once.

        The first call wakes the loop, which then looks again after each `doze_s` until it finds
        nothing. `_dozing` is cleared, like `_woken`, before the deque is read.
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
            wrapper = InternalError(f"{type(error).__name__}: {error}")
            wrapper.__cause__ = error
            error = wrapper
        self.post(_raise, error)

    def close(self) -> None:
        """Drop the calls that have not been made, and all later ones."""
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
            self._loop.call_later(self._doze_s, self._look_again)
        try:
            for _ in range(len(self._calls)):
                if not self._calls:
                    return
                function, args = self._calls.popleft()
                function(*args)
        finally:
            # After a call that raises, the others are still made.
            if self._calls and not self._woken:
                self._woken = True
                self._loop.call_soon(self._drain)


class QueueThread(Generic[Item]):
    """A daemon thread that handles items in the order in which they were put.

    It runs with 64-bit types enabled: a worker must not narrow the types that a client has traced.

    Args:
        name: name of the thread.
        handle: called with each item.
        failed: called with what `handle` raises.
        nap_s: how long it sleeps after each item, so that many items in a row wake it a few times
        only.
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
        """Wait for the end of the thread; whether it came (a collective may block it)."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def whereabouts(self, doing: str, client: int = 0) -> list[ThreadReport]:
        """Return where in the code the thread is, and for how long with one item; empty if it has none.

        Args:
            doing: the item in words.
            client: the client that the item belongs to; 0 for none.
        """
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
        return [ThreadReport(self._thread.name, doing, busy_s, tuple(lines), client)]

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
    """Stop all `threads`; whether they all ended within `timeout_s`."""
    deadline_s = time.monotonic() + timeout_s
    for thread in threads:
        thread.stop()
    blocked = [t for t in threads if not t.join(max(0.0, deadline_s - time.monotonic()))]
    return not blocked


def _raise(error: BaseException) -> None:
    raise error
