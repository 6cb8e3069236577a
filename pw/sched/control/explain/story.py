"""Tells what schedulers and hosts have reported: the verdict, then the states of all work.

Pure: the same reports give the same words. Each host of a launch gives *delays*: what the launch
waits for there. The lightest delay of the oldest launch is the verdict, because what is certainly
wrong (a host does not answer, a handshake that only one side knows) weighs less than what may take
its time (a computation that runs).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from pw.core import messages as msg
from pw.core.ids import client_of, run_name

BUSY_S = 1.0
"""Seconds after its launch for which work does not count as stalled."""

SILENT, BROKEN, CALLED, LATE, BEHIND, AT_WORK = range(6)


class Delay(NamedTuple):
    """Reason why one host delays a launch."""

    weight: int
    host: str
    words: str


def story(
    facts: msg.Explanation,
    hosts_awaited: Sequence[str] = (),
    run: int = 0,
    run_name: Callable[[int], str] = run_name,
    asker: int = 0,
) -> Iterator[str]:
    """Return the lines of the text.

    Args:
        facts: what was reported; its own text does not matter.
        hosts_awaited: hosts from which the asker waits for something.
        run: the run that the verdict is about; 0 for the oldest launch.
        run_name: returns what people call a run.
        asker: number of the client that asks; 0 for none.
    """
    text = _Story(facts, run_name, asker)
    yield text.verdict(hosts_awaited, run)
    yield from text.details()


class _Story:
    def __init__(self, facts: msg.Explanation, name: Callable[[int], str], asker: int) -> None:
        self._facts, self._asker = facts, asker
        self._run_name = name
        self._hosts = {report.host: report for report in facts.hosts}
        self._silent = {
            silence.host: "does not answer"
            + (f" (nothing was heard of it for {silence.silent_s:.1f} s)" * (silence.silent_s >= 0))
            for silence in facts.silent
        }
        self._clients = {client.client: client.name for client in facts.clients}

    # --- the verdict ------------------------------------------------------------------------------

    def verdict(self, awaited: Sequence[str], run: int) -> str:
        """Return why work does not go on, in one line."""
        launched = [work for report in self._facts.work for work in report.oldest]
        for work in sorted(launched, key=lambda one: (one.run != run, -one.launched_s)):
            delays = [delay for host in work.hosts for delay in self._delays(work, host)]
            if not delays:
                continue
            first, age = min(delays), f"launched {work.launched_s:.1f} s ago"
            if first.weight > BROKEN and work.launched_s < BUSY_S:
                return f"Work goes on: the oldest is {self._named(work)}, {age}"
            hosts = ", ".join(work.hosts)
            why = f"That is why {self._named(work)} has not ended, {age} on {hosts}"
            return f"{first.words}. {why}"
        ended = "Work goes on: what was asked about has just ended"
        return self._unlaunched(awaited) or (ended if launched else "Nothing is under way")

    def _unlaunched(self, awaited: Sequence[str]) -> str:
        """Return the reason for a stall that no launch shows."""
        silent = sorted(self._silent, key=lambda host: host not in awaited)
        if silent:
            waits = "; this client waits for it" if silent[0] in awaited else ""
            return f"{silent[0]} {self._silent[silent[0]]}{waits}"
        absent = next((_island(one) for one in self._facts.islands if one.state != "ready"), "")
        for client in self._facts.clients:
            if client.suspended:
                is_asker = client.client == self._asker
                who = "this client" if is_asker else self._client(client.client)
                return f"{who} is {client.suspended}"
            if client.waits_for:
                reason = (absent or "; ".join(self._left_out())) if client.lacks_hosts else ""
                why = f": {reason}" if reason else ""
                return f"{self._client(client.client)} waits for {client.waits_for[0]}{why}"
        for report in self._facts.work:
            for work in report.heads:
                return f"{self._named(work)} waits for {' and '.join(work.waits_for)}"
        return absent

    def _delays(self, work: msg.WorkReport, host: str) -> list[Delay]:
        """Return what a launch waits for on one of its hosts."""
        who, what = _holder(work, host), _computed(work)
        report = self._hosts.get(host)
        if report is None:
            return [self._no_answer(host, who)]
        launch, busy = _launch(report, work), _busy(report.threads)
        if report.state:
            return [Delay(SILENT, host, f"{who} does nothing: {report.state}")]
        if launch is None or launch.state == "missing":
            return [Delay(BROKEN, host, f"{who} has not got the launch of {what}")]
        called = self._called(report, client_of(work.run))
        if called and launch.state != "finished":
            return [Delay(CALLED, host, f"{who} waits for {called}")]
        if launch.state in ("waiting", "queued"):
            head = _first_waiting(report, work.run)
            behind = "" if head is launch else f"; {what} is queued behind {self._launched(head)}"
            delays = [self._edge(host, edge) for edge in _awaited(report, head)]
            delays += [
                Delay(LATE, host, f"{who} waits for the end of {name!r}{busy}")
                for name in head.unsettled
            ]
            if not delays:
                words = f"{who} has not enqueued {what}"
                delays = [Delay(BEHIND, host, words)]
            return [one._replace(words=one.words + behind) for one in delays]
        if _stage(report, work, launch) == "submitted":
            return [Delay(LATE, host, f"{who} has not enqueued {what}{busy}")]
        if launch.state == "finished":
            return []
        runs_python = any("Python function" in thread.doing for thread in report.threads)
        weight = LATE if runs_python else AT_WORK
        return [Delay(weight, host, f"{who} has not finished {what}{busy}")]

    def _called(self, report: msg.HostReport, client: int) -> str:
        """Return the function of a client that a host waits for, if it waits for one."""
        for number, called_s in report.calls:
            if number == client:
                silent_s = next((c.silent_s for c in self._facts.clients if c.client == client), 0)
                silent = f" (it is silent for {silent_s:.0f} s)" if silent_s else ""
                whose = self._client(client)
                return f"a function in the process of {whose}{silent}, called {called_s:.1f} s ago"
        return ""

    def _no_answer(self, host: str, who: str) -> Delay:
        if host in self._silent:
            return Delay(SILENT, host, f"{who} {self._silent[host]}")
        return Delay(BEHIND, host, f"{who} was not asked")

    def _edge(self, host: str, edge: msg.EdgeReport) -> Delay:
        """Compare what both ends of an edge report."""
        peer, what = edge.peer, _edge(edge)
        there = self._hosts.get(peer)
        if there is None:
            silent = self._no_answer(peer, peer)
            return silent._replace(words=f"{silent.words}, and {host} waits for {what} from it")
        if there.state:
            words = f"{peer} does nothing: {there.state}; {host} waits for {what} from it"
            return Delay(SILENT, peer, words)
        ends = (end for end in there.edges if not end.incoming)
        key = (edge.run, edge.edge, host)
        state = next((end.state for end in ends if (end.run, end.edge, end.peer) == key), "")
        not_there = f"{peer} has not delivered {what} to {host}"
        if state == "no credit" and edge.state == "credit sent":
            words = (
                f"{not_there}: it was not told where to put it, though {host} has told it "
                f"{edge.open_s:.1f} s ago. That message was lost"
            )
            return Delay(BROKEN, peer, words)
        if state == "sending":
            moved = f"{edge.received_bytes} of {edge.size_bytes} bytes are there"
            return Delay(BEHIND, peer, f"{peer} is sending {what} to {host}, {moved}")
        if state == "no value":
            words = f"{peer} does not have {what} yet, which {host} waits for{_busy(there.threads)}"
            return Delay(LATE, peer, words)
        held_up = (launch for launch in there.launches if launch.state in ("waiting", "queued"))
        if any(client_of(launch.run) == client_of(edge.run) for launch in held_up):
            head = self._launched(_first_waiting(there, edge.run))
            words = f"{peer} has not come to sending {what} to {host}; it waits at {head}"
            return Delay(LATE, peer, words)
        words = (
            f"{not_there}, and has nothing left to send: either it has not been launched there, "
            "or a message was lost"
        )
        return Delay(BROKEN, peer, words)

    # --- details ----------------------------------------------------------------------------------

    def details(self) -> Iterator[str]:
        """Print the states of launches, hosts, islands and clients."""
        for report in self._facts.work:
            if report.oldest:
                quiet = f"nothing was launched or ended for {report.quiet_s:.1f} s"
                count = _counted(report.launched, "piece")
                yield f"launched on {report.island}: {count} of work; {quiet}"
            for work in report.oldest:
                yield f"  {self._named(work)}, launched {work.launched_s:.1f} s ago"
                for host in work.hosts:
                    yield f"    {_holder(work, host)}: {self._state(work, host)}"
            if report.heads:
                yield f"queued on {report.island}: {_counted(report.queued, 'piece')} of work"
            for work in report.heads:
                yield f"  {self._named(work)} waits for {' and '.join(work.waits_for)}"
            for one in report.installing:
                whose, hosts = self._client(client_of(one.program)), ", ".join(one.hosts)
                yield f"program {one.name!r} of {whose} has not been compiled by {hosts}"
        for there in self._facts.hosts:
            yield from self._host(there)
        yield from (f"{host}: {words}" for host, words in self._silent.items())
        yield from (_island(island) for island in self._facts.islands if island.state != "ready")
        yield from (one.words for one in msg.slow_hosts(self._facts.islands))
        yield from self._left_out()
        for client in self._facts.clients:
            if client.silent_s:
                yield f"{self._client(client.client)} is silent for {client.silent_s:.0f} s"
            if client.suspended:
                yield f"{self._client(client.client)} is {client.suspended}"
            elif client.waits_for or client.held:
                yield (
                    f"{self._client(client.client)}: {_counted(client.runs_in_flight, 'run')} in "
                    f"flight, {_counted(client.held, 'message')} held; waits for "
                    f"{' and '.join(client.waits_for) or 'its turn'}"
                )

    def _state(self, work: msg.WorkReport, host: str) -> str:
        """Return the state of a launch on one of its hosts, and the values that it waits for there."""
        report = self._hosts.get(host)
        if report is None:
            return self._silent.get(host, "not asked")
        launch = _launch(report, work)
        if launch is None or launch.state != "waiting":
            return _stage(report, work, launch)
        waits = [f"{_edge(e)} from {e.peer} ({e.state})" for e in _awaited(report, launch)]
        waits += [f"the end of {name!r}" for name in launch.unsettled]
        return f"waiting for {', '.join(waits) or 'its turn'}"

    def _left_out(self) -> Iterator[str]:
        """Yield the devices that no slice gets, because they have failed their test."""
        for island in self._facts.islands:
            for host in island.hosts:
                for one in host.sick:
                    if one.state is msg.SickState.FAILED:
                        yield (
                            f"device {one.device} of {host.name} has failed its test ({one.words}), and island "
                            f"{island.name} goes on without it"
                        )

    def _host(self, report: msg.HostReport) -> Iterator[str]:
        if not (report.state or report.queued or report.threads or report.edges or report.calls):
            return
        yield (
            f"{report.host}: {report.state or 'in its island'}, "
            f"{_counted(report.queued, 'launch', 'es')} queued; nothing was enqueued for "
            f"{report.quiet_s:.1f} s"
        )
        for edge in report.edges:
            way = "from" if edge.incoming else "to"
            here = f", {edge.received_bytes} bytes are here" if edge.incoming else ""
            yield (
                f"  {_edge(edge)} of run {self._run_name(edge.run)} {way} {edge.peer}: "
                f"{edge.state}{here}, open for {edge.open_s:.1f} s"
            )
        for client, _ in report.calls:
            yield f"  a computation waits for {self._called(report, client)}"
        for thread in report.threads:
            yield f"  {thread.thread}: at {thread.doing} for {thread.busy_s:.1f} s"
            yield from (f"      {call}" for call in thread.stack)

    # --- names ------------------------------------------------------------------------------------

    def _named(self, work: msg.WorkReport) -> str:
        run, client = self._run_name(work.run), self._client(client_of(work.run))
        return f"{_computed(work)} (run {run} of {client}, program {work.program!r})"

    def _launched(self, launch: msg.LaunchReport) -> str:
        names = ", ".join(map(repr, launch.computations)) or launch.program
        return f"{names} (run {self._run_name(launch.run)})"

    def _client(self, number: int) -> str:
        name = self._clients.get(number)
        return f"client {number} ({name})" if name else f"client {number}"


def _launch(report: msg.HostReport, work: msg.WorkReport) -> msg.LaunchReport | None:
    key = (work.run, work.segment)
    return next((one for one in report.launches if (one.run, one.segment) == key), None)


def _stage(report: msg.HostReport, work: msg.WorkReport, launch: msg.LaunchReport | None) -> str:
    """Return the state of a launch; it is entered when a thread is in one of its computations."""
    if launch is None:
        return "missing"
    kinds = ("the computation", "the Python function")
    names = {f"{kind} {name!r}" for kind in kinds for name in work.computations}
    is_entered = any(thread.doing in names for thread in report.threads)
    return "entered" if launch.state == "submitted" and is_entered else launch.state


def _first_waiting(report: msg.HostReport, run: int) -> msg.LaunchReport:
    """Return the launch that holds up a run on a host: its client's, or any for a gang."""
    waiting = [launch for launch in report.launches if launch.state == "waiting"]
    own = [launch for launch in waiting if client_of(launch.run) == client_of(run)]
    return (own or waiting or list(report.launches))[0]


def _awaited(report: msg.HostReport, launch: msg.LaunchReport) -> list[msg.EdgeReport]:
    """Return the open edges that a launch waits for."""
    return [e for e in report.edges if e.incoming and (e.run, e.edge) in launch.waits_for]


def _busy(threads: tuple[msg.ThreadReport, ...]) -> str:
    """Return what keeps a host busy: a Python function, rather than what waits for it."""
    for thread in sorted(threads, key=lambda one: "Python function" not in one.doing):
        return f": it has been at {thread.doing} for {thread.busy_s:.1f} s"
    return ""


def _computed(work: msg.WorkReport) -> str:
    return ", ".join(map(repr, work.computations)) or f"the transfers of {work.program!r}"


def _holder(work: msg.WorkReport, host: str) -> str:
    """Return a host of a gang, with its shards."""
    shards = _shards(work.shards[work.hosts.index(host)])
    return f"{host} ({shards})" if shards else host


def _edge(edge: msg.EdgeReport) -> str:
    size = f"{edge.size_bytes} bytes" if edge.size_bytes else ""
    details = ", ".join(filter(None, (_shards(edge.shards), size)))
    return f"transfer {edge.edge} ({details})" if details else f"transfer {edge.edge}"


def _shards(shards: tuple[int, ...]) -> str:
    """Return positions in a mesh, neighbours as ranges."""
    ranges: list[list[int]] = []
    for at in shards:
        if ranges and ranges[-1][-1] == at - 1:
            ranges[-1][1:] = [at]
        else:
            ranges.append([at])
    words = ", ".join("-".join(map(str, ends)) for ends in ranges)
    return words and f"shard{'s' if len(shards) > 1 else ''} {words}"


def _island(island: msg.IslandInfo) -> str:
    missing = f", missing are {', '.join(island.missing)}" if island.missing else ""
    late = [host.name for host in island.hosts if host.state == "joining"]
    joining = f", {', '.join(late)} has not joined" if island.state == "forming" and late else ""
    here = f"{len(island.hosts)} of {island.expected_hosts} hosts are here"
    return f"island {island.name} is {island.state}: {here}{missing}{joining}"


def _counted(count: int, noun: str, plural: str = "s") -> str:
    return f"{count} {noun}{'' if count == 1 else plural}"
