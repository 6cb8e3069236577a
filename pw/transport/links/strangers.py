"""Bounds how many connections of strangers a process has: in all, and for each address.

Beyond a bound the oldest is dropped, so that idle ones keep no good one out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

STRANGERS = 512
STRANGERS_OF_ADDRESS = 128
HANDSHAKE_S = 5.0

Connection = TypeVar("Connection")


class Strangers(Generic[Connection]):
    """The connections that have not said who they are.

    Args:
        is_one: whether a connection is a stranger's still. Others are forgotten.
        most: how many there may be.
        most_of_address: how many of one address there may be.
        handshake_s: seconds that a stranger may take to say who it is.
    """

    def __init__(
        self,
        is_one: Callable[[Connection], bool],
        most: int = STRANGERS,
        most_of_address: int = STRANGERS_OF_ADDRESS,
        handshake_s: float = HANDSHAKE_S,
    ) -> None:
        self.most, self.most_of_address, self.handshake_s = most, most_of_address, handshake_s
        self._is_one = is_one
        self._addresses: dict[Connection, str] = {}

    def add(self, new: Connection, address: str) -> Connection | None:
        """Count a new stranger; return the oldest, which is to be dropped, if there are too many."""
        strangers = self._addresses
        if len(strangers) >= min(self.most_of_address, self.most):
            for stranger in [one for one in strangers if not self._is_one(one)]:
                del strangers[stranger]
        same = [one for one, origin in strangers.items() if origin == address]
        oldest = None
        if len(same) >= self.most_of_address:
            oldest = same[0]
        elif len(strangers) >= self.most:
            oldest = next(iter(strangers))
        strangers[new] = address
        if oldest is not None:
            del strangers[oldest]
        return oldest
