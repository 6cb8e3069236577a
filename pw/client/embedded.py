"""The cluster that `pw` starts by itself: a controller in this process and one host beside it.

Where JAX has only CPUs the host is a child process with `PW_EMBEDDED_DEVICES` CPU devices, so that it
does not matter what the user's own JAX has been set up to. Where JAX has accelerators, which one process
cannot lend to another, the host lives in this process over them.

This is the one module of `pw.client` that knows `pw.cli`, where actors are put together.
"""

from __future__ import annotations

import os
import secrets
from typing import TYPE_CHECKING

import jax

from pw.client.children import Child
from pw.client.threads import LoopThread, SessionOnNode, incarnation
from pw.core.errors import Error
from pw.core.ids import CONTROLLER
from pw.transport.bulk import BulkPlane
from pw.transport.local import LocalHub
from pw.transport.node import Node
from pw.transport.stream_network import StreamNetwork

if TYPE_CHECKING:
    from pw.client.runtime import Runtime

ISLAND = "embedded"
HEARTBEAT_S = 3.0
"""Nothing could take the place of this host, so it is given up later than those of other clusters."""


def device_count() -> int:
    """How many CPU devices an embedded host gets. Raises Error if PW_EMBEDDED_DEVICES is no number."""
    text = os.environ.get("PW_EMBEDDED_DEVICES", "8")
    if not text.isdigit() or not 1 <= int(text) <= 1024:
        raise Error(f"PW_EMBEDDED_DEVICES must be a number from 1 to 1024, not {text!r}")
    return int(text)


def start(runtime: Runtime) -> SessionOnNode:
    """Start the cluster and a session with it; closing the session ends both."""
    if jax.default_backend() == "cpu":
        return _with_child(runtime, device_count())
    return _in_process(runtime)


def _with_child(runtime: Runtime, devices: int) -> SessionOnNode:
    from pw.cli.assembly import add_controller

    thread = LoopThread("pw-embedded")
    children: list[Child] = []

    def make() -> tuple[SessionOnNode, str]:
        network = StreamNetwork(thread.loop, CONTROLLER, incarnation(), bind="tcp://127.0.0.1:0")
        node = Node(CONTROLLER, thread.loop, network)
        services = add_controller(node, thread.loop, secret=secrets.token_bytes(32))

        def teardown() -> None:
            for child in children:
                child.stop()
            thread.call(services.close)
            thread.stop()

        session = SessionOnNode(thread, node, BulkPlane(thread.loop), runtime, None, teardown)
        return session, network.endpoint

    try:
        session, endpoint = thread.call(make)
    except BaseException:
        thread.stop()
        raise
    arguments = [
        *("--controller", endpoint, "--island", ISLAND, "--devices", str(devices)),
        *("--name", "embedded-0", "--allow-python", "--heartbeat", str(HEARTBEAT_S)),
    ]
    children.append(Child("pw.cli.host", arguments))
    session.expect_hosts(1, children)
    return session


def _in_process(runtime: Runtime) -> SessionOnNode:
    from pw.cli.assembly import add_controller
    from pw.cli.in_process import InProcessHost

    thread = LoopThread("pw-embedded")

    def make() -> SessionOnNode:
        hub = LocalHub(thread.loop)
        node = Node(CONTROLLER, thread.loop, hub.network(CONTROLLER))
        services = add_controller(node, thread.loop, secret=secrets.token_bytes(32))
        host = InProcessHost(thread.loop, hub, "embedded-0", ISLAND, jax.local_devices())

        def teardown() -> None:
            thread.call(host.close)
            thread.call(services.close)
            thread.stop()

        bulk = BulkPlane(thread.loop)
        return SessionOnNode(thread, node, bulk, runtime, None, teardown, has_frames=False)

    session = thread.call(make)
    session.expect_hosts(1, [])
    return session
