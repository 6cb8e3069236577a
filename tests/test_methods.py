"""Methods and indexing of arrays, outside and inside programs, beside numpy's."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import pw
from pw.testing import InProcessCluster

VALUE = np.arange(24, dtype=np.float32).reshape(4, 6)


@pytest.fixture(scope="module")
def mesh() -> Iterator[pw.Mesh]:
    with InProcessCluster(islands=1, devices_per_island=4):
        yield pw.Mesh(pw.make_virtual_device_set().add_slice(devices=4).devices, ("x",))


@pytest.fixture
def x(mesh: pw.Mesh) -> pw.Array:
    return pw.put(VALUE, sharding=pw.NamedSharding(mesh, P("x")))


USES: list[Callable[[Any], Any]] = [
    lambda x: x.sum(),
    lambda x: x.mean(axis=1, keepdims=True),
    lambda x: x.max(0),
    lambda x: x.argmax(axis=1),
    lambda x: x.std(),
    lambda x: x.reshape(3, 8),
    lambda x: x.reshape((2, -1)),
    lambda x: x.T,
    lambda x: x.real,
    lambda x: x.astype(np.int32),
    lambda x: x.astype("bfloat16"),
    lambda x: x.clip(3, 9),
    lambda x: x.dot(x.T),
    lambda x: x.flatten(),
    lambda x: x.transpose(1, 0),
    lambda x: x[0],
    lambda x: x[-1, 2],
    lambda x: x[1:3, ::2],
    lambda x: x[1:3, 1:4],
    lambda x: x[-2, -3:-1],
    lambda x: x[2:1, 2:4],
    lambda x: x[..., 5],
    lambda x: x[:, None, 1],
    lambda x: x[np.array([2, 0])],
    lambda x: x[1][2],
    lambda x: list(x)[2],
    lambda x: sum(row.sum() for row in x),
]


@pytest.mark.parametrize("use", USES)
def test_they_are_those_of_jax(x: pw.Array, use: Callable[[Any], Any]) -> None:
    wanted = use(jnp.asarray(VALUE))
    for found in (use(x), pw.program(use)(x)):
        assert isinstance(found, pw.Array)
        assert found.dtype == wanted.dtype
        np.testing.assert_allclose(
            np.asarray(found, np.float32), np.asarray(wanted, np.float32), rtol=1e-6
        )


def test_elements_are_read_with_one_compilation(x: pw.Array) -> None:
    x[0].block_until_ready()
    before = pw.stats()["host-0"]["compilations"]
    assert [float(x[i, 0]) for i in range(4)] == [0, 6, 12, 18]
    assert pw.stats()["host-0"]["compilations"] <= before + 1


def test_elementwise_methods_keep_the_sharding(x: pw.Array) -> None:
    assert x.astype(np.int32).sharding == x.sharding
    assert x.copy().sharding == x.sharding


def test_typed_keys_can_be_taken_apart(mesh: pw.Mesh) -> None:
    keys = pw.jit(jax.random.split, mesh=mesh)(jax.random.key(3))
    first, second = keys
    wanted = jax.random.split(jax.random.key(3))
    normal = pw.jit(lambda key: jax.random.normal(key, (3,)), mesh=mesh)
    for found, key in ((first, wanted[0]), (keys[1], wanted[1]), (second, wanted[1])):
        np.testing.assert_allclose(np.asarray(normal(found)), jax.random.normal(key, (3,)), 1e-6)


def test_indices_out_of_bounds_and_unknown_names(x: pw.Array) -> None:
    with pytest.raises(IndexError, match="out of bounds"):
        x[4]
    with pytest.raises(IndexError, match="too many"):
        x[0, 0, 0]
    with pytest.raises(AttributeError, match=r"pw\.jit"):
        _ = x.at
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = x.nonsense
    with pytest.raises(TypeError, match="0-d"):
        iter(x.sum())


def test_optimisers_can_be_started_from_arrays(x: pw.Array) -> None:
    state = optax.adam(1e-2).init({"w": x})
    assert jax.tree.map(np.shape, state)[0].mu["w"] == (4, 6)
    assert jnp.zeros_like(x).shape == (4, 6)


def test_many_arrays_can_be_awaited_together(x: pw.Array) -> None:
    async def both() -> Any:
        return await asyncio.gather(pw.ready((x + 1, {"a": x * 2})), pw.ready(x.sum()))

    (plus, double), total = asyncio.run(both())
    assert plus.is_ready()
    assert float(double["a"][0, 1]) == 2
    assert float(total) == VALUE.sum()


def test_pmap_without_devices_takes_as_many_as_it_needs(mesh: pw.Mesh) -> None:
    total = pw.pmap(lambda x: x + jax.lax.psum(x, "i"), axis_name="i")
    np.testing.assert_array_equal(np.asarray(total(np.arange(3.0))), [3, 4, 5])
    np.testing.assert_array_equal(np.asarray(total(total(np.arange(2.0)))), [4, 5])
    with pytest.raises(pw.InsufficientDevices, match="5 devices"):
        total(np.arange(5.0))


def test_a_failed_array_can_be_shown_by_a_debugger(mesh: pw.Mesh) -> None:
    far_too_big = pw.jit(lambda x: jnp.ones((1 << 42,)) * x, mesh=mesh)(1.0)
    failed = far_too_big.sum()
    assert repr(failed).startswith("array(OutOfDeviceMemory: ")
    with pytest.raises(pw.OutOfDeviceMemory):
        str(failed)
