"""What the JAX backend does with computations that other hosts take part in when this host fails them."""

from __future__ import annotations

import asyncio
from typing import Any

import jax
import numpy as np

from pw.core.errors import ErrorReport
from pw.devices.host.backend import Build, Execute, Move, Watch
from pw.devices.host.value import Value
from tests.devices.test_jax_backend import (
    BOUND_S,
    Host,
    add_one,
    addresses,
    export,
    on_host,
    spec_of,
    whole,
)
from tests.stages.daemons import until_true


class Failing:
    """A jax.Array whose computation has been enqueued, and fails."""

    def block_until_ready(self) -> None:
        raise RuntimeError("RESOURCE_EXHAUSTED: no room for temporaries")

    def is_deleted(self) -> bool:
        return False

    def is_ready(self) -> bool:
        return True


def joint(host: Host, key: bytes, *args: Value) -> tuple[asyncio.Future[Any], Value]:
    """Submit a computation that has peers; a future of its failure."""
    failure, failed = host.answer()
    (result,) = host.execute(key, *args, failed=failed)
    return failure, result


async def heard(failure: asyncio.Future[Any]) -> ErrorReport:
    report: ErrorReport = await asyncio.wait_for(failure, BOUND_S)
    return report


@on_host
async def test_what_cannot_be_enqueued_is_told_and_nothing_joint_is_enqueued_after_it(
    host: Host,
) -> None:
    spec = spec_of()
    assert await host.install(b"k", export(add_one, [spec], [spec])) is None
    value = host.build(spec, np.zeros(8))
    fine, before = joint(host, b"k", value)
    failure, failed = joint(host, b"missing", value)
    later, after = joint(host, b"k", before)
    (own,) = host.execute(b"k", before)
    report = await heard(failure)
    assert report.kind == "InternalError"
    assert await host.watch(failed) == report
    error = await host.watch(after)
    assert error is not None
    assert (error.kind, error.where) == ("HostLost", "h0"), "it may be run again"
    np.testing.assert_array_equal(await host.read(own, spec), np.full(8, 2))
    assert not fine.done()
    assert not later.done(), "told once"


@on_host
async def test_a_joint_computation_that_fails_later_is_told(host: Host) -> None:
    spec = spec_of()
    assert await host.install(b"k", export(add_one, [spec], [spec])) is None
    executables: dict[bytes, Any] = host.backend.enqueuer.executables
    await until_true(lambda: b"k" in executables)  # the execute thread publishes it
    compiled = executables[b"k"]
    executables[b"k"] = compiled._replace(call=lambda array: (Failing(),))
    value = host.build(spec, np.zeros(8))
    failure, result = joint(host, b"k", value)
    assert (await heard(failure)).kind == "OutOfDeviceMemory"
    # A watch of the result sees whose fault it is, so it needs no guard.
    unguarded, failed = host.answer()
    (watched,) = host.execute(b"k", value, failed=failed, guarded=False)
    (own,) = host.execute(b"k", value)
    for made, alone in ((watched, True), (own, False), (result, True)):
        report = await host.watch(made)
        assert report is not None
        assert "add_one" in report.message
        assert made.alone == alone
    assert not unguarded.done()
    executables[b"k"] = compiled


@on_host
async def test_an_argument_that_failed_here_alone_is_this_hosts_failure(host: Host) -> None:
    """And one that failed on all hosts alike is not."""
    spec = spec_of()
    assert await host.install(b"k", export(add_one, [spec], [spec])) is None
    alike = Value(ErrorReport("ComputationFailed", "everywhere"))
    unbroken, poisoned = joint(host, b"k", alike)
    assert await host.watch(poisoned) == alike.error
    built, moved = Value(), Value()
    wrong = [((0,), whole(spec), np.zeros(3, np.float32))]
    host.backend.submit([Build(built, spec, addresses(spec), wrong)])
    move = Move(built, spec, addresses(spec), moved, spec, addresses(spec), ())
    host.backend.submit([move])
    failure, result = joint(host, b"k", moved)
    report = await heard(failure)
    assert moved.alone
    assert report == built.error == await host.watch(result)
    assert not unbroken.done()


@on_host
async def test_a_donated_result_is_not_taken_for_a_failed_one(host: Host) -> None:
    spec = spec_of()
    assert await host.install(b"k", export(add_one, [spec], [spec])) is None
    assert await host.install(b"d", export(add_one, [spec], [spec], donated=(0,))) is None
    value = host.build(spec, np.zeros(8))
    failures = []
    for _ in range(20):
        failure, value = joint(host, b"d", value)
        failures.append(failure)
    np.testing.assert_array_equal(await host.read(value, spec), np.full(8, 20))
    future, done = host.answer()
    host.backend.submit([Watch((value,), done), Execute(b"k", (value,), (Value(),))])
    assert await asyncio.wait_for(future, BOUND_S) is None
    assert not any(failure.done() for failure in failures)
    assert jax.devices()
