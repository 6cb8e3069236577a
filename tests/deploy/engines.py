"""What the tests of engines share: a training script, cluster files, and a real sshd on the loopback."""

from __future__ import annotations

import getpass
import os
import random
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from tests.stages.daemons import until
from tests.stages.programs import ROOT

SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")

TRAIN = """
import pathlib, sys, time
import jax, jax.numpy as jnp, numpy as np, pw
steps = int(sys.argv[1]) if sys.argv[1:] else 40
devices = pw.make_virtual_device_set()
meshes = [pw.Mesh(devices.add_slice(devices=1).devices, ("x",)) for _ in range(2)]
rng = np.random.default_rng(0)
x = rng.normal(size=(64, 8)).astype(np.float32)
y = x @ np.arange(8, dtype=np.float32)
hidden = pw.jit(lambda w, x: jnp.tanh(x @ w), mesh=meshes[0])
loss = pw.jit(lambda v, h, y: jnp.mean((h @ v - y) ** 2), mesh=meshes[1])

@pw.program
def step(w, v, x, y):
    value, (dw, dv) = pw.value_and_grad(lambda w, v: loss(v, hidden(w, x), y), (0, 1))(w, v)
    return descend_w(w, dw), descend_v(v, dv), value

descend_w = pw.jit(lambda p, d: p - 0.05 * d, mesh=meshes[0])
descend_v = pw.jit(lambda p, d: p - 0.05 * d, mesh=meshes[1])
w, v = rng.normal(size=(8, 16)).astype(np.float32) / 3, np.zeros(16, np.float32)
losses, longest_s = [], 0.0
until = pathlib.Path(sys.argv[2]) if sys.argv[2:] else None  # half of the steps before it exists
for number in range(steps):
    if until is not None and number == steps // 2:
        until.with_name("trains").touch()
        kept, calls = (w, v), 0
        while not until.exists():
            begun_s = time.monotonic()
            value = step(*kept, x, y)[2]
            assert float(np.asarray(value)) == float(np.asarray(step(*kept, x, y)[2]))
            longest_s, calls = max(longest_s, time.monotonic() - begun_s), calls + 1
        print(f"{calls} pairs of calls meanwhile", flush=True)
    begun_s = time.monotonic()
    w, v, value = step(w, v, x, y)
    losses.append(float(np.asarray(value)))
    longest_s = max(longest_s, (time.monotonic() - begun_s) * (number > 0))
    if number % 20 == 0:
        pw.checkpoint((w, v))
        print(f"step {number} loss {losses[-1]:.6f}", flush=True)
print(f"trained: loss {losses[0]:.6f} -> {losses[-1]:.6f}, longest step {longest_s:.3f} s", flush=True)
assert losses[-1] < losses[0] / 2
"""


def environment() -> dict[str, str]:
    """Variables with which daemons on this machine run the code of this checkout."""
    return {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "XDG_CACHE_HOME": _caches()}


def _caches() -> str:
    return os.environ.get("XDG_CACHE_HOME", "/tmp")


def write_cluster(folder: Path, **parts: Any) -> Path:
    """Write a cluster file for daemons of this checkout on this machine."""
    path = folder / "cluster.yaml"
    described = {
        "name": "test",
        "python": sys.executable,
        "folder": str(folder / "machine"),
        "keys": str(folder / "keys"),
        "environment": environment(),
    }
    path.write_text(yaml.safe_dump(described | parts))
    return path


def free_port() -> int:
    """Return a free port that no connection gets by chance, for a daemon that is started later."""
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        try:
            port = random.randrange(10_000, first)
            socket.create_server(("127.0.0.1", port)).close()
            return port
        except OSError:  # it is taken
            continue


def pw_command(*arguments: object, bound_s: float = 110.0) -> subprocess.CompletedProcess[str]:
    """Run `pw` in an interpreter of its own."""
    return subprocess.run(
        [sys.executable, "-m", "pw.cli.main", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=bound_s,
        env=os.environ | environment(),
        check=False,
    )


def train(credentials: Path, *arguments: object, bound_s: float = 110.0) -> str:
    """Run the training script on a cluster; return what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", TRAIN, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=bound_s,
        env=os.environ | environment() | {"PW_CREDENTIALS": str(credentials)},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@contextmanager
def sshd(folder: Path) -> Iterator[list[str]]:
    """Run a real sshd on 127.0.0.1 with keys of its own; yield the options of ssh that reach it."""
    assert SSHD is not None
    if os.getuid() == 0:
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # where its unprivileged part lives
    for name in ("host", "user"):
        key = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
        subprocess.run(key, check=True)
    shutil.copy(folder / "user.pub", folder / "authorized")
    port = free_port()
    host_key = (folder / "host.pub").read_text()
    names = f"[127.0.0.1]:{port},[127.0.0.2]:{port}"
    (folder / "known").write_text(f"{names} {host_key}")
    lines = [
        f"Port {port}",
        "ListenAddress 127.0.0.1",
        f"HostKey {folder}/host",
        f"AuthorizedKeysFile {folder}/authorized",
        "StrictModes no",
        "UsePAM no",
        "PasswordAuthentication no",
        "PidFile none",
        f"AllowUsers {getpass.getuser()}",
        "PermitRootLogin prohibit-password",
    ]
    (folder / "sshd_config").write_text("\n".join(lines) + "\n")
    with (folder / "sshd.log").open("wb") as log:
        command = [SSHD, "-D", "-e", "-f", str(folder / "sshd_config")]
        process = subprocess.Popen(command, stderr=log)
    options = ["-F", "none", "-p", str(port), "-i", str(folder / "user")]
    options += ["-o", "IdentitiesOnly=yes", "-o", f"UserKnownHostsFile={folder}/known"]
    try:
        until(lambda: "listening" in (folder / "sshd.log").read_text(), "sshd listens")
        yield options
    finally:
        process.terminate()
        process.wait(10)
