"""The process that runs one client's Python functions, or one stream, on a host.

It ends when its host ends, even in the middle of a call: a thread waits for that, and for questions.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
import traceback
from typing import Any

import cloudpickle

from pw.core.errors import CompileError, ComputationFailed, ErrorReport
from pw.core.functions.parts import Share
from pw.devices.python.wire import (
    Call,
    Drop,
    Frame,
    Load,
    Raised,
    Returned,
    Wrote,
    described,
    receive,
    send,
)

_OWN_FILES = (__file__, os.path.join(os.path.dirname(__file__), "entry.py"), "<frozen runpy>")
STACK_FRAMES = 12
"""Calls shown of a function that is at work."""


class _Link:
    """The way to the host; several threads may write."""

    def __init__(self, link: socket.socket) -> None:
        self.socket = link
        self._lock = threading.Lock()

    def send(self, frame: Frame, arrays: Any = ()) -> None:
        """Send one frame; end the process if the host has ended."""
        try:
            with self._lock:
                send(self.socket, frame, arrays)
        except OSError:
            os._exit(0)


class _Stream:
    """A standard stream whose text goes to the client."""

    encoding, errors = "utf-8", "backslashreplace"

    def __init__(self, link: _Link, is_error: bool, stream: Any) -> None:
        self._link = link
        self._is_error = is_error
        self._stream = stream

    def write(self, text: str) -> int:
        """As for any text stream."""
        if text:
            self._link.send(Wrote(self._is_error, text))
        return len(text)

    def writelines(self, lines: Any) -> None:
        """As for any text stream."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Do nothing: text is sent at once."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _Functions:
    """The functions of this process."""

    def __init__(self, link: _Link) -> None:
        self._link = link
        self._loads: dict[bytes, Load] = {}
        self._loaded: dict[bytes, Any] = {}

    def handle(self, frame: Frame, arrays: list[Any]) -> None:
        """Do what the host asks for."""
        if isinstance(frame, Load):
            self._loads[frame.key] = frame
        elif isinstance(frame, Drop):
            self._loads.pop(frame.key, None)
            self._loaded.pop(frame.key, None)
        elif isinstance(frame, Call):
            share = self._loads[frame.key].share
            try:
                function = self._loaded.get(frame.key) or self._load(frame.key, share)
                made = function(share, *arrays)
            except BaseException as error:  # noqa: BLE001 - a user's function may raise anything
                self._link.send(Raised(_reported(error)))
            else:
                self._link.send(Returned(described(made)), made)

    def _load(self, key: bytes, share: Share) -> Any:
        # Equal code is one object: a stream's position is in it.
        artifact = self._loads[key].artifact
        for other, loaded in self._loaded.items():
            if self._loads[other].artifact == artifact:
                self._loaded[key] = loaded
                return loaded
        try:
            loaded = self._loaded[key] = cloudpickle.loads(artifact)
        except BaseException as error:  # a client's code may raise anything
            raise CompileError(
                f"the Python function {share.name!r} cannot be loaded here: "
                f"{type(error).__name__}: {error}. What it imports must be installed on the host"
            ) from error
        return loaded


def _reported(error: BaseException) -> ErrorReport:
    """Describe an error, with the traceback below this file."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return ErrorReport.of(error.with_traceback(trace), kind=ComputationFailed)


def _answer(questions: socket.socket, worker: int) -> None:
    """Tell the host where in the code the main thread is; end this process when the host ends."""
    while questions.recv(1):
        frame = sys._current_frames().get(worker)
        calls = traceback.extract_stack(frame)
        below = [call for call in calls if call.filename not in _OWN_FILES]
        lines = [
            f"{os.sep.join(call.filename.split(os.sep)[-2:])}:{call.lineno} in {call.name}"
            for call in below[-STACK_FRAMES:]
        ]
        questions.send("\n".join(lines).encode())
    os._exit(0)


def main() -> None:
    """Serve the host at the other ends of the two descriptors that are given as arguments."""
    link, questions = (socket.socket(fileno=int(text)) for text in sys.argv[1:])
    threading.Thread(target=_answer, args=(questions, threading.get_ident()), daemon=True).start()
    to_host = _Link(link)
    sys.stdout = _Stream(to_host, False, sys.stdout)
    sys.stderr = _Stream(to_host, True, sys.stderr)
    logging.basicConfig(level=logging.WARNING)
    functions = _Functions(to_host)
    while True:
        try:
            frame, arrays = receive(link)
        except EOFError:
            os._exit(0)
        functions.handle(frame, arrays)
        del frame, arrays
