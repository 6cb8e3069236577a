"""Names between processes: a trainer here, servers elsewhere, and hosts and trainers that die."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pw
from tests.stages.daemons import Program, start_module, until
from tests.stages.scripts import finish, start_client

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]

VERSIONS = 4

SERVER = """
import sys, numpy as np, pw
address, island, last = sys.argv[1], sys.argv[2], int(sys.argv[3])
pw.connect(address)
mesh = pw.Mesh(pw.make_virtual_device_set().add_slice(devices=2, island=island).devices, ("x",))
like, seen = pw.NamedSharding(mesh, pw.PartitionSpec("x")), 0
while seen < last:
    weights = pw.lookup("served", after=seen, like=like, wait=60)
    seen = pw.version_of(weights)
    steps = {float(x) for array in weights["layers"] for x in np.unique(np.asarray(array))}
    assert steps == {float(weights["step"])}, (steps, weights["step"])
    print("version", seen, flush=True)
print("done", flush=True)
"""

TRAINER = """
import signal, sys, numpy as np, pw
pw.connect(sys.argv[1])
mesh = pw.Mesh(pw.make_virtual_device_set().add_slice(devices=2, island="island-0").devices, ("x",))
x = pw.put(np.arange(4096.0, dtype=np.float32), sharding=pw.NamedSharding(mesh, pw.PartitionSpec("x")))
x = pw.jit(lambda x: x + 1, mesh=mesh, donate_argnums=0)(x)
pw.publish("kept", {"x": x}, keep="1h").result(60)
print("published", flush=True)
signal.pause()
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[pw.LocalCluster]:
    with pw.LocalCluster(islands=2, hosts_per_island=2, devices_per_host=1) as cluster:
        yield cluster


@pytest.fixture
def scripts(tmp_path: Path) -> Iterator[Any]:
    started: list[Program] = []

    def start(script: str, *arguments: object) -> Program:
        started.append(Program(tmp_path, ["-c", script, *map(str, arguments)], JAX_PLATFORMS="cpu"))
        return started[-1]

    yield start
    for one in started:
        one.kill()


def mesh_on(island: int) -> pw.Mesh:
    added = pw.make_virtual_device_set().add_slice(devices=2, island=f"island-{island}")
    return pw.Mesh(added.devices, ("x",))


def replica_bytes() -> int:
    return sum(of.get("replica_bytes", 0) for of in pw.stats().values())


def kill_runtime(cluster: pw.LocalCluster) -> None:
    """Kill the runtime of a host of island-0; its supervisor starts another one."""
    placed = {host.name: host.island for host in pw.status().hosts}
    victim = next(host for host in cluster.hosts if placed[host.name] == "island-0")
    pid = victim.runtime_pid()
    assert pid is not None
    os.kill(pid, signal.SIGKILL)


def test_servers_follow_a_trainer_that_donates(cluster: pw.LocalCluster, scripts: Any) -> None:
    mesh = mesh_on(0)
    sharding = pw.NamedSharding(mesh, pw.PartitionSpec("x"))
    layers = pw.put([np.zeros(200_000, np.float32) for _ in range(3)], sharding=sharding)
    step = pw.jit(lambda layers: [x + 1 for x in layers], mesh=mesh, donate_argnums=0)
    servers = [scripts(SERVER, cluster.address, f"island-{at}", VERSIONS) for at in (1, 0)]
    for number in range(1, VERSIONS + 1):
        layers = step(layers)
        assert pw.publish("served", {"layers": layers, "step": number}).result(60) == number
    for server in servers:
        assert server.end() == 0, server.err
        assert f"version {VERSIONS}" in server.out
    until(lambda: pw.names()["served"].readers == 0, "the servers have left")
    assert pw.names()["served"].versions == (VERSIONS,)
    pw.unpublish("served")


def test_a_lost_host_is_repaired_for_the_name_and_its_readers(cluster: pw.LocalCluster) -> None:
    mesh = mesh_on(0)
    value = np.arange(100_000, dtype=np.float32)
    x = pw.put(value, sharding=pw.NamedSharding(mesh, pw.PartitionSpec("x")))
    pw.publish("repaired", {"x": pw.jit(lambda x: 2 * x, mesh=mesh)(x)}).result(60)
    there = pw.NamedSharding(mesh_on(1), pw.PartitionSpec("x"))
    here, moved = pw.lookup("repaired"), pw.lookup("repaired", like=there)
    pw.block_until_ready((here, moved))
    kill_runtime(cluster)
    for found in (here, moved, pw.lookup("repaired", wait=60)):
        np.testing.assert_array_equal(pw.get(found["x"], timeout=90), 2 * value)


def test_a_name_outlasts_its_trainer_and_a_host(
    cluster: pw.LocalCluster, scripts: Any, tmp_path: Path
) -> None:
    trainer = scripts(TRAINER, cluster.address)
    trainer.until_says("published")
    trainer.kill()
    until(lambda: pw.names()["kept"].maker == 0, "the trainer has left")
    shown = Program(
        tmp_path, ["-m", "pw.cli.main", "names", "--address", str(cluster.address), "--json"]
    )
    assert shown.end() == 0, shown.err
    (row,) = [one for one in json.loads(shown.out)["names"] if one["name"] == "kept"]
    assert (row["version"], row["size_bytes"], row["keep_s"]) == (1, 4096 * 4, 3600.0)
    value = np.arange(4096, dtype=np.float32) + 1
    np.testing.assert_array_equal(pw.lookup("kept")["x"], value)
    until(lambda: replica_bytes() >= 2 * 4096 * 4, "each of its shards has two replicas")
    kill_runtime(cluster)
    np.testing.assert_array_equal(pw.get(pw.lookup("kept", wait=60)["x"], timeout=90), value)
    pw.unpublish("kept")


RESTARTED = """
mesh = pw.Mesh(pw.make_virtual_device_set().add_slice(devices=2).devices, ("x",))
x = pw.put(np.arange(8.0), sharding=pw.NamedSharding(mesh, pw.PartitionSpec("x")))
step = pw.jit(lambda x: x + 1, mesh=mesh)
for number in range(1, 3):
    x = step(x)
    pw.publish("base", {"x": x, "step": number}).result(60)
held = pw.block_until_ready(pw.lookup("base"))
print("published", flush=True)
sys.stdin.readline()
found = pw.lookup("base", wait=60)
assert (pw.version_of(found), found["step"]) == (2, 2), pw.version_of(found)
for tree in (found, held):
    assert np.array_equal(pw.get(tree["x"], timeout=60), np.arange(8.0) + 2)
assert pw.publish("base", {"x": step(x), "step": 3}).result(60) == 3
assert np.array_equal(pw.get(pw.lookup("base")["x"], timeout=60), np.arange(8.0) + 3)
print("told again")
"""


def test_publishers_tell_another_controller_of_their_names(tmp_path: Path) -> None:
    started: list[Program] = []

    def start(module: str, *arguments: object) -> Program:
        started.append(start_module(module, *arguments, folder=tmp_path))
        return started[-1]

    try:
        controller = start("pw.cli.controller", "--bind", "tcp://127.0.0.1:0")
        controller.until_says("listens at")
        address = re.findall(r"listens at (\S+)", controller.out)[0]
        start("pw.cli.worker", "--controller", address, "--island", "i", "--devices", 2)
        script = start_client(address, RESTARTED)
        assert script.stdout.readline() == "published\n"
        controller.kill()
        start("pw.cli.controller", "--bind", address).until_says("listens at")
        script.stdin.write("\n")
        assert finish(script) == "told again\n"
    finally:
        for one in reversed(started):
            one.kill()
