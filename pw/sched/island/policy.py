"""Which client goes next on an island (G2).

A policy orders clients whose oldest launch may go now, and accounts for the device time that they
use. It does not decide which launches may go.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from pw.sched.island.window import Account, Stake

CLAIM_US = 100_000
"""Device time that a client may be ahead of others because it could not be served before, in microseconds."""
AGE_S = 1.0
"""Seconds of waiting after which a client goes next once, whatever its priority."""


class Contender(Protocol):
    """A client that has work for an island: its queue, or a copy of its claim in a forecast."""

    @property
    def stake(self) -> Stake:
        """The client's part of the island."""

    @property
    def priority(self) -> int:
        """The client's priority."""

    @property
    def head_arrival(self) -> int:
        """The arrival of the client's oldest task."""

    @property
    def waits_since_s(self) -> float:
        """Time since which no launch of the client has gone, in seconds."""

    @property
    def accounts(self) -> Sequence[Account]:
        """The fair-share accounts of the devices that the client's oldest launch uses."""


C = TypeVar("C", bound=Contender)


class Policy:
    """Base of the policies: it keeps no accounts."""

    name = ""
    keeps_accounts = False
    """True if the scheduler calls the methods below `order`."""
    keeps_devices = True
    """True if devices are kept idle for a client whose turn it is and that comes back soon."""

    def order(self, queues: Sequence[C], now_s: float) -> Sequence[C]:
        """Return the queues in the order in which they may go."""
        raise NotImplementedError

    def launched(self, stake: Stake, accounts: Sequence[Account], time_us: float) -> None:
        """A launch of this client goes, and is expected to take `time_us`."""

    def measured(self, stake: Stake, accounts: Sequence[Account], more_us: float) -> None:
        """A launch has ended, and took `more_us` longer than expected; its client may have left."""

    def idle(self, accounts: Sequence[Account]) -> None:
        """No client has wanted these devices."""

    def rejoin(self, stake: Stake, account: Account, *, only_of_tenant: bool) -> None:
        """A client that had nothing queued wants some devices, perhaps as the only one of its tenant."""

    def forget(self, stake: Stake, accounts: Sequence[Account]) -> None:
        """The client has left; `accounts` are all that there are."""


class Fifo(Policy):
    """The oldest work goes first."""

    name = "fifo"
    keeps_devices = False

    def order(self, queues: Sequence[C], now_s: float) -> Sequence[C]:
        """Order by arrival."""
        if len(queues) < 2:
            return queues
        return sorted(queues, key=lambda queue: queue.head_arrival)


class ProportionalShare(Policy):
    """Stride scheduling (Waldspurger and Weihl, 1995) on measured device time, in two levels.

    Each tenant has a pass that advances by the time it uses over its share, and within a tenant each
    client has one; the lowest pass goes next. So neither the number of a tenant's clients nor the
    shares that they ask for take time from other tenants. A client that comes back from idling
    starts at the current minimum, so it cannot claim the past, and so does its tenant if no other
    client of it wants the devices. A client that wanted work but could not be served (its input was
    late) may claim `CLAIM_US` of the past.

    Each group of devices has an account of its own, so what a client uses on devices that no
    other client wants changes nothing on other devices.
    """

    name = "share"
    keeps_accounts = True

    def order(self, queues: Sequence[C], now_s: float) -> Sequence[C]:
        """Order by passes; on several devices the one counts where a client is furthest ahead."""
        if len(queues) < 2:
            return queues
        of_tenants = [0.0] * len(queues)
        if len({queue.stake.tenant for queue in queues}) > 1:
            of_tenants = _leads(
                [
                    [(a, queue.stake.tenant, queue.stake.tenant_share) for a in queue.accounts]
                    for queue in queues
                ]
            )
        of_clients = _leads(
            [
                [
                    (a.within(queue.stake.tenant), queue.stake.client, queue.stake.share)
                    for a in queue.accounts
                ]
                for queue in queues
            ]
        )
        arrivals = [queue.head_arrival for queue in queues]
        ahead = list(zip(of_tenants, of_clients, arrivals, strict=True))
        return [queues[at] for at in sorted(range(len(ahead)), key=ahead.__getitem__)]

    def launched(self, stake: Stake, accounts: Sequence[Account], time_us: float) -> None:
        """Advance virtual time to the passes of tenant and client, and those by the expected time."""
        for account in accounts:
            _advance(account, stake.tenant, stake.tenant_share, time_us)
            _advance(account.within(stake.tenant), stake.client, stake.share, time_us)

    def measured(self, stake: Stake, accounts: Sequence[Account], more_us: float) -> None:
        """Correct the passes of the client and of its tenant."""
        for account in accounts:
            tenants, clients = account.passes, account.within(stake.tenant).passes
            if stake.tenant in tenants:
                tenants[stake.tenant] += more_us / stake.tenant_share
            if stake.client in clients:
                clients[stake.client] += more_us / stake.share

    def idle(self, accounts: Sequence[Account]) -> None:
        """Reset the fair-share account of devices that had no contention."""
        for account in accounts:
            for level in (account, *account.tenants.values()):
                level.now = max(level.now, *level.passes.values(), 0.0)

    def rejoin(self, stake: Stake, account: Account, *, only_of_tenant: bool) -> None:
        """Take away the client's, and the tenant's, claim to the time that it did not want."""
        within = account.within(stake.tenant)
        within.passes[stake.client] = max(within.passes.get(stake.client, 0.0), within.now)
        if only_of_tenant:
            account.passes[stake.tenant] = max(account.passes.get(stake.tenant, 0.0), account.now)

    def forget(self, stake: Stake, accounts: Sequence[Account]) -> None:
        """Drop the client's passes; its tenant keeps its own, for its later clients."""
        for account in accounts:
            if (within := account.tenants.get(stake.tenant)) is not None:
                within.passes.pop(stake.client, None)
                if not within.passes:
                    del account.tenants[stake.tenant]


def _claimed(account: Account, key: str | int, share: float) -> float:
    """The pass of a tenant or client, with as much of the past as it may claim."""
    return max(account.passes.get(key, account.now), account.now - CLAIM_US / share)


def _leads(claims: Sequence[Sequence[tuple[Account, str | int, float]]]) -> list[float]:
    """Return how far each is ahead of the last one, on the account where it is furthest ahead."""
    passes = [[(id(one), _claimed(one, key, share)) for one, key, share in each] for each in claims]
    lowest: dict[int, float] = {}
    for each in passes:
        for where, claimed in each:
            lowest[where] = min(claimed, lowest.get(where, claimed))
    return [max(claimed - lowest[where] for where, claimed in each) for each in passes]


def _advance(account: Account, key: str | int, share: float, time_us: float) -> None:
    claimed = _claimed(account, key, share)
    account.now = max(account.now, claimed)
    account.passes[key] = claimed + time_us / share


class Priority(Policy):
    """The highest priority goes first; equals go in order of arrival.

    A client that has waited for `AGE_S` goes before all others once, so every client gets at least
    one launch in that time.
    """

    name = "priority"

    def order(self, queues: Sequence[C], now_s: float) -> Sequence[C]:
        """Order by overlong waits, then by priority, then by arrival."""
        if len(queues) < 2:
            return queues
        aged_s = now_s - AGE_S

        def rank(queue: C) -> tuple[bool, float, int]:
            if queue.waits_since_s <= aged_s:
                return False, queue.waits_since_s, queue.head_arrival
            return True, -queue.priority, queue.head_arrival

        return sorted(queues, key=rank)


POLICIES: dict[str, type[Policy]] = {
    policy.name: policy for policy in (Fifo, ProportionalShare, Priority)
}
"""Policies by the name under which `pw-controller --policy` knows them."""
