"""Shardings: between JAX's remote protocol and the specs of the runtime.

The protocol describes an array by its shards: a list of devices and the shape of a shard. Which part of
the array a shard is, only the client knows. So an array of the gateway has one of two specs:
*replicated*, if all shards are equal, or *stacked*, in which the shards lie side by side in the first
dimension, in the order of the devices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from google.protobuf.message import DecodeError

from pw.gateway.protocol import protos
from pw.gateway.protocol.dtypes import name_of
from pw.gateway.protocol.statuses import StatusError, unsupported

_IFRT = "xla::ifrt::"
_KINDS = frozenset(
    f"{kind}Sharding"
    for kind in ("SingleDevice", "ConcreteEven", "Concrete", "Hlo", "Opaque", "ShardingParam")
)


class ShardLayout(NamedTuple):
    """The devices, the memory and the shape of the shards of an array."""

    devices: tuple[int, ...]
    """The numbers of the devices, in JAX."""
    memory: str
    is_replicated: bool
    """Whether all shards are known to be equal."""
    shard_shape: tuple[int, ...] | None
    """Shape of a shard; None if the protocol does not say."""
    sharding: bytes | None = None
    """A serialized `xla.OpSharding`, if the protocol says which part of the array each shard is."""


def read(proto: Any, shape: tuple[int, ...]) -> ShardLayout:
    """Return what a `ShardingProto` says of an array of this shape. Raises StatusError."""
    serialized = proto.serialized_sharding
    return _read(serialized.type_name.removeprefix(_IFRT), serialized.data, shape)


@lru_cache(256)
def _read(kind: str, data: bytes, shape: tuple[int, ...]) -> ShardLayout:
    if kind not in _KINDS:
        raise unsupported(f"shardings of the kind {kind[:100]!r} are not supported")
    try:
        proto = protos.message(f"xla.ifrt.{kind}Proto").FromString(data)
    except DecodeError as error:
        raise _damaged() from error
    memory = proto.memory_kind if proto.HasField("memory_kind") else ""
    if kind == "SingleDeviceSharding":
        return ShardLayout((proto.device_id,), memory, True, shape)
    devices = tuple(proto.devices.device_ids)
    if kind == "ConcreteEvenSharding":
        shard = tuple(proto.shard_shape.dims)
        return ShardLayout(devices, memory, proto.is_fully_replicated or len(devices) == 1, shard)
    if kind == "ConcreteSharding":
        shards = {tuple(one.dims) for one in proto.shard_shapes}
        if len(shards) > 1:
            raise unsupported("arrays whose shards have different shapes are not supported")
        return ShardLayout(devices, memory, False, next(iter(shards), shape))
    if kind == "HloSharding":
        return of_op_sharding(proto.xla_op_sharding, devices, memory, shape)
    if kind == "OpaqueSharding":
        return ShardLayout(devices, memory, len(devices) == 1, shape if len(devices) == 1 else None)
    parts = tuple(proto.sharding_param.dim_shards)
    return ShardLayout(devices, memory, math.prod(parts) == 1, divided(shape, parts))


def of_op_sharding(
    sharding: Any, devices: tuple[int, ...], memory: str, shape: tuple[int, ...]
) -> ShardLayout:
    """Return what an `xla.OpSharding` says of an array of this shape."""
    parts = partitions(sharding, len(shape))
    is_replicated = math.prod(parts) == 1
    shard = divided(shape, parts)
    return ShardLayout(devices, memory, is_replicated, shard, sharding.SerializeToString())


def write(
    into: Any,
    devices: Sequence[int],
    memory: str,
    shape: tuple[int, ...],
    shard_shape: tuple[int, ...],
    *,
    is_replicated: bool,
) -> None:
    """Fill a `ShardingProto`."""
    if len(devices) == 1:
        kind = "SingleDeviceSharding"
        proto = protos.message(f"xla.ifrt.{kind}Proto")(device_id=devices[0])
    else:
        kind = "ConcreteEvenSharding"
        proto = protos.message(f"xla.ifrt.{kind}Proto")(is_fully_replicated=is_replicated)
        proto.devices.device_ids.extend(devices)
        proto.shape.dims.extend(shape)
        proto.shard_shape.dims.extend(shard_shape)
    if memory:
        proto.memory_kind = memory
    into.serialized_sharding.type_name = _IFRT + kind
    into.serialized_sharding.data = proto.SerializeToString()


def partitions(sharding: Any, ndim: int) -> tuple[int, ...]:
    """Return into how many parts an `xla.OpSharding` divides each of `ndim` dimensions. Raises StatusError."""
    if sharding.HasField("named_sharding"):
        named = sharding.named_sharding
        sizes = [axis.size for axis in named.mesh.axes]
        parts = []
        for dimension in named.dim_shardings:
            count = 1
            for axis in dimension.axes:
                has_part = axis.HasField("sub_axis_info")
                if not has_part and not 0 <= axis.mesh_axis_index < len(sizes):
                    raise _damaged()
                count *= axis.sub_axis_info.size if has_part else sizes[axis.mesh_axis_index]
            parts.append(count)
        return (*parts, *[1] * (ndim - len(parts)))
    tiles = tuple(sharding.tile_assignment_dimensions)[:ndim]
    return (*tiles, *[1] * (ndim - len(tiles)))


def divided(shape: tuple[int, ...], parts: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of a shard. Raises StatusError."""
    if min(parts, default=1) < 1:
        raise _damaged()
    return tuple(-(-size // count) for size, count in zip(shape, parts, strict=False))


def _damaged() -> StatusError:
    return StatusError("INVALID_ARGUMENT", "the sharding of an array cannot be read")


def dtype_and_shape(described: Any) -> tuple[str, tuple[int, ...]]:
    """Return the dtype and the shape of any message with these two fields."""
    return name_of(described.dtype.kind), tuple(described.shape.dims)


def strided(
    data: Any, dtype: np.dtype[Any], shape: tuple[int, ...], strides: Sequence[int] | None
) -> np.ndarray[Any, Any]:
    """Return bytes as an array of this shape; `strides` are in bytes, None for C order.

    Raises:
        StatusError: it does not lie in so many bytes.
    """
    try:
        if min(shape, default=0) < 0:
            raise ValueError  # for numpy, -1 means the rest
        if 0 in shape or dtype.itemsize == 0:
            return np.zeros(shape, dtype)
        if strides is None:
            return np.frombuffer(data, dtype, count=math.prod(shape)).reshape(shape)
        return np.ndarray(shape, dtype, data, 0, tuple(strides))
    except (ValueError, TypeError, OverflowError):  # TypeError: too few bytes for the strides
        laid = "" if strides is None else f" with strides of {list(strides)} bytes"
        raise StatusError(
            "INVALID_ARGUMENT",
            f"a host buffer of {len(data)} bytes cannot be an array of {dtype} of the shape {shape}{laid}",
        ) from None
