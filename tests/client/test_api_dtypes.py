"""Every dtype goes in, through a computation, to another island, and comes out as it was."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pw
from pw.core.dtypes import PACKED
from pw.testing import InProcessCluster
from tests.stages.samples import long
from tests.stages.scripts import finish, start_client
from tests.stages.stage import mesh_on, split

INTEGERS = ("bool", "int4", "uint4", "int8", "int16", "int32", "uint8", "uint16", "uint32")
FLOATS = ("float16", "bfloat16", "float32", "complex64", "float4_e2m1fn", "float8_e8m0fnu")
FLOATS_8 = ("e4m3fn", "e4m3", "e5m2", "e4m3b11fnuz", "e4m3fnuz", "e5m2fnuz", "e3m4")
NARROW = (*INTEGERS, *FLOATS, *(f"float8_{kind}" for kind in FLOATS_8))
WIDE = ("int64", "uint64", "float64", "complex128")
ROUNDED = "float8_e5m2fnuz"
"""Without fusion emitters (see `conftest.py`), XLA rounds its smallest values when it moves them."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[InProcessCluster]:
    with InProcessCluster(islands=2, devices_per_island=2) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def meshes(cluster: InProcessCluster) -> tuple[pw.Mesh, pw.Mesh]:
    return mesh_on(0), mesh_on(1)


def bits(array: Any) -> bytes:
    return np.asarray(array).tobytes()


def sample(dtype: Any, size: int) -> Any:
    """All values that a byte can hold, or as many that fit."""
    if dtype == np.bool_:
        return np.arange(size) % 3 == 0
    kind = np.dtype(dtype)
    if kind.kind == "c":
        return (np.arange(size) + 1j * np.arange(size)[::-1]).astype(dtype)
    if kind.itemsize == 1 and "int4" not in kind.name and "float4" not in kind.name:
        raw = np.arange(size, dtype=np.uint8)
        finite = raw.view(dtype).astype(np.float32)
        return np.where(np.isfinite(finite), raw, 0).astype(np.uint8).view(dtype)
    return (np.arange(size) % 5 + (kind.itemsize == 8) * (2**40)).astype(dtype)


def check_dtypes(names: Sequence[str], east: pw.Mesh, west: pw.Mesh) -> None:
    """All of them go through one computation: one for each would take longer than all else."""
    with jax.enable_x64(names[0] in WIDE):
        flip = pw.jit(
            lambda tree: jax.tree.map(lambda x: (x[::-1], x[:1], x), tree),
            mesh=west,
            out_shardings=dict.fromkeys(names, (P("x"), None, None)),
        )
        for size in (256, 65_536 * 2):
            values = {name: sample(jnp.dtype(name), size) for name in names}
            placed = pw.put(values, sharding=split(east))
            results = flip(placed)
            # XLA's threads write into the same bytes of packed arrays.
            is_packed = {name: name in PACKED and size > 256 for name in names}
            flipped = {name: results[name][2 if is_packed[name] else 0] for name in names}
            moved = pw.put(flipped, sharding=pw.NamedSharding(east, P()))
            for name, value in values.items():
                x, (backwards, first, same), dtype = placed[name], results[name], jnp.dtype(name)
                assert (x.dtype, x.nbytes) == (dtype, value.nbytes)
                assert backwards.dtype == dtype
                assert bits(x) == bits(same) == bits(value), name
                there = value if is_packed[name] else value[::-1]
                assert bits(moved[name]) == bits(there), name
                assert np.asarray(first).dtype == dtype
                if size == 256:
                    assert f"dtype={name}" in repr(first)
            if size == 256:
                again = flip(values)
                rows = {name: value.reshape(2, -1) for name, value in values.items()}
                mapped = pw.get(pw.pmap(lambda v: v, devices=list(east.devices.flat))(rows))
                for name, value in values.items():
                    assert bits(again[name][0]) == bits(value[::-1]), name
                    assert bits(mapped[name]) == bits(value), name


@pytest.mark.parametrize(
    "names",
    [
        [name for name in NARROW if name != ROUNDED],
        WIDE,
        *[long([name]) for name in (*NARROW, *WIDE) if name != ROUNDED],
    ],
)
def test_dtypes(names: Sequence[str], meshes: tuple[pw.Mesh, pw.Mesh]) -> None:
    check_dtypes(names, *meshes)


def test_the_dtype_that_the_quick_compiler_rounds() -> None:
    """In a process whose XLA compiles as users' does."""
    body = f"""
    from pw.testing import InProcessCluster
    from tests.stages.stage import mesh_on
    from tests.client.test_api_dtypes import check_dtypes
    with InProcessCluster(islands=2, devices_per_island=2):
        check_dtypes([{ROUNDED!r}], mesh_on(0), mesh_on(1))
    print("ok")
    """
    assert finish(start_client("", body, XLA_FLAGS="")).strip() == "ok"


def test_wide_values_are_the_clients_choice(meshes: tuple[pw.Mesh, pw.Mesh]) -> None:
    east, _ = meshes
    f = pw.jit(lambda x: x / 3, mesh=east)
    narrow = f(np.arange(3.0))
    with jax.enable_x64(True):
        wide = f(np.arange(3.0))
        assert (narrow.dtype, wide.dtype) == (np.float32, np.float64)
        assert np.asarray(wide)[2] == 2 / 3
        assert int(pw.jit(lambda n: n + 1, mesh=east)(2**40)) == 2**40 + 1
        assert (wide + 1).dtype == np.float64
    with pytest.raises(OverflowError):
        pw.jit(lambda n: n + 1, mesh=east)(2**40)
    assert pw.put(np.arange(3.0)).dtype == np.float32


@pytest.mark.parametrize(
    "value",
    [True, 3, 2.5, 1j, np.float64(1), np.int8(1), np.array(2, np.uint8), np.arange(3.0), "jax"],
    ids=str,
)
def test_results_have_the_types_that_jax_gives(value: Any, meshes: tuple[pw.Mesh, pw.Mesh]) -> None:
    value = jnp.arange(3, dtype=jnp.bfloat16) if isinstance(value, str) else value

    def f(x: Any) -> Any:
        return x, x + 1, x * jnp.float16(2), x == 1

    for mine, his in zip(pw.jit(f, mesh=meshes[0])(value), jax.jit(f)(value), strict=True):
        assert (mine.dtype, mine.shape, mine.weak_type) == (his.dtype, his.shape, his.weak_type)
        np.testing.assert_array_equal(mine, his)
    put, his = pw.put(value), jnp.asarray(value)
    assert (put.dtype, put.shape) == (his.dtype, his.shape)


@pytest.mark.parametrize(
    "array",
    [
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.arange(12.0).reshape(2, 6)[:, ::2],
        np.broadcast_to(np.float32(3), (2, 40_000)),
        np.zeros((2, 0, 3), np.float32),
    ],
    ids=["fortran", "strided", "broadcast", "empty"],
)
def test_arrays_of_any_layout(array: Any, meshes: tuple[pw.Mesh, pw.Mesh]) -> None:
    x = pw.put(array, sharding=split(meshes[0]))
    np.testing.assert_array_equal(x, array)
    np.testing.assert_array_equal(pw.jit(lambda v: v, mesh=meshes[1])(x), array)
    np.testing.assert_array_equal(pw.jit(lambda v: v, mesh=meshes[1])(array), array)


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_typed_keys_move_between_islands(impl: str, meshes: tuple[pw.Mesh, pw.Mesh]) -> None:
    east, west = meshes
    key = jax.random.key(3, impl=impl)
    keys = pw.jit(lambda k: jax.random.split(k, 4), mesh=east, out_shardings=P("x"))(key)
    moved = pw.put(keys, sharding=split(west))
    assert moved.dtype == key.dtype
    expected = jax.random.split(key, 4)
    assert (pw.get(moved) == expected).all()
    drawn = pw.jit(jax.vmap(lambda k: jax.random.bits(k, (2,))), mesh=west)(moved)
    np.testing.assert_array_equal(drawn, jax.vmap(lambda k: jax.random.bits(k, (2,)))(expected))
    captured = pw.jit(lambda: jax.random.bits(key), mesh=west)()
    np.testing.assert_array_equal(captured, jax.random.bits(key))
