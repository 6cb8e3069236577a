"""Views: arrays that consist of shards of other arrays, on real devices."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pw
from pw.client.connection import current
from pw.core.messages import Status
from pw.core.programs.views import Shards
from pw.core.sharding import ArraySpec
from pw.testing import InProcessCluster
from tests.core.test_view_programs import on_one, stacked
from tests.stages.daemons import send, until
from tests.stages.inside import number_of, type_of
from tests.stages.stage import held, live, numbers, until_live

DEVICES = 4


def spec_of(array: pw.Array) -> ArraySpec:
    """Return how hosts hold an array."""
    return type_of(array).spec


class Arrays:
    """Arrays by their ids, as a front door names them."""

    def __init__(self) -> None:
        self.runtime = current.runtime()
        self.specs: dict[int, ArraySpec] = {}

    def of(self, array: Any) -> int:
        """The id of a `pw.Array`, whose handle the caller keeps."""
        self.specs[number_of(array)] = spec_of(array)
        return number_of(array)

    def view(
        self, sources: Sequence[int], outputs: Sequence[ArraySpec], shards: Shards
    ) -> list[int]:
        made = self.runtime.view([(one, self.specs[one]) for one in sources], outputs, shards)
        self.specs.update(zip(made, outputs, strict=True))
        return made

    def disassemble(self, array: int) -> list[int]:
        spec = self.specs[array]
        places = range(len(spec.placement.devices))
        return self.view([array], [on_one(spec, at) for at in places], [[(0, at)] for at in places])

    def assemble(self, arrays: Sequence[int]) -> int:
        devices = [self.specs[one].placement.devices[0] for one in arrays]
        spec = stacked(self.specs[arrays[0]], devices)
        (made,) = self.view(arrays, [spec], [[(n, 0) for n in range(len(arrays))]])
        return made

    def value(self, array: int) -> np.ndarray[Any, Any]:
        fetched: np.ndarray[Any, Any] = self.runtime.fetch(array, self.specs[array]).result(60)
        return fetched

    def handle(self, array: int, like: pw.Array) -> pw.Array:
        """A `pw.Array` of an id whose spec is that of `like`."""
        assert self.specs[array] == spec_of(like)
        return pw.Array(self.runtime, array, type_of(like))

    def delete(self, *arrays: int) -> None:
        self.runtime.delete(arrays)


@pytest.fixture(scope="module")
def cluster() -> Iterator[InProcessCluster]:
    with InProcessCluster(devices_per_island=DEVICES) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def mesh(cluster: InProcessCluster) -> pw.Mesh:
    devices = pw.make_virtual_device_set().add_slice(devices=DEVICES).devices
    return pw.Mesh(devices, ("x",))


@pytest.fixture
def arrays(mesh: pw.Mesh) -> Iterator[Arrays]:
    arrays = Arrays()
    yield arrays
    arrays.delete(*arrays.specs)


def split(mesh: pw.Mesh, value: Any) -> pw.Array:
    return pw.put(value, sharding=pw.NamedSharding(mesh, P("x")))


def halves() -> list[np.ndarray[Any, Any]]:
    return [numbers(8)[2 * at : 2 * at + 2] for at in range(DEVICES)]


def test_an_array_is_taken_apart_and_put_together(mesh: pw.Mesh, arrays: Arrays) -> None:
    x = split(mesh, numbers(8))
    pieces = arrays.disassemble(arrays.of(x))
    for piece, value in zip(pieces, halves(), strict=True):
        np.testing.assert_array_equal(arrays.value(piece), value)
    whole = arrays.assemble(pieces[::-1])
    np.testing.assert_array_equal(arrays.value(whole), np.concatenate(halves()[::-1]))
    again = arrays.disassemble(whole)
    np.testing.assert_array_equal(arrays.value(again[0]), halves()[-1])


def test_shards_of_several_arrays_are_mixed(mesh: pw.Mesh, arrays: Arrays) -> None:
    """Of an upload, of a result, and of a view; with a result that other programs take."""
    x, y = split(mesh, numbers(8)), split(mesh, numbers(8, 100))
    made = pw.jit(lambda y: y + 1, mesh=mesh, out_shardings=P("x"))(y)
    names = [arrays.of(x), arrays.of(made)]
    spec = spec_of(x)
    (mixed,) = arrays.view(names, [spec], [[(at % 2, at) for at in range(DEVICES)]])
    (again,) = arrays.view([mixed, names[0]], [spec], [[(0, 0), (1, 1), (0, 2), (0, 3)]])
    expected = numbers(8)
    expected[6:] = numbers(8, 101)[6:]
    doubled = pw.jit(lambda x: x * 2, mesh=mesh)(arrays.handle(again, x))
    np.testing.assert_array_equal(doubled, expected * 2)


def test_bits_and_small_dtypes_are_shared(mesh: pw.Mesh, arrays: Arrays) -> None:
    for dtype in (jnp.bfloat16, jnp.int4, bool):
        x = split(mesh, np.arange(8).astype(dtype))
        pieces = arrays.disassemble(arrays.of(x))
        np.testing.assert_array_equal(arrays.value(pieces[3]), np.arange(8).astype(dtype)[6:])


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_arrays_are_deleted_in_any_order(
    order: tuple[int, ...], mesh: pw.Mesh, arrays: Arrays
) -> None:
    source = arrays.runtime.upload(numbers(8), spec_of(split(mesh, numbers(8))))
    arrays.specs[source] = spec_of(split(mesh, numbers(8)))
    (view,) = arrays.view([source], [arrays.specs[source]], [[(0, at) for at in range(DEVICES)]])
    (of_view,) = arrays.view([view], [arrays.specs[view]], [[(0, at) for at in range(DEVICES)]])
    left = {source, view, of_view}
    for at in order:
        gone = (source, view, of_view)[at]
        arrays.delete(gone)
        left.remove(gone)
        for array in left:
            np.testing.assert_array_equal(arrays.value(array), numbers(8))


def test_a_shard_counts_once_on_its_host(mesh: pw.Mesh, arrays: Arrays) -> None:
    until_live({"host-0": 0})
    size = 1 << 16
    x = split(mesh, np.zeros(size, np.uint8))
    source = arrays.of(x)
    pieces = arrays.disassemble(source)
    whole = arrays.assemble(pieces)
    arrays.value(whole)

    def live_bytes() -> int:
        return arrays.runtime.stats()["host-0"]["live_bytes"]

    assert live_bytes() == size
    arrays.delete(*pieces)
    x.delete()
    until(lambda: live()["host-0"] == 1, "the others are gone")
    assert live_bytes() == size, "the last array has all shards"
    (one,) = arrays.view([whole], [on_one(arrays.specs[whole], 2)], [[(0, 2)]])
    arrays.delete(whole)
    until(lambda: live_bytes() == size // DEVICES, "one shard is left")
    arrays.delete(one)
    until(lambda: live_bytes() == 0, "nothing is left")


def overwriting(mesh: pw.Mesh) -> Any:
    return pw.jit(lambda x: x * 0 - 1, mesh=mesh, donate_argnums=0, out_shardings=P("x"))


@pytest.mark.parametrize("gives_view", [False, True])
def test_a_donated_array_leaves_the_shards_that_others_name(
    gives_view: bool, mesh: pw.Mesh, arrays: Arrays
) -> None:
    eat = overwriting(mesh)
    for at in range(10):
        x = split(mesh, numbers(40_000, at))
        source, spec = arrays.of(x), spec_of(x)
        shards = [[(0, position) for position in range(DEVICES)]]
        (view,) = arrays.view([source], [spec], shards)
        given, kept = (arrays.handle(view, x), source) if gives_view else (x, view)
        eaten = eat(given)
        np.testing.assert_array_equal(arrays.value(kept), numbers(40_000, at))
        np.testing.assert_array_equal(eaten, np.full(40_000, -1))


def test_a_view_of_a_donated_or_deleted_array_fails(mesh: pw.Mesh, arrays: Arrays) -> None:
    x, y = split(mesh, numbers(8)), split(mesh, numbers(8))
    names = [arrays.of(x), arrays.of(y)]
    overwriting(mesh)(x)
    y.delete()
    for name in names:
        for piece in arrays.disassemble(name):
            with pytest.raises(pw.ArrayDeleted, match="deleted or donated before this call"):
                arrays.value(piece)


def test_a_view_has_the_errors_of_its_sources(mesh: pw.Mesh, arrays: Arrays) -> None:
    bad = pw.jit(jnp.log, mesh=mesh, out_shardings=P("x"), check_nans=True)(
        split(mesh, -numbers(8, 1))
    )
    good = split(mesh, numbers(8))
    names = [arrays.of(bad), arrays.of(good)]
    spec = spec_of(good)
    rows = [[(at % 2, at) for at in range(DEVICES)], [(1, at) for at in range(DEVICES)]]
    mixed, clean = arrays.view(names, [spec, spec], rows)
    with pytest.raises(pw.NaNFound, match="'log' made NaNs"):
        arrays.value(mixed)
    with pytest.raises(pw.NaNFound, match="'log' made NaNs"):
        arrays.runtime.wait([(mixed, spec)]).result(60)
    np.testing.assert_array_equal(arrays.value(clean), numbers(8))


def test_a_restored_array_has_views(mesh: pw.Mesh, arrays: Arrays, tmp_path: Path) -> None:
    x = split(mesh, numbers(8))
    pw.checkpoint({"x": x}, path=tmp_path / "saved").result(60)
    restored = pw.restore(tmp_path / "saved", {"x": x})["x"]
    pieces = arrays.disassemble(arrays.of(restored))
    np.testing.assert_array_equal(arrays.value(pieces[1]), halves()[1])


def test_views_are_made_ahead_and_by_many_threads(
    cluster: InProcessCluster, mesh: pw.Mesh, arrays: Arrays
) -> None:
    x = split(mesh, numbers(8))
    source = arrays.of(x)
    y = pw.jit(lambda x: x + 1, mesh=mesh, out_shardings=P("x"))
    y(x).block_until_ready()
    with held(cluster), ThreadPoolExecutor(8) as threads:
        made = y(x)  # it is not made before the block ends
        name = arrays.of(made)
        pieces = list(threads.map(lambda _: Arrays.disassemble(arrays, name), range(32)))
        others = list(threads.map(lambda _: Arrays.disassemble(arrays, source), range(32)))
    for mine, other in zip(pieces, others, strict=True):
        np.testing.assert_array_equal(arrays.value(mine[2]), halves()[2] + 1)
        np.testing.assert_array_equal(arrays.value(other[2]), halves()[2])


# --- two hosts ---------------------------------------------------------------------------------------


@pytest.fixture
def two_hosts() -> Iterator[pw.LocalCluster]:
    with pw.LocalCluster(hosts_per_island=2, devices_per_host=2) as cluster:
        yield cluster


def status() -> Status:
    return current.runtime().ask.status(30.0)


@pytest.mark.processes
def test_views_over_two_hosts(two_hosts: pw.LocalCluster) -> None:
    arrays = Arrays()
    part = pw.make_virtual_device_set().add_slice(devices=DEVICES)
    mesh, first = pw.Mesh(part.devices, ("x",)), pw.Mesh(part.devices[:1], ("x",))
    x = split(mesh, numbers(8))
    pieces = arrays.disassemble(arrays.of(x))
    log = pw.jit(jnp.log, mesh=first, check_nans=True)
    total = pw.jit(lambda x: x.sum(), mesh=mesh)
    formed = status().islands[0].formed
    for at, start in enumerate((1, -9)):
        logs = log(pw.put(numbers(2, start), sharding=pw.NamedSharding(first, P("x"))))
        spec = spec_of(x)
        arrays.of(logs)
        sources = [number_of(logs), *pieces[1:]]
        (mixed,) = arrays.view(sources, [spec], [[(n, 0) for n in range(DEVICES)]])
        # A gang of both hosts reads it, and only one of them has an error.
        held_view = arrays.handle(mixed, x)  # a dead handle would delete it
        summed = total(held_view)
        if at == 0:
            expected = np.log(numbers(2, start)).sum() + numbers(8)[2:].sum()
            np.testing.assert_allclose(summed, expected, rtol=1e-5)
        else:
            with pytest.raises(pw.NaNFound, match="'log'"):
                summed.block_until_ready()
            with pytest.raises(pw.NaNFound, match="'log'"):
                held_view.block_until_ready()
    assert status().islands[0].formed == formed, "an error of one host holds up no gang"

    # A lost host: a view comes back, and so does one whose source is deleted.
    apart = arrays.disassemble(arrays.of(x))
    whole = arrays.assemble(apart)
    x.delete()
    arrays.value(whole)
    arrays.delete(*apart[1:])
    for host in status().islands[0].hosts[:1]:
        send(host.pid, signal.SIGKILL)
    until(lambda: status().islands[0].formed != formed, "the island is formed again", 60.0)
    np.testing.assert_array_equal(arrays.value(whole), numbers(8))
    np.testing.assert_array_equal(arrays.value(apart[0]), numbers(8)[:2])
    y = split(mesh, numbers(8))
    (remade,) = arrays.view([whole], [spec_of(y)], [[(0, at) for at in range(DEVICES)]])
    np.testing.assert_array_equal(total(arrays.handle(remade, y)), 28)
    y.delete()
    summed.delete()
    arrays.delete(*(arrays.specs.keys() - {whole, apart[0]}))

    def live_bytes() -> int:
        return sum(one.get("live_bytes", 0) for one in arrays.runtime.stats().values())

    until(lambda: live_bytes() == numbers(8).nbytes, "both share one memory again")
