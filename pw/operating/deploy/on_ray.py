"""`pw.on_ray`: a cluster whose daemons run in actors of a Ray cluster, placed by its placement groups.

Each island is a placement group, and each host an actor in a bundle of its own. An actor starts `pw-worker`
and ends with it; Ray starts it again, on another machine if its own is gone. Ray places and restarts
processes; data and launches never pass through it.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from pw.client.connection import current
from pw.client.keywords import checks_keywords
from pw.core.errors import ConnectionFailed, Error
from pw.core.installed import check_extra
from pw.core.messages.roles import Role
from pw.core.platforms import platform_of
from pw.operating.deploy.cluster_file import ClusterFile, ControllerEntry, IslandEntry, Value
from pw.operating.deploy.daemons import CONTROLLER, controller_command, host_names, worker_command
from pw.processes.child import Announcement, Child, import_path, interpreter
from pw.transport.access import private_files
from pw.transport.access.authority import Authority

PLACE_S = 120.0
STOP_S = 5.0
CREDENTIALS = "CREDENTIALS"
"""Stands in a command for the file of credentials, which is where the actor writes it."""
ADDRESS = "ADDRESS"
"""Stands in a command for the address of the actor's machine."""


class RayDaemon:
    """The actor that runs one daemon: it starts it, and ends when the daemon does."""

    def __init__(self, command: list[str], pem: bytes) -> None:
        import ray

        self._folder = tempfile.TemporaryDirectory(prefix="pw-")
        file = Path(self._folder.name) / "credentials.pem"
        private_files.write(file, pem)
        here: str = ray.util.get_node_ip_address()
        words = [str(file) if word == CREDENTIALS else word for word in command]
        words = [word.replace(ADDRESS, f"[{here}]" if ":" in here else here) for word in words]
        module, arguments = words[2], words[3:]
        start = interpreter(module, arguments, os.environ | {"PYTHONPATH": import_path()})
        self._child: Child[Announcement] = Child(start, Announcement)
        self._closed = False
        threading.Thread(target=self._watch, name="pw-watch", daemon=True).start()

    def _watch(self) -> None:
        while self._child.exit_code() is None:
            time.sleep(0.2)
        if not self._closed:
            self._folder.cleanup()
            os._exit(1)  # Ray starts the actor again

    def address(self) -> str:
        """Wait for what the controller announces; return its address."""
        message, _, _ = self._child.channel.receive()
        if message.error:
            raise ConnectionFailed(message.error)
        return message.address

    def stop(self) -> None:
        """End the daemon."""
        self._closed = True
        self._child.stop(STOP_S)
        self._folder.cleanup()


class RayCluster:
    """A cluster in a Ray cluster; it ends with `close`, or with the `with` block."""

    def __init__(self, file: ClusterFile, resources: Mapping[str, float], strategy: str) -> None:
        import ray

        self._ray, self._file = ray, file
        self._groups: list[Any] = []
        self._actors: list[Any] = []
        self._authority = Authority.create()
        self._folder = tempfile.TemporaryDirectory(prefix="pw-ray-")
        self.credentials = Path(self._folder.name) / "client.pem"
        """The file with this process's credentials, for `PW_CREDENTIALS` of other scripts on this machine."""
        self.address = ""
        self._closed = False
        atexit.register(self.close)
        try:
            self._place(resources, strategy)
        except BaseException:
            self.close()
            raise

    def _place(self, resources: Mapping[str, float], strategy: str) -> None:
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        ray, file = self._ray, self._file
        for name, island in file.islands.items():
            bundles = [dict(resources) for _ in range(island.workers)]
            self._groups.append(placement_group(bundles, strategy=strategy, name=f"pw-{name}"))
        waiting = [group.ready() for group in self._groups]
        _, late = ray.wait(waiting, num_returns=len(waiting), timeout=PLACE_S)
        if late:
            raise Error(
                f"Ray has had no room for {len(late)} of {len(waiting)} islands for {PLACE_S:g} s; each host "
                f"asks for {dict(resources)}, see ray status. Ask for fewer hosts, or add machines to it"
            )
        command = controller_command(file, f"tcp://{ADDRESS}:{file.controller.port}", CREDENTIALS)
        controller = self._start(CONTROLLER, Role.CONTROLLER, "", command, num_cpus=0)
        try:
            self.address = ray.get(controller.address.remote(), timeout=PLACE_S)
        except (ray.exceptions.RayError, TimeoutError) as error:
            raise ConnectionFailed(f"the controller did not start in Ray: {error}") from error
        for group, (name, island) in zip(self._groups, file.islands.items(), strict=True):
            for number, host in enumerate(host_names(file, name)):
                bind = f"tcp://{ADDRESS}:{island.ports}"
                spare = number >= island.size
                worker = worker_command(
                    file, name, self.address, host, bind, CREDENTIALS, spare=spare
                )
                where = PlacementGroupSchedulingStrategy(
                    placement_group=group, placement_group_bundle_index=number
                )
                self._start(
                    host,
                    Role.WORKER,
                    name,
                    worker,
                    num_cpus=resources.get("CPU", 0),
                    num_gpus=resources.get("GPU", 0),
                    scheduling_strategy=where,
                    max_restarts=-1,
                )
        pem = self._authority.issue(Role.CLIENT, "ray", "operator", address=self.address)
        private_files.write(self.credentials, pem)

    def _start(self, name: str, role: Role, island: str, command: list[str], **how: Any) -> Any:
        pem = self._authority.issue(role, name, islands=[island] if island else [])
        actor = self._ray.remote(RayDaemon).options(**how).remote(command, pem)
        self._actors.append(actor)
        return actor

    def connect(self) -> None:
        """Connect this process, once all hosts are there. Raises ConnectionFailed."""
        runtime = current.connect(self.address, credentials=self.credentials)
        wanted = sum(island.size for island in self._file.islands.values())
        end_s = time.monotonic() + PLACE_S
        while True:
            status = runtime.ask.status(PLACE_S)
            ready = sum(len(island.hosts) for island in status.islands if island.formed)
            if ready >= wanted:
                return
            if time.monotonic() > end_s:
                raise ConnectionFailed(
                    f"{wanted - ready} of {wanted} hosts have not joined for {PLACE_S:g} s; ray logs shows why"
                )
            time.sleep(0.1)

    def close(self) -> None:
        """End the daemons, and give Ray its resources back. Idempotent."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        if self.address:
            current.leave(self.address, None)
        ray = self._ray
        if ray.is_initialized():
            stops = [actor.stop.remote() for actor in reversed(self._actors)]
            with contextlib.suppress(ray.exceptions.RayError, TimeoutError):
                ray.get(stops, timeout=2 * STOP_S)
            for actor in self._actors:
                ray.kill(actor)
            for group in self._groups:
                ray.util.remove_placement_group(group)
        self._folder.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"RayCluster(address={self.address!r}, islands={list(self._file.islands)})"


@checks_keywords
def on_ray(
    islands: int = 1,
    hosts_per_island: int = 1,
    devices_per_host: int = 1,
    *,
    spares: int = 0,
    platform: str = "cpu",
    cpus_per_host: float = 1.0,
    strategy: str = "SPREAD",
    options: Mapping[str, Value] | None = None,
    policy: str = "fifo",
    connect: bool = True,
) -> RayCluster:
    """Start a cluster in the Ray cluster that this process uses (`ray.init`), and connect this process to it.

    Islands are called `ray-0`, `ray-1`, ... All nodes need `pw`; a `runtime_env` of `ray.init` may bring it.
    Ray carries the daemons' private keys to their nodes, so its users may get at them.

    Args:
        islands: number of islands; each is a placement group.
        hosts_per_island: workers of each island; each is an actor in a bundle of its own.
        devices_per_host: devices of each worker; on accelerators, as many GPUs are asked of Ray.
        spares: workers of each island that only replace lost hosts.
        platform: `cpu`, `cuda` or `tpu`.
        cpus_per_host: CPUs that each worker asks of Ray.
        strategy: of the placement groups, as `STRICT_SPREAD` for one host a node.
        options: further options of `pw-worker`, as in `{"device-memory": "4GiB"}`.
        policy: scheduling policy among clients.
        connect: connect this process (`pw.connect`) once all islands are formed.

    Raises:
        Error: Ray has no room for the islands, or is not installed.
        ConnectionFailed: the controller or hosts did not start in time.
    """
    check_extra("ray", "ray")
    import ray

    if min(islands, hosts_per_island, devices_per_host) < 1 or spares < 0:
        raise Error("islands, hosts_per_island and devices_per_host must be at least 1")
    if not ray.is_initialized():
        ray.init()
    resources = {"CPU": float(cpus_per_host)}
    if platform_of(platform).visible:
        resources["GPU"] = float(devices_per_host)
    island = IslandEntry(
        hosts=hosts_per_island,
        spares=spares,
        devices=devices_per_host,
        platform=platform,
        options=dict(options or {}),
    )
    file = ClusterFile(
        {f"ray-{number}": island for number in range(islands)},
        name="ray",
        controller=ControllerEntry(port=0, options={"policy": policy}),
    )
    cluster = RayCluster(file, resources, strategy)
    if connect:
        try:
            cluster.connect()
        except BaseException:
            cluster.close()
            raise
    return cluster
