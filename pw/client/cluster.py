"""A real cluster on this machine: daemons as child processes on free ports.

    with pw.LocalCluster(islands=2, hosts_per_island=2, devices_per_host=1) as cluster:
        ...

It is what a deployment over several machines is, but for the distance: separate processes, ZeroMQ
between them, `jax.distributed` inside each island. Nothing of it survives this process.
"""

from __future__ import annotations

import atexit
import os
import signal
import threading
import types
from typing import Self

from pw.client import runtime as runtime_module
from pw.client.children import Child, read_announcement
from pw.client.runtime import Runtime
from pw.client.threads import remote

START_S = 30.0


class LocalCluster:
    """Start a controller and workers, connect this process to them, and end them again.

    Islands are called `island-0`, `island-1`, ...

    Args:
        islands: number of islands.
        hosts_per_island: worker processes of each island.
        devices_per_host: devices of each worker.
        platform: `cpu`, `cuda` or `tpu`.
        policy: scheduling policy among clients: `fifo`, `share` or `priority`.
        connect: connect this process (`pw.connect`) once all islands are formed.
        lease_s: how long a silent client keeps what it owns, in seconds.
        allow_python: let the workers run `pw.host_function`s.
        log_level: what the daemons write to standard error.

    Raises:
        ConnectionFailed: a daemon ended or the islands were not formed in time.
    """

    def __init__(
        self,
        islands: int = 1,
        hosts_per_island: int = 1,
        devices_per_host: int = 1,
        *,
        platform: str = "cpu",
        policy: str = "fifo",
        connect: bool = True,
        lease_s: float = 10.0,
        allow_python: bool = False,
        log_level: str = "error",
    ) -> None:
        for name, value in (
            ("islands", islands),
            ("hosts_per_island", hosts_per_island),
            ("devices_per_host", devices_per_host),
        ):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        self.address = ""
        self._children: list[Child] = []
        self._runtime: Runtime | None = None
        self._previous: Runtime | None = None
        self._closed = False
        self._sigterm = False
        self._owner = os.getpid()
        common = ["--log-level", log_level]
        atexit.register(self.close)
        self._end_on_sigterm()
        try:
            self.address = self._start_controller(
                [
                    "--bind",
                    "tcp://127.0.0.1:0",
                    "--policy",
                    policy,
                    "--lease",
                    str(lease_s),
                    *common,
                ]
            )
            for island in range(islands):
                for host in range(hosts_per_island):
                    self._start_worker(
                        [
                            *("--controller", self.address),
                            *("--island", f"island-{island}"),
                            *("--island-hosts", str(hosts_per_island)),
                            *("--devices", str(devices_per_host)),
                            *("--platform", platform),
                            *("--lease", str(lease_s)),
                            *("--name", f"island-{island}-host-{host}"),
                            *(["--allow-python"] if allow_python else []),
                            *common,
                        ]
                    )
            self._wait(islands * hosts_per_island, connect)
        except BaseException:
            self.close()
            raise

    def _start_controller(self, arguments: list[str]) -> str:
        read, write = os.pipe()
        try:
            controller = Child(
                "pw.cli.controller", [*arguments, "--announce-fd", str(write)], [write]
            )
        finally:
            os.close(write)
        self._children.append(controller)
        return read_announcement(controller, read, START_S)

    def _start_worker(self, arguments: list[str]) -> None:
        self._children.append(Child("pw.cli.worker", arguments))

    def _wait(self, hosts: int, connect: bool) -> None:
        """A session that sees all hosts has seen all islands formed."""

        def start(runtime: Runtime) -> runtime_module.SessionThread:
            session = remote(self.address)(runtime)
            session.expect_hosts(hosts, self._children)
            return session

        session = Runtime(start, 1.0, 0)
        if connect:
            self._previous = runtime_module.use(session)
            self._runtime = session
        else:
            session.close()

    @property
    def pids(self) -> list[int]:
        """Process ids of the daemons: the controller first, then the workers (their supervisors)."""
        return [child.pid for child in self._children]

    def close(self) -> None:
        """Disconnect if connected here, end all daemons and wait for them. Idempotent.

        In a process forked from the one that started the cluster it does nothing.
        """
        if self._closed or self._owner != os.getpid():
            return
        self._closed = True
        atexit.unregister(self.close)
        if self._runtime is not None and runtime_module.is_current(self._runtime):
            runtime_module.disconnect()
            runtime_module.use(self._previous)
        elif self._runtime is not None:
            self._runtime.close()
        workers, controller = self._children[1:], self._children[:1]
        for group in (workers, controller):
            for child in group:
                child.terminate()
            for child in group:
                child.stop()
        in_main = threading.current_thread() is threading.main_thread()
        if self._sigterm and in_main and signal.getsignal(signal.SIGTERM) is _exit:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _end_on_sigterm(self) -> None:
        """Have SIGTERM end the script as an exception would, unless the script handles it itself."""
        if threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, _exit)
            self._sigterm = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: types.TracebackType | None,
    ) -> None:
        self.close()


def _exit(number: int, frame: types.FrameType | None) -> None:
    raise SystemExit(128 + number)
