"""Sends clients the output of their programs on this host.

Lines travel at most once, together with other lines of the same moment, and before the answer to
the client's next request. A client that has not met this host yet gets the last lines when it does.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Protocol

from pw.core.actors.actor import Env, Part, handles
from pw.core.actors.ticker import Ticker
from pw.core.ids import Address
from pw.core.messages import OutputLine, Printed

TOGETHER_S = 0.02
"""Seconds that a line may wait for others."""

EARLY_LINES = 200
"""Lines that are kept for a client that has not met this host."""


class OutputLines(Protocol):
    """Lines that were written, by client (see `pw.devices.host.output.Output`)."""

    is_pending: bool
    """True if there may be lines, or a note about lines that were left out."""

    def fetch(self) -> dict[int, tuple[OutputLine, ...]]:
        """Take them."""


@dataclass(frozen=True, slots=True)
class Written:
    """Note from the threads that write: there are lines."""


class Printing(Part):
    """Knows which clients want to see what their programs write.

    Args:
        env: the store's.
        output: lines of this host; None if it takes none.
        gone_clients: clients that have left; their lines are dropped.
    """

    def __init__(self, env: Env, output: OutputLines | None, gone_clients: set[int]) -> None:
        self._env = env
        self._output = output
        self._gone_clients = gone_clients
        self._sends = Ticker(env, TOGETHER_S, self._send_written)
        self._listeners: dict[int, Address | None] = {}
        """Address of each client that has met this host; None for a client that wants no output."""
        self._lines: dict[int, Address] = {}
        """Address of the line of each client that has one: output belongs before the answers on it."""
        self._early: dict[int, deque[OutputLine]] = {}
        """Lines of the other clients."""

    def met(self, client: int, at: Address, wants: bool) -> None:
        """Add a client, and send it the lines that are kept for it."""
        self._listeners[client] = at if wants else None
        early = self._early.pop(client, None)
        if early and wants:
            self._env.send(at, Printed(tuple(early)))

    def met_line(self, client: int, at: Address) -> None:
        """Add the line of a client."""
        self._lines[client] = at

    def lost_line(self, client: int) -> None:
        """Remove the line of a client."""
        self._lines.pop(client, None)

    def lost(self, client: int) -> None:
        """Remove a client that may come back."""
        self._listeners.pop(client, None)

    def gone(self, client: int) -> None:
        """Remove a client for good."""
        self._listeners.pop(client, None)
        self._lines.pop(client, None)
        self._early.pop(client, None)

    @property
    def early_lines(self) -> int:
        """Lines that are kept for clients that have not met this host."""
        return sum(map(len, self._early.values()))

    @handles(Written)
    def _written(self, sender: Address, note: Written) -> None:
        self._sends.start()

    def _send_written(self) -> bool:
        self.flush()
        return self._output is not None and self._output.is_pending

    def flush(self) -> None:
        """Send all lines, before a message that follows from them."""
        if self._output is None or not self._output.is_pending:
            return
        for client, lines in self._output.fetch().items():
            if client in self._gone_clients:
                continue
            if client not in self._listeners:
                self._early.setdefault(client, deque(maxlen=EARLY_LINES)).extend(lines)
            elif (at := self._listeners[client]) is not None:
                self._env.send(self._lines.get(client, at), Printed(lines))
