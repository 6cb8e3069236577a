"""The training example without a cluster: the pipeline computes the same as the uncut model."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import numpy as np
import pytest

from examples.train_lm import pipeline, reference
from examples.train_lm.corpus import Batch, Corpus
from examples.train_lm.model import (
    ModelConfig,
    OptimizerConfig,
    init_params,
    stage0_forward,
    stage1_loss,
    whole_loss,
)
from examples.train_lm.schedule import Kind, Schedule, merge, one_forward_one_backward, table

CONFIG = ModelConfig(width=32, heads=2, blocks=2, context=16)
OPTIMIZER = OptimizerConfig()


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return Corpus.standard_library()


def draw_batch(corpus: Corpus, step: int) -> Batch:
    return corpus.training_batch(seed=7, step=step, micro_batches=3, rows=4, context=CONFIG.context)


# Compiled: without that, JAX compiles each operation alone, which takes longer.
loss_of_whole = jax.jit(partial(whole_loss, CONFIG))
gradients_of_whole = jax.jit(jax.value_and_grad(partial(whole_loss, CONFIG)))
forward = jax.jit(partial(stage0_forward, CONFIG))
loss_and_backward = jax.jit(partial(pipeline.loss_and_backward, CONFIG))
backward = jax.jit(partial(pipeline.backward, CONFIG))
zero_gradients = jax.jit(pipeline.zero_gradients)
zero_gradients_and_loss = jax.jit(pipeline.zero_gradients_and_loss)


def gradients_by_schedule(params: Any, batch: Batch, schedule: Schedule) -> Any:
    """Compute the gradients as the pipeline does, with its own tasks, on one device."""
    gradients0 = zero_gradients(params[0])
    accumulator1 = zero_gradients_and_loss(params[1])
    activations, activation_gradients = {}, {}
    for tick in merge(schedule):
        for task in tick:
            inputs, targets = batch.inputs[task.micro_batch], batch.targets[task.micro_batch]
            if task.kind is Kind.FORWARD:
                activations[task.micro_batch] = forward(params[0], inputs)
            elif task.kind is Kind.LOSS:
                accumulator1, activation_gradients[task.micro_batch] = loss_and_backward(
                    params[1], accumulator1, activations[task.micro_batch], targets
                )
            else:
                gradients0 = backward(
                    params[0], gradients0, inputs, activation_gradients[task.micro_batch]
                )
    return gradients0, *accumulator1


def test_splitting_a_batch_gives_its_micro_batches(corpus: Corpus) -> None:
    batch = draw_batch(corpus, 0)
    parts = pipeline.split_micro_batches(batch.inputs)
    assert np.array_equal(np.stack(parts), batch.inputs)
    assert len(parts) == 3


def test_corpus_is_large_and_deterministic(corpus: Corpus) -> None:
    again = Corpus.standard_library()
    assert len(corpus.training) > 2_000_000
    assert np.array_equal(corpus.training, again.training)
    assert np.array_equal(corpus.held_out, again.held_out)


def test_batches_depend_on_seed_and_step_only(corpus: Corpus) -> None:
    first, again, other = draw_batch(corpus, 0), draw_batch(corpus, 0), draw_batch(corpus, 1)
    assert np.array_equal(first.inputs, again.inputs)
    assert not np.array_equal(first.inputs, other.inputs)
    assert np.array_equal(first.inputs[..., 1:], first.targets[..., :-1])
    assert first.inputs.shape == (3, 4, CONFIG.context)


def test_an_untrained_model_guesses_uniformly(corpus: Corpus) -> None:
    batch = draw_batch(corpus, 0)
    loss = loss_of_whole(init_params(CONFIG, 0), batch.inputs[0], batch.targets[0])
    assert float(loss) == pytest.approx(np.log(256), abs=0.1)


def test_the_model_is_causal() -> None:
    stage0, _ = init_params(CONFIG, 0)
    inputs = np.arange(CONFIG.context, dtype=np.int32)[None]
    changed = inputs.copy()
    changed[0, -1] = 99
    before, after = forward(stage0, inputs), forward(stage0, changed)
    assert np.allclose(before[:, :-1], after[:, :-1])
    assert not np.allclose(before[:, -1], after[:, -1])


def test_the_stages_together_have_the_loss_of_the_whole(corpus: Corpus) -> None:
    batch, params = draw_batch(corpus, 0), init_params(CONFIG, 0)
    inputs, targets = batch.inputs[0], batch.targets[0]
    whole = loss_of_whole(params, inputs, targets)
    loss = jax.jit(partial(stage1_loss, CONFIG))(params[1], forward(params[0], inputs), targets)
    assert float(loss) == pytest.approx(float(whole))


@pytest.mark.parametrize("ahead", [1, 2])
def test_pipeline_gradients_equal_those_of_the_whole(corpus: Corpus, ahead: int) -> None:
    batch, params = draw_batch(corpus, 0), init_params(CONFIG, 0)
    rows = (batch.inputs.reshape(-1, CONFIG.context), batch.targets.reshape(-1, CONFIG.context))
    loss, expected = gradients_of_whole(params, *rows)
    schedule = one_forward_one_backward(3, ahead)
    gradients0, gradients1, loss_sum = gradients_by_schedule(params, batch, schedule)
    assert float(loss_sum / 3) == pytest.approx(float(loss), rel=1e-5)
    for measured, wanted in zip(
        jax.tree.leaves((gradients0, gradients1)), jax.tree.leaves(expected), strict=True
    ):
        np.testing.assert_allclose(measured / 3, wanted, rtol=1e-3, atol=1e-6)


def test_training_by_schedule_matches_the_reference(corpus: Corpus) -> None:
    params, schedule = init_params(CONFIG, 0), one_forward_one_backward(3)
    batches = [draw_batch(corpus, step) for step in range(3)]
    update = jax.jit(partial(pipeline.update, OPTIMIZER.build(), 3))
    states = [pipeline.initial_state(OPTIMIZER, stage) for stage in params]
    losses = []
    for batch in batches:
        stages = (states[0]["params"], states[1]["params"])
        *gradients, loss_sum = gradients_by_schedule(stages, batch, schedule)
        states = [update(*one) for one in zip(states, gradients, strict=True)]
        losses.append(float(loss_sum / 3))
    np.testing.assert_allclose(
        losses, reference.train(CONFIG, OPTIMIZER, params, batches), rtol=1e-4
    )


def test_schedule_is_complete_and_bounded() -> None:
    stage0, stage1 = schedule = one_forward_one_backward(5, ahead=2)
    assert len(stage0) == 10
    assert len(stage1) == 5
    seen = set()
    for task in (task for tick in merge(schedule) for task in tick):
        assert task.needs() is None or task.needs() in seen
        seen.add(task)
    assert seen == {*stage0, *stage1}
    in_flight = 0
    for task in stage0:
        in_flight += 1 if task.kind is Kind.FORWARD else -1
        assert in_flight <= 2


def test_schedule_prints_as_a_table() -> None:
    assert table(one_forward_one_backward(3, ahead=2)) == [
        "F0 F1 B0 F2 B1 B2",
        ".  L0 L1 .  L2 .",
    ]


def test_a_schedule_whose_stages_wait_for_each_other_is_refused() -> None:
    stage0, stage1 = one_forward_one_backward(2)
    with pytest.raises(ValueError, match="wait for each other"):
        merge((tuple(reversed(stage0)), stage1))


def test_generated_text_continues_the_prompt() -> None:
    params = init_params(CONFIG, 0)
    text = reference.generate(CONFIG, params, prompt=b"def ", size_bytes=20, seed=1)
    assert text.startswith(b"def ")
    assert len(text) == 24
    assert text == reference.generate(CONFIG, params, prompt=b"def ", size_bytes=20, seed=1)
