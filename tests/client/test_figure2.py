"""The paper's Figure 2 as printed, and other functions of JAX over virtual devices in programs."""

from __future__ import annotations

import ast
import gc
import re
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import pw
from pw.client.connection import current
from pw.testing import InProcessCluster
from tests.client.test_transforms import CASES, Model, W, X, far_of, near_of
from tests.stages.jax_releases import PMAP_AXIS
from tests.stages.programs import ROOT
from tests.stages.samples import some
from tests.stages.stage import numbers

FIGURE = '''
import jax
import numpy
import pw

def get_devices(n):
    """Allocates `n` virtual TPU devices on an island."""
    device_set = pw.make_virtual_device_set()
    return device_set.add_slice(tpu_devices=n).tpus

a = jax.pmap(lambda x: x * 2., devices=get_devices(2))
b = jax.pmap(lambda x: x + 1., devices=get_devices(2))
c = jax.pmap(lambda x: x / 2., devices=get_devices(2))

@pw.program  # program tracing (optional)
def f(v):
    x = a(v)
    y = b(x)
    z = a(c(x))
    return (y, z)

print(f(numpy.array([1., 2.])))
'''
PRINTED = "(array([3., 5.], dtype=float32), array([2., 4.], dtype=float32))\n"


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[InProcessCluster]:
    with InProcessCluster(islands=2, devices_per_island=2) as made:
        yield made


def devices(island: int = 0) -> Any:
    return pw.make_virtual_device_set().add_slice(2, island=f"island-{island}").devices


def mesh_of(given: Any) -> Mesh:
    return Mesh(np.array(given), ("x",))


def doubled(given: Any) -> Any:
    """A function of `jax.jit` whose arguments and results are split over devices."""
    split = NamedSharding(mesh_of(given), P("x"))
    return jax.jit(lambda x: x * 2, in_shardings=split, out_shardings=split)


def test_figure_2_prints_its_values(capsys: pytest.CaptureFixture[str]) -> None:
    shown = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert ast.dump(ast.parse(FIGURE)) in [ast.dump(ast.parse(block)) for block in shown]
    names: dict[str, Any] = {}
    exec(FIGURE, names)
    assert capsys.readouterr().out == PRINTED
    with pytest.raises(pw.ArgumentError, match=r"is in the cluster, .* in a @pw\.program"):
        names["a"](np.array([1.0, 2.0]))


# --- JAX's transformations, and other functions ----------------------------------------------------------


@pytest.fixture(scope="module")
def model(cluster: InProcessCluster) -> Model:
    whole = [NamedSharding(mesh_of(devices(at)), P()) for at in range(2)]
    near, far = (
        jax.jit(function, in_shardings=(to, to), out_shardings=to)
        for function, to in zip((near_of, far_of), whole, strict=True)
    )
    return Model(near, far)


@pytest.mark.parametrize("name", some(list(CASES), 3))
def test_transformations_of_functions_of_jax(model: Model, name: str) -> None:
    wanted = CASES[name](Model(near_of, far_of))(W, X)
    found = pw.get(pw.program(CASES[name](model))(W, X))
    jax.tree.map(
        lambda one, other: np.testing.assert_allclose(one, other, rtol=2e-4, atol=1e-5),
        found,
        wanted,
    )


def _of_pmap(f: Any, g: Any) -> Callable[..., Any]:
    return lambda x: jax.value_and_grad(lambda x: (g(f(x) + 1) ** 2).sum())(x)


def _twice(x: Any) -> Any:
    return x * 2


def _sum(x: Any) -> Any:
    return x * jax.lax.psum(x, "x")


def test_pmap_has_collectives_and_gradients() -> None:
    f, g = (
        jax.pmap(fun, axis_name="x", devices=devices(at)) for at, fun in enumerate((_sum, jnp.tanh))
    )
    value, grad = pw.program(_of_pmap(f, g))(numbers(2))
    wanted = _of_pmap(lambda x: x * x.sum(), jnp.tanh)(numbers(2))
    np.testing.assert_allclose(pw.get((value, grad))[1], wanted[1], rtol=1e-4)
    mapped = pw.program(jax.vmap(lambda x: g(f(x))))(numbers(6).reshape(3, 2))
    rows = numbers(6).reshape(3, 2)
    np.testing.assert_allclose(mapped, np.tanh(rows * rows.sum(1, keepdims=True)), rtol=1e-4)
    axes = jax.pmap(lambda x, y: x + y, in_axes=(1, None), out_axes=1, devices=devices())
    added = pw.program(axes)(numbers(6).reshape(3, 2), numbers(3))
    assert added.tolist() == (numbers(6).reshape(3, 2) + numbers(3)[:, None]).tolist()
    rows_axis, columns_axis = added.sharding.spec
    assert rows_axis is None
    assert re.fullmatch(PMAP_AXIS, columns_axis)


def test_an_equation_is_one_computation_where_it_says() -> None:
    here, there = devices(), devices(1)
    split, other = (NamedSharding(mesh_of(given), P("x")) for given in (here, there))
    made = NamedSharding(jax.make_mesh((2,), ("x",), devices=there), P())
    tripled = pw.jit(lambda x: x * 3)
    alone = jax.shard_map(_sum, mesh=mesh_of(here), in_specs=P("x"), out_specs=P("x"))
    x = numbers(4)
    cases: list[tuple[Callable[..., Any], Any, Any]] = [
        (doubled(here), x * 2, split),
        (alone, x * (x[[0, 1, 0, 1]] + x[[2, 3, 2, 3]]), split),
        (jax.jit(alone), x * (x[[0, 1, 0, 1]] + x[[2, 3, 2, 3]]), split),
        (lambda x: jax.device_put(x, other), x, other),
        (lambda x: jax.device_put(doubled(here)(x) + 1, other), x * 2 + 1, other),
        (lambda x: jax.device_put(x, SingleDeviceSharding(there[1])) + 1, x + 1, None),
        (lambda x: jax.lax.with_sharding_constraint(x, other) + 1, x + 1, other),
        (jax.jit(lambda x: jax.lax.with_sharding_constraint(x + 1, split)), x + 1, split),
        (lambda x: tripled(doubled(there)(x)), x * 6, other),
        (jax.jit(lambda x: doubled(there)(doubled(here)(x))), x * 4, other),
        (jax.jit(lambda x: doubled(here)(doubled(here)(x))), x * 4, split),
        (lambda x: pw.put(x, sharding=other), x, other),
        (jax.jit(lambda x: x @ x, in_shardings=made, out_shardings=made), x @ x, made),
        (
            lambda x: jax.lax.scan(lambda c, _: (doubled(here)(c), None), x, None, length=3)[0],
            x * 8,
            split,
        ),
    ]
    for function, values, sharding in cases:
        found = pw.program(function)(x)
        assert found.tolist() == values.tolist()
        if sharding is not None:
            assert list(found.sharding.mesh.devices) == list(sharding.mesh.devices)
            assert found.sharding.spec == sharding.spec


def test_functions_of_pw_take_functions_of_jax() -> None:
    x = numbers(2) + 1
    here, there = (doubled(devices(at)) for at in range(2))
    mapped = jax.pmap(lambda x: x + 1, devices=devices(1))

    def loss(x: Any) -> Any:
        return (there(mapped(x)) ** 2).sum()

    cases: list[tuple[Callable[..., Any], Any]] = [
        (lambda x: pw.cond(x.sum() > 0, here, mapped, x), x * 2),
        (lambda x: pw.while_loop(lambda c: c.sum() < 20, here, x), x * 8),
        (
            lambda x: pw.while_loop(
                lambda c: c.sum() < 20, lambda c: there(here(c)), x, max_iterations=3
            ),
            x * 16,
        ),
        (lambda x: pw.map(lambda row: mapped(row), jnp.stack([x, x])), np.stack([x + 1, x + 1])),
        (pw.grad(loss), 8 * (x + 1)),
        (pw.jit(lambda x: here(x) + 1, mesh=mesh_of(devices())), x * 2 + 1),
    ]
    for function, values in cases:
        assert pw.program(function)(x).tolist() == values.tolist()


def test_arguments_are_donated_and_constants_travel() -> None:
    given = devices()
    split = NamedSharding(mesh_of(given), P("x"))
    more = pw.put(numbers(2), sharding=split)
    for function in (
        jax.jit(lambda x: x + more, in_shardings=split, donate_argnums=0),
        jax.pmap(lambda x: x + more[1] - 1, devices=given, donate_argnums=0),
    ):
        x = pw.put(numbers(2), sharding=split)
        assert pw.program(function)(x)[0] == 0
        assert x.is_deleted()
        assert not more.is_deleted()


def test_pw_takes_meshes_and_shardings_of_jax() -> None:
    mesh = mesh_of(devices())
    split, x = NamedSharding(mesh, P("x")), numbers(4)
    for found in (
        pw.put(x, split),
        pw.jit(lambda x: x, in_shardings=split, out_shardings=split)(x),
        pw.jit(lambda x: jax.lax.with_sharding_constraint(x, split), mesh=mesh)(x),
        pw.jit(
            lambda x: jax.shard_map(lambda x: x, mesh=mesh, in_specs=P("x"), out_specs=P("x"))(x),
            mesh=mesh,
        )(x),
    ):
        assert found.sharding == pw.NamedSharding(pw.Mesh(mesh.devices, ("x",)), P("x"))
        assert found.tolist() == x.tolist()


# --- what goes wrong -------------------------------------------------------------------------------------


def test_outside_of_a_program_an_error_says_what_to_do() -> None:
    given = devices()
    split, x = NamedSharding(mesh_of(given), P("x")), numbers(4)
    double = doubled(given)
    for call in (
        lambda: double(x),
        lambda: jax.grad(lambda x: double(x).sum())(x),
        lambda: jnp.zeros(4, device=split),
        lambda: double.lower(x),
    ):
        with pytest.raises(pw.ArgumentError, match=r"in a @pw\.program. With JAX_PLATFORMS=pw"):
            call()
    assert jax.eval_shape(double, x).shape == (4,)
    assert jax.device_put(x, split).sharding == split


def test_errors_name_meshes_and_arguments() -> None:
    here, there = devices(), devices()
    split = [NamedSharding(mesh_of(given), P("x")) for given in (here, there)]
    double = jax.pmap(lambda x, y: x * y, devices=here)
    mixed = jax.pmap(lambda x: x, devices=(here[0], jax.devices()[0]))
    cases: list[tuple[Callable[..., Any], type[Exception], str]] = [
        (lambda x: double(x[:2], x), pw.ArgumentError, r"array 1 .* \(4,\), .* each of 2 devices"),
        (lambda x: double(x[:3], x), pw.ArgumentError, r"array 0 .*\.<lambda> .* \(3,\)"),
        (lambda x: mixed(x[:2]), pw.PlacementError, "made of virtual devices"),
        (
            jax.jit(lambda x: x, in_shardings=split[0], out_shardings=split[1]),
            pw.PlacementError,
            r"over several meshes: .* jax\.device_put",
        ),
    ]
    for function, kind, words in cases:
        with pytest.raises(kind, match=words):
            pw.program(function)(numbers(4))
    with pytest.raises(pw.PlacementError, match="a mesh is made of virtual devices"):
        pw.jit(lambda x: x, mesh=jax.make_mesh((1,), ("x",)))


def test_devices_of_a_closed_session(cluster: InProcessCluster) -> None:
    mine, session = current.runtime(), cluster.client()
    current.use(session)
    try:
        double = doubled(devices())
    finally:
        current.use(mine)
    session.close()
    with pytest.raises(pw.Disconnected, match="make new ones with"):
        pw.program(double)(numbers(2))


@pytest.mark.parametrize(
    "how", ["jit", "pmap", "shard_map", "device_put", "scan", "grad", "pw.jit"]
)
def test_jax_keeps_no_slice(how: str) -> None:
    def functions(given: Any) -> dict[str, Callable[..., Any]]:
        mesh = mesh_of(given)
        split, double = NamedSharding(mesh, P("x")), doubled(given)
        return {
            "jit": double,
            "pmap": jax.pmap(lambda x: x * 2, devices=given),
            "shard_map": jax.shard_map(_sum, mesh=mesh, in_specs=P("x"), out_specs=P("x")),
            "device_put": lambda x: jax.device_put(x, split),
            "scan": lambda x: jax.lax.scan(lambda c, _: (double(c), None), x, None, length=2)[0],
            "grad": jax.grad(lambda x: double(x).sum()),
            "pw.jit": lambda x: double(pw.jit(_twice, in_shardings=split)(x)),
        }

    given = devices()
    owner = weakref.ref(given[0].slice)
    program = pw.program(functions(given)[how])
    del given
    pw.get(program(numbers(2)))
    gc.collect()
    assert owner() is not None
    del program
    gc.collect()
    assert owner() is None
