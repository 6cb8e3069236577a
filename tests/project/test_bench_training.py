"""The models, the training loop and the optimizer of the training benchmarks.

Functions are compiled: without that, JAX compiles each of their operations alone, which takes longer.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from bench.models import (
    BUCKETS,
    Shape,
    lm_init,
    lm_loss,
    lm_stage,
    position_buckets,
    t5_init,
    t5_loss,
)
from bench.training import STEPS_IN_FLIGHT, TASKS, Adam, Trainer, farthest

SHAPE = Shape(width=16, heads=2, layers=2, context=8, vocabulary=32)


@pytest.fixture(scope="module")
def batch() -> Any:
    return TASKS["lm-tiny"].batch(0)[:2, : SHAPE.context + 1] % SHAPE.vocabulary


@pytest.fixture(scope="module")
def params() -> Any:
    """Parameters of the uncut decoder LM."""
    return jax.jit(partial(lm_init, SHAPE))(1)


@pytest.mark.long
def test_a_model_in_stages_computes_the_same_as_in_one_piece(batch: Any, params: Any) -> None:
    x = batch[:, :-1]
    run = jax.jit(partial(lm_stage, SHAPE))
    whole = run(params, x)
    for stage in range(2):
        x = run(jax.jit(lambda seed, stage=stage: lm_init(SHAPE, seed, stage, 2))(1), x)
    np.testing.assert_array_equal(x, whole)


def test_recomputing_changes_no_gradient(batch: Any, params: Any) -> None:
    kept, recomputed = (
        jax.jit(jax.grad(partial(lm_loss, shape)))(params, batch)
        for shape in (SHAPE, replace(SHAPE, recompute=True))
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), kept, recomputed)


@pytest.mark.long
def test_no_decoder_sees_the_tokens_that_it_predicts() -> None:
    shape = replace(SHAPE, layers=1)

    def of_row(loss: Any, params: Any, tokens: Any) -> Any:
        """The gradient of a loss by the embedding of each token of the vocabulary."""
        gradients = jax.jit(jax.grad(partial(loss, shape)))(params, tokens)
        return jnp.abs(gradients["tokens"]).sum(axis=-1)

    tokens = jnp.arange(SHAPE.context + 1)[None]
    assert of_row(lm_loss, jax.jit(partial(lm_init, shape))(1), tokens)[SHAPE.context] == 0
    pairs = jnp.arange(2 * SHAPE.context)[None]
    seen = of_row(t5_loss, jax.jit(partial(t5_init, shape))(1), pairs)
    assert seen[2 * SHAPE.context - 1] == 0
    assert (seen[1 : 2 * SHAPE.context - 1] > 0).all()


def test_near_positions_have_one_bucket_each_and_far_ones_share_buckets() -> None:
    buckets = jax.jit(position_buckets, static_argnums=(0, 1, 2))
    causal = np.asarray(buckets(200, 200, False))
    assert (causal[0] == 0).all()  # the first position has none before it
    before = causal[-1][::-1]  # by distance
    assert list(before[: BUCKETS // 2]) == list(range(BUCKETS // 2))
    assert (np.diff(before) >= 0).all()
    assert before[-1] == before[128] == BUCKETS - 1
    both = np.asarray(buckets(200, 200, True))
    assert (both[0, 1:] >= BUCKETS // 2).all()
    assert (both[-1] < BUCKETS // 2).all()


def test_the_adam_of_the_benchmarks_equals_that_of_optax() -> None:
    params = {"a": jnp.arange(3.0), "b": jnp.ones(2)}
    ours, theirs = Adam(1e-2), optax.adam(1e-2, b2=0.95)
    our_state, their_state = ours.init(params), theirs.init(params)
    our_update, their_update = jax.jit(ours.update), jax.jit(theirs.update)
    for step in range(3):
        gradients = jax.tree.map(lambda p, step=step: p * (step + 1) - 1, params)
        our_updates, our_state = our_update(gradients, our_state, params)
        their_updates, their_state = their_update(gradients, their_state, params)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4), our_updates, their_updates
        )


def test_a_trainer_reads_all_losses_in_order_and_keeps_some_in_flight() -> None:
    called: list[int] = []
    read_at: list[int] = []

    class Loss:
        def __init__(self, step: int) -> None:
            self._step = step

        def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
            read_at.append(len(called))
            return np.array(self._step, np.float32)

    def step(state: int, batch: int) -> tuple[int, Loss]:
        assert state == batch
        called.append(batch)
        return state + 1, Loss(batch)

    trainer = Trainer(step, 0, lambda number: number)
    trainer.run(10)
    assert trainer.losses == list(range(10))
    assert read_at[0] == STEPS_IN_FLIGHT + 1
    trainer.run(2)
    assert trainer.losses == list(range(12))


def test_losses_are_compared_for_the_steps_that_both_sides_have_run() -> None:
    assert farthest([1.0, 2.0, 9.0], [1.0, 2.0]) == 0
    assert farthest([1.0, 2.2], [1.0, 2.0]) == pytest.approx(0.1)
