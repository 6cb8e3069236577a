"""The client's objects, against a runtime that runs programs in this process."""

from __future__ import annotations

import asyncio
import copy
import gc
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pw.client.arrays.array import Array
from pw.client.arrays.devices import make_virtual_device_set
from pw.client.arrays.of_jax import own_sharding
from pw.client.arrays.operator_cache import OPERATORS_KEPT, Recent
from pw.client.connection import current
from pw.client.functions.jit import jit
from pw.client.functions.pmap import pmap
from pw.client.functions.program import program
from pw.client.functions.transfer import block_until_ready, get, put
from pw.core import errors
from pw.core.messages import INLINE_BYTES
from tests.stages.inside import number_of, set_fetching, traced_of, type_of
from tests.stages.local_runtime import LocalRuntime


@pytest.fixture(autouse=True)
def rt() -> Iterator[LocalRuntime]:
    with LocalRuntime.in_use() as local:
        yield local


def devices(count: int, island: str | None = None) -> Any:
    return make_virtual_device_set().add_slice(devices=count, island=island).devices


def test_the_papers_example() -> None:
    def get_devices(n: int) -> Any:
        return make_virtual_device_set().add_slice(tpu_devices=n).tpus

    a = pmap(lambda x: x * 2.0, devices=get_devices(2))
    b = pmap(lambda x: x + 1.0, devices=get_devices(2))
    c = pmap(lambda x: x / 2.0, devices=get_devices(2))

    @program
    def f(v: Any) -> Any:
        x = a(v)
        y = b(x)
        z = a(c(x))
        return (y, z)

    y, z = f(np.array([1.0, 2.0]))
    assert np.asarray(y).tolist() == [3.0, 5.0]
    assert np.asarray(z).tolist() == [2.0, 4.0]


# --- devices, meshes, shardings ------------------------------------------------------------------------


def test_devices_say_what_they_are() -> None:
    part = make_virtual_device_set().add_slice(devices=2, island="west")
    assert part.tpus == part.devices
    assert [d.index for d in part.devices] == [0, 1]
    assert part.devices[0].slice is part
    assert "west" in repr(part.devices[1])
    assert "cpu" in repr(part)


def test_a_slice_lives_as_long_as_its_devices(rt: LocalRuntime) -> None:
    held = devices(2)
    gc.collect()
    assert rt.released_slices == []
    number = held[0].slice.id
    del held
    gc.collect()
    assert rt.released_slices == [number]


def test_a_slice_that_only_jax_remembers_is_given_back(rt: LocalRuntime) -> None:
    mesh = Mesh(devices(2), "x")
    split = NamedSharding(mesh, P("x"))
    x = put(np.ones(4, np.float32), sharding=split)
    y = jit(lambda v: v * 2, mesh=mesh, in_shardings=split)(x) + x
    assert y.sharding == split
    split.devices_indices_map((4,))
    number = mesh.devices[0].slice.id
    del mesh, split, x, y
    gc.collect()
    devices(2)
    gc.collect()
    assert number in rt.released_slices


def test_too_many_devices() -> None:
    with pytest.raises(errors.InsufficientDevices):
        devices(9)
    wrong: list[Any] = [0, -1, True, np.True_, 2.0, "2"]
    for count in wrong:
        with pytest.raises(ValueError, match="at least one"):
            devices(count)
    assert [device.index for device in devices(np.int64(2))] == [0, 1]


def test_a_mesh_is_of_different_virtual_devices() -> None:
    one = devices(1)
    with pytest.raises(errors.PlacementError, match="twice"):
        jit(lambda x: x, mesh=Mesh([*one, *one], "x"))
    with pytest.raises(errors.PlacementError, match="made of virtual devices"):
        jit(lambda x: x, mesh=Mesh(jax.devices(), "x"))
    with pytest.raises(errors.PlacementError, match="virtual devices"):
        jit(lambda x: x, mesh=Mesh([*one, *jax.devices()], "x"))


@pytest.mark.parametrize(
    ("spec", "axes"),
    [
        (P(), ()),
        (P(None), ()),
        (P("x"), (("x",),)),
        (P("x", None), (("x",),)),
        (P(None, "y"), ((), ("y",))),
        (P(("x", "y")), (("x", "y"),)),
    ],
)
def test_partition_specs(spec: P, axes: Any) -> None:
    mesh = Mesh(np.array(devices(4)).reshape(2, 2), ("x", "y"))
    sharding = own_sharding(NamedSharding(mesh, spec))
    assert sharding is not None
    assert sharding.core.spec == axes
    assert sharding.of_jax.mesh is mesh
    assert own_sharding(sharding.of_jax) == sharding


@pytest.mark.parametrize("spec", ["x", P("z"), P("x", "x"), P(P.UNCONSTRAINED), ("x",)])
def test_partition_specs_that_are_refused(spec: Any) -> None:
    with pytest.raises(errors.Error):
        jit(lambda x: x, devices=devices(2), in_shardings=spec)(np.ones((2, 2)))


# --- jit -----------------------------------------------------------------------------------------------


def test_trees_keywords_statics_and_none(rt: LocalRuntime) -> None:
    traces = []

    @jit(devices=devices(2), static_argnames="n")
    def f(a: Any, b: Any, n: int, *, scale: Any = 1.0) -> Any:
        traces.append(n)
        return {"sum": a["x"] + b[0] * n, "none": None, "scale": [scale]}

    out = f({"x": np.arange(3)}, (2, None), 3, scale=0.5)
    assert out["none"] is None
    assert out["sum"].tolist() == [6, 7, 8]
    assert float(out["scale"][0]) == 0.5
    f({"x": np.arange(3)}, (5, None), n=3, scale=2.5)
    f({"x": np.arange(3)}, (2, None), 3, scale=0.5)
    assert len(traces) <= 2  # n by position and by name
    f({"x": np.arange(3)}, (2, None), 4, scale=0.5)
    assert traces[-1] == 4
    with pytest.raises(errors.ArgumentError, match="hashed"):
        f({"x": np.arange(3)}, (2, None), [4])


def test_dtypes_and_weak_types_are_jaxs() -> None:
    f = jit(lambda x, y: (x, x + y), devices=devices(1))
    for x, y in [
        (1, 2.0),
        (True, 1),
        (np.float64(1), 1),
        (np.ones(2, np.int8), 1.5),
        (jnp.ones(2, jnp.bfloat16), 2.0),
        (1j, 1),
        (np.ones((2, 0), np.float32), 1),
    ]:
        ours, theirs = f(x, y), jax.jit(lambda x, y: (x, x + y))(x, y)
        for mine, his in zip(ours, theirs, strict=True):
            assert (mine.shape, mine.dtype, mine.weak_type) == (his.shape, his.dtype, his.weak_type)
            np.testing.assert_array_equal(np.asarray(mine), np.asarray(his))


@pytest.mark.parametrize(
    "dtype", ["int4", "uint4", "float8_e4m3fn", "bfloat16", "bool", "complex64"]
)
def test_unusual_dtypes_travel(dtype: str) -> None:
    value = jnp.array([0, 1, 3]).astype(dtype)
    out = jit(lambda x: (x, x[::-1]), devices=devices(1))(value)
    np.testing.assert_array_equal(np.asarray(out[1]), np.asarray(value)[::-1])
    assert out[0].dtype == value.dtype


@pytest.mark.filterwarnings("ignore:Explicitly requested dtype float64")
def test_configuration_is_part_of_the_call() -> None:
    f = jit(lambda x: x / 3, devices=devices(1))
    assert f(np.arange(3.0)).dtype == np.float32
    with jax.enable_x64(True):
        wide = f(np.arange(3.0))
        assert wide.dtype == np.float64
        assert np.asarray(wide)[2] == 2 / 3
    assert f(np.arange(3.0)).dtype == np.float32
    assert np.asarray(f(wide)).dtype in (np.float32, np.float64)


def test_typed_keys() -> None:
    key = jax.random.key(7)
    draw = jit(lambda k: (jax.random.split(k, 4), jax.random.normal(k, (3,))), devices=devices(2))
    keys, normal = draw(key)
    np.testing.assert_array_equal(np.asarray(normal), jax.random.normal(key, (3,)))
    assert keys.dtype == key.dtype
    assert keys.shape == (4,)
    with pytest.raises(TypeError, match="key_data"):
        np.asarray(keys)
    keys.block_until_ready()
    assert "key<fry>" in repr(keys)
    data = jit(jax.random.key_data)(keys)
    np.testing.assert_array_equal(np.asarray(data), jax.random.key_data(jax.random.split(key, 4)))
    assert (get(keys) == jax.random.split(key, 4)).all()
    mesh = Mesh(devices(4), "x")
    split = put(keys, sharding=NamedSharding(mesh, P("x")))
    means = jit(jax.vmap(lambda k: jax.random.uniform(k)), mesh=mesh, out_shardings=P("x"))(split)
    expected = jax.vmap(lambda k: jax.random.uniform(k))(jax.random.split(key, 4))
    np.testing.assert_array_equal(np.asarray(means), expected)
    closed = jit(lambda x: x + jax.random.normal(key, (3,)), devices=devices(1))(0.0)
    np.testing.assert_allclose(np.asarray(closed), np.asarray(normal), rtol=1e-6)


def test_shardings(rt: LocalRuntime) -> None:
    mesh = Mesh(np.array(devices(4)).reshape(2, 2), ("x", "y"))
    f = jit(
        lambda a, b: (a @ b, a),
        in_shardings=(NamedSharding(mesh, P("x", None)), NamedSharding(mesh, P(None, "y"))),
        out_shardings=(NamedSharding(mesh, P("x", "y")), None),
    )
    a, b = np.random.rand(4, 6).astype(np.float32), np.random.rand(6, 2).astype(np.float32)
    product, same = f(a, b)
    assert product.sharding == NamedSharding(mesh, P("x", "y"))
    assert same.sharding == NamedSharding(mesh, P("x"))
    np.testing.assert_allclose(np.asarray(product), a @ b, rtol=1e-5)
    # as they lie: no transfer where the mesh is the same
    g = jit(lambda p: p + 1, mesh=mesh)
    g(product)
    graph = rt.programs[rt.runs[-1][0]]
    assert graph.computations[0].inputs[0] == graph.inputs[0] == type_of(product).spec
    # elsewhere: an edge
    h = jit(lambda p: p + 1, devices=devices(2))
    np.testing.assert_allclose(np.asarray(h(product)), a @ b + 1, rtol=1e-5)
    graph = rt.programs[rt.runs[-1][0]]
    assert graph.computations[0].inputs[0] != graph.inputs[0]
    with pytest.raises(errors.ShardingError, match=r"argument 0.*does not divide"):
        f(np.ones((3, 6), np.float32), b)
    with pytest.raises(errors.ShardingError, match="own mesh"):
        jit(lambda x: x, devices=devices(2), out_shardings=NamedSharding(mesh, P()))(1)
    with pytest.raises(errors.ArgumentError, match="in_shardings"):
        f(a)


def test_constraints_use_the_mesh_of_the_computation() -> None:
    mesh = Mesh(devices(4), "x")

    @jit(mesh=mesh, out_shardings=P("x"))
    def f(v: Any) -> Any:
        return jax.lax.with_sharding_constraint(v * 2, P("x"))

    assert f(np.arange(4)).tolist() == [0, 2, 4, 6]


def test_where_a_call_without_devices_runs(rt: LocalRuntime) -> None:
    double = jit(lambda x: x * 2)
    one = double(3)
    assert one.sharding.mesh.size == 1
    mesh = Mesh(devices(2), "x")
    there = put(np.arange(4.0), sharding=NamedSharding(mesh, P("x")))
    assert double(there).sharding.mesh == mesh
    with pytest.raises(errors.PlacementError, match="devices="):
        jit(lambda x, y: x + y)(one, there)


def test_same_computation_is_shared(rt: LocalRuntime) -> None:
    traces = []

    def count(x: Any) -> Any:
        traces.append(1)
        return x + 1

    chosen = devices(2)
    f = jit(count, devices=chosen)
    here = put(np.ones(2, np.float32), devices=chosen)
    there = put(np.ones(2, np.float32), devices=devices(1))
    f(np.ones(2, np.float32)), f(jnp.ones(2)), f(here), f(there), f(there)
    assert len(traces) == 1
    assert len({c.artifact for p in rt.programs.values() for c in p.computations}) == 1


def test_slices_of_one_shape_share_what_was_traced(rt: LocalRuntime) -> None:
    traced = []

    def double(x: Any) -> Any:
        traced.append(x.shape)
        return x * 2

    def on(count: int, **how: Any) -> Any:
        return jit(double, devices=devices(count), **how)

    x = np.arange(4.0, dtype=np.float32)
    for calls, call in enumerate(
        (on(1), on(1), on(1), on(2), on(2), on(2, out_shardings=P("devices")))
    ):
        assert get(call(x)).tolist() == [0, 2, 4, 6]
        assert len(traced) == (1, 1, 1, 2, 2, 3)[calls]
    for _ in range(2):
        assert get(pmap(double, devices=devices(2))(x.reshape(2, 2))).tolist() == [[0, 2], [4, 6]]
    assert len(traced) == 4


def test_what_a_function_closes_over_belongs_to_its_slice(rt: LocalRuntime) -> None:
    places = [devices(2) for _ in range(2)]
    weights = [
        put(np.full(4, at, np.float32), sharding=NamedSharding(Mesh(place, ("x",)), P("x")))
        for at, place in enumerate(places, 1)
    ]
    which = 0

    def scaled(x: Any) -> Any:
        return x * weights[which]

    x = np.ones(4, np.float32)
    for which, place in enumerate(places):
        assert get(jit(scaled, mesh=Mesh(place, ("x",)))(x)).tolist() == [which + 1] * 4


def test_captured_arrays_become_arguments(rt: LocalRuntime) -> None:
    mesh = Mesh(devices(2), "x")
    weights = put(np.arange(1000.0, dtype=np.float32), sharding=NamedSharding(mesh, P("x")))
    table = np.arange(2000, dtype=np.float32)
    local = jnp.arange(3000, dtype=jnp.float32)

    @jax.jit
    def inner(x: Any) -> Any:
        return jnp.sin(weights) * x + local[0] + jax.jit(lambda y: y + jnp.asarray(table)[1])(x)

    @jit(mesh=mesh)
    def f(x: Any) -> Any:
        total, _ = jax.lax.scan(
            lambda c, _: (c + jnp.dot(weights, weights), None), x, None, length=2
        )
        return inner(x) + weights, total + jnp.asarray(table).sum() + weights[3]

    first, second = f(2.0)
    w = np.asarray(weights)
    np.testing.assert_allclose(np.asarray(first), np.sin(w) * 2 + 3 + w, rtol=1e-4)
    np.testing.assert_allclose(float(second), 2 + 2 * float(w @ w) + table.sum() + 3, rtol=1e-4)
    graph = rt.programs[rt.runs[-1][0]]
    assert graph.inputs.count(type_of(weights).spec) == 1
    assert {spec.shape for spec in graph.inputs} == {(), (1000,), (2000,), (3000,)}
    assert all(len(blob) < 8000 for blob in rt.artifacts.values())
    uploads = rt.uploads
    f(3.0)
    assert rt.uploads == uploads
    with pytest.raises(errors.ArgumentError, match="lies on virtual devices"):
        inner(jnp.float32(1.0))
    weights.delete()
    with pytest.raises(errors.ArrayDeleted):
        f(2.0)


def test_a_jax_array_is_uploaded_once_for_all_traces(rt: LocalRuntime) -> None:
    mesh = Mesh(devices(2), "x")
    params = jnp.arange(3000, dtype=jnp.float32)
    table = np.arange(3000, dtype=np.float32)
    inner = jax.jit(lambda x: x * params[2])
    f = jit(lambda x: jax.lax.fori_loop(0, 2, lambda _, y: y + params[1], inner(x)), mesh=mesh)
    g = jit(lambda x: x + jnp.asarray(table)[1], mesh=mesh)
    same = jit(lambda x: x + params[2], mesh=mesh)
    for size in range(1, 4):
        assert f(np.ones(size, np.float32)).tolist() == [4] * size
    assert rt.uploads == 1
    assert same(1.0).tolist() == 3
    whole = jit(lambda x, y: x.sum() + y, mesh=mesh)
    for size in range(1, 4):
        assert program(lambda y: whole(params, y))(np.ones(size, np.float32)).shape == (size,)
    assert rt.uploads == 1
    for size in range(1, 4):
        table[1] = size
        assert g(np.zeros(size, np.float32)).tolist() == [size] * size
    assert rt.uploads == 4


def test_uploaded_constants_are_those_of_the_values_that_live(rt: LocalRuntime) -> None:
    part = make_virtual_device_set().add_slice(devices=1)
    params: list[Any] = [None]
    f = jit(lambda x: x + params[0][0], devices=part)
    for step in range(1, 20):  # the next value often gets the address of the one before
        params[0] = None
        params[0] = jnp.full(3000, step, jnp.float32)
        assert f(np.zeros(step, np.float32)).tolist() == [step] * step
    assert rt.uploads == 19
    del f
    gc.collect()
    assert not part.constants
    assert not set(rt.arrays) - set(rt.released)


def test_errors_of_the_function_are_its_own() -> None:
    class Mine(Exception):
        pass

    def fails(x: Any) -> Any:
        raise Mine("at once")

    with pytest.raises(Mine):
        jit(fails, devices=devices(1))(1)
    with pytest.raises(TypeError, match="shape"):
        jit(lambda x, y: x + y, devices=devices(1))(np.ones(2), np.ones(3))
    with pytest.raises(jax.errors.TracerBoolConversionError):
        jit(lambda x: 1 if x else 2, devices=devices(1))(1)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (jax.debug.print("{}", x), x)[1],
        lambda x: jax.pure_callback(lambda v: v, jax.ShapeDtypeStruct((), np.float32), x),
    ],
)
def test_what_cannot_travel(function: Any) -> None:
    with pytest.raises(errors.TracingError, match=r"pure_callback.*return such values"):
        jit(function, devices=devices(1))(np.float32(1))


def test_wrong_arguments() -> None:
    f = jit(lambda x, y=0: x, devices=devices(1))
    with pytest.raises(errors.ArgumentError, match=r"argument 0\['k'\]\[1\].*str"):
        f({"k": [1, "no"]})
    with pytest.raises(errors.ArgumentError, match="argument 'y'"):
        f(1, y=object())
    with pytest.raises(errors.ArgumentError, match="dtype"):
        f(np.array(["a"]))
    with pytest.raises(ValueError, match="no parameters named"):
        jit(lambda x: x, static_argnames="z")
    with pytest.raises(TypeError, match="not both"):
        jit(lambda x: x, devices=devices(1), mesh=Mesh(devices(1), "x"))


def test_donation() -> None:
    where = devices(1)

    def step(state: Any, x: Any) -> Any:
        return {k: v + x for k, v in state.items()}

    f = jit(step, devices=where, donate_argnames="state")
    state = put({"a": np.ones(3), "b": np.zeros(3)}, where)
    other = f(state, 1.0)
    assert state["a"].is_deleted()
    assert state["b"].is_deleted()
    with pytest.raises(
        errors.ArrayDeleted, match=r"float32\[3\].*donated to the computation 'step'"
    ):
        np.asarray(state["a"])
    with pytest.raises(errors.ArrayDeleted):
        f(state, 1.0)
    assert other["a"].tolist() == [2.0, 2.0, 2.0]
    with pytest.raises(errors.ArgumentError, match="more than once"):
        f(other, other["a"])
    assert not other["a"].is_deleted()
    f(other, copy.copy(other["a"]))


def test_what_was_donated_or_deleted_is_not_released_once_more(rt: LocalRuntime) -> None:
    f = jit(lambda x: x + 1, devices=devices(1), donate_argnums=0)
    for let_go in (f, lambda x: x.delete()):
        x = put(np.ones(3), devices(1))
        number = number_of(x)
        let_go(x)
        del x
        gc.collect()
        assert number not in rt.released


def test_functions_that_call_others_take_them_in() -> None:
    f = jit(lambda x: jnp.sum(x**2), devices=devices(1))
    outer = jit(lambda x: f(x) + f(2.0), devices=devices(1))
    assert float(outer(np.ones(2))) == 6.0
    gradient = jit(jax.grad(f), devices=devices(1))
    assert gradient(np.ones(2)).tolist() == [2.0, 2.0]


def test_large_arguments_are_uploaded(rt: LocalRuntime) -> None:
    f = jit(lambda x: x.sum(), devices=devices(1))
    big = np.ones(INLINE_BYTES, np.float32)
    assert float(f(big)) == big.size
    assert rt.uploads == 1
    assert isinstance(rt.runs[-1][1][0], int)
    f(np.ones(3, np.float32))
    assert rt.uploads == 1


def test_a_method_and_a_wrapped_function() -> None:
    class Model:
        @jit(static_argnums=0)
        def twice(self, x: Any) -> Any:
            """Doubles."""
            return x * 2

    assert int(Model().twice(4)) == 8
    assert Model.twice.__doc__ == "Doubles."
    assert Model.twice.__wrapped__.__name__ == "twice"


def test_one_recording_for_many_threads(rt: LocalRuntime) -> None:
    traces = []
    start = threading.Barrier(8)

    @jit(devices=devices(1))
    def f(x: Any) -> Any:
        traces.append(1)
        return x + 1

    results = []

    def call() -> None:
        start.wait(60)
        results.append(float(f(1.0)))

    threads = [threading.Thread(target=call) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results == [2.0] * 8
    assert len(traces) == 1


def test_an_artifact_says_what_it_donates_and_how_its_results_are_divided() -> None:
    mesh = Mesh(np.array(devices(2)).reshape(2, 1), ("x", "y"))
    kinds = {}
    for donated in ((), (0,)):
        f = jit(
            lambda x, unused: x * 2, mesh=mesh, in_shardings=(P("x"), P()), donate_argnums=donated
        )
        text = f.lower(np.ones((4, 2), np.float32), np.ones(3)).as_text()
        results = text.partition("->")[2].partition("{\n")[0]
        assert '@mesh, [{"x"}, {}]' in results, "the compiler has not been asked for it"
        assert text.count("jax.buffer_donor") == len(donated)
        kinds[donated] = text
    assert kinds[()] == kinds[(0,)].replace("jax.buffer_donor = true, ", "")


def test_artifacts_for_another_platform() -> None:
    other = LocalRuntime(platform="cuda")
    current.use(other)
    mesh = Mesh(devices(4), "x")
    f = jit(lambda x: jax.lax.linalg.eigh(x), mesh=mesh)
    f.lower(np.ones((4, 4), np.float32))
    assert b"cusolver_syevd_ffi" in traced_of(f).artifact


# --- arrays --------------------------------------------------------------------------------------------


def test_what_an_array_says_of_itself(rt: LocalRuntime) -> None:
    x = put(np.arange(6, dtype=np.int32).reshape(2, 3), devices(2))
    assert (x.shape, x.dtype, x.ndim, x.size, x.nbytes) == ((2, 3), np.int32, 2, 6, 24)
    assert len(x) == 2
    assert repr(x) == "array([[0, 1, 2],\n       [3, 4, 5]], dtype=int32)"
    assert str(x) == str(np.arange(6).reshape(2, 3))
    assert x[1, 2] == 5
    assert [row.tolist() for row in x] == x.tolist()
    assert np.asarray(x, np.float64).dtype == np.float64
    with pytest.raises(ValueError, match="read-only"):
        np.asarray(x)[0] = 1
    same = put(np.asarray(x))
    assert {x: 1, same: 2}[same] == 2  # a future is itself, whatever its value
    static = jit(lambda n: n + 1, static_argnums=0)
    with pytest.raises(errors.ArgumentError, match=r"int\(x\)"):
        static(x[0, 0])
    assert static(int(x[0, 0])).item() == 1
    with pytest.raises(TypeError, match="unsized"):
        len(put(1))
    three = put(3)
    assert f"{three:03d}" == "003"
    assert [10, 20, 30, 40][three] == 40
    assert three.item() == int(three) == 3
    assert bool(three)
    assert jax.device_get({"x": x})["x"].tolist() == x.tolist()
    assert jax.tree.map(lambda leaf: leaf.shape, {"a": x}) == {"a": (2, 3)}
    number = number_of(x)
    del x
    assert number in rt.released


def test_operators() -> None:
    mesh = Mesh(devices(2), "x")
    split = NamedSharding(mesh, P("x"))
    a = np.arange(1.0, 5.0, dtype=np.float32)
    x = put(a, sharding=split)
    for ours, theirs in [
        (x + 1, a + 1), (1 - x, 1 - a), (x * x, a * a), (x / 2, a / 2), (2**x, 2**a), (-x, -a),
        (abs(-x), a), (x // 2, a // 2), (x % 3, a % 3), (x > 2, a > 2), (x == a, a == a),
        (x != 2, a != 2), (a + x, a + a), (np.float32(2) * x, 2 * a), (x**2, a**2),
    ]:  # fmt: skip
        assert isinstance(ours, Array)
        assert ours.sharding == split
        np.testing.assert_allclose(np.asarray(ours), theirs, rtol=1e-6)
    rows = put(np.ones((4, 4), np.float32), sharding=NamedSharding(mesh, P("x")))
    assert (rows @ x).tolist() == [10.0] * 4
    assert (rows @ rows).sharding == NamedSharding(mesh, P("x"))
    elsewhere = put(a, devices(2))
    assert (x + elsewhere).sharding == split
    assert ((put(5) >> 1) | 8).item() == 10
    with pytest.raises(TypeError):
        x + "no"
    assert (x == "no") is False


def test_a_product_is_split_as_its_left_factor_is_by_rows() -> None:
    mesh = Mesh(devices(4), "x")
    tall = np.arange(192, dtype=np.float32).reshape(64, 3)
    batched = np.arange(96, dtype=np.float32).reshape(4, 8, 3)
    x = put(tall, sharding=NamedSharding(mesh, P("x")))
    batches = put(batched, sharding=NamedSharding(mesh, P("x")))
    rows = put(batched, sharding=NamedSharding(mesh, P(None, "x")))
    vector = put(np.arange(64, dtype=np.float32), sharding=NamedSharding(mesh, P("x")))
    ones = np.ones((3, 64), np.float32)
    for found, wanted, spec in [
        (x.T @ x, tall.T @ tall, P()),
        (ones @ x, ones @ tall, P()),
        (x @ ones, tall @ ones, P("x")),
        (x @ np.ones(3, np.float32), tall.sum(1), P("x")),
        (vector @ x, np.arange(64) @ tall, P()),
        (vector @ vector, np.arange(64) @ np.arange(64), P()),
        (x @ np.ones((5, 3, 2), np.float32), tall @ np.ones((5, 3, 2)), P(None, "x")),
        (batches @ np.ones((3, 2), np.float32), batched @ np.ones((3, 2)), P("x")),
        (batches @ np.ones(3, np.float32), batched.sum(2), P("x")),
        (rows @ np.ones((1, 3, 2), np.float32), batched @ np.ones((1, 3, 2)), P(None, "x")),
        (np.ones((2, 8), np.float32) @ batches, np.ones((2, 8)) @ batched, P("x")),
        (np.ones(8, np.float32) @ batches, batched.sum(1), P("x")),
        (np.ones((2, 8), np.float32) @ rows, np.ones((2, 8)) @ batched, P()),
        (
            np.ones((2, 1, 1, 8), np.float32) @ batches,
            np.ones((2, 1, 1, 8)) @ batched,
            P(None, "x"),
        ),
    ]:
        assert found.sharding == NamedSharding(mesh, spec)
        np.testing.assert_allclose(np.asarray(found), wanted)


def test_powers_of_known_integers_are_jaxs(rt: LocalRuntime) -> None:
    mesh = Mesh(devices(2), "x")
    split = NamedSharding(mesh, P("x"))
    odd = np.array([1, 2, -3, 46341], np.int32)
    half = odd.astype(np.float32) / 3
    for value, exponents in [(odd, (2, 0, 64, np.int64(3))), (half, (2, -1, 7, np.int8(-2), 0.5))]:
        x = put(value, sharding=split)
        for exponent in exponents:
            wanted = jnp.asarray(value) ** exponent
            for found in (x**exponent, program(lambda x, n=exponent: x**n)(x)):
                assert found.dtype == wanted.dtype
                assert found.sharding == (split if exponent else NamedSharding(mesh, P()))
                np.testing.assert_array_equal(np.asarray(found), np.asarray(wanted))
    ints = put(odd, sharding=split)
    assert (ints ** ints.astype(np.float32)).dtype == np.float32
    for power in (lambda x: x**-1, program(lambda x: x ** np.int32(-1))):
        with pytest.raises(TypeError, match="negative"):
            power(ints)
    before = len(rt.programs)
    assert (ints**3).tolist() == (odd**3).tolist()
    assert len(rt.programs) == before
    for base, dtype, exponent in [
        (-1, jnp.bfloat16, 257),
        (-1.001, np.float16, 2049),
        (-1, np.float32, (1 << 24) + 1),
    ]:
        known = jnp.asarray(base, dtype)
        assert float(put(known) ** exponent) == float(known**exponent)
    near = np.linspace(0.9, 1.1, 4, dtype=np.float32)
    x = put(near, sharding=split)
    before = len(rt.programs)
    for exponent in range(65, 90):  # a loop that counts does not compile at every step
        np.testing.assert_allclose(np.asarray(x**exponent), near**exponent, rtol=1e-4)
    assert len(rt.programs) <= before + 1


def test_counts_of_repetitions_may_be_an_array(rt: LocalRuntime) -> None:
    value = np.arange(6, dtype=np.float32).reshape(2, 3)
    x = put(value, devices(1))
    assert x.repeat(np.array([2, 0, 3]), 1).tolist() == value.repeat([2, 0, 3], 1).tolist()
    before = len(rt.programs)
    assert x.repeat(np.array([1, 4, 0]), 1).tolist() == value.repeat([1, 4, 0], 1).tolist()
    assert len(rt.programs) == before, "counts are data"
    for counts, axis in [(np.arange(6), None), (np.array(2), -1), (jnp.array([3]), 0)]:
        wanted = value.repeat(np.asarray(counts), axis).tolist()
        assert x.repeat(counts, axis=axis).tolist() == wanted
        assert program(lambda x, c=counts, a=axis: x.repeat(c, a))(x).tolist() == wanted
    with pytest.raises(ValueError, match="broadcast"):
        x.repeat(np.array([1, 2]), 1)


def test_arrays_say_where_slices_end(rt: LocalRuntime) -> None:
    value = np.arange(24).reshape(4, 6)
    x, n = put(value, devices(1)), put(3)
    assert x[:n].tolist() == value[:3].tolist()
    assert x[: jnp.int32(3)].tolist() == x[: np.int64(3)].tolist() == value[:3].tolist()
    assert x[1:n, n::2].tolist() == value[1:3, 3::2].tolist()
    assert x[np.array([2, 0]), :n].tolist() == value[[2, 0], :3].tolist()
    before = len(rt.programs)
    assert x[:3].tolist() == value[:3].tolist()
    assert len(rt.programs) == before
    with pytest.raises(TypeError):
        x[: put(1.5)]
    with pytest.raises(errors.TracerError):
        program(lambda x, n: x[:n])(x, n)


def test_masks_of_this_machine_are_indices() -> None:
    value = np.arange(24, dtype=np.float32).reshape(4, 6)
    x = put(value, devices(1))
    rows, columns, both = value[:, 0] > 5, value[0] > 2, value % 5 == 0
    for index in [
        rows, jnp.asarray(both), rows.tolist(), (slice(1, 3), columns), (..., columns), (rows, -1),
        (None, both), (None, ..., rows, 2), np.zeros(4, bool), (np.array([1, 2, 0]), columns),
    ]:  # fmt: skip
        wanted = value[np.asarray(index) if isinstance(index, jax.Array) else index]
        np.testing.assert_array_equal(np.asarray(x[index]), wanted)
    assert program(lambda x: x[rows])(x).tolist() == value[rows].tolist()
    for index in (columns, rows[:2], (..., rows), (0, 0, rows), both.T, (rows, rows, rows)):
        with pytest.raises(IndexError, match="mask"):
            x[index]
    for use in (lambda x: x[x > 5], lambda x: x[1, x[0] > 2]):
        for run in (use, program(use)):
            with pytest.raises(errors.ArgumentError, match=r"pw\.get\(mask\)"):
                run(x)


def test_awaiting() -> None:
    x = put(2.5)

    async def main() -> float:
        return float(await x)

    assert asyncio.run(main()) == 2.5
    assert x.is_ready()
    assert x.block_until_ready() is x


def test_deleted_arrays(rt: LocalRuntime) -> None:
    x = put(np.ones(3), devices(1))
    x.delete()
    x.delete()
    assert x.is_deleted()
    for use in (np.asarray, jit(lambda v: v), lambda v: v + 1, get, block_until_ready, put):
        with pytest.raises(errors.ArrayDeleted, match=r"float32\[3\].*delete\(\)"):
            use(x)
    assert "deleted" in repr(x)


def test_a_finalizer_may_delete_arrays_while_one_is_given_up() -> None:
    x, other = put(1.0), put(2.0)

    class Owner:
        def __del__(self) -> None:
            other.delete()

    fetching: Any = Owner()
    set_fetching(x, fetching)
    del fetching
    thread = threading.Thread(target=x.delete, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    assert x.is_deleted()
    assert other.is_deleted()


def test_copies_and_pickles() -> None:
    x = put(np.arange(3))
    y = copy.deepcopy({"x": x})["x"]
    x.delete()
    assert y.tolist() == [0, 1, 2]
    with pytest.raises(errors.ArgumentError, match=r"pw\.get"):
        pickle.dumps(y)


def test_sessions_do_not_mix(rt: LocalRuntime) -> None:
    x = put(1.0)
    fetched = put(2.0)
    get(fetched)
    f = jit(lambda v: v + 1, devices=devices(1))
    second = LocalRuntime()
    current.use(second)
    g = jit(lambda v: v + 1, devices=devices(1))
    with pytest.raises(errors.NotOwner, match="session"):
        g(x)
    assert float(g(1.0)) == 2.0
    rt.close()
    with pytest.raises(errors.Disconnected):
        np.asarray(x)
    with pytest.raises(errors.Disconnected):
        f(1.0)
    with pytest.raises(errors.Disconnected):
        g(x)


def test_programs_are_released(rt: LocalRuntime) -> None:
    f = jit(lambda x: x + 1, devices=devices(1))
    f(1)
    number = rt.runs[-1][0]
    del f
    gc.collect()
    assert number in rt.released_programs


def test_equal_arguments_of_methods_are_not_always_the_same() -> None:
    x = put(np.arange(5, dtype=np.int32))
    for most in (3, 3.0, np.float16(3), 3):
        wanted = jnp.arange(5, dtype=jnp.int32)
        assert x.clip(0, most).dtype == wanted.clip(0, most).dtype
        assert x.clip(min=0, max=most).dtype == wanted.clip(min=0, max=most).dtype


def test_batch_after_batch_is_read_with_one_compilation(rt: LocalRuntime) -> None:
    mesh = Mesh(devices(2), "x")
    value = np.arange(160, dtype=np.float32).reshape(40, 4)
    whole, split = put(value, mesh.devices[0]), put(value, sharding=NamedSharding(mesh, P("x")))
    before = len(rt.programs)
    for start in range(1, 30):
        np.testing.assert_array_equal(
            np.asarray(whole[start : start + 5]), value[start : start + 5]
        )
    np.testing.assert_array_equal(np.asarray(whole[np.int64(-9) : -4 : 1]), value[-9:-4])
    assert len(rt.programs) == before + 1
    for row in range(-40, 40, 8):
        assert whole[row, 1:3].tolist() == value[row, 1:3].tolist()
    assert len(rt.programs) == before + 2
    for start in (0, 1, 2, 35, 38, 40, 50, -3, -50):
        for found in (whole, split):
            part = found[start : start + 5]
            np.testing.assert_array_equal(np.asarray(part), value[start : start + 5])
            assert part.dtype == value.dtype
    weak = jit(lambda x: jnp.broadcast_to(x, (5,)))(2.0)
    assert weak[1:3].weak_type
    keys = jit(lambda key: jax.random.split(key, 6))(jax.random.key(1))
    wanted = jax.random.key_data(jax.random.split(jax.random.key(1), 6))
    for start in (1, 2):
        found = jax.random.key_data(keys[start : start + 3].local())
        assert found.tolist() == wanted[start : start + 3].tolist()


def programs_kept(rt: LocalRuntime) -> int:
    gc.collect()
    assert len(set(rt.released_programs)) == len(rt.released_programs)
    return len(set(rt.programs) - set(rt.released_programs))


def few_kept() -> Any:
    """A device whose slice keeps few operators, for compiling takes long."""
    on = devices(1)[0]
    on.slice.compiled = Recent(20)
    return on


def test_operators_that_are_not_used_for_long_are_forgotten(rt: LocalRuntime) -> None:
    value = np.arange(100, dtype=np.float32)
    x = put(value, few_kept())
    for start in range(25):
        part = x[start : start + 5 : 2]
        np.testing.assert_array_equal(np.asarray(part), value[start : start + 5 : 2])
        assert float(x.sum()) == value.sum()
    assert 10 <= programs_kept(rt) <= 20
    (sum_of,) = {run[0] for run in rt.runs if rt.programs[run[0]].name == "sum"}
    assert sum_of not in rt.released_programs
    assert x[1:6:2].tolist() == [1, 3, 5]
    del x, part
    assert programs_kept(rt) == 0


@pytest.mark.long
def test_operands_and_moves_of_ever_new_kinds_are_forgotten(rt: LocalRuntime) -> None:
    on = few_kept()
    for size in range(1, 8):
        x = put(np.ones(size, np.float32), on)
        assert float(x.sum()) == size
        assert (x * 2).clip(0, 1 / size).tolist() == [np.float32(1 / size)] * size
        assert program(lambda x: x + 1)(x).tolist() == [2] * size
    assert programs_kept(rt) <= 20
    assert put(np.ones(1, np.float32), on).tolist() == [1]


def test_operators_are_looked_up_while_others_are_forgotten() -> None:
    table = devices(1)[0].slice.compiled
    used = table.add("used", object())
    wrong: list[Any] = []

    def work(thread: int) -> None:
        for number in range(20 * OPERATORS_KEPT):
            key = (thread, number)
            if table.add(key, key) is not key or table.get("used") is not used:
                wrong.append(key)

    threads = [threading.Thread(target=work, args=(thread,)) for thread in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert OPERATORS_KEPT // 2 <= len(table) <= OPERATORS_KEPT
    assert table.get((0, 0)) is None


# --- transfers -----------------------------------------------------------------------------------------


def test_put_and_get(rt: LocalRuntime) -> None:
    mesh = Mesh(devices(2), "x")
    split = NamedSharding(mesh, P("x"))
    tree = {"small": np.arange(4), "big": np.ones((4, 4096), np.float32), "n": 3}
    there = put(tree, sharding={"small": split, "big": split, "n": NamedSharding(mesh, P())})
    assert rt.uploads == 1
    assert there["small"].sharding == split
    back = get({**there, "other": "left alone"})
    assert back["other"] == "left alone"
    np.testing.assert_array_equal(back["big"], tree["big"])
    moved = put(there["small"], devices(1)[0])
    assert moved.tolist() == [0, 1, 2, 3]
    assert rt.programs[rt.runs[-1][0]].nodes == ()
    assert put(moved, sharding=moved.sharding) is moved
    assert put(np.arange(2), mesh.devices.flat, sharding=P("devices")).tolist() == [0, 1]
    waits = rt.waits
    assert block_until_ready(there) is there
    assert rt.waits == waits + 1
    with pytest.raises(errors.ShardingError, match="divide"):
        put(np.arange(3), sharding=split)
    with pytest.raises(errors.ShardingError, match="without devices"):
        put(1, sharding=P())
    with pytest.raises(errors.ArgumentError):
        put("text")


# --- pmap ----------------------------------------------------------------------------------------------


def test_pmap() -> None:
    where = devices(4)
    x = np.arange(8.0, dtype=np.float32).reshape(4, 2)
    f = pmap(lambda v: v / jax.lax.psum(v, "i"), axis_name="i", devices=where)
    np.testing.assert_allclose(np.asarray(f(x)), x / x.sum(0), rtol=1e-6)
    g = pmap(
        lambda tree, y: (tree["a"] + y, jax.lax.psum(y, "i")),
        "i",
        devices=where,
        in_axes=({"a": 1}, None),
        out_axes=(1, None),
    )
    one, two = g({"a": x.T}, 2.0)
    np.testing.assert_allclose(np.asarray(one), x.T + 2)
    assert float(two) == 8.0
    assert one.sharding.spec == P(None, "i")
    with pytest.raises(errors.ArgumentError, match=r"argument 0 has size 3 .*there are 4 devices"):
        f(np.ones((3, 2)))
    with pytest.raises(errors.ArgumentError, match="0 dimensions"):
        f(1.0)
    h = pmap(lambda n, v: v * n, devices=where, static_broadcasted_argnums=0)
    np.testing.assert_allclose(np.asarray(h(3, x)), x * 3)
    inside = jit(jax.grad(lambda v: f(v).sum()), devices=where)
    np.testing.assert_allclose(np.asarray(inside(x)), 0, atol=1e-6)
    indices = pmap(lambda v: jax.lax.axis_index("i"), axis_name="i", devices=where)(x)
    assert indices.tolist() == [0, 1, 2, 3]
    keys = jax.random.split(jax.random.key(0), 4)
    drawn = pmap(lambda k: jax.random.normal(k), devices=where)(keys)
    np.testing.assert_allclose(np.asarray(drawn), jax.vmap(jax.random.normal)(keys), rtol=1e-6)


# --- programs ------------------------------------------------------------------------------------------


def test_a_program_is_traced_once_and_small(rt: LocalRuntime) -> None:
    traces = []
    add = jit(lambda x: x + 1, devices=devices(4))

    @program(static_argnames="n")
    def chain(x: Any, n: int, label: str = "a") -> Any:
        traces.append(label)
        for _ in range(n):
            x = add(x)
        return x

    assert float(chain(1.0, n=128)) == 129.0
    assert float(chain(2.0, n=128)) == 130.0
    assert traces == ["a"]
    graph = rt.programs[rt.runs[-1][0]]
    assert len(graph.nodes) == 128
    assert len(graph.computations) == 1
    chain(1.0, n=2, label="b")
    assert traces == ["a", "b"]


def test_host_values_go_where_they_are_wanted(rt: LocalRuntime) -> None:
    one, two = jit(lambda x: x + 1, devices=devices(1)), jit(lambda x: x * 2, devices=devices(2))

    @program
    def f(x: Any, unused: Any) -> Any:
        return one(x), one(x), two(x), x, 7, two(np.float32(3))

    a, b, c, same, seven, six = f(5.0, 1)
    assert [float(v) for v in (a, b, c, same, seven, six)] == [6, 6, 10, 5, 7, 6]
    graph = rt.programs[rt.runs[-1][0]]
    assert len(graph.inputs) == 5


def test_operators_and_reshards_in_programs(rt: LocalRuntime) -> None:
    mesh = Mesh(devices(2), "x")
    split = NamedSharding(mesh, P("x"))
    captured = put(np.arange(4.0, dtype=np.float32), sharding=split)
    double = jit(lambda x: x * 2, devices=devices(1))
    inner = program(lambda x: double(x) + 1)

    @program
    def f(x: Any) -> Any:
        y = put(inner(x), sharding=split)
        return {"y": y - captured, "same": captured, "moved": put(x, sharding=split)}

    out = f(np.ones(4, np.float32))
    assert out["y"].tolist() == [3.0, 2.0, 1.0, 0.0]
    assert out["y"].sharding == split
    assert out["same"].tolist() == [0, 1, 2, 3]
    assert out["moved"].tolist() == [1.0] * 4


def test_values_do_not_exist_while_tracing() -> None:
    for use in (
        lambda x: bool(x[0]),
        lambda x: int(x[0]),
        lambda x: float(x[0]),
        np.asarray,
        lambda x: [1, 2][x.astype(int)[0]],
        get,
        block_until_ready,
        lambda x: range(x.astype(int)[0]),
    ):
        with pytest.raises(errors.TracerError, match=r"(pw\.jit)"):
            program(lambda x, use=use: use(x))(np.ones(2))

    @program
    def decides(x: Any) -> Any:
        if x > 0:
            return x
        return -x

    with pytest.raises(errors.TracerError, match=r"decides.*test_tracing\.py"):
        decides(1.0)
    kept: list[Any] = []
    program(lambda x: kept.append(x + 1))(1.0)
    with pytest.raises(errors.TracerError, match="return it from the program"):
        program(lambda x: x + kept[0])(1.0)


def test_donation_in_programs() -> None:
    where = devices(1)
    eat = jit(lambda x: x + 1, devices=where, donate_argnums=0)

    @program
    def twice(x: Any) -> Any:
        return eat(eat(x))

    x = put(1.0, where)
    assert float(twice(x)) == 3.0
    assert x.is_deleted()
    with pytest.raises(errors.ArrayDeleted, match="donated"):
        twice(x)
    assert float(twice(1.0)) == 3.0
    with pytest.raises(errors.ArrayDeleted, match="donated to the computation"):
        program(lambda x: (eat(x), x))(put(1.0, where))
    assert [float(v) for v in program(lambda x: (eat(x), x, eat(x)))(1.0)] == [2.0, 1.0, 2.0]
    both = jit(lambda x, y: x + y, devices=where, donate_argnums=0)
    with pytest.raises(errors.ArgumentError, match="donates"):
        program(lambda x: both(x, x))(put(1.0, where))
    big = np.ones(5000, np.float32)
    feeds = program(lambda: eat(big))
    assert np.asarray(feeds())[0] == np.asarray(feeds())[0] == 2.0


def test_what_put_made_in_a_program_can_be_donated_without_its_source(rt: LocalRuntime) -> None:
    east, west = Mesh(devices(2), "x"), Mesh(devices(2, "west"), "x")
    here, there = NamedSharding(east, P("x")), NamedSharding(west, P("x"))
    eat = jit(lambda v: v + 1, mesh=west, donate_argnums=0)
    eat_here = jit(lambda v: v + 1, mesh=east, donate_argnums=0)
    cell = jit(lambda h, c: (h + 1, c + 2), mesh=west, donate_argnums=(0, 1))
    small, big = np.arange(4, dtype=np.float32), np.zeros(5000, np.float32)
    fixed = jnp.zeros(5000, jnp.float32)

    def changes(_: Any) -> Any:
        value = np.zeros(4, np.float32)
        first = put(value, sharding=there)
        value[:] = 1
        return cell(first, put(value, sharding=there))

    kept: list[Callable[[Any], Any]] = [
        lambda v: eat(put(v, sharding=there)),
        lambda v: (eat(put(v, sharding=there)), eat(put(v, sharding=there)), v + 1),
        lambda v: cell(put(v, sharding=there), put(v, sharding=there)),
        lambda _: eat(put(big, sharding=there)),
        lambda _: eat(put(fixed, sharding=there)),
        lambda _: eat(put(put(big, sharding=here), sharding=there)),
        lambda _: cell(put(np.zeros(4), sharding=there), put(np.zeros(4), sharding=there)),
        changes,
    ]
    taken: list[Callable[[Any], Any]] = [
        lambda v: (put(v, sharding=there), eat_here(v)),
        lambda v: eat_here(put(v, sharding=here)),
    ]
    for function in kept + taken:
        for run in (function, program(function)):
            x = put(small, sharding=here)
            host, held = run(small), run(x)
            again = run(put(small, sharding=here) if function in taken else x)
            assert x.is_deleted() == (function in taken)
            wanted = get(function(small))
            for found in (host, held, again):
                jax.tree.map(np.testing.assert_array_equal, get(found), wanted)

    def twice(v: Any) -> Any:
        moved = put(v, sharding=there)
        return cell(moved, moved)

    def afterwards(v: Any) -> Any:
        moved = put(v, sharding=there)
        return eat(moved), moved + 1

    for value in (small, put(small, sharding=here)):
        for run in (twice, program(twice)):
            with pytest.raises(errors.ArgumentError, match=r"donate"):
                run(value)
        for run in (afterwards, program(afterwards)):
            with pytest.raises(errors.ArrayDeleted, match="donated to the computation"):
                run(value)
    late = program(lambda v: (eat_here(v), put(v, sharding=there)))
    with pytest.raises(errors.ArrayDeleted, match=r"'pw\.put' uses"):
        late(put(small, sharding=here))


def test_programs_return_arrays() -> None:
    with pytest.raises(errors.ArgumentError, match="returns 'text'"):
        program(lambda: "text")()
    assert program(lambda x: None)(1) is None
    with pytest.raises(errors.ArgumentError, match="hashed"):
        program(lambda x: 1)({1, 2})
