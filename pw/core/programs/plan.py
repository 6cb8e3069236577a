"""Plans: for each host a short list of instructions, which lowering makes of a program.

Values live in numbered slots, the same numbers on every host; a host fills only the slots whose
shards it holds. Instructions are grouped in segments. A segment is what a gang scheduler launches
as one unit
on one island: it begins with the transfers it needs from other islands, and `depends` names the segments
(of other islands) that make them (G4).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

import msgspec

from pw.core.compact import OnPlacement, OnSpec
from pw.core.sharding import ArraySpec, Binding, Box

Result = TypeVar("Result")
"""What stands for a result that a computation makes."""


class BoxCopy(msgspec.Struct, frozen=True, array_like=True):
    """A box copied from one source shard into one or more destination shards.

    Devices are positions in the meshes of the source and destination specs; boxes are relative to
    the shard they are in.
    """

    source_device: int
    source_box: Box
    destination_devices: tuple[int, ...]
    destination_box: Box


class Route(msgspec.Struct, frozen=True, array_like=True, cache_hash=True):
    """All pieces of one edge that go from one host to another (or stay on one, when equal).

    The bytes travel as one buffer, piece after piece, each at a 64-byte boundary.
    """

    source_host: str
    destination_host: str
    pieces: tuple[BoxCopy, ...]


class Execute(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """Enqueue a computation on this host's part of its devices."""

    computation: int
    args: tuple[int, ...]
    results: tuple[int, ...]
    donated: tuple[int, ...]
    """Positions of arguments whose buffers may be taken over."""
    guard: int = -1
    """Slot of a boolean that must be true (with `unless`, false), or nothing is enqueued; -1 for none."""
    unless: bool = False

    @property
    def reads(self) -> tuple[int, ...]:
        """The slots of its arguments and of its guard."""
        return self.args if self.guard < 0 else (*self.args, self.guard)


class Counts(msgspec.Struct, frozen=True, array_like=True):
    """Counts of the rows of a counted edge's value, at its source (`pw.core.programs.counted`)."""

    slot: int
    spec: ArraySpec
    maker: str
    """Name of the computation that made the values, for an error."""


class Send(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Send this host's pieces of the value in `slot` along one route; with counts, the rows that count."""

    edge: int
    slot: int
    spec: ArraySpec
    route: Route
    counts: Counts | None = None

    @property
    def reads(self) -> tuple[int, ...]:
        """The slots of its value and of its counts."""
        return (self.slot,) if self.counts is None else (self.slot, self.counts.slot)


class Receive(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Assemble an array of `spec` in `slot` from what arrives along `routes`.

    A route whose source is this host reads the value in `source_slot`, which lies as `source`.
    """

    edge: int
    slot: int
    spec: ArraySpec
    routes: tuple[Route, ...]
    source_slot: int
    source: ArraySpec
    counts: Counts | None = None
    """Counts of the rows that arrive, if only rows that count do; the others are zeros."""

    @property
    def reads(self) -> tuple[int, ...]:
        """The slots of its local source and of its counts; this host may not have them."""
        source = self.source_slot
        return (source,) if self.counts is None else (source, self.counts.slot)


class Free(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Forget the values in these slots."""

    slots: tuple[int, ...]


Instruction = Execute | Send | Receive | Free


class Segment(msgspec.Struct, frozen=True, array_like=True):
    """One gang-scheduled unit; its index is its position in `BoundProgram.segments`."""

    island: str
    hosts: tuple[str, ...]
    depends: tuple[int, ...]
    reporters: int = 1
    """Number of hosts, the first ones, that report the segment's end: one for each computation and received
    output."""


class HostSegment(msgspec.Struct, frozen=True, array_like=True):
    """One host's instructions of one segment."""

    segment: int
    instructions: tuple[Instruction, ...]


class HostPlan(msgspec.Struct, frozen=True, array_like=True):
    """One host's part of a program.

    `inputs` are the program inputs with shards here (input i is in slot i); `outputs` are pairs of a
    program output and the slot it is in.
    """

    host: str
    segments: tuple[HostSegment, ...]
    inputs: tuple[int, ...]
    outputs: tuple[tuple[int, int], ...]
    bindings: tuple[Binding, ...]

    def with_placed(self, spec: OnSpec, placement: OnPlacement) -> HostPlan:
        """Return a copy with other specs."""

        def counted(counts: Counts | None) -> Counts | None:
            return counts and msgspec.structs.replace(counts, spec=spec(counts.spec))

        def placed(instruction: Instruction) -> Instruction:
            match instruction:
                case Send():
                    return msgspec.structs.replace(
                        instruction, spec=spec(instruction.spec), counts=counted(instruction.counts)
                    )
                case Receive():
                    return msgspec.structs.replace(
                        instruction,
                        spec=spec(instruction.spec),
                        source=spec(instruction.source),
                        counts=counted(instruction.counts),
                    )
            return instruction

        segments = [
            HostSegment(part.segment, tuple([placed(one) for one in part.instructions]))
            for part in self.segments
        ]
        return msgspec.structs.replace(self, segments=tuple(segments))


class BoundProgram(msgspec.Struct, frozen=True, array_like=True):
    """A program bound to physical devices."""

    segments: tuple[Segment, ...]
    hosts: tuple[HostPlan, ...]


def last_on_devices(results: Iterable[tuple[frozenset[Any], Result]]) -> list[Result]:
    """Return the last results on each device, which hosts watch: all before them have ended when they have.

    Args:
        results: the results of one host in the order in which they are computed, each with its devices.
    """
    last: list[tuple[frozenset[Any], Result]] = []
    for devices, result in results:
        last = [entry for entry in last if not entry[0] <= devices]
        last.append((devices, result))
    return [result for _, result in last]
