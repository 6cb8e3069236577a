"""JAX's own transformations of functions that call `pw.jit` functions on two slices, against plain JAX."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pw
from pw.testing import InProcessCluster
from tests.stages.samples import long

W = np.random.default_rng(0).standard_normal((4, 4)).astype(np.float32)
X = np.random.default_rng(1).standard_normal((3, 4)).astype(np.float32)


def near_of(w: Any, x: Any) -> Any:
    return jnp.tanh(x @ w)


def far_of(w: Any, h: Any) -> Any:
    return jnp.sin(h @ w)


class Model:
    """A function on one slice, one on another, and what is made of both."""

    def __init__(self, near: Any, far: Any, mesh: Any = None) -> None:
        self.near, self.far, self.mesh = near, far, mesh

        @jax.custom_vjp
        def own(w: Any, x: Any) -> Any:
            return far(w, near(w, x)).sum()

        def pull(kept: Any, cotangent: Any) -> Any:
            return 2 * cotangent * near(*kept).sum() * kept[0], cotangent * kept[1]

        own.defvjp(lambda w, x: (own(w, x), (w, x)), pull)
        self.own = own

    def loss(self, w: Any, x: Any) -> Any:
        return jnp.sum(self.far(w, self.near(w, x)) ** 2)


def _chosen(m: Model, w: Any, x: Any) -> Any:
    return jax.lax.cond(m.loss(w, x) > 0, lambda: m.near(w, x), lambda: m.far(w, x))


def _switched(m: Model, index: Any, w: Any, x: Any) -> Any:
    return jax.lax.switch(index, [lambda: m.near(w, x), lambda: m.far(w, x), lambda: x])


def _switches(m: Model, w: Any, x: Any) -> Any:
    first = (m.loss(w, x) * 0).astype(int)
    return [_switched(m, first + at, w, x) for at in range(3)]


def _scanned(m: Model, w: Any, x: Any) -> Any:
    def step(carry: Any, more: Any) -> Any:
        return m.near(w, carry) + more, m.far(w, carry).sum()

    return jax.lax.scan(step, x, jnp.arange(3.0), reverse=True)


def _numbered(m: Model, w: Any, x: Any) -> Any:
    """Numbers of this process go through the loop beside the values of the slices."""

    def step(carry: Any, _: Any) -> Any:
        at, c = carry
        return (at + 1, m.near(w, m.far(w, c)) * at), (at * 2, at)

    return jax.lax.scan(step, (1, x), None, length=3)


def _ended(m: Model, w: Any, x: Any) -> Any:
    """A loop of choices on one slice: one ends early, and the others do not."""

    def over(stay: Callable[[Any], Any]) -> Any:
        def step(carry: Any, _: Any) -> Any:
            def go() -> Any:
                return carry[0] & (carry[1].sum() < 9), m.near(w, carry[1]) + carry[1] + 1

            return jax.lax.cond(carry[0], go, lambda: stay(carry)), None

        return jax.lax.scan(step, (True, x), None, length=7)[0]

    def again(carry: Any) -> Any:
        return True, carry[1]

    return over(lambda carry: carry), over(again), over(lambda carry: (False, carry[1] * 0))


def _while(m: Model, w: Any, x: Any) -> Any:
    """All calls of the loop are on one slice."""
    return jax.lax.while_loop(lambda c: c.sum() < 100, lambda c: m.near(w, c) + c + 1, x)


def _bounded(m: Model, w: Any, x: Any) -> Any:
    """It ends before its bound."""

    def step(carry: Any) -> Any:
        at, c = carry
        return at + 1, m.far(w, m.near(w, c)) + c / 2

    if m.mesh is not None:
        return pw.while_loop(lambda carry: carry[0] < 3, step, (0, x), max_iterations=5)[1]
    for at in range(3):
        x = step((at, x))[1]
    return x


def _nested(m: Model, w: Any, x: Any) -> Any:
    """Loops in a loop: what inner iterations keep for the backward half is kept by outer ones."""

    def steps(step: Callable[[Any], Any], count: int, x: Any) -> Any:
        if m.mesh is not None:
            return pw.while_loop(
                lambda carry: carry[0] < count,
                lambda carry: (carry[0] + 1, step(carry[1])),
                (0, x),
                max_iterations=count + 1,
            )[1]
        for _ in range(count):
            x = step(x)
        return x

    return steps(lambda x: steps(lambda x: m.far(w, m.near(w, x)) + x, 2, x), 2, x).sum()


def _mapped(m: Model, w: Any, x: Any) -> Any:
    over = jax.lax.map if m.mesh is None else pw.map
    return over(lambda row: m.far(w, m.near(w, row)), x)


CASES: dict[str, Callable[[Model], Callable[..., Any]]] = {
    "grad": lambda m: jax.grad(m.loss),
    "value_and_grad": lambda m: jax.value_and_grad(m.loss, (0, 1)),
    "vjp": lambda m: lambda w, x: jax.vjp(m.loss, w, x)[1](jnp.float32(2)),
    "jvp": lambda m: lambda w, x: jax.jvp(m.loss, (w, x), (w, x)),
    "linearize": lambda m: lambda w, x: jax.linearize(lambda w: m.loss(w, x), w)[1](w),
    "forward over reverse": lambda m: lambda w, x: jax.jvp(jax.grad(m.loss), (w, x), (w, x)),
    "jacrev": lambda m: lambda w, x: jax.jacrev(lambda x: m.far(w, m.near(w, x)))(x),
    "jacfwd": lambda m: lambda w, x: jax.jacfwd(lambda x: m.far(w, m.near(w, x)))(x),
    "vmap": lambda m: lambda w, x: jax.vmap(m.loss, (None, 0))(w, jnp.stack([x, x + 1])),
    "checkpoint": lambda m: jax.grad(jax.checkpoint(m.loss)),
    "custom_vjp": lambda m: jax.grad(m.own, (0, 1)),
    "stop_gradient": lambda m: jax.grad(
        lambda w, x: m.loss(w, jax.lax.stop_gradient(m.near(w, x)))
    ),
    "jit": lambda m: jax.jit(lambda w, x: m.loss(w, x) + 1),
    "eval_shape": lambda m: lambda w, x: x * len(jax.eval_shape(m.near, w, x).shape),
    "cond": lambda m: lambda w, x: _chosen(m, w, x),
    "grad of cond": lambda m: jax.grad(lambda w, x: _chosen(m, w, x).sum()),
    "switch": lambda m: lambda w, x: _switches(m, w, x),
    "grad of switch": lambda m: jax.grad(lambda w, x: _switches(m, w, x)[1].sum()),
    "scan": lambda m: lambda w, x: _scanned(m, w, x),
    "scan of numbers": lambda m: lambda w, x: _numbered(m, w, x),
    "scan that ends early": lambda m: lambda w, x: _ended(m, w, x),
    "grad of scan": lambda m: jax.grad(lambda w, x: _scanned(m, w, x)[1].sum()),
    "fori_loop": lambda m: (
        lambda w, x: jax.lax.fori_loop(0, 3, lambda at, c: m.far(w, m.near(w, c)) + at, x)
    ),
    "while_loop": lambda m: lambda w, x: _while(m, w, x),
    "pw.while_loop": lambda m: lambda w, x: _bounded(m, w, x),
    "grad of pw.while_loop": lambda m: jax.grad(lambda w, x: _bounded(m, w, x).sum(), (0, 1)),
    "jvp of pw.while_loop": lambda m: (
        lambda w, x: jax.jvp(lambda w, x: _bounded(m, w, x), (w, x), (w, x))
    ),
    "vmap of pw.while_loop": lambda m: lambda w, x: jax.vmap(lambda row: _bounded(m, w, row))(x),
    "checkpoint of pw.while_loop": lambda m: jax.grad(
        jax.checkpoint(lambda w, x: _bounded(m, w, x).sum())
    ),
    "grad of nested loops": lambda m: jax.grad(lambda w, x: _nested(m, w, x), (0, 1)),
    "jvp of grad of nested loops": lambda m: (
        lambda w, x: jax.jvp(jax.grad(lambda w: _nested(m, w, x)), (w,), (w,))
    ),
    "pw.map": lambda m: lambda w, x: _mapped(m, w, x),
    "grad of pw.map": lambda m: jax.grad(lambda w, x: (_mapped(m, w, x) ** 2).sum(), (0, 1)),
    "vmap of pw.map": lambda m: (
        lambda w, x: jax.vmap(lambda w: _mapped(m, w, x))(jnp.stack([w, w + 1]))
    ),
    "map": lambda m: lambda w, x: jax.lax.map(lambda row: m.far(w, m.near(w, row)), x),
    "jax.numpy between calls": lambda m: (
        lambda w, x: m.far(w, jnp.concatenate([m.near(w, x), jnp.ones((2, 4))])[::2] / 2) @ w
    ),
}


@pytest.fixture(scope="module")
def model() -> Iterator[Model]:
    with InProcessCluster(islands=2, devices_per_island=2):
        slices = pw.make_virtual_device_set()
        near, far = (
            pw.Mesh(slices.add_slice(2, island=f"island-{at}").devices, ("x",)) for at in range(2)
        )
        rows = {"in_shardings": (P(), P()), "out_shardings": P()}
        yield Model(pw.jit(near_of, mesh=near, **rows), pw.jit(far_of, mesh=far), near)


REPEATED = {
    *("grad", "vjp", "linearize", "jacfwd", "fori_loop", "map"),
    *("vmap of pw.map", "checkpoint of pw.while_loop"),
}
"""Cases of which others are made, as `value_and_grad` of `grad` and `scan` of `fori_loop`."""


@pytest.mark.parametrize("name", [long(name) if name in REPEATED else name for name in CASES])
def test_it_gives_what_plain_jax_gives(model: Model, name: str) -> None:
    wanted = CASES[name](Model(near_of, far_of))(W, X)
    found = pw.get(pw.program(CASES[name](model))(W, X))
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    jax.tree.map(
        lambda one, other: np.testing.assert_allclose(one, other, rtol=2e-4, atol=1e-5),
        found,
        wanted,
    )


def test_a_step_of_training_is_one_program(model: Model) -> None:
    """Donated parameters, gradients by JAX, and an update of ordinary operators."""
    near = model.mesh
    step = pw.jit(lambda w, g: w - 0.1 * g, mesh=near, donate_argnums=0)

    @pw.program
    def train(w: Any, x: Any) -> Any:
        loss, grad = jax.value_and_grad(model.loss)(w, x)
        return step(w, grad * (1 + 0 * loss)), loss

    plain, w = W, pw.put(W, sharding=pw.NamedSharding(near, P()))
    for _ in range(3):
        loss, grad = jax.value_and_grad(Model(near_of, far_of).loss)(plain, X)
        plain = plain - 0.1 * grad
        before, (w, found) = w, train(w, X)
        np.testing.assert_allclose(pw.get(found), loss, rtol=1e-4)
        assert before.is_deleted()
    np.testing.assert_allclose(pw.get(w), plain, rtol=1e-4)


def test_a_loop_over_calls_on_two_slices_needs_a_bound(model: Model) -> None:
    def endless(w: Any, x: Any) -> Any:
        return jax.lax.while_loop(
            lambda c: c.sum() < 1, lambda c: model.far(w, model.near(w, c)), x
        )

    with pytest.raises(pw.TracingError, match=r"pw\.while_loop with max_iterations"):
        pw.program(endless)(W, X)
    with pytest.raises(pw.ArgumentError, match="300 iterations, and a program takes at most 256"):
        pw.program(
            lambda w, x: jax.lax.fori_loop(0, 300, lambda _, c: model.far(w, model.near(w, c)), x)
        )(W, X)


def test_vmap_and_gradients_over_host_functions_are_refused(model: Model) -> None:
    shape = jax.ShapeDtypeStruct((4,), np.float32)
    ask = pw.host_function(lambda x: x, shape, mesh=model.mesh)
    with pytest.raises(pw.TracingError, match=r"vmap.*Call it once for each value"):
        pw.program(jax.vmap(ask))(X)
    with pytest.raises(pw.TracingError, match=r"Python has no gradient"):
        pw.program(jax.grad(lambda x: ask(x).sum()))(X[0])


def test_a_callback_between_calls_is_refused(model: Model) -> None:
    def shows(x: Any) -> Any:
        jax.debug.print("{}", x)
        return model.near(W, x)

    with pytest.raises(pw.TracingError, match=r"'shows' has debug_print .*cannot travel"):
        pw.program(shows)(X)


def test_how_a_value_lies_is_not_known_in_a_program(model: Model) -> None:
    def laid(x: Any) -> Any:
        return pw.put(model.near(W, x), sharding=x.sharding)

    with pytest.raises(pw.TracerError, match=r"'laid', in .*laid .*test_transforms"):
        pw.program(laid)(X)


def test_arguments_of_a_program_are_donated(model: Model) -> None:
    def step(state: Any, x: Any) -> Any:
        return {"w": model.near(state["w"], x)}, state["count"] + 1

    program = pw.program(step, donate_argnames="state")
    there = pw.NamedSharding(model.mesh, P())
    state = pw.put({"w": W, "count": np.int32(3)}, sharding=there)
    x = pw.put(X, sharding=there)
    made, count = program(state, x)
    np.testing.assert_allclose(pw.get(made["w"]), near_of(W, X), rtol=1e-4)
    assert int(count) == 4
    assert [one.is_deleted() for one in (state["w"], state["count"], x)] == [True, True, False]
    with pytest.raises(pw.ArrayDeleted, match=r"argument 0\['count'\]"):
        program(state, x)


def test_calls_of_one_kind_are_traced_once_for_all_programs(model: Model) -> None:
    traced = []

    def counted(x: Any) -> Any:
        traced.append(1)
        return x * 2

    double = pw.jit(counted, mesh=model.mesh)
    for times in (1, 2, 3):
        program = pw.program(lambda x, times=times: sum(double(x + at) for at in range(times)))
        assert pw.get(program(X)).shape == X.shape
    assert len(traced) == 1


def test_a_lowered_program_shows_what_the_passes_make_of_it(model: Model) -> None:
    first, second = (pw.make_virtual_device_set().add_slice(1) for _ in range(2))

    def double(x: Any) -> Any:
        return x * 2

    def square(x: Any) -> Any:
        return x**2

    doubled, squared = pw.jit(double, devices=first), pw.jit(square, devices=second)

    def choose(x: Any) -> Any:
        y = doubled(x)
        return pw.cond(y.sum() > 0, lambda: squared(y), lambda: y)

    lowered = pw.program(choose).lower(np.ones(3, np.float32))
    assert "name=double" in lowered.as_text("trace")
    assert lowered.as_text("residuals").count("name=square") == 1
    text = lowered.as_text().replace("cond(<lambda>, <lambda>)", "cond")
    assert [line.strip() for line in text.splitlines()] == [
        "program choose",
        "in0: float32[3] on slice0",
        "%0 = double(in0) -> float32[3] on slice0",
        "%1 = reduce_sum_gt(%0) -> bool[] on slice0",
        "%2 = square(%0 as float32[3] on slice1) -> float32[3] on slice1 if %1",
        "%3 = cond(%1 as bool[] on slice1, %2, %0 as float32[3] on slice1) -> float32[3] on slice1",
        "return %3",
    ]
    with pytest.raises(pw.ArgumentError, match="no pass 'ways'; choose trace"):
        lowered.as_text("ways")


@pytest.mark.parametrize("in_branch", [False, True])
def test_residuals_of_a_gradient_of_a_gradient_may_be_constants(
    model: Model, in_branch: bool
) -> None:
    def scaled(x: Any) -> Any:
        return jax.nn.gelu(x.sum()) * jnp.sin(x[0, 0])

    def second(f: Any) -> Any:
        def loss(w: Any) -> Any:
            return jax.lax.cond(w[0, 0] > 0, f, lambda w: (w**2).sum(), w) if in_branch else f(w)

        return jax.grad(lambda w: (jax.grad(loss)(w) ** 2).sum())

    w = np.abs(W) / 9
    got = pw.get(pw.program(second(pw.jit(scaled, mesh=model.mesh)))(w))
    np.testing.assert_allclose(got, second(scaled)(w), atol=1e-5)


@pytest.mark.parametrize("is_nested", [False, True])
def test_branches_keep_no_more_residuals_than_calls_outside_of_them(is_nested: bool) -> None:
    """Each branch keeps one array for its backward half, and takes its rows as they have come."""

    def gelu(x: Any, w: Any) -> Any:
        return jax.nn.gelu(x @ w)

    def other(x: Any, w: Any) -> Any:
        return jnp.tanh(jnp.sin(x @ w))

    with InProcessCluster(islands=2, devices_per_island=2):
        slices = pw.make_virtual_device_set()
        meshes = [
            pw.Mesh(slices.add_slice(2, island=f"island-{at}").devices, ("x",)) for at in range(2)
        ]
        split = {"in_shardings": (P("x"), P())}
        calls = [pw.jit(f, mesh=m, **split) for f, m in zip((gelu, other), meshes, strict=True)]
        total = pw.jit(lambda x: x.sum(), mesh=meshes[0])

        def loss(w: Any, x: Any, one: Any, two: Any, total: Any) -> Any:
            def apply(w: Any) -> Any:
                return jax.lax.cond(x[0, 0] > 0, lambda w: one(x, w), lambda w: two(x, w), w)

            if is_nested:
                return total(jax.lax.cond(x.sum() > 0, apply, lambda w: x[:, :3] * w.sum(), w))
            return total(apply(w))

        grad = pw.program(jax.grad(lambda w, x: loss(w, x, *calls, total)))
        w = np.random.default_rng(1).standard_normal((4, 3)).astype(np.float32)
        for sign in (1, -1):
            x = np.abs(W)
            x[0, 0] *= sign
            expected = jax.grad(lambda w: loss(w, x, gelu, other, jnp.sum))(w)  # noqa: B023
            x = pw.put(x, sharding=pw.NamedSharding(meshes[0], P("x")))
            np.testing.assert_allclose(pw.get(grad(w, x)), expected, atol=1e-5)
        text = grad.lower(w, x).as_text()
    for name in ("gelu", "other"):
        ((results,),) = [re.findall(rf"= {name}\(.*\) -> (.*)", text)]
        assert results.count("float32") == 2, text
    moved = re.findall(r"in0 as (\S+) on slice1", text)
    assert len(moved) == 2, text
    assert len(set(moved)) == 1, text
