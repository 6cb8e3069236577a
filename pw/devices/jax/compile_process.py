"""One process that parses, vets and compiles artifacts, as its host sees it, and the server that forks it."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from pw.core.errors import ErrorReport
from pw.devices.jax.compile_server import Begin, Incoming, Task, send
from pw.processes.fork_server import ForkServer
from pw.processes.serving import ForkRequest

TIMEOUT_S = 600.0
MEMORY_BYTES = 8 << 30
"""The default bounds of one compilation."""

_LOOK_S = 0.05
"""How often the memory of a process is looked at."""

MODULE = "pw.devices.jax.compile_server"

_END_S = 5.0
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


Done = Callable[[bytes | ErrorReport], None]


@dataclass(frozen=True)
class Bounds:
    """What one compilation may take."""

    timeout_s: float = TIMEOUT_S
    memory_bytes: int = MEMORY_BYTES


@dataclass(eq=False)
class Job:
    """A task of a client."""

    client: int
    name: str
    digest: bytes
    task: Task
    done: Done
    cancelled: bool = False


class Ended(Exception):
    """A process has ended, or had to be ended; the message says why, of the artifact."""


@dataclass(eq=False)
class CompileProcess:
    """A child of the server. Raises OSError if it cannot be started."""

    server: ForkServer
    begin: Begin
    tasks: int = 0
    _incoming: Incoming = field(default_factory=Incoming)

    def __post_init__(self) -> None:
        self.devices = self.begin.devices
        self._link, theirs = socket.socketpair()
        try:
            with theirs:
                end = theirs.fileno()
                request = ForkRequest(MODULE, (str(end),), (end,), ends_with_server=True)
                self._process = self.server.start(request, [end])
            send(self._link, self.begin)
        except OSError:
            self._link.close()
            raise
        self._link.setblocking(False)

    def work(self, job: Job, bounds: Bounds, meanwhile: Callable[[], None]) -> bytes:
        """Have a task done; return the answer. Raises Ended."""
        until_s = time.monotonic() + bounds.timeout_s
        try:
            self._link.setblocking(True)
            self._link.settimeout(bounds.timeout_s)
            send(self._link, job.task)
            self._link.setblocking(False)
            data: bytes | None = b""
            while True:
                if data and (frame := self._incoming.feed(data)) is not None:
                    return frame
                if not select.select([self._link], [], [], _LOOK_S)[0]:
                    data = None
                    meanwhile()
                    self._check(job, until_s, bounds)
                    continue
                data = self._link.recv(1 << 20)
                if not data:
                    break
        except TimeoutError:
            raise self._too_slow(bounds) from None
        except OSError:
            pass
        raise Ended(self._how(bounds))

    def _check(self, job: Job, until_s: float, bounds: Bounds) -> None:
        if job.cancelled:
            raise Ended("it is not wanted any more")
        if time.monotonic() > until_s:
            raise self._too_slow(bounds)
        if self._memory_bytes() > bounds.memory_bytes:
            raise self._too_large(bounds)

    def _too_slow(self, bounds: Bounds) -> Ended:
        return Ended(
            f"it takes longer than {bounds.timeout_s:g} s. Make it smaller, for example with "
            "jax.lax.scan in place of a Python loop, or start the workers with a larger --compile-timeout"
        )

    def _too_large(self, bounds: Bounds) -> Ended:
        return Ended(
            f"it needs more than {bounds.memory_bytes / (1 << 30):.3g} GiB to compile. Make it smaller, or "
            "start the workers with a larger --compile-memory"
        )

    def _how(self, bounds: Bounds) -> str:
        """Say how the process ended."""
        try:
            code = self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            code = -signal.SIGKILL
        if code == -signal.SIGKILL:
            return "the system ended the compiler, most likely because memory was short"
        how = f"with {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        return (
            f"the compiler crashed on it ({how}). Divide the function to find out which part it is, and "
            "report it to JAX"
        )

    def _memory_bytes(self) -> int:
        try:
            with open(f"/proc/{self._process.pid}/statm") as file:
                _, resident, shared, *_ = map(int, file.read().split())
            return (resident - shared) * _PAGE_BYTES
        except OSError:
            return 0

    def end(self) -> None:
        """End the process, if it still runs."""
        self._process.kill()
        self._link.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)


def started_server() -> ForkServer:
    """Start a fork server that is a new interpreter."""
    path = [entry or os.getcwd() for entry in sys.path]
    return ForkServer.interpreter([MODULE], {**os.environ, "PYTHONPATH": os.pathsep.join(path)})


def pool() -> str:
    """Return how many threads XLA has in this process."""
    return os.environ.get("PJRT_NPROC", "") or str(os.cpu_count())
