"""A table that forgets what has not been used for long.

What pw compiles unasked, for operators, indexing and moves, has a program on every host, and a loop can ask
for ever new ones. Users know nothing of these programs, so nobody else could let go of them.
"""

from __future__ import annotations

import threading
from typing import Any

OPERATORS_KEPT = 512
"""Operators and moves, each for operands of one kind, that a slice keeps compiled."""


class Recent:
    """At most `kept` values by their keys, at least the half of them that was used last.

    There are two generations: what is found in the old one goes to the young one, and when that is full,
    it becomes the old one. So to look up what is in use is to look into one dictionary, without a lock.
    """

    def __init__(self, kept: int = OPERATORS_KEPT) -> None:
        self.lock = threading.RLock()
        """For those who make something only if nobody else does."""
        self._at_once = kept // 2
        self._young: dict[Any, Any] = {}
        self._old: dict[Any, Any] = {}

    def __len__(self) -> int:
        return len(self._young.keys() | self._old.keys())

    def get(self, key: Any) -> Any:
        """The value of `key`, or None."""
        found = self._young.get(key)
        if found is None:
            found = self._old.get(key)
            if found is not None:
                found = self.add(key, found)
        return found

    def add(self, key: Any, value: Any) -> Any:
        """Keep `value`, unless `key` has one by now; returns the one that is kept."""
        forgotten: dict[Any, Any] = {}
        with self.lock:
            known = self._young.get(key)
            if known is not None:
                return known
            value = self._old.get(key, value)
            if len(self._young) >= self._at_once:
                forgotten = self._old
                self._old, self._young = self._young, {}
            self._young[key] = value
        del forgotten  # outside of the lock: values say goodbye to their hosts
        return value
