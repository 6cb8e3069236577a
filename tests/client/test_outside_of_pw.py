"""JAX applied to pw arrays and pw functions outside of `pw.jit`: nothing moves without a word.

What computes raises, and names a replacement; here each replacement is followed. What only asks for shapes
works. Numpy is asked for values, and gives them.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import pw
from pw.client.connection import current
from tests.stages.inside import traced_of
from tests.stages.local_runtime import LocalRuntime

VALUE = np.arange(6, dtype=np.float32).reshape(2, 3)
IN_CLUSTER = r"is in the cluster, .* pw\.jit\(f, mesh=mesh\) computes there"
LIES = r"lies on virtual devices.* Wrap the function in pw\.jit, or take the value with np\.asarray\(x\)"


class Counting(LocalRuntime):
    """Counts what is brought here."""

    fetches = 0

    def fetch(self, *args: Any) -> Any:
        self.fetches += 1
        return super().fetch(*args)


@pytest.fixture(autouse=True)
def rt() -> Iterator[Counting]:
    local = Counting()
    current.use(local)
    yield local
    local.close()
    current.use(None)


@pytest.fixture
def x() -> pw.Array:
    put: pw.Array = pw.put(VALUE)
    return put


@pytest.fixture
def key() -> pw.Array:
    made: pw.Array = pw.jit(lambda: jax.random.key(3))()
    return made


tx = optax.adam(1e-2)

FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "stack": lambda x: jnp.stack([x, x]),
    "concatenate": lambda x: jnp.concatenate([x, x]),
    "einsum": lambda x: jnp.einsum("ij->i", x),
    "zeros_like": jnp.zeros_like,
    "full_like": lambda x: jnp.full_like(x, 2),
    "apply_updates": lambda x: optax.apply_updates({"w": x}, {"w": x}),
    "init": lambda x: tx.init({"w": x}),
    "init, compiled": lambda x: jax.jit(tx.init)({"w": x}),
    "imag": jnp.imag,
    "update": lambda x: tx.update({"w": x}, tx.init({"w": np.zeros((2, 3))})),
    "global_norm": lambda x: optax.global_norm({"w": x}),
    "sum": jnp.sum,
    "dot": lambda x: jnp.dot(x, x.T),
    "where": lambda x: jnp.where(x > 1, x, 0),
    "softmax": jax.nn.softmax,
    "one_hot": lambda x: jax.nn.one_hot(x[0], 3),
    "logsumexp": jax.scipy.special.logsumexp,
    "norm": jnp.linalg.norm,
    "fft": jnp.fft.fft,
    "lax.add": lambda x: jax.lax.add(x, x),
    "asarray": jnp.asarray,
    "array": jnp.array,
    "device_put": jax.device_put,
    "jit": lambda x: jax.jit(lambda v: v * 2)(x),
    "jit that closes over it": lambda x: jax.jit(lambda v: v * x)(1.0),
    "grad": lambda x: jax.grad(lambda v: (v * 2).sum())(x),
    "grad that closes over it": lambda x: jax.grad(lambda v: (v * jnp.sin(x)).sum())(1.0),
    "vmap": lambda x: jax.vmap(lambda v: v * 2)(x),
    "scan": lambda x: jax.lax.scan(lambda c, row: (c + row, c), x[0], x),
    "cond": lambda x: jax.lax.cond(x[0, 0] > 0, lambda: 1, lambda: 2),
    "fori_loop": lambda x: jax.lax.fori_loop(0, 3, lambda i, c: c + 1, x),
    "ravel_pytree": lambda x: jax.flatten_util.ravel_pytree([x, x]),
    "debug.print": lambda x: jax.debug.print("{}", x),
    "uniform": lambda x: jax.random.uniform(jax.random.key(0), minval=x),
}

OPERATORS: dict[str, Callable[[Any], Any]] = {
    "multiply in a gradient": lambda x: jax.grad(lambda v: (v * x).sum())(1.0),
    "add in vmap": lambda x: jax.vmap(lambda v: v + x)(np.ones(3)),
}


@pytest.mark.parametrize("what", FUNCTIONS)
def test_functions_of_jax_raise(what: str, rt: Counting, x: pw.Array) -> None:
    with pytest.raises(pw.ArgumentError, match=f"{LIES}|{IN_CLUSTER}"):
        FUNCTIONS[what](x)
    assert rt.fetches == 0


@pytest.mark.parametrize("what", OPERATORS)
def test_operators_raise_in_functions_that_jax_transforms(what: str, x: pw.Array) -> None:
    with pytest.raises(pw.Error, match=r"outside of pw\.jit.* np\.asarray\(x\)"):
        OPERATORS[what](x)


def test_the_ways_out(x: pw.Array) -> None:
    """Those that the errors name."""
    for function in (jnp.sum, jax.nn.softmax, lambda v: jnp.stack([v, v])):
        wanted = function(jnp.asarray(VALUE))
        np.testing.assert_allclose(np.asarray(pw.jit(function)(x)), wanted, rtol=1e-6)
        np.testing.assert_allclose(function(np.asarray(x)), wanted, rtol=1e-6)
        np.testing.assert_allclose(function(pw.get(x)), wanted, rtol=1e-6)
    state = pw.jit(tx.init)({"w": x})
    updates, state = pw.jit(tx.update)({"w": x}, state)
    params = pw.jit(optax.apply_updates)({"w": x}, updates)
    assert params["w"].shape == (2, 3)
    grad = pw.jit(jax.grad(lambda v: (v * x).sum()))(1.0)
    assert float(grad) == VALUE.sum()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.long
def test_no_function_of_jax_numpy_computes_here(rt: Counting, x: pw.Array) -> None:
    """Whatever there is, called in the simplest ways: it raises, or tells what is known without a value."""
    quiet = set()
    for module in (jnp, jax.nn):
        for name, function in vars(module).items():
            if name.startswith("_") or not callable(function) or inspect.isclass(function):
                continue
            for args in ((x,), (x, x), ([x, x],), (x, 0)):
                fetches = rt.fetches
                try:
                    result = function(*args)
                except Exception:  # noqa: BLE001 - of the function, for its arguments, or ours
                    continue
                local = any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(result))
                if local or rt.fetches > fetches:
                    quiet.add(name)
    # Text is asked for as by print(); the others ask for the shape.
    assert quiet == {"array_repr", "array_str", "tril_indices_from", "triu_indices_from"}


def test_what_was_compiled_for_other_values_is_not_used(x: pw.Array) -> None:
    for function in (jax.jit(lambda v: v + 1), jax.jit(jnp.zeros_like), jnp.sin):
        function(VALUE)
        with pytest.raises(pw.ArgumentError, match=LIES):
            function(x)


def test_shapes_are_known(x: pw.Array) -> None:
    f = pw.jit(lambda params: {"y": params["w"] @ params["w"].T})
    for function in (f, f.__wrapped__, jax.grad(lambda p: f(p)["y"].sum())):
        shapes = jax.eval_shape(function, {"w": x})
        assert {leaf.shape for leaf in jax.tree.leaves(shapes)} <= {(2, 2), (2, 3)}
    assert jax.eval_shape(f, {"w": jax.ShapeDtypeStruct((5, 3), np.float32)})["y"].shape == (5, 5)
    assert (jnp.shape(x), jnp.ndim(x), jnp.size(x)) == ((2, 3), 2, 6)
    assert jnp.result_type(x, np.int32) == np.float32
    assert jax.typeof(x).str_short() == "float32[2,3]"
    assert jax.tree.map(jnp.shape, {"a": x}) == {"a": (2, 3)}


def test_what_asks_for_values_gets_them(x: pw.Array) -> None:
    assert jax.device_get({"x": x})["x"].tolist() == VALUE.tolist()
    assert jax.block_until_ready(x) is x
    np.testing.assert_array_equal(np.stack([x, x]), [VALUE, VALUE])
    np.testing.assert_array_equal(np.array(x), VALUE)
    assert float(x[1, 2]) == 5


def test_arrays_of_jax_are_operands(x: pw.Array) -> None:
    local = jnp.ones(3)
    for found, wanted in [
        (x + local, VALUE + 1),
        (local + x, VALUE + 1),
        (local / (x + 1), 1 / (VALUE + 1)),
        (local > x, VALUE < 1),
        (jnp.ones((2, 2)) @ x, np.ones((2, 2)) @ VALUE),
    ]:
        assert isinstance(found, pw.Array)
        np.testing.assert_allclose(np.asarray(found), wanted, rtol=1e-6)


def test_keys(rt: Counting, key: pw.Array) -> None:
    for function in (jax.random.split, jax.random.normal, jax.random.key_data):
        with pytest.raises(pw.ArgumentError, match=LIES):
            function(key)
        assert pw.jit(function)(key) is not None
    assert rt.fetches == 0
    wanted = jax.random.normal(jax.random.split(jax.random.key(3))[1])
    first, second = pw.jit(jax.random.split)(key)
    assert float(pw.jit(jax.random.normal)(second)) == pytest.approx(float(wanted))
    assert float(jax.random.normal(jax.random.split(pw.get(key))[1])) == pytest.approx(
        float(wanted)
    )
    with pytest.raises(pw.ArgumentError, match=r"arguments of the pw\.jit function"):
        pw.jit(lambda: jax.random.normal(first))()


# --- pw functions ---------------------------------------------------------------------------------------


@pw.jit
def loss(w: Any) -> Any:
    return jnp.sum(w**2)


@pw.jit
def step(carry: Any, row: Any) -> Any:
    return carry + row, carry


TRANSFORMED: dict[str, tuple[Callable[[], Any], str, Any]] = {
    "grad": (lambda: jax.grad(loss)(VALUE), "pw.jit(jax.grad(loss))", 2 * VALUE),
    "vmap": (lambda: jax.vmap(loss)(VALUE), "pw.jit(jax.vmap(loss))", (VALUE**2).sum(1)),
    "jit": (lambda: jax.jit(loss)(VALUE), "pw.jit(jax.grad(loss))", 2 * VALUE),
    "value_and_grad": (
        lambda: jax.value_and_grad(loss)(VALUE),
        "pw.jit(jax.grad(loss))",
        2 * VALUE,
    ),
    "jit of grad": (lambda: jax.jit(jax.grad(loss))(VALUE), "pw.jit(jax.grad(loss))", 2 * VALUE),
}


@pytest.mark.parametrize("what", TRANSFORMED)
def test_functions_are_transformed_inside(what: str, rt: Counting) -> None:
    wrong, said, wanted = TRANSFORMED[what]
    with pytest.raises(pw.TracingError, match=re.escape(said)):
        wrong()
    assert not rt.runs
    right = eval(said, {"pw": pw, "jax": jax, "loss": loss})
    np.testing.assert_allclose(np.asarray(right(VALUE)), wanted, rtol=1e-6)


def test_loops_are_inside(x: pw.Array) -> None:
    said = r"pw.jit(lambda carry, xs: jax.lax.scan(step, carry, xs))"
    right = eval(said, {"pw": pw, "jax": jax, "step": step})
    with pytest.raises(pw.TracingError, match=re.escape(said)):
        jax.lax.scan(step, VALUE[0], VALUE)
    for rows in (VALUE, x):
        assert right(rows[0] * 0, rows)[0].tolist() == VALUE.sum(0).tolist()

    @pw.program
    def scanned(x: Any) -> Any:
        return jax.lax.scan(step, x[0] * 0, x)

    assert scanned(x)[0].tolist() == VALUE.sum(0).tolist()
    total, _ = pw.program(lambda x: right(x[0] * 0, x))(x)
    assert total.tolist() == VALUE.sum(0).tolist()


def test_gradients_in_programs(x: pw.Array) -> None:
    both = pw.jit(jax.value_and_grad(loss))
    for function in (
        jax.value_and_grad(loss),
        jax.value_and_grad(lambda w: jnp.sum(w**2)),
        lambda w: both(w),
    ):
        value, grad = pw.program(function)(x)
        assert (float(value), grad.tolist()) == ((VALUE**2).sum(), (2 * VALUE).tolist())


def test_gradients_of_functions_that_call_pw_functions(x: pw.Array) -> None:
    def model(w: Any) -> Any:
        carry, _ = jax.lax.scan(step, w[0], w)
        return loss(w) + carry.sum()

    grad = pw.jit(jax.grad(model))(x)
    wanted = jax.grad(lambda w: jnp.sum(w**2) + w[0].sum() + w.sum())(VALUE)
    np.testing.assert_allclose(np.asarray(grad), wanted, rtol=1e-6)


def test_what_was_traced_inside_is_not_used_outside(rt: Counting) -> None:
    """JAX keeps traces of inner functions; those for the hosts are not those for this process."""
    inner = jax.jit(lambda w: loss(w) + 1)
    assert jax.eval_shape(inner, VALUE).shape == ()
    assert float(pw.jit(inner)(VALUE)) == (VALUE**2).sum() + 1
    with pytest.raises(pw.TracingError, match=r"pw\.jit"):
        inner(VALUE)


# --- meshes and shardings -------------------------------------------------------------------------------


@pytest.fixture
def mesh() -> pw.Mesh:
    return pw.Mesh(pw.make_virtual_device_set().add_slice(devices=4).devices, ("x",))


def test_shardings_of_pw_are_those_of_jax_where_functions_are_traced(mesh: pw.Mesh) -> None:
    split, whole = pw.NamedSharding(mesh, P("x")), pw.NamedSharding(mesh, P())
    v = pw.put(np.arange(8.0, dtype=np.float32), sharding=whole)
    for function in (
        lambda v: jax.lax.with_sharding_constraint(v * 2, split),
        lambda v: jax.lax.with_sharding_constraint({"v": v * 2}, split)["v"],
        lambda v: jax.jit(lambda v: v * 2, out_shardings=split)(v),
        lambda v: jax.lax.scan(
            lambda c, _: (jax.lax.with_sharding_constraint(c + v, split), None), v, None, length=1
        )[0],
    ):
        found = pw.jit(function)(v)
        assert found.sharding == split
        assert found.tolist() == [0, 2, 4, 6, 8, 10, 12, 14]
    described = jax.ShapeDtypeStruct((8,), np.float32, sharding=split)
    assert jax.eval_shape(lambda v: v.sum(), described).shape == ()


def test_meshes_of_pw_say_where_they_go(mesh: pw.Mesh) -> None:
    """Each error names what to write instead, which is then written."""
    spec, v = P("x"), np.arange(8.0, dtype=np.float32)
    sharding = pw.NamedSharding(mesh, spec)

    def double(block: Any) -> Any:
        return block * 2

    def mapped(**how: Any) -> Any:
        shards = jax.shard_map(double, in_specs=spec, out_specs=spec, **how)
        return pw.jit(shards, mesh=mesh)(v).tolist()

    assert mapped() == mapped(mesh=mesh) == mapped(mesh=mesh.abstract_mesh) == (2 * v).tolist()
    assert pw.jit(double, mesh=mesh)(v).sharding.mesh is mesh
    for sends in (
        lambda: jax.make_array_from_callback(v.shape, sharding, v.__getitem__),
        lambda: jax.jit(double, out_shardings=sharding)(v),
        lambda: jax.lax.with_sharding_constraint(v, sharding),
    ):
        with pytest.raises(pw.ArgumentError, match=r"pw\.put\(x, sharding=sharding\)"):
            sends()
    assert pw.put(v, sharding=sharding).sharding == jax.device_put(v, sharding).sharding == sharding


def test_code_does_not_say_where_in_a_script_it_was_called() -> None:
    """So the hosts find its executable again, also when other lines of the script change."""
    source = "double = pw.jit(lambda x: x * 2); double.lower(1.5)"
    first: dict[str, Any] = {"pw": pw}
    second: dict[str, Any] = {"pw": pw}
    exec(source, first)
    exec(f"\n\n{source}", second)
    assert traced_of(first["double"]).artifact == traced_of(second["double"]).artifact


def test_what_a_function_is_lowered_to(mesh: pw.Mesh, rt: Counting) -> None:
    f = pw.jit(lambda v, n: {"sum": v.sum(0), "same": v * n}, mesh=mesh, static_argnums=1)
    v = pw.put(VALUE.T[:2], sharding=pw.NamedSharding(mesh, P(None)))
    split = jax.ShapeDtypeStruct((8, 2), np.float32, sharding=pw.NamedSharding(mesh, P("x")))
    runs = len(rt.runs)
    lowered = f.lower(split, 3)
    assert "stablehlo.multiply" in lowered.as_text()
    assert lowered.out_info["same"].shape == (8, 2)
    assert lowered.out_info["same"].sharding == split.sharding
    assert f.lower(jax.ShapeDtypeStruct((2, 2), np.int32), 3).out_info["sum"].dtype == np.int32
    assert len(rt.runs) == runs
    with pytest.raises(pw.TracingError, match="call the function itself"):
        f.lower(v, 3).compile()
    assert f(v, 3)["same"].tolist() == (3 * VALUE.T[:2]).tolist()
    doubled = pw.pmap(lambda x: x * 2, devices=mesh.devices.flat)
    assert "manual_computation" in doubled.lower(np.ones((4, 2))).as_text()
    python = pw.host_function(np.sin, jax.ShapeDtypeStruct((2,), np.float32), devices=mesh.devices)
    with pytest.raises(pw.TracingError, match="runs as Python"):
        python.lower(np.ones(2, np.float32)).as_text()  # type: ignore[attr-defined]
