"""The injected faults: counts for the report, and the nodes whose errors they excuse."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

DISPLACED = "slice displaced"
"""Name of what excuses errors: a slice has no room any more after a host was replaced, or the controller."""
GIVEN_BACK = "slice given back"
"""Name of what excuses one error: an array is handed over after its owner has given its slice back."""
SUSPENDED = "suspension"
"""Name of what excuses errors of reads of arrays that their client has deleted meanwhile."""
NOT_KEPT = "has not kept the value"
"""Words of the error of an upload of which neither a host nor its client has the bytes."""
A_READ = "a read"
"""Name in the place of a computation: a host could not read a value."""


class Ledger:
    """Every injected fault, and the nodes that it touched."""

    def __init__(self) -> None:
        self.injected: Counter[str] = Counter()
        self.any = False
        """True if a fault was injected that may end an epoch or fail a request."""
        self._touched: set[str] = set()
        self._failures: dict[str, str] = {}

    def note(self, fault: str, *nodes: str) -> None:
        """Count a fault that may have touched these nodes."""
        self.injected[fault] += 1
        self.any = True
        self._touched.update(nodes)

    def touch(self, *nodes: str) -> None:
        """A fault elsewhere has touched these nodes."""
        self._touched.update(nodes)

    def touched(self, nodes: Iterable[str]) -> bool:
        """Whether a fault has concerned any of these nodes."""
        return not self._touched.isdisjoint(nodes)

    def failure(self, computation: str) -> str:
        """Count a failed computation, and return the text of its error."""
        self.note("computation failed")
        words = f"injected failure {len(self._failures) + 1}"
        self._failures[words] = computation
        return words

    def failed_computation(self, message: str) -> str | None:
        """Return the computation of the injected failure in an error message."""
        for words, computation in self._failures.items():
            if message.endswith(words):
                return computation
        return None
