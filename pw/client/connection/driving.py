"""Lets a thread that waits for results do the work of the session's thread itself.

A call that waits passes two changes of threads in this process: the session's thread is woken to send it, and
the script's thread to take the result. A thread that waits again and again, shortly, borrows the session's loop
instead: the session's thread *rests* in a callback of its loop, so nothing else of it runs, and the
borrower handles what is posted, and receives what comes, where it stands.

    running -a thread has waited shortly, and waits again: the loop is asked to rest-> resting
    resting -the borrower waits longer than `LONGEST_S`, is away for `AWAY_S`, or has had it for
             `HELD_S`; another thread needs the loop-> running

While the main thread handles messages, signals are noted (`Signals`). One that comes while it waits for
messages ends that: the loop goes on, and the handler is called.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from functools import partial
from typing import Any

import uvloop

from pw.client.connection.signals import Signals
from pw.transport.links.connection import StreamConnection
from pw.transport.links.interface import Connection
from pw.transport.links.links import Links
from pw.transport.links.node import Node

LONGEST_S = 2e-3
"""How long a borrower waits for a result before it gives the loop back, and sleeps."""
AWAY_S = 2e-3
"""How long a borrower may be away between two waits."""
HELD_S = 20e-3
"""How long the loop's timers, and whatever else it does, wait at most."""
ASKED_S = 1e-3
"""How long a thread waits until the loop rests; it may be at work."""
PAUSE_S = 1e-3
LONGEST_PAUSE_S = 0.1
"""How long nothing is borrowed after a wait that was too long; twice as long after the next one, and half as
long after a short one."""


class BorrowedLoop(uvloop.Loop):
    """A loop that wakes its borrower when another thread wants something of it."""

    wanted: Callable[[], None] | None = None

    def __init__(self) -> None:
        super().__init__()
        self.set_debug(False)  # with `python -X dev` it refuses timers of a borrower

    def call_soon_threadsafe(  # type: ignore[override]
        self, callback: Any, *args: Any, context: Any = None
    ) -> Any:
        """Call soon; from any thread."""
        handle = super().call_soon_threadsafe(callback, *args, context=context)
        if self.wanted is not None:
            self.wanted()
        return handle


class Driver:
    """The right to do a session's work, of its own thread or of the thread that borrows it."""

    def __init__(self, loop: BorrowedLoop, node: Node, network: Links) -> None:
        self._loop = loop
        self._node = node
        self._network = network
        self._lock = threading.Lock()
        """Held by the borrower while it works, and by the loop while it decides."""
        self._rested = threading.Semaphore(0)
        self._sleep = threading.Semaphore(0)
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._is_resting = False
        self._is_wanted = False
        self._borrower = 0
        self._since_s = 0.0
        self.left_s = -1.0
        """When the last short wait was over."""
        self.not_before_s = 0.0
        """No thread gets the loop before."""
        self._pause_s = PAUSE_S
        self._signals = Signals()
        self._main = threading.main_thread().ident
        self._known: list[Connection] = []
        self._poll = select.poll()
        self._by_number: dict[int, StreamConnection] = {}
        self._is_closed = False

    # --- the borrower --------------------------------------------------------------------------------

    def is_mine(self) -> bool:
        """Whether this thread has the loop, or had it a moment ago."""
        return self._borrower == threading.get_ident()

    def turn(self) -> bool:
        """Handle what this thread has posted, if it has the loop; return whether."""
        return self._in_turns(self._turn)

    def wait(self, future: Future[Any]) -> None:
        """Wait until a future is settled, for at most `LONGEST_S`; meanwhile do the loop's work if possible."""
        if future.done():
            return
        began_s = time.monotonic()
        if not self._may_borrow(began_s) or not self._in_turns(
            partial(self._work, future, began_s)
        ):
            with contextlib.suppress(TimeoutError, CancelledError):
                future.exception(LONGEST_S)
        now_s = time.monotonic()
        if now_s - began_s < LONGEST_S:
            self.left_s = now_s
            if self._pause_s > PAUSE_S:
                self._pause_s /= 2

    def _in_turns(self, act: Callable[[], bool]) -> bool:
        """Do something in which no handler of a signal may raise; return whether it was done."""
        if threading.get_ident() != self._main:
            return act()
        usual: dict[int, Any] = {}
        try:
            self._signals.begin(usual)
            return act()
        finally:
            self._signals.end(usual)

    def _may_borrow(self, now_s: float) -> bool:
        if self._borrower:
            return self.is_mine()
        return not self._is_closed and now_s >= self.not_before_s and now_s - self.left_s <= AWAY_S

    def _borrow(self, now_s: float) -> bool:
        """Have the loop rest; return whether it does, with the lock."""
        if self._begin():
            return True
        if self._borrower:
            return False
        self._borrower, self._is_wanted = threading.get_ident(), False
        self._loop.call_soon_threadsafe(self.rest)
        if not self._rested.acquire(timeout=ASKED_S):
            self._pause(now_s)
            with self._lock:
                if not self._is_resting:
                    self._borrower = 0
                    return False
        self._since_s = time.monotonic()
        return self._begin()

    def _pause(self, now_s: float) -> None:
        self.not_before_s = now_s + self._pause_s
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)

    def _begin(self) -> bool:
        """Begin to work; False if the loop is running."""
        if not self._lock.acquire(blocking=False):
            return False
        if self._is_resting and self.is_mine():
            return True
        self._lock.release()
        return False

    def _end(self) -> None:
        self._lock.release()
        if self._is_wanted:
            self._sleep.release()

    def _turn(self) -> bool:
        if not self._begin():
            return False
        try:
            self._node.turn_of(self._node.collect)
        finally:
            self._end()
        return True

    def _work(self, future: Future[Any], began_s: float) -> bool:
        """Do the loop's work until a future is settled."""
        if not self._borrow(began_s):
            return False
        try:
            if self._node.needs_turn:
                self._node.turn_of(self._node.collect)
            poll = self._sockets()
            while not (future.done() or self._is_wanted):
                rest_s = began_s + LONGEST_S - time.monotonic()
                if rest_s <= 0:
                    self._is_wanted = True
                    self._pause(began_s)
                    break
                ready = self._signals.wait(poll, rest_s)
                if ready is None:  # the handler of a signal may wait for what the loop does
                    self._is_wanted = True
                    break
                for number, _ in ready:
                    connection = self._by_number.get(number)
                    if connection is not None:
                        self._node.turn_of(connection.read)
                    else:
                        self._is_wanted = True
            if began_s > self._since_s + HELD_S:
                self._is_wanted = True
        finally:
            self._end()
        return True

    def _sockets(self) -> select.poll:
        """Return what to wait for: something from a peer, or from another thread."""
        known = list(self._network.connections)
        if known != self._known:
            self._known, self._by_number, self._poll = known, {}, select.poll()
            self._poll.register(self._event, select.POLLIN)
            for connection in known:
                if isinstance(connection, StreamConnection) and connection.number >= 0:
                    self._poll.register(connection.number, select.POLLIN)
                    self._by_number[connection.number] = connection
        return self._poll

    # --- the loop's thread ---------------------------------------------------------------------------

    def rest(self) -> None:
        """Do nothing while a thread has the loop; a callback of the loop."""
        with self._lock:
            if not self._borrower or self._is_wanted or self._is_closed:
                self._borrower = 0
                return
            self._is_resting = True
            self._loop.wanted = self._want
        self._rested.release()
        while True:
            self._sleep.acquire(timeout=AWAY_S)
            if not self._lock.acquire(blocking=False):
                continue
            if self._is_wanted or time.monotonic() - self.left_s > AWAY_S:
                break
            self._lock.release()
        self._is_resting, self._borrower, self._loop.wanted = False, 0, None
        while self._sleep.acquire(blocking=False):
            pass
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._event)
        self._lock.release()

    def _want(self) -> None:
        """Another thread has given the loop something to do."""
        if threading.get_ident() != self._borrower and not self._is_wanted:
            self._is_wanted = True
            os.eventfd_write(self._event, 1)
            self._sleep.release()

    def close(self) -> None:
        """Lend nothing any more; on the loop's thread."""
        self._is_closed = True
        os.close(self._event)
