"""Orders to copy arrays, as they travel to a host: small enough for messages, however large the tree.

Where an array lies takes as much to say as there are devices, and a tree has a thousand arrays that lie
alike. So it is said once in a message; what is still too much for one message comes in several, one after the
other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec

from pw.core.messages import Copy, CopyFile, Place, Replicate
from pw.core.sharding import Placement

OBJECTS = 1 << 19
"""Of one message: half of what a frame may hold."""

_SAID_ONCE = Placement(0, ())


def weight_of(copies: Iterable[Copy]) -> int:
    """How many objects copies take in a message, their places aside."""
    total = 0
    for copy in copies:
        sharding = copy.spec.sharding
        total += 17 + len(copy.spec.shape) + 2 * len(sharding.axis_names)
        total += len(copy.positions) + len(copy.targets)
        total += sum(1 + len(axes) for axes in sharding.spec)
    return total


class _Order:
    """One message in the making."""

    def __init__(self) -> None:
        self.copies: list[Copy] = []
        self.files: list[CopyFile] = []
        self.places: dict[Placement, tuple[int, Place]] = {}
        self.weight = 0

    def takes(self, copies: Sequence[Copy]) -> bool:
        """Whether there is room for all of these; there always is in a new one."""
        new = {copy.spec.placement for copy in copies} - self.places.keys()
        more = weight_of(copies) + sum(8 + 4 * len(placement.devices) for placement in new)
        if self.weight and self.weight + more > OBJECTS:
            return False
        self.weight += more
        return True

    def packed(self, copy: Copy) -> Copy:
        placement = copy.spec.placement
        if placement not in self.places:
            self.places[placement] = len(self.places), Place(placement, copy.devices)
        number, _ = self.places[placement]
        spec = msgspec.structs.replace(copy.spec, placement=_SAID_ONCE)
        return msgspec.structs.replace(copy, spec=spec, devices=(), place=number)

    def made(self, epoch: int, sequence: int) -> Replicate:
        places = tuple([place for _, place in self.places.values()])
        return Replicate(epoch, sequence, tuple(self.copies), tuple(self.files), places)


def orders(
    epoch: int, sequence: Callable[[], int], copies: Sequence[Copy], files: Sequence[CopyFile]
) -> Iterator[Replicate]:
    """Messages that have a host make these copies and write these files, each of which is in one of them.

    Args:
        epoch: of the host's island.
        sequence: gives a message its number; called once for each, in their order.
        copies: of arrays that are on the same devices if they have the same placement.
        files: with copies of such arrays as well.
    """
    order = _Order()
    items: tuple[Copy | CopyFile, ...] = (*copies, *files)
    for item in items:
        theirs = item.copies if isinstance(item, CopyFile) else (item,)
        if not order.takes(theirs):
            yield order.made(epoch, sequence())
            order = _Order()
            order.takes(theirs)
        packed = tuple([order.packed(copy) for copy in theirs])
        if isinstance(item, CopyFile):
            order.files.append(msgspec.structs.replace(item, copies=packed))
        else:
            order.copies += packed
    yield order.made(epoch, sequence())


def unpacked(order: Replicate) -> Replicate:
    """The order as it was before it was packed to travel."""

    def whole(copy: Copy) -> Copy:
        if copy.place is None:
            return copy
        place = order.places[copy.place]
        spec = msgspec.structs.replace(copy.spec, placement=place.placement)
        return msgspec.structs.replace(copy, spec=spec, devices=place.devices, place=None)

    files = tuple(
        [
            msgspec.structs.replace(file, copies=tuple([whole(copy) for copy in file.copies]))
            for file in order.files
        ]
    )
    copies = tuple([whole(copy) for copy in order.copies])
    return Replicate(order.epoch, order.sequence, copies, files)
