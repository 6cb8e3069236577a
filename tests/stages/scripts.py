"""Clients as processes of their own, for tests in which several clients share a cluster."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pw

ROOT = Path(__file__).resolve().parents[2]

PRELUDE = """
import os, sys, time
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import PartitionSpec as P
import pw
"""


TWO_GANGS = """
slices = pw.make_virtual_device_set()
here, there = (
    pw.Mesh(slices.add_slice(devices=2, island=island).devices, ("x",))
    for island in ("island-0", "island-1")
)

def step(x):
    return x * np.uint32(22695477) + jnp.sum(x, dtype=jnp.uint32) + np.uint32(7)

split = {"in_shardings": P("x"), "out_shardings": P("x")}
on_first = pw.jit(step, mesh=here, **split)
on_second = pw.jit(step, mesh=there, **split)

def after(x, steps):
    with np.errstate(over="ignore"):
        for _ in range(steps):
            x = x * np.uint32(22695477) + x.sum(dtype=np.uint32) + np.uint32(7)
    return x
"""
"""A step with a collective, for gangs of two hosts on each of two islands; `after` computes it in numpy."""


def two_gangs() -> pw.LocalCluster:
    """A cluster for `TWO_GANGS`: two islands of two hosts."""
    return pw.LocalCluster(islands=2, hosts_per_island=2, devices_per_host=1, connect=False)


def start_client(address: str, body: str, **variables: str) -> subprocess.Popen[str]:
    """Run `body` (after the usual imports) in a process connected to `address`."""
    environment = os.environ | {"PW_ADDRESS": address, "PYTHONPATH": str(ROOT)} | variables
    return subprocess.Popen(
        [sys.executable, "-c", PRELUDE + textwrap.dedent(body)],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(client: subprocess.Popen[str], timeout_s: float = 90.0) -> str:
    """What the client printed. Fails with its errors if it did not end well, or in time."""
    try:
        output, errors = client.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        client.kill()
        output, errors = client.communicate()
        raise AssertionError(f"the client hung\n{output}\n{errors}") from None
    assert client.returncode == 0, f"exit code {client.returncode}\n{output}\n{errors}"
    return output


def two_clients_say_ok(address: str, body: str) -> None:
    """Run `body` in two processes at once; each must print "ok" and nothing else."""
    clients = [start_client(address, body) for _ in range(2)]
    assert [finish(client).strip() for client in clients] == ["ok", "ok"]
