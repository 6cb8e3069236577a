"""A cluster on this machine: daemons as child processes, with unix sockets that no other user can reach.

    with pw.LocalCluster(islands=2, hosts_per_island=2, devices_per_host=1) as cluster:
        ...

It has the same processes as a deployment over several machines, with `jax.distributed` inside each
island. They end with this process.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import threading
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Self

from pw.client.connection import current
from pw.client.connection.runtime import Runtime
from pw.client.connection.session_thread import SessionThread
from pw.client.connection.threads import remote
from pw.client.display.tables import Table, html, is_notebook, link_to
from pw.client.keywords import checks_keywords
from pw.core.actors.watchdog import STALL_S
from pw.core.installed import DASHBOARD, check_extra, is_installed
from pw.core.platforms import platform_of
from pw.core.sizes import parse_size
from pw.core.waits import CLIENT_TIMEOUT_S, MOVE_S, RECOVERY_S
from pw.processes.daemons import (
    LocalDaemon,
    options,
    start_dashboard,
    start_fork_server,
    visible_gpus,
)
from pw.transport.access.private import PrivateFolder

START_S = 30.0


class LocalHost:
    """One host of a local cluster: a supervisor process (`pw-worker`), and the runtime that it restarts.

    Tests send signals to its process ids.
    """

    def __init__(self, name: str, start: Callable[[], LocalDaemon]) -> None:
        self.name = name
        self._start = start
        self._worker = start()

    @property
    def pid(self) -> int:
        """Process id of the supervisor."""
        return self._worker.pid

    def runtime_pid(self) -> int | None:
        """Return the process id of the runtime; None while there is none."""
        return next(iter(self._runtime_pids()), None)

    def _runtime_pids(self) -> list[int]:
        """Return the process ids of the supervisor's children: the runtime, if there is one."""
        try:
            children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text()
        except OSError:
            return []
        return [int(child) for child in children.split()]

    def exit_code(self) -> int | None:
        """The supervisor's exit code; None while it runs."""
        return self._worker.exit_code()

    def kill(self) -> None:
        """End supervisor and runtime for good, as if the machine had lost its power; again it does nothing."""
        if self.exit_code() is not None:
            return
        # Stop the supervisor first: it would replace the runtime.
        os.kill(self.pid, signal.SIGSTOP)
        for runtime in self._runtime_pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(runtime, signal.SIGKILL)
        self._worker.kill()
        self._worker.stop()

    def restart(self) -> None:
        """Start a host again that `kill` has ended, as if its machine had been switched on."""
        if self.exit_code() is not None:
            self._worker = self._start()

    def __repr__(self) -> str:
        return f"LocalHost({self.name!r}, pid={self.pid})"


class LocalCluster:
    """Start a controller and workers, connect this process to them, and end them again.

    Islands are called `island-0`, `island-1`, ...

    Args:
        islands: number of islands.
        hosts_per_island: worker processes of each island.
        devices_per_host: devices of each worker.
        spare_hosts: workers that wait for a free place in any island.
        platform: `cpu`, `cuda` or `tpu`. On `cuda` each worker is shown GPUs of its own, taken in order from
            those that CUDA_VISIBLE_DEVICES names, if it is set.
        device_memory: memory of each device that runs may use, in bytes or as in `"4GiB"`; by default what the
            device says that it has, which CPU devices do not.
        spill: host memory of each worker for arrays that leave the devices when a run has no room there, in
            bytes or as in `"64GiB"`; by default they stay. It needs devices with a limit (docs/memory.md).
        spill_files: a folder for arrays that leave this host memory when it is full, or when no run has read
            them for minutes; by default they stay.
        policy: scheduling policy among clients: `fifo`, `share` or `priority`.
        connect: connect this process (`pw.connect`) once all islands are formed.
        dashboard: show the cluster on a page; `cluster.dashboard` is its link (docs/dashboard.md). By default
            only in a notebook, if the extra `dashboard` is installed.
        events: have the controller publish events, for `pw events` and other readers (docs/monitoring.md).
        lease_s: how long a client keeps what it owns after its machine has ceased to answer, in seconds.
        client_timeout_s: how long a silent client keeps it while its machine answers, in seconds.
        recovery_timeout_s: how long what needs a lost island waits until it is given up, in seconds.
        move_after_s: after how long slices of a lost island move to one that has room, in seconds.
        heartbeat_s: the interval of a worker's heartbeats. It is lost if its machine does not answer three of
            them, and if it says nothing for 10 s, or for three of them.
        allow_python: let the workers run `pw.host_function`s.
        compile_cache: a folder for compiled computations, which workers share, also with later clusters; by
            default `~/.cache/pw/executables`. With `""` nothing is kept.
        stall_s: after how long without progress the daemons log the reason, in seconds.
        log_level: the lowest level that the daemons log to standard error.

    Raises:
        ConnectionFailed: a daemon ended or the islands were not formed in time.
        ValueError: there are too few GPUs for so many workers, `device_memory` or `spill` is no size, or
            `spill_files` is no folder or comes without `spill`.
    """

    @checks_keywords
    def __init__(
        self,
        islands: int = 1,
        hosts_per_island: int = 1,
        devices_per_host: int = 1,
        *,
        spare_hosts: int = 0,
        platform: str = "cpu",
        device_memory: int | str | None = None,
        spill: int | str | None = None,
        spill_files: str | os.PathLike[str] | None = None,
        policy: str = "fifo",
        connect: bool = True,
        dashboard: bool | None = None,
        events: bool = False,
        lease_s: float = 10.0,
        client_timeout_s: float = CLIENT_TIMEOUT_S,
        recovery_timeout_s: float = RECOVERY_S,
        move_after_s: float = MOVE_S,
        heartbeat_s: float = 1.0,
        allow_python: bool = False,
        compile_cache: str | os.PathLike[str] | None = None,
        stall_s: float = STALL_S,
        log_level: str = "error",
    ) -> None:
        for name, value, least in (
            ("islands", islands, 1),
            ("hosts_per_island", hosts_per_island, 1),
            ("devices_per_host", devices_per_host, 1),
            ("spare_hosts", spare_hosts, 0),
        ):
            if value < least:
                raise ValueError(f"{name} must be at least {least}, not {value}")
        bound_bytes = None if device_memory is None else parse_size(str(device_memory))
        spill_bytes = None if spill is None else parse_size(str(spill))
        if spill_files is not None and not (spill_bytes and os.path.isdir(spill_files)):
            raise ValueError(
                f"spill_files={os.fspath(spill_files)!r} must be a folder, for arrays that leave the host "
                "memory of spill="
            )
        self.address = ""
        self.hosts: list[LocalHost] = []
        """The hosts of the islands as they were started, and after them the spare ones."""
        self._children: list[LocalDaemon] = []
        self._folder = PrivateFolder.make()
        if dashboard is None:
            dashboard = is_notebook() and is_installed(*DASHBOARD)
        elif dashboard:
            check_extra("dashboard", *DASHBOARD)
        self.dashboard = ""
        """The link of the page that shows the cluster; empty if there is none."""
        self._page: LocalDaemon | None = None
        events = events or dashboard
        self.events = f"ipc://{self._folder.path}/events" if events else ""
        """Address at which the controller publishes events; empty if it does not."""
        self._runtime: Runtime | None = None
        self._previous: Runtime | None = None
        self._platform, self._devices_per_host = platform, devices_per_host
        self._closed = False
        self._sigterm = False
        self._owner = os.getpid()
        common = options(
            lease=lease_s, client_timeout=client_timeout_s, log_level=log_level, stall_after=stall_s
        )
        atexit.register(self.close)
        self._end_on_sigterm()
        start_fork_server()  # several daemons, and one import of JAX
        try:
            where = options(
                bind=self._folder.controller,
                policy=policy,
                events=self.events or None,
                recovery_timeout=recovery_timeout_s,
                move_after=move_after_s,
            )
            controller = self._start("pw.cli.controller", [*where, *common])
            self.address = controller.address(START_S)
            common += options(
                controller=self.address,
                devices=devices_per_host,
                platform=platform,
                device_memory=bound_bytes,
                spill=spill_bytes,
                spill_files=None if spill_files is None else os.fspath(spill_files),
                heartbeat=heartbeat_s,
                allow_python=allow_python,
                compile_cache=None if compile_cache is None else os.fspath(compile_cache),
            )
            for island in range(islands):
                place = options(island=f"island-{island}", island_hosts=hosts_per_island)
                for host in range(hosts_per_island):
                    self._start_worker(f"island-{island}-host-{host}", [*place, *common])
            for host in range(spare_hosts):
                self._start_worker(f"spare-{host}", ["--spare", *common])
            if dashboard:
                self._page = start_dashboard(self.address)
            self._wait(islands * hosts_per_island, connect)
            if self._page is not None:
                self.dashboard = self._page.address(START_S)
        except BaseException:
            self.close()
            raise

    def _start(
        self, module: str, arguments: list[str], environment: Mapping[str, str] | None = None
    ) -> LocalDaemon:
        daemon = LocalDaemon(module, arguments, environment)
        self._children.append(daemon)
        return daemon

    def _start_worker(self, name: str, arguments: list[str]) -> None:
        environment: dict[str, str] = {}
        if variable := platform_of(self._platform).visible:
            shown = os.environ.get(variable)
            environment[variable] = visible_gpus(len(self.hosts), self._devices_per_host, shown)
        arguments = [*arguments, *options(name=name)]
        place = len(self._children)

        def start() -> LocalDaemon:
            del self._children[place : place + 1]  # of the process that was killed
            worker = LocalDaemon("pw.cli.worker", arguments, environment)
            self._children.insert(place, worker)
            return worker

        self.hosts.append(LocalHost(name, start))

    def _wait(self, hosts: int, connect: bool) -> None:
        """Wait until all islands are formed; connect this process if that is wanted."""

        def start(runtime: Runtime) -> SessionThread:
            session = remote(self.address)(runtime)
            session.expect_hosts(hosts, self._children)
            return session

        session = Runtime(start, 1.0, 0)
        if connect:
            self._previous = current.use(session)
            self._runtime = session
        else:
            session.close()

    @property
    def pids(self) -> list[int]:
        """Process ids of the daemons: the controller first, then the workers (their supervisors)."""
        return [child.pid for child in self._children]

    @property
    def page_pids(self) -> list[int]:
        """Process id of the dashboard, if there is one."""
        return [] if self._page is None else [self._page.pid]

    def close(self) -> None:
        """Disconnect if connected here, end all daemons and wait for them. Idempotent.

        In a process forked from the one that started the cluster it does nothing.
        """
        if self._closed or self._owner != os.getpid():
            return
        self._closed = True
        atexit.unregister(self.close)
        current.leave(self.address, self._previous)  # which may be a later session
        if self._runtime is not None:
            self._runtime.close()
        workers, controller = self._children[1:], self._children[:1]
        page = [] if self._page is None else [self._page]
        for group in (page, workers, controller):
            for child in group:
                child.terminate()
            for child in group:
                child.stop()
        self._folder.leave()
        in_main = threading.current_thread() is threading.main_thread()
        if self._sigterm and in_main and signal.getsignal(signal.SIGTERM) is _exit:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _end_on_sigterm(self) -> None:
        """Make SIGTERM raise SystemExit, unless the script handles it."""
        if threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, _exit)
            self._sigterm = True

    def __repr__(self) -> str:
        if self._closed:
            return "LocalCluster(closed)"
        return f"LocalCluster(address={self.address!r}, hosts={len(self.hosts)})"

    def _repr_html_(self) -> str:
        codes = [(host, host.exit_code()) for host in self.hosts]
        rows = tuple(
            (host.name, host.pid, "running" if code is None else f"ended with exit code {code}")
            for host, code in codes
        )
        shown = html(f"{self!r}", [Table("Hosts", ("host", "pid", "state"), rows)])
        return shown + link_to("" if self._closed else self.dashboard)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _exit(number: int, frame: types.FrameType | None) -> None:
    raise SystemExit(128 + number)
