"""Processes that are forked from this one, which has imported what they need and has no other threads.

A new interpreter takes more than a second to import JAX; a fork has it already and takes some 20 ms.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import select
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from typing import NoReturn

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)


def preload(modules: Sequence[str]) -> None:
    """Import modules, and spare the garbage collector of each fork all that exists now."""
    for module in modules:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()


def end_with_parent(number: signal.Signals) -> None:
    """Have the system send this signal to this process when its parent ends, which has one thread."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)


def keep_open(descriptors: Iterable[int]) -> None:
    """Close all descriptors except the standard streams and these."""
    last = 2
    for descriptor in sorted(descriptors):
        if descriptor > last:
            os.closerange(last + 1, descriptor)
            last = descriptor
    os.closerange(last + 1, os.sysconf("SC_OPEN_MAX"))


def become(name: str, entry: Callable[[], object]) -> NoReturn:
    """In a fork: run `entry` as the main function of this process, and end it as an interpreter ends.

    Args:
        name: what `ps` and `top` show, 15 characters at most.
        entry: the main function.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)
    signal.set_wakeup_fd(-1)
    for number in _SIGNALS:
        signal.signal(
            number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        )
    code = 1
    try:
        entry()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 - the edge of the process
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            import atexit

            atexit._run_exitfuncs()
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


class Process:
    """A process that was forked, with methods of `subprocess.Popen`.

    Args:
        pid: its process id.
        collect: called once it has ended; returns its exit code, negative for a signal.
    """

    def __init__(self, pid: int, collect: Callable[[], int]) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._collect = collect
        try:
            self._handle = os.pidfd_open(pid)
        except ProcessLookupError:  # it has ended, and its parent has collected it
            self._handle = os.open(os.devnull, os.O_RDONLY)  # which is always ready

    def poll(self) -> int | None:
        """Return the exit code; None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code. Raises subprocess.TimeoutExpired."""
        if self.returncode is None:
            ready = select.poll()
            ready.register(self._handle, select.POLLIN)
            if not ready.poll(None if timeout is None else timeout * 1000):
                raise subprocess.TimeoutExpired("fork", timeout or 0.0)
            self.returncode = self._collect()
            os.close(self._handle)
        return self.returncode

    def terminate(self) -> None:
        """Send SIGTERM, if it still runs."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL, if it still runs."""
        self.send_signal(signal.SIGKILL)

    def send_signal(self, number: int) -> None:
        """Send a signal, if it still runs."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._handle, number)


def fork(name: str, entry: Callable[[], object], kept: Iterable[int]) -> Process:
    """Fork this process.

    Args:
        name: as of `become`.
        entry: what the fork runs.
        kept: descriptors that stay open in the fork, beside the standard streams.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        keep_open(kept)
        become(name, entry)
    return Process(pid, lambda: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
