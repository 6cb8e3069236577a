"""Computations of kind STABLEHLO on the devices of one process: modules as JAX's remote protocol sends them."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from pw.core.errors import ErrorReport
from pw.core.messages import Detail
from pw.core.programs.plan import BoxCopy
from pw.core.programs.stablehlo import Facts, Stablehlo, encode, spec_of_shards
from pw.core.sharding import Placement
from pw.devices.host.backend import Move
from pw.devices.host.value import Value
from tests.devices.test_jax_backend import (
    BOUND_S,
    Host,
    address,
    addresses,
    on_host,
    open_host,
    whole,
)
from tests.stages.jax_releases import RESULTS_IN_HOST_MEMORY
from tests.stages.lowered import computation_of, like, over, stablehlo_of

EIGHT = Placement(0, tuple(range(8)))
FOUR = Placement(0, (0, 1, 2, 3))
ONE = Placement(0, (0,))

stacked = partial(spec_of_shards, is_stacked=True)
replicated = partial(spec_of_shards, is_stacked=False)


async def examine(
    host: Host, key: bytes, code: Stablehlo, devices: int, detail: Detail = Detail.FACTS
) -> Any:
    future, done = host.answer()
    addresses = tuple(address(ordinal) for ordinal in range(devices))
    host.backend.compile(key, encode(code), addresses, detail, done)
    return await asyncio.wait_for(future, BOUND_S)


def sum_and_next(x: Any, y: Any) -> Any:
    return (x @ y).sum(axis=0), x + 1


def sums(devices: int, **jit: Any) -> Stablehlo:
    args = [like((16, 8), sharding=over(devices, "x")), like((8, 8), sharding=over(devices))]
    return stablehlo_of(sum_and_next, args, **jit)


@on_host
async def test_a_module_over_four_devices_takes_and_gives_shards(host: Host) -> None:
    code = sums(4, donate_argnums=0)
    x_spec, y_spec = stacked((4, 8), "float32", FOUR), replicated((8, 8), "float32", FOUR)
    sums_spec = replicated((8,), "float32", FOUR)
    computation = computation_of(code, [x_spec, y_spec], [sums_spec, x_spec], (0,))
    assert await host.install(b"k", computation) is None
    x, y = np.arange(128, dtype=np.float32).reshape(16, 8), np.eye(8, dtype=np.float32)
    given = host.build(x_spec, x)
    total, following = host.execute(b"k", given, host.build(y_spec, y), results=2)
    np.testing.assert_array_equal(await host.read(total, sums_spec), x.sum(axis=0))
    np.testing.assert_array_equal(await host.read(following, x_spec), x + 1)
    assert given.error is not None
    assert given.error.kind == "ArrayDeleted"
    assert host.backend.counters()["donations_copied"] == 0


@on_host
async def test_facts_are_what_the_compiler_decided(host: Host) -> None:
    facts = await examine(host, b"1/compile/1", sums(4, donate_argnums=0), 4)
    assert isinstance(facts, Facts)
    assert facts.name == "jit_sum_and_next"
    assert [(one.shape, one.dtype) for one in facts.inputs] == [
        ((4, 8), "float32"),
        ((8, 8), "float32"),
    ]
    assert [(one.shape, one.dtype) for one in facts.outputs] == [
        ((8,), "float32"),
        ((4, 8), "float32"),
    ]
    assert facts.donated == (0,)
    assert [one.minor_to_major for one in facts.outputs] == [(0,), (1, 0)]
    assert {one.memory_kind for one in (*facts.inputs, *facts.outputs)} == {"device"}
    assert facts.argument_bytes == 4 * (4 * 8 + 8 * 8)
    total, following = (
        jax._src.lib.xla_client.HloSharding.from_proto(proto)
        for proto in map(parsed, facts.outputs)
    )  # type: ignore[attr-defined]
    assert total.is_replicated()
    assert following.tile_assignment_dimensions() == [4, 1]


def parsed(one: Any) -> Any:
    sharding = jax._src.lib.xla_client.OpSharding()  # type: ignore[attr-defined]
    sharding.ParseFromString(one.sharding)
    return sharding


@on_host
async def test_text_and_costs_come_on_demand(host: Host) -> None:
    code = stablehlo_of(lambda x: x @ x, [like((8, 8))])
    text = await examine(host, b"1/compile/1", code, 1, Detail.TEXT)
    assert text.startswith("HloModule")
    assert "f32[8,8]" in text
    costs = await examine(host, b"1/compile/2", code, 1, Detail.COSTS)
    assert costs["flops"] == 2 * 8**3
    assert host.backend.counters()["compilations"] == 1


@on_host
async def test_a_program_shares_the_executable_of_a_question(host: Host) -> None:
    """Until the key of the question is forgotten; then the program alone keeps it."""
    code, spec = stablehlo_of(lambda x: x + 1, [like((8,))]), replicated((8,), "float32", ONE)
    assert isinstance(await examine(host, b"1/compile/1", code, 1), Facts)
    assert await host.install(b"a", computation_of(code, [spec], [spec])) is None
    host.backend.forget(b"1/compile/1")
    assert isinstance(await examine(host, b"1/compile/2", code, 1), Facts)
    assert host.backend.counters()["compilations"] == 1
    host.backend.forget(b"1/compile/2")
    host.backend.forget(b"a")
    assert isinstance(await examine(host, b"1/compile/3", code, 1), Facts)
    assert host.backend.counters()["compilations"] == 2
    host.backend.forget(b"1/compile/3")
    assert isinstance(
        await examine(host, b"1/compile/4", stablehlo_of(jnp.sin, [like((8,))]), 1), Facts
    )
    assert host.backend.counters()["installed"] == 1


def psum_of(devices: int) -> Stablehlo:
    def body(x: Any) -> Any:
        return jax.lax.psum(x, "x"), x * jax.lax.axis_index("x").astype(np.float32)

    mapped = jax.shard_map(
        body,
        mesh=over(devices).mesh,
        in_specs=PartitionSpec("x"),
        out_specs=(PartitionSpec(), PartitionSpec("x")),
    )
    return stablehlo_of(mapped, [like((devices, 4), sharding=over(devices, "x"))])


@on_host
async def test_a_collective_over_eight_devices(host: Host) -> None:
    x_spec, total_spec = stacked((1, 4), "float32", EIGHT), replicated((1, 4), "float32", EIGHT)
    computation = computation_of(psum_of(8), [x_spec], [total_spec, x_spec])
    assert await host.install(b"k", computation) is None
    x = np.arange(32, dtype=np.float32).reshape(8, 4)
    total, scaled = host.execute(b"k", host.build(x_spec, x), results=2)
    np.testing.assert_array_equal(await host.read(total, total_spec), x.sum(0, keepdims=True))
    np.testing.assert_array_equal(await host.read(scaled, x_spec), x * np.arange(8)[:, None])


@on_host
async def test_devices_in_another_order(host: Host) -> None:
    """The shards of a computation lie in the order of its devices, not in that of the host's."""
    backwards = Placement(0, (3, 2, 1, 0))
    spec = stacked((1,), "float32", backwards)
    computation = computation_of(
        psum_of(4),
        [msgspec.structs.replace(spec, shape=(4, 4))],
        [replicated((1, 4), "float32", backwards), stacked((1, 4), "float32", backwards)],
    )
    assert await host.install(b"k", computation) is None
    x_spec = stacked((1, 4), "float32", backwards)
    x = np.arange(16, dtype=np.float32).reshape(4, 4)
    _, scaled = host.execute(b"k", host.build(x_spec, x), results=2)
    np.testing.assert_array_equal(await host.read(scaled, x_spec), x * np.arange(4)[:, None])


DTYPES = [
    "bool",
    "int4",
    "uint2",
    "int8",
    "int64",
    "float64",
    "bfloat16",
    "float8_e4m3fn",
    "complex128",
]


@pytest.mark.parametrize("dtype", DTYPES)
def test_types_are_the_clients(dtype: str) -> None:
    """Nothing narrows, and results of small types can be arguments again."""

    @on_host
    async def run(host: Host) -> None:
        spec = replicated((8,), dtype, ONE)
        with jax.enable_x64(True):
            code = stablehlo_of(lambda x: x[::-1], [jax.ShapeDtypeStruct((8,), jnp.dtype(dtype))])
        assert await host.install(b"k", computation_of(code, [spec], [spec])) is None
        x = np.array([0, 1, 0, 1, 1, 1, 0, 0]).astype(jnp.dtype(dtype))
        (once,) = host.execute(b"k", host.build(spec, x))
        (twice,) = host.execute(b"k", once)
        np.testing.assert_array_equal(await host.read(once, spec), x[::-1])
        np.testing.assert_array_equal(await host.read(twice, spec), x)

    run()


@on_host
async def test_linear_algebra_and_loops(host: Host) -> None:
    def solve(x: Any, key: Any) -> Any:
        noise = jax.random.normal(jax.random.wrap_key_data(key), (3, 3), jnp.float64)
        looped = jax.lax.fori_loop(0, 3, lambda _, y: y + 1, x)
        return jnp.linalg.inv(x) + 0 * noise, jnp.linalg.qr(x)[1], jax.lax.top_k(looped, 3)[0]

    spec, key = replicated((3, 3), "float64", ONE), replicated((2,), "uint32", ONE)
    code = stablehlo_of(solve, [like((3, 3), "float64"), like((2,), "uint32")])
    assert await host.install(b"k", computation_of(code, [spec, key], [spec] * 3)) is None
    x = 2 * np.eye(3)
    inverse, _, top = host.execute(b"k", host.build(spec, x), host.build(key, [0, 1]), results=3)
    np.testing.assert_allclose(await host.read(inverse, spec), np.eye(3) / 2)
    np.testing.assert_allclose((await host.read(top, spec))[:, 0], [5, 5, 5])


@on_host
async def test_an_argument_that_is_still_needed_is_copied(host: Host) -> None:
    code, spec = (
        stablehlo_of(lambda x: x + 1, [like((8,))], donate_argnums=0),
        replicated((8,), "float32", ONE),
    )
    assert await host.install(b"k", computation_of(code, [spec], [spec], (0,))) is None
    x = host.build(spec, np.arange(8, dtype=np.float32))
    (kept,) = host.execute(b"k", x, copied=(0,))
    (made,) = host.execute(b"k", x)
    for value in (kept, made):
        np.testing.assert_array_equal(await host.read(value, spec), np.arange(8) + 1)
    report = await host.read(x, spec)
    assert isinstance(report, ErrorReport)
    assert report.kind == "ArrayDeleted"
    assert host.backend.counters()["donations_copied"] == 1


@on_host
async def test_an_argument_whose_shards_come_in_another_order(host: Host) -> None:
    """No edge moves it, because each device has what it needs."""
    spec = replicated((8,), "float32", FOUR)
    backwards = replicated((8,), "float32", Placement(0, (3, 2, 1, 0)))
    code = stablehlo_of(lambda x: x + 1, [like((8,), sharding=over(4))], out_shardings=over(4))
    assert await host.install(b"k", computation_of(code, [spec], [spec])) is None
    x = np.arange(8, dtype=np.float32)
    (made,) = host.execute(b"k", host.build(backwards, x))
    np.testing.assert_array_equal(await host.read(made, spec), x + 1)


def _kind(value: Value) -> str:
    """The memory that the shards of a value are really in."""
    array: Any = value.payload
    (kind,) = {shard.data.sharding.memory_kind for shard in array.addressable_shards}
    return str(kind)


@on_host
async def test_arrays_in_host_memory(host: Host) -> None:
    """They are built, moved, computed with, donated and read there."""
    there = stacked((4,), "float32", FOUR, memory="pinned_host")
    here = stacked((4,), "float32", FOUR)
    x = np.arange(16, dtype=np.float32)
    lies = over(4, "x")
    args = [like((16,), sharding=lies.with_memory_kind("pinned_host"))]

    def from_host(x: Any) -> Any:
        x = jax.device_put(x, lies.with_memory_kind("device")) + 1
        return x, jax.device_put(x, lies.with_memory_kind("pinned_host"))

    if RESULTS_IN_HOST_MEMORY:
        second, other = there, here
    else:
        second, other = here, there
    code = stablehlo_of(from_host, args)
    facts = await examine(host, b"1/compile/1", code, 4)
    kinds = [one.memory_kind for one in (*facts.inputs, *facts.outputs)]
    kind, wrong = (spec.memory or "device" for spec in (second, other))
    assert kinds == ["pinned_host", "device", kind]
    report = await host.install(b"wrong", computation_of(code, [there], [here, other]))
    assert report is not None
    assert f"{kind!r}, not {wrong!r}" in report.message
    assert await host.install(b"k", computation_of(code, [there], [here, second])) is None
    given = host.build(there, x)
    on_device, on_host_side = host.execute(b"k", given, results=2)
    for value, spec in ((on_device, here), (on_host_side, second)):
        np.testing.assert_array_equal(await host.read(value, spec), x + 1)
    assert (_kind(given), _kind(on_device), _kind(on_host_side)) == ("pinned_host", "device", kind)
    pieces = [whole(here)] * 4
    for source, source_spec, spec in ((given, there, here), (on_device, here, there)):
        moved = Value()
        parts = tuple(BoxCopy(at, box, (at,), box) for at, box in enumerate(pieces))
        devices = addresses(spec)
        host.backend.submit([Move(source, source_spec, devices, moved, spec, devices, parts)])
        wanted = await host.read(source, source_spec)
        np.testing.assert_array_equal(await host.read(moved, spec), wanted)
        assert _kind(moved) == (spec.memory or "device")
        assert not moved.shared


def _native(x: Any) -> Any:
    return jax.ffi.ffi_call("open_the_door", jax.ShapeDtypeStruct((8,), np.float32))(x)


def _printing(x: Any) -> Any:
    jax.debug.print("{}", x)
    return x


def _one(**changes: Any) -> Any:
    """A computation that adds one, with other fields."""
    spec = replicated((8,), "float32", ONE)
    computation, artifact = computation_of(
        stablehlo_of(lambda x: x + 1, [like((8,))]), [spec], [spec]
    )
    return msgspec.structs.replace(computation, **changes), artifact


def _marked(x: Any) -> Any:
    call = jax.ffi.ffi_call("LayoutConstraint", jax.ShapeDtypeStruct((1 << 20,), np.float32))
    return call(x)[:8]


def _of(code: Stablehlo, count: int = 1) -> Any:
    spec = replicated((8,), "float32", Placement(0, tuple(range(count))))
    return computation_of(code, [spec], [spec])


def _with_options(**options: Any) -> Any:
    return _of(stablehlo_of(lambda x: x + 1, [like((8,))], compiler_options=options))


REFUSED = {
    "a native function": (lambda: _of(stablehlo_of(_native, [like((8,))])), "'open_the_door'"),
    "a callback that is not declared": (
        lambda: _of(stablehlo_of(_printing, [like((8,))])),
        "xla_ffi_python_cpu_callback",
    ),
    "garbage": (
        lambda: _of(msgspec.structs.replace(stablehlo_of(lambda x: x, [like((8,))]), module=b"no")),
        "code of the function cannot be read",
    ),
    "garbled options": (
        lambda: _of(
            msgspec.structs.replace(stablehlo_of(lambda x: x, [like((8,))]), options=b"\xff")
        ),
        "0 replicas of 0 partitions",
    ),
    "no artifact": (lambda: (_one()[0], b"\xc1"), "damaged on its way"),
    "more devices than the options say": (
        lambda: _of(stablehlo_of(lambda x: x + 1, [like((8,))]), 2),
        "1 replicas of 1 partitions, and has 2 devices",
    ),
    "an option that writes files": (
        lambda: _with_options(xla_dump_to="/tmp/mine"),
        "'xla_dump_to' is not allowed",
    ),
    "a mark that changes a type": (
        lambda: _of(stablehlo_of(lambda x: _marked(x), [like((8,))])),
        "'LayoutConstraint' with a result of another type",
    ),
    "an option that does not exist": (
        lambda: _with_options(xla_no_such_thing="1"),
        "xla_no_such_thing",
    ),
    "other arguments": (lambda: _one(inputs=(replicated((9,), "float32", ONE),)), "arguments"),
    "more arguments": (lambda: _one(inputs=(replicated((8,), "float32", ONE),) * 2), "arguments"),
    "other results": (lambda: _one(outputs=(replicated((8,), "int32", ONE),)), "results"),
    "results elsewhere": (
        lambda: _one(outputs=(replicated((8,), "float32", Placement(0, (1,))),)),
        "lie on other devices",
    ),
    "another donation": (lambda: _one(donated=(0,)), "takes the buffers of its arguments ()"),
}


FOR_OTHERS = {"a native function", "an option that writes files", "a mark that changes a type"}
"""What could harm other clients of the host."""


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_compiled_is_refused(case: str) -> None:
    make, words = REFUSED[case]

    @on_host
    async def run(host: Host) -> None:
        report = await host.install(b"k", make())
        assert report is not None
        kind = "CodeRefused" if case in FOR_OTHERS else "CompileError"
        assert (report.kind, words in report.message) == (kind, True), report.message
        assert host.backend.counters()["installed"] == 0
        assert await host.install(b"k", _one()) is None

    run()


def test_an_executable_outlives_its_process(tmp_path: Path) -> None:
    """In the folder of executables; its facts are the same."""
    code, spec = sums(4, donate_argnums=0), stacked((4, 8), "float32", FOUR)
    other, total = replicated((8, 8), "float32", FOUR), replicated((8,), "float32", FOUR)

    async def run() -> tuple[Facts, dict[str, int], Any]:
        async with open_host(tmp_path) as host:
            facts = await examine(host, b"1/compile/1", code, 4)
            computation = computation_of(code, [spec, other], [total, spec], (0,))
            assert await host.install(b"k", computation) is None
            x = np.arange(128, dtype=np.float32).reshape(16, 8)
            made, _ = host.execute(
                b"k", host.build(spec, x), host.build(other, np.eye(8)), results=2
            )
            return facts, host.backend.counters(), await host.read(made, total)

    facts, counters, made = asyncio.run(run())
    assert (counters["compilations"], counters["executables_loaded"]) == (1, 0)
    again, counters, loaded = asyncio.run(run())
    assert (counters["compilations"], counters["executables_loaded"]) == (0, 1)
    assert again == facts
    np.testing.assert_array_equal(loaded, made)
