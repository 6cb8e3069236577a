"""`pw.grad` and `pw.value_and_grad`: values against plain JAX, the programs that they make, and errors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pw
from pw.core.programs.program import Program
from pw.testing import InProcessCluster
from tests.stages.local_runtime import LocalRuntime
from tests.stages.samples import long
from tests.stages.stage import mesh_on

Place = Callable[..., Any]
"""Compiles a function for one of the slices, or returns it as it is."""


def draw(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


X, Y = draw(4, 6), draw(4, 3, seed=1)
LAYERS = {"one": {"w": draw(6, 6, seed=2), "b": draw(6, seed=3)}, "two": draw(6, 3, seed=4)}
LABELS = np.array([2, 0, 1, 1], np.int32)
LARGE = draw(32, 16, seed=5)


def hidden(params: Any, x: Any) -> Any:
    return jnp.tanh(x @ params["w"] + params["b"])


def error(w: Any, h: Any, y: Any) -> Any:
    return jnp.mean((jax.nn.gelu(h @ w) - y) ** 2)


@jax.custom_vjp
def doubled_on_the_way_back(x: Any) -> Any:
    return x * 1.0


doubled_on_the_way_back.defvjp(lambda x: (x * 1.0, None), lambda _, g: (2 * g,))


# --- functions: each is called with `place` in plain JAX, and on slices ------------------------------


def chain(place: Place) -> Any:
    first, last = place(hidden, 0), place(error, 1)
    return lambda params, x, y: last(params["two"], first(params["one"], x), y)


def repeated(place: Place) -> Any:
    first, last = place(hidden, 0), place(error, 1)

    def loss(params: Any, x: Any, y: Any) -> Any:
        for _ in range(3):
            x = x + first(params["one"], x)
        return last(params["two"], x, y)

    return loss


def shared(place: Place) -> Any:
    """One parameter, on both islands and twice in one call."""
    first, second = (
        place(lambda w, x: x @ w, 0),
        place(lambda v, w, h: ((h @ w) * v.sum()).sum(), 1),
    )
    return lambda w, x: second(w, w, first(w, x)) + second(w * 0.5, w, x)


def with_results_of_several_kinds(place: Place) -> Any:
    both = place(lambda x: {"sin": jnp.sin(x), "best": jnp.argmax(x, 1), "unused": x.sum()}, 0)
    take = place(lambda h, at: jnp.take_along_axis(h, at[:, None], 1).sum(), 1)

    def loss(x: Any) -> Any:
        made = both(x)
        return take(made["sin"], made["best"]), {"best": made["best"], "sum": made["unused"]}

    return loss


def of_integers(place: Place) -> Any:
    embed = place(lambda table, at: {"rows": table[at], "at": at}, 0)

    def score(w: Any, found: Any, labels: Any) -> Any:
        scores = jax.nn.log_softmax(found["rows"] @ w)
        return -jnp.take_along_axis(scores, labels[:, None], 1).mean() + 0.0 * found["at"].sum()

    last = place(score, 1)
    return lambda table, w, at: last(w, embed(table, at), at % 3)


def with_constants(place: Place) -> Any:
    small = np.float32(3.0)
    return place(lambda x: ((x @ LARGE[:6]) * small).sum(), 0)


def with_operators(place: Place) -> Any:
    square, total = place(jnp.square, 0), place(lambda x: x.sum(), 1)

    def loss(x: Any, scale: Any) -> Any:
        h = square(x) * scale - x[1:3].sum() / 2
        first, *rest = h
        return total(h.T.reshape(-1)[::2]) + first.mean() + rest[1].max()

    return loss


def with_derivatives_of_its_own(place: Place) -> Any:
    own = place(doubled_on_the_way_back, 0)
    again = place(jax.checkpoint(lambda x: jnp.sin(jnp.sin(x))), 1)
    return lambda x: own(again(x)).sum()


def with_loops(place: Place) -> Any:
    def scanned(ws: Any, x: Any) -> Any:
        return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), h.sum()), x, ws)

    def chosen(h: Any, sums: Any) -> Any:
        return jax.lax.cond(sums[0] > 0, lambda v: (v**2).sum(), lambda v: v.sum(), h)

    run, pick = place(scanned, 0), place(chosen, 1)
    return lambda ws, x: pick(*run(ws, x))


def with_keys_and_names(place: Place) -> Any:
    def drop(x: Any, key: Any, *, rate: float) -> Any:
        return jnp.where(jax.random.bernoulli(key, rate, x.shape), x, 0.0)

    dropped, total = place(drop, 0, static_argnames="rate"), place(lambda x: (x**2).sum(), 1)
    return lambda x, key: total(dropped(x, key=key, rate=0.5))


def with_constants_of_the_gradient(place: Place) -> Any:
    halt, mix = place(jax.lax.stop_gradient, 0), place(lambda x, c: (x * c).sum(), 1)
    return lambda x: mix(x, halt(x))


def of_numbers(place: Place) -> Any:
    scale = place(lambda x, s: (x * s**2).sum(), 0)
    return lambda s, x: scale(x, s)


def of_complex_numbers(place: Place) -> Any:
    turn, size = place(lambda z, w: z * w, 0), place(lambda z: (jnp.abs(z) ** 2).sum(), 1)
    return lambda z, w: size(turn(z, w) + 1.0)


def of_its_argument_alone(place: Place) -> Any:
    return lambda x, unused: x


def of_nothing(place: Place) -> Any:
    total = place(lambda c: c.sum(), 0)
    return lambda x: total(Y)


CASES: dict[str, tuple[Callable[[Place], Any], tuple[Any, ...], dict[str, Any]]] = {
    "a chain over two islands": (chain, (LAYERS, X, Y), {}),
    "by all arguments": (chain, (LAYERS, X, Y), {"argnums": (2, 0, -2)}),
    "one function three times": (repeated, (LAYERS, X, Y), {"argnums": (0, 1)}),
    "a shared parameter": (shared, (draw(6, 6), X), {"argnums": (0, 1)}),
    "several results": (with_results_of_several_kinds, (X,), {"has_aux": True}),
    "integers": (of_integers, (draw(5, 6), draw(6, 3), LABELS), {"argnums": (0, 1)}),
    "constants": (with_constants, (X,), {}),
    "operators": (with_operators, (X, draw(6)), {"argnums": (0, 1)}),
    "custom derivatives, and jax.checkpoint": (with_derivatives_of_its_own, (X,), {}),
    "loops and branches": (with_loops, (draw(3, 6, 6), X), {"argnums": (0, 1)}),
    "keys, names and static arguments": (with_keys_and_names, (X, jax.random.key), {}),
    "stop_gradient": (with_constants_of_the_gradient, (X,), {}),
    "numbers": (of_numbers, (1.5, X), {}),
    "complex numbers": (of_complex_numbers, (draw(3) + 1j * draw(3, seed=1), 2.0 - 1j), {}),
    "no call": (of_its_argument_alone, (2.0, X), {"argnums": (0, 1)}),
    "no dependence": (of_nothing, (X,), {}),
}


def case_of(name: str) -> tuple[Callable[[Place], Any], tuple[Any, ...], dict[str, Any]]:
    """A case, with a key where it says so: JAX has no backend yet when a test is collected."""
    make, args, options = CASES[name]
    return make, tuple(arg(0) if arg is jax.random.key else arg for arg in args), options


@pytest.fixture
def rt() -> Iterator[LocalRuntime]:
    with LocalRuntime.in_use() as local:
        yield local


@pytest.fixture
def meshes(rt: LocalRuntime) -> list[pw.Mesh]:
    """A slice of two devices on each of two islands."""
    return [mesh_on(island) for island in range(2)]


def here(function: Any, where: int, **options: Any) -> Any:
    return function


def on(meshes: Sequence[pw.Mesh]) -> Place:
    return lambda function, where, **options: pw.jit(function, mesh=meshes[where], **options)


def near(found: Any, expected: Any) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert (one.shape, one.dtype) == (np.shape(other), jnp.result_type(other))
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=2e-5)


def names(rt: LocalRuntime) -> Counter[str]:
    """The names of the computations of the last program, with the number of their calls."""
    program = last(rt)
    return Counter(program.computations[node.computation].name for node in program.nodes)


def last(rt: LocalRuntime) -> Program:
    return rt.programs[rt.runs[-1][0]]


# --- values ---------------------------------------------------------------------------------------


HOW = [*product(CASES, ["called alone", "in a program"])]


@pytest.mark.parametrize(
    ("case", "how"), [long(*pair) if at % 5 else pair for at, pair in enumerate(HOW)]
)
def test_values_and_gradients_are_those_of_plain_jax(
    meshes: list[pw.Mesh], case: str, how: str
) -> None:
    make, args, options = case_of(case)
    expected = jax.jit(jax.value_and_grad(make(here), **options))(*args)
    placed = make(on(meshes))
    if how == "called alone":
        near(pw.get(pw.value_and_grad(placed, **options)(*args)), expected)
        return
    inside = pw.program(pw.grad(placed, **options))
    gradient = (expected[1], expected[0][1]) if options.get("has_aux") else expected[1]
    near(pw.get(inside(*args)), gradient)


@pytest.mark.parametrize("case", [long("a chain over two islands"), "a shared parameter"])
def test_gradients_of_gradients(meshes: list[pw.Mesh], case: str) -> None:
    make, args, _ = case_of(case)

    def norm(place: Place, grad: Any) -> Any:
        square = place(lambda tree: sum((leaf**2).sum() for leaf in jax.tree.leaves(tree)), 1)
        return lambda *args: square(grad(make(place))(*args))

    expected = jax.jit(jax.grad(norm(here, jax.grad)))(*args)
    near(pw.get(pw.grad(norm(on(meshes), pw.grad))(*args)), expected)


def test_mapped_functions(meshes: list[pw.Mesh]) -> None:
    def local(w: Any, x: Any) -> Any:
        h = jnp.tanh(x @ w)
        return h - jax.lax.pmean(h, "i"), jax.lax.psum((h**2).sum(), "i")

    options: Any = {"in_axes": (None, 0), "out_axes": (0, None)}
    mapped = pw.pmap(local, axis_name="i", devices=meshes[0].devices, **options)
    total = pw.jit(lambda h, s: (h**3).sum() + s, mesh=meshes[1])
    args = draw(6, 3), draw(2, 4, 6)
    plain = jax.vmap(local, axis_name="i", **options)

    def expected(w: Any, x: Any) -> Any:
        h, s = plain(w, x)
        return (h**3).sum() + s

    found = pw.value_and_grad(lambda w, x: total(*mapped(w, x)), (0, 1))(*args)
    near(pw.get(found), jax.jit(jax.value_and_grad(expected, (0, 1)))(*args))


def test_a_function_over_islands_that_are_joined(rt: LocalRuntime) -> None:
    joined = pw.make_virtual_device_set().add_slice(devices=4, islands=2)
    mesh = pw.Mesh(np.reshape(joined.devices, (2, 2)), ("island", "data"))
    rows = P(("island", "data"))
    first = pw.jit(hidden, mesh=mesh, in_shardings=(P(), rows))
    end = pw.jit(error, mesh=mesh, in_shardings=(P(), rows, rows))
    found = pw.value_and_grad(lambda p, x, y: end(p["two"], first(p["one"], x), y))(LAYERS, X, Y)
    near(pw.get(found), jax.jit(jax.value_and_grad(chain(here)))(LAYERS, X, Y))


def test_inside_of_a_jit_function_it_is_that_of_jax(meshes: list[pw.Mesh]) -> None:
    found = pw.jit(pw.grad(chain(on(meshes))), mesh=meshes[1])(LAYERS, X, Y)
    near(pw.get(found), jax.jit(jax.grad(chain(here)))(LAYERS, X, Y))


def test_the_same_value_in_a_closure_is_a_constant(meshes: list[pw.Mesh]) -> None:
    times = pw.jit(lambda a, b: (a * b).sum(), mesh=meshes[0])

    @pw.program
    def run(x: Any) -> Any:
        return pw.grad(lambda a: times(a, x))(x)

    near(pw.get(run(X)), X)


def test_arrays_in_closures_are_constants(meshes: list[pw.Mesh]) -> None:
    far = pw.put(X, sharding=pw.NamedSharding(meshes[1], P("x")))
    near(pw.get(pw.grad(pw.jit(lambda a: (a * far).sum(), mesh=meshes[0]))(X)), X)


# --- programs -------------------------------------------------------------------------------------


def test_a_gradient_lies_as_its_parameter(meshes: list[pw.Mesh]) -> None:
    one, two = (pw.NamedSharding(mesh, P("x")) for mesh in meshes)
    params = {"near": pw.put(draw(6, 4), sharding=one), "unused": pw.put(draw(4), sharding=two)}
    params["far"] = pw.put(draw(4, 6), sharding=two)
    compute = pw.jit(lambda a, b, x: (x @ a @ b).sum(), mesh=meshes[0])
    found = pw.grad(lambda p, x: compute(p["near"], p["far"], x))(params, X)
    assert {k: v.sharding for k, v in found.items()} == {"near": one, "unused": two, "far": two}
    expected = jax.grad(lambda p, x: (x @ p["near"] @ p["far"]).sum())(pw.get(params), X)
    near(pw.get(found), expected)


def test_a_value_that_is_moved_is_the_same_value(rt: LocalRuntime, meshes: list[pw.Mesh]) -> None:
    double, total = (pw.jit(f, mesh=meshes[0]) for f in (lambda x: x * x, lambda a: a.sum()))
    there = pw.NamedSharding(meshes[1], P("x"))

    def loss(x: Any) -> Any:
        h = double(x)
        return total(pw.put(h, sharding=there)) + total(h)

    near(pw.get(pw.grad(loss)(X)), 4 * X)
    assert names(rt)["add"] == 1  # the cotangents; nothing uses the sum of the losses


def test_residuals_that_are_arguments_or_results_are_not_made_again(
    rt: LocalRuntime, meshes: list[pw.Mesh]
) -> None:
    def product(x: Any, w: Any) -> Any:
        h = x @ w
        return h, (h * h).sum()

    def total(h: Any, norm: Any) -> Any:
        return jnp.tanh(h).sum() + norm

    multiply, end = (pw.jit(f, mesh=meshes[0]) for f in (product, total))
    pw.grad(lambda w: end(*multiply(X, w)))(draw(6, 3))
    results = {computation.name: len(computation.outputs) for computation in last(rt).computations}
    assert results == {"product": 2, "product_backward": 1, "total": 1, "total_backward": 2}


def test_what_the_loss_does_not_depend_on_has_no_backward_computation(
    rt: LocalRuntime, meshes: list[pw.Mesh]
) -> None:
    def used(x: Any) -> Any:
        return (x**2).sum()

    def report(x: Any) -> Any:
        return x.mean()

    def halted(x: Any) -> Any:
        return jax.lax.stop_gradient(x).sum()

    def rounded(x: Any) -> Any:
        return x.astype(np.int32)

    add, note, stop, to_integer = (
        pw.jit(f, mesh=meshes[0]) for f in (used, report, halted, rounded)
    )

    def loss(x: Any, unused: Any) -> Any:
        return add(x) + stop(x), (note(x), to_integer(x), unused)

    pw.grad(loss, (0, 1), has_aux=True)(X, Y)
    expected = ["used", "used_backward", "report", "halted", "rounded", "add"]
    found = names(rt)
    assert {name: found[name] for name in expected} == dict.fromkeys(expected, 1)
    assert set(found) == {*expected, "broadcast_in_dim"}


def test_calls_of_one_kind_share_their_computations(
    rt: LocalRuntime, meshes: list[pw.Mesh]
) -> None:
    sharding = pw.NamedSharding(meshes[0], P())
    params = jax.tree.map(lambda leaf: pw.put(leaf, sharding=sharding), LAYERS)
    layer, end = pw.jit(hidden, mesh=meshes[0]), pw.jit(error, mesh=meshes[1])

    def loss(params: Any, x: Any) -> Any:
        x = pw.put(x, sharding=sharding)
        for _ in range(4):
            x = layer(params["one"], x)
        return end(params["two"], x, Y)

    pw.grad(loss)(params, X)
    found = names(rt)
    assert (found["hidden"], found["hidden_backward"]) == (4, 4)
    # The backward computation of the first call makes no gradient of x.
    kinds = Counter(computation.name for computation in last(rt).computations)
    assert (kinds["hidden"], kinds["hidden_backward"]) == (1, 2)


def test_donated_arguments_stay_when_a_gradient_needs_them(meshes: list[pw.Mesh]) -> None:
    square = pw.jit(lambda x: (x**2).sum(), mesh=meshes[0], donate_argnums=0)
    x = pw.put(X, sharding=pw.NamedSharding(meshes[0], P()))
    near(pw.get(pw.grad(square)(x)), 2 * X)
    near(pw.get(x), X)
    square(x)
    with pytest.raises(pw.ArrayDeleted):
        pw.get(x)


# --- errors ---------------------------------------------------------------------------------------


def test_a_host_function_has_no_gradient(meshes: list[pw.Mesh]) -> None:
    def lookup(x: Any) -> Any:
        return x

    shape = jax.ShapeDtypeStruct(X.shape, X.dtype)
    ask = pw.host_function(lookup, shape, devices=meshes[0].devices)
    total = pw.jit(lambda x, c: (x * c).sum(), mesh=meshes[1])
    halt = pw.jit(jax.lax.stop_gradient, mesh=meshes[1])
    with pytest.raises(pw.TracingError, match=r"lookup.*Python has no gradient.*stop_gradient"):
        pw.grad(lambda x: total(x, ask(x)))(X)

    @pw.program
    def fine(x: Any) -> Any:
        return pw.grad(lambda x: (total(x, halt(ask(x))), ask(x)), has_aux=True)(x)

    assert fine.lower(X)


def test_a_callback_is_refused(meshes: list[pw.Mesh]) -> None:
    def shown(x: Any) -> Any:
        jax.debug.print("{}", x)
        return x.sum()

    with pytest.raises(pw.TracingError, match=r"'shown'.*Callbacks"):
        pw.grad(pw.jit(shown, mesh=meshes[0]))(X)


ERRORS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "not a scalar": (lambda f: pw.grad(lambda x: f(x))(X), r"'<lambda>' returned float32\[4,6\]"),
    "not one value": (
        lambda f: pw.grad(lambda x: (f(x),) * 2)(X),
        r"returned \(float32\[.*has_aux",
    ),
    "an integer": (lambda f: pw.grad(lambda x: (f(x).sum() > 0).astype(int))(X), r"int32\[\]"),
    "no pair": (
        lambda f: pw.grad(lambda x: f(x).sum(), has_aux=True)(X),
        r"returned float32\[\], .*pair",
    ),
    "no such argument": (lambda f: pw.grad(lambda x: f(x).sum(), 1)(X), "argnums=1.*1 positional"),
    "an integer argument": (
        lambda f: pw.grad(lambda p: f(p["x"]).sum())({"x": X, "at": LABELS}),
        r"argument 0\['at'\] of '<lambda>' is int32\[4\]",
    ),
    "no array": (lambda f: pw.grad(lambda x, y: f(x).sum(), (0, 1))(X, "y"), "argument 1.*'y'"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors(meshes: list[pw.Mesh], case: str) -> None:
    call, said = ERRORS[case]
    with pytest.raises(pw.ArgumentError, match=said):
        call(pw.jit(jnp.sin, mesh=meshes[0]))


# --- training -------------------------------------------------------------------------------------


def test_a_model_on_two_islands_trains_as_in_plain_jax() -> None:
    with InProcessCluster(islands=2, devices_per_island=2):
        meshes = [mesh_on(island) for island in range(2)]
        first = pw.jit(hidden, mesh=meshes[0], in_shardings=(P(), P("x")))
        end = pw.jit(error, mesh=meshes[1], in_shardings=(P(), P("x"), P("x")))

        def loss(params: Any, x: Any, y: Any) -> Any:
            return end(params["two"], first(params["one"], x), y)

        def steps(loss: Any, grad: Any) -> Any:
            def run(params: Any, x: Any, y: Any) -> Any:
                losses = []
                for _ in range(5):
                    value, found = grad(loss)(params, x, y)
                    params = jax.tree.map(lambda p, g: p - 0.5 * g, params, found)
                    losses.append(value)
                return params, losses

            return run

        params = {
            "one": pw.put(LAYERS["one"], sharding=pw.NamedSharding(meshes[0], P())),
            "two": pw.put(LAYERS["two"], sharding=pw.NamedSharding(meshes[1], P("x"))),
        }
        train = pw.program(steps(loss, pw.value_and_grad))
        found = pw.get(train(params, X, Y))
        near(found, jax.jit(steps(chain(here), jax.value_and_grad))(LAYERS, X, Y))
        assert found[1][-1] < found[1][0]
        again = pw.get(train(params, X, Y))
        assert jax.tree.all(jax.tree.map(np.array_equal, found, again))
