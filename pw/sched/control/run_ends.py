"""The end of runs: with their values, or refused, overdue, cancelled, or with a failed argument.

A run that fails takes with it all that needs its results, in flight or later. The schedulers forget
the queued part of it. The launched part cannot be called back from the devices: if it does not end
within a grace period, its island's epoch ends. The work of others there is handed over and goes on
in the next epoch, so that a computation that never ends costs them seconds.

A timeout counts from the launch of a run's first segment, on the controller's clock. One timer
serves all runs, and it runs only while a run with a timeout is in flight.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import partial

from pw.core import messages as msg
from pw.core.actors.actor import Timer, handles
from pw.core.errors import ArgumentError, Cancelled, ComputationTimeout, Error, ErrorReport
from pw.core.ids import Address, arrays_in, client_of, run_name
from pw.sched.control.client_order import ClientOrder
from pw.sched.control.clients import Client
from pw.sched.control.explain.memory import with_holders
from pw.sched.control.explain.why import Explainer
from pw.sched.control.recovery.losses import Losses
from pw.sched.control.recovery.rebuild import Rebuilder
from pw.sched.control.run_states import RunInFlight, RunTransition
from pw.sched.control.runs import RunsInFlight
from pw.sched.control.sessions import ControlPart, handles_client

GRACE_S = 1.0
"""Seconds that a cancelled run, once launched, may take before its island is ended."""


@dataclass(frozen=True, slots=True)
class LookAtDeadlines:
    """Timer: a run may be overdue."""


@dataclass(eq=False)
class RunEnds(ControlPart):
    """Ends runs that time out, are cancelled, or whose client leaves."""

    runs: RunsInFlight
    losses: Losses
    rebuilder: Rebuilder
    stream: ClientOrder
    explainer: Explainer

    def __post_init__(self) -> None:
        super().__post_init__()
        self._deadlines: dict[int, float] = {}
        self._timer: Timer | None = None
        self._due_s = 0.0
        """Time at which the timer runs out, in seconds; 0 without a timer."""

    # --- the end of runs --------------------------------------------------------------------------

    @handles(msg.SegmentDone)
    def _segment_done(self, sender: Address, message: msg.SegmentDone) -> None:
        run = self.runs.segment_done(message)
        if run is None:
            return
        if self._deadlines:
            self._forget_deadline(run)
        if run.cause is not None:
            self.losses.run_lost(run, run.cause)
        else:
            self.runs.end(run)

    @handles(msg.RunRefused)
    def _refused(self, sender: Address, message: msg.RunRefused) -> None:
        """A scheduler cannot launch a run; if it seemed to have ended, its results fail now."""
        asker, results = client_of(message.run), message.results
        error = with_holders(self.sessions, asker, message.error, message.holders)
        if message.run not in self.runs.in_flight and results:
            client = self.sessions.owner(results[0])
            if client is None:
                return
            self._fail_arrays(client, results, error)
        self.fail(error, runs=(message.run,), arrays=results)

    def fail(
        self,
        error: ErrorReport,
        *,
        runs: Collection[int] = (),
        arrays: Iterable[int] = (),
        reason: str = "",
        grace_s: float = 0.0,
    ) -> None:
        """Fail these runs, the runs that need these arrays, and the runs that need their results.

        With a `reason`, the launched part of them must end as well, `grace_s` later at the latest.
        """
        failed = set(arrays)
        for run in list(self.runs.in_flight.values()):
            if run.number not in runs and failed.isdisjoint(arrays_in(run.args)):
                continue
            self._forget_deadline(run)
            grace = grace_s if run.number in runs else max(grace_s, GRACE_S)
            client = self.runs.withdraw(run, RunTransition.FAIL, error, reason, grace)
            failed.update(run.results)
            client.arrays.fail(run.results, error)
            self.sessions.tell(client, msg.RunFailed(run.number, run.results, error))

    def _fail_arrays(self, client: Client, arrays: Iterable[int], error: ErrorReport) -> None:
        """Fail arrays that no run in flight makes."""
        failed = client.arrays.fail(arrays, error)
        if failed:
            self.sessions.tell(client, msg.RunFailed(0, failed, error))

    # --- deadlines --------------------------------------------------------------------------------

    @handles(msg.RunStarted)
    def _started(self, sender: Address, message: msg.RunStarted) -> None:
        """A segment of a run with a timeout was launched; the time counts from the first one."""
        run = self.runs.in_flight.get(message.run)
        if run is not None and run.number not in self._deadlines:
            deadline_s = self._env.now_s() + run.record.program.body.timeout_s
            self._deadlines[run.number] = deadline_s
            self._arm(deadline_s)

    def _forget_deadline(self, run: RunInFlight) -> None:
        had_one = self._deadlines.pop(run.number, None) is not None
        if had_one and not self._deadlines and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self, deadline_s: float) -> None:
        """Have the timer run out at a deadline, unless it runs out before."""
        if self._timer is not None:
            if self._due_s <= deadline_s:
                return
            self._timer.cancel()
        self._due_s = deadline_s
        delay_s = max(0.0, deadline_s - self._env.now_s())
        self._timer = self._env.call_later(delay_s, LookAtDeadlines())

    @handles(LookAtDeadlines)
    def _look_at_deadlines(self, sender: Address, timer: LookAtDeadlines) -> None:
        self._timer = None
        now_s = self._env.now_s()
        for number in [number for number, due_s in self._deadlines.items() if due_s <= now_s]:
            del self._deadlines[number]
            if number in self.runs.in_flight:
                self._env.count("runs_overdue")
                self.explainer.explain_run(number, partial(self._time_out, number))
        if self._deadlines:
            self._arm(min(self._deadlines.values()))

    def _time_out(self, number: int, explanation: str) -> None:
        run = self.runs.in_flight.get(number)
        if run is None:
            return  # it ended while the explainer asked the hosts
        program = run.record.program
        where = ", ".join(f"{island} ({', '.join(h)})" for island, h in program.hosts.items())
        words = (
            f"a call of {program.body.name!r} had not ended {program.body.timeout_s:g} s after it "
            f"began on {where}"
        )
        self._env.log("warning", "run timed out", run=run_name(number), program=program.body.name)
        error = ErrorReport.of(ComputationTimeout(". ".join(filter(None, (words, explanation)))))
        self.fail(error, runs=(number,), reason=words)

    # --- cancelling -------------------------------------------------------------------------------

    @handles_client(msg.Cancel)
    def _cancel_arrays(self, client: Client, message: msg.Cancel) -> None:
        """Cancel the runs whose results a client does not want any more, except arrays that it has handed
        over.
        """
        number = client.number
        wanted = frozenset(array for array in message.arrays if client_of(array) == number)
        self._cancel(client, lambda run, results: not wanted.isdisjoint(results), "pw.cancel")

    @handles_client(msg.CancelRuns)
    def _cancel_runs(self, asker: Client, message: msg.CancelRuns) -> None:
        """An operator cancels a run, or all runs, of any client."""
        client = self.sessions.get(message.client)
        error: Error | None = None
        rights = self.sessions.usage.rights.of(asker.tenant)
        if client is not None and not (asker.may_touch(client) or rights.may_cancel):
            what = f"cancel runs of client {client.number}, which is of another tenant"
            refused = self.sessions.objection(asker, what, "clients of that tenant")
            self._env.send(asker.address, msg.Answered(message.request, refused))
            return
        if client is not None:
            self._audit(asker, client, message)
        if client is None:
            error = ArgumentError(f"there is no client {message.client}; see pw status")
        elif (
            not self._cancel(client, lambda run, _: message.run in (0, run), "pw cancel")
            and message.run
        ):
            words = f"no run {run_name(message.run)} is in flight; see pw status"
            error = ArgumentError(words)
        report = None if error is None else ErrorReport.of(error)
        self._env.send(asker.address, msg.Answered(message.request, report))

    def _audit(self, asker: Client, client: Client, message: msg.CancelRuns) -> None:
        self._env.audit(
            "cancel",
            tenant=asker.tenant,
            name=asker.name,
            node=asker.address.node,
            client=client.number,
            of=client.tenant,
            run=run_name(message.run) if message.run else "all",
        )

    def _cancel(
        self, client: Client, wanted: Callable[[int, Collection[int]], bool], by: str
    ) -> int:
        """Cancel the runs of a client that are `wanted`, by number and results; return how many."""
        chosen = {
            run.number: run.record.program.body.name
            for run in self.runs.in_flight.values()
            if run.client == client.number and wanted(run.record.order, run.results)
        }
        waiting = self.stream.take_runs(client, lambda run: wanted(run.run, run.results))
        lost = self._lost(client, wanted)
        names = set(chosen.values())
        names.update(
            client.programs[message.program].body.name
            for message in waiting
            if message.program in client.programs
        )
        makers = (client.lineage.maker(array) for array in lost)
        names.update(maker.program.body.name for maker in makers if maker is not None)
        what = ", ".join(map(repr, sorted(names))) or "nothing"
        words = f"{what} of client {client.number} ({client.name}) was cancelled with {by}"
        again = "call it again if its results are needed after all"
        error = ErrorReport.of(Cancelled(f"{words}; {again}"))
        self._fail_arrays(client, lost, error)
        self.fail(error, runs=chosen, arrays=lost, reason=words, grace_s=GRACE_S)
        for message in waiting:
            self.runs.refuse(client, message, error)
        self._env.count("runs_cancelled", len(chosen) + len(waiting))
        if lost:
            self.rebuilder.proceed(client)
        return len(chosen) + len(waiting) + len(lost)

    def _lost(
        self, client: Client, wanted: Callable[[int, Collection[int]], bool]
    ) -> tuple[int, ...]:
        """Return the lost arrays that such runs would make again, or that need what these make."""
        lost = client.arrays.lost
        makers = {
            maker.order: maker
            for array in lost
            if (maker := client.lineage.maker(array)) is not None
        }
        failed: set[int] = set()
        for _, record in sorted(makers.items()):
            results = [array for array in record.results if array in lost]
            if wanted(record.order, results) or not failed.isdisjoint(arrays_in(record.args)):
                failed.update(record.results)
        return tuple(array for array in lost if array in failed)
