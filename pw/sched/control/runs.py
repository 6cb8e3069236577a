"""The life of a run at the controller: checked, recorded, handed to the schedulers, and credited when it ends.

A client may have so many runs in flight (`RUN_CREDITS`), and gets a credit back for each that has ended, in
whatever way. Credits are given back together: a client that has most of them misses none.
"""

from __future__ import annotations

from dataclasses import dataclass

from pw.core.actor import Env
from pw.core.errors import Error, ErrorReport
from pw.core.ids import client_of, scheduler_of
from pw.core.messages import Run, RunFailed, RunsSettled, SegmentDone
from pw.core.ticker import Ticker
from pw.sched.control.clients import NOWHERE, Array, Client, Poisoned, RunState
from pw.sched.control.ledger import Ledger, drop

RUN_CREDITS = 512
"""Runs a client may have in flight before its calls block."""

CREDITS_AT_ONCE = 64
"""So many are given back at once; fewer can wait, since a client that has most of its credits misses none."""

CREDITS_S = 0.01
"""How long credits wait for others: who waits for the end of each run must not be disturbed by each."""


@dataclass(frozen=True, slots=True)
class GiveBack:
    """Note to the controller: credits have waited for others long enough."""


class Runs:
    """The controller's part that starts runs and sees them end; see the module.

    Args:
        env: of the controller.
        ledger: what the controller knows.
        credits_at_once: credits of a client that do not wait for more.
    """

    def __init__(self, env: Env, ledger: Ledger, credits_at_once: int) -> None:
        self._env = env
        self._ledger = ledger
        self._credits_at_once = credits_at_once
        self._refunds = Ticker(env, CREDITS_S, GiveBack())
        self._settled: set[int] = set()
        """Clients that get credits back when this turn ends."""

    def start(self, client: Client, message: Run) -> None:
        """Submit a run to the scheduler of each island that it touches; refuse it if it cannot be."""
        if client_of(message.run) != client.number or message.run <= client.last_run:
            self._env.count("messages_duplicate")
            return
        client.last_run = message.run
        try:
            program = client.program_of(message)
            awaits = client.check_arguments(program, message.args)
            homes = client.check_results(program, message.results, self._ledger.bindings)
        except (Poisoned, Error) as error:
            report = error.report if isinstance(error, Poisoned) else ErrorReport.of(error)
            self.refuse(client, message, report)
            drop(self._env, self._ledger, client, client.delete(client.donated_to(message)))
            return
        given = [(number, client.take(number)) for number in client.donated_to(message)]
        donated = [(number, array) for number, array in given if array is not None]
        for array, output, home in zip(message.results, program.body.outputs, homes, strict=True):
            client.arrays[array] = Array(output.spec, *home)
        self._env.count("runs")
        record = client.lineage.add_run(message.run, program, message.args, message.results)
        client.lineage.release(number for number, _ in donated)
        islands = tuple(program.parts)
        if not islands:
            self._settle(client)
            return
        client.in_flight += 1
        self._ledger.runs[message.run] = RunState(
            client.number,
            record,
            message.args,
            message.results,
            islands,
            program.segment_count,
            donated,
            began_s=self._env.now_s(),
        )
        for island, submit in program.submissions(
            message.run, message.args, message.results, awaits
        ):
            self._env.send(scheduler_of(island), submit)

    def refuse(self, client: Client, message: Run, error: ErrorReport) -> None:
        """A run cannot be: its results carry the error. What it was to take away is still there."""
        for array in message.results:
            if client_of(array) == client.number and array not in client.arrays:
                client.arrays[array] = Array(NOWHERE, "", (), error=error)
        self._env.count("runs_failed")
        client.lineage.refuse_run(message.run)
        self._env.send(client.address, RunFailed(message.run, message.results, error))
        self._settle(client)

    def segment_done(self, message: SegmentDone) -> RunState | None:
        """A segment has ended; the run, if it was the last one."""
        state = self._ledger.runs.get(message.run)
        if state is None:
            return None
        state.segments_left -= 1
        state.lost = state.lost or message.lost
        return None if state.segments_left > 0 else state

    def end(self, run: int) -> None:
        """A run has ended by itself, with all its values."""
        self.credit(self._ledger.runs.pop(run))

    def client_left(self, client: Client) -> None:
        """Forget its runs."""
        runs = self._ledger.runs
        for run in [run for run, state in runs.items() if state.client == client.number]:
            del runs[run]
        self._settled.discard(client.number)

    # --- credits ---------------------------------------------------------------------------------------

    def credit(self, state: RunState) -> None:
        """A run that was in flight has ended, in whatever way."""
        if state.credited:
            client = self._ledger.clients[state.client]
            client.in_flight -= 1
            self._settle(client)

    def _settle(self, client: Client) -> None:
        client.settled += 1
        if client.settled >= self._credits_at_once:
            self._settled.add(client.number)
        else:
            self._refunds.start()

    def give_back(self) -> None:
        """All credits have waited long enough."""
        self._refunds.ticked(more=False)
        self._settled.update(n for n, client in self._ledger.clients.items() if client.settled)

    def turn_ended(self) -> None:
        """Send clients the credits that they get back."""
        for number in self._settled:
            client = self._ledger.clients.get(number)
            if client is not None:
                self._env.send(client.address, RunsSettled(client.settled))
                client.settled = 0
        self._settled.clear()
