"""The runtime of one host: what `pw-worker` starts, watches over and starts again.

Threads: the event loop (this one) for control and nothing else; those of the device backend; one of the
bulk plane. A collective that will never end holds the execute thread, not the loop, so the process can
always be ended from the loop.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Callable
from typing import Annotated

import typer
import uvloop

from pw.cli.assembly import add_host
from pw.cli.process import (
    EXIT_AGAIN,
    EXIT_ERROR,
    EXIT_UNAVAILABLE,
    Daemon,
    configure_logging,
    fail,
)
from pw.core.errors import Error, ErrorReport, InternalError
from pw.core.ids import CONTROLLER
from pw.core.messages import FormIsland, IslandJoined, IslandJoinFailed, RegisterHost
from pw.core.sharding import DeviceAddress
from pw.devices import group
from pw.devices.jax_backend import JaxBackend
from pw.transport.bulk import BulkPlane
from pw.transport.node import Node
from pw.transport.zmq_network import ZmqNetwork

SWITCH_INTERVAL_S = 0.0005
"""Tracing and lowering hold the interpreter; with Python's default the loop would be 45 ms late."""


class HostRuntime:
    """The process around a host's actors (see `pw.devices.executor.HostProcess`)."""

    def __init__(self, daemon: Daemon, loop: asyncio.AbstractEventLoop, local_devices: int) -> None:
        self._daemon = daemon
        self._loop = loop
        self._local_devices = local_devices
        self._hosts: tuple[str, ...] = ()
        self._devices: list[object] = []

    def device(self, address: DeviceAddress) -> object:
        """The JAX device at an address in this epoch's island."""
        rank = self._hosts.index(address.host)
        return self._devices[rank * self._local_devices + address.ordinal]

    def join(
        self, form: FormIsland, joined: Callable[[IslandJoined | IslandJoinFailed], None]
    ) -> None:
        """Join the group in a thread of its own: peers may take their time."""

        def work() -> None:
            answer: IslandJoined | IslandJoinFailed
            try:
                devices = group.join(
                    form.group_address, form.rank, len(form.hosts), form.epoch
                )
                self._devices, self._hosts = list(devices), form.hosts
                answer = IslandJoined(
                    form.island,
                    form.epoch,
                    devices[0].device_kind,
                    len(devices) // len(form.hosts),
                    (devices[0].memory_stats() or {}).get("bytes_limit")
                    if len(form.hosts) == 1
                    else None,
                )
            except Exception as error:  # noqa: BLE001  (the edge of a thread)
                answer = IslandJoinFailed(form.island, form.epoch, ErrorReport.of(error))
            self._loop.call_soon_threadsafe(joined, answer)

        threading.Thread(target=work, name="pw-join", daemon=True).start()

    def stop(self, reason: str, error: ErrorReport | None) -> None:
        """End this incarnation."""
        if error is None:
            self._daemon.stop(EXIT_AGAIN)
            return
        fail("pw-worker", error.message)
        unreachable = error.kind == "ConnectionFailed"
        self._daemon.stop(EXIT_UNAVAILABLE if unreachable else EXIT_ERROR)


def serve(
    controller: Annotated[str, typer.Option()],
    island: Annotated[str, typer.Option()],
    name: Annotated[str, typer.Option()],
    island_hosts: Annotated[int, typer.Option()] = 1,
    devices: Annotated[int, typer.Option()] = 1,
    platform: Annotated[str, typer.Option()] = "cpu",
    bind: Annotated[str, typer.Option()] = "tcp://127.0.0.1:0",
    incarnation: Annotated[int, typer.Option()] = 0,
    log_level: Annotated[str, typer.Option()] = "error",
    parent_fd: Annotated[int, typer.Option()] = -1,
) -> None:
    """Run one incarnation of a host."""
    configure_logging(log_level)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    loop = uvloop.new_event_loop()
    asyncio.set_event_loop(loop)
    daemon = Daemon(loop, parent_fd)
    try:
        group.prepare(platform, devices)
        network = ZmqNetwork(loop, name, incarnation or _now(), bind=bind)
        bulk = BulkPlane(loop, bind_host=_host_of(bind))
    except Error as error:
        fail("pw-worker", str(error))
        _exit(EXIT_ERROR)
    runtime = HostRuntime(daemon, loop, devices)
    node = Node(name, loop, network)
    network.introduce(CONTROLLER, controller)
    backend = JaxBackend(loop, name, runtime.device)  # type: ignore[arg-type]
    registration = RegisterHost(
        island, island_hosts, devices, platform, network.endpoint, os.getpid()
    )
    executor = add_host(node, registration, runtime, backend, bulk)

    def crashed(actor: str, error: BaseException) -> None:
        """An actor's state can no longer be trusted: begin again from a known one."""
        node.counters["actor_crashes"] += 1
        report = ErrorReport.of(error, name, InternalError)
        fail("pw-worker", f"{actor}: {report.message}\n{report.traceback}")
        daemon.stop(EXIT_AGAIN)

    node.on_crash = crashed
    executor.register()

    def teardown() -> None:
        node.close()
        bulk.close()

    _exit(daemon.run(teardown))


def _host_of(endpoint: str) -> str:
    return endpoint.removeprefix("tcp://").rpartition(":")[0] or "127.0.0.1"


def _now() -> int:
    import time

    return time.time_ns()


def _exit(code: int) -> None:
    """End at once: a thread may sit in a collective that will never return."""
    sys.stderr.flush()
    os._exit(code)


def main() -> None:
    """Entry point of the runtime child."""
    typer.run(serve)


if __name__ == "__main__":
    main()
