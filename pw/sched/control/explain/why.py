"""Why it does not go on: asks the schedulers and the hosts, and tells what they say as one story.

Theory of operation. Launched work waits only for work launched before it (G4). So what holds up everything
is found at the segment that was launched longest ago and has not ended: some host of its gang has not got
it, waits for an edge, has not enqueued it, or is in it. The schedulers say which segment that is, and what
the next ones wait for; then hosts are asked how far they are. A host that waits for an edge points to the
host at the other end, whose own report is compared with it: that shows a handshake of which only one side
knows.
A host that does not answer within `ANSWER_S` is an answer by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import msgspec

from pw.core.actor import Env
from pw.core.ids import Address, executor_of, run_name, scheduler_of, serial_of
from pw.core.messages import (
    Checkpoint,
    ClientReport,
    Explain,
    ExplainHost,
    ExplainIsland,
    Explanation,
    HostReport,
    HostSilence,
    IslandReport,
    IslandStatus,
    Run,
    SaveArrays,
)
from pw.sched.control.clients import Client
from pw.sched.control.explain.story import story
from pw.sched.control.ledger import Ledger
from pw.sched.island.reports import WORK_TOLD

ANSWER_S = 0.8
"""How long hosts have to answer."""
HOSTS_ASKED = 128


@dataclass(frozen=True, slots=True)
class Overdue:
    """Note to the controller: whoever has not answered by now does not."""

    question: int


@dataclass(slots=True)
class _Question:
    tell: Callable[[Explanation], None]
    run: int
    """What is to be explained; 0 for whatever does not go on."""
    hosts_awaited: tuple[str, ...]
    """Hosts from which the asker waits for something."""
    islands: set[str]
    """Those whose schedulers have not answered."""
    asked: set[str] = field(default_factory=set)
    work: list[IslandReport] = field(default_factory=list)
    hosts: dict[str, HostReport] = field(default_factory=dict)


class Explainer:
    """The controller's part that answers `Explain`.

    Args:
        env: the controller's.
        ledger: what the controller knows.
        island_status: describes all islands.
        heard_s: seconds since a node was heard last; None if that is not known.
    """

    def __init__(
        self,
        env: Env,
        ledger: Ledger,
        island_status: Callable[[], tuple[IslandStatus, ...]],
        heard_s: Callable[[str], float | None],
    ) -> None:
        self._env = env
        self._ledger = ledger
        self._island_status = island_status
        self._heard_s = heard_s
        self._questions: dict[int, _Question] = {}
        self._asked = 0
        self._logging = False

    def answer(self, asker: Address, message: Explain) -> None:
        """A client asks."""

        def tell(explanation: Explanation) -> None:
            answer = msgspec.structs.replace(explanation, request=message.request)
            self._env.send(asker, answer)

        self._ask(tell, hosts_awaited=message.hosts)

    def explain_run(self, run: int, tell: Callable[[str], None]) -> None:
        """Find out why a run has not ended."""
        self._ask(lambda explanation: tell(explanation.text), run=run)

    def log(self) -> None:
        """Something has stalled: find out why and write it to the log, unless that is under way."""
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
        run: int = 0,
        hosts_awaited: tuple[str, ...] = (),
    ) -> None:
        self._asked += 1
        question = _Question(tell, run, hosts_awaited, set(self._ledger.schedulers))
        self._questions[self._asked] = question
        for island in sorted(self._ledger.schedulers):
            self._env.send(scheduler_of(island), ExplainIsland(self._asked, run))
        if not question.islands:
            self._finish(self._asked)
        else:
            self._env.call_later(ANSWER_S, Overdue(self._asked))

    def island_reported(self, message: IslandReport) -> None:
        """A scheduler has answered; when all have, it is the hosts' turn."""
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

    def host_reported(self, host: str, message: HostReport) -> None:
        """A host has answered."""
        question = self._questions.get(message.request)
        if question is None or host not in question.asked or message.host != host:
            self._env.count("messages_stale")
            return
        question.hosts[host] = message
        if len(question.hosts) == len(question.asked):
            self._finish(message.request)

    def overdue(self, note: Overdue) -> None:
        """Tell what is known by now."""
        if note.question in self._questions:
            self._finish(note.question)

    def _finish(self, number: int) -> None:
        question = self._questions.pop(number)
        silent = []
        for host in sorted(question.asked - question.hosts.keys()):
            heard_s = self._heard_s(host)
            silent.append(HostSilence(host, -1.0 if heard_s is None else heard_s))
        facts = Explanation(
            0,
            "",
            self._island_status(),
            tuple(sorted(question.work, key=lambda report: report.island)),
            tuple(question.hosts[host] for host in sorted(question.hosts)),
            tuple(silent),
            tuple(self._about(client) for client in self._ledger.clients.values()),
        )
        lines = story(facts, question.hosts_awaited, question.run, self._run_name)
        question.tell(msgspec.structs.replace(facts, text="\n".join(lines)))

    def _run_name(self, run: int) -> str:
        """A run that is run again is still the same to its user."""
        state = self._ledger.runs.get(run)
        if state is None or state.record.order == run:
            return run_name(run)
        return f"{run_name(state.record.order)}, run again,"

    # --- clients -------------------------------------------------------------------------------------

    def _about(self, client: Client) -> ClientReport:
        return ClientReport(
            client.number,
            client.name,
            client.in_flight,
            len(client.backlog),
            tuple(self._obstacles(client)),
        )

    def _obstacles(self, client: Client) -> Iterator[str]:
        """What keeps the client's stream from being looked at, and its work from being queued."""
        if client.unbound:
            count = len(client.unbound)
            yield f"lost hosts of the island of {count} slice{'' if count == 1 else 's'}"
        elif client.lost:
            programs = [*client.programs.values(), *client.retired.values()]
            names = sorted({p.body.name for p in programs if p.installing})
            yield f"{len(client.lost)} lost arrays to be made again" + (
                f", when {', '.join(map(repr, names))} has been compiled" if names else ""
            )
        head = client.backlog[0] if client.backlog else None
        if isinstance(head, Run):
            program = client.programs.get(head.program)
            if program is not None and program.installing:
                where = ", ".join(sorted(program.installing))
                yield f"the compilation of {program.body.name!r} on {where}"
        elif isinstance(head, (Checkpoint, SaveArrays)):
            if client.awaits_uploads(head):
                yield "the uploads of what it checkpoints"
            elif client.awaits_checkpoints(head):
                doing = "written to disk" if isinstance(head, SaveArrays) else "copied"
                yield (
                    f"{client.unanswered[type(head)]} checkpoints that are still being {doing}, which takes "
                    "longer than the time between them"
                )
            elif isinstance(head, SaveArrays) and not client.recovering:
                yield f"an earlier checkpoint to be put in its place at {head.path}"
        arriving = [
            (number, array)
            for number, array in (*client.arrays.items(), *client.doomed.items())
            if array.uploading
        ]
        for number, array in arriving[:WORK_TOLD]:
            hosts = ", ".join(sorted(array.uploading))
            yield f"array {serial_of(number)} to arrive on {hosts}"
