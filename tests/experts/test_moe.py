"""`pw.moe` against a dense computation in plain JAX: every expert on every row, masked by the capacity rule."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pw
from pw.building.experts import routing
from pw.testing import InProcessCluster
from tests.stages.samples import diagonal
from tests.stages.stage import mesh_on

ROWS, WIDTH, EXPERTS = 32, 6, 4
draw = np.random.default_rng(0).standard_normal
X = draw((ROWS, WIDTH)).astype(np.float32)
LOGITS = draw((ROWS, EXPERTS)).astype(np.float32)
PARAMS = {
    "w": draw((EXPERTS, WIDTH, WIDTH)).astype(np.float32),
    "b": draw((EXPERTS, WIDTH)).astype(np.float32),
}
FAR = np.array([0, 0, -100, -100], np.float32)
"""Added to logits, the last two experts get no rows."""


def expert(params: Any, rows: Any) -> Any:
    return jnp.tanh(rows @ params["w"] + params["b"])


def choices(gates: Any, top_k: int, factor: float) -> tuple[Any, Any, Any]:
    """Return what GShard chooses: experts of each row, which have room for it, shares of first choices."""
    gates = np.asarray(gates)
    order = np.argsort(-gates, axis=1, kind="stable")[:, :top_k].astype(np.int32)
    room = int(np.ceil(top_k * len(gates) / EXPERTS * factor))
    taken, kept = [0] * EXPERTS, np.zeros(order.shape, np.float32)
    for number in range(top_k):
        for row, choice in enumerate(order[:, number]):
            kept[row, number] = taken[choice] < room
            taken[choice] += 1
    shares = np.bincount(order[:, 0], minlength=EXPERTS) / len(gates)
    return order, kept, shares.astype(np.float32)


@partial(jax.jit, static_argnames=("top_k", "groups", "factor"))
def dense(
    params: Any, xs: Any, logits: Any, top_k: int = 1, groups: int = 1, factor: float = 1.25
) -> Any:
    """All experts on all rows."""
    outputs, losses = [], []
    for x, scores in zip(jnp.split(xs, groups), jnp.split(logits, groups), strict=True):
        gates = jax.nn.softmax(scores)
        order, kept, shares = jax.pure_callback(
            partial(choices, top_k=top_k, factor=factor),
            (
                jax.ShapeDtypeStruct((len(x), top_k), np.int32),
                jax.ShapeDtypeStruct((len(x), top_k), np.float32),
                jax.ShapeDtypeStruct((EXPERTS,), np.float32),
            ),
            jax.lax.stop_gradient(gates),
        )
        weights = jnp.take_along_axis(gates, order, 1)
        if top_k > 1:
            weights = weights / weights.sum(1, keepdims=True)
        every = jax.vmap(expert, (0, None))(params, x)
        outputs.append(
            sum(
                (weights[:, at] * kept[:, at])[:, None] * every[order[:, at], np.arange(len(x))]
                for at in range(top_k)
            )
        )
        losses.append(EXPERTS * (shares * gates.mean(0)).sum())
    return jnp.concatenate(outputs), jnp.stack(losses).mean()


class Place:
    """Rows on one island; experts on two devices of another one, or on one device of each island."""

    def __init__(self) -> None:
        self.rows = mesh_on(0)
        self.experts = {"one slice": mesh_on(1), "islands": [mesh_on(0, 1), mesh_on(1, 1)]}
        self.square = pw.jit(lambda y, balance: (y**2).sum() + balance, mesh=self.rows)

    def put(self, *values: Any, split: bool = True) -> list[Any]:
        sharding = pw.NamedSharding(self.rows, P("x") if split else P())
        return [pw.put(value, sharding=sharding) for value in values]


@pytest.fixture(scope="module")
def place() -> Iterator[Place]:
    with InProcessCluster(islands=2, devices_per_island=2):
        yield Place()


def whole(params: Any) -> Any:
    """Return parameters of all slices as one tree of numpy arrays."""
    trees = pw.get(params if isinstance(params, list) else [params])
    return jax.tree.map(lambda *parts: np.concatenate(parts), *trees)


@pytest.mark.parametrize(
    ("factor", "top_k", "where"), diagonal([0.5, 1.25, 9.0], [1, 2], ["one slice", "islands"])
)
def test_results_are_those_of_all_experts_on_all_rows(
    place: Place, where: str, top_k: int, factor: float
) -> None:
    layer = pw.moe(expert, devices=place.experts[where], top_k=top_k, capacity_factor=factor)
    params = layer.put(PARAMS)
    for logits in (LOGITS, LOGITS + FAR):
        y, balance = layer(params, *place.put(X, logits))
        wanted, loss = dense(PARAMS, X, logits, top_k, 2, factor)
        np.testing.assert_allclose(y, wanted, atol=1e-5)
        np.testing.assert_allclose(balance, loss, rtol=1e-6)
        assert y.sharding == pw.NamedSharding(place.rows, P("x"))


@pytest.mark.parametrize(("where", "top_k"), diagonal(["one slice", "islands"], [2, 1]))
def test_gradients_are_those_of_all_experts_on_all_rows(
    place: Place, where: str, top_k: int
) -> None:
    layer = pw.moe(expert, devices=place.experts[where], top_k=top_k)
    params = layer.put(PARAMS)

    def loss(params: Any, x: Any, logits: Any) -> Any:
        return place.square(*layer(params, x, logits))

    def wanted_loss(params: Any, x: Any, logits: Any) -> Any:
        y, balance = dense(params, x, logits, top_k)
        return (y**2).sum() + balance

    ours, theirs = (
        pw.value_and_grad(loss, (0, 1, 2)),
        jax.jit(jax.value_and_grad(wanted_loss, (0, 1, 2))),
    )
    for logits in (LOGITS, LOGITS + FAR):  # with FAR, a slice is skipped
        value, (by_params, *others) = ours(params, *place.put(X, logits, split=False))
        got = pw.get(value), (whole(by_params), *pw.get(others))
        wanted = theirs(PARAMS, X, logits)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), got, wanted)


def test_rows_of_a_full_expert_are_dropped_in_their_order(place: Place) -> None:
    layer = pw.moe(expert, devices=place.experts["islands"], capacity_factor=1.0)
    logits = np.where(np.arange(EXPERTS) == 1, 9.0, 0.0) + np.zeros((ROWS, 1))
    y, balance = layer(layer.put(PARAMS), *place.put(X, logits.astype(np.float32), split=False))
    is_zero = (np.asarray(y) == 0).all(1)
    np.testing.assert_array_equal(is_zero, np.arange(ROWS) >= ROWS // EXPERTS)
    np.testing.assert_allclose(balance, EXPERTS, rtol=1e-2)  # one expert has everything


def test_first_choices_come_before_second_ones() -> None:
    logits = np.array([[1, 2, -9], [1, 2, -9], [2, 1, -9], [2, 1, -9]], np.float32)
    found = routing.assign(logits, top_k=2, capacity=3)
    # each expert has two first choices and then the first of the two second ones
    np.testing.assert_array_equal(found.counts, [3, 3, 0])
    np.testing.assert_array_equal(found.slots, [[3, 2], [4, 9], [0, 5], [1, 9]])
    assert routing.capacity_of(4, 3, 2, 1.0) == 3


def test_results_of_another_width_and_type(place: Place) -> None:
    """Also where a slice is skipped: its results do not exist then."""

    def wide(params: Any, rows: Any) -> Any:
        return jnp.concatenate([rows, rows @ params], 1).astype(jnp.bfloat16)

    layer = pw.moe(wide, devices=place.experts["islands"], capacity_factor=9.0)
    y, _ = layer(layer.put(PARAMS["w"]), *place.put(X, LOGITS + FAR))
    gates = jax.nn.softmax(LOGITS + FAR)
    chosen = np.argmax(gates, 1)
    full = np.stack(
        [
            np.concatenate([x, x @ PARAMS["w"][at]]).astype(jnp.bfloat16)
            for x, at in zip(X, chosen, strict=True)
        ]
    ).astype(np.float32)
    assert (y.dtype, y.shape) == (jnp.bfloat16, (ROWS, 2 * WIDTH))
    np.testing.assert_allclose(
        np.asarray(y, np.float32), full * np.max(gates, 1)[:, None], rtol=0.03, atol=0.03
    )


def test_a_layer_in_a_program_with_its_router(place: Place) -> None:
    """Host values, two layers that share nothing, and steps in flight together."""
    layer = pw.moe(expert, devices=place.experts["islands"])
    router = pw.jit(lambda w, x: x @ w, mesh=place.rows, in_shardings=(None, P("x")))
    add = pw.jit(lambda x, y: x + y, mesh=place.rows, out_shardings=P("x"))
    gate = draw((WIDTH, EXPERTS)).astype(np.float32)

    @pw.program
    def twice(first: Any, second: Any, x: Any) -> Any:
        for params in (first, second):
            y, _ = layer(params, x, router(gate, x))
            x = add(x, y)
        return x

    trees = PARAMS, jax.tree.map(lambda leaf: -leaf, PARAMS)
    given = [layer.put(tree) for tree in trees]
    results = [twice(*given, X * scale) for scale in (1, 2, 3)]
    for scale, result in zip((1, 2, 3), results, strict=True):
        x = X * scale
        for tree in trees:
            x = x + dense(tree, x, x @ gate, groups=2)[0]
        np.testing.assert_allclose(result, x, atol=1e-4)


def test_bad_input_is_refused_before_anything_is_launched(place: Place) -> None:
    devices = place.experts["islands"]
    for options, words in (
        ({"capacity_factor": 0}, "capacity_factor"),
        ({"capacity_factor": float("nan")}, "capacity_factor"),
        ({"capacity_factor": "1"}, "capacity_factor is a positive number, not '1'"),
        ({"top_k": 0}, "top_k"),
        ({"top_k": 1.5}, "top_k"),
        ({"devices": []}, "at least one"),
    ):
        with pytest.raises(pw.ArgumentError, match=words):
            pw.moe(expert, **{"devices": devices} | options)  # type: ignore[arg-type]
    layer = pw.moe(expert, devices=devices)
    params = layer.put(PARAMS)
    pw.moe(expert, devices=devices, top_k=np.int64(2))(params, X, LOGITS)  # type: ignore[arg-type]
    with pytest.raises(pw.ShardingError, match="3 experts do not divide over 2 devices"):
        layer.put(jax.tree.map(lambda leaf: leaf[:3], PARAMS))
    for arguments, words in (
        ((params, X, LOGITS[:, :3]), r"logits \(32, 3\)"),
        ((params, X[0], LOGITS), r"x \(6,\)"),
        ((params[0], X, LOGITS), "a tree for each, and not a dict; its method put makes them"),
        ((params, X[:0], LOGITS[:0]), "with a row or more"),
        (([{"w": X[:2]}, {"w": X[:4]}], X, LOGITS), "equally many"),
        (([{"w": np.float32(0)}] * 2, X, LOGITS), "leading axis"),
    ):
        with pytest.raises(pw.ArgumentError, match=words):
            layer(*arguments)
    with pytest.raises(pw.ArgumentError, match="top_k=5, but there are 4 experts"):
        pw.moe(expert, devices=devices, top_k=5)(params, X, LOGITS)
    with pytest.raises(pw.ArgumentError, match="one row for each"):
        pw.moe(lambda params, rows: rows.sum(0), devices=devices)(params, X, LOGITS)
    with pytest.raises(pw.ArgumentError, match="in a function that JAX traces"):
        pw.jit(layer, mesh=place.rows)(PARAMS, X, LOGITS)
    crossing = pw.Mesh(
        np.array(pw.make_virtual_device_set().add_slice(2, islands=2).devices), ("x",)
    )
    with pytest.raises(pw.ShardingError, match="several islands"):
        pw.moe(expert, devices=crossing)


@pytest.mark.parametrize(
    "spec", [pytest.param(P("island"), marks=pytest.mark.long), P(("data", "island"))]
)
def test_rows_may_lie_on_several_islands(place: Place, spec: P) -> None:
    devices = pw.make_virtual_device_set().add_slice(4, islands=2).devices
    mesh = pw.Mesh(np.reshape(devices, (2, 2)), ("island", "data"))
    groups = 4 if "data" in spec[0] else 2
    rows = pw.NamedSharding(mesh, spec)
    layer = pw.moe(expert, devices=place.experts["islands"], top_k=2)
    params = layer.put(PARAMS)
    square = pw.jit(lambda y: (y**2).sum(), mesh=mesh, in_shardings=spec, out_shardings=P())
    router = pw.jit(
        lambda x: jnp.sin(x[:, :EXPERTS]), mesh=mesh, in_shardings=spec, out_shardings=spec
    )

    def loss(params: Any, x: Any) -> Any:
        y, balance = layer(params, x, router(x))
        return square(y) + balance

    def wanted_loss(params: Any, x: Any) -> Any:
        y, balance = dense(params, x, jnp.sin(x[:, :EXPERTS]), 2, groups)
        return (y**2).sum() + balance

    wanted = jax.jit(jax.value_and_grad(wanted_loss, (0, 1)))(PARAMS, X)
    value, (by_params, by_x) = pw.value_and_grad(loss, (0, 1))(params, pw.put(X, sharding=rows))
    got = pw.get(value), (whole(by_params), pw.get(by_x))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=3e-5), got, wanted)
    y, balance = layer(params, pw.put(X, sharding=rows), LOGITS)
    assert y.sharding == rows
    wanted_y, wanted_balance = dense(PARAMS, X, LOGITS, 2, groups)
    np.testing.assert_allclose(y, wanted_y, atol=1e-5)
    np.testing.assert_allclose(balance, wanted_balance, rtol=1e-6)
    with pytest.raises(pw.ShardingError, match="not split over them; split"):
        layer(params, pw.put(X, sharding=pw.NamedSharding(mesh, P("data"))), LOGITS)


@pytest.mark.parametrize("is_alone", [False, True])
def test_experts_in_a_loop(place: Place, is_alone: bool) -> None:
    """The layer asks how the carry lies, and it lies as the loop leaves it."""
    layer = pw.moe(expert, devices=place.experts["one slice"])
    params = layer.put(PARAMS)
    score = pw.jit(lambda x: x @ PARAMS["w"][0, :, :EXPERTS], mesh=place.rows)

    def body(carry: Any) -> Any:
        at, x = carry
        return at + 1, layer(params, x, score(x))[0]

    def loop(x: Any) -> Any:
        return pw.while_loop(lambda carry: carry[0] < 2, body, (0, x), max_iterations=3)[1]

    wanted = X
    for _ in range(2):
        wanted, _ = dense(PARAMS, wanted, wanted @ PARAMS["w"][0, :, :EXPERTS], 1, 2)
    (x,) = place.put(X)
    found = (loop if is_alone else pw.program(loop))(x)
    np.testing.assert_allclose(found, wanted, atol=1e-5)
    assert found.sharding == pw.NamedSharding(place.rows, P("x"))


def test_rows_and_their_cotangents_go_there_and_back_once(place: Place) -> None:
    layer = pw.moe(expert, devices=place.experts["islands"])
    params = layer.put(PARAMS)

    def loss(params: Any, x: Any, logits: Any) -> Any:
        return place.square(*layer(params, x, logits))

    program = pw.program(lambda *args: pw.grad(loss, (0, 1, 2))(*args))
    text = program.lower(params, *place.put(X, LOGITS)).as_text()
    moved = re.findall(r"(\S+ as float32\[\d+,\d+,\d+,\d+\][^,%]* on slice\d)(, of which)?", text)
    # Two slices; rows, results, and cotangents of both. The backward half takes the rows that have come.
    assert len({edge for edge, _ in moved}) == 2 * 4, text
    assert all(counts for _, counts in moved), text
