"""The bounds of what messages of other processes may hold, as types of their fields.

Other processes are not trusted: a message may come from any process that may connect. A frame with a field
beyond its bounds does not decode, and is counted and dropped. A client's session refuses such a message
itself, before it sends it (`pw.core.messages.checks`).
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from pw.core.coordinates import AXES, LONGEST
from pw.core.ids import NAME_CHARACTERS
from pw.core.messages.base import INLINE_BYTES
from pw.core.programs.spec_checks import DEVICES, DIMENSIONS, VALUES
from pw.core.sharding import ArraySpec, DeviceAddress

TREE_BYTES = 32 << 20
"""Bytes that a client may describe of a checkpoint: the answer to `Describe` has room for them."""

_HOSTS = 1 << 14
"""Number of hosts that one message names, at most."""

_ARRAYS = Meta(max_length=1 << 16)
"""Number of arrays in one checkpoint, offer, wait or inquiry, at most."""

Name = Annotated[str, Meta(max_length=NAME_CHARACTERS)]
"""Name of a node, or of anything that a user names."""

Path = Annotated[str, Meta(max_length=4096)]
"""Path of a file, or JAX path of an array in a tree."""

Names = Annotated[tuple[Path, ...], _ARRAYS]
"""JAX paths of the arrays of a checkpoint."""

Tree = Annotated[bytes, Meta(max_length=TREE_BYTES)]
"""Description of a checkpoint by a client."""

Hosts = Annotated[tuple[Name, ...], Meta(max_length=_HOSTS)]
"""Names of hosts."""

Islands = Annotated[tuple[Name, ...], Meta(max_length=_HOSTS)]
"""Names of islands."""

HostCount = Annotated[int, Meta(ge=0, le=_HOSTS)]
"""Number of hosts."""

Arrays = Annotated[tuple[int, ...], _ARRAYS]
"""Numbers of arrays, or of slices."""

ManyArrays = Annotated[tuple[int, ...], Meta(max_length=VALUES)]
"""Numbers of arrays of one run."""

RunArguments = Annotated[
    tuple[int | Annotated[bytes, Meta(max_length=8 * INLINE_BYTES)], ...], Meta(max_length=VALUES)
]
"""Arguments of a run: numbers of arrays, or host values; larger values are uploaded."""

Specs = Annotated[tuple[ArraySpec, ...], _ARRAYS]
"""Specs of such arrays."""

Count = Annotated[int, Meta(ge=0)]
"""Number of anything."""

DeviceCount = Annotated[int, Meta(le=DEVICES)]
"""Number of devices of a slice, or of a host."""

DeviceBytes = Annotated[int, Meta(ge=0, le=1 << 60)]
"""Bytes of the memory of a device."""

Topology = Annotated[tuple[DeviceCount, ...], Meta(max_length=DIMENSIONS)]
"""Numbers of devices of a slice in each dimension."""

Devices = Annotated[tuple[DeviceAddress, ...], Meta(max_length=DEVICES)]
"""Devices of a slice."""

Coordinate = Annotated[tuple[Annotated[int, Meta(ge=0, le=LONGEST)], ...], Meta(max_length=AXES)]
"""Coordinates of a device, or a length for each axis of an interconnect."""

Coordinates = Annotated[tuple[Coordinate, ...], Meta(max_length=DEVICES)]
"""Coordinates of the devices of a host, in order."""

Seconds = Annotated[float, Meta(ge=0)]
"""Length of time in seconds; it may be infinite."""

Fraction = Annotated[float, Meta(ge=0, le=1)]
"""Part of a whole."""

Share = Annotated[float, Meta(ge=1e-6, le=1e6)]
"""Weight of a client."""
