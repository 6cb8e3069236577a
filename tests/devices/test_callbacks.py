"""Functions that computations call in their client's process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import msgspec
import numpy as np
import pytest
from jax.experimental import io_callback
from jax.sharding import PartitionSpec

import pw
from pw.client.connection.current import runtime as current_runtime
from pw.client.connection.runtime import Runtime
from pw.client.session.thread_messages import Called
from pw.core.ids import client_id
from pw.core.messages import INLINE_BYTES
from pw.core.programs.program import Computation, Node, Output, Program, ValueRef
from pw.core.programs.stablehlo import Stablehlo, spec_of_shards
from pw.core.sharding import ArraySpec, Placement
from pw.devices.host.backend import ClientCall
from pw.testing import InProcessCluster
from tests.devices.test_jax_backend import Host, on_host
from tests.devices.test_stablehlo import ONE, replicated
from tests.stages.daemons import until
from tests.stages.lowered import computation_of, like, over, stablehlo_of

SPEC = replicated((8,), "float32", ONE)
X = np.arange(8, dtype=np.float32)


def calling(function: Callable[..., Any], *args: Any, callbacks: int = 1, **jit: Any) -> Stablehlo:
    """A module that calls functions of its client."""
    code = stablehlo_of(function, args or [like((8,))], **jit)
    return msgspec.structs.replace(code, callbacks=(b"its name",) * callbacks)


def pure(x: Any) -> Any:
    return 2 * jax.pure_callback(np.sin, jax.ShapeDtypeStruct((8,), np.float32), x)


def of(code: Stablehlo, inputs: Any, outputs: Any) -> tuple[Computation, bytes]:
    computation, artifact = computation_of(code, inputs, outputs)
    return msgspec.structs.replace(computation, calls_back=True), artifact


class Client:
    """Takes the calls of a host."""

    def __init__(self, host: Host, answer: Callable[[ClientCall], None]) -> None:
        self.calls: list[ClientCall] = []
        self.came = asyncio.Event()
        self.answer = answer
        host.backend.take_calls(self.take)

    def take(self, call: ClientCall) -> None:
        self.calls.append(call)
        self.came.set()
        self.answer(call)


def sine(call: ClientCall) -> None:
    call.returned([np.sin(call.operands[0])])


@on_host
async def test_a_computation_calls_and_takes_the_result(host: Host) -> None:
    client = Client(host, sine)
    computation = of(calling(pure), [SPEC], [SPEC])
    assert await host.install(b"k", computation) is None
    (made,) = host.execute(b"k", host.build(SPEC, X))
    np.testing.assert_array_equal(await host.read(made, SPEC), 2 * np.sin(X))
    (call,) = client.calls
    assert (call.artifact, call.index) == (computation[0].artifact, 0)
    assert call.results == (("float32", (8,)),)


@on_host
async def test_a_waiting_call_holds_up_no_other_computation(host: Host) -> None:
    client = Client(host, lambda call: None)
    assert await host.install(b"calls", of(calling(pure), [SPEC], [SPEC])) is None
    other = computation_of(stablehlo_of(lambda x: x + 1, [like((8,))]), [SPEC], [SPEC])
    assert await host.install(b"other", other) is None
    x = host.build(SPEC, X)
    (late,) = host.execute(b"calls", x)
    (made,) = host.execute(b"other", x)
    np.testing.assert_array_equal(await host.read(made, SPEC), X + 1)
    await client.came.wait()
    assert host.backend.stage(late) == "submitted"
    sine(client.calls[0])
    np.testing.assert_array_equal(await host.read(late, SPEC), 2 * np.sin(X))


BAD: dict[str, tuple[Callable[[ClientCall], None], str]] = {
    "an error": (lambda call: call.raised("ValueError: the user's words"), "the user's words"),
    "another dtype": (lambda call: call.returned([np.zeros(8, np.int8)]), "int8"),
    "a smaller array": (lambda call: call.returned([np.zeros(7, np.float32)]), r"(7,)"),
    "a larger array": (lambda call: call.returned([np.zeros(9999, np.float32)]), r"(9999,)"),
    "nothing": (lambda call: call.returned([]), "[]"),
    "too much": (lambda call: call.returned([X, X]), "(8,)"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_a_client_may_not_return(case: str) -> None:
    answer, words = BAD[case]

    @on_host
    async def run(host: Host) -> None:
        Client(host, answer)
        assert await host.install(b"k", of(calling(pure), [SPEC], [SPEC])) is None
        (made,) = host.execute(b"k", host.build(SPEC, X))
        report = await host.read(made, SPEC)
        assert report.kind == "ComputationFailed"
        assert words in report.message
        assert "CpuCallback error calling callback" in report.message, "as plain JAX says it"

    run()


@on_host
async def test_tokens_keep_calls_in_order(host: Host) -> None:
    """They are arguments and results of ordered effects."""

    def ordered(x: Any) -> Any:
        return io_callback(np.cos, jax.ShapeDtypeStruct((8,), np.float32), x, ordered=True)

    token = replicated((0,), "bool", ONE)
    Client(host, sine)
    assert await host.install(b"k", of(calling(ordered), [token, SPEC], [token, SPEC])) is None
    first = host.build(token, np.zeros(0, bool))
    for _ in range(2):
        first, made = host.execute(b"k", first, host.build(SPEC, X), results=2)
        np.testing.assert_array_equal(await host.read(made, SPEC), np.sin(X))


@on_host
async def test_only_declared_functions_are_called(host: Host) -> None:
    def two(x: Any) -> Any:
        return pure(x) + jax.pure_callback(np.cos, jax.ShapeDtypeStruct((8,), np.float32), x)

    report = await host.install(b"k", of(calling(two), [SPEC], [SPEC]))
    assert report is not None
    assert "calls back function 1 of its client" in report.message
    report = await host.install(b"k", computation_of(calling(pure), [SPEC], [SPEC]))
    assert report is not None
    assert "unlike its call says" in report.message


@on_host
async def test_clients_do_not_share_what_calls_them(host: Host) -> None:
    computation = of(calling(pure), [SPEC], [SPEC])
    client = Client(host, sine)
    for number in (1, 2):
        key = f"{client_id(number, 1)}/1/0".encode()
        assert await host.install(key, computation) is None
        (made,) = host.execute(key, host.build(SPEC, X))
        assert await host.watch(made) is None
    assert host.backend.counters()["compilations"] == 2
    assert len({call.client for call in client.calls}) == 2


# --- from a client ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster() -> Iterator[InProcessCluster]:
    with InProcessCluster(devices_per_island=2) as cluster:
        yield cluster


class Session:
    """A session whose functions run on a thread of their own."""

    def __init__(self, runtime: Runtime, function: Callable[..., Any], devices: int = 1) -> None:
        self.runtime = runtime
        self.function = function
        self.came = threading.Event()
        self.calls: list[Called] = []
        runtime.calls.handler = self.take
        slice = runtime.allocate_slice(devices).slice
        self.placement = Placement(slice, tuple(range(devices)))

    def take(self, call: Called) -> None:
        self.calls.append(call)
        threading.Thread(target=self.run_function, args=(call,), daemon=True).start()

    def run_function(self, call: Called) -> None:
        self.came.set()
        try:
            results = self.function(*call.operands)
        except ValueError as error:
            self.runtime.calls.fail(call, f"ValueError: {error}")
        else:
            self.runtime.calls.answer(call, results)

    def register(self, code: Stablehlo, inputs: list[ArraySpec], outputs: list[ArraySpec]) -> int:
        computation, artifact = of(code, inputs, outputs)
        node = Node(0, tuple(ValueRef(-1, index) for index in range(len(inputs))))
        results = tuple(Output(ValueRef(0, index), spec) for index, spec in enumerate(outputs))
        body = Program("f", (computation,), (node,), tuple(inputs), results)
        return self.runtime.register_program(body, {computation.artifact: artifact})


SIZES = {"small": 8, "large": INLINE_BYTES}


@pytest.mark.parametrize("size", SIZES)
def test_values_travel_to_the_client_and_back(cluster: InProcessCluster, size: str) -> None:
    count = SIZES[size]
    session = Session(cluster.client(), lambda a, b: (a + b, np.int16(a.sum())))
    types = (jax.ShapeDtypeStruct((count,), np.float32), jax.ShapeDtypeStruct((), np.int16))

    def function(x: Any) -> Any:
        return jax.pure_callback(lambda *_: None, types, x, x * 2)

    code = calling(function, like((count,)))
    facts = session.runtime.ask.compile(code, session.placement).result(60).facts
    assert facts is not None
    spec = spec_of_shards((count,), "float32", session.placement, is_stacked=False)
    scalar = spec_of_shards((), "int16", session.placement, is_stacked=False)
    program = session.register(code, [spec], [spec, scalar])
    x = np.ones(count, np.float32)
    made, total = session.runtime.run(program, [session.runtime.upload(x, spec)], 2)
    np.testing.assert_array_equal(session.runtime.fetch(made, spec).result(60), x * 3)
    assert session.runtime.fetch(total, scalar).result(60) == np.float32(count).astype(np.int16)
    session.runtime.close()


def test_the_users_error_comes_back(cluster: InProcessCluster) -> None:
    def fails(*operands: Any) -> Any:
        raise ValueError("the user's words")

    session = Session(cluster.client(), fails)
    spec = spec_of_shards((8,), "float32", session.placement, is_stacked=False)
    program = session.register(calling(pure), [spec], [spec])
    session.runtime.ask.compile(calling(pure), session.placement).result(60)
    (made,) = session.runtime.run(program, [X.tobytes()], 1)
    with pytest.raises(pw.ComputationFailed, match="ValueError: the user's words"):
        session.runtime.fetch(made, spec).result(60)
    session.runtime.close()


def test_others_go_on_while_a_client_does_not_answer_and_when_it_is_gone(
    cluster: InProcessCluster,
) -> None:
    release = threading.Event()
    stuck = Session(cluster.client(), lambda a: (release.wait(60), a)[1:])
    spec = spec_of_shards((8,), "float32", stuck.placement, is_stacked=False)
    stuck.runtime.ask.compile(calling(pure), stuck.placement).result(60)
    program = stuck.register(calling(pure), [spec], [spec])
    (held,) = stuck.runtime.run(program, [X.tobytes()], 1)
    (behind,) = stuck.runtime.run(program, [held], 1)
    waiting = stuck.runtime.fetch(behind, spec)
    assert stuck.came.wait(60)

    other = Session(cluster.client(), lambda a: (np.cos(a),))
    spec = spec_of_shards((8,), "float32", other.placement, is_stacked=False)
    other.runtime.ask.compile(calling(pure), other.placement).result(60)
    program = other.register(calling(pure), [spec], [spec])
    for _ in range(3):
        (made,) = other.runtime.run(program, [X.tobytes()], 1)
        result = other.runtime.fetch(made, spec).result(60)
        np.testing.assert_array_equal(result, 2 * np.cos(X))
    assert not waiting.done()
    stuck.runtime.close()
    with pytest.raises(pw.Disconnected):
        waiting.result(60)
    (made,) = other.runtime.run(program, [X.tobytes()], 1)
    np.testing.assert_array_equal(other.runtime.fetch(made, spec).result(60), 2 * np.cos(X))
    found = other.runtime.stats()
    assert found["host-0"]["calls_waiting"] == 0
    release.set()
    other.runtime.close()


def test_prints_of_each_shard_come_though_there_are_no_results(cluster: InProcessCluster) -> None:
    """And the next run of the client finds its argument again."""
    shown: list[list[float]] = []

    def show(a: Any) -> Any:
        shown.append(a.tolist())
        return ()

    session = Session(cluster.client(), show, devices=2)
    spec = spec_of_shards((2,), "float32", session.placement, is_stacked=True)
    lies = over(2, "x")

    def prints(x: Any) -> None:
        jax.debug.callback(lambda a: None, x, partitioned=True)

    code = calling(prints, like((4,), sharding=lies), in_shardings=lies)
    session.runtime.ask.compile(code, session.placement).result(60)
    program = session.register(code, [spec], [])
    x = session.runtime.upload(np.arange(4, dtype=np.float32), spec)
    for number in range(1, 4):
        assert session.runtime.run(program, [x], 0) == []
        until(lambda wanted=2 * number: len(shown) == wanted, "the prints of both shards")
        assert sorted(shown[-2:]) == [[0, 1], [2, 3]]
    session.runtime.close()


LOOPS: dict[str, Callable[[Any, Any], Any]] = {
    "a call": lambda called, x: jax.lax.psum(called(x), "x"),
    "a loop that waits for its results": lambda called, x: jax.lax.while_loop(
        lambda y: jax.lax.psum(y.sum(), "x") < 100, lambda y: called(y), x
    ),
}


@pytest.mark.parametrize("kind", LOOPS)
def test_an_error_on_one_device_keeps_no_other_in_a_collective(
    cluster: InProcessCluster, kind: str
) -> None:
    """The computation ends, with the user's words, and the devices are free for the next one."""
    seen: list[float] = []

    def function(a: Any) -> Any:
        seen.append(float(a[0, 0]))
        if a[0, 0] < 0:
            raise ValueError("negative")
        return (a * 10,)

    session = Session(cluster.client(), function, devices=2)

    def called(x: Any) -> Any:
        return jax.pure_callback(lambda a: a, jax.ShapeDtypeStruct((1, 4), np.float32), x)

    lies = over(2, "x")
    mapped = jax.shard_map(
        lambda x: jax.lax.psum(LOOPS[kind](called, x), "x"),
        mesh=lies.mesh,
        in_specs=PartitionSpec("x"),
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    code = calling(mapped, like((2, 4), sharding=lies))
    x_spec = spec_of_shards((1, 4), "float32", session.placement, is_stacked=True)
    total_spec = spec_of_shards((1, 4), "float32", session.placement, is_stacked=False)
    session.runtime.ask.compile(code, session.placement).result(60)
    program = session.register(code, [x_spec], [total_spec])
    x = np.array([[-1, 0, 0, 0], [1, 1, 1, 1]], np.float32)
    (bad,) = session.runtime.run(program, [x.tobytes()], 1)
    with pytest.raises(pw.ComputationFailed, match="ValueError: negative"):
        session.runtime.fetch(bad, total_spec).result(60)
    assert len(seen) <= 2, "no function is called after an error"
    (total,) = session.runtime.run(program, [abs(x).tobytes()], 1)
    assert np.isfinite(session.runtime.fetch(total, total_spec).result(60)).all()
    session.runtime.close()


@pytest.mark.processes
def test_a_gang_calls_back_from_each_device_as_jax_does() -> None:
    """Then one of its calls fails, and the gang goes on with the next run."""
    with pw.LocalCluster(islands=1, hosts_per_island=2, devices_per_host=1):
        runtime: Any = current_runtime()
        seen: list[float] = []

        def function(a: Any) -> Any:
            seen.append(float(a[0, 0]))
            if a[0, 0] < 0:
                raise ValueError("negative")
            return (a * 10,)

        session = Session(runtime, function, devices=2)

        def body(x: Any) -> Any:
            y = jax.pure_callback(lambda a: a, jax.ShapeDtypeStruct((1, 4), np.float32), x)
            return jax.lax.psum(y, "x")

        mapped = jax.shard_map(
            body, mesh=over(2).mesh, in_specs=PartitionSpec("x"), out_specs=PartitionSpec()
        )
        code = calling(mapped, like((2, 4), sharding=over(2, "x")))
        x_spec = spec_of_shards((1, 4), "float32", session.placement, is_stacked=True)
        total_spec = spec_of_shards((1, 4), "float32", session.placement, is_stacked=False)
        runtime.ask.compile(code, session.placement).result(60)
        program = session.register(code, [x_spec], [total_spec])
        x = np.arange(8, dtype=np.float32).reshape(2, 4)
        for _ in range(3):
            (total,) = runtime.run(program, [x.tobytes()], 1)
            found = runtime.fetch(total, total_spec).result(60)
            np.testing.assert_array_equal(found, 10 * x.sum(0, keepdims=True))
        assert sorted(seen) == [0, 0, 0, 4, 4, 4]
        (bad,) = runtime.run(program, [(x - 4).tobytes()], 1)
        with pytest.raises(pw.Error, match="negative"):
            runtime.fetch(bad, total_spec).result(100)
        (total,) = runtime.run(program, [x.tobytes()], 1)
        found = runtime.fetch(total, total_spec).result(100)
        np.testing.assert_array_equal(found, 10 * x.sum(0, keepdims=True))
