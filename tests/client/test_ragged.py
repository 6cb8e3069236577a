"""Values whose size their producer decides: against numpy, between islands, and what goes wrong."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pw
from pw.core.messages import INLINE_BYTES
from pw.core.programs.counted import filled, joined, most_bytes, packed, unpacked
from pw.core.programs.reshard import plan_routes
from pw.core.sharding import ArraySpec, DeviceAddress, Placement, Sharding, box_shape, box_slices
from pw.testing import InProcessCluster
from tests.stages.samples import diagonal

LARGE = 64
"""Rows of this width are more than a message takes."""


BOTH_WAYS = pytest.mark.parametrize("cluster", ["shared", "tcp"], indirect=True)
"""Rows go through shared memory, and through sockets."""


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest) -> Iterator[InProcessCluster]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PW_BULK", getattr(request, "param", "shared"))
        with InProcessCluster(islands=2, devices_per_island=4) as made:
            yield made


@pytest.fixture(scope="module")
def meshes(cluster: InProcessCluster) -> tuple[pw.Mesh, pw.Mesh]:
    virtual = pw.make_virtual_device_set()
    devices = [virtual.add_slice(devices=4).devices for _ in range(2)]
    return pw.Mesh(np.reshape(devices[0], (2, 2)), ("x", "y")), pw.Mesh(devices[1], ("z",))


def sent_bytes(cluster: InProcessCluster) -> int:
    return sum(host.bulk.sent_bytes for host in cluster.hosts)


def cells(lead: tuple[int, ...], capacity: int, rest: tuple[int, ...], counts: Any) -> Any:
    """Rows with something in the padding, and what is to arrive of them."""
    rows = np.arange(1, 1 + np.prod([*lead, capacity, *rest]), dtype=np.int32)
    rows = rows.reshape(*lead, capacity, *rest)
    counting = np.arange(capacity) < np.asarray(counts)[..., None]
    return rows, np.where(counting.reshape(counting.shape + (1,) * len(rest)), rows, 0)


def test_it_is_a_pytree_in_jax_and_on_the_host() -> None:
    ragged = pw.Ragged(np.arange(6).reshape(2, 3), np.array([1, 3]))
    assert ragged.capacity == 3
    np.testing.assert_array_equal(ragged.mask(), [[True, False, False], [True] * 3])
    total = jax.jit(lambda r: jnp.where(r.mask(), r.rows, 0).sum())(ragged)
    assert int(total) == 0 + 3 + 4 + 5
    doubled = jax.tree.map(lambda x: 2 * x, ragged)
    assert isinstance(doubled, pw.Ragged)
    assert doubled.counts[1] == 6
    assert pw.Ragged(np.zeros((4, 2)), 3).mask().tolist() == [True, True, True, False]


@BOTH_WAYS
def test_a_filter_on_one_island_feeds_another(meshes: Any) -> None:
    first, second = meshes

    def multiples(x: Any, of: Any) -> pw.Ragged:
        chosen = x % of == 0
        return pw.Ragged(x[jnp.argsort(~chosen, stable=True)], chosen.sum(dtype=jnp.int32))

    choose = pw.jit(multiples, mesh=first)
    look = pw.jit(lambda r: (r.rows, r.counts, jnp.where(r.mask(), r.rows, 0).sum()), mesh=second)
    both = pw.program(lambda x, of: look(choose(x, of)))
    x = np.arange(1, 49, dtype=np.int32)
    for of in (1, 3, 7, 48, 100):
        wanted = x[x % of == 0]
        for rows, count, total in (both(x, of), look(choose(x, of))):
            padded = np.concatenate([wanted, np.zeros(48 - len(wanted), np.int32)])
            np.testing.assert_array_equal(np.asarray(rows), padded)
            assert (int(count), int(total)) == (len(wanted), wanted.sum())
    edges = pw.plan(both).edges
    assert {edge.way for edge in edges if edge.type.startswith("int32[48]")} == {"rows that count"}


def test_where_nothing_moves_it_stays_as_it_is(meshes: Any) -> None:
    mesh, _ = meshes
    rows, _ = cells((), 8, (), 3)
    made = pw.jit(lambda x: pw.Ragged(x, jnp.int32(3)), mesh=mesh)(rows)
    seen = pw.jit(lambda r: r.rows, mesh=mesh)(made)
    np.testing.assert_array_equal(np.asarray(seen), rows)
    again = pw.put(made, sharding=pw.NamedSharding(mesh, P()))
    np.testing.assert_array_equal(pw.get(again).rows, rows)


SOURCES = {
    "whole": P(),
    "cells split": P("x"),
    "cells split over all": P(("x", "y")),
    "rows split": P(None, "x"),
    "widths split": P(None, None, "y"),
    "all split": P("x", "y"),
}
TARGETS = {
    "whole": P(),
    "cells split": P("z"),
    "rows split": P(None, "z"),
    "widths": P(None, None, "z"),
}


@BOTH_WAYS
@pytest.mark.parametrize("there", TARGETS)
@pytest.mark.parametrize("here", SOURCES)
def test_it_is_sharded_in_any_other_way(meshes: Any, here: str, there: str) -> None:
    first, second = meshes
    counts = np.array([3, 0, 8, 5], np.int32)
    rows, wanted = cells((4,), 8, (4,), counts)
    source = pw.NamedSharding(first, SOURCES[here])
    ragged = pw.Ragged(
        pw.put(rows, sharding=source), pw.put(counts, sharding=pw.NamedSharding(first, P()))
    )
    moved = pw.put(
        ragged,
        sharding=pw.Ragged(pw.NamedSharding(second, TARGETS[there]), pw.NamedSharding(second, P())),
    )
    np.testing.assert_array_equal(np.asarray(moved.rows), wanted)
    np.testing.assert_array_equal(np.asarray(moved.counts), counts)


@BOTH_WAYS
@pytest.mark.parametrize("counts", [0, 1, 100, 300, 512])
def test_large_rows_move_as_far_as_they_count(
    cluster: InProcessCluster, meshes: Any, counts: int
) -> None:
    first, second = meshes
    rows, wanted = cells((), 512, (LARGE,), counts)
    ragged = pw.jit(lambda x, n: pw.Ragged(x + 0, n), mesh=first)(rows, np.int32(counts))
    is_right = pw.jit(lambda r, x: (r.rows == x).all(), mesh=second)
    there = pw.put(wanted, second.devices)
    pw.block_until_ready((ragged, there))
    before, times = sent_bytes(cluster), 4  # landings that were not needed are used again
    for _ in range(times):
        assert bool(is_right(ragged, there))
    useful = counts * LARGE * 4
    assert sent_bytes(cluster) - before <= times * (useful + 64) * (useful > INLINE_BYTES)


@BOTH_WAYS
@pytest.mark.parametrize("counts", [[0, 0, 0, 0], [64, 64, 64, 64], [64, 0, 3, 0]])
def test_empty_and_full_routes(meshes: Any, counts: list[int]) -> None:
    first, second = meshes
    rows, wanted = cells((4,), 64, (LARGE,), counts)
    split = pw.NamedSharding(first, P("x"))
    ragged = pw.Ragged(pw.put(rows, sharding=split), np.array(counts, np.int32))
    take = pw.jit(lambda r: r.rows, mesh=second, in_shardings=pw.NamedSharding(second, P("z")))
    np.testing.assert_array_equal(np.asarray(take(ragged)), wanted)


def test_the_padding_does_not_depend_on_the_binding(cluster: InProcessCluster) -> None:
    virtual = pw.make_virtual_device_set()
    same = [pw.Mesh(virtual.add_slice(devices=4, island="island-0").devices, ("x",)) for _ in "ab"]
    rows, wanted = cells((), 8, (), 3)
    ragged = pw.jit(lambda x: pw.Ragged(x, jnp.int32(3)), mesh=same[0])(rows)
    taken = pw.jit(lambda r: r.rows, mesh=same[1])(ragged)
    np.testing.assert_array_equal(np.asarray(taken), wanted)


@BOTH_WAYS
def test_counts_come_from_anywhere(meshes: Any) -> None:
    first, second = meshes
    rows, wanted = cells((4,), 8, (), [3, 0, 8, 5])
    counts = np.array([3, 0, 8, 5], np.int64)
    own = pw.put(rows, sharding=pw.NamedSharding(first, P("x")))
    take = pw.jit(lambda r: r.rows, mesh=second)
    split = pw.put(counts, sharding=pw.NamedSharding(first, P("x")))
    elsewhere = pw.put(counts, sharding=pw.NamedSharding(second, P()))
    for each in (counts, split, elsewhere):
        np.testing.assert_array_equal(np.asarray(take(pw.Ragged(own, each))), wanted)

    @pw.program
    def later(x: Any, n: Any) -> Any:
        made = pw.jit(lambda x: x + 0, mesh=first)(x)
        found = pw.jit(lambda n: n + 0, mesh=first)(n)
        return take(pw.Ragged(made, found)), pw.put(pw.Ragged(made, found), second.devices[0])

    taken, moved = later(rows, counts.astype(np.int32))
    np.testing.assert_array_equal(np.asarray(taken), wanted)
    np.testing.assert_array_equal(np.asarray(moved.rows), wanted)


@pytest.mark.parametrize(
    "dtype", [jnp.bfloat16, np.int4 if hasattr(np, "int4") else jnp.int4, bool]
)
def test_small_dtypes_travel(meshes: Any, dtype: Any) -> None:
    first, second = meshes
    make = pw.jit(lambda n: pw.Ragged(jnp.ones((3, 2), dtype), n), mesh=first)
    taken = pw.jit(lambda r: r.rows.astype(jnp.int32).sum(), mesh=second)
    assert int(taken(make(np.int32(2)))) % 8 == 4


@pytest.mark.parametrize("count", [-1, 9])
def test_impossible_counts_are_an_error_of_their_maker(meshes: Any, count: int) -> None:
    first, second = meshes
    rows, _ = cells((2,), 8, (), [1, 1])

    def wrongly(x: Any, n: Any) -> pw.Ragged:
        return pw.Ragged(x, jnp.array([8, 0]) + jnp.array([0, 1]) * n)

    ragged = pw.jit(wrongly, mesh=first)(rows, np.int32(count))
    taken = pw.jit(lambda r: r.rows.sum(), mesh=second)(ragged)
    words = rf"'wrongly'.* say {count} at \[1\].*0 to the capacity, 8"
    with pytest.raises(pw.ResultMismatch, match=words):
        np.asarray(taken)
    again = pw.jit(wrongly, mesh=first)(rows, np.int32(1))
    assert int(pw.jit(lambda r: r.rows.sum(), mesh=second)(again)) == rows[0].sum() + rows[1, 0]


GIVEN = {
    "to a function": lambda take, put: take,
    "to a program": lambda take, put: pw.program(lambda r: take(r)),
    "in parts": lambda take, put: (
        lambda r: pw.program(lambda x, n: take(pw.Ragged(x, n)))(r.rows, r.counts)
    ),
    "closed over": lambda take, put: lambda r: pw.program(lambda: take(r))(),
    "put": lambda take, put: lambda r: take(put(r)),
    "put in a program": lambda take, put: pw.program(lambda r: take(put(r))),
    "to a branch": lambda take, put: lambda r: pw.cond(True, take, lambda r: r.counts + 0, r),
    "to a loop": lambda take, put: (
        lambda r: pw.while_loop(lambda r: take(r) < 0, lambda r: put(r), r).counts
    ),
}


@pytest.mark.parametrize(("how", "kind"), diagonal([*GIVEN], [int, jnp.asarray]))
def test_impossible_counts_of_this_process_are_refused(meshes: Any, how: str, kind: Any) -> None:
    first, second = meshes
    take = pw.jit(lambda r: r.mask().sum(), mesh=second)
    call = GIVEN[how](take, lambda r: pw.put(r, first.devices[0]))
    rows = np.arange(8, dtype=np.int32)
    assert int(call(pw.Ragged(rows, kind(8)))) == 8, "the next calls are of the same kind"
    for count in (-1, 9):
        words = (
            rf"counts for rows int32\[8\] that say {count}; counts are from 0 to the capacity, 8"
        )
        with pytest.raises(pw.ArgumentError, match=words):
            call(pw.Ragged(rows, kind(count)))
    traced = pw.jit(
        lambda n: GIVEN["to a loop"](take, lambda r: r)(pw.Ragged(rows, n)), mesh=second
    )
    assert int(traced(8)) == 8
    with pytest.raises(pw.ArgumentError, match=r"say 9 at \[1\]"):
        take(pw.Ragged(np.zeros((2, 8)), np.array([8, 9])))


def test_impossible_counts_over_several_islands_are_refused(cluster: InProcessCluster) -> None:
    devices = pw.make_virtual_device_set().add_slice(devices=4, islands=2).devices
    mesh = pw.Mesh(np.reshape(devices, (2, 2)), ("islands", "x"))
    take = pw.jit(lambda r: r.rows + r.counts, mesh=mesh)
    assert take(pw.Ragged(np.zeros(8), 8))[0] == 8
    with pytest.raises(pw.ArgumentError, match="say 9"):
        take(pw.Ragged(np.zeros(8), 9))


def test_a_failure_reaches_its_consumers(meshes: Any) -> None:
    first, second = meshes

    def picky() -> Any:
        raise ValueError("no such file")

    shapes = pw.Ragged(jax.ShapeDtypeStruct((4,), jnp.float32), jax.ShapeDtypeStruct((), jnp.int32))
    failed = pw.host_function(picky, shapes, mesh=first)()
    with pytest.raises(pw.ComputationFailed, match="no such file"):
        pw.get(pw.jit(lambda r: r.rows, mesh=second)(failed))


@pytest.mark.parametrize(
    ("rows", "counts", "words"),
    [
        (np.zeros((2, 3)), np.zeros(3, np.int32), "counts have the first dimensions"),
        (np.zeros(3), np.zeros(3, np.int32), "capacity"),
        (np.zeros(3), np.float32(1), "counts are integers"),
    ],
)
def test_rows_and_counts_must_fit(meshes: Any, rows: Any, counts: Any, words: str) -> None:
    with pytest.raises(pw.ArgumentError, match=words):
        pw.jit(lambda r: r.rows, mesh=meshes[0])(pw.Ragged(rows, counts))


def result(*shape: int, lead: tuple[int, ...] = ()) -> pw.Ragged:
    return pw.Ragged(jax.ShapeDtypeStruct(shape, jnp.int32), jax.ShapeDtypeStruct(lead, jnp.int32))


def test_a_host_function_returns_any_number_of_rows(meshes: Any) -> None:
    first, second = meshes

    def words(n: Any) -> Any:
        lengths = [int(n) % 5, 0, 4]
        return {
            "all": np.arange(int(n), dtype=np.int32),
            "lines": [np.arange(size, dtype=np.int32) for size in lengths],
            "plain": np.int32(7),
        }

    shapes = {
        "all": result(8),
        "lines": result(3, 4, lead=(3,)),
        "plain": jax.ShapeDtypeStruct((), jnp.int32),
    }
    read = pw.host_function(words, shapes, mesh=first)
    take = pw.jit(lambda found: found, mesh=second)
    for n in (0, 3, 8):
        found = pw.get(take(read(np.int32(n))))
        np.testing.assert_array_equal(found["all"].rows[: found["all"].counts], np.arange(n))
        np.testing.assert_array_equal(found["lines"].counts, [n % 5, 0, 4])
        np.testing.assert_array_equal(found["lines"].rows[2], np.arange(4))
        assert found["plain"] == 7


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (np.zeros(9, np.int32), "9 rows, and at most 8"),
        (
            pw.Ragged(np.zeros(8, np.int32), np.int32(9)),
            "'<lambda>' has counts that say 9; counts are from 0",
        ),
        (np.zeros((2, 2), np.int32), r"int32\[2, 2\].*int32\[8\]"),
        (
            np.zeros(2, np.int16),
            r"int16\[2\].*int32\[8\] is declared; .*np.asarray\(rows, np.int32\)",
        ),
    ],
)
def test_a_host_function_that_returns_too_much(meshes: Any, made: Any, words: str) -> None:
    with pytest.raises(pw.ResultMismatch, match=words):
        pw.get(pw.host_function(lambda: made, result(8), mesh=meshes[0])())


@pytest.mark.parametrize(
    ("made", "words"),
    [
        ([np.zeros(2, np.int32)], "'<lambda>' has 1 where 3 cells are declared; return a sequence"),
        (None, r"'<lambda>' has no sequence \(NoneType\) where 3 cells are declared"),
        (
            [np.zeros(n, np.int32) for n in (1, 5, 1)],
            "cell 1 of result 0 of '<lambda>' has 5 rows, and at most 4",
        ),
    ],
)
def test_a_host_function_that_returns_other_cells(meshes: Any, made: Any, words: str) -> None:
    with pytest.raises(pw.ResultMismatch, match=words):
        pw.get(pw.host_function(lambda: made, result(3, 4, lead=(3,)), mesh=meshes[0])())


@pytest.mark.parametrize("how", [pw.put, pw.jit(lambda r: r.counts)])
def test_rows_in_a_list_are_refused(meshes: Any, how: Any) -> None:
    with pytest.raises(pw.ArgumentError, match="rows in a list of 3; make one array"):
        how(pw.Ragged([1, 2, 3], 2))


def test_a_host_function_that_makes_a_part_returns_no_ragged(meshes: Any) -> None:
    sharding = pw.NamedSharding(meshes[0], P())
    with pytest.raises(pw.ArgumentError, match=r"pw\.Ragged"):
        pw.host_function(lambda part: None, result(8), out_shardings=sharding)


# --- what travels ------------------------------------------------------------------------------------


def split(shape: tuple[int, ...], spec: tuple[tuple[str, ...], ...], dtype: str) -> ArraySpec:
    return ArraySpec(shape, dtype, Sharding(("x",), (4,), spec), Placement(1, (0, 1, 2, 3)))


@pytest.mark.parametrize("dtype", ["int32", "bfloat16", "int4"])
@pytest.mark.parametrize("target", [((),), (("x",),), ((), ("x",)), ((), (), ("x",))])
@pytest.mark.parametrize("source", [((),), (("x",),), ((), ("x",)), ((), (), ("x",))])
@pytest.mark.parametrize("spread", [False, True])
def test_what_is_packed_is_unpacked(source: Any, target: Any, dtype: str, spread: bool) -> None:
    draw = np.random.default_rng(0)
    shape, devices = (4, 8, 4), [DeviceAddress(f"h{at}", 0) for at in range(8)]
    here, there = split(shape, source, dtype), split(shape, target, dtype)
    rows = draw.integers(1, 7, shape).astype(np.dtype(getattr(jnp, dtype)))
    counts = np.array([0, 8, 3, 5], np.int32)
    routes = plan_routes(here, there, tuple(devices[:4]), tuple(devices[4:]))
    shards = [np.zeros([b - a for a, b in there.box(at)], rows.dtype) for at in range(4)]
    for route in routes:
        views = [
            rows[box_slices(here.box(piece.source_device))][box_slices(piece.source_box)]
            for piece in route.pieces
        ]
        parts, size_bytes = packed(route, here, counts, views, 0 if spread else 1 << 20)
        buffer: Any = joined(parts, most_bytes(route, here, 1) if spread else size_bytes)
        if spread:
            buffer = np.frombuffer(buffer, np.uint8)
        found, used_bytes = unpacked(buffer, route, here, 1)
        assert used_bytes == size_bytes
        for piece, numbers, own in found:
            for (_, _, box), values in zip(filled(piece, numbers), own, strict=True):
                for at in piece.destination_devices:
                    shards[at][box_slices(box)] = values.reshape(box_shape(box))
        for cut in (0, size_bytes - 1) if not spread else ():
            with pytest.raises(ValueError):
                unpacked(buffer[:cut], route, here, 1)
    counting = np.arange(8) < counts[:, None]
    for at, shard in enumerate(shards):
        wanted = np.where(counting[..., None], rows, rows.dtype.type(0))[box_slices(there.box(at))]
        np.testing.assert_array_equal(shard.astype(np.float32), wanted.astype(np.float32))
