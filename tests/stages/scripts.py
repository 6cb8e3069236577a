"""Clients as processes of their own, for tests in which several clients share a cluster."""

from __future__ import annotations

import contextlib
import os
import tempfile
import textwrap
import threading
from pathlib import Path

import pw
from tests.stages.programs import start

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


class Client:
    """A script that runs: text goes to its `stdin`, and comes from its `stdout`."""

    def __init__(self, code: str, variables: dict[str, str]) -> None:
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - of the whole life
        theirs_in, ours_in = os.pipe()
        ours_out, theirs_out = os.pipe()
        streams = (theirs_in, theirs_out, self._errors.fileno())
        try:
            self.process = start(["-c", code], variables, Path.cwd(), streams)
        finally:
            os.close(theirs_in)
            os.close(theirs_out)
        self.stdin, self.stdout = os.fdopen(ours_in, "w"), os.fdopen(ours_out)

    def finish(self, timeout_s: float) -> tuple[str, str]:
        """Return the rest of its output, and its errors. It is killed after the time-out."""
        late = threading.Timer(timeout_s, self.process.kill)
        late.start()
        with contextlib.suppress(BrokenPipeError):
            self.stdin.close()
        output = self.stdout.read()
        self.stdout.close()
        self.process.wait()
        late.cancel()
        self._errors.seek(0)
        with self._errors:
            return output, self._errors.read()


def start_client(address: str, body: str, **variables: str) -> Client:
    """Run `body` (after the usual imports) in a process connected to `address`."""
    return Client(PRELUDE + textwrap.dedent(body), os.environ | {"PW_ADDRESS": address} | variables)


def finish(client: Client, timeout_s: float = 90.0) -> str:
    """What the client printed. Fails with its errors if it did not end well, or in time."""
    output, errors = client.finish(timeout_s)
    code = client.process.returncode
    assert code == 0, f"exit code {code}, within {timeout_s:g} s\n{output}\n{errors}"
    return output


def two_clients_say_ok(address: str, body: str) -> None:
    """Run `body` in two processes at once; each must print "ok" and nothing else."""
    clients = [start_client(address, body) for _ in range(2)]
    assert [finish(client).strip() for client in clients] == ["ok", "ok"]
