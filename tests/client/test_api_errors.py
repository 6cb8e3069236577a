"""What goes wrong, as a user sees it: at once where it can be known, else where the value is read."""

from __future__ import annotations

import inspect
import re
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pw
from pw.client.connection import current, runtime
from pw.core.near import nearest
from pw.core.variables import VARIABLES
from pw.testing import InProcessCluster
from pw.transport.links import codec
from tests.stages.inside import number_of, traced_of, type_of
from tests.stages.stage import held, interrupted_in_its_wait, mesh_on, numbers, split


def _options(name: str) -> list[str]:
    """Names of the arguments with defaults of a function of pw."""
    fun = getattr(pw, name)
    if not fun.__module__.startswith("pw.") or name in ("IslandEvent", "Stream", "Schedule"):
        return []
    if isinstance(fun, type) and issubclass(fun, Exception):
        return []
    parameters = inspect.signature(fun).parameters.values()
    return [one.name for one in parameters if one.default is not one.empty]


TOO_LARGE = 1 << 44
"""Elements of an array that no host has memory for."""


@pytest.fixture
def cluster() -> Iterator[InProcessCluster]:
    with InProcessCluster(islands=2, devices_per_island=2) as cluster:
        yield cluster


@pytest.fixture
def east(cluster: InProcessCluster) -> pw.Mesh:
    return mesh_on(0)


@pytest.fixture
def west(cluster: InProcessCluster) -> pw.Mesh:
    return mesh_on(1)


def exhausting(mesh: pw.Mesh) -> Any:
    """A function that runs out of memory on its host."""

    def hungry(x: Any) -> Any:
        return jnp.broadcast_to(x, (TOO_LARGE,)) * 2

    return pw.jit(hungry, mesh=mesh)


# --- at once -------------------------------------------------------------------------------------------


def test_a_slice_larger_than_an_island(cluster: InProcessCluster) -> None:
    devices = pw.make_virtual_device_set()
    with pytest.raises(pw.InsufficientDevices, match=r"3.*2"):
        devices.add_slice(devices=3)
    with pytest.raises(pw.InsufficientDevices, match="island-7"):
        devices.add_slice(devices=1, island="island-7")
    with pytest.raises(pw.InsufficientDevices, match="TPU v9"):
        devices.add_slice(devices=1, kind="TPU v9")
    assert devices.add_slice(devices=2).size == 2


def test_a_mesh_over_two_islands(east: pw.Mesh, west: pw.Mesh) -> None:
    both = pw.Mesh([*east.devices, west.devices[0]], ("x",))
    assert np.array_equal(pw.put(np.arange(6), sharding=pw.NamedSharding(both, P("x"))), range(6))
    with pytest.raises(pw.PlacementError, match="different devices"):
        pw.jit(lambda a, b: a + b)(pw.put(1, east.devices[0]), pw.put(1, west.devices[0]))


def test_shardings_that_do_not_divide(east: pw.Mesh) -> None:
    for call in (
        lambda: pw.put(numbers(3), sharding=split(east)),
        lambda: pw.jit(lambda x: x, mesh=east, in_shardings=P("x"))(numbers(3)),
        lambda: pw.jit(lambda x: x, mesh=east, out_shardings=P("x"))(numbers(3)),
        lambda: pw.program(lambda x: pw.put(x, sharding=split(east)))(numbers(3)),
    ):
        with pytest.raises(pw.ShardingError, match="divide"):
            call()


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
def test_more_host_values_than_travel_with_a_call(
    east: pw.Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime, "MANY_ARGUMENTS", 3)
    monkeypatch.setattr(codec, "MAX_FRAME_BYTES", 2 * 4 * 4096)
    f = pw.jit(lambda x, rest: x + sum(map(jnp.sum, rest)), mesh=east, donate_argnums=0)
    x, values = pw.put(np.float32(1), sharding=pw.NamedSharding(east, P())), np.ones(1024, "f4")
    with pytest.raises(pw.ArgumentError, match=r"6 arguments.* 20480 bytes.*pw\.put"):
        f(x, [values] * 5)
    assert float(x) == 1, "it was not given away"
    assert float(f(x, [values] * 4)) == 1 + 4 * 1024


def test_wrong_calls(east: pw.Mesh) -> None:
    f = pw.jit(lambda a, b: {"sum": a["x"] @ b}, mesh=east, in_shardings=({"x": None}, None))
    good = {"x": np.ones((2, 3), np.float32)}
    for wrong, error in {
        "shape": (lambda: f(good, np.ones(4)), TypeError),
        "dtype": (lambda: f(good, np.array(["a"])), pw.ArgumentError),
        "tree": (lambda: f({"y": good["x"]}, np.ones(3)), pw.ArgumentError),
        "count": (lambda: f(good), pw.ArgumentError),
        "no array": (lambda: f(good, object()), pw.ArgumentError),
        "mapped axis": (
            lambda: pw.pmap(lambda x: x, devices=list(east.devices))(np.ones(3)),
            pw.ArgumentError,
        ),
        "names": (lambda: pw.jit(lambda x: x, mesh=east)(y=1), TypeError),
    }.values():
        with pytest.raises(error):
            wrong()
    np.testing.assert_array_equal(f(good, np.ones(3, np.float32))["sum"], [3, 3])


def test_a_traced_value_is_looked_at(east: pw.Mesh) -> None:
    f = pw.jit(lambda x: x + 1, mesh=east)

    @pw.program
    def p(x: Any) -> Any:
        return f(x) if f(x) > 0 else x

    with pytest.raises(pw.TracerError, match=r"bool.*test_api_errors\.py.*pw\.jit"):
        p(1.0)
    kept: list[Any] = []
    pw.program(lambda x: kept.append(f(x)) or f(x))(1.0)
    with pytest.raises(pw.TracerError, match="return it from the program"):
        pw.program(lambda: f(kept[0]))()
    assert float(f(1.0)) == 2  # the session goes on


@pytest.mark.parametrize("name", [name for name in pw.__all__ if _options(name)])
def test_a_wrong_keyword_is_answered_with_the_right_one(name: str) -> None:
    (right, *_) = _options(name)
    with pytest.raises(pw.ArgumentError, match=f"^{name} has no argument {right}s=; .*{right}"):
        getattr(pw, name)(**{f"{right}s": 1})


def test_the_nearest_of_some_names() -> None:
    cluster, sliced = _options("LocalCluster"), ("devices", "kind", "island", "hosts")
    for word, names, near in (
        ("hosts", cluster, "hosts_per_island"),
        ("device", ("devices", "donate_argnums"), "devices"),
        ("device", sliced, "devices"),
        ("memory", cluster, "device_memory"),
        ("memory", sliced, None),
        ("PW_ADRESS", ("PW_ADVICE", "PW_ADDRESS"), "PW_ADDRESS"),
        ("x", ("xs",), None),
    ):
        assert nearest(word, names) == near, word
    with pytest.raises(pw.ArgumentError, match="no argument colour=; there are devices, kind"):
        pw.client.arrays.devices.VirtualDeviceSet(None).add_slice(1, colour=1)  # type: ignore[call-overload]


def test_a_misspelt_variable_and_an_address_without_its_scheme(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PW_ADRESS", "tcp://127.0.0.1:7777")
    monkeypatch.setenv("PW_OF_MY_OWN", "1")
    current.disconnect()
    with (
        pytest.warns(UserWarning, match="PW_ADRESS; did you mean PW_ADDRESS") as warned,
        pytest.raises(pw.ConnectionFailed, match=r"did you mean tcp://10\.0\.0\.1:7777\?"),
    ):
        pw.connect("10.0.0.1:7777")
    assert len(warned) == 1
    monkeypatch.delenv("PW_ADRESS")
    with pytest.raises(pw.ConnectionFailed, match=r"tcp://host:port$"):
        pw.connect("http://10.0.0.1:7777")


@pytest.mark.parametrize("run", ["1.30", 12, [np.ones(3)]])
def test_a_run_is_not_cancelled_by_what_is_no_array(run: Any, east: pw.Mesh) -> None:
    with pytest.raises(pw.ArgumentError, match="pw cancel RUN"):
        pw.cancel(run)
    pw.cancel([])
    pw.cancel({"x": pw.put(numbers(4), sharding=pw.NamedSharding(east, P())), "step": 3})


def test_all_variables_are_known() -> None:
    written = "".join(path.read_text() for path in Path(pw.__path__[0]).rglob("*.py"))
    assert set(re.findall(r"\bPW_[A-Z]+(?:_[A-Z]+)*\b", written)) == set(VARIABLES)


def test_what_is_given_in_the_place_of_devices(east: pw.Mesh) -> None:
    x = numbers(4)
    for wrong, words in (
        (lambda: pw.put(x, east), r"pw\.NamedSharding\(mesh, spec\)"),
        (lambda: pw.put(x, P("x")), r"pw\.NamedSharding\(mesh, \w+\('x',\)\)"),
        (lambda: pw.put(x, 2), r"add_slice\(devices=2\)\.devices"),
        (lambda: pw.jit(lambda x: x, devices=2), r"add_slice\(devices=2\)\.devices"),
        (lambda: pw.jit(lambda x: x, devices=east), "mesh=mesh"),
        (lambda: pw.pmap(lambda x: x, devices=2), r"add_slice\(devices=2\)\.devices"),
        (lambda: pw.host_function(lambda x: x, x, devices=2), r"add_slice\(devices=2\)\.devices"),
    ):
        with pytest.raises(pw.PlacementError, match=words):
            wrong()
    devices = pw.make_virtual_device_set()
    for name in ("island", "kind"):
        with pytest.raises(pw.ArgumentError, match=f"{name}= as a name.*not 1"):
            devices.add_slice(devices=1, **{name: 1})  # type: ignore[call-overload]


def test_a_mesh_takes_slices(cluster: InProcessCluster) -> None:
    devices = pw.make_virtual_device_set()
    one, two = devices.add_slice(devices=1), devices.add_slice(devices=2, islands=2)
    for part in (one, two):
        mesh = pw.Mesh(part, ("x",))
        assert list(mesh.devices) == list(part.devices)
        assert np.array_equal(pw.put(numbers(2), sharding=pw.NamedSharding(mesh, P("x"))), [0, 1])


# --- where the value is read ---------------------------------------------------------------------------


def failures(east: pw.Mesh, west: pw.Mesh) -> list[pw.Array]:
    """A value that cannot be, and what depends on it near and far."""
    near = pw.jit(lambda x: x[0] + 1, mesh=east)
    far = pw.jit(lambda x: x * 2, mesh=west)
    both = pw.jit(lambda a, b: jnp.stack([a, b]), mesh=west)
    chained = pw.program(lambda a, b: near(both(a, b)))
    root = exhausting(east)(np.float32(1))
    child = near(root)
    grandchild = far(child)
    return [root, child, grandchild, chained(child, grandchild), grandchild + 1]


def test_out_of_memory_poisons_all_that_depends_on_it(east: pw.Mesh, west: pw.Mesh) -> None:
    for _ in range(2):
        for x in failures(east, west):
            for read in (x.block_until_ready, lambda x=x: np.asarray(x + 1 if x.ndim else x)):
                with pytest.raises(pw.OutOfDeviceMemory, match="host-0") as caught:
                    read()
                text = "".join(traceback.format_exception(caught.value))
                assert "Traceback on host-0" in text
                assert "pw/devices/jax/" in text
            assert x.is_ready()
        fine = pw.jit(lambda v: v + 1, mesh=east)(1.0)
        with pytest.raises(pw.OutOfDeviceMemory):
            pw.get([fine, x])
        assert float(fine) == 2  # the worker lives on
        assert float(pw.jit(lambda v: v + 1, mesh=west)(fine)) == 3


def test_what_does_not_compile_poisons_all_that_depends_on_it(
    cluster: InProcessCluster, east: pw.Mesh, west: pw.Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    f = pw.jit(lambda x: x * 3, mesh=east)
    g = pw.jit(lambda x: x + 1, mesh=west)
    backend: Any = cluster.hosts[0].backend
    install = backend.install

    def fails(key: bytes, computation: Any, artifact: bytes, devices: Any, done: Any) -> None:
        install(key, computation, artifact[:100], devices, done)

    monkeypatch.setattr(backend, "install", fails)
    broken = f(1.0)
    later = [g(broken), broken + 1, pw.program(lambda x: g(f(x)))(2.0)]
    for x in (broken, *later):
        with pytest.raises(pw.CompileError, match="host-0"):
            np.asarray(x)
    monkeypatch.undo()
    assert float(pw.jit(lambda x: x * 5, mesh=east)(2.0)) == 10


def test_arrays_of_another_client(cluster: InProcessCluster, east: pw.Mesh) -> None:
    x = pw.put(numbers(4), sharding=split(east))
    f = pw.jit(lambda v: v + 1, mesh=east)
    mine = pw.connect()
    other = cluster.client()
    current.use(other)
    try:
        there = mesh_on(0)
        for use in (
            lambda: pw.jit(lambda v: v, mesh=there)(x),
            lambda: pw.jit(lambda v: v + jnp.sum(jnp.asarray(x) + x), mesh=there)(1.0),
            lambda: pw.put(x, sharding=split(there)),
            lambda: pw.program(lambda v: pw.jit(lambda a: a, mesh=there)(v))(x),
        ):
            with pytest.raises(pw.NotOwner, match=r"pw\.get\(x\)"):
                use()
        np.testing.assert_array_equal(pw.jit(lambda v: v, mesh=there)(pw.get(x)), numbers(4))
        # Not by its number either: the hosts and the controller look for themselves.
        with pytest.raises(pw.Error):
            other.fetch(number_of(x), type_of(x).spec).result(60)
        other.delete([number_of(x)])
    finally:
        current.use(mine)
    np.testing.assert_array_equal(f(x), numbers(4) + 1)
    other.close()
    np.testing.assert_array_equal(f(x), numbers(4) + 1)


# --- the end of a session ------------------------------------------------------------------------------


def test_disconnecting_with_work_in_flight_and_connecting_again(cluster: InProcessCluster) -> None:
    mesh = mesh_on(0)
    f = pw.jit(lambda x: x + 1, mesh=mesh)
    anywhere = pw.jit(lambda x: x * 2)
    program = pw.program(lambda x: anywhere(x))
    f(1.0).block_until_ready()
    fetched = pw.put(numbers(4), sharding=split(mesh))
    np.testing.assert_array_equal(fetched, numbers(4))
    caught: list[BaseException] = []

    def read(x: Any) -> None:
        try:
            np.asarray(x)
        except BaseException as error:  # noqa: BLE001 - looked at below
            caught.append(error)

    with held(cluster):
        pending = f(2.0)
        unread = f(pending)
        started = pending.start_fetch()
        reader = threading.Thread(target=read, args=(pending,))
        reader.start()
        pw.disconnect()
        reader.join(60)
        assert not reader.is_alive()
    assert isinstance(caught[0], pw.Disconnected)
    assert isinstance(started.exception(0), pw.Disconnected)
    for use in (
        lambda: np.asarray(unread),
        lambda: np.asarray(fetched),
        unread.block_until_ready,
        unread.is_ready,
        lambda: f(1.0),
        lambda: f(fetched),
        lambda: fetched + 1,
        lambda: pw.put(1, sharding=split(mesh)),
    ):
        with pytest.raises(pw.Disconnected):
            use()
    unread.delete()
    assert unread.is_deleted()
    assert fetched.shape == (4,)
    current.use(cluster.client())
    assert float(anywhere(3.0)) == 6
    assert float(program(3.0)) == 6
    assert float(pw.jit(lambda x: x + 1, mesh=mesh_on(0))(1.0)) == 2


# --- where -----------------------------------------------------------------------------------------------


def test_devices_of_this_process_are_named_as_such(
    cluster: InProcessCluster, east: pw.Mesh
) -> None:
    here = jax.make_mesh((1,), ("x",))
    own = jax.sharding.NamedSharding(here, P())
    f = pw.jit(lambda x: x, mesh=east, in_shardings=own)
    for use in (
        lambda: pw.put(1.0, own),
        lambda: pw.put(1.0, jax.devices()[0]),
        lambda: pw.jit(lambda x: x, mesh=here),
        lambda: f(1.0),
    ):
        with pytest.raises(pw.Error, match="whose devices are this process's own"):
            use()


def test_two_meshes_that_read_alike_are_told_apart(cluster: InProcessCluster) -> None:
    devices = pw.make_virtual_device_set()
    one, other = (pw.Mesh(devices.add_slice(1, island="island-0").devices, "x") for _ in range(2))
    x, y = (pw.put(1.0, pw.NamedSharding(mesh, P())) for mesh in (one, other))
    with pytest.raises(pw.PlacementError, match=r"devices 0 of slice \d+ and .* of slice \d+\)"):
        pw.jit(lambda x, y: x + y)(x, y)
    f = pw.jit(lambda x: x, mesh=one, in_shardings=pw.NamedSharding(other, P()))
    with pytest.raises(pw.ShardingError, match=r"of slice \d+ was given to .* of slice \d+;"):
        f(x)


def test_the_argument_of_a_call_in_a_program_is_named(
    cluster: InProcessCluster, east: pw.Mesh
) -> None:
    step = pw.jit(lambda x: x["a"], mesh=east)
    program = pw.program(lambda x, y: step({"a": x, "b": y}))
    with pytest.raises(pw.ArgumentError, match=r"<lambda>: argument 0\['b'\]: 'no array'"):
        program(1.0, "no array")


# --- Ctrl-C --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["asarray", "block", "get"])
def test_ctrl_c_while_waiting(how: str, cluster: InProcessCluster, east: pw.Mesh) -> None:
    wait: dict[str, Callable[[Any], Any]] = {
        "asarray": np.asarray,
        "block": pw.block_until_ready,
        "get": lambda x: pw.get([x, x]),
    }
    f = pw.jit(lambda x: x + 1, mesh=east)
    f(numbers(4)).block_until_ready()
    with held(cluster):
        x = f(numbers(4))
        with interrupted_in_its_wait():
            wait[how](x)
        assert not x.is_ready()
        y = f(x)  # the session is usable
    np.testing.assert_array_equal(x, numbers(4) + 1)
    np.testing.assert_array_equal(y, numbers(4) + 2)
    assert not pw.connect().forked


# --- another platform ----------------------------------------------------------------------------------


def test_an_artifact_for_cuda_is_made_without_one(
    cluster: InProcessCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a host that has none refuses it with words."""
    mesh = mesh_on(0)
    monkeypatch.setattr(mesh.devices[0].slice, "platform", "cuda")
    w = pw.put(numbers(1024), sharding=split(mesh))
    f = pw.jit(
        lambda k, x: jnp.linalg.eigvalsh(jax.random.normal(k, (4, 4))) * x + w[:4], mesh=mesh
    )
    result = f(jax.random.key(0), numbers(4))
    traced = traced_of(f)
    assert b"cusolver" in traced.artifact
    with pytest.raises(pw.CompileError, match="cusolver"):
        np.asarray(result)
