"""What names the places of many arrays, as it travels: each place is said once.

A placement takes as many numbers as there are devices, and a training step takes and returns thousands of
arrays that lie on the same ones. So a message has every placement once, and everything in it that names one
has its number instead: as a placement without devices in the slice of that number.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, Protocol, Self, TypeVar

import msgspec

from pw.core.errors import ProtocolError
from pw.core.sharding import ArraySpec, Placement

OnSpec = Callable[[ArraySpec], ArraySpec]
OnPlacement = Callable[[Placement], Placement]


class Placed(Protocol):
    """What names placements, in its specs or beside them."""

    def with_placed(self, spec: OnSpec, placement: OnPlacement) -> Self:
        """The same with another object for each of its specs, and for each placement beside them."""


T = TypeVar("T", bound=Placed)


class Compact(msgspec.Struct, Generic[T], frozen=True, array_like=True):
    """Something that can be made `whole` again; what it holds names placements by number."""

    held: T
    placements: tuple[Placement, ...]

    @classmethod
    def of(cls, whole: T) -> Compact[T]:
        """Make it fit to travel."""
        numbers: dict[Placement, Placement] = {}

        def number(placement: Placement) -> Placement:
            return numbers.setdefault(placement, Placement(len(numbers), ()))

        held = whole.with_placed(_once(number), number)
        return cls(held, tuple(numbers))

    def whole(self) -> T:
        """What it was made of; equal specs are one object.

        Raises:
            ProtocolError: it names a placement that is not there.
        """
        return self.held.with_placed(_once(self._said), self._said)

    def _said(self, number: Placement) -> Placement:
        if not 0 <= number.slice < len(self.placements) or number.devices:
            raise ProtocolError("a placement is named that was not said")
        return self.placements[number.slice]


def _once(other: OnPlacement) -> OnSpec:
    """Specs with the other placement, one object for all that are equal."""
    known: dict[ArraySpec, ArraySpec] = {}

    def spec(old: ArraySpec) -> ArraySpec:
        new = known.get(old)
        if new is None:
            new = known[old] = msgspec.structs.replace(old, placement=other(old.placement))
        return new

    return spec
