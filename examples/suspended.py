"""Trains, leaves its devices for another user, and ends on the other island with the same losses.

Run it: `python -m examples.suspended`. It starts a cluster of two islands and trains on one of them. In the
midst another process suspends the training, as an operator would (`pw suspend CLIENT`), and takes all devices
of that island for itself. `pw resume` has the training go on, and it gets devices of the other island. The loop
notices nothing: it reads the losses at the end.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import pw

STEPS, ROWS, WIDTH = 200, 64, 128
LEAVE_AT = 50
"""Step before which the training is suspended."""

OTHER = """
import sys, pw
slice = pw.make_virtual_device_set().add_slice(devices=2, island=sys.argv[1], exclusive=True)
print("has devices", flush=True)
sys.stdin.read()
"""
"""Script of the other user, who holds the devices until its input ends."""


def loss_of(weights: Any, batch: Any) -> Any:
    """Return the error of a small network that learns the sine of its input."""
    return jnp.mean((jnp.tanh(batch @ weights["in"]) @ weights["out"] - jnp.sin(batch)) ** 2)


def train(slice_: Any, before: dict[int, Any]) -> list[float]:
    """Train on a slice, and return all losses; before some steps a function is called."""
    mesh = pw.Mesh(slice_.devices, ("data",))
    same, rows = pw.NamedSharding(mesh, P()), pw.NamedSharding(mesh, P("data"))

    @pw.jit(donate_argnums=0, out_shardings=(same, same))
    def step(weights: Any, batch: Any) -> Any:
        loss, slopes = jax.value_and_grad(loss_of)(weights, batch)
        return jax.tree.map(lambda weight, slope: weight - 0.1 * slope, weights, slopes), loss

    random = np.random.default_rng(0)
    shapes = {"in": (WIDTH, WIDTH), "out": (WIDTH, WIDTH)}
    weights = {
        name: pw.put(random.standard_normal(shape).astype(np.float32) / 16, same)
        for name, shape in shapes.items()
    }
    losses = []
    for number in range(STEPS):
        before.get(number, lambda: None)()
        batch = pw.put(random.standard_normal((ROWS, WIDTH)).astype(np.float32), rows)
        weights, loss = step(weights, batch)
        losses.append(loss)
    return [float(loss) for loss in pw.get(losses)]


def main() -> None:
    """Train twice, once undisturbed, and compare."""
    with pw.LocalCluster(islands=2, devices_per_host=2) as cluster:
        (me,) = [client.number for client in pw.status().clients if client.is_me]
        slice_ = pw.make_virtual_device_set().add_slice(devices=2, exclusive=True)
        at = ["--address", cluster.address]
        others: list[subprocess.Popen[str]] = []

        def operator(*words: object) -> None:
            """Run a command of `pw`, as an operator does."""
            subprocess.run([sys.executable, "-m", "pw.cli.main", *map(str, words), *at], check=True)

        def leave() -> None:
            """Have another user take the devices; its script runs until the end."""
            home = slice_.island
            operator("suspend", me)
            script = [sys.executable, "-c", OTHER, home]
            address = {"PW_ADDRESS": cluster.address}
            other = subprocess.Popen(
                script,
                env={**os.environ, **address},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            others.append(other)
            assert other.stdout is not None
            print(f"  suspended on {home}; the other user {other.stdout.readline().strip()}")
            operator("resume", me)

        print("alone")
        alone = train(slice_, {})
        print("suspended in the midst")
        losses = train(slice_, {LEAVE_AT: leave})
        print(f"  it went on on {slice_.island}")
        for other in others:
            other.communicate()
        if losses != alone:
            raise AssertionError("the losses differ")
        print(
            f"all {len(losses)} losses are the same, bit for bit: {losses[0]:.4f} to {losses[-1]:.4f}"
        )


if __name__ == "__main__":
    main()
