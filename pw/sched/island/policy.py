"""Which client goes next on an island (DESIGN G2).

A policy sees only clients whose next piece of work may be launched now; it never decides whether work
is eligible. Policies are data to the scheduler: they `order` candidates, and account for what a client has
used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

CLAIM_US = 100_000
"""Device time that a client may have in advance of others because it could not be served before."""


AGE_S = 1.0
"""After so long a wait, a client goes next once, whatever its priority."""


@dataclass(slots=True)
class Account:
    """How the time of some devices has been shared, as far as a policy has to know."""

    now: float = 0.0
    """Virtual time: the pass of whoever was served last."""
    passes: dict[int, float] = field(default_factory=dict)
    """For each client its time there over its share."""

    def copy(self) -> Account:
        """An account of other devices that have been used in the same way so far."""
        return Account(self.now, dict(self.passes))

    def join(self, other: Account) -> None:
        """From now on this is of other devices as well: everybody is as far ahead as where that is least."""
        known = self.passes.keys() | other.passes.keys()
        ahead = {
            c: min(one.passes.get(c, one.now) - one.now for one in (self, other)) for c in known
        }
        self.now = max(self.now, other.now)
        self.passes = {client: self.now + by for client, by in sorted(ahead.items())}


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

    @property
    def accounts(self) -> Sequence[Account]:
        """Of all devices that its oldest queued work runs on."""

    @property
    def waits_since_s(self) -> float:
        """When it was served last, or came to the queue after that."""


C = TypeVar("C", bound=Contender)


class Policy(Protocol):
    """Orders eligible work among clients."""

    name: str
    keeps_accounts: bool
    """Whether it has to hear what is used, and of clients that come and go."""
    keeps_places: bool
    """Whether a device is kept for a client whose turn it is and who is about to come back."""

    def order(self, contenders: Sequence[C], now_s: float) -> Sequence[C]:
        """Whoever goes next comes first, then who goes if that one cannot; nothing is launched yet."""

    def launched(self, contender: Contender, time_us: float) -> None:
        """Its oldest work is launched, and is expected to take so long."""

    def measured(
        self, client: int, share: float, accounts: Sequence[Account], more_us: float
    ) -> None:
        """Work has ended that took so much longer than was expected."""

    def idle(self, accounts: Sequence[Account]) -> None:
        """Nobody has wanted these devices."""

    def rejoin(self, client: int, accounts: Sequence[Account]) -> None:
        """A client that had no queued work has some again, on these devices."""

    def forget(self, client: int, accounts: Sequence[Account]) -> None:
        """The client has left; these are all accounts that there are."""


class _Unaccounted:
    """A policy that does not care what anybody has used."""

    keeps_accounts = False

    def launched(self, contender: Contender, time_us: float) -> None:
        """Nothing is accounted."""

    def measured(
        self, client: int, share: float, accounts: Sequence[Account], more_us: float
    ) -> None:
        """Nothing is accounted."""

    def idle(self, accounts: Sequence[Account]) -> None:
        """Nothing is accounted."""

    def rejoin(self, client: int, accounts: Sequence[Account]) -> None:
        """Nothing is accounted."""

    def forget(self, client: int, accounts: Sequence[Account]) -> None:
        """Nothing is kept."""


class Fifo(_Unaccounted):
    """The oldest work first, whoever it belongs to."""

    name = "fifo"
    keeps_places = False

    def order(self, contenders: Sequence[C], now_s: float) -> Sequence[C]:
        """In the order in which heads arrived."""
        if len(contenders) < 2:
            return contenders
        return sorted(contenders, key=lambda wants: wants.head_arrival)


class ProportionalShare:
    """Stride scheduling (Waldspurger and Weihl, 1995) on measured device time.

    Each client has a pass that advances by time used over its share; the lowest pass goes next. A client
    that comes back from idling starts at the current minimum, so that it cannot claim the past; one that
    wanted work but could not be served (its input was late) may claim `CLAIM_US` of it.

    Passes are kept for all devices that are used alike, and compared with the lowest of those who want to work
    there: what a client uses where nobody else wants to be changes nothing where others do.
    """

    name = "share"
    keeps_accounts = True
    keeps_places = True

    def order(self, contenders: Sequence[C], now_s: float) -> Sequence[C]:
        """The lowest pass first; on several devices that counts where it is furthest from the lowest."""
        if len(contenders) < 2:
            return contenders
        passes = [
            [(id(one), _claimed(one, wants.client, wants.share)) for one in wants.accounts]
            for wants in contenders
        ]
        lowest: dict[int, float] = {}
        for claims in passes:
            for where, claimed in claims:
                lowest[where] = min(claimed, lowest.get(where, claimed))
        ahead = [
            (max(claimed - lowest[where] for where, claimed in claims), wants.head_arrival)
            for claims, wants in zip(passes, contenders, strict=True)
        ]
        return [contenders[at] for at in sorted(range(len(ahead)), key=ahead.__getitem__)]

    def launched(self, contender: Contender, time_us: float) -> None:
        """Time goes on to the pass of who goes, and that advances."""
        client, share = contender.client, contender.share
        for account in contender.accounts:
            claimed = _claimed(account, client, share)
            account.now = max(account.now, claimed)
            account.passes[client] = claimed + time_us / share

    def measured(
        self, client: int, share: float, accounts: Sequence[Account], more_us: float
    ) -> None:
        """Correct the client's pass."""
        for account in accounts:
            start = account.passes.get(client, account.now)
            account.passes[client] = start + more_us / share

    def idle(self, accounts: Sequence[Account]) -> None:
        """What was used until then was nobody else's: it is not held against who used it."""
        for account in accounts:
            account.now = max(account.now, *account.passes.values(), 0.0)

    def rejoin(self, client: int, accounts: Sequence[Account]) -> None:
        """Whoever idled may not claim the time it did not want."""
        for account in accounts:
            account.passes[client] = max(account.passes.get(client, 0.0), account.now)

    def forget(self, client: int, accounts: Sequence[Account]) -> None:
        """Drop the client's passes."""
        for account in accounts:
            account.passes.pop(client, None)


def _claimed(account: Account, client: int, share: float) -> float:
    """A client's pass, with as much of the past as it may claim."""
    return max(account.passes.get(client, account.now), account.now - CLAIM_US / share)


class Priority(_Unaccounted):
    """The highest priority first; equals in order of arrival.

    A client that has waited for `AGE_S` goes before all others, once: every client gets at least one launch
    in that time.
    """

    name = "priority"
    keeps_places = True

    def order(self, contenders: Sequence[C], now_s: float) -> Sequence[C]:
        """What has waited too long, then the most important, the older one of equals."""
        if len(contenders) < 2:
            return contenders
        aged_s = now_s - AGE_S

        def rank(wants: C) -> tuple[bool, float, int]:
            if wants.waits_since_s <= aged_s:
                return False, wants.waits_since_s, wants.head_arrival
            return True, -wants.priority, wants.head_arrival

        return sorted(contenders, key=rank)


POLICIES: dict[str, type[Fifo] | type[ProportionalShare] | type[Priority]] = {
    policy.name: policy for policy in (Fifo, ProportionalShare, Priority)
}
"""All policies by the name under which `pw-controller --policy` knows them."""
