"""Which part of an array each device has, as a spec of the runtime.

Most requests of the protocol are about shards, whatever they mean. To divide an array in another way
(`reshard_arrays`), or to write it to files, one must know which part of it each shard is: its *tile*.
The protocol says so in an `xla.OpSharding`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from pw.core.sharding import ArraySpec, Placement, Sharding
from pw.gateway.protocol import protos
from pw.gateway.protocol.statuses import StatusError, unsupported


class Tiles(NamedTuple):
    """The division of an array among the devices of its list."""

    parts: tuple[int, ...]
    """The number of parts of each dimension."""
    order: tuple[int, ...]
    """Positions in the list of devices: tile by tile, and for each tile those that have a copy of it."""

    @property
    def distinct(self) -> int:
        """Return the number of different tiles."""
        return math.prod(self.parts)

    @property
    def copies(self) -> int:
        """Return the number of devices that have each tile."""
        return len(self.order) // self.distinct

    def holders(self, tile: int) -> tuple[int, ...]:
        """Return the positions of the devices that have a tile."""
        return self.order[tile * self.copies : (tile + 1) * self.copies]

    def box(self, shape: tuple[int, ...], tile: int) -> tuple[slice, ...]:
        """Return the place of a tile in an array of this shape."""
        place = np.unravel_index(tile, self.parts) if self.parts else ()
        extents = [size // count for size, count in zip(shape, self.parts, strict=True)]
        return tuple(
            slice(int(at) * extent, (int(at) + 1) * extent)
            for at, extent in zip(place, extents, strict=True)
        )

    def spec(
        self, shape: tuple[int, ...], dtype: str, placement: Placement, memory: str
    ) -> ArraySpec:
        """Return the spec of such an array; the devices of `placement` are those at `order`."""
        if self.distinct == 1:
            sharding = Sharding(("_",), (len(self.order),))
        elif self.parts[0] == len(self.order):
            sharding = Sharding(("_",), (len(self.order),), (("_",),))
        else:
            names = tuple(f"_{at}" for at in range(len(self.parts)))
            sharding = Sharding(
                (*names, "_"), (*self.parts, self.copies), tuple((name,) for name in names)
            )
        return ArraySpec(shape, dtype, sharding, placement, memory)

    def on(self, positions: Sequence[int]) -> Tiles | None:
        """Return how the array is divided among some of its devices; None if they do not have all of it.

        Where they have more copies of one tile than of another, the copies in excess are left out.
        """
        wanted = set(positions)
        rows = [[at for at in self.holders(tile) if at in wanted] for tile in range(self.distinct)]
        copies = min(map(len, rows))
        return (
            Tiles(self.parts, tuple(at for row in rows for at in row[:copies])) if copies else None
        )


def of(
    shape: tuple[int, ...], devices: int, sharding: bytes | None, *, is_replicated: bool
) -> Tiles:
    """Return the tiles of an array.

    Args:
        shape: that of the array.
        devices: how many there are.
        sharding: a serialized `xla.OpSharding`; None if the client has not said it.
        is_replicated: all shards are equal.

    Raises:
        StatusError: nothing says which part each device has, or a dimension does not divide.
    """
    if is_replicated or devices == 1:
        return _replicated(len(shape), devices)
    if sharding is None:
        raise unsupported(
            "the gateway does not know which part of the array each of its shards is; pass it through a "
            "jax.jit with out_shardings first"
        )
    tiles = _read(sharding, len(shape), devices)
    if any(size % count for size, count in zip(shape, tiles.parts, strict=True)):
        raise unsupported(
            f"an array of shape {list(shape)} does not divide into {list(tiles.parts)} equal parts; pad it"
        )
    return tiles


def sharding_of(tiles: Tiles) -> bytes:
    """Return a serialized `xla.OpSharding` that says the same."""
    sharding = protos.message("xla.OpSharding")(type=protos.enum("xla.OpSharding.Type")["OTHER"])
    sharding.tile_assignment_dimensions.extend((*tiles.parts, tiles.copies))
    sharding.tile_assignment_devices.extend(tiles.order)
    sharding.replicate_on_last_tile_dim = True
    return bytes(sharding.SerializeToString())


def _replicated(ndim: int, devices: int) -> Tiles:
    return Tiles((1,) * ndim, tuple(range(devices)))


@lru_cache(4096)
def _read(serialized: bytes, ndim: int, devices: int) -> Tiles:
    """Return the tiles that a serialized `xla.OpSharding` describes. Raises StatusError."""
    sharding = protos.message("xla.OpSharding").FromString(serialized)
    if sharding.HasField("named_sharding"):
        parts, grid = _named(sharding.named_sharding, ndim, devices)
    else:
        kind = protos.enum("xla.OpSharding.Type")
        if devices == 1 or sharding.type == kind["REPLICATED"]:
            return _replicated(ndim, devices)
        if sharding.type != kind["OTHER"]:
            raise unsupported("a sharding does not say which part of the array each device has")
        if any(other != kind["REPLICATED"] for other in sharding.last_tile_dims):
            raise unsupported("arrays with manual or unreduced axes cannot be divided otherwise")
        dims = tuple(sharding.tile_assignment_dimensions)
        if sharding.iota_reshape_dims:
            iota = np.arange(math.prod(dims)).reshape(tuple(sharding.iota_reshape_dims))
            grid = iota.transpose(tuple(sharding.iota_transpose_perm)).reshape(dims)
        else:
            grid = np.array(sharding.tile_assignment_devices).reshape(dims)
        parts = (*dims, *[1] * (ndim - len(dims)))[:ndim]
    order = tuple(map(int, grid.reshape(-1)))
    if sorted(order) != list(range(devices)) or devices % math.prod(parts):
        raise StatusError(
            "INVALID_ARGUMENT", f"a sharding is not over the {devices} devices of its list"
        )
    return Tiles(parts, order)


def _named(named: Any, ndim: int, devices: int) -> tuple[tuple[int, ...], Any]:
    """Return the parts, and the positions of the devices tile by tile, of a `NamedShardingProto`."""
    if named.unreduced_axes or named.manual_axes:
        raise unsupported("arrays with manual or unreduced axes cannot be divided otherwise")
    mesh = named.mesh
    sizes = [int(axis.size) for axis in mesh.axes]
    if mesh.device_ids:
        grid = np.array(mesh.device_ids)
    else:
        grid = np.arange(devices)
        if (moved := mesh.iota_transform).reshape_dims:
            grid = grid.reshape(tuple(moved.reshape_dims)).transpose(tuple(moved.transpose_perm))
    grid = grid.reshape(sizes)
    # A part of an axis (`sub_axis_info`) is an axis of its own: split each axis where a part begins or ends.
    cuts: list[set[int]] = [{1, size} for size in sizes]
    for dimension in named.dim_shardings:
        for axis in dimension.axes:
            if axis.HasField("sub_axis_info"):
                before = int(axis.sub_axis_info.pre_size)
                cuts[axis.mesh_axis_index] |= {before, before * int(axis.sub_axis_info.size)}
    place_of: dict[tuple[int, int], int] = {}
    small: list[int] = []
    for at, cut in enumerate(cuts):
        steps = sorted(cut)
        for before, after in pairwise(steps):
            place_of[at, before] = len(small)
            small.append(after // before)
    split = grid.reshape(small)
    parts, used = [], []
    for dimension in named.dim_shardings:
        count = 1
        for axis in dimension.axes:
            before, after = 1, sizes[axis.mesh_axis_index]
            if axis.HasField("sub_axis_info"):
                before = int(axis.sub_axis_info.pre_size)
                after = before * int(axis.sub_axis_info.size)
            while before < after:
                at = place_of[axis.mesh_axis_index, before]
                used.append(at)
                count *= small[at]
                before *= small[at]
        parts.append(count)
    rest = [at for at in range(len(small)) if at not in used]
    return (*parts, *[1] * (ndim - len(parts))), split.transpose((*used, *rest))
