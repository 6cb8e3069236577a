"""`jax.experimental.colocated_python` on workers that allow Python functions, and on others."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import colocated_python as colocated
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tests.stages.daemons import until
from tests.stages.gateway_stage import Stage
from tests.stages.programs import run_python

pytestmark = pytest.mark.processes

SCRIPT = """
import os
import jax, numpy as np
from jax.experimental import colocated_python as colocated
from jax.extend import backend
from jax.extend.backend import ifrt_proxy
from jax.sharding import Mesh, NamedSharding, PartitionSpec

backend.register_backend_factory("proxy", lambda: ifrt_proxy.get_client(
    jax.config.read("jax_backend_target"), ifrt_proxy.ClientConnectionOptions()
), priority=-1)
rows = NamedSharding(Mesh(np.array(jax.devices()), ("x",)), PartitionSpec("x"))

@colocated.colocated_python
def function(x, scale):
    process = jax.device_put(np.full(4, os.getpid(), np.int32), x.sharding)
    return {"scaled": x * scale, "process": process}

x = jax.jit(lambda x: x + 1, out_shardings=rows)(jax.device_put(np.arange(8.0), rows))
scale = jax.device_put(np.float32(3), NamedSharding(rows.mesh, PartitionSpec()))
for _ in range(2):  # the first call finds out what it returns
    made = function(x, scale=scale)
    assert made["scaled"].sharding == rows
    np.testing.assert_array_equal(jax.jit(lambda x: x * 2)(made["scaled"]), np.arange(1.0, 9.0) * 6)
    assert os.getpid() not in np.asarray(made["process"])
    print("same")

@colocated.colocated_python_class
class Sum:
    def __init__(self, start):
        self.sum = start

    def add(self, x):
        self.sum += float(x.sum())
        return jax.device_put(np.full(4, self.sum, np.float32), x.sharding)

total = Sum(10.0)
ones = jax.device_put(np.ones(4, np.float32), rows)
print([float(total.add(ones)[0]) for _ in range(3)])
"""


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    with Stage() as stage:
        stage.worker("python", 4, "--allow-python")
        until(lambda: len(stage.status().islands) == 3, "the third island")
        yield stage


@pytest.fixture(scope="module")
def python(stage: Stage) -> str:
    """The address of a gateway to four devices of a host that runs Python functions."""
    _, address = stage.start_gateway("--islands", "python")
    return address


@pytest.fixture(scope="module")
def devices(stage: Stage, python: str) -> Sequence[Any]:
    return stage.client(python).devices()


@pytest.fixture
def rows(devices: Sequence[Any]) -> NamedSharding:
    return NamedSharding(Mesh(np.array(devices), ("x",)), PartitionSpec("x"))


def test_functions_and_objects(python: str) -> None:
    where = {"JAX_PLATFORMS": "proxy", "JAX_BACKEND_TARGET": python}
    ran = run_python(["-c", SCRIPT], environment={**os.environ, **where})
    assert ran.stdout.splitlines() == ["same", "same", "[14.0, 18.0, 22.0]"], ran.stderr


def test_results_that_are_said_before(rows: NamedSharding) -> None:
    columns = NamedSharding(rows.mesh, PartitionSpec(None, "x"))

    @colocated.colocated_python
    def function(x: jax.Array) -> jax.Array:
        return jax.device_put(x.astype(jnp.bfloat16), columns)

    said = function.specialize(
        out_specs_fn=lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16, sharding=columns)
    )
    value = np.arange(32, dtype=np.float32).reshape(8, 4)
    made = said(jax.device_put(value, rows))
    assert made.sharding == columns
    np.testing.assert_array_equal(np.asarray(made), value.astype(jnp.bfloat16))


def test_errors(stage: Stage, rows: NamedSharding) -> None:
    @colocated.colocated_python
    def function(x: jax.Array) -> jax.Array:
        raise KeyError("mine")

    def same(x: Any) -> Any:
        return x

    with pytest.raises(jax.errors.JaxRuntimeError, match="'function' failed: KeyError: 'mine'"):
        function.specialize(out_specs_fn=same)(
            jax.device_put(np.ones(4, np.float32), rows)
        ).block_until_ready()
    elsewhere = jax.device_put(np.ones(4, np.float32), stage.neighbour()[4])
    with pytest.raises(jax.errors.JaxRuntimeError, match="start it with pw-worker --allow-python"):
        function.specialize(out_specs_fn=same)(elsewhere).block_until_ready()
