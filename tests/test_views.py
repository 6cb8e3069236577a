"""Views: arrays that consist of shards of other arrays, on real devices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pw
from pw.client.connection import current
from pw.core.sharding import ArraySpec, Placement, Sharding
from pw.core.views import Shards
from pw.testing import InProcessCluster
from tests.stage import numbers

DEVICES = 4


def on_one(spec: ArraySpec, position: int) -> ArraySpec:
    """The spec of one shard of `spec` as an array of its own."""
    place = Placement(spec.placement.slice, (spec.placement.devices[position],))
    shape = spec.sharding.shard_shape(spec.shape)
    return ArraySpec(shape, spec.dtype, Sharding(("_",), (1,), ()), place)


def stacked(spec: ArraySpec, devices: Sequence[int]) -> ArraySpec:
    """The spec of arrays like `spec`, one on each of the devices, side by side in dimension 0."""
    place, count = Placement(spec.placement.slice, tuple(devices)), len(devices)
    shape = (count * spec.shape[0], *spec.shape[1:])
    return ArraySpec(shape, spec.dtype, Sharding(("_",), (count,), (("_",),)), place)


class Arrays:
    """Arrays by their ids, as a front door names them."""

    def __init__(self) -> None:
        self.runtime = current.runtime()
        self.specs: dict[int, ArraySpec] = {}

    def of(self, array: Any) -> int:
        """The id of a `pw.Array`, whose handle the caller keeps."""
        self.specs[array._id] = array._type.spec
        return int(array._id)

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
        fetched: np.ndarray[Any, Any] = self.runtime.fetch(array, self.specs[array]).result(30)
        return fetched

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
def arrays(mesh: pw.Mesh) -> Arrays:
    return Arrays()


def split(mesh: pw.Mesh, value: Any) -> pw.Array:
    return pw.put(value, sharding=pw.NamedSharding(mesh, P("x")))


def test_an_array_is_taken_apart_and_put_together(mesh: pw.Mesh, arrays: Arrays) -> None:
    x = split(mesh, numbers(8))
    pieces = arrays.disassemble(arrays.of(x))
    for at, piece in enumerate(pieces):
        np.testing.assert_array_equal(arrays.value(piece), numbers(8)[2 * at : 2 * at + 2])
    whole = arrays.assemble(pieces[::-1])
    expected = numbers(8).reshape(4, 2)[::-1].reshape(-1)
    np.testing.assert_array_equal(arrays.value(whole), expected)
