"""`pw.queue()`: which clients wait, and for which, as an object and as a table."""

from __future__ import annotations

from dataclasses import dataclass

from pw.client.connection import current
from pw.client.display.tables import Shown, Table
from pw.client.keywords import checks_keywords
from pw.core.messages import ClientWait, InFront, Queue
from pw.core.sizes import size_in_words
from pw.core.waits import LOOKING_S

__all__ = ["ClientWait", "ClusterQueue", "InFront", "queue"]


@dataclass(frozen=True, slots=True, repr=False)
class ClusterQueue(Shown):
    """All that waits in a cluster at the time of the question; prints as a table."""

    policy: str
    """Policy that orders what waits on islands."""
    waits: tuple[ClientWait, ...]
    """Waits, by island; on each island the next one comes first."""
    hidden: int = 0
    """Number of waits of other tenants for devices, names and the like, which this one may not see."""
    left_out: int = 0
    """Number of clients that wait on islands behind those of `waits`."""

    @classmethod
    def of(cls, reply: Queue) -> ClusterQueue:
        """Return the controller's answer."""
        return cls(reply.policy, reply.waits, reply.hidden, reply.left_out)

    @property
    def head(self) -> str:
        """One line about all that waits."""
        count = len(self.waits)
        line = f"{count} wait{'' if count == 1 else 's'}, policy {self.policy}"
        if self.left_out:
            line += f"; {self.left_out} more behind them"
        if self.hidden:
            waits = "1 wait" if self.hidden == 1 else f"{self.hidden} waits"
            line += f"; not shown: {waits} of other tenants"
        return line

    def tables(self) -> tuple[Table, ...]:
        """Return the table of waits."""
        rows = [
            (
                _client(one.client, one.name),
                one.tenant or "-",
                _what(one),
                one.where or "-",
                ", ".join(_front(one, front) for front in one.in_front) or "-",
                _seconds(one.waited_s),
                _seconds(one.left_s),
            )
            for one in self.waits
        ]
        columns = ("client", "tenant", "waits for", "island", "behind", "since", "goes on in")
        return (Table("Waits", columns, tuple(rows)),)


def _client(number: int, name: str) -> str:
    return f"{number} ({name})" if number else name


def _what(wait: ClientWait) -> str:
    more = f" (and {wait.more} more behind it)" if wait.more else ""
    return wait.what + more


def _front(wait: ClientWait, front: InFront) -> str:
    unit = wait.unit
    if front.amount == 1:
        unit = "launch" if unit == "launches" else unit.removesuffix("s")
    amount = size_in_words(front.amount) if unit == "bytes" else f"{front.amount} {unit}"
    if front.client == wait.client and front.client:
        return f"its own {amount}"
    return f"{amount} of {_client(front.client, front.name)}" if front.amount else front.name


def _seconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.3f} s" if seconds < 1.0 else f"{seconds:.1f} s"


@checks_keywords
def queue(timeout_s: float = LOOKING_S) -> ClusterQueue:
    """Return which clients of the cluster wait, for which others, since when, and when they go on.

    In a terminal the result prints as a table, in a notebook it shows as such; a script reads its attributes,
    as in `pw.queue().waits[0].left_s`. A client has one row on each island: its oldest launch that waits.

    `left_s` is an estimate of the seconds until a launch has its devices. It adds up the launches in front
    of it on these devices: those in flight, and those that the policy puts first (with shares, by what each
    tenant and each client has had). Each is expected to take as long as earlier launches of the same part of
    its program. It is None behind a launch that has never run, that takes far longer than before, or that waits
    for an input or for memory, and for all that is no launch. Work that comes later may go first.

    Clients of other tenants have no number, and are called "another tenant"; an operator sees all.

    Args:
        timeout_s: how long to wait for the controller's answer, in seconds.

    Raises:
        ConnectionFailed: the controller has not answered within `timeout_s`, or is gone for good.
    """
    return ClusterQueue.of(current.runtime().ask.queue(timeout_s))
