"""Layouts in closed form agree with JAX and with plain slicing."""

from __future__ import annotations

import jax
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pw.core.errors import ShardingError
from pw.core.sharding import (
    ALIGNMENT_BYTES,
    ArraySpec,
    Binding,
    DeviceAddress,
    Placement,
    Sharding,
    box_bytes,
    box_shape,
    box_slices,
    dtype_of,
    packed_offsets,
)
from tests.stages.layouts import divisible_shape, shardings


def spec_of(sharding: Sharding, shape: tuple[int, ...], dtype: str = "float32") -> ArraySpec:
    return ArraySpec(shape, dtype, sharding, Placement(0, tuple(range(sharding.device_count))))


@given(st.data())
def test_boxes_are_those_of_jax(data: st.DataObject) -> None:
    ndim = data.draw(st.integers(0, 4))
    sharding = data.draw(shardings(ndim, (1, 2, 4, 6, 8)))
    shape = divisible_shape(data.draw, ndim, sharding)
    devices = np.array(jax.devices()[: sharding.device_count]).reshape(sharding.axis_sizes)
    theirs = NamedSharding(Mesh(devices, sharding.axis_names), PartitionSpec(*sharding.spec))
    array = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    assert theirs.shard_shape(shape) == sharding.shard_shape(shape)
    sharding.check(shape)
    for position, device in enumerate(devices.flat):
        box = sharding.box(shape, position)
        assert box_shape(box) == sharding.shard_shape(shape)
        index = theirs.devices_indices_map(shape)[device]
        np.testing.assert_array_equal(array[box_slices(box)], array[index])


@given(st.data())
def test_distinct_boxes_cover_every_element_once_and_every_device(data: st.DataObject) -> None:
    ndim = data.draw(st.integers(0, 3))
    sharding = data.draw(shardings(ndim, (1, 2, 3, 4, 6, 8, 12)))
    spec = spec_of(sharding, divisible_shape(data.draw, ndim, sharding))
    count = np.zeros(spec.shape, int)
    seen: list[int] = []
    for box, positions in spec.distinct_boxes():
        count[box_slices(box)] += 1
        seen += positions
        assert all(spec.box(position) == box for position in positions)
        assert box_bytes(box, spec.dtype) == spec.shard_bytes
    assert (count == 1).all()
    assert sorted(seen) == list(range(sharding.device_count))


@pytest.mark.parametrize(
    ("sharding", "shape", "words"),
    [
        (Sharding(("x",), (2,), (("x",), ())), (4,), "2 dimensions .* 1 dimensions"),
        (Sharding(("x",), (2,), (("y",),)), (4,), "names the axis 'y'"),
        (Sharding(("x",), (2,), (("x",), ("x",))), (4, 4), "axis 'x' twice"),
        (Sharding(("x",), (2, 4), (("x",),)), (8,), "each needs one"),
        (Sharding(("x",), (0,), (("x",),)), (8,), "1 or more"),
        (Sharding(("x", "y"), (2, 4), ((), ("x", "y"))), (1, 12), "dimension 1 .* 8 equal shards"),
    ],
)
def test_a_sharding_that_does_not_fit_says_why(
    sharding: Sharding, shape: tuple[int, ...], words: str
) -> None:
    with pytest.raises(ShardingError, match=words):
        sharding.check(shape)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("float32", np.dtype(np.float32)),
        ("bool", np.dtype(bool)),
        ("bfloat16", np.dtype(ml_dtypes.bfloat16)),
        ("float8_e4m3fn", np.dtype(ml_dtypes.float8_e4m3fn)),
        ("int4", np.dtype(ml_dtypes.int4)),
    ],
)
def test_dtypes_of_numpy_and_of_ml_dtypes(name: str, expected: np.dtype) -> None:
    assert dtype_of(name) == expected
    assert dtype_of(expected.name) == expected


def test_sizes_are_in_bytes() -> None:
    spec = spec_of(Sharding(("x", "y"), (2, 2), (("x",),)), (8, 3), "bfloat16")
    assert (spec.size_bytes, spec.shard_bytes) == (48, 24)
    assert spec_of(Sharding((), ()), ()).size_bytes == 4


@given(st.lists(st.integers(0, 300)))
def test_packed_buffers_are_aligned_and_do_not_touch(sizes_bytes: list[int]) -> None:
    offsets, total_bytes = packed_offsets(sizes_bytes)
    end = 0
    for offset, size in zip(offsets, sizes_bytes, strict=True):
        assert offset % ALIGNMENT_BYTES == 0
        assert end <= offset < end + ALIGNMENT_BYTES
        end = offset + size
    assert total_bytes == end


def test_a_binding_locates_virtual_devices() -> None:
    devices = tuple(DeviceAddress(f"h{i // 2}", i % 2) for i in range(4))
    binding = Binding.of(3, "island", devices)
    assert binding.located(Placement(3, (3, 0))) == (devices[3], devices[0])
