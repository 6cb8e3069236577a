"""Where the shards of simulated computations lie, and their buffers."""

from __future__ import annotations

import weakref
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np

from pw.core.programs.program import Computation
from pw.core.sharding import ArraySpec, DeviceAddress, box_slices, dtype_of
from pw.devices.host.backend import Build
from pw.testing.sim.world import Violation

SKEW = 1.1
"""Factor of the limit, because a host of a gang may drop its part of an array later than the one that
reports."""


class Shards(dict[int, np.ndarray[Any, Any]]):
    """The buffers of one value on one host, by the ordinal of the device."""

    __slots__ = ("__weakref__", "is_upload")

    is_upload: bool
    """True if no run has made the value, and it has not left the devices: uploads are not admitted."""

    def __init__(self, *shards: Any) -> None:
        super().__init__(*shards)
        self.is_upload = False


@dataclass(slots=True)
class _Buffer:
    """Shard, with the number of values that have it."""

    ordinal: int
    size_bytes: int
    is_made: bool
    """True if a run has made the buffer, in other memory than that of an upload."""
    values: int = 0


class Buffers:
    """The buffers on one host's devices; a shard that several values have counts once.

    Args:
        host: the name of the host.
        limit_bytes: memory of each device; 0 where nothing limits it.
    """

    def __init__(self, host: str, limit_bytes: int) -> None:
        self.live_bytes: Counter[int] = Counter()
        self._host = host
        self._limit_bytes = limit_bytes
        self._made_bytes: Counter[int] = Counter()
        """Bytes of results on each device: runs wait for memory, uploads do not."""
        self._taken_over: Counter[int] = Counter()
        """Bytes of uploads that runs have taken over, and that results will have."""
        self._refs: dict[int, weakref.ref[Shards]] = {}
        self._filled = 0
        self._shards: dict[int, _Buffer] = {}
        """Buffers by the id of the array, which lives as long as a value has it."""

    def __len__(self) -> int:
        """Values whose buffers are still referenced."""
        return len(self._refs)

    def fill(self, shards: Shards, *, by_run: bool) -> None:
        """Count the shards of a value until it is dropped."""
        for ordinal, shard in shards.items():
            buffer = self._shards.get(id(shard))
            if buffer is None:
                had = by_run and self._taken_over[ordinal] >= shard.nbytes
                self._taken_over[ordinal] -= had * shard.nbytes
                buffer = _Buffer(ordinal, shard.nbytes, by_run and not had)
                self._shards[id(shard)] = buffer
                self._count(buffer, 1)
            buffer.values += 1
            if self._limit_bytes and self._made_bytes[ordinal] > SKEW * self._limit_bytes:
                what = f"runs made {self._made_bytes[ordinal]} bytes on device {ordinal} of {self._host}"
                raise Violation("memory", f"{what}, which has {self._limit_bytes}")
        names = tuple([id(shard) for shard in shards.values()])

        self._filled += 1
        serial = self._filled

        def dropped(ref: weakref.ref[Shards]) -> None:
            del self._refs[serial]
            for name in names:
                self._drop(name)

        self._refs[serial] = weakref.ref(shards, dropped)

    def donate(self, shards: Shards) -> None:
        """A computation takes over the shards of a value. Raises Violation if another value has one."""
        for shard in shards.values():
            buffer = self._shards.get(id(shard))
            if buffer is None:
                continue
            if buffer.values > 1:
                raise Violation("views", f"a shard of two arrays was donated on {self._host}")
            if not buffer.is_made:
                self._taken_over[buffer.ordinal] += buffer.size_bytes

    def _drop(self, name: int) -> None:
        buffer = self._shards[name]
        buffer.values -= 1
        if not buffer.values:
            del self._shards[name]
            self._count(buffer, -1)

    def _count(self, buffer: _Buffer, sign: int) -> None:
        self.live_bytes[buffer.ordinal] += sign * buffer.size_bytes
        self._made_bytes[buffer.ordinal] += sign * buffer.size_bytes * buffer.is_made


_Index = tuple[slice, ...]


@dataclass(slots=True)
class _Place:
    """Places of the shards of one argument or result."""

    spec: ArraySpec
    by_host: dict[str, list[tuple[int, _Index]]]
    """Ordinals and boxes on each host."""
    holder: tuple[str, int] | None
    """Host and ordinal of a device that has the whole array."""
    replicated: bool


class SimLayout:
    """Places of a computation's shards, computed once for all hosts."""

    def __init__(self, computation: Computation, devices: tuple[DeviceAddress, ...]) -> None:
        virtual = dict(zip(computation.placement.devices, devices, strict=True))
        self.hosts = tuple(dict.fromkeys(device.host for device in devices))
        self.inputs = [_place(spec, virtual) for spec in computation.inputs]
        self.outputs = [_place(spec, virtual) for spec in computation.outputs]


def _place(spec: ArraySpec, virtual: dict[int, DeviceAddress]) -> _Place:
    by_host: dict[str, list[tuple[int, _Index]]] = {}
    holder = None
    boxes = set()
    for position, index in enumerate(spec.placement.devices):
        device, box = virtual[index], spec.box(position)
        boxes.add(box)
        by_host.setdefault(device.host, []).append((device.ordinal, box_slices(box)))
        if all(stop - start == size for (start, stop), size in zip(box, spec.shape, strict=True)):
            holder = holder or (device.host, device.ordinal)
    return _Place(spec, by_host, holder, len(boxes) < len(spec.placement.devices))


@dataclass(slots=True)
class SimInstalled:
    """A computation as this host runs it."""

    name: str
    artifact: bytes
    computation: Computation
    layout: SimLayout
    lasts_s: float | None
    """Seconds of a run of the computation, if they are always the same."""


def cut(array: np.ndarray[Any, Any], place: _Place, host: str) -> Shards:
    """Return the shards that one host has of a whole array."""
    shards = Shards()
    for ordinal, box in place.by_host[host]:
        shards[ordinal] = array[box]
    return shards


def empty(spec: ArraySpec, devices: tuple[DeviceAddress, ...], host: str) -> Shards:
    """Return shards of zeros for the devices of one host."""
    shape, dtype = spec.sharding.shard_shape(spec.shape), dtype_of(spec.dtype)
    return Shards(
        {device.ordinal: np.zeros(shape, dtype) for device in devices if device.host == host}
    )


def write_parts(shards: Shards, op: Build, host: str) -> int:
    """Write the parts of a build into empty shards; return how many bytes that were."""
    written: Counter[int] = Counter()
    total = 0
    for positions, box, data in op.parts:
        for position in positions:
            ordinal = op.devices[position].ordinal
            shards[ordinal][box_slices(box)] = data
            written[ordinal] += data.size
            total += data.nbytes
    for ordinal, shard in shards.items():
        if written[ordinal] != shard.size and not op.over_zeros:
            what = f"{written[ordinal]} of {shard.size} elements on {host}"
            raise Violation("arrays are built from all their parts", what)
    return total
