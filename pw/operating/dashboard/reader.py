"""The one reader of a cluster: a session that asks the controller at most once a second, however many look.

Theory of operation. A thread has one session, with the rights of its credentials. Each second it asks one
question: in turn the status, the memory of devices and the counters of all processes;
a question of a person at the page (why, queue, plan) takes the place of one of them. While runs are in flight
it also records short samples (`pw.operating.dashboard.sampling`). Each answer makes a new `Snapshot`, which
replaces the one before. A controller that does not answer, or is started again, makes a snapshot that says so.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from pw.client.connection.runtime import Runtime
from pw.client.connection.threads import remote
from pw.core.errors import ArgumentError, Error
from pw.core.ids import CONTROLLER
from pw.core.messages import LogLine, Status
from pw.core.tenants import OPERATOR
from pw.operating.dashboard.happenings import EventThread, changes, words_of
from pw.operating.dashboard.sampling import Picture, Sample, pictured, summed
from pw.operating.dashboard.snapshot import (
    Happening,
    ProcessLine,
    Rates,
    Readings,
    Snapshot,
    WorkSample,
    snapshot,
)
from pw.operating.dashboard.sums import Totals, transfer_rates, work_between
from pw.operating.timeline import chrome
from pw.operating.timeline.resolve import resolved
from pw.operating.timeline.timeline import Timeline

PERIOD_S = 1.0
ANSWER_S = 5.0
AGAIN_S = 2.0
"""Seconds between the end of a session and the next session."""
SAMPLE_S = 0.4
LEAST_SAMPLE_S = 0.02
MANY = 20_000
"""Computations in a sample from which the next one is shorter."""
WATCHED_EVERY, ALONE_EVERY = 3, 12
"""Turns from one sample to the next, while a browser looks and while none does."""
SAMPLES_KEPT = 20
"""Samples that are kept for the matrix of transfers: about a minute."""
HISTORY = 300
HAPPENINGS = 60
LINES = 60
CLICKS = 8
"""Questions of people that may wait; more are refused."""
TRACE_S = 10.0
"""The longest timeline that the page records."""

Question = tuple[str, str]
"""Question (`why`, `queue` or `plan`), and the name of what it is about."""


class Busy(Error):
    """Too many people ask at once."""


@dataclass(eq=False)
class Reader:
    """Reads a cluster until it is closed; see the module."""

    address: str
    period_s: float = PERIOD_S
    wants_runs: bool = False
    """Whether to read an event for each run: metrics need them."""
    is_watched: Callable[[], bool] = lambda: True
    newest: Snapshot | None = field(default=None, init=False)
    picture: Picture | None = field(default=None, init=False)
    history: deque[Rates] = field(default_factory=lambda: deque(maxlen=HISTORY), init=False)
    readings: Readings = field(default_factory=Readings, init=False)
    totals: Totals = field(default_factory=Totals, init=False)
    """Sums of counters, by `controller` and `hosts`, and by tenant and island."""
    tenants: dict[str, None] = field(default_factory=dict, init=False)
    """All tenants that had clients here, in the order of their coming."""
    listeners: list[Callable[[Snapshot], None]] = field(default_factory=list, init=False)
    """Functions that take each new snapshot, on the reader's thread."""
    samplers: list[Callable[[Sample], None]] = field(default_factory=list, init=False)
    runs: list[Callable[[int, dict[str, Any]], None]] = field(default_factory=list, init=False)
    """Functions that take the client and the event of each run that has ended, on the reader's thread."""

    def __post_init__(self) -> None:
        self._status: Status | None = None
        self._tenant = ""
        self._session: Runtime | None = None
        self._events: EventThread | None = None
        self._closing = threading.Event()
        self._clicks: dict[Question, Future[Any]] = {}
        self._guard = threading.Lock()
        self._tracing = threading.Lock()
        self._sent: deque[tuple[float, dict[tuple[str, str], int]]] = deque(maxlen=SAMPLES_KEPT)
        self._sample_s = SAMPLE_S
        self._worked = (0, 0.0)
        self._read_s = 0.0
        """Time of the last reading of counters, in seconds since 1970."""
        self._counted: tuple[float, dict[str, int]] = (0.0, {})
        self._happenings: deque[Happening] = deque(maxlen=HAPPENINGS)
        self._lines: dict[tuple[str, LogLine], None] = {}
        """Lines of processes, also of those that are gone."""
        self._looked_s = 0.0
        self._work: WorkSample | None = None
        """Work since the last snapshot; None once it is published."""
        self._recovering: Counter[int] = Counter()
        self._answered = threading.Event()
        self._trouble = ""
        self._thread = threading.Thread(target=self._main, name="pw-reader", daemon=True)

    # --- for other threads ---------------------------------------------------------------------------

    def start(self, timeout_s: float) -> None:
        """Begin; return when there is a snapshot. Raises the error of a session that cannot begin."""
        self._session = self._connect(timeout_s)
        self._thread.start()
        self._answered.wait(timeout_s)

    def close(self) -> None:
        """End the session and the thread."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join(2 * ANSWER_S)

    def ask(self, what: str, name: str = "") -> Future[Any]:
        """Ask `why`, for the `queue`, or for the `plan` of a program; equal questions share an answer.

        Raises:
            Busy: too many questions wait.
        """
        question = what, name
        with self._guard:
            if question not in self._clicks:
                if len(self._clicks) >= CLICKS:
                    raise Busy("many people ask at the moment; try again in a few seconds")
                self._clicks[question] = Future()
            return self._clicks[question]

    def trace(self, path: Path, seconds: float) -> str:
        """Record a timeline into a file for Perfetto, and return its summary; waits until it is done.

        Raises:
            Busy: another one is being recorded.
            ArgumentError: it would be too long.
            Error: there is no session with the controller.
        """
        if not 0.0 < seconds <= TRACE_S:
            raise ArgumentError(f"a timeline may take from 0 to {TRACE_S:g} s, not {seconds:g}")
        session = self._session
        if session is None:
            raise Error(self._trouble or "there is no session with the controller")
        if not self._tracing.acquire(blocking=False):
            raise Busy("a timeline is being recorded; wait until it has ended")
        try:
            timeline = self._recorded(session, seconds)
        finally:
            self._tracing.release()
        chrome.write(timeline, path)
        return timeline.summary

    # --- the thread ----------------------------------------------------------------------------------

    def _main(self) -> None:
        turn = 0
        while not self._closing.is_set():
            began_s = time.monotonic()
            try:
                if self._session is None:
                    self._session = self._connect(ANSWER_S)
                self._turn(self._session, turn)
                self._trouble = ""
            except (Error, TimeoutError) as error:
                self._trouble = str(error) or "the controller does not answer"
                self._publish()
                if self._session is None or not self._session.alive:
                    self._disconnect()
                    self._closing.wait(AGAIN_S)
            turn += 1
            self._closing.wait(max(0.05, self.period_s - (time.monotonic() - began_s)))
        self._disconnect()

    def _connect(self, timeout_s: float) -> Runtime:
        return Runtime(remote(self.address), 1.0, 0, timeout_s, worker_output=False, name=NAME)

    def _disconnect(self) -> None:
        session, self._session = self._session, None
        events, self._events = self._events, None
        if events is not None:
            events.close()
        if session is not None:
            with contextlib.suppress(Error):
                session.close()

    def _turn(self, session: Runtime, turn: int) -> None:
        """Ask one question, then record a sample if it is time."""
        with self._guard:
            click = next(iter(self._clicks.items()), None) if turn % 2 else None
        if click is not None:
            self._answer(session, *click)
        elif turn % 5 == 3:
            self.readings.memory = session.ask.memory(ANSWER_S)
        elif turn % 5 == 4:
            for node, reply in session.ask.stats(ANSWER_S).items():
                self._count(node, reply.counters)
                for line in reply.lines:
                    self._lines.setdefault((node, line))
            self._read_s = time.time()
        else:
            self._look(session.ask.status(ANSWER_S))
        if self._events is not None:
            self._hear(self._events)
        every = WATCHED_EVERY if self.is_watched() else ALONE_EVERY
        if turn % every == 1 and self._has_worked():
            self._sample(session)
        self._publish()

    def _answer(self, session: Runtime, question: Question, answer: Future[Any]) -> None:
        what, name = question
        try:
            reply: Any
            if what == "why":
                reply = session.ask.explain(ANSWER_S)
            elif what == "queue":
                reply = session.ask.queue(ANSWER_S)
            else:
                reply = session.ask.plan(name, 0, ANSWER_S)
        except Error as error:
            answer.set_exception(error)
        else:
            answer.set_result(reply)
        with self._guard:
            del self._clicks[question]

    def _look(self, status: Status) -> None:
        before, self._status = self._status, status
        now_s = time.time()
        if before is not None:
            self._work = WorkSample(self._looked_s, now_s, work_between(before, status))
        self._looked_s = now_s
        mine = next((client.tenant for client in status.clients if client.is_me), OPERATOR)
        self._tenant = "" if mine == OPERATOR else mine
        for client in status.clients:
            use = client.use
            counts = {"launches": use.launches, "waited_s": use.waited_s, "device_s": use.device_s}
            self.totals.take(client.number, ("tenant", client.tenant), counts)
            self.tenants[client.tenant] = None
        for tenant in status.tenants:
            moved = {"moved_bytes": tenant.spent.get("moved_bytes", 0.0)}
            self.totals.take(("moved", tenant.name), ("tenant", tenant.name), moved)
        for island in status.islands:
            self.totals.take(
                ("island", island.name),
                ("island", island.name),
                {"device_s": island.device_s, "formed": island.formed},
            )
        if self._events is None and status.events and _is_reachable(status.events):
            self._events = EventThread(status.events, self.wants_runs)
            self.readings.has_events = True
        if self._events is None and before is not None:
            self._happenings.extend(changes(before, status, now_s))
        self._answered.set()

    def _count(self, node: str, counters: Mapping[str, int]) -> None:
        if "lost" not in counters:
            group = "controller" if node == CONTROLLER else "hosts"
            self.totals.take(node, group, counters)

    def _hear(self, events: EventThread) -> None:
        for topic, time_s, event in events.take():
            if topic == "run" and event["what"] in ("ended", "failed"):
                for listener in self.runs:
                    listener(event["client"], event | {"time_s": time_s})
            if topic == "recovery":
                began = event["what"] == "began"
                self._recovering[event["client"]] = int(began)
            if (words := words_of(topic, event)) is not None:
                self._happenings.append(Happening(time_s, topic, event["what"], words))

    # --- samples -------------------------------------------------------------------------------------

    def _has_worked(self) -> bool:
        """Whether something is in flight, or has ended since the last sample."""
        status = self._status
        if status is None:
            return False
        worked = (
            sum(island.launched + island.queued for island in status.islands),
            sum(island.device_s for island in status.islands),
        )
        before, self._worked = self._worked, worked
        idle = not worked[0] and worked[1] == before[1]
        if idle and self.readings.sample is not None and self.readings.sample.busy:
            self.readings.sample = Sample(SAMPLE_S, 0, {}, {}, {}, [], [])
            self.readings.transfers = ()
            self._sent.clear()
        return not idle

    def _sample(self, session: Runtime) -> None:
        if not self._tracing.acquire(blocking=False):
            return  # a person records a timeline
        try:
            timeline = self._recorded(session, self._sample_s)
        finally:
            self._tracing.release()
        now_s, readings = time.time(), self.readings
        sample = summed(timeline)
        if sample.computations > MANY:
            self._sample_s = max(LEAST_SAMPLE_S, self._sample_s / 2)
        elif sample.computations < MANY // 4:
            self._sample_s = min(SAMPLE_S, self._sample_s * 2)
        self._sent.append((sample.length_s, sample.sent))
        readings.sample, readings.sampled_s = sample, now_s
        readings.samples += 1
        readings.transfers = transfer_rates(self._sent)
        self.picture = pictured(timeline, readings.samples, now_s)
        for sampler in self.samplers:
            sampler(sample)

    def _recorded(self, session: Runtime, seconds: float) -> Timeline:
        names = {} if self._status is None else {c.number: c.name for c in self._status.clients}
        number = session.ask.start_timeline(ANSWER_S)
        began_s = time.monotonic()
        self._closing.wait(seconds)
        ended_s = time.monotonic()
        return resolved(session.ask.stop_timeline(number, ANSWER_S), names, began_s, ended_s)

    # --- snapshots -----------------------------------------------------------------------------------

    def _publish(self) -> None:
        status, readings, now_s = self._status, self.readings, time.time()
        if status is None:
            return
        hosts, controller = self.totals.of("hosts"), self.totals.of("controller")
        readings.counters = {name: int(value) for name, value in hosts.items()} | {
            f"controller_{name}": int(value) for name, value in controller.items()
        }
        readings.happenings = tuple(self._happenings)
        newest = sorted(self._lines, key=lambda one: one[1].time_s)[-LINES:]
        self._lines = dict.fromkeys(newest)
        readings.lines = tuple(
            ProcessLine(node, *msgspec.structs.astuple(one)) for node, one in newest
        )
        readings.recoveries = sum(self._recovering.values())
        readings.rates = self._rates(status, now_s)
        new = snapshot(
            status,
            readings,
            time_s=now_s,
            address=self.address,
            trouble=self._trouble,
            tenant=self._tenant,
        )
        self.history.append(readings.rates)
        self.newest = new
        for listener in self.listeners:
            listener(new)

    def _rates(self, status: Status, now_s: float) -> Rates:
        """Return what has happened in a second, between the last two times that counters were read."""
        sums = self.readings.counters
        seen = {
            "runs": sums.get("controller_runs", 0),
            "launches": sums.get("controller_launches", 0),
            "sent": sums.get("bulk_sent_bytes", 0),
        }
        before, rates = self._counted, self.readings.rates
        queued = sum(island.queued for island in status.islands)
        in_flight = sum(client.runs for client in status.clients) + status.hidden_runs
        sample = self.readings.sample
        devices = max(1, sum(island.devices for island in status.islands))
        use = None if sample is None else sum(sample.busy.values()) / devices
        work, self._work = self._work, None
        rates = replace(rates, time_s=now_s, queued=queued, in_flight=in_flight, use=use, work=work)
        if before[0] == self._read_s:
            return rates
        self._counted = self._read_s, seen
        if not before[0]:
            return rates
        passed_s = max(1e-3, self._read_s - before[0])
        runs, launches, sent = ((seen[name] - before[1][name]) / passed_s for name in seen)
        return replace(rates, runs=runs, launches=launches, sent_bytes=sent)


NAME = "pw dashboard"


def _is_reachable(endpoint: str) -> bool:
    """Whether events at an endpoint can be read by this process."""
    return not endpoint.startswith("ipc://") or os.access(
        endpoint.removeprefix("ipc://"), os.R_OK | os.W_OK
    )
