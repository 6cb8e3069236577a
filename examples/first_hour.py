"""The first hour with `pw`: failures, other clients, the placement of arrays, messages.

Run it: `python -m examples.first_hour`, in about half a minute. Each line reports an observation,
and the script fails if the observation is wrong. docs/guide.md shows the output.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import pw

SHARES = (1, 4)
CLIENTS_S = 4.0
RECOVERED_S = 10.0
"""A limit for slow machines; a recovery takes about one second."""


def say(text: str) -> None:
    print("  " + text, flush=True)


def spin(x: jax.Array, turns: int = 1_000_000) -> jax.Array:
    """A computation of some milliseconds."""
    return jax.lax.fori_loop(0, turns, lambda _, y: y * 0.999 + 1e-3, x)


def hang(x: jax.Array) -> jax.Array:
    """A computation that never ends."""
    return jax.lax.while_loop(lambda y: y >= 0, lambda y: y + 1 - 1, x)


def tcp_ports(pid: int) -> int:
    """The number of tcp ports on which a process listens."""
    names = (os.readlink(name) for name in Path(f"/proc/{pid}/fd").iterdir() if name.exists())
    sockets = {name[8:-1] for name in names if name.startswith("socket:[")}
    lines = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]
    ]
    return sum(line[3] == "0A" and line[9] in sockets for line in lines)


def failures(mesh: pw.Mesh) -> None:
    """A hung call and a killed host, on the cluster that this script starts."""
    print("1. The cluster that a script starts beside itself")
    kept = pw.put(np.arange(4.0), sharding=pw.NamedSharding(mesh, P("data")))
    double = pw.jit(lambda x: x * 2, mesh=mesh)
    double(kept).block_until_ready()
    try:
        pw.jit(hang, timeout=1)(1.0).block_until_ready()
    except pw.ComputationTimeout as error:
        say(f"a call that hung: {str(error).partition('. ')[0]}")
    begun_s = time.monotonic()
    assert np.array_equal(double(kept), [0.0, 2.0, 4.0, 6.0])
    say(f"the next call had the right values {time.monotonic() - begun_s:.1f} s later")
    (host,) = pw.status().islands[0].hosts
    ports = tcp_ports(host.pid) + tcp_ports(os.getpid())
    say(f"tcp ports that the host and this script listen on: {ports}")
    os.kill(host.pid, signal.SIGKILL)
    begun_s = time.monotonic()
    assert np.array_equal(double(kept), [0.0, 2.0, 4.0, 6.0])
    took_s = time.monotonic() - begun_s
    assert took_s < RECOVERED_S
    say(f"its host was killed; the next call had the right values {took_s:.1f} s later")


def client(share: float) -> None:
    """A client that waits for each result; prints the number of its calls."""
    pw.connect(share=share)
    step = pw.jit(spin)
    x = step(1.0)
    x.block_until_ready()
    print("ready", flush=True)
    sys.stdin.readline()
    calls, end_s = 0, time.monotonic() + CLIENTS_S
    while time.monotonic() < end_s:
        x = step(x)
        x.block_until_ready()
        calls += 1
    print(calls)


def neighbours() -> None:
    """Shares of two clients that wait for their results."""
    print("2. Two clients that wait for every result, with shares 1:4")
    with pw.LocalCluster(policy="share", connect=False) as cluster:
        clients = [
            subprocess.Popen(
                [sys.executable, "-m", "examples.first_hour", "--client", str(share)],
                env=os.environ | {"PW_ADDRESS": cluster.address},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for share in SHARES
        ]
        for client in clients:
            assert client.stdout is not None
            assert client.stdout.readline() == "ready\n"
        for client in clients:
            assert client.stdin is not None
            client.stdin.write("go\n")
            client.stdin.flush()
        calls = [int(client.communicate()[0]) for client in clients]
    say(f"calls: {calls[0]} and {calls[1]}, which is 1:{calls[1] / calls[0]:.1f}")


def placement(mesh: pw.Mesh) -> None:
    """The shardings of results; arrays are never fetched or replicated without a request."""
    print("3. Arrays stay where they are")
    x = pw.put(np.arange(16.0).reshape(4, 4), sharding=pw.NamedSharding(mesh, P("data")))
    try:
        jnp.stack([x, x])
    except pw.ArgumentError as error:
        say(f"jnp.stack([x, x]): {error}")
    stack = pw.jit(lambda a, b: jnp.stack([a, b]))
    for name, value in {
        "x": x,
        "x.T": x.T,
        "x[:, :2]": x[:, :2],
        "pw.jit(lambda x: x * 2)(x)": pw.jit(lambda x: x * 2)(x),
        "pw.jit(jnp.stack)": stack(x, x),
        "x.sum()": x.sum(),
    }.items():
        say(f"{name}: {value.shape} {value.sharding.spec}")
    half = pw.jit(lambda x: jnp.mean(x**2) / 2)
    gradient = pw.jit(jax.grad(lambda x: half(x) + half(x)))(x)
    np.testing.assert_allclose(gradient, np.arange(16.0).reshape(4, 4) / 8)
    say(f"a gradient through pw.jit functions: {gradient.shape} {gradient.sharding.spec}")


def words(mesh: pw.Mesh) -> None:
    """Output of hosts, and errors that name the functions and paths of this script."""
    print("4. What is said", flush=True)

    def show(x: np.ndarray) -> np.ndarray:
        print(f"the host has read {x.sum():g}", flush=True)
        return x

    shape = jax.ShapeDtypeStruct((2,), np.float32)
    pw.get(pw.host_function(show, shape, devices=list(mesh.devices)[:1])(np.ones(2, np.float32)))

    @pw.jit
    def pick(x: jax.Array) -> jax.Array:
        return x if x > 0 else -x

    try:
        pick(1.0)
    except jax.errors.TracerBoolConversionError as error:
        function = traceback.extract_tb(error.__traceback__)[-1].name
        say(f"a Python if on a traced value: {type(error).__name__} in {function!r}")
    with tempfile.TemporaryDirectory() as folder:
        try:
            pw.restore(folder + "/none", {"w": 0})
        except pw.Error as error:
            say(f"{type(error).__name__}: {str(error).replace(folder, '…')}")
    status = pw.status()
    say(f"pw.status(): {len(status.islands)} island, {status.islands[0].devices} devices")


def main() -> None:
    devices = pw.make_virtual_device_set().add_slice(devices=4).devices
    mesh = pw.Mesh(devices, ("data",))
    failures(mesh)
    neighbours()
    placement(mesh)
    words(mesh)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--client"]:
        client(float(sys.argv[2]))
    else:
        main()
