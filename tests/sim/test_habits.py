"""Clients that wait for their results, on one device in virtual time: what they get, and what that costs."""

from __future__ import annotations

import heapq
from collections import Counter, deque
from dataclasses import dataclass, field
from itertools import pairwise

import pytest

from pw.core.messages import Release, UploadEnded
from pw.sched.island.launching import AROUND_S, TIMER_S
from pw.sched.island.policy import AGE_S
from pw.sched.island.think_time import KEPT_S, KEPT_SHARE, KEPT_TIMES
from pw.sched.island.window import CONTENDED_TIME_US
from tests.stages.samples import diagonal
from tests.stages.scheduling import Bench, runs_on


@dataclass
class User:
    """Waits for the oldest of so many calls, thinks, and calls again; one of 0 calls has enough queued."""

    waits_for: int
    takes_s: float
    share: float = 1.0
    priority: int = 0
    think_s: float = 0.5e-3
    calls: int = 1 << 30
    """It goes away after so many."""
    began_s: list[float] = field(default_factory=list)
    """When its calls began on the device."""


class Device:
    """One device, and its users."""

    def __init__(self, policy: str, *users: User) -> None:
        self.bench = Bench(policy, ("h0",))
        self.users = dict(enumerate(users, 1))
        self.events: list[tuple[float, int, int]] = []
        self.under_way: deque[int] = deque()
        self.done = 0
        self.ends_s = 0.0
        self.busy_s = 0.0
        for number, user in self.users.items():
            self.bench.client(number, user.share, user.priority)
            for _ in range(user.waits_for or 50):
                self.plan(0.0, number)

    def plan(self, delay_s: float, number: int) -> None:
        """A call of this user's."""
        event = (self.bench.world.now_s + delay_s, len(self.events) + self.done, number)
        heapq.heappush(self.events, event)

    def used_s(self, since_s: float) -> dict[int, float]:
        """How long each user had the device since then."""
        return {
            number: user.takes_s * sum(at >= since_s for at in user.began_s)
            for number, user in self.users.items()
        }

    def run(self, for_s: float) -> None:
        """Let time pass."""
        world = self.bench.world
        end_s = world.now_s + for_s
        while world.now_s < end_s:
            due_s = [alarm.due_s for alarm in world.alarms]
            due_s += [self.events[0][0]] if self.events else []
            due_s += [self.ends_s] if self.under_way else []
            world.wait(max(0.0, min([end_s, *due_s]) - world.now_s))
            while self.events and self.events[0][0] <= world.now_s:
                number = heapq.heappop(self.events)[2]
                user = self.users[number]
                if user.calls > 0:
                    user.calls -= 1
                    self.bench.tell(self.bench.submission(number))
            if self.under_way and self.ends_s <= world.now_s:
                number = self.under_way.popleft()
                user = self.users[number]
                launch = self.bench.launches()[self.done]
                self.done += 1
                self.busy_s += user.takes_s
                self.plan(user.think_s if user.waits_for else 0.0, number)
                self.bench.end(launch, round(user.takes_s * 1e6))
            launches = self.bench.launches()
            if not self.under_way and len(launches) > self.done:
                number = launches[self.done].run >> 40
                self.under_way.append(number)
                self.users[number].began_s.append(world.now_s)
                self.ends_s = world.now_s + self.users[number].takes_s


@pytest.mark.parametrize(
    ("waits_for", "takes_ms"),
    diagonal(
        [(1, 1), (2, 5), (200, 200), (0, 1), (1, 0)],
        [(0.4, 28.0), (0.4, 0.4), (2.4, 2.4), (28.0, 28.0), (28.0, 0.4)],
    ),
)
def test_clients_that_wait_have_their_shares(
    waits_for: tuple[int, int], takes_ms: tuple[float, float]
) -> None:
    light = User(waits_for[0], takes_ms[0] * 1e-3, share=1.0)
    heavy = User(waits_for[1], takes_ms[1] * 1e-3, share=4.0)
    device = Device("share", light, heavy)
    device.run(0.3)
    device.run(2.0)
    used = Counter(device.used_s(0.3))
    assert used[2] / used.total() == pytest.approx(0.8, abs=0.03)


@pytest.mark.parametrize("waits_for", [(1, 1), (0, 1), (200, 200), (1, 200)])
def test_a_higher_priority_has_all_but_what_ages(waits_for: tuple[int, int]) -> None:
    low, high = User(waits_for[0], 5e-3), User(waits_for[1], 5e-3, priority=9)
    device = Device("priority", low, high)
    device.run(5.0)
    learned = [at for at in low.began_s if at > 0.5]
    assert 3 <= len(learned) <= 5
    longest_s = max(b - a for a, b in pairwise(learned))
    assert longest_s <= AGE_S + CONTENDED_TIME_US * 1e-6 + 3 * 5e-3


def test_what_a_client_deletes_does_not_hide_how_long_it_waits() -> None:
    """A deletion and a run of one turn, as a loop makes them that drops its last result."""
    bench = Bench("priority", ("h0",))
    bench.client(1)
    bench.client(2, priority=9)
    bench.measure(1, 2)
    bench.tell(*[bench.submission(2) for _ in range(200)])
    sender, release = bench.address, Release(1, (5,), (("h0",),), False)
    for message in (release, bench.submission(1)):
        bench.scheduler.receive(sender, message)
    bench.scheduler.turn_ended()
    bench.world.wait(AGE_S)
    before = len(bench.launches())
    for launch in bench.launches()[2:20]:
        bench.end(launch, 1000)
    assert 1 in bench.owners()[before:]


def test_nothing_is_kept_first_come_first_served() -> None:
    device = Device("fifo", User(1, 5e-3, priority=9, share=100.0), User(1, 5e-3))
    device.run(1.0)
    used = device.used_s(0.0)
    assert used[1] == pytest.approx(used[2], abs=11e-3)


@pytest.mark.parametrize("policy", ["share", "priority"])
def test_a_device_is_not_idle_for_a_client_that_thinks_for_long(policy: str) -> None:
    """It goes first when it comes, and meanwhile others work."""
    visitor = User(1, 2e-3, share=4.0, priority=9, think_s=20e-3)
    device = Device(policy, visitor, User(0, 3e-3))
    device.run(0.5)
    busy_s = device.busy_s
    device.run(2.0)
    assert device.busy_s - busy_s > 0.97 * 2.0
    turns_s = [b - a for a, b in pairwise(visitor.began_s[20:])]
    assert max(turns_s) <= 22e-3 + CONTENDED_TIME_US * 1e-6 + 2 * 3e-3


def test_a_device_is_idle_for_a_client_that_does_not_come_back_only_so_long() -> None:
    leaves = User(1, 4e-3, share=100.0, calls=20)
    stays = User(0, 4e-3)
    device = Device("share", leaves, stays)
    device.run(1.0)
    left_s = leaves.began_s[-1] + leaves.takes_s
    waited_s = min(at for at in stays.began_s if at >= left_s - 1e-9) - left_s
    assert waited_s == pytest.approx(KEPT_S + KEPT_SHARE * 4e-3 + TIMER_S, abs=1e-4)
    after = [at for at in stays.began_s if at >= left_s]
    assert max(b - a for a, b in pairwise(after)) < 4.1e-3, "once"


def test_short_work_earns_a_short_wait() -> None:
    leaves = User(1, 0.2e-3, share=100.0, think_s=0.3e-3, calls=50)
    stays = User(0, 4e-3)
    device = Device("share", leaves, stays)
    device.run(1.0)
    left_s = leaves.began_s[-1] + leaves.takes_s
    waited_s = min(at for at in stays.began_s if at >= left_s - 1e-9) - left_s
    assert waited_s <= KEPT_TIMES * 0.2e-3 + TIMER_S + 1e-4


def test_a_client_that_waits_for_an_upload_keeps_its_turn() -> None:
    """Its run is there, and cannot go yet."""
    bench = Bench("priority", ("h0",))
    bench.client(1, priority=9)
    bench.client(2)
    bench.measure(2)
    for _ in range(3):
        bench.tell(bench.submission(1))
        bench.world.wait(1e-3)
        bench.end(bench.launches()[-1], 1000)
        bench.world.wait(1e-4)
    bench.tell(bench.submission(1))
    before = len(bench.launches())
    bench.tell(bench.submission(1, awaits=(99,)), bench.submission(2))
    assert len(bench.launches()) == before
    bench.tell(UploadEnded(99))
    assert bench.owners()[before:] == [1]
    bench.world.wait(0.1)
    assert bench.owners()[before:] == [1, 2], "what takes so long may be waiting itself"


def test_a_kept_device_delays_no_client_on_another() -> None:
    bench = Bench("priority")
    for client, at, priority in ((1, 0, 9), (2, 0, 0), (3, 1, 0)):
        runs_on(bench, client, at, priority=priority)
    bench.measure(2, 3)
    for _ in range(4):
        bench.tell(bench.submission(1))
        bench.world.wait(1e-3)
        bench.end(bench.launches()[-1], 1000)
        bench.world.wait(1e-4)
    before = len(bench.launches())
    bench.tell(bench.submission(2), bench.submission(3))
    assert bench.owners()[before:] == [3]
    bench.world.wait(10e-3)
    assert bench.owners()[before:] == [3, 2]


def test_a_client_that_came_lately_counts_while_it_thinks() -> None:
    """Or what another launches meanwhile would be as much as if it were alone."""
    bench = Bench("fifo")
    bench.client(1)
    bench.client(2)
    bench.measure(1, 2)
    for _ in range(30):
        bench.tell(bench.submission(1))
        bench.end(bench.launches()[-1], 1000)
    bench.tell(*[bench.submission(1) for _ in range(60)])
    few = bench.scheduler.launched
    assert few <= CONTENDED_TIME_US / 900 + 1
    bench.world.wait(AROUND_S)
    bench.end(bench.launches()[-few], 1000)
    assert bench.scheduler.launched > 4 * few
