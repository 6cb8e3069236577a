"""The two small language models of the training benchmarks, in plain jax.numpy.

The **decoder LM** is a causal Transformer with learned positions. It can be cut into any number of
pipeline stages. The parameters of a stage decide its work: a stage with `tokens` embeds them, a
stage with `logits` computes them. The whole model is one stage. The **encoder-decoder** is in the
style of T5 (Raffel et al., 2020): RMS norms without biases, cross attention, and attention scores
that are not scaled but get a bias for each bucket of relative positions, shared by the layers of a
stack.

jax.random draws the parameters from a seed and the layer's number, so every cut of a model, and
every process, begins with the same parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

Params = dict[str, Any]
"""A tree of float32 arrays."""

BUCKETS = 32
FARTHEST = 128
"""Longer distances share one bucket."""
_EMBEDDING, _ENDING, _ENCODER, _DECODER = range(10_000, 10_004)
"""Numbers for `_Draw` of parameters outside of layers."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a model; `layers` is the number in each stack.

    With `recompute`, the backward pass computes the inside of a block again instead of keeping it.
    Matrices are multiplied in `dtype`; parameters and sums are in float32.
    """

    width: int
    heads: int
    layers: int
    context: int
    vocabulary: int = 512
    recompute: bool = False
    dtype: str = "float32"


class _Draw:
    """Draws one layer's parameters."""

    def __init__(self, seed: Any, layer: int, scale: float = 1.0) -> None:
        self._key = jax.random.fold_in(jax.random.key(seed), layer)
        self._residual_scale = scale
        self._drawn = 0

    def weight(self, *shape: int, residual: bool = False, std: float = 0.02) -> Any:
        """Normal numbers; smaller in weights that write to the residual stream."""
        self._drawn += 1
        scale = self._residual_scale if residual else 1.0
        return jax.random.normal(jax.random.fold_in(self._key, self._drawn), shape) * std * scale

    def attention(self, width: int) -> Params:
        """Query, and key with value, which in cross attention have another input."""
        return {
            "norm": jnp.ones(width),
            "query": self.weight(width, width),
            "key_value": self.weight(width, 2 * width),
            "out": self.weight(width, width, residual=True),
        }

    def feed_forward(self, width: int) -> Params:
        """Two matrices; the hidden layer is four times as wide."""
        return {
            "norm": jnp.ones(width),
            "up": self.weight(width, 4 * width),
            "down": self.weight(4 * width, width, residual=True),
        }


def rms_norm(x: Any, gain: Any) -> Any:
    """RMS norm over the last axis."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * gain


def cross_entropy(logits: Any, targets: Any) -> Any:
    """Mean over all positions, in nats; `targets` are int32 `[rows, context]`."""
    chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - chosen)


def _matmul(shape: Shape, x: Any, weight: Any) -> Any:
    return (x.astype(shape.dtype) @ weight.astype(shape.dtype)).astype(jnp.float32)


def _attention(shape: Shape, params: Params, x: Any, memory: Any, bias: Any, scale: float) -> Any:
    """Attention from normed `x` to `memory` (None: to itself); adds `bias` to the scores."""
    x = rms_norm(x, params["norm"])
    memory = x if memory is None else memory

    def split(y: Any, parts: int) -> Any:
        heads = (parts, shape.heads, shape.width // shape.heads)
        return jnp.moveaxis(y.reshape(*y.shape[:2], *heads), 2, 0).astype(shape.dtype)

    (query,) = split(_matmul(shape, x, params["query"]), 1)
    key, value = split(_matmul(shape, memory, params["key_value"]), 2)
    scores = jnp.einsum("rqhd,rkhd->rhqk", query, key).astype(jnp.float32) * scale + bias
    weights = jax.nn.softmax(scores, axis=-1).astype(shape.dtype)
    mixed = jnp.einsum("rhqk,rkhd->rqhd", weights, value)
    return _matmul(shape, mixed.reshape(x.shape), params["out"])


def _feed_forward(shape: Shape, params: Params, x: Any, activate: Callable[[Any], Any]) -> Any:
    hidden = activate(_matmul(shape, rms_norm(x, params["norm"]), params["up"]))
    return _matmul(shape, hidden, params["down"])


def _causal(queries: int, keys: int) -> Any:
    return jnp.where(jnp.tril(jnp.ones((queries, keys), bool)), 0.0, -1e30)


def lm_init(shape: Shape, seed: Any, stage: int = 0, stages: int = 1) -> Params:
    """The parameters of one stage of a decoder LM that is cut into `stages` stages."""
    assert shape.layers % stages == 0
    each = shape.layers // stages
    params: Params = {"blocks": []}
    if stage == 0:
        draw = _Draw(seed, _EMBEDDING)
        params["tokens"] = draw.weight(shape.vocabulary, shape.width)
        params["positions"] = draw.weight(shape.context, shape.width)
    for layer in range(stage * each, (stage + 1) * each):
        draw = _Draw(seed, layer, (2 * shape.layers) ** -0.5)
        params["blocks"].append(
            {
                "attention": draw.attention(shape.width),
                "feed_forward": draw.feed_forward(shape.width),
            }
        )
    if stage == stages - 1:
        params["norm"] = jnp.ones(shape.width)
        params["logits"] = _Draw(seed, _ENDING).weight(shape.width, shape.vocabulary)
    return params


def lm_stage(shape: Shape, params: Params, x: Any) -> Any:
    """One stage: tokens int32 `[rows, context]` or activations to activations or logits.

    Its blocks are a list, or the tree of one block with all of them in each array, for a scan, in which each
    device has all weights of a block.
    """

    def block(params: Params, x: Any) -> Any:
        scale = (shape.width // shape.heads) ** -0.5
        mask = _causal(shape.context, shape.context)
        x = x + _attention(shape, params["attention"], x, None, mask, scale)
        return x + _feed_forward(shape, params["feed_forward"], x, jax.nn.gelu)

    if shape.recompute:
        block = jax.checkpoint(block)
    if "tokens" in params:
        x = params["tokens"][x] + params["positions"]
    blocks = params["blocks"]
    if isinstance(blocks, list):
        for layer in blocks:
            x = block(layer, x)
    else:

        def step(x: Any, layer: Params) -> Any:
            whole = jax.lax.with_sharding_constraint(layer, P())
            return block(whole, x), None

        x, _ = jax.lax.scan(step, x, blocks)
    if "logits" in params:
        x = _matmul(shape, rms_norm(x, params["norm"]), params["logits"])
    return x


def lm_loss(shape: Shape, params: Params, batch: Any) -> Any:
    """The mean loss over a batch int32 `[rows, context + 1]` of the uncut decoder LM."""
    return cross_entropy(lm_stage(shape, params, batch[:, :-1]), batch[:, 1:])


def t5_init(shape: Shape, seed: Any) -> Params:
    """The parameters of an encoder-decoder."""
    width, scale = shape.width, (2 * shape.layers) ** -0.5

    def stack(first: int, cross: bool) -> Params:
        blocks = []
        for layer in range(first, first + shape.layers):
            draw = _Draw(seed, layer, scale)
            block = {"attention": draw.attention(width)}
            if cross:
                block["cross"] = draw.attention(width)
            blocks.append({**block, "feed_forward": draw.feed_forward(width)})
        positions = _Draw(seed, _DECODER if cross else _ENCODER).weight(BUCKETS, shape.heads)
        return {"blocks": blocks, "positions": positions, "norm": jnp.ones(width)}

    return {
        "tokens": _Draw(seed, _EMBEDDING).weight(shape.vocabulary, width, std=1.0),
        "encoder": stack(0, cross=False),
        "decoder": stack(shape.layers, cross=True),
        "logits": _Draw(seed, _ENDING).weight(width, shape.vocabulary),
    }


def position_buckets(queries: int, keys: int, both_ways: bool) -> Any:
    """The bucket of each relative position, int32 `[queries, keys]` (T5, section 2.1).

    Half of the buckets are for one near position each, the others grow logarithmically. An encoder
    (`both_ways`) has as many for later positions as for earlier positions.
    """
    ahead = jnp.arange(keys)[None, :] - jnp.arange(queries)[:, None]
    buckets = BUCKETS // 2 if both_ways else BUCKETS
    base = jnp.where(ahead > 0, buckets, 0) if both_ways else 0
    distance = jnp.abs(ahead) if both_ways else jnp.maximum(-ahead, 0)
    near = buckets // 2
    growth = jnp.log(jnp.maximum(distance, 1) / near) / jnp.log(FARTHEST / near)
    far = near + (growth * (buckets - near)).astype(jnp.int32)
    return base + jnp.where(distance < near, distance, jnp.minimum(far, buckets - 1))


def t5_loss(shape: Shape, params: Params, batch: Any) -> Any:
    """The mean loss over a batch int32 `[rows, 2 * context]`: sources, then their targets."""
    source, target = batch[:, : shape.context], batch[:, shape.context :]

    def block(params: Params, x: Any, memory: Any, bias: Any) -> Any:
        x = x + _attention(shape, params["attention"], x, None, bias, 1.0)
        if "cross" in params:
            x = x + _attention(shape, params["cross"], x, memory, 0.0, 1.0)
        return x + _feed_forward(shape, params["feed_forward"], x, jax.nn.relu)

    if shape.recompute:
        block = jax.checkpoint(block)

    def stack(params: Params, x: Any, memory: Any) -> Any:
        encoding, length = memory is None, x.shape[1]
        bias = jnp.moveaxis(params["positions"][position_buckets(length, length, encoding)], -1, 0)
        bias = bias if encoding else bias + _causal(length, length)
        for layer in params["blocks"]:
            x = block(layer, x, memory, bias)
        return rms_norm(x, params["norm"])

    memory = stack(params["encoder"], params["tokens"][source], None)
    shifted = jnp.pad(target[:, :-1], ((0, 0), (1, 0)))
    out = stack(params["decoder"], params["tokens"][shifted], memory)
    return cross_entropy(_matmul(shape, out, params["logits"]), target)
