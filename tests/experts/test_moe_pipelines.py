"""`pw.moe` in stages of a pipeline: losses, gradients and training are those of the unpipelined model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import pw
from pw.testing import InProcessCluster
from tests.stages.stage import mesh_on

WIDTH, EXPERTS, ROWS, MICROBATCHES = 8, 4, 16, 2


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[InProcessCluster]:
    with InProcessCluster(islands=2, devices_per_island=4) as cluster:
        yield cluster


def draw(*shape: int, seed: int) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def expert(params: Any, rows: Any) -> Any:
    return jnp.tanh(rows @ params["w"])


def first(params: Any, x: Any) -> Any:
    return jnp.tanh(x @ params["w"])


class Model:
    """Three stages; experts in the second one, on slices of some islands."""

    def __init__(self, islands: tuple[int, int]) -> None:
        self.meshes = [mesh_on(at, devices=1) for at in (islands[0], islands[1], islands[0])]
        self.experts = [mesh_on(at, devices=1) for at in islands]
        self.layer = pw.moe(expert, devices=self.experts, top_k=2)

    def middle(self, params: Any, x: Any) -> Any:
        y, balance = self.layer(params["experts"], x, x @ params["gate"])
        return x + y, balance

    def last(self, params: Any, given: Any, targets: Any) -> Any:
        x, balance = given
        return jnp.mean((x @ params["w"] - targets) ** 2) + 0.01 * balance

    def marked(self, params: Any, x: Any, targets: Any) -> Any:
        x = pw.stage_boundary(first(params[0], x))
        given = pw.stage_boundary(self.middle(params[1], x))
        return self.last(params[2], given, targets)

    def params(self) -> Any:
        half = [{"w": draw(EXPERTS // 2, WIDTH, WIDTH, seed=at)} for at in (1, 2)]
        return (
            {"w": draw(WIDTH, WIDTH, seed=0)},
            {"experts": half, "gate": draw(WIDTH, EXPERTS, seed=3)},
            {"w": draw(WIDTH, 1, seed=4)},
        )


def batch(seed: int = 5) -> tuple[Any, Any]:
    return draw(ROWS, WIDTH, seed=seed), draw(ROWS, 1, seed=seed + 1)


def near(found: Any, expected: Any) -> None:
    found, expected = pw.get(found), pw.get(expected)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-6)


ONE, TWO = (0, 0), (0, 1)


@pytest.fixture(
    params=[pytest.param(ONE, marks=pytest.mark.long), TWO], ids=["one island", "two islands"]
)
def model(request: pytest.FixtureRequest) -> Model:
    return Model(request.param)


@pytest.mark.parametrize(
    ("islands", "how"),
    [
        pytest.param(ONE, "1f1b", marks=pytest.mark.long),
        (ONE, "marks"),
        # What is trained below has this.
        pytest.param(TWO, "1f1b", marks=pytest.mark.long),
        pytest.param(TWO, "zero-bubble", marks=pytest.mark.long),
        pytest.param(TWO, "recompute", marks=pytest.mark.long),
    ],
)
def test_gradients_are_those_of_the_unpipelined_model(islands: tuple[int, int], how: str) -> None:
    model = Model(islands)
    pipe = pw.pipeline(
        model.marked if how == "marks" else [first, model.middle, model.last],
        meshes=model.meshes,
        microbatches=MICROBATCHES,
        schedule=how if how == "zero-bubble" else "1f1b",
        recompute=how == "recompute",
    )
    params = model.params()
    alone = pw.program(pw.value_and_grad(pipe.unpipelined))
    loss, gradients = pipe.gradients(params, *batch())
    near((loss, tuple(gradients)), alone(params, *batch()))
    lie = [own["w"].sharding.mesh for own in gradients[1]["experts"]]
    assert lie == model.experts


def test_training_keeps_experts_and_their_moments_and_shows_its_tasks(model: Model) -> None:
    optimizer = optax.adam(1e-2)
    stages = [first, model.middle, model.last]
    pipe = pw.pipeline(stages, meshes=model.meshes, microbatches=MICROBATCHES, optimizer=optimizer)
    own = model.params()
    moments, update = optimizer.init(own), jax.jit(optimizer.update)
    alone = pw.program(pw.value_and_grad(pipe.unpipelined))
    state = pipe.init(own, *batch())
    losses, expected = [], []
    for number in range(3):
        with contextlib.nullcontext() if number < 2 else pw.trace(None) as timeline:
            state, loss = pipe(state, *batch())
            jax.block_until_ready(state)
        losses.append(float(loss))
        found, gradients = pw.get(alone(own, *batch()))
        updates, moments = update(gradients, moments, own)
        own = jax.tree.map(np.add, own, updates)
        expected.append(float(found))
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert losses[-1] < losses[0]
    measured = pipe.measured(timeline)
    assert measured.steps == 1
    assert set(measured.times) == {(stage, kind) for stage in range(3) for kind in "FB"}
    near(pipe.params(state), own)
    kept = [state[1]["params"]["experts"]]
    kept += [[one[0].mu["experts"][at] for at, one in enumerate(state[1]["optimizer"][:2])]]
    for trees in kept:
        assert [tree["w"].sharding.mesh for tree in trees] == model.experts
    with pytest.raises(
        pw.ArgumentError, match=r"stage 1 .*'middle'.* has experts on .*init\(params, \*batch"
    ):
        pipe(pipe.init(model.params()), *batch())


def test_rows_are_split_as_the_stage_says() -> None:
    """Each device of the stage is a group of its own, with its own capacity."""
    meshes = [mesh_on(0), mesh_on(1)]
    layer = pw.moe(
        expert, devices=[mesh_on(1, devices=1), mesh_on(0, devices=1)], capacity_factor=0.5
    )

    def stage(params: Any, x: Any) -> Any:
        x = jax.lax.with_sharding_constraint(jnp.tanh(x @ params["w"]), P("x"))
        return x + layer(params["experts"], x, x @ params["gate"])[0]

    def loss(params: Any, x: Any, targets: Any) -> Any:
        return jnp.mean((x @ params["w"] - targets) ** 2)

    half = [{"w": draw(EXPERTS // 2, WIDTH, WIDTH, seed=at)} for at in (1, 2)]
    params = (
        {"w": draw(WIDTH, WIDTH, seed=0), "experts": half, "gate": draw(WIDTH, EXPERTS, seed=3)},
        {"w": draw(WIDTH, 1, seed=4)},
    )
    pipe = pw.pipeline([stage, loss], meshes=meshes, microbatches=2, in_shardings=(P(), P("x")))
    before = pw.jit(
        lambda params, x: jnp.tanh(x @ params["w"]), mesh=meshes[0], out_shardings=P("x")
    )
    after = pw.jit(loss, mesh=meshes[1])

    def whole(params: Any, x: Any, targets: Any) -> Any:
        total = 0.0
        for rows in (slice(0, 8), slice(8, 16)):
            own = before(params[0], x[rows])
            gates = pw.jit(jnp.matmul, mesh=meshes[0])(own, params[0]["gate"])
            y, _ = layer(params[0]["experts"], own, gates)
            total += after(params[1], own + y, targets[rows])
        return total / 2

    found = pipe.gradients(params, *batch())
    near(found, pw.program(pw.value_and_grad(whole))(params, *batch()))


def test_a_model_without_marks_is_refused() -> None:
    model = Model(TWO)

    def loss(params: Any, x: Any, targets: Any) -> Any:
        return model.last(params[2], model.middle(params[1], first(params[0], x)), targets)

    pipe = pw.pipeline(loss, stages=3, meshes=model.meshes, microbatches=2)
    with pytest.raises(pw.ArgumentError, match=r"experts on other devices .*stage_boundary"):
        pipe.gradients(model.params(), *batch())
