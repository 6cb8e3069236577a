"""The JAX backend keeps the promises of `pw.devices.host.backend` on the CPU devices of one process."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import sys
import tempfile
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import jax
import jax.export
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest
from jax._src.config import traceback_in_locations_limit
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from pw.client.computations.stablehlo import artifact_of
from pw.core.errors import ErrorReport
from pw.core.programs.plan import BoxCopy
from pw.core.programs.program import Computation, Kind
from pw.core.sharding import ArraySpec, DeviceAddress, Placement, Sharding, dtype_of
from pw.devices.host.backend import Build, Execute, Move, Op, Read, RunFunction, Watch
from pw.devices.host.value import Value
from pw.devices.jax import answers as jax_answers
from pw.devices.jax import enqueue, execution
from pw.devices.jax.backend import JaxBackend
from pw.devices.jax.layouts import Layouts, aligned_empty
from pw.devices.jax.quick import CALLS, CLOCK_S, PROCESSOR_S, SOON_S
from pw.devices.jax.values import Failures
from tests.stages.daemons import until_true

HOST = "h0"
BOUND_S = 60.0
ONE = Sharding(("x",), (1,))
FOUR = Sharding(("x",), (4,), (("x",),))
REPLICATED = Sharding(("x",), (4,))


def address(ordinal: int) -> DeviceAddress:
    return DeviceAddress(HOST, ordinal)


def addresses(spec: ArraySpec) -> tuple[DeviceAddress, ...]:
    return tuple(address(ordinal) for ordinal in spec.placement.devices)


def spec_of(
    shape: tuple[int, ...] = (8,),
    dtype: str = "float32",
    sharding: Sharding = ONE,
    devices: tuple[int, ...] | None = None,
) -> ArraySpec:
    placement = Placement(0, devices or tuple(range(sharding.device_count)))
    return ArraySpec(shape, dtype, sharding, placement)


def whole(spec: ArraySpec) -> tuple[tuple[int, int], ...]:
    return tuple((0, size) for size in spec.sharding.shard_shape(spec.shape))


def export(
    function: Callable[..., Any],
    inputs: Sequence[ArraySpec],
    outputs: Sequence[ArraySpec],
    donated: tuple[int, ...] = (),
    platforms: Sequence[str] = ("cpu",),
) -> tuple[Computation, bytes]:
    """What a client makes of `function`, which takes arrays and returns a tuple of arrays, without lines."""

    def lies(spec: ArraySpec) -> NamedSharding:
        mesh = AbstractMesh(spec.sharding.axis_sizes or (1,), spec.sharding.axis_names or ("x",))
        axes = [names or None for names in spec.sharding.spec]
        return NamedSharding(mesh, PartitionSpec(*axes))

    with jax.enable_x64(True), traceback_in_locations_limit(0):
        exported = jax.export.export(
            jax.jit(
                function,
                in_shardings=tuple(map(lies, inputs)),
                out_shardings=tuple(map(lies, outputs)),
                keep_unused=True,
            ),
            platforms=platforms,
        )(*(jax.ShapeDtypeStruct(spec.shape, dtype_of(spec.dtype)) for spec in inputs))
    artifact = artifact_of(exported.mlir_module_serialized, donated, ())
    placement = (*inputs, *outputs)[0].placement
    return (
        Computation(
            function.__name__,
            hashlib.sha256(artifact).digest(),
            placement,
            tuple(inputs),
            tuple(outputs),
            donated,
        ),
        artifact,
    )


def python(
    function: Callable[..., Any], inputs: Sequence[ArraySpec], outputs: Sequence[ArraySpec]
) -> tuple[Computation, bytes]:
    """Return a host function, which runs in another process."""

    def of_share(_: Any, *arrays: Any) -> Any:
        return function(*arrays)

    artifact = cloudpickle.dumps(of_share)
    return pickled(function.__name__, artifact, inputs, outputs), artifact


def pickled(
    name: str, artifact: bytes, inputs: Sequence[ArraySpec], outputs: Sequence[ArraySpec]
) -> Computation:
    digest, placement = hashlib.sha256(artifact).digest(), outputs[0].placement
    return Computation(name, digest, placement, tuple(inputs), tuple(outputs), kind=Kind.PYTHON)


class Opened:
    """An event of all processes."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._path = str(Path(self._folder.name) / "opened")

    def set(self) -> None:
        """Let all go on that wait."""
        Path(self._path).touch()

    def held(self) -> Callable[[Any], Any]:
        """Return a function that adds one, once this is set."""
        path, bound_s = self._path, BOUND_S

        def add_one_held(x: Any) -> Any:
            import os
            import time

            until_s = time.monotonic() + bound_s
            while not os.path.exists(path):
                assert time.monotonic() < until_s
                time.sleep(0.005)
            return [x + 1]

        return add_one_held


class Clock:
    """The clocks of the loop and of the execute thread, which stand still between two steps of a test."""

    def __init__(self) -> None:
        self.clock_s = 1.0
        self.processor_s = 1.0

    def monotonic(self) -> float:
        return self.clock_s

    def thread_time(self) -> float:
        return self.processor_s


class Host:
    """A backend with its asynchronous answers turned into awaitables."""

    def __init__(self, backend: JaxBackend, clock: Clock | None = None) -> None:
        self.backend = backend
        self.clock = clock or Clock()
        self.loop = asyncio.get_running_loop()

    def answer(self) -> tuple[asyncio.Future[Any], Callable[[Any], None]]:
        future = self.loop.create_future()

        def done(result: Any) -> None:
            assert threading.current_thread() is threading.main_thread()
            assert not future.done(), "a done was called twice"
            future.set_result(result)

        return future, done

    async def install(self, key: bytes, exported: tuple[Computation, bytes]) -> ErrorReport | None:
        told = await self.installed(key, exported)
        return told if isinstance(told, ErrorReport) else None

    async def installed(self, key: bytes, exported: tuple[Computation, bytes]) -> Any:
        """What went wrong, or the bytes of temporaries."""
        future, done = self.answer()
        computation, artifact = exported
        devices = tuple(address(ordinal) for ordinal in computation.placement.devices)
        self.backend.install(key, computation, artifact, devices, done)
        return await asyncio.wait_for(future, BOUND_S)

    def build(self, spec: ArraySpec, array: Any) -> Value:
        """Submit a build of `array`, without waiting for it."""
        value = Value()
        array = np.asarray(array, dtype_of(spec.dtype))
        parts = [
            (
                (position,),
                whole(spec),
                np.ascontiguousarray(
                    array[tuple(slice(start, stop) for start, stop in spec.box(position))]
                ).reshape(spec.sharding.shard_shape(spec.shape)),
            )
            for position in range(spec.sharding.device_count)
        ]
        self.backend.submit([Build(value, spec, addresses(spec), parts)])
        return value

    def reading(self, value: Value, spec: ArraySpec) -> tuple[asyncio.Future[Any], Read]:
        future, done = self.answer()
        boxes = [(position, whole(spec)) for position in range(spec.sharding.device_count)]
        return future, Read(value, boxes, spec, addresses(spec), done)

    async def read(self, value: Value, spec: ArraySpec) -> Any:
        """The whole array, or the report of what went wrong."""
        future, op = self.reading(value, spec)
        self.backend.submit([op])
        return joined(await asyncio.wait_for(future, BOUND_S), spec)

    async def watch(self, *values: Value) -> ErrorReport | None:
        future, done = self.answer()
        self.backend.submit([Watch(values, done)])
        return await asyncio.wait_for(future, BOUND_S)

    def execute(self, key: bytes, *args: Value, results: int = 1, **more: Any) -> tuple[Value, ...]:
        made = tuple(Value() for _ in range(results))
        self.backend.submit([Execute(key, args, made, **more)])
        return made


def joined(shards: Any, spec: ArraySpec) -> Any:
    if isinstance(shards, ErrorReport):
        return shards
    array = np.empty(spec.shape, dtype_of(spec.dtype))
    for position, shard in enumerate(shards):
        assert shard.shape == spec.sharding.shard_shape(spec.shape)
        assert shard.dtype == array.dtype
        array[tuple(slice(start, stop) for start, stop in spec.box(position))] = shard
    return array


@asynccontextmanager
async def open_host(folder: Path | None = None) -> AsyncIterator[Host]:
    devices = jax.devices()
    assert len(devices) >= 8, "these tests need JAX_NUM_CPU_DEVICES=8"
    loop, clock = asyncio.get_running_loop(), Clock()
    backend = JaxBackend(
        loop, HOST, lambda at: devices[at.ordinal], allow_python=True, compile_cache=folder
    )
    with pytest.MonkeyPatch.context() as patched:
        for module in (enqueue, execution):
            patched.setattr(module, "time", clock)
        try:
            yield Host(backend, clock)
        finally:
            backend.close()


def on_host(test: Callable[[Host], Any]) -> Callable[[], None]:
    """Run an async test with a host."""

    def run() -> None:
        async def main() -> None:
            raised: list[Any] = []
            asyncio.get_running_loop().set_exception_handler(lambda _, told: raised.append(told))
            async with open_host() as host:
                await test(host)
            assert not raised

        asyncio.run(main())

    run.__name__ = test.__name__
    run.__doc__ = test.__doc__
    return run


class Gate:
    """Holds the execute thread, so that a test decides what is submitted while it is busy."""

    def __init__(self, host: Host) -> None:
        self._event = threading.Event()
        host.backend.submit([RunFunction(lambda: self._event.wait(BOUND_S) and None)])

    def open(self) -> None:
        self._event.set()


def add_one(x: Any) -> Any:
    return (x + 1,)


def slow_add(x: Any) -> Any:
    """Adds one, after enough work that the result is not ready at once."""
    y = jax.lax.fori_loop(0, 30, lambda _, m: m @ m / 300.0, jnp.full((300, 300), 1.0, x.dtype))
    return (x + 1 + 0 * y[0, 0],)


@on_host
async def test_executes(host: Host) -> None:
    spec = spec_of()
    assert await host.install(b"k", export(add_one, [spec], [spec])) is None
    (result,) = host.execute(b"k", host.build(spec, range(8)))
    assert await host.watch(result) is None
    np.testing.assert_array_equal(await host.read(result, spec), np.arange(8) + 1)


async def at_rest(host: Host) -> None:
    """The execute thread waits for more, and the last computation came some time ago."""
    host.clock.clock_s += 2 * SOON_S
    await until_true(lambda: host.backend.execution.is_idle)


NO_TIME = (0.0, 0.0)
"""Processor time of a computation, and its time on the clock."""


async def called_on(
    host: Host, key: bytes, value: Value, takes: tuple[float, float] = NO_TIME, **how: Any
) -> set[threading.Thread]:
    """The threads of calls after the trial; each call has ended when it returns, and takes so long."""
    await host.watch()  # what was installed is known then
    known = host.backend.enqueuer.executables[key]
    threads: list[threading.Thread] = []

    def noted(*arrays: Any) -> Any:
        threads.append(threading.current_thread())
        host.clock.processor_s += takes[0]
        host.clock.clock_s += takes[1]
        return jax.block_until_ready(known.call(*arrays))

    host.backend.enqueuer.executables[key] = known._replace(call=noted)
    for _ in range(CALLS + 4):
        (value,) = host.execute(key, value, **how)
        assert await host.watch(value) is None
        await at_rest(host)
    assert len(threads) == CALLS + 4
    return set(threads[CALLS:])


async def install_quick(host: Host, key: bytes, spec: ArraySpec) -> None:
    """Install `add_one`, and call it until it has proven quick."""
    assert await host.install(key, export(add_one, [spec], [spec])) is None
    assert await called_on(host, key, host.build(spec, range(8))) == {threading.main_thread()}


def loop_of_one(x: Any) -> Any:
    return (jax.lax.while_loop(lambda y: y[0] < x[0] + 1, lambda y: y + 1, x),)


@on_host
async def test_a_computation_that_takes_no_time_runs_on_the_loop(host: Host) -> None:
    """Other clients' may take long, and delay no client."""
    spec = spec_of()
    await install_quick(host, b"quick", spec)
    for key, function, donated, takes in (
        (b"heavy", add_one, (), (2 * PROCESSOR_S, 0.0)),
        (b"elsewhere", add_one, (), (0.0, 2 * CLOCK_S)),
        (b"loop", loop_of_one, (), NO_TIME),
        (b"branch", branch_add, (), NO_TIME),
        (b"donated", add_one, (0,), NO_TIME),
    ):
        assert await host.install(key, export(function, [spec], [spec], donated)) is None
        threads = await called_on(host, key, host.build(spec, range(8)), takes)
        assert len(threads) == 1, key
        assert threading.main_thread() not in threads, key


def branch_add(x: Any) -> Any:
    return (jax.lax.cond(x[0] > 1000, lambda y: jnp.cumsum(y), lambda y: y + 1, x),)


def mean_by_hand(x: Any) -> Any:
    mean = jax.shard_map(
        lambda part: part + jax.lax.pmean(part, "x"),
        mesh=AbstractMesh((4,), ("x",)),
        in_specs=PartitionSpec("x"),
        out_specs=PartitionSpec("x"),
    )
    return (mean(x),)


@pytest.mark.parametrize(
    ("function", "is_straight"),
    [(add_one, True), (lambda x: (x + x.sum(),), False), (mean_by_hand, False)],
    ids=["alone", "partitioned", "by hand"],
)
def test_several_devices_are_never_called_on_the_loop(
    function: Callable[..., Any], is_straight: bool
) -> None:
    """Those of one host wait for XLA's threads. A gang's may be, if they wait for no other: `is_straight`."""

    @on_host
    async def run(host: Host) -> None:
        spec = spec_of(sharding=FOUR)
        assert await host.install(b"k", export(function, [spec], [spec])) is None
        threads = await called_on(host, b"k", host.build(spec, range(8)))
        assert threading.main_thread() not in threads
        assert host.backend.enqueuer.executables[b"k"].is_straight == is_straight

    run()


@on_host
async def test_the_loop_computes_nothing_while_the_devices_have_as_much_as_they_take(
    host: Host,
) -> None:
    """JAX holds who brings more than 32 computations at a time."""
    spec = spec_of()
    assert await host.install(b"slow", export(slow_add, [spec], [spec])) is None
    await install_quick(host, b"quick", spec)
    value = host.build(spec, np.zeros(8))
    chain = [value, *[Value() for _ in range(32)]]
    assert await host.watch(value) is None
    host.backend.submit([Execute(b"slow", (a,), (b,)) for a, b in itertools.pairwise(chain)])
    await at_rest(host)
    (made,) = host.execute(b"quick", value)
    assert made.payload is None or chain[-1].payload.is_ready()
    np.testing.assert_array_equal(await host.read(made, spec), np.ones(8))
    assert await host.watch(chain[-1]) is None


@on_host
async def test_what_numpy_has_to_unpack_is_not_read_on_the_loop(host: Host) -> None:
    spec = spec_of(dtype="int4")
    value = host.build(spec, np.arange(8) % 4)
    assert await host.watch(value) is None
    threads: list[threading.Thread] = []
    views = jax_answers.shard_views

    def noted(op: Read, layouts: Layouts) -> Any:
        threads.append(threading.current_thread())
        return views(op, layouts)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(jax_answers, "shard_views", noted)
        np.testing.assert_array_equal(await host.read(value, spec), np.arange(8) % 4)
    assert threads
    assert threading.main_thread() not in threads


@on_host
async def test_the_part_of_a_gang_that_exchanges_nothing_runs_on_the_loop(host: Host) -> None:
    spec = spec_of()
    assert await host.install(b"k", export(add_one, [spec], [spec])) is None
    broken, failed = host.answer()
    value = host.build(spec, range(8))
    threads = await called_on(host, b"k", value, failed=failed, guarded=True)
    assert threads == {threading.main_thread()}
    assert not broken.done()


@on_host
async def test_what_takes_no_time_overtakes_nothing(host: Host) -> None:
    spec = spec_of()
    assert await host.install(b"slow", export(slow_add, [spec], [spec])) is None
    await install_quick(host, b"quick", spec)
    first = host.build(spec, np.zeros(8))
    gate = Gate(host)
    (behind,) = host.execute(b"quick", first)
    assert behind.payload is None, "the execute thread has something to do before it"
    gate.open()
    values = [Value() for _ in range(4)]
    future, read = host.reading(values[3], spec)
    chain = zip((b"quick", b"slow", b"quick"), values, values[1:], strict=False)
    host.backend.submit(
        [
            Execute(b"quick", (behind,), (values[0],)),
            *[Execute(key, (value,), (made,)) for key, value, made in chain],
            read,
        ]
    )
    np.testing.assert_array_equal(joined(await future, spec), np.full(8, 5))
    assert await host.watch(behind, *values) is None


@on_host
async def test_many_computations_at_once_are_not_for_the_loop(host: Host) -> None:
    spec = spec_of()
    await install_quick(host, b"k", spec)
    values = [host.build(spec, np.zeros(8)), *[Value() for _ in range(2000)]]
    assert await host.watch(values[0]) is None
    await at_rest(host)
    host.backend.submit([Execute(b"k", (a,), (b,)) for a, b in itertools.pairwise(values)])
    assert values[-1].payload is None
    np.testing.assert_array_equal(await host.read(values[-1], spec), np.full(8, 2000))


@on_host
async def test_a_chain_is_submitted_at_once(host: Host) -> None:
    spec = spec_of(())
    await host.install(b"k", export(add_one, [spec], [spec]))
    values = [host.build(spec, 0)] + [Value() for _ in range(128)]
    host.backend.submit([Execute(b"k", (values[i],), (values[i + 1],)) for i in range(128)])
    assert await host.read(values[-1], spec) == 128
    assert host.backend.counters()["computations"] == 128


@on_host
async def test_what_a_chain_has_read_is_freed_before_its_end(host: Host) -> None:
    """And not with the batch: a plan counts on it, and memory may be short."""
    spec = spec_of()
    await host.install(b"k", export(lambda x: (x + 1,), [spec], [spec]))
    first, last = host.build(spec, np.zeros(8)), Value()
    future, done = host.answer()
    chain: list[Op] = []
    values = [first, *(Value() for _ in range(3)), last]
    for taken, made in itertools.pairwise(values):
        chain.append(Execute(b"k", (taken,), (made,)))
    between = [weakref.ref(value) for value in values[1:-1]]
    left: list[int] = []
    chain.append(RunFunction(lambda: left.append(sum(ref() is not None for ref in between))))
    chain.append(Watch((), done))
    del values, taken, made
    host.backend.submit(chain)
    del chain
    assert await asyncio.wait_for(future, BOUND_S) is None
    assert left == [0]


@on_host
async def test_what_a_chain_on_the_loop_has_read_is_freed_before_its_end(host: Host) -> None:
    spec = spec_of()
    await install_quick(host, b"quick", spec)
    first, last = host.build(spec, np.zeros(8)), Value()
    assert await host.watch(first) is None
    await at_rest(host)
    middle = [Value(), Value()]
    is_early: list[bool] = []
    for value in middle:
        weakref.finalize(value, lambda: is_early.append(last.payload is None))
    pairs = itertools.pairwise([first, *middle, last])
    chain: list[Op] = [Execute(b"quick", (taken,), (made,)) for taken, made in pairs]
    del middle, value, pairs
    host.backend.submit(chain)
    assert last.payload is not None, "the loop has computed it"
    assert is_early == [True, False]


@on_host
async def test_no_arguments_and_several_results(host: Host) -> None:
    spec, other = spec_of((2,)), spec_of((), "int64")

    def constants() -> Any:
        return jnp.ones(2, jnp.float32), jnp.int64(1 << 40)

    await host.install(b"k", export(constants, [], [spec, other]))
    first, second = host.execute(b"k", results=2)
    np.testing.assert_array_equal(await host.read(first, spec), [1, 1])
    assert await host.read(second, other) == 1 << 40


@on_host
async def test_a_sharding_without_axes_is_one_device(host: Host) -> None:
    spec = spec_of((3,), sharding=Sharding((), ()), devices=(5,))
    await host.install(b"k", export(add_one, [spec], [spec]))
    (result,) = host.execute(b"k", host.build(spec, [1, 2, 3]))
    np.testing.assert_array_equal(await host.read(result, spec), [2, 3, 4])
    assert result.payload.sharding.addressable_devices == {jax.devices()[5]}


@pytest.mark.parametrize("devices", [(0, 1, 2, 3), (6, 3, 7, 0)])
def test_a_collective_over_four_devices(devices: tuple[int, ...]) -> None:
    spec = spec_of((8,), sharding=FOUR, devices=devices)
    total = ArraySpec((), "float32", REPLICATED, spec.placement)

    def spread(x: Any) -> Any:
        return x[::-1], x.sum()

    def by_hand(x: Any) -> Any:
        mesh = AbstractMesh((4,), ("x",))
        return (
            jax.shard_map(
                lambda part: jax.lax.psum(part.sum(), "x"),
                mesh=mesh,
                in_specs=PartitionSpec("x"),
                out_specs=PartitionSpec(),
            )(x),
        )

    @on_host
    async def run(host: Host) -> None:
        assert await host.install(b"g", export(spread, [spec], [spec, total])) is None
        assert await host.install(b"s", export(by_hand, [spec], [total])) is None
        value = host.build(spec, range(8))
        turned, summed = host.execute(b"g", value, results=2)
        (psummed,) = host.execute(b"s", value)
        np.testing.assert_array_equal(await host.read(turned, spec), np.arange(8)[::-1])
        assert await host.read(summed, total) == 28
        assert await host.read(psummed, total) == 28

    run()


@on_host
async def test_two_dimensions_and_two_axes(host: Host) -> None:
    by_two = Sharding(("a", "b"), (2, 2), (("b", "a"), ()))
    spec = spec_of((8, 3), "int32", by_two, (4, 5, 6, 7))
    data = np.arange(24).reshape(8, 3)
    await host.install(b"k", export(add_one, [spec], [spec]))
    (result,) = host.execute(b"k", host.build(spec, data))
    np.testing.assert_array_equal(await host.read(result, spec), data + 1)


DTYPES = [
    "bool", "int4", "uint4", "int8", "uint8", "int16", "int32", "uint32", "int64", "uint64",
    "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float32", "float64",
    "complex64", "complex128",
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sharding", [ONE, FOUR])
def test_every_dtype_survives_the_round_trip(dtype: str, sharding: Sharding) -> None:
    spec = spec_of((8, 2), dtype, sharding)
    data = (np.arange(16).reshape(8, 2) % 5).astype(dtype_of(dtype))

    def identity(x: Any) -> Any:
        return (x,)

    @on_host
    async def run(host: Host) -> None:
        value = host.build(spec, data)
        np.testing.assert_array_equal(await host.read(value, spec), data)
        assert await host.install(b"k", export(identity, [spec], [spec])) is None
        (result,) = host.execute(b"k", value)
        np.testing.assert_array_equal(await host.read(result, spec), data)

    run()


@pytest.mark.parametrize("shape", [(0,), (4, 0, 3)])
def test_arrays_without_elements(shape: tuple[int, ...]) -> None:
    spec = spec_of(shape)
    there = spec_of(shape, devices=(1,))

    @on_host
    async def run(host: Host) -> None:
        await host.install(b"k", export(add_one, [spec], [spec]))
        value, moved = host.build(spec, np.zeros(shape)), Value()
        host.backend.submit(
            [Move(value, spec, addresses(spec), moved, there, addresses(there), ())]
        )
        (result,) = host.execute(b"k", value)
        assert (await host.read(result, spec)).shape == shape
        assert (await host.read(moved, there)).shape == shape

    run()


# Builds and reads.


@on_host
async def test_a_build_from_boxes(host: Host) -> None:
    spec = spec_of((8, 4), "int32", FOUR)
    data = np.arange(32, dtype=np.int32).reshape(8, 4)
    parts: list[Any] = []
    for position in range(4):
        shard = data[2 * position : 2 * position + 2]
        parts.append(((position,), ((0, 2), (0, 1)), shard[:, :1]))
        parts.append(((position,), ((0, 2), (1, 4)), shard[:, 1:]))
    future, done = host.answer()
    value = Value()
    host.backend.submit([Build(value, spec, addresses(spec), parts, done)])
    assert await asyncio.wait_for(future, BOUND_S) is None
    np.testing.assert_array_equal(await host.read(value, spec), data)


@on_host
async def test_a_large_build_is_deferred_and_later_ops_still_see_it(host: Host) -> None:
    spec = spec_of((1 << 16,))
    await host.install(b"k", export(add_one, [spec], [spec]))
    halves = [np.full(1 << 15, i, np.float32) for i in range(2)]
    parts: list[Any] = [((0,), ((i << 15, (i + 1) << 15),), half) for i, half in enumerate(halves)]
    future, done = host.answer()
    value, result = Value(), Value()
    host.backend.submit(
        [Build(value, spec, addresses(spec), parts, done), Execute(b"k", (value,), (result,))]
    )
    read = await host.read(result, spec)
    assert future.done()
    assert value.building is not None
    np.testing.assert_array_equal(read, np.repeat([1.0, 2.0], 1 << 15))


@on_host
async def test_aligned_bytes_are_aliased_by_every_replica(host: Host) -> None:
    spec = spec_of((1 << 16,), sharding=REPLICATED)
    data = aligned_empty((1 << 16,), np.dtype(np.float32))
    data[:] = 7
    value = Value()
    host.backend.submit([Build(value, spec, addresses(spec), [((0, 1, 2, 3), whole(spec), data)])])
    future, op = host.reading(value, spec)
    host.backend.submit([op])
    views = await asyncio.wait_for(future, BOUND_S)
    assert [view.ctypes.data for view in views] == [data.ctypes.data] * 4
    assert value.building is None


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ([((0,), ((0, 4),), np.zeros(4, np.float32))], "cover 4 elements"),
        ([((0,), ((0, 8),), np.zeros(7, np.float32))], "was given for a box"),
        ([((0,), ((0, 8),), np.zeros(8, np.int32))], "was given for a box"),
        ([((0,), ((0, 2), (0, 4)), np.zeros(8, np.float32))], "was given for a box"),
    ],
)
def test_a_build_that_does_not_fit_fails(parts: Any, words: str) -> None:
    @on_host
    async def run(host: Host) -> None:
        spec = spec_of()
        future, done = host.answer()
        value = Value()
        host.backend.submit([Build(value, spec, addresses(spec), parts, done)])
        report = await asyncio.wait_for(future, BOUND_S)
        assert report.kind == "InternalError"
        assert words in report.message
        assert await host.read(value, spec) == report

    run()


@on_host
async def test_a_read_gives_boxes_in_the_order_asked_for(host: Host) -> None:
    spec = spec_of((8, 2), "int32", FOUR)
    value = host.build(spec, np.arange(16).reshape(8, 2))
    future, done = host.answer()
    boxes = [(3, ((0, 1), (0, 2))), (0, ((1, 2), (1, 2))), (3, ((0, 2), (0, 2)))]
    host.backend.submit([Read(value, boxes, spec, addresses(spec), done)])
    views = await asyncio.wait_for(future, BOUND_S)
    assert [view.tolist() for view in views] == [[[12, 13]], [[3]], [[12, 13], [14, 15]]]


# Donation.


@on_host
async def test_a_donated_argument_is_gone(host: Host) -> None:
    spec = spec_of()
    await host.install(b"k", export(add_one, [spec], [spec], donated=(0,)))
    value = host.build(spec, np.zeros(8))
    (first,) = host.execute(b"k", value)
    (second,) = host.execute(b"k", value)
    np.testing.assert_array_equal(await host.read(first, spec), np.ones(8))
    report = await host.read(second, spec)
    assert report.kind == "ArrayDeleted"
    assert host.backend.counters()["donations_copied"] == 0


@on_host
async def test_donation_waits_for_no_pending_read(host: Host) -> None:
    spec = spec_of()
    await host.install(b"slow", export(slow_add, [spec], [spec]))
    await host.install(b"k", export(add_one, [spec], [spec], donated=(0,)))
    (value,) = host.execute(b"slow", host.build(spec, np.zeros(8)))
    future, op = host.reading(value, spec)
    result = Value()
    host.backend.submit([op, Execute(b"k", (value,), (result,))])
    np.testing.assert_array_equal(joined(await future, spec), np.ones(8))
    np.testing.assert_array_equal(await host.read(result, spec), np.full(8, 2))
    assert host.backend.counters()["donations_copied"] == 1


def test_what_was_copied_from_a_device_is_donated_afterwards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(jax_answers, "in_host_memory", lambda array: False)

    @on_host
    async def run(host: Host) -> None:
        spec = spec_of(sharding=FOUR)
        await host.install(b"k", export(add_one, [spec], [spec], donated=(0,)))
        value = host.build(spec, np.arange(8))
        for reads in (1, 2):
            before = value
            futures, ops = zip(*(host.reading(before, spec) for _ in range(reads)), strict=True)
            host.backend.submit(list(ops))
            views = await asyncio.wait_for(asyncio.gather(*futures), BOUND_S)
            (value,) = host.execute(b"k", before)
            assert await host.watch(value) is None
            assert before.payload is None, "it was given away"
            for shards in views:
                np.testing.assert_array_equal(joined(shards, spec), np.arange(8) + reads - 1)
        assert host.backend.counters()["donations_copied"] == 0

    run()


@on_host
async def test_views_outlive_a_donation(host: Host) -> None:
    spec = spec_of()
    await host.install(b"k", export(add_one, [spec], [spec], donated=(0,)))
    value = host.build(spec, np.zeros(8))
    for step in range(3):
        future, op = host.reading(value, spec)
        host.backend.submit([op])
        (view,) = await asyncio.wait_for(future, BOUND_S)
        (value,) = host.execute(b"k", value)
        assert await host.watch(value) is None
        np.testing.assert_array_equal(view, np.full(8, step))


@on_host
async def test_copied_and_repeated_arguments_stay(host: Host) -> None:
    spec = spec_of(sharding=FOUR)

    def add(x: Any, y: Any) -> Any:
        return (x + y,)

    await host.install(b"k", export(add, [spec, spec], [spec], donated=(0,)))
    value = host.build(spec, np.arange(8))
    other = host.build(spec, np.arange(8))
    (twice,) = host.execute(b"k", value, value)
    (again,) = host.execute(b"k", value, other, copied=(0,))
    for result in (twice, again):
        np.testing.assert_array_equal(await host.read(result, spec), 2 * np.arange(8))
    np.testing.assert_array_equal(await host.read(value, spec), np.arange(8))
    assert host.backend.counters()["donations_copied"] == 2


@on_host
async def test_a_watch_follows_donated_values(host: Host) -> None:
    spec = spec_of()
    await host.install(b"slow", export(slow_add, [spec], [spec], donated=(0,)))
    values = [host.build(spec, np.zeros(8))] + [Value() for _ in range(6)]
    futures, ops = [], []
    for before, after in itertools.pairwise(values):
        future, done = host.answer()
        futures.append(future)
        ops += [Execute(b"slow", (before,), (after,)), Watch((after,), done)]
    host.backend.submit(ops)
    assert await asyncio.wait_for(asyncio.gather(*futures), BOUND_S) == [None] * 6
    assert await host.read(values[-1], spec) is not None


# Waiting on several devices.


class Late:
    """An array that a slow computation makes: it is ready when it is let go."""

    def __init__(self, value: Value) -> None:
        self._array = value.payload
        self._event = threading.Event()
        value.payload = self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._array, name)

    def is_ready(self) -> bool:
        return self._event.is_set()

    def block_until_ready(self) -> None:
        assert self._event.wait(2 * BOUND_S)

    def let_go(self) -> None:
        self._event.set()


async def late(host: Host, spec: ArraySpec, order: int = 1) -> tuple[Value, Late]:
    value = host.build(spec, np.zeros(8))
    assert await host.watch(value) is None
    value.order = order
    return value, Late(value)


async def waiting(host: Host, ops: int) -> None:
    """So many questions wait for arrays: it is known a little after the last answer."""
    await until_true(lambda: host.backend.counters()["waiting"] == ops)


@on_host
async def test_a_copy_in_host_memory_is_not_late_behind_a_computation(host: Host) -> None:
    """It is no work of the device's own: it may be complete long before."""
    computed, computing = await late(host, spec_of())
    copied, copying = await late(
        host, msgspec.structs.replace(spec_of(), memory="pinned_host"), order=2
    )
    (first, computed_told), (second, copied_told) = host.answer(), host.answer()
    host.backend.submit([Watch((computed,), computed_told), Watch((copied,), copied_told)])
    await waiting(host, 2)
    copying.let_go()
    assert await asyncio.wait_for(second, BOUND_S) is None
    assert not first.done()
    computing.let_go()
    assert await asyncio.wait_for(first, BOUND_S) is None


@on_host
async def test_what_is_ready_is_answered_while_the_execute_thread_is_held(host: Host) -> None:
    """One client's computations may hold it: JAX takes 32 at a time on CPU, and runs some in the call."""
    spec, wide = spec_of(), spec_of((1 << 16,))
    await host.install(b"k", export(add_one, [spec], [spec]))
    (ready,) = host.execute(b"k", host.build(spec, range(8)))
    assert await host.watch(ready) is None
    gate = Gate(host)
    try:
        (behind,) = host.execute(b"k", ready)
        waiting_behind, done = host.answer()
        reading_behind, read = host.reading(behind, spec)
        everything, all_done = host.answer()
        host.backend.submit([Watch((behind,), done), read, Watch((), all_done)])
        assert await host.watch(ready) is None
        np.testing.assert_array_equal(await host.read(ready, spec), np.arange(8) + 1)
        assert await host.watch(Value(ErrorReport("ComputationFailed", "boom"))) is not None
        for lies in (spec, wide):
            built = host.build(lies, np.arange(lies.shape[0]))
            assert await host.watch(built, ready) is None
            np.testing.assert_array_equal(await host.read(built, lies), np.arange(lies.shape[0]))
        together, done = host.answer()
        late_build = Value()
        parts = [((0,), whole(spec), np.arange(8, dtype=np.float32))]
        ops = [Execute(b"k", (ready,), (Value(),)), Build(late_build, spec, (address(0),), parts)]
        host.backend.submit([*ops, Watch((late_build,), done)])
        assert await asyncio.wait_for(together, BOUND_S) is None
        assert not any(future.done() for future in (waiting_behind, reading_behind, everything))
    finally:
        gate.open()
    for future in (waiting_behind, everything):
        assert await asyncio.wait_for(future, BOUND_S) is None
    np.testing.assert_array_equal(joined(await reading_behind, spec), np.arange(8) + 2)


@on_host
async def test_a_question_stands_behind_what_makes_its_value_and_nothing_else(host: Host) -> None:
    spec = spec_of()
    await host.install(b"k", export(add_one, [spec], [spec]))
    start = host.build(spec, range(8))
    before = Gate(host)
    (made,) = host.execute(b"k", start)
    after = Gate(host)
    try:
        watching, done = host.answer()
        reading, read = host.reading(made, spec)
        host.backend.submit([Watch((start, made), done)])
        host.backend.submit([read])
        assert await host.watch(start) is None
        assert not watching.done()
        before.open()
        assert await asyncio.wait_for(watching, BOUND_S) is None
        np.testing.assert_array_equal(joined(await reading, spec), np.arange(8) + 1)
    finally:
        before.open()
        after.open()


@on_host
async def test_what_no_op_makes_is_an_error(host: Host) -> None:
    spec = spec_of()
    for error in (await host.watch(Value()), await host.read(Value(), spec)):
        assert error.kind == "InternalError"


@on_host
async def test_a_slow_array_holds_up_nobody_who_waits_for_another(host: Host) -> None:
    """Whether the other is on its device, was enqueued before it, or lies on other devices as well."""
    zero, one = spec_of(), spec_of(devices=(1,))
    both = spec_of(sharding=Sharding(("x",), (2,)), devices=(1, 0))
    slow, computing = await late(host, zero, order=10)
    wide, gang = await late(host, both, order=3)
    earlier, before = await late(host, zero, order=5)
    soon, other = await late(host, one, order=11)
    futures = {}
    try:
        for value in (slow, wide, earlier, soon):
            futures[value], done = host.answer()
            host.backend.submit([Watch((host.build(zero, np.zeros(8)), value), done)])
        reading, read = host.reading(earlier, zero)
        host.backend.submit([read])
        for value, array in ((soon, other), (earlier, before)):
            assert not futures[value].done()
            array.let_go()
            assert await asyncio.wait_for(futures[value], BOUND_S) is None
        np.testing.assert_array_equal(joined(await reading, zero), np.zeros(8))
        failed = Value(ErrorReport("ComputationFailed", "boom"))
        assert await host.watch(earlier, failed) is failed.error
        assert not any(futures[value].done() for value in (slow, wide))
        await waiting(host, 2)
    finally:
        computing.let_go()
        gang.let_go()
    assert await asyncio.wait_for(asyncio.gather(*futures.values()), BOUND_S) == [None] * 4
    await waiting(host, 0)


@on_host
async def test_one_thread_waits_for_what_is_enqueued_in_order(host: Host) -> None:
    spec = spec_of()
    lates = [await late(host, spec, order=order) for order in range(20)]
    asked = [0, 12, 4, 4, 19, 7]
    ended: list[int] = []
    threads = threading.active_count()
    futures = []
    for order in asked:
        future, done = host.answer()
        future.add_done_callback(lambda _, order=order: ended.append(order))
        host.backend.submit([Watch((lates[order][0],), done)])
        futures.append(future)
    await waiting(host, len(asked))
    assert threading.active_count() <= threads + 1
    for _, array in lates:
        array.let_go()
    assert await asyncio.wait_for(asyncio.gather(*futures), BOUND_S) == [None] * len(asked)
    assert ended == sorted(asked)


@on_host
async def test_the_loop_does_not_read_what_is_being_given_away(host: Host) -> None:
    """JAX would hold it until the computation that takes the buffers has been enqueued."""
    spec, entered, leave = spec_of(), threading.Event(), threading.Event()
    await host.install(b"k", export(add_one, [spec], [spec], donated=(0,)))
    value = host.build(spec, range(8))
    assert await host.watch() is None
    known = host.backend.enqueuer.executables[b"k"]

    def held_call(*arrays: Any) -> Any:
        entered.set()
        assert leave.wait(BOUND_S)
        return known.call(*arrays)

    host.backend.enqueuer.executables[b"k"] = known._replace(call=held_call)
    readers: list[threading.Thread] = []
    views = jax_answers.shard_views

    def noted(op: Read, layouts: Layouts) -> Any:
        readers.append(threading.current_thread())
        return views(op, layouts)

    (made,) = host.execute(b"k", value)
    await asyncio.to_thread(entered.wait, BOUND_S)
    try:
        assert host.backend.snapshot(value, spec, addresses(spec)) is None
        reading, read = host.reading(value, spec)
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(jax_answers, "shard_views", noted)
            host.backend.submit([read])
            np.testing.assert_array_equal(joined(await reading, spec), np.arange(8))
        assert readers
        assert threading.main_thread() not in readers
    finally:
        leave.set()
    assert await host.watch(made) is None


@on_host
async def test_a_watch_follows_what_was_given_away_a_thousand_times(host: Host) -> None:
    spec = spec_of()
    await host.install(b"k", export(add_one, [spec], [spec], donated=(0,)))
    values = [host.build(spec, np.zeros(8)), *[Value() for _ in range(2000)]]
    host.backend.submit([Execute(b"k", (a,), (b,)) for a, b in itertools.pairwise(values)])
    assert await host.watch() is None
    assert await host.watch(*values) is None
    np.testing.assert_array_equal(await host.read(values[-1], spec), np.full(8, 2000))


@pytest.mark.parametrize("in_host_memory", [True, False])
def test_reads_of_what_is_donated_then_wait_for_no_other_device(
    monkeypatch: pytest.MonkeyPatch, in_host_memory: bool
) -> None:
    monkeypatch.setattr(jax_answers, "in_host_memory", lambda array: in_host_memory)

    @on_host
    async def run(host: Host) -> None:
        spec = spec_of(devices=(1,))
        await host.install(b"slow", export(slow_add, [spec], [spec]))
        await host.install(b"k", export(add_one, [spec], [spec], donated=(0,)))
        slow, computing = await late(host, spec_of())
        watching, done = host.answer()
        host.backend.submit([Watch((slow,), done)])
        try:
            start, value, result = host.build(spec, np.zeros(8)), Value(), Value()
            readings, reads = zip(*(host.reading(value, spec) for _ in range(2)), strict=True)
            make, take = Execute(b"slow", (start,), (value,)), Execute(b"k", (value,), (result,))
            host.backend.submit([make, *reads, take])
            for views in await asyncio.wait_for(asyncio.gather(*readings), BOUND_S):
                np.testing.assert_array_equal(joined(views, spec), np.ones(8))
            np.testing.assert_array_equal(await host.read(result, spec), np.full(8, 2))
            assert host.backend.counters()["donations_copied"] == 1
            assert value.reads_ended == 2
            assert not watching.done()
        finally:
            computing.let_go()
        assert await asyncio.wait_for(watching, BOUND_S) is None

    run()


def test_what_is_not_in_host_memory_is_read_by_watchers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether there is an array already when it is asked for, or none yet."""
    monkeypatch.setattr(jax_answers, "in_host_memory", lambda array: False)

    @on_host
    async def run(host: Host) -> None:
        spec, opened = spec_of(sharding=REPLICATED, devices=(6, 3, 7, 5)), Opened()
        await host.install(b"python", python(opened.held(), [spec_of()], [spec]))
        await host.install(b"k", export(add_one, [spec], [spec], donated=(0,)))
        threads: list[str] = []
        views = jax_answers.shard_views

        def noted(op: Read, layouts: Layouts) -> Any:
            threads.append(threading.current_thread().name)
            return views(op, layouts)

        monkeypatch.setattr(jax_answers, "shard_views", noted)
        (value,) = host.execute(b"python", host.build(spec_of(), np.arange(8)))
        reading, read = host.reading(value, spec)
        host.backend.submit([read])
        await at_rest(host)
        opened.set()
        np.testing.assert_array_equal(joined(await reading, spec), np.arange(8) + 1)
        np.testing.assert_array_equal(await host.read(value, spec), np.arange(8) + 1)
        assert len(threads) == 2
        assert all(name.startswith("pw-watch") for name in threads)
        assert (value.reads_begun, value.reads_ended) == (2, 2)
        assert await host.watch(*host.execute(b"k", value)) is None
        assert host.backend.counters()["donations_copied"] == 0

    run()


# What is handed over at the end of an epoch.


@pytest.mark.parametrize("sharding", [ONE, FOUR, REPLICATED])
def test_a_snapshot_is_taken_while_the_execute_thread_is_stuck(sharding: Sharding) -> None:
    @on_host
    async def run(host: Host) -> None:
        spec = spec_of(sharding=sharding)
        await host.install(b"k", export(add_one, [spec], [spec]))
        (value,) = host.execute(b"k", host.build(spec, np.arange(8)))
        assert await host.watch(value) is None
        gate = Gate(host)
        views = host.backend.snapshot(value, spec, addresses(spec))
        gate.open()
        assert views is not None
        assert [box for box, _ in views] == [box for box, _ in spec.distinct_boxes()]
        shards = {shard.device.id: shard.data for shard in value.payload.addressable_shards}
        for (box, view), (_, positions) in zip(views, spec.distinct_boxes(), strict=True):
            np.testing.assert_array_equal(view, np.arange(*box[0]) + 1)
            assert view.ctypes.data == shards[positions[0]].unsafe_buffer_pointer(), "no copy"

    run()


@on_host
async def test_a_snapshot_outlives_a_donation(host: Host) -> None:
    spec = spec_of((), "bfloat16")
    await host.install(b"k", export(add_one, [spec], [spec], donated=(0,)))
    value = host.build(spec, 0)
    assert await host.watch(value) is None
    views = host.backend.snapshot(value, spec, addresses(spec))
    assert views is not None
    (result,) = host.execute(b"k", value)
    assert await host.watch(result) is None
    assert views[0][1] == 0
    assert host.backend.snapshot(value, spec, addresses(spec)) is None, "it has gone"


class HalfTaken:
    """An array of which a computation has taken one buffer of two."""

    def block_until_ready(self) -> None:
        array = jax.device_put(np.zeros(8))
        jax.block_until_ready(jax.jit(lambda x: x + 1, donate_argnums=0)(array))
        array.block_until_ready()

    def is_deleted(self) -> bool:
        return False


@on_host
async def test_an_array_that_is_being_donated_has_not_failed(host: Host) -> None:
    """Otherwise its gang would be broken: the island would leave its epoch."""
    taken, failures = Value(), Failures(HOST)
    taken.payload = HalfTaken()
    assert failures.settled(taken) is failures.deleted
    failed: list[ErrorReport] = []
    host.backend.enqueuer.guard((taken, failed.append))
    assert await host.watch(host.build(spec_of(), np.arange(8))) is None
    assert failed == []
    assert taken.error is None


class Unready:
    """An array that a computation has not made yet."""

    def is_deleted(self) -> bool:
        return False

    def is_ready(self) -> bool:
        return False


@on_host
async def test_nothing_is_waited_for_in_a_snapshot(host: Host) -> None:
    spec = spec_of()
    running, failed = Value(), Value(ErrorReport("ComputationFailed", "it raised"))
    running.payload = Unready()
    for value in (running, failed, Value()):
        assert host.backend.snapshot(value, spec, addresses(spec)) is None


@on_host
async def test_what_is_built_of_bytes_never_changes_them(host: Host) -> None:
    """A copy that an array was restored from is still there when the array has been donated."""
    spec = spec_of((1 << 16,))
    await host.install(b"k", export(add_one, [spec], [spec], donated=(0,)))
    copied = aligned_empty(spec.shape, np.dtype(np.float32))
    copied[...] = 5
    value = Value()
    host.backend.submit([Build(value, spec, addresses(spec), [((0,), whole(spec), copied)])])
    for _ in range(3):
        (value,) = host.execute(b"k", value)
    np.testing.assert_array_equal(await host.read(value, spec), np.full(spec.shape, 8))
    assert (copied == 5).all()


@pytest.mark.parametrize(
    ("hosts", "words", "kind"),
    [
        (2, "UNKNOWN: Gloo all-reduce failed: [pair.cc:525] Connection reset by peer", "HostLost"),
        (2, "INTERNAL: NCCL operation ncclAllReduce failed: remote process exited", "HostLost"),
        (
            1,
            "INTERNAL: NCCL operation ncclCommInitAll failed: no shared memory",
            "ComputationFailed",
        ),
        (2, "RESOURCE_EXHAUSTED: out of memory", "OutOfDeviceMemory"),
        (2, "INVALID_ARGUMENT: no", "ComputationFailed"),
    ],
)
def test_a_collective_that_lost_its_peers_is_not_the_programs_fault(
    monkeypatch: pytest.MonkeyPatch, hosts: int, words: str, kind: str
) -> None:
    monkeypatch.setattr(jax, "process_count", lambda: hosts)
    report = Failures(HOST).report(RuntimeError(words), "step")
    assert report.kind == kind
    assert "'step' failed" in report.message
    assert ("pw.memory()" in report.message) is (kind == "OutOfDeviceMemory"), "and says what to do"


# Moves.


def move(
    host: Host, value: Value, source: ArraySpec, spec: ArraySpec, pieces: Sequence[BoxCopy]
) -> Value:
    result = Value()
    host.backend.submit(
        [Move(value, source, addresses(source), result, spec, addresses(spec), tuple(pieces))]
    )
    return result


def same(position: int, *destinations: int, size: int = 2) -> BoxCopy:
    return BoxCopy(position, ((0, size),), destinations, ((0, size),))


@pytest.mark.parametrize(
    ("source", "spec", "pieces", "aliased"),
    [
        pytest.param(
            spec_of(sharding=FOUR),
            spec_of(sharding=FOUR),
            [same(i, i) for i in range(4)],
            True,
            id="same devices",
        ),
        pytest.param(
            spec_of(sharding=FOUR),
            spec_of(sharding=FOUR, devices=(7, 6, 5, 4)),
            [same(i, i) for i in range(4)],
            False,
            id="other devices",
        ),
        pytest.param(
            spec_of(sharding=FOUR),
            spec_of(sharding=FOUR, devices=(3, 2, 1, 0)),
            [same(i, i) for i in range(4)],
            False,
            id="same devices in another order",
        ),
        pytest.param(
            spec_of(),
            spec_of(sharding=REPLICATED),
            [same(0, 0, 1, 2, 3, size=8)],
            True,
            id="spread out",
        ),
        pytest.param(
            spec_of(sharding=REPLICATED),
            spec_of(sharding=FOUR),
            [BoxCopy(i, ((2 * i, 2 * i + 2),), (i,), ((0, 2),)) for i in range(4)],
            False,
            id="slices where they are",
        ),
        pytest.param(
            spec_of(devices=(5,)),
            spec_of(sharding=FOUR),
            [BoxCopy(0, ((2 * i, 2 * i + 2),), (i,), ((0, 2),)) for i in range(4)],
            False,
            id="slices of one shard",
        ),
    ],
)
def test_moves(source: ArraySpec, spec: ArraySpec, pieces: list[BoxCopy], aliased: bool) -> None:
    @on_host
    async def run(host: Host) -> None:
        await host.install(b"k", export(slow_add, [source], [source]))
        await host.install(b"d", export(add_one, [spec], [spec], donated=(0,)))
        (value,) = host.execute(b"k", host.build(source, np.arange(8)))
        moved = move(host, value, source, spec, pieces)
        (result,) = host.execute(b"d", moved)
        np.testing.assert_array_equal(await host.read(result, spec), np.arange(8) + 2)
        # Before the next read: one that has to wait shares the value as well.
        assert (value.shared, moved.shared) == (aliased, aliased)
        np.testing.assert_array_equal(await host.read(value, source), np.arange(8) + 1)

    run()


@on_host
async def test_moves_that_do_not_cover_a_shard_fail(host: Host) -> None:
    source, spec = spec_of(), spec_of(sharding=FOUR)
    value = host.build(source, np.arange(8))
    wrong = move(host, value, source, spec, [BoxCopy(0, ((0, 1),), (0,), ((0, 1),))])
    assert (await host.watch(wrong)).kind == "InternalError"
    missing = move(host, value, source, spec, [BoxCopy(0, ((0, 2),), (0,), ((0, 2),))])
    assert (await host.watch(missing)).kind == "InternalError"


# Failures.


@on_host
async def test_poison_is_the_original_error(host: Host) -> None:
    spec = spec_of()
    await host.install(b"k", export(add_one, [spec], [spec]))
    original = ErrorReport("ComputationFailed", "boom", "h7", "a traceback")
    poisoned = Value(original)
    (first,) = host.execute(b"k", poisoned)
    (second,) = host.execute(b"k", first)
    moved = move(host, second, spec, spec, [same(0, 0, size=8)])
    assert await host.watch(host.build(spec, np.zeros(8)), moved) is original
    assert await host.read(second, spec) is original
    (fine,) = host.execute(b"k", host.build(spec, np.zeros(8)))
    assert await host.watch(fine) is None


@on_host
async def test_a_failing_computation_fails_its_results_only(host: Host) -> None:
    spec, other = spec_of(), spec_of((9,))
    await host.install(b"k", export(add_one, [spec], [spec]))
    (result,) = host.execute(b"k", host.build(other, np.zeros(9)))
    report = await host.read(result, spec)
    assert report.kind == "ComputationFailed"
    assert report.where == HOST
    assert "Traceback" in report.traceback
    (unknown,) = host.execute(b"unknown", result)
    assert (
        await host.watch(unknown) is report or (await host.watch(unknown)).kind == "InternalError"
    )
    (fine,) = host.execute(b"k", host.build(spec, np.zeros(8)))
    assert await host.watch(fine) is None


@on_host
async def test_running_out_of_memory_is_told_as_such(host: Host) -> None:
    spec, huge = spec_of(()), spec_of((1 << 44,))

    def widen(x: Any) -> Any:
        return (jnp.broadcast_to(x, (1 << 44,)) * 2,)

    assert await host.install(b"k", export(widen, [spec], [huge])) is None
    (result,) = host.execute(b"k", host.build(spec, 1))
    report = await host.watch(result)
    assert report is not None
    assert report.kind == "OutOfDeviceMemory"


@on_host
async def test_a_failing_call_is_raised_on_the_loop(host: Host) -> None:
    told: asyncio.Future[Any] = host.loop.create_future()
    handler = host.loop.get_exception_handler()
    host.loop.set_exception_handler(lambda _, context: told.set_result(context["exception"]))

    def fail() -> None:
        raise ValueError("in its turn")

    future, done = host.answer()
    host.backend.submit([RunFunction(fail), Watch((), done)])
    assert await asyncio.wait_for(future, BOUND_S) is None
    assert str(await asyncio.wait_for(told, BOUND_S)) == "in its turn"
    host.loop.set_exception_handler(handler)


# Python functions.


@on_host
async def test_who_waits_for_a_python_function_holds_up_nobody_else(host: Host) -> None:
    spec, opened = spec_of(), Opened()
    await host.install(b"python", python(opened.held(), [spec], [spec]))
    await host.install(b"slow", export(slow_add, [spec], [spec]))
    ready = host.build(spec, np.zeros(8))
    (made,) = host.execute(b"python", host.build(spec, np.arange(8)))
    reading, read = host.reading(made, spec)
    watching, done = host.answer()
    host.backend.submit([read, Watch((ready, made, ready), done)])
    try:
        (later,) = host.execute(b"slow", ready)
        assert await host.watch(ready, later) is None
        np.testing.assert_array_equal(await host.read(later, spec), np.ones(8))
        assert not reading.done()
        assert not watching.done()
    finally:
        opened.set()
    views = await asyncio.wait_for(reading, BOUND_S)
    np.testing.assert_array_equal(joined(views, spec), np.arange(8) + 1)
    assert await asyncio.wait_for(watching, BOUND_S) is None


@on_host
async def test_a_python_function_may_wait_for_who_reads_the_one_before(host: Host) -> None:
    spec, first, second = spec_of(), Opened(), Opened()
    await host.install(b"first", python(first.held(), [spec], [spec]))
    await host.install(b"second", python(second.held(), [spec], [spec]))
    start = host.build(spec, np.zeros(8))
    (one,), (two,) = host.execute(b"first", start), host.execute(b"second", start)
    watching, done = host.answer()
    reading, read = host.reading(one, spec)
    host.backend.submit([Watch((one, two), done), read])
    try:
        assert await host.watch(start) is None
        first.set()
        views = await asyncio.wait_for(reading, BOUND_S)
        np.testing.assert_array_equal(joined(views, spec), np.ones(8))
        assert not watching.done()
    finally:
        first.set()
        second.set()
    assert await asyncio.wait_for(watching, BOUND_S) is None


@on_host
async def test_what_is_read_of_a_python_function_is_not_donated(host: Host) -> None:
    spec, opened = spec_of(), Opened()
    await host.install(b"python", python(opened.held(), [spec], [spec]))
    await host.install(b"k", export(add_one, [spec], [spec], donated=(0,)))
    (made,) = host.execute(b"python", host.build(spec, np.zeros(8)))
    reading, read = host.reading(made, spec)
    result = Value()
    host.backend.submit([read, Execute(b"k", (made,), (result,))])
    opened.set()
    np.testing.assert_array_equal(await host.read(result, spec), np.full(8, 2))
    views = await asyncio.wait_for(reading, BOUND_S)
    np.testing.assert_array_equal(joined(views, spec), np.ones(8))


def panic() -> BaseException:
    """Like one of an extension in Rust."""
    return type("PanicException", (BaseException,), {})("called `Option::unwrap()`")


@pytest.mark.parametrize("raised", [SystemExit(3), asyncio.CancelledError(), panic()])
def test_a_python_function_ends_no_thread(raised: BaseException) -> None:
    def ends(x: Any) -> Any:
        if x[0]:
            raise raised
        return [x]

    @on_host
    async def run(host: Host) -> None:
        spec = spec_of()
        await host.install(b"python", python(ends, [spec], [spec]))
        (failed,) = host.execute(b"python", host.build(spec, np.ones(8)))
        report = await host.watch(failed)
        assert report is not None
        assert report.kind == "ComputationFailed"
        assert type(raised).__name__ in report.message
        (fine,) = host.execute(b"python", host.build(spec, np.zeros(8)))
        assert await host.watch(fine) is None

    run()


class Exits:
    """Ends what unpickles it."""

    def __reduce__(self) -> Any:
        return sys.exit, (3,)


@on_host
async def test_a_python_function_that_cannot_be_unpickled_ends_nothing(host: Host) -> None:
    spec = spec_of()
    artifact = cloudpickle.dumps(Exits())
    computation = pickled("exits", artifact, [spec], [spec])
    assert await host.install(b"exits", (computation, artifact)) is None
    (failed,) = host.execute(b"exits", host.build(spec, np.ones(8)))
    report = await host.watch(failed)
    assert report is not None
    assert report.kind == "CompileError"
    assert "SystemExit: 3" in report.message
    assert await host.install(b"k", export(add_one, [spec], [spec])) is None


@on_host
async def test_a_thread_outlives_whatever_is_raised_on_it(host: Host) -> None:
    told: asyncio.Future[Any] = host.loop.create_future()
    handler = host.loop.get_exception_handler()
    host.loop.set_exception_handler(lambda _, context: told.set_result(context["exception"]))
    host.backend.compiler.thread.put(partial(sys.exit, 3))
    error = await asyncio.wait_for(told, BOUND_S)
    assert "SystemExit: 3" in str(error)
    host.loop.set_exception_handler(handler)
    spec = spec_of()
    assert await host.install(b"k", export(add_one, [spec], [spec])) is None


# Installing.


@on_host
async def test_equal_computations_are_compiled_once(host: Host) -> None:
    spec = spec_of()
    exported = export(add_one, [spec], [spec])
    for key in (b"a", b"b", b"a"):
        assert await host.install(key, exported) is None
    assert host.backend.counters()["compilations"] == 1
    assert host.backend.counters()["installed"] == 2
    elsewhere = spec_of(devices=(1,))
    assert await host.install(b"c", export(add_one, [elsewhere], [elsewhere])) is None
    assert host.backend.counters()["compilations"] == 2


def test_what_a_computation_takes_besides_its_arguments_and_results_is_told(tmp_path: Path) -> None:
    def sorted_product(x: Any) -> Any:
        product = jnp.sort(x @ x, axis=0)
        return (jnp.sum(product @ product),)

    spec, result = spec_of((128, 128), sharding=ONE), spec_of(())
    exported = export(sorted_product, [spec], [result])

    async def installed() -> tuple[list[Any], dict[str, int]]:
        async with open_host(tmp_path) as host:
            told = [await host.installed(key, exported) for key in (b"a", b"b", b"a")]
            told.append(await host.installed(b"c", export(add_one, [result], [result])))
            return told, host.backend.counters()

    (first, *again, little), counters = asyncio.run(installed())
    assert first >= 128 * 128 * 4, "the product has to be somewhere"
    assert again == [first, first]
    assert little == 0
    assert counters["compilations"] == 2
    told, counters = asyncio.run(installed())
    assert told == [first, first, first, 0]
    assert (counters["compilations"], counters["executables_loaded"]) == (0, 2)


@on_host
async def test_forgetting_is_ordered_with_ops(host: Host) -> None:
    spec = spec_of()
    exported = export(add_one, [spec], [spec])
    for key in (b"a", b"b"):
        await host.install(key, exported)
    value = host.build(spec, np.zeros(8))
    gate = Gate(host)
    (before,) = host.execute(b"a", value)
    host.backend.forget(b"a")
    assert await host.install(b"c", exported) is None  # so the compile thread has forgotten
    (after,) = host.execute(b"a", value)
    (shared,) = host.execute(b"b", value)
    gate.open()
    assert await host.watch(before) is None
    assert await host.watch(shared) is None
    report = await host.watch(after)
    assert report is not None
    assert report.kind == "InternalError"
    assert host.backend.counters()["compilations"] == 1
    assert await host.install(b"a", exported) is None
    assert await host.watch(*host.execute(b"a", value)) is None


def _unknown_target(x: Any) -> Any:
    return (jax.ffi.ffi_call("open_the_door", jax.ShapeDtypeStruct((8,), np.float32))(x),)


def _export_unchecked(function: Callable[..., Any]) -> tuple[Computation, bytes]:
    spec = spec_of()
    exported = jax.export.export(
        jax.jit(function),
        platforms=["cpu"],
        disabled_checks=[jax.export.DisabledSafetyCheck.custom_call("open_the_door")],
    )(jax.ShapeDtypeStruct((8,), np.float32))
    artifact = artifact_of(exported.mlir_module_serialized, (), ())
    digest = hashlib.sha256(artifact).digest()
    return Computation("f", digest, spec.placement, (spec,), (spec,)), artifact


def _declared(**changes: Any) -> tuple[Computation, bytes]:
    spec = spec_of()
    computation, artifact = export(add_one, [spec], [spec])
    fields = {name: getattr(computation, name) for name in computation.__struct_fields__}
    return Computation(**{**fields, **changes}), artifact


REFUSED = {
    "a native function": (lambda: _export_unchecked(_unknown_target), "open_the_door"),
    "another platform": (
        lambda: export(
            lambda x: (jnp.linalg.eigvalsh(x),), [spec_of((8, 8))], [spec_of()], platforms=["cuda"]
        ),
        "cusolver",
    ),
    "garbage": (lambda: (_declared(artifact=hashlib.sha256(b"no").digest())[0], b"no"), ""),
    "another hash": (lambda: _declared(artifact=bytes(32)), "damaged on its way"),
    "other arguments": (lambda: _declared(inputs=(spec_of((9,)),)), "arguments"),
    "more arguments": (lambda: _declared(inputs=(spec_of(), spec_of())), "arguments"),
    "other results": (lambda: _declared(outputs=(spec_of(dtype="int32"),)), "results"),
    "a donation of nothing": (lambda: _declared(donated=(3,)), ""),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_compiled_is_refused(case: str) -> None:
    make, words = REFUSED[case]

    @on_host
    async def run(host: Host) -> None:
        report = await host.install(b"k", make())
        assert report is not None
        assert report.kind == ("CodeRefused" if case == "a native function" else "CompileError")
        assert words in report.message
        assert host.backend.counters()["installed"] == 0
        spec = spec_of()
        assert await host.install(b"k", export(add_one, [spec], [spec])) is None

    run()


@on_host
async def test_linear_algebra_and_random_numbers_are_allowed(host: Host) -> None:
    spec, key = spec_of((3, 3), "float64"), spec_of((2,), "uint32")

    def solve(x: Any, seed: Any) -> Any:
        noise = jax.random.normal(jax.random.wrap_key_data(seed), (3, 3), jnp.float64)
        return jnp.linalg.inv(x) + 0 * noise, jnp.linalg.qr(x)[1], jax.lax.top_k(x, 3)[0]

    exported = export(solve, [spec, key], [spec, spec, spec])
    assert await host.install(b"k", exported) is None
    inverse, _, _ = host.execute(
        b"k", host.build(spec, 2 * np.eye(3)), host.build(key, [0, 1]), results=3
    )
    np.testing.assert_allclose(await host.read(inverse, spec), np.eye(3) / 2)


# Ending.


def test_close_leaves_no_thread_and_calls_nobody() -> None:
    before = set(threading.enumerate())
    called: list[Any] = []

    async def main() -> None:
        async with open_host() as host:
            spec = spec_of()
            value, computing = await late(host, spec)
            watching, done = host.answer()
            host.backend.submit([Watch((value,), done)])
            computing.let_go()
            assert await asyncio.wait_for(watching, BOUND_S) is None
            assert {t.name for t in set(threading.enumerate()) - before} >= {
                "pw-execute",
                "pw-compile",
                "pw-watch-1",
                "pw-copy",
            }
            gate = Gate(host)
            host.backend.submit([Watch((), called.append)])
            gate.open()
        await asyncio.sleep(0)

    asyncio.run(main())
    left = [t for t in set(threading.enumerate()) - before if t.name.startswith("pw-")]
    assert not left
    assert not called


@on_host
async def test_an_idle_backend_holds_no_buffers(host: Host) -> None:
    spec = spec_of((1 << 12,))
    await host.install(b"k", export(add_one, [spec], [spec]))
    before = host.backend.counters()["live_bytes"]
    value = host.build(spec, np.zeros(1 << 12))
    (result,) = host.execute(b"k", value)
    assert await host.watch(result) is None
    assert host.backend.counters()["live_bytes"] == before + 2 * 4 * (1 << 12)
    del value, result
    # The threads drop an op a little after they have answered it.
    await until_true(lambda: host.backend.counters()["live_bytes"] == before)


OPS: tuple[type, ...] = Op.__args__


def test_every_op_has_a_handler() -> None:
    """On the execute thread, which reads nothing."""

    @on_host
    async def run(host: Host) -> None:
        assert set(host.backend.execution.handlers) == set(OPS) - {Read}

    run()
