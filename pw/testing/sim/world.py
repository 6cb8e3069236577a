"""The simulated world: virtual time, a queue of events, and the state that all parts share.

Time jumps from event to event. Events of the same moment happen in the order in which they were
planned, so a run depends on its seed only. A monitor that finds a broken promise raises
`Violation`, which ends the run.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any, Protocol

from pw.core.actors.actor import Actor
from pw.core.ids import Address
from pw.core.messages.roles import CLIENT_PREFIX
from pw.core.messages.routes import permits
from pw.core.tenants import OPERATOR
from pw.testing.sim.ledger import Ledger
from pw.testing.sim.profiles import SimProfile
from pw.testing.sim.trace import Trace

Watcher = Callable[[Address, Address, Any], "Callable[[], None] | None"]
"""Function that gets sender, receiver and message; may return a function to call after the message was
handled."""
Tamper = Callable[[Address, Address, Any], "list[Any] | None"]
"""Function that returns the messages to send instead; None for the message itself."""


class SimProcess(Protocol):
    """One incarnation of a simulated process, as its network and the world see it (`SimNode`)."""

    name: str
    incarnation: int
    slowness: float
    link_slowness: float
    paused_until_s: float
    counters: Counter[str]
    world: World
    unwatched: dict[str, Actor]
    network: Any
    """`SimNetwork` of the process."""

    def post(self, actor: str, message: object, sender: Address | None = None) -> None:
        """Put a message into the mailbox."""

    def request_turn(self) -> None:
        """Have what was sent leave soon."""

    @property
    def alive(self) -> bool:
        """Whether the process has not ended."""

    @property
    def paused(self) -> bool:
        """Whether the process is stopped now."""


class Streams:
    """Named streams of random numbers, all from one seed.

    Each link, host and client draws from a stream of its own, so one more actor or draw does not change
    the numbers of the others.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._streams: dict[str, Random] = {}

    def __call__(self, name: str) -> Random:
        """The stream called `name`; seeded by text, so the same in every process."""
        stream = self._streams.get(name)
        if stream is None:
            stream = self._streams[name] = Random(f"{self.seed}/{name}")
        return stream


class Violation(Exception):
    """A monitor has found a broken promise."""

    def __init__(self, monitor: str, what: str) -> None:
        super().__init__(monitor, what)
        self.monitor = monitor
        self.what = what

    def __str__(self) -> str:
        return f"{self.monitor}: {self.what}"


@dataclass(slots=True, eq=False)
class PlannedEvent:
    """A planned event, which can be cancelled."""

    action: Callable[..., None] | None
    args: tuple[Any, ...]

    def cancel(self) -> None:
        """Do not let it happen."""
        self.action = None
        self.args = ()


def tenant_of_user(node: str) -> str:
    """Return the tenant of a user by the name of its node, where users have tenants: one of two."""
    number = node.removeprefix(CLIENT_PREFIX).partition(".")[0]
    return f"tenant-{int(number) % 2}"


def tenant_in_turn(node: str, clients: int) -> str:
    """Return the tenant of a user of a divided island: the first and the last have one of their own."""
    number = int(node.removeprefix(CLIENT_PREFIX).partition(".")[0])
    return {0: "single", clients - 1: "visitor"}.get(number, "crowd")


class World:
    """Clock, event queue, random streams, and the nodes that exist.

    Args:
        seed: decides everything that may vary.
        profile: the size of the world, and its faults.
        trace: takes notes of all events.
    """

    def __init__(self, seed: int, profile: SimProfile, trace: Trace) -> None:
        self.seed = seed
        self.profile = profile
        self.streams = Streams(seed)
        self.trace = trace
        self.ledger = Ledger()
        self.now_s = 0.0
        self.events = 0
        self.nodes: dict[str, SimProcess] = {}
        self.listeners: dict[str, SimProcess] = {}
        """Processes that accept connections, by endpoint."""
        self.blocked: dict[tuple[str, str], float] = {}
        """Blocked directions, with the time when each ends, in seconds."""
        self.held_until_s = 0.0
        """Time at which the last frame arrives that a partition has delayed, in seconds."""
        self.calm = False
        """True when faults have stopped."""
        self.sent_watchers: dict[type, list[Watcher]] = {}
        self.handled_watchers: dict[type, list[Watcher]] = {}
        self.computing: list[Callable[[str, float], None]] = []
        """Functions that get the name of each computation that begins, and the seconds that it takes."""
        self.tenants: Callable[[str], str] = tenant_of_user
        """Function that returns the tenant of a client's node, if users have tenants."""
        self.permits: Callable[[str, str, type], bool] = permits
        self.floods: set[str] = set()
        """Names of clients that have sent more than their peers can handle."""
        self.waited: Callable[[SimProcess, str, float, float], None] | None = None
        """Function that gets a process, its peer, and when the peer's message came and is handled, in
        seconds."""
        self.tamper: Tamper | None = None
        self.checked: Counter[str] = Counter()
        """Number of checks of each monitor."""
        self._queue: list[tuple[float, int, PlannedEvent]] = []
        self._serial = 0

    def tenant_of(self, node: str) -> str:
        """Return the tenant of a node: the operator, but for users that have tenants."""
        if node.startswith(CLIENT_PREFIX):
            if self.profile.trespasses or self.profile.quotas:
                return self.tenants(node)
            if self.profile.divided:
                return tenant_in_turn(node, self.profile.clients)
        return OPERATOR

    def islands_of(self, node: str) -> tuple[str, ...]:
        """No node has a certificate here: every host may join all islands."""
        return ()

    def at(self, time_s: float, action: Callable[..., None], *args: Any) -> PlannedEvent:
        """Plan `action(*args)` for a moment, which must not have passed."""
        event = PlannedEvent(action, args)
        self._serial += 1
        heapq.heappush(self._queue, (time_s, self._serial, event))
        return event

    def after(self, delay_s: float, action: Callable[..., None], *args: Any) -> PlannedEvent:
        """Plan `action(*args)` for `delay_s` seconds from now."""
        return self.at(self.now_s + delay_s, action, *args)

    def step(self, until_s: float = float("inf")) -> bool:
        """Let the next event happen; False if there is none before `until_s`."""
        queue = self._queue
        while queue:
            if queue[0][0] > until_s:
                return False
            self.now_s, _, event = heapq.heappop(queue)
            action = event.action
            if action is not None:
                self.events += 1
                action(*event.args)
                return True
        return False

    def run(self, until_s: float, limit: int, stop: Callable[[], bool]) -> bool:
        """Go on until `stop()`; False if the time or `limit` events have passed before."""
        end = self.events + limit
        while not stop():
            if self.events >= end or not self.step(until_s):
                return stop()
        return True

    def blocked_until(self, source: str, target: str) -> float:
        """Return when a frame sent now can pass; 0 for at once."""
        until = self.blocked.get((source, target))
        return 0.0 if until is None or until <= self.now_s else until

    def watch_sent(self, kind: type, watcher: Watcher) -> None:
        """Call the watcher when a message of this type is sent."""
        self.sent_watchers.setdefault(kind, []).append(watcher)

    def watch_handled(self, kind: type, watcher: Watcher) -> None:
        """Call the watcher before a message of this type is handled, and its result afterwards."""
        self.handled_watchers.setdefault(kind, []).append(watcher)
