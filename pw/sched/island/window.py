"""How far launches run ahead of what has ended, on each device.

A new client on the same devices waits for the launches that are in flight there. The window
therefore bounds the launches in flight, by number and by expected time: enough to keep a device
busy, no more than another client may wait for. It counts at each *site* where a launch runs: on
each device, and on the host where a segment uses no device (a Python function, or only transfers).
A launch may go when all its sites have room; a full site elsewhere does not matter.

A gang has many devices, nearly always used together. They are counted once, as one group, until a
segment uses some of them only. Then the group is divided, and both halves have the counts of the
whole. So a launch costs one step for each group, however many devices there are. Parts are joined
again from time to time.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

from pw.core.tenants import OPERATOR

SEGMENTS = 256
"""Number of launches in flight while one client has the island to itself."""
TIME_US = 50_000.0
"""Expected time of these launches, in microseconds: how long a second client may have to wait."""
CONTENDED_TIME_US = 5_000.0
"""Expected time of the launches in flight while several clients want the island, in microseconds: with more,
the policy has less to decide."""
CONTENDED_SEGMENTS = 32
FEW = 16
"""Number of footprints that are made before groups are joined again."""


class Stake(NamedTuple):
    """A client's part of an island: its tenant's among tenants, and its own within the tenant."""

    client: int
    share: float = 1.0
    tenant: str = OPERATOR
    tenant_share: float = 1.0


@dataclass(slots=True)
class Account:
    """Account of how tenants, or the clients of one, have shared the time of some devices."""

    now: float = 0.0
    """Virtual time: the pass of the tenant, or of the client, that was served last."""
    passes: dict[Any, float] = field(default_factory=dict)
    """Virtual time of each tenant, or of each client by its number: its time there over its share."""
    tenants: dict[str, Account] = field(default_factory=dict)
    """Accounts of the clients of each tenant, which share what the tenant has had there."""

    def within(self, tenant: str) -> Account:
        """Return the account of the clients of a tenant."""
        account = self.tenants.get(tenant)
        if account is None:
            account = self.tenants[tenant] = Account()
        return account

    def copy(self) -> Account:
        """Return an account of other devices that have been used in the same way so far."""
        within = {tenant: account.copy() for tenant, account in self.tenants.items()}
        return Account(self.now, dict(self.passes), within)

    def join(self, other: Account) -> None:
        """Be the account of other devices as well: each is ahead by the least of both."""
        for tenant in sorted(self.tenants.keys() | other.tenants.keys()):
            self.within(tenant).join(other.within(tenant))
        clients = self.passes.keys() | other.passes.keys()
        ahead = {
            c: min(one.passes.get(c, one.now) - one.now for one in (self, other)) for c in clients
        }
        self.now = max(self.now, other.now)
        self.passes = {client: self.now + by for client, by in sorted(ahead.items())}


@dataclass(slots=True, eq=False)
class SiteGroup:
    """Sites that have always been used together, with the counts of each of them."""

    size: int
    launched: int = 0
    """Number of launches in flight."""
    time_us: float = 0.0
    """Expected time of the launches in flight, in microseconds."""
    turn_s: float = 0.0
    """Time at which the oldest launch in flight had its turn, in seconds."""
    account: Account = field(default_factory=Account)


@dataclass(slots=True, eq=False, weakref_slot=True)
class Footprint:
    """The sites where a segment runs."""

    sites: frozenset[Hashable]
    groups: list[SiteGroup]

    @property
    def accounts(self) -> list[Account]:
        """The fair-share accounts of all sites."""
        return [group.account for group in self.groups]


class Window:
    """Counts the launches in flight at each site of one island."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget all sites: the island has left its epoch."""
        self._group_of: dict[Hashable, SiteGroup] = {}
        self._footprints = WeakValueDictionary[frozenset[Hashable], Footprint]()
        self._new_footprints = 0
        """Number of footprints made since groups were joined."""

    def footprint(self, sites: Iterable[Hashable]) -> Footprint:
        """Return the one footprint of these sites."""
        wanted = frozenset(sites)
        footprint = self._footprints.get(wanted)
        if footprint is None:
            if self._new_footprints > 2 * len(self._footprints) + FEW:
                self.tidy()
            self._new_footprints += 1
            footprint = self._footprints[wanted] = Footprint(wanted, self._divide(wanted))
        return footprint

    def tidy(self) -> None:
        """Forget sites without a footprint, and join groups that all footprints use together."""
        before, self._group_of, self._new_footprints = self._group_of, {}, 0
        users: defaultdict[Hashable, list[Footprint]] = defaultdict(list)
        for footprint in self._footprints.values():
            footprint.groups.clear()
            for site in footprint.sites:
                users[site].append(footprint)
        groups: dict[tuple[Footprint, ...], SiteGroup] = {}
        joined: dict[SiteGroup, set[SiteGroup]] = {}
        for site, using in users.items():
            old, group = before[site], groups.get(tuple(using))
            if group is None:
                # Each launch in flight at one of these sites is in flight at all of them.
                group = groups[tuple(using)] = replace(old, size=0, account=old.account.copy())
                joined[group] = {old}
                for footprint in using:
                    footprint.groups.append(group)
            elif old not in joined[group]:
                joined[group].add(old)
                group.account.join(old.account)
            group.size += 1
            self._group_of[site] = group

    def _divide(self, wanted: frozenset[Hashable]) -> list[SiteGroup]:
        """Return the groups that make up these sites; divide those that also have other sites."""
        inside = Counter(self._group_of.get(site) for site in wanted)
        becomes: dict[SiteGroup | None, SiteGroup] = {}
        for group, count in inside.items():
            if group is None:
                becomes[None] = SiteGroup(count)
            elif count == group.size:
                becomes[group] = group
            else:
                becomes[group] = half = replace(group, size=count, account=group.account.copy())
                group.size -= count
                for footprint in self._footprints.values():
                    if group in footprint.groups:
                        footprint.groups.append(half)
        for site in wanted:
            self._group_of[site] = becomes[self._group_of.get(site)]
        return list(becomes.values())

    def accounts(self) -> list[Account]:
        """Return the accounts of all sites."""
        return [group.account for group in dict.fromkeys(self._group_of.values())]

    @property
    def sites(self) -> int:
        """Number of sites that are counted."""
        return len(self._group_of)

    def is_open(self, footprint: Footprint, contended: bool) -> bool:
        """Whether one more launch may go; `contended` if several clients want the island."""
        segments, time_us = SEGMENTS, TIME_US
        if contended:
            segments, time_us = CONTENDED_SEGMENTS, CONTENDED_TIME_US
        for group in footprint.groups:
            if group.launched >= 2 and (group.launched >= segments or group.time_us >= time_us):
                return False
        return True

    def launched(self, footprint: Footprint, time_us: float, now_s: float) -> None:
        """Count a launch that is expected to take `time_us`."""
        for group in footprint.groups:
            if not group.launched:
                group.turn_s = now_s
            group.launched += 1
            group.time_us += time_us

    def ended(self, footprint: Footprint, time_us: float, now_s: float) -> None:
        """A launch has ended that was expected to take `time_us`."""
        for group in footprint.groups:
            group.turn_s = now_s
            group.launched -= 1
            group.time_us -= time_us
