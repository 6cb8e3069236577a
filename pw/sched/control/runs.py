"""The runs in flight: submits them to the schedulers, withdraws them, and gives credits back.

A client may have `RUN_CREDITS` runs in flight, and gets a credit back for each run that has ended,
in whatever way. Credits are given back together: a client that has most of them misses none.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from pw.core import events as published
from pw.core import messages as msg
from pw.core.actors.ticker import Ticker
from pw.core.errors import ArrayLost, Error, ErrorReport, HostLost, ProtocolError
from pw.core.ids import client_of, is_repeat, run_name, scheduler_of
from pw.core.recorder import CALLED
from pw.core.tenants import OPERATOR
from pw.sched.control.array_states import ArrayEntry
from pw.sched.control.clients import Client
from pw.sched.control.lineage import Record
from pw.sched.control.run_checks import Poisoned, check_arguments, check_results, program_of
from pw.sched.control.run_states import RunInFlight, RunTransition
from pw.sched.control.sessions import RUN_CREDITS, ControlPart

CREDITS_AT_ONCE = 64
"""Number of credits that are given back at once."""

CREDITS_S = 0.01
"""Seconds for which fewer credits wait for others, so that not every end of a run disturbs the client."""

RUNS_SHOWN = 16
"""Number of runs of each client in a status report."""


@dataclass(eq=False)
class RunsInFlight(ControlPart):
    """Runs in flight of all clients."""

    credits_at_once: int

    def __post_init__(self) -> None:
        super().__post_init__()
        self.in_flight: dict[int, RunInFlight] = {}
        """Runs by number, in the order in which they were submitted."""
        self.handed: list[tuple[int, ErrorReport | None]] = []
        """Arrays that runs have made for other clients, or why they will not (`pw.sched.control.handovers`)."""
        self._news: list[tuple[str, RunInFlight, float, str]] = []
        """Events to publish when this turn ends: together, events cost a third."""
        self._refunds: Counter[int] = Counter()
        """Number of credits that each client gets back."""
        self._due: set[int] = set()
        """Numbers of clients that get their credits when this turn ends."""
        self._timer = Ticker(self._env, CREDITS_S, self._give_back)
        self._env.recorder.unfinished[self._env.address.actor] = self._record_unfinished

    def status(self) -> tuple[msg.RunInfo, ...]:
        """Describe the oldest runs in flight of each client."""
        shown: Counter[int] = Counter()
        infos = []
        now_s = self._env.now_s()
        for run in self.in_flight.values():
            shown[run.client] += 1
            if shown[run.client] <= RUNS_SHOWN:
                infos.append(
                    msg.RunInfo(
                        run_name(run.record.order),
                        run.client,
                        run.record.program.body.name,
                        run.islands,
                        now_s - run.began_s,
                        run.segments_left,
                    )
                )
        return tuple(infos)

    # --- beginning --------------------------------------------------------------------------------

    def start(self, client: Client, message: msg.Run) -> None:
        """Submit a run to the scheduler of each of its islands, or refuse it."""
        number = message.run
        if client_of(number) != client.number or is_repeat(number) or not client.is_new(number):
            self._env.count("messages_duplicate")
            return
        try:
            if client.usage.runs >= RUN_CREDITS:
                raise ProtocolError(f"a client has more than {RUN_CREDITS} runs in flight")
            program = program_of(client, message)
            awaits = check_arguments(client, program, message.args)
            homes = check_results(client, program, message.results, self._islands.bindings)
        except (Poisoned, Error) as error:
            report = error.report if isinstance(error, Poisoned) else ErrorReport.of(error)
            self.refuse(client, message, report)
            self._islands.release(client.number, client.delete(client.donated_to(message)))
            self._follow_lease(client, message)
            return
        donated = self._take_donated(client, message) if program.body.donated else []
        for array, output, home in zip(message.results, program.body.outputs, homes, strict=True):
            client.arrays.add(array, ArrayEntry(output.spec, *home))
        self._env.count("runs")
        record = client.lineage.add_run(message.run, program, message.args, message.results)
        if donated:
            client.lineage.release(number for number, _ in donated)
        if not program.parts:
            self._credit(client.number)
            return
        args, results = message.args, message.results
        lease = (message.lease, message.index) if message.lease else None
        self.submit(client, message.run, record, args, results, awaits, donated, lease)
        if lease is not None:
            # Hosts may have launched it, and dropped these, before they were made again.
            again = [(number, array) for number, array in donated if array.was_lost]
            self._islands.release(client.number, again)
        if client.early_losses:
            self._spoil_early(client, self.in_flight[message.run])

    def _take_donated(self, client: Client, message: msg.Run) -> list[tuple[int, ArrayEntry]]:
        """Take the arrays that a client gives away from it."""
        arrays = [(number, client.arrays.take(number)) for number in client.donated_to(message)]
        return [(number, array) for number, array in arrays if array is not None]

    def _spoil_early(self, client: Client, run: RunInFlight) -> None:
        """A host may have lost a result of a leased run before the client told of the run."""
        over = (one for one in client.early_losses if one <= run.number)
        for number in [one for one in over if not client.stream.will_make(one)]:
            host, array = client.early_losses.pop(number), client.arrays.get(number)
            if number in run.results and array is not None and host in array.hosts:
                name = run.record.program.body.name
                run.spoil(ErrorReport.of(HostLost(f"{host} did not get all that {name!r} reads")))

    def submit(
        self,
        client: Client,
        number: int,
        record: Record,
        args: tuple[int | bytes, ...],
        results: tuple[int, ...],
        awaits: tuple[int, ...],
        donated: list[tuple[int, ArrayEntry]] | None = None,
        lease: tuple[int, int] | None = None,
    ) -> None:
        """Put a run in flight. Without `donated` it repeats the `record`, and uses no credit.

        `lease` has the number of a lease and the index in it, if the client has launched the run itself.
        """
        program = record.program
        self.in_flight[number] = RunInFlight(
            number,
            client.number,
            record,
            args,
            results,
            donated or [],
            tuple(program.parts),
            program.segment_count,
            self._env.now_s(),
            credited=donated is not None,
        )
        client.usage.runs += donated is not None
        if self._events is not None:
            self._news.append(("began", self.in_flight[number], 0.0, ""))
        gaps = client.recovering
        for island, submit in program.submissions(number, args, results, awaits, has_gaps=gaps):
            message = submit if lease is None else msg.SubmitLeased(submit, *lease)
            self._env.send(scheduler_of(island), message)

    def _follow_lease(self, client: Client, message: msg.Run) -> None:
        """Have hosts drop the results of a refused run that was launched under a launch lease."""
        program = client.programs.get(message.program)
        homes = None if program is None else program.result_homes(self._islands.bindings)
        if not message.lease or program is None or homes is None:
            return
        for island, submit in program.submissions(message.run, message.args, message.results, ()):
            leased = msg.SubmitLeased(submit, message.lease, message.index)
            self._env.send(scheduler_of(island), leased)
        results = [
            (number, ArrayEntry(output.spec, *home))
            for number, output, home in zip(
                message.results, program.body.outputs, homes, strict=False
            )
        ]
        self._islands.release(client.number, results)

    def refuse(self, client: Client, message: msg.Run, error: ErrorReport) -> None:
        """Fail the results of a run that is not submitted. Its arguments stay."""
        for array in message.results:
            if client_of(array) == client.number and array not in client.arrays:
                client.arrays.add(array, ArrayEntry.failed(error))
        self._env.count("runs_failed")
        if self._events is not None:
            registered = client.programs.get(message.program)
            name = run_name(message.run)
            program = "" if registered is None else registered.body.name
            refused = published.RunEvent(
                "refused", name, name, client.number, program, error=error.message
            )
            self._events.publish(refused)
        client.lineage.refuse_run(message.run)
        self.sessions.tell(client, msg.RunFailed(message.run, message.results, error))
        self._credit(client.number)

    # --- ending -----------------------------------------------------------------------------------

    def segment_done(self, message: msg.SegmentDone) -> RunInFlight | None:
        """Note the end of a segment; return the run if this was its last segment."""
        run = self.in_flight.get(message.run)
        if run is None or not run.segment_ended(message.lost):
            return None
        return run

    def end(self, run: RunInFlight) -> None:
        """A run has ended with all its values."""
        run.after(RunTransition.END)
        if self._events is not None:
            self._news.append(("ended", run, self._env.now_s() - run.began_s, ""))
        if run.record.program.exports:
            self._hand(run, None)
        self._remove(run)

    def publish(self) -> None:
        """Publish which runs have begun and ended since the last time."""
        if self._events is None or not self._news:
            return
        news, self._news = self._news, []
        for what, run, seconds, error in news:
            if run.names is None:
                attempt = run_name(run.number)
                is_first = run.number == run.record.order
                run.names = attempt if is_first else run_name(run.record.order), attempt
            name = run.record.program.body.name
            self._events.publish(
                published.RunEvent(what, *run.names, run.client, name, run.islands, seconds, error)
            )

    def _hand(self, run: RunInFlight, error: ErrorReport | None) -> None:
        """Note the end of a run that makes arrays of another client."""
        if run.record.program.exports:
            exports = (number for number in run.results if client_of(number) != run.client)
            self.handed += [(number, error) for number in exports]

    def withdraw(
        self,
        run: RunInFlight,
        event: RunTransition,
        error: ErrorReport,
        reason: str = "",
        grace_s: float = 0.0,
    ) -> Client:
        """End a run before its time on all islands; return its client. What was donated to it goes.

        With a `reason`, the launched part of it must end as well, `grace_s` later at the latest.
        """
        run.after(event)
        if self._events is not None:
            what = "lost" if event is RunTransition.LOSE else "failed"
            self._news.append((what, run, self._env.now_s() - run.began_s, error.message))
        self._hand(run, error)
        for island in run.islands:
            self._islands.tell(island, msg.CancelRun(run.number, reason, grace_s))
        client = self.sessions.get(run.client)
        assert client is not None, "the runs of a client leave with it"
        arrays = [(n, array) for n, array in run.donated if not array.awaited]
        self._islands.release(client.number, arrays)
        self._remove(run)
        return client

    def client_left(self, client: Client) -> None:
        """Forget the runs of a client, and withdraw those that make arrays for it."""
        number = client.number
        self.publish()
        error = ErrorReport.of(
            ArrayLost(
                "the session that handed the array over ended before it had; hand it over again"
            )
        )
        for run in list(self.in_flight.values()):
            if run.client == number:
                self._hand(run, error)
                if self._env.recorder.on:
                    self._record(run)
            elif run.record.program.exports and number in map(client_of, run.results):
                self.withdraw(run, RunTransition.FAIL, error)
        self.in_flight = {n: run for n, run in self.in_flight.items() if run.client != number}
        self._refunds.pop(number, None)
        self._due.discard(number)

    def _remove(self, run: RunInFlight) -> None:
        if self._env.recorder.on:
            self._record(run, self._env.now_s())
        del self.in_flight[run.number]
        if run.credited:
            client = self.sessions.get(run.client)
            assert client is not None, "the runs of a client leave with it"
            client.usage.runs -= 1
            self._credit(run.client)

    def _record(self, run: RunInFlight, ended_s: float = 0.0) -> None:
        """Record a call that has ended, or has not; call it only while the recorder is on."""
        recorder, client = self._env.recorder, self.sessions.get(run.client)
        tenant = OPERATOR if client is None else client.tenant
        name = recorder.name(run.record.program.body.name, tenant)
        recorder.add(CALLED, run.began_s, ended_s, run.number, name)

    def _record_unfinished(self) -> None:
        """Record the calls that have not ended, for a timeline that ends now."""
        for run in self.in_flight.values():
            self._record(run)

    # --- credits ----------------------------------------------------------------------------------

    def _credit(self, client: int) -> None:
        self._refunds[client] += 1
        if self._refunds[client] >= self.credits_at_once:
            self._due.add(client)
        elif not self._timer.is_running:
            self._timer.start()

    def _give_back(self) -> bool:
        """Credits have waited for others long enough."""
        self._due.update(self._refunds)
        return False

    def send_credits(self) -> None:
        """Send clients the credits that are due."""
        for number in self._due:
            client = self.sessions.get(number)
            if client is not None:
                self.sessions.tell(client, msg.RunsSettled(self._refunds.pop(number)))
        self._due.clear()
