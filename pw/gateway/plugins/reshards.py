"""Dividing arrays in another way, over the edges of the runtime.

The runtime's edges re-shard between any two specs, each on one slice. So an array is named by its
true spec first (a view: its shards stay where they are), moved to the spec of the result, and the
result is named again in the order of the client's devices. An array that is spread over several
islands takes part if one of them has all of it. Else a function over all its devices divides it
otherwise (`Moves`): so that each island has all of it, or right away as the result is divided.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pw.core.sharding import ArraySpec, dtype_of
from pw.gateway.arrays.arrays import DEFAULT_MEMORY, ProxyArray, Stored, memory_of
from pw.gateway.arrays.devices import Devices
from pw.gateway.arrays.runs import Runs
from pw.gateway.arrays.transfers import Transfers
from pw.gateway.plugins.moves import Moves
from pw.gateway.protocol import tiles
from pw.gateway.protocol.shardings import ShardLayout
from pw.gateway.protocol.tiles import Tiles

_Part = tuple[ProxyArray, ArraySpec]


class Reshards:
    """Divides the arrays of one client."""

    def __init__(self, devices: Devices, runs: Runs, moves: Moves, transfers: Transfers) -> None:
        self._devices = devices
        self._runs = runs
        self._moves = moves
        self._transfers = transfers

    async def reshard(
        self, sources: Sequence[ProxyArray], layouts: Sequence[ShardLayout]
    ) -> list[ProxyArray]:
        """Return copies of arrays, divided as the layouts say. Raises Status."""
        arrays, moves = [], []
        for source, layout in zip(sources, layouts, strict=True):
            if source.value is not None:
                arrays.append(await self._of_value(source, layout))
                continue
            stored = await self.named(source)
            target = self.unfilled(source.dtype, source.shape, layout)
            if stored is None or target is None:
                arrays.append(await self._spread(source, layout))
                continue
            array, parts = target
            arrays.append(array)
            for part, spec in parts:
                if spec == stored.spec:
                    part.consist_of(stored)
                else:
                    moves.append((stored, spec, part))
        if moves:
            await self._runs.credit()
            moved = self._runs.moved([one for one, _, _ in moves], [one for _, one, _ in moves])
            for stored, (_, _, part) in zip(moved, moves, strict=True):
                part.consist_of(stored)
        return arrays

    async def named(self, array: ProxyArray) -> Stored | None:
        """Return the runtime's array that is this one, by its true spec; None if no island has all of it.

        Raises:
            Status: it is not known which part of the array each shard is.
        """
        own_tiles = array.tiles
        for positions in self._devices.by_slice(array.devices).values():
            if (here := own_tiles.on(positions)) is None:
                continue
            devices = tuple(array.devices[at] for at in here.order)
            spec = here.spec(
                array.shape, array.dtype, self._devices.placement(devices), memory_of(array.memory)
            )
            if not _is_identity(here.order, len(array.devices)):
                part = ProxyArray(
                    array.dtype,
                    array.shape,
                    array.shard_shape,
                    devices,
                    array.memory,
                    here.distinct == 1,
                )
                part.pieces = tuple((array, at) for at in here.order)
                array = part
            if array.stored is None or array.stored.spec != spec:
                await self._runs.credit()
            return self._runs.stored(array, spec)
        return None

    def unfilled(
        self, dtype: str, shape: tuple[int, ...], layout: ShardLayout
    ) -> tuple[ProxyArray, list[_Part]] | None:
        """Return a new array without values, and its parts with their specs.

        None if it lies on several islands, and one of them does not have all of it.

        Raises:
            Status: it does not divide that way.
        """
        wanted = tiles.of(
            shape, len(layout.devices), layout.sharding, is_replicated=layout.is_replicated
        )
        shard = tuple(size // count for size, count in zip(shape, wanted.parts, strict=True))

        def new(devices: tuple[int, ...]) -> ProxyArray:
            return ProxyArray(dtype, shape, shard, devices, layout.memory, wanted.distinct == 1)

        array = new(layout.devices)
        array.sharding = layout.sharding
        parts: list[_Part] = []
        pieces: dict[int, tuple[ProxyArray, int]] = {}
        for positions in self._devices.by_slice(layout.devices).values():
            here = wanted.on(positions)
            if here is None or len(here.order) < len(positions):
                return None
            devices = tuple(layout.devices[at] for at in here.order)
            part = array if _is_identity(here.order, len(layout.devices)) else new(devices)
            spec = here.spec(
                shape, dtype, self._devices.placement(devices), memory_of(layout.memory)
            )
            parts.append((part, spec))
            pieces.update({position: (part, at) for at, position in enumerate(here.order)})
        if parts[0][0] is not array:
            array.pieces = tuple(pieces[position] for position in range(len(layout.devices)))
        return array, parts

    async def gathered(self, array: ProxyArray) -> Stored:
        """Return an array of the runtime with all of this one, on one of its islands.

        Raises:
            Status: it is not known which part of the array each shard is.
        """
        stored = await self.named(array)
        if stored is None:
            stored = await self.named(
                await self._moved(array, self.on_each(array.shape, array.devices, array.memory))
            )
        assert stored is not None
        return stored

    async def _spread(self, source: ProxyArray, layout: ShardLayout) -> ProxyArray:
        """Divide an array otherwise of which no island has all, now or then."""
        if set(source.devices) != set(layout.devices):
            if self.unfilled(source.dtype, source.shape, layout) is None:
                there = self.on_each(source.shape, layout.devices, source.memory)
                (source,) = await self.reshard([source], [there])
            else:
                source = await self._moved(
                    source, self.on_each(source.shape, source.devices, source.memory)
                )
                return (await self.reshard([source], [layout]))[0]
        return await self._moved(source, layout)

    async def _moved(self, source: ProxyArray, layout: ShardLayout) -> ProxyArray:
        """Run the function that divides an array otherwise over the same devices."""
        wanted = tiles.of(
            source.shape, len(layout.devices), layout.sharding, is_replicated=layout.is_replicated
        )
        copy = await self._moves.moved(source, layout.devices, wanted)
        shard = tuple(size // count for size, count in zip(source.shape, wanted.parts, strict=True))
        array = ProxyArray(
            source.dtype,
            source.shape,
            shard,
            layout.devices,
            DEFAULT_MEMORY,
            wanted.distinct == 1,
            sharding=layout.sharding,
        )
        where = {device: at for at, device in enumerate(copy.devices)}
        array.pieces = tuple((copy, where[device]) for device in layout.devices)
        if memory_of(layout.memory):
            array = await self._transfers.copied(array, layout.devices, layout.memory)
        return array

    def on_each(self, shape: tuple[int, ...], devices: tuple[int, ...], memory: str) -> ShardLayout:
        """Return a layout in which each island has all of an array, if possible divided over its devices."""
        islands = self._devices.islands(devices)
        each = {len(one.positions) for one in islands}
        width = max(each)
        along = next((at for at, size in enumerate(shape) if size and not size % width), None)
        if along is None or len(each) > 1:
            return ShardLayout(devices, memory, True, shape)
        order = [one.positions[place] for place in range(width) for one in islands]
        parts = [1] * len(shape)
        parts[along] = width
        sharding = tiles.sharding_of(Tiles(tuple(parts), tuple(order)))
        return ShardLayout(devices, memory, False, None, sharding)

    async def _of_value(self, source: ProxyArray, layout: ShardLayout) -> ProxyArray:
        """Divide a value that is here."""
        own_tiles, shape = source.tiles, source.shape
        wanted = tiles.of(
            shape, len(layout.devices), layout.sharding, is_replicated=layout.is_replicated
        )
        content = np.empty(shape, dtype_of(source.dtype))
        for tile in range(own_tiles.distinct):
            value = await self._runs.shard(source, own_tiles.holders(tile)[0])
            content[own_tiles.box(shape, tile)] = value
        content.flags.writeable = False
        return self._transfers.from_host(source.dtype, shape, layout, _divided(content, wanted))


def _divided(
    content: np.ndarray[tuple[int, ...], np.dtype[np.generic]], wanted: Tiles
) -> list[np.ndarray[tuple[int, ...], np.dtype[np.generic]]]:
    """Return the shard of each device."""
    shards = [content] * len(wanted.order)
    if wanted.distinct > 1:
        for tile in range(wanted.distinct):
            shard = np.ascontiguousarray(content[wanted.box(content.shape, tile)])
            for position in wanted.holders(tile):
                shards[position] = shard
    return shards


def _is_identity(order: Sequence[int], devices: int) -> bool:
    return len(order) == devices and all(at == position for at, position in enumerate(order))
