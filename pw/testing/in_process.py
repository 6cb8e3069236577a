"""A whole cluster in this process: every actor of production on one event loop.

    with InProcessCluster(islands=2, devices_per_island=2) as cluster:
        ...

All actors are those of the daemons. Messages are direct calls (through the codec, so each could
cross to another process), and each island is one host over some of this process's JAX devices. It
starts in milliseconds, so most tests use it. An island of several hosts needs processes: see
`pw.LocalCluster`.
"""

from __future__ import annotations

import secrets
import traceback
from typing import Self

import jax

from pw.cli.assembly import add_controller
from pw.cli.in_process import InProcessHost
from pw.client.connection import current
from pw.client.connection.runtime import Runtime
from pw.client.connection.threads import LoopThread, SessionOnNode
from pw.client.connection.wires import LocalWires
from pw.core.events import Sink
from pw.core.ids import CONTROLLER
from pw.transport.bulk.plane import BulkPlane
from pw.transport.links.local import LocalHub
from pw.transport.links.node import Node


class InProcessCluster:
    """Controller, hosts and clients on one event loop, over this process's JAX devices.

    Args:
        islands: number of islands, called `island-0`, `island-1`, ...; each has one host.
        devices_per_island: JAX devices of each; islands get different ones.
        device_memory_bytes: memory of each device that runs may use; None for what the device says.
        spill_bytes: host memory of each island for arrays that leave the devices.
        spill_files: a folder for arrays that leave this host memory.
        policy: scheduling policy among clients.
        events: takes the events of the controller.
        codec: encode and decode every message on its way.
        connect: make a first client the runtime of this process.

    Raises:
        ValueError: this process has too few JAX devices.
    """

    def __init__(
        self,
        islands: int = 1,
        devices_per_island: int = 4,
        *,
        device_memory_bytes: int | None = None,
        spill_bytes: int = 0,
        spill_files: str = "",
        policy: str = "fifo",
        events: Sink | None = None,
        codec: bool = True,
        connect: bool = True,
    ) -> None:
        devices = jax.devices()
        if len(devices) < islands * devices_per_island:
            raise ValueError(
                f"{islands} islands of {devices_per_island} devices need "
                f"{islands * devices_per_island} JAX devices, this process has {len(devices)}"
            )
        self.crashes: list[str] = []
        """Tracebacks of actors that raised; `close` fails if there are any."""
        self.thread = LoopThread("pw-test-cluster")
        """Thread of all actors."""
        self._clients: list[Runtime] = []
        self._codec = codec
        self._closed = False
        loop = self.thread.loop

        def build() -> None:
            self.hub = LocalHub(loop, codec=codec)
            self.controller = self._node(CONTROLLER)
            self._services = add_controller(
                self.controller, loop, secret=secrets.token_bytes(32), policy=policy, events=events
            )
            self.hosts = [
                InProcessHost(
                    loop,
                    self.hub,
                    f"host-{index}",
                    f"island-{index}",
                    devices[index * devices_per_island : (index + 1) * devices_per_island],
                    device_memory_bytes=device_memory_bytes,
                    spill_bytes=spill_bytes,
                    spill_files=spill_files,
                )
                for index in range(islands)
            ]
            for host in self.hosts:
                host.node.on_crash = self._crashed

        self.thread.call(build)
        if connect:
            current.disconnect()
            current.use(self.client())

    def _node(self, name: str) -> Node:
        node = Node(name, self.thread.loop, self.hub.network(name))
        node.on_crash = self._crashed
        return node

    def _crashed(self, actor: str, error: BaseException) -> None:
        self.crashes.append("".join(traceback.format_exception(error)))

    def client(self, *, share: float = 1.0, priority: int = 0) -> Runtime:
        """Return another client of this cluster; `pw.client.connection.current.use` makes it current."""
        name = f"client-{len(self._clients)}"

        def start(runtime: Runtime) -> SessionOnNode:
            def make() -> SessionOnNode:
                bulk, node = BulkPlane(self.thread.loop), self._node(name)
                return SessionOnNode(
                    self.thread,
                    node,
                    bulk,
                    runtime,
                    None,
                    lambda: None,
                    has_frames=self._codec,
                    make_wires=lambda lines: LocalWires(
                        self.thread.loop, self.hub, lines, node.counters
                    ),
                )

            session = self.thread.call(make)
            session.expect_hosts(len(self.hosts), [])
            return session

        runtime = Runtime(start, share, priority)
        self._clients.append(runtime)
        return runtime

    def close(self) -> None:
        """End everything. Raises AssertionError if an actor had crashed. Idempotent."""
        if self._closed:
            return
        self._closed = True
        for client in self._clients:
            if current.is_current(client):
                current.disconnect()
            client.close()
        self.thread.call(self.controller.close)
        for host in self.hosts:
            self.thread.call(host.close)
        self.thread.call(self._services.close)
        self.thread.stop()
        if self.crashes:
            raise AssertionError("actors crashed:\n" + "\n".join(self.crashes))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
