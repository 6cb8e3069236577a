"""What a user reads when something fails on a host."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

import pw
from pw.testing import InProcessCluster


def test_a_computation_that_does_not_fit_is_named_wherever_it_is_noticed() -> None:
    with InProcessCluster(islands=1, devices_per_island=1):
        devices = pw.make_virtual_device_set().add_slice(devices=1).devices

        def far_too_big(x):
            return jnp.ones((1 << 42,), jnp.float32) * x

        big = pw.jit(far_too_big, devices=devices)(np.float32(2))
        after = pw.jit(lambda x: jnp.sum(x), devices=devices)(big)
        with pytest.raises(pw.OutOfDeviceMemory, match="far_too_big"):
            np.asarray(after)


@pytest.mark.parametrize("elements", [1 << 40, 1 << 58])
def test_a_transfer_that_no_host_has_room_for_fails_and_nothing_else_does(elements: int) -> None:
    with InProcessCluster(islands=2, devices_per_island=1):
        device_set = pw.make_virtual_device_set()
        one, two = (device_set.add_slice(devices=1, island=f"island-{i}").devices for i in (0, 1))
        huge = pw.jit(lambda x: jnp.broadcast_to(x, (elements,)), devices=one)(np.float32(1))
        first = pw.jit(lambda x: x[0], devices=two)(huge)
        with pytest.raises(pw.Error, match=r"memory|room|TransferFailed|failed|larger than"):
            np.asarray(first)
        assert float(pw.jit(lambda x: x + 1, devices=two)(np.float32(1))) == 2
