"""`pw.map` over a `Ragged`: the values are those of JAX, and rows that do not count are not computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pw
from pw.testing import InProcessCluster
from tests.stages.daemons import until
from tests.stages.samples import diagonal, long
from tests.stages.scripts import TWO_GANGS, two_clients_say_ok, two_gangs

WIDTH = 3
LARGE = 4096
"""Values in a row that is more than a message takes."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[InProcessCluster]:
    with InProcessCluster(islands=2, devices_per_island=2) as made:
        yield made


@pytest.fixture(scope="module")
def meshes(cluster: InProcessCluster) -> list[pw.Mesh]:
    slices = pw.make_virtual_device_set()
    return [pw.Mesh(slices.add_slice(2, island=f"island-{at}").devices, ("x",)) for at in range(2)]


def _scale(x: Any) -> Any:
    return x * 2


def _norm(x: Any) -> Any:
    return {"row": x + 1, "sum": x.sum()}


def rows_of(capacity: int) -> Any:
    return np.arange(1, 1 + capacity * WIDTH, dtype=np.float32).reshape(capacity, WIDTH)


def check(made: Any, wanted: list[Any], count: int, capacity: int) -> None:
    """Check results against those of the rows that count."""
    assert jax.tree.structure(made, is_leaf=lambda one: isinstance(one, pw.Ragged)) == (
        jax.tree.structure(wanted[0])
    )
    for found, leaves in zip(
        jax.tree.leaves(made, is_leaf=lambda one: isinstance(one, pw.Ragged)),
        zip(*map(jax.tree.leaves, wanted), strict=True),
        strict=True,
    ):
        assert isinstance(found, pw.Ragged)
        assert int(found.counts) == count
        assert found.rows.shape == (capacity, *np.shape(leaves[0]))
        np.testing.assert_array_equal(found.rows[:count], np.stack(leaves)[:count])
        assert not found.rows[count:].any(), "there are zeros behind the count"


@pytest.mark.parametrize(("hosts", "capacity"), [(1, 1), (2, 4), long(1, 40), long(2, 1)])
def test_the_values_are_those_of_the_rows_that_count(
    meshes: Any, hosts: int, capacity: int
) -> None:
    here, there = meshes[0], meshes[hosts - 1]
    scale, norm = pw.jit(_scale, mesh=here), pw.jit(_norm, mesh=there)

    def ours(x: Any) -> Any:
        return norm(scale(x)), 7

    rows = rows_of(capacity)
    wanted = [(_norm(_scale(row)), 7) for row in rows]
    make = pw.jit(lambda rows, count: pw.Ragged(rows, count), mesh=there)
    lie = pw.jit(lambda x: x, mesh=here)
    inside = pw.program(lambda given: pw.map(ours, given))
    traced = pw.jit(lambda given: pw.map(ours, given), mesh=here)
    plain = jax.jit(lambda given: pw.map(lambda x: (_norm(_scale(x)), 7), given))
    for count in {0, 1, capacity // 2, capacity}:
        host = pw.Ragged(rows, np.int32(count))
        made = make(rows, np.uint8(count))
        for given in (host, made, pw.Ragged(lie(rows), made.counts)):
            check(pw.get(pw.map(ours, given)), wanted, count, capacity)
        for call in (inside, traced):
            check(pw.get(call(host)), wanted, count, capacity)
        check(jax.device_get(plain(host)), wanted, count, capacity)


def test_rows_behind_the_count_are_not_computed(meshes: Any) -> None:
    """Each of them would take a minute or more."""

    def walk(x: Any) -> Any:
        def step(at: Any) -> Any:
            return at + 1 + (at == x[1])

        return jax.lax.while_loop(lambda at: at < x[0], step, 0)

    walk, scale = (pw.jit(fun, mesh=mesh) for fun, mesh in zip((walk, _scale), meshes, strict=True))
    rows = np.full((40, 2), np.iinfo(np.int32).max, np.int32)
    rows[:3, 0] = 5
    functions: list[Callable[[Any], Any]] = [lambda x: walk(x), lambda x: scale(walk(x))]
    for times, fun in enumerate(functions, 1):
        for count in (0, 3):
            made = pw.get(pw.map(fun, pw.Ragged(rows, count)).rows)
            assert made.tolist() == [5 * times] * count + [0] * (40 - count)


def test_rows_behind_the_count_are_not_sent(cluster: InProcessCluster, meshes: Any) -> None:
    here, there = meshes
    on, back = pw.jit(_scale, mesh=there), pw.jit(_scale, mesh=here)
    whole = pw.jit(lambda count: pw.Ragged(jnp.ones((8, LARGE)), count), mesh=here)

    def mapped(x: Any) -> Any:
        return back(on(x))

    def sent() -> float:
        """Rows that hosts have sent; they count them a little later."""
        return sum(host.bulk.sent_bytes for host in cluster.hosts) / (4 * LARGE)

    result = 8  # rows that the client reads
    for count in (0, 2, 8):
        given, before = whole(np.int32(count)), sent()
        pw.get(pw.map(mapped, given))
        wanted = before + result + 2 * count
        until(lambda wanted=wanted: abs(sent() - wanted) < 0.1, f"{wanted} rows were sent")


@pytest.mark.parametrize(("count", "hosts"), diagonal([0, 2, 5], [1, 2]))
def test_gradients_are_those_of_the_rows_that_count(meshes: Any, hosts: int, count: int) -> None:
    here, there = meshes[0], meshes[hosts - 1]
    rows, w = rows_of(5) / 7, np.arange(1, 1 + WIDTH, dtype=np.float32)

    def square(x: Any, w: Any) -> Any:
        return jnp.sin(x) * w * w

    ours, scale = pw.jit(square, mesh=here), pw.jit(_scale, mesh=there)
    total = pw.jit(lambda r: jnp.where(r.mask()[:, None], r.rows, 0).sum(), mesh=there)

    def loss(w: Any, rows: Any) -> Any:
        return total(pw.map(lambda x: scale(ours(x, w)), pw.Ragged(rows, np.int32(count))))

    def plain(w: Any, rows: Any) -> Any:
        return sum((_scale(square(row, w)).sum() for row in rows[:count]), jnp.zeros(()))

    wanted = jax.jit(jax.value_and_grad(plain, (0, 1)))(w, rows)
    found = pw.get(pw.value_and_grad(loss, (0, 1))(w, rows))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), found, wanted)


def test_it_takes_what_goes_with_the_rows(meshes: Any) -> None:
    here, there = meshes
    add, scale = pw.jit(jnp.add, mesh=there), pw.jit(_scale, mesh=here)
    rows, weights = rows_of(4), np.arange(4, dtype=np.float32)
    given = pw.Ragged(rows, np.int32(3))
    both = pw.map(lambda x: {"twice": scale(x), "more": add(x, 1)}, given)
    made = pw.map(lambda x: add(add(x[0]["twice"], x[0]["more"]), scale(x[1])), (both, weights))
    wanted = rows * 3 + 1 + 2 * weights[:, None]
    check(pw.get(made), list(wanted), 3, 4)


def test_cells_are_elements_too(meshes: Any) -> None:
    """The leading axis of a `Ragged` with several cells is that of the cells, as in JAX."""
    here, there = meshes
    total = pw.jit(lambda r: jnp.where(r.mask()[:, None], r.rows, 0).sum(0), mesh=there)
    rows, counts = np.stack([rows_of(4), rows_of(4)]), np.array([1, 3], np.int32)
    sums = np.stack([rows[0, :1].sum(0), rows[1, :3].sum(0)])
    scale = pw.jit(_scale, mesh=here)
    cells = pw.map(lambda r: scale(total(r)), pw.Ragged(rows, counts))
    np.testing.assert_array_equal(cells, 2 * sums)
    nested = pw.map(lambda r: total(pw.map(scale, r)), pw.Ragged(rows, counts))
    np.testing.assert_array_equal(nested, 2 * sums)
    few = pw.jit(lambda x: pw.Ragged(x, jnp.int32(2)), mesh=here)
    copy = pw.jit(lambda r: r, mesh=there)
    made = pw.get(pw.map(lambda x: copy(few(x)), pw.Ragged(rows_of(4), 3)))
    assert made.counts.tolist() == [2, 2, 2, 0]
    wanted = np.where(np.arange(WIDTH) < 2, rows_of(4), 0)
    np.testing.assert_array_equal(made.rows[:3], wanted[:3])


def test_an_error_behind_the_count_does_not_matter(meshes: Any) -> None:
    strict = pw.jit(jnp.log, mesh=meshes[0], check_nans=True)
    rows = np.float32([1, 2, -1, -2])
    found = pw.get(pw.map(strict, pw.Ragged(rows, np.int32(2))))
    np.testing.assert_allclose(found.rows, [0, np.log(2), 0, 0], rtol=1e-6)
    with pytest.raises(pw.NaNFound):
        pw.get(pw.map(strict, pw.Ragged(rows, np.int32(3))).rows)


def test_it_says_what_is_wrong(meshes: Any) -> None:
    scale = pw.jit(_scale, mesh=meshes[0])
    with pytest.raises(pw.ArgumentError, match="counts are the same object"):
        pw.map(lambda x: x, [pw.Ragged(rows_of(4), np.int32(at)) for at in (1, 2)])
    with pytest.raises(pw.ArgumentError, match="counts are integers"):
        pw.map(scale, pw.Ragged(rows_of(4), np.float32(1)))
    with pytest.raises(pw.ArgumentError, match="leading axis"):
        pw.map(scale, pw.Ragged(np.float32(1), np.int32(1)))
    with pytest.raises(pw.ArgumentError, match="one size"):
        pw.map(lambda x: scale(x[0]), (pw.Ragged(rows_of(4), np.int32(1)), rows_of(3)))


GANGS = f"""{TWO_GANGS}
rows = np.arange(24, dtype=np.uint32).reshape(6, 4)
filter = pw.jit(lambda x, of: pw.Ragged(x, (x[:, 0] < of).sum(dtype=jnp.int32)), mesh=here)
mapped = pw.program(lambda x, of: pw.map(lambda row: on_second(on_first(row)), filter(x, of)))
for of in (0, 9, 100):
    count = int((rows[:, 0] < of).sum())
    wanted = [after(row, 2) if at < count else 0 * row for at, row in enumerate(rows)]
    for made in (mapped(rows, of), pw.map(lambda row: on_second(on_first(row)), filter(rows, of))):
        np.testing.assert_array_equal(np.asarray(made.rows), wanted)
        assert int(made.counts) == count
print("ok")
"""


@pytest.mark.long
@pytest.mark.processes
def test_gangs_of_two_islands_skip_alike() -> None:
    with two_gangs() as cluster:
        two_clients_say_ok(cluster.address, GANGS)
