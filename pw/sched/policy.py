"""Which client goes next on an island (DESIGN G2).

A policy sees only clients whose next piece of work may be launched now; it never decides whether work
is eligible. Policies are data to the scheduler: `choose` among candidates, and `charge` what a client
has used.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

CLAIM_US = 100_000
"""Device time that a client may have in advance of others because it could not be served before."""


class Contender(Protocol):
    """What a policy may know about a client's queue."""

    @property
    def client(self) -> int:
        """The client's number."""

    @property
    def share(self) -> float:
        """Its weight."""

    @property
    def priority(self) -> int:
        """Its priority; higher goes first."""

    @property
    def head_arrival(self) -> int:
        """Serial number of its oldest queued work, island-wide."""


class Policy(Protocol):
    """Orders eligible work among clients."""

    name: str

    def choose(self, contenders: Sequence[Contender]) -> int:
        """Index of the contender that goes next; nothing is launched yet, and may not be."""

    def launched(self, contender: Contender) -> None:
        """Work of this contender is launched."""

    def idle(self) -> None:
        """Nobody has had any work."""

    def charge(self, contender: Contender, device_time_us: float) -> None:
        """Account for work just launched (estimated), or correct that (measured)."""

    def rejoin(self, client: int) -> None:
        """A client that had no queued work has some again."""

    def forget(self, client: int) -> None:
        """The client has left."""


class Fifo:
    """The oldest work first, whoever it belongs to."""

    name = "fifo"

    def choose(self, contenders: Sequence[Contender]) -> int:
        """The contender whose head arrived first."""
        return min(range(len(contenders)), key=lambda i: contenders[i].head_arrival)

    def launched(self, contender: Contender) -> None:
        """Nothing is accounted."""

    def idle(self) -> None:
        """Nothing is accounted."""

    def charge(self, contender: Contender, device_time_us: float) -> None:
        """Nothing is accounted."""

    def rejoin(self, client: int) -> None:
        """Nothing is accounted."""

    def forget(self, client: int) -> None:
        """Nothing is kept."""


class ProportionalShare:
    """Stride scheduling (Waldspurger and Weihl, 1995) on measured device time.

    Each client has a pass that advances by time used over its share; the lowest pass goes next. A client
    that comes back from idling starts at the current minimum, so that it cannot claim the past; one that
    wanted work but could not be served (its input was late) may claim `CLAIM_US` of it.
    """

    name = "share"

    def __init__(self) -> None:
        self._pass: dict[int, float] = {}
        self._virtual_time = 0.0

    def choose(self, contenders: Sequence[Contender]) -> int:
        """The contender with the lowest pass."""
        passes = [self._claimed(contender) for contender in contenders]
        return min(range(len(passes)), key=lambda i: (passes[i], contenders[i].head_arrival))

    def _claimed(self, contender: Contender) -> float:
        """Its pass, with as much of the past as it may claim."""
        now = self._virtual_time
        known = self._pass.get(contender.client, now)
        return max(known, now - CLAIM_US / contender.share)

    def launched(self, contender: Contender) -> None:
        """Time goes on to the pass of who goes."""
        claimed = self._claimed(contender)
        self._virtual_time = max(self._virtual_time, claimed)
        self._pass[contender.client] = claimed

    def idle(self) -> None:
        """What was used until then was nobody else's: it is not held against who used it."""
        self._virtual_time = max(self._virtual_time, *self._pass.values(), 0.0)

    def charge(self, contender: Contender, device_time_us: float) -> None:
        """Advance the client's pass."""
        start = self._pass.get(contender.client, self._virtual_time)
        self._pass[contender.client] = start + device_time_us / contender.share

    def rejoin(self, client: int) -> None:
        """Whoever idled may not claim the time it did not want."""
        self._pass[client] = max(self._pass.get(client, 0.0), self._virtual_time)

    def forget(self, client: int) -> None:
        """Drop the client's pass."""
        self._pass.pop(client, None)


class Priority:
    """The highest priority first; equals in order of arrival."""

    name = "priority"

    def choose(self, contenders: Sequence[Contender]) -> int:
        """The most important contender, the older one of equals."""
        return min(
            range(len(contenders)),
            key=lambda i: (-contenders[i].priority, contenders[i].head_arrival),
        )

    def launched(self, contender: Contender) -> None:
        """Nothing is accounted."""

    def idle(self) -> None:
        """Nothing is accounted."""

    def charge(self, contender: Contender, device_time_us: float) -> None:
        """Nothing is accounted."""

    def rejoin(self, client: int) -> None:
        """Nothing is accounted."""

    def forget(self, client: int) -> None:
        """Nothing is kept."""


POLICIES: dict[str, type[Fifo] | type[ProportionalShare] | type[Priority]] = {
    policy.name: policy for policy in (Fifo, ProportionalShare, Priority)
}
"""All policies by the name under which `pw-controller --policy` knows them."""
