"""Buffers that are given away or deleted while they are still needed.

Each of these would fail quietly: with a wrong value, not with an error. So values are checked, in many
rounds, for arrays that travel in messages and for such that travel in bulk.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pw
from pw.testing import InProcessCluster
from tests.stages.stage import held, mesh_on, numbers, split

pytestmark = pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")

SMALL, LARGE = 8, 40_000  # in float32: far below, and above, what travels in a message
ROUNDS = {SMALL: 40, LARGE: 15}
SIZES = pytest.mark.parametrize("size", [SMALL, LARGE])


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


def overwriting(mesh: pw.Mesh) -> Any:
    """A computation that can reuse the memory of its argument, and does."""
    return pw.jit(lambda x: x * 0 - 1, mesh=mesh, donate_argnums=0, out_shardings=P("x"))


@SIZES
def test_donated_right_after_it_was_sent_to_another_island(
    size: int, east: pw.Mesh, west: pw.Mesh
) -> None:
    make = pw.jit(lambda k: k + numbers(size), mesh=east, out_shardings=P("x"))
    far = pw.jit(lambda x: x * 2, mesh=west, in_shardings=P("x"))
    eat = overwriting(east)
    results = []
    for k in range(ROUNDS[size]):
        x = make(np.float32(k))
        results.append((k, far(x), pw.put(x, sharding=split(west)), eat(x)))
    for k, doubled, moved, eaten in results:
        np.testing.assert_array_equal(moved, numbers(size, k))
        np.testing.assert_array_equal(doubled, numbers(size, k) * 2)
        np.testing.assert_array_equal(eaten, np.full(size, -1))


@SIZES
def test_donated_in_a_program_that_sends_it_as_well(
    size: int, east: pw.Mesh, west: pw.Mesh
) -> None:
    make = pw.jit(lambda k: k + numbers(size), mesh=east, out_shardings=P("x"))
    far = pw.jit(lambda x: x * 2, mesh=west, in_shardings=P("x"))
    eat = overwriting(east)

    @pw.program
    def f(k: Any) -> Any:
        x = make(k)
        sent = far(x)
        return sent, eat(x), eat(make(k + 1))

    results = [(k, f(np.float32(k))) for k in range(ROUNDS[size])]
    for k, (doubled, *eaten) in results:
        np.testing.assert_array_equal(doubled, numbers(size, k) * 2)
        for value in eaten:
            np.testing.assert_array_equal(value, np.full(size, -1))


@SIZES
def test_donated_while_it_is_fetched(size: int, east: pw.Mesh) -> None:
    make = pw.jit(lambda k: k + numbers(size), mesh=east, out_shardings=P("x"))
    eat = overwriting(east)
    for k in range(ROUNDS[size]):
        x = make(np.float32(k))
        early = np.asarray(x)
        coming = x.start_fetch()
        eat(x).block_until_ready()
        np.testing.assert_array_equal(early, numbers(size, k))
        np.testing.assert_array_equal(coming.result(30), numbers(size, k))


@SIZES
def test_training_loop_that_donates_its_state(size: int, east: pw.Mesh, west: pw.Mesh) -> None:
    step = pw.jit(
        lambda state, x: ({"w": state["w"] + x, "n": state["n"] + 1}, state["w"].sum()),
        mesh=east,
        donate_argnums=0,
        in_shardings=({"w": P("x"), "n": None}, None),
        out_shardings=({"w": P("x"), "n": None}, None),
    )
    watch = pw.jit(lambda w: w[0], mesh=west)
    state: Any = {"w": np.zeros(size, np.float32), "n": 0}
    seen = []
    for k in range(ROUNDS[size]):
        before = state
        state, _ = step(state, np.float32(k))
        seen.append(watch(state["w"]))
    assert before["w"].is_deleted()
    assert int(state["n"]) == ROUNDS[size]
    expected = np.cumsum(np.arange(ROUNDS[size]))
    assert [float(value) for value in seen] == expected.tolist()
    np.testing.assert_array_equal(state["w"], np.full(size, expected[-1]))


@SIZES
def test_a_host_value_that_is_donated_stays_what_it_is(size: int, east: pw.Mesh) -> None:
    eat = overwriting(east)
    value = numbers(size)
    kept = pw.put(value, sharding=split(east))
    for _ in range(3):
        eat(value).block_until_ready()
        np.testing.assert_array_equal(value, numbers(size))
    eat(pw.put(value, sharding=split(east))).block_until_ready()
    np.testing.assert_array_equal(kept, numbers(size))
    np.testing.assert_array_equal(value, numbers(size))


def test_one_buffer_of_two_arrays(east: pw.Mesh) -> None:
    """Results that are the same value, and a copy that is none, do not share a fate."""
    twice = pw.jit(lambda x: (x, x), mesh=east, in_shardings=P("x"), out_shardings=P("x"))
    passed = pw.program(lambda x: (x, pw.put(x, sharding=split(east))))
    eat = overwriting(east)
    for _ in range(10):
        first, second = twice(numbers(SMALL))
        third, fourth = passed(first)
        eat(first), eat(third)
        np.testing.assert_array_equal(second, numbers(SMALL))
        np.testing.assert_array_equal(fourth, numbers(SMALL))


def test_a_donated_array_is_gone(east: pw.Mesh, west: pw.Mesh) -> None:
    eat = overwriting(east)
    x = pw.put(numbers(SMALL), sharding=split(east))
    eat(x)
    assert x.is_deleted()
    assert "deleted" in repr(x)
    for use in (
        lambda: np.asarray(x),
        lambda: x.block_until_ready(),
        lambda: eat(x),
        lambda: pw.put(x, sharding=split(west)),
        lambda: x + 1,
        lambda: pw.program(lambda v: v)(x),
        x.is_ready,
    ):
        with pytest.raises(pw.ArrayDeleted, match="donated to the computation"):
            use()
    words = r"argument 0\['w'\]\[1\]: the array float32.* donated to .*; use what that returned"
    for again in (pw.jit(lambda tree: tree["w"][1], mesh=east), pw.program(lambda tree: tree)):
        with pytest.raises(pw.ArrayDeleted, match=words):
            again({"w": [1.0, x]})
    y = pw.put(numbers(SMALL), sharding=split(east))
    with pytest.raises(pw.ArrayDeleted, match=r"uses argument 0\['w'\], float32.*; use what"):
        pw.program(lambda tree: (eat(tree["w"]), tree["w"] + 1))({"w": y})
    with pytest.raises(pw.ArgumentError, match="more than once"):
        pw.jit(lambda a, b: a + b, mesh=east, donate_argnums=0)(y, y)
    np.testing.assert_array_equal(y, numbers(SMALL))


def test_of_two_threads_that_donate_one_array_one_wins(east: pw.Mesh) -> None:
    eat = overwriting(east)
    eat(numbers(SMALL)).block_until_ready()
    for _ in range(20):
        x = pw.put(numbers(SMALL), sharding=split(east))
        start = threading.Barrier(2)
        outcomes: list[str] = []

        def give(x: pw.Array = x, start: Any = start, outcomes: list[str] = outcomes) -> None:
            start.wait()
            try:
                eat(x).block_until_ready()
                outcomes.append("won")
            except pw.ArrayDeleted:
                outcomes.append("lost")

        threads = [threading.Thread(target=give) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert sorted(outcomes) == ["lost", "won"]


# --- deletes -------------------------------------------------------------------------------------------


@SIZES
def test_deleted_right_after_calls_that_use_it(size: int, east: pw.Mesh, west: pw.Mesh) -> None:
    make = pw.jit(lambda k: k + numbers(size), mesh=east, out_shardings=P("x"))
    near = pw.jit(lambda x: x + 1, mesh=east)
    far = pw.jit(lambda x: x * 2, mesh=west, in_shardings=P("x"))
    both = pw.program(lambda x: (near(far(x)), x))
    results = []
    for k in range(ROUNDS[size]):
        x = make(np.float32(k))
        used = (near(x), far(x), *both(x))
        x.delete()
        uploaded = pw.put(numbers(size, k), sharding=split(east))
        used += (far(uploaded), near(uploaded))
        uploaded.delete()
        results.append((k, used))
    for k, used in results:
        value = numbers(size, k)
        wanted = (value + 1, value * 2, value * 2 + 1, value, value * 2, value + 1)
        for got, expected in zip(used, wanted, strict=True):
            np.testing.assert_array_equal(got, expected)


@SIZES
def test_deleted_or_dropped_while_the_host_is_busy(
    size: int, cluster: InProcessCluster, east: pw.Mesh, west: pw.Mesh
) -> None:
    make = pw.jit(lambda k: k + numbers(size), mesh=east, out_shardings=P("x"))
    far = pw.jit(lambda x: x * 2, mesh=west, in_shardings=P("x"))
    eat = overwriting(east)
    far(make(0.0)).block_until_ready()
    eat(make(0.0)).block_until_ready()
    with held(cluster):
        x = make(1.0)
        sent = far(x)
        eaten = eat(x)
        y = make(2.0)
        dropped = far(y)
        y.delete()
        del y
        assert not sent.is_ready()
    np.testing.assert_array_equal(sent, numbers(size, 1) * 2)
    np.testing.assert_array_equal(dropped, numbers(size, 2) * 2)
    np.testing.assert_array_equal(eaten, np.full(size, -1))


def test_a_deleted_array_is_gone(east: pw.Mesh) -> None:
    x = pw.put(numbers(SMALL), sharding=split(east))
    x.delete()
    x.delete()
    for use in (lambda: np.asarray(x), lambda: x + 1, lambda: pw.get([x]), x.block_until_ready):
        with pytest.raises(pw.ArrayDeleted, match=r"deleted by delete\(\)"):
            use()
    f = pw.program(lambda: x)
    with pytest.raises(pw.ArrayDeleted):
        f()
