"""A table that forgets the entries that were not used for long.

pw compiles programs for operators, indexing and moves, and a loop can need new ones without end.
Users do not know these programs and cannot release them, so this table does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

OPERATORS_KEPT = 512
"""How many operators and moves, each for one kind of operands, a slice keeps compiled."""


class Recent:
    """At most `kept` values by key, at least the half that was used last.

    It has two generations. A value that is found in the old one moves to the young one, and a full young one
    becomes the old one. So a lookup of a value in use reads one dictionary, without a lock.
    """

    def __init__(self, kept: int = OPERATORS_KEPT) -> None:
        self.lock = threading.RLock()
        """Held by a thread that makes a value, so that others do not make it too."""
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

    def made(self, key: Any, make: Callable[[], Any]) -> Any:
        """The value of `key`, which `make` makes if there is none; one thread makes it for all."""
        found = self.get(key)
        if found is None:
            with self.lock:
                found = self.get(key)
                if found is None:
                    found = self.add(key, make())
        return found

    def add(self, key: Any, value: Any) -> Any:
        """Keep `value`, unless `key` has one. Returns the kept value."""
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
        del forgotten  # outside of the lock: values release programs on hosts
        return value
