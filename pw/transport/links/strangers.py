"""Bounds how many connections of strangers a process has: in all, and for each address.

Beyond a bound the oldest is dropped, so that idle ones keep no good one out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

STRANGERS = 512
STRANGERS_OF_ADDRESS = 128
HANDSHAKE_S = 5.0
"""How long a stranger may take to say who it is."""

Connection = TypeVar("Connection")


class Strangers(Generic[Connection]):
    """The connections that have not said who they are.

    Args:
        is_one: whether a connection is a stranger's still. Others are forgotten.
    """

    def __init__(self, is_one: Callable[[Connection], bool]) -> None:
        self._is_one = is_one
        self._addresses: dict[Connection, str] = {}

    def add(self, new: Connection, address: str) -> Connection | None:
        """Count a new stranger; return the oldest, which is to be dropped, if there are too many."""
        strangers = self._addresses
        if len(strangers) >= min(STRANGERS_OF_ADDRESS, STRANGERS):
            for known in [one for one in strangers if not self._is_one(one)]:
                del strangers[known]
        same = [one for one, known in strangers.items() if known == address]
        oldest = None
        if len(same) >= STRANGERS_OF_ADDRESS:
            oldest = same[0]
        elif len(strangers) >= STRANGERS:
            oldest = next(iter(strangers))
        strangers[new] = address
        if oldest is not None:
            del strangers[oldest]
        return oldest
