"""The numbers that a controller gives to its clients.

Each start of a controller begins at another number, so that no client gets a number that hosts or
clients still know from the controller before.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container

from pw.core.messages.links import in_words

CLIENT_NUMBERS = 1 << 23
"""Numbers below this one: an id has 63 bits, and 40 of them are the client's to give."""

GIVEN_KEPT = 1 << 16
"""Numbers of clients that have left are known until so many others have come: each `pw status` is a client."""


class ClientNumbers:
    """The numbers that one controller gives to its clients.

    Args:
        first: the first one; another start has another one.
        here: those of the clients that are here.
    """

    def __init__(self, first: int, here: Container[int]) -> None:
        self.first = first % CLIENT_NUMBERS or 1
        self._here = here
        self._next = self.first
        self._given: OrderedDict[int, str] = OrderedDict()
        """With the reason why a client left that is not here any more."""

    def take(self, taken: Container[int]) -> int:
        """A number that is not `taken`."""
        while self._next in taken or self.is_known(self._next):
            self._skip()
        number = self._next
        self._give(number)
        self._skip()
        return number

    def _give(self, number: int) -> None:
        self._given[number] = ""
        if len(self._given) > GIVEN_KEPT:
            self._given.popitem(last=False)

    def _skip(self) -> None:
        self._next = (self._next + 1) % CLIENT_NUMBERS or 1

    def claim(self, number: int) -> bool:
        """A client of an earlier controller has this number; false if it cannot have it (any more)."""
        if not 0 < number < CLIENT_NUMBERS or self.is_known(number):
            return False
        self._give(number)
        return True

    def left(self, number: int, reason: str) -> None:
        """The client with this number has left."""
        if number in self._given:
            self._given[number] = reason

    def why_gone(self, number: int) -> str:
        """Why a client that comes back cannot have this number any more."""
        reason = self._given.get(number)
        if not reason:
            return "it does not know this session, nor did the one before it; its arrays are gone"
        if reason.startswith("silent"):
            return f"{in_words(reason)}, and was given up"
        return (
            f"the connection between them was lost ({in_words(reason)}), and so it was given up. If the "
            "network was not cut, the controller was paused for longer than its clients wait for it"
        )

    def is_known(self, number: int) -> bool:
        """Whether a client has this number here, or had it not long ago, whatever has become of it."""
        return number in self._here or number in self._given
