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
from pw.devices.jax.compile_server import STATUS, Begin, Incoming, Task, ask_fork, ask_kill, send

TIMEOUT_S = 600.0
MEMORY_BYTES = 8 << 30
"""The default bounds of one compilation."""

_LOOK_S = 0.05
"""How often the memory of a process is looked at."""

_START_S = 60.0
"""How long a server may take to start a process; it imports JAX first, unless it was forked."""

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

    server: socket.socket
    number: int
    begin: Begin
    tasks: int = 0
    _incoming: Incoming = field(default_factory=Incoming)

    def __post_init__(self) -> None:
        self.devices = self.begin.devices
        ours, theirs = socket.socketpair()
        self._link = ours
        self._pipe, end = os.pipe()
        try:
            with theirs:
                ask_fork(self.server, self.number, theirs.fileno(), end)
            status = self._status(_START_S)
            if status is None:
                raise OSError("the server does not answer")
            self._process = status
            send(self._link, self.begin)
        except OSError:
            self._link.close()
            os.close(self._pipe)
            raise
        finally:
            os.close(end)
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
        status = self._status(_END_S)
        code = -signal.SIGKILL if status is None else os.waitstatus_to_exitcode(status)
        if code == -signal.SIGKILL:
            return "the system ended the compiler, most likely because memory was short"
        how = f"with {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        return (
            f"the compiler crashed on it ({how}). Divide the function to find out which part it is, and "
            "report it to JAX"
        )

    def _status(self, timeout_s: float) -> int | None:
        if not select.select([self._pipe], [], [], timeout_s)[0]:
            return None
        data = os.read(self._pipe, STATUS.size)
        return STATUS.unpack(data)[0] if len(data) == STATUS.size else None

    def _memory_bytes(self) -> int:
        try:
            with open(f"/proc/{self._process}/statm") as file:
                _, resident, shared, *_ = map(int, file.read().split())
            return (resident - shared) * _PAGE_BYTES
        except OSError:
            return 0

    def end(self) -> None:
        """End the process, if it still runs."""
        with contextlib.suppress(OSError):
            ask_kill(self.server, self.number)
        self._link.close()
        os.close(self._pipe)


@dataclass
class Server:
    """The way to a server; it ends when that is closed."""

    socket: socket.socket
    process: subprocess.Popen[bytes] | None = None
    """Unless it was forked."""

    def close(self) -> None:
        """End the server."""
        self.socket.close()
        if self.process is not None:
            try:
                self.process.wait(_END_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


def started_server() -> Server:
    """Start a server as a program of its own."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    path = [entry or os.getcwd() for entry in sys.path]
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "pw.devices.jax.compile_server", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
            start_new_session=True,
        )
    return Server(ours, process)


def pool() -> str:
    """Return how many threads XLA has in this process."""
    return os.environ.get("PJRT_NPROC", "") or str(os.cpu_count())
