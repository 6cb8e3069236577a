"""`pw.moe` in stages of a pipeline: losses, gradients and training are those of the unpipelined model."""

from __future__ import annotations

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


@pytest.fixture(params=[(0, 0), (0, 1)], ids=["one island", "two islands"])
def model(request: pytest.FixtureRequest) -> Model:
    return Model(request.param)


@pytest.mark.parametrize("how", ["1f1b", "zero-bubble", "recompute", "marks"])
def test_gradients_are_those_of_the_unpipelined_model(model: Model, how: str) -> None:
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
