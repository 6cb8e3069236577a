"""`pw.pipeline` on the real runtime: losses, gradients and training are those of the unpipelined model."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import pw
from pw.building.pipelines.schedules import NAMES
from pw.client.programs.writing.builder import ProgramBuilder
from pw.operating.timeline.timeline import Timeline
from pw.testing import InProcessCluster
from tests.stages.samples import long
from tests.stages.stage import mesh_on

WIDTH, WORDS, ROWS = 8, 16, 8
MICROBATCHES = 4
TIED = [[(0, "words"), (3, "words")]]


@pytest.fixture(scope="module")
def pairs(cluster: InProcessCluster) -> list[pw.Mesh]:
    """A slice of two devices on each island."""
    return [mesh_on(island, axis="data") for island in range(2)]


def embed(params: Any, words: Any) -> Any:
    return jax.nn.gelu(params["words"][words] @ params["w"])


def block(params: Any, x: Any) -> Any:
    return x + jax.nn.softmax(x @ params["w"]) * params["gain"]


def head(params: Any, x: Any, targets: Any) -> Any:
    scores = jax.nn.log_softmax(block(params, x) @ params["words"].T)
    return -jnp.mean(jnp.take_along_axis(scores, targets[:, None], axis=-1))


STAGES = [embed, block, block, head]


def draw(*shape: int, seed: int) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def first_params() -> list[Any]:
    square = [{"w": draw(WIDTH, WIDTH, seed=n), "gain": draw(WIDTH, seed=10 + n)} for n in range(4)]
    words = draw(WORDS, WIDTH, seed=20)
    return [{"words": words, "w": square[0]["w"]}, *square[1:3], {"words": words, **square[3]}]


def batch(seed: int = 0) -> tuple[Any, Any]:
    words = np.random.default_rng(seed).integers(0, WORDS, (2, ROWS), dtype=np.int32)
    return words[0], words[1]


def whole_loss(params: Any, words: Any, targets: Any) -> Any:
    """The model in plain JAX, on the whole batch at once; the tied weight is that of stage 0."""
    x = embed(params[0], words)
    for stage in (1, 2):
        x = block(params[stage], x)
    return head({**params[3], "words": params[0]["words"]}, x, targets)


whole = jax.jit(jax.value_and_grad(whole_loss))


def near(found: Any, expected: Any) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-6)


def made(meshes: list[pw.Mesh], **options: Any) -> Any:
    wanted = {"microbatches": MICROBATCHES, "tied": TIED, "in_shardings": (P(), P("data"))}
    return pw.pipeline(STAGES, meshes=meshes, **{**wanted, **options})


@pytest.mark.parametrize(
    "schedule",
    # What is trained below has 1f1b.
    [long(name) if name == "1f1b" else name for name in NAMES],
)
def test_loss_and_gradients_are_those_of_the_whole_model(
    meshes: list[pw.Mesh], schedule: str
) -> None:
    share = schedule in ("interleaved", "gpipe")  # two stages on a slice
    pipe = made(meshes[1:3] if share else meshes, schedule=schedule)
    params = first_params()
    loss, gradients = pipe.gradients(params, *batch())
    expected_loss, expected = whole(params, *batch())
    expected[3]["words"] = expected[0]["words"]
    near(np.asarray(loss), expected_loss)
    near(list(pw.get(gradients)), expected)


def test_recomputing_and_a_users_own_table_change_nothing(meshes: list[pw.Mesh]) -> None:
    rows = [[(s, m, k) for k in "FBW" for m in (1, 0, 2, 3)] for s in range(4)]
    own = pw.Schedule(rows, "by kind, microbatch 1 first")
    pipe = made(meshes, schedule=own, recompute=True, microbatches=None)
    params = first_params()
    loss, gradients = pipe.gradients(params, *batch())
    expected_loss, expected = whole(params, *batch())
    expected[3]["words"] = expected[0]["words"]
    near(np.asarray(loss), expected_loss)
    near(list(pw.get(gradients)), expected)


def test_training_is_that_of_the_whole_model_and_tied_weights_stay_alike(
    pairs: list[pw.Mesh],
) -> None:
    """Two stages on each slice, data-parallel over its two devices."""
    optimizer = optax.adam(1e-2)
    pipe = made(pairs, optimizer=optimizer)
    params = first_params()
    state = pipe.init(params)
    own = [*params[:3], {name: params[3][name] for name in ("w", "gain")}]
    moments, update = optimizer.init(own), jax.jit(optimizer.update)
    losses, expected = [], []
    for step in range(3):
        state, loss = pipe(state, *batch(step))
        losses.append(float(loss))
        found, gradients = whole([*own[:3], {**own[3], "words": own[0]["words"]}], *batch(step))
        del gradients[3]["words"]
        updates, moments = update(gradients, moments, own)
        own = jax.tree.map(np.add, own, updates)
        expected.append(float(found))
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    trained = pw.get(pipe.params(state))
    assert np.array_equal(trained[0]["words"], trained[3]["words"])
    del trained[3]["words"]
    near(list(trained), own)
    assert "words" not in jax.tree_util.keystr(
        jax.tree_util.tree_flatten_with_path(state[3]["optimizer"])[0][-1][0]
    )


def test_arrays_of_every_kind_go_in(meshes: list[pw.Mesh], pairs: list[pw.Mesh]) -> None:
    def loss(params: Any, x: Any) -> Any:
        return jnp.sum(x * params) / x.shape[0]

    pipe = pw.pipeline([loss], meshes=meshes[:1], microbatches=2)
    x, params = draw(4, 3, seed=1), draw(3, seed=2)
    expected = np.sum(x * params) / 4
    there = pw.put(x, sharding=pw.NamedSharding(pairs[1], P("data")))
    for value in (x, jnp.asarray(x), there):
        found, (gradient,) = pipe.gradients([params], value)
        near(np.asarray(found), expected)
        near(np.asarray(gradient), np.mean(x, axis=0))
    assert isinstance(gradient, pw.Array)


def model(params: Any, words: Any, targets: Any) -> Any:
    """The same model as one function."""
    x = pw.stage_boundary(embed(params[0], words))
    x = pw.stage_boundary(block(params[1], x))
    x = pw.stage_boundary(block(params[2], x))
    return head({**params[3], "words": params[0]["words"]}, x, targets)


def test_one_function_is_cut_at_its_marks(meshes: list[pw.Mesh]) -> None:
    params = first_params()
    del params[3]["words"]
    pipe = pw.pipeline(
        model,
        meshes=meshes,
        microbatches=MICROBATCHES,
        in_shardings=(P(), P("data")),
        optimizer=optax.sgd(0.1),
    )
    with pytest.raises(
        pw.ArgumentError, match="pass a batch, or its shapes, behind the parameters"
    ):
        pipe.init(params)
    state = pipe.init(params, *batch())
    assert [sorted(stage["params"][0]) for stage in state] == [["w", "words"]] * 4
    held = [[leaf is not None for leaf in stage["params"][0].values()] for stage in state]
    assert held[1] == held[2] == [False, False]
    assert sum(held[3]) == 1  # the tied words
    expected_loss, expected = whole(
        [*params[:3], {**params[3], "words": params[0]["words"]}], *batch()
    )
    del expected[3]["words"]
    state, loss = pipe(state, *batch())
    near(np.asarray(loss), expected_loss)
    near(pw.get(pipe.params(state)), jax.tree.map(lambda p, g: p - 0.1 * g, params, expected))
    assert np.array_equal(state[0]["params"][0]["words"], state[3]["params"][0]["words"])
    near(jax.jit(model)(params, *batch()), expected_loss)  # elsewhere a mark does nothing


def dropped(params: Any, x: Any, key: Any) -> Any:
    return block(params, x) * jax.random.bernoulli(key, 0.5, x.shape)


def dropped_words(params: Any, words: Any, key: Any) -> Any:
    return dropped(params[1], embed(params[0], words), key)


def test_dropout_does_not_depend_on_the_schedule(meshes: list[pw.Mesh]) -> None:
    params, key = first_params(), jax.random.key(7, impl="unsafe_rbg")
    losses = []
    for schedule, recompute in (("1f1b", False), ("gpipe", True)):
        pipe = pw.pipeline(
            [dropped_words, head],
            meshes=meshes[:2],
            microbatches=2,
            schedule=schedule,
            recompute=recompute,
        )
        loss, gradients = pipe.gradients([params[:2], params[3]], *batch(), key=key)
        losses.append((np.asarray(loss), pw.get(gradients)))
    near(*losses)

    def plain(params: Any) -> Any:
        total = 0.0
        for number, rows in enumerate((slice(0, 4), slice(4, 8))):
            own = jax.random.fold_in(jax.random.fold_in(key, number), 0)
            words, targets = (part[rows] for part in batch())
            x = dropped_words(params[0], words, own)
            total += head(params[1], x, targets)
        return total / 2

    near(losses[0], jax.jit(jax.value_and_grad(plain))((params[:2], params[3])))
    with pytest.raises(pw.ArgumentError, match="takes a PRNG key: pass key="):
        pipe.gradients([params[:2], params[3]], *batch())


def test_stages_of_pw_jit_have_their_own_meshes_and_shardings(cluster: InProcessCluster) -> None:
    """Stage 0 is data-parallel, stage 1 tensor-parallel: its weights are divided."""
    first, second = mesh_on(0, axis="rows"), mesh_on(1, axis="columns")

    @pw.jit(mesh=first, in_shardings=(None, P("rows")))
    def up(params: Any, x: Any) -> Any:
        return jnp.tanh(x @ params)

    @pw.jit(mesh=second, in_shardings=({"in": P(None, "columns"), "out": P("columns")}, P(), P()))
    def down(params: Any, x: Any, targets: Any) -> Any:
        return jnp.mean((jnp.tanh(x @ params["in"]) @ params["out"] - targets) ** 2)

    pipe = pw.pipeline([up, down], microbatches=2, optimizer=optax.adam(0.1))
    params = (draw(4, 6, seed=0), {"in": draw(6, 8, seed=1), "out": draw(8, 3, seed=2)})
    x, targets = draw(8, 4, seed=3), draw(8, 3, seed=4)
    state = pipe.init(params)
    assert state[1]["params"]["in"].sharding.spec == P(None, "columns")
    assert state[1]["optimizer"][0].mu["out"].sharding.spec == P("columns")
    state, loss = pipe(state, x, targets)
    near(np.asarray(loss), jax.jit(pipe.unpipelined)(params, x, targets))
    assert state[1]["params"]["in"].sharding.spec == P(None, "columns")


def test_low_precision_gradients_are_summed_in_float32(meshes: list[pw.Mesh]) -> None:
    def loss(params: Any, x: Any) -> Any:
        return jnp.mean((x * params).astype(jnp.float32))

    pipe = pw.pipeline([loss], meshes=meshes[:1], microbatches=8)
    x = np.asarray([256] + [1] * 7, jnp.bfloat16)
    _, (gradient,) = pipe.gradients([jnp.bfloat16(1)], x)
    assert gradient.dtype == jnp.bfloat16
    assert float(gradient) == float(jnp.bfloat16(263 / 8))


def test_a_state_is_used_once_and_the_bubble_is_measured_in_a_timeline(
    meshes: list[pw.Mesh],
) -> None:
    pipe = made(meshes[1:3], schedule="interleaved", optimizer=optax.sgd(0.1))
    with pytest.raises(pw.ArgumentError, match="has done no step"):
        pipe.measured(Timeline())
    used = pipe.init(first_params())
    state, _ = pipe(used, *batch())
    words = r"<pw.pipeline .*: state\[0\]\['params'\].*, float32.* donated to an earlier step.* pass the state"
    with pytest.raises(pw.ArrayDeleted, match=words):
        pipe(used, *batch())
    jax.block_until_ready(state)
    with pw.trace(None) as timeline:
        for number in range(2):
            state, _ = pipe(state, *batch(number))
            jax.block_until_ready(state)
    found = pipe.measured(timeline)
    assert (found.steps, len(found.groups)) == (2, 2)
    tasks_s = timeline.busy(lambda one: re.fullmatch(r".*_\d_[FBW]", one.name) is not None)
    assert found.bubble == pytest.approx(1 - tasks_s / (2 * 2 * found.step_s))
    assert 0 <= found.expected_bubble < 1
    assert set(found.times) == {(stage, kind) for stage in range(4) for kind in "FB"}
    assert max(found.activations) <= MICROBATCHES


# --- bad input: one sentence, before anything is launched ----------------------------------------------


def pair(params: Any, x: Any) -> Any:
    return x, x


def narrow(params: Any, x: Any) -> Any:
    return x[:, :3]


def no_loss(params: Any, x: Any, targets: Any) -> Any:
    return x


def in_a_loop(params: Any, words: Any, targets: Any) -> Any:
    x = params[0]["words"][words]
    return jax.lax.fori_loop(0, 2, lambda _, x: pw.stage_boundary(x), x).sum()


def unmarked(params: Any, words: Any, targets: Any) -> Any:
    return jnp.sum(params[0]["words"])


def at_the_end(params: Any, words: Any, targets: Any) -> Any:
    pw.stage_boundary(words)
    return jnp.sum(params[0]["words"][words]) + 0 * jnp.sum(pw.stage_boundary(words))


Case = tuple[Callable[[list[pw.Mesh]], Any], str]
BAD: dict[str, Case] = {
    "shapes that do not fit": (
        lambda m: pw.pipeline([embed, narrow, block, head], meshes=m, microbatches=2),
        r"stage 2 \('block'\) does not take what stage 1 returns, float32\[4,3\]: TypeError",
    ),
    "a stage that returns something else": (
        lambda m: pw.pipeline([embed, pair, block, head], meshes=m, microbatches=2),
        r"stage 2 \('block'\) does not take what stage 1 returns, float32\[4,8\], float32\[4,8\]",
    ),
    "no loss": (
        lambda m: pw.pipeline([embed, block, block, no_loss], meshes=m, microbatches=2),
        r"stage 3 \('no_loss'\) is the last one and returns float32\[4,8\]; it has to return the loss",
    ),
    "rows": (
        lambda m: pw.pipeline(STAGES, meshes=m, microbatches=3),
        "has 8 rows, which cannot be divided into 3 microbatches",
    ),
    "a mark in a loop": (
        lambda m: pw.pipeline(in_a_loop, meshes=m, microbatches=2),
        "'in_a_loop' calls pw.stage_boundary inside of",
    ),
    "no marks": (
        lambda m: pw.pipeline(unmarked, meshes=m, microbatches=2),
        r"'unmarked' has no pw.stage_boundary\(x\)",
    ),
    "marks without effect": (
        lambda m: pw.pipeline(at_the_end, meshes=m[:3], microbatches=2),
        "'at_the_end'",
    ),
    "meshes": (
        lambda m: pw.pipeline(STAGES, meshes=m[:3], microbatches=2),
        "4 stages and 3 meshes",
    ),
    "no meshes": (
        lambda m: pw.pipeline(STAGES, microbatches=2),
        r"stage 0 \('embed'\) has no devices: pass meshes=, or pw.jit\(embed, mesh=mesh\)",
    ),
    "no microbatches": (lambda m: pw.pipeline(STAGES, meshes=m), "needs microbatches="),
    "a table of another size": (
        lambda m: pw.pipeline(
            STAGES, meshes=m, schedule=pw.Schedule([[(0, 0, "F"), (0, 0, "B")]], "small")
        ),
        "the schedule 'small' has 1 stages, and the pipeline 4",
    ),
    "a table with other slices": (
        lambda m: pw.pipeline(
            STAGES,
            meshes=m,
            schedule=pw.Schedule(
                [[*[(s, 0, "F") for s in range(4)], *[(3 - s, 0, "B") for s in range(4)]]]
            ),
        ),
        "stages of one row run on the same devices",
    ),
    "no key": (
        lambda m: pw.pipeline([embed, block, dropped, head], meshes=m, microbatches=2),
        "takes a PRNG key",
    ),
    "ties": (
        lambda m: pw.pipeline(STAGES, meshes=m, microbatches=2, tied=[[(0, "words"), (1, "w")]]),
        r"are tied, but are float32\[16,8\], float32\[8,8\]",
    ),
    "a tie to nothing": (
        lambda m: pw.pipeline(
            STAGES, meshes=m, microbatches=2, tied=[[(0, "words"), (1, "words")]]
        ),
        "stage 1 has no such parameter",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_in_one_sentence(
    meshes: list[pw.Mesh], case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    build, said = BAD[case]
    # Without a finished program there is nothing to launch.
    monkeypatch.delattr(ProgramBuilder, "finish")
    with pytest.raises(pw.ArgumentError, match=said) as refused:
        build(meshes).gradients(first_params(), *batch())
    assert "\n" not in str(refused.value)


def test_bad_parameters_are_refused(meshes: list[pw.Mesh]) -> None:
    pipe = made(meshes, tied=())
    params = first_params()
    with pytest.raises(pw.ArgumentError, match="4 stages and takes as many trees of parameters"):
        pipe.init(params[:3])
    params[1]["w"] = np.ones((WIDTH, WIDTH), np.int32)
    with pytest.raises(pw.ArgumentError, match=r"stage 1 of .* has a parameter int32\[8,8\]"):
        pipe.init(params)
    with pytest.raises(pw.ArgumentError, match="has no optimizer"):
        pipe((), *batch())
    with pytest.raises(pw.ArgumentError, match="takes the state that init"):
        made(meshes, optimizer=optax.sgd(0.1))(first_params(), *batch())


def test_the_users_own_error_in_the_first_stage_is_raised_as_it_is(meshes: list[pw.Mesh]) -> None:
    def broken(params: Any, words: Any) -> Any:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        pw.pipeline([broken, head], meshes=meshes[:2], microbatches=2).gradients(
            [{}, first_params()[3]], *batch()
        )
