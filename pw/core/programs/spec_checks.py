"""Checks what a client says of an array, before anything is computed from it.

Clients are not trusted. After these checks the numbers of a spec fit each other and the slice, so an
array costs one step for each device of its slice at most, and no later code has to look again.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec

from pw.core.dtypes import DTYPES
from pw.core.errors import PlacementError, ShardingError
from pw.core.ids import NAME_CHARACTERS
from pw.core.sharding import ArraySpec, DeviceAddress, Placement, dtype_of

DIMENSIONS = 64
"""Number of dimensions of an array, and of axes of a mesh, at most: numpy has no more."""

DEVICES = 1 << 16
"""Number of devices of a slice, or of a host, at most."""

VALUES = 1 << 18
"""Number of arrays that one message names, at most: arguments and results of a run, inputs of a program."""

ARRAY_BYTES = 1 << 56
"""Bytes of the largest array; sizes of many arrays together fit into 63 bits."""


def shortened(text: str, characters: int = NAME_CHARACTERS) -> str:
    """Return a text for people, cut if it is too long."""
    return text if len(text) <= characters else f"{text[:characters]}..."


def check_spec(spec: ArraySpec, devices: int | None) -> None:
    """Raise unless an array can lie on a slice as its spec says.

    Args:
        spec: the spec.
        devices: how many devices the slice has; None if that is not known.

    Raises:
        ShardingError: the shape, the dtype or the sharding is none, or they do not fit each other.
        PlacementError: the mesh does not fit the devices.
    """
    check_array(spec.dtype, spec.shape)
    sharding = spec.sharding
    if max(map(len, (sharding.axis_names, sharding.axis_sizes, sharding.spec))) > DIMENSIONS:
        raise ShardingError(
            f"a mesh has more than {DIMENSIONS} axes, or a partition spec more dimensions than that"
        )
    _check_names((spec.memory, *sharding.axis_names))
    sharding.check(spec.shape)
    check_placement(spec.placement, devices)
    if sharding.device_count != len(spec.placement.devices):
        raise PlacementError(
            f"the mesh {sharding.axis_sizes} has {sharding.device_count} positions, "
            f"but {len(spec.placement.devices)} devices were named for it"
        )


def check_array(dtype: str, shape: tuple[int, ...]) -> None:
    """Raise ShardingError unless there can be an array of this dtype and shape."""
    if dtype not in DTYPES:
        raise ShardingError(f"an array cannot have the dtype {shortened(dtype, 40)!r}")
    if len(shape) > DIMENSIONS:
        raise ShardingError(
            f"an array has {len(shape)} dimensions, and may have {DIMENSIONS} at most"
        )
    if any(size < 0 for size in shape):
        raise ShardingError(f"the shape {shape} has a negative size")
    if math.prod(shape) * dtype_of(dtype).itemsize > ARRAY_BYTES:
        raise ShardingError(f"an array of {dtype}{list(shape)} is larger than {ARRAY_BYTES} bytes")


def check_placement(placement: Placement, devices: int | None) -> None:
    """Raise PlacementError unless a placement names different devices of a slice of so many devices."""
    named = placement.devices
    if not named:
        raise PlacementError("it names no devices to run on")
    most = DEVICES if devices is None else devices
    if min(named) < 0 or max(named) >= most:
        wrong = min(named) if min(named) < 0 else max(named)
        raise PlacementError(f"it names device {wrong} of a slice that has {most} devices")
    if len(set(named)) < len(named):
        twice = max(Counter(named).items(), key=lambda device: device[1])[0]
        raise PlacementError(
            f"two positions of its mesh are device {twice} of its slice; make the mesh of different devices"
        )


def check_devices(
    devices: Sequence[DeviceAddress], host: str, most: int, local_devices: int
) -> None:
    """Raise PlacementError unless these are different devices of an island, some of them of `host`.

    Args:
        devices: the devices.
        host: a host of the island.
        most: how many devices the island has.
        local_devices: how many of them are on each of its hosts.
    """
    if len(devices) > most or len(set(devices)) < len(devices):
        raise PlacementError(
            f"{len(devices)} devices were named, some of them twice or beyond the {most} of the island"
        )
    if not all(0 <= device.ordinal < local_devices for device in devices):
        raise PlacementError(f"a device was named that host {host} does not have")
    if not any(device.host == host for device in devices):
        raise PlacementError(f"no device of host {host} was named")


def layout_of(spec: ArraySpec, devices: Sequence[DeviceAddress]) -> bytes:
    """Return a digest of how an array lies on physical devices.

    A client tells the controller and each host of its array. If they are not told the same, the hosts of a gang
    could not run what takes the array.
    """
    layout = (spec.shape, spec.dtype, spec.sharding, spec.memory, devices)
    return hashlib.blake2b(msgspec.msgpack.encode(layout), digest_size=16).digest()


def _check_names(names: Iterable[str]) -> None:
    for name in names:
        if len(name) > NAME_CHARACTERS:
            raise ShardingError(
                f"the name {shortened(name, 40)!r} has {len(name)} characters; {NAME_CHARACTERS} are "
                "the most"
            )
