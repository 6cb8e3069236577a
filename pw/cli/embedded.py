"""The embedded cluster, which `pw` starts by itself: a controller in this process, and one host.

If JAX has only CPUs, the host is a child process with `PW_EMBEDDED_DEVICES` CPU devices,
independent of the user's own JAX settings. It is a normal worker: a supervisor, and the runtime
that it restarts. If JAX has accelerators, which two processes cannot share, the host is in this
process; it cannot be restarted, so the session ends with it.
"""

from __future__ import annotations

import math
import os
import secrets
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from glob import glob
from importlib.util import find_spec
from typing import TYPE_CHECKING

from pw.client.connection.threads import LoopThread, SessionOnNode
from pw.client.connection.wires import LocalWires, StreamWires
from pw.client.display.tables import is_notebook
from pw.client.session.thread_messages import Close
from pw.core.coordinates import parse_times, times
from pw.core.errors import ConnectionFailed, Error, HostLost
from pw.core.ids import CONTROLLER
from pw.core.installed import DASHBOARD, is_installed
from pw.core.platforms import platform_of
from pw.core.sizes import parse_size
from pw.core.waits import RECONNECT_S
from pw.processes.daemons import KeptWorker, LocalDaemon, options, start_dashboard, visible_gpus
from pw.transport.access.private import PrivateFolder
from pw.transport.bulk.plane import BulkPlane
from pw.transport.links.link import incarnation
from pw.transport.links.local import LocalHub
from pw.transport.links.network import StreamNetwork
from pw.transport.links.node import Node

if TYPE_CHECKING:
    from pw.client.connection.runtime import Runtime

ISLAND = "embedded"
HOST = "embedded-0"
HEARTBEAT_S = 3.0
"""Longer than other hosts', because no other host could take its place on a busy machine."""
PAGE_S = 10.0
"""Seconds that a notebook waits for the link of the page."""


def device_count() -> int:
    """Return the number of CPU devices. Raises Error if PW_EMBEDDED_DEVICES is no number."""
    text = os.environ.get("PW_EMBEDDED_DEVICES", "")
    if not text:
        return math.prod(topology()) if topology() else 8
    if not text.isdigit() or not 1 <= int(text) <= 1024:
        raise Error(f"PW_EMBEDDED_DEVICES must be a number from 1 to 1024, not {text!r}")
    return int(text)


def topology() -> tuple[int, ...]:
    """Return the grid in which the CPU devices lie; empty for one row. Raises Error if it is none."""
    text = os.environ.get("PW_EMBEDDED_TOPOLOGY", "")
    try:
        return parse_times(text)
    except ValueError as error:
        raise Error(f"PW_EMBEDDED_TOPOLOGY={text}: {error}") from None


def coordinates(devices: int) -> str | None:
    """Return the coordinates of so many CPU devices, for `pw-worker --coords`. Raises Error."""
    sizes = topology()
    if not sizes:
        return None
    if math.prod(sizes) != devices:
        raise Error(
            f"PW_EMBEDDED_TOPOLOGY={times(sizes)} is a grid of {math.prod(sizes)} devices, and {devices} are "
            "asked for (PW_EMBEDDED_DEVICES, PW_DEVICES)"
        )
    return f"{','.join('0' for _ in sizes)}:{times(sizes)}"


def device_memory() -> int | None:
    """Return the memory of each device in bytes. Raises Error if PW_EMBEDDED_DEVICE_MEMORY is no size."""
    return _size("PW_EMBEDDED_DEVICE_MEMORY")


def spill() -> int | None:
    """Return the host memory for arrays that leave the devices, in bytes. Raises Error if PW_EMBEDDED_SPILL is
    no size.
    """
    return _size("PW_EMBEDDED_SPILL")


def spill_files() -> str:
    """Return the folder for arrays that leave host memory, or "". Raises Error without PW_EMBEDDED_SPILL."""
    folder = os.environ.get("PW_EMBEDDED_SPILL_FILES", "")
    if folder and not spill():
        raise Error(
            "PW_EMBEDDED_SPILL_FILES is for arrays that leave the host memory of PW_EMBEDDED_SPILL; give that "
            "a size, too"
        )
    return folder


def _size(variable: str) -> int | None:
    text = os.environ.get(variable, "")
    try:
        return parse_size(text) if text else None
    except ValueError as error:
        raise Error(f"{variable}: {error}") from None


def start(runtime: Runtime) -> SessionOnNode:
    """Start the cluster and a session with it; closing the session ends both."""
    import jax  # late: a gateway imports this module, and may do without jax

    if jax.default_backend() == "cpu":
        return start_with_worker(runtime, "cpu", device_count())
    return _in_process(runtime)


def with_worker(devices: int | None, beside: LoopThread) -> Callable[[Runtime], SessionOnNode]:
    """Return a function as `start`, for a process without devices of its own.

    Args:
        devices: how many: GPUs if this machine has so many. None for all GPUs of this machine, else
            `PW_EMBEDDED_DEVICES`.
        beside: the thread that the cluster and the session live in.
    """
    platform, count = devices_of_machine(devices)
    shown = {}
    if variable := platform_of(platform).visible:
        shown[variable] = visible_gpus(0, count, os.environ.get(variable))
    return lambda runtime: start_with_worker(runtime, platform, count, beside, shown)


def devices_of_machine(each: int | None, islands: int = 1) -> tuple[str, int]:
    """Return the platform and the number of the devices of each of so many islands on this machine.

    They are GPUs if there are enough of them, and JAX can use them. `each` is how many are asked for; None
    for as many GPUs as there are, else `PW_EMBEDDED_DEVICES`.
    """
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = (
        len(glob("/dev/nvidia[0-9]*")) if shown is None else len(shown.split(",")) if shown else 0
    )
    if gpus and any(find_spec(f"jax_cuda{version}_plugin") for version in (12, 13)):
        asked = islands * (each or 1)
        if asked <= gpus:
            return "cuda", each or gpus // islands
        print(
            f"pw: {asked} devices are asked for, more than the GPUs of this machine ({gpus}): "
            "they are CPU devices",
            file=sys.stderr,
        )
    return "cpu", each or device_count()


class _SessionWithWorker(SessionOnNode):
    """A session on the controller's own node, and the worker beside it."""

    worker: KeptWorker
    page: LocalDaemon | None = None
    _is_ready = False
    _link = ""

    def wait_for_hosts(self) -> None:
        """Wait for the worker; if it were ended before, it would log that its controller is lost."""
        self.expect_hosts(1, [self.worker])
        super().wait_for_hosts()
        self._is_ready = True

    @property
    def dashboard(self) -> str:
        """The link of the page that shows the cluster; empty if there is none."""
        if self.page is not None and not self._link:
            with suppress(ConnectionFailed):
                self._link = self.page.address(PAGE_S)
        return self._link

    def close(self) -> None:
        """End the page and the worker, then everything else. Idempotent."""
        if not self._closed:
            if self.page is not None:
                self.page.terminate()
                self.page.stop()
            self._thread.call(self.worker.terminate)
            if not self._is_ready:
                self.worker.stop()
        super().close()

    def worker_ended(self, code: int) -> None:
        """End the session: the worker is not started again."""
        error = HostLost(
            f"the worker of the embedded cluster ended with exit code {code}; its error is above"
        )
        self.post(Close(error, Future()))


def start_with_worker(
    runtime: Runtime,
    platform: str,
    devices: int,
    beside: LoopThread | None = None,
    shown: Mapping[str, str] = {},
) -> SessionOnNode:
    teardown = ExitStack()
    folder = PrivateFolder.make()
    teardown.callback(folder.leave)
    thread = beside or LoopThread("pw-embedded")
    if beside is None:
        teardown.callback(thread.stop)
    # First, because it takes longest; it dials until the controller listens.
    worker = thread.call(lambda: _start_worker(thread, folder.controller, platform, devices, shown))
    teardown.callback(worker.stop)
    teardown.callback(thread.call, worker.terminate)

    def make() -> SessionOnNode:
        from pw.cli.assembly import add_controller

        network = StreamNetwork(thread.loop, CONTROLLER, incarnation(), bind=folder.controller)
        node = Node(CONTROLLER, thread.loop, network)
        services = add_controller(node, thread.loop, secret=secrets.token_bytes(32))
        teardown.callback(thread.call, services.close)
        bulk = BulkPlane(thread.loop, folder=folder.path)
        session = _SessionWithWorker(
            thread,
            node,
            bulk,
            runtime,
            None,
            teardown.close,
            make_wires=lambda lines: StreamWires(thread.loop, runtime.lock, lines, node.counters),
        )
        session.endpoint = folder.controller
        if is_notebook() and is_installed(*DASHBOARD):
            session.page = start_dashboard(folder.controller)
        session.worker, worker.given_up = worker, session.worker_ended
        return session

    try:
        return thread.call(make)
    except BaseException:
        teardown.close()
        raise


def _start_worker(
    thread: LoopThread, controller: str, platform: str, devices: int, shown: Mapping[str, str]
) -> KeptWorker:
    has_supervisor = hasattr(os, "memfd_create")  # see pw.cli.supervisor
    arguments = options(
        controller=controller,
        island=ISLAND,
        devices=devices,
        platform=platform,
        name=HOST,
        allow_python=True,
        log_level="error",
        heartbeat=HEARTBEAT_S,
        device_memory=device_memory(),
        coords=coordinates(devices) if platform == "cpu" else None,
        spill=spill(),
        spill_files=spill_files() or None,
        alone=not has_supervisor,
        reconnect=None if has_supervisor else RECONNECT_S,
    )
    return KeptWorker(thread.loop, arguments, shown)


def _in_process(runtime: Runtime) -> SessionOnNode:
    from pw.cli.assembly import add_controller
    from pw.cli.in_process import InProcessHost

    bound_bytes, spill_bytes, files = device_memory(), spill() or 0, spill_files()
    folder = PrivateFolder.make()
    thread = LoopThread("pw-embedded")

    def make() -> SessionOnNode:
        hub = LocalHub(thread.loop)
        node = Node(CONTROLLER, thread.loop, hub.network(CONTROLLER))
        services = add_controller(node, thread.loop, secret=secrets.token_bytes(32))
        bulk, hosts_bulk = (BulkPlane(thread.loop, folder=folder.path) for _ in range(2))

        def ended() -> None:
            error = HostLost(
                "the runtime in this process has stopped, since a run was cancelled or took longer than its "
                "timeout, or failed: devices that this process holds cannot be taken from a computation that "
                "has not ended. pw.LocalCluster(platform=...) has its runtime in a process of its own, which "
                "can be started again"
            )
            session.post(Close(error, Future()))

        import jax

        devices = jax.local_devices()
        host = InProcessHost(
            thread.loop,
            hub,
            HOST,
            ISLAND,
            devices,
            hosts_bulk,
            ended,
            bound_bytes,
            spill_bytes,
            files,
        )

        def teardown() -> None:
            thread.call(host.close)
            thread.call(services.close)
            thread.stop()
            folder.leave()

        session = SessionOnNode(
            thread,
            node,
            bulk,
            runtime,
            None,
            teardown,
            has_frames=False,
            make_wires=lambda lines: LocalWires(thread.loop, hub, lines, node.counters),
        )
        session.expect_hosts(1, [])
        return session

    return thread.call(make)
