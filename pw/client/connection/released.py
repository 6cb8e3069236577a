"""Arrays without handles, which calls and ticks delete together."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Sequence

KEPT = 64
KEPT_BYTES = 16 << 20
"""Bytes of released arrays, above which (or above `KEPT` arrays) a call deletes them before the next tick:
hosts then reuse warm pages."""


class Released:
    """The released arrays of a session.

    Args:
        delete: deletes arrays, in order with the runs that use them.
    """

    def __init__(self, delete: Callable[[Sequence[int]], None]) -> None:
        self._delete = delete
        self._arrays: deque[int] = deque()
        self._size_bytes = 0  # approximate: several threads may change it at once
        self._is_closed = False

    def add(self, array: int, size_bytes: int) -> None:
        """Delete an array without handles later; callable from `__del__`, even in the garbage collector."""
        if not self._is_closed:
            self._arrays.append(array)
            self._size_bytes += size_bytes

    def make_room(self) -> None:
        """Delete the arrays before a call if they are many or large."""
        if len(self._arrays) > KEPT or self._size_bytes > KEPT_BYTES:
            self.delete()

    def delete(self) -> None:
        """Delete the arrays."""
        if not self._arrays:
            return
        arrays = []
        self._size_bytes = 0
        with contextlib.suppress(IndexError):  # empty: another thread may have taken the last one
            while True:
                arrays.append(self._arrays.popleft())
        self._delete(arrays)

    def close(self) -> None:
        """The session has ended, and its arrays with it."""
        self._is_closed = True
