"""Orders to a gang of many hosts: they go down a tree, so that the scheduler sends each to a few hosts only.

The hosts of a gang have positions, in the gang's order. The scheduler sends an order to the hosts at the
first positions, and each host passes it on, as it is, to its children. So one message has the numbers of
all hosts: a run of hosts that follow each other in the island, with the same next number, is one `Span`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, NamedTuple

import msgspec

from pw.core.messages.base import ControllerToExecutor, HostToExecutor
from pw.core.messages.bounds import Count
from pw.core.messages.gangs import Discard, Launch


class Trees(NamedTuple):
    """Which gangs have trees, and of which form."""

    over: int = 64
    """Number of hosts of a gang above which its orders go down a tree."""
    fan: int = 8
    """Number of hosts to which the scheduler sends an order, and to which each host passes it on."""


TREES = Trees()


class Span(msgspec.Struct, frozen=True, array_like=True):
    """Hosts that follow each other in a gang and in their island, and have the same next number."""

    rank: Count
    """Rank of the first host in the island."""
    count: Annotated[int, msgspec.Meta(ge=1)]
    sequence: Count
    """Number of the order on each of the hosts."""


class GangOrder(ControllerToExecutor, HostToExecutor, frozen=True, tag=200):
    """IslandScheduler to the first HostExecutors of a gang, each of them to its children: an order to all.

    A host passes it on at once, and takes it in the order of its numbers.
    """

    epoch: int
    spans: tuple[Span, ...]
    fan: Annotated[int, msgspec.Meta(ge=1)]
    reporters: Count
    """Number of hosts of the gang, the first ones, that report the end of a launch."""
    order: Launch | Discard
    """Order; its number, and whether the host reports, is for each host to fill in."""


def size_of(spans: Sequence[Span]) -> int:
    """Return how many hosts a gang has."""
    return sum(span.count for span in spans)


def place_of(spans: Sequence[Span], rank: int) -> tuple[int, int] | None:
    """Return the position of a host in a gang, and its number; None if it is not in it."""
    before = 0
    for span in spans:
        if span.rank <= rank < span.rank + span.count:
            return before + rank - span.rank, span.sequence
        before += span.count
    return None


def at_position(spans: Sequence[Span], position: int) -> tuple[int, int]:
    """Return the rank of the host at a position of a gang, and its number. Raises IndexError."""
    for span in spans:
        if position < span.count:
            return span.rank + position, span.sequence
        position -= span.count
    raise IndexError("a gang has no such position")


def parent_of(position: int, fan: int) -> int:
    """Return the position that passes orders on to another one; below zero for the scheduler."""
    return position // fan - 1


def children_of(position: int, fan: int, size: int) -> range:
    """Return the positions to which a host passes orders on; those of the scheduler for -1."""
    first = fan * (position + 1)
    return range(min(first, size), min(first + fan, size))
