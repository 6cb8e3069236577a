"""The memory of one array on the devices of an island, and the tier in which it lies."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from pw.core.sharding import DeviceAddress
from pw.sched.island.memory_totals import DeviceSet


class Tier(Enum):
    """Memory in which a buffer lies.

    | tier | counts on | `MemoryTiers.spill` | `spilled` | `write` | `written` | a run reads it |
    |---|---|---|---|---|---|---|
    | DEVICE | devices | LEAVING | | | | DEVICE |
    | LEAVING | devices, hosts | | HOST; STAYS if it was not copied | | | waits |
    | STAYS | devices | | | | | STAYS |
    | HOST | hosts | | | WRITING | | DEVICE |
    | WRITING | hosts | | | | FILE; HOST_STAYS if it was not written | waits |
    | HOST_STAYS | hosts | | | | | DEVICE |
    | FILE | nothing | | | | | DEVICE |

    Where a buffer returns to the devices, its bytes are part of what the run needs.
    """

    DEVICE = "device"
    LEAVING = "leaving"
    """It is being copied to host memory."""
    STAYS = "stays"
    """It could not be copied to host memory."""
    HOST = "host"
    WRITING = "writing"
    """It is being written to files of the hosts."""
    HOST_STAYS = "host stays"
    """It could not be written to files."""
    FILE = "file"

    @property
    def is_moving(self) -> bool:
        """Whether hosts move the buffer, so that runs that read it wait."""
        return self is Tier.LEAVING or self is Tier.WRITING

    @property
    def may_return(self) -> bool:
        """Whether a run that reads the buffer brings it back to the devices."""
        return self is Tier.HOST or self is Tier.HOST_STAYS or self is Tier.FILE


@dataclass(slots=True, eq=False)
class Buffer:
    """The memory of an array, on each of its devices."""

    on: DeviceSet
    shard_bytes: int
    names: int = 0
    """Number of arrays that have the buffer."""
    readers: int = 0
    """Number of runs in flight that read the buffer."""
    is_counted: bool = False
    """True if the buffer counts on its own; a result of a run in flight is part of the run's reservation."""
    tier: Tier = Tier.DEVICE
    used: int = 0
    """Number of the newest run that has read or made the buffer (`DeviceMemory.runs`)."""
    rested: int = -1
    """The number in `used` when idle buffers were last looked for in host memory."""
    shards: dict[DeviceAddress, Buffer] | None = None
    """Buffers of a view, or of a buffer that is divided for one, by device. These are counted instead, and the
    divided buffer is one of their `names` until no array and no run has it any more."""

    @property
    def is_needed(self) -> bool:
        """Return whether an array or a run in flight has the buffer."""
        return bool(self.names or self.readers)

    @property
    def may_leave(self) -> bool:
        """Whether it may leave the devices: it lies there, and nothing uses or shares it.

        An array that its client has in host memory has no bytes there.
        """
        is_there = self.tier is Tier.DEVICE and self.is_counted and self.shards is None
        return is_there and self.shard_bytes > 0 and self.names == 1 and not self.readers

    def parts(self) -> Iterable[Buffer]:
        """Return the buffers that are counted for it: itself, or one for each device."""
        return (self,) if self.shards is None else self.shards.values()
