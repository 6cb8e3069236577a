"""What travels between the processes of a cluster with credentials: no byte of an array in clear."""

from __future__ import annotations

import re
import secrets
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from examples.train_lm.model import ModelConfig, init_params
from pw.core.messages.roles import Role
from pw.transport.access.authority import Authority
from tests.stages.daemons import Program, start_module, until


def _may_capture() -> bool:
    try:
        socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0).close()
    except (AttributeError, OSError):
        return False
    return True


pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(not _may_capture(), reason="only root on Linux sees all packets"),
]

MARKER = b"a secret weight!"
CONTROLLER, WORKERS, CLIENT = "127.0.0.2", ("127.0.0.3", "127.0.0.4"), "127.0.0.1"
_ALL_PROTOCOLS = 3  # ETH_P_ALL

SCRIPT = f"""
import sys, jax, numpy as np, pw
from tests.stages.daemons import until
runtime = pw.connect(sys.argv[1])
until(lambda: sum(one.formed > 0 for one in runtime.ask.status(20.0).islands) == 2, "both islands")
devices = pw.make_virtual_device_set()
here, there = (
    pw.Mesh(devices.add_slice(devices=1, island=name).devices, ("x",)) for name in ("a", "b")
)
for repeats in (4, 50_000):
    words = np.frombuffer({MARKER!r} * repeats, np.uint8)
    x = pw.put(words, pw.NamedSharding(here, jax.sharding.PartitionSpec()))
    y = pw.jit(lambda x: x | 0, mesh=here)(x)
    z = pw.jit(lambda y: y[::-1], mesh=there)(y)
    assert np.array_equal(np.asarray(z), words[::-1])
    assert np.array_equal(np.asarray(pw.jit(lambda z: z[::-1], mesh=there)(z)), words)
print("computed", flush=True)
"""


class Capture:
    """All packets of the loopback between the addresses of the cluster, from the beginning on."""

    def __init__(self) -> None:
        self._socket = socket.socket(
            socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ALL_PROTOCOLS)
        )
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 20)
        self._socket.bind(("lo", 0))
        self._socket.settimeout(0.1)
        self._ended = False
        self._addresses = {socket.inet_aton(one) for one in (CONTROLLER, *WORKERS)}
        self.packets: list[bytes] = []
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        ethernet = 14
        while not self._ended:
            try:
                packet = self._socket.recv(1 << 17)[ethernet:]
            except TimeoutError:
                continue
            if {packet[12:16], packet[16:20]} & self._addresses:
                self.packets.append(packet)

    def end(self) -> bytes:
        """All that was seen until now."""
        last = secrets.token_bytes(16)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
            sender.bind((CONTROLLER, 0))

            def is_read() -> bool:
                sender.sendto(last, (CONTROLLER, 9))
                return any(packet.endswith(last) for packet in self.packets[-100:])

            until(is_read, "the last packet")
        self._ended = True
        self._thread.join()
        self._socket.close()
        return b"".join(self.packets)


@contextmanager
def cluster(folder: Path, devices: str = "1") -> Iterator[tuple[str, dict[str, str]]]:
    """Two islands of one host, each process at its own address; yields the controller's, and variables for a
    client."""
    authority, started = Authority.create(), list[Program]()

    def let_in(role: Role, name: str) -> dict[str, str]:
        file = folder / f"{name}.pem"
        file.touch(0o600)
        file.write_bytes(authority.issue(role, name))
        return {"PW_CREDENTIALS": str(file), "PW_BULK": "tcp"}

    def start(module: str, variables: dict[str, str], *arguments: str) -> Program:
        started.append(start_module(module, *arguments, folder=folder, **variables))
        return started[-1]

    try:
        controller = start(
            "pw.cli.controller",
            let_in(Role.CONTROLLER, "one"),
            *("--bind", f"tcp://{CONTROLLER}:0"),
        )
        controller.until_says("listens at")
        address = re.findall(r"listens at (\S+)", controller.out)[0]
        for island, at in zip("ab", WORKERS, strict=True):
            start(
                "pw.cli.worker",
                let_in(Role.WORKER, island),
                *("--controller", address, "--bind", f"tcp://{at}:0"),
                *("--island", island, "--name", island, "--compile-cache", ""),
                *("--devices", devices),
            )
        yield address, let_in(Role.CLIENT, "me")
    finally:
        for one in reversed(started):
            one.kill()


def parameters() -> list[np.ndarray[Any, Any]]:
    """Those with which the demo begins: they travel to the islands, and trained ones back."""
    return [np.asarray(leaf) for leaf in jax.tree.leaves(init_params(ModelConfig(), 0))]


def send_in_clear(listens: str, dials: str) -> None:
    with socket.create_server((listens, 0)) as listener:
        with socket.create_connection(listener.getsockname(), 10, (dials, 0)) as dialler:
            accepted, _ = listener.accept()
            with accepted:
                dialler.sendall(MARKER)
                assert accepted.recv(len(MARKER), socket.MSG_WAITALL) == MARKER


def test_no_byte_of_an_array_travels_in_clear(tmp_path: Path) -> None:
    capture = Capture()
    send_in_clear(CONTROLLER, WORKERS[0])
    assert MARKER in capture.end()  # what is not encrypted is seen
    capture = Capture()
    try:
        with cluster(tmp_path) as (address, variables):
            script = Program(tmp_path, ["-c", SCRIPT, address], **variables, JAX_PLATFORMS="cpu")
            try:
                assert script.end() == 0, script.err
                assert "computed" in script.out
            finally:
                script.kill()
    finally:
        seen = capture.end()
    assert len(seen) > 4 * 50_000 * len(MARKER)  # to a, to b, and twice back
    assert MARKER not in seen
    assert MARKER[::-1] not in seen


@pytest.mark.long
def test_the_demo_runs_encrypted(tmp_path: Path) -> None:
    sent = [leaf for leaf in parameters() if leaf.any()]
    capture = Capture()
    try:
        with cluster(tmp_path, devices="2") as (address, variables):
            command = ["-m", "examples.train_lm", "--steps", "1"]
            demo = Program(tmp_path, command, **variables, PW_ADDRESS=address, JAX_PLATFORMS="cpu")
            try:
                demo.end()
                assert "the first 1 losses differ by at most" in demo.out, demo.err
                assert re.search(r"\(relative\): ok", demo.out), demo.out
            finally:
                demo.kill()
    finally:
        seen = capture.end()
    assert len(seen) > 2 * sum(leaf.nbytes for leaf in sent)
    assert not any(row.tobytes()[:64] in seen for leaf in sent for row in leaf[::16])
