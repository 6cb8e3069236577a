"""The fork server of this process: starts daemons of `pw.cli` without importing JAX for each.

It is one more child process (`pw.cli.fork_server`), which imports everything once and then forks. The
requests go through one socket; what becomes of a fork comes back in a pipe of its own: its process id, then its
exit status. A fork gets the descriptors, the environment and the folder that its request names. Variables that
libraries read while they are imported cannot be changed afterwards: a daemon that needs others of them
is started as a new interpreter.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence

import msgspec

MODULE = "pw.cli.fork_server"
STATUS = struct.Struct("<i")
START_S = 60.0
REAP_S = 5.0
"""How long the server may take to tell the status of a fork that has ended."""
REQUEST_BYTES = 1 << 17

_READ_AT_IMPORT = ("JAX_", "XLA_", "TF_", "PYTHON", "LD_", "MALLOC_", "GLIBC_", "OMP_", "OPENBLAS_")


class ForkRequest(msgspec.Struct, frozen=True, array_like=True):
    """Client to fork server: fork, and run the main function of a module there."""

    module: str
    arguments: tuple[str, ...]
    environment: dict[str, str]
    folder: str
    descriptors: tuple[int, ...]
    """The numbers that the descriptors of the request get in the fork; the pipe comes before them."""


encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(ForkRequest).decode


def _fixed(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a fork cannot change any more."""
    return {k: v for k, v in environment.items() if k.startswith(_READ_AT_IMPORT)}


class Forked:
    """A daemon that the fork server has started, with the methods of `subprocess.Popen` that `Child` needs."""

    def __init__(self, pipe: int) -> None:
        self._pipe = pipe
        self.returncode: int | None = None
        self.pid = self._number(START_S)
        if self.pid <= 0:
            os.close(pipe)
            raise OSError("the fork server does not answer")
        self._handle = os.pidfd_open(self.pid)

    def _number(self, timeout_s: float) -> int:
        """Return the next number of the server; -SIGKILL if none comes."""
        if _is_ready(self._pipe, timeout_s):
            data = os.read(self._pipe, STATUS.size)
            if len(data) == STATUS.size:
                return int(STATUS.unpack(data)[0])
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
                raise subprocess.TimeoutExpired("daemon", timeout or 0.0)
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
    """One fork server; it ends with this process."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._fixed = _fixed(environment)
        self._owner = os.getpid()
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.settimeout(START_S)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", MODULE, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
                pass_fds=[theirs.fileno()],
                env=dict(environment),
            )

    def can_start(self, environment: Mapping[str, str]) -> bool:
        """Return whether a daemon with this environment can be a fork of this server."""
        return (
            self._owner == os.getpid()
            and self._process.poll() is None
            and self._fixed == _fixed(environment)
        )

    def start(
        self,
        module: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        descriptors: Sequence[int],
    ) -> Forked:
        """Start a daemon. Raises OSError if the server has ended."""
        kept = (1, 2, *descriptors)
        request = ForkRequest(module, tuple(arguments), dict(environment), os.getcwd(), kept)
        pipe, theirs = os.pipe()
        null = os.open(os.devnull, os.O_WRONLY)
        try:
            socket.send_fds(self.socket, [encode(request)], [theirs, null, 2, *descriptors])
        except BaseException:
            os.close(pipe)
            raise
        finally:
            os.close(theirs)
            os.close(null)
        return Forked(pipe)

    def close(self) -> None:
        """End the server; what it has started goes on. Idempotent."""
        self.socket.close()
        if self._owner == os.getpid():
            self._process.wait()


_current: ForkServer | None = None


def start_fork_server(environment: Mapping[str, str]) -> None:
    """Start the fork server of this process, unless it runs."""
    global _current
    if not hasattr(os, "pidfd_open"):
        return
    if _current is None or not _current.can_start(environment):
        if _current is not None:
            _current.close()
        _current = ForkServer(environment)


def stop_fork_server() -> None:
    """End the fork server of this process; what it has started goes on."""
    global _current
    if _current is not None:
        _current.close()
        _current = None


def fork_server(environment: Mapping[str, str]) -> ForkServer | None:
    """Return the fork server of this process if it can start a daemon with this environment."""
    if _current is not None and _current.can_start(environment):
        return _current
    return None


def _forked() -> None:
    if _current is not None:
        _current.socket.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
