"""Explains why work does not go on: asks the schedulers and the hosts, and has the story told.

Theory of operation. Launched work waits only for work launched before it (G4). So the oldest launch
that has not ended holds up everything: a host of its gang has not got it, waits for an edge, has
not enqueued it, or runs it. The schedulers report that launch and what the next ones wait for; then
hosts report how far they are. A host that waits for an edge names the host at the other end. The
reports of both ends are compared, which shows a handshake that only one side knows. That a host
does not answer in time is itself the answer. What the controller itself waits for is in the
states of its arrays and clients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice

from msgspec.structs import replace

from pw.core import messages as msg
from pw.core.actors.actor import handles
from pw.core.ids import (
    Address,
    client_of,
    executor_of,
    is_repeat,
    run_name,
    scheduler_of,
    serial_of,
)
from pw.core.messages.owners import visible
from pw.core.rights import Resource, in_words
from pw.sched.control.checkpoints.in_memory import Checkpoints
from pw.sched.control.checkpoints.on_disk import Saves
from pw.sched.control.client_order import ClientOrder
from pw.sched.control.clients import Client
from pw.sched.control.explain.inquiries import Inquiries, Inquiry
from pw.sched.control.explain.story import story
from pw.sched.control.runs import RunsInFlight
from pw.sched.control.sessions import ControlPart, handles_client
from pw.sched.control.slices import SliceRequests
from pw.sched.island.reports import WORK_TOLD

HOSTS_ASKED = 128
ARRAYS_LOOKED_AT = 4096
"""Number of arrays of each client that a report looks at: one that has not arrived is nearly always among the
newest."""


@dataclass(eq=False)
class Explainer(ControlPart):
    """Answers `Explain`."""

    inquiries: Inquiries
    slices: SliceRequests
    runs: RunsInFlight
    stream: ClientOrder
    checkpoints: Checkpoints
    saves: Saves
    island_status: Callable[[], tuple[msg.IslandInfo, ...]]
    heard_s: Callable[[str], float | None]

    def __post_init__(self) -> None:
        super().__post_init__()
        self._logging = False

    @handles_client(msg.Explain)
    def _explain(self, client: Client, message: msg.Explain) -> None:
        inquiry = self._inquire(client.number, request=message.request, awaited=message.hosts)
        self.inquiries.answer(client, message, inquiry)

    def explain_run(self, run: int, tell: Callable[[str], None]) -> None:
        """Tell in words why a run has not ended, at once or later."""
        inquiry = self._inquire(self.runs.in_flight[run].client, run=run)
        self.inquiries.begin(inquiry, lambda explanation: tell(explanation.text))

    @handles(msg.Stalled)
    def _stalled(self, sender: Address, message: msg.Stalled) -> None:
        """Write to the log why work does not go on, unless that is under way."""
        self._env.count("stalls")
        if not self._logging:
            self._logging = True
            self.inquiries.begin(self._inquire(), self._write)

    def _write(self, explanation: msg.Explanation) -> None:
        self._logging = False
        for line in explanation.text.splitlines():
            self._env.log("warning", "stalled", why=line)

    def _inquire(
        self, asker: int = 0, *, request: int = 0, awaited: Sequence[str] = (), run: int = 0
    ) -> Inquiry:
        """Explain what holds up a run, or the oldest launch.

        Args:
            asker: the client that is told; 0 for the log, which is told everything.
            request: the number of the asker's request.
            awaited: hosts from which the asker waits for something.
            run: the run that the question is about; 0 for the oldest launch.
        """
        ask = partial(msg.ExplainIsland, run=run)
        schedulers = map(scheduler_of, sorted(self._islands.schedulers))
        answers = yield msg.IslandReport, dict.fromkeys(schedulers, ask)
        work = sorted(answers.values(), key=lambda report: report.island)
        launched = [
            (launch, host) for report in work for launch in report.oldest for host in launch.hosts
        ]
        launched.sort(key=lambda pair: -pair[0].launched_s)
        members = [host for report in work for host in report.hosts]
        first = [host for _, host in launched] + [h for h in awaited if h in members]
        questions: dict[Address, Callable[[int], object]] = {}
        for host in list(dict.fromkeys([*first, *members]))[:HOSTS_ASKED]:
            theirs = tuple((one.run, one.segment) for one, other in launched if other == host)
            questions[executor_of(host)] = partial(msg.ExplainHost, work=theirs)
        answers = yield msg.HostReport, questions
        hosts = {at.node: report for at, report in answers.items() if report.host == at.node}
        silent = sorted({at.node for at in questions} - hosts.keys())
        everything = msg.Explanation(
            request,
            "",
            self.island_status(),
            tuple(work),
            tuple(hosts[host] for host in sorted(hosts)),
            tuple(msg.HostSilence(host, self._silent_s(host)) for host in silent),
            tuple(
                map(self._about, sorted(self.sessions.clients, key=lambda one: one.number != asker))
            ),
            tuple(self._left(asker, work)),
        )
        sees = self.sessions.sight(asker) if asker else lambda number: True
        facts = visible(everything, sees)
        lines = [*story(facts, awaited, run, self._run_name, asker)]
        clients = self.sessions.clients
        if hidden := sum(one.usage.runs for one in clients if not sees(one.number)):
            lines.append(f"not shown: {hidden} run{'' if hidden == 1 else 's'} of other tenants")
        return replace(facts, text="\n".join(lines))

    def _silent_s(self, host: str) -> float:
        heard_s = self.heard_s(host)
        return -1.0 if heard_s is None else heard_s

    def _run_name(self, number: int) -> str:
        """Return the name of the user's run, also where another run repeats it."""
        run = self.runs.in_flight.get(number)
        if run is None or run.record.order == number:
            return run_name(number)
        return f"{run_name(run.record.order)}, run again,"

    # --- clients ----------------------------------------------------------------------------------

    def _about(self, client: Client) -> msg.ClientReport:
        return msg.ClientReport(
            client.number,
            client.name,
            client.usage.runs,
            len(client.stream),
            tuple(self._waits_for(client)),
            self.sessions.silent_s(client),
            ""
            if client.suspension is None
            else client.suspension.in_words(client.number, self._env.now_s()),
            bool(client.slices.unbound or self.slices.unplaced(client))
            and not (client.suspension or client.left_for),
        )

    def _left(self, asker: int, work: Sequence[msg.IslandReport]) -> Iterator[tuple[str, int]]:
        """Yield what a client's long work still has to do, the work that all other waits for first."""
        client = self.sessions.get(asker)
        if client is None:
            return
        arriving = client.arrays.arriving(ARRAYS_LOOKED_AT)
        again = sum(is_repeat(one) and client_of(one) == asker for one in self.runs.in_flight)
        installing = [one for island in work for one in island.installing]
        counts = {
            "steps of the recovery are done": len(client.arrays.lost)
            + again
            + sum(array.restored for _, array in arriving),
            "compilations are done": sum(
                len(one.hosts) for one in installing if client_of(one.program) == asker
            ),
            "replicas are made": self.checkpoints.left(client),
            "files are written": self.saves.left(client),
        }
        yield from ((what, count) for what, count in counts.items() if count)

    def _waits_for(self, client: Client) -> Iterator[str]:
        """Return the reasons for which a client waits at the controller."""
        if client.is_suspended:
            return  # the story says by whom; all else waits for that
        if awaited := self.slices.awaited_hosts(client, self.island_status()):
            yield f"{' and '.join(awaited)}, which its slices name (hosts=), to come back"
        elif client.slices.unbound:
            if client.left_for:
                yield self.slices.wanted_in_words(client)
                return
            count = len(client.slices.unbound)
            yield f"lost hosts of the island of {count} slice{'' if count == 1 else 's'}"
        elif count := self.slices.unplaced(client):
            yield f"{count} device{'' if count == 1 else 's'} that no island has yet"
        elif count := self.slices.over_quota(client):
            rights = self.sessions.usage.rights.of(client.tenant)
            yield (
                f"{in_words(Resource.DEVICES, count)}, until tenant {client.tenant!r}, which may have "
                f"{rights.devices}, has given some back"
            )
        elif client.arrays.lost:
            programs = (*client.programs.values(), *client.retired.values())
            names = sorted({repr(p.body.name) for p in programs if p.installing})
            when = f", when {', '.join(names)} has been compiled" if names else ""
            yield f"{len(client.arrays.lost)} lost arrays to be made again{when}"
        backlog = client.stream.backlog
        if backlog and (not client.recovering or client.away is not None):
            yield self.stream.reason(client, backlog[0]) or "its turn"
        for number, array in islice(client.arrays.arriving(ARRAYS_LOOKED_AT), WORK_TOLD):
            hosts = ", ".join(sorted(array.awaited))
            before = f" ({array.history})" if array.past else ""
            yield f"array {serial_of(number)} to arrive on {hosts}{before}"
