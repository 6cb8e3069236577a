"""What the benchmark of islands runs: each a function for a mesh with the axes "island" and "data".

- *data-parallel*: a decoder LM; the gradients are added up over all devices.
- *FSDP*: the same with a scan over its layers, whose weights are split over "island" outside of the layer.
- *tensor-parallel*: the same with feed-forward layers that are split over "island": each layer adds up
  activations over islands, forwards and backwards.
- *experts*: each device has an expert, and all rows go to experts and back by all-to-alls over all devices.
  Rows take the experts in turn, so equal numbers of rows go everywhere.
- *small*: a mean over all devices, as `jax.pmap` would be used, which takes no time itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import pw
from bench.measure import timed
from bench.models import Shape, lm_init
from bench.training import SEED, Optimizer, Task, Trainer

BOTH = ("island", "data")
WARM_UP = 3


@dataclass(frozen=True, slots=True)
class Scanned(Task):
    """A decoder LM whose layers are a scan."""

    def initial_state(self, seed: Any) -> Any:
        """The first parameters, those of the layers in one array each, and optimizer state."""
        params = lm_init(self.shape, seed)
        params["blocks"] = jax.tree.map(lambda *layers: jnp.stack(layers), *params["blocks"])
        return params, self.optimizer().init(params)


Specs = Callable[[tuple[str, ...]], P]
"""How a parameter lies, by the names on its path."""


def replicated(names: tuple[str, ...]) -> P:
    """All of it is on each device."""
    return P()


def split_layers(names: tuple[str, ...]) -> P:
    """Weights of a scan's layers are split over islands."""
    return P(None, "island") if "blocks" in names else P()


def split_features(names: tuple[str, ...]) -> P:
    """The features between the two matrices of a feed-forward layer are split over islands."""
    if "feed_forward" in names and names[-1] == "up":
        return P(None, "island")
    return P("island") if "feed_forward" in names and names[-1] == "down" else P()


def language_model(task: Task, mesh: pw.Mesh, specs: Specs, rows: Any = BOTH) -> Trainer:
    """A trainer of a task whose batch is split over the axes `rows`; it has run a few steps."""
    state = _specs(jax.eval_shape(task.initial_state, SEED), specs)
    step = pw.jit(
        task.step,
        mesh=mesh,
        in_shardings=(state, P(rows)),
        out_shardings=(state, P()),
        donate_argnums=(0,),
    )
    first = pw.jit(task.initial_state, mesh=mesh, out_shardings=state)(SEED)
    trainer = Trainer(step, first, task.batch)
    trainer.run(WARM_UP)
    return trainer


def _specs(state: Any, specs: Specs) -> Any:
    def of(path: Any, leaf: Any) -> P:
        names = tuple(str(getattr(key, "key", getattr(key, "name", ""))) for key in path)
        return specs(names) if leaf.ndim else P()

    return jax.tree_util.tree_map_with_path(of, state)


@dataclass(frozen=True, slots=True)
class Experts:
    """A layer of experts, one on each device."""

    rows: int
    """Of a batch."""
    width: int

    @property
    def tokens_per_step(self) -> int:
        """Rows of a batch."""
        return self.rows

    def least_bytes(self, devices: int) -> float:
        """Bytes that a device sends to other islands in a step: of four all-to-alls, the half of its rows."""
        return 4 * self.rows / devices * self.width * 4 / 2

    def trainer(self, mesh: pw.Mesh) -> Trainer:
        """A trainer of the experts and of their rows, which has run a few steps."""
        draw = np.random.default_rng(SEED)
        devices, width = mesh.size, self.width

        def normal(*shape: int) -> Any:
            return (draw.normal(size=shape) / width**0.5).astype(np.float32)

        state = (
            normal(devices, width, 2 * width),
            normal(devices, 2 * width, width),
            normal(self.rows, width),
        )

        def layer(up: Any, down: Any, x: Any) -> Any:
            sent = jax.lax.all_to_all(x.reshape(devices, -1, width), BOTH, 0, 0)
            made = jax.nn.gelu(sent.reshape(-1, width) @ up[0]) @ down[0]
            back = jax.lax.all_to_all(made.reshape(devices, -1, width), BOTH, 0, 0)
            return back.reshape(x.shape)

        def step(state: Any, batch: Any) -> Any:
            def loss(state: Any) -> Any:
                own = jax.shard_map(layer, in_specs=P(BOTH), out_specs=P(BOTH), check_vma=False)
                return jnp.mean((own(*state) - state[2]) ** 2) + batch

            found, gradients = jax.value_and_grad(loss)(state)
            return jax.tree.map(lambda a, b: a - 0.1 * b, state, gradients), found

        made = pw.jit(
            step,
            mesh=mesh,
            in_shardings=(P(BOTH), P()),
            out_shardings=(P(BOTH), P()),
            donate_argnums=(0,),
        )
        placed = pw.put(state, sharding=pw.NamedSharding(mesh, P(BOTH)))
        trainer = Trainer(made, placed, lambda _: np.float32(0))
        trainer.run(WARM_UP)
        return trainer


def small_calls(mesh: pw.Mesh) -> Callable[[int], float]:
    """Return a function that calls a small one so many times, in a chain, and returns the time in seconds."""

    def mean(x: Any) -> Any:
        return (x + jax.lax.pmean(x, BOTH)) / 2

    split = P(BOTH)

    @pw.jit(mesh=mesh, in_shardings=split, out_shardings=split)
    def call(x: Any) -> Any:
        return jax.shard_map(mean, in_specs=split, out_specs=split)(x)

    x = pw.put(np.ones((mesh.size, 8), np.float32), sharding=pw.NamedSharding(mesh, split))

    def run(count: int) -> Any:
        made = x
        for _ in range(count):
            made = call(made)
        pw.block_until_ready(made)

    return timed(run)


def tasks(shape: Shape, rows: int, optimizer: Optimizer) -> tuple[Task, Task]:
    """Return a decoder LM, and the same with a scan over its layers."""
    common = shape, rows, lambda: optimizer
    return Task("lm", "lm", *common), Scanned("scan", "lm", *common)
