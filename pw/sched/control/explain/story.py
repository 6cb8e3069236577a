"""Tells what schedulers and hosts have reported as one story: the most likely culprit first, then details.

Pure: the same reports give the same words. Everything that can hold up a launched segment on one
host is a *finding* with a weight; the lightest one of the segment that was launched longest ago is
the verdict, because what is certainly wrong (nobody answers, a handshake of which only one side
knows) weighs less than what may just take its time (a computation that runs).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from pw.core.ids import client_of, run_name
from pw.core.messages import (
    EdgeReport,
    Explanation,
    HostReport,
    IslandStatus,
    LaunchReport,
    ThreadReport,
    WorkReport,
)

BUSY_S = 1.0
"""What has gone on so lately is no stall."""

SILENT, BROKEN, LATE, BEHIND, AT_WORK = range(5)


@dataclass(frozen=True, slots=True, order=True)
class Finding:
    """What one host is found to hold up."""

    weight: int
    host: str
    words: str


def story(
    facts: Explanation,
    hosts_awaited: Sequence[str] = (),
    run: int = 0,
    run_name: Callable[[int], str] = run_name,
) -> Iterator[str]:
    """The lines of the text.

    Args:
        facts: what was reported; its own text is not looked at.
        hosts_awaited: hosts from which the asker waits for something.
        run: what the verdict is to be about; 0 for whatever was launched longest ago.
        run_name: what people call a run.
    """
    return _Story(facts, hosts_awaited, run, run_name).lines()


class _Story:
    def __init__(
        self,
        facts: Explanation,
        hosts_awaited: Sequence[str],
        run: int,
        name: Callable[[int], str],
    ) -> None:
        self._facts = facts
        self._awaited = hosts_awaited
        self._run_name = name
        self._hosts = {report.host: report for report in facts.hosts}
        self._silent = {silence.host: silence.silent_s for silence in facts.silent}
        work = [work for report in facts.work for work in report.oldest]
        self._oldest = sorted(work, key=lambda one: (one.run != run, -one.launched_s))
        self._clients = {client.client: client.name for client in facts.clients}

    def lines(self) -> Iterator[str]:
        """The verdict, then islands, hosts and clients."""
        yield self._verdict()
        yield from self._work()
        for host in self._facts.hosts:
            yield from self._host(host)
        yield from (f"{host}: does not answer{_heard(s)}" for host, s in self._silent.items())
        yield from (_island(island) for island in self._facts.islands if island.state != "ready")
        for client in self._facts.clients:
            if client.waits_for or client.held:
                yield (
                    f"client {client.client} ({client.name}): {_counted(client.runs_in_flight, 'run')} in "
                    f"flight, {_counted(client.held, 'message')} held; waits for "
                    f"{' and '.join(client.waits_for) or 'its turn'}"
                )

    # --- the verdict ------------------------------------------------------------------------------

    def _verdict(self) -> str:
        for work in self._oldest:
            found = sorted(finding for host in work.hosts for finding in self._findings(work, host))
            if not found:
                continue
            if found[0].weight > BROKEN and work.launched_s < BUSY_S:
                return (
                    f"Work goes on: the oldest is {self._named(work)}, launched "
                    f"{_seconds(work.launched_s)} ago"
                )
            return (
                f"{found[0].words}. That is why {self._named(work)} has not ended, launched "
                f"{_seconds(work.launched_s)} ago on {', '.join(work.hosts)}"
            )
        return self._unlaunched() or (
            "Work goes on: what was asked about has just ended"
            if self._oldest
            else "Nothing is under way"
        )

    def _unlaunched(self) -> str:
        """What is wrong though nothing that is launched shows it."""
        awaited = [host for host in self._awaited if host in self._silent]
        for host in [*awaited, *self._silent]:
            waits = "; this client waits for it" if host in awaited else ""
            return f"{host} does not answer{_heard(self._silent[host])}{waits}"
        absent = [island for island in self._facts.islands if island.state != "ready"]
        for client in self._facts.clients:
            if client.waits_for:
                why = f": {_island(absent[0])}" if absent else ""
                return (
                    f"client {client.client} ({client.name}) waits for {client.waits_for[0]}{why}"
                )
        for report in self._facts.work:
            for work in report.heads:
                return f"{self._named(work)} waits for {' and '.join(work.waits_for)}"
        return _island(absent[0]) if absent else ""

    def _findings(self, work: WorkReport, host: str) -> Iterator[Finding]:
        """What holds up this segment on this host."""
        who, what = _holder(work, host), _computed(work)
        report = self._hosts.get(host)
        if report is None:
            yield self._no_answer(host, who)
            return
        launch = _launch(report, work)
        state = launch.state if launch is not None else "missing"
        busy = _busy(report.threads)
        if report.state:
            yield Finding(SILENT, host, f"{who} does nothing: {report.state}")
        elif state == "missing":
            yield Finding(BROKEN, host, f"{who} has not got the launch of {what}")
        elif state in ("waiting", "queued"):
            head = _before(report, work.run)
            behind = "" if head is launch else f"; {what} is queued behind {self._launched(head)}"
            yield from self._queued(report, who, what, head, behind)
        elif state == "handed over" and not _is_at(report, work):
            yield Finding(LATE, host, f"{who} has not enqueued {what}{busy}")
        elif state != "finished":
            weight = LATE if _runs_python(report) else AT_WORK
            yield Finding(weight, host, f"{who} has not finished {what}{busy}")

    def _no_answer(self, host: str, who: str) -> Finding:
        if host in self._silent:
            return Finding(SILENT, host, f"{who} does not answer{_heard(self._silent[host])}")
        return Finding(BEHIND, host, f"{who} was not asked")

    def _queued(
        self, report: HostReport, who: str, what: str, head: LaunchReport, behind: str
    ) -> Iterator[Finding]:
        """Why what is not handed over has to wait: for itself, or behind a head that waits."""
        found = [self._edge(report.host, edge) for edge in _awaited(report, head)]
        for name in head.unsettled:
            words = f"{who} waits for the end of {name!r}{_busy(report.threads)}"
            found.append(Finding(LATE, report.host, words))
        if not found:
            words = f"{who} has not handed {what} to its devices"
            found.append(Finding(BEHIND, report.host, words))
        for finding in found:
            yield Finding(finding.weight, finding.host, finding.words + behind)

    def _edge(self, host: str, edge: EdgeReport) -> Finding:
        """Compare what both ends of a route say."""
        peer, what = edge.peer, _edge(edge)
        there = self._hosts.get(peer)
        if there is None:
            silent = self._no_answer(peer, peer)
            words = f"{silent.words}, and {host} waits for {what} from it"
            return Finding(silent.weight, peer, words)
        if there.state:
            words = f"{peer} does nothing: {there.state}; {host} waits for {what} from it"
            return Finding(SILENT, peer, words)
        state = ""
        for end in there.edges:
            if not end.incoming and (end.run, end.edge, end.peer) == (edge.run, edge.edge, host):
                state = end.state
        if state == "no credit" and edge.state == "credit sent":
            words = (
                f"{peer} has not delivered {what} to {host}: it was not told where to put it, though {host} "
                f"has told it {_seconds(edge.open_s)} ago. That was lost on its way"
            )
            return Finding(BROKEN, peer, words)
        if state == "sending":
            moved = f"{edge.received_bytes} of {edge.size_bytes} bytes are there"
            return Finding(BEHIND, peer, f"{peer} is sending {what} to {host}, {moved}")
        if state == "no value":
            words = f"{peer} does not have {what} yet, which {host} waits for{_busy(there.threads)}"
            return Finding(LATE, peer, words)
        if (held_up := _behind(there, edge.run)) is not None:
            words = f"{peer} has not come to sending {what} to {host}"
            return Finding(LATE, peer, f"{words}; it waits at {self._launched(held_up)}")
        words = (
            f"{peer} has not delivered {what} to {host}, and has nothing left to send: either it has not been "
            "launched there, or it was lost on its way"
        )
        return Finding(BROKEN, peer, words)

    # --- details ----------------------------------------------------------------------------------

    def _work(self) -> Iterator[str]:
        """What is launched, queued and compiled on each island."""
        for report in self._facts.work:
            if report.oldest:
                yield (
                    f"launched on {report.island}: {_counted(report.launched, 'piece')} of work; nothing was "
                    f"launched or ended for {_seconds(report.quiet_s)}"
                )
            for work in report.oldest:
                yield f"  {self._named(work)}, launched {_seconds(work.launched_s)} ago"
                for host in work.hosts:
                    yield f"    {_holder(work, host)}: {self._state(work, host)}"
            if report.heads:
                yield f"queued on {report.island}: {_counted(report.queued, 'piece')} of work"
            for work in report.heads:
                yield f"  {self._named(work)} waits for {' and '.join(work.waits_for)}"
            for install in report.installing:
                yield (
                    f"program {install.name!r} of {self._client(install.program)} has not been compiled by "
                    f"{', '.join(install.hosts)}"
                )

    def _state(self, work: WorkReport, host: str) -> str:
        report = self._hosts.get(host)
        if report is None:
            return f"no answer{_heard(self._silent[host])}" if host in self._silent else "not asked"
        launch = _launch(report, work)
        if launch is None or launch.state == "missing":
            return "has not got the launch"
        if launch.state == "waiting":
            waits = [f"{_edge(e)} from {e.peer} ({_state(e)})" for e in _awaited(report, launch)]
            waits += [f"the end of {name!r}" for name in launch.unsettled]
            if not waits and launch.waits_for:
                waits = ["bytes that are being assembled"]
            return f"waits for {', '.join(waits) or 'its turn'}"
        if launch.state == "handed over" and _is_at(report, work):
            return "entered"
        return launch.state

    def _host(self, report: HostReport) -> Iterator[str]:
        """A host that has something to tell."""
        if not (report.state or report.queued or report.threads or report.edges):
            return
        yield (
            f"{report.host}: {report.state or 'in its island'}, {_counted(report.queued, 'launch', 'es')} "
            f"queued; nothing was handed over for {_seconds(report.quiet_s)}"
        )
        for edge in report.edges:
            way = "from" if edge.incoming else "to"
            yield (
                f"  {_edge(edge)} of run {self._run_name(edge.run)} {way} {edge.peer}: {_state(edge)}"
                + (f", {edge.received_bytes} bytes are here" if edge.incoming else "")
                + f", open for {_seconds(edge.open_s)}"
            )
        for thread in report.threads:
            yield f"  {thread.thread}: at {thread.doing} for {_seconds(thread.busy_s)}"
            yield from (f"      {call}" for call in thread.stack)

    def _named(self, work: WorkReport) -> str:
        return (
            f"{_computed(work)} (run {self._run_name(work.run)} of {self._client(work.run)}, program "
            f"{work.program!r})"
        )

    def _launched(self, launch: LaunchReport) -> str:
        names = ", ".join(map(repr, launch.computations)) or launch.program
        return f"{names} (run {self._run_name(launch.run)})"

    def _client(self, identifier: int) -> str:
        number = client_of(identifier)
        name = self._clients.get(number)
        return f"client {number} ({name})" if name else f"client {number}"


def _launch(report: HostReport, work: WorkReport) -> LaunchReport | None:
    for launch in report.launches:
        if (launch.run, launch.segment) == (work.run, work.segment):
            return launch
    return None


def _before(report: HostReport, run: int) -> LaunchReport:
    """What holds up work of a run's client on a host: its own that waits, or as a gang the oldest that does."""
    waiting = [launch for launch in report.launches if launch.state == "waiting"]
    own = [launch for launch in waiting if client_of(launch.run) == client_of(run)]
    return (own or waiting or list(report.launches))[0]


def _behind(report: HostReport, run: int) -> LaunchReport | None:
    """What holds up a run's client on a host; None if all that it was sent has been handed over."""
    waiting = (launch for launch in report.launches if launch.state in ("waiting", "queued"))
    is_held = any(client_of(launch.run) == client_of(run) for launch in waiting)
    return _before(report, run) if is_held else None


def _awaited(report: HostReport, launch: LaunchReport) -> list[EdgeReport]:
    """The open edges that a launch waits for."""
    return [e for e in report.edges if e.incoming and (e.run, e.edge) in launch.waits_for]


def _is_at(report: HostReport, work: WorkReport) -> bool:
    """Whether a thread of the host is in one of the segment's computations, rather than before it."""
    names = {f"the computation {name!r}" for name in work.computations}
    names |= {f"the Python function {name!r}" for name in work.computations}
    return any(thread.doing in names for thread in report.threads)


def _runs_python(report: HostReport) -> bool:
    return any("Python function" in thread.doing for thread in report.threads)


def _busy(threads: tuple[ThreadReport, ...]) -> str:
    """What keeps a host busy; a Python function that it runs says more than who waits for it."""
    for thread in sorted(threads, key=lambda one: "Python function" not in one.doing):
        return f": it has been at {thread.doing} for {_seconds(thread.busy_s)}"
    return ""


def _computed(work: WorkReport) -> str:
    return ", ".join(map(repr, work.computations)) or f"the transfers of {work.program!r}"


def _holder(work: WorkReport, host: str) -> str:
    """A host of a gang, with its shards."""
    shards = _shards(work.shards[work.hosts.index(host)])
    return f"{host} ({shards})" if shards else host


def _edge(edge: EdgeReport) -> str:
    size = f"{edge.size_bytes} bytes" if edge.size_bytes else ""
    details = ", ".join(filter(None, (_shards(edge.shards), size)))
    return f"transfer {edge.edge} ({details})" if details else f"transfer {edge.edge}"


_STATES = {
    "awaited": "it has not come",
    "credit sent": "it was asked for",
    "assembled": "its parts are put together",
    "no value": "it is not made yet",
    "no credit": "nobody has said where to put it",
    "sending": "it is being sent",
    "credit early": "it was asked for before it was launched here",
}


def _state(edge: EdgeReport) -> str:
    return _STATES.get(edge.state, edge.state)


def _shards(shards: tuple[int, ...]) -> str:
    """Positions in a mesh, neighbours as ranges."""
    ranges: list[list[int]] = []
    for at in shards:
        if ranges and ranges[-1][-1] == at - 1:
            ranges[-1][1:] = [at]
        else:
            ranges.append([at])
    words = ", ".join("-".join(map(str, ends)) for ends in ranges)
    return words and f"shard{'s' if len(shards) > 1 else ''} {words}"


def _island(island: IslandStatus) -> str:
    missing = f", missing are {', '.join(island.missing)}" if island.missing else ""
    late = [host.node for host in island.hosts if not host.joined]
    joining = f", {', '.join(late)} has not joined" if island.state == "forming" and late else ""
    return (
        f"island {island.island} is {island.state}: {len(island.hosts)} of {island.expected_hosts} hosts are "
        f"here{missing}{joining}"
    )


def _heard(silent_s: float) -> str:
    return f" (nothing was heard of it for {_seconds(silent_s)})" if silent_s >= 0 else ""


def _counted(count: int, noun: str, plural: str = "s") -> str:
    return f"{count} {noun}{'' if count == 1 else plural}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s"
