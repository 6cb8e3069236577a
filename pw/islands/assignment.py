"""Which island each device of a function is on."""

from __future__ import annotations

from collections.abc import Sequence


class Assignment:
    """The islands of a function's partitions.

    Args:
        islands: of each partition the number of its island, from 0 on.

    Attributes:
        members: the partitions of each island, in their order; a partition's place there is its *position*.
    """

    def __init__(self, islands: Sequence[int]) -> None:
        self.islands = tuple(islands)
        self.members: list[list[int]] = [[] for _ in range(max(self.islands) + 1)]
        self.position: list[int] = []
        """Position of each partition on its island."""
        for partition, island in enumerate(self.islands):
            self.position.append(len(self.members[island]))
            self.members[island].append(partition)

    @property
    def count(self) -> int:
        """The number of islands."""
        return len(self.members)

    @property
    def partitions(self) -> int:
        """The number of devices."""
        return len(self.islands)

    def devices(self, island: int) -> int:
        """Return how many devices an island has."""
        return len(self.members[island])

    @property
    def is_even(self) -> bool:
        """Whether all islands have as many devices."""
        return len({len(own) for own in self.members}) == 1

    def crosses(self, partitions: Sequence[int]) -> bool:
        """Whether these partitions are on several islands."""
        return len({self.islands[one] for one in partitions}) > 1
