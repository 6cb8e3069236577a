"""Who goes next: first come, shares of measured device time, priority (G2)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from pw.core.messages import RemoveClient, UploadEnded
from pw.sched.island import window
from pw.sched.island.launching import UNKNOWN_AT_ONCE
from pw.sched.island.policy import ProportionalShare
from pw.sched.island.window import Account, Stake
from tests.stages.scheduling import Bench, runs_on


class Island:
    """One device that does what is launched, one after the other; client n takes `time_us[n]` a piece."""

    def __init__(self, policy: str, time_us: dict[int, int]) -> None:
        self.bench = Bench(policy, ("h0",))
        self.time_us = time_us
        self.used_us: Counter[int] = Counter()
        self.done = 0
        self.worst_ahead_us = 0

    def submit(self, *clients: int) -> None:
        """One run of each of these clients, all in one turn."""
        self.bench.tell(*[self.bench.submission(client) for client in clients])

    def work(self, count: int) -> list[int]:
        """Do so many launches; whose they were."""
        owners = []
        for _ in range(count):
            launches = self.bench.launches()[self.done :]
            owners.append(launches[0].run >> 40)
            ahead = sum(self.time_us[launch.run >> 40] for launch in launches)
            self.worst_ahead_us = max(self.worst_ahead_us, ahead)
            self.used_us[owners[-1]] += self.time_us[owners[-1]]
            self.done += 1
            self.bench.end(launches[0], self.time_us[owners[-1]])
        return owners


@dataclass
class Wants:
    """A client that has work for some devices."""

    client: int
    accounts: Sequence[Account]
    priority: int = 0
    head_arrival: int = 0
    waits_since_s: float = 0.0

    @property
    def stake(self) -> Stake:
        return Stake(self.client)


@pytest.mark.parametrize("times_us", [(300, 1000, 5000), (5000, 300, 1000), (2000, 2000, 2000)])
def test_shares_of_device_time_converge(times_us: tuple[int, ...]) -> None:
    island = Island("share", dict(enumerate(times_us, 1)))
    for client, share in ((1, 1.0), (2, 2.0), (3, 4.0)):
        island.bench.client(client, share)
    island.submit(*[1, 2, 3] * 1500)
    island.work(200)
    before = Counter(island.used_us)
    while sum(island.used_us.values()) - sum(before.values()) < 700_000:
        island.work(1)
    used = island.used_us - before
    for client, share in ((1, 1), (2, 2), (3, 4)):
        assert used[client] / used.total() == pytest.approx(share / 7, abs=0.04)


@pytest.mark.parametrize(
    ("red", "blue"),
    [
        ((1.0,), (1.0,)),
        ((1.0,), (1.0, 1.0, 1.0, 1e6)),
        ((1.0, 1.0, 2.0), (1e6,)),
        ((1e-3,), (1e3,)),
    ],
)
def test_tenants_divide_devices_whatever_their_clients_are(
    red: tuple[float, ...], blue: tuple[float, ...]
) -> None:
    """Two thirds are red's; within a tenant, the shares of its clients count."""
    shares = dict(enumerate((*red, *blue), 1))
    island = Island("share", {client: 1000 + 400 * client for client in shares})
    for client, share in shares.items():
        tenant = ("red", 2.0) if client <= len(red) else ("blue", 1.0)
        island.bench.client(client, share, 0, *tenant)
    island.submit(*list(shares) * 900)
    island.work(100)
    before = Counter(island.used_us)
    while sum(island.used_us.values()) - sum(before.values()) < 1_000_000:
        island.work(1)
    used = island.used_us - before
    of_red = {client: used[client] for client in shares if client <= len(red)}
    assert sum(of_red.values()) / used.total() == pytest.approx(2 / 3, abs=0.02)
    for client in of_red:
        part = shares[client] / sum(red)
        assert of_red[client] / sum(of_red.values()) == pytest.approx(part, abs=0.04)


def test_a_tenant_pays_for_clients_that_have_left() -> None:
    """Else it would use a new client for each call that takes long, and owe nothing."""
    island = Island("share", {1: 1000, 2: 1000})
    for client in (1, 2):
        island.bench.client(client, 1.0, 0, "red", 1.0)
    island.submit(*[1, 2] * 1500)
    island.work(10)
    for client in range(3, 43):
        island.time_us[client] = 40_000
        island.bench.client(client, 1.0, 0, "blue", 1.0)
        island.submit(client)
        while client not in island.bench.owners()[island.done :]:
            island.work(1)
        island.bench.tell(RemoveClient(client))
    red = island.used_us.pop(1) + island.used_us.pop(2)
    assert red == pytest.approx(sum(island.used_us.values()), rel=0.15)
    (account,) = island.bench.scheduler.queues.window.accounts()
    assert account.passes.keys() == {"red", "blue"}
    assert account.tenants.keys() <= {"red", "blue"}
    assert account.within("blue").passes.keys() <= {42}


def test_a_client_that_idled_does_not_claim_the_past() -> None:
    """Not even when it was the only client while it idled."""
    island = Island("share", {1: 1000, 2: 1000})
    island.bench.client(1)
    island.bench.client(2)
    island.submit(*[1] * 500)
    island.work(400)
    island.submit(*[1] * 500, *[2] * 500)
    island.work(300)
    owners = island.work(100)
    assert 40 <= owners.count(2) <= 60


def test_time_used_without_contention_does_not_count() -> None:
    island = Island("share", {1: 600_000_000, 2: 1000})
    island.bench.client(1)
    island.bench.client(2)
    island.submit(1)
    island.work(1)
    island.submit(*[2] * 50)
    island.work(50)
    island.submit(*[1, 2] * 20)
    assert 1 in island.work(3)


def test_looking_for_a_client_that_fits_changes_no_share() -> None:
    policy, account = ProportionalShare(), Account()
    contenders = [Wants(client, (account,)) for client in (1, 2)]
    for number, contender in enumerate(contenders):
        policy.launched(contender.stake, contender.accounts, 1e6 * number)
    before = account.copy()
    assert policy.order(contenders, 0.0) == contenders
    assert account == before


@pytest.mark.parametrize("times_us", [(4000, 4000), (1000, 10_000)])
def test_work_on_other_devices_changes_no_share(times_us: tuple[int, int]) -> None:
    """Neither that of others, nor its own when it wants to work where they do."""
    bench = Bench("share", ("h0",))
    for client, at, share in ((1, 0, 3.0), (2, 0, 1.0), (3, 1, 1.0)):
        runs_on(bench, client, at, share=share)
    took_us = {1: times_us[0], 2: times_us[1], 3: 1000}
    used_us: Counter[int] = Counter()
    ends_us = [0, 0]
    bench.tell(*[bench.submission(client) for client in (1, 2, 3) for _ in range(1500)])
    done: set[int] = set()
    for _ in range(1500):
        open_ = [launch for launch in bench.launches() if launch.sequence not in done]
        first = [next((n for n in open_ if (n.run >> 40 == 3) == bool(at)), None) for at in (0, 1)]
        assert all(first), "neither device is without work"
        at = ends_us.index(min(ends_us))
        launch = first[at]
        assert launch is not None
        client = launch.run >> 40
        done.add(launch.sequence)
        ends_us[at] += took_us[client]
        used_us[client] += took_us[client]
        bench.end(launch, took_us[client])
    assert used_us[1] / used_us[2] == pytest.approx(3, rel=0.15)
    assert used_us[3] > 0.9 * (used_us[1] + used_us[2])


def test_a_client_that_was_alone_elsewhere_has_its_share_here() -> None:
    policy, here, there = ProportionalShare(), Account(), Account()
    alone, mine, theirs = Wants(1, (there,)), Wants(1, (here,)), Wants(2, (here,))
    for _ in range(1000):
        policy.launched(alone.stake, alone.accounts, 1000.0)
        policy.launched(theirs.stake, theirs.accounts, 1000.0)
    policy.rejoin(mine.stake, here, only_of_tenant=False)
    served = Counter()
    for _ in range(100):
        contenders = [mine, theirs]
        chosen = policy.order(contenders, 0.0)[0]
        policy.launched(chosen.stake, chosen.accounts, 1000.0)
        served[chosen.client] += 1
    assert abs(served[1] - served[2]) <= 2
    both = Wants(3, (here, there))
    for account in both.accounts:
        policy.rejoin(both.stake, account, only_of_tenant=False)
    for _ in range(90):
        contenders = [mine, theirs, alone, both]
        chosen = policy.order(contenders, 0.0)[0]
        policy.launched(chosen.stake, chosen.accounts, 1000.0)
        served[id(chosen)] += 1
    assert 20 <= served[id(both)] <= 25, "as often as the others"
    served.clear()
    for _ in range(90):
        contenders = [theirs, both]
        chosen = policy.order(contenders, 0.0)[0]
        policy.launched(chosen.stake, chosen.accounts, 1000.0 if chosen is theirs else 50_000.0)
        served[id(chosen)] += 1
    assert served[id(both)] in (2, 3), "time without contention does not count"


def test_a_client_that_could_not_be_served_claims_only_a_little_of_the_past() -> None:
    island = Island("share", {1: 1000, 2: 1000})
    island.bench.client(1)
    island.bench.client(2)
    late = island.bench.submission(2, awaits=(99,))
    island.bench.tell(late)
    island.submit(*[2] * 1000, *[1] * 2000)
    island.work(1000)
    island.bench.tell(UploadEnded(99))
    owners = island.work(500)
    assert 250 <= owners.count(2) <= 250 + 80


def test_the_launched_work_of_contenders_is_milliseconds() -> None:
    """Although they sent all of it before anything was measured."""
    island = Island("fifo", {1: 4000, 2: 4000})
    for client in (1, 2):
        island.bench.client(client)
    for _ in range(200):
        island.submit(1)
        island.submit(2)
    island.work(2 * UNKNOWN_AT_ONCE)  # what was launched before anything was known
    assert island.worst_ahead_us <= window.CONTENDED_TIME_US + 2 * UNKNOWN_AT_ONCE * 4000
    island.worst_ahead_us = 0
    island.work(100)
    assert island.worst_ahead_us <= window.CONTENDED_TIME_US + 2 * 4000


def test_first_come_first_served() -> None:
    island = Island("fifo", {1: 10, 2: 10})
    island.bench.client(1)
    island.bench.client(2)
    order = [1, 2, 2, 1, 1, 1, 2] * 5
    for client in order:
        island.submit(client)
    assert island.work(len(order)) == order


def test_the_higher_priority_goes_first() -> None:
    island = Island("priority", {1: 1000, 2: 1000, 3: 1000})
    for client, priority in ((1, 0), (2, 5), (3, 5)):
        island.bench.client(client, priority=priority)
    island.submit(*[1] * 400)
    ahead = len(island.bench.launches())
    island.submit(*[2] * 10, *[3] * 10)
    owners = island.work(ahead + 30)[ahead:]
    assert owners == [2] * 10 + [3] * 10 + [1] * 10
