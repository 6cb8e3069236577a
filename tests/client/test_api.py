"""The API on the real runtime: what a user of JAX expects, and what only futures can do."""

from __future__ import annotations

import asyncio
import gc
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pw
from pw.testing import InProcessCluster
from tests.stages.daemons import BOUND_S, until, until_true
from tests.stages.inside import traced_of
from tests.stages.samples import diagonal
from tests.stages.stage import held, mesh_on, numbers, split


@pytest.fixture(scope="module")
def cluster() -> Iterator[InProcessCluster]:
    with InProcessCluster(islands=2, devices_per_island=2) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def east(cluster: InProcessCluster) -> pw.Mesh:
    return mesh_on(0)


@pytest.fixture(scope="module")
def west(cluster: InProcessCluster) -> pw.Mesh:
    return mesh_on(1)


# --- functions -----------------------------------------------------------------------------------------


class Pair(NamedTuple):
    left: Any
    right: Any


def test_trees_keywords_statics_and_none_go_in_and_come_out(east: pw.Mesh) -> None:
    @pw.jit(mesh=east, static_argnames="times")
    def f(pair: Pair, scale: Any = None, *, times: int = 1) -> Any:
        total = pair.left * times + pair.right["b"][1]
        return Pair(total, {"none": None, "scaled": None if scale is None else total * scale})

    pair = Pair(numbers(4), {"b": (None, 2.0)})
    first = f(pair, times=3)
    assert isinstance(first, Pair)
    assert first.right == {"none": None, "scaled": None}
    np.testing.assert_array_equal(first.left, numbers(4) * 3 + 2)
    second = f(pair, scale=np.float32(10))
    np.testing.assert_array_equal(second.right["scaled"], (numbers(4) + 2) * 10)
    again = f(pair=first._replace(right={"b": (None, first.left)}), times=2)
    np.testing.assert_array_equal(again.left, (numbers(4) * 3 + 2) * 3)


def test_functions_of_nothing_to_nothing(east: pw.Mesh) -> None:
    assert pw.jit(lambda: (), mesh=east)() == ()
    assert int(pw.jit(lambda: 3, mesh=east)()) == 3
    assert pw.jit(lambda unused: None, mesh=east)(np.ones((100, 100))) is None
    x = pw.put(numbers(4), sharding=split(east))
    assert np.asarray(pw.jit(lambda v: v[:0], mesh=east)(x)).shape == (0,)
    same, also, deep = pw.jit(lambda v: (v, v, {"k": v}), mesh=east)(x)
    for result in (same, also, deep["k"]):
        np.testing.assert_array_equal(result, numbers(4))


COLLECTIVES: dict[str, Callable[[Any], Any]] = {
    "psum": lambda v: jax.lax.psum(v, "x"),
    "pmean": lambda v: jax.lax.pmean(v, "x"),
    "pmax": lambda v: jax.lax.pmax(v, "x"),
    "all_gather": lambda v: jax.lax.all_gather(v, "x").sum(0) * jax.lax.axis_index("x"),
    "ppermute": lambda v: jax.lax.ppermute(v, "x", [(0, 1), (1, 0)]),
    "all_to_all": lambda v: jax.lax.all_to_all(v, "x", 0, 0),
    "psum_scatter": lambda v: jax.lax.psum_scatter(v, "x"),
}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_collectives_in_pmap_and_in_shard_map_inside_jit(name: str, east: pw.Mesh) -> None:
    collective = COLLECTIVES[name]
    x = numbers(8).reshape(2, 2, 2)
    expected = jax.vmap(collective, axis_name="x")(x)
    mapped = pw.pmap(collective, axis_name="x", devices=list(east.devices))(x)
    np.testing.assert_array_equal(mapped, expected)

    def blocks(v: Any) -> Any:
        return collective(v[0])[None]

    inside = pw.jit(
        lambda v: jax.shard_map(
            blocks, in_specs=P("x"), out_specs=P("x"), axis_names={"x"}, check_vma=False
        )(v),
        mesh=east,
        in_shardings=P("x"),
    )
    np.testing.assert_array_equal(inside(x), expected)


def test_partitioned_by_the_compiler(east: pw.Mesh) -> None:
    a, b = numbers(16).reshape(4, 4), numbers(16, 3).reshape(4, 4)
    f = pw.jit(lambda a, b: a @ b, mesh=east, in_shardings=(P(None, "x"), P("x", None)))
    np.testing.assert_array_equal(f(a, b), a @ b)


def test_gradients_of_functions_and_of_those_that_run_on_devices(east: pw.Mesh) -> None:
    def loss(w: Any, x: Any) -> Any:
        return jnp.sum(jnp.tanh(w @ x) ** 2)

    w, x = numbers(9).reshape(3, 3) / 9, numbers(3)
    expected = jax.grad(loss)(w, x)
    np.testing.assert_allclose(pw.jit(jax.grad(loss), mesh=east)(w, x), expected, rtol=1e-5)
    outside = pw.jit(jax.grad(pw.jit(loss, mesh=east)), mesh=east)
    np.testing.assert_allclose(outside(w, x), expected, rtol=1e-5)
    mapped = pw.pmap(jax.value_and_grad(loss), in_axes=(None, 0), devices=list(east.devices))
    values, grads = mapped(w, np.stack([x, 2 * x]))
    np.testing.assert_allclose(values[1], loss(w, 2 * x), rtol=1e-5)
    np.testing.assert_allclose(grads[0], expected, rtol=1e-5)


def test_pmap_of_keys_axes_and_statics(east: pw.Mesh) -> None:
    def draw(key: Any, scale: float, shift: Any, count: int) -> Any:
        return jax.random.split(key)[0], jax.random.normal(key, (count,)) * scale + shift

    f = pw.pmap(
        draw,
        in_axes=(0, None, 1),
        out_axes=(0, 1),
        static_broadcasted_argnums=3,
        devices=list(east.devices),
    )
    keys = jax.random.split(jax.random.key(3), 2)
    shift = numbers(2).reshape(1, 2)
    new, drawn = f(keys, 2.0, shift, 5)
    expected = jax.vmap(lambda k, s: draw(k, 2.0, s, 5), in_axes=(0, 1), out_axes=(0, 1))
    want_keys, want = expected(keys, shift)
    np.testing.assert_allclose(drawn, want, rtol=1e-5)
    assert drawn.shape == (5, 2)
    assert (pw.get(new) == want_keys).all()
    again, _ = f(new, 2.0, shift, 5)
    assert again.dtype == keys.dtype


def test_raw_keys_are_integers_like_any(east: pw.Mesh) -> None:
    raw = jax.random.PRNGKey(5)
    f = pw.jit(lambda k: jax.random.uniform(k, (3,)), mesh=east)
    np.testing.assert_array_equal(f(raw), jax.random.uniform(raw, (3,)))


# --- closures ------------------------------------------------------------------------------------------


def inverted(function: Callable[[Any], Any]) -> Any:
    f = jax.custom_vjp(function)
    f.defvjp(lambda x: (f(x), None), lambda residual, g: (-g,))
    return f


CAPTURING: dict[str, Callable[[Any], Callable[[Any], Any]]] = {
    "jit": lambda w: jax.jit(lambda x: x * w),
    "jit in jit": lambda w: jax.jit(lambda x: jax.jit(lambda y: y * w)(x) + w),
    "jit in scan": lambda w: (
        lambda x: jax.lax.scan(
            lambda c, a: (jax.jit(lambda y: y * w)(c) * a, None), x, jnp.arange(1.0, 3.0)
        )[0]
    ),
    "jits in both parts of while": lambda w: (
        lambda x: jax.lax.while_loop(
            lambda c: jax.jit(lambda y: jnp.sum(y * w))(c) < 1e5,
            lambda c: jax.jit(lambda y: y * w + 1)(c),
            x,
        )
    ),
    "jits in some branches": lambda w: (
        lambda x: sum(
            jax.lax.switch(i, [jax.jit(lambda y: y * w), lambda y: y, jax.jit(lambda y: y + w)], x)
            for i in (np.int32(0), jnp.argmax(x) % 3)
        )
    ),
    "jit in checkpoint, differentiated": lambda w: jax.grad(
        jax.checkpoint(lambda x: jnp.sum(jax.jit(lambda y: jnp.sin(y) * w)(x)))
    ),
    "jit in custom_vjp": lambda w: inverted(lambda x: jax.jit(lambda y: y * w)(x)),
    "jit in shard_map": lambda w: (
        lambda x: jax.shard_map(
            lambda v: jax.jit(lambda y: y * w)(v), in_specs=P(), out_specs=P(), check_vma=False
        )(x)
    ),
    "all at once": lambda w: (
        lambda x: jax.lax.scan(
            lambda c, a: (
                jax.lax.cond(a > 0, jax.checkpoint(jax.jit(lambda y: y * w)), lambda y: y + w, c),
                jnp.sum(c),
            ),
            x,
            jnp.arange(3.0),
        )[0]
    ),
}


@pytest.mark.parametrize(("kind", "how"), diagonal(["pw", "jax"], list(CAPTURING)))
def test_what_is_closed_over_is_an_argument_at_any_depth(
    how: str, kind: str, east: pw.Mesh, west: pw.Mesh
) -> None:
    host = numbers(1024) / 512
    w = pw.put(host, sharding=split(west)) if kind == "pw" else jnp.asarray(host)
    build = CAPTURING[how]
    f = pw.jit(build(w), mesh=east)
    x = numbers(1024) / 1024
    with jax.sharding.use_abstract_mesh(east.abstract_mesh):
        expected = build(jnp.asarray(host))(x) if how != "jit in shard_map" else x * host
    np.testing.assert_allclose(f(x), expected, rtol=1e-5)
    traced = traced_of(f)
    assert len(traced.captured) == 1
    assert w is traced.captured[0] or kind == "jax"
    np.testing.assert_allclose(f(x), expected, rtol=1e-5)


def test_a_captured_array_has_the_methods_of_jax_where_it_is_traced(east: pw.Mesh) -> None:
    w = pw.put(numbers(6).reshape(2, 3))
    f = pw.jit(lambda x: w.T.sum() + w.astype(jnp.int32).reshape(-1)[4] + w.at[0].set(0).max() * x)
    assert float(f(2.0)) == 15 + 4 + 10
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = w.nonsense
    traced: list[str] = []

    @pw.program
    def p(v: Any) -> Any:
        with pytest.raises(AttributeError, match=r"no attribute '?nonsense"):
            _ = v.nonsense
        traced.append("once")
        return v

    p(w)
    assert traced == ["once"]


# --- programs ------------------------------------------------------------------------------------------


def test_a_program_is_traced_once_and_moves_values_by_itself(east: pw.Mesh, west: pw.Mesh) -> None:
    traces = []
    a = pw.jit(lambda x: x * 2, mesh=east, in_shardings=P("x"), out_shardings=P("x"))
    b = pw.jit(lambda x: x + 1, mesh=west, in_shardings=P("x"), out_shardings=P("x"))
    c = pw.pmap(lambda x: x - jax.lax.psum(x, "i"), axis_name="i", devices=list(east.devices))

    @pw.program
    def f(tree: Any, steps: int = 2) -> Any:
        traces.append(1)
        v = tree["v"]
        for _ in range(3):
            v = b(a(v))
        return {"v": v, "c": c(v), "given": tree["v"], "none": tree["none"]}

    for start in range(5):
        given = numbers(2, start)
        out = f({"v": given, "none": None})
        v = ((given * 2 + 1) * 2 + 1) * 2 + 1
        np.testing.assert_array_equal(out["v"], v)
        np.testing.assert_array_equal(out["c"], v - v.sum())
        np.testing.assert_array_equal(out["given"], given)
        assert out["v"].sharding.mesh == west
        assert out["none"] is None
    assert len(traces) == 1
    f({"v": out["v"], "none": None})  # lies on an island now
    assert len(traces) == 2


def test_three_slices_of_two_devices_on_two_physical_ones(cluster: InProcessCluster) -> None:
    meshes = [mesh_on(1) for _ in range(3)]
    assert len({mesh.devices[0].slice.id for mesh in meshes}) == 3
    stages = [
        pw.pmap(
            lambda x, k=k: jax.lax.psum(x, "i") + k, axis_name="i", devices=list(m.devices.flat)
        )
        for k, m in enumerate(meshes)
    ]

    @pw.program
    def f(x: Any) -> Any:
        for stage in stages:
            x = stage(x)
        return x

    np.testing.assert_array_equal(f(numbers(2)), [8, 8])
    np.testing.assert_array_equal(stages[2](stages[1](stages[0](numbers(2)))), [8, 8])


# --- futures -------------------------------------------------------------------------------------------


def test_calls_return_and_chains_go_on_while_a_host_is_busy(
    cluster: InProcessCluster, east: pw.Mesh, west: pw.Mesh
) -> None:
    here = pw.jit(lambda x: x + 1, mesh=east)
    there = pw.jit(lambda x: x * 2, mesh=west)
    both = pw.program(lambda x: there(here(x)))
    for f in (here, there, both):
        f(here(1.0)).block_until_ready()  # compiled
    with held(cluster):
        assert float(there(np.float32(2))) == 4  # the other island is free
        x = here(here(1.0))
        chain = x
        for _ in range(50):
            chain = both(here(chain))
        assert (chain.shape, chain.dtype) == ((), np.float32)
        assert chain.sharding.mesh == west
        assert not x.is_ready()
        assert not chain.is_ready()
    value = np.float32(3)
    for _ in range(50):
        value = (value + 1 + 1) * np.float32(2)
    assert np.asarray(chain) == value
    until(chain.is_ready, "readiness")
    assert chain.block_until_ready() is chain


def test_the_error_of_a_wait_that_was_given_up_is_silent(
    cluster: InProcessCluster, east: pw.Mesh
) -> None:
    f = pw.jit(lambda x: x * 2, mesh=east)
    f(numbers(3)).block_until_ready()
    told: list[Any] = []

    async def gives_up() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
        with held(cluster):
            x = f(numbers(3))
            waiting = asyncio.ensure_future(_value(x))
            await asyncio.sleep(0)  # it begins to wait
            waiting.cancel()
            pw.cancel(x)
            await until_true(lambda: x.is_ready() or told)

    asyncio.run(gives_up())
    gc.collect()
    assert told == []


@pytest.mark.parametrize("wait", [pw.get, pw.block_until_ready])
def test_a_wait_may_have_a_limit(cluster: InProcessCluster, east: pw.Mesh, wait: Any) -> None:
    f = pw.jit(lambda x: x * 2, mesh=east)
    wait(f(numbers(3)), timeout=BOUND_S)
    with held(cluster):
        made = [f(numbers(3)), f(numbers(4))]
        for limit_s in (0.0, 0.01):
            with pytest.raises(TimeoutError, match=rf"not within {limit_s:g} s; pw\.why\(\)"):
                wait(made, timeout=limit_s)
        for wrong in ("2", -1, math.nan, [1]):
            with pytest.raises(
                pw.ArgumentError, match="a timeout is a number of seconds, 0 or more"
            ):
                wait(made, timeout=wrong)
    last = pw.get(wait(made, timeout=math.inf), timeout=BOUND_S)
    np.testing.assert_array_equal(last[1], 2 * numbers(4))


def test_many_clients_wait_for_one_array(cluster: InProcessCluster, east: pw.Mesh) -> None:
    f = pw.jit(lambda x: x * 2, mesh=east)
    f(numbers(3)).block_until_ready()
    got: list[Any] = []

    async def awaits(x: Any) -> Any:
        waiting = [asyncio.ensure_future(_value(x)) for _ in range(3)]
        await asyncio.sleep(0)
        waiting[0].cancel()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(_value(x), 0.001)
        release.set()
        return await asyncio.gather(*waiting[1:])

    release = threading.Event()
    with held(cluster):
        x = f(numbers(3))
        reader = threading.Thread(target=lambda: got.append(np.asarray(x)))
        reader.start()

        def run() -> None:
            got.extend(asyncio.run(awaits(x)))

        awaiter = threading.Thread(target=run)
        awaiter.start()
        assert release.wait(60)
    reader.join(60)
    awaiter.join(60)
    assert len(got) == 3
    for value in got:
        np.testing.assert_array_equal(value, numbers(3) * 2)


async def _value(x: Any) -> Any:
    return np.asarray(await x)


def test_printing_and_reading(east: pw.Mesh) -> None:
    x = pw.put(numbers(4), sharding=split(east))
    assert str(x) == "[0. 1. 2. 3.]"
    assert repr(x) == "array([0., 1., 2., 3.], dtype=float32)"
    assert f"{x[1]:.2f} {x[2]}" == "1.00 2.0"
    assert not np.asarray(x).flags.writeable
    assert [float(v) for v in x] == [0, 1, 2, 3]
    tree = pw.get({"a": x, "b": [1, None, pw.put(2)]})
    assert tree["b"] == [1, None, 2]
    assert pw.block_until_ready({"a": x, "n": None, "host": 3})["a"] is x


def test_put_moves_between_islands_and_shardings(east: pw.Mesh, west: pw.Mesh) -> None:
    for size in (8, 100_000):
        x = pw.put(numbers(size), sharding=split(east))
        for sharding in (
            split(west),
            pw.NamedSharding(west, P()),
            split(east),
            pw.NamedSharding(east, P()),
        ):
            x = pw.put(x, sharding=sharding)
            assert x.sharding == sharding
        np.testing.assert_array_equal(x, numbers(size))


def test_put_takes_shardings_where_jax_does(east: pw.Mesh, west: pw.Mesh) -> None:
    there, here = split(east), pw.NamedSharding(west, P())
    x, y = pw.put((numbers(4), numbers(2)), (there, here))
    assert (x.sharding, y.sharding) == (there, here)
    assert pw.put(x, here).sharding == here
    with pytest.raises(pw.PlacementError, match=r"^3 was given"):
        pw.put(numbers(4), 3)


def test_what_is_put_is_a_copy(east: pw.Mesh) -> None:
    for size in (8, 1_000_000):
        value = numbers(size)
        x = pw.put(value, sharding=split(east))
        y = pw.jit(lambda v: v, mesh=east)(value)
        value[:] = -1
        np.testing.assert_array_equal(x, numbers(size))
        np.testing.assert_array_equal(y, numbers(size))


# --- several threads -----------------------------------------------------------------------------------


def test_threads_call_at_the_same_time(east: pw.Mesh, west: pw.Mesh) -> None:
    f = pw.jit(lambda x: x + 1, mesh=east)
    g = pw.jit(lambda x: x * 2, mesh=west)
    p = pw.program(lambda x: g(f(x)))
    wrong: list[Any] = []

    def user(number: int) -> None:
        try:
            x, expected = pw.put(np.float32(number)), np.float32(number)
            for step in range(30):
                x = p(x) if step % 2 else g(f(x))
                expected = (expected + 1) * np.float32(2)
                if step % 7 == 0:
                    x, dead = f(x), x
                    dead.delete()
                    expected += 1
            np.testing.assert_array_equal(x, expected)
        except BaseException as error:  # noqa: BLE001 - shown by the main thread
            wrong.append(error)

    threads = [threading.Thread(target=user, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert wrong == []
    assert not any(thread.is_alive() for thread in threads)


def test_results_of_calls_in_a_program_lie_as_shardings_of_jax_say(
    cluster: InProcessCluster,
) -> None:
    mesh = mesh_on(0, devices=2)
    rows, whole = (pw.NamedSharding(mesh, spec) for spec in (P("x"), P()))

    def both(x: Any) -> Any:
        return x + 1, {"twice": x * 2}

    call = pw.jit(both, in_shardings=rows, out_shardings=(rows, {"twice": whole}))

    @pw.program
    def again(x: Any) -> Any:
        return call(call(x)[0])

    y, others = again(np.arange(4.0, dtype=np.float32))
    np.testing.assert_array_equal(y, [2, 3, 4, 5])
    np.testing.assert_array_equal(others["twice"], [2, 4, 6, 8])
    assert (y.sharding, others["twice"].sharding) == (rows, whole)
