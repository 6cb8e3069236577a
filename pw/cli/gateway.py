"""`pw gateway`: serves JAX's remote protocol to processes that know nothing of pw.

Each connection gets a session of its own. Without the address of a controller the gateway starts a
cluster, which ends with it; the first connection uses the session of that cluster.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer
import uvloop

from pw.cli import embedded
from pw.cli.process import Daemon, check_bind, command, configure_logging
from pw.client.connection.current import recovery_s
from pw.client.connection.runtime import Runtime
from pw.client.connection.threads import LoopThread, remote
from pw.core.errors import Error
from pw.core.jax_private import native_logs
from pw.core.messages.roles import Role
from pw.gateway import choosing
from pw.gateway.arrays.devices import Devices
from pw.gateway.functions import CallbackAnswer, Script
from pw.gateway.server import Server
from pw.processes.child import Announcement
from pw.processes.daemons import fork_children
from pw.transport.access.private import PrivateFolder
from pw.transport.access.security import Security
from pw.transport.endpoints import parse

PLAIN = (
    "JAX's protocol is not encrypted, and credentials do not change that; listen at 127.0.0.1 and use ssh -L, "
    "or give --insecure on a network that you trust"
)
_ERRORS = 2
"""Lowest level at which XLA's partitioner, which runs here, may write to the terminal."""
CONNECTING = 4
"""Sessions that are begun at the same time."""


_Session = tuple[Runtime, Devices, Callable[[], object]]
"""Session of a client, its devices, and the function that ends it."""


class _Sessions:
    """Begins a session for each connection, all in one thread; called in other threads."""

    def __init__(
        self,
        thread: LoopThread,
        address: str,
        wanted: choosing.Wanted,
        share: float,
        priority: int,
        cluster: ExitStack,
        security: Security,
        name: str,
    ) -> None:
        self._thread = thread
        self._name = name
        self._wanted = wanted
        self._share, self._priority = share, priority
        self._address = address
        self._are_slices = choosing.are_slices(os.environ)
        self._security = security
        # Begun now, so that what is wrong is an error of this command.
        self._first: _Session | None = self._begin() if address else self._start_cluster(cluster)
        """The session of the first connection."""

    def _start_cluster(self, cluster: ExitStack) -> _Session:
        """Start a cluster. Returns a session that ends with it."""
        count = self._wanted.island_count or 1
        each = self._wanted.devices_each(count)
        if count == 1:
            start = embedded.with_worker(each, self._thread)
        else:
            from pw.operating.deploy.local_cluster import LocalCluster

            platform, devices = embedded.devices_of_machine(each, count)
            memory = embedded.device_memory()
            local = LocalCluster(
                count, 1, devices, platform=platform, device_memory=memory, connect=False
            )
            start = remote(cluster.enter_context(local).address, self._thread)
        runtime = Runtime(
            start, self._share, self._priority, recovery_s=recovery_s(), name=self._name
        )
        cluster.callback(runtime.close)
        self._address = runtime.endpoint or ""
        return runtime, self._devices(runtime), lambda: None

    def _devices(self, runtime: Runtime) -> Devices:
        return Devices(choosing.allocate(runtime, self._wanted), self._are_slices)

    def close(self) -> None:
        """End the first session if no connection has come for it."""
        if self._first is not None:
            self._first[2]()

    def begin(self) -> _Session:
        """Begin a session, or give the first one away."""
        first, self._first = self._first, None
        return first if first is not None and first[0].alive else self._begin()

    def _begin(self) -> _Session:
        runtime = Runtime(
            remote(self._address, self._thread, self._security),
            self._share,
            self._priority,
            recovery_s=recovery_s(),
            name=self._name,
        )
        try:
            devices = self._devices(runtime)
        except BaseException:
            runtime.close()
            raise
        return runtime, devices, runtime.close


def serve(
    address: Annotated[str, typer.Option()] = "",
    bind: Annotated[str, typer.Option()] = "tcp://127.0.0.1:29000",
    devices: Annotated[int, typer.Option()] = 0,
    islands: Annotated[str, typer.Option()] = "",
    share: Annotated[float, typer.Option()] = 1.0,
    priority: Annotated[int, typer.Option()] = 0,
    credentials: Annotated[str, typer.Option()] = "",
    insecure: Annotated[bool, typer.Option("--insecure")] = False,
    files: Annotated[str, typer.Option(hidden=True)] = "",
    script: Annotated[str, typer.Option(hidden=True)] = "",
    parent_fd: Annotated[int, typer.Option(hidden=True)] = -1,
) -> None:
    """Serve until SIGTERM. `pw gateway` describes the options.

    Raises:
        Error: it cannot listen there, or there are not so many devices.
    """
    configure_logging("error")
    native_logs.set_min_level(_ERRORS)
    if not address:
        fork_children()
    check_bind(bind, Security(None, insecure=insecure), PLAIN)
    security = Security.of(address, credentials, insecure=insecure, role=Role.CLIENT)
    where = parse(bind).address
    loop = uvloop.new_event_loop()
    daemon = Daemon(loop, parent_fd, CallbackAnswer)
    functions = None
    if daemon.parent is not None:
        functions = Script(loop, daemon.parent)
        daemon.heard = functions.answered
    with ExitStack() as cluster:
        if (folder := PrivateFolder.of(bind)) is not None:
            cluster.callback(daemon.leave, folder)
        # The server and all sessions share one thread: a request costs no change of threads.
        thread = LoopThread("pw-gateway")
        cluster.callback(thread.stop)
        try:
            wanted = choosing.Wanted.of(devices or None, islands, os.environ)
            name = script or f"pw gateway, pid {os.getpid()}"
            how = (thread, address, wanted, share, priority, cluster, security, name)
            # An island may be long in coming; a cluster of one's own begins at once, on this thread.
            sessions = daemon.begin(lambda: _Sessions(*how)) if address else _Sessions(*how)
        except Error as error:
            if not daemon.announce(Announcement(error=str(error))):  # the script raises it
                raise
            raise SystemExit(1) from None
        cluster.callback(sessions.close)
        waiting = cluster.enter_context(ThreadPoolExecutor(CONNECTING, "pw-connect"))

        async def connect() -> _Session:
            runtime, own_devices, end = await thread.loop.run_in_executor(waiting, sessions.begin)
            return runtime, own_devices, lambda: waiting.submit(end)

        server = Server(connect, Path(files) if files else None, functions)
        cluster.callback(shutil.rmtree, files, ignore_errors=True)
        listening = asyncio.run_coroutine_threadsafe(server.start(where), thread.loop)
        try:
            port = listening.result()
        except OSError as error:
            words = os.strerror(error.errno) if error.errno else str(error)
            raise Error(
                f"cannot listen on {bind}: {words}; stop what uses it, or choose another --bind"
            ) from error
        shown = f"unix:{where}" if isinstance(where, str) else f"{where[0]}:{port}"
        if not daemon.announce(Announcement(f"grpc://{shown}")):
            typer.echo(f"pw gateway serves JAX at grpc://{shown}")
        code = daemon.run(lambda: thread.call(server.stop))
    raise SystemExit(code)


def main() -> None:
    """Entry point of the gateway beside a script."""
    command("pw gateway", serve)


if __name__ == "__main__":
    main()
