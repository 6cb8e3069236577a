"""Arrays on their way to their hosts: announced by the client, and sent to the hosts by the client itself.

    announced (`CreateArray`) -> every host says that its shards are there, or are not (`Uploaded`) -> usable

Either may come first, since they come over different links: what ends early is remembered. An array that is
read from disk, or brought back after a host was lost (`pw.sched.control.recovery.rebuild`), arrives in
the same way. An array that is deleted on its way is *doomed*: its hosts drop it when it has arrived.
"""

from __future__ import annotations

from collections.abc import Callable

from pw.core.actor import Env
from pw.core.errors import INFRASTRUCTURE, ArrayLost, Error, ErrorReport, NotOwner
from pw.core.ids import client_of, scheduler_of, store_of
from pw.core.messages import (
    CreateArray,
    DropUploads,
    InputGone,
    RunFailed,
    UploadAgain,
    Uploaded,
    UploadEnded,
)
from pw.sched.control.cancelling import RunEnder
from pw.sched.control.checkpoints.replicas import Copies
from pw.sched.control.clients import NOWHERE, Array, Client
from pw.sched.control.ledger import Ledger, drop
from pw.sched.control.programs import holders
from pw.sched.control.recovery.plan import named
from pw.sched.control.recovery.rebuild import Rebuilder


class Uploads:
    """The controller's part that sees arrays arrive; see the module.

    Args:
        env: of the controller.
        ledger: what the controller knows.
        rebuilder: gets in another way what has not arrived.
        copies: what hosts have in memory, which may not be needed any more.
        ender: ends the runs that need what does not arrive at all.
        go_on: goes on with what the client has sent, which may have waited for an array.
        is_known: whether a client had this number here, whatever has become of it.
    """

    def __init__(
        self,
        env: Env,
        ledger: Ledger,
        rebuilder: Rebuilder,
        copies: Copies,
        ender: RunEnder,
        go_on: Callable[[Client], None],
        is_known: Callable[[int], bool],
    ) -> None:
        self._env = env
        self._ledger = ledger
        self._rebuilder = rebuilder
        self._copies = copies
        self._ender = ender
        self._go_on = go_on
        self._is_known = is_known

    def create(self, client: Client, message: CreateArray) -> None:
        """A client announces an array that it sends to the hosts, or that they are to read."""
        held = holders(message.spec, self._ledger.bindings)
        early = client.early_uploads.pop(message.array, {})
        if (
            client_of(message.array) != client.number
            or message.array in client.arrays
            or message.spec.placement.slice not in client.slices
            or held is None
        ):
            self._refuse(client, message, early)
            return
        island, hosts = held
        spec = client.one_spec(message.spec)
        array = Array(spec, island, hosts, frozenset(hosts), input=message.array)
        client.arrays[message.array] = array
        client.lineage.add_input(message.array, spec, message.source)
        self._env.send(scheduler_of(island), self._ledger.placed(message.array, spec))
        client.newest_input = max(client.newest_input, message.array)
        if message.source is not None:
            array.input = 0
            self._rebuilder.read(message.array, array, message.source)
            return
        for host, error_report in early.items():
            self._end(client, message.array, array, host, error_report)
        sent_elsewhere = message.bound != client.bounds[message.spec.placement.slice]
        unsure = sent_elsewhere or message.array in client.unsure
        client.unsure.discard(message.array)
        if unsure and array.uploading and message.array not in client.lost:
            self._env.send(client.address, UploadAgain(message.array, message.array))

    def _refuse(
        self, client: Client, message: CreateArray, early: dict[str, ErrorReport | None]
    ) -> None:
        self._env.count("messages_refused")
        error: Error = NotOwner(
            f"the array {message.spec.short} cannot be put where it was to go: these devices have been given "
            "back; put it on the ones of another pw.make_virtual_device_set()"
        )
        placed = holders(message.spec, self._ledger.bindings) is not None
        if not placed and message.spec.placement.slice in client.slices:
            error = ArrayLost(
                f"the array {message.spec.short} cannot be put where it was to go: a host was lost, and its "
                "island has not come back. Put it again when it has (see pw.status()), or on other devices"
            )
        report = ErrorReport.of(error)
        client.newest_input = max(client.newest_input, message.array)
        for host in early:
            self._env.send(store_of(host), DropUploads((message.array,)))
        if client_of(message.array) == client.number and message.array not in client.arrays:
            client.arrays[message.array] = Array(NOWHERE, "", (), error=report)
        self._env.send(client.address, RunFailed(0, (message.array,), report))

    def uploaded(self, host: str, message: Uploaded) -> None:
        """A host has its shards of an array, or will not have them."""
        client = self._ledger.clients.get(client_of(message.array))
        if client is None:
            self._env.count("messages_stale")
            if self._is_known(client_of(message.array)):
                self._env.send(store_of(host), DropUploads((message.array,)))
            return
        array = client.arrays.get(message.array) or client.doomed.get(message.array)
        if array is None and message.again:
            self._env.count("messages_stale")  # runs that read it may not have been launched yet
            return
        if array is None and (
            message.array <= client.newest_input or client.is_repeat(message.array)
        ):
            self._env.send(store_of(host), DropUploads((message.array,)))
            return
        if array is None:
            client.early_uploads.setdefault(message.array, {})[host] = message.error
            return
        self._end(client, message.array, array, host, message.error)

    def _end(
        self, client: Client, number: int, array: Array, host: str, error: ErrorReport | None
    ) -> None:
        if host not in array.uploading:
            self._env.count("messages_stale")
            return
        array.uploading -= {host}
        if error is not None and array.error is None:
            if self._rebuilder.arrival_failed(client, number, array, error):
                self._tell_schedulers(number)
                return
            if error.kind in INFRASTRUCTURE:
                what = named(array.spec, client.lineage.origins.get(number))
                lost = ArrayLost(f"{what} could not be brought back: {error.message}")
                error = ErrorReport.of(lost, error.where)
            array.error = error
            self._ender.fail(error, arrays=(number,))
        if array.uploading:
            return
        if array.restored:
            self._copies.arrived(client, number)
        self._tell_schedulers(number)
        if client.doomed.pop(number, None) is not None:
            drop(self._env, self._ledger, client, [(number, array)], late=True)
        if client.backlog:
            self._go_on(client)

    def _tell_schedulers(self, number: int) -> None:
        """Nothing waits for this array any more: it is there, or what needs it was withdrawn."""
        for island in self._ledger.schedulers:
            self._env.send(scheduler_of(island), UploadEnded(number))

    def input_gone(self, client: Client, message: InputGone) -> None:
        """A client was asked to send an array once more, and has not got it any more."""
        array = client.arrays.get(message.array) or client.doomed.get(message.array)
        if array is None or not array.uploading:
            return
        error = ErrorReport.of(
            ArrayLost(
                f"the hosts that had the array {array.spec.short} were lost, and this process has not kept the "
                "value that it was put there with; pass keep=True to pw.put, or call pw.checkpoint"
            )
        )
        for host in tuple(array.uploading):
            self._end(client, message.array, array, host, error)
        self._env.send(client.address, RunFailed(0, (message.array,), error))

    def host_lost(self, node: str) -> None:
        """What has ended early on a host is gone with it."""
        for client in self._ledger.clients.values():
            for early in client.early_uploads.values():
                early.pop(node, None)
