"""A process that forks others: each begins with all that the server has imported.

A request goes through one socket; what becomes of a fork comes back in a pipe of its own: its process id,
then its exit code. Where a server is a new interpreter, its forks get the environment and the folder of their
requests. But variables that libraries read while they are imported cannot change afterwards.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence

from pw.processes import serving
from pw.processes.forking import Fork
from pw.processes.serving import ForkRequest

START_S = 60.0
"""How long a server may take to start a fork: it imports JAX first."""
REAP_S = 5.0
"""How long a server may take to tell the exit code of a fork that has ended."""

_READ_AT_IMPORT = ("JAX_", "XLA_", "TF_", "PYTHON", "LD_", "MALLOC_", "GLIBC_", "OMP_", "OPENBLAS_")


def _fixed(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a fork cannot change any more."""
    return {k: v for k, v in environment.items() if k.startswith(_READ_AT_IMPORT)}


class Forked:
    """A process that a server has started, with methods of `subprocess.Popen`."""

    def __init__(self, pipe: int) -> None:
        self._pipe = pipe
        self.returncode: int | None = None
        self.pid = self._number(START_S)
        if self.pid <= 0:
            os.close(pipe)
            raise OSError("the fork server does not answer")
        try:
            self._handle = os.pidfd_open(self.pid)
        except ProcessLookupError:  # it has ended
            self._handle = os.open(os.devnull, os.O_RDONLY)  # which is always ready

    def _number(self, timeout_s: float) -> int:
        """Return the next number of the server; -SIGKILL if none comes."""
        if _is_ready(self._pipe, timeout_s):
            data = os.read(self._pipe, serving.CODE.size)
            if len(data) == serving.CODE.size:
                return int(serving.CODE.unpack(data)[0])
        return -signal.SIGKILL

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code. Raises subprocess.TimeoutExpired."""
        if self.returncode is None:
            if not _is_ready(self._handle, timeout):
                raise subprocess.TimeoutExpired("fork", timeout or 0.0)
            self.returncode = self._number(REAP_S)
            os.close(self._pipe)
            os.close(self._handle)
        return self.returncode

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal, if it still runs."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._handle, number)

    def kill(self) -> None:
        """Send SIGKILL, if it still runs."""
        self.send_signal(signal.SIGKILL)


def _is_ready(descriptor: int, timeout_s: float | None) -> bool:
    """Wait until a descriptor is readable, or has ended; return whether it is."""
    ready = select.poll()
    ready.register(descriptor, select.POLLIN)
    return bool(ready.poll(None if timeout_s is None else timeout_s * 1000))


class ForkServer:
    """A fork server of this process: it ends when this process does."""

    def __init__(
        self,
        process: subprocess.Popen[bytes] | Fork,
        link: socket.socket,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.process = process
        self._socket = link
        self._fixed = None if environment is None else _fixed(environment)
        self._owner = os.getpid()

    @classmethod
    def interpreter(cls, preloaded: Sequence[str], environment: Mapping[str, str]) -> ForkServer:
        """Start a server as a new interpreter, which imports these modules."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", serving.__name__, str(theirs.fileno()), *preloaded],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
                pass_fds=[theirs.fileno()],
                env=dict(environment),
            )
        return cls(process, ours, environment)

    @classmethod
    def forked(cls, environment: Mapping[str, str] | None = None) -> ForkServer:
        """Fork a server from this process, which has no other threads yet.

        Args:
            environment: in which this process imported its modules, if `can_start` is asked.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:

            def run() -> None:
                serving.serve(theirs)

            process = Fork("pw-fork-server", run, [theirs.fileno()])
        return cls(process, ours, environment)

    def can_start(self, environment: Mapping[str, str]) -> bool:
        """Return whether a process with this environment can be a fork of this server."""
        return (
            self._owner == os.getpid()
            and self.process.poll() is None
            and self._fixed == _fixed(environment)
        )

    def start(self, request: ForkRequest, descriptors: Sequence[int]) -> Forked:
        """Start a process. Raises OSError if the server has ended."""
        pipe, theirs = os.pipe()
        try:
            self._socket.settimeout(START_S)
            socket.send_fds(self._socket, [serving.encode(request)], [theirs, *descriptors])
        except BaseException:
            os.close(pipe)
            raise
        finally:
            os.close(theirs)
        return Forked(pipe)

    def leave(self) -> None:
        """Close the socket to the server in a forked copy of this process."""
        self._socket.close()

    def close(self) -> None:
        """End the server; what it has started goes on, unless it ends with the server. Idempotent."""
        self._socket.close()
        if self._owner != os.getpid():
            return
        try:
            self.process.wait(REAP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
