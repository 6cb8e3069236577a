"""Nothing is held longer than it can be used: arrays, what functions closed over, slices."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pw
from pw.client.connection import released, threads
from pw.testing import InProcessCluster
from tests.stages.daemons import until
from tests.stages.stage import live, mesh_on, numbers, split, until_live

pytestmark = pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")


@pytest.fixture
def cluster() -> Iterator[InProcessCluster]:
    """A new one for each test, so that nothing of another test is counted."""
    with InProcessCluster(islands=2, devices_per_island=2) as cluster:
        yield cluster


@pytest.fixture
def east(cluster: InProcessCluster) -> pw.Mesh:
    return mesh_on(0)


@pytest.fixture
def west(cluster: InProcessCluster) -> pw.Mesh:
    return mesh_on(1)


def test_dropped_handles_free_their_arrays(east: pw.Mesh, west: pw.Mesh) -> None:
    base = live()
    x = pw.put(numbers(100_000), sharding=split(east))
    y = pw.jit(lambda v: (v + 1, v * 2), mesh=west)(x)
    p = pw.program(lambda v: (v, pw.put(v, sharding=split(west))))(x)
    pw.block_until_ready((x, y, p))
    assert live() != base
    cycle: list[Any] = [x, y]
    cycle.append(cycle)
    del x, y, p, cycle
    until_live(base)


def test_large_arrays_are_deleted_by_the_next_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "TICK_S", 3600.0)
    with InProcessCluster(islands=2, devices_per_island=2):
        here, there = split(mesh_on(0)), split(mesh_on(1))
        x = pw.put(np.zeros(released.KEPT_BYTES + 2, np.uint8), sharding=here)
        base = live()
        for _ in range(5):
            pw.put(x, sharding=there).block_until_ready()
        pw.put(x, sharding=there).block_until_ready()
        until_live({node: count + 1 for node, count in base.items()})


def test_pages_that_two_hosts_share_are_written_by_neither() -> None:
    with InProcessCluster(islands=2, devices_per_island=1):
        here, there = mesh_on(0, devices=1), mesh_on(1, devices=1)
        values = numbers(1 << 20)
        x = pw.put(values, sharding=split(here))
        y = pw.put(x, sharding=split(there))
        fetched = np.asarray(y)
        assert pw.stats()["host-0"]["bulk_shared_bytes"] == values.nbytes
        doubled = pw.jit(lambda v: v * 2, mesh=here, donate_argnums=0)(x)
        assert np.array_equal(np.asarray(doubled), values * 2)
        tripled = pw.jit(lambda v: v * 3, mesh=there, donate_argnums=0)(y)
        assert np.array_equal(np.asarray(tripled), values * 3)
        assert np.array_equal(fetched, values)
        for start in range(5):  # pages without a reader are written to again
            z = pw.put(pw.put(values + start, sharding=split(here)), sharding=split(there))
            assert np.array_equal(np.asarray(z), values + start)
        assert np.array_equal(fetched, values)


def test_caches_do_not_hold_arguments_and_results(east: pw.Mesh, west: pw.Mesh) -> None:
    f = pw.jit(lambda v, k: v + k, mesh=east, donate_argnums=0)
    g = pw.program(lambda v: f(pw.put(v, sharding=split(west)), 1))
    base = live()
    for large in (8, 100_000):
        x = pw.put(numbers(large), sharding=split(east))
        pw.get((f(x, x[:1]), g(numbers(large)), -pw.put(numbers(large), sharding=split(west))))
        with pytest.raises(TypeError):
            pw.jit(lambda v: jnp.dot(v, np.ones(3)), mesh=east)(
                pw.put(numbers(large), sharding=split(west))
            )
        del x
    until_live(base)


def test_functions_that_die_release_what_they_closed_over(east: pw.Mesh) -> None:
    base = live()

    def make() -> Any:
        w = pw.put(numbers(5000), sharding=split(east))
        table = jnp.asarray(numbers(5000))
        inner = jax.jit(lambda x: x * w + table)
        f = pw.jit(lambda x: inner(x), mesh=east)
        g = pw.program(lambda x: f(x) + w + numbers(5000))
        return f, g

    f, g = make()
    np.testing.assert_array_equal(f(2.0), numbers(5000) * 3)
    np.testing.assert_array_equal(g(2.0), numbers(5000) * 5)
    assert live() != base
    del f, g
    until_live(base)


def test_slices_are_given_back(cluster: InProcessCluster) -> None:
    runtime = pw.connect()

    def slices() -> int:
        gc.collect()
        pw.make_virtual_device_set().add_slice(devices=1)  # JAX forgets the others
        return sum(client.slices for client in runtime.ask.status().clients)

    pw.put(1.0)  # the default slice is there for good
    base = slices()
    mesh = mesh_on(0)
    x = pw.put(pw.put(numbers(8), sharding=split(mesh)), sharding=pw.NamedSharding(mesh, P()))
    np.testing.assert_array_equal((x + 1)[:2], [1, 2])
    np.testing.assert_array_equal(pw.pmap(lambda v: v)(np.asarray(x)[:1].reshape(1, 1)), [[0.0]])
    assert slices() > base
    del x, mesh
    until(lambda: slices() == base, "slices given back")
