"""The process that runs one client's Python functions, or one stream, on a host.

It ends when its host ends, even in the middle of a call: a thread waits for that, and for questions.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
import threading
import traceback
from typing import Any

import cloudpickle
import numpy as np

from pw.core.errors import CompileError, ComputationFailed, ErrorReport
from pw.core.functions.parts import HostPart
from pw.devices.python.wire import (
    BeginFunction,
    CallRaised,
    Drop,
    FunctionCall,
    Load,
    Returned,
    ToHost,
    ToProcess,
    Wrote,
)
from pw.processes.channel import Channel
from pw.processes.child import parent

_OWN_FILES = (__file__, os.path.join(os.path.dirname(__file__), "entry.py"), "<frozen runpy>")
STACK_FRAMES = 12
"""Calls shown of a function that is at work."""


class _Host:
    """The host, as this process sees it."""

    def __init__(self, channel: Channel[ToProcess]) -> None:
        self.channel = channel

    def send(self, message: ToHost, arrays: Any = ()) -> None:
        """Send a message; end the process if the host has ended."""
        try:
            self.channel.send(message, arrays)
        except OSError:
            os._exit(0)


class _ChildStream:
    """A standard stream whose text goes to the client."""

    encoding, errors = "utf-8", "backslashreplace"

    def __init__(self, host: _Host, is_error: bool, stream: Any) -> None:
        self._host = host
        self._is_error = is_error
        self._stream = stream

    def write(self, text: str) -> int:
        """Send text to the client."""
        if text:
            self._host.send(Wrote(self._is_error, text))
        return len(text)

    def writelines(self, lines: Any) -> None:
        """Send lines to the client."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Do nothing: text is sent at once."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _Functions:
    """The functions of this process."""

    def __init__(self, host: _Host) -> None:
        self._host = host
        self._loads: dict[bytes, Load] = {}
        self._loaded: dict[bytes, Any] = {}

    def handle(self, message: ToProcess, arrays: list[Any]) -> None:
        """Do what the host asks for."""
        if isinstance(message, Load):
            self._loads[message.key] = message
        elif isinstance(message, Drop):
            self._loads.pop(message.key, None)
            self._loaded.pop(message.key, None)
        elif isinstance(message, FunctionCall):
            share = self._loads[message.key].share
            try:
                function = self._loaded.get(message.key) or self._load(message.key, share)
                result = function(share, *arrays)
            except BaseException as error:  # noqa: BLE001 - a user's function may raise anything
                self._host.send(CallRaised(_reported(error)))
            else:
                self._host.send(Returned(), result)

    def _load(self, key: bytes, share: HostPart) -> Any:
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
    with contextlib.suppress(OSError):  # the host may end with answers that it has not read
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
    """Serve the host."""
    begin = parent(BeginFunction, descriptors=1)
    try:
        questions = socket.socket(fileno=begin.receive().descriptors[0])
        host = _Host(Channel(begin.socket.detach(), ToProcess, np.empty))
        threading.Thread(
            target=_answer, args=(questions, threading.get_ident()), daemon=True
        ).start()
        sys.stdout = _ChildStream(host, False, sys.stdout)
        sys.stderr = _ChildStream(host, True, sys.stderr)
        logging.basicConfig(level=logging.WARNING)
        functions = _Functions(host)
        while True:
            message, arrays, _ = host.channel.receive()
            functions.handle(message, arrays)
            del message, arrays
    except EOFError:
        os._exit(0)
