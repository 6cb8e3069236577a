"""Many users of three kinds on one island, some of whom are killed: they train, serve, or are notebooks.

A user who trains always has work. One who serves gets requests at random times (Poisson), at `LOAD` of what
its share allows, and each has a deadline: a while after it comes, or when the share alone allows it if many
have come at once. A notebook calls in bursts, and does nothing in between. The policy is `share`. `Crowd`
checks, where others have been killed as well:

| | promise |
|---|---|
| shares | any two seconds: each who trains has its part of the time of all who train, within `TOLERANCE` |
| deadlines | at least `MET` of the requests are answered within `DEADLINE_S` |
| starvation | no user with calls in flight waits longer than `STARVED_S` for the next of its results |
| census | `NOTICED_S` after a user was killed, neither controller nor hosts have anything of it |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pw.testing.sim.cluster import SimCluster
from pw.testing.sim.tenants import LEARN_S, STEP_S, WINDOW_S, Tenancy, Tenant
from pw.testing.sim.workload import SimClient
from pw.testing.sim.world import Violation

LOAD = 0.9
"""Part of the device time due to a user who serves that its requests take."""
DEADLINE_S = 0.5
"""Seconds in which a request has its answer."""
MET = 0.95
"""Least part of the requests that meet their deadline."""
STARVED_S = 0.5
"""Seconds in which a user with calls in flight gets a result."""
NOTICED_S = 20.0
"""Seconds after which a killed user has left nothing."""
BURST_S = 0.7
"""Mean seconds between the bursts of a notebook."""
IN_FLIGHT = 1 << 20
"""Number of calls in flight of a user whose requests do not wait for each other."""


@dataclass(slots=True)
class Stay:
    """One life of a user at work."""

    name: str
    share: float
    began_s: float
    ended_s: float


class Resident(Tenant):
    """A user of one of the kinds; each of its lives is a stay."""

    def _claim(self) -> tuple[float, int]:
        share, priority = super()._claim()
        self.visits = False
        self.calls: dict[int, float] = {}
        """Time of each call in flight, in seconds, by its result; the oldest first."""
        self.progress_s = 0.0
        """Time of the last result, in seconds."""
        return self._work(share), priority

    def _work(self, share: float) -> float:
        """Choose the work of a life; returns its share."""
        raise NotImplementedError

    def live(self) -> None:
        """Begin a session."""
        if not self.lives:
            self.stays: list[Stay] = []
            self.longest_s = 0.0
            """Longest time without a result in which calls were in flight, in seconds."""
        super().live()

    def die(self) -> None:
        """The process is killed; in the end nothing of it is left."""
        if self.node.alive:
            self.waited()
            if self.began_s >= 0:
                self.stays.append(Stay(self.name, self.share, self.began_s, self.world.now_s))
            if self.attached is not None:
                self.world.after(NOTICED_S, self._check_gone, self.name, self.attached.client)
            self._drop()
        super().die()

    def _drop(self) -> None:
        """Forget the calls in flight: the process that wanted the results is dead."""
        self.calls.clear()

    def _check_gone(self, name: str, client: int) -> None:
        cluster = self.cluster
        self.world.checked["killed users"] += 1
        left = [
            f"{host.name} holds {held}"
            for host in cluster.members()
            if (held := host.held_by(client))
        ]
        if cluster.controller.sessions.get(client) is not None:
            left.append("the controller has its session")
        if left:
            raise Violation("census", f"of {name}, which was killed: {'; '.join(left)}")

    def staying(self) -> list[Stay]:
        """Return the lives until now in which it was at work."""
        if self.began_s < 0 or not self.node.alive:
            return self.stays
        return [*self.stays, Stay(self.name, self.share, self.began_s, self.world.now_s)]

    def waited(self) -> None:
        """Count the time for which it waits for the next result."""
        if self.calls:
            since_s = max(self.progress_s, next(iter(self.calls.values())))
            self.longest_s = max(self.longest_s, self.world.now_s - since_s)

    def _launch(self) -> int:
        result = super()._launch()
        self.calls[result] = self.world.now_s
        return result

    def _came(self, array: int, result: Any, error: BaseException | None) -> None:
        self.waited()
        self.progress_s = self.world.now_s
        del self.calls[array]
        super()._came(array, result, error)


class TrainingUser(Resident):
    """A user who always has work: one step after the other."""

    def _work(self, share: float) -> float:
        self.takes_s = self.random.uniform(2e-3, 5e-3)
        self.waits_for = self.random.choice((1, 2, 2))
        self.think_s = self.random.uniform(0.02, 0.12) * self.takes_s
        return share


class ServingUser(Resident):
    """A user whose requests come at random times, and have deadlines."""

    def _work(self, share: float) -> float:
        self.takes_s = self.random.uniform(0.5e-3, 2e-3)
        self.waits_for, self.think_s = IN_FLIGHT, 1e-5
        self.requests: list[float] = []
        """Times of requests that are not called yet, in seconds."""
        self.allowed_s = 0.0
        """Time at which all requests have ended on devices that give the user no more than its share, in
        seconds."""
        self.asked: dict[int, float] = {}
        """Times of requests in flight, in seconds, by their result."""
        return 2.0

    def live(self) -> None:
        """Begin a session."""
        if not self.lives:
            self.answered = self.late = 0
        super().live()

    def _drop(self) -> None:
        super()._drop()
        self.requests.clear()
        self.asked.clear()

    def _call_more(self) -> None:
        if not self.calls and not self.requests and self.began_s == self.world.now_s:
            self._next(self.lives)
        while self.requests and self.credits and not self.final:
            self.asked[self._launch()] = self.requests.pop(0)

    def _next(self, life: int) -> None:
        if life == self.lives and self.node.alive and not self.final:
            delay_s, requests = self._pause()
            self.world.after(delay_s, self._request, life, requests)

    def _request(self, life: int, requests: int) -> None:
        if life == self.lives and self.node.alive and not self.final:
            now_s = self.world.now_s
            for _ in range(requests):
                self.allowed_s = max(self.allowed_s, now_s) + self.takes_s / self.due
                self.requests.append(max(now_s, self.allowed_s - DEADLINE_S))
            self._call_more()
            self._next(life)

    def _pause(self) -> tuple[float, int]:
        """Return the seconds until the next requests, and their number."""
        return self.random.expovariate(LOAD * self.due / self.takes_s), 1

    @property
    def due(self) -> float:
        """Part of the device time that is due to the user."""
        total: float = sum(user.share for user in self.cluster.users)
        return self.share / total

    def _came(self, array: int, result: Any, error: BaseException | None) -> None:
        asked_s = self.asked.pop(array)
        if asked_s > self.began_s + LEARN_S:
            self.answered += 1
            self.late += self.world.now_s > asked_s + DEADLINE_S
        super()._came(array, result, error)

    def overdue(self) -> int:
        """Return the number of requests that wait, and are late."""
        dues = [*self.requests, *self.asked.values()]
        return sum(self.world.now_s > asked_s + DEADLINE_S for asked_s in dues)


class NotebookUser(ServingUser):
    """A user who calls some functions at once, and then thinks."""

    def _work(self, share: float) -> float:
        super()._work(share)
        self.takes_s = self.random.uniform(1e-3, 5e-3)
        return 1.0

    def _pause(self) -> tuple[float, int]:
        return self.random.expovariate(1 / BURST_S), self.random.randint(2, 8)


def user_of_many(cluster: SimCluster, number: int, runs: int) -> Resident:
    """Return a user of the kind of its number: of eight, three train and three serve."""
    eighth = number * 8 // cluster.world.profile.clients
    kind = TrainingUser if eighth < 3 else ServingUser if eighth < 6 else NotebookUser
    return kind(cluster, number, runs)


class Crowd(Tenancy):
    """Checks what is promised to users of these kinds."""

    def __init__(self, cluster: SimCluster, users: Sequence[SimClient]) -> None:
        super().__init__(cluster, users)
        self._users = [user for user in users if isinstance(user, Resident)]

    def check(self) -> None:
        """Check all until now."""
        world = self._cluster.world
        for user in self._users:
            user.waited()
            world.checked["starvation"] += 1
            if user.longest_s > STARVED_S:
                words = f"{user.name} got no result for {user.longest_s:.2f} s, and waited for some"
                raise Violation("starvation", words)
        self._check_deadlines([user for user in self._users if type(user) is ServingUser])
        trainers = [user for user in self._users if isinstance(user, TrainingUser)]
        stays = [stay for user in trainers for stay in user.staying()]
        start_s = min((stay.began_s for stay in stays), default=world.now_s) + LEARN_S
        while start_s + WINDOW_S <= world.now_s:
            end_s = start_s + WINDOW_S
            at_work = [
                stay
                for stay in stays
                if stay.began_s + LEARN_S <= start_s and end_s <= stay.ended_s
            ]
            world.checked["shares"] += 1
            total = sum(stay.share for stay in at_work)
            dues = {stay.name: stay.share / total for stay in at_work}
            self.compare(dues, self.used(start_s, end_s), f"from {start_s:.2f} to {end_s:.2f} s")
            start_s += STEP_S

    def _check_deadlines(self, servers: Sequence[ServingUser]) -> None:
        late = sum(user.late + user.overdue() for user in servers)
        requests = sum(user.answered + user.overdue() for user in servers)
        self._cluster.world.checked["deadlines"] += requests
        if late > (1 - MET) * requests:
            words = f"{late} of {requests} requests missed their deadline of {DEADLINE_S} s"
            raise Violation("deadlines", words)
