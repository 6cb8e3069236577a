"""Suspends clients and resumes them (`suspension_states` has the states of a suspension).

What it takes is there for other reasons: copies in host memory are replicas (`checkpoints.replicas`), a client
without devices waits as for a lost island (`recovery`), and queued runs that are withdrawn are run like those
that were lost. An array that has replicas already is not copied again, and one that cannot be copied is made
again from its lineage. Arrays under a name belong to the holder of the name and stay where they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

from pw.core import messages as msg
from pw.core.actors.actor import handles
from pw.core.errors import INFRASTRUCTURE, ArrayLost, CheckpointFailed, Error, ErrorReport, HostLost
from pw.core.ids import NAME_CHARACTERS, Address, is_repeat, scheduler_of, store_of
from pw.core.rights import Resource
from pw.core.sharding import ArraySpec
from pw.sched.control.array_states import ArrayEntry, ArrayState
from pw.sched.control.checkpoints.in_memory import box_holders
from pw.sched.control.checkpoints.replicas import ReplicaTable
from pw.sched.control.client_order import ClientOrder
from pw.sched.control.clients import Client
from pw.sched.control.recovery.losses import Losses
from pw.sched.control.recovery.rebuild import Rebuilder
from pw.sched.control.run_states import RunInFlight
from pw.sched.control.runs import RunsInFlight
from pw.sched.control.sessions import ControlPart, handles_client, handles_host
from pw.sched.control.slices import SliceRequests
from pw.sched.control.suspension_states import Suspension, SuspensionEvent, SuspensionState

HEARD_S = 5.0
"""Seconds to wait for a client's word that it sends nothing more to hosts: it may be stopped."""

BYTES_PER_S = 256 << 20
"""Speed at which arrays are taken to leave devices until some have."""
MEASURED_BYTES = 16 << 20
"""Bytes of arrays that tell how fast arrays leave devices."""

_NOT_COPIED = INFRASTRUCTURE | {CheckpointFailed.__name__, ArrayLost.__name__}
"""Names of the errors of a copy; any other is the error of the array."""


@dataclass(eq=False)
class Suspensions(ControlPart):
    """The suspended clients, and those that are about to leave their devices."""

    stream: ClientOrder
    slices: SliceRequests
    runs: RunsInFlight
    replicas: ReplicaTable
    losses: Losses
    rebuilder: Rebuilder
    stays: Callable[[Client], None] = lambda client: None
    """Function that is called when a client is to go on that has not been suspended."""
    bytes_per_s: float = BYTES_PER_S
    """Speed at which the arrays of a client left its devices last, in bytes per second."""
    leaving: dict[int, Client] = field(default_factory=dict, init=False)
    """Clients that are to leave their devices and have not, by number."""

    # --- leave, and come back -------------------------------------------------------------------

    def islands_of(self, client: Client) -> set[str]:
        """Return the islands on which a client has slices."""
        bindings = self._islands.bindings
        return {bindings[number].island for number in client.slices.all if number in bindings}

    def in_words(self, client: Client) -> str:
        """Return who has suspended a client, and since when, or what it waits for since; empty for others."""
        if client.suspension is not None:
            return client.suspension.in_words(client.number, self._env.now_s())
        wants = client.left_for and client.slices.unbound
        return f"waits for {self.slices.wanted_in_words(client)}" if wants else ""

    def suspend(
        self,
        client: Client,
        by: str,
        request: tuple[Address, int] | None = None,
        *,
        to_files: bool = False,
    ) -> bool:
        """Have a client leave its devices; return whether it has left them already."""
        suspension = client.suspension
        if suspension is None:
            slices = frozenset(client.slices.all)
            suspension = client.suspension = Suspension(by, self._env.now_s(), slices)
            self.leaving[client.number] = client
            self._hold(client, suspension)
            self._env.log("info", "client is to be suspended", client=client.number, by=by)
        if to_files:
            suspension.to_files = True
            self.replicas.write(client)  # copies that are there already
        if not suspension.is_complete and request is not None:
            suspension.asked.append(request)
        return suspension.is_complete

    def suspended_before(self, client: Client, by: str) -> None:
        """A client that comes back was suspended at an earlier controller: it stays so."""
        state, slices = SuspensionState.SUSPENDED, frozenset(client.slices.all)
        client.suspension = Suspension(by, self._env.now_s(), slices, state=state)
        self.sessions.tell(client, msg.PauseUploads(is_over=True, suspended_by=by))

    def resume(self, client: Client) -> None:
        """Have a client go on, as soon as there are devices for it."""
        suspension = client.suspension
        if suspension is None:
            self.stays(client)
            return
        suspension.after(SuspensionEvent.RESUME)
        client.suspension = None
        self._env.log("info", "client is resumed", client=client.number)
        if self.leaving.pop(client.number, None) is None:
            client.left_for = f"it was {suspension.verb} by {suspension.by}"
            self.sessions.tell(client, msg.PauseUploads(is_over=True))
            at = suspension.target, suspension.devices
            self.slices.take_up(client, suspension.slices, *at)
        else:
            self._islands.tell_all(msg.LetLaunch(client.number))
            self.sessions.tell(client, msg.PauseUploads(is_over=True))
            error = ErrorReport.of(
                Error(f"client {client.number} was resumed before it was suspended")
            )
            self._answer(suspension, error)
        self.rebuilder.proceed(client)

    def _answer(self, suspension: Suspension, error: ErrorReport | None) -> None:
        for asker, request in suspension.asked:
            self._env.send(asker, msg.Answered(request, error))
        suspension.asked.clear()

    def client_left(self, client: Client) -> None:
        """A client that leaves is not suspended any more."""
        self.leaving.pop(client.number, None)
        if client.suspension is not None:
            error = ErrorReport.of(Error(f"client {client.number} has left"))
            self._answer(client.suspension, error)

    # --- to the boundary --------------------------------------------------------------------------

    def _hold(self, client: Client, suspension: Suspension, but: tuple[int, ...] = ()) -> None:
        suspension.unanswered = set(self._islands.schedulers)
        self._islands.tell_all(msg.HoldLaunches(client.number, but))

    @handles(msg.LaunchesHeld)
    def _held(self, sender: Address, message: msg.LaunchesHeld) -> None:
        client = self.leaving.get(message.client)
        if client is not None and client.suspension is not None:
            client.suspension.unanswered.discard(message.island)
            client.suspension.queued[message.island] = frozenset(message.queued)

    def go_on(self) -> None:
        """Take each suspension as far as it can go, at the end of a turn."""
        for client in list(self.leaving.values()):
            suspension = client.suspension
            assert suspension is not None, "a client that leaves its devices is being suspended"
            if suspension.unanswered or client.resuming is not None:
                continue
            if suspension.state is SuspensionState.HOLDING:
                suspension.after(SuspensionEvent.HOLD)
                self._hold(client, suspension)
                self.sessions.tell(client, msg.PauseUploads())
                self._env.call_later(HEARD_S, partial(self._hear, suspension))
            elif suspension.state is SuspensionState.COUNTING and suspension.is_heard:
                suspension.after(SuspensionEvent.COUNT)
                self.stream.begin_uploads(client)
                suspension.withdrawn = tuple(self.behind_boundary(client, suspension))
                first = tuple(run.number for run in self._launched(client, suspension))
                self._hold(client, suspension, first)
            elif suspension.state is SuspensionState.ENDING and self._has_ended(client, suspension):
                suspension.after(SuspensionEvent.END)
                self._copy(client, suspension)
            if suspension.state is SuspensionState.COPYING and self.are_copied(client, suspension):
                self._measure(suspension)
                suspension.after(SuspensionEvent.COPY)
                self.leave(client, suspension)

    @handles_client(msg.UploadsPaused)
    def _uploads_paused(self, client: Client, message: msg.UploadsPaused) -> None:
        if client.suspension is not None:
            self._hear(client.suspension)

    @staticmethod
    def _hear(suspension: Suspension) -> None:
        suspension.is_heard = True

    def runs_of(self, client: Client) -> list[RunInFlight]:
        """Return the runs in flight of a client, in the order in which they were submitted."""
        return [run for run in self.runs.in_flight.values() if run.client == client.number]

    def behind_boundary(self, client: Client, suspension: Suspension) -> Iterator[int]:
        """Yield the runs behind the last one that was launched, or that could not be run again."""
        runs = self.runs_of(client)
        last = -1
        for place, run in enumerate(runs):
            queued = all(run.number in suspension.queued.get(at, ()) for at in run.islands)
            body, program = run.record.program.body, run.record.program.program
            if not queued or not body.is_repeatable or is_repeat(program):
                last = place
        yield from (run.number for run in runs[last + 1 :])

    def _launched(self, client: Client, suspension: Suspension) -> list[RunInFlight]:
        behind = frozenset(suspension.withdrawn)
        return [run for run in self.runs_of(client) if run.number not in behind]

    def _has_ended(self, client: Client, suspension: Suspension) -> bool:
        """Whether launched runs and checkpoints have ended, and no bytes are on their way to a device."""
        arrives = any(array.awaited for _, array in client.arrays.all())
        saves = self.stream.saves.count(client) + self.stream.checkpoints.count(client)
        return not (arrives or saves or self._launched(client, suspension))

    def _lies_there(self, spec: ArraySpec, suspension: Suspension) -> bool:
        """Whether an array lies on devices that the client leaves."""
        slice_ = spec.placement.slice
        return slice_ in suspension.slices and slice_ in self._islands.bindings

    # --- copies -----------------------------------------------------------------------------------

    def present(self, client: Client, suspension: Suspension) -> Iterator[tuple[int, ArraySpec]]:
        """Yield the arrays that exist: those that the client holds, and those that queued runs read."""
        runs = [
            run for n in suspension.withdrawn if (run := self.runs.in_flight.get(n)) is not None
        ]
        results = {array for run in runs for array in run.results}
        for number, array in client.arrays.held.items():
            if array.state is ArrayState.PRESENT and number not in results:
                yield number, array.spec
        seen: set[int] = set()
        for run in runs:
            for arg, spec in zip(run.args, run.record.program.body.inputs, strict=True):
                if isinstance(arg, int) and not (
                    arg in seen or arg in results or arg in client.arrays.held
                ):
                    seen.add(arg)
                    yield arg, spec

    def _copy(self, client: Client, suspension: Suspension) -> None:
        """Have all that exists copied to host memory, before queued work that may drop it.

        Of slices that stay, what only queued runs read: it is gone when these are withdrawn.
        """
        suspension.include(client.slices.all)
        by_island: dict[str, list[tuple[str, msg.ArrayCopy]]] = {}
        amounts: dict[int, int] = {}
        for number, spec in self.present(client, suspension):
            goes = self._lies_there(spec, suspension) or (
                number not in client.arrays.held and self._islands.is_bound(spec)
            )
            if not goes or self.replicas.are_complete(number, spec):
                continue
            if number not in client.lineage.origins:
                continue  # made again for a run that is withdrawn; no copy of it would count
            devices = self._islands.located(spec)
            island = self._islands.bindings[spec.placement.slice].island
            for host, positions in box_holders(spec, devices).items():
                copy = msg.ArrayCopy(number, spec, devices, positions, to_files=suspension.to_files)
                by_island.setdefault(island, []).append((host, copy))
            amounts[number] = spec.size_bytes
        suspension.copied = set(amounts)
        suspension.copies_since_s = self._env.now_s()
        suspension.size_bytes = sum(amounts.values())
        self.sessions.usage.keep(client.number, Resource.HOST_MEMORY, amounts)
        for island, copies in by_island.items():
            order = msg.CopyArrays(client.number, tuple(copies), first=True)
            self._env.send(scheduler_of(island), order)

    def _measure(self, suspension: Suspension) -> None:
        """Note how fast a client's arrays were copied, if there were enough of them to tell."""
        took_s = self._env.now_s() - suspension.copies_since_s
        if suspension.size_bytes >= MEASURED_BYTES and took_s > 0:
            self.bytes_per_s = suspension.size_bytes / took_s

    def are_copied(self, client: Client, suspension: Suspension) -> bool:
        """Whether all that is to be copied and still exists is in host memory."""
        origins = client.lineage.origins
        return all(
            (origin := origins.get(number)) is None
            or self.replicas.are_complete(number, origin.spec)
            or not self._islands.is_bound(origin.spec)
            or ((array := client.arrays.get(number)) is not None and not array.is_good)
            for number in suspension.copied
        )

    @handles_host(msg.Holdings)
    def _not_copied(self, host: str, message: msg.Holdings) -> None:
        """A host cannot copy an array: it has an error, is made again, or its client does not leave."""
        if not self.leaving:
            return
        for holding in message.holdings:
            client = self.sessions.owner(holding.array)
            suspension = None if client is None else client.suspension
            if client is None or suspension is None or holding.boxes or holding.error is None:
                continue
            if holding.array not in suspension.copied:
                continue
            suspension.copied.discard(holding.array)
            origin = client.lineage.origins.get(holding.array)
            if origin is None:
                continue
            if holding.error.kind not in _NOT_COPIED:
                origin.value_error = holding.error
                continue
            can_be_made = origin.maker is not None and origin.maker.program.body.is_repeatable
            if not (can_be_made or origin.is_input):
                self._give_up(client, suspension, holding.error)
                return

    def _give_up(self, client: Client, suspension: Suspension, why: ErrorReport) -> None:
        """Leave a client where it is: it has an array that could not be copied and not be made again."""
        words = f"client {client.number} ({client.name}) stays on its devices: {why.message}"
        self._env.log("warning", "client is not suspended", client=client.number, why=why.message)
        asked, suspension.asked = suspension.asked, []
        self.resume(client)
        for asker, request in asked:
            self._env.send(asker, msg.Answered(request, ErrorReport.of(Error(words))))

    # --- off the devices --------------------------------------------------------------------------

    def leave(self, client: Client, suspension: Suspension) -> None:
        """Take a client's queued runs, arrays and slices off the devices."""
        error = ErrorReport.of(
            HostLost(
                f"client {client.number} ({client.name}) was {suspension.verb} by {suspension.by}"
            )
        )
        suspension.islands = frozenset(self.islands_of(client))
        suspension.include(client.slices.all)
        withdrawn = [self.runs.in_flight.get(number) for number in suspension.withdrawn]
        results = {array for run in withdrawn if run is not None for array in run.results}
        self.losses.withdraw(suspension.withdrawn, error)
        arrays = [  # also lost ones: some hosts may have their shards; of results to come, none has any
            (number, array)
            for number, array in client.arrays.all()
            if array.error is None
            and number not in results
            and self._lies_there(array.spec, suspension)
        ]
        self.release(arrays)
        for number, _ in arrays:
            client.arrays.lose(number, error, island=True)
        self._drop_unannounced(client, suspension)
        self.slices.set_down(client, suspension.slices, error)
        gone = tuple(number for number, _ in arrays)
        self._islands.tell_all(msg.LetLaunch(client.number, gone))
        stays = suspension.outlasts and not suspension.goes_on
        by = suspension.by[:NAME_CHARACTERS] if stays else ""
        self.sessions.tell(client, msg.PauseUploads(is_over=True, suspended_by=by))
        del self.leaving[client.number]
        self._answer(suspension, None)
        seconds = round(self._env.now_s() - suspension.since_s, 3)
        self._env.log("info", "client is suspended", client=client.number, seconds=seconds)
        self._env.count("suspensions")
        if suspension.goes_on:
            self.resume(client)

    def _drop_unannounced(self, client: Client, suspension: Suspension) -> None:
        """Have hosts drop what has come to them before its announcement; the client uploads it again.

        What goes to a slice that stays is kept: the client takes it for uploaded.
        """
        stays = {
            message.array
            for message in client.stream
            if isinstance(message, msg.CreateArray)
            and message.spec.placement.slice not in suspension.slices
        }
        unannounced = client.arrays.unannounced
        for number in [number for number in unannounced if number not in stays]:
            for host in unannounced.pop(number):
                self._env.send(store_of(host), msg.DropUploads((number,)))

    def release(self, arrays: list[tuple[int, ArrayEntry]]) -> None:
        """Have hosts drop arrays that are in host memory.

        They hear it from here, so that they drop them before they restore them for a client that goes on.
        """
        of_hosts: dict[str, list[int]] = {}
        for number, array in arrays:
            for host in array.hosts:
                of_hosts.setdefault(host, []).append(number)
        for host, numbers in of_hosts.items():
            self._env.send(store_of(host), msg.DropUploads(tuple(numbers)))
