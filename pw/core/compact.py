"""`Compact`: programs and plans in messages, with each placement once.

A placement has one number for each device, and a training step takes and returns thousands of
arrays on the same devices. So a message has each placement once, as ranges of devices that follow
each other: all devices of thousands of hosts are one range. Where a spec has a placement, the message has its
index: a `Placement` whose `slice` is the index and which has no devices.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Generic, Protocol, Self, TypeVar

import msgspec

from pw.core.errors import ProtocolError
from pw.core.sharding import ArraySpec, Placement, ranges_of

OnSpec = Callable[[ArraySpec], ArraySpec]
OnPlacement = Callable[[Placement], Placement]


class Placed(Protocol):
    """A value with placements, in its specs or beside them."""

    def with_placed(self, spec: OnSpec, placement: OnPlacement) -> Self:
        """Return a copy with other specs, and with other placements beside them."""


T = TypeVar("T", bound=Placed)

DEVICES = 1 << 20
"""Number of devices of all placements of a message, at most; a range has as many as it says, whatever its
size."""


class Ranges(msgspec.Struct, frozen=True, array_like=True):
    """A placement in a message."""

    slice: int
    ranges: tuple[int, ...]
    """First device of each range, and after it the number of devices of the range."""

    @classmethod
    def of(cls, placement: Placement) -> Self:
        """Find the ranges of a placement."""
        return cls(placement.slice, tuple(chain.from_iterable(ranges_of(placement.devices))))

    def placement(self) -> Placement:
        """Return the placement; `counts` are known to be in bounds."""
        pairs = zip(self.ranges[::2], self.counts, strict=True)
        return Placement(
            self.slice, tuple([at for first, count in pairs for at in range(first, first + count)])
        )

    @property
    def counts(self) -> tuple[int, ...]:
        """Number of devices of each range."""
        return self.ranges[1::2]


class Compact(msgspec.Struct, Generic[T], frozen=True, array_like=True):
    """A value whose placements are indices; `value` restores it."""

    held: T
    placements: tuple[Ranges, ...]

    @classmethod
    def of(cls, value: T) -> Compact[T]:
        """Replace each placement by its index."""
        numbers: dict[Placement, Placement] = {}

        def number(placement: Placement) -> Placement:
            return numbers.setdefault(placement, Placement(len(numbers), ()))

        bare = value.with_placed(_once(number), number)
        return cls(bare, tuple(map(Ranges.of, numbers)))

    def value(self) -> T:
        """Return the value with its placements; equal specs are one object.

        Raises:
            ProtocolError: an index or a range is out of bounds.
        """
        if any(len(one.ranges) % 2 or min(one.counts, default=1) < 1 for one in self.placements):
            raise ProtocolError("a message has a placement with an empty range")
        if sum(sum(one.counts) for one in self.placements) > DEVICES:
            raise ProtocolError(f"a message has placements on more than {DEVICES} devices")
        placements = [one.placement() for one in self.placements]

        def placement_of(number: Placement) -> Placement:
            if not 0 <= number.slice < len(placements) or number.devices:
                raise ProtocolError("a message names a placement that it does not have")
            return placements[number.slice]

        return self.held.with_placed(_once(placement_of), placement_of)


def _once(other: OnPlacement) -> OnSpec:
    """Return a function that replaces placements of specs, and makes equal specs one object."""
    specs: dict[ArraySpec, ArraySpec] = {}

    def spec(old: ArraySpec) -> ArraySpec:
        new = specs.get(old)
        if new is None:
            new = specs[old] = msgspec.structs.replace(old, placement=other(old.placement))
        return new

    return spec
