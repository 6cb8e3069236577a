"""The training example: the pipeline computes the same as the uncut model."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import jax
import numpy as np
import pytest

import pw
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
from pw.testing import InProcessCluster

CONFIG = ModelConfig(width=32, heads=2, blocks=2, context=16)
OPTIMIZER = OptimizerConfig()


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return Corpus.standard_library()


def draw_batch(corpus: Corpus, step: int) -> Batch:
    return corpus.training_batch(seed=7, step=step, micro_batches=3, rows=4, context=CONFIG.context)


@pytest.fixture(scope="module")
def cluster() -> Iterator[InProcessCluster]:
    with InProcessCluster(islands=2, devices_per_island=2) as cluster:
        yield cluster


def built(schedule: str, devices: int) -> pw.Pipeline:
    """The example's pipeline for three micro-batches, with so many devices for each stage."""
    islands = ("island-0", "island-1")
    return pipeline.build_pipeline(CONFIG, OPTIMIZER, islands, devices, 3, schedule)


# Compiled: without that, JAX compiles each operation alone, which takes longer.
loss_of_whole = jax.jit(partial(whole_loss, CONFIG))
forward = jax.jit(partial(stage0_forward, CONFIG))


def test_the_rows_of_a_batch_are_those_of_its_micro_batches(corpus: Corpus) -> None:
    batch = draw_batch(corpus, 0)
    inputs, targets = pipeline.rows(batch)
    assert np.array_equal(inputs.reshape(batch.inputs.shape), batch.inputs)
    assert np.array_equal(targets[:, :-1], inputs[:, 1:])


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


@pytest.mark.long
def test_pipeline_gradients_equal_those_of_the_whole(
    corpus: Corpus, cluster: InProcessCluster
) -> None:
    params, rows = init_params(CONFIG, 0), pipeline.rows(draw_batch(corpus, 0))
    loss, expected = jax.jit(jax.value_and_grad(partial(whole_loss, CONFIG)))(params, *rows)
    measured_loss, gradients = built("gpipe", devices=1).gradients(params, *rows)
    assert float(measured_loss) == pytest.approx(float(loss), rel=1e-5)
    for measured, wanted in zip(
        jax.tree.leaves(pw.get(gradients)), jax.tree.leaves(expected), strict=True
    ):
        np.testing.assert_allclose(measured, wanted, rtol=1e-3, atol=1e-6)


@pytest.mark.long
def test_training_by_schedule_matches_the_reference(
    corpus: Corpus, cluster: InProcessCluster
) -> None:
    params, step = init_params(CONFIG, 0), built("1f1b", devices=2)
    batches = [draw_batch(corpus, number) for number in range(3)]
    state = step.init(params)
    losses = []
    for batch in batches:
        state, loss = step(state, *pipeline.rows(batch))
        losses.append(loss)
    np.testing.assert_allclose(
        [float(loss) for loss in losses],
        reference.train(CONFIG, OPTIMIZER, params, batches),
        rtol=1e-4,
    )


def test_generated_text_continues_the_prompt() -> None:
    params = init_params(CONFIG, 0)
    text = reference.generate(CONFIG, params, prompt=b"def ", size_bytes=20, seed=1)
    assert text.startswith(b"def ")
    assert len(text) == 24
    assert text == reference.generate(CONFIG, params, prompt=b"def ", size_bytes=20, seed=1)
