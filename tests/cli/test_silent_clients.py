"""Clients that are silent for longer than the lease, and go on with all that they have."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

import pw
from tests.stages.daemons import send, until
from tests.stages.scripts import Client, finish, start_client

pytestmark = pytest.mark.processes

LEASE_S = 3.0

STEPS = """
import ctypes
mesh = pw.Mesh(pw.make_virtual_device_set().add_slice(devices=1).devices, ("d",))
step = pw.jit(lambda x: x + 1, mesh=mesh)
kept, x = pw.put(np.arange(10.0)), pw.put(np.float32(0))

def call(times):
    global x
    for _ in range(times):
        x = step(x)
        x.block_until_ready()

def leased():
    return any(counters.get("leased_launches") for counters in pw.stats().values())

while not leased():
    call(50)
before = float(x)
print("under a lease", flush=True)
"""
IN_PYTHON = "sys.stdin.readline()"
IN_C = "ctypes.PyDLL(None).read(0, ctypes.create_string_buffer(1), 1)  # keeps Python's lock"
AFTER = """
call(50)
assert float(x) == before + 50, x
assert float(np.asarray(kept).sum()) == 45
print("went on")
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[pw.LocalCluster]:
    with pw.LocalCluster(devices_per_host=2, lease_s=LEASE_S) as cluster:
        yield cluster


def silent_s(client: Client) -> float:
    """How long the controller has heard nothing of a client; -1 if it does not have it."""
    name = f"pid {client.process.pid}"
    return next((one.silent_s for one in pw.status().clients if one.name.endswith(name)), -1.0)


def begun(cluster: pw.LocalCluster, meanwhile: str) -> Client:
    client = start_client(cluster.address, STEPS + meanwhile + AFTER)
    assert client.stdout.readline() == "under a lease\n"
    return client


def test_a_client_that_is_stopped_or_in_c_code_loses_nothing(cluster: pw.LocalCluster) -> None:
    stopped, computing = begun(cluster, IN_PYTHON), begun(cluster, IN_C)
    try:
        send(stopped.process.pid, signal.SIGSTOP)
        for client in (stopped, computing):
            until(lambda client=client: silent_s(client) > 2 * LEASE_S, "it is silent")
        words = pw.why()
        for client in (stopped, computing):
            assert any(
                f"pid {client.process.pid}) is silent for" in line
                for line in str(words).splitlines()
            ), words
        send(stopped.process.pid, signal.SIGCONT)
        for client in (stopped, computing):
            client.stdin.write("\n")
            client.stdin.flush()
            assert finish(client) == "went on\n"
    finally:
        for client in (stopped, computing):
            client.process.kill()


def test_a_stopped_client_that_dies_is_gone_at_once(cluster: pw.LocalCluster) -> None:
    client = begun(cluster, IN_PYTHON)
    send(client.process.pid, signal.SIGSTOP)
    until(lambda: silent_s(client) > 0.0, "it is silent")
    client.process.kill()
    until(lambda: silent_s(client) < 0.0, "it is gone")
    client.finish(60.0)
