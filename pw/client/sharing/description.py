"""The description of a published tree: its containers and host values, and how its arrays lie.

The publisher writes it, the controller passes it on, and readers build types and trees from it. A reader does
not trust it: it may come from another tenant.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np

from pw.client.arrays.array import Array
from pw.client.arrays.devices import VirtualDevice
from pw.client.arrays.mesh import OwnMesh
from pw.client.arrays.sharding import OwnSharding, PartitionSpec
from pw.client.arrays.signature import ArrayType
from pw.client.checkpoints.tree import UNREADABLE, Leaf, TreeNode
from pw.core.errors import Error, ProtocolError

Devices = Sequence[VirtualDevice]
"""Devices of this process in the place of those of an offer."""
Member = tuple[int, int]
"""Index of an offer, and of an array in it."""


class SharedMesh(msgspec.Struct, frozen=True):
    """A mesh over the devices of the offers."""

    axes: list[str]
    extent: list[int]
    devices: list[tuple[int, int]]
    """Index of the offer on whose slice each device is, and the device's index there."""

    @classmethod
    def of(cls, mesh: OwnMesh, slices: Sequence[int]) -> SharedMesh:
        """Describe a mesh whose slices have these numbers."""
        at = {number: index for index, number in enumerate(slices)}
        devices = [(at[device.slice.id], device.index) for device in mesh.devices.flat]
        return cls(list(mesh.axis_names), list(mesh.devices.shape), devices)

    def mesh(self, devices: Sequence[Devices]) -> OwnMesh:
        """Return the mesh over these devices. Raises LookupError or ValueError if there is none."""
        if math.prod(self.extent) != len(self.devices):
            raise ValueError("a mesh has another number of devices than its shape")
        grid = np.empty(len(self.devices), dtype=object)
        for place, (part, index) in enumerate(self.devices):
            if not 0 <= part < len(devices) or not 0 <= index < len(devices[part]):
                raise LookupError("a mesh names a device that its slices do not have")
            grid[place] = devices[part][index]
        return OwnMesh(grid.reshape(self.extent), self.axes)


class SharedLeaf(Leaf, frozen=True, omit_defaults=True):
    """One leaf: a host value, or an array with its sharding."""

    members: tuple[Member, ...] = ()
    """The array; of one over several islands, its part on each."""
    mesh: int = 0
    """Index of its mesh."""
    axes: tuple[tuple[str, ...], ...] = ()
    """Mesh axes that split each dimension."""
    memory: str = ""
    """Kind of memory in which its shards lie; empty for the devices' own."""

    def type(self, meshes: Sequence[OwnMesh]) -> ArrayType:
        """Return the type of the array. Raises an Error, LookupError or ValueError if there is none."""
        spec = PartitionSpec(*(axes or None for axes in self.axes))
        sharding = OwnSharding.over(meshes[self.mesh], spec, self.memory or None)
        type_ = ArrayType.of(self.aval(), sharding)
        if len(self.members) != len(type_.parts or (type_,)):
            raise ValueError("an array has another number of parts than islands")
        return type_


class SharedTree(msgspec.Struct, frozen=True):
    """A published tree."""

    leaves: list[SharedLeaf]
    structure: TreeNode
    meshes: list[SharedMesh]


encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(SharedTree).decode


def read(
    tree: bytes, devices: Sequence[Devices]
) -> tuple[SharedTree, list[ArrayType | None], list[dict[int, ArrayType]]]:
    """Return a published tree, the type of each leaf that is an array, and the types of each offer's arrays.

    Args:
        tree: the description.
        devices: virtual devices of this process on those of each offer.

    Raises:
        ProtocolError: it is nothing that pw writes.
    """
    try:
        shared = _decode(tree)
        meshes = [mesh.mesh(devices) for mesh in shared.meshes]
        types: list[ArrayType | None] = []
        parts: list[dict[int, ArrayType]] = [{} for _ in devices]
        for leaf in shared.leaves:
            leaf.check()
            types.append(type_ := leaf.type(meshes) if leaf.in_files else None)
            for member, part in (
                zip(leaf.members, type_.parts or (type_,), strict=True) if type_ else ()
            ):
                parts[member[0]][member[1]] = part
        if shared.structure.count() != len(shared.leaves):
            raise ValueError("a tree has another number of leaves than places")
        if any(sorted(part) != list(range(len(part))) for part in parts):
            raise ValueError("an array of an offer has no leaf")
    except (*UNREADABLE, Error) as error:
        raise ProtocolError(
            f"what was published has a description that cannot be read: {error}"
        ) from None
    return shared, types, parts


def leaf_of(key: str, array: Array, members: Sequence[Member], mesh: int) -> SharedLeaf:
    """Describe an array."""
    type_ = array._type
    return SharedLeaf(
        key,
        key or "array",
        type_.spec.shape,
        type_.spec.dtype,
        type_.key_impl or "",
        array.weak_type,
        members=tuple(members),
        mesh=mesh,
        axes=type_.sharding.core.spec,
        memory=type_.sharding.memory,
    )
