"""`pw.while_loop` and `pw.map` against JAX's: values, places, ends, and errors."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pw
from pw.client.loops import driver
from pw.testing import InProcessCluster
from tests.stages.daemons import BOUND_S, until
from tests.stages.samples import long
from tests.stages.scripts import TWO_GANGS, finish, start_client, two_clients_say_ok, two_gangs
from tests.stages.stage import held, interrupted_in_its_wait

ONES = np.ones(4, np.float32)


class Place:
    """Slices of two islands, and functions on them."""

    cluster: InProcessCluster

    def __init__(self) -> None:
        slices = pw.make_virtual_device_set()
        self.here = pw.Mesh(slices.add_slice(2, island="island-0").devices, ("x",))
        self.there = pw.Mesh(slices.add_slice(2, island="island-1").devices, ("x",))
        self.double = pw.jit(lambda x: x * 2, mesh=self.here)
        self.more = pw.jit(lambda x: x + 1, mesh=self.here)
        self.add = pw.jit(lambda x: x + 1, mesh=self.there)
        self.is_small = pw.jit(lambda x: x.sum() < 1000, mesh=self.here)
        self.is_low = pw.jit(lambda x: x.sum() < 500, mesh=self.there)
        self.plain = SimpleNamespace(
            **{name: fun.__wrapped__ for name, fun in vars(self).items() if hasattr(fun, "lower")}
        )
        """The same functions for JAX alone."""


@pytest.fixture(scope="module")
def place() -> Iterator[Place]:
    with InProcessCluster(islands=2, devices_per_island=2) as cluster:
        made = Place()
        made.cluster = cluster
        yield made


Ops = SimpleNamespace | Any
OURS = SimpleNamespace(cond=pw.cond, while_loop=pw.while_loop)
JAX = SimpleNamespace(cond=jax.lax.cond, while_loop=jax.lax.while_loop)


def _counted(p: Any, step: Callable[[Any], Any]) -> tuple[Any, Any, Any]:
    def body(carry: Any) -> Any:
        return {"x": step(carry["x"]), "i": carry["i"] + 1}

    return lambda carry: p.is_small(carry["x"]), body, {"x": ONES, "i": 0}


def _choosing(p: Any, ops: Ops) -> tuple[Any, Any, Any]:
    def body(x: Any) -> Any:
        return ops.cond(p.is_low(x), lambda x: p.add(p.double(x)), p.more, x)

    return p.is_small, body, ONES * 30


def _several(p: Any, ops: Ops) -> tuple[Any, Any, Any]:
    def body(carry: Any) -> Any:
        number, fixed, (x, y) = carry
        return number + 1, fixed, (p.double(x), p.add(y))

    return lambda carry: carry[0] < 7, body, (np.int32(0), ONES * 7, (ONES * 0, ONES))


def _nested(p: Any, ops: Ops) -> tuple[Any, Any, Any]:
    def body(x: Any) -> Any:
        return ops.while_loop(lambda x: x.sum() % 64 > 0, p.more, p.double(p.more(x)))

    return p.is_small, body, ONES


LOOPS: dict[str, Callable[[Any, Any], tuple[Any, Any, Any]]] = {
    "one mesh": lambda p, ops: _counted(p, p.double),
    "two islands": lambda p, ops: _counted(p, lambda x: p.add(p.double(x))),
    "predicate elsewhere": lambda p, ops: (p.is_low, p.double, ONES),
    "no iterations": lambda p, ops: (p.is_small, p.double, ONES * 1000),
    "no iterations on two islands": lambda p, ops: (p.is_small, p.add, ONES * 1000),
    "cond in the body": _choosing,
    "several leaves": _several,
    "a loop in the body": _nested,
    "operators": lambda p, ops: (lambda x: x < 100, lambda x: x * 3, 1),
}


@pytest.mark.parametrize("name", LOOPS)
def test_it_gives_what_jax_gives(place: Place, name: str) -> None:
    cond_fun, body_fun, init = LOOPS[name](place, OURS)
    wanted = jax.lax.while_loop(*LOOPS[name](place.plain, JAX))
    alone = pw.get(pw.while_loop(cond_fun, body_fun, init))
    jax.tree.map(np.testing.assert_array_equal, alone, wanted)
    again = pw.while_loop(cond_fun, body_fun, pw.put(init, place.here.devices.ravel().tolist()))
    jax.tree.map(np.testing.assert_array_equal, pw.get(again), wanted)
    inside = pw.program(lambda x: pw.while_loop(cond_fun, body_fun, x, max_iterations=12))
    jax.tree.map(np.testing.assert_array_equal, pw.get(inside(init)), wanted)
    traced = pw.jit(lambda x: pw.while_loop(cond_fun, body_fun, x), mesh=place.here)
    jax.tree.map(np.testing.assert_array_equal, pw.get(traced(init)), wanted)


@pytest.mark.parametrize("limit", [0, 1, long(5), 23])
def test_it_ends_after_so_many_iterations(place: Place, limit: int) -> None:
    for step in (place.more, place.add):
        for run in (
            lambda x, step=step: pw.while_loop(lambda x: True, step, x, max_iterations=limit),
            pw.program(
                lambda x, step=step: pw.while_loop(lambda x: True, step, x, max_iterations=limit)
            ),
            pw.jit(
                lambda x, step=step: pw.while_loop(lambda x: True, step, x, max_iterations=limit),
                mesh=place.here,
            ),
        ):
            assert pw.get(run(ONES)).tolist() == [1.0 + limit] * 4


def test_leaves_lie_where_the_body_leaves_them(place: Place) -> None:
    split, other = pw.NamedSharding(place.here, P("x")), pw.NamedSharding(place.there, P("x"))
    double = pw.jit(lambda x: x * 2, mesh=place.here, in_shardings=P("x"), out_shardings=P("x"))
    add = pw.jit(lambda x: x + 1, mesh=place.there, in_shardings=P("x"), out_shardings=P("x"))
    for step, lies in ((double, split), (lambda x: add(double(x)), other)):
        made = pw.while_loop(place.is_small, step, {"a": ONES}["a"])
        assert made.sharding == lies
        wanted = jax.lax.while_loop(
            lambda x: x.sum() < 1000, lambda x, f=step: x * 2 + (f is not double), ONES
        )
        np.testing.assert_array_equal(pw.get(made), wanted)

    def swap(pair: Any) -> Any:
        return pair[1], pair[0]

    with pytest.raises(
        pw.ShardingError, match=r"'swap' takes carry\[[01]\] as .* and returns it as"
    ):
        x = pw.put(ONES, sharding=split)
        pw.while_loop(lambda pair: True, swap, (x, pw.put(ONES, sharding=other)))


def test_a_leaf_that_no_computation_uses_stays_where_it_is(place: Place) -> None:
    fixed = pw.put(ONES * 7, sharding=pw.NamedSharding(place.there, P()))
    made, same = pw.while_loop(
        lambda carry: place.is_small(carry[0]),
        lambda carry: (place.more(carry[0]), carry[1]),
        (ONES, fixed),
    )
    assert same.sharding == fixed.sharding
    assert pw.get((made, same))[0].tolist() == [250.0] * 4
    assert pw.get(same).tolist() == [7.0] * 4


def test_only_what_the_functions_donate_is_gone(place: Place) -> None:
    for mesh in (place.here, place.there):
        giving = pw.jit(lambda x: x + 1, mesh=mesh, donate_argnums=0)
        kept, gone = (pw.put(ONES, sharding=pw.NamedSharding(mesh, P())) for _ in range(2))
        for step, x in ((place.more, kept), (giving, gone)):
            made = pw.while_loop(place.is_small, step, x)
            assert pw.get(made).tolist() == [250.0] * 4
        assert pw.get(kept).tolist() == [1.0] * 4
        with pytest.raises(pw.ArrayDeleted):
            pw.get(gone)


def test_arrays_that_the_functions_close_over(place: Place) -> None:
    weights = pw.put(ONES * 3, sharding=pw.NamedSharding(place.here, P()))
    scale = pw.jit(lambda x, w: x + w, mesh=place.here)
    made = pw.while_loop(place.is_small, lambda x: scale(x, weights), ONES)
    assert pw.get(made).tolist() == [250.0] * 4

    @pw.program
    def inside(x: Any, w: Any) -> Any:
        return pw.while_loop(place.is_small, lambda x: scale(x, w), x, max_iterations=90)

    assert pw.get(inside(ONES, weights)).tolist() == [250.0] * 4


def test_an_error_ends_it(place: Place) -> None:
    fails = pw.jit(lambda x: jnp.log(5.5 - x), mesh=place.here, check_nans=True)

    def counts(x: Any) -> Any:
        assert x.sum() < 20
        return x + 1

    raises = pw.host_function(counts, jax.ShapeDtypeStruct((4,), np.float32), mesh=place.there)
    with pytest.raises(pw.NaNFound):
        pw.while_loop(lambda x: place.is_small(x), lambda x: fails(x) * 0 + place.more(x), ONES)
    with pytest.raises(pw.ComputationFailed, match="AssertionError"):
        pw.while_loop(lambda x: place.is_low(x), raises, ONES)
    assert pw.get(pw.while_loop(place.is_small, place.double, ONES)).tolist() == [256.0] * 4


def test_it_ends_after_its_timeout(place: Place) -> None:
    for step in (place.more, place.add):
        with pytest.raises(pw.ComputationTimeout, match="within its timeout of"):
            pw.while_loop(lambda x: x.sum() > -1, step, ONES, timeout=0.2)
    assert (
        pw.get(pw.while_loop(place.is_small, place.add, ONES, timeout=60)).tolist() == [250.0] * 4
    )


def test_ctrl_c_ends_it(place: Place) -> None:
    for step in (place.more, place.add):
        with held(place.cluster, 0), held(place.cluster, 1), interrupted_in_its_wait():
            pw.while_loop(lambda x: x.sum() > -1, step, ONES)
    assert pw.get(pw.while_loop(place.is_small, place.add, ONES)).tolist() == [250.0] * 4


def test_two_threads_at_once(place: Place) -> None:
    made: dict[int, list[float]] = {}

    def run(number: int) -> None:
        step = (place.more, place.add)[number % 2]
        made[number] = pw.get(pw.while_loop(place.is_small, step, ONES * number)).tolist()

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(BOUND_S)
    assert made == {number: [250.0] * 4 for number in range(2)}


WRONG: dict[str, tuple[type[Exception], str, Callable[[Place], Any]]] = {
    "no function": (TypeError, "two functions", lambda p: pw.while_loop(True, p.more, ONES)),
    "no number": (
        ValueError,
        "a whole number of iterations, not -1",
        lambda p: pw.while_loop(p.is_small, p.more, ONES, max_iterations=-1),
    ),
    "a fraction": (
        ValueError,
        "a whole number of iterations, not 2.5",
        lambda p: pw.while_loop(p.is_small, p.more, ONES, max_iterations=2.5),  # type: ignore[arg-type]
    ),
    "no seconds": (
        ValueError,
        "a positive number of seconds, not '3'",
        lambda p: pw.while_loop(p.is_small, p.more, ONES, timeout="3"),  # type: ignore[arg-type]
    ),
    "seconds in a program": (
        pw.ArgumentError,
        r"'<lambda>' was given timeout=3 in a pw.program function.* as in pw.program\(f, timeout=3\)",
        lambda p: pw.program(
            lambda x: pw.while_loop(p.is_small, lambda x: p.more(x), x, timeout=3)
        )(ONES),
    ),
    "seconds in a branch": (
        pw.ArgumentError,
        "where a loop has no timeout of its own",
        lambda p: pw.cond(
            True, lambda x: pw.while_loop(p.is_small, p.more, x, timeout=3), p.more, ONES
        ),
    ),
    "seconds in a jit function": (
        pw.ArgumentError,
        r"in a pw.jit function.* as in pw.jit\(f, timeout=3\)",
        lambda p: pw.jit(lambda x: pw.while_loop(lambda x: False, lambda x: x, x, timeout=3))(ONES),
    ),
    "a list": (
        pw.ArgumentError,
        r"must return a scalar boolean, and returns \[bool\[\]\]; compute one",
        lambda p: pw.while_loop(lambda x: [p.is_small(x)], p.more, ONES),
    ),
    "no boolean": (
        pw.ArgumentError,
        r"'more' must return a scalar boolean, and returns float32\[4\]",
        lambda p: pw.while_loop(_more(p), p.more, ONES),
    ),
    "another shape": (
        pw.ArgumentError,
        r"'halve' takes carry\['a'\]\[0\] as float32\[4\] and returns float32\[2\]",
        lambda p: pw.while_loop(lambda c: True, _halve, {"a": [ONES]}),
    ),
    "another dtype": (
        pw.ArgumentError,
        r"takes carry as int32\[4\] and returns float32\[4\]",
        lambda p: pw.while_loop(
            lambda x: True, pw.jit(lambda x: x / 2, mesh=p.here), np.int32([1] * 4)
        ),
    ),
    "another tree": (
        pw.ArgumentError,
        r"must return a carry of the tree that it takes, float32\[4\], and returns \(float32\[4\], 1\)",
        lambda p: pw.while_loop(p.is_small, lambda x: (p.more(x), 1), ONES),
    ),
    "no array": (
        pw.ArgumentError,
        "given 'x' of type str in its first carry",
        lambda p: pw.while_loop(lambda c: True, lambda c: c, (ONES, "x")),
    ),
    "returns no array": (
        pw.ArgumentError,
        r"returns 'x' of type str as carry\[1\]",
        lambda p: pw.while_loop(lambda c: True, lambda c: (c[0], "x"), (ONES, 1)),
    ),
    "no bound": (
        pw.ArgumentError,
        "each iteration is recorded; give max_iterations, or call the loop outside",
        lambda p: pw.program(lambda x: pw.while_loop(p.is_small, p.add, x))(ONES),
    ),
    "bool()": (
        pw.TracerError,
        "needs the value",
        lambda p: pw.while_loop(p.is_small, lambda x: x if x.sum() else p.more(x), ONES),
    ),
}


def _more(place: Place) -> Any:
    def more(x: Any) -> Any:
        return place.more(x)

    return more


def _with_word(place: Place) -> Any:
    def more(x: Any) -> Any:
        return place.more(x), "x"

    return more


def _halve(carry: Any) -> Any:
    def halve(carry: Any) -> Any:
        return {"a": [carry["a"][0][:2]]}

    return halve(carry)


_halve.__name__ = "halve"


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_said_before_anything_runs(place: Place, name: str) -> None:
    kind, words, wrong = WRONG[name]
    with pytest.raises(kind, match=words):
        wrong(place)


class _Portions:
    """A loop of so many iterations of so many seconds, without a cluster.

    The client hears late of each fifth burst.
    """

    sizes = ()

    def __init__(self, iterations: int, each_s: float, late_s: float) -> None:
        self.iterations = 1
        self._late_s = late_s
        self.now_s, self.lengths = 0.0, []
        self._left, self._each_s, self._busy_s = iterations, each_s, 0.0

    def burst(self, count: int, state: Any) -> Any:
        self.lengths.append(count)
        self._busy_s = (
            max(self._busy_s, self.now_s) + 0.0002 + self._each_s * min(count, self._left)
        )
        self._left = max(self._left - count, 0)
        ends_s, goes_on = self._busy_s, self._left > 0

        late_s = 0.0 if len(self.lengths) % 5 else self._late_s

        def result(timeout: float | None) -> bool:
            self.now_s = max(self.now_s, ends_s + late_s)
            return goes_on

        made = SimpleNamespace(result=result)
        return [SimpleNamespace(start_fetch=lambda: made, start_wait=lambda: made)]


@pytest.mark.parametrize("late_s", [0.0, 0.008])
@pytest.mark.parametrize("each_s", [1e-6, 50e-6, 1e-3, 0.1])
def test_a_portion_takes_about_as_long_as_it_should(each_s: float, late_s: float) -> None:
    bursts: Any = _Portions(int(5 / each_s), each_s, late_s)
    driver.drive(
        bursts, [], max_iterations=None, timeout_s=0.0, name="", clock=lambda: bursts.now_s
    )
    later = bursts.lengths[len(bursts.lengths) // 2 : -driver.AHEAD]
    for length in later:
        assert length == 1 or driver.BURST_S / 2 < length * each_s < driver.BURST_S * 2


@pytest.mark.parametrize("step", ["more", "add"])
def test_a_loss_in_a_long_loop_needs_few_runs_again(
    place: Place, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    period = 25
    monkeypatch.setattr(driver, "MOST", 1)  # iterations in each burst
    monkeypatch.setattr(driver, "REPLICATED_BURSTS", period)
    fixed = pw.put(ONES, sharding=pw.NamedSharding(place.here, P()))
    made = pw.while_loop(
        lambda carry: carry[0].sum() > 0,
        lambda carry: (getattr(place, step)(carry[0]), carry[1]),
        (ONES, fixed),
        max_iterations=150,
    )
    controller: Any = place.cluster.controller.actors["controller"]

    def kept() -> int:
        gc.collect()  # the errors of other loops, whose tracebacks hold their arrays
        return sum(len(client.lineage) for client in controller.sessions.clients)

    until(lambda: kept() < 4 * period, "runs before the last replicas are forgotten")
    assert pw.get(made[0]).tolist() == [151.0] * 4


# --- pw.map --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, long(1), 3, long(40)])
def test_map_gives_what_jax_gives(place: Place, size: int) -> None:
    xs = {"a": np.arange(size * 3, dtype=np.float32).reshape(size, 3), "b": np.arange(size)}
    on_devices = xs | {"a": pw.put(xs["a"], sharding=pw.NamedSharding(place.there, P()))}

    def on_one(p: Any) -> Any:
        return lambda x: {"made": p.double(p.more(x["a"]))}

    def on_two(p: Any) -> Any:
        return lambda x: (p.add(p.double(x["a"])), p.add(x["b"]))

    for fun in (on_one, on_two):
        wanted = jax.lax.map(fun(place.plain), xs)
        ours = fun(place)
        for given in (xs, on_devices):
            jax.tree.map(np.testing.assert_array_equal, pw.get(pw.map(ours, given)), wanted)
        inside = pw.program(lambda xs, ours=ours: pw.map(ours, xs))
        jax.tree.map(np.testing.assert_array_equal, pw.get(inside(xs)), wanted)
        traced = pw.jit(lambda xs, ours=ours: pw.map(ours, xs), mesh=place.here)
        jax.tree.map(np.testing.assert_array_equal, pw.get(traced(xs)), wanted)


def test_a_map_has_a_gradient(place: Place) -> None:
    xs = np.arange(6, dtype=np.float32).reshape(3, 2)
    scale = pw.jit(lambda x, w: x * x * w, mesh=place.here)
    total = pw.jit(jnp.sum, mesh=place.there)

    def loss(w: Any, xs: Any) -> Any:
        return total(pw.map(lambda x: place.add(scale(x, w)), xs))

    assert pw.get(pw.grad(loss)(np.float32(2), xs)) == 55.0


def test_rows_that_count_may_be_carried(place: Place) -> None:
    grow = pw.jit(lambda r: pw.Ragged(r.rows * 2, r.counts + 1), mesh=place.here)
    move = pw.jit(lambda r: pw.Ragged(r.rows, r.counts), mesh=place.there)
    few = pw.jit(lambda r: r.counts < 6, mesh=place.there)
    init = pw.Ragged(np.ones(8, np.float32), np.int32(4))
    made = pw.get(pw.while_loop(few, lambda r: move(grow(r)), init))
    assert (made.rows.tolist(), int(made.counts)) == ([4.0] * 4 + [0.0] * 4, 6)


def test_a_body_that_only_moves_its_carry(place: Place) -> None:
    def body(x: Any) -> Any:
        return pw.put(x, sharding=pw.NamedSharding(place.here, P()))

    made = pw.while_loop(lambda x: place.is_low(x), body, ONES, max_iterations=3)
    assert (made.sharding.mesh, pw.get(made).tolist()) == (place.here, [1.0] * 4)


def test_a_loop_with_a_bound_has_a_gradient(place: Place) -> None:
    def grow(x: Any) -> Any:
        return x * x

    def loss(x: Any, bound: int | None = 4) -> Any:
        small = pw.while_loop(lambda x: place.is_small(x), body, x, max_iterations=bound)
        return end(small)

    def plain(x: Any) -> Any:
        for _ in range(4):
            x = jnp.where(x.sum() < 1000, grow(x), x)
        return x.sum()

    body, end = pw.jit(grow, mesh=place.here), pw.jit(jnp.sum, mesh=place.there)
    gradient = pw.grad(loss)
    for size in (0.5, 5.0, 900.0):
        x = ONES * np.float32(size)
        np.testing.assert_allclose(pw.get(gradient(x)), jax.grad(plain)(x), rtol=1e-5)
    with pytest.raises(pw.ArgumentError, match=r"gradient flows .* 'grow'.*give max_iterations"):
        pw.grad(lambda x: loss(x, None))(ONES)


def test_iterations_that_do_not_run_keep_nothing_for_gradients(place: Place) -> None:
    square = pw.jit(lambda x: x * x, mesh=place.here)

    def loss(x: Any) -> Any:
        return pw.while_loop(
            place.is_small, lambda x: place.add(square(x)), x, max_iterations=3
        ).sum()

    step = pw.program(jax.grad(loss))
    assert pw.get(step(ONES)).tolist() == [80.0] * 4
    assert "empty" not in repr(pw.plan(step)), "JAX's zeros in place of residuals"


def test_map_says_what_is_wrong(place: Place) -> None:
    for xs, words in (
        ((ONES, ONES[:2]), r"one size, but xs\[0\] is float32\[4\] and xs\[1\] is float32\[2\]"),
        (np.float32(1), r"a leading axis, .* and xs is float32\[\]; make one array"),
        ({"a": ONES, "b": 2.0}, r"a leading axis, .* and xs\['b'\] is float32\[\]"),
        ([], "takes a tree of arrays, and xs has none"),
        ([ONES, "x"], r"but xs\[1\] is 'x' of type str"),
    ):
        for call in (pw.map, pw.program(lambda fun, xs: pw.map(fun, xs), static_argnums=0)):
            with pytest.raises(pw.ArgumentError, match=f"^pw.map of 'more' .*{words}"):
                call(_more(place), xs)
    with pytest.raises(pw.ArgumentError, match=r"'more' .* but its result\[1\] is 'x' of type str"):
        pw.map(_with_word(place), ONES)
    with pytest.raises(pw.ArgumentError, match="at most 256 elements, and was given 300"):
        pw.program(lambda xs: pw.map(lambda x: place.add(place.more(x)), xs))(np.zeros(300))


# --- on real processes ---------------------------------------------------------------------------------

GANGS = f"""
import os, signal
from pw.client.connection import current
{TWO_GANGS}
count = int(sys.argv[1]) if len(sys.argv) > 1 else 300

def goes_on(carry):
    return carry[0] < carry[1]

def on_one(carry):
    return carry[0] + 1, carry[1], on_first(carry[2])

def on_two(carry):
    return carry[0] + 1, carry[1], on_second(on_first(carry[2]))

first = np.arange(4, dtype=np.uint32)

def run(body, steps, of):
    _, _, x = pw.while_loop(goes_on, body, (0, np.int32(steps), first))
    np.testing.assert_array_equal(np.asarray(x), after(first, of * steps))
"""

BOTH = """
for steps in (0, 1, 12):
    run(on_one, 20 * steps, 1)
    run(on_two, steps, 2)
print("ok")
"""

DYING = """
from pw.client.loops import bursts, driver

driver.REPLICATED_BURSTS, driver.MOST = 10, 100
run(on_one, 10, 1)
run(on_two, 10, 2)
pids = [host.pid for island in current.runtime().ask.status(20.0).islands for host in island.hosts]
burst = bursts.Bursts.burst
launched, victim = 0, 0

def disturbed(*arguments):
    global launched
    launched += 1
    if launched == 15:
        os.kill(victim, signal.SIGKILL)
    return burst(*arguments)

bursts.Bursts.burst = disturbed
for victim, (body, steps, of) in zip((pids[0], pids[-1]), ((on_one, 3_000, 1), (on_two, 300, 2))):
    launched = 0
    run(body, steps, of)
    assert launched > 15, "the loop ended before the host died"
print("ok")
"""


@pytest.mark.long
@pytest.mark.processes
def test_gangs_of_two_islands_and_two_clients() -> None:
    with two_gangs() as cluster:
        two_clients_say_ok(cluster.address, GANGS + BOTH)
        assert finish(start_client(cluster.address, GANGS + DYING)).strip() == "ok"
