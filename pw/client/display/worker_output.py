"""Shows the output of host functions on this process's standard streams.

The session's loop never waits for a terminal: a thread of its own writes the lines. A user's thread
that gets a result writes them first, so that output appears before the result.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections import deque

from pw.client.display.live import aside
from pw.core.messages import OutputLine

KEPT = 10_000
"""The most lines that wait for a slow terminal; further ones are left out."""

_ON = {"1": True, "0": False}


def is_wanted(option: bool | None) -> bool:
    """Return whether to show the output: as `option` says, else as `PW_WORKER_OUTPUT`.

    Raises:
        ValueError: the variable is neither 0 nor 1.
    """
    if option is not None:
        return bool(option)
    text = os.environ.get("PW_WORKER_OUTPUT") or "1"
    if text not in _ON:
        raise ValueError(f"PW_WORKER_OUTPUT must be 0 or 1, not {text!r}")
    return _ON[text]


class WorkerOutput:
    """Lines of hosts on their way to the terminal.

    Args:
        kept: how many lines may wait for the terminal; later ones are left out.
    """

    def __init__(self, kept: int = KEPT) -> None:
        self._kept = kept
        self._lines: deque[tuple[str, OutputLine]] = deque()
        self._left_out = 0
        """Number of lines that were left out."""
        self._told_left_out = 0
        """Number of lines that were reported as left out."""
        self._writing = threading.RLock()
        self._there = threading.Event()
        self._thread: threading.Thread | None = None
        self._closed = False

    def show(self, host: str, lines: tuple[OutputLine, ...]) -> None:
        """Have lines written."""
        room = max(0, self._kept - len(self._lines))
        self._left_out += len(lines[room:])
        self._lines.extend((host, line) for line in lines[:room])
        self._there.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="pw-output", daemon=True)
            self._thread.start()

    def flush(self) -> None:
        """Write all lines, on the calling thread."""
        if not self._lines:
            return
        with self._writing:
            while self._lines:
                self._write(self._next())
            if left_out := self._left_out - self._told_left_out:
                self._told_left_out += left_out
                self._write((True, f"(pw) … {left_out:,} lines of hosts left out\n"))

    def close(self) -> None:
        """Write the last lines; no more will come."""
        self.flush()
        self._closed = True
        self._there.set()

    def _run(self) -> None:
        while not self._closed:
            self._there.wait()
            self._there.clear()
            self.flush()

    def _next(self) -> tuple[bool, str]:
        """Return the next lines of one stream as one text."""
        is_error = self._lines[0][1].is_error
        text = ""
        while self._lines and self._lines[0][1].is_error == is_error:
            host, line = self._lines.popleft()
            text += f"({host}) {line.text}\n"
        return is_error, text

    def _write(self, what: tuple[bool, str]) -> None:
        is_error, text = what
        stream = sys.stderr if is_error else sys.stdout  # as they are now: a notebook replaces them
        if stream is None:
            return
        with aside(), contextlib.suppress(OSError, ValueError):  # it is closed, or cannot say this
            stream.write(text)
            stream.flush()
