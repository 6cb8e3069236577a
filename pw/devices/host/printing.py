"""Sends clients what their programs write on this host: the part of the object store that does.

Lines travel at most once, together with those of the same moment, and before the answer to what the
client asks afterwards. A client that has not met this host yet gets the last of them when it does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from pw.core.actor import Env
from pw.core.ids import Address
from pw.core.messages import Line, Printed
from pw.core.ticker import Ticker

TOGETHER_S = 0.02
"""How long a line may wait for others."""


EARLY_LINES = 200
"""Kept of what programs have written of a client that has not met this host."""


class Lines(Protocol):
    """Lines that were written, by client (see `pw.devices.host.output.Output`)."""

    is_pending: bool
    """There may be some, or something is still to be said of those that were left out."""

    def fetch(self) -> dict[int, tuple[Line, ...]]:
        """Take them."""


@dataclass(frozen=True, slots=True)
class Written:
    """Note to the store: there are lines."""


@dataclass(frozen=True, slots=True)
class SendWritten:
    """Note to the store: what was written has waited for more."""


class Printing:
    """Knows which clients want to see what their programs write.

    Args:
        env: the store's.
        output: where the lines are; None if nothing is taken on this host.
        is_gone: whether a client will not come back; what it still writes is of no use.
    """

    def __init__(self, env: Env, output: Lines | None, is_gone: Callable[[int], bool]) -> None:
        self._env = env
        self._output = output
        self._is_gone = is_gone
        self._sends = Ticker(env, TOGETHER_S, SendWritten())
        self._listeners: dict[int, Address | None] = {}
        """Clients that have met this host, and where they are; None if they want to see nothing."""
        self._early: dict[int, deque[Line]] = {}
        """Lines of those that have not."""

    def met(self, client: int, at: Address, wants: bool) -> None:
        """A client is there."""
        self._listeners[client] = at if wants else None
        early = self._early.pop(client, None)
        if early and wants:
            self._env.send(at, Printed(tuple(early)))

    def lost(self, client: int) -> None:
        """The link to a client is gone; it may come back."""
        self._listeners.pop(client, None)

    def gone(self, client: int) -> None:
        """A client will not come back (see `is_gone`)."""
        self._listeners.pop(client, None)
        self._early.pop(client, None)

    def written(self) -> None:
        """There are lines: send them soon."""
        self._sends.start()

    def send_written(self) -> None:
        """The time for that has come."""
        self.flush()
        self._sends.ticked(more=self._output is not None and self._output.is_pending)

    def flush(self) -> None:
        """Send what is there, before something else that follows from it."""
        if self._output is None or not self._output.is_pending:
            return
        for client, lines in self._output.fetch().items():
            if self._is_gone(client):
                continue
            if client not in self._listeners:
                self._early.setdefault(client, deque(maxlen=EARLY_LINES)).extend(lines)
            elif (at := self._listeners[client]) is not None:
                self._env.send(at, Printed(lines))
