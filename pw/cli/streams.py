"""Sends the output and log records of host functions to their clients.

It takes the text of threads that work for a client (`pw.devices.host.output`); other text goes to
the daemon's own streams. The daemon shows the output of host functions too, unless it shares its
terminal with a client.
"""

from __future__ import annotations

import logging
import os
import sys
from dataclasses import dataclass
from typing import Any, TextIO

from pw.devices.host.output import Output
from pw.transport.log import logger

CLIENTS_ONLY = "PW_OUTPUT_TO_CLIENTS_ONLY"
"""Environment variable that is 1 for daemons that share their terminal with a client."""


@dataclass(eq=False)
class _Stream:
    """A standard stream that takes the text of some threads."""

    _stream: TextIO
    _is_error: bool
    _output: Output
    _shows: bool

    def write(self, text: str) -> int:
        """Write text, as to any stream."""
        if self._output.is_taking:
            self._output.write(self._is_error, text)
            if not self._shows:
                return len(text)
        return self._stream.write(text)

    def writelines(self, lines: Any) -> None:
        """Write lines, as to any stream of text."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _Records(logging.Handler):
    """Takes log records from WARNING on, but not those of the daemon itself."""

    def __init__(self, output: Output) -> None:
        super().__init__(logging.WARNING)
        self.setFormatter(logging.Formatter(logging.BASIC_FORMAT))
        self._output = output

    def emit(self, record: logging.LogRecord) -> None:
        """Take a record of a thread that works for a client."""
        if self._output.is_taking and record.name != logger.name:
            try:
                self._output.write(True, f"{self.format(record)}\n")
            except Exception:  # noqa: BLE001 - as all handlers do: its arguments may not fit its format
                self.handleError(record)


def take_output(level: str) -> Output:
    """Begin to take output; `level` is that of the daemon's own log."""
    output = Output()
    shows = os.environ.get(CLIENTS_ONLY) != "1"
    sys.stdout = _Stream(sys.stdout, False, output, shows)
    sys.stderr = _Stream(sys.stderr, True, output, shows)
    root = logging.getLogger()
    for handler in root.handlers:
        handler.setLevel(level.upper())
        if not shows:
            handler.addFilter(lambda record: record.name == logger.name or not output.is_taking)
    # A client may want a lower level than the daemon: records below a logger's level reach no handler.
    logger.setLevel(level.upper())
    root.setLevel(min(root.level, logging.WARNING))
    root.addHandler(_Records(output))
    return output
