"""What the training benchmarks train: models that can be cut, a loop that reads all losses, our own Adam."""

from __future__ import annotations

from dataclasses import replace
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


def test_a_model_in_stages_is_the_model_in_one_piece(batch: Any) -> None:
    x = batch[:, :-1]
    whole = lm_stage(SHAPE, lm_init(SHAPE, 1), x)
    for stage in range(2):
        x = lm_stage(SHAPE, lm_init(SHAPE, 1, stage, 2), x)
    np.testing.assert_array_equal(x, whole)


def test_recomputing_changes_no_gradient(batch: Any) -> None:
    params = lm_init(SHAPE, 1)
    kept, recomputed = (
        jax.grad(lambda p, shape=shape: lm_loss(shape, p, batch))(params)
        for shape in (SHAPE, replace(SHAPE, recompute=True))
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), kept, recomputed)


def test_neither_decoder_sees_what_it_is_to_predict(batch: Any) -> None:
    def of_row(loss: Any, params: Any, tokens: Any) -> Any:
        """The gradient of a loss by the embedding of each token of the vocabulary."""
        return jnp.abs(jax.grad(lambda p: loss(SHAPE, p, tokens))(params)["tokens"]).sum(axis=-1)

    tokens = jnp.arange(SHAPE.context + 1)[None]
    assert of_row(lm_loss, lm_init(SHAPE, 1), tokens)[SHAPE.context] == 0
    pairs = jnp.arange(2 * SHAPE.context)[None]
    seen = of_row(t5_loss, t5_init(SHAPE, 1), pairs)
    assert seen[2 * SHAPE.context - 1] == 0
    assert (seen[1 : 2 * SHAPE.context - 1] > 0).all()


def test_near_positions_have_buckets_of_their_own_and_far_ones_share_them() -> None:
    causal = np.asarray(position_buckets(200, 200, both_ways=False))
    assert (causal[0] == 0).all()  # nothing lies before the first
    before = causal[-1][::-1]  # by distance
    assert list(before[: BUCKETS // 2]) == list(range(BUCKETS // 2))
    assert (np.diff(before) >= 0).all()
    assert before[-1] == before[128] == BUCKETS - 1
    both = np.asarray(position_buckets(200, 200, both_ways=True))
    assert (both[0, 1:] >= BUCKETS // 2).all()
    assert (both[-1] < BUCKETS // 2).all()


def test_our_adam_is_adam() -> None:
    params = {"a": jnp.arange(3.0), "b": jnp.ones(2)}
    ours, theirs = Adam(1e-2), optax.adam(1e-2, b2=0.95)
    our_state, their_state = ours.init(params), theirs.init(params)
    for step in range(3):
        gradients = jax.tree.map(lambda p, step=step: p * (step + 1) - 1, params)
        our_updates, our_state = ours.update(gradients, our_state, params)
        their_updates, their_state = theirs.update(gradients, their_state, params)
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


def test_losses_are_compared_where_both_have_some() -> None:
    assert farthest([1.0, 2.0, 9.0], [1.0, 2.0]) == 0
    assert farthest([1.0, 2.2], [1.0, 2.0]) == pytest.approx(0.1)
