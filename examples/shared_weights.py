"""One set of weights for many: a trainer publishes, servers follow, an adapter is trained on the same memory.

    python -m examples.shared_weights

Four processes share a cluster of two islands. The trainer donates its weights at each step and publishes every
ten steps. Two servers look up each version, sharded as they need it, while the trainer goes on. Then a third
client trains a low-rank adapter on the published weights, where they lie: they are in memory once.
"""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pw

WIDTH, LAYERS, RANK = 256, 3, 4
STEPS, EVERY = 40, 10
P = pw.PartitionSpec


def mesh_on(island: str) -> pw.Mesh:
    """Two devices of an island."""
    added = pw.make_virtual_device_set().add_slice(devices=2, island=island)
    return pw.Mesh(added.devices, ("model",))


def predict(layers: Any, x: Any) -> Any:
    """A small network; each layer also carries the step at which it was made."""
    for layer in layers:
        x = jnp.tanh(x @ layer["w"])
    return x


def loss_of(layers: Any, x: Any, y: Any) -> Any:
    """Mean squared error."""
    return jnp.mean((predict(layers, x) - y) ** 2)


def samples(seed: int = 0) -> tuple[Any, Any]:
    """Inputs, and what a network with other weights makes of them."""
    random = np.random.default_rng(seed)
    x = random.normal(size=(512, WIDTH)).astype(np.float32)
    teacher = random.normal(size=(WIDTH, WIDTH)).astype(np.float32) / WIDTH**0.5
    return x, np.tanh(x @ teacher)


def train(mesh: pw.Mesh) -> None:
    """Train, and publish every `EVERY` steps."""
    split = pw.NamedSharding(mesh, P(None, "model"))
    random = np.random.default_rng(1)
    scale = np.float32(WIDTH**-0.5)
    weights = [random.normal(size=(WIDTH, WIDTH)).astype(np.float32) * scale for _ in range(LAYERS)]
    number = partial(pw.put, np.int32(0), sharding=replicated(mesh))
    layers = [{"w": pw.put(w, sharding=split), "step": number()} for w in weights]

    @partial(pw.jit, mesh=mesh, donate_argnums=0)
    def step(layers: Any, x: Any, y: Any) -> Any:
        loss, slopes = jax.value_and_grad(loss_of, allow_int=True)(layers, x, y)
        moved = [
            {"w": layer["w"] - 3.0 * slope["w"], "step": layer["step"] + 1}
            for layer, slope in zip(layers, slopes, strict=True)
        ]
        return moved, loss

    x, y = samples()
    losses = []
    for number in range(1, STEPS + 1):
        layers, loss = step(layers, x, y)
        losses.append(loss)
        if number % EVERY == 0:
            pw.publish("base", layers, keep="10m").result()
    print(
        f"trainer: {STEPS // EVERY} versions, loss {losses[0]:.3f} to {losses[-1]:.3f}", flush=True
    )


def replicated(mesh: pw.Mesh) -> pw.NamedSharding:
    """A full copy on each device."""
    return pw.NamedSharding(mesh, P())


def serve(island: str) -> None:
    """Follow the versions, sharded as this server needs them, until the last one."""
    mesh = mesh_on(island)
    like = {"w": pw.NamedSharding(mesh, P("model")), "step": replicated(mesh)}
    answer = pw.jit(predict, mesh=mesh)
    x, y = samples()
    seen = steps = 0
    versions = []
    while steps < STEPS:
        layers = pw.lookup("base", after=seen, like=[like] * LAYERS, wait=60)
        seen = pw.version_of(layers)
        made_at = {int(layer["step"]) for layer in layers}
        assert len(made_at) == 1, f"version {seen} is a mixture of the steps {made_at}"
        (steps,) = made_at
        versions.append(seen)
        error = float(np.mean((np.asarray(answer(layers, x)) - y) ** 2))
    print(
        f"server on {island}: up to version {versions[-1]}, none mixed, error {error:.3f}",
        flush=True,
    )


def adapt() -> None:
    """Train a low-rank adapter on the published weights, which stay as they are."""
    held = bytes_held()
    layers = pw.block_until_ready(pw.lookup("base", wait=60))
    print(f"adapter: the weights take {bytes_held() - held} B more", flush=True)
    mesh = layers[0]["w"].sharding.mesh
    random = np.random.default_rng(2)
    low = [random.normal(size=(WIDTH, RANK)).astype(np.float32) / WIDTH**0.5 for _ in range(LAYERS)]
    adapters = [(w, np.zeros((RANK, WIDTH), np.float32)) for w in low]

    def adapted_loss(adapters: Any, layers: Any, x: Any, y: Any) -> Any:
        pairs = zip(layers, adapters, strict=True)
        return loss_of([{"w": layer["w"] + a @ b} for layer, (a, b) in pairs], x, y)

    @partial(pw.jit, mesh=mesh)
    def step(adapters: Any, layers: Any, x: Any, y: Any) -> Any:
        loss, slopes = jax.value_and_grad(adapted_loss)(adapters, layers, x, y)
        return jax.tree.map(lambda a, slope: a - 10.0 * slope, adapters, slopes), loss

    x, y = samples(3)
    losses = []
    for _ in range(STEPS):
        adapters, loss = step(adapters, layers, x, y)
        losses.append(loss)
    print(f"adapter: loss {losses[0]:.3f} to {losses[-1]:.3f}", flush=True)


def bytes_held() -> int:
    """Bytes of arrays on all devices."""
    return sum(device.arrays_bytes or 0 for device in pw.memory().devices)


def main() -> None:
    """Start the cluster and the other processes, or be one of them."""
    if sys.argv[1:2] == ["serve"]:
        serve(sys.argv[2])
        return
    if sys.argv[1:2] == ["adapt"]:
        adapt()
        return
    with pw.LocalCluster(islands=2, hosts_per_island=1, devices_per_host=4) as cluster:

        def start(*arguments: str) -> subprocess.Popen[bytes]:
            command = [sys.executable, "-m", "examples.shared_weights", *arguments]
            return subprocess.Popen(command, env=os.environ | {"PW_ADDRESS": cluster.address})

        servers = [start("serve", f"island-{at}") for at in range(2)]
        train(mesh_on("island-0"))
        codes = [server.wait() for server in servers] + [start("adapt").wait()]
        assert codes == [0, 0, 0], codes
        print(pw.names())


if __name__ == "__main__":
    main()
