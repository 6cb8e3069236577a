"""A training in plain JAX that goes on with fewer slices, as scripts for Pathways on Cloud do.

`python elastic_script.py` uses the elastic manager of `pathwaysutils`. Its parent kills a host when it reads
`step 10`, and starts it again when it reads `step 30`.
"""

from __future__ import annotations

import logging
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from pathwaysutils.elastic import manager

P = PartitionSpec
STEPS, RETURNS_AT = 60, 45
logging.disable(logging.CRITICAL)  # of tracebacks
slices = manager.Manager()
saved: tuple[int, Any] = 0, np.zeros((8, 8), np.float32)
history: list[int] = []


@slices.elastic_retry(minimum_slice_count=1, poll_interval=0.2, timeout=60)
def train() -> np.ndarray[Any, Any]:
    """Train on the slices that are active, from the last saved step on."""
    global saved
    chosen = sorted(slices.active_slice_indices)
    history.append(len(chosen))
    devices = np.array([slices.slice_to_devices[index] for index in chosen])
    mesh = Mesh(devices, ("slice", "data"))
    rows = NamedSharding(mesh, P(("slice", "data")))
    number, weights = saved[0], jax.device_put(saved[1], NamedSharding(mesh, P()))

    @jax.jit
    def step(weights: Any, x: Any) -> Any:
        return weights + jnp.mean(x @ weights + 1, axis=0)

    while number < STEPS:
        if slices.available_inactive_slices:
            raise manager.ScaleUpSignalError
        if number == RETURNS_AT and len(chosen) < slices.total_slice_count:
            time.sleep(0.1)  # the training would be over before the slice is back
            continue
        x = jax.device_put(np.full((8, 8), 0.01, np.float32), rows)
        weights = step(weights, x).block_until_ready()
        number += 1
        if number % 5 == 0:
            saved = number, np.asarray(weights)
        if number % 10 == 0:
            print("step", number, flush=True)
    return np.asarray(weights)


trained = train()
print("slices", history, float(trained.sum()).hex())
