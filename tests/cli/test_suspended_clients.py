"""A client that was suspended, a controller that is started again, and a runtime that is killed."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pw
from tests.stages.daemons import Program, start_module, until
from tests.stages.scripts import finish, start_client

SCRIPT = """
mesh = pw.Mesh(pw.make_virtual_device_set().add_slice(devices=2).devices, ("x",))
x = pw.put(np.arange(8.0), sharding=pw.NamedSharding(mesh, pw.PartitionSpec("x")))
step = pw.jit(lambda x: x + 1, mesh=mesh, donate_argnums=0)
x = pw.block_until_ready(step(x))
print("begun", flush=True)
sys.stdin.readline()
for _ in range(4):
    x = step(x)
assert np.array_equal(pw.get(x, timeout=120), np.arange(8.0) + 5)
print("went on")
"""


@pytest.mark.processes
@pytest.mark.timeout(180)
def test_a_suspended_client_stays_so_under_another_controller(tmp_path: Path) -> None:
    started: list[Program] = []

    def start(module: str, *arguments: object) -> Program:
        started.append(start_module(module, *arguments, folder=tmp_path))
        return started[-1]

    def ask(*arguments: object) -> str:
        asked = start("pw.cli.main", *arguments, "--address", address)
        assert asked.end() == 0, asked.err
        return asked.out

    def clients() -> list[dict[str, Any]]:
        status: dict[str, Any] = json.loads(ask("status", "--json", "--timeout", 30))
        return list(status["clients"])

    try:
        controller = start("pw.cli.controller", "--bind", "tcp://127.0.0.1:0")
        controller.until_says("listens at")
        address = re.findall(r"listens at (\S+)", controller.out)[0]
        worker = start("pw.cli.worker", "--controller", address, "--island", "i", "--devices", 2)
        script = start_client(address, SCRIPT)
        assert script.stdout.readline() == "begun\n"
        (client,) = [one["client"] for one in clients()]
        ask("suspend", client, "--to", "files")
        worker.until_says("copies stay in host memory")  # it has no folder
        controller.kill()
        start("pw.cli.controller", "--bind", address).until_says("listens at")
        until(lambda: [one["client"] for one in clients()] == [client], "the client is back")
        script.stdin.write("\n")
        script.stdin.flush()
        assert "suspended, by" in clients()[0]["suspended"]
        ask("resume", client)
        assert finish(script) == "went on\n"
    finally:
        for one in reversed(started):
            one.kill()


def files_in(folder: Path) -> list[int]:
    """The sizes of all files in a folder."""
    return [path.stat().st_size for path in folder.rglob("*") if path.is_file()]


def parcels_of(host: Any) -> list[str]:
    """The files without a name in which a worker keeps what outlives its runtime."""
    links: list[str] = []
    for descriptor in Path(f"/proc/{host.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # it was closed meanwhile
            links.append(os.readlink(descriptor))
    return [link for link in links if "pw-handover" in link or "parcel-" in link]


@pytest.mark.processes
@pytest.mark.timeout(180)
def test_copies_in_files_take_no_memory_and_outlive_a_killed_runtime(tmp_path: Path) -> None:
    def stats() -> tuple[int, int]:
        of = pw.stats().values()
        names = ("replica_bytes", "replica_file_bytes")
        sums = [sum(counters.get(name, 0) for counters in of) for name in names]
        return sums[0], sums[1]

    with pw.LocalCluster(1, 1, devices_per_host=2, spill="64MiB", spill_files=tmp_path) as local:
        (host,) = local.hosts
        mesh = pw.Mesh(pw.make_virtual_device_set().add_slice(devices=2).devices, ("x",))
        rows = pw.NamedSharding(mesh, pw.PartitionSpec("x"))
        step = pw.jit(lambda x: x * 1.5 + 1, mesh=mesh, donate_argnums=0)
        value = np.random.default_rng(0).standard_normal(1 << 20, np.float32)
        x = step(pw.put(value, sharding=rows))
        pw.block_until_ready(x)
        alone = np.asarray(x)
        pw.suspend(to="files")
        assert stats() == (0, value.nbytes)
        assert sum(files_in(tmp_path)) == value.nbytes
        parcels = parcels_of(host)
        assert parcels, "the worker has what outlives its runtime"
        assert all(str(tmp_path) in parcel for parcel in parcels), parcels
        runtime = host.runtime_pid()
        assert runtime is not None
        os.kill(runtime, signal.SIGKILL)
        until(lambda: host.runtime_pid() not in (None, runtime), "another runtime")
        until(lambda: stats() == (0, value.nbytes), "it has the copies")
        pw.resume()
        np.testing.assert_array_equal(pw.get(x, timeout=90), alone)
        np.testing.assert_array_equal(pw.get(step(x), timeout=90), alone * np.float32(1.5) + 1)
        until(lambda: stats() == (0, 0), "no copies are left")
        del x
        until(lambda: not files_in(tmp_path), "no files are left")
        with pytest.raises(pw.ArgumentError, match='to="memory" or to="files"; not to=\'disk\''):
            pw.suspend(to="disk")  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())
