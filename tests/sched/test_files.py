"""What leaves host memory for files, and comes back (`pw-worker --spill-files`)."""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pw
from pw.core import messages as msg
from pw.core.errors import ErrorReport
from pw.core.ids import client_id, executor_of
from pw.core.messages.roles import Role
from pw.devices.host import spill_files
from pw.sched.island.buffers import Tier
from pw.testing.in_process import InProcessCluster
from pw.transport.access.authority import Authority
from tests.cli.test_secure_cluster import issue
from tests.sched.test_memory import DEVICE, OTHER, MemoryBench, needs
from tests.sched.test_residency import MIB, Sweeps, TierBench, arrays_of, split_over_two
from tests.stages.daemons import Program, start_module, until


class FilesBench(TierBench):
    """Devices with 100 bytes each, and hosts with room for 50 bytes, and a folder."""

    def __init__(self, spill_bytes: int = 50) -> None:
        MemoryBench.__init__(self, 2)
        error = ErrorReport("HostLost", "gone")
        formed = msg.IslandFormed(
            "i", 2, self.hosts, 100, spill_bytes=spill_bytes, spill_files=True
        )
        self.tell(msg.EpochEnded("i", 1, error), formed)
        self.scheduler.residency.small_bytes = 1 << 20

    def orders(self, host: str = "h0") -> list[tuple[tuple[int, ...], bool]]:
        """The arrays of each order to a host so far, and whether they go to files."""
        sent = self.world.to(executor_of(host), msg.Spill)
        return [(order.arrays, order.to_files) for order in sent]

    def in_host_memory(self, host: str = "h0") -> int:
        return self.memory.tiers.used_bytes[host]

    def after(self, seconds: float) -> None:
        """Let the scheduler's timers come that are due by then."""
        self.world.now_s += seconds
        alarms = self.world.alarms
        due = [one for one in alarms if one.due_s <= self.world.now_s and not one.cancelled]
        self.world.alarms = [one for one in alarms if one not in due]
        for alarm in due:
            if callable(alarm.note):
                alarm.note()


def away(bench: FilesBench, *arrays: int) -> None:
    """A run of the second client needs so much that these arrays leave; it ends."""
    run = bench.run(bench.program(2, needs(100)))
    bench.spilled(*arrays)
    assert bench.launched()[-1] == run.run
    bench.end(bench.launches()[-1])
    assert {bench.tier(array) for array in arrays} == {Tier.HOST}


def test_an_array_goes_to_a_file_when_host_memory_is_full_and_another_must_leave() -> None:
    bench = FilesBench()
    (first,) = arrays_of(bench, 40)
    away(bench, first)
    second = client_id(2, 5)
    bench.upload(second, 40)
    run = bench.run(bench.program(1, needs(80)))
    assert bench.orders()[-1] == ((first,), True)
    assert (bench.tier(first), bench.in_host_memory()) == (Tier.WRITING, 40)
    bench.spilled(first)
    assert (bench.tier(first), bench.tier(second)) == (Tier.FILE, Tier.LEAVING)
    bench.spilled(second)
    assert bench.launched()[-1] == run.run
    assert bench.in_host_memory() == 40


def test_a_run_brings_an_array_back_from_a_file_and_reserves_room_for_it() -> None:
    bench = FilesBench()
    (first,) = arrays_of(bench, 40)
    away(bench, first)
    second = client_id(2, 5)
    bench.upload(second, 40)
    run = bench.run(bench.program(1, needs(80)))
    bench.spilled(first)
    bench.spilled(second)
    reader = bench.run(bench.program(1, needs(10, inputs=1)), first)
    assert bench.launched()[-1] == run.run, "80 bytes are reserved, and 50 more are needed"
    bench.end(bench.launches()[-1])
    assert bench.launched()[-1] == reader.run
    assert (bench.tier(first), bench.used, bench.in_host_memory()) == (Tier.DEVICE, 50, 40)
    bench.end(bench.launches()[-1])
    bench.tell(msg.Release(1, (first, second), (("h0",), ("h0",))))
    assert (bench.used, bench.in_host_memory(), bench.memory.tiers.off) == (0, 0, set())


def test_a_run_waits_while_a_file_is_written_of_what_it_reads() -> None:
    bench = FilesBench()
    (first,) = arrays_of(bench, 40)
    away(bench, first)
    bench.upload(client_id(2, 5), 40)
    bench.run(bench.program(2, needs(80)))
    reader = bench.run(bench.program(1, needs(0, inputs=1)), first)
    assert reader.run not in bench.launched()
    bench.spilled(first)
    assert reader.run in bench.launched()


def test_more_than_host_memory_leaves_in_rounds() -> None:
    bench = FilesBench()
    arrays = arrays_of(bench, 30, 30, 30)
    run = bench.run(bench.program(2, needs(100)))
    for array, later in zip(arrays, [*arrays[1:], None], strict=True):
        assert bench.orders()[-1] == ((array,), False)
        bench.spilled(array)
        if later is not None:
            assert bench.orders()[-1] == ((array,), True)
            bench.spilled(array)
    assert bench.launched() == [run.run]
    assert [bench.tier(array) for array in arrays] == [Tier.FILE, Tier.FILE, Tier.HOST]
    assert not bench.refused()


def test_what_cannot_be_written_stays_in_host_memory_and_is_not_written_again() -> None:
    bench = FilesBench()
    first, second = arrays_of(bench, 40, 40)
    run = bench.run(bench.program(2, needs(100)))
    bench.spilled(first)
    bench.spilled(kept=(first,))
    assert (bench.tier(first), bench.tier(second)) == (Tier.HOST_STAYS, Tier.DEVICE)
    assert [one.run for one in bench.refused()] == [run.run]
    assert bench.orders() == [((first,), False), ((first,), True)]
    bench.tell(msg.Release(1, (first,), (("h0",),)))
    assert bench.in_host_memory() == 0


def test_an_array_that_is_deleted_while_it_is_written_counts_until_then() -> None:
    bench = FilesBench()
    (first,) = arrays_of(bench, 40)
    away(bench, first)
    second = client_id(2, 5)
    bench.upload(second, 40)
    bench.run(bench.program(2, needs(80)))
    bench.tell(msg.Release(1, (first,), (("h0",),)))
    assert bench.in_host_memory() == 40
    bench.spilled(first)
    assert bench.orders()[-1] == ((second,), False)
    bench.spilled(second)
    assert bench.memory.tiers.off == {bench.memory.buffers[second]}


def test_all_hosts_of_an_array_have_written_it_before_their_memory_is_free() -> None:
    bench = FilesBench()
    array, other = client_id(1, 5), client_id(2, 5)
    bench.tell(msg.ArrayPlaced(array, (DEVICE, OTHER), 40), msg.UploadEnded(array))
    bench.run(bench.program(2, needs(100)))
    bench.spilled(array)
    bench.spilled(array, host="h1")
    bench.end(bench.launches()[-1])
    bench.upload(other, 40)
    bench.run(bench.program(2, needs(80)))
    assert bench.orders("h0")[-1] == bench.orders("h1")[-1] == ((array,), True)
    bench.spilled(array)
    assert (bench.tier(array), bench.in_host_memory()) == (Tier.WRITING, 40)
    bench.spilled(array, host="h1")
    assert (bench.tier(array), bench.in_host_memory("h1")) == (Tier.FILE, 0)


def test_what_no_run_reads_for_minutes_goes_to_a_file() -> None:
    bench = FilesBench(spill_bytes=1000)
    bench.scheduler.residency.idle_s = 60.0
    first, second = arrays_of(bench, 40, 40)
    away(bench, first, second)
    bench.after(60)
    assert bench.orders() == [((first, second), False)]
    bench.read(1, second)
    away(bench, second)
    bench.after(60)
    assert bench.orders()[-1] == ((first,), True)
    bench.spilled(first)
    bench.after(60)
    assert bench.orders()[-1] == ((second,), True)
    bench.spilled(second)
    assert bench.in_host_memory() == 0


# --- in one process ----------------------------------------------------------------------------------


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[InProcessCluster]:
    with InProcessCluster(
        devices_per_island=2,
        device_memory_bytes=8 * MIB,
        spill_bytes=12 * MIB,
        spill_files=str(tmp_path),
    ) as cluster:
        yield cluster


def files_in(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def trained(layers: int, steps: int) -> list[np.ndarray[Any, Any]]:
    """Weights of layers of 2 MiB on each of two devices, after some steps of training."""
    mesh, rows = split_over_two()

    @pw.jit(mesh=mesh, donate_argnums=0)
    def step(weights: Any, inputs: Any) -> Any:
        return weights - 0.01 * jax.grad(lambda w: jnp.square(jnp.tanh(w * inputs)).sum())(weights)

    random = np.random.default_rng(0)
    inputs = pw.put(random.standard_normal((1024, 1024), np.float32), sharding=rows)
    weights = [
        pw.put(random.standard_normal((1024, 1024), np.float32), sharding=rows)
        for _ in range(layers)
    ]
    for _ in range(steps):
        weights = [step(layer, inputs) for layer in weights]
    return [np.asarray(layer) for layer in weights]


def test_more_than_devices_and_host_memory_hold_trains_to_the_same_values(
    cluster: InProcessCluster, tmp_path: Path
) -> None:
    layers = 12  # 24 MiB on each device, which has 8; 48 MiB in all, and 28 without files
    values = trained(layers, steps=3)
    stats = pw.stats()["host-0"]
    assert stats["file_bytes_written"] > 20 * MIB
    assert stats["file_bytes_read"] > 20 * MIB
    cluster.close()
    assert not files_in(tmp_path)
    with InProcessCluster(devices_per_island=2):
        for value, unbound in zip(values, trained(layers, steps=3), strict=True):
            assert np.array_equal(value, unbound)


def test_an_array_in_a_file_is_read_saved_shared_and_deleted_like_others(
    cluster: InProcessCluster, tmp_path: Path
) -> None:
    mesh, rows = split_over_two()
    add = pw.jit(lambda x: x + 1, mesh=mesh)
    values = [np.arange(MIB, dtype=np.float32) + 10 * at for at in range(12)]
    arrays = [add(pw.put(value, sharding=rows)) for value in values]
    arrays = [add(x) for x in arrays]  # all of them have left the devices by now, but the last
    pw.block_until_ready(arrays)
    assert sum(one.file_bytes or 0 for one in pw.memory().devices) >= 4 * MIB
    folder = tmp_path / "saved"
    pw.checkpoint(arrays, path=str(folder)).result()
    for x, value in zip(arrays, values, strict=True):
        assert np.array_equal(np.asarray(x), value + 2)
    restored = pw.restore(str(folder), like=arrays)
    pw.publish("first", arrays[0])
    assert np.array_equal(np.asarray(pw.lookup("first")), values[0] + 2)
    assert np.array_equal(np.asarray(add(arrays[1])), values[1] + 3)
    assert np.array_equal(np.asarray(arrays[2][:5]), values[2][:5] + 2)
    for x, value in zip(restored, values, strict=True):
        assert np.array_equal(np.asarray(x), value + 2)


def test_an_array_that_leaves_again_is_not_written_again(
    cluster: InProcessCluster, tmp_path: Path
) -> None:
    mesh, rows = split_over_two()
    add = pw.jit(lambda x, y: x + y.sum(), mesh=mesh)
    values = [np.arange(MIB, dtype=np.float32) + at for at in range(12)]
    layers = [pw.put(value, sharding=rows) for value in values]
    total = pw.put(np.zeros(2, np.float32), sharding=rows)

    def sweep() -> int:
        nonlocal total
        for layer in layers:
            total = add(total, layer)
        pw.block_until_ready(total)
        return int(pw.stats()["host-0"]["file_bytes_written"])

    written = [sweep() for _ in range(4)]
    assert written[0] > 20 * MIB
    layers_bytes = sum(value.nbytes for value in values)
    assert written[-1] < layers_bytes + MIB, "each layer once, and small totals"
    for layer, value in zip(layers, values, strict=True):
        assert np.array_equal(np.asarray(layer), value)
    layers.clear()
    del layer
    until(lambda: not files_in(tmp_path), "files are deleted with their arrays")


def test_on_a_full_disk_arrays_stay_in_host_memory_and_the_log_says_so_once(
    cluster: InProcessCluster,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def full(descriptor: int, data: Any, offset: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(spill_files.os, "pwrite", full)
    mesh, rows = split_over_two()
    add = pw.jit(lambda x: x + 1, mesh=mesh)
    values = [np.arange(MIB, dtype=np.float32) + at for at in range(12)]
    arrays = [pw.put(value, sharding=rows) for value in values]
    results = [add(x) for x in arrays]
    errors: list[pw.OutOfDeviceMemory] = []
    for x, value in zip(results, values, strict=True):
        try:
            assert np.array_equal(np.asarray(x), value + 1)
        except pw.OutOfDeviceMemory as error:
            errors.append(error)
    assert errors
    assert "--spill" in str(errors[0])
    for x, value in zip(arrays, values, strict=True):
        assert np.array_equal(np.asarray(x), value)
    warnings = [
        one.getMessage() for one in caplog.records if "stay in host memory" in one.getMessage()
    ]
    assert len(warnings) == 1
    for words in (str(tmp_path), "No space left", "Make room there"):
        assert words in warnings[0]
    assert not files_in(tmp_path)


# --- real processes ----------------------------------------------------------------------------------


def folder_of(host: Any, folder: Path) -> Path:
    """The folder of a worker's runtime, which has it open."""
    opened = set()
    for descriptor in Path(f"/proc/{host.runtime_pid()}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # it was closed meanwhile
            opened.add(Path(os.readlink(descriptor)))
    (own,) = opened & set(folder.iterdir())
    return own


@pytest.mark.processes
def test_a_killed_worker_leaves_no_files_behind_after_its_restart(tmp_path: Path) -> None:
    with pw.LocalCluster(
        1, 2, spare_hosts=1, device_memory="8MiB", spill="12MiB", spill_files=tmp_path
    ) as local:
        sweeps = Sweeps()
        sweeps.sweep()
        pw.block_until_ready(sweeps.arrays)
        assert files_in(tmp_path)
        assert len(list(tmp_path.iterdir())) == 3, "a folder for each worker"
        left = folder_of(local.hosts[0], tmp_path)
        assert files_in(left)
        local.hosts[0].kill()
        sweeps.sweep()
        sweeps.check()
        local.hosts[0].restart()
        until(lambda: not left.exists(), "another worker removes the files of a killed one")
    assert not list(tmp_path.iterdir())


TENANT = """
import sys, numpy as np, pw
from tests.stages.daemons import until
runtime = pw.connect()
until(lambda: any(island.formed for island in runtime.ask.status(20.0).islands), "an island")
mesh = pw.Mesh(pw.make_virtual_device_set().add_slice(devices=1).devices, ("x",))
start = int(sys.argv[1])
add = pw.jit(lambda x: x * 3 + 1, mesh=mesh, donate_argnums=0)
values = [np.full(1 << 19, start + at, np.float32) for at in range(12)]  # 2 MiB
arrays = [pw.put(value, list(mesh.devices.flat)) for value in values]
for _ in range(3):
    arrays = [add(x) for x in arrays]
for x, value in zip(arrays, values, strict=True):
    assert np.array_equal(np.asarray(x), value * 27 + 13)
print("computed", pw.stats()["h"]["file_bytes_read"] > 0, flush=True)
"""


@pytest.mark.processes
def test_two_tenants_over_tls_share_the_tiers(tmp_path: Path) -> None:
    authority, disk = Authority.create(), tmp_path / "disk"
    disk.mkdir()
    started: list[Program] = []

    def start(module: str, role: Role, name: str, *arguments: object) -> Program:
        keys = issue(authority, tmp_path / f"{name}.pem", role, name)
        options = (*arguments, "--credentials", keys)
        started.append(start_module(module, *options, folder=tmp_path))
        return started[-1]

    try:
        controller = start(
            "pw.cli.controller", Role.CONTROLLER, "one", "--bind", "tcp://127.0.0.1:0"
        )
        controller.until_says("listens at")
        (address,) = re.findall(r"listens at (\S+)", controller.out)
        place = ("--controller", address, "--island", "i", "--device-memory", "8MiB")
        start(
            *("pw.cli.worker", Role.WORKER, "h", *place, "--spill", "8MiB", "--spill-files", disk)
        )
        for number, tenant in enumerate(("red", "blue")):
            keys = issue(authority, tmp_path / f"{tenant}.pem", Role.CLIENT, tenant, tenant)
            variables = {"PW_ADDRESS": address, "PW_CREDENTIALS": str(keys), "JAX_PLATFORMS": "cpu"}
            script = Program(tmp_path, ["-c", TENANT, str(100 * number)], **variables)
            started.append(script)
        for script in started[2:]:
            assert script.end() == 0, script.err
            assert "computed True" in script.out
    finally:
        for program in reversed(started):
            program.kill()
