"""Threads that wait for arrays, so that the loop and the execute thread do not.

Arrays on the same devices become ready in the order in which they were enqueued. So one thread
serves many of them: it waits for the one enqueued first. A question about an array that was
enqueued before that one, or about other devices, goes to another thread. Threads are kept for the
next question.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from contextlib import suppress
from functools import partial
from heapq import heappop, heappush
from itertools import count
from typing import Any, NamedTuple

from pw.devices.jax.threads import QueueThread

_SPARE = 8
"""Threads with nothing to do that are kept."""


class _Question(NamedTuple):
    order: int
    number: int
    """Orders questions about the same array."""
    array: Any
    ready: Callable[[], None]


class _Line:
    """A thread, the place of the arrays that it waits for, and its next questions."""

    def __init__(self, name: str, wait: Callable[[_Line, _Question], None], failed: Any) -> None:
        self.place: Hashable = None
        self.order = 0
        """The order of the array that it waits for."""
        self.later: list[_Question] = []
        self.thread: QueueThread[_Question] = QueueThread(name, partial(wait, self), failed)


class Watchers:
    """The threads of one host that wait for arrays."""

    def __init__(self, failed: Callable[[BaseException], None]) -> None:
        self._failed = failed
        self._lock = threading.Lock()
        self._busy: dict[Hashable, list[_Line]] = {}
        self._idle: list[_Line] = []
        self._numbers = count()
        self._line_count = 0
        self._closed = False

    def wait(self, place: Hashable, order: int, array: Any, ready: Callable[[], None]) -> None:
        """Call `ready` on one of the threads when `array` is ready or has failed; from any thread.

        `place` says where it lies, and `order` when it was enqueued there. None is ready at once.
        """
        question = _Question(order, next(self._numbers), array, ready)
        with self._lock:
            lines = self._busy.get(place, ())
            before = [line for line in lines if line.order <= order]
            if before:
                heappush(max(before, key=lambda line: line.order).later, question)
            elif not self._closed:
                line = self._idle.pop() if self._idle else self._new_line()
                line.place, line.order = place, order
                self._busy.setdefault(place, []).append(line)
                line.thread.put(question)

    @property
    def waiting(self) -> int:
        """Questions that have not been answered."""
        with self._lock:
            lines = [line for lines in self._busy.values() for line in lines]
            return sum(1 + len(line.later) for line in lines)

    def close(self) -> list[QueueThread[Any]]:
        """Start no thread any more, and return the existing ones, to be stopped."""
        with self._lock:
            self._closed = True
            lines = [line for lines in self._busy.values() for line in lines]
            return [line.thread for line in (*lines, *self._idle)]

    def _new_line(self) -> _Line:
        self._line_count += 1
        return _Line(f"pw-watch-{self._line_count}", self._wait_in_line, self._failed)

    def _wait_in_line(self, line: _Line, first: _Question) -> None:
        """On the thread of `line`, until it has no question left."""
        question: _Question | None = first
        while question is not None and not self._closed:
            if question.array is not None:
                with suppress(Exception):  # it has failed, or was donated: the callback finds out
                    question.array.block_until_ready()
            try:
                question.ready()
            except Exception as error:  # noqa: BLE001 - other questions remain
                self._failed(error)
            del question
            question = self._next(line)

    def _next(self, line: _Line) -> _Question | None:
        with self._lock:
            if line.later:
                question = heappop(line.later)
                line.order = question.order
                return question
            lines = self._busy[line.place]
            lines.remove(line)
            if not lines:
                del self._busy[line.place]
            if len(self._idle) < _SPARE and not self._closed:
                self._idle.append(line)
            else:
                line.thread.stop()
            return None
