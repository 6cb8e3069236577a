"""Users that share one island for good: some wait for their results, some only enqueue.

A tenant calls one function again and again. A waiting tenant has some calls in flight, waits for
the oldest, thinks, and calls again; one that does not wait uses all its credits. All run on all
devices of the same island, so the scheduler alone decides their shares. The last tenant is a
visitor: it calls once in a while, uses less than its share, and has precedence. `Tenancy` checks
every two seconds in which all of them were at work:

| policy | promise |
|---|---|
| share | each has its part of the time without the visitor's, within `TOLERANCE`: of that of its tenant |
| priority | the highest has all of that but for `TOLERANCE` and what aged; each has something in `AGED_S` |
| both | the visitor's calls wait for the launches before them, and one more of each tenant |
| all | the devices are in use most of the time |
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

from pw.client.session.thread_messages import Await, Forget
from pw.core.messages import SliceBound
from pw.core.programs.program import Output, ValueRef
from pw.core.sharding import ArraySpec, Placement, Sharding
from pw.sched.island.policy import AGE_S
from pw.sched.island.window import CONTENDED_TIME_US
from pw.testing.sim.cluster import SimCluster
from pw.testing.sim.digests import lasting
from pw.testing.sim.programs import Drafting
from pw.testing.sim.workload import SimClient
from pw.testing.sim.world import Violation

WINDOW_S = 2.0
STEP_S = 0.25
LEARN_S = 0.5
"""Seconds before the first check, in which the scheduler measures."""
TOLERANCE = 0.05
"""Tolerance, as a part of the device's time."""
AGED_S = AGE_S + 0.25
"""Seconds after which an aged launch has begun at the latest."""
IN_USE = 0.75
"""Least part of the time in which devices are in use."""
VISIT_S = 0.03
"""Seconds between a visitor's calls."""
LONGEST_S = 12e-3
"""Seconds of the longest call."""
GREED = 1e6
"""Share that leaves others nothing, but for clients of other tenants."""


class Tenant(SimClient):
    """A user of one function, on all of the first island."""

    def _claim(self) -> tuple[float, int]:
        draw = self.random
        self.visits = self.number == self.world.profile.clients - 1
        self.takes_s = LONGEST_S * (0.1 if self.visits else draw.uniform(0.5, 1.0))
        self.waits_for = 1 if self.visits else draw.choice((0, 1, 1, 2, 5))
        """Number of calls in flight of a client that waits for the oldest; 0 for one that does not wait."""
        if self.world.profile.parts:
            self.waits_for = int(self.is_wide)
        self.think_s = VISIT_S if self.visits else draw.uniform(0.02, 0.12) * self.takes_s
        self.in_flight: deque[int] = deque()
        self.there: set[int] = set()
        """Waited results that have come."""
        self.thinking = False
        self.last = 0
        """Number of the newest result that the client has seen."""
        self.began_s = -1.0
        self.called_s = 0.0
        self.slowest_s = 0.0
        """Seconds of the slowest call; `called_s` is the time of the last call."""
        shares = (1.0, 2.0, GREED) if self.world.profile.divided else (1.0, 2.0, 4.0)
        return 16.0 if self.visits else draw.choice(shares), self.number

    @property
    def is_wide(self) -> bool:
        """Whether it works on the whole island."""
        return not self.world.profile.parts or self.number == 0 or self.visits

    def _place(self) -> tuple[str, int]:
        members = self.cluster.islands["island-0"]
        devices = len(members) * members[0].devices
        return "island-0", devices if self.is_wide else max(1, devices // 2)

    def act(self, life: int) -> None:
        """Begin and finish; in between, each answer leads to the next call."""
        if life != self.lives or not self.node.alive or self.closing:
            return
        if self.session.closed is not None:
            self._cut_off(self.session.closed)
            return
        if self.slices and self.began_s < 0:
            self._begin(next(iter(self.slices.values())))
        elif self.final and not self.in_flight:
            self._finish()
        self.world.after(0.05, self.act, life)

    def _begin(self, on: SliceBound) -> None:
        size = len(on.devices)
        place = Placement(on.slice, tuple(range(size)))
        spec = ArraySpec((16,), "uint8", Sharding(("x",), (size,), ((),)), place)
        name = f"{self.name}/call"
        blob = lasting(name.encode(), self.takes_s)
        program = Drafting(name)
        (result,) = program.compute(name, [spec], [spec], [ValueRef(-1, 0)], blob=blob)
        self.program = self._id()
        self.draft = program.draft([spec], [Output(result, spec)])
        self._add_program(self.program, self.draft)
        self.argument = self._put(spec)
        self.spec = spec
        self.began_s = self.world.now_s
        self._call_more()

    def _call_more(self) -> None:
        while self.credits and not self.final:
            if self.waits_for and len(self.in_flight) >= self.waits_for:
                return
            self._launch()

    def _launch(self) -> int:
        """Call once; returns the result."""
        result = self._id()
        self.oracle.run(self.draft, (self.argument,), (result,))
        self.arrays[result] = self.spec
        self.in_flight.append(result)
        self.credits -= 1
        self.world.checked["runs"] += 1
        self.called_s = self.world.now_s
        self._call(self._id(), self.program, (self.argument,), (result,))
        if self.waits_for:
            promise = self._promise("wait", partial(self._came, result))
            self._post(Await(((result, self.spec),), promise))
        return result

    def _came(self, array: int, result: Any, error: BaseException | None) -> None:
        if error is not None:
            raise Violation("oracle", f"{self.name}: {error}")
        self.there.add(array)
        if self.world.now_s > self.began_s + LEARN_S:
            self.slowest_s = max(self.slowest_s, self.world.now_s - self.called_s)
        if not self.thinking:
            self._take_oldest()

    def _take_oldest(self) -> None:
        """If it is there: think, call again, and look at the next one."""
        self.thinking = bool(self.in_flight) and self.in_flight[0] in self.there
        if self.thinking:
            oldest = self.in_flight.popleft()
            self.there.discard(oldest)
            self._forget(oldest)
            think_s = self.think_s * self.random.uniform(0.7, 1.3)
            self.world.after(think_s, self._thought, self.lives)

    def _thought(self, life: int) -> None:
        if life == self.lives and self.node.alive:
            self._call_more()
            self._take_oldest()

    def _credits(self, count: int) -> None:
        super()._credits(count)
        if self.began_s >= 0 and not self.waits_for and count < 1 << 20:
            for _ in range(min(count, len(self.in_flight))):
                self._forget(self.in_flight.popleft())
            self._call_more()

    def _forget(self, array: int) -> None:
        """Delete all results but the last one, which is looked at in the end."""
        last, self.last = self.last, array
        if last:
            del self.arrays[last]
            self._post(Forget((last,)))


class Tenancy:
    """Checks the share of each tenant."""

    def __init__(self, cluster: SimCluster, tenants: Sequence[SimClient]) -> None:
        self._cluster = cluster
        self._tenants = [tenant for tenant in tenants if isinstance(tenant, Tenant)]
        self._used: list[tuple[float, str, float]] = []
        """Beginning of each computation, its tenant, and its device time, in seconds."""
        if self._tenants:
            cluster.world.computing.append(self._computing)

    def _computing(self, name: str, takes_s: float) -> None:
        self._used.append((self._cluster.world.now_s, name.partition("/")[0], takes_s))

    def check(self) -> None:
        """Check that all tenants have been at work until now."""
        if not self._tenants:
            return
        *_, visitor = self._tenants
        longest_s = 2 * LONGEST_S + len(self._tenants) * LONGEST_S + CONTENDED_TIME_US * 1e-6
        promised = self._cluster.policy != "fifo" and not self._cluster.world.profile.parts
        if promised and visitor.slowest_s > longest_s:
            words = f"a call of {visitor.name}, which calls once in a while"
            raise Violation("response", f"{words}, took {visitor.slowest_s * 1e3:.0f} ms")
        world = self._cluster.world
        start_s = max(tenant.began_s for tenant in self._tenants) + LEARN_S
        while start_s + WINDOW_S <= world.now_s:
            world.checked["shares"] += 1
            if world.profile.parts:
                self._look_for_gaps(start_s, start_s + WINDOW_S)
            else:
                self._look_at(start_s, start_s + WINDOW_S)
            start_s += STEP_S

    def _look_at(self, start_s: float, end_s: float) -> None:
        used_s = self.used(start_s, end_s)
        when = f"from {start_s:.2f} to {end_s:.2f} s"
        *residents, visitor = self._tenants
        if self._cluster.policy == "share":
            names = [tenant.name for tenant in residents]
            dues = dict(zip(names, self._dues(residents), strict=True))
            self.compare(dues, used_s, when)
            return
        self._check_use(used_s, when)
        if self._cluster.policy == "priority":
            within = [(at, name) for at, name, _ in self._used if start_s <= at < end_s]
            total_s = sum(used_s.values()) - used_s[visitor.name]
            highest = max(residents, key=lambda tenant: tenant.priority)
            aged_s = (len(residents) - 1) * LONGEST_S * (WINDOW_S / AGE_S)
            got = used_s[highest.name] / total_s
            if got < 1 - TOLERANCE - aged_s / total_s:
                words = f"{highest.name}, which goes before all others, got {got:.3f} {when}"
                raise Violation("shares", words)
            for tenant in residents:
                began = [start_s, *(at for at, name in within if name == tenant.name), end_s]
                longest_s = max(b - a for a, b in pairwise(began))
                if longest_s > AGED_S:
                    raise Violation("shares", f"{tenant.name} got nothing for {longest_s:.2f} s")

    def used(self, start_s: float, end_s: float) -> defaultdict[str, float]:
        """Return the seconds of computations that have begun between two moments, by the user's name."""
        used_s = defaultdict[str, float](float)
        for at, name, takes_s in self._used:
            if start_s <= at < end_s:
                used_s[name] += takes_s
        return used_s

    def compare(
        self, dues: Mapping[str, float], used_s: defaultdict[str, float], when: str
    ) -> None:
        """Check that users have had the parts due to them of what all of these users have had."""
        self._check_use(used_s, when)
        total_s = sum(used_s[name] for name in dues)
        for name, due in dues.items():
            got = used_s[name] / total_s
            if abs(got - due) > TOLERANCE:
                words = f"{name} got {got:.3f} of the island {when}, and {due:.3f} is its due"
                raise Violation("shares", words)

    def _check_use(self, used_s: defaultdict[str, float], when: str) -> None:
        total_s = sum(used_s.values())
        if total_s < IN_USE * WINDOW_S:
            raise Violation("shares", f"the island was in use for {total_s:.2f} s {when}")

    def _look_for_gaps(self, start_s: float, end_s: float) -> None:
        """No tenant waits for ever until all of its devices are free, while others use parts of them."""
        *residents, _ = self._tenants
        for tenant in residents:
            began = (
                at for at, name, _ in self._used if name == tenant.name and start_s <= at < end_s
            )
            longest_s = max(b - a for a, b in pairwise([start_s, *began, end_s]))
            if longest_s > AGED_S:
                raise Violation("shares", f"{tenant.name} got nothing for {longest_s:.2f} s")

    def _dues(self, residents: Sequence[Tenant]) -> list[float]:
        """Return the part due to each: of its tenant's part, by its share."""
        tenant_of, rights = self._cluster.world.tenant_of, self._cluster.rights
        asked: dict[str, float] = {}
        for user in residents:
            name = tenant_of(user.name)
            asked[name] = asked.get(name, 0.0) + user.share
        total = sum(rights.of(name).share for name in asked)
        return [
            rights.of(name).share / total * user.share / asked[name]
            for user, name in ((user, tenant_of(user.name)) for user in residents)
        ]
