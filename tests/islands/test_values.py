"""What functions over several islands compute, against the same in plain JAX over as many devices."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import NamedSharding as JaxSharding
from jax.sharding import PartitionSpec as P

from pw.client.arrays.devices import make_virtual_device_set
from pw.client.functions.jit import jit
from pw.client.functions.transfer import get
from pw.islands import loops, sums
from tests.stages.local_runtime import LocalRuntime
from tests.stages.samples import diagonal, long

ISLANDS, EACH = 2, 4
BATCH = P(("island", "data"))
_numbers = np.random.default_rng(0)
X = _numbers.normal(size=(16, 8)).astype(np.float32)
V = _numbers.normal(size=16).astype(np.float32)
W = _numbers.normal(size=(8, 8)).astype(np.float32)
STACK = (_numbers.normal(size=(6, 8, 8)) / 4).astype(np.float32)
ROWS = _numbers.integers(0, 16, 16).astype(np.int32)


@pytest.fixture(autouse=True)
def rt() -> Iterator[LocalRuntime]:
    with LocalRuntime.in_use(("east", "west", "north")) as local:
        yield local


@pytest.fixture
def mesh() -> Mesh:
    joined = make_virtual_device_set().add_slice(devices=ISLANDS * EACH, islands=ISLANDS)
    return Mesh(np.reshape(joined.devices, (ISLANDS, EACH)), ("island", "data"))


def plain(mesh: Mesh) -> jax.sharding.Mesh:
    """Return the same mesh over devices of this process."""
    devices = jax.devices()[: mesh.size]
    return jax.sharding.Mesh(np.reshape(devices, mesh.devices.shape), mesh.axis_names)


def check(
    mesh: Mesh,
    function: Callable[..., Any],
    specs: tuple[Any, ...],
    arguments: tuple[Any, ...],
    out: Any = None,
    *,
    exactly: bool = False,
) -> None:
    """Compare with plain JAX over a mesh of one process."""
    how = {} if out is None else {"out_shardings": out}
    made = get(jit(function, mesh=mesh, in_shardings=specs, **how)(*arguments))
    here = plain(mesh)
    with jax.sharding.set_mesh(here):
        shardings = [None if spec is None else JaxSharding(here, spec) for spec in specs]
        placed = [
            one if where is None else jax.device_put(one, where)
            for one, where in zip(arguments, shardings, strict=True)
        ]
        expected = jax.jit(function)(*placed)
    for ours, theirs in zip(jax.tree.leaves(made), jax.tree.leaves(expected), strict=True):
        if exactly:
            np.testing.assert_array_equal(ours, theirs)
        else:
            np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-5)


def layers(w: Any, x: Any) -> Any:
    return jax.lax.scan(lambda h, layer: (jnp.tanh(h @ layer), None), x, w)[0]


Case = tuple[Callable[..., Any], tuple[Any, ...], tuple[Any, ...]]
"""A function, how its arguments are split, and the arguments."""

MOVES: dict[str, Case] = {
    "sort along the split axis": (jnp.sort, (BATCH,), (V,)),
    "sort rows": (lambda x: jnp.sort(x, 0), (BATCH,), (X,)),
    "argsort": (jnp.argsort, (BATCH,), (V,)),
    "reverse and roll": (lambda v: jnp.roll(v[::-1], 3), (BATCH,), (V,)),
    "slice": (lambda x: (x[3], x[2:13:3], x[:, 2:5]), (BATCH,), (X,)),
    "gather rows": (lambda x, i: x[i], (BATCH, BATCH), (X, ROWS)),
    "transpose": (lambda x: x.T + 1, (BATCH,), (X,)),
    "top_k": (lambda v: jax.lax.top_k(v, 3), (BATCH,), (V,)),
    "concatenate": (lambda x: jnp.concatenate([x, x[::-1]]), (BATCH,), (X,)),
    "pad": (lambda x: jnp.pad(x, ((1, 2), (0, 0))), (BATCH,), (X,)),
    "reshape": (lambda x: x.reshape(4, 32), (BATCH,), (X,)),
    "random": (lambda x: x + jax.random.normal(jax.random.key(1), x.shape), (BATCH,), (X,)),
    "rbg": (
        lambda x: x + jax.random.normal(jax.random.key(1, impl="rbg"), x.shape),
        (BATCH,),
        (X,),
    ),
    "dynamic update": (
        lambda x: jax.lax.dynamic_update_slice(x, x[:2] * 3, (5, 0)),
        (BATCH,),
        (X,),
    ),
    "scatter": (lambda x, i: jnp.zeros_like(x).at[i].set(x), (BATCH, BATCH), (X, ROWS * 0 + 3)),
    "complex numbers": (
        lambda x: jnp.pad(jax.lax.complex(x, x) + 1j, ((1, 1), (0, 0)))[::-1],
        (BATCH,),
        (X,),
    ),
    "erf and others": (lambda x: jax.scipy.special.erf(x) + jnp.arcsinh(x), (BATCH,), (X,)),
}

SUMS: dict[str, Case] = {
    "cumsum": (jnp.cumsum, (BATCH,), (V,)),
    "product of rows": (lambda x: x @ x.T, (BATCH,), (X,)),
    "contraction": (lambda x: x.T @ x, (BATCH,), (X,)),
    "scatter add": (lambda x, i: jnp.zeros_like(x).at[i].add(x), (BATCH, BATCH), (X, ROWS)),
    "fft": (lambda v: jnp.abs(jnp.fft.fft(v)), (BATCH,), (V,)),
    "convolution over space": (
        lambda v: jnp.convolve(v, jnp.array([1.0, 2.0, 3.0]), "same"),
        (BATCH,),
        (V,),
    ),
    "inverse": (lambda w: jnp.linalg.inv(w + 8 * jnp.eye(8)), (P("island"),), (W,)),
    "cholesky": (lambda w: jnp.linalg.cholesky(w @ w.T + 8 * jnp.eye(8)), (P("island"),), (W,)),
    "tensor parallel": (
        lambda a, b, x: jnp.tanh(x @ a) @ b,
        (P(None, "island"), P("island", None), None),
        (W, W, X),
    ),
    "a product": (lambda v: jnp.prod(v), (BATCH,), (V,)),
    "argmax": (lambda v: (jnp.argmax(v), jnp.argmin(v)), (BATCH,), (V,)),
    "fsdp in a scan": (layers, (P(None, "island"), BATCH), (STACK, X)),
    "its gradient": (
        jax.grad(lambda w, x: (layers(w, x) ** 2).mean()),
        (P(None, "island"), BATCH),
        (STACK, X),
    ),
    "its gradient, rematerialized": (
        jax.grad(lambda w, x: (jax.checkpoint(layers)(w, x) ** 2).mean()),
        (P(None, "island"), BATCH),
        (STACK, X),
    ),
    "a sum in a loop": (
        lambda x: jax.lax.fori_loop(0, 3, lambda i, c: jnp.tanh(c * c.sum() + i), x),
        (BATCH,),
        (X,),
    ),
    "loops in loops": (
        lambda x: jax.lax.fori_loop(
            0, 3, lambda _, c: jax.lax.fori_loop(0, 2, lambda _, d: jnp.sin(d - d.mean()), c), x
        ),
        (BATCH,),
        (X,),
    ),
    "a branch": (
        lambda x: jax.lax.cond(x.sum() > 0, lambda x: x - x.mean(), lambda x: x[::-1] * 2, x),
        (BATCH,),
        (X,),
    ),
    "switch": (
        lambda x: jax.lax.switch(
            jnp.int32(x[0, 0] > 9) + 1, [lambda x: x, lambda x: x - x.max(0), lambda x: x * 2], x
        ),
        (BATCH,),
        (X,),
    ),
    "norms in each layer": (
        lambda x: jax.lax.scan(
            lambda h, _: ((h - h.mean(0)) / (h.std(0) + 1), h.sum()), x, None, 4
        ),
        (BATCH,),
        (X,),
    ),
}


def together(cases: dict[str, Case]) -> Case:
    """Return one function that computes all cases: it is planned and compiled once."""
    specs = [spec for _, each, _ in cases.values() for spec in each]
    arguments = [value for _, _, each in cases.values() for value in each]

    def all_of_them(*values: Any) -> dict[str, Any]:
        rest = iter(values)
        return {name: case[0](*islice(rest, len(case[1]))) for name, case in cases.items()}

    return all_of_them, tuple(specs), tuple(arguments)


def thirds(cases: dict[str, Any]) -> list[Any]:
    """Return three parameters with a third of the names each; `make long` takes each name alone as well."""
    names = [*cases]
    return [*[names[at::3] for at in range(3)], *[long([name]) for name in names]]


@pytest.mark.parametrize("names", thirds(MOVES))
def test_what_only_moves_is_the_same(mesh: Mesh, names: list[str]) -> None:
    check(mesh, *together({name: MOVES[name] for name in names}), exactly=True)


@pytest.mark.parametrize("names", thirds(SUMS))
def test_what_adds_up_is_alike(mesh: Mesh, names: list[str]) -> None:
    check(mesh, *together({name: SUMS[name] for name in names}))


RESHARDS = {
    "whole": (BATCH, P()),
    "columns to rows": (P(None, "island"), P("island")),
    "permuted axes": (BATCH, P("data", "island")),
    "only data": (BATCH, P("data")),
    "from whole": (P(), BATCH),
}


@pytest.mark.parametrize("name", RESHARDS)
def test_shardings_of_results(mesh: Mesh, name: str) -> None:
    before, after = RESHARDS[name]
    check(mesh, lambda x: x + 1, (before,), (X,), after, exactly=True)


# --- manual parts --------------------------------------------------------------------------------

RING = [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (5, 6), (6, 7), (7, 0)]
BOTH = ("island", "data")


def attention(q: Any) -> Any:
    """A ring over all devices: each adds what the others hold."""

    def step(_: Any, carried: Any) -> Any:
        total, block = carried
        total = total + q @ block.T @ block
        return total, jax.lax.ppermute(block, BOTH, RING)

    return jax.lax.fori_loop(0, 8, step, (jnp.zeros_like(q), q))[0]


MANUAL: dict[str, tuple[Callable[[Any], Any], Any]] = {
    "psum": (lambda x: jax.lax.psum(x, BOTH), P()),
    "psum of islands": (lambda x: jax.lax.psum(x, "island"), P("data")),
    "psum inside": (lambda x: jax.lax.psum(x, "data"), P("island")),
    "pmean": (lambda x: jax.lax.pmean(x, "island"), P("data")),
    "pmax and pmin": (lambda x: jax.lax.pmax(x, "island") - jax.lax.pmin(x, "island"), P("data")),
    "all_gather": (lambda x: jax.lax.all_gather(x, BOTH, tiled=True)[:2], BATCH),
    "all_gather of islands": (
        lambda x: jax.lax.all_gather(x, "island"),
        P(None, ("data", "island")),
    ),
    "all_gather the other way": (
        lambda x: jax.lax.all_gather(x, ("data", "island"), tiled=True)[2:4],
        BATCH,
    ),
    "all_to_all": (lambda x: jax.lax.all_to_all(x, BOTH, 1, 0, tiled=True), BATCH),
    "all_to_all of islands": (lambda x: jax.lax.all_to_all(x, "island", 1, 1, tiled=True), BATCH),
    "ppermute of islands": (lambda x: jax.lax.ppermute(x, "island", [(0, 1), (1, 0)]), BATCH),
    "ppermute one way": (lambda x: jax.lax.ppermute(x, "island", [(0, 1)]), BATCH),
    "a ring": (lambda x: jax.lax.ppermute(x, BOTH, RING), BATCH),
    "any permutation": (
        lambda x: jax.lax.ppermute(x, BOTH, [(0, 5), (1, 4), (6, 1), (2, 3), (5, 0), (7, 7)]),
        BATCH,
    ),
    "psum_scatter": (
        lambda x: jax.lax.psum_scatter(x, BOTH, scatter_dimension=1, tiled=True),
        P(None, BOTH),
    ),
    "psum_scatter of islands": (
        lambda x: jax.lax.psum_scatter(x, "island", scatter_dimension=1, tiled=True),
        P("data", "island"),
    ),
    "axis_index": (
        lambda x: x + 8 * jax.lax.axis_index("island") + jax.lax.axis_index("data"),
        BATCH,
    ),
    "ring attention": (attention, BATCH),
    "psum in a loop": (
        lambda x: jax.lax.fori_loop(0, 3, lambda _, c: c + jax.lax.psum(c, BOTH) / 9, x),
        BATCH,
    ),
    "uneven groups": (
        lambda x: jax.lax.psum(x, BOTH, axis_index_groups=[[0, 1, 4], [2, 3, 5, 6, 7]]),
        BATCH,
    ),
    "groups that lie otherwise": (
        lambda x: jax.lax.all_gather(
            x, BOTH, axis_index_groups=[[0, 5], [1, 4], [2, 3], [6, 7]], tiled=True
        )[:2],
        BATCH,
    ),
}


@pytest.mark.parametrize("names", thirds(MANUAL))
def test_collectives_of_a_shard_map(mesh: Mesh, names: list[str]) -> None:
    outs = {name: MANUAL[name][1] for name in names}

    def bodies(x: Any) -> Any:
        return {name: MANUAL[name][0](x) for name in names}

    def mapped(x: Any) -> Any:
        return jax.shard_map(bodies, in_specs=BATCH, out_specs=outs, check_vma=False)(x)

    check(mesh, mapped, (BATCH,), (X,))


def test_large_values_are_sent_in_fractions(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sums, "SMALL_BYTES", 16)
    for name in ("fsdp in a scan", "its gradient", "tensor parallel"):
        check(mesh, *SUMS[name])
    check(mesh, lambda x: x + 1, (P("island"),), (X,), P(None, "island"), exactly=True)
    check(mesh, lambda x: x + 1, (P("island"),), (X,), P(), exactly=True)


LOOPS: dict[str, Callable[[Any], Any]] = {
    "a loop that its values end": lambda x: jax.lax.while_loop(
        lambda c: jnp.abs(c).sum() > 1, lambda c: c / 2, x
    ),
    "very many iterations": lambda x: jax.lax.fori_loop(
        0, loops.ITERATIONS + 1, lambda _, c: c / (1 + jnp.abs(c).sum()), x
    ),
}


ALONE: dict[str, Any] = {
    "one value": lambda r: jax.lax.while_loop(lambda c: c < 3, lambda c: c * 0.5 + 2, r),
    "several, and a count": lambda r: jax.lax.while_loop(
        lambda c: (c[0] < 3) & (c[1] < 4),
        lambda c: (c[0] * 0.5 + 2, c[1] + 1, c[2] * r),
        (r, 0, jnp.ones(3) * r),
    ),
    "roots": lambda r: jax.lax.while_loop(
        lambda c: jnp.abs(c[0] - c[1]) > 1e-3, lambda c: ((c[0] + r * r / c[0]) / 2, c[0]), (r, 0.0)
    ),
    "a loop in it": lambda r: jax.lax.while_loop(
        lambda c: c < 5, lambda c: jax.lax.while_loop(lambda z: z < c + 2, lambda z: z + 0.7, c), r
    ),
}


def test_each_island_ends_its_own_part_of_a_loop_of_vmap(mesh: Mesh) -> None:
    """Without a word between islands, and so without a warning that the loop runs whole on each device."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check(
            mesh,
            lambda v: [jax.vmap(one)(v) for one in ALONE.values()],
            (BATCH,),
            (V,),
            exactly=True,
        )


STAYING: dict[str, Any] = {
    "what goes on for all": lambda v: jax.lax.while_loop(
        lambda c: (c < 3).any(), lambda c: c + 1, v
    ),
    "other elements stay than have ended": lambda v: jax.lax.while_loop(
        lambda c: (c < 3).any(), lambda c: jnp.where(c < 6, c + 1, c), v
    ),
    "what stays is another value": lambda v: jax.lax.while_loop(
        lambda c: (c[0] < 3).any(),
        lambda c: (jnp.where(c[0] < 3, c[0] + 1, c[0]), jnp.where(c[0] < 3, c[1], c[1] + 1)),
        (v, v),
    ),
}


@pytest.mark.filterwarnings("ignore:a loop of")
def test_an_island_waits_for_others_where_values_depend_on_it(mesh: Mesh) -> None:
    numbers = np.arange(16, dtype=np.float32) - 4
    for function in STAYING.values():
        check(mesh, function, (BATCH,), (numbers,), exactly=True)


@pytest.mark.parametrize("name", LOOPS)
def test_some_loops_run_whole_on_each_device(mesh: Mesh, name: str) -> None:
    with pytest.warns(RuntimeWarning, match=r"test_values.py.*carries 5\d\d bytes"):
        check(mesh, LOOPS[name], (BATCH,), (X,))


# --- meshes --------------------------------------------------------------------------------------

Y = _numbers.normal(size=(48, 24)).astype(np.float32)


def slices(*counts: int, islands: tuple[str, ...] = ("east", "west", "north")) -> Any:
    """Return the devices of slices of these sizes."""
    own = make_virtual_device_set()
    found = [own.add_slice(devices=n, island=at) for n, at in zip(counts, islands, strict=False)]
    return np.array([device for each in found for device in each.devices])


MESHES: dict[str, Callable[[], Mesh]] = {
    "one axis": lambda: Mesh(slices(4, 4), "x"),
    "one axis, islands in turn": lambda: Mesh(slices(4, 4).reshape(2, 4).T.reshape(8), "x"),
    "one axis, pairs of each island": lambda: Mesh(
        slices(4, 4).reshape(2, 2, 2).transpose(1, 0, 2).reshape(8), "x"
    ),
    "islands last": lambda: Mesh(slices(4, 4).reshape(2, 4).T, ("data", "island")),
    "two axes cross": lambda: Mesh(
        slices(2, 2, 2, 2, islands=("east", "west", "north", "east")).reshape(2, 4), ("a", "b")
    ),
    "three islands": lambda: Mesh(slices(2, 2, 2).reshape(3, 2).T, ("data", "island")),
    "no order": lambda: Mesh(slices(4, 4)[[0, 4, 5, 1, 6, 2, 3, 7]].reshape(4, 2), ("a", "b")),
    "islands of several sizes": lambda: Mesh(
        slices(5, 3)[[0, 5, 1, 2, 6, 7, 3, 4]].reshape(2, 4), ("a", "b")
    ),
}


def manual(x: Any) -> Any:
    def body(rows: Any) -> Any:
        axes = jax.sharding.get_abstract_mesh().axis_names
        ring = [(at, (at + 1) % size) for size in [jax.lax.axis_size(axes)] for at in range(size)]
        last = jax.lax.all_gather(rows, axes[-1], tiled=True)
        return jax.lax.ppermute(rows, axes, ring) + jax.lax.psum(rows, axes[0]), last[: len(rows)]

    axes = jax.sharding.get_abstract_mesh().axis_names
    return jax.shard_map(body, in_specs=P(axes), out_specs=P(axes), check_vma=False)(x)


ON_MESHES: dict[str, Callable[[Any], Any]] = {
    "moves": lambda x: (jnp.sort(x, 0), x.T, x[5], jnp.roll(x, 7, 0), x.reshape(24, 48)),
    "sums": lambda x: (jnp.cumsum(x, 0), x @ x.T, x.sum(0), jax.nn.softmax(x, 0), x.max()),
    "a loop": jax.grad(
        lambda x: (
            jax.lax.scan(lambda h, _: (jnp.tanh(h - h.mean(0)), h.sum()), x, None, 3)[0] ** 2
        ).sum()
    ),
    "manual": manual,
}


SPLIT: dict[str, Callable[[tuple[str, ...]], P]] = {
    "rows over all": lambda axes: P(axes[::-1]),
    "columns": lambda axes: P(None, axes[-1]),
}
SPLIT_ON_MESHES = {
    f"{name}, {how}": (function, split)
    for how, split in SPLIT.items()
    for name, function in ON_MESHES.items()
}


@pytest.mark.parametrize(("name", "case"), diagonal(list(MESHES), list(SPLIT_ON_MESHES)))
def test_any_assignment_of_devices(name: str, case: str) -> None:
    mesh = MESHES[name]()
    function, split = SPLIT_ON_MESHES[case]
    check(mesh, function, (split(mesh.axis_names),), (Y,))


@pytest.mark.parametrize("columns", [24, 9000])
def test_unlike_islands_pack_what_they_add_in_one_order(columns: int) -> None:
    """Several values travel in a bucket: a small one is added on each island, a large one in parts.

    Devices of the first island alone send to each other, so each island has code of its own.
    """
    mesh = MESHES["one axis"]()
    values = np.arange(48 * columns, dtype=np.float32).reshape(48, columns) / (48 * columns)

    def sums(x: Any) -> Any:
        def body(rows: Any) -> Any:
            moved = jax.lax.ppermute(rows, "x", [(0, 1), (1, 0)])
            made = rows.sum(0), (rows * rows).sum(0)[:16], jnp.cos(rows + moved).sum(0)
            return moved, jax.lax.psum(made, "x")

        return jax.shard_map(body, in_specs=P("x"), out_specs=(P("x"), P()), check_vma=False)(x)

    check(mesh, sums, (P("x"),), (values,))


def test_unlike_islands_pack_parts_of_values_in_one_order(mesh: Mesh) -> None:
    """Each island takes its own part of the gradients of weights that are split over the islands."""
    split = P(None, "island")

    def step(w: Any, v: Any, x: Any) -> Any:
        def swapped(rows: Any) -> Any:
            return jax.lax.ppermute(rows, ("island", "data"), [(0, 1), (1, 0)])

        moved = jax.shard_map(swapped, in_specs=BATCH, out_specs=BATCH, check_vma=False)(x)
        return moved, jax.grad(
            lambda w, v: (jnp.tanh(moved @ w) + jnp.sin(x @ v)).sum(), argnums=(0, 1)
        )(w, v)

    check(mesh, step, (split, split, BATCH), (W, W.T, X), (BATCH, (split, split)))


def test_groups_that_differ_between_pairs_of_islands() -> None:
    mesh = Mesh(slices(2, 2, 2, 2, islands=("a", "b", "c", "d")), "x")
    groups = [[0, 2], [1, 3], [6, 4], [7, 5]]

    def gathered(x: Any) -> Any:
        def body(rows: Any) -> Any:
            both = jax.lax.all_gather(rows, "x", axis_index_groups=groups)
            return both[0] - both[1] + jax.lax.psum(rows, "x", axis_index_groups=groups)

        return jax.shard_map(body, in_specs=P("x"), out_specs=P("x"), check_vma=False)(x)

    check(mesh, gathered, (P("x"),), (Y,))


@pytest.mark.parametrize(("name", "move"), diagonal(list(MESHES), range(5)))
def test_any_sharding_of_results(name: str, move: int) -> None:
    mesh = MESHES[name]()
    axes = mesh.axis_names
    specs = [P(), P(axes), P(axes[::-1]), P(None, axes[-1]), P(axes[-1], axes[:-1])]
    before, after = specs[move - 1], specs[move]
    check(mesh, lambda x: x + 1, (before,), (Y,), after, exactly=True)
