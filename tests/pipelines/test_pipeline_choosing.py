"""Models without marks: `pw.pipeline(loss, stages=...)` chooses where they are cut."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import combinations, pairwise
from typing import Any

import equinox as eqx
import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import pallas as pl

import pw
from pw.building.pipelines import costs
from pw.building.pipelines.choosing import balanced, choose
from pw.building.pipelines.forms import Marked
from pw.building.pipelines.plan import PlannedStage
from pw.building.pipelines.units import units_of
from pw.client.equations.graph import Graph
from tests.stages.samples import long

WIDTH, WORDS, ROWS, LENGTH = 16, 32, 4, 8


def normed(x: Any, gain: Any) -> Any:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * gain


def block(params: Any, x: Any) -> Any:
    """A layer of a Transformer with two heads."""
    rows, length, width = x.shape
    qkv = (normed(x, params["gains"][0]) @ params["qkv"]).reshape(rows, length, 3, 2, width // 2)
    scores = jnp.einsum("rqhd,rkhd->rhqk", qkv[:, :, 0], qkv[:, :, 1]) / width**0.5
    mask = jnp.tril(jnp.ones((length, length), bool))
    weights = jax.nn.softmax(jnp.where(mask, scores, -1e9), axis=-1)
    mixed = jnp.einsum("rhqk,rkhd->rqhd", weights, qkv[:, :, 2]).reshape(x.shape)
    x = x + mixed @ params["out"]
    return x + jax.nn.gelu(normed(x, params["gains"][1]) @ params["up"]) @ params["down"]


def scanned(params: Any, words: Any, targets: Any) -> Any:
    """A model whose layers are a scan; its embedding is tied."""
    x, _ = jax.lax.scan(
        lambda x, layer: (block(layer, x), None), params["words"][words], params["layers"]
    )
    scores = jax.nn.log_softmax(x @ params["words"].T)
    return -jnp.mean(jnp.take_along_axis(scores, targets[..., None], axis=-1))


def draw(*shape: int, seed: int) -> Any:
    return 0.3 * np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def first_params(layers: int, width: int = WIDTH) -> Any:
    return {
        "words": draw(WORDS, width, seed=0),
        "layers": {
            "gains": np.ones((layers, 2, width), np.float32),
            "qkv": draw(layers, width, 3 * width, seed=1),
            "out": draw(layers, width, width, seed=2),
            "up": draw(layers, width, 4 * width, seed=3),
            "down": draw(layers, 4 * width, width, seed=4),
        },
    }


def batch(seed: int = 0) -> tuple[Any, Any]:
    words = np.random.default_rng(seed).integers(0, WORDS, (2, ROWS, LENGTH), dtype=np.int32)
    return words[0], words[1]


def near(found: Any, expected: Any) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-4, atol=2e-5)


# --- the choice --------------------------------------------------------------------------------------

CASES: dict[str, tuple[list[float], list[int], int, list[int] | None]] = {
    "equal costs": ([1.0] * 8, [5] * 8, 4, [2, 4, 6]),
    "few bytes, for a little more time": ([10, 10, 1, 10, 10], [9, 9, 1, 9, 9], 2, [3]),
    "bytes do not outweigh half of the time": ([10.0] * 6, [1, 9, 9, 9, 9, 0], 2, [3]),
    "a large last one": ([4, 4, 4, 4, 12], [1] * 5, 3, [2, 4]),
    "no stage that does nothing": ([0, 1e-9, 5, 5, 1e-9, 0], [0, 0, 9, 0, 0, 0], 2, [3]),
    "one stage": ([1.0, 2.0], [3, 0], 1, []),
    "one giant": ([1, 98, 1], [1, 1, 1], 3, None),
    "fewer units than stages": ([1.0, 1.0], [1, 1], 3, None),
}


@pytest.mark.parametrize("case", CASES)
def test_a_list_is_cut_evenly_where_few_bytes_cross(case: str) -> None:
    costs, sent, count, expected = CASES[case]
    assert balanced(costs, sent, count) == expected


@pytest.mark.parametrize("seed", range(20))
def test_the_slowest_stage_is_as_fast_as_any_choice_makes_it(seed: int) -> None:
    draw = random.Random(seed)
    costs = [draw.randint(1, 9) for _ in range(draw.randint(5, 12))]
    count = draw.randint(2, 4)

    def slowest(cuts: Sequence[int]) -> float:
        ends = [0, *cuts, len(costs)]
        return max(sum(costs[a:b]) for a, b in pairwise(ends))

    chosen = balanced(costs, [1] * len(costs), count)
    assert chosen is not None
    assert slowest(chosen) == min(map(slowest, combinations(range(1, len(costs)), count - 1)))


def graph_of(function: Any, params: Any, *batch: Any) -> Graph:
    closed = jax.make_jaxpr(function)(params, *batch)
    count = len(jax.tree.leaves(params))
    takes = [("param", n) for n in range(count)] + [("batch", n) for n in range(len(batch))]
    return Graph(closed, takes, [("y", 0)])


def product(x: Any) -> Any:
    return jnp.einsum("bij,bkj->bik", x, x)


def convolution(x: Any) -> Any:
    kernel = jnp.ones((5, 3, 2, 2))  # 5 features of 3, from 2 x 2
    return jax.lax.conv(x[:, :3], kernel, (1, 1), "VALID")


def repeated(x: Any) -> Any:
    return jax.lax.scan(lambda x, _: (product(x), None), x, None, 5)[0]


def branch(x: Any) -> Any:
    return jax.lax.cond(x[0, 0, 0] > 0, product, lambda x: x @ x @ x, x)


def kernel(x: Any) -> Any:
    def body(x: Any, y: Any) -> None:
        y[...] = x[...] @ x[...]

    block = pl.BlockSpec((1, 4, 4), lambda n: (n, 0, 0))
    return pl.pallas_call(
        lambda x, y: body(x.at[0], y.at[0]),
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(6,),
        in_specs=[block],
        out_specs=block,
    )(x)


@pytest.mark.parametrize(
    ("function", "shape", "flops"),
    [
        (product, (6, 4, 4), 6 * 2 * 4**3),
        (convolution, (2, 3, 4, 4), 2 * (3 * 2 * 2) * (2 * 5 * 3 * 3)),
        (jax.checkpoint(product), (6, 4, 4), 6 * 2 * 4**3),
        (repeated, (6, 4, 4), 5 * 6 * 2 * 4**3),
        (branch, (6, 4, 4), 2 * 6 * 2 * 4**3),
        (kernel, (6, 4, 4), 6 * 2 * 4**3),
    ],
    ids=["product", "convolution", "checkpoint", "scan", "branch", "kernel"],
)
def test_products_count_their_operations(
    function: Any, shape: Any, flops: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(costs, "FLOPS_PER_BYTE", 0)
    assert costs.cost_of_jaxpr(jax.make_jaxpr(function)(jnp.ones(shape)).jaxpr) == flops


def test_units_are_what_depends_on_parameters_and_batch() -> None:
    def loss(params: Any, x: Any) -> Any:
        mask = jnp.exp(x)  # by the batch alone: computed where it is used, and never sent
        w = params["w"] * 2.0
        return jnp.sum(jnp.tanh(x @ w @ w) * mask)

    units = units_of(
        graph_of(loss, {"w": np.ones((4, 4), np.float32)}, np.ones((2, 4), np.float32))
    )
    product = 2 * 2 * 4 * 4
    written = costs.FLOPS_PER_BYTE * 4 * 2 * 4
    assert [unit.cost for unit in units] == [
        product + 2 * written,  # with the weight
        product,
        written,
        2 * written,  # with the mask
        written,  # what the sum reads
    ]
    assert [unit.sent_bytes for unit in units] == [32, 32, 32, 32, 4]


def test_iterations_of_a_scan_are_units() -> None:
    def loss(params: Any, x: Any) -> Any:
        scale = jnp.sum(x * params["scale"])

        def layer(x: Any, w: Any) -> tuple[Any, Any]:
            return jnp.tanh(x @ w), jnp.sum(x)

        x, sums = jax.lax.scan(layer, x, params["w"])
        return jnp.sum(x) * scale + jnp.sum(sums)

    params = {"scale": np.float32(1), "w": np.ones((3, 4, 4), np.float32)}
    units = units_of(graph_of(loss, params, np.ones((2, 4), np.float32)))
    scan = [unit for unit in units if unit.place.equation == units[3].place.equation]
    assert [unit.place.iteration for unit in scan] == [0, 1, 2]
    assert len({unit.cost for unit in scan}) == 1
    # The scale, the carry, and the sums so far.
    assert [unit.sent_bytes for unit in scan] == [4 + 32 + 4, 4 + 32 + 8, 4 + 32 + 12]


def test_a_scan_is_unrolled_where_its_iterations_are_too_coarse() -> None:
    def choice(layers: int, stages: int) -> Any:
        return choose(graph_of(cast, first_params(layers), *batch()), stages, "cast")

    assert choice(16, 4).scans == ()
    coarse = choice(3, 2)
    assert len(coarse.scans) == 1
    assert {place.iteration for place in coarse.places} == {0}


# --- pipelines ---------------------------------------------------------------------------------------


def even(stages: Sequence[PlannedStage]) -> bool:
    """Whether the stages cost the same, up to 10 %."""
    costs = [stage.cost for stage in stages]
    return max(costs) <= 1.1 * min(costs)


def test_a_scan_over_layers_is_trained(meshes: list[pw.Mesh]) -> None:
    params = first_params(layers=8)
    meshes = meshes[1:3]
    step = pw.pipeline(scanned, stages=2, meshes=meshes, microbatches=1, optimizer=optax.sgd(1.0))
    plan = step.plan(params, *batch())
    assert even(plan.stages)
    assert {stage.sent_bytes for stage in plan.stages} == {0, ROWS * LENGTH * WIDTH * 4}
    assert "2 stages; the slowest costs 1.0" in repr(plan)
    assert "(scanned)" in plan.stages[1].begins
    expected_loss, expected = jax.jit(jax.value_and_grad(scanned))(params, *batch())
    state = step.init(params, *batch())
    assert [stage["params"]["layers"]["up"].range for stage in state] == [(0, 4), (4, 8)]
    state, loss = step(state, *batch())
    near(np.asarray(loss), expected_loss)
    trained = step.params(state)
    near(jax.tree.map(np.subtract, params, pw.get(trained)), expected)
    assert trained["layers"]["up"].sharding.mesh == meshes[0]


@pytest.mark.long
def test_parameters_of_a_state_go_in_again_and_other_batches_leave_the_cuts(
    meshes: list[pw.Mesh],
) -> None:
    params = first_params(layers=16)
    step = pw.pipeline(scanned, stages=4, meshes=meshes, microbatches=2, optimizer=optax.sgd(0.1))
    state, _ = step(step.init(params, *batch()), *batch())
    trained = step.params(state)
    short = jax.tree.map(lambda words: words[:2, :3], batch())
    expected_loss = scanned(pw.get(trained), *short)
    loss, _ = step.gradients(trained, *short)
    near(np.asarray(loss), expected_loss)
    state, loss = step(state, *short)
    near(np.asarray(loss), expected_loss)


class Layer(eqx.Module):
    """A layer of a Transformer of equinox."""

    attention: eqx.nn.MultiheadAttention
    mlp: eqx.nn.MLP
    norms: list[eqx.nn.LayerNorm]

    def __init__(self, key: Any) -> None:
        keys = jax.random.split(key)
        self.attention = eqx.nn.MultiheadAttention(2, WIDTH, key=keys[0])
        self.mlp = eqx.nn.MLP(WIDTH, WIDTH, 4 * WIDTH, 1, jax.nn.gelu, key=keys[1])
        self.norms = [eqx.nn.LayerNorm(WIDTH) for _ in range(2)]

    def __call__(self, x: Any) -> Any:
        normed = jax.vmap(self.norms[0])(x)
        mask = jnp.tril(jnp.ones((len(x), len(x)), bool))
        x = x + self.attention(normed, normed, normed, mask=mask)
        return x + jax.vmap(self.mlp)(jax.vmap(self.norms[1])(x))


class Model(eqx.Module):
    """A Transformer; it knows nothing of pw, except for the marks that one test wants."""

    words: eqx.nn.Embedding
    layers: list[Layer]
    head: eqx.nn.Linear
    marks: tuple[int, ...] = eqx.field(static=True)

    def __init__(self, layers: int, marks: Sequence[int] = ()) -> None:
        keys = jax.random.split(jax.random.key(0), 2 + layers)
        self.words = eqx.nn.Embedding(WORDS, WIDTH, key=keys[0])
        self.head = eqx.nn.Linear(WIDTH, WORDS, key=keys[1])
        self.layers = [Layer(key) for key in keys[2:]]
        self.marks = tuple(marks)

    def __call__(self, words: Any) -> Any:
        x = jax.vmap(self.words)(words)
        for number, layer in enumerate(self.layers):
            x = layer(pw.stage_boundary(x) if number in self.marks else x)
        return jax.vmap(self.head)(x)


def loss_of(model: Model) -> tuple[Any, Any]:
    """Return the parameters of a model of equinox, and its loss as a function of them."""
    params, static = eqx.partition(model, eqx.is_inexact_array)

    def loss(params: Any, words: Any, targets: Any) -> Any:
        scores = jax.vmap(eqx.combine(params, static))(words)
        return optax.softmax_cross_entropy_with_integer_labels(scores, targets).mean()

    return params, loss


def test_a_model_of_equinox_is_a_pipeline(meshes: list[pw.Mesh]) -> None:
    params, loss = loss_of(Model(layers=1))
    step = pw.pipeline(loss, stages=2, meshes=meshes[1:3], microbatches=2)
    expected_loss, expected = jax.jit(jax.value_and_grad(loss))(params, *batch())
    found, gradients = step.gradients(params, *batch())
    near(np.asarray(found), expected_loss)
    near(pw.get(gradients), expected)


def test_the_choice_is_no_worse_than_marks_by_hand(meshes: list[pw.Mesh]) -> None:
    plans = {}
    for marks, stages in (((), 3), ((2, 4), None)):
        params, loss = loss_of(Model(6, marks))
        step = pw.pipeline(loss, stages=stages, meshes=meshes[:3], microbatches=2)
        plans[stages] = step.plan(params, *batch())
    chosen, by_hand = (plan.stages for plan in plans.values())
    assert even(chosen)
    assert max(s.cost for s in chosen) <= max(s.cost for s in by_hand)
    assert sum(s.sent_bytes for s in chosen) <= sum(s.sent_bytes for s in by_hand)


def cast(params: Any, words: Any, targets: Any) -> Any:
    """The model in another precision, backwards and with a sum of what each layer gives."""
    params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)

    def layer(x: Any, own: Any) -> Any:
        x = block(own, x)
        return x, jnp.mean(x)

    x, means = jax.lax.scan(layer, params["words"][words], params["layers"], reverse=True)
    scores = x[..., 0].astype(jnp.float32)
    weights = jnp.arange(1.0, 1 + len(means))
    return jnp.mean((scores - targets) ** 2) + jnp.sum(means.astype(jnp.float32) * weights)


@pytest.mark.parametrize("layers", [long(4), 3])
def test_weights_in_another_precision_are_divided_too(meshes: list[pw.Mesh], layers: int) -> None:
    """With three layers the scan is unrolled, and one is cut in its middle: both stages use its gains."""
    params = first_params(layers)
    step = pw.pipeline(cast, stages=2, meshes=meshes[1:3], microbatches=2)
    plan = step.plan(params, *batch())
    whole = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    assert plan.imbalance < 1.15
    shared = 0 if layers == 4 else params["layers"]["gains"].nbytes
    assert sum(stage.param_bytes for stage in plan.stages) == whole + shared
    form = Marked(cast, meshes[1:3], None, 2)
    micro = [leaf[:2] for leaf in batch()]
    trees = form.trees(params, micro)
    near(form.user_params(trees), params)
    stages = form.trace(trees, micro, None)
    # The last layers come first.
    assert set(stages[0].rows.values()) == ({(2, 4)} if layers == 4 else {(1, 3), (2, 3)})
    values: list[Any] = []
    for stage, own in zip(stages, form.numbered(trees), strict=True):
        known = {("param", n): leaf for n, leaf in own.items()}
        known |= {("batch", n): leaf for n, leaf in enumerate(micro)}
        known |= {("x", n): value for n, value in enumerate(values)}
        values = jax.extend.core.jaxpr_as_fun(stage.closed)(*(known[n] for n in stage.takes))
    np.testing.assert_allclose(values[0], cast(params, *micro), rtol=1e-2)


# --- bad input: one sentence -------------------------------------------------------------------------


def marked(params: Any, words: Any, targets: Any) -> Any:
    return jnp.sum(pw.stage_boundary(params["words"][words]) * 2.0)


def few_operations(params: Any, words: Any, targets: Any) -> Any:
    return jnp.sum(params["words"]) + jnp.sum(params["words"][words])


def no_parameters(params: Any, words: Any, targets: Any) -> Any:
    return jnp.mean(words * 1.0)


def at_once(params: Any, words: Any, targets: Any) -> Any:
    return jax.checkpoint(scanned)(params, words, targets)


BAD: dict[str, tuple[Any, dict[str, Any], str]] = {
    "marks and stages": (
        marked,
        {"stages": 4},
        r"'marked' has 1 pw.stage_boundary\(x\), which make 2",
    ),
    "too many stages": (
        few_operations,
        {"stages": 40},
        "'few_operations' cannot be cut into 40 stages of about the same cost: of its [3-6] operations",
    ),
    "no parameters": (no_parameters, {"stages": 4}, "does not depend on both its parameters and"),
    "a checkpoint around all": (
        at_once,
        {"stages": 4},
        r"'at_once' cannot be cut into 4 stages .*: of its 1 operations .* at .*choosing.py:.* 100% of",
    ),
    "no number": (scanned, {"stages": "4"}, "stages= is how many stages there are, not '4'"),
    "a list": ([scanned, scanned], {"stages": 3}, "the list has 2 stage functions"),
    "meshes": (scanned, {"stages": 3}, "3 stages and 4 meshes"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_in_one_sentence(meshes: list[pw.Mesh], case: str) -> None:
    model, options, said = BAD[case]
    with pytest.raises(pw.ArgumentError, match=said) as refused:
        step = pw.pipeline(model, meshes=meshes, microbatches=2, **options)
        step.plan(first_params(layers=8), *batch())
    assert "\n" not in str(refused.value)
