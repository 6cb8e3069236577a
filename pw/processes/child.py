"""A child process of this one, and the channel between them.

Each process takes the end of the channel for the end of the other one, so no child outlives its parent
by accident. Children have sessions of their own: a Ctrl-C at the terminal reaches only their parent.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic

import msgspec

from pw.processes.channel import Channel, Empty, Message
from pw.processes.forking import Process

PARENT = "--parent-fd="
"""Last argument of a child, in front of the descriptor of its end of the channel."""
STOP_S = 3.0
EXIT_ERROR = 1
"""Exit code of a daemon after a one-line error on standard error; starting it again would not help."""

Start = Callable[[int], "Process | subprocess.Popen[bytes]"]
"""Starts a process, which inherits this descriptor."""

_children: weakref.WeakSet[Child[Any]] = weakref.WeakSet()


def _forked() -> None:
    """Close the channels in a forked copy of this process, which would keep the children alive."""
    for child in _children:
        child.let_go()


os.register_at_fork(after_in_child=_forked)


def interpreter(
    module: str,
    arguments: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    *,
    shows_output: bool = False,
) -> Start:
    """Return what starts `python -m module`, with the environment of this process by default."""

    def start(end: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-m", module, *arguments, f"{PARENT}{end}"],
            stdin=subprocess.DEVNULL,
            stdout=None if shows_output else subprocess.DEVNULL,
            start_new_session=True,
            pass_fds=[end],
            env=environment,
        )

    return start


def import_path() -> str:
    """Return the PYTHONPATH with which an interpreter imports what this one does."""
    return os.pathsep.join(entry or os.getcwd() for entry in sys.path)


def parent(kinds: Any, empty: Empty | None = None, descriptors: int = 0) -> Channel[Any]:
    """Return the channel to the parent of this process (see `Channel`)."""
    end = int(sys.argv[-1].removeprefix(PARENT))
    return Channel(end, kinds, empty, descriptors)


def ending(code: int) -> str:
    """Return what a process ended with, in words: a signal or an exit code."""
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


class Announcement(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """From a daemon to its parent: it is ready, or cannot begin."""

    address: str = ""
    error: str = ""


class Child(Generic[Message]):
    """A child, which `start` starts now; the other arguments are those of `Channel`."""

    def __init__(
        self, start: Start, kinds: Any = None, empty: Empty | None = None, descriptors: int = 0
    ) -> None:
        ours, theirs = socket.socketpair()
        self.channel: Channel[Message] = Channel(ours, kinds, empty, descriptors)
        self._owner = os.getpid()
        try:
            with theirs:
                self._process = start(theirs.fileno())
        except BaseException:
            ours.close()
            raise
        _children.add(self)

    @property
    def is_ours(self) -> bool:
        """Whether this process has started it, and not one that was forked into this one."""
        return self._owner == os.getpid()

    @property
    def pid(self) -> int:
        """The child's process id."""
        return self._process.pid

    def exit_code(self) -> int | None:
        """Return the exit code, negative for a signal; None while it runs."""
        return self._process.poll()

    def let_go(self) -> None:
        """Close this process's end of the channel."""
        self.channel.close()

    def terminate(self) -> None:
        """Send SIGTERM; only the process that started it can."""
        if self.is_ours:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()

    def kill(self) -> None:
        """Send SIGKILL; only the process that started it can."""
        if self.is_ours:
            self._process.kill()

    def wait(self, timeout_s: float | None = STOP_S) -> int:
        """Return its exit code; kill it if it has not ended by then, unless `timeout_s` is None."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    def stop(self, timeout_s: float | None = STOP_S) -> None:
        """End it and reap it; kill it if that takes longer, unless `timeout_s` is None. Idempotent."""
        self.terminate()
        if self.is_ours:
            self.wait(timeout_s)
        self.let_go()
