"""JAX's own client against a gateway over two islands, the first one of two hosts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from tests.gateway.gateway_cases import CASES, check_as_in_plain_jax
from tests.stages.gateway_stage import Stage
from tests.stages.samples import long

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    with Stage() as stage:
        yield stage


@pytest.fixture(scope="module")
def devices(stage: Stage) -> Sequence[Any]:
    """The gateway's devices: four of two hosts, then four of one."""
    return stage.client().devices()


ALSO_FROM_OTHERS = {
    *("random_numbers", "linear_algebra", "puts_on_each_device", "another_order_of_devices"),
    *("ready_arrays", "gradients_and_transformations", "control_flow", "some_of_the_devices"),
    *("collectives_in_shard_map", "a_mesh_of_two_dimensions_with_transposed_specs"),
}
"""What the other cases use as well."""


@pytest.mark.parametrize(
    "name",
    [long(name) if name in ALSO_FROM_OTHERS or at % 2 else name for at, name in enumerate(CASES)],
)
def test_it_is_as_in_plain_jax(name: str, devices: Sequence[Any]) -> None:
    check_as_in_plain_jax(CASES[name], devices)
