"""Shardings of results without out_shardings: those that `jax.jit` gives them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pw.client.arrays.array import Array
from pw.client.arrays.devices import make_virtual_device_set
from pw.client.computations import export
from pw.client.computations.stablehlo import artifact_of
from pw.client.functions.jit import jit
from pw.client.functions.program import program
from pw.client.functions.transfer import put
from tests.stages.local_runtime import LocalRuntime

AXES = ("x", "y")
VALUE = np.arange(128, dtype=np.float32).reshape(16, 8) / 64


@pytest.fixture(autouse=True)
def rt(monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalRuntime]:
    """A runtime that is not told how results are divided: it compares what XLA chooses."""
    monkeypatch.setattr(
        export, "artifact_of", lambda module, donated, _: artifact_of(module, donated, ())
    )
    with LocalRuntime.in_use() as local:
        yield local


@pytest.fixture
def mesh() -> Mesh:
    part = make_virtual_device_set().add_slice(devices=4)
    return Mesh(np.array(part.devices).reshape(2, 2), AXES)


def keys_of(x: Any) -> Any:
    """A typed key for each row."""
    return jax.vmap(jax.random.key)((x[:, 0] * 64).astype(jnp.int32))


FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "elementwise": lambda x: jnp.tanh(x) * 2 + 1,
    "itself": lambda x: x,
    "transposed": lambda x: x.T,
    "sum of rows": lambda x: x.sum(1),
    "sum of columns": lambda x: x.sum(0),
    "sum of all": lambda x: {"loss": x.mean()},
    "columns": lambda x: x[:, :4],
    "columns that do not divide": lambda x: x[:, :3],
    "a row": lambda x: x[3],
    "nothing": lambda x: x[16:],
    "new axis": lambda x: x[None],
    "reshaped": lambda x: x.reshape(4, 4, 8),
    "a part of an axis": lambda x: x.reshape(-1, 2, 2),
    "product": lambda x: x @ x.T,
    "outer": lambda x: jnp.outer(x[:, 0], x[0]),
    "softmax": jax.nn.softmax,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "scan": lambda x: jax.lax.scan(lambda total, row: (total + row, row * 2), x[0], x),
    "while": lambda x: jax.lax.while_loop(lambda c: c.sum() < 0, lambda c: c + 1, x),
    "cond": lambda x: jax.lax.cond(x.sum() < 0, lambda c: c + 1, lambda c: c * 2, x),
    "gradient": jax.grad(lambda x: (jax.nn.relu(x) @ x.T).sum()),
    "vmap": jax.vmap(lambda row: row @ row),
    "inner jit": lambda x: jax.jit(lambda row: row * 2)(x),
    "remat": jax.checkpoint(lambda x: jnp.sin(x) * 2),
    "sorted": lambda x: jnp.sort(x, 0),
    "cumulative": lambda x: jnp.cumsum(x, 0),
    "twice": lambda x: jnp.concatenate([x, x]),
    "looked up": lambda x: x[jnp.array([3, 1])],
    "made inside": jnp.zeros_like,
    "keys": keys_of,
    "random": lambda x: jax.vmap(jax.random.normal)(keys_of(x)),
    "constrained": lambda x: jax.lax.with_sharding_constraint(jnp.ones(8) * x.sum(), P("y")),
    "convolved": lambda x: jax.lax.conv(x[:, None], jnp.ones((1, 1, 3)), (1,), "SAME"),
    "by shard": lambda x: jax.shard_map(
        lambda block: jax.lax.psum(block, "x"), in_specs=P("x", "y"), out_specs=P(None, "y")
    )(x),
}


@pytest.mark.parametrize("what", FUNCTIONS)
def test_results_lie_where_the_compiler_leaves_them(what: str, mesh: Mesh) -> None:
    """The artifact does not say where: the compiler chooses, and this runtime compares with what we foresaw."""
    function = jit(FUNCTIONS[what])
    for spec in (P("x", "y"), P(("x", "y")) if what == "elementwise" else P("x")):
        results = jax.tree.leaves(function(put(VALUE, sharding=NamedSharding(mesh, spec))))
        assert all(result.sharding.mesh == mesh for result in results)


def test_they_are_those_of_plain_jax(mesh: Mesh) -> None:
    """But for those that depend on no argument, which JAX replicates if others depend on one."""
    local = jax.sharding.Mesh(np.array(jax.devices("cpu")[:4]).reshape(2, 2), AXES)
    known = [function for what, function in FUNCTIONS.items() if what != "made inside"]
    everything = lambda x: [function(x) for function in known]  # noqa: E731
    ours = jax.tree.leaves(jit(everything)(put(VALUE, sharding=NamedSharding(mesh, P("x", "y")))))
    with jax.set_mesh(local):
        split = jax.sharding.NamedSharding(local, P("x", "y"))
        jaxs = jax.tree.leaves(jax.jit(everything)(jax.device_put(VALUE, split)))
    for found, wanted in zip(ours, jaxs, strict=True):
        lies = jax.sharding.NamedSharding(local, found.sharding.spec)
        assert lies.is_equivalent_to(wanted.sharding, wanted.ndim)


USES: list[tuple[Callable[[Any], Any], P]] = [
    (lambda x: x.T, P(None, "x")),
    (lambda x: x.sum(1), P("x")),
    (lambda x: x[:, :2], P("x")),
    (lambda x: x * 2 + x, P("x")),
    (lambda x: x.reshape(4, 4, 8), P("x")),
    (lambda x: x.astype(np.int32), P("x")),
    (lambda x: x @ np.ones((8, 3), np.float32), P("x")),
    (lambda x: x.sum(), P()),
]


@pytest.mark.parametrize(("use", "spec"), USES)
def test_methods_and_operators_leave_arrays_split(
    use: Callable[[Any], Any], spec: P, mesh: Mesh
) -> None:
    x = put(VALUE, sharding=NamedSharding(mesh, P("x")))
    for found in (use(x), program(use)(x)):
        assert isinstance(found, Array)
        assert found.sharding == NamedSharding(mesh, spec)
        np.testing.assert_allclose(np.asarray(found), use(VALUE), rtol=1e-6)


def test_what_is_asked_for_goes_before(mesh: Mesh) -> None:
    x = put(VALUE, sharding=NamedSharding(mesh, P("x")))
    whole, split = jit(lambda x: (x * 2, x * 2), out_shardings=(P(), None))(x)
    assert (whole.sharding.spec, split.sharding.spec) == (P(), P("x"))
    checked = jit(lambda x: x * 2, check_nans=True)(x)
    assert checked.sharding.spec == P("x")


def zeros(tree: Any) -> Any:
    return jax.tree.map(jnp.zeros_like, tree)


ZEROS: dict[str, tuple[Callable[[Any], Any], list[P]]] = {
    "all": (zeros, [P("x"), P(None, "x"), P("x"), P(("x", "y"))]),
    "further inside": (lambda t: {"mu": (zeros(t["a"]),)}, [P("x"), P(None, "x")]),
    "compiled": (lambda t: jax.jit(zeros)(t["a"]), [P("x"), P(None, "x")]),
    "compiled with others": (
        lambda t: jax.jit(lambda t: (t["a"]["w"].sum(1), {"v": zeros(t["a"]["v"])}))(t),
        [P(), P("x")],
    ),
    "another dtype": (lambda t: {"v": jnp.zeros((8, 4), int)}, [P("x")]),
    "like arguments that lie apart": (lambda t: {"u": jnp.zeros((8, 4))}, [P()]),
    "the only one of its shape": (lambda t: jnp.ones((16,), jnp.bfloat16), [P(("x", "y"))]),
    "of a value": (lambda t: {"v": t["b"]["v"][0] + jnp.zeros((8, 4))}, [P()]),
    "another shape": (lambda t: {"v": jnp.zeros((4, 8)), "step": 0}, [P(), P()]),
    "keys": (lambda t: jax.random.split(jax.random.key(0), 16), [P(("x", "y"))]),
    "nothing": (lambda t: jnp.zeros((0, 8)), [P()]),
}


@pytest.mark.parametrize("what", ZEROS)
def test_results_without_values_of_arguments_lie_like_the_arguments(what: str, mesh: Mesh) -> None:
    """Like the one with the same shape and the same end of its path, if these lie alike."""
    function, specs = ZEROS[what]
    value = np.ones((8, 4), np.float32)
    lies = {"a": {"v": P("x"), "w": P(None, "x")}, "b": {"v": P("x")}, "c": P(("x", "y"))}
    tree = {"a": {"v": value, "w": value}, "b": {"v": value}, "c": np.ones(16, np.float32)}
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), lies)
    results = jax.tree.leaves(jit(function)(put(tree, sharding=shardings)))
    assert [result.sharding for result in results] == [NamedSharding(mesh, spec) for spec in specs]


def test_the_state_of_an_optimizer_is_split_like_its_parameters(mesh: Mesh) -> None:
    params = put({"w": VALUE, "b": VALUE[0]}, sharding=NamedSharding(mesh, P(("x", "y"))))
    tx = optax.adamw(1e-2)

    def train(params: Any, state: Any) -> Any:
        grads = jax.grad(lambda p: ((VALUE @ p["w"].T + p["b"].sum()) ** 2).mean())(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    state = jit(tx.init)(params)
    step = jit(train, donate_argnums=(0, 1))
    after = step.lower(params, state).out_info
    moments = [state[0].mu, state[0].nu, *(after[1][0].mu, after[1][0].nu)]
    for tree in moments:
        assert jax.tree.map(lambda x: x.sharding, tree) == jax.tree.map(
            lambda x: x.sharding, params
        )
    assert state[0].count.sharding == after[1][0].count.sharding == NamedSharding(mesh, P())


def test_state_that_is_replicated_stays_so(mesh: Mesh) -> None:
    """A training step: what goes round need not be asked for again."""

    def step(w: Any, batch: Any) -> tuple[Any, Any]:
        loss, grad = jax.value_and_grad(lambda w: jnp.mean((batch @ w) ** 2))(w)
        return w - 0.1 * grad, loss

    run = jit(step, mesh=mesh, in_shardings=(None, P(("x", "y"))))
    w = np.ones((8, 4), np.float32)
    for _ in range(2):
        w, loss = run(w, VALUE)
    assert w.sharding == loss.sharding == NamedSharding(mesh, P())
