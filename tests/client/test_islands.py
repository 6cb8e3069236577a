"""Functions over meshes that join islands: values against plain JAX, arrays, and what cannot be cut."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pw.building.feeding.stream import stream
from pw.client.arrays.array import Array
from pw.client.arrays.devices import VirtualDeviceSet, make_virtual_device_set
from pw.client.arrays.mesh import OwnMesh
from pw.client.arrays.of_jax import own_mesh
from pw.client.functions.host_function import host_function
from pw.client.functions.jit import jit
from pw.client.functions.program import program
from pw.client.functions.transfer import get, put
from pw.core.errors import ArrayDeleted, PlacementError, TracingError
from pw.islands import cutting, sums
from tests.stages.inside import traced_of
from tests.stages.local_runtime import LocalRuntime
from tests.stages.programs import ROOT
from tests.stages.samples import long

ISLANDS = 3
ROWS = 12 * ISLANDS
BATCH = P(("island", "data"))

_numbers = np.random.default_rng(0)
X = _numbers.normal(size=(ROWS, 8)).astype(np.float32)
TOKENS = _numbers.integers(0, 20, ROWS).astype(np.int32)
TARGETS = _numbers.integers(0, 6, ROWS).astype(np.int32)
PARAMS = {
    name: _numbers.normal(size=shape).astype(np.float32)
    for name, shape in {"embed": (20, 8), "layers": (2, 8, 8), "out": (8, 6)}.items()
}


@pytest.fixture(autouse=True)
def rt() -> Iterator[LocalRuntime]:
    with LocalRuntime.in_use(("east", "north", "west")) as local:
        yield local


GRIDS: dict[str, Callable[[Any], Any]] = {
    "islands last": lambda grid: grid.T,
    "islands in pairs of rows": lambda grid: grid.reshape(2, 3),
    "no order": lambda grid: grid.flat[[0, 2, 3, 1, 5, 4]].reshape(3, 2),
}
on_any_mesh = pytest.mark.parametrize("mesh", GRIDS, indirect=True)
on_few_meshes = pytest.mark.parametrize(
    "mesh",
    ["islands first", *[name if name == "no order" else long(name) for name in GRIDS]],
    indirect=True,
)


@pytest.fixture
def mesh(request: pytest.FixtureRequest) -> Mesh:
    joined = make_virtual_device_set().add_slice(devices=2 * ISLANDS, islands=ISLANDS)
    grid = GRIDS.get(getattr(request, "param", ""), lambda grid: grid)
    return Mesh(grid(np.reshape(joined.devices, (ISLANDS, 2))), ("island", "data"))


@pytest.fixture
def many_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small models too have several pieces, and sums in parts."""
    monkeypatch.setattr(cutting, "BUCKET_BYTES", 64)
    monkeypatch.setattr(sums, "SMALL_BYTES", 64)


def apart(ours: Any, theirs: Any) -> float:
    """The largest difference between the leaves of two trees, relative to the largest element."""
    pairs = zip(jax.tree.leaves(get(ours)), jax.tree.leaves(theirs), strict=True)
    found = [0.0]
    for mine, other in pairs:
        left, right = np.asarray(mine, np.float64), np.asarray(other, np.float64)
        assert left.shape == right.shape
        found.append(float(np.max(np.abs(left - right), initial=0)) / max(1.0, np.abs(right).max()))
    return max(found)


def loss_of(params: Any, tokens: Any, targets: Any, key: Any) -> Any:
    hidden = params["embed"][tokens]
    keep = jax.random.bernoulli(key, 0.8, hidden.shape)

    def layer(hidden: Any, weights: Any) -> Any:
        return jnp.tanh(hidden @ weights) + hidden, None

    hidden, _ = jax.lax.scan(jax.checkpoint(layer), jnp.where(keep, hidden, 0), params["layers"])
    chosen = jnp.take_along_axis(
        jax.nn.log_softmax(hidden @ params["out"]), targets[:, None], axis=1
    )
    return -chosen.mean()


def step(params: Any, tokens: Any, targets: Any, key: Any) -> Any:
    """A training step that clips by the norm of all gradients."""
    loss, found = jax.value_and_grad(loss_of)(params, tokens, targets, key)
    norm = jnp.sqrt(sum(jnp.sum(one * one) for one in jax.tree.leaves(found)))
    after = jax.tree.map(lambda w, g: w * 0.99 - 0.1 * g / (1 + norm), params, found)
    return after, {"loss": loss, "norm": norm}


def accumulated(params: Any, tokens: Any, targets: Any, key: Any) -> Any:
    """Gradients added up over micro-batches."""

    def add(total: Any, rows: Any) -> Any:
        found = jax.value_and_grad(loss_of)(params, *rows, key)
        return jax.tree.map(jnp.add, total, found), None

    start = (jnp.float32(0), jax.tree.map(jnp.zeros_like, params))
    rows = (tokens.reshape(-1, 2).T, targets.reshape(-1, 2).T)
    return jax.lax.scan(add, start, rows)[0]


def check_against_plain_jax(mesh: Mesh, function: Callable[..., Any]) -> None:
    arguments = (PARAMS, TOKENS, TARGETS, jax.random.key(7))
    ours = jit(function, mesh=mesh, in_shardings=(None, BATCH, BATCH, None))
    assert apart(ours(*arguments), jax.jit(function)(*arguments)) < 1e-5


@pytest.mark.usefixtures("many_buckets")
def test_a_training_step_is_that_of_plain_jax(mesh: Mesh) -> None:
    check_against_plain_jax(mesh, step)


@on_any_mesh
def test_a_training_step_on_any_mesh(mesh: Mesh) -> None:
    check_against_plain_jax(mesh, step)


def test_gradients_of_micro_batches_are_those_of_plain_jax(mesh: Mesh) -> None:
    check_against_plain_jax(mesh, accumulated)


@pytest.mark.usefixtures("many_buckets")
def test_sums_of_many_buckets_begin_before_the_last_gradient(mesh: Mesh, rt: LocalRuntime) -> None:
    def deep(params: Any, x: Any) -> Any:
        def loss(params: Any) -> Any:
            hidden = x
            for weights in params:
                hidden = jnp.tanh(hidden @ weights)
            return hidden.mean()

        return jax.tree.map(lambda w, g: w - g, params, jax.grad(loss)(params))

    params = [_numbers.normal(size=(8, 8)).astype(np.float32) for _ in range(6)]
    ours = jit(deep, mesh=mesh, in_shardings=(None, BATCH))
    assert apart(ours(params, X), jax.jit(deep)(params, X)) < 1e-5
    (graph,) = [one for one in rt.programs.values() if one.name == "deep"]
    names = [graph.computations[node.computation].name for node in graph.nodes]
    pieces = [at for at, name in enumerate(names) if " of " in name]
    sums = [at for at, name in enumerate(names) if "add over island" in name]
    assert len(pieces) >= ISLANDS * 4
    assert len(sums) % ISLANDS == 0
    assert min(sums) < max(pieces[:-ISLANDS])  # a sum before the last gradients


FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "elementwise": lambda x: (x * 2, x.T),
    "moments": lambda x: ((x - x.mean(0)) / jnp.sqrt(x.var(0) + 1), x.max(0), x.min()),
    "iota": lambda x: (x + jnp.arange(ROWS)[:, None], jnp.arange(ROWS) * 2),
    "constants": lambda x: (x * np.arange(ROWS, dtype=np.float32)[:, None], jnp.ones(3)),
    "softmax over the batch": lambda x: jax.nn.softmax(x, 0),
    "along a row": lambda x: (jnp.sort(x, 1), jnp.cumsum(x, 1), x[:, ::-1], jax.lax.top_k(x, 2)),
    "random": lambda x: x + jax.random.normal(jax.random.key(1), x.shape),
    "booleans": lambda x: (jnp.any(x > 2), jnp.all(x > -9)),
    "integers": lambda x: (x > 0).sum(0),
    "branch": lambda x: jax.lax.cond(x.sum() > 0, jnp.sin, jnp.cos, x),
    "a sum that starts with something": lambda x: jnp.ones((4, 8)).at[jnp.zeros(ROWS, int)].add(x),
    "itself": lambda x: x,
    "no arguments": lambda x: jnp.zeros((2, 2)),
    "no values of arguments": lambda x: jax.random.normal(jax.random.key(1, impl="rbg"), x.shape),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_are_those_of_plain_jax(mesh: Mesh, name: str) -> None:
    function = FUNCTIONS[name]
    ours = jit(function, mesh=mesh, in_shardings=(BATCH,))(X)
    assert apart(ours, jax.jit(function)(X)) < 1e-5


def test_collectives_of_a_shard_map_over_the_axis(mesh: Mesh) -> None:
    def mapped(x: Any) -> Any:
        def body(rows: Any) -> Any:
            return jax.lax.psum(rows.sum(0), "island"), jax.lax.pmax(rows, "island"), rows * 2

        specs = (P(), P(), P("island"))
        return jax.shard_map(body, in_specs=P("island"), out_specs=specs, axis_names={"island"})(x)

    ours = jit(mapped, mesh=mesh, in_shardings=(P("island"),))(X)
    assert apart(ours, (X.sum(0), X.reshape(ISLANDS, -1, 8).max(0), X * 2)) < 1e-5


@pytest.mark.filterwarnings("ignore:a loop of 'mine'")
def test_what_cannot_be_cut_raises_before_anything_runs(mesh: Mesh, rt: LocalRuntime) -> None:
    def mine(x: Any) -> Any:
        def body(rows: Any) -> Any:
            return jax.lax.while_loop(
                lambda c: jax.lax.psum(c.sum(), ("island", "data")) > 1, lambda c: c / 2, rows
            )

        return jax.shard_map(body, in_specs=BATCH, out_specs=BATCH)(x)

    with pytest.raises(TracingError, match=r"'mine' cannot run on the islands .*decide how often"):
        jit(mine, mesh=mesh, in_shardings=(BATCH,))(X)
    assert not rt.runs


def test_checks_of_nans_are_for_one_island(mesh: Mesh) -> None:
    with pytest.raises(TracingError, match="several islands, where check_nans"):
        jit(lambda x: x * 2, mesh=mesh, check_nans=True)(X)


# --- meshes --------------------------------------------------------------------------------------


def test_meshes_that_join_islands(rt: LocalRuntime) -> None:
    own = VirtualDeviceSet(rt)
    joined = own.add_slice(devices=6, islands=3)
    assert [part.island for part in joined.parts] == ["east", "north", "west"]
    assert (joined.size, len(joined.devices), len(own.slices)) == (6, 6, 3)
    grid = np.reshape(joined.devices, (3, 2))
    mesh = OwnMesh(grid, ("island", "data"))
    assert (mesh.size, [dict(part.shape) for part in mesh.parts]) == (6, [{"data": 2}] * 3)
    assert mesh == own_mesh(Mesh(np.reshape(joined.devices, (3, 2)), ("island", "data")))
    assert mesh != OwnMesh(grid[[0, 2, 1]], ("island", "data"))
    swapped = grid.copy()
    swapped[0, 1], swapped[1, 1] = grid[1, 1], grid[0, 1]
    assert mesh != OwnMesh(swapped, ("island", "data"))
    assert OwnMesh(joined.devices[::2], "island").parts[1].size == 1
    for count, islands in ((5, 3), (4, "east"), (4, ("east", "east"))):
        with pytest.raises(ValueError, match="island"):
            own.add_slice(devices=count, islands=islands)
    with pytest.raises(TypeError, match="without island="):
        own.add_slice(devices=4, islands=2, island="east")  # type: ignore[call-overload]


# --- arrays --------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [ROWS, 3000])
def test_arrays_move_to_and_from_islands(mesh: Mesh, rows: int) -> None:
    value = _numbers.normal(size=(rows, 6)).astype(np.float32)
    here = Mesh(make_virtual_device_set().add_slice(devices=2).devices, "x")
    shardings = [
        NamedSharding(mesh, spec)
        for spec in (P(), P("data"), BATCH, P("island"), P(None, "island"))
    ]
    shardings += [NamedSharding(here, P("x")), NamedSharding(here, P())]
    if rows == ROWS:  # values that travel inside of messages
        shardings = shardings[::3]
    for source in shardings:
        array = put(value, sharding=source)
        assert isinstance(array, Array)
        assert array.shape == value.shape
        assert np.array_equal(array, value)
        for target in shardings:
            moved = put(array, sharding=target)
            assert moved.sharding == target
            assert np.array_equal(moved, value)


def test_a_large_value_is_uploaded_once(rt: LocalRuntime) -> None:
    rt.islands = ("a", "b", "c", "d", "e")
    joined = make_virtual_device_set().add_slice(devices=5, islands=5)
    value = np.arange(1 << 18, dtype=np.float32)
    array = put(value, sharding=NamedSharding(Mesh(joined.devices, "island"), P()))
    assert rt.uploads == 1
    for member in array.members:
        assert np.array_equal(member, value)


def test_arrays_move_between_any_meshes(mesh: Mesh) -> None:
    devices = make_virtual_device_set()
    one = devices.add_slice(devices=2, island="east")
    other = devices.add_slice(devices=4, island="east")
    meshes = [Mesh(grid(mesh.devices), ("island", "data")) for grid in GRIDS.values()]
    meshes.append(Mesh(mesh.devices.reshape(6), "all"))
    meshes.append(Mesh(np.reshape([*one.devices, *other.devices], (3, 2)), ("island", "data")))
    shardings = [NamedSharding(mesh, BATCH), NamedSharding(one_axis(one), P("x"))]
    shardings += [NamedSharding(own, P(own.axis_names[::-1])) for own in meshes]
    shardings += [NamedSharding(meshes[2], P(None, "island"))]
    value = jax.random.split(jax.random.key(0), (ROWS, 3))
    for at, source in enumerate(shardings):
        array = put(value, sharding=source)
        for target in (shardings[at - 1], shardings[at - 4]):
            moved = put(array, sharding=target)
            assert moved.sharding == target
            assert np.array_equal(*map(jax.random.key_data, (get(moved), value)))


def one_axis(devices: Any) -> Mesh:
    return Mesh(devices.devices, "x")


@on_few_meshes
def test_operators_and_methods_compute_on_all_islands(mesh: Mesh) -> None:
    x = put(X, sharding=NamedSharding(mesh, BATCH))
    doubled = x * 2 + 1
    assert doubled.sharding == x.sharding
    assert apart((doubled, x.sum(0), x.T, x[:, 2]), (X * 2 + 1, X.sum(0), X.T, X[:, 2])) < 1e-5
    assert apart((x[3], x.at[5].set(0)), (X[3], jnp.asarray(X).at[5].set(0))) == 0
    assert jit(jnp.zeros_like, mesh=mesh)(x).sharding == x.sharding
    assert x.block_until_ready().is_ready()


def test_constants_that_a_function_closes_over(mesh: Mesh) -> None:
    x = put(X, sharding=NamedSharding(mesh, BATCH))
    for large in (X.copy(), jnp.asarray(X)):
        assert np.array_equal(jit(lambda x, large=large: x + large, mesh=mesh)(x), X + X)


@on_few_meshes
def test_donated_and_deleted_parts(mesh: Mesh) -> None:
    whole = NamedSharding(mesh, P())
    params = put(PARAMS, sharding=whole)
    ours = jit(step, mesh=mesh, in_shardings=(None, BATCH, BATCH, None), donate_argnums=0)
    after, _ = ours(params, TOKENS, TARGETS, jax.random.key(7))
    assert params["out"].is_deleted()
    with pytest.raises(ArrayDeleted, match="donated"):
        np.asarray(params["out"])
    with pytest.raises(ArrayDeleted, match="donated"):
        ours(params, TOKENS, TARGETS, jax.random.key(7))
    assert after["out"].sharding == whole
    after["out"].delete()
    with pytest.raises(ArrayDeleted, match="delete"):
        after["out"] + 1


def test_an_argument_that_is_donated_and_not_used_is_gone(mesh: Mesh) -> None:
    x, unused = put((X, X * 2), sharding=NamedSharding(mesh, BATCH))
    ours = jit(lambda other, x: x * 2, mesh=mesh, donate_argnums=0)
    assert np.array_equal(ours(unused, x), X * 2)
    assert unused.is_deleted()
    assert not x.is_deleted()


def test_host_functions_and_streams_say_what_they_cannot(mesh: Mesh) -> None:
    double = host_function(lambda x: x * 2, jax.ShapeDtypeStruct((4,), np.float32), mesh=mesh)
    with pytest.raises(PlacementError, match="runs on one island"):
        double(np.ones(4, np.float32))
    like, lies = jax.ShapeDtypeStruct((ROWS, 8), np.float32), NamedSharding(mesh, BATCH)
    with pytest.raises(PlacementError, match='where="client"'):
        stream(lambda: iter([X]), like=like, sharding=lies, where="hosts")
    assert stream(lambda: iter([X]), like=like, sharding=lies).where == "client"


@on_few_meshes
def test_a_program_mixes_meshes(mesh: Mesh) -> None:
    here = Mesh(make_virtual_device_set().add_slice(devices=2).devices, "x")
    joined = jit(lambda x: (x * 2, x.sum(0)), mesh=mesh, in_shardings=(BATCH,))
    alone = jit(lambda x, total: x - total, mesh=here, in_shardings=(P("x"), None))

    @program
    def both(x: Any) -> Any:
        doubled, total = joined(x)
        return joined(alone(doubled, total)), doubled

    twice, doubled = both(X)
    expected = X * 2 - X.sum(0)
    assert apart((twice, doubled), ((expected * 2, expected.sum(0)), X * 2)) < 1e-5


def test_the_code_of_each_piece_can_be_read(mesh: Mesh) -> None:
    function = jit(step, mesh=mesh, in_shardings=(None, BATCH, BATCH, None))
    lowered = function.lower(PARAMS, TOKENS, TARGETS, jax.random.key(7))
    text = lowered.as_text()
    assert text.count("func.func public @main") == 3  # gradients, their sum, the update
    assert "island" not in text
    assert lowered.out_info[1]["loss"].shape == ()
    assert not any(b"test_islands.py" in piece.artifact for piece in traced_of(function).pieces)


def test_the_code_of_the_page_runs_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "islands.md").read_text()
    (code,) = [one for one in re.findall(r"```python\n(.*?)```", page, re.S) if "pw.jit" in one]
    exec(code, {})
    assert float(capsys.readouterr().out) > 0
