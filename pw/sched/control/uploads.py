"""Arrays on their way to their hosts.

A client announces an array in its stream (`CreateArray`) and sends the bytes to the hosts; each
host reports that it has its shards, or that it will not have them (`Uploaded`). Either may come
first, since they take different links. An array that is read from files, or that recovery brings
back, arrives in the same way.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from pw.core import messages as msg
from pw.core.actors.actor import handles
from pw.core.errors import (
    INFRASTRUCTURE,
    ArrayLost,
    Error,
    ErrorReport,
    IslandLost,
    NotOwner,
    ProtocolError,
)
from pw.core.events import TransferEvent
from pw.core.ids import Address, client_of, is_repeat, run_name, store_of
from pw.core.messages.checks import check_source
from pw.core.programs.spec_checks import check_spec, layout_of
from pw.sched.control.array_states import ArrayEntry, ArrayState
from pw.sched.control.checkpoints.replicas import ReplicaTable
from pw.sched.control.clients import Client
from pw.sched.control.explain.memory import with_holders
from pw.sched.control.programs import holders
from pw.sched.control.recovery.losses import Losses
from pw.sched.control.recovery.plan import named
from pw.sched.control.recovery.replay import Replays
from pw.sched.control.run_ends import RunEnds
from pw.sched.control.sessions import ControlPart, handles_client, handles_host

DISCARDED_KEPT = 16_384
"""Number of arrays that a client has deleted and whose upload has not ended."""


@dataclass(eq=False)
class UploadTable(ControlPart):
    """Tracks arrays until all their hosts have reported."""

    replicas: ReplicaTable
    losses: Losses
    replays: Replays
    ends: RunEnds

    # --- announced by the client ------------------------------------------------------------------

    def create(self, client: Client, message: msg.CreateArray) -> None:
        """Add an array that a client uploads, or that its hosts read."""
        number, slice_ = message.array, message.spec.placement.slice
        if client_of(number) != client.number or is_repeat(number) or number in client.arrays:
            self._env.count("messages_refused")
            error = ProtocolError("a new array has a number that is taken or is another client's")
            self.sessions.tell(client, msg.RunFailed(0, (number,), ErrorReport.of(error)))
            return
        reported = client.arrays.announced(number)
        try:
            check_spec(message.spec, client.slices.devices(slice_))
            check_source(message.source)
        except Error as refused:
            self._refuse(client, message, reported, refused)
            return
        home = holders(message.spec, self._islands.bindings)
        if slice_ not in client.slices.owned or home is None:
            self._refuse(client, message, reported, self._nowhere(client, message))
            return
        self._bound_discarded(client)
        island, hosts = home
        spec = client.one_spec(message.spec)
        array = ArrayEntry(spec, island, hosts, ArrayState.ARRIVING, frozenset(hosts))
        client.arrays.add(message.array, array)
        client.lineage.add_input(message.array, spec, message.source)
        if isinstance(message.source, msg.OfferSource):
            self.replays.handovers.take(client, message.array, spec, message.source)
            return
        self._islands.place(island, message.array, spec)
        if message.source is not None:
            self.replays.read(message.array, array, message.source)
            return
        array.input = message.array
        for host, report in reported.items():
            self._reported(client, number, array, host, self._error_of(array, report))
        was_bound = client.slices.times_bound.get(message.spec.placement.slice, 0)
        if message.bound != was_bound and array.awaited:
            # It went to the hosts of an earlier binding.
            self.sessions.tell(client, msg.UploadAgain(message.array, message.array))

    def _bound_discarded(self, client: Client) -> None:
        """Give up the oldest upload of a deleted array if there are too many: its bytes may never come."""
        discarded = client.arrays.discarded
        if len(discarded) <= DISCARDED_KEPT:
            return
        number, array = next(iter(discarded.items()))
        error = ErrorReport.of(
            ProtocolError(
                f"the array {array.spec.short} was deleted before its bytes were sent, as were "
                f"{DISCARDED_KEPT} later ones"
            )
        )
        for host in tuple(array.awaited):
            self._reported(client, number, array, host, error)

    def _nowhere(self, client: Client, message: msg.CreateArray) -> Error:
        """Return why an array has no devices."""
        refusal = client.slices.refused.get(message.spec.placement.slice)
        if refusal is not None:
            return refusal.exception()
        if message.spec.placement.slice in client.slices.owned:
            return IslandLost(
                f"the array {message.spec.short} cannot be put where it was to go: a host was "
                "lost, and its island has not come back. Put it again when it has (see pw.status()), or "
                "on other devices"
            )
        return NotOwner(
            f"the array {message.spec.short} cannot be put where it was to go: these devices have "
            "been given back; put it on the ones of another pw.make_virtual_device_set()"
        )

    def _refuse(
        self, client: Client, message: msg.CreateArray, reported: Collection[str], error: Error
    ) -> None:
        self._env.count("messages_refused")
        report = ErrorReport.of(error)
        for host in reported:
            self._env.send(store_of(host), msg.DropUploads((message.array,)))
        client.arrays.add(message.array, ArrayEntry.failed(report))
        self.sessions.tell(client, msg.RunFailed(0, (message.array,), report))

    @handles_client(msg.InputGone)
    def _input_gone(self, client: Client, message: msg.InputGone) -> None:
        """The client was asked to upload an array again, and has not kept its value."""
        array = client.arrays.find(message.array)
        if array is None or not array.awaited:
            return
        error = ErrorReport.of(
            ArrayLost(
                f"the hosts that had the array {array.spec.short} were lost, and this process has "
                "not kept the value that it was put there with; pass keep=True to pw.put, or call "
                "pw.checkpoint"
            )
        )
        for host in tuple(array.awaited):
            self._reported(client, message.array, array, host, error)
        self.sessions.tell(client, msg.RunFailed(0, (message.array,), error))

    @handles_client(msg.LinkLost)
    def _link_lost(self, client: Client, message: msg.LinkLost) -> None:
        """Ask again for what the client sent to a host, because it may not have come there."""
        for number, array in client.arrays.all():
            if message.host in array.awaited and array.input:
                self.sessions.tell(client, msg.UploadAgain(array.input, number))

    # --- reported by the hosts --------------------------------------------------------------------

    @handles_host(msg.Uploaded)
    def _uploaded(self, host: str, message: msg.Uploaded) -> None:
        number = message.array
        client = self.sessions.owner(number)
        if client is None:
            self._env.count("messages_stale")
            if self.sessions.is_known(client_of(number)):
                self._env.send(store_of(host), msg.DropUploads((number,)))
            return
        array = client.arrays.find(number)
        if array is not None:
            self._reported(client, number, array, host, self._error_of(array, message))
        elif message.again:
            self._env.count("messages_stale")  # runs that read it may not have been launched yet
        elif number <= client.arrays.newest_input or is_repeat(number) or client.is_suspended:
            self._env.send(store_of(host), msg.DropUploads((number,)))
        elif not client.slices.are_on(host):
            self._env.count("messages_refused")
        else:
            client.arrays.unannounced.setdefault(number, {})[host] = message

    def _error_of(self, array: ArrayEntry, message: msg.Uploaded) -> ErrorReport | None:
        """Return why a host does not have its shards of an array, or has others than were announced."""
        is_bound = array.spec.placement.slice in self._islands.bindings
        if message.error is not None or not message.layout or not is_bound or array.error:
            return message.error
        if message.layout == layout_of(array.spec, self._islands.located(array.spec)):
            return None
        wrong = ProtocolError(
            f"the array {array.spec.short} was announced in another form than it was uploaded"
        )
        return ErrorReport.of(wrong)

    def _reported(
        self, client: Client, number: int, array: ArrayEntry, host: str, error: ErrorReport | None
    ) -> None:
        """A host has its shards of an array, or will not have them."""
        if host not in array.awaited:
            self._env.count("messages_stale")
            return
        array.report(host)
        if error is not None and array.error is None:
            if self.losses.arrival_failed(client, number, array, error):
                self._islands.tell_all(msg.UploadEnded(number))
                return
            if error.kind in INFRASTRUCTURE:
                what = named(array.spec, client.lineage.origins.get(number))
                lost = ArrayLost(f"{what} could not be brought back: {error.message}")
                error = ErrorReport.of(lost, error.where)
            array.fail(error)
            self.ends.fail(error, arrays=(number,))
        if array.awaited:
            return
        if array.input and array.error is None:
            client.usage.uploaded_bytes += array.spec.size_bytes
        if self._events is not None and array.input and array.error is None:
            self._events.publish(_uploaded(client, number, array))
        was_discarded = client.arrays.arrive(number, array)
        if array.restored:
            self.replicas.arrived(client, number)
        self._islands.tell_all(msg.UploadEnded(number))
        if was_discarded or array.refused:
            self._drop(client, number, array)

    def _drop(self, client: Client, number: int, array: ArrayEntry) -> None:
        self._islands.release(client.number, [(number, array)], late=True)
        array.drop()

    # --- refused by a scheduler -------------------------------------------------------------------

    @handles(msg.UploadRefused)
    def _over_bound(self, sender: Address, message: msg.UploadRefused) -> None:
        """Fail an array for which its tenant has no room, and have its hosts drop it."""
        number = message.array
        client = self.sessions.owner(number)
        array = None if client is None else client.arrays.get(number)
        if client is None or array is None or not array.is_good:
            self._env.count("messages_stale")
            return
        error = with_holders(self.sessions, client.number, message.error, message.holders)
        array.refused = True
        client.arrays.fail((number,), error)
        self.ends.fail(error, arrays=(number,))
        self.sessions.tell(client, msg.RunFailed(0, (number,), error))
        if not array.awaited:
            self._drop(client, number, array)

    def settle_taken(self) -> None:
        """Arrays that runs of other clients make have arrived, or will not."""
        runs = self.losses.runs
        while runs.handed:  # an array that will not arrive may fail runs that make arrays of others
            handed, runs.handed = runs.handed, []
            for number, error in handed:
                self._settle_taken(number, error)

    def _settle_taken(self, number: int, error: ErrorReport | None) -> None:
        client = self.sessions.owner(number)
        array = None if client is None else client.arrays.find(number)
        if client is None or array is None:
            return
        for host in sorted(array.awaited):
            if host in array.awaited:
                self._reported(client, number, array, host, error)
        if array.error is not None:
            self.sessions.tell(client, msg.RunFailed(0, (number,), array.error))

    def host_lost(self, node: str) -> None:
        """Forget what a host has reported of uploads that are not announced."""
        for client in self.sessions.clients:
            for reported in client.arrays.unannounced.values():
                reported.pop(node, None)


def _uploaded(client: Client, number: int, array: ArrayEntry) -> TransferEvent:
    sender = (str(client.number),)
    size_bytes = array.spec.size_bytes
    return TransferEvent("upload", run_name(number), -1, sender, array.hosts, size_bytes, None)
