"""JAX's own client against a gateway over two islands, the first one of two hosts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
import pytest

from tests.gateway.gateway_cases import CASES, Case
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


def seen(case: Case, devices: Sequence[Any]) -> Any:
    """Return what a case returns, with numpy's arrays for JAX's."""
    with jax.default_device(devices[0]):
        return jax.tree.map(
            lambda leaf: np.asarray(leaf) if isinstance(leaf, jax.Array) else leaf, case(devices)
        )


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
    plain = seen(CASES[name], jax.devices("cpu")[:8])
    here = seen(CASES[name], devices)
    wanted, structure = jax.tree.flatten_with_path(plain)
    found, structure_found = jax.tree.flatten(here)
    assert structure_found == structure
    for one, (path, other) in zip(found, wanted, strict=True):
        where = jax.tree_util.keystr(path)
        if isinstance(other, np.ndarray | np.generic | float):
            assert np.asarray(one).dtype == np.asarray(other).dtype, where
            np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-5, err_msg=where)
        else:
            assert one == other, where
