"""What was lost with a host: marks the arrays, and withdraws the runs that need them.

When an island leaves its epoch, each run in flight that needs it is withdrawn on all its islands.
The results of those runs are lost, as is every array that lay on the island. The same happens to a
single array that a host has not got, and to an upload that did not reach its hosts. `rebuild`
brings back what is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from pw.core.actors.actor import handles
from pw.core.errors import INFRASTRUCTURE, ErrorReport, HostLost
from pw.core.ids import Address, arrays_in, is_repeat
from pw.core.messages import ArraysLost, EpochEnded, RunFailed
from pw.sched.control.array_states import ArrayEntry, ArrayState
from pw.sched.control.clients import Client
from pw.sched.control.lineage import pause_s
from pw.sched.control.recovery.plan import named
from pw.sched.control.run_states import RunInFlight, RunTransition
from pw.sched.control.runs import RunsInFlight
from pw.sched.control.sessions import ControlPart, handles_host

EARLY_LOSSES = 1 << 16
"""Number of results that hosts may report as lost before their client has told of them."""


@dataclass(frozen=True, slots=True)
class Proceed:
    """Timer: rebuild what this client has lost."""

    client: int


@dataclass(eq=False)
class Losses(ControlPart):
    """Finds lost arrays and runs."""

    runs: RunsInFlight

    @handles(EpochEnded)
    def _epoch_ended(self, sender: Address, message: EpochEnded) -> None:
        arriving: set[int] = set()
        for client in self.sessions.clients:
            error = self.sessions.error_for(client, message)
            for number, array in list(client.arrays.all()):
                if array.island != message.island or array.state is ArrayState.FAILED:
                    continue
                if array.awaited:
                    arriving.add(number)
                client.arrays.lose(number, error, island=True)

        def error_for(client: Client) -> ErrorReport:
            return self.sessions.error_for(client, message)

        self._interrupt(error_for, island=message.island, arrays=arriving)

    def _interrupt(
        self,
        error_for: Callable[[Client], ErrorReport],
        *,
        island: str = "",
        runs: Iterable[int] = (),
        arrays: Iterable[int] = (),
    ) -> None:
        """Withdraw these runs, those that need this island, and those that need their results.

        Also those that need one of these arrays, which do not arrive: a run waits for all its
        arguments, even for one on another island that it does not read.
        """
        chosen, lost = set(runs), set(arrays)
        for run in list(self.runs.in_flight.values()):
            needs_lost = not lost.isdisjoint(arrays_in(run.args))
            if run.number not in chosen and island not in run.islands and not needs_lost:
                continue
            lost.update(run.results)
            client = self.sessions.get(run.client)
            assert client is not None, "the runs of a client leave with it"
            error = error_for(client)
            self.runs.withdraw(run, RunTransition.LOSE, error)
            for number in run.results:
                array = client.arrays.get(number)
                if array is not None and array.error is None and not array.is_lost:
                    client.arrays.lose(number, error)

    def withdraw(self, runs: Iterable[int], error: ErrorReport) -> None:
        """Withdraw runs of which nothing was launched; their results are lost until they are run."""
        self._interrupt(lambda client: error, runs=runs)

    def run_lost(self, run: RunInFlight, error: ErrorReport) -> None:
        """Repeat a run that has ended without its values, with the runs that need it."""
        self._interrupt(lambda client: error, runs=(run.number,))
        self._try_again(run.client, run.record.tries)

    def _try_again(self, client: int, tries: int) -> None:
        self._env.call_later(pause_s(tries), Proceed(client))

    @handles_host(ArraysLost)
    def _arrays_lost(self, host: str, message: ArraysLost) -> None:
        for number in message.arrays:
            client = self.sessions.owner(number)
            if client is None:
                self._env.count("messages_stale")
            else:
                self._array_lost(client, number, host)

    def _array_lost(self, client: Client, number: int, host: str) -> None:
        """A host says that it has not got an array, which may be known."""
        array = client.arrays.get(number)
        if array is None:
            is_known = number <= client.last_run or is_repeat(number)
            is_to_come = not is_known or client.stream.will_make(number)
            if is_to_come and len(client.early_losses) < EARLY_LOSSES:
                client.early_losses.setdefault(number, host)
            return
        if array.error is not None:
            self.sessions.tell(client, RunFailed(0, (number,), array.error))
            return
        if array.is_lost:
            return
        if host not in array.hosts:
            self._env.count("messages_refused")
            return
        origin = client.lineage.origins.get(number)
        words = f"a host was lost while it sent what {named(array.spec, origin)} is made of"
        error = ErrorReport.of(HostLost(words))
        making = [run for run in self.runs.in_flight.values() if number in run.results]
        for run in making:
            run.spoil(error)  # it is run again when all its segments have ended
        if not making and not array.awaited:
            client.arrays.lose(number, error)
            maker = origin.maker if origin is not None else None
            if maker is None:
                array.count(self._env.now_s())
            self._try_again(client.number, (maker or array).tries)

    def arrival_failed(
        self, client: Client, number: int, array: ArrayEntry, error: ErrorReport
    ) -> bool:
        """Lose an array that did not reach a host; return False if it is not brought again."""
        now_s = self._env.now_s()
        if error.kind not in INFRASTRUCTURE or array.in_vain(now_s):
            return False
        array.restored = True
        array.count(now_s)
        client.arrays.lose(number, error)
        if number not in client.arrays:  # other hosts may have their shards
            self._islands.release(client.number, [(number, array)], late=True)
        needing = [run.number for run in self.runs.in_flight.values() if number in run.args]
        self._interrupt(lambda client: error, runs=needing)
        self._try_again(client.number, array.tries)
        return True
