"""Tells scripts what happens to islands: `pw.island_events` and `pw.on_island_event`.

The session's thread gives each event to all readers, and never waits for one: a reader that is late keeps at
most `KEPT` events. If more come, it reads the present state of each island in their place.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from types import CodeType
from typing import Any, Literal, Self
from weakref import WeakSet

from pw.client.session.island_news import IslandChange
from pw.client.session.thread_messages import FollowIslands
from pw.core.errors import Error

KEPT = 256
"""Events that wait for a reader, at most; one for each island, if there are more islands."""


@dataclass(frozen=True, slots=True)
class IslandEvent:
    """An island has joined the cluster, left it, returned, or was given up."""

    island: str
    """Name of the island."""
    what: Literal["joined", "left", "returned", "given_up"]
    """`joined`: it is ready, and has not been before. `left`: a host of it was lost or drained; it may return.
    `returned`: it is ready again, in another epoch. `given_up`: it has not returned in time, and what
    waited for it has failed; it may still return."""
    epoch: int
    """Number of the epoch in which it is, or was last. In each epoch it has other processes."""
    hosts: tuple[str, ...]
    """Names of the hosts of that epoch."""
    devices: int
    """Number of devices of those hosts."""
    reason: str
    """Why it has left; empty while it is ready."""
    time_s: float
    """Time at which this process heard of it, in seconds since 1970."""
    is_present: bool = False
    """True if the event tells the state of the island when the reader began, or after events that it missed."""

    @property
    def is_ready(self) -> bool:
        """Whether the island is ready."""
        return self.what in ("joined", "returned")


class _IslandReader:
    """Events on their way to one reader; the lock is that of all readers."""

    def __init__(self, readers: IslandReaders) -> None:
        self._readers = readers
        self.queue: deque[IslandEvent] = deque()
        self.is_over = False
        self.error: Error | None = None
        """The error that ended the session, if it did not end by a call."""

    def feed(self, event: IslandEvent, present: dict[str, IslandEvent]) -> None:
        """Take an event, or the present states if there are too many; with the lock."""
        if len(self.queue) < max(KEPT, len(present)):
            self.queue.append(event)
        else:
            self.begin(present)
        self.wake()

    def begin(self, present: dict[str, IslandEvent]) -> None:
        """Take the present states instead of all events before; with the lock."""
        self.queue.clear()
        self.queue.extend(replace(event, is_present=True) for event in present.values())

    def end(self, error: Error | None) -> None:
        """Take no more events; with the lock. Without an error, those that wait are not read any more."""
        if error is None:
            self.queue.clear()
        if not self.is_over:
            self.is_over, self.error = True, error
            self.wake()

    def wake(self) -> None:
        """There is something to read; with the lock."""
        raise NotImplementedError

    def close(self) -> None:
        """Read no more events. Idempotent."""
        self._readers.remove(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class IslandReaders:
    """The readers of a session's events.

    Args:
        post: hands a note to the session. Raises Error when the session has ended.
    """

    def __init__(self, post: Callable[[object], None]) -> None:
        self._post = post
        self.lock = threading.RLock()
        self._readers: WeakSet[_IslandReader] = WeakSet()
        self._is_on = False
        self._present: dict[str, IslandEvent] = {}
        """Last event of each island."""

    def add(self, reader: _IslandReader) -> None:
        """Begin with the present states. Raises Error when the session has ended."""
        with self.lock:
            if not self._is_on:
                self._present.clear()
                self._post(FollowIslands(is_on=True))
                self._is_on = True
            self._readers.add(reader)
            reader.begin(self._present)

    def remove(self, reader: _IslandReader) -> None:
        """End a reader; ask the controller no more after the last one."""
        with self.lock:
            reader.end(None)
            self._readers.discard(reader)
            self._rest()

    def _rest(self) -> None:
        if self._is_on and not self._readers:
            self._is_on = False
            with contextlib.suppress(Error):  # the session has ended
                self._post(FollowIslands(is_on=False))

    def changed(self, change: IslandChange) -> None:
        """Tell all readers of a change; called on the session's thread."""
        state = change.state
        event = IslandEvent(
            state.island,
            change.what,
            state.epoch,
            state.hosts,
            state.devices,
            state.reason,
            time.time(),
            change.is_present,
        )
        with self.lock:
            if not self._is_on:
                return
            self._present[state.island] = event
            for reader in list(self._readers):
                reader.feed(event, self._present)
            self._rest()  # readers that no code has any more have gone

    def end(self, error: Error | None) -> None:
        """The session has ended: with an error, or by a call or the end of the script."""
        with self.lock:
            self._is_on = False
            for reader in list(self._readers):
                reader.end(error)


class IslandEvents(_IslandReader, AsyncIterator[IslandEvent]):
    """The events that `pw.island_events` returns; in a `with` statement they end with the block."""

    def __init__(self, readers: IslandReaders) -> None:
        super().__init__(readers)
        self._waiter: asyncio.Future[None] | None = None

    def wake(self) -> None:
        """Have the loop of the waiting coroutine go on; with the lock."""
        waiter, self._waiter = self._waiter, None
        if waiter is not None:
            with contextlib.suppress(RuntimeError):  # its loop is closed
                waiter.get_loop().call_soon_threadsafe(_settle, waiter)

    async def __anext__(self) -> IslandEvent:
        """Return the next event."""
        while True:
            with self._readers.lock:
                if self.queue:
                    return self.queue.popleft()
                if self.error is not None:
                    raise self.error
                if self.is_over:
                    raise StopAsyncIteration
                if self._waiter is not None:
                    words = "the script waits for the next of these events already"
                    raise RuntimeError(f"{words}; call pw.island_events() for each loop")
                waiter = self._waiter = asyncio.get_running_loop().create_future()
            try:
                await waiter
            finally:
                with self._readers.lock:
                    if self._waiter is waiter:
                        self._waiter = None


def _settle(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


class IslandListener(_IslandReader):
    """Calls a function with each event on the session's thread, for code of pw that lives there."""

    def __init__(self, readers: IslandReaders, heard: Callable[[IslandEvent], object]) -> None:
        super().__init__(readers)
        self._heard = heard
        readers.add(self)

    def wake(self) -> None:
        """Call it; with the lock."""
        while self.queue:
            self._heard(self.queue.popleft())


class IslandCallback(_IslandReader):
    """Calls a function with each event, in a thread of its own, until it is closed.

    `close()`, or the end of a `with` block, begins no further call; one that runs may go on.
    """

    def __init__(self, readers: IslandReaders, callback: Callable[[IslandEvent], object]) -> None:
        super().__init__(readers)
        self._callback = callback
        # The errors are the script's own: the logger of pw says nothing, unless it is asked to.
        self._log = logging.getLogger(getattr(callback, "__module__", None) or "__main__")
        self._changed = threading.Condition(readers.lock)
        self._thread = threading.Thread(target=self._run, name="pw-island-events", daemon=True)

    def start(self) -> None:
        """Begin to call."""
        self._thread.start()

    def wake(self) -> None:
        """Have the thread go on; with the lock."""
        self._changed.notify()

    def _next(self) -> IslandEvent | None:
        with self._changed:
            self._changed.wait_for(lambda: self.queue or self.is_over)
            return self.queue.popleft() if self.queue else None

    def _run(self) -> None:
        while (event := self._next()) is not None:
            try:
                self._callback(event)
            except Exception as error:  # noqa: BLE001 - the script's code; the next event comes all the same
                error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next
                words = (
                    "the callback %s of pw.on_island_event has raised on %s; it gets the next event"
                )
                self._log.error(words, _place(self._callback), event, exc_info=error)
        if self.error is not None:
            words = "the callback %s of pw.on_island_event gets no more events: %s"
            self._log.warning(words, _place(self._callback), self.error)


def _place(function: Callable[..., Any]) -> str:
    """Return the name of a function, with its file and line if it has one."""
    name = getattr(function, "__qualname__", None) or repr(function)
    code = getattr(function, "__code__", None)
    if isinstance(code, CodeType):
        return f"{name} ({code.co_filename}:{code.co_firstlineno})"
    return str(name)
