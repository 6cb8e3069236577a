"""An event loop for a client's lines, which any thread turns.

The connections of lines are those of links (`StreamNetwork`), on this loop. A thread that waits for an answer
polls their sockets itself, and handles what comes. While none does, the session's loop handles it: it watches
the sockets through a second `epoll`, which the thread that waits switches off, by one call of the system.

A thread that handles something has the session's lock, and `is_at_work` is set. The handler of a signal may
raise in the midst of that. Then the flag stays, no thread uses the lines, and the session makes new ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import threading
import time
from collections.abc import Callable
from typing import Any

from pw.client.connection.waiting import Waiting
from pw.client.session.thread_messages import LOCKED_S

AGAIN_S = 0.01
"""Seconds after which the session's thread tries again to get the lock."""
_NOTHING: tuple[Callable[..., object], tuple[Any, ...]] = (lambda: None, ())


class _Timer:
    """A planned call, which any thread may cancel."""

    def __init__(self, call: Callable[..., object], args: tuple[Any, ...]) -> None:
        self.call = call
        self.args = args
        self.is_cancelled = False

    def cancel(self) -> None:
        """Do not call."""
        self.is_cancelled = True


class LineLoop:
    """What connections ask of an event loop, for those of one client's lines.

    Args:
        loop: the session's.
        lock: the session's, held by the thread that adds or handles something.
        settle: called without the lock when something was handled.
        awaits_more: returns whether an answer is to come.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        lock: threading.RLock,
        settle: Callable[[], None],
        awaits_more: Callable[[], bool],
    ) -> None:
        self._loop = loop
        self._lock = lock
        self._settle = settle
        self._awaits_more = awaits_more
        self._thread = threading.get_ident()
        self.is_at_work = False
        """True while something is handled or sent, and after the handler of a signal has raised meanwhile."""
        self.time = time.monotonic
        self._readers: dict[int, tuple[Callable[..., object], tuple[Any, ...]]] = {}
        self._writers: dict[int, tuple[Callable[..., object], tuple[Any, ...]]] = {}
        self._sockets = select.epoll()
        self._watched = select.epoll()
        self._nudge = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._sockets.register(self._nudge, select.EPOLLIN)
        self._watched.register(self._sockets.fileno(), select.EPOLLIN)
        self._is_watched = True
        self._polling = threading.RLock()
        """Held by the thread that polls."""
        self._depth = 0
        """Number of waits that poll: several, if the handler of a signal waits in a wait."""
        self._poller = 0
        """The thread that polls, or has polled last."""
        self._is_closed = False
        loop.add_reader(self._watched.fileno(), self._readable)

    @property
    def is_polled(self) -> bool:
        """Whether a thread waits here."""
        return self._depth > 0

    # --- threads that wait ---------------------------------------------------------------------------

    def wait(self, future: Waiting[Any], timeout_s: float) -> None:
        """Handle what comes until a future is settled; return at once if another thread does."""
        if self._is_closed or not self._polling.acquire(blocking=False):
            return
        outer = self._depth
        try:
            self._poller = threading.get_ident()
            self._depth = outer + 1
            if self._is_watched:
                self.ignore()
            until_s = time.monotonic() + timeout_s
            while not future.is_settled:
                rest_s = until_s - time.monotonic()
                if rest_s <= 0 or self._is_closed:
                    return
                events = self._sockets.poll(rest_s)
                if events and not self._turn(events):
                    return
        finally:
            self._depth = outer
            self._polling.release()
            if outer:
                os.eventfd_write(self._nudge, 1)  # what that one waits for may have come
            elif self._awaits_more():
                self.watch()

    def look(self) -> None:
        """Handle what has come."""
        if not self._is_closed and (events := self._sockets.poll(0)):
            self._turn(events)

    def watch(self) -> None:
        """Have the session's loop handle what comes."""
        if not self._is_watched and not self._is_closed:
            self._is_watched = True
            self._watched.modify(self._sockets.fileno(), select.EPOLLIN)

    def wake(self) -> None:
        """A future was settled: a thread may poll, and wait for it."""
        if self._depth and self._poller != threading.get_ident():
            os.eventfd_write(self._nudge, 1)

    def ignore(self) -> None:
        """Keep the session's loop from waking for what comes."""
        if self._is_watched and not self._is_closed:
            self._is_watched = False
            self._watched.modify(self._sockets.fileno(), 0)

    def _turn(self, events: list[tuple[int, int]]) -> bool:
        """Handle events; return False if that is impossible here."""
        with self._lock:
            if self.is_at_work:  # the handler of a signal waits, or has raised
                return False
            self._handle(events)
        self._settle()
        return True

    def _handle(self, events: list[tuple[int, int]]) -> None:
        self.is_at_work = True
        for number, event in events:
            if number == self._nudge:
                self._take_nudge()
                continue
            if event & ~select.EPOLLOUT:
                call, args = self._readers.get(number, _NOTHING)
                call(*args)
            if event & ~select.EPOLLIN:
                call, args = self._writers.get(number, _NOTHING)
                call(*args)
        self.is_at_work = False

    def _take_nudge(self) -> None:
        """Clear the nudge, unless it is for a thread that polls."""
        if not self._depth or self._thread != threading.get_ident():
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._nudge)

    # --- the session's thread ------------------------------------------------------------------------

    def _readable(self) -> None:
        if not self._lock.acquire(timeout=LOCKED_S):
            return  # once more
        try:
            if self.is_at_work:
                self.ignore()  # until there are new lines
            elif events := self._sockets.poll(0):
                self._handle(events)
        finally:
            self._lock.release()
        self._settle()
        if self._depth:
            os.eventfd_write(self._nudge, 1)  # what the thread waits for may have come

    def within(self, act: Callable[[], object]) -> bool:
        """Do something with the lines, on the session's thread; return whether it was done."""
        if self._is_closed or not self._lock.acquire(timeout=LOCKED_S):
            return False
        try:
            if self.is_at_work:
                return False
            self.is_at_work = True
            act()
            self.is_at_work = False
        finally:
            self._lock.release()
        self._settle()
        return True

    def tick(self, renew: Callable[[], None]) -> None:
        """Look whether something was left undone; `renew` makes new lines after an interrupt."""
        if self._is_closed or not self._lock.acquire(timeout=LOCKED_S):
            return
        try:
            if self.is_at_work:  # and no thread is
                self._drop_all()
                self.is_at_work = False
                renew()
            elif self._awaits_more() or self._sockets.poll(0):
                self._is_watched = False
                self.watch()
        finally:
            self._lock.release()
        self._settle()

    def _drop_all(self) -> None:
        for number in {*self._readers, *self._writers}:
            with contextlib.suppress(OSError, ValueError):
                self._sockets.unregister(number)
        self._readers.clear()
        self._writers.clear()

    def forked(self) -> None:
        """This is the copy in a forked process, whose sockets are the other one's."""
        self._is_closed, self._depth = True, 0

    def close(self) -> None:
        """Handle nothing any more."""
        if not self._is_closed:
            self._is_closed = True
            self._loop.remove_reader(self._watched.fileno())
            os.eventfd_write(self._nudge, 1)  # a thread may poll

    # --- what connections ask ------------------------------------------------------------------------

    def call_soon(self, call: Callable[..., object], *args: Any) -> _Timer:
        """Call on the session's thread, with the lock."""
        timer = _Timer(call, args)
        self._loop.call_soon_threadsafe(self._call, timer)
        return timer

    def call_later(self, delay_s: float, call: Callable[..., object], *args: Any) -> _Timer:
        """Call later on the session's thread, with the lock."""
        timer = _Timer(call, args)
        if self._thread == threading.get_ident():
            self._loop.call_later(delay_s, self._call, timer)
        else:
            self._loop.call_soon_threadsafe(self._loop.call_later, delay_s, self._call, timer)
        return timer

    def _call(self, timer: _Timer) -> None:
        def call() -> None:
            if not timer.is_cancelled:
                timer.is_cancelled = True
                timer.call(*timer.args)

        if not timer.is_cancelled and not self._is_closed and not self.within(call):
            self._loop.call_later(AGAIN_S, self._call, timer)

    def run_in_executor(self, executor: None, call: Callable[..., Any], *args: Any) -> Any:
        """Look a name up in a thread; on the session's thread."""
        return _Asking(self, self._loop.run_in_executor(executor, call, *args))

    def add_reader(self, socket: Any, call: Callable[..., object], *args: Any) -> None:
        """Call when a socket can be read."""
        self._change(socket, self._readers, (call, args))

    def remove_reader(self, socket: Any) -> None:
        """Do not call any more when it can."""
        self._change(socket, self._readers, None)

    def add_writer(self, socket: Any, call: Callable[..., object], *args: Any) -> None:
        """Call when a socket can be written."""
        self._change(socket, self._writers, (call, args))
        self.watch()

    def remove_writer(self, socket: Any) -> None:
        """Do not call any more when it can."""
        self._change(socket, self._writers, None)

    def _change(
        self,
        socket: Any,
        calls: dict[int, tuple[Callable[..., object], tuple[Any, ...]]],
        call: tuple[Callable[..., object], tuple[Any, ...]] | None,
    ) -> None:
        number = socket.fileno()
        is_known = number in self._readers or number in self._writers
        if call is None:
            calls.pop(number, None)
        else:
            calls[number] = call
        mask = (number in self._readers) * select.EPOLLIN
        mask |= (number in self._writers) * select.EPOLLOUT
        with contextlib.suppress(OSError, ValueError):  # the socket is closed
            if not is_known:
                if mask:
                    self._sockets.register(number, mask)
            elif mask:
                self._sockets.modify(number, mask)
            else:
                self._sockets.unregister(number)


class _Asking:
    """A future of the session's loop, whose callback has the lock."""

    def __init__(self, loop: LineLoop, future: asyncio.Future[Any]) -> None:
        self._loop = loop
        self._future = future

    def add_done_callback(self, call: Callable[[asyncio.Future[Any]], object]) -> None:
        """Call when it is done."""
        self._future.add_done_callback(lambda done: self._loop.call_soon(call, done))
