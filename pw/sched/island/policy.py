"""Which client goes next on an island (G2).

A policy orders clients whose oldest launch may go now, and accounts for the device time that they
use. It does not decide which launches may go.
"""

from __future__ import annotations

from collections.abc import Sequence

from pw.sched.island.client_queue import ClientQueue
from pw.sched.island.window import Account

CLAIM_US = 100_000
"""Device time that a client may have ahead of others because it could not be served before."""
AGE_S = 1.0
"""A client that has waited so long goes next once, whatever its priority."""


class Policy:
    """Base of the policies: it keeps no accounts."""

    name = ""
    keeps_accounts = False
    """Whether the scheduler calls the methods below `order`."""
    keeps_devices = True
    """Whether devices are kept idle for a client whose turn it is and that comes back soon."""

    def order(self, queues: Sequence[ClientQueue], now_s: float) -> Sequence[ClientQueue]:
        """Return the queues in the order in which they may go."""
        raise NotImplementedError

    def launched(self, queue: ClientQueue, time_us: float) -> None:
        """The oldest launch of `queue` goes, and is expected to take `time_us`."""

    def measured(
        self, client: int, share: float, accounts: Sequence[Account], more_us: float
    ) -> None:
        """A launch has ended, and took `more_us` longer than expected."""

    def idle(self, accounts: Sequence[Account]) -> None:
        """No client has wanted these devices."""

    def rejoin(self, client: int, accounts: Sequence[Account]) -> None:
        """A client that had nothing queued wants these devices."""

    def forget(self, client: int, accounts: Sequence[Account]) -> None:
        """The client has left; `accounts` are all that there are."""


class Fifo(Policy):
    """The oldest work goes first."""

    name = "fifo"
    keeps_devices = False

    def order(self, queues: Sequence[ClientQueue], now_s: float) -> Sequence[ClientQueue]:
        """Order by arrival."""
        if len(queues) < 2:
            return queues
        return sorted(queues, key=lambda queue: queue.head_arrival)


class ProportionalShare(Policy):
    """Stride scheduling (Waldspurger and Weihl, 1995) on measured device time.

    Each client has a pass that advances by the time it uses over its share; the lowest pass goes
    next. A client that comes back from idling starts at the current minimum, so it cannot claim the
    past. A client that wanted work but could not be served (its input was late) may claim
    `CLAIM_US` of the past.

    Each group of devices has an account of its own, so what a client uses on devices that no
    other client wants changes nothing on other devices.
    """

    name = "share"
    keeps_accounts = True

    def order(self, queues: Sequence[ClientQueue], now_s: float) -> Sequence[ClientQueue]:
        """Order by pass; on several devices the one counts where a client is furthest ahead."""
        if len(queues) < 2:
            return queues
        passes = [
            [(id(one), _claimed(one, queue.client, queue.share)) for one in queue.accounts]
            for queue in queues
        ]
        lowest: dict[int, float] = {}
        for claims in passes:
            for where, claimed in claims:
                lowest[where] = min(claimed, lowest.get(where, claimed))
        ahead = [
            (max(claimed - lowest[where] for where, claimed in claims), queue.head_arrival)
            for claims, queue in zip(passes, queues, strict=True)
        ]
        return [queues[at] for at in sorted(range(len(ahead)), key=ahead.__getitem__)]

    def launched(self, queue: ClientQueue, time_us: float) -> None:
        """Advance virtual time to the client's pass, and the pass by the expected time."""
        client, share = queue.client, queue.share
        for account in queue.accounts:
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
        """Reset the fair-share account of devices that had no contention."""
        for account in accounts:
            account.now = max(account.now, *account.passes.values(), 0.0)

    def rejoin(self, client: int, accounts: Sequence[Account]) -> None:
        """Take away the client's claim to the time that it did not want."""
        for account in accounts:
            account.passes[client] = max(account.passes.get(client, 0.0), account.now)

    def forget(self, client: int, accounts: Sequence[Account]) -> None:
        """Drop the client's passes."""
        for account in accounts:
            account.passes.pop(client, None)


def _claimed(account: Account, client: int, share: float) -> float:
    """A client's pass, with as much of the past as it may claim."""
    return max(account.passes.get(client, account.now), account.now - CLAIM_US / share)


class Priority(Policy):
    """The highest priority goes first; equals go in order of arrival.

    A client that has waited for `AGE_S` goes before all others once, so every client gets at least
    one launch in that time.
    """

    name = "priority"

    def order(self, queues: Sequence[ClientQueue], now_s: float) -> Sequence[ClientQueue]:
        """Order by overlong waits, then by priority, then by arrival."""
        if len(queues) < 2:
            return queues
        aged_s = now_s - AGE_S

        def rank(queue: ClientQueue) -> tuple[bool, float, int]:
            if queue.waits_since_s <= aged_s:
                return False, queue.waits_since_s, queue.head_arrival
            return True, -queue.priority, queue.head_arrival

        return sorted(queues, key=rank)


POLICIES: dict[str, type[Policy]] = {
    policy.name: policy for policy in (Fifo, ProportionalShare, Priority)
}
"""All policies by the name under which `pw-controller --policy` knows them."""
