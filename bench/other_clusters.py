"""Sessions beside the first one of a benchmark: over TLS on tcp, and of a second client of the same cluster."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from bench.security import issue
from pw.client.connection import current
from pw.client.connection.runtime import Runtime
from pw.client.connection.threads import SessionOnNode, remote
from pw.core.messages.roles import Role
from pw.processes.daemons import LocalDaemon
from pw.transport.access.authority import Authority
from pw.transport.access.security import Security

START_S = 90.0


@contextlib.contextmanager
def session(address: str, credentials: Path | None = None, hosts: int = 0) -> Iterator[Runtime]:
    """Have this process's calls go to another session in the block; it waits for so many hosts first."""
    security = None if credentials is None else Security.of(address, credentials, role=Role.CLIENT)

    def start(runtime: Runtime) -> SessionOnNode:
        made = remote(address, security=security)(runtime)
        made.expect_hosts(hosts, ())
        return made

    mine = Runtime(start, 1.0, 0)
    previous = current.use(mine)
    try:
        yield mine
    finally:
        current.use(previous)
        mine.close()


@contextlib.contextmanager
def over_tls() -> Iterator[Runtime]:
    """A session with a cluster of one host whose processes use TLS on tcp."""
    authority = Authority.create()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        mine, main, host = (
            issue(authority, Path(folder, role.name), role)
            for role in (Role.CLIENT, Role.CONTROLLER, Role.WORKER)
        )
        where = ["--bind", "tcp://127.0.0.1:0", "--credentials", str(main), "--log-level", "error"]
        controller = LocalDaemon("pw.cli.controller", where)
        stack.callback(controller.stop)
        address = controller.address(START_S)
        where = ["--controller", address, "--credentials", str(host), "--island", "tls"]
        worker = LocalDaemon("pw.cli.worker", [*where, "--log-level", "error"])
        stack.callback(worker.stop)
        yield stack.enter_context(session(address, mine, hosts=1))
