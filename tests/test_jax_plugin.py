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


AGAIN = """
import pw.jax
for _ in range(2):
    pw.jax.connect(devices=2)
    print(len(jax.devices()))
try:
    pw.jax.connect(devices=1)
except pw.Error as error:
    print(error)
"""
STARTED = """
import pw.jax
print(len(jax.devices()))
pw.jax.connect()
"""


def test_the_same_connection_again_is_no_error_and_another_names_the_first() -> None:
    again = start_client("", AGAIN, JAX_PLATFORMS="", XLA_FLAGS="")
    started = start_client("", STARTED, JAX_PLATFORMS="pw", PW_DEVICES="2", XLA_FLAGS="")
    two, two_again, refused = finish(again).splitlines()
    assert (two, two_again) == ("2", "2")
    assert "by pw.jax.connect(devices=2, share=1.0)" in refused
    assert finish(started) == "2\n"
