"""Packs orders to copy arrays into `Replicate` messages, each small enough for a frame.

A place has one entry for each device, and a tree has a thousand arrays at the same place. So a
message has each place once. What does not fit into one message goes into several.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec

from pw.core.messages import ArrayCopy, BoundPlacement, CopyFile, Replicate
from pw.core.sharding import Placement

OBJECTS = 1 << 19
"""Number of objects in one message, at most: half of what a frame may hold."""

_NO_PLACEMENT = Placement(0, ())


def weight_of(copies: Iterable[ArrayCopy]) -> int:
    """Return the number of objects that copies take in a message, without their places."""
    total = 0
    for copy in copies:
        sharding = copy.spec.sharding
        total += 18 + len(copy.spec.shape) + 2 * len(sharding.axis_names)
        total += len(copy.positions)
        total += sum(1 + len(axes) for axes in sharding.spec)
    return total


class _CopyMessage:
    """A message that is being filled."""

    def __init__(self) -> None:
        self.copies: list[ArrayCopy] = []
        self.files: list[CopyFile] = []
        self.places: dict[Placement, tuple[int, BoundPlacement]] = {}
        self.weight = 0

    def takes(self, copies: Sequence[ArrayCopy]) -> bool:
        """Make room for all of these. Returns whether they fit; into an empty message they always do."""
        new = {copy.spec.placement for copy in copies} - self.places.keys()
        more = weight_of(copies) + sum(8 + 4 * len(placement.devices) for placement in new)
        if self.weight and self.weight + more > OBJECTS:
            return False
        self.weight += more
        return True

    def packed(self, copy: ArrayCopy) -> ArrayCopy:
        placement = copy.spec.placement
        if placement not in self.places:
            self.places[placement] = len(self.places), BoundPlacement(placement, copy.devices)
        number, _ = self.places[placement]
        spec = msgspec.structs.replace(copy.spec, placement=_NO_PLACEMENT)
        return msgspec.structs.replace(copy, spec=spec, devices=(), place=number)

    def message(self, epoch: int, sequence: int) -> Replicate:
        places = tuple([place for _, place in self.places.values()])
        return Replicate(epoch, sequence, tuple(self.copies), tuple(self.files), places)


def orders(
    epoch: int, sequence: Callable[[], int], copies: Sequence[ArrayCopy], files: Sequence[CopyFile]
) -> Iterator[Replicate]:
    """Yield messages that order a host to make these copies and write these files.

    Args:
        epoch: of the host's island.
        sequence: returns the next launch number; called once for each message.
        copies: of arrays; equal placements mean equal devices.
        files: with copies of such arrays.
    """
    order = _CopyMessage()
    items: tuple[ArrayCopy | CopyFile, ...] = (*copies, *files)
    for item in items:
        theirs = item.copies if isinstance(item, CopyFile) else (item,)
        if not order.takes(theirs):
            yield order.message(epoch, sequence())
            order = _CopyMessage()
            order.takes(theirs)
        packed = tuple([order.packed(copy) for copy in theirs])
        if isinstance(item, CopyFile):
            order.files.append(msgspec.structs.replace(item, copies=packed))
        else:
            order.copies += packed
    yield order.message(epoch, sequence())


def unpacked(order: Replicate) -> Replicate:
    """Return the order with a place in each copy again."""

    def with_place(copy: ArrayCopy) -> ArrayCopy:
        if copy.place is None:
            return copy
        place = order.places[copy.place]
        spec = msgspec.structs.replace(copy.spec, placement=place.placement)
        return msgspec.structs.replace(copy, spec=spec, devices=place.devices, place=None)

    files = tuple(
        [
            msgspec.structs.replace(file, copies=tuple([with_place(copy) for copy in file.copies]))
            for file in order.files
        ]
    )
    copies = tuple([with_place(copy) for copy in order.copies])
    return Replicate(order.epoch, order.sequence, copies, files)
