"""JAX's plugin `pw`: what a script sees that knows nothing of pw."""

from __future__ import annotations

import pytest

from tests.scripts import finish, start_client

pytestmark = pytest.mark.processes

CHECK = """
asked = jax.config.jax_platforms
assert len(jax.devices()) == 2
assert jax.devices("cpu")[0].client is not jax.devices()[0].client
assert jax.config.jax_platforms == asked, jax.config.jax_platforms
print("well")
"""


@pytest.mark.parametrize("platforms", ["pw", "pw,cpu"])
def test_this_machines_cpu_is_a_second_platform(platforms: str) -> None:
    settings = {"JAX_PLATFORMS": platforms, "PW_DEVICES": "2", "XLA_FLAGS": ""}
    assert finish(start_client("", CHECK, **settings)) == "well\n"
