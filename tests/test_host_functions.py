"""Python functions on hosts: nodes of programs, off unless a host allows them."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pw
from pw.testing import InProcessCluster
from tests.scripts import finish, start_client


@pytest.fixture
def mesh() -> Iterator[pw.Mesh]:
    with InProcessCluster(islands=1, devices_per_island=2):
        yield pw.Mesh(pw.make_virtual_device_set().add_slice(devices=2).devices, ("x",))


def test_it_stands_between_computations_of_a_program(mesh: pw.Mesh) -> None:
    def words(x: np.ndarray, *, scale: float) -> dict[str, np.ndarray]:
        assert isinstance(x, np.ndarray)
        return {"sorted": np.sort(x) * np.float32(scale), "length": np.int32(len(x))}

    shapes = {
        "sorted": jax.ShapeDtypeStruct((4,), jnp.float32),
        "length": jax.ShapeDtypeStruct((), jnp.int32),
    }
    on_host = pw.host_function(words, shapes, devices=mesh.devices)
    double = pw.jit(lambda x: x * 2, mesh=mesh, in_shardings=P("x"), out_shardings=P("x"))

    @pw.program
    def both(x):
        found = on_host(double(x), scale=10.0)
        return double(found["sorted"]), found["length"]

    for _ in range(3):
        doubled, length = both(np.array([3, 1, 2, 0], np.float32))
        np.testing.assert_array_equal(np.asarray(doubled), [0, 40, 80, 120])
        assert int(length) == 4


def test_its_arguments_can_be_donated_afterwards(mesh: pw.Mesh) -> None:
    total = pw.host_function(
        lambda x: x.sum(), jax.ShapeDtypeStruct((), jnp.float32), devices=mesh.devices
    )
    bump = pw.jit(lambda x: x + 1, mesh=mesh, donate_argnums=0)
    x = pw.put(np.zeros(1 << 16, np.float32), sharding=pw.NamedSharding(mesh, P()))
    totals = []
    for _ in range(20):
        totals.append(total(x))
        x = bump(x)
    assert [int(t) for t in totals] == [step << 16 for step in range(20)]


def test_what_it_raises_is_raised_where_the_value_is_read(mesh: pw.Mesh) -> None:
    def picky(x: np.ndarray) -> np.ndarray:
        raise ValueError("no such file")

    shape = jax.ShapeDtypeStruct((2,), jnp.float32)
    failed = pw.host_function(picky, shape, devices=mesh.devices)(np.ones(2, np.float32))
    after = pw.jit(lambda x: x + 1, mesh=mesh)(failed)
    with pytest.raises(pw.ComputationFailed, match="no such file") as caught:
        np.asarray(after)
    assert "picky" in "".join(caught.value.__notes__)


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (np.ones(3, np.float32), r"float32\[3\].*float32\[2\]"),
        (np.ones(2, np.float64), r"float64\[2\].*float32\[2\]"),
        ((np.ones(2, np.float32),), "result_shape_dtypes says"),
    ],
)
def test_results_that_were_not_promised(mesh: pw.Mesh, result: object, words: str) -> None:
    shape = jax.ShapeDtypeStruct((2,), jnp.float32)
    failed = pw.host_function(lambda: result, shape, devices=mesh.devices)()
    with pytest.raises(pw.ComputationFailed, match=words):
        np.asarray(failed)


def test_bad_promises_and_calls_from_traced_functions(mesh: pw.Mesh) -> None:
    with pytest.raises(pw.ArgumentError, match="ShapeDtypeStruct"):
        pw.host_function(lambda: 1, (1, 2), devices=mesh.devices)
    shape = jax.ShapeDtypeStruct((2,), jnp.float32)
    on_host = pw.host_function(lambda x: x, shape, devices=mesh.devices)
    with pytest.raises(pw.TracingError, match=r"pw\.program"):
        pw.jit(lambda x: on_host(x) + 1, mesh=mesh)(np.ones(2, np.float32))


@pytest.mark.processes
def test_workers_refuse_unless_their_owner_allows() -> None:
    body = """
        devices = pw.make_virtual_device_set().add_slice(devices=1).devices
        shape = jax.ShapeDtypeStruct((), jnp.int32)
        seen = pw.host_function(lambda: np.int32(os.getpid()), shape, devices=devices)()
        try:
            print("ran" if int(seen) != os.getpid() else "ran here")
        except pw.CompileError as error:
            print("--allow-python" in str(error))
    """
    for allowed, answer in ((False, "True"), (True, "ran")):
        with pw.LocalCluster(connect=False, allow_python=allowed) as cluster:
            assert finish(start_client(cluster.address, body)).strip() == answer
