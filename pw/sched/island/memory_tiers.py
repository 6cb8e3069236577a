"""The buffers of an island that lie in the memory of its hosts, and what it takes to bring them back.

`Tier` has the states of a buffer. Here they change, and their bytes are counted on the devices or not;
`pw.sched.island.residency` decides.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from pw.core.ids import client_of
from pw.sched.island.buffers import Buffer, Tier
from pw.sched.island.memory_totals import Bytes, Needs, Total


@dataclass(frozen=True, slots=True)
class Returns:
    """What a run reads and is in host memory."""

    buffers: tuple[Buffer, ...]
    is_leaving: bool
    """True if some of it is on its way there; the run waits for its end."""

    def bytes_in(self, total: Total) -> Bytes:
        """Return the bytes that a total would count on each device."""
        back = np.zeros_like(total.used)
        for buffer in self.buffers:
            if total in buffer.on.totals:
                back[buffer.on.devices] += buffer.shard_bytes
        return back

    def has_no_room(self, total: Total, needs: Needs, more: Bytes) -> bool:
        """Whether a device would have too much with it, and with `more` bytes of the run itself."""
        if self.is_leaving or total.bound_bytes is None:
            return self.is_leaving
        back = self.bytes_in(total)
        used = total.used + back
        used[needs.devices] += more
        return bool(((used > total.bound_bytes) & (back > 0)).any())


class CountedBuffers(Protocol):
    """What counts buffers on devices (`DeviceMemory`)."""

    buffers: dict[int, Buffer]
    frees: int

    def count(self, buffer: Buffer) -> None:
        """Count a buffer on its devices."""

    def uncount(self, buffer: Buffer) -> None:
        """Count it there no more."""


@dataclass(eq=False)
class MemoryTiers:
    """The buffers that lie in host memory.

    Args:
        memory: counts the others.
        spill_bytes: memory of each host for arrays that leave the devices; 0 if they stay there.
    """

    memory: CountedBuffers
    spill_bytes: int
    off: set[Buffer] = field(default_factory=set)
    """Buffers in host memory, or on their way there."""

    def spill(self, buffer: Buffer) -> None:
        """Hosts copy a buffer to their memory; nothing reads it meanwhile."""
        buffer.tier = Tier.LEAVING
        self.off.add(buffer)

    def spilled(self, buffer: Buffer, *, kept: bool) -> None:
        """A buffer does not lie on the devices any more, unless hosts have `kept` it there."""
        self.memory.frees += 1
        if kept and buffer.is_needed:
            buffer.tier = Tier.STAYS
            self.off.remove(buffer)
            return
        self.memory.uncount(buffer)
        if buffer.is_needed:
            buffer.tier = Tier.HOST
        else:  # it was deleted meanwhile
            self.forget(buffer)

    def keep_off(self, buffer: Buffer) -> None:
        """An upload stays in host memory until a run reads it."""
        self.memory.uncount(buffer)
        buffer.tier = Tier.HOST
        self.off.add(buffer)

    def forget(self, buffer: Buffer) -> None:
        """A buffer in host memory is not needed any more."""
        buffer.tier = Tier.DEVICE
        self.off.remove(buffer)

    def bring_back(self, buffers: Iterable[Buffer | None]) -> None:
        """Count buffers on their devices again, because a run reads them."""
        for buffer in buffers:
            if buffer is not None and buffer.tier is Tier.HOST:
                self.forget(buffer)
                self.memory.count(buffer)

    def returns(self, buffers: Iterable[Buffer | None]) -> Returns | None:
        """Return what a run that reads these buffers brings back; None if it brings nothing."""
        off = tuple({one for one in buffers if one is not None and one in self.off})
        leaving = any(one.tier is Tier.LEAVING for one in off)
        return Returns(off, leaving) if off else None

    # --- what there is -------------------------------------------------------------------------------

    def used_bytes(self) -> Counter[str]:
        """Return the bytes of these buffers in the memory of each host."""
        total: Counter[str] = Counter()
        for buffer in self.off:
            total += host_bytes(buffer)
        return total

    def have(self, client: int) -> bool:
        """Whether an array of a client lies there."""
        return bool(self.off) and any(
            buffer in self.off and client_of(array) == client
            for array, buffer in self.memory.buffers.items()
        )


def host_bytes(buffer: Buffer) -> Counter[str]:
    """Return the bytes that a buffer takes in the memory of each host, if it leaves the devices."""
    total: Counter[str] = Counter()
    for device in buffer.on.addresses:
        total[device.host] += buffer.shard_bytes
    return total


def shortage(total: Total, needs: Needs, peaks: Bytes, returns: Returns | None) -> Bytes:
    """Return the bytes that a run lacks on each device, as a total counts; none where it needs nothing."""
    more = np.zeros_like(total.used) if returns is None else returns.bytes_in(total)
    more[needs.devices] += total.with_temporaries(needs, peaks)
    bound_bytes = np.iinfo(np.int64).max if total.bound_bytes is None else total.bound_bytes
    short: Bytes = np.where(more > 0, total.used + more - bound_bytes, 0)
    return short
