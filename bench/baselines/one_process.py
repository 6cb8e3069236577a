"""Plain JAX in one process over its own devices: what `bench.train` and `bench.gpu` stand beside.

The process is set up by the function that sets up pw's workers, so that devices and thread pools are the
same; it traces without 64-bit types, as pw's client does. The steps and batches of a training are those of
`bench.training`, compiled by `jax.jit` with the same shardings and donation.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from bench.baselines.peer import Peer, serve
from bench.training import SEED, TASKS, Trainer
from pw.devices.jax import group

DISPATCH = "dispatch"
READY_S = 300.0
"""A training step takes a while to compile, on a GPU with all that it tries out."""


class PlainJax:
    """One process, or several that measure together and each do the same.

    Args:
        work: the name of a task of `bench.training`, or `DISPATCH`.
        devices: how many devices each process uses.
        platform: `cpu` or `cuda`.
        processes: how many.

    Raises:
        GaveUp: it did not become ready.
    """

    def __init__(self, work: str, devices: int, platform: str = "cpu", processes: int = 1) -> None:
        self._directory = tempfile.TemporaryDirectory()
        self._losses = [Path(self._directory.name) / str(rank) for rank in range(processes)]
        try:
            self._peer = Peer(
                "JAX",
                "bench.baselines.one_process",
                [[work, str(devices), platform, str(path)] for path in self._losses],
                ready_s=READY_S,
            )
        except BaseException:
            self._directory.cleanup()
            raise

    def seconds(self, case: str, count: int) -> float:
        """How long `count` of a case take: steps of the task, or dispatches of one kind."""
        return self._peer.seconds(case, count)

    def busy_s(self) -> float:
        """Processor time used so far."""
        return self._peer.busy_s()

    def losses(self) -> list[list[float]]:
        """For each process the losses of all its steps up to now."""
        return [json.loads(path.read_text()) for path in self._losses]

    def close(self) -> None:
        """End it. Idempotent."""
        self._peer.close()
        self._directory.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def mesh_of(devices: int, platform: str) -> Mesh:
    """Set up JAX as in a worker; a mesh over the first devices of this process, axis "data"."""
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
    """Scalar additions, each on the result of the one before; a count is of additions."""
    whole = NamedSharding(mesh, P())
    add = jax.jit(lambda x: x + 1, in_shardings=whole, out_shardings=whole)
    zero = jax.device_put(jnp.float32(0), whole)

    def op_by_op(count: int) -> None:
        x: Any = zero
        for _ in range(count):
            x = add(x)
        assert float(x) == count

    return {"op by op": op_by_op}


def main() -> None:
    """WORK DEVICES PLATFORM LOSSES: serve until standard input ends."""
    work, devices, platform, losses = sys.argv[1:]

    def prepare() -> Mapping[str, Callable[[int], object]]:
        mesh = mesh_of(int(devices), platform)
        return dispatch(mesh) if work == DISPATCH else training(work, mesh, Path(losses))

    serve(prepare)


if __name__ == "__main__":
    main()
