"""The same training in plain JAX: one process, one device, the uncut model.

It has only these in common with the pipeline: the model's definition, the first parameters, the
batches and the optimizer. It has no micro-batches, no stages and no `pw`. If the losses of both
agree step after step, then the pipeline's gradients, their sums and its updates are right.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import numpy as np
import optax

from examples.train_lm.corpus import Batch, Corpus
from examples.train_lm.model import (
    ModelConfig,
    OptimizerConfig,
    Params,
    stage0_forward,
    stage1_logits,
    whole_loss,
)


def train(
    config: ModelConfig,
    optimizer_config: OptimizerConfig,
    params: tuple[Params, Params],
    batches: list[Batch],
) -> list[float]:
    """Trains over `batches`; returns the loss of each, from before its update."""
    optimizer = optimizer_config.build()

    @jax.jit
    def step(params: Any, optimizer_states: Any, inputs: Any, targets: Any) -> Any:
        loss, gradients = jax.value_and_grad(partial(whole_loss, config))(params, inputs, targets)
        stages = []
        for stage, state, gradient in zip(params, optimizer_states, gradients, strict=True):
            updates, new_state = optimizer.update(gradient, state, stage)
            stages.append((optax.apply_updates(stage, updates), new_state))
        new_params, new_states = zip(*stages, strict=True)
        return new_params, new_states, loss

    states: Any = tuple(optimizer.init(stage) for stage in params)
    stages: Any = params
    losses = []
    for batch in batches:
        # One big batch: the mean over all rows is the mean over micro-batches of equal size.
        inputs = batch.inputs.reshape(-1, config.context)
        targets = batch.targets.reshape(-1, config.context)
        stages, states, loss = step(stages, states, inputs, targets)
        losses.append(float(loss))
    return losses


def held_out_loss(
    config: ModelConfig, params: tuple[Params, Params], corpus: Corpus, rows: int = 256
) -> float:
    """The loss on the held-out text, in nats a byte."""
    batch = corpus.held_out_batch(rows=rows, context=config.context)
    loss = jax.jit(partial(whole_loss, config))(params, batch.inputs[0], batch.targets[0])
    return float(loss)


def generate(
    config: ModelConfig,
    params: tuple[Params, Params],
    *,
    prompt: bytes,
    size_bytes: int,
    seed: int,
    temperature: float = 0.7,
) -> bytes:
    """Continues `prompt` by `size_bytes` sampled bytes."""

    @jax.jit
    def next_byte_logits(stages: Any, window: Any, last: Any) -> Any:
        activations = stage0_forward(config, stages[0], window[None])
        return stage1_logits(config, stages[1], activations)[0, last]

    draw = np.random.default_rng(seed)
    on_device = jax.device_put(params)
    text = bytearray(prompt)
    for _ in range(size_bytes):
        visible = text[-config.context :]
        # Attention is causal, so the bytes before the padding do not see it.
        window = np.zeros(config.context, np.int32)
        window[: len(visible)] = visible
        logits = np.asarray(next_byte_logits(on_device, window, len(visible) - 1), np.float64)
        # The Gumbel trick: the largest of logits plus Gumbel noise is a sample of their softmax.
        text.append(int(np.argmax(logits / temperature + draw.gumbel(size=logits.shape))))
    return bytes(text)
