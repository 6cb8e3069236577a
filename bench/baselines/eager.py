"""One script of plain JAX, as users write it, on its own CPU device or on the gateway: `bench.gateway`.

On the gateway, the script starts a cluster of one device beside itself. Its executables are kept in a folder
that is empty at first, so new operations are compiled.
"""

from __future__ import annotations

import itertools
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import pw.jax
from bench.baselines.peer import Peer, serve
from bench.baselines.steps import calls

PLAIN, GATEWAY = "plain JAX", "gateway"
CHAIN, BLOCKING = "eager operation in a chain", "eager operation, blocking"
STEP, STEP_AND_LOSS = "training step", "training step, its loss read"
PUT, READ = "put of 1 MB", "read of 25 MB"
SCALARS, GOTTEN = "float of each of many results", "jax.device_get of many results"
NEW, LAYER = "new eager operation", "new layer"

PUT_BYTES, READ_BYTES = 1 << 20, 25_000_000
WIDTH, ROWS, LAYERS = 192, 512, 4
"""Of a model whose step takes some 4 ms on one core."""

Case = Callable[[int], object]


def start(way: str) -> Peer:
    """Start the script. Raises GaveUp if it does not become ready."""
    return Peer(way, "bench.baselines.eager", [[way]], ready_s=300.0)


def putting() -> Case:
    """A case that puts an array on the device, and waits for it."""
    value = np.ones(PUT_BYTES // 4, np.float32)

    def case(count: int) -> None:
        for _ in range(count):
            jax.device_put(value).block_until_ready()

    return case


def reading() -> Case:
    """A case that reads a result; the time is that of the read alone."""
    array = jnp.zeros(READ_BYTES // 4)

    def case(count: int) -> float:
        took_s = 0.0
        for at in range(count):
            result = (array + at).block_until_ready()
            begun_s = time.perf_counter()
            assert np.asarray(result)[-1] == at
            took_s += time.perf_counter() - begun_s
        return took_s

    return case


def scalars(read: Callable[[list[Any]], Any]) -> Case:
    """A case that reads many results that are ready."""
    x = jnp.zeros(())

    def case(count: int) -> float:
        results = jax.block_until_ready([x + at for at in range(count)])
        begun_s = time.perf_counter()
        values = read(results)
        took_s = time.perf_counter() - begun_s
        assert values[-1] == count - 1
        return took_s

    return case


def training(*, is_read: bool) -> Case:
    """A case of training steps."""
    batch = jnp.ones((ROWS, WIDTH))

    def loss(weights: Any, batch: Any) -> Any:
        for layer in range(LAYERS):
            batch = jnp.tanh(batch @ weights[layer])
        return jnp.mean(batch**2)

    @partial(jax.jit, donate_argnums=0)
    def step(weights: Any, batch: Any) -> tuple[Any, Any]:
        value, slopes = jax.value_and_grad(loss)(weights, batch)
        return weights - 0.1 * slopes, value

    weights = 0.05 * jax.random.normal(jax.random.key(0), (LAYERS, WIDTH, WIDTH))

    def case(count: int) -> None:
        nonlocal weights
        for _ in range(count):
            weights, value = step(weights, batch)
            if is_read:
                float(value)
        weights.block_until_ready()

    return case


def new_operations() -> Case:
    """A case of operations, each of which JAX has not compiled before."""
    sizes = itertools.count(2)

    def case(count: int) -> None:
        results = []
        for _ in range(-(-count // 4)):
            x = jnp.ones((next(sizes), 5))
            results.append(jnp.sin(x) + jnp.tanh(x))  # three more
        jax.block_until_ready(results)

    return case


def new_layers() -> Case:
    """A case of layers that are initialized; JAX has compiled most of their operations never before."""
    widths = itertools.count(9)

    def case(count: int) -> None:
        for _ in range(count):
            width = next(widths)
            layer = eqx.nn.Linear(width, 2 * width, key=jax.random.key(width))
            jax.block_until_ready(eqx.filter(layer, eqx.is_array))

    return case


def main() -> None:
    """WAY: serve until standard input ends."""
    (way,) = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder

        def prepare() -> Mapping[str, Case]:
            if way == GATEWAY:
                pw.jax.connect(None, devices=1)
            else:
                jax.config.update("jax_platforms", "cpu")
            x = jnp.zeros(16)
            return {
                CHAIN: calls(lambda y: y + 1.0, x),
                BLOCKING: calls(lambda y: y + 1.0, x, wait=True),
                STEP: training(is_read=False),
                STEP_AND_LOSS: training(is_read=True),
                PUT: putting(),
                READ: reading(),
                SCALARS: scalars(lambda results: [float(one) for one in results]),
                GOTTEN: scalars(jax.device_get),
                NEW: new_operations(),
                LAYER: new_layers(),
            }

        serve(prepare)


if __name__ == "__main__":
    main()
