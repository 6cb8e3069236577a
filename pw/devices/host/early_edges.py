"""Messages about edges that came before the launch that they belong to.

They are kept within a bound of bytes. After `EARLY_S` the launch has been cancelled, together
with an earlier host of this name. If not, the receiver asks, and hears that the edge was sent. A
credit waits longer while its run is queued here, because its receiver sends it only once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pw.core.actors.actor import Env, Part
from pw.core.actors.ticker import Ticker
from pw.core.errors import ErrorReport, TransferFailed
from pw.core.ids import client_of
from pw.core.messages import EdgeCredit, EdgeData, EdgeFailed
from pw.devices.host.edge_states import EdgeKey
from pw.devices.host.run_table import RunTable

EARLY_BYTES = 256 << 20
"""Bytes of edges that are kept at most."""

EARLY_S = 600.0
"""Seconds that bytes wait for their launch."""

EXPIRY_S = 1.0
"""Shortest time between two looks at the age of the messages."""

Early = EdgeCredit | EdgeData | EdgeFailed

_Slot = tuple[EdgeKey, bool]
"""An edge may go both ways between two hosts, so credits are kept apart from what they answer."""


@dataclass(slots=True)
class _Kept:
    message: Early
    since_s: float


class EarlyMessages(Part):
    """Keeps messages for edges that this host does not know yet."""

    def __init__(self, env: Env, runs: RunTable, most_bytes: int = EARLY_BYTES) -> None:
        self.most_bytes = most_bytes
        """How many bytes are kept; an edge beyond them fails."""
        self._env = env
        self._runs = runs
        self._early: dict[_Slot, _Kept] = {}
        self._expiry = Ticker(env, EARLY_S, self._expire)
        self.size_bytes = 0

    def __len__(self) -> int:
        return len(self._early)

    def keep(self, key: EdgeKey, message: Early, size_bytes: int = 0) -> None:
        """Keep a message; one that does not fit is replaced by the error that says so."""
        run, edge, peer = key
        if client_of(run) in self._runs.gone_clients and not isinstance(message, EdgeCredit):
            self._env.count("edges_stale")
            return
        if self.size_bytes + size_bytes > self.most_bytes:
            self._env.count("edges_dropped")
            self._env.log("error", "too many early edges", run=run, edge=edge, sender=peer)
            host = self._env.address.node
            error = TransferFailed(
                f"host {host} got more than {self.most_bytes} bytes from other hosts for runs that "
                "had not begun there"
            )
            message, size_bytes = EdgeFailed(run, edge, ErrorReport.of(error, host)), 0
        self._env.count("edges_early")
        self._early[key, isinstance(message, EdgeCredit)] = _Kept(message, self._env.now_s())
        self._expiry.start()
        self.size_bytes += size_bytes

    def take(self, key: EdgeKey) -> Early | None:
        """Remove and return what a sender has said, None if it has said nothing."""
        return self._remove((key, False))

    def take_credit(self, key: EdgeKey) -> EdgeCredit | None:
        """Remove and return the credit of a receiver, None if there is none."""
        credit = self._remove((key, True))
        assert credit is None or isinstance(credit, EdgeCredit)
        return credit

    def has_credit(self, key: EdgeKey) -> bool:
        """Whether the credit of a receiver is here."""
        return (key, True) in self._early

    def credits(self) -> list[EdgeKey]:
        """Return the routes whose credit is here."""
        return [key for key, is_credit in self._early if is_credit]

    def drop(self, is_meant: Callable[[EdgeKey], bool]) -> list[EdgeKey]:
        """Drop messages, and return the routes whose receivers wait because of a dropped credit."""
        waiting = []
        for key, is_credit in [slot for slot in self._early if is_meant(slot[0])]:
            if is_credit and self._runs.is_queued(key):
                continue
            message = self._remove((key, is_credit))
            if isinstance(message, EdgeCredit) and message.landing is not None:
                waiting.append(key)
        return waiting

    def drop_host(self, node: str) -> None:
        """Drop all messages of a lost host."""
        for slot in [slot for slot in self._early if slot[0][2] == node]:
            self._remove(slot)

    def _remove(self, slot: _Slot) -> Early | None:
        kept = self._early.pop(slot, None)
        if kept is None:
            return None
        if isinstance(kept.message, EdgeData):
            self.size_bytes -= len(kept.message.data)
        return kept.message

    def _expire(self) -> bool:
        """Drop the messages that are too old."""
        now_s = self._env.now_s()
        for slot in [s for s, kept in self._early.items() if now_s - kept.since_s >= EARLY_S]:
            key, is_credit = slot
            if is_credit and self._runs.is_queued(key):
                self._early[slot].since_s = now_s  # its receiver will not send it again
                continue
            self._remove(slot)
            self._env.count("edges_expired")
        if self._early:
            due_s = min(kept.since_s for kept in self._early.values()) + EARLY_S
            self._expiry.start(max(due_s - now_s, EXPIRY_S))
        return False
