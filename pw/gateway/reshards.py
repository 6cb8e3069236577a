"""Dividing arrays in another way, over the edges of the runtime.

The runtime's edges re-shard between any two specs, each on one slice. So an array is named by its
true spec first (a view: its shards stay where they are), moved to the spec of the result, and the
result is named again in the order of the client's devices. An array that is spread over several
islands takes part if one of them has all of it. Else its tiles come together in the gateway.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pw.core.sharding import ArraySpec, dtype_of
from pw.gateway import tiles
from pw.gateway.arrays import ProxyArray, Stored, memory_of
from pw.gateway.devices import Devices
from pw.gateway.runs import Runs
from pw.gateway.shardings import ShardLayout
from pw.gateway.tiles import Tiles
from pw.gateway.transfers import Transfers

_Part = tuple[ProxyArray, ArraySpec]


class Reshards:
    """Divides the arrays of one client."""

    def __init__(self, devices: Devices, runs: Runs, transfers: Transfers) -> None:
        self._devices = devices
        self._runs = runs
        self._transfers = transfers

    async def reshard(
        self, sources: Sequence[ProxyArray], layouts: Sequence[ShardLayout]
    ) -> list[ProxyArray]:
        """Return copies of arrays, divided as the layouts say. Raises Status."""
        made, moves = [], []
        for source, layout in zip(sources, layouts, strict=True):
            stored = None if source.value is not None else await self.named(source)
            target = None if stored is None else self.unfilled(source.dtype, source.shape, layout)
            if stored is None or target is None:
                made.append(await self._through_here(source, layout))
                continue
            array, parts = target
            made.append(array)
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
        return made

    async def named(self, array: ProxyArray) -> Stored | None:
        """Return the runtime's array that is this one, by its true spec; None if no island has all of it.

        Raises:
            Status: it is not known which part of the array each shard is.
        """
        known = array.tiles
        for positions in self._devices.by_slice(array.devices).values():
            if (here := known.on(positions)) is None:
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

    async def _through_here(self, source: ProxyArray, layout: ShardLayout) -> ProxyArray:
        """Fetch an array's tiles, and make the new array of the whole."""
        known, shape = source.tiles, source.shape
        wanted = tiles.of(
            shape, len(layout.devices), layout.sharding, is_replicated=layout.is_replicated
        )
        whole = np.empty(shape, dtype_of(source.dtype))
        for tile in range(known.distinct):
            value = await self._runs.shard(source, known.holders(tile)[0])
            whole[known.box(shape, tile)] = value
        whole.flags.writeable = False
        return self._transfers.from_host(source.dtype, shape, layout, _divided(whole, wanted))


def _divided(
    whole: np.ndarray[tuple[int, ...], np.dtype[np.generic]], wanted: Tiles
) -> list[np.ndarray[tuple[int, ...], np.dtype[np.generic]]]:
    """Return the shard of each device."""
    shards = [whole] * len(wanted.order)
    if wanted.distinct > 1:
        for tile in range(wanted.distinct):
            shard = np.ascontiguousarray(whole[wanted.box(whole.shape, tile)])
            for position in wanted.holders(tile):
                shards[position] = shard
    return shards


def _is_identity(order: Sequence[int], devices: int) -> bool:
    return len(order) == devices and all(at == position for at, position in enumerate(order))
