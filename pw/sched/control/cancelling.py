"""Ends runs that have not ended by themselves: refused ones, overdue ones, and those that nobody wants.

Whatever the reason, a run fails with all that needs its results, in flight or later. What is queued of it is
forgotten. What is launched cannot be called back from the devices: if it does not end by itself within a grace
period, its island's epoch ends (`IslandScheduler`). What others had there is handed over and goes on in
the next epoch, so that a computation that never ends costs them seconds.

A timeout counts from the launch of a run's first segment, on the controller's clock. There is one timer for
all of them, and only while a run with a timeout is in flight.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import partial

from pw.core.actor import Env, Timer
from pw.core.errors import (
    ArgumentError,
    Cancelled,
    ComputationTimeout,
    Error,
    ErrorReport,
)
from pw.core.ids import arrays_in, client_of, run_name
from pw.core.messages import CancelRuns, Delete, Run, RunFailed, RunStatus
from pw.sched.control.clients import Client, RunState
from pw.sched.control.ledger import Ledger
from pw.sched.control.recovery.rebuild import Rebuilder

GRACE_S = 1.0
"""How long a launched run that is cancelled may take to end by itself."""

RUNS_SHOWN = 16
"""Runs of each client in a status report."""

Explain = Callable[[int, Callable[[str], None]], None]
"""Find out what a run waits for, and tell it in words; at once or later."""


@dataclass(frozen=True, slots=True)
class LookAtDeadlines:
    """Note to the controller: a run may be overdue."""


class Deadlines:
    """When runs are to have ended.

    Runs with one and the same timeout are overdue in the order in which they were launched, so that
    nothing needs to be sorted.
    """

    def __init__(self) -> None:
        self._by_timeout: dict[float, dict[int, float]] = {}

    def __bool__(self) -> bool:
        return bool(self._by_timeout)

    def add(self, run: int, timeout_s: float, now_s: float) -> None:
        """A part of a run was launched: its time counts, unless it does so already."""
        self._by_timeout.setdefault(timeout_s, {}).setdefault(run, now_s + timeout_s)

    def discard(self, run: int, timeout_s: float) -> None:
        """A run has ended."""
        runs = self._by_timeout.get(timeout_s)
        if runs is not None:
            runs.pop(run, None)
            if not runs:
                del self._by_timeout[timeout_s]

    def next_s(self) -> float:
        """The earliest deadline; there is one."""
        return min(next(iter(runs.values())) for runs in self._by_timeout.values())

    def overdue(self, now_s: float) -> list[int]:
        """Take out the runs that should have ended by now."""
        found = []
        for timeout_s, runs in list(self._by_timeout.items()):
            for run, deadline_s in list(runs.items()):
                if deadline_s > now_s:
                    break
                found.append(run)
                self.discard(run, timeout_s)
        return found


class RunEnder:
    """The controller's part that ends runs; see the module."""

    def __init__(
        self,
        env: Env,
        ledger: Ledger,
        rebuilder: Rebuilder,
        refuse: Callable[[Client, Run, ErrorReport], None],
        explain: Explain,
    ) -> None:
        self._env = env
        self._ledger = ledger
        self._rebuilder = rebuilder
        self._refuse = refuse
        self._explain = explain
        self._deadlines = Deadlines()
        self._timer: Timer | None = None
        self._due_s = 0.0
        """When the timer, if there is one, will run out."""

    # --- the end of runs -------------------------------------------------------------------------------

    def fail(
        self,
        error: ErrorReport,
        *,
        runs: Collection[int] = (),
        arrays: Iterable[int] = (),
        reason: str = "",
        grace_s: float = 0.0,
    ) -> None:
        """Give up these runs in flight, or those that need these arrays, and those that need them.

        With a `reason` also what has been launched of them must end: `grace_s` later at the latest.
        """
        failed = set(arrays)
        for run, state in list(self._ledger.runs.items()):
            if run not in runs and failed.isdisjoint(arrays_in(state.args)):
                continue
            self.ended(run, state)
            grace = grace_s if run in runs else max(grace_s, GRACE_S)
            client = self._rebuilder.withdraw(run, reason, grace)
            failed.update(state.results)
            for array in state.results:
                if array in client.arrays:
                    client.arrays[array].error = error
            self._env.send(client.address, RunFailed(run, state.results, error))

    def refused(self, run: int, results: tuple[int, ...], error: ErrorReport) -> None:
        """A run cannot be; if it seemed to have ended, its results are not what they should be."""
        if run not in self._ledger.runs and results:
            client = self._ledger.clients.get(client_of(results[0]))
            if client is None:
                return
            self._spoil(client, results, error)
        self.fail(error, runs=(run,), arrays=results)

    # --- deadlines -------------------------------------------------------------------------------------

    def started(self, run: int) -> None:
        """A run with a timeout has been launched."""
        state = self._ledger.runs.get(run)
        if state is not None:
            timeout_s = state.record.program.body.timeout_s
            self._deadlines.add(run, timeout_s, self._env.now_s())
            self._arm()

    def ended(self, run: int, state: RunState) -> None:
        """A run has ended, in whatever way."""
        timeout_s = state.record.program.body.timeout_s
        if timeout_s > 0:
            self._deadlines.discard(run, timeout_s)
            if not self._deadlines and self._timer is not None:
                self._timer.cancel()
                self._timer = None

    def _arm(self) -> None:
        if not self._deadlines:
            return
        next_s = self._deadlines.next_s()
        if self._timer is not None:
            if self._due_s <= next_s:
                return
            self._timer.cancel()
        self._due_s = next_s
        delay_s = max(0.0, next_s - self._env.now_s())
        self._timer = self._env.call_later(delay_s, LookAtDeadlines())

    def look_at_deadlines(self) -> None:
        """The timer has run out: fail what is overdue, and wait for the next."""
        self._timer = None
        for run in self._deadlines.overdue(self._env.now_s()):
            if run in self._ledger.runs:
                self._env.count("runs_overdue")
                self._explain(run, partial(self._time_out, run))
        self._arm()

    def _time_out(self, run: int, explanation: str) -> None:
        state = self._ledger.runs.get(run)
        if state is None:
            return  # it has ended while somebody found out why it does not
        program = state.record.program
        where = ", ".join(f"{island} ({', '.join(h)})" for island, h in program.hosts.items())
        words = (
            f"a call of {program.body.name!r} had not ended {program.body.timeout_s:g} s after it began on "
            f"{where}"
        )
        self._env.log("warning", "run timed out", run=run_name(run), program=program.body.name)
        error = ErrorReport.of(ComputationTimeout(". ".join(filter(None, (words, explanation)))))
        self.fail(error, runs=(run,), reason=words)

    # --- cancelling ------------------------------------------------------------------------------------

    def cancel(self, client: Client, arrays: tuple[int, ...]) -> None:
        """A client does not want these arrays any more."""
        wanted = frozenset(arrays)
        self._cancel(client, lambda run, results: not wanted.isdisjoint(results), "pw.cancel")

    def cancel_runs(self, message: CancelRuns) -> Error | None:
        """Somebody ends a run, or all of a client's; what is wrong with that."""
        client = self._ledger.clients.get(message.client)
        if client is None:
            return ArgumentError(f"there is no client {message.client}; see pw status")
        chosen = message.run

        def wanted(run: int, results: Collection[int]) -> bool:
            return chosen in (0, run)

        if not self._cancel(client, wanted, "pw cancel") and chosen:
            return ArgumentError(f"no run {run_name(chosen)} is in flight; see pw status")
        return None

    def _cancel(
        self, client: Client, wanted: Callable[[int, Collection[int]], bool], by: str
    ) -> int:
        """End the runs of a client that are `wanted`, by their numbers and results; how many there are."""
        chosen = {
            run: state.record.program.body.name
            for run, state in self._ledger.runs.items()
            if state.client == client.number and wanted(state.record.order, state.results)
        }
        waiting = [
            message
            for message in client.backlog
            if isinstance(message, Run) and wanted(message.run, message.results)
        ]
        names = set(chosen.values())
        names.update(
            client.programs[message.program].body.name
            for message in waiting
            if message.program in client.programs
        )
        lost = self._lost(client, wanted)
        origins = (client.lineage.origins.get(array) for array in lost)
        names.update(o.maker.program.body.name for o in origins if o is not None and o.maker)
        what = ", ".join(map(repr, sorted(names))) or "nothing"
        words = f"{what} of client {client.number} ({client.name}) was cancelled with {by}"
        again = "call it again if its results are needed after all"
        error = ErrorReport.of(Cancelled(f"{words}; {again}"))
        for array in lost:
            del client.lost[array]
        self._spoil(client, lost, error)
        self.fail(error, runs=chosen, arrays=lost, reason=words, grace_s=GRACE_S)
        for message in waiting:
            place = client.backlog.index(message)
            if given := client.donated_to(message):
                client.backlog[place] = Delete(given)  # in its turn: it may not even be made yet
            else:
                del client.backlog[place]
            self._refuse(client, message, error)
        self._env.count("runs_cancelled", len(chosen) + len(waiting))
        if lost or waiting:  # what was behind them may go now
            self._rebuilder.proceed(client)
        return len(chosen) + len(waiting) + len(lost)

    def _lost(
        self, client: Client, wanted: Callable[[int, Collection[int]], bool]
    ) -> tuple[int, ...]:
        """What is lost and would be made again by such runs, or from what these make."""
        origins = client.lineage.origins
        makers = {
            maker.order: maker
            for array in client.lost
            if (origin := origins.get(array)) is not None and (maker := origin.maker) is not None
        }
        failed: set[int] = set()
        for _, record in sorted(makers.items()):
            lost = [array for array in record.results if array in client.lost]
            if wanted(record.order, lost) or not failed.isdisjoint(arrays_in(record.args)):
                failed.update(record.results)
        return tuple(array for array in client.lost if array in failed)

    def _spoil(self, client: Client, arrays: Iterable[int], error: ErrorReport) -> None:
        """These arrays, which no run in flight makes, have failed."""
        spoilt = [n for n in arrays if n in client.arrays and client.arrays[n].error is None]
        for number in spoilt:
            client.arrays[number].error = error
        if spoilt:
            self._env.send(client.address, RunFailed(0, tuple(spoilt), error))

    # --- reports ---------------------------------------------------------------------------------------

    def status(self) -> tuple[RunStatus, ...]:
        """The oldest runs in flight of each client."""
        shown: dict[int, int] = {}
        found = []
        now_s = self._env.now_s()
        for state in self._ledger.runs.values():
            count = shown[state.client] = shown.get(state.client, 0) + 1
            if count <= RUNS_SHOWN:
                found.append(
                    RunStatus(
                        state.record.order,
                        state.record.program.body.name,
                        state.islands,
                        state.segments_left,
                        now_s - state.began_s,
                    )
                )
        return tuple(found)
