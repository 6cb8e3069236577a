"""A recorder that remembers everything it was given, so that a monitor can compare."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pw.core.recorder import WIDTH, Recorder


class LoggedRecorder(Recorder):
    """Keeps all records with the time of the world."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        super().__init__()
        self._now_s = now_s
        self.log: list[tuple[float, tuple[Any, ...]]] = []

    def add(self, *record: Any) -> None:
        """Add one record."""
        super().add(*record)
        self.log.append((self._now_s(), tuple(self.values[-WIDTH:])))
