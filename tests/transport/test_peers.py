"""Which user is at the other end of a connection on this machine."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pw.gateway.server import Server
from pw.transport.access.unix import is_foreign, loopback_user

pytestmark = pytest.mark.skipif(
    not Path("/proc/net/tcp").exists(), reason="only Linux lists the users of sockets"
)

OTHER = 65534
DIAL = """
import os, socket, sys
import encodings.idna
if len(sys.argv) > 3:
    os.setgroups([]); os.setgid(int(sys.argv[3])); os.setuid(int(sys.argv[3]))
with socket.create_connection((sys.argv[1], int(sys.argv[2]))) as end:
    try:
        told = end.recv(1)
    except ConnectionResetError:
        told = b""
    sys.exit(not told)
"""


@pytest.fixture(params=["127.0.0.1", "::1"])
def listener(request: pytest.FixtureRequest) -> Iterator[socket.socket]:
    family = socket.AF_INET6 if ":" in request.param else socket.AF_INET
    with socket.socket(family) as made:
        try:
            made.bind((request.param, 0))
        except OSError:
            pytest.skip(f"this machine has no {request.param}")
        made.listen()
        made.settimeout(60)
        yield made


def test_this_user_is_found(listener: socket.socket) -> None:
    with socket.create_connection(listener.getsockname()[:2]) as dialler:
        accepted, _ = listener.accept()
        with accepted:
            assert loopback_user(accepted) == loopback_user(dialler) == os.geteuid()
            assert not is_foreign(accepted)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_is_foreign(listener: socket.socket) -> None:
    host, port = listener.getsockname()[:2]
    command = [sys.executable, "-c", DIAL, host, str(port), str(OTHER)]
    with subprocess.Popen(command, cwd="/") as dialler:
        accepted, _ = listener.accept()
        with accepted:
            assert loopback_user(accepted) == OTHER
            assert is_foreign(accepted)
            accepted.send(b"x")
        assert dialler.wait(60) == 0


def test_an_end_that_is_gone_is_nobody() -> None:
    with socket.socket() as alone:
        assert loopback_user(alone) is None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("user", [0, OTHER])
def test_the_gateway_serves_no_other_user(user: int) -> None:
    async def served() -> bool:
        async def connect() -> Any:
            raise AssertionError("no session was asked for")

        server = Server(connect)
        port = await server.start(("127.0.0.1", 0))
        command = [sys.executable, "-c", DIAL, "127.0.0.1", str(port), str(user)]
        dialler = await asyncio.create_subprocess_exec(*command, cwd="/")
        try:
            return await asyncio.wait_for(dialler.wait(), 60) == 0
        finally:
            server.stop()

    assert asyncio.run(served()) == (user == 0)
