"""Python functions on hosts: nodes of programs, off unless a host allows them."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pw
from pw.core.functions.parts import share_of
from pw.core.sharding import ArraySpec, DeviceAddress, Placement, Sharding
from pw.testing import InProcessCluster
from tests.stages.scripts import finish, start_client


@pytest.fixture(scope="module")
def mesh() -> Iterator[pw.Mesh]:
    with InProcessCluster(islands=1, devices_per_island=2):
        yield pw.Mesh(pw.make_virtual_device_set().add_slice(devices=2).devices, ("x",))


def test_it_stands_between_computations_of_a_program(mesh: pw.Mesh) -> None:
    def words(x: np.ndarray, *, scale: float) -> dict[str, np.ndarray]:
        assert isinstance(x, np.ndarray)
        return {"sorted": np.sort(x) * np.float32(scale), "length": np.int32(len(x))}

    shapes = {
        "sorted": jax.ShapeDtypeStruct((4,), jnp.float32),
        "length": jax.ShapeDtypeStruct((), jnp.int32),
    }
    on_host = pw.host_function(words, shapes, devices=mesh.devices)
    double = pw.jit(lambda x: x * 2, mesh=mesh, in_shardings=P("x"), out_shardings=P("x"))

    @pw.program
    def both(x):
        found = on_host(double(x), scale=10.0)
        return double(found["sorted"]), found["length"]

    for _ in range(3):
        doubled, length = both(np.array([3, 1, 2, 0], np.float32))
        np.testing.assert_array_equal(np.asarray(doubled), [0, 40, 80, 120])
        assert int(length) == 4


def test_its_arguments_can_be_donated_afterwards(mesh: pw.Mesh) -> None:
    total = pw.host_function(
        lambda x: x.sum(), jax.ShapeDtypeStruct((), jnp.float32), devices=mesh.devices
    )
    bump = pw.jit(lambda x: x + 1, mesh=mesh, donate_argnums=0)
    x = pw.put(np.zeros(1 << 16, np.float32), sharding=pw.NamedSharding(mesh, P()))
    totals = []
    for _ in range(20):
        totals.append(total(x))
        x = bump(x)
    assert [int(t) for t in totals] == [step << 16 for step in range(20)]


def test_what_it_raises_is_raised_where_the_value_is_read(mesh: pw.Mesh) -> None:
    def picky(x: np.ndarray) -> np.ndarray:
        raise ValueError("no such file")

    shape = jax.ShapeDtypeStruct((2,), jnp.float32)
    failed = pw.host_function(picky, shape, devices=mesh.devices)(np.ones(2, np.float32))
    after = pw.jit(lambda x: x + 1, mesh=mesh)(failed)
    with pytest.raises(pw.ComputationFailed, match="no such file") as caught:
        np.asarray(after)
    assert "picky" in "".join(caught.value.__notes__)


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (np.ones(3, np.float32), r"float32\[3\].*float32\[2\]"),
        (np.ones(2, np.float64), r"float64\[2\].*float32\[2\]"),
        ((np.ones(2, np.float32),), "is declared"),
    ],
)
def test_results_that_were_not_promised(mesh: pw.Mesh, result: object, words: str) -> None:
    shape = jax.ShapeDtypeStruct((2,), jnp.float32)
    failed = pw.host_function(lambda: result, shape, devices=mesh.devices)()
    with pytest.raises(pw.ResultMismatch, match=words):
        np.asarray(failed)


def test_bad_promises_and_calls_from_traced_functions(mesh: pw.Mesh) -> None:
    with pytest.raises(pw.ArgumentError, match="ShapeDtypeStruct"):
        pw.host_function(lambda: 1, (1, 2), devices=mesh.devices)
    shape = jax.ShapeDtypeStruct((2,), jnp.float32)
    on_host = pw.host_function(lambda x: x, shape, devices=mesh.devices)
    with pytest.raises(pw.TracingError, match=r"pw\.program"):
        pw.jit(lambda x: on_host(x) + 1, mesh=mesh)(np.ones(2, np.float32))


def test_a_process_that_ends_does_no_harm(mesh: pw.Mesh) -> None:
    shape = jax.ShapeDtypeStruct((), jnp.int32)
    where = pw.host_function(lambda: np.int32(os.getpid()), shape, devices=mesh.devices)
    ends = pw.host_function(lambda: os._exit(3), shape, devices=mesh.devices)
    before = int(where())
    assert before != os.getpid(), "it has a process of its own"
    with pytest.raises(
        pw.ComputationFailed, match="ended with exit code 3 while it ran '<lambda>'"
    ):
        np.asarray(ends())
    assert int(where()) not in (before, os.getpid())


def test_what_it_refers_to_must_be_picklable(mesh: pw.Mesh) -> None:
    lock = threading.Lock()
    shape = jax.ShapeDtypeStruct((), jnp.int32)
    function = pw.host_function(lambda: lock.locked(), shape, devices=mesh.devices)
    with pytest.raises(pw.ArgumentError, match=r"cannot be pickled.*lock.*inside the function"):
        function()


@pytest.mark.parametrize("makes_part", [False, True])
def test_results_are_split_over_the_devices(mesh: pw.Mesh, makes_part: bool) -> None:
    def whole() -> tuple[np.ndarray, dict[str, np.ndarray]]:
        rows = np.arange(12, dtype=np.int32).reshape(4, 3)
        return rows, {"same": np.ones(2, np.float32)}

    def part(*, part: pw.Part) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        rows, others = whole()
        assert (part.index, part.count) == (0, 1)
        return rows[part.slices[0]], {"same": others["same"][part.slices[1]["same"]]}

    like = jax.eval_shape(whole)
    function = pw.host_function(
        part if makes_part else whole, like, mesh=mesh, out_shardings=(P("x"), None)
    )
    rows, others = function()
    assert rows.sharding == pw.NamedSharding(mesh, P("x"))
    np.testing.assert_array_equal(np.asarray(rows), whole()[0])
    np.testing.assert_array_equal(np.asarray(others["same"]), [1, 1])


def test_a_split_that_does_not_fit(mesh: pw.Mesh) -> None:
    shape = jax.ShapeDtypeStruct((3,), jnp.int32)
    function = pw.host_function(lambda: 0, shape, mesh=mesh, out_shardings=P("x"))
    with pytest.raises(pw.ShardingError, match="size 3, which does not divide into 2"):
        function()
    with pytest.raises(pw.ArgumentError, match="not both"):
        pw.host_function(lambda: 0, shape, mesh=mesh, devices=mesh.devices)


SPLITS = [
    # how a result is split over hosts of two devices each; the parts of the hosts
    (Sharding(("x",), (4,), (("x",),)), [((0, 4), (0, 6)), ((4, 8), (0, 6))]),
    (Sharding(("x",), (4,), ()), [((0, 8), (0, 6))] * 2),
    (Sharding(("x", "y"), (2, 2), ((), ("y",))), [((0, 8), (0, 6))] * 2),
    (Sharding(("x", "y"), (2, 2), (("y",), ("x",))), [((0, 8), (0, 3)), ((0, 8), (3, 6))]),
]


@pytest.mark.parametrize(("sharding", "parts"), SPLITS)
def test_each_host_has_the_smallest_box_with_its_shards(
    sharding: Sharding, parts: list[Any]
) -> None:
    devices = [DeviceAddress(host, ordinal) for host in ("b", "a") for ordinal in range(2)]
    spec = ArraySpec((8, 6), "int32", sharding, Placement(1, (0, 1, 2, 3)))
    shares = [share_of("f", [spec], devices, host) for host in ("b", "a")]
    assert [share.boxes[0] for share in shares] == parts
    different = len(set(parts))
    assert [(share.index, share.count) for share in shares] == [
        (index % different, different) for index in range(2)
    ]
    with pytest.raises(pw.ResultMismatch, match=r"int64\[1\], but it is declared as int32\[8,6\]"):
        shares[0].cut([np.zeros(1, np.int64)], is_part=False)


SPLIT_OVER_HOSTS = """
    mesh = pw.Mesh(pw.make_virtual_device_set().add_slice(devices=4).devices, ("x",))
    like = jax.ShapeDtypeStruct((8, 2), jnp.int32)

    def rows(seed, *, part):
        assert part.count == 2 and part.slices[0] == slice(4 * part.index, 4 * part.index + 4)
        return np.full((4, 2), 10 * part.index + seed, np.int32)

    rows = pw.host_function(rows, like, mesh=mesh, out_shardings=P("x"))
    total = pw.jit(lambda x: x.sum(), mesh=mesh)
    print([int(total(rows(seed))) for seed in range(3)])

    def ends(*, part):
        if part.index:
            os._exit(3)
        return np.zeros((4, 2), np.int32)

    try:
        np.asarray(pw.host_function(ends, like, mesh=mesh, out_shardings=P("x"))())
    except pw.ComputationFailed as error:
        print("exit code 3" in str(error))
    print(int(total(rows(1))))
"""


@pytest.mark.processes
def test_each_host_makes_its_own_part() -> None:
    with pw.LocalCluster(
        hosts_per_island=2, devices_per_host=2, connect=False, allow_python=True
    ) as cluster:
        said = finish(start_client(cluster.address, SPLIT_OVER_HOSTS)).splitlines()
    assert said == ["[80, 96, 112]", "True", "96"]


@pytest.mark.processes
def test_workers_refuse_unless_their_owner_allows() -> None:
    body = """
        devices = pw.make_virtual_device_set().add_slice(devices=1).devices
        shape = jax.ShapeDtypeStruct((), jnp.int32)
        seen = pw.host_function(lambda: np.int32(os.getpid()), shape, devices=devices)()
        try:
            print("ran" if int(seen) != os.getpid() else "ran here")
        except pw.CompileError as error:
            print("--allow-python" in str(error))
    """
    for allowed, answer in ((False, "True"), (True, "ran")):
        with pw.LocalCluster(connect=False, allow_python=allowed) as cluster:
            assert finish(start_client(cluster.address, body)).strip() == answer
