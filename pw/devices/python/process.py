"""A Python process beside the host: clients' functions cannot hold its interpreter lock, or end it."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pw.core.errors import ComputationFailed, ErrorReport
from pw.devices.python.confining import NO_BOUNDS, ChildBounds
from pw.devices.python.confining import environment as inherited
from pw.devices.python.wire import (
    BeginFunction,
    CallRaised,
    Drop,
    FunctionCall,
    Load,
    ToHost,
    Wrote,
)
from pw.processes.channel import Empty
from pw.processes.child import Child, ending, import_path, interpreter

_ANSWER_S = 0.1
"""Seconds in which a process says where in the code it is; the host's loop waits for it."""

_ANSWER_BYTES = 1 << 16

_END_S = 5.0
"""Seconds that the end of a process is waited for, before it is killed."""


class FunctionRaised(Exception):
    """A function raised in its process."""

    def __init__(self, report: ErrorReport) -> None:
        super().__init__(report.message)
        self.report = report


class ProcessEnded(FunctionRaised):
    """A Python process ended in the middle of a call."""


class PythonProcess:
    """Runs functions in a process that it starts when needed, and again after its end.

    One thread calls `call`; any thread may call the other methods.

    Args:
        environment: returns the variables that differ from this process's.
        empty: makes memory for results.
        bounds: bounds of what the process may do.
    """

    def __init__(
        self,
        environment: Callable[[], dict[str, str]],
        empty: Empty,
        bounds: ChildBounds = NO_BOUNDS,
    ) -> None:
        self._environment = environment
        self._empty = empty
        self._bounds = bounds
        self._lock = threading.Lock()
        self._calling = threading.Lock()
        """Held while a thread uses the channel."""
        self._child: Child[ToHost] | None = None
        self._questions: socket.socket | None = None
        self._loads: dict[bytes, Load] = {}
        self._child_keys: set[bytes] = set()
        """Keys of the functions that the running process has."""
        self._closed = False

    @property
    def pid(self) -> int:
        """The number of the running process; 0 if there is none."""
        return 0 if self._child is None else self._child.pid

    def stack(self) -> tuple[str, ...]:
        """Return where in the code the process is, if it answers at once."""
        try:
            with self._lock:
                if self._questions is None:
                    return ()
                self._questions.send(b"?")
                return tuple(self._questions.recv(_ANSWER_BYTES).decode().splitlines())
        except OSError:
            return ()

    def load(self, load: Load) -> None:
        """Have a function known, and the process started."""
        with self._lock:
            self._loads[load.key] = load
            if self._child is None and not self._closed:
                self._start()

    def drop(self, key: bytes) -> None:
        """Forget a function; on the thread of `call`."""
        with self._lock:
            self._loads.pop(key, None)
            child = self._child if key in self._child_keys else None
            self._child_keys.discard(key)
        if child is not None:
            with contextlib.suppress(OSError):
                child.channel.send(Drop(key))

    def call(
        self, key: bytes, arrays: Sequence[np.ndarray[Any, Any]], wrote: Callable[[bool, str], None]
    ) -> list[np.ndarray[Any, Any]]:
        """Call a function; `wrote` takes what it writes meanwhile.

        Raises:
            FunctionRaised: the function raised, or could not be loaded.
            ProcessEnded: the process ended; the next call starts another one.
        """
        with self._lock:
            load = self._loads[key]
            if self._child is None and not self._closed:
                self._start()
            child = self._child
            is_loaded = key in self._child_keys
            self._child_keys.add(key)
        name = load.share.name
        if child is None:
            raise ProcessEnded(_failed(f"the host ended before it called {name!r}"))
        try:
            with self._calling:
                if not is_loaded:
                    child.channel.send(load)
                child.channel.send(FunctionCall(key), arrays)
                while True:
                    message, results, _ = child.channel.receive()
                    if isinstance(message, Wrote):
                        wrote(message.is_error, message.text)
                    elif isinstance(message, CallRaised):
                        raise FunctionRaised(message.report)
                    else:
                        return results
        except (OSError, EOFError):
            words = f"the Python process of the host {self._ended()} while it ran {name!r}"
            raise ProcessEnded(_failed(f"{words}; the next call starts another one")) from None

    def close(self) -> None:
        """End the process."""
        with self._lock:
            self._closed = True
            child = self._child
        if child is not None:
            child.kill()
        with self._calling:  # a call ends with its process
            self._ended()

    def _start(self) -> None:
        questions, answers = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        questions.settimeout(_ANSWER_S)
        environment = {
            **inherited(os.environ, self._bounds),
            "PYTHONPATH": import_path(),
            **self._environment(),
        }
        with answers:
            begin = interpreter("pw.devices.python.entry", (), environment, shows_output=True)
            child: Child[ToHost] = Child(begin, ToHost, self._empty)
            with contextlib.suppress(OSError):  # it has ended; the first call hears that
                child.channel.send(BeginFunction(), descriptors=[answers.fileno()])
        self._child, self._questions = child, questions
        self._child_keys = set()

    def _ended(self) -> str:
        """Forget the process; return how it ended."""
        with self._lock:
            child, self._child = self._child, None
            questions, self._questions = self._questions, None
        if child is None or questions is None:
            return "ended"
        questions.close()
        child.let_go()
        return f"ended with {ending(child.wait(_END_S))}"


def _failed(words: str) -> ErrorReport:
    return ErrorReport(ComputationFailed.__name__, words)
