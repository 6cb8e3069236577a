"""Daemons as child processes of this one, which never outlive it."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pw.core.errors import ConnectionFailed
from pw.processes.child import EXIT_ERROR, Announcement, Child, ending, interpreter
from pw.processes.fork_server import ForkServer
from pw.processes.forking import Process

LOOK_S = 0.1
"""Seconds between two looks of the loop at whether the worker still runs."""
MOST_RESTARTS = 10
ANYWHERE = "tcp://127.0.0.1:0"
"""Address of a free port of the loopback."""
_OWN_SETTINGS = (*("JAX_NUM_CPU_DEVICES", "JAX_PLATFORMS", "PJRT_NPROC", "NPROC"), "PW_ADDRESS")
_OWN_FLAG = re.compile(r"--xla_force_host_platform_device_count=\S*")
"""Settings of this process only; children inherit all other flags."""
_PRELOADED = ("pw.cli.preloaded",)

_server: ForkServer | None = None
"""Forks daemons, so that each of them need not import JAX."""


def start_fork_server() -> None:
    """Have a process import what daemons need, once for all that are started from now on."""
    global _server
    environment = inherited()
    if hasattr(os, "pidfd_open") and not (_server and _server.can_start(environment)):
        stop_fork_server()
        _server = ForkServer.interpreter(_PRELOADED, environment)
        atexit.register(stop_fork_server)


def fork_children(imported_with: Mapping[str, str] = os.environ) -> None:
    """Have daemons be forks of this process, which has imported JAX and has no other threads yet.

    Args:
        imported_with: the environment when it imported JAX.
    """
    global _server
    if hasattr(os, "pidfd_open"):
        _server = ForkServer.forked(imported_with)
        atexit.register(stop_fork_server)


def stop_fork_server() -> None:
    """End the fork server of this process; what it has started goes on."""
    global _server
    atexit.unregister(stop_fork_server)
    if _server is not None:
        _server.close()
        _server = None


def inherited() -> dict[str, str]:
    """Return the environment that a child inherits."""
    environment = {k: v for k, v in os.environ.items() if k not in _OWN_SETTINGS}
    if "XLA_FLAGS" in environment:
        environment["XLA_FLAGS"] = _OWN_FLAG.sub("", environment["XLA_FLAGS"]).strip()
    environment["PW_OUTPUT_TO_CLIENTS_ONLY"] = "1"  # they share this process's terminal
    return environment


def options(**values: object) -> list[str]:
    """Return a command line: values as options, True as a flag; None and False are left out."""
    named = [(f"--{name.replace('_', '-')}", value) for name, value in values.items()]
    chosen = [(name, value) for name, value in named if value is not None and value is not False]
    return [name if value is True else f"{name}={value}" for name, value in chosen]


class LocalDaemon(Child[Any]):
    """One daemon of `pw.cli`.

    Args:
        module: its module.
        arguments: arguments of its command line.
        environment: variables that differ from this process's.
        kinds: the types of the messages that it sends after its announcement.
    """

    def __init__(
        self,
        module: str,
        arguments: Sequence[str],
        environment: Mapping[str, str] | None = None,
        kinds: Any = None,
    ) -> None:
        self.module = module
        variables = {**inherited(), **(environment or {})}

        def start(end: int) -> Process | subprocess.Popen[bytes]:
            if _server is not None and _server.can_start(variables):
                with contextlib.suppress(OSError):  # it was killed
                    return _server.fork(module, arguments, variables)(end)
            return interpreter(module, arguments, variables)(end)

        super().__init__(start, Announcement | kinds, np.empty)

    def address(self, timeout_s: float) -> str:
        """Return the address that it announces when it is ready.

        Raises ConnectionFailed if it ends, or takes longer than `timeout_s`.
        """
        if not self.channel.is_readable(timeout_s):
            raise ConnectionFailed(f"{self.module} was not ready within {timeout_s:.0f} s")
        try:
            announcement: Announcement = self.channel.receive().message
        except EOFError:
            how = ending(self.wait())
            words = f"{self.module} ended with {how} before it was ready; its error is above"
            raise ConnectionFailed(words) from None
        if announcement.error:
            raise ConnectionFailed(announcement.error)
        return announcement.address


def start_dashboard(
    address: str,
    environment: Mapping[str, str] | None = None,
    bind: str = ANYWHERE,
    **settings: object,
) -> LocalDaemon:
    """Start the process that shows a cluster on a page; its address is the link.

    Args:
        address: address of the controller.
        environment: variables that differ from this process's.
        bind: address at which the page listens; `none` for no page.
        settings: further options of `pw dashboard`.
    """
    arguments = options(address=address, bind=bind, **settings)
    return LocalDaemon("pw.cli.dashboard", arguments, environment)


@dataclass(eq=False)
class KeptWorker:
    """The worker of an embedded cluster, started again whenever it is killed; on the thread of `loop`.

    A worker that exits with EXIT_ERROR would do so again, so the session ends then.

    Args:
        loop: the event loop that watches it.
        arguments: its command line.
        environment: variables that differ from this process's.
    """

    _loop: asyncio.AbstractEventLoop
    arguments: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    given_up: Callable[[int], None] = lambda code: None
    """Called on the loop, with the exit code, when the daemon is not started again."""
    _restarts: int = 0
    _ended: int | None = None
    _is_closing: bool = False
    module = "pw.cli.worker"

    def __post_init__(self) -> None:
        self._child = LocalDaemon(self.module, self.arguments, self.environment)
        self._loop.call_later(LOOK_S, self._look)

    @property
    def pid(self) -> int:
        """Process id of the daemon as it is now."""
        return self._child.pid

    def exit_code(self) -> int | None:
        """None as long as it runs, or is started again."""
        return self._ended

    def terminate(self) -> None:
        """Ask it to end, and do not start it again; on the loop's thread."""
        self._is_closing = True
        self._child.terminate()

    def stop(self) -> None:
        """Wait until it has ended, after `terminate`; on any thread."""
        self._child.stop()

    def _look(self) -> None:
        if self._is_closing:
            return
        code = self._child.exit_code()
        if code is not None:
            self._child.let_go()
            self._restarts += 1
            if code == EXIT_ERROR or self._restarts > MOST_RESTARTS:
                self._ended = code
                self.given_up(code)
                return
            self._child = LocalDaemon(self.module, self.arguments, self.environment)
        self._loop.call_later(LOOK_S, self._look)


def visible_gpus(worker: int, count: int, shown: str | None) -> str:
    """Return CUDA_VISIBLE_DEVICES for one of several workers on this machine, each with its own GPUs.

    Args:
        worker: the worker's index.
        count: number of GPUs of each worker.
        shown: CUDA_VISIBLE_DEVICES of this process; None if it is not set.

    Raises:
        ValueError: no GPUs are left for it.
    """
    first = worker * count
    if shown is None:
        return ",".join(map(str, range(first, first + count)))
    names = [name.strip() for name in shown.split(",") if name.strip()]
    own = names[first : first + count]
    if len(own) < count:
        raise ValueError(
            f"worker {worker + 1} of this machine is to have {count} GPUs, and those before it have "
            f"{first}; CUDA_VISIBLE_DEVICES names {len(names)}"
        )
    return ",".join(own)
