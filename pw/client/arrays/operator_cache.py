"""A table that forgets the entries that were not used for long.

pw compiles programs for operators, indexing and moves, and a loop can need new ones without end.
Users do not know these programs and cannot release them, so this table does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

OPERATORS_KEPT = 512
"""Number of operators and moves, each for one kind of operands, that a slice keeps compiled."""


class Recent:
    """At most `kept` values by key, at least the half that was used last.

    It has two generations. A lookup moves a value of the old one to the young one, and a full young one
    becomes the old one. So a lookup of a value in use reads one dictionary, without a lock.
    """

    def __init__(self, kept: int = OPERATORS_KEPT) -> None:
        self.lock = threading.RLock()
        """Lock of a thread that makes a value, so that no other thread makes it too."""
        self._at_once = kept // 2
        self._young: dict[Any, Any] = {}
        self._old: dict[Any, Any] = {}

    def __len__(self) -> int:
        return len(self._young.keys() | self._old.keys())

    def get(self, key: Any) -> Any:
        """The value of `key`, or None."""
        value = self._young.get(key)
        if value is None:
            value = self._old.get(key)
            if value is not None:
                value = self.add(key, value)
        return value

    def get_or_make(self, key: Any, make: Callable[[], Any]) -> Any:
        """The value of `key`, which `make` makes if there is none; one thread makes it for all."""
        value = self.get(key)
        if value is None:
            with self.lock:
                value = self.get(key)
                if value is None:
                    value = self.add(key, make())
        return value

    def add(self, key: Any, value: Any) -> Any:
        """Keep `value`, unless `key` has one. Returns the kept value."""
        forgotten: dict[Any, Any] = {}
        with self.lock:
            earlier = self._young.get(key)
            if earlier is not None:
                return earlier
            value = self._old.get(key, value)
            if len(self._young) >= self._at_once:
                forgotten = self._old
                self._old, self._young = self._young, {}
            self._young[key] = value
        del forgotten  # outside of the lock: values release programs on hosts
        return value
