"""Which part of an array each island has: every device has the shard that it would have on one island."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from pw.client.arrays.devices import make_virtual_device_set
from pw.client.arrays.factors import Factor, factors_of
from pw.client.arrays.island_parts import is_divided, parts_of, put_together, sources
from pw.client.arrays.mesh import OwnMesh
from pw.client.arrays.sharding import OwnSharding
from pw.core.sharding import box_slices
from tests.stages.local_runtime import LocalRuntime

OWNERS = {
    "an island after another": [0, 0, 0, 0, 1, 1, 1, 1],
    "the other first": [1, 1, 1, 1, 0, 0, 0, 0],
    "in turn": [0, 1, 0, 1, 0, 1, 0, 1],
    "in pairs": [0, 0, 1, 1, 0, 0, 1, 1],
    "four": [0, 0, 1, 1, 2, 2, 3, 3],
    "four in turn": [0, 1, 2, 3, 0, 1, 2, 3],
    "no order": [0, 1, 1, 0, 1, 0, 0, 1],
    "several sizes": [0, 1, 0, 0, 0, 1, 0, 0],
    "one of its own": [0, 1, 1, 1, 1, 1, 1, 1],
}
EXTENTS = {(8,): ("x",), (4, 2): ("x", "y"), (2, 4): ("x", "y"), (2, 1, 4): ("x", "y", "z")}


@pytest.fixture(autouse=True)
def rt() -> Iterator[LocalRuntime]:
    with LocalRuntime.in_use(("a", "b", "c", "d")) as local:
        yield local


def mesh_of(owners: list[int], extent: tuple[int, ...]) -> OwnMesh:
    joined = make_virtual_device_set().add_slice(devices=32, islands=4)
    left = [list(part.devices) for part in joined.parts]
    devices = np.array([left[owner].pop(0) for owner in owners])
    return OwnMesh(devices.reshape(extent), EXTENTS[extent])


def specs_of(names: tuple[str, ...]) -> list[P]:
    return [P(), P(names), P(names[::-1]), P(None, names[-1]), P(names[-1], names[:-1])]


@pytest.mark.parametrize("extent", EXTENTS)
@pytest.mark.parametrize("name", OWNERS)
def test_each_device_has_its_shard(name: str, extent: tuple[int, ...]) -> None:
    mesh = mesh_of(OWNERS[name], extent)
    value = np.arange(16 * 8 * 3).reshape(16, 8, 3)
    for spec in specs_of(mesh.axis_names):
        sharding = OwnSharding(mesh, spec)
        islands = parts_of(sharding, value.shape)
        parts = [island.of(value) for island in islands]
        for island, part in zip(islands, parts, strict=True):
            assert part.shape == island.shape
            assert island.is_whole == (part.shape == value.shape)
            for at, device in enumerate(island.sharding.mesh.devices.flat):
                place = list(mesh.devices.flat).index(device)
                shard = value[box_slices(sharding.core.box(value.shape, place))]
                own = part[box_slices(island.sharding.core.box(part.shape, at))]
                assert np.array_equal(own, shard)
        needed = {at: parts[at] for at, _ in sources(islands)}
        assert np.array_equal(put_together(islands, needed, value.shape), value)
        if spec == P(mesh.axis_names):
            assert is_divided(islands, value.shape)


def test_an_island_has_one_block_of_what_its_axis_splits() -> None:
    mesh = mesh_of(OWNERS["an island after another"], (2, 4))
    east, west = parts_of(OwnSharding(mesh, P(("x", "y"))), (16, 8))
    assert [block.in_array for block in east.blocks] == [((0, 8), (0, 8))]
    assert [block.in_array for block in west.blocks] == [((8, 16), (0, 8))]
    assert west.sharding == OwnSharding(mesh.parts[1], P("y"))
    assert all(part.is_whole for part in parts_of(OwnSharding(mesh, P("y")), (16, 8)))


def test_factors_of_axes() -> None:
    def factors(owners: list[int]) -> list[tuple[int, str]]:
        found = factors_of(np.array(owners), ["x"])
        assert found is not None
        return [tuple(factor) for factor in found.of_axis["x"]]

    assert factors([0, 0, 0, 1, 1, 1]) == [(2, ""), (3, "x")]
    assert factors([0, 1, 2, 0, 1, 2]) == [(2, "x"), (3, "")]
    assert factors([0, 0, 1, 1] * 3) == [(3, "x_0"), (2, ""), (2, "x_1")]
    assert factors([0]) == [(1, "x")]
    assert factors_of(np.array([0, 1, 1, 0]), ["x"]) is None
    assert factors_of(np.array([[0, 1], [1, 0]]), ["x", "y"]) is None
    both = factors_of(np.array([[0, 1], [2, 3]]), ["x", "y"])
    assert both is not None
    assert both.of_axis == {"x": (Factor(2, ""),), "y": (Factor(2, ""),)}
    assert both.places[2] == {"x": (1,), "y": (0,)}
