"""Daemons with credentials: the ports that they open, and clients that listen nowhere."""

from __future__ import annotations

import ipaddress
import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pw.core.messages.roles import Role
from tests.stages.cluster import authority
from tests.stages.daemons import Program, start_module

pytestmark = pytest.mark.processes

SCRIPT = """
import socket, sys

def refuse(*_):
    raise OSError("a client must not listen")

socket.socket.listen = refuse
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
import pw

pw.connect(sys.argv[1], credentials=sys.argv[2])
devices = pw.make_virtual_device_set().add_slice(devices=2).devices
mesh = pw.Mesh(np.reshape(devices, (2,)), ("d",))
double = pw.jit(lambda x: (2 * x, jnp.sum(x)), mesh=mesh, in_shardings=P("d"))
for size in (8, 4_000_000):
    value = np.ones(size, dtype=np.float32)
    doubled, total = double(value)
    assert np.array_equal(np.asarray(doubled), 2 * value), size
    assert float(total) == size
print("all is well", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Program]]:
    programs: list[Program] = []

    def begin(module: str, *arguments: object, **variables: str) -> Program:
        programs.append(start_module(module, *arguments, folder=tmp_path, **variables))
        return programs[-1]

    yield begin
    for program in programs:
        program.kill()


def issue(folder: Path, role: Role, name: str) -> Path:
    file = folder / f"{name}.pem"
    file.touch(0o600)
    tenant = "research" if role is Role.CLIENT else ""
    file.write_bytes(authority().issue(role, name, tenant))
    return file


def listening(program: Program) -> set[tuple[str, int]]:
    """The addresses and ports at which a program, or what it has started, listens."""
    inodes = set()
    for pid in program.family():
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            try:
                target = os.readlink(descriptor)
            except OSError:
                continue
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for row in Path(table).read_text().splitlines()[1:]:
            fields = row.split()
            if fields[3] == "0A" and fields[9] in inodes:
                address, _, port = fields[1].partition(":")
                packed = bytes.fromhex(address)
                words = struct.unpack(f">{len(packed) // 4}I", packed)
                host = ipaddress.ip_address(struct.pack(f"<{len(words)}I", *words))
                host = getattr(host, "ipv4_mapped", None) or host
                found.add((str(host), int(port, 16)))
    return found


def test_a_cluster_with_credentials_opens_one_port_a_host(
    start: Callable[..., Program], tmp_path: Path
) -> None:
    """And XLA's own traffic is at the private address; a client with credentials needs no port."""
    chunks = {"PW_BULK": "tcp"}
    controller = start(
        "pw.cli.controller",
        *("--bind", "tcp://127.0.0.1:0", "--private-address", "127.0.0.3"),
        *("--credentials", issue(tmp_path, Role.CONTROLLER, "controller")),
    )
    controller.until_says("pw-controller listens at ")
    address = controller.out.partition("listens at ")[2].strip()
    first_port = 20_000 + os.getpid() % 20_000
    workers = [
        start(
            "pw.cli.worker",
            *("--controller", address, "--island", "east", "--island-hosts", 2, "--name", name),
            *("--bind", f"tcp://127.0.0.2:{first_port}-{first_port + 9}"),
            *("--private-address", "127.0.0.3", "--log-level", "info"),
            *("--credentials", issue(tmp_path, Role.WORKER, name)),
            **chunks,
        )
        for name in ("one", "two")
    ]
    for worker in workers:
        worker.until_says("island=east")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    client = Program(
        tmp_path, [str(script), address, str(issue(tmp_path, Role.CLIENT, "laptop"))], **chunks
    )
    try:
        client.until_says("all is well", 120.0)
    finally:
        client.kill()
    for worker in workers:
        own = {host for host, _ in listening(worker)}
        ports = [port for host, port in listening(worker) if host == "127.0.0.2"]
        assert own <= {"127.0.0.2", "127.0.0.3"}
        assert len(ports) == 1
        assert first_port <= ports[0] <= first_port + 9
    assert {host for host, _ in listening(controller)} == {"127.0.0.1", "127.0.0.3"}
