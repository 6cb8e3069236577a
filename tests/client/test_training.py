"""Models of other libraries, trained in programs by JAX's own `value_and_grad`, against plain JAX."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import numpy as np
import optax
import pytest

import pw
from pw.testing import InProcessCluster
from tests.stages.samples import long
from tests.stages.stage import mesh_on

WIDTH, ROWS, STEPS = 8, 6, 4
draw = np.random.default_rng(0).standard_normal
X = draw((ROWS, WIDTH)).astype(np.float32)
Y = draw((ROWS, WIDTH)).astype(np.float32)


class Block(eqx.Module):
    """A normalised layer with a residual."""

    norm: eqx.nn.LayerNorm
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, key: Any) -> None:
        keys = jax.random.split(key)
        self.norm = eqx.nn.LayerNorm(WIDTH)
        self.up = eqx.nn.Linear(WIDTH, 2 * WIDTH, key=keys[0])
        self.down = eqx.nn.Linear(2 * WIDTH, WIDTH, key=keys[1])

    def __call__(self, x: Any) -> Any:
        return x + self.down(jax.nn.gelu(self.up(self.norm(x))))


def blocks() -> list[Block]:
    return [Block(key) for key in jax.random.split(jax.random.key(0), 3)]


def applied(block: Block, x: Any) -> Any:
    return jax.vmap(block)(x)


def error(y: Any, wanted: Any) -> Any:
    return ((y - wanted) ** 2).mean()


def _same(own: Any, like: Any) -> None:
    assert own == like


def trained(stages: Any, last: Any, whole: Any, model: Any) -> tuple[list[float], Any]:
    """Return the losses of a few steps, and the model after them; `whole` makes one function of a step."""
    optimizer = optax.adamw(1e-2)

    def loss(model: Any, x: Any, y: Any) -> Any:
        for stage, block in zip(stages, model, strict=True):
            x = stage(block, x)
        return last(x, y)

    def step(model: Any, state: Any, x: Any, y: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(model, x, y)
        updates, state = optimizer.update(gradients, state, model)
        return optax.apply_updates(model, updates), state, value

    step = whole(step)
    losses = []
    state = whole(optimizer.init)(model)
    if whole is pw.program:  # what looks like the parameters lies as they do
        moments = next(one for one in state if hasattr(one, "mu"))
        for moment in (moments.mu, moments.nu):
            jax.tree.map(lambda own, like: _same(own.sharding, like.sharding), moment, model)
    for _ in range(STEPS):
        model, state, value = step(model, state, X, Y)
        losses.append(float(value))
    return losses, model


@pytest.mark.parametrize("islands", [long(1), 3])
def test_three_stages_on_three_slices_train_as_in_plain_jax(islands: int) -> None:
    arrays, statics = eqx.partition(blocks(), eqx.is_array)

    def stage(at: int) -> Any:
        return lambda arrays, x: applied(eqx.combine(arrays, statics[at]), x)

    stages = [stage(at) for at in range(3)]
    wanted, there = trained(stages, error, jax.jit, arrays)
    with InProcessCluster(islands=islands, devices_per_island=6 // islands):
        meshes = [mesh_on(at % islands) for at in range(3)]
        on_slices = [pw.jit(fun, mesh=mesh) for fun, mesh in zip(stages, meshes, strict=True)]
        last = pw.jit(error, mesh=meshes[-1])
        laid = [
            pw.put(block, sharding=pw.NamedSharding(mesh, jax.sharding.PartitionSpec()))
            for block, mesh in zip(arrays, meshes, strict=True)
        ]
        losses, model = trained(on_slices, last, pw.program, laid)
        model = pw.get(model)
    np.testing.assert_allclose(losses, wanted, rtol=1e-5)
    assert losses[-1] < losses[0]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), model, there)
