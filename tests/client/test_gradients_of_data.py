"""Gradients through `pw.cond` and `pw.Ragged`: values against plain JAX, and what travels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pw
from pw.client.connection import current
from pw.core.programs.program import Program
from pw.testing import InProcessCluster
from tests.stages.stage import mesh_on

X = np.random.default_rng(0).standard_normal((8, 4)).astype(np.float32)
W = np.random.default_rng(1).standard_normal((4, 4)).astype(np.float32)

Place = Callable[..., Any]
"""Compiles a function for one of the slices, or returns it as it is."""


@pytest.fixture(scope="module")
def place() -> Iterator[Place]:
    with InProcessCluster(islands=2, devices_per_island=2):
        meshes = [mesh_on(island, 2) for island in range(2)]
        yield lambda fun, at, **how: pw.jit(fun, mesh=meshes[at], **how)


def programs_of(monkeypatch: pytest.MonkeyPatch) -> list[Program]:
    """Return a list of the programs that are registered from now on."""
    runtime = current.runtime()
    programs: list[Program] = []
    register = runtime.register_program

    def registered(program: Program, *rest: Any) -> int:
        programs.append(program)
        return register(program, *rest)

    monkeypatch.setattr(runtime, "register_program", registered)
    return programs


def plainly(fun: Any, at: int, **how: Any) -> Any:
    return fun


def both_branches(place: Place, cond: Any) -> Any:
    """Each branch uses values from outside on both slices; the parameters are used in one, both and none."""
    near, far = place(lambda w, x: jnp.tanh(x @ w), 0), place(lambda w, x: jnp.sin(x @ w), 1)
    is_large = place(lambda x: x.sum() > 0, 0)
    total = place(lambda y, z: (y**2).sum() + z.sum(), 1)

    def loss(v: Any, w: Any, x: Any) -> Any:
        h = near(w, x)

        def large(x: Any) -> Any:
            return far(v, near(w, h)), x

        def small(x: Any) -> Any:
            return near(w, x), h

        return total(*cond(is_large(x), large, small, x))

    return loss


def nested(place: Place, cond: Any) -> Any:
    near, far = place(lambda w, x: jnp.tanh(x @ w), 0), place(lambda w, x: jnp.sin(x @ w), 1)
    is_large, is_huge = place(lambda x: x.sum() > 0, 0), place(lambda x: x.sum() > 20, 1)
    total = place(lambda y: (y**2).sum(), 1)

    def loss(v: Any, w: Any, x: Any) -> Any:
        def large(y: Any) -> Any:
            z = far(v, y)
            return cond(is_huge(x), lambda: far(w, z), lambda: near(v, far(v, z)))

        y = near(w, x)
        return total(cond(is_large(x), large, lambda y: y, y))

    return loss


def constants(place: Place, cond: Any) -> Any:
    near, is_large = place(lambda w, x: jnp.tanh(x @ w), 0), place(lambda x: x.sum() > 0, 0)
    total = place(lambda y: (y**2).sum(), 1)
    zeros = np.zeros_like(X)

    def loss(v: Any, w: Any, x: Any) -> Any:
        return total(cond(is_large(x), lambda: near(w, near(v, x)), lambda: zeros))

    return loss


@pytest.mark.parametrize("case", [both_branches, nested, constants])
def test_gradients_through_branches_are_those_of_jax(place: Place, case: Any) -> None:
    ours = pw.value_and_grad(case(place, pw.cond), (0, 1, 2))
    theirs = jax.value_and_grad(case(plainly, jax.lax.cond), (0, 1, 2))
    for x in (X, -abs(X), abs(X)):
        got, wanted = pw.get(ours(W, W + 1, x)), theirs(W, W + 1, x)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=3e-4), got, wanted)


def test_gradients_of_gradients_through_branches(place: Place) -> None:
    def doubled(place: Place, cond: Any, grad: Any) -> Any:
        loss, square = both_branches(place, cond), place(lambda g: (g**2).sum(), 0)
        return grad(lambda w, x: square(grad(lambda v: loss(v, w, x))(w)))

    ours, theirs = (doubled(place, pw.cond, pw.grad), doubled(plainly, jax.lax.cond, jax.grad))
    for x in (abs(X), -abs(X)):
        np.testing.assert_allclose(ours(W, x), theirs(W, x), rtol=2e-3, atol=1e-4)


def chosen(x: Any) -> pw.Ragged:
    """The rows with a positive first entry, and behind them the others."""
    is_chosen = x[:, 0] > 0
    order = jnp.argsort(~is_chosen, stable=True)
    return pw.Ragged(x[order], is_chosen.sum(dtype=jnp.int32))


def padded(ragged: pw.Ragged) -> pw.Ragged:
    """What a consumer on another slice is given."""
    return pw.Ragged(jnp.where(ragged.mask()[:, None], ragged.rows, 0), ragged.counts)


def apply(w: Any, ragged: pw.Ragged) -> pw.Ragged:
    return pw.Ragged(jnp.cos(ragged.rows @ w), ragged.counts)  # of padding, it is 1


def test_gradients_of_rows_that_count(place: Place) -> None:
    """Rows go to another slice, twice, and back; padding that was zeros there has no gradient."""

    def loss(place: Place, moved: Any) -> Any:
        choose, there, again = place(chosen, 0), place(apply, 1), place(apply, 1)
        total = place(lambda a, b: (a.rows**2).sum() + (b.rows * a.rows).sum(), 0)

        def fun(w: Any, x: Any) -> Any:
            sent = choose(x)
            return total(moved(there(w, moved(sent))), moved(again(w, moved(sent))))

        return fun

    got = pw.get(pw.value_and_grad(loss(place, lambda ragged: ragged), (0, 1))(W, X))
    wanted = jax.value_and_grad(loss(plainly, padded), (0, 1))(W, X)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), got, wanted)


def test_cotangents_of_rows_travel_as_rows_that_count(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No edge of the program moves an array of rows whole, forwards, backwards or to a branch."""
    choose, there = place(chosen, 0), place(apply, 1)
    some = place(lambda ragged: ragged.counts > 0, 0)
    total = place(lambda ragged: (ragged.rows**2).sum(), 0)
    programs = programs_of(monkeypatch)

    def loss(w: Any, x: Any) -> Any:
        sent = choose(x)
        back = pw.cond(some(sent), lambda: there(w, sent), lambda: sent, out_shardings=P())
        return total(back)

    got = pw.get(pw.value_and_grad(loss, (0, 1))(W, X))
    program = programs[-1]
    wanted = jax.value_and_grad(
        lambda w, x: (padded(apply(w, padded(chosen(x)))).rows ** 2).sum(), (0, 1)
    )(W, X)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), got, wanted)
    called = [program.computations[node.computation] for node in program.nodes]

    def made_as(value: Any) -> Any:
        return (
            program.inputs[value.index]
            if value.node < 0
            else called[value.node].outputs[value.index]
        )

    whole = [
        (computation.name, at)
        for node, computation in zip(program.nodes, called, strict=True)
        for at, (value, spec) in enumerate(zip(node.args, computation.inputs, strict=True))
        if spec.shape == X.shape
        and made_as(value).placement != spec.placement
        and at not in dict(node.counted)
    ]
    assert whole == []
    assert sum(len(node.counted) for node in program.nodes) >= 4  # there and back, twice


def test_a_branch_keeps_what_its_backward_half_needs_where_it_is(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Residuals are not merged with zeros of the other branch, and nothing is donated that is needed again."""
    near = place(lambda w, x: jnp.tanh(x @ w), 0)
    far = place(lambda w, x: jnp.sin(x @ w).sum(), 1, donate_argnums=1)
    some = place(lambda x: x.sum() > 0, 0)

    def loss(w: Any, x: Any) -> Any:
        return pw.cond(some(x), lambda: far(w, near(w, near(w, x))), lambda: far(w, x))

    programs = programs_of(monkeypatch)
    got = pw.get(pw.value_and_grad(loss, (0, 1))(W, X))
    names = Counter(programs[-1].computations[node.computation].name for node in programs[-1].nodes)
    wanted = jax.value_and_grad(
        lambda w, x: jax.lax.cond(
            x.sum() > 0,
            lambda: jnp.sin(jnp.tanh(jnp.tanh(x @ w) @ w) @ w).sum(),
            lambda: jnp.sin(x @ w).sum(),
        ),
        (0, 1),
    )(W, X)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), got, wanted)
    merges = sum(count for name, count in names.items() if name.startswith("cond("))
    assert merges == 3, names  # of the value, and of a gradient on each of the slices
    assert not any(name.startswith(("empty", "broadcast")) for name in names), names
