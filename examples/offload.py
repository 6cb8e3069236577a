"""Training whose optimizer's state lies in host memory between steps: in `pw.jit`, and in plain JAX.

Run it: `python -m examples.offload`. Four trainings have the same losses: with the moments of Adam in the
memory of the devices and in that of their hosts, as a `pw.jit` function and as one of `jax.jit`. It starts a
cluster beside itself. With PW_ADDRESS it runs on that cluster, whose devices nothing else should use: it
prints what their memory holds.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import pw
import pw.jax

WIDTH, LAYERS, ROWS, STEPS, DEVICES = 256, 4, 32, 20, 2
RATE, DECAY, DECAY_OF_SQUARES = 1e-3, 0.9, 0.999

_draw = np.random.default_rng(0)
WEIGHTS = _draw.normal(size=(LAYERS, WIDTH, WIDTH)).astype(np.float32) / np.float32(WIDTH**0.5)
INPUTS = _draw.normal(size=(ROWS, WIDTH)).astype(np.float32)
TARGETS = np.roll(INPUTS, 1, axis=1)


def loss_of(weights: Any, x: Any, y: Any) -> Any:
    """The mean square of what a few layers get wrong."""
    for layer in weights:
        x = jnp.tanh(x @ layer)
    return jnp.mean((x - y) ** 2)


def adam(weights: Any, moments: Any, number: Any, gradient: Any) -> Any:
    """Return the weights and the moments after a step."""
    first = DECAY * moments["first"] + (1 - DECAY) * gradient
    second = DECAY_OF_SQUARES * moments["second"] + (1 - DECAY_OF_SQUARES) * gradient**2
    mean = first / (1 - DECAY**number)
    scale = jnp.sqrt(second / (1 - DECAY_OF_SQUARES**number)) + 1e-8
    return weights - RATE * mean / scale, {"first": first, "second": second}


def train(jit: Callable[..., Any], devices: Any, kind: str) -> tuple[list[float], int]:
    """Return the losses, and the bytes of arrays on a device after the last step.

    Args:
        jit: `jax.jit` or `pw.jit`.
        devices: the devices.
        kind: JAX's name of the memory in which the moments lie.
    """
    mesh = Mesh(np.array(devices), ("x",))
    split, whole = NamedSharding(mesh, P(None, None, "x")), NamedSharding(mesh, P())
    away = split.with_memory_kind(kind)

    def step(weights: Any, moments: Any, number: Any, x: Any, y: Any) -> Any:
        moments = jax.device_put(moments, split)
        loss, gradient = jax.value_and_grad(loss_of)(weights, x, y)
        weights, moments = adam(weights, moments, number, gradient)
        return weights, jax.device_put(moments, away), loss

    run = jit(step, donate_argnums=(0, 1), out_shardings=(split, away, whole))
    weights = jax.device_put(WEIGHTS, split)
    zeros = np.zeros_like(WEIGHTS)
    moments = jax.device_put({"first": zeros, "second": zeros}, away)
    x, y = jax.device_put((INPUTS, TARGETS), whole)
    losses = []
    for number in range(1, STEPS + 1):
        weights, moments, loss = run(
            weights, moments, jax.device_put(np.float32(number), whole), x, y
        )
        losses.append(float(loss))
    size_bytes = until_steady()
    for array in jax.tree.leaves((weights, moments, x, y)):
        array.delete()
    return losses, size_bytes


def until_steady() -> int:
    """Return the bytes of arrays on a device, once no step is in flight and dead arrays are gone."""
    before = -1
    for _ in range(600):
        now = max(device.arrays_bytes or 0 for device in pw.memory().devices)
        if now == before:
            return now
        before = now
        time.sleep(0.1)
    raise TimeoutError("other clients change what lies on the devices of this cluster")


def main() -> None:
    """Train four times, and compare."""
    pw.jax.connect(devices=DEVICES)
    own = pw.make_virtual_device_set().add_slice(devices=DEVICES)
    expected: list[float] = []
    for name, jit, devices in (
        ("pw.jit", pw.jit, own.devices),
        ("jax.jit", jax.jit, jax.devices()),
    ):
        sizes = {}
        for kind in ("device", "pinned_host"):
            losses, sizes[kind] = train(jit, devices, kind)
            expected = expected or losses
            assert losses == expected, (name, kind, losses, expected)
            print(
                f"{name}, moments in {kind}: {sizes[kind]} bytes on a device, loss {losses[-1]:.4f}"
            )
        moments_bytes = 2 * WEIGHTS.nbytes // DEVICES
        assert sizes["device"] - sizes["pinned_host"] > 0.99 * moments_bytes, sizes
    print(f"{len(expected)} losses, four times the same, bit for bit")


if __name__ == "__main__":
    main()
