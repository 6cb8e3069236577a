"""`Compact`: programs and plans in messages, with each placement once.

A placement has one number for each device, and a training step takes and returns thousands of
arrays on the same devices. So a message has each placement once. Where a spec has a placement, the
message has its index: a `Placement` whose `slice` is the index and which has no devices.
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
    """A value with placements, in its specs or beside them."""

    def with_placed(self, spec: OnSpec, placement: OnPlacement) -> Self:
        """Return a copy with other specs, and with other placements beside them."""


T = TypeVar("T", bound=Placed)


class Compact(msgspec.Struct, Generic[T], frozen=True, array_like=True):
    """A value whose placements are indices; `whole` restores it."""

    held: T
    placements: tuple[Placement, ...]

    @classmethod
    def of(cls, whole: T) -> Compact[T]:
        """Replace each placement by its index."""
        numbers: dict[Placement, Placement] = {}

        def number(placement: Placement) -> Placement:
            return numbers.setdefault(placement, Placement(len(numbers), ()))

        held = whole.with_placed(_once(number), number)
        return cls(held, tuple(numbers))

    def whole(self) -> T:
        """Return the value with its placements; equal specs are one object.

        Raises:
            ProtocolError: an index is out of bounds.
        """
        return self.held.with_placed(_once(self._said), self._said)

    def _said(self, number: Placement) -> Placement:
        if not 0 <= number.slice < len(self.placements) or number.devices:
            raise ProtocolError("a message names a placement that it does not have")
        return self.placements[number.slice]


def _once(other: OnPlacement) -> OnSpec:
    """Return a function that replaces placements of specs, and makes equal specs one object."""
    known: dict[ArraySpec, ArraySpec] = {}

    def spec(old: ArraySpec) -> ArraySpec:
        new = known.get(old)
        if new is None:
            new = known[old] = msgspec.structs.replace(old, placement=other(old.placement))
        return new

    return spec
