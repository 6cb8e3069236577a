"""One training step as one program over two islands.

Each stage of the model lives on an island of its own, and is data-parallel over the hosts of that
island: the rows of a micro-batch and their activations are split over the mesh axis "dp",
parameters and optimizer state are replicated, and the compiler inserts the all-reduce of the
gradients because their result is declared replicated. Between islands the runtime moves
activations one way and their gradients the other; nothing here says so, it follows from where the
functions that make and take them are placed.

`train_step` is ordinary Python that runs once, when it is traced. It walks through the schedule's
tasks and calls one compiled function for each; what it leaves behind is a graph that the runtime
runs for every step, and that can be called again before the last run has ended.

A stage's state is a dict with `params` and `optimizer`. A stage's gradients are summed over
micro-batches in an accumulator that begins as zeros and is donated from task to task, so that
each stage holds one of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

import pw
from examples.train_lm.corpus import Batch
from examples.train_lm.model import (
    ModelConfig,
    OptimizerConfig,
    Params,
    stage0_forward,
    stage1_loss,
)
from examples.train_lm.schedule import Kind, Schedule, merge

_REPLICATED = P()
_ROWS = P("dp")
_ROWS_OF_MICRO_BATCHES = P(None, "dp")


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A training step that is placed on two islands, and the sharding of each stage's state.

    `train_step(stage0_state, stage1_state, micro_batches)` takes what `put_states` and `put_batch`
    return, and gives both new states and the loss, all of them futures. It consumes the states.
    """

    train_step: Callable[[Any, Any, Any], tuple[Any, Any, Any]]
    state_shardings: tuple[Any, Any]
    batch_shardings: tuple[Any, Any]

    def put_states(self, states: tuple[Any, Any]) -> tuple[Any, Any]:
        """Sends each stage's state to all the hosts of its island."""
        stage0, stage1 = (
            pw.put(state, sharding=sharding)
            for state, sharding in zip(states, self.state_shardings, strict=True)
        )
        return stage0, stage1

    def put_batch(self, batch: Batch) -> tuple[Any, Any]:
        """Sends a batch's inputs to the hosts of stage 0, and its targets to those of stage 1."""
        inputs_sharding, targets_sharding = self.batch_shardings
        return (
            pw.put(batch.inputs, sharding=inputs_sharding),
            pw.put(batch.targets, sharding=targets_sharding),
        )


def initial_state(optimizer_config: OptimizerConfig, params: Params) -> dict[str, Any]:
    """Makes the state with which a stage starts, in this process."""
    optimizer_state = optimizer_config.build().init(params)
    return {"params": params, "optimizer": jax.tree.map(np.asarray, optimizer_state)}


def zero_gradients(params: Params) -> Params:
    """An empty accumulator."""
    zeros: Params = jax.tree.map(jnp.zeros_like, params)
    return zeros


def zero_gradients_and_loss(params: Params) -> tuple[Params, Any]:
    """An empty accumulator of the last stage, which sums losses too."""
    return zero_gradients(params), jnp.float32(0)


def split_micro_batches(batch: Any) -> tuple[Any, ...]:
    """Cuts a batch along its first axis, on the hosts: one array to send for all the cuts."""
    return tuple(batch[index] for index in range(batch.shape[0]))


def loss_and_backward(
    config: ModelConfig,
    params: Params,
    accumulator: tuple[Params, Any],
    activations: Any,
    targets: Any,
) -> tuple[tuple[Params, Any], Any]:
    """Stage 1: adds a micro-batch to the accumulator and gives the activations' gradient."""
    gradients, loss_sum = accumulator
    loss, (params_gradient, activations_gradient) = jax.value_and_grad(
        partial(stage1_loss, config), argnums=(0, 1)
    )(params, activations, targets)
    return (_add(gradients, params_gradient), loss_sum + loss), activations_gradient


def backward(
    config: ModelConfig, params: Params, accumulator: Params, inputs: Any, activations_gradient: Any
) -> Params:
    """Stage 0's backward task: computes its forward again rather than keeping what is inside it."""
    _, pull_back = jax.vjp(lambda stage: stage0_forward(config, stage, inputs), params)
    (params_gradient,) = pull_back(activations_gradient)
    return _add(accumulator, params_gradient)


def update(
    optimizer: optax.GradientTransformation,
    micro_batches: int,
    state: dict[str, Any],
    gradients: Params,
) -> dict[str, Any]:
    """Ends a step: one optimizer update with the mean gradient."""
    mean = jax.tree.map(lambda total: total / micro_batches, gradients)
    updates, optimizer_state = optimizer.update(mean, state["optimizer"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "optimizer": optimizer_state}


def _add(left: Params, right: Params) -> Params:
    total: Params = jax.tree.map(jnp.add, left, right)
    return total


def build_pipeline(
    config: ModelConfig,
    optimizer_config: OptimizerConfig,
    schedule: Schedule,
    islands: tuple[str, str],
    hosts_per_island: int,
) -> Pipeline:
    """Asks for a slice of each island and places the two stages on them.

    Args:
        schedule: what each stage computes in a step, in which order.
        islands: names of the islands for stage 0 and stage 1.
        hosts_per_island: number of devices, one a host, over which each stage is data-parallel.
    """
    device_set = pw.make_virtual_device_set()
    mesh0, mesh1 = (
        pw.Mesh(device_set.add_slice(devices=hosts_per_island, island=island).devices, ("dp",))
        for island in islands
    )
    optimizer = optimizer_config.build()
    micro_batch_count = len(schedule[1])

    # Where an argument or a result is sharded is all that is said about parallelism.
    forward0 = pw.jit(
        partial(stage0_forward, config),
        mesh=mesh0,
        in_shardings=(_REPLICATED, _ROWS),
        out_shardings=_ROWS,
    )
    backward0 = pw.jit(
        partial(backward, config),
        mesh=mesh0,
        in_shardings=(_REPLICATED, _REPLICATED, _ROWS, _ROWS),
        donate_argnums=(1,),
    )
    loss1 = pw.jit(
        partial(loss_and_backward, config),
        mesh=mesh1,
        in_shardings=(_REPLICATED, _REPLICATED, _ROWS, _ROWS),
        out_shardings=(_REPLICATED, _ROWS),
        donate_argnums=(1,),
    )
    zeros0 = pw.jit(zero_gradients, mesh=mesh0, in_shardings=(_REPLICATED,))
    zeros1 = pw.jit(zero_gradients_and_loss, mesh=mesh1, in_shardings=(_REPLICATED,))
    update0, update1 = (
        pw.jit(
            partial(update, optimizer, micro_batch_count),
            mesh=mesh,
            in_shardings=(_REPLICATED, _REPLICATED),
            donate_argnums=(0,),
        )
        for mesh in (mesh0, mesh1)
    )
    split0, split1 = (
        pw.jit(
            split_micro_batches,
            mesh=mesh,
            in_shardings=(_ROWS_OF_MICRO_BATCHES,),
            out_shardings=_ROWS,
        )
        for mesh in (mesh0, mesh1)
    )
    mean1 = pw.jit(lambda loss_sum: loss_sum / micro_batch_count, mesh=mesh1)

    @pw.program
    def train_step(stage0: Any, stage1: Any, micro_batches: Any) -> tuple[Any, Any, Any]:
        inputs, targets = split0(micro_batches[0]), split1(micro_batches[1])
        gradients0 = zeros0(stage0["params"])
        accumulator1 = zeros1(stage1["params"])
        activations: dict[int, Any] = {}
        activation_gradients: dict[int, Any] = {}
        for tick in merge(schedule):
            for task in tick:
                index = task.micro_batch
                match task.kind:
                    case Kind.FORWARD:
                        activations[index] = forward0(stage0["params"], inputs[index])
                    case Kind.LOSS:
                        accumulator1, activation_gradients[index] = loss1(
                            stage1["params"], accumulator1, activations.pop(index), targets[index]
                        )
                    case Kind.BACKWARD:
                        gradients0 = backward0(
                            stage0["params"],
                            gradients0,
                            inputs[index],
                            activation_gradients.pop(index),
                        )
        gradients1, loss_sum = accumulator1
        return update0(stage0, gradients0), update1(stage1, gradients1), mean1(loss_sum)

    return Pipeline(
        train_step=train_step,
        state_shardings=(
            pw.NamedSharding(mesh0, _REPLICATED),
            pw.NamedSharding(mesh1, _REPLICATED),
        ),
        batch_shardings=(
            pw.NamedSharding(mesh0, _ROWS_OF_MICRO_BATCHES),
            pw.NamedSharding(mesh1, _ROWS_OF_MICRO_BATCHES),
        ),
    )
