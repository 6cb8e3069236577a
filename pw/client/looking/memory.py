"""`pw.memory()`: what lies in the memory of devices, and whose it is, as an object and as tables."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pw.client.connection import current
from pw.client.display.tables import Shown, Table
from pw.client.keywords import checks_keywords
from pw.core.messages import ArrayMemory, DeviceUse, Memory, OwnerMemory, SliceMemory
from pw.core.sizes import size_in_words
from pw.core.waits import LOOKING_S

__all__ = ["ArrayMemory", "ClusterMemory", "DeviceUse", "OwnerMemory", "SliceMemory", "memory"]


@dataclass(frozen=True, slots=True, repr=False)
class ClusterMemory(Shown):
    """The memory of all devices at the time of the question; prints as tables."""

    devices: tuple[DeviceUse, ...]
    """Devices of the islands that are ready, by island and host."""
    silent: tuple[str, ...]
    """Hosts that did not answer: their devices have no `arrays_bytes`."""

    @classmethod
    def of(cls, reply: Memory) -> ClusterMemory:
        """Return the controller's answer."""
        return cls(reply.devices, reply.silent)

    @property
    def head(self) -> str:
        """One line about all devices."""
        held = sum(device.arrays_bytes or 0 for device in self.devices)
        reserved = sum(device.reserved_bytes for device in self.devices)
        sizes = f"{size_in_words(held)} of arrays, {size_in_words(reserved)} reserved"
        line = f"{len(self.devices)} devices: {sizes}"
        return f"{line}; no answer from {', '.join(self.silent)}" if self.silent else line

    def tables(self) -> tuple[Table, ...]:
        """Return the tables of devices, owners and largest arrays, and of slices if some have a bound."""
        place: dict[str, Callable[..., Any]] = {
            "island": lambda d, *_: d.island,
            "host": lambda d, *_: d.host,
            "device": lambda d, *_: d.device,
        }
        memory = {
            "limit": lambda d: _words(d.limit_bytes, "unlimited"),
            "free": lambda d: _words(d.free_bytes, ""),
            "arrays": lambda d: _words(d.arrays_bytes, "no answer"),
            "reserved": lambda d: size_in_words(d.reserved_bytes),
            "temporaries": lambda d: size_in_words(d.temporary_bytes),
            "in host memory": lambda d: _words(d.host_bytes, "no answer"),
            "in files": lambda d: _words(d.file_bytes, "no answer"),
            "in use": lambda d: _words(d.in_use_bytes, ""),
            "peak": lambda d: _words(d.peak_bytes, ""),
        }
        owned = {
            "client": lambda _, o: o.client,
            "name": lambda _, o: o.name,
            "arrays": lambda _, o: o.arrays,
            "bytes": lambda _, o: size_in_words(o.arrays_bytes),
            "reserved": lambda _, o: size_in_words(o.reserved_bytes),
        }
        array = {
            "array": lambda _, a: f"{a.client}.{a.array}",
            "type": lambda _, a: a.type,
            "made by": lambda _, a: a.program or "(uploaded)",
            "bytes": lambda _, a: size_in_words(a.size_bytes),
        }
        slices = {
            "client": lambda _, s: s.client,
            "slice": lambda _, s: s.slice,
            "has": lambda _, s: size_in_words(s.used_bytes),
            "may have": lambda _, s: size_in_words(s.bound_bytes),
        }
        bounded = [(device, one) for device in self.devices for one in device.slices]
        owners = ((device, owner) for device in self.devices for owner in device.owners)
        arrays = ((device, largest) for device in self.devices for largest in device.largest)
        return (
            Table.of("Devices", zip(self.devices, strict=True), place | memory),
            Table.of("Owners", owners, place | owned),
            Table.of("Largest arrays", arrays, place | array),
            *([Table.of("Slices", bounded, place | slices)] if bounded else []),
        )


def _words(size_bytes: int | None, without: str) -> str:
    return without if size_bytes is None else size_in_words(size_bytes)


@checks_keywords
def memory(timeout_s: float = LOOKING_S) -> ClusterMemory:
    """Return what lies in the memory of each device: whose it is, what is reserved, the largest arrays.

    In a terminal the result prints as tables, in a notebook it shows as such; a script reads its attributes,
    as in `min(device.free_bytes for device in pw.memory().devices)` on devices with a limit. All sizes are in
    bytes for one device. A host that does not answer within 0.8 s is in `silent`.

    Args:
        timeout_s: how long to wait for the controller's answer, in seconds.

    Raises:
        ConnectionFailed: the controller has not answered within `timeout_s`, or is gone for good.
    """
    return ClusterMemory.of(current.runtime().ask.memory(timeout_s))
