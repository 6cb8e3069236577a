"""The runtime of one host, which `pw-worker` starts, watches and restarts.

Threads: the event loop (this one) for control only; those of the device backend; one of the bulk
plane; a few for files. A collective that never ends holds the execute thread, not the loop, so the
loop can always end the process.
"""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NoReturn

import uvloop

from pw.cli import handover
from pw.cli.assembly import add_host, coords_of, memory_of
from pw.cli.host_options import HostOptions
from pw.cli.keeping import Keeper
from pw.cli.process import (
    EXIT_AGAIN,
    EXIT_ERROR,
    EXIT_OK,
    EXIT_REFUSED,
    EXIT_UNAVAILABLE,
    Daemon,
    configure_logging,
    fail,
    longest_silence_s,
    size_of,
    time_of,
)
from pw.cli.streams import take_output
from pw.cli.supervision import Begin, Parcel, SupervisorLink
from pw.core.coordinates import parse_coordinates, parse_wraps
from pw.core.errors import Error, ErrorReport, InternalError, PlacementError
from pw.core.ids import CONTROLLER
from pw.core.messages import FormIsland, IslandJoined, IslandJoinFailed, RegisterHost
from pw.core.messages.roles import Role
from pw.core.platforms import platform_of
from pw.core.sharding import DeviceAddress
from pw.devices.host.replica_memory import Replica
from pw.devices.host.spill_files import SpillFolder
from pw.devices.jax import group
from pw.devices.jax.backend import JaxBackend
from pw.devices.jax.compile_process import Bounds
from pw.devices.jax.compile_processes import CompileProcesses
from pw.devices.jax.executables import default_folder
from pw.devices.jax.file_threads import FileThreads
from pw.devices.python.confining import ChildBounds as PythonBounds
from pw.processes.fork_server import ForkServer
from pw.transport.access.private import beside
from pw.transport.access.security import Security
from pw.transport.bulk.plane import BulkPlane
from pw.transport.endpoints import advertised, own_address
from pw.transport.links.network import StreamNetwork
from pw.transport.links.node import Node
from pw.transport.log import log

DESCRIPTORS = 1 << 20
"""Upper bound of descriptors that a host takes; each larger array needs one."""

SWITCH_INTERVAL_S = 0.0005
"""Tracing and lowering hold the interpreter: with Python's default the loop is up to 45 ms late."""


@dataclass(eq=False)
class HostRuntime:
    """The process around a host's actors (see `pw.devices.host.membership.HostProcess`)."""

    _options: HostOptions
    _daemon: Daemon
    _address: str
    _keeper: Keeper | None
    _has_credentials: bool = False
    _hosts: tuple[str, ...] = ()
    _devices: list[object] = field(default_factory=list)

    def device(self, address: DeviceAddress) -> object:
        """Return the JAX device at an address in this epoch's island."""
        rank = self._hosts.index(address.host)
        return self._devices[rank * self._options.devices + address.ordinal]

    def count_devices(self) -> int:
        """Return how many devices the island has; 0 before this host has joined."""
        return len(self._devices)

    def join(
        self, form: FormIsland, joined: Callable[[IslandJoined | IslandJoinFailed], None]
    ) -> None:
        """Join the group on a thread of its own, because its peers may be slow."""

        def work() -> None:
            answer: IslandJoined | IslandJoinFailed
            try:
                devices = group.join(
                    form.group_address,
                    form.rank,
                    len(form.hosts),
                    form.epoch,
                    self._options.devices,
                    host=self._address,
                    platform=self._options.platform,
                )
                own = devices
                if len(form.hosts) > 1:
                    own = [device for device in devices if device.process_index == form.rank]
                local_count = len(own)
                if local_count != self._options.devices:
                    words = (
                        f"this host has {local_count} {devices[0].platform} devices, not "
                        f"{self._options.devices}; start it with --devices {local_count}"
                    )
                    if variable := platform_of(self._options.platform).visible:
                        words += f", or have {variable} name {self._options.devices}"
                    raise PlacementError(words)
                self._devices, self._hosts = list(devices), form.hosts
                answer = IslandJoined(
                    form.island,
                    form.epoch,
                    devices[0].device_kind,
                    local_count,
                    memory_of(own, size_of(self._options.device_memory)),
                    coords_of(own),
                    size_of(self._options.spill) or 0,
                    bool(self._options.spill_files),
                )
            except Exception as error:  # noqa: BLE001  (the edge of a thread)
                alone = len(form.hosts) == 1 or not isinstance(error, group.GroupError)
                if not isinstance(error, Error):
                    error = PlacementError(
                        f"JAX cannot open the {self._options.platform} devices of this host ({error!r}); is "
                        f"it installed with support for {self._options.platform}?"
                    )
                report = ErrorReport.of(error)
                if alone:  # no other host is the reason, so another attempt would fail as well
                    self._daemon.loop.call_soon_threadsafe(self.stop, "could not join", report)
                    return
                log("error", "could not join", self._options.name, error=report.message)
                answer = IslandJoinFailed(form.island, form.epoch, report)
            self._daemon.loop.call_soon_threadsafe(joined, answer)

        threading.Thread(target=work, name="pw-join", daemon=True).start()

    def keep(self, replicas: Sequence[Replica], kept: Callable[[ErrorReport | None], None]) -> None:
        """Have the supervisor, if there is one, keep these for the next incarnation."""
        if self._keeper is None:
            kept(None)  # there is no next incarnation to keep them for
        else:
            self._keeper.keep(replicas, kept)

    def hand_over(self, replicas: Iterable[Replica]) -> None:
        """Leave these to the next incarnation, through the supervisor."""
        if self._keeper is not None:
            self._keeper.hand_over(replicas)

    def finish(self, reason: str) -> None:
        """End for good."""
        log("info", "leaving for good", self._options.name, reason=reason)
        self._daemon.stop(EXIT_OK)

    def stop(self, reason: str, error: ErrorReport | None) -> None:
        """End this incarnation."""
        log("info", "leaving", self._options.name, reason=reason)
        if error is None:
            self._daemon.stop(EXIT_AGAIN)
            return
        fail("pw-worker", error.message)
        code = EXIT_UNAVAILABLE if error.kind == "ConnectionFailed" else EXIT_ERROR
        if error.kind == "AccessRefused" and self._has_credentials:
            code = EXIT_REFUSED
        self._daemon.stop(code)


def run(options: HostOptions, supervisor: SupervisorLink | None = None) -> NoReturn:
    """Run one incarnation of a host: a child of `pw-worker`, or alone, beside an embedded cluster.

    Args:
        options: of the host.
        supervisor: the link to the supervisor; without one, `options.parent_fd` leads to the parent.
    """
    configure_logging(options.log_level, options.log_format)
    output = take_output(options.log_level)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    if sys.platform == "linux":
        take_descriptors()
    name, controller = options.name, options.controller
    begin, parcel = Begin(time.time_ns(), False, -1), None
    if supervisor is not None:
        start = supervisor.begin()
        if start is None:
            _exit(EXIT_OK)
        begin, parcel = start
    compilers = ForkServer.forked()  # before this process has other threads
    loop = uvloop.new_event_loop()
    asyncio.set_event_loop(loop)
    daemon = Daemon(loop, options.parent_fd if supervisor is None else -1)
    try:
        group.prepare(options.platform, options.devices)
        folder = beside(controller)
        try:
            security = Security.of(
                controller,
                options.credentials,
                insecure=options.insecure,
                revoked=options.revoked,
                role=Role.WORKER,
                warns=False,  # pw-worker has
            )
        except Error as error:  # pw-worker could use them, so they have changed, or are revoked
            fail("pw-worker", str(error))
            _exit(EXIT_REFUSED)
        bind = options.bind
        network = StreamNetwork(
            loop,
            name,
            begin.incarnation,
            bind=bind,
            advertise=options.advertise or advertised(bind, controller),
            heartbeat_s=options.heartbeat,
            lease_s=options.lease,
            patience_s=options.client_timeout,
            own_silence_s=longest_silence_s(options.heartbeat),
            connect_s=options.connect_timeout,
            credentials=security.credentials,
            insecure=security.insecure,
        )
        address = options.private_address or own_address(bind, controller)
        folder = folder if bind.startswith("ipc://") else None
        bulk = BulkPlane(
            loop,
            folder=folder,
            credentials=security.credentials,
            insecure=security.insecure,
            endpoint=network.endpoint,
        )
        network.take_chunks = bulk.adopt
    except Error as error:
        fail("pw-worker", str(error))
        _exit(EXIT_ERROR)
    keeper = Keeper(name, loop, supervisor, daemon.stop) if supervisor is not None else None
    runtime = HostRuntime(options, daemon, address, keeper, security.credentials is not None)
    node = Node(name, loop, network)
    network.introduce(CONTROLLER, controller)
    cache = Path(options.compile_cache) if options.compile_cache else None
    if options.compile_cache is None:
        cache = default_folder()
    allow_python = options.allow_python or bool(options.python_tenants)
    backend = JaxBackend(
        loop,
        name,
        runtime.device,
        allow_python=allow_python,
        python_bounds=PythonBounds(size_of(options.python_memory) or 0, strangers=any(security)),
        compile_apart=partial(
            CompileProcesses,
            runtime.count_devices,
            bounds=Bounds(options.compile_timeout, size_of(options.compile_memory) or 0),
            server=compilers,
        ),
        compile_cache=cache,
        output=output,
        recorder=node.recorder,
    )
    registration = RegisterHost(
        options.island,
        0 if options.spare else options.island_hosts,
        options.devices,
        options.platform,
        network.endpoint,
        os.getpid(),
        begin.spare,
        python=allow_python,
        python_tenants=tuple(filter(None, map(str.strip, options.python_tenants.split(",")))),
        coords=parse_coordinates(options.coords, options.devices),
        wraps=parse_wraps(options.wrap),
        is_to_end=begin.is_to_end,
        grace_s=options.drain,
    )
    replicas = _inherited(name, parcel, supervisor)
    aside = FileThreads(loop)
    try:
        files = SpillFolder(options.spill_files, aside) if options.spill_files else None
    except Error as error:
        fail("pw-worker", str(error))
        _exit(EXIT_ERROR)
    if keeper is not None and files is not None:
        keeper.folder = files.path
    executor = add_host(
        node,
        registration,
        runtime,
        backend,
        bulk,
        replicas,
        stall_s=options.stall_after,
        aside=aside,
        reconnect_s=options.reconnect,
        output=output,
        checkpoint_root=options.checkpoint_root,
        spill_bytes=size_of(options.spill) or 0,
        spill_files=files,
        test_devices_s=time_of(options.test_devices, "--test-devices"),
    )
    del replicas  # only the store may hold them

    def crashed(actor: str, error: BaseException) -> None:
        """Begin again from a known state: that of the actor cannot be trusted."""
        node.counters["actor_crashes"] += 1
        report = ErrorReport.of(error, name, InternalError)
        fail("pw-worker", f"{actor}: {report.message}\n{report.traceback}")
        daemon.stop(EXIT_AGAIN)

    def beat() -> None:
        if supervisor is not None:
            supervisor.beat()
            loop.call_later(options.heartbeat, beat)

    node.on_crash = crashed
    executor.register()
    if keeper is not None:
        keeper.leave = executor.ask_to_leave
        if options.drain:  # the supervisor says when to end, also if all processes get the signal
            loop.add_signal_handler(signal.SIGTERM, lambda: None)
    loop.call_soon(beat)

    def teardown() -> None:
        node.close()
        bulk.close()
        if files is not None:
            files.close()

    _exit(daemon.run(teardown))


def take_descriptors() -> None:
    """Raise the bound of descriptors of this process, which never calls `select`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return
    wanted = DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, DESCRIPTORS)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _inherited(
    name: str, parcel: Parcel | None, supervisor: SupervisorLink | None
) -> list[Replica]:
    """Return the replicas that the last incarnation left."""
    if parcel is None or supervisor is None:
        return []
    replicas = handover.unpack(parcel, supervisor.dropped)
    if replicas:
        event = "begins with the replicas of the runtime before it"
        log("info", event, name, replicas=len(replicas))
    return replicas


def _exit(code: int) -> NoReturn:
    """End at once: a thread may be in a collective that never returns."""
    sys.stderr.flush()
    os._exit(code)
