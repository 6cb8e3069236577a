"""How far a stream is begun ahead of the element that it hands out."""

from __future__ import annotations

from collections import deque
from typing import Any, Generic, NamedTuple, TypeVar

Element = TypeVar("Element")


class Due(NamedTuple):
    """The next element to begin."""

    number: int
    base: int
    """Number of elements behind which the states of the request come."""
    states: Any
    """States to send with the request; None if the parts have none."""


class Ahead(Generic[Element]):
    """The elements of a stream that were begun and not handed out, at most `most`.

    Args:
        most: the bound.
        number: how many elements were handed out.
        states: those of the parts after them, None if they have none.
    """

    def __init__(self, most: int, number: int = 0, states: Any = None) -> None:
        self.most = most
        self.number = number
        self.states = states
        self._begun: deque[Element] = deque()

    def __len__(self) -> int:
        return len(self._begun)

    @property
    def due(self) -> Due | None:
        """The next element to begin; None if enough are begun."""
        if len(self._begun) >= self.most:
            return None
        return Due(self.number + len(self._begun), self.number, self.states)

    def begun(self, element: Element) -> None:
        """Add the element that was due."""
        self._begun.append(element)

    @property
    def first(self) -> Element:
        """The element to hand out next."""
        return self._begun[0]

    def hand_out(self, states: Any) -> Element:
        """Return the first element; `states` are those after it."""
        self.number, self.states = self.number + 1, states
        return self._begun.popleft()

    def drop(self) -> list[Element]:
        """Return all elements, and forget them: they are due again."""
        dropped = list(self._begun)
        self._begun.clear()
        return dropped
