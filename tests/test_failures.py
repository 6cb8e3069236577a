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
