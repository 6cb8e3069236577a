"""Answers why work does not go on: asks the schedulers and the hosts, and has the story told.

Theory of operation. Launched work waits only for work launched before it (G4). So the oldest launch
that has not ended holds up everything: a host of its gang has not got it, waits for an edge, has
not enqueued it, or runs it. The schedulers report that launch and what the next ones wait for; then
hosts report how far they are. A host that waits for an edge names the host at the other end. The
reports of both ends are compared, which shows a handshake that only one side knows. That a host
does not answer within `ANSWER_S` is an answer by itself. What the controller itself waits for is in
the states of its arrays and clients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import islice

import msgspec

from pw.core.actors.actor import handles
from pw.core.ids import Address, executor_of, run_name, scheduler_of, serial_of
from pw.core.messages import (
    ClientReport,
    Explain,
    ExplainHost,
    ExplainIsland,
    Explanation,
    HostReport,
    HostSilence,
    IslandInfo,
    IslandReport,
    Stalled,
)
from pw.core.tenants import OPERATOR
from pw.sched.control.clients import Client
from pw.sched.control.explain.hiding import without_others
from pw.sched.control.explain.limits import may_ask
from pw.sched.control.explain.story import story
from pw.sched.control.runs import Runs
from pw.sched.control.sessions import ControlPart, handles_client, handles_host
from pw.sched.control.slices import Slices
from pw.sched.control.stream import Stream
from pw.sched.island.reports import WORK_TOLD

ANSWER_S = 0.8
"""How long hosts have to answer."""
HOSTS_ASKED = 128
ARRAYS_LOOKED_AT = 4096
"""The newest arrays of each client: one that has not arrived is nearly always among them."""


@dataclass(slots=True)
class _Question:
    tell: Callable[[Explanation], None]
    run: int
    """The run that the question is about; 0 for the oldest launch."""
    hosts_awaited: tuple[str, ...]
    """Hosts from which the asker waits for something."""
    asker: int
    """The client that is told; 0 for the log, which is told everything."""
    islands: set[str]
    """Those whose schedulers have not answered."""
    asked: set[str] = field(default_factory=set)
    work: list[IslandReport] = field(default_factory=list)
    hosts: dict[str, HostReport] = field(default_factory=dict)


@dataclass(eq=False)
class Explainer(ControlPart):
    """Answers `Explain`; see the module."""

    slices: Slices
    runs: Runs
    stream: Stream
    island_status: Callable[[], tuple[IslandInfo, ...]]
    heard_s: Callable[[str], float | None]

    def __post_init__(self) -> None:
        super().__post_init__()
        self._questions: dict[int, _Question] = {}
        self._asked = 0
        self._logging = False

    @handles_client(Explain)
    def _explain(self, client: Client, message: Explain) -> None:
        theirs = [q for q in self._questions.values() if q.asker == client.number and not q.run]
        if not may_ask(self.sessions, client, message, len(theirs)):
            return

        def tell(explanation: Explanation) -> None:
            answer = msgspec.structs.replace(explanation, request=message.request)
            self._env.send(client.address, answer)

        self._ask(tell, asker=client.number, hosts_awaited=message.hosts)

    def explain_run(self, run: int, tell: Callable[[str], None]) -> None:
        """Tell in words why a run has not ended, at once or later."""
        known = self.runs.in_flight[run]
        self._ask(lambda explanation: tell(explanation.text), asker=known.client, run=run)

    @handles(Stalled)
    def _stalled(self, sender: Address, message: Stalled) -> None:
        """Write to the log why work does not go on, unless that is under way."""
        self._env.count("stalls")
        if not self._logging:
            self._logging = True
            self._ask(self._write)

    def _write(self, explanation: Explanation) -> None:
        self._logging = False
        for line in explanation.text.splitlines():
            self._env.log("warning", "stalled", why=line)

    def _ask(
        self,
        tell: Callable[[Explanation], None],
        *,
        asker: int = 0,
        run: int = 0,
        hosts_awaited: tuple[str, ...] = (),
    ) -> None:
        self._asked += 1
        question = _Question(tell, run, hosts_awaited, asker, set(self._islands.schedulers))
        self._questions[self._asked] = question
        for island in sorted(self._islands.schedulers):
            self._env.send(scheduler_of(island), ExplainIsland(self._asked, run))
        if not question.islands:
            self._finish(self._asked)
        else:
            self._env.call_later(ANSWER_S, partial(self._overdue, self._asked))

    @handles(IslandReport)
    def _island_reported(self, sender: Address, message: IslandReport) -> None:
        """A scheduler has answered; when all have, ask the hosts."""
        question = self._questions.get(message.request)
        if question is None:
            return
        question.islands.discard(message.island)
        question.work.append(message)
        if not question.islands:
            self._ask_hosts(message.request, question)

    def _ask_hosts(self, number: int, question: _Question) -> None:
        launched = [
            (work, host)
            for report in question.work
            for work in report.oldest
            for host in work.hosts
        ]
        launched.sort(key=lambda pair: -pair[0].launched_s)
        members = [host for report in question.work for host in report.hosts]
        first = [host for _, host in launched] + [h for h in question.hosts_awaited if h in members]
        hosts = list(dict.fromkeys([*first, *members]))[:HOSTS_ASKED]
        question.asked.update(hosts)
        for host in hosts:
            theirs = tuple((work.run, work.segment) for work, other in launched if other == host)
            self._env.send(executor_of(host), ExplainHost(number, theirs))
        if not hosts:
            self._finish(number)

    @handles_host(HostReport)
    def _host_reported(self, host: str, message: HostReport) -> None:
        """A host has answered."""
        question = self._questions.get(message.request)
        if question is None or host not in question.asked or message.host != host:
            self._env.count("messages_stale")
            return
        question.hosts[host] = message
        if len(question.hosts) == len(question.asked):
            self._finish(message.request)

    def _overdue(self, question: int) -> None:
        """Hosts that have not answered a question by now do not."""
        if question in self._questions:
            self._finish(question)

    def _finish(self, number: int) -> None:
        question = self._questions.pop(number)
        silent = []
        for host in sorted(question.asked - question.hosts.keys()):
            heard_s = self.heard_s(host)
            silent.append(HostSilence(host, -1.0 if heard_s is None else heard_s))
        used = self.runs.used_credits()
        facts = Explanation(
            0,
            "",
            self.island_status(),
            tuple(sorted(question.work, key=lambda report: report.island)),
            tuple(question.hosts[host] for host in sorted(question.hosts)),
            tuple(silent),
            tuple(self._about(client, used[client.number]) for client in self.sessions.clients),
        )
        asker = self.sessions.get(question.asker)
        hidden = 0
        if question.asker and (asker is None or asker.tenant != OPERATOR):
            sees = self.sessions.sight(question.asker)
            facts = without_others(facts, sees)
            hidden = sum(runs for number, runs in used.items() if not sees(number))
        lines = [*story(facts, question.hosts_awaited, question.run, self._run_name)]
        if hidden:
            lines.append(f"not shown: {hidden} run{'' if hidden == 1 else 's'} of other tenants")
        question.tell(msgspec.structs.replace(facts, text="\n".join(lines)))

    def _run_name(self, number: int) -> str:
        """Return the name of the user's run, also where another run repeats it."""
        run = self.runs.in_flight.get(number)
        if run is None or run.record.order == number:
            return run_name(number)
        return f"{run_name(run.record.order)}, run again,"

    # --- clients ----------------------------------------------------------------------------------

    def _about(self, client: Client, used_credits: int) -> ClientReport:
        return ClientReport(
            client.number,
            client.name,
            used_credits,
            len(client.backlog),
            tuple(self._waits_for(client)),
        )

    def _waits_for(self, client: Client) -> Iterator[str]:
        """What a client waits for at the controller."""
        if awaited := self.slices.awaited_hosts(client, self.island_status()):
            yield f"{' and '.join(awaited)}, which its slices name (hosts=), to come back"
        elif client.slices.unbound:
            count = len(client.slices.unbound)
            yield f"lost hosts of the island of {count} slice{'' if count == 1 else 's'}"
        elif client.arrays.lost:
            programs = (*client.programs.values(), *client.retired.values())
            names = sorted({repr(p.body.name) for p in programs if p.installing})
            when = f", when {', '.join(names)} has been compiled" if names else ""
            yield f"{len(client.arrays.lost)} lost arrays to be made again{when}"
        if client.backlog and not client.recovering:
            yield self.stream.obstacle(client, client.backlog[0]) or "its turn"
        for number, array in islice(client.arrays.arriving(ARRAYS_LOOKED_AT), WORK_TOLD):
            hosts = ", ".join(sorted(array.awaited))
            before = f" ({array.history})" if array.past else ""
            yield f"array {serial_of(number)} to arrive on {hosts}{before}"
