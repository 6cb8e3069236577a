"""What clients send is parsed, vetted and compiled by processes beside the host: attacks on them."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest

from pw.core.errors import CompileError, ErrorReport
from pw.core.programs.program import Computation
from pw.core.programs.stablehlo import Stablehlo, encode
from pw.core.sharding import Sharding
from pw.devices.jax.backend import JaxBackend
from pw.devices.jax.compile_process import Bounds, Job
from pw.devices.jax.compile_processes import CompileProcesses
from pw.devices.jax.making import Order
from pw.gateway.protocol import protos
from tests.devices.test_jax_backend import BOUND_S, HOST, Host, address, export, spec_of
from tests.stages.samples import parts

SPEC = spec_of()

CRASHING: dict[str, Callable[[Any], Any]] = {
    "SIGABRT": lambda x: x + jnp.sum(jax.lax.broadcast(x[0], (2**62, 4))),
    "SIGSEGV": lambda x: x + jax.lax.broadcast(x[0], (2**31, 2**31, 2**31))[0, 0, 0],
}
"""Functions that end the process which compiles them."""


def fails(error: BaseException) -> None:
    raise error


@pytest.fixture(scope="module")
def processes() -> Iterator[CompileProcesses]:
    processes = CompileProcesses(lambda: 8, fails, second=1, long_s=0.1)
    yield processes
    for thread in processes.close():
        thread.join(BOUND_S)


class Asked:
    """A task, and its answer."""

    def __init__(
        self, processes: CompileProcesses, artifact: bytes, client: int = 1, name: str = "f"
    ) -> None:
        self.over = threading.Event()
        self.answer: bytes | ErrorReport = b""
        computation, _ = one_more()
        digest = hashlib.sha256(artifact).digest()
        order = order_of((computation, artifact))
        self.job: Job = processes.put(client, name, digest, order, self.done, only_examine=False)

    def done(self, answer: bytes | ErrorReport) -> None:
        self.answer = answer
        self.over.set()

    def words(self) -> str:
        """The error, or nothing."""
        assert self.over.wait(BOUND_S)
        if isinstance(self.answer, bytes):
            return ""
        assert self.answer.kind == "CompileError"
        return self.answer.message


def order_of(exported: tuple[Computation, bytes]) -> Order:
    computation, artifact = exported
    devices = tuple(address(ordinal) for ordinal in computation.placement.devices)
    return Order(artifact, devices)


def one_more() -> tuple[Computation, bytes]:
    return export(lambda x: (x + 1,), [SPEC], [SPEC])


def crashing(name: str) -> bytes:
    return export(lambda x: (CRASHING[name](x),), [SPEC], [SPEC])[1]


def bomb(number: int = 0) -> bytes:
    """A function of a few kilobytes that calls one twice, which calls one twice, and so on."""
    function: Callable[..., Any] = jax.jit(lambda x: jnp.sin(x) + number)
    for _ in range(17):
        function = jax.jit(partial(lambda inner, x: inner(inner(x) * 1.5), function))
    artifact = export(lambda x: (function(x),), [SPEC], [SPEC])[1]
    assert len(artifact) < 10_000  # it names its source files
    return artifact


@pytest.mark.parametrize("name", CRASHING)
def test_what_crashes_the_compiler_ends_one_process(name: str, processes: CompileProcesses) -> None:
    ended, artifact = processes.ended, crashing(name)
    words = Asked(processes, artifact, name="large").words()
    wanted = f"the function 'large' cannot be compiled: the compiler crashed on it (with {name})"
    assert words.startswith(wanted)
    assert processes.ended == ended + 1
    assert Asked(processes, one_more()[1]).words() == ""


def test_options_that_end_a_process_never_reach_the_host(processes: CompileProcesses) -> None:
    """A host that compiles for accelerators reads the options itself, when a process has read them."""
    options = protos.message("xla.CompileOptionsProto")()
    options.executable_build_options.device_ordinal = -5
    module = jax.export.export(jax.jit(lambda x: x + 1))(1.0).mlir_module_serialized
    artifact = encode(Stablehlo(bytes(module), options.SerializeToString()))
    order = Order(artifact, (address(0),))
    with pytest.raises(CompileError, match="cannot be compiled"):
        processes.wait_for(1, "f", hashlib.sha256(artifact).digest(), order)


@pytest.mark.parametrize("seeds", parts(range(40)), ids=["few", "all others"])
def test_corrupt_artifacts_are_answered(processes: CompileProcesses, seeds: list[int]) -> None:
    """Some still compile, some are refused, and some end the process that parses them."""
    artifact = one_more()[1]
    for seed in seeds:
        random, changed = Random(seed), bytearray(artifact)
        for _ in range(random.randint(1, 4)):
            changed[random.randrange(len(changed))] = random.randrange(256)
        Asked(processes, bytes(changed), client=40).words()
    assert Asked(processes, artifact, client=40).words() == ""


def test_what_has_ended_two_processes_of_a_client_is_not_tried_again(
    processes: CompileProcesses,
) -> None:
    artifact = crashing("SIGSEGV")
    asked = [Asked(processes, artifact, client=7) for _ in range(2)]
    assert not any("not tried again" in one.words() for one in asked)
    ended = processes.ended
    assert "It is not tried again" in Asked(processes, artifact, client=7).words()
    assert processes.ended == ended
    assert "not tried" not in Asked(processes, artifact, client=8).words()
    assert Asked(processes, one_more()[1], client=7).words() == ""


@pytest.mark.parametrize(
    ("attack", "bounds", "words"),
    [
        (bomb, Bounds(timeout_s=0.5), "takes longer than 0.5 s"),
        (bomb, Bounds(memory_bytes=200 << 20), "needs more than 0.195 GiB to compile"),
    ],
    ids=["the time of compiling", "the memory of compiling"],
)
def test_what_takes_too_much_is_ended(
    attack: Callable[[], bytes],
    bounds: Bounds,
    words: str,
    processes: CompileProcesses,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(processes, "bounds", bounds)
    assert words in Asked(processes, attack(), client=20).words()
    monkeypatch.undo()
    assert Asked(processes, one_more()[1], client=20).words() == ""


def test_a_bomb_does_not_hold_up_other_clients(processes: CompileProcesses) -> None:
    """Not even three of them; and they go when they are not wanted any more."""
    bombs = [Asked(processes, bomb(number), client=30) for number in range(3)]
    for client in (31, 32):
        assert Asked(processes, one_more()[1], client=client).words() == ""
    assert not any(one.over.is_set() for one in bombs)
    assert [one.doing for one in processes.whereabouts()] == ["the compilation of 'f'"] * 2
    for one in bombs:
        processes.cancel(one.job)
    assert Asked(processes, one_more()[1], client=30).words() == ""
    assert not any(one.over.is_set() for one in bombs)
    assert not processes.whereabouts()


def test_clients_take_turns() -> None:
    processes = CompileProcesses(lambda: 8, fails, processes=1, second=0)
    came: list[int] = []
    all_are_asked = threading.Event()

    def asked(client: int, before: Callable[[], object]) -> Asked:
        def done(answer: Any) -> None:
            before()
            one.done(answer)

        one = Asked(processes, one_more()[1], client=client)
        one.job.done = done
        return one

    first = asked(9, lambda: all_are_asked.wait(BOUND_S))  # its thread begins no other before
    others = [asked(client, partial(came.append, client)) for client in (1, 1, 1, 2, 3)]
    all_are_asked.set()
    assert [one.words() for one in (first, *others)] == [""] * 6
    assert came == [1, 2, 3, 1, 1]
    for thread in processes.close():
        thread.join(BOUND_S)


def test_the_server_is_started_again(processes: CompileProcesses) -> None:
    assert Asked(processes, one_more()[1]).words() == ""
    server = processes.server
    assert server is not None
    server.child.kill()
    server.child.wait()
    assert [Asked(processes, one_more()[1]).words() for _ in range(2)][1] == ""


def test_a_host_lives_on_and_runs_what_was_compiled_beside_it() -> None:
    async def run() -> None:
        devices = jax.devices()
        backend = JaxBackend(
            asyncio.get_running_loop(),
            HOST,
            lambda at: devices[at.ordinal],
            compile_apart=lambda failed: CompileProcesses(lambda: 8, failed),
        )
        try:
            host = Host(backend)
            computation, _ = one_more()
            corrupt = crashing("SIGABRT")
            digest = hashlib.sha256(corrupt).digest()
            bad = msgspec.structs.replace(computation, artifact=digest)
            report = await host.install(b"1/1/0", (bad, corrupt))
            assert report is not None
            assert "the compiler crashed on it" in report.message
            # Several at once; two are equal.
            artifact = one_more()
            solve = export(lambda x: (jnp.linalg.inv(jnp.diag(x + 1)),), [SPEC], [spec_of((8, 8))])
            told = await asyncio.gather(
                host.install(b"a", artifact),
                host.install(b"b", artifact),
                host.install(b"c", solve),
            )
            assert told == [None] * 3
            assert backend.counters()["compilations"] == 2
            (made,) = host.execute(b"b", host.build(SPEC, range(8)))
            np.testing.assert_array_equal(await host.read(made, SPEC), np.arange(8) + 1)
            (made,) = host.execute(b"c", host.build(SPEC, range(8)))
            np.testing.assert_allclose(
                np.diag(await host.read(made, spec_of((8, 8)))), 1 / (np.arange(8) + 1.0), rtol=1e-6
            )
            # What is released while it is compiled ends.
            future, done = host.answer()
            large = bomb()
            released = msgspec.structs.replace(computation, artifact=hashlib.sha256(large).digest())
            places = tuple(address(ordinal) for ordinal in computation.placement.devices)
            backend.install(b"1/2/0", released, large, places, done)
            backend.forget(b"1/2/0")
            assert "released" in (await asyncio.wait_for(future, BOUND_S)).message
            assert await host.install(b"1/3/0", export(lambda x: (x * 3,), [SPEC], [SPEC])) is None
        finally:
            backend.close()

    asyncio.run(run())


def test_one_executable_serves_all_devices(tmp_path: Path) -> None:
    """Those that wait while it is compiled, and those of a later host."""
    split = Sharding(("x",), (2,), (("x",),))

    async def counters(places: list[tuple[int, ...]]) -> tuple[int, int]:
        devices = jax.devices()
        backend = JaxBackend(
            asyncio.get_running_loop(),
            HOST,
            lambda at: devices[at.ordinal],
            compile_apart=lambda failed: CompileProcesses(lambda: 8, failed),
            compile_cache=tmp_path,
        )
        host = Host(backend)
        try:
            specs = [spec_of(sharding=split, devices=place) for place in places]
            orders = [export(lambda x: (jnp.cumsum(x),), [spec], [spec]) for spec in specs]
            keys = [b"%d" % at for at in range(len(places))]
            told = await asyncio.gather(*map(host.install, keys, orders))
            assert told == [None] * len(places)
            for key, spec in zip(keys, specs, strict=True):
                (made,) = host.execute(key, host.build(spec, range(8)))
                np.testing.assert_array_equal(await host.read(made, spec), np.cumsum(range(8)))
            found = backend.counters()
            return found["compilations"], found["executables_loaded"]
        finally:
            backend.close()

    hosts = [(0, 1), (2, 3), (5, 4)], [(6, 7), (1, 0)]
    assert [asyncio.run(counters(places)) for places in hosts] == [(1, 0), (0, 2)]
