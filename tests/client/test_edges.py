"""Values between hosts and islands, through the whole in-process cluster."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pw
from pw.testing import InProcessCluster
from tests.stages.daemons import BOUND_S
from tests.stages.inside import number_of, type_of


@pytest.fixture
def meshes() -> Iterator[list[pw.Mesh]]:
    with InProcessCluster(islands=2, devices_per_island=2):
        device_set = pw.make_virtual_device_set()
        yield [
            pw.Mesh(device_set.add_slice(devices=2, island=f"island-{index}").devices, ("x",))
            for index in range(2)
        ]


@pytest.mark.parametrize("size", [4, 1 << 18])
def test_a_value_that_has_not_arrived_yet_can_be_sent_on(meshes: list[pw.Mesh], size: int) -> None:
    value = np.arange(size, dtype=np.float32)
    x = pw.put(value, sharding=pw.NamedSharding(meshes[0], P("x")))
    for hop in range(1, 7):
        x = pw.put(x, sharding=pw.NamedSharding(meshes[hop % 2], P("x") if hop % 3 else P()))
    np.testing.assert_array_equal(np.asarray(x), value)


def test_everything_asked_for_is_settled_when_the_session_ends() -> None:
    from pw.client.connection import current

    with InProcessCluster(islands=1, devices_per_island=1):
        devices = pw.make_virtual_device_set().add_slice(devices=1).devices
        x = pw.put(np.zeros(4, np.float32), devices)
        spec = type_of(x).spec
        futures = [current.runtime().fetch(number_of(x), spec) for _ in range(5_000)]
        pw.disconnect()
        for future in futures:
            error = future.exception(timeout=BOUND_S)
            assert error is None or isinstance(error, pw.Disconnected)
