"""The layout of logical arrays on virtual devices, in numbers.

A `Sharding` is JAX's NamedSharding without devices: mesh axes with sizes, and for each dimension of
the array the axes that split it. A `Placement` names the virtual devices of one slice at the
positions of that mesh. Boxes (start and stop in every dimension) follow in closed form, so no part
of pw needs an object per shard.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator
from functools import cached_property, lru_cache
from itertools import groupby
from typing import Annotated, Self

import ml_dtypes
import msgspec
import numpy as np

from pw.core.errors import ShardingError

Box = tuple[tuple[int, int], ...]
"""Half-open interval in every dimension."""

ALIGNMENT_BYTES = 64
"""The alignment of shards in memory and in a transfer: JAX aliases such memory, and copies other memory."""

RANGE_DEVICES = 1 << 12
"""Number of devices of a host in one range of a binding, at most."""

BOXES_KEPT = 16_384
"""Number of boxes that are cached: one slice of 512 hosts has 2,048, and a step uses few shapes."""


@lru_cache(maxsize=256)  # names that clients give may be any
def dtype_of(name: str) -> np.dtype[np.generic]:
    """The numpy dtype called `name`, the small floats and integers of ml_dtypes included."""
    extension = getattr(ml_dtypes, name, None)
    return np.dtype(extension if extension is not None else name)


def box_shape(box: Box) -> tuple[int, ...]:
    """Extent of `box` in every dimension."""
    return tuple(stop - start for start, stop in box)


def box_bytes(box: Box, dtype: str) -> int:
    """Size of `box` in bytes as numpy lays it out."""
    return math.prod(box_shape(box)) * dtype_of(dtype).itemsize


def box_slices(box: Box) -> tuple[slice, ...]:
    """`box` as an index."""
    return tuple(slice(start, stop) for start, stop in box)


def packed_offsets(sizes_bytes: list[int]) -> tuple[list[int], int]:
    """Offsets of buffers laid one after the other at 64-byte boundaries, and the total size."""
    offsets, end = [], 0
    for size in sizes_bytes:
        start = -(-end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        offsets.append(start)
        end = start + size
    return offsets, end


class Sharding(msgspec.Struct, frozen=True, array_like=True, cache_hash=True):
    """Mesh axes, and the axes that split each dimension (dimensions left out are not split)."""

    axis_names: tuple[str, ...]
    axis_sizes: tuple[int, ...]
    spec: tuple[tuple[str, ...], ...] = ()

    @property
    def device_count(self) -> int:
        """Number of devices in the mesh."""
        return math.prod(self.axis_sizes)

    @lru_cache(maxsize=BOXES_KEPT)  # noqa: B019 - a sharding is a value, and equal ones are many
    def partitions(self, ndim: int) -> tuple[int, ...]:
        """Return the number of parts of each of `ndim` dimensions."""
        sizes = dict(zip(self.axis_names, self.axis_sizes, strict=True))
        split = [math.prod(sizes[axis] for axis in axes) for axes in self.spec]
        return tuple(split + [1] * (ndim - len(split)))

    def check(self, shape: tuple[int, ...]) -> None:
        """Raise ShardingError if an array of `shape` cannot be split this way."""
        if len(self.axis_names) != len(self.axis_sizes) or min(self.axis_sizes, default=1) < 1:
            raise ShardingError(
                f"the mesh has axes {self.axis_names} of sizes {self.axis_sizes}: each needs one, of 1 or more"
            )
        if len(set(self.axis_names)) < len(self.axis_names):
            raise ShardingError(f"two axes of the mesh {self.axis_names} have the same name")
        if len(self.spec) > len(shape):
            raise ShardingError(
                f"a partition spec of {len(self.spec)} dimensions was given for an array of "
                f"{len(shape)} dimensions with shape {shape}"
            )
        used: set[str] = set()
        for axes in self.spec:
            for axis in axes:
                if axis not in self.axis_names:
                    raise ShardingError(
                        f"the partition spec names the axis {axis!r}, but the mesh has {self.axis_names}"
                    )
                if axis in used:
                    raise ShardingError(f"the partition spec uses the mesh axis {axis!r} twice")
                used.add(axis)
        for dim, (size, parts) in enumerate(zip(shape, self.partitions(len(shape)), strict=True)):
            if size % parts:
                raise ShardingError(
                    f"dimension {dim} of shape {shape} has size {size}, which does not divide into "
                    f"{parts} equal shards over the mesh axes {self.spec[dim]}; pad it or choose another "
                    "sharding"
                )

    @lru_cache(maxsize=BOXES_KEPT)  # noqa: B019
    def shard_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of every shard of an array of `shape`."""
        return tuple(
            size // parts for size, parts in zip(shape, self.partitions(len(shape)), strict=True)
        )

    @lru_cache(maxsize=BOXES_KEPT)  # noqa: B019
    def box(self, shape: tuple[int, ...], device: int) -> Box:
        """Return the box of an array of `shape` on the device at position `device` of the mesh."""
        coordinates: dict[str, tuple[int, int]] = {}
        rest = device
        for axis, size in zip(reversed(self.axis_names), reversed(self.axis_sizes), strict=True):
            rest, coordinate = divmod(rest, size)
            coordinates[axis] = (coordinate, size)
        box = []
        for dim, size in enumerate(shape):
            index, parts = 0, 1
            for axis in self.spec[dim] if dim < len(self.spec) else ():
                coordinate, axis_size = coordinates[axis]
                index, parts = index * axis_size + coordinate, parts * axis_size
            width = size // parts
            box.append((index * width, (index + 1) * width))
        return tuple(box)


class Placement(msgspec.Struct, frozen=True, array_like=True, cache_hash=True):
    """The virtual devices (indices into one slice) at the positions of a mesh, in row-major order."""

    slice: int
    devices: tuple[int, ...]


class ArraySpec(msgspec.Struct, frozen=True, array_like=True, cache_hash=True, weakref=True):
    """Shape, dtype, sharding and placement of a logical array.

    Typed PRNG keys appear here as the unsigned integers they consist of; only clients see key dtypes.
    """

    shape: tuple[int, ...]
    dtype: str
    sharding: Sharding
    placement: Placement
    memory: str = ""
    """Kind of memory beside each device that the shards lie in, such as "pinned_host"; empty for the device's
    own."""

    @property
    def short(self) -> str:
        """The dtype and shape, as in `float32[8,128]`."""
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"

    @property
    def size_bytes(self) -> int:
        """Size of one full copy in bytes."""
        return math.prod(self.shape) * dtype_of(self.dtype).itemsize

    @property
    def shard_bytes(self) -> int:
        """Size of one shard in bytes."""
        return math.prod(self.sharding.shard_shape(self.shape)) * dtype_of(self.dtype).itemsize

    @property
    def device_bytes(self) -> int:
        """Size of one shard in its device's own memory, in bytes."""
        return 0 if self.memory else self.shard_bytes

    def box(self, device: int) -> Box:
        """Return the box on the device at position `device`."""
        return self.sharding.box(self.shape, device)

    def distinct_boxes(self) -> Iterator[tuple[Box, tuple[int, ...]]]:
        """Yield every distinct box with the positions of the devices that hold it."""
        holders: dict[Box, list[int]] = {}
        for device in range(self.sharding.device_count):
            holders.setdefault(self.box(device), []).append(device)
        for box, devices in holders.items():
            yield box, tuple(devices)


class DeviceAddress(msgspec.Struct, frozen=True, array_like=True):
    """A physical device: its host and its position among that host's devices."""

    host: str
    ordinal: int


def ranges_of(numbers: Iterable[int], most: int = sys.maxsize) -> list[tuple[int, int]]:
    """Group numbers that follow each other, at most so many: the first of each range, and how many it has."""
    ranges: list[tuple[int, int]] = []
    first, count = 0, 0
    for number in numbers:
        if count and number == first + count and count < most:
            count += 1
            continue
        if count:
            ranges.append((first, count))
        first, count = number, 1
    if count:
        ranges.append((first, count))
    return ranges


class DeviceRange(msgspec.Struct, frozen=True, array_like=True):
    """Devices of a host that follow each other."""

    host: str
    first: int
    count: Annotated[int, msgspec.Meta(ge=1, le=RANGE_DEVICES)]


class Binding(msgspec.Struct, frozen=True, array_like=True, dict=True):
    """The physical devices of a slice."""

    slice: int
    island: str
    ranges: tuple[DeviceRange, ...]
    """Ranges of devices. Each host gets them in a message, so they must not grow with the devices of a host."""
    platform: str = ""
    """Platform of the devices."""
    machine: str = ""
    """Machine of all hosts of the island; empty if they are on several, or on unknown ones."""

    @classmethod
    def of(
        cls,
        slice: int,
        island: str,
        devices: Iterable[DeviceAddress],
        platform: str = "",
        machine: str = "",
    ) -> Self:
        """Return the binding of a slice to these devices."""
        ranges = [
            DeviceRange(host, first, count)
            for host, own in groupby(devices, lambda device: device.host)
            for first, count in ranges_of((device.ordinal for device in own), RANGE_DEVICES)
        ]
        return cls(slice, island, tuple(ranges), platform, machine)

    @cached_property
    def devices(self) -> tuple[DeviceAddress, ...]:
        """The device at each index of the slice."""
        return tuple(
            DeviceAddress(one.host, one.first + ordinal)
            for one in self.ranges
            for ordinal in range(one.count)
        )

    def located(self, placement: Placement) -> tuple[DeviceAddress, ...]:
        """Physical device at every position of `placement`."""
        return tuple(self.devices[index] for index in placement.devices)


def host_boxes(
    spec: ArraySpec, devices: tuple[DeviceAddress, ...], host: str
) -> list[tuple[Box, tuple[int, ...]]]:
    """Return the distinct boxes of an array on `host`, each with the mesh positions there that hold it.

    Uploads and inline arguments carry a host's boxes in this order.
    """
    holders: dict[Box, list[int]] = {}
    for position, device in enumerate(devices):
        if device.host == host:
            holders.setdefault(spec.box(position), []).append(position)
    return [(box, tuple(positions)) for box, positions in holders.items()]
