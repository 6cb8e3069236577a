"""A process that forks others: each begins with all that the server has imported.

What becomes of a fork comes back in a pipe of its own: its process id, then its exit code. Where a server
is a new interpreter, its forks get the environment and the folder of their requests. But variables that
libraries read while they are imported cannot change afterwards.
"""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Mapping, Sequence
from typing import Any

from pw.processes import serving
from pw.processes.channel import Channel
from pw.processes.child import Child, Start, interpreter
from pw.processes.forking import Process, fork
from pw.processes.serving import ForkRequest

START_S = 60.0
"""Seconds that a server may take to start a fork: it imports JAX first."""
REAP_S = 5.0
"""Seconds that a server may take to tell the exit code of a fork that has ended."""

_READ_AT_IMPORT = ("JAX_", "XLA_", "TF_", "PYTHON", "LD_", "MALLOC_", "GLIBC_", "OMP_", "OPENBLAS_")


def _fixed(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a fork cannot change any more."""
    return {k: v for k, v in environment.items() if k.startswith(_READ_AT_IMPORT)}


def _number(pipe: int, timeout_s: float) -> int:
    """Return the next number in a pipe from the server; -SIGKILL if none comes."""
    ready = select.poll()
    ready.register(pipe, select.POLLIN)
    data = os.read(pipe, serving.CODE.size) if ready.poll(timeout_s * 1000) else b""
    return int(serving.CODE.unpack(data)[0]) if data else -signal.SIGKILL


class ForkServer:
    """A fork server of this process: it ends when this process does.

    Args:
        child: the process of the server.
        environment: its variables, if it is a new interpreter.
    """

    def __init__(self, child: Child[Any], environment: Mapping[str, str] | None = None) -> None:
        self.child = child
        child.channel.socket.settimeout(START_S)
        self._fixed = None if environment is None else _fixed(environment)

    @classmethod
    def interpreter(cls, preloaded: Sequence[str], environment: Mapping[str, str]) -> ForkServer:
        """Start a server as a new interpreter, which imports these modules."""
        return cls(Child(interpreter(serving.__name__, preloaded, environment)), environment)

    @classmethod
    def forked(cls, environment: Mapping[str, str] | None = None) -> ForkServer:
        """Fork a server from this process, which has no other threads yet.

        Args:
            environment: in which this process imported its modules, if `can_start` is asked.
        """

        def serve(end: int) -> None:
            serving.serve(Channel(end, ForkRequest, descriptors=serving.DESCRIPTORS))

        return cls(
            Child(lambda end: fork("pw-fork-server", lambda: serve(end), [end])), environment
        )

    def can_start(self, environment: Mapping[str, str]) -> bool:
        """Return whether a process with this environment can be a fork of this server."""
        return (
            self.child.is_ours
            and self.child.exit_code() is None
            and self._fixed == _fixed(environment)
        )

    def fork(
        self,
        module: str,
        arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> Start:
        """Return what starts a fork that runs `main` of a module. It raises OSError if the server has ended.

        Args:
            module: its name.
            arguments: of its command line.
            environment: all variables of a process of its own, with the working folder and the standard
                error of this one. Without it, the fork is a part of the server and ends with it.
        """

        def start(end: int) -> Process:
            folder, streams = ("", []) if environment is None else (os.getcwd(), [2])
            request = ForkRequest(module, tuple(arguments), environment, folder)
            pipe, theirs = os.pipe()
            try:
                self.child.channel.send(request, descriptors=[theirs, end, *streams])
            except BaseException:
                os.close(pipe)
                raise
            finally:
                os.close(theirs)

            def collect() -> int:
                code = _number(pipe, REAP_S)
                os.close(pipe)
                return code

            pid = _number(pipe, START_S)
            if pid <= 0:
                os.close(pipe)
                raise OSError("the fork server does not answer")
            return Process(pid, collect)

        return start

    def close(self) -> None:
        """End the server; what it has started goes on, unless it ends with the server. Idempotent."""
        self.child.let_go()
        if self.child.is_ours:
            self.child.wait(REAP_S)
