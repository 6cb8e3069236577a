"""One process that parses, vets and compiles artifacts, as its host sees it, and the server that forks it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from pw.core.errors import ErrorReport
from pw.devices.jax.compile_server import BeginCompile, CompileAnswer, CompileTask
from pw.processes.child import Child, ending, import_path
from pw.processes.fork_server import ForkServer

TIMEOUT_S = 600.0
MEMORY_BYTES = 8 << 30
"""The default bounds of one compilation."""

_LOOK_S = 0.05
"""Seconds between two looks at the memory of a process."""

MODULE = "pw.devices.jax.compile_server"

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
    task: CompileTask
    done: Done
    cancelled: bool = False


class Ended(Exception):
    """A process has ended, or had to be ended; the message says why, of the artifact."""


class CompileProcess:
    """A child of the server. Raises OSError if it cannot be started."""

    def __init__(self, server: ForkServer, begin: BeginCompile) -> None:
        self.devices = begin.devices
        self.tasks = 0
        self._child: Child[CompileAnswer] = Child(server.fork(MODULE), CompileAnswer)
        self._child.channel.send(begin)

    def work(self, job: Job, bounds: Bounds, meanwhile: Callable[[], None]) -> CompileAnswer:
        """Have a task done; return the answer. Raises Ended."""
        until_s = time.monotonic() + bounds.timeout_s
        channel = self._child.channel

        def watch() -> None:
            while not channel.is_readable(_LOOK_S):
                meanwhile()
                self._check(job, until_s, bounds)

        try:
            channel.socket.settimeout(bounds.timeout_s)
            channel.send(job.task)
            return channel.receive(watch).message
        except TimeoutError:
            raise self._too_slow(bounds) from None
        except msgspec.MsgspecError:
            raise Ended("the compiler gave an answer that cannot be read") from None
        except (EOFError, OSError):
            raise Ended(self._how()) from None

    def _check(self, job: Job, until_s: float, bounds: Bounds) -> None:
        if job.cancelled:
            raise Ended("it is not wanted any more")
        if time.monotonic() > until_s:
            raise self._too_slow(bounds)
        if self._memory_bytes() > bounds.memory_bytes:
            raise Ended(
                f"it needs more than {bounds.memory_bytes / (1 << 30):.3g} GiB to compile. Make it smaller, or "
                "start the workers with a larger --compile-memory"
            )

    def _too_slow(self, bounds: Bounds) -> Ended:
        return Ended(
            f"it takes longer than {bounds.timeout_s:g} s. Make it smaller, for example with "
            "jax.lax.scan in place of a Python loop, or start the workers with a larger --compile-timeout"
        )

    def _how(self) -> str:
        """Say how the process ended."""
        code = self._child.wait()
        if code == -signal.SIGKILL:
            return "the system ended the compiler, most likely because memory was short"
        return (
            f"the compiler crashed on it (with {ending(code)}). Divide the function to find out which part it "
            "is, and report it to JAX"
        )

    def _memory_bytes(self) -> int:
        try:
            with open(f"/proc/{self._child.pid}/statm") as file:
                _, resident, shared, *_ = map(int, file.read().split())
            return (resident - shared) * _PAGE_BYTES
        except OSError:
            return 0

    def end(self) -> None:
        """End the process, if it still runs."""
        self._child.kill()
        self._child.stop()


def started_server() -> ForkServer:
    """Start a fork server that is a new interpreter."""
    return ForkServer.interpreter([MODULE], {**os.environ, "PYTHONPATH": import_path()})


def pool() -> str:
    """Return how many threads XLA has in this process."""
    return os.environ.get("PJRT_NPROC", "") or str(os.cpu_count())
