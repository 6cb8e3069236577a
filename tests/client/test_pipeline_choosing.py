"""Models without marks: `pw.pipeline(loss, stages=...)` chooses where they are cut."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import pw
from pw.testing import InProcessCluster
from tests.stages.stage import mesh_on

WIDTH, WORDS, ROWS, LENGTH = 16, 32, 4, 8


def normed(x: Any, gain: Any) -> Any:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * gain


def block(params: Any, x: Any) -> Any:
    """A layer of a Transformer with two heads."""
    rows, length, width = x.shape
    qkv = (normed(x, params["gains"][0]) @ params["qkv"]).reshape(rows, length, 3, 2, width // 2)
    scores = jnp.einsum("rqhd,rkhd->rhqk", qkv[:, :, 0], qkv[:, :, 1]) / width**0.5
    mask = jnp.tril(jnp.ones((length, length), bool))
    weights = jax.nn.softmax(jnp.where(mask, scores, -1e9), axis=-1)
    mixed = jnp.einsum("rhqk,rkhd->rqhd", weights, qkv[:, :, 2]).reshape(x.shape)
    x = x + mixed @ params["out"]
    return x + jax.nn.gelu(normed(x, params["gains"][1]) @ params["up"]) @ params["down"]


def scanned(params: Any, words: Any, targets: Any) -> Any:
    """A model whose layers are a scan; its embedding is tied."""
    x, _ = jax.lax.scan(
        lambda x, layer: (block(layer, x), None), params["words"][words], params["layers"]
    )
    scores = jax.nn.log_softmax(x @ params["words"].T)
    return -jnp.mean(jnp.take_along_axis(scores, targets[..., None], axis=-1))


def draw(*shape: int, seed: int) -> Any:
    return 0.3 * np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def first_params(layers: int, width: int = WIDTH) -> Any:
    return {
        "words": draw(WORDS, width, seed=0),
        "layers": {
            "gains": np.ones((layers, 2, width), np.float32),
            "qkv": draw(layers, width, 3 * width, seed=1),
            "out": draw(layers, width, width, seed=2),
            "up": draw(layers, width, 4 * width, seed=3),
            "down": draw(layers, 4 * width, width, seed=4),
        },
    }


def batch(seed: int = 0) -> tuple[Any, Any]:
    words = np.random.default_rng(seed).integers(0, WORDS, (2, ROWS, LENGTH), dtype=np.int32)
    return words[0], words[1]


@pytest.fixture(scope="module")
def cluster() -> Iterator[InProcessCluster]:
    with InProcessCluster(islands=2, devices_per_island=4) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def meshes(cluster: InProcessCluster) -> list[pw.Mesh]:
    return [mesh_on(stage // 2, devices=1, axis="data") for stage in range(4)]


def near(found: Any, expected: Any) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-4, atol=2e-5)


def test_a_scan_over_layers_is_trained(meshes: list[pw.Mesh]) -> None:
    params = first_params(layers=8)
    step = pw.pipeline(scanned, stages=4, meshes=meshes, microbatches=2, optimizer=optax.sgd(0.1))
    expected_loss, expected = jax.jit(jax.value_and_grad(scanned))(params, *batch())
    loss, gradients = step.gradients(params, *batch())
    near(np.asarray(loss), expected_loss)
    near(pw.get(gradients), expected)
    state = step.init(params, *batch())
    state, loss = step(state, *batch())
    near(np.asarray(loss), expected_loss)
    near(pw.get(step.params(state)), jax.tree.map(lambda p, g: p - 0.1 * g, params, expected))
