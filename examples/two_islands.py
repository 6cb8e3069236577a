"""Trains one model over two islands: one jit function, cut by the runtime where islands exchange sums.

Run it: `python -m examples.two_islands`. It starts a cluster of two islands of two hosts each. With
PW_ADDRESS it runs on that cluster, which needs two islands with two devices each.
"""

from __future__ import annotations

import os
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import pw

STEPS, ROWS, WIDTH = 40, 64, 32
BATCH = P(("island", "data"))
"""Rows are split over islands first, then over the devices of each."""


def initial(seed: Any) -> Any:
    """The first parameters: three layers."""
    keys = jax.random.split(jax.random.key(seed), 3)
    return [jax.random.normal(key, (WIDTH, WIDTH)) / np.sqrt(WIDTH) for key in keys]


def train(params: Any, x: Any, y: Any) -> Any:
    """One step of gradient descent; nothing in it says that there are islands."""

    def loss(params: Any) -> Any:
        hidden = x
        for weights in params[:-1]:
            hidden = jnp.tanh(hidden @ weights)
        return jnp.mean((hidden @ params[-1] - y) ** 2)

    value, gradients = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda w, g: w - 0.5 * g, params, gradients), value


def main() -> None:
    """Train, and compare with plain JAX on this machine."""
    cluster: Any = nullcontext()
    if "PW_ADDRESS" not in os.environ:
        cluster = pw.LocalCluster(islands=2, hosts_per_island=2)
    with cluster:
        slices = pw.make_virtual_device_set().add_slice(devices=4, islands=2)
        mesh = pw.Mesh(np.array(slices.devices).reshape(2, 2), ("island", "data"))
        print(f"{mesh}; it joins {len(slices.parts)} islands")
        step = pw.jit(train, mesh=mesh, in_shardings=(None, BATCH, BATCH), donate_argnums=0)
        params = pw.jit(initial, mesh=mesh)(0)
        alone = jax.jit(initial)(0)
        for number in range(STEPS):
            x = np.random.default_rng(number).normal(size=(ROWS, WIDTH)).astype(np.float32)
            params, ours = step(params, x, np.roll(x, 1, axis=1))
            alone, theirs = jax.jit(train)(alone, x, np.roll(x, 1, axis=1))
            if number % 10 == 9:
                print(f"step {number + 1}: loss {ours:.4f}; in plain JAX {theirs:.4f}")


if __name__ == "__main__":
    main()
