"""Names in plain JAX: one script publishes jax arrays, others get jax arrays and pw arrays of them."""

from __future__ import annotations

import numpy as np
import pytest

import pw
from tests.stages.scripts import finish, start_client

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]

PUBLISHES = """
import pw.jax
mesh = jax.sharding.Mesh(jax.devices(), ("x",))
split = jax.sharding.NamedSharding(mesh, P("x"))
x = jax.jit(lambda x: 2 * x)(jax.device_put(jnp.arange(8.0), split))
print(pw.jax.publish("of jax", {"x": x, "lr": 0.5}, keep="1m").result(60))
again = pw.jax.lookup("of jax")
assert isinstance(again["x"], jax.Array) and again["lr"] == 0.5
assert again["x"].sharding.is_equivalent_to(split, 1)
assert again["x"].tolist() == [2 * i for i in range(8)]
"""

LOOKS_UP = """
import pw, pw.jax
first = pw.jax.lookup("of jax", wait=60)  # before any other use of JAX
assert pw.version_of(first) == 1
one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
split = jax.sharding.NamedSharding(jax.sharding.Mesh(jax.devices(), ("x",)), P("x"))
found = pw.jax.lookup("of jax", like={"x": split, "lr": None}, wait=60)
doubled = jax.jit(lambda x: x + 1, donate_argnums=0)(found["x"])
assert doubled.tolist() == [2 * i + 1 for i in range(8)], doubled
assert pw.jax.lookup("of jax")["x"].tolist() == [2 * i for i in range(8)]
print("well")
"""


def test_jax_arrays_are_published_and_looked_up() -> None:
    with pw.LocalCluster(devices_per_host=2) as cluster:
        settings = {"JAX_PLATFORMS": "pw", "PW_DEVICES": "2", "XLA_FLAGS": ""}
        assert finish(start_client(cluster.address, PUBLISHES, **settings)) == "1\n"
        assert finish(start_client(cluster.address, LOOKS_UP, **settings)) == "well\n"
        np.testing.assert_array_equal(pw.lookup("of jax")["x"], 2 * np.arange(8.0))
