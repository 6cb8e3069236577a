"""Daemons as child processes of this one, which never outlive it.

Each child inherits the reading end of a pipe whose writing end only this process holds: when this process ends
in any way, the child reads the end of the file and stops. Children have sessions of their own, so a Ctrl-C at
the terminal reaches only the user's script. A forked copy of this process closes its writing ends, or it would
keep the daemons alive.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import re
import select
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from pw.core.errors import ConnectionFailed
from pw.processes.fork_server import Forked, ForkServer
from pw.processes.serving import ForkRequest

STOP_S = 3.0
LOOK_S = 0.1
"""How often the loop looks whether the worker still runs."""
MOST_RESTARTS = 10
EXIT_ERROR = 1
"""The worker has written a line that says why, and starting it again would not help."""
_OWN_SETTINGS = (
    *("JAX_NUM_CPU_DEVICES", "JAX_PLATFORMS", "PJRT_NPROC", "NPROC"),
    "PW_ADDRESS",
)
_OWN_FLAG = re.compile(r"--xla_force_host_platform_device_count=\S*")
"""Settings of this process only; children inherit all other flags."""
_PRELOADED = ("pw.cli.host", "pw.cli.worker", "pw.cli.controller")

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


def _start(
    module: str, arguments: Sequence[str], environment: dict[str, str], descriptors: Sequence[int]
) -> subprocess.Popen[bytes] | Forked:
    if _server is not None and _server.can_start(environment):
        # Standard output goes nowhere; standard error is that of this process as it is now.
        request = ForkRequest(
            module, tuple(arguments), (1, 2, *descriptors), environment, os.getcwd()
        )
        with open(os.devnull, "w") as null, contextlib.suppress(OSError):  # it was killed
            return _server.start(request, [null.fileno(), 2, *descriptors])
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
        pass_fds=descriptors,
        env=environment,
    )


class Child:
    """One daemon of `pw.cli`, started with `arguments`; `environment` adds to this process's."""

    def __init__(
        self,
        module: str,
        arguments: Sequence[str],
        pass_fds: Sequence[int] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.module = module
        self._owner = os.getpid()
        parent_read, self._parent_write = os.pipe()
        arguments = [*arguments, "--parent-fd", str(parent_read)]
        variables = {**inherited(), **(environment or {})}
        try:
            self._process = _start(module, arguments, variables, [parent_read, *pass_fds])
        except BaseException:
            os.close(self._parent_write)
            raise
        finally:
            os.close(parent_read)
        _children.add(self)

    @property
    def pid(self) -> int:
        """The child's process id."""
        return self._process.pid

    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._process.poll()

    def let_go(self) -> None:
        """Close this process's end of the pipe."""
        if self._parent_write >= 0:
            os.close(self._parent_write)
            self._parent_write = -1

    def terminate(self) -> None:
        """Ask it to end; only the process that started it can."""
        self.let_go()
        if self._owner != os.getpid():
            return
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill it, and reap it."""
        self.let_go()
        if self._owner == os.getpid():
            self._process.kill()
            self._process.wait()

    def stop(self) -> None:
        """End it and reap it. Idempotent."""
        self.terminate()
        if self._owner != os.getpid():
            return
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


_children: weakref.WeakSet[Child] = weakref.WeakSet()


def _forked() -> None:
    if _server is not None:
        _server.leave()
    for child in _children:
        child.let_go()


os.register_at_fork(after_in_child=_forked)


def read_announcement(child: Child, announcement: int, timeout_s: float) -> str:
    """Return the line that a daemon writes to the pipe `announcement` when it is ready.

    Raises ConnectionFailed if it ends, or takes longer than `timeout_s`.
    """
    text = b""
    with os.fdopen(announcement, "rb", buffering=0) as pipe:
        while not text.endswith(b"\n"):
            if not select.select([pipe], [], [], timeout_s)[0]:
                raise ConnectionFailed(f"{child.module} was not ready within {timeout_s:.0f} s")
            chunk = pipe.read(1024)
            if not chunk:
                child.stop()
                raise ConnectionFailed(
                    f"{child.module} ended with exit code {child.exit_code()} before it was ready; "
                    "its error is above"
                )
            text += chunk
    return text.decode().strip()


@dataclass(eq=False)
class KeptWorker:
    """The worker of an embedded cluster, started again whenever it is killed; on the thread of `loop`.

    A worker that exits with EXIT_ERROR would do so again, so the session ends then.

    Args:
        loop: the event loop that watches it.
        arguments: its command line.
    """

    _loop: asyncio.AbstractEventLoop
    _arguments: Sequence[str]
    given_up: Callable[[int], None] = lambda code: None
    """Called on the loop, with the exit code, when the daemon is not started again."""
    _restarts: int = 0
    _ended: int | None = None
    _is_closing: bool = False
    module = "pw.cli.worker"

    def __post_init__(self) -> None:
        self._child = Child(self.module, self._arguments)
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
            self._child = Child(self.module, self._arguments)
        self._loop.call_later(LOOK_S, self._look)
