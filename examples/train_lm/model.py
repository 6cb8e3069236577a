"""A small decoder-only Transformer in plain jax.numpy, cut into two pipeline stages.

Stage 0 turns bytes into activations (embeddings and the first half of the blocks); stage 1 turns
activations into next-byte logits and a loss. This file does not use `pw`: a stage is an
ordinary function of (parameters, inputs), and the reference composes both.

Blocks are pre-norm (RMSNorm), with causal multi-head attention and a GELU feed-forward layer, all
in float32. The first weights that write into the residual stream are smaller by sqrt(2 * blocks),
as in GPT-2, so the first loss is that of a uniform guess: ln 256 = 5.55 nats a byte.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

Params = dict[str, Any]
"""A tree of float32 arrays."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes of the model. The vocabulary is bytes; each stage has half of the `blocks`."""

    width: int = 96
    heads: int = 4
    blocks: int = 4
    context: int = 64
    vocabulary: int = 256


@dataclass(frozen=True, slots=True)
class OptimizerConfig:
    """AdamW with a linear warm-up and inverse-square-root decay after it; one instance a stage."""

    peak_learning_rate: float = 5e-3
    warm_up_steps: int = 20
    weight_decay: float = 0.01
    clip_norm: float = 1.0

    def build(self) -> optax.GradientTransformation:
        """Makes the optax transformation, which clips by the norm of one stage's gradient."""

        def learning_rate(step: Any) -> Any:
            progress = (step + 1) / self.warm_up_steps
            return self.peak_learning_rate * jnp.minimum(progress, jax.lax.rsqrt(progress))

        return optax.chain(
            optax.clip_by_global_norm(self.clip_norm),
            optax.adamw(learning_rate, b2=0.95, weight_decay=self.weight_decay),
        )


def init_params(config: ModelConfig, seed: int) -> tuple[Params, Params]:
    """Draws the parameters of both stages with numpy, the same on every machine."""
    draw = np.random.default_rng(seed)
    residual_scale = (2 * config.blocks) ** -0.5

    def weight(*shape: int, scale: float = 1.0) -> Any:
        return (draw.standard_normal(shape) * 0.02 * scale).astype(np.float32)

    def gain() -> Any:
        return np.ones(config.width, np.float32)

    def block() -> Params:
        return {
            "attention_norm": gain(),
            "qkv": weight(config.width, 3 * config.width),
            "attention_out": weight(config.width, config.width, scale=residual_scale),
            "feed_forward_norm": gain(),
            "up": weight(config.width, 4 * config.width),
            "down": weight(4 * config.width, config.width, scale=residual_scale),
        }

    half = config.blocks // 2
    stage0 = {
        "bytes": weight(config.vocabulary, config.width),
        "positions": weight(config.context, config.width),
        "blocks": [block() for _ in range(half)],
    }
    stage1 = {
        "blocks": [block() for _ in range(config.blocks - half)],
        "final_norm": gain(),
        "logits": weight(config.width, config.vocabulary),
    }
    return stage0, stage1


def count_params(*stages: Params) -> int:
    """Counts the parameters."""
    return sum(int(np.size(leaf)) for leaf in jax.tree.leaves(stages))


def stage0_forward(config: ModelConfig, params: Params, inputs: Any) -> Any:
    """Bytes int32 `[rows, context]` to activations float32 `[rows, context, width]`."""
    x = params["bytes"][inputs] + params["positions"]
    for block in params["blocks"]:
        x = _block(config, block, x)
    return x


def stage1_logits(config: ModelConfig, params: Params, activations: Any) -> Any:
    """Activations to next-byte logits, float32 `[rows, context, vocabulary]`."""
    x = activations
    for block in params["blocks"]:
        x = _block(config, block, x)
    return _rms_norm(x, params["final_norm"]) @ params["logits"]


def stage1_loss(config: ModelConfig, params: Params, activations: Any, targets: Any) -> Any:
    """Mean cross-entropy in nats a byte of `targets`, int32 `[rows, context]`."""
    logits = stage1_logits(config, params, activations)
    chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - chosen)


def whole_loss(
    config: ModelConfig, stages: tuple[Params, Params], inputs: Any, targets: Any
) -> Any:
    """The loss of the uncut model, for the reference and for evaluation."""
    return stage1_loss(config, stages[1], stage0_forward(config, stages[0], inputs), targets)


def _rms_norm(x: Any, gain: Any) -> Any:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * gain


def _block(config: ModelConfig, params: Params, x: Any) -> Any:
    x = x + _attention(config, params, _rms_norm(x, params["attention_norm"]))
    hidden = jax.nn.gelu(_rms_norm(x, params["feed_forward_norm"]) @ params["up"])
    return x + hidden @ params["down"]


def _attention(config: ModelConfig, params: Params, x: Any) -> Any:
    rows, context, width = x.shape
    head_width = width // config.heads
    qkv = (x @ params["qkv"]).reshape(rows, context, 3, config.heads, head_width)
    query, key, value = qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]
    scores = jnp.einsum("rqhd,rkhd->rhqk", query, key) * head_width**-0.5
    causal = jnp.tril(jnp.ones((context, context), bool))
    attention = jax.nn.softmax(jnp.where(causal, scores, -1e30), axis=-1)
    mixed = jnp.einsum("rhqk,rkhd->rqhd", attention, value).reshape(rows, context, width)
    return mixed @ params["attention_out"]
