"""Forecasts in which order the launches that wait on an island go on, and when.

Theory of operation. A forecast is made from what the scheduler has, when a person asks, and changes none of
it. First come the launches in flight: on each device they run one after the other. Then the policy itself
orders the queues, on copies of its accounts: again and again, the client that it puts first has its oldest
launch put behind what is on the launch's devices, until each client has its place.

A launch is expected to take as long as earlier launches of its segment have taken (`InstalledProgram`), less
the time for which it has run. The forecast has no time for what is behind a launch that has never run, that
runs for far longer than expected (`OVERDUE`), or that waits for an input or for memory. It
does not know of work that comes later: with shares and priorities such work may go first.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from pw.core.ids import serial_of
from pw.core.sharding import DeviceAddress
from pw.sched.island.admission import Admission
from pw.sched.island.client_queue import LAST
from pw.sched.island.in_flight import InFlight
from pw.sched.island.launch_states import LaunchState, SegmentTask
from pw.sched.island.launching import UNKNOWN_US
from pw.sched.island.lease_states import LeaseTable
from pw.sched.island.memory_report import held_by_clients
from pw.sched.island.policy import Policy
from pw.sched.island.queues import Queues
from pw.sched.island.window import CONTENDED_TIME_US, Account, SiteGroup, Stake

CLIENTS_TOLD = 32
"""Number of clients of an island in a forecast: those that go first."""
COMPARISONS = 1 << 13
"""Number of claims that a forecast compares, at most: the island's work waits for it, about 50 ms."""
OVERDUE, OVERDUE_S = 2.0, 0.1
"""Multiple of its expected time, and seconds beyond that, after which the end of a launch cannot be told."""

NO_RESULT_YET = "an input that is not there yet"
LENT = "the end of the launch lease of its hosts"
SUSPENDED = "its client to be resumed"
FOR_MEMORY = "device memory that others hold"


@dataclass(slots=True, eq=False)
class WaitingLaunch:
    """The oldest launch of a client that waits, and its place."""

    task: SegmentTask
    in_front: dict[int, int] = field(default_factory=dict)
    """Amounts of each client that are in front of it, by the client's number."""
    unit: str = "launches"
    left_s: float | None = None
    """Seconds until it has its devices; None if that cannot be told."""
    reasons: tuple[str, ...] = ()
    """What it waits for besides its turn."""
    more: int = 0
    """Number of later launches of the client that wait."""


@dataclass(slots=True, eq=False)
class _Claim:
    """A client's queue, as far as the policy looks at it; a forecast changes it."""

    stake: Stake
    priority: int
    waits_since_s: float
    tasks: deque[SegmentTask]
    copies: dict[SiteGroup, Account]
    """Copies of the accounts of all devices."""

    @property
    def head_arrival(self) -> int:
        return self.tasks[0].arrival if self.tasks else LAST

    @property
    def accounts(self) -> Sequence[Account]:
        return self._accounts_of(self.tasks[0]) if self.tasks else ()

    def _accounts_of(self, task: SegmentTask) -> list[Account]:
        for group in task.footprint.groups:
            if group not in self.copies:
                self.copies[group] = group.account.copy()
        return [self.copies[group] for group in task.footprint.groups]


@dataclass(eq=False)
class Forecast:
    """One forecast for one island."""

    policy: Policy
    admission: Admission
    in_flight: InFlight
    queues: Queues
    leases: LeaseTable
    now_s: float
    places: list[WaitingLaunch] = field(default_factory=list, init=False)
    """Places of all clients that wait, the next one first."""
    turns: list[SegmentTask] = field(default_factory=list, init=False)
    """Queued launches that may go, in the order in which they are expected to, as far as places ask for it."""
    clients_left_out: int = field(default=0, init=False)
    """Number of clients that wait behind these."""
    _busy_s: dict[SiteGroup, float] = field(default_factory=dict, init=False)
    """Seconds for which each device is busy with what is in front; inf if that cannot be told."""
    _last_s: dict[SiteGroup, float] = field(default_factory=dict, init=False)
    """Seconds until the last of the launches in front begins on each device."""
    _on: defaultdict[SiteGroup, Counter[int]] = field(
        default_factory=lambda: defaultdict(Counter), init=False
    )
    """Number of launches of each client that come first on each device."""
    _held: dict[DeviceAddress, Counter[int]] | None = field(default=None, init=False)
    """Bytes of each client on each device; None until something waits for memory."""
    _place_of: dict[int, WaitingLaunch] = field(default_factory=dict, init=False)
    """Places by client."""

    def __post_init__(self) -> None:
        self._look_at_flights()
        self._look_at_queues()

    # --- in flight -----------------------------------------------------------------------------------

    def _look_at_flights(self) -> None:
        for task in self.in_flight.launches.values():
            if task.passed_on:
                self._put(task, reasons=(NO_RESULT_YET,))
                continue
            expected_s = _expected_s(task)
            if any(group in self._busy_s for group in task.footprint.groups):
                self._put(task)
            else:
                ran_s = self.now_s - max(
                    (group.turn_s for group in task.footprint.groups), default=self.now_s
                )
                is_overdue = ran_s > OVERDUE * expected_s + OVERDUE_S
                expected_s = math.inf if is_overdue else max(0.0, expected_s - ran_s)
            self._occupy(task, math.inf if task.unfinished else expected_s)

    # --- queued --------------------------------------------------------------------------------------

    def _look_at_queues(self) -> None:
        copies: dict[SiteGroup, Account] = {}
        ready: list[_Claim] = []
        eligible: list[_Claim] = []
        held: list[tuple[SegmentTask, tuple[str, ...]]] = []
        for queue in self.queues.busy.values():
            tasks = deque(task for task in queue.tasks if isinstance(task, SegmentTask))
            if not tasks:
                continue
            head = tasks[0]
            place = self._place_of.get(queue.stake.client)
            if place is not None:
                place.more += len(tasks)
            reasons = (SUSPENDED,) if queue.holds(head) else tuple(self._obstacles(head))
            if reasons:
                held.append((head, reasons))
                continue
            claim = _Claim(queue.stake, queue.priority, queue.waits_since_s, tasks, copies)
            (ready if head.state is LaunchState.READY else eligible).append(claim)
        for contenders in (ready, eligible):
            self._go_through(contenders)
        for task, reasons in sorted(held, key=lambda one: one[0].arrival):
            self._hold(task, reasons)

    def _go_through(self, contenders: Sequence[_Claim]) -> None:
        """Give each of these clients its place, as the policy would launch them."""
        at_s = self.now_s
        claims: list[_Claim] = []
        unplaced: set[int] = set()
        for claim in self.policy.order(contenders, at_s):
            if claim.stake.client not in self._place_of:
                if len(self.places) + len(unplaced) >= CLIENTS_TOLD:
                    self.clients_left_out += 1
                    continue
                unplaced.add(claim.stake.client)
            claims.append(claim)
        comparisons = COMPARISONS
        while unplaced and comparisons > 0:
            comparisons -= len(claims)
            opens = (self._opens_s(claim.tasks[0]) for claim in claims)
            at_s = max(at_s, self.now_s + min((s for s in opens if s < math.inf), default=0.0))
            first = self.policy.order(claims, at_s)[0]
            task = first.tasks[0]
            self.turns.append(task)
            if first.stake.client in unplaced:
                unplaced.discard(first.stake.client)
                self._put(task, more=len(first.tasks) - 1)
            expected_s = _expected_s(task)
            self._occupy(task, math.inf if task.unfinished else expected_s)
            charged_us = expected_s * 1e6 if expected_s < math.inf else UNKNOWN_US
            self.policy.launched(first.stake, first.accounts, charged_us)
            first.tasks.popleft()
            first.waits_since_s = at_s
            if not first.tasks or first.tasks[0].state is not task.state:
                claims.remove(first)
        for claim in claims:  # it would take too long to say more than the order of now
            if claim.stake.client in unplaced:
                self._put(claim.tasks[0], more=len(claim.tasks) - 1, is_timed=False)

    def _hold(self, task: SegmentTask, reasons: tuple[str, ...]) -> None:
        """Give a place to a launch that waits for more than its turn."""
        if task.here.stake.client in self._place_of:
            return
        if len(self.places) >= CLIENTS_TOLD:
            self.clients_left_out += 1
            return
        place = self._put(task, reasons=reasons)
        place.more = sum(isinstance(one, SegmentTask) for one in self._queue_of(task)) - 1
        reservation = task.here.reservation
        if reservation is not None and reservation.tried_at >= 0 and not task.awaits:
            place.in_front, place.unit = self._holders(task), "bytes"
        elif reasons[0] == LENT:
            for host in task.hosts:
                if (lease := self.leases.holders.get(host)) is not None:
                    place.in_front.setdefault(lease.client, 0)

    def _queue_of(self, task: SegmentTask) -> Iterable[object]:
        return self.queues.clients[task.here.stake.client].tasks

    def _obstacles(self, head: SegmentTask) -> list[str]:
        """Return what the oldest launch of a client waits for besides its turn."""
        reasons = obstacles(head)
        if not reasons and not self.leases.are_free(head.hosts):
            reasons.append(LENT)
        return reasons

    def _holders(self, task: SegmentTask) -> dict[int, int]:
        """Return the bytes that each client has on the devices of a launch."""
        memory, reservation = self.admission.memory, task.here.reservation
        if memory is None or reservation is None:
            return {}
        if self._held is None:
            self._held = held_by_clients(memory)
        held: Counter[int] = Counter()
        for device, clients in self._held.items():
            if device in task.footprint.sites:
                held.update(clients)
        short = reservation.short or memory.total  # of a slice, of its tenant, or of all
        return {
            client: size_bytes
            for client, size_bytes in held.items()
            if short is memory.total or memory.totals.count(short, (client,))
        }

    # --- devices -------------------------------------------------------------------------------------

    def _start_s(self, task: SegmentTask) -> float:
        return max((self._busy_s.get(group, 0.0) for group in task.footprint.groups), default=0.0)

    def _opens_s(self, task: SegmentTask) -> float:
        """Return the seconds until the window has room for a launch: then the policy chooses."""
        opens = (
            min(self._last_s[group], self._busy_s[group] - CONTENDED_TIME_US * 1e-6)
            for group in task.footprint.groups
            if group in self._busy_s
        )
        return max(opens, default=0.0)

    def _put(
        self,
        task: SegmentTask,
        *,
        more: int = 0,
        reasons: tuple[str, ...] = (),
        is_timed: bool = True,
    ) -> WaitingLaunch:
        """Put a launch behind what its devices have in front, if it is the oldest of its client that waits."""
        client = task.here.stake.client
        if (place := self._place_of.get(client)) is not None:
            if task.state is LaunchState.IN_FLIGHT:
                place.more += 1
            return place
        in_front: Counter[int] = Counter()
        for group in task.footprint.groups:
            in_front |= self._on[group]
        start_s = self._start_s(task)
        is_known = is_timed and not reasons and not task.unfinished and start_s < math.inf
        place = WaitingLaunch(
            task, dict(in_front), "launches", start_s if is_known else None, reasons
        )
        place.more = more
        self._place_of[client] = place
        self.places.append(place)
        return place

    def _occupy(self, task: SegmentTask, expected_s: float) -> None:
        """Count a launch on its devices."""
        start_s = self._start_s(task)
        for group in task.footprint.groups:
            self._last_s[group], self._busy_s[group] = start_s, start_s + expected_s
            self._on[group][task.here.stake.client] += 1


def _expected_s(task: SegmentTask) -> float:
    """Return how long a launch takes, by earlier ones; inf if none has ended."""
    estimate_us = task.here.installed.estimates_us.get(task.segment)
    return math.inf if estimate_us is None else estimate_us * 1e-6


def obstacles(head: SegmentTask) -> list[str]:
    """Return what the launch at the head of a client's queue waits for besides its turn."""
    reasons = []
    reservation = head.here.reservation
    if head.awaits:
        arrays = ", ".join(str(serial_of(array)) for array in sorted(head.awaits))
        reasons.append(f"the upload of its arguments (array {arrays})")
    if head.unlaunched:
        producers = ", ".join(map(str, sorted(head.unlaunched)))
        reasons.append(f"part {producers} of the same program to be launched on another island")
    if head.state is LaunchState.REFUSED:
        reasons.append("its end: its program is in quarantine")
    if reservation is not None and not reservation.is_admitted:
        short = reservation.short
        if short is not None and short.tenant:
            reasons.append(f"device memory that its tenant {short.tenant!r} may have")
        elif short is not None and short.slice:
            reasons.append(f"device memory that slice {serial_of(short.slice)} may have (memory=)")
        elif reservation.tried_at >= 0:
            reasons.append(FOR_MEMORY)
        elif reservation.islands:
            names = ", ".join(reservation.islands)
            reasons.append(f"all of its islands ({names}) to have room for it")
    return reasons
