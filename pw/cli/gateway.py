"""`pw gateway`: serves JAX's remote protocol to processes that know nothing of pw."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import typer
import uvloop

from pw.cli.process import Daemon, check_bind
from pw.client.connection.runtime import Runtime
from pw.client.connection.threads import remote
from pw.core.errors import Error
from pw.gateway import choosing
from pw.gateway.devices import Devices
from pw.gateway.server import Server
from pw.transport.endpoints import parse

CONNECTING = 4
"""Sessions that are begun at the same time."""


def serve(
    address: str,
    bind: str,
    devices: int | None,
    islands: int | None,
    share: float,
    priority: int,
    allow_remote: bool,
) -> int:
    """Serve until SIGTERM; returns the exit code. Each connection gets a session of its own.

    Raises:
        Error: it cannot listen there, or there are not so many devices.
    """
    check_bind(bind, allow_remote)
    where = parse(bind).address
    target = f"unix:{where}" if isinstance(where, str) else f"{where[0]}:{where[1]}"
    loop = uvloop.new_event_loop()
    asyncio.set_event_loop(loop)
    daemon = Daemon(loop, -1)
    threads = ThreadPoolExecutor(CONNECTING, "pw-connect")

    def begin() -> tuple[Runtime, Devices]:
        runtime = Runtime(remote(address), share, priority)
        try:
            return runtime, Devices(choosing.allocate(runtime, devices, islands, os.environ))
        except BaseException:
            runtime.close()
            raise

    runtime, chosen = begin()  # now, so that a wrong number of devices is an error of this command
    count = len(chosen)
    del chosen
    runtime.close()

    async def connect() -> tuple[Runtime, Devices, Callable[[], None]]:
        runtime, found = await loop.run_in_executor(threads, begin)
        return runtime, found, lambda: threads.submit(runtime.close) and None

    async def listen() -> tuple[Server, int]:
        server = Server(connect)
        try:
            return server, await server.start(target)
        except RuntimeError as error:
            raise Error(f"cannot listen on {bind}: {error}") from error

    server, port = loop.run_until_complete(listen())
    shown = target if isinstance(where, str) else f"{where[0]}:{port}"
    typer.echo(f"pw gateway serves {count} devices to JAX at grpc://{shown}")

    def teardown() -> None:
        loop.run_until_complete(server.stop())
        threads.shutdown(wait=True)

    return daemon.run(teardown)
