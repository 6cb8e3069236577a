"""What was injected: counts for the report, and which errors that can excuse."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable


class Ledger:
    """Every injected fault, and the nodes that it touched."""

    def __init__(self) -> None:
        self.injected: Counter[str] = Counter()
        self.any = False
        """Something was injected that may end an epoch or cost an answer."""
        self._touched: set[str] = set()
        self._failures: dict[str, str] = {}

    def note(self, fault: str, *nodes: str) -> None:
        """A fault was injected that these nodes may have felt."""
        self.injected[fault] += 1
        self.any = True
        self._touched.update(nodes)

    def touch(self, *nodes: str) -> None:
        """These nodes felt what was injected elsewhere."""
        self._touched.update(nodes)

    def touched(self, nodes: Iterable[str]) -> bool:
        """Whether a fault has concerned any of these nodes."""
        return not self._touched.isdisjoint(nodes)

    def failure(self, computation: str) -> str:
        """Note that this computation is made to fail; the words with which it does."""
        self.note("computation failed")
        words = f"injected failure {len(self._failures) + 1}"
        self._failures[words] = computation
        return words

    def failed_computation(self, message: str) -> str | None:
        """The computation whose injected failure an error message speaks of."""
        for words, computation in self._failures.items():
            if message.endswith(words):
                return computation
        return None
