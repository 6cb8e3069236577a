"""Trains a network of equinox with optax: plain JAX, in which no line knows pw.

Run it: `JAX_PLATFORMS=pw python examples/jax/equinox_train.py`. The network learns to tell two spirals
apart. All devices of one island train it, each with a part of the batch. With `--two-islands` another
island evaluates it in the meantime.
"""

import sys

import equinox as eqx
import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

STEPS = 60
EVALUATE_EVERY = 20
ROWS = 256

optimizer = optax.adamw(1e-2)


def draw_spirals(rng):
    """Return points float32 `[ROWS, 2]`, and for each its spiral, 0 or 1."""
    spirals = rng.integers(0, 2, ROWS)
    radius = rng.uniform(0.1, 1, ROWS)
    angle = 6 * radius + np.pi * spirals
    points = radius[:, None] * np.stack([np.cos(angle), np.sin(angle)], axis=1)
    return (points + rng.normal(0, 0.02, points.shape)).astype(np.float32), spirals


@eqx.filter_jit
def evaluate(model, points, spirals):
    logits = jax.vmap(model)(points)
    return optax.softmax_cross_entropy_with_integer_labels(logits, spirals).mean()


@eqx.filter_jit(donate="all-except-first")
def step(batch, model, state):
    loss, gradients = eqx.filter_value_and_grad(evaluate)(model, *batch)
    updates, state = optimizer.update(gradients, state, eqx.filter(model, eqx.is_inexact_array))
    return eqx.apply_updates(model, updates), state, loss


def two_islands():
    """Return the devices of two islands; of plain JAX's devices, two halves."""
    devices = jax.devices()
    if hasattr(devices[0], "island"):
        names = sorted({one.island for one in devices})[:2]
        return [[one for one in devices if one.island == name] for name in names]
    half = len(devices) // 2
    return [devices[:half], devices[half:]]


def main():
    if "--two-islands" in sys.argv:
        training, evaluating = two_islands()
    else:
        training = evaluating = jax.devices()
    mesh = Mesh(np.array(training), ("batch",))
    whole, split = NamedSharding(mesh, P()), NamedSharding(mesh, P("batch"))
    there = NamedSharding(Mesh(np.array(evaluating), ("batch",)), P())

    rng = np.random.default_rng(0)
    test_set = jax.device_put(draw_spirals(rng), there)
    model = eqx.nn.MLP(2, 2, width_size=64, depth=2, activation=jax.nn.tanh, key=jax.random.key(0))
    state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
    model, state = eqx.filter_shard((model, state), whole)
    for number in range(1, STEPS + 1):
        batch = jax.device_put(draw_spirals(rng), split)
        model, state, loss = step(batch, model, state)
        if number % EVALUATE_EVERY == 0:
            arrays, functions = eqx.partition(model, eqx.is_array)
            copy = eqx.combine(jax.device_put(arrays, there), functions)
            tested = evaluate(copy, *test_set)
            print(f"step {number}: loss {loss:.9g}, of other points {tested:.9g}")


main()
