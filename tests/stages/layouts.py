"""Random layouts of arrays, and shards as plain numpy arrays, for the tests of pure functions."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from hypothesis import strategies as st

from pw.core.programs.plan import Route
from pw.core.programs.reshard import route_layout
from pw.core.sharding import ArraySpec, Sharding, box_shape, box_slices, dtype_of

AXES = ("x", "y", "z")


@st.composite
def shardings(draw: st.DrawFn, ndim: int, device_counts: Sequence[int]) -> Sharding:
    """A mesh of one to three axes over some number of devices, its axes strewn over dimensions."""
    rest = draw(st.sampled_from(device_counts))
    sizes = []
    for _ in range(draw(st.integers(0, 2))):
        sizes.append(draw(st.sampled_from([d for d in range(1, rest + 1) if rest % d == 0])))
        rest //= sizes[-1]
    sizes.append(rest)
    names = AXES[: len(sizes)]
    spec: list[tuple[str, ...]] = [()] * ndim
    for axis in draw(st.permutations(names)):
        dim = draw(st.sampled_from([None, *range(ndim)]))
        if dim is not None:
            spec[dim] += (axis,)
    while spec and not spec[-1] and draw(st.booleans()):
        spec.pop()
    return Sharding(names, tuple(sizes), tuple(spec))


def divisible_shape(draw: st.DrawFn, ndim: int, *shardings: Sharding) -> tuple[int, ...]:
    """A shape that all of `shardings` divide, sometimes without elements."""
    parts = zip(*(sharding.partitions(ndim) for sharding in shardings), strict=True)
    return tuple(
        math.lcm(*split) * draw(st.sampled_from([1, 1, 1, 2, 2, 2, 3, 3, 3, 0])) for split in parts
    )


def shards(array: np.ndarray, spec: ArraySpec) -> list[np.ndarray]:
    """The shard of `array` at every position of the mesh of `spec`."""
    return [
        array[box_slices(spec.box(position))].copy()
        for position in range(len(spec.placement.devices))
    ]


def pack(route: Route, spec: ArraySpec, held: dict[int, np.ndarray]) -> bytes:
    """What the source of `route` sends, from the shards it holds by mesh position."""
    offsets, size_bytes = route_layout(route, spec)
    buffer = bytearray(size_bytes)
    for piece, offset in zip(route.pieces, offsets, strict=True):
        data = held[piece.source_device][box_slices(piece.source_box)].tobytes()
        buffer[offset : offset + len(data)] = data
    return bytes(buffer)


def unpack(
    route: Route,
    spec: ArraySpec,
    buffer: bytes,
    shards: dict[int, np.ndarray],
    written: dict[int, np.ndarray],
) -> None:
    """Put what came along `route` into destination shards by position, and count the writes."""
    offsets, _ = route_layout(route, spec)
    for piece, offset in zip(route.pieces, offsets, strict=True):
        shape = box_shape(piece.destination_box)
        assert shape == box_shape(piece.source_box)
        data = np.frombuffer(buffer, dtype_of(spec.dtype), math.prod(shape), offset).reshape(shape)
        for position in piece.destination_devices:
            shards[position][box_slices(piece.destination_box)] = data
            written[position][box_slices(piece.destination_box)] += 1
