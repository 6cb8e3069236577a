"""What all daemons share: logging, signals, the watch on the parent, and how they end."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable

EXIT_OK = 0
EXIT_ERROR = 1
"""A one-line error has been written to standard error; starting again would not help."""
EXIT_UNAVAILABLE = 69
"""The controller cannot be reached."""
EXIT_AGAIN = 75
"""This incarnation is over; start the next one."""

LOG_LEVELS = ("debug", "info", "warning", "error")


def configure_logging(level: str) -> None:
    """One line a record on standard error: time, level, event, then key=value pairs."""
    logging.basicConfig(
        stream=sys.stderr,
        level=level.upper(),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    logging.getLogger("jax").setLevel(logging.ERROR)


def fail(program: str, message: str) -> None:
    """Write the one line that says why the program ends."""
    print(f"{program}: error: {message}", file=sys.stderr, flush=True)


class Daemon:
    """Runs an event loop until a signal, the parent's end, or `stop`."""

    def __init__(self, loop: asyncio.AbstractEventLoop, parent_fd: int) -> None:
        self.loop = loop
        self.exit_code = EXIT_OK
        self._stopped = False
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)
        if parent_fd >= 0:
            loop.add_reader(parent_fd, self._parent_ended, parent_fd)

    def _parent_ended(self, parent_fd: int) -> None:
        if os.read(parent_fd, 1) == b"":
            self.loop.remove_reader(parent_fd)
            self.stop()

    def stop(self, exit_code: int = EXIT_OK) -> None:
        """End the loop; the first reason counts."""
        if not self._stopped:
            self._stopped = True
            self.exit_code = exit_code
            self.loop.stop()

    def run(self, teardown: Callable[[], None]) -> int:
        """Run until stopped, tear down, and return the exit code."""
        try:
            if not self._stopped:
                self.loop.run_forever()
        finally:
            teardown()
        return self.exit_code
