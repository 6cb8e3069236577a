"""The buffers of an island in the memory or the files of its hosts, and what it takes to bring them back.

`Tier` has the states of a buffer. Here they change, and their bytes are counted on the devices or not;
`pw.sched.island.residency` decides.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from pw.core.ids import client_of
from pw.core.sharding import DeviceAddress
from pw.sched.island.buffers import Buffer, Tier
from pw.sched.island.memory_totals import Bytes, Needs, Total


@dataclass(frozen=True, slots=True)
class Returns:
    """What a run reads and is not on the devices."""

    buffers: tuple[Buffer, ...]
    is_moving: bool
    """True if some of it is on its way to host memory or to files; the run waits for its end."""

    def bytes_in(self, total: Total) -> Bytes:
        """Return the bytes that a total would count on each device."""
        back = np.zeros_like(total.used)
        for buffer in self.buffers:
            if total in buffer.on.totals:
                back[buffer.on.devices] += buffer.shard_bytes
        return back

    def has_no_room(self, total: Total, needs: Needs, more: Bytes) -> bool:
        """Whether a device would have too much with it, and with `more` bytes of the run itself."""
        if self.is_moving or total.bound_bytes is None:
            return self.is_moving
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
    """The buffers that lie in host memory or in files.

    Args:
        memory: counts the others.
        spill_bytes: memory of each host for arrays that leave the devices; 0 if they stay there.
        has_files: whether hosts write arrays from there to files.
    """

    memory: CountedBuffers
    spill_bytes: int
    has_files: bool = False
    off: set[Buffer] = field(default_factory=set)
    """Buffers in host memory or in files, or on their way there."""
    used_bytes: Counter[str] = field(default_factory=Counter)
    """Bytes of these buffers in the memory of each host."""

    def spill(self, buffer: Buffer) -> None:
        """Hosts copy a buffer to their memory; nothing reads it meanwhile."""
        self._take(buffer, Tier.LEAVING)

    def spilled(self, buffer: Buffer, *, kept: bool) -> None:
        """A buffer does not lie on the devices any more, unless hosts have `kept` it there."""
        self.memory.frees += 1
        if kept and buffer.is_needed:
            self._let_go(buffer, Tier.STAYS)
            return
        self.memory.uncount(buffer)
        if buffer.is_needed:
            buffer.tier = Tier.HOST
        else:  # it was deleted meanwhile
            self.forget(buffer)

    def keep_off(self, buffer: Buffer) -> None:
        """An upload stays in host memory until a run reads it."""
        self._take(buffer, Tier.HOST)

    def write(self, buffer: Buffer) -> None:
        """Hosts write a buffer from their memory to files; nothing reads it meanwhile."""
        buffer.tier = Tier.WRITING

    def written(self, buffer: Buffer, *, kept: bool) -> None:
        """A buffer does not lie in host memory any more, unless hosts have `kept` it there."""
        self.memory.frees += 1
        if kept:
            buffer.tier = Tier.HOST_STAYS
        else:
            buffer.tier = Tier.FILE
            self.used_bytes.subtract(host_bytes(buffer.on.addresses, buffer.shard_bytes))
        if not buffer.is_needed:  # it was deleted meanwhile
            self.forget(buffer)

    def forget(self, buffer: Buffer) -> None:
        """A buffer in host memory or in files is not needed any more."""
        self._let_go(buffer, Tier.DEVICE)

    def _take(self, buffer: Buffer, tier: Tier) -> None:
        buffer.tier = tier
        self.off.add(buffer)
        self.used_bytes.update(host_bytes(buffer.on.addresses, buffer.shard_bytes))

    def _let_go(self, buffer: Buffer, tier: Tier) -> None:
        if buffer.tier is not Tier.FILE:
            self.used_bytes.subtract(host_bytes(buffer.on.addresses, buffer.shard_bytes))
        buffer.tier = tier
        self.off.remove(buffer)

    def bring_back(self, buffers: Iterable[Buffer | None]) -> None:
        """Count buffers on their devices again, because a run reads them."""
        for buffer in buffers:
            if buffer is not None and buffer.tier.may_return:
                self.forget(buffer)
                self.memory.count(buffer)

    def returns(self, buffers: Iterable[Buffer | None]) -> Returns | None:
        """Return what a run that reads these buffers brings back; None if it brings nothing."""
        off = tuple({one for one in buffers if one is not None and one in self.off})
        return Returns(off, any(one.tier.is_moving for one in off)) if off else None

    # --- what there is -------------------------------------------------------------------------------

    def have_room(self, more: Mapping[str, int], chosen: Mapping[str, int]) -> bool:
        """Whether each host has room for so many more bytes, beside those of what is chosen already."""
        used = self.used_bytes
        return all(
            used[host] + chosen.get(host, 0) + size_bytes <= self.spill_bytes
            for host, size_bytes in more.items()
        )

    def can_take(self, more: Mapping[str, int], chosen: Mapping[str, int]) -> bool:
        """Whether each host has room for so many more bytes, now or when other arrays have gone to files."""
        if self.has_files:
            return all(size_bytes <= self.spill_bytes for size_bytes in more.values())
        return self.have_room(more, chosen)

    def lacking(self, more: Mapping[str, int]) -> Counter[str]:
        """Return the bytes that hosts lack for so many more, when what is being written is in files."""
        lacks = {host: self.used_bytes[host] + more[host] - self.spill_bytes for host in more}
        for buffer in self.off:
            if buffer.tier is Tier.WRITING:
                for host, frees in host_bytes(buffer.on.addresses, buffer.shard_bytes).items():
                    if host in lacks:
                        lacks[host] -= frees
        return +Counter(lacks)

    def have(self, client: int) -> bool:
        """Whether an array of a client lies there."""
        return bool(self.off) and any(
            buffer in self.off and client_of(array) == client
            for array, buffer in self.memory.buffers.items()
        )


def host_bytes(devices: Iterable[DeviceAddress], shard_bytes: int) -> Counter[str]:
    """Return the bytes that shards of these devices take in the memory of each host."""
    total: Counter[str] = Counter()
    for device in devices:
        total[device.host] += shard_bytes
    return total
