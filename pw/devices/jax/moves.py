"""Lays out an array on other devices of the same host, and makes views of arrays."""

from __future__ import annotations

import math
from functools import partial

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from pw.core.errors import InternalError
from pw.core.sharding import box_shape
from pw.devices.host.backend import Move, View
from pw.devices.jax.layouts import Layouts, assemble, assemble_view, is_whole, local_shards


def moved(op: Move, array: jax.Array, layouts: Layouts) -> jax.Array:
    """The array of `op.result`, made of `array`.

    A whole shard that stays on its device, and in its memory, is aliased.
    """
    source = layouts.of(op.source_spec, op.source_devices)
    layout = layouts.of(op.spec, op.devices)
    shards = local_shards(array)
    shape = op.spec.sharding.shard_shape(op.spec.shape)
    source_shape = op.source_spec.sharding.shard_shape(op.source_spec.shape)
    parts: dict[int, jax.Array] = {}
    memory = op.spec.memory or None
    stays = op.spec.memory == op.source_spec.memory
    for piece in op.pieces:
        home = source.local[piece.source_device]
        shard, box = shards[home], piece.source_box
        if box_shape(box) != shape:
            raise InternalError(f"a piece of {box} moves into shards of {shape}")
        aliased = is_whole(box, source_shape)
        if not aliased:
            starts, stops = zip(*box, strict=True)
            shard = _slice(shard, starts, stops)
        for position in piece.destination_devices:
            device = layout.local.get(position)
            if device is None:
                continue
            if device == home and stays and (aliased or memory is None):
                parts[position] = shard
                if aliased:
                    op.source.shared = op.result.shared = True
            else:
                there = SingleDeviceSharding(device, memory_kind=memory)
                parts[position] = jax.device_put(shard, there, may_alias=False)
    if not math.prod(shape):  # empty shards may have no piece
        empty = np.zeros(shape, array.dtype)
        for position, device in layout.local.items():
            there = SingleDeviceSharding(device, memory_kind=memory)
            parts.setdefault(position, jax.device_put(empty, there))
    return assemble(op.spec, layout, parts)


def viewed(op: View, layouts: Layouts) -> jax.Array:
    """The array of `op.result`, whose shards are those of its sources."""
    layout = layouts.of(op.spec, op.devices)
    parts: dict[int, jax.Array] = {}
    for source in op.sources:
        shards = local_shards(source.value.payload)
        for position, _ in source.shards:
            parts[position] = shards[layout.local[position]]
    return assemble_view(op.spec, layout, parts)


@partial(jax.jit, static_argnums=(1, 2))
def _slice(shard: jax.Array, starts: tuple[int, ...], stops: tuple[int, ...]) -> jax.Array:
    return jax.lax.slice(shard, starts, stops)
