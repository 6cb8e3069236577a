"""Plain JAX in one process over its own devices: the baseline of `bench.train` and `bench.gpu`.

With the platform `pw`, the same script runs on the gateway: a contender of `bench.gateway`.

The function that sets up pw's workers sets it up too, so devices and thread pools are the same. It
traces without 64-bit types, as pw's client does. It trains with the steps and batches of
`bench.training`, compiled by `jax.jit` with the same shardings and donation.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import pw.jax
from bench.baselines.peer import Peer, serve
from bench.baselines.steps import local
from bench.baselines.two_ways import in_common, one_way
from bench.training import SEED, TASKS, Trainer
from pw.devices.jax import group

DISPATCH = "dispatch"
ONE_WAY = "one way"
GATEWAY = "pw"
READY_S = 300.0
"""Compiling a training step takes long, on a GPU with its autotuning above all."""


class PlainJax(Peer):
    """One process, or several that measure together and each do the same.

    Args:
        work: the name of a task of `bench.training`, `DISPATCH`, or `ONE_WAY` and the bytes of an array.
        devices: the number of devices of each process.
        platform: `cpu`, `cuda`, or `pw` for a cluster that the script starts beside itself.
        processes: the number of processes.
        address: of the cluster for `pw`, in place of one beside the script.

    Raises:
        GaveUp: it did not become ready.
    """

    def __init__(
        self, work: str, devices: int, platform: str = "cpu", processes: int = 1, address: str = ""
    ) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._losses = [Path(self._folder.name) / str(rank) for rank in range(processes)]
        arguments = [[work, str(devices), platform, str(path), address] for path in self._losses]
        name = "gateway" if platform == GATEWAY else "JAX"
        super().__init__(name, "bench.baselines.one_process", arguments, ready_s=READY_S)

    def losses(self) -> list[list[float]]:
        """For each process the losses of all its steps so far."""
        return [json.loads(path.read_text()) for path in self._losses]

    def close(self) -> None:
        """End its processes. Idempotent."""
        super().close()
        self._folder.cleanup()


def mesh_of(devices: int, platform: str, address: str = "") -> Mesh:
    """Set up JAX as in a worker; returns a mesh over the devices of this process, axis "data"."""
    if platform == GATEWAY:
        pw.jax.connect(address or None, devices=devices)
    else:
        group.prepare(platform, devices)
        jax.config.update("jax_enable_x64", False)
    return Mesh(np.array(jax.devices()[:devices]), ("data",))


def training(work: str, mesh: Mesh, losses: Path) -> Mapping[str, Callable[[int], object]]:
    """The case of a task; a count is of steps."""
    task = TASKS[work]
    whole, rows = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
    state = jax.jit(task.initial_state, out_shardings=whole)(SEED)
    step = jax.jit(task.step, in_shardings=(whole, rows), out_shardings=whole, donate_argnums=(0,))
    trainer = Trainer(step, state, task.batch)

    def case(count: int) -> None:
        trainer.run(count)
        losses.write_text(json.dumps(trainer.losses))

    return {work: case}


def dispatch(mesh: Mesh) -> Mapping[str, Callable[[int], object]]:
    """Scalar additions and transfers; a count is of calls."""
    whole = NamedSharding(mesh, P())
    add = jax.jit(local, in_shardings=whole, out_shardings=whole)
    put = partial(jax.device_put, device=whole)

    return in_common(add, put(jnp.float32(0)), put)


def moves(mesh: Mesh, size_bytes: int) -> Mapping[str, Callable[[int], object]]:
    """Arrays that are put, or read; a count is of arrays."""
    whole = NamedSharding(mesh, P())
    add = jax.jit(local, in_shardings=whole, out_shardings=whole)
    return one_way(add, partial(jax.device_put, device=whole), size_bytes)


def main() -> None:
    """WORK DEVICES PLATFORM LOSSES ADDRESS: serve until standard input ends."""
    work, devices, platform, losses, address = sys.argv[1:]

    def prepare() -> Mapping[str, Callable[[int], object]]:
        mesh = mesh_of(int(devices), platform, address)
        if work.startswith(ONE_WAY):
            return moves(mesh, int(work.removeprefix(ONE_WAY)))
        return dispatch(mesh) if work == DISPATCH else training(work, mesh, Path(losses))

    serve(prepare)


if __name__ == "__main__":
    main()
