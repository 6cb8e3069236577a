"""Methods and indexing of arrays, outside and inside programs, beside numpy's."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pw
from pw.testing import InProcessCluster
from tests.stages.samples import some

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
    lambda x: round(x / 7, 1),
    lambda x: divmod(x, 5)[1] + divmod(100, x + 1)[0],
    lambda x: x.ptp(axis=1),
    lambda x: x.view(np.int32),
    lambda x: x.nonzero(size=23)[1],
    lambda x: (x % 4).astype(int).choose([x, 2 * x, np.zeros((4, 6)), 3 * x], mode="clip"),
    lambda x: x.at[1].set(7),
    lambda x: x.at[1, 2:4].add(x[0, :2]),
    lambda x: x.at[np.array([0, 2])].max(9.0),
    lambda x: x.at[np.arange(4) > 1].set(0),
    lambda x: x.at[:, -1].apply(jnp.exp),
    lambda x: x.at[9].set(1),  # out of bounds: left out, as in JAX
    lambda x: x.at[np.array([1, 9])].get(mode="fill", fill_value=3),
]


def test_a_mask_of_this_machine_chooses_rows(x: pw.Array) -> None:
    """In a program as in `jax.jit`, `size` says how many."""
    mask = np.array([True, False, True, False])
    assert x.compress(mask, 0).tolist() == VALUE[mask].tolist()
    chosen = pw.program(lambda x: x.compress(mask, 0, size=2))(x)
    assert chosen.tolist() == VALUE[mask].tolist()


def all_uses(x: Any) -> list[Any]:
    return [use(x) for use in USES]


@pytest.fixture(scope="module")
def wanted() -> list[Any]:
    """What JAX gives."""
    found: list[Any] = jax.jit(all_uses)(VALUE)
    return found


def check(found: Any, wanted: Any) -> None:
    assert isinstance(found, pw.Array)
    assert found.dtype == wanted.dtype
    np.testing.assert_allclose(
        np.asarray(found, np.float32), np.asarray(wanted, np.float32), rtol=1e-6
    )


@pytest.mark.parametrize("at", some(range(len(USES)), 2))
def test_they_are_those_of_jax(x: pw.Array, wanted: list[Any], at: int) -> None:
    check(USES[at](x), wanted[at])


def test_in_a_program_they_are_those_of_jax(x: pw.Array, wanted: list[Any]) -> None:
    for found, value in zip(pw.program(all_uses)(x), wanted, strict=True):
        check(found, value)


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
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = x.nonsense
    with pytest.raises(TypeError, match="0-d"):
        iter(x.sum())


def test_what_arrays_lack_has_a_replacement(mesh: pw.Mesh, x: pw.Array) -> None:
    for name, said in [
        ("to_device", r"pw\.put\(x, device\)"),
        ("flat", r"x\.ravel\(\)"),
        ("addressable_shards", r"np\.asarray\(x\)"),
    ]:
        with pytest.raises(AttributeError, match=said):
            getattr(x, name)
    moved = pw.put(x, mesh.devices[1])
    assert moved.device == mesh.devices[1]
    for whole in (moved, x.ravel(), x):
        np.testing.assert_array_equal(np.asarray(whole).reshape(4, 6), VALUE)
    with pytest.raises(TypeError, match=r"x = x\.at\[index\]\.set\(value\)"):
        x[0, 0] = 5
    x = x.at[0, 0].set(5)
    assert x[0, 0] == 5
    with pytest.raises(pw.ArgumentError, match=r"np\.nonzero\(np\.asarray\(x\)\)"):
        (x > 20).nonzero()
    assert len(np.nonzero(np.asarray(x > 20))[0]) == 3
    with pytest.raises(pw.ArgumentError, match=r"x\.compress\(np\.asarray\(condition\)\)"):
        x.compress(x[:, 1] > 8, 0)
    assert x.compress(np.asarray(x[:, 1] > 8), 0).shape == (2, 6)
    assert x.compress(x[:, 1] > 8, 0, size=3).shape == (3, 6)


def test_where_an_array_lies(mesh: pw.Mesh, x: pw.Array) -> None:
    assert x.devices() == set(mesh.devices.flat)
    assert x.device == x.sharding
    assert x.sum().is_fully_replicated
    assert not x.is_fully_replicated
    x.copy_to_host_async()
    assert x.itemsize == 4


def test_dir_and_help_know_the_methods(x: pw.Array) -> None:
    """Those of JAX's arrays, but for what tells how these lie in this process."""
    public = {name for name in dir(jax.Array) if not name.startswith("_")}
    elsewhere = {"addressable_data", "addressable_shards", "global_shards", "is_fully_addressable"}
    assert public - set(dir(x)) == elsewhere | {"flat", "to_device"}
    assert inspect.signature(x.sum) == inspect.signature(jnp.ones(3).sum)
    assert x.sum.__doc__ == jnp.ones(3).sum.__doc__
    assert pw.Array.sum.__qualname__ == "Methods.sum"


def test_many_arrays_can_be_awaited_together(x: pw.Array) -> None:
    async def both() -> Any:
        return await asyncio.gather(pw.ready((x + 1, {"a": x * 2})), x.sum(), x)

    (plus, double), total, same = asyncio.run(both())
    assert same is x
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
