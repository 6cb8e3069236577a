"""The lines that clients' programs write on a host.

A thread that works for a client says so (`Output.on_behalf_of`). What it writes to the standard
streams, or logs, is then taken here (`pw.cli.streams`), and the loop fetches it. For each client,
only so much is taken in a second; a line says how much was left out. Threads that a function starts
by itself write where this process writes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from pw.core.messages import OutputLine

LINES = 1000
"""Lines that are taken of a client in a second."""

LINES_BYTES = 64 << 10
"""Bytes that are taken of a client in a second."""

LINE_CHARACTERS = 4096
"""Characters of a line at most; a longer line becomes several."""

SECOND_S = 1.0


@dataclass(slots=True)
class _Client:
    """The lines of one client."""

    since_s: float
    """Time of the clock, in seconds, at which the client's current second began."""
    count: int = 0
    """Lines of the current second."""
    size_bytes: int = 0
    """Bytes of the lines of the current second."""
    left_out: int = 0
    """Lines above the bound that no line reports yet."""
    lines: list[OutputLine] = field(default_factory=list)
    """Lines until the loop fetches them."""


class _Thread(threading.local):
    """The client that a thread works for, and its unfinished line on each stream."""

    client = 0

    def __init__(self) -> None:
        self.begun = {False: "", True: ""}


class Output:
    """Lines that threads have written for clients; its methods may be called from any thread.

    Args:
        written: called on the writing thread when there are lines after there were none.
        now_s: a clock.
    """

    def __init__(
        self,
        written: Callable[[], None] = lambda: None,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.written = written
        self.is_pending = False
        """True if there may be lines to fetch."""
        self._now_s = now_s
        self._lock = threading.Lock()
        self.clients: dict[int, _Client] = {}
        """Clients whose lines were taken, until `fetch` finds that no more have come."""
        self._thread = _Thread()

    @property
    def is_taking(self) -> bool:
        """Whether what this thread writes is taken."""
        return self._thread.client != 0

    @contextmanager
    def on_behalf_of(self, client: int) -> Iterator[None]:
        """Take what this thread writes in the block for this client; 0 takes nothing."""
        self._thread.client = client
        try:
            yield
        finally:
            for is_error, begun in self._thread.begun.items():
                if begun:
                    self._thread.begun[is_error] = ""
                    self._take(client, is_error, begun)
            self._thread.client = 0

    def write(self, is_error: bool, text: str) -> None:
        """Take text that this thread writes to standard output or standard error."""
        *lines, begun = (self._thread.begun[is_error] + text).split("\n")
        while len(begun) > LINE_CHARACTERS:
            lines.append(begun[:LINE_CHARACTERS])
            begun = begun[LINE_CHARACTERS:]
        self._thread.begun[is_error] = _shown(begun)
        for line in lines:
            for start in range(0, len(line) or 1, LINE_CHARACTERS):
                self._take(self._thread.client, is_error, line[start : start + LINE_CHARACTERS])

    def _take(self, client: int, is_error: bool, text: str) -> None:
        data = _shown(text).rstrip("\r").encode("utf-8", "backslashreplace")
        with self._lock:
            now_s = self._now_s()
            of = self.clients.get(client)
            if of is None:
                of = self.clients[client] = _Client(now_s)
            self._renew(of, now_s)
            is_room = of.count < LINES and of.size_bytes + len(data) <= LINES_BYTES
            if is_room and len(of.lines) < LINES:
                of.count += 1
                of.size_bytes += len(data)
                of.lines.append(OutputLine(is_error, data.decode()))
            else:
                of.left_out += 1
            was_pending, self.is_pending = self.is_pending, True
        if not was_pending:
            self.written()

    def _renew(self, of: _Client, now_s: float) -> None:
        """Begin a new second if the last one has passed."""
        if now_s - of.since_s < SECOND_S:
            return
        of.since_s, of.count, of.size_bytes = now_s, 0, 0
        if of.left_out:
            most = f"{LINES:,} lines or {LINES_BYTES >> 10} KiB"
            of.lines.append(
                OutputLine(True, f"… {of.left_out:,} lines left out (beyond {most} a second)")
            )
            of.left_out = 0

    def fetch(self) -> dict[int, tuple[OutputLine, ...]]:
        """Remove and return the lines of each client."""
        with self._lock:
            now_s = self._now_s()
            by_client = {}
            for client, of in list(self.clients.items()):
                self._renew(of, now_s)
                if of.lines:
                    by_client[client], of.lines = tuple(of.lines), []
                elif not of.count and not of.left_out:
                    del self.clients[client]
            self.is_pending = any(of.left_out for of in self.clients.values())
            return by_client


def _shown(text: str) -> str:
    """Return what a terminal shows of a line with carriage returns, as of a progress bar."""
    return text[text.rstrip("\r").rfind("\r") + 1 :] if "\r" in text else text
