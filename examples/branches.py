"""Answers requests with a small model, and asks a large one on another island where the small one is not sure.

Run it: `python -m examples.branches`. It starts a cluster of two islands of two hosts each. The client never
looks at a value: it calls for all requests, and the hosts of the large model skip those that are not for them.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import pw

REQUESTS, ROWS, WIDTH, CLASSES = 12, 8, 32, 4


def model(depth: int) -> Any:
    """Return a model of so many layers: its parameters, and a function to the scores of each row."""
    keys = jax.random.split(jax.random.key(depth), depth + 1)
    layers = [np.asarray(jax.random.normal(key, (WIDTH, WIDTH)) / WIDTH**0.5) for key in keys[1:]]
    last = np.asarray(jax.random.normal(keys[0], (WIDTH, CLASSES)))

    def scores(x: Any) -> Any:
        for weights in layers:
            x = jnp.tanh(x @ weights)
        return jax.nn.softmax(x @ last)

    return scores


def is_unsure(scores: Any) -> Any:
    """Whether the best class is not clear in some rows."""
    return jnp.mean(jnp.max(scores, axis=-1)) < 0.55


def main() -> None:
    """Answer requests, and compare with both models in plain JAX."""
    small, large = model(1), model(6)
    with pw.LocalCluster(islands=2, hosts_per_island=2, devices_per_host=1):
        slices = pw.make_virtual_device_set()
        near, far = (
            pw.Mesh(slices.add_slice(devices=2, island=island).devices, ("data",))
            for island in ("island-0", "island-1")
        )
        rows = {"in_shardings": P("data"), "out_shardings": P("data")}
        draft, ask = pw.jit(small, mesh=near, **rows), pw.jit(large, mesh=far, **rows)
        unsure = pw.jit(is_unsure, mesh=near, in_shardings=P("data"))

        @pw.program
        def answer(x: Any) -> Any:
            drafted = draft(x)
            is_asked = unsure(drafted)
            return pw.cond(is_asked, lambda: ask(x), lambda: drafted), is_asked

        draw = np.random.default_rng(0).normal
        sizes = np.linspace(0.01, 1, REQUESTS)  # of small numbers the small model is not sure
        requests = [draw(scale=size, size=(ROWS, WIDTH)).astype(np.float32) for size in sizes]
        answers = pw.get([answer(x) for x in requests])
    for x, (scores, is_asked) in zip(requests, answers, strict=True):
        np.testing.assert_allclose(scores, (large if is_asked else small)(x), atol=1e-4)
    asked = sum(bool(is_asked) for _, is_asked in answers)
    print(f"{REQUESTS} requests, {asked} of them for the large model; all as in plain JAX")


if __name__ == "__main__":
    main()
