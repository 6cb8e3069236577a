"""The API over processes: two islands of two hosts each, whose collectives cross hosts."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pw
from tests.client.test_api_dtypes import NARROW, ROUNDED, WIDE, bits, sample
from tests.stages.stage import interrupted_in_its_wait, live, mesh_on, numbers, split, until_live

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[pw.LocalCluster]:
    with pw.LocalCluster(
        islands=2, hosts_per_island=2, devices_per_host=1, allow_python=True
    ) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def east(cluster: pw.LocalCluster) -> pw.Mesh:
    return mesh_on(0)


@pytest.fixture(scope="module")
def west(cluster: pw.LocalCluster) -> pw.Mesh:
    return mesh_on(1)


def test_what_the_cluster_is_shown_as(cluster: pw.LocalCluster) -> None:
    status = pw.status()
    assert status.address == cluster.address
    assert {host.name for host in status.hosts} == {host.name for host in cluster.hosts}
    assert [client.is_me for client in status.clients] == [True]
    assert cluster.address in repr(cluster)
    for host in cluster.hosts:
        assert host.name in repr(status)
        assert host.name in cluster._repr_html_()
        assert str(host.pid) in cluster._repr_html_()


def test_collectives_between_the_hosts_of_an_island(east: pw.Mesh) -> None:
    def collectives(v: Any) -> Any:
        return {
            "psum": jax.lax.psum(v, "i"),
            "all_gather": jax.lax.all_gather(v, "i").sum(0) * jax.lax.axis_index("i"),
            "ppermute": jax.lax.ppermute(v, "i", [(0, 1), (1, 0)]),
            "pmax": jax.lax.pmax(v, "i"),
        }

    x = numbers(8).reshape(2, 4)
    got = pw.pmap(collectives, axis_name="i", devices=list(east.devices))(x)
    for name, expected in jax.vmap(collectives, axis_name="i")(x).items():
        np.testing.assert_array_equal(got[name], expected, err_msg=name)
    a, b = numbers(16).reshape(4, 4), numbers(16, 3).reshape(4, 4)
    f = pw.jit(lambda a, b: a @ b, mesh=east, in_shardings=(P(None, "x"), P("x", None)))
    np.testing.assert_array_equal(f(a, b), a @ b)


def test_resharding_between_hosts_and_islands(east: pw.Mesh, west: pw.Mesh) -> None:
    for shape in ((4, 2), (512, 256)):
        value = numbers(shape[0] * shape[1]).reshape(shape)
        x = pw.put(value, sharding=split(east))
        for mesh in (east, west, east):
            for spec in (P(None, "x"), P(), P("x")):
                x = pw.put(x, sharding=pw.NamedSharding(mesh, spec))
        np.testing.assert_array_equal(x, value)


def test_all_dtypes_between_hosts(east: pw.Mesh, west: pw.Mesh) -> None:
    """In one program for each width: a compilation for each dtype would take longer than all else."""
    turn = pw.jit(
        lambda tree: jax.tree.map(lambda x: x[::-1], tree), mesh=west, out_shardings=P("x")
    )

    @pw.program
    def f(tree: Any) -> Any:
        return jax.tree.map(lambda x: pw.put(x, sharding=split(east)), turn(tree))

    for names in (NARROW, WIDE):
        with jax.enable_x64(names is WIDE):
            values = {
                name: sample(jnp.dtype(name), 256)
                for name in names
                if name != ROUNDED  # the hosts of these tests round it
            }
            got = pw.get(f(pw.put(values, sharding=split(east))))
        for name, value in values.items():
            assert got[name].dtype == value.dtype, name
            assert bits(got[name]) == bits(value[::-1]), name


def test_keys(east: pw.Mesh, west: pw.Mesh) -> None:
    key = jax.random.key(9)
    keys = pw.jit(lambda k: jax.random.split(k, 2), mesh=east, out_shardings=P("x"))(key)
    drawn = pw.pmap(lambda k: jax.random.normal(k, (3,)), devices=list(west.devices))(keys)
    expected = jax.vmap(lambda k: jax.random.normal(k, (3,)))(jax.random.split(key, 2))
    np.testing.assert_array_equal(drawn, expected)
    assert (pw.get(keys) == jax.random.split(key, 2)).all()


def test_errors_come_with_the_workers_traceback(east: pw.Mesh, west: pw.Mesh) -> None:
    root = pw.jit(lambda x: jnp.broadcast_to(x, (1 << 44,)) * 2, mesh=east)(np.float32(1))
    near = pw.jit(lambda x: x[0], mesh=east)(root)
    far = pw.jit(lambda x: x + 1, mesh=west)(near)
    for x in (root, near, far, far + 1):
        with pytest.raises(pw.OutOfDeviceMemory, match="island-0-host-") as caught:
            x.block_until_ready()
        assert "devices/jax/" in "".join(traceback.format_exception(caught.value))
    assert float(pw.jit(lambda x: x + 1, mesh=east)(1.0)) == 2


def test_donated_and_deleted_while_sent_to_another_island(east: pw.Mesh, west: pw.Mesh) -> None:
    eat = pw.jit(lambda x: x * 0 - 1, mesh=east, donate_argnums=0, out_shardings=P("x"))
    far = pw.jit(lambda x: x * 2, mesh=west, in_shardings=P("x"))
    for size in (8, 100_000):
        make = pw.jit(lambda k, n=size: k + numbers(n), mesh=east, out_shardings=P("x"))
        results = []
        for k in range(10):
            x, y = make(np.float32(k)), make(np.float32(k))
            results.append((k, far(x), eat(x), far(y)))
            y.delete()
        for k, sent, eaten, deleted in results:
            np.testing.assert_array_equal(sent, numbers(size, k) * 2)
            np.testing.assert_array_equal(deleted, numbers(size, k) * 2)
            np.testing.assert_array_equal(eaten, np.full(size, -1))


def test_ctrl_c_ends_the_wait_and_nothing_else(
    east: pw.Mesh, west: pw.Mesh, tmp_path: Path
) -> None:
    """The signal comes as from a terminal, while the hosts are in a long function."""
    over = str(tmp_path / "over")

    def slow(x: Any) -> Any:
        import os
        import time

        while not os.path.exists(over):
            time.sleep(0.01)
        return x * 3

    long = pw.host_function(slow, jax.ShapeDtypeStruct((2,), np.float32), mesh=east)
    x = pw.jit(lambda x: x + 1, mesh=east)(long(numbers(2)))
    assert not x.is_ready()
    with interrupted_in_its_wait():
        np.asarray(x)
    assert not x.is_ready()
    assert float(pw.jit(lambda v: v + 1, mesh=west)(1.0)) == 2
    Path(over).touch()
    np.testing.assert_array_equal(x, numbers(2) * 3 + 1)


def test_dropped_handles_free_their_arrays_on_all_hosts(east: pw.Mesh, west: pw.Mesh) -> None:
    base = live()
    x = pw.put(numbers(100_000), sharding=split(east))
    y = pw.put(x, sharding=split(west))
    pw.block_until_ready(y + 1)
    del x, y
    until_live(base)
