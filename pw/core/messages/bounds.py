"""The bounds of what messages of other processes may hold, as types of their fields.

Other processes are not trusted: a message may come from any process that may connect. A frame with a field
beyond its bounds does not decode, and is counted and dropped. A client's session refuses such a message
itself, before it sends it (`pw.core.messages.checks`).
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from pw.core.ids import NAME_CHARACTERS
from pw.core.messages.base import INLINE_BYTES
from pw.core.programs.spec_checks import DEVICES, DIMENSIONS, VALUES
from pw.core.sharding import ArraySpec, DeviceAddress

TREE_BYTES = 32 << 20
"""The most that a client may describe of a checkpoint: the answer to `Describe` has room for it."""

_HOSTS = 1 << 14
"""The most hosts that one message names."""

_ARRAYS = Meta(max_length=1 << 16)
"""The most arrays in one checkpoint, offer, wait or inquiry."""

Name = Annotated[str, Meta(max_length=NAME_CHARACTERS)]
"""A name of a node, or of anything that a user names."""

Path = Annotated[str, Meta(max_length=4096)]
"""The path of a file, or the JAX path of an array in a tree."""

Names = Annotated[tuple[Path, ...], _ARRAYS]
"""JAX paths of the arrays of a checkpoint."""

Tree = Annotated[bytes, Meta(max_length=TREE_BYTES)]
"""What a client describes of a checkpoint."""

Hosts = Annotated[tuple[Name, ...], Meta(max_length=_HOSTS)]
"""Names of hosts."""

HostCount = Annotated[int, Meta(ge=0, le=_HOSTS)]
"""A number of hosts."""

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
"""A number of anything."""

DeviceCount = Annotated[int, Meta(le=DEVICES)]
"""A number of devices of a slice, or of a host."""

Topology = Annotated[tuple[DeviceCount, ...], Meta(max_length=DIMENSIONS)]
"""Numbers of devices of a slice in each dimension."""

Devices = Annotated[tuple[DeviceAddress, ...], Meta(max_length=DEVICES)]
"""Devices of a slice."""

Share = Annotated[float, Meta(ge=1e-6, le=1e6)]
"""The weight of a client."""
