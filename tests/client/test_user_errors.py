"""A user's errors, and their effect on other clients: on real processes, an island of two hosts.

Wherever it can be, the processes live on; where a computation is stuck on the devices they cannot, and what
was there is found again in the next epoch.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import threading
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import pw
from pw.client.connection import current
from tests.stages.daemons import until
from tests.stages.programs import run_python
from tests.stages.scripts import finish, start_client
from tests.stages.stage import mesh_on, numbers, split

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]

BOUND_S = 60.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[pw.LocalCluster]:
    with pw.LocalCluster(hosts_per_island=2, devices_per_host=1, allow_python=True) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def mesh(cluster: pw.LocalCluster) -> pw.Mesh:
    return mesh_on(0)


def on(mesh: pw.Mesh, fun: Any, **how: Any) -> Any:
    """A computation that takes both hosts."""
    return pw.jit(fun, mesh=mesh, in_shardings=P("x"), out_shardings=P("x"), **how)


def mix(x: Any) -> Any:
    """Every element goes into every other, over both hosts."""
    return x * 3 + jnp.sum(x)


def mixed(x: Any) -> Any:
    return x * 3 + np.sum(x)


def for_ever(x: Any) -> Any:
    """Both hosts meet in every step, and it never ends."""
    return jax.lax.while_loop(lambda c: jnp.max(c) > -1, lambda c: c * 0.5 + 1, x)


def check_gang(mesh: pw.Mesh) -> None:
    """The gang's hosts agree on what comes next: values show it."""
    step = on(mesh, mix)
    x, wanted = numbers(4), numbers(4)
    for _ in range(6):
        x, wanted = step(x), mixed(wanted)
    np.testing.assert_array_equal(x, wanted)


def pids(cluster: pw.LocalCluster) -> list[int | None]:
    return [host.runtime_pid() for host in cluster.hosts]


class Unloadable:
    """What a host cannot unpickle."""

    def __reduce__(self) -> tuple[Any, ...]:
        return int, ("no number",)


def host_function(mesh: pw.Mesh, fun: Any) -> Any:
    return pw.host_function(fun, jax.ShapeDtypeStruct((4,), np.float32), devices=mesh.devices)


def raising(mesh: pw.Mesh, hosts: list[int | None]) -> Any:
    """A Python function that raises on the hosts with these process ids."""

    def raises(x: np.ndarray) -> np.ndarray:
        if os.getppid() in hosts:  # the host has started this process
            raise OSError("no such file")
        return x

    return host_function(mesh, raises)


def not_compiling(mesh: pw.Mesh, hosts: list[int | None]) -> Any:
    needed = Unloadable()
    return host_function(mesh, lambda x: (needed, x)[1])


ALIKE: dict[str, tuple[type[pw.Error], Any]] = {
    "a host function": (pw.ComputationFailed, raising),
    "a host function, on one host": (
        pw.ComputationFailed,
        lambda mesh, hosts: raising(mesh, hosts[1:]),
    ),
    "compiling": (pw.CompileError, not_compiling),
    "a NaN": (pw.NaNFound, lambda mesh, hosts: on(mesh, lambda x: jnp.log(x - 1), check_nans=True)),
}


@pytest.mark.parametrize("what", ALIKE)
def test_what_fails_on_all_hosts_alike_ends_no_process(
    what: str, cluster: pw.LocalCluster, mesh: pw.Mesh
) -> None:
    error, make = ALIKE[what]
    check_gang(mesh)
    before = pids(cluster)
    function, after = make(mesh, before), on(mesh, mix)
    for _ in range(3):
        failed = function(numbers(4))
        later = after(after(failed))
        program = pw.program(lambda x: after(function(x)))(numbers(4))
        for array in (later, failed, program):
            with pytest.raises(error):
                np.asarray(array)
        check_gang(mesh)
    assert pids(cluster) == before


def test_what_does_not_trace_is_raised_at_once(cluster: pw.LocalCluster, mesh: pw.Mesh) -> None:
    before = pids(cluster)
    with pytest.raises(TypeError, match="dot_general"):
        on(mesh, lambda x: x @ jnp.ones((3, 3)))(numbers(4))
    with pytest.raises(ZeroDivisionError):
        on(mesh, lambda x: x * (1 // 0))(numbers(4))
    check_gang(mesh)
    assert pids(cluster) == before


def test_no_memory_for_a_computation_of_several_hosts(
    cluster: pw.LocalCluster, mesh: pw.Mesh
) -> None:
    """Any one of them may have had the memory, so the island is formed anew; nothing is run again."""
    kept = on(mesh, mix)(numbers(4))
    kept.block_until_ready()

    def hungry(x: Any) -> Any:
        return jnp.broadcast_to(jnp.sum(x), (1 << 44,)) * 2

    failed = on(mesh, hungry)(numbers(4))
    after = pw.jit(lambda x: x[:4], mesh=mesh)(failed)
    for array in (after, failed):
        with pytest.raises(pw.OutOfDeviceMemory, match="'hungry'"):
            array.block_until_ready()
    np.testing.assert_array_equal(on(mesh, mix)(kept), mixed(mixed(numbers(4))))
    check_gang(mesh)


def test_a_computation_that_never_ends_times_out(cluster: pw.LocalCluster, mesh: pw.Mesh) -> None:
    other = start_client(
        cluster.address,
        """
        devices = pw.make_virtual_device_set().add_slice(devices=2).devices
        f = pw.jit(lambda x: x + jnp.sum(x), devices=devices)
        x = f(np.ones(2, np.float32))
        x.block_until_ready()
        print("ready", flush=True)
        sys.stdin.readline()
        y = f(x)
        print(np.asarray(x).tolist(), np.asarray(y).tolist())
        """,
    )
    assert other.stdout.readline().strip() == "ready"
    kept = on(mesh, mix)(numbers(4))
    kept.block_until_ready()
    stuck = on(mesh, for_ever, timeout=0.5)(kept)
    after, beside = on(mesh, mix)(stuck), on(mesh, mix)(kept)
    current.runtime().ask.status()  # the controller has the run
    other.stdin.write("\n")
    other.stdin.flush()
    for array in (after, stuck):
        with pytest.raises(pw.ComputationTimeout, match=r"'for_ever'.*0\.5 s.*island-0-host-1"):
            np.asarray(array)
    np.testing.assert_array_equal(beside, mixed(mixed(numbers(4))))
    assert finish(other).split("\n")[0] == "[3.0, 3.0] [9.0, 9.0]"
    check_gang(mesh)


def test_a_program_and_a_host_function_can_time_out(
    cluster: pw.LocalCluster, mesh: pw.Mesh
) -> None:
    def sleeps(x: np.ndarray) -> np.ndarray:
        import threading

        threading.Event().wait()
        return x

    function = host_function(mesh, sleeps)
    program = pw.program(lambda x: function(on(mesh, mix)(x)), timeout=0.5)
    with pytest.raises(pw.ComputationTimeout):
        program(numbers(4)).block_until_ready()
    check_gang(mesh)
    for wrong in (0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="seconds"):
            pw.jit(lambda x: x, timeout=wrong)


def test_cancelling(cluster: pw.LocalCluster, mesh: pw.Mesh) -> None:
    kept = on(mesh, mix)(numbers(4))
    kept.block_until_ready()
    stuck = on(mesh, for_ever)(kept)
    after, beside = on(mesh, mix)(stuck), on(mesh, mix)(kept)
    waiting = threading.Thread(target=pw.cancel, args=({"stuck": [stuck], "host": 1.0},))
    waiting.start()
    for array in (after, stuck):
        with pytest.raises(pw.Cancelled, match="'for_ever'"):
            np.asarray(array)
    waiting.join(BOUND_S)
    np.testing.assert_array_equal(beside, mixed(mixed(numbers(4))))
    pw.cancel(beside)  # it has ended
    np.testing.assert_array_equal(beside, mixed(mixed(numbers(4))))
    np.testing.assert_array_equal(on(mesh, mix)(beside), mixed(mixed(mixed(numbers(4)))))
    with pytest.raises(pw.Cancelled):
        np.asarray(on(mesh, mix)(after))
    check_gang(mesh)
    beside.delete()
    with pytest.raises(pw.ArrayDeleted):
        pw.cancel([kept, beside])


def test_a_task_that_is_cancelled_ends_its_wait_and_pw_cancel_the_computation(
    cluster: pw.LocalCluster, mesh: pw.Mesh
) -> None:
    stuck = on(mesh, for_ever)(numbers(4))

    async def main() -> None:
        async def wait() -> None:
            try:
                await pw.ready({"stuck": stuck})
            except asyncio.CancelledError:
                waits.append(stuck.is_ready())
                pw.cancel(stuck)
                raise

        waits: list[bool] = []
        task = asyncio.create_task(wait())
        await asyncio.sleep(0)  # it begins to wait
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert waits == [False]

    asyncio.run(main())
    with pytest.raises(pw.Cancelled, match="'for_ever'"):
        np.asarray(stuck)
    check_gang(mesh)


def test_the_operator_cancels_what_status_shows(cluster: pw.LocalCluster, mesh: pw.Mesh) -> None:
    def command(*arguments: str) -> subprocess.CompletedProcess[str]:
        return run_python(["-m", "pw.cli.main", *arguments, "--address", cluster.address])

    stuck = on(mesh, for_ever)(numbers(4))
    beside = on(mesh, mix)(numbers(4))
    until(lambda: len(current.runtime().ask.status().runs) == 2, "both are in flight")
    shown = command("status")
    assert shown.returncode == 0, shown.stderr
    (line,) = [line for line in shown.stdout.splitlines() if "for_ever" in line]
    run = line.replace("│", " ").split()[0]
    assert run.startswith(f"{current.runtime().client}.")
    refused = command("cancel", "77")
    assert refused.returncode == 1
    assert "no client 77" in refused.stderr
    assert len(refused.stderr.splitlines()) == 1
    done = command("cancel", run)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    with pytest.raises(pw.Cancelled, match="pw cancel"):
        np.asarray(stuck)
    np.testing.assert_array_equal(beside, mixed(numbers(4)))
    put = pw.put(numbers(4), sharding=split(mesh))
    np.testing.assert_array_equal(on(mesh, mix)(put), mixed(numbers(4)))
