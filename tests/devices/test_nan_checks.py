"""`check_nans`: a result with a NaN is an error before it is read, and so is all that is made of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pw
from pw.client.computations.export import Traced
from pw.core.errors import ErrorReport
from pw.core.messages import CallEnded
from pw.core.programs.program import Computation, Kind, Node, Output, Program, ValueRef
from pw.core.sharding import ArraySpec
from pw.testing import InProcessCluster
from tests.sched.test_rebuild import Cluster, X
from tests.stages.inside import traced_of
from tests.stages.scripted import SMALL, digest
from tests.stages.stage import live, mesh_on, numbers, until_live

BAD = np.array([-1, 1, 2, 3], np.float32)


@pytest.fixture
def cluster() -> Iterator[InProcessCluster]:
    with InProcessCluster(islands=2, devices_per_island=2) as cluster:
        yield cluster


@pytest.fixture
def mesh(cluster: InProcessCluster) -> pw.Mesh:
    return mesh_on(0)


def log(x: Any) -> Any:
    return {"log": jnp.log(x), "next": x + 1, "count": jnp.int32(1)}


def test_it_names_the_function_and_the_result(mesh: pw.Mesh) -> None:
    checked = pw.jit(log, mesh=mesh, in_shardings=P("x"), check_nans=True)
    for result in checked(BAD).values():  # of one call all results
        with pytest.raises(pw.NaNFound, match=r"'log' made NaNs in result\['log'\], float32\[4\]"):
            result.block_until_ready()
        with pytest.raises(FloatingPointError, match="NaN"):
            np.asarray(result)
    fine = checked(numbers(4, 1))
    np.testing.assert_allclose(fine["log"], np.log(numbers(4, 1)), rtol=1e-6)


def test_whatever_depends_on_it_has_the_same_error(
    cluster: InProcessCluster, mesh: pw.Mesh
) -> None:
    """Near and far, in one program or several, although it was all asked for before the check."""
    far = mesh_on(1)
    checked = pw.jit(jnp.log, mesh=mesh, in_shardings=P("x"), out_shardings=P("x"), check_nans=True)
    hides = pw.jit(lambda x: jnp.nan_to_num(x), mesh=mesh)
    there = pw.jit(lambda x: x * 2, mesh=far)
    program = pw.program(lambda x: there(hides(checked(x))))
    for _ in range(3):
        root = checked(BAD)
        hidden = hides(root)
        for array in (hidden, there(hidden), program(BAD), root + 1, root):
            with pytest.raises(pw.NaNFound, match="'log'"):
                np.asarray(array)
        np.testing.assert_allclose(program(numbers(4, 1)), 2 * np.log(numbers(4, 1)), rtol=1e-6)


def test_every_dtype_that_can_have_one_is_checked(mesh: pw.Mesh) -> None:
    for dtype in (jnp.float16, jnp.bfloat16, jnp.float32, jnp.complex64, jnp.float8_e4m3fn):
        checked = pw.jit(lambda x: x / x, mesh=mesh, check_nans=True)
        with pytest.raises(pw.NaNFound):
            np.asarray(checked(jnp.zeros(2, dtype)))
        assert np.all(np.asarray(checked(jnp.ones(2, dtype))) == 1)
    whole = pw.jit(lambda x, key: (x // 2, key, x[:0] / 1), mesh=mesh, check_nans=True)
    halves, _, empty = whole(np.arange(4), jax.random.key(0))
    np.testing.assert_array_equal(halves, [0, 0, 1, 1])
    assert empty.shape == (0,)


def test_jax_debug_nans_asks_for_it_unless_the_function_says_otherwise(mesh: pw.Mesh) -> None:
    follows = pw.jit(jnp.log, mesh=mesh)
    never = pw.jit(jnp.log, mesh=mesh, check_nans=False)
    mapped = pw.pmap(jnp.log, devices=list(mesh.devices))
    assert np.isnan(np.asarray(follows(BAD))[0])
    with jax.debug_nans(True):
        with pytest.raises(pw.NaNFound):
            follows(BAD).block_until_ready()
        with pytest.raises(pw.NaNFound):
            mapped(BAD.reshape(2, 2)).block_until_ready()
        with pytest.raises(pw.NaNFound):
            (pw.put(BAD) / 0 * 0).block_until_ready()
        assert np.isnan(np.asarray(never(BAD))[0])
    assert np.isnan(np.asarray(follows(BAD))[0])


def test_a_checked_step_that_donates_goes_on(mesh: pw.Mesh) -> None:
    step = pw.jit(lambda x: x - 1, mesh=mesh, donate_argnums=0, check_nans=True)
    root = pw.jit(jnp.sqrt, mesh=mesh, check_nans=True)
    x = pw.put(numbers(4, 2), sharding=pw.NamedSharding(mesh, P()))
    for _ in range(2):
        x = step(x)
    np.testing.assert_array_equal(root(x), np.sqrt(numbers(4)))
    x = step(x)
    with pytest.raises(pw.NaNFound, match="'sqrt'"):
        np.asarray(root(x))
    np.testing.assert_array_equal(x, numbers(4) - 1)
    del x
    until_live(dict.fromkeys(live(), 0))


def test_without_the_check_nothing_is_added(mesh: pw.Mesh) -> None:
    plain, checked = pw.jit(jnp.log, mesh=mesh), pw.jit(jnp.log, mesh=mesh, check_nans=True)
    for f in (plain, checked):
        f(BAD)
    traced: list[Traced] = [traced_of(f) for f in (plain, checked)]
    assert [len(t.computation.outputs) for t in traced] == [1, 2]
    assert [t.computation.checks for t in traced] == [(), ("result, float32[4]",)]
    assert [len(t.outputs) for t in traced] == [1, 1]


# --- on several hosts ----------------------------------------------------------------------------------


def judged(spec: ArraySpec, then: ArraySpec, *, python: bool = False) -> Program:
    """A computation with a verdict, and one that needs its result."""
    flags = ArraySpec((1,), "bool", type(spec.sharding)(("x",), (2,), ((),)), spec.placement)
    first = Computation(
        "first",
        digest(b"1"),
        spec.placement,
        (spec,),
        (spec,) if python else (spec, flags),
        kind=Kind.PYTHON if python else Kind.STABLEHLO,
        checks=() if python else ("result",),
    )
    second = Computation("second", digest(b"1"), then.placement, (then,), (then,))
    nodes = (Node(0, (ValueRef(-1, 0),)), Node(1, (ValueRef(0, 0),)))
    outputs = (Output(ValueRef(0, 0), spec), Output(ValueRef(1, 0), then))
    return Program("judged", (first, second), nodes, (spec,), outputs)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("far", [False, True])
def test_all_hosts_of_a_gang_read_the_same_verdict(seed: int, far: bool) -> None:
    cluster = Cluster(seed)
    client, world = cluster.client, cluster.world
    program = client.program(judged(cluster.a, cluster.b if far else cluster.a))
    made = [client.run(program, x) for x in (X, X - 5, X)]
    world.steps(world.random.randrange(200))
    for arrays, expected in zip(made, (X, None, X), strict=True):
        for index, array in enumerate(arrays):
            found = client.value(array)
            if expected is None:
                assert isinstance(found, ErrorReport)
                assert (found.kind, "'first'" in found.message) == ("NaNFound", True)
            else:
                np.testing.assert_array_equal(found, expected + index + 1)
    assert not world.counters["gangs_broken"]
    client.delete(*(array for arrays in made for array in arrays))
    client.release(program)
    cluster.idle()


@pytest.mark.parametrize("seed", range(30))
def test_hosts_agree_on_a_python_function_that_raises_on_one_of_them(seed: int) -> None:
    cluster = Cluster(seed)
    client, world = cluster.client, cluster.world
    replicated = ArraySpec(
        (SMALL,), "int64", type(cluster.a.sharding)(("x",), (2,), ((),)), cluster.a.placement
    )
    program = client.program(judged(replicated, cluster.a, python=True))
    raising = cluster.hosts[f"a{seed % 2}"].current.backend
    fine = client.run(program, X)
    world.settle()
    raising.raises = True
    failed = [client.run(program, X) for _ in range(2)]
    world.settle()
    raising.raises = False
    again = client.run(program, X)
    for arrays in failed:
        for array in arrays:
            found = client.value(array)
            assert (found.kind, found.where) == ("ComputationFailed", raising.name)
    for arrays in (fine, again):
        for index, array in enumerate(arrays):
            np.testing.assert_array_equal(client.value(array), X + index + 1)
    assert not world.counters["gangs_broken"]
    told = [m for _, to, m in world.sent if isinstance(m, CallEnded) and to.actor == "executor"]
    assert len(told) == 2 * 4
    client.delete(*(array for arrays in (fine, again, *failed) for array in arrays))
    client.release(program)
    cluster.idle()


@pytest.mark.parametrize("seed", range(20))
def test_a_host_is_lost_before_the_verdict(seed: int) -> None:
    """What was there already is not handed over as if it had been found good."""
    cluster = Cluster(seed)
    client, world = cluster.client, cluster.world
    program = client.program(judged(cluster.a, cluster.a))
    world.settle()
    made = [client.run(program, x) for x in (X - 5, X)]
    world.steps(10 + 4 * seed)
    cluster.hosts[f"a{seed % 2}"].crash()
    world.settle()
    world.wait(2)
    for array in made[0]:
        assert client.value(array).kind == "NaNFound"
    for index, array in enumerate(made[1]):
        np.testing.assert_array_equal(client.value(array), X + index + 1)
