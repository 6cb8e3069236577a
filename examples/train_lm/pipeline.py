"""One training step as one program over two islands.

Each stage of the model runs on its own island and is data-parallel over the hosts of that island:
the mesh axis "dp" divides the rows of a micro-batch and their activations, and every host has all
parameters and optimizer state. The compiler inserts the all-reduce of the gradients, because their
result is declared replicated. The runtime moves activations to the other island, and their
gradients back; it derives these transfers from the placement of the functions.

`train_step` is ordinary Python that runs once, when it is traced. It walks through the tasks of the
schedule and calls one compiled function for each. The trace is a graph, which the runtime runs for
every step. The next run can begin before the last one has ended.

A stage's state is a dict with `params` and `optimizer`. An accumulator sums a stage's gradients
over micro-batches; it is donated from task to task, so each stage holds one of them.
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

_WHOLE = P()
_ROWS = P("dp")
_ROWS_OF_MICRO_BATCHES = P(None, "dp")


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A training step on two islands, and the shardings of its states and batches.

    `train_step(stage0_state, stage1_state, micro_batches)` takes the results of `put_states` and
    `put_batch`. It returns both new states and the loss, as futures, and donates the old states.
    """

    train_step: Callable[[Any, Any, Any], tuple[Any, Any, Any]]
    state_shardings: tuple[Any, Any]
    batch_shardings: tuple[Any, Any]

    def put_states(self, states: tuple[Any, Any]) -> tuple[Any, Any]:
        """Sends each stage's state to all hosts of its island."""
        on0, on1 = self.state_shardings
        return pw.put(states[0], sharding=on0), pw.put(states[1], sharding=on1)

    def put_batch(self, batch: Batch) -> tuple[Any, Any]:
        """Sends a batch's inputs to the hosts of stage 0, its targets to those of stage 1."""
        on0, on1 = self.batch_shardings
        return pw.put(batch.inputs, sharding=on0), pw.put(batch.targets, sharding=on1)


def initial_state(optimizer_config: OptimizerConfig, params: Params) -> dict[str, Any]:
    """Makes the first state of a stage, in this process."""
    optimizer_state = optimizer_config.build().init(params)
    return {"params": params, "optimizer": jax.tree.map(np.asarray, optimizer_state)}


def zero_gradients(params: Params) -> Params:
    """An empty accumulator."""
    zeros: Params = jax.tree.map(jnp.zeros_like, params)
    return zeros


def zero_gradients_and_loss(params: Params) -> tuple[Params, Any]:
    """An empty accumulator of the last stage, which also sums losses."""
    return zero_gradients(params), jnp.float32(0)


def split_micro_batches(batch: Any) -> tuple[Any, ...]:
    """Cuts a batch along its first axis on the hosts, so that the client sends one array."""
    return tuple(batch[index] for index in range(batch.shape[0]))


def loss_and_backward(
    config: ModelConfig,
    params: Params,
    accumulator: tuple[Params, Any],
    activations: Any,
    targets: Any,
) -> tuple[tuple[Params, Any], Any]:
    """Stage 1: adds a micro-batch to the accumulator; also returns the activations' gradient."""
    gradients, loss_sum = accumulator
    loss, (params_gradient, activations_gradient) = jax.value_and_grad(
        partial(stage1_loss, config), argnums=(0, 1)
    )(params, activations, targets)
    return (_add(gradients, params_gradient), loss_sum + loss), activations_gradient


def backward(
    config: ModelConfig, params: Params, accumulator: Params, inputs: Any, activations_gradient: Any
) -> Params:
    """Stage 0: adds a micro-batch; computes the forward again instead of keeping its inside."""
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
    """Allocates a slice of each island and places the two stages on them.

    Args:
        schedule: the tasks of each stage in a step, in order.
        islands: names of the islands for stage 0 and stage 1.
        hosts_per_island: the number of devices of each stage, one a host.
    """
    device_set = pw.make_virtual_device_set()
    mesh0, mesh1 = (
        pw.Mesh(device_set.add_slice(devices=hosts_per_island, island=island).devices, ("dp",))
        for island in islands
    )
    optimizer = optimizer_config.build()
    micro_batch_count = len(schedule[1])

    # The shardings of arguments and results alone decide the parallelism.
    def on(mesh: pw.Mesh, function: Any, inputs: Any, outputs: Any = None, **more: Any) -> Any:
        return pw.jit(function, mesh=mesh, in_shardings=inputs, out_shardings=outputs, **more)

    forward0 = on(mesh0, partial(stage0_forward, config), (_WHOLE, _ROWS), _ROWS)
    backward0 = on(
        mesh0,
        partial(backward, config),
        (_WHOLE, _WHOLE, _ROWS, _ROWS),
        donate_argnums=(1,),
    )
    loss1 = on(
        mesh1,
        partial(loss_and_backward, config),
        (_WHOLE, _WHOLE, _ROWS, _ROWS),
        (_WHOLE, _ROWS),
        donate_argnums=(1,),
    )
    zeros0 = on(mesh0, zero_gradients, (_WHOLE,))
    zeros1 = on(mesh1, zero_gradients_and_loss, (_WHOLE,))
    update_by_mean = partial(update, optimizer, micro_batch_count)
    update0, update1 = (
        on(mesh, update_by_mean, (_WHOLE, _WHOLE), donate_argnums=(0,)) for mesh in (mesh0, mesh1)
    )
    split0, split1 = (
        on(mesh, split_micro_batches, (_ROWS_OF_MICRO_BATCHES,), _ROWS) for mesh in (mesh0, mesh1)
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

    def shardings(spec: Any) -> tuple[Any, Any]:
        return pw.NamedSharding(mesh0, spec), pw.NamedSharding(mesh1, spec)

    return Pipeline(train_step, shardings(_WHOLE), shardings(_ROWS_OF_MICRO_BATCHES))
