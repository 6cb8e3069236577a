"""A host's object store: the shards of logical arrays that clients hold, and their way to clients.

An entry appears when the launch that makes the array arrives, when its client uploads it, or when the
controller has it restored from copies; it goes when a `Discard` says so, in launch order. A run that is
run again, or an array that is restored, replaces the entry. What a client asks about an array that is
not known yet is parked: its request came by another link than the launch.

When the epoch ends, the host's process takes over what is ready on the devices, and what is held in host
memory anyway (`save`); the next incarnation's store begins with it (see `pw.devices.host.replicas`).
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import msgspec
import numpy as np

from pw.core.actor import Actor, Env, handles
from pw.core.errors import (
    INFRASTRUCTURE,
    ArgumentError,
    ArrayDeleted,
    ArrayLost,
    Disconnected,
    Error,
    ErrorReport,
    HostLost,
    NotOwner,
    ProtocolError,
    TransferFailed,
)
from pw.core.ids import CONTROL, CONTROLLER, Address, client_of
from pw.core.landing import Bulk, Bytes
from pw.core.messages import (
    AbandonFiles,
    ArraysLost,
    CancelRequest,
    CommitFiles,
    Describe,
    DropReplicas,
    DropUploads,
    Fetch,
    Fetched,
    FetchReplica,
    GetStats,
    Identify,
    OfferReplica,
    PeerLost,
    ReadArray,
    Ready,
    ReplicaData,
    ReplicaRefused,
    RequestFailed,
    Restore,
    Stats,
    Upload,
    UploadAborted,
    Uploaded,
    UploadLanding,
    Wait,
)
from pw.core.packing import pack, unpack
from pw.core.sharding import (
    ArraySpec,
    Box,
    DeviceAddress,
    box_bytes,
    host_boxes,
    packed_offsets,
)
from pw.devices.host.backend import Backend, Build, Part, Read, Value, Watch, relative
from pw.devices.host.files import Aside, Files
from pw.devices.host.held import Keep, Keeping, Overdue, Saved
from pw.devices.host.printing import Lines, Printing, SendWritten, Written
from pw.devices.host.replicas import Gathering, Replicas

_STRANGER = "this host does not know this session (any more); connect again with pw.connect()"
PARKED_REQUESTS = 100_000
"""Requests for arrays not known yet that one host keeps; beyond that it refuses."""

DROPPED_KEPT = 65_536
"""Arrays dropped last that are remembered, so that a request that comes too late is told."""


@dataclass(slots=True)
class _Entry:
    value: Value
    spec: ArraySpec
    devices: tuple[DeviceAddress, ...]
    submitted: bool = False
    """The op that makes the value has been handed to the backend, so that it can be watched."""
    arrived: bool = False
    """It was uploaded or restored, and all of it is here."""
    told: bool = False
    """The controller knows that the value was lost."""


@dataclass(slots=True)
class _Request:
    client: Address
    number: int
    waiting_for: set[int] = field(default_factory=set)
    fetch: Fetch | None = None
    cancelled: bool = False


class ObjectStore(Actor):
    """Keeps what clients hold on this host and moves it to and from them."""

    def __init__(
        self,
        env: Env,
        backend: Backend,
        bulk: Bulk,
        counters: Callable[[], dict[str, int]],
        replicas: Sequence[Saved] = (),
        aside: Aside | None = None,
        keep: Keeping | None = None,
        output: Lines | None = None,
    ) -> None:
        super().__init__(env)
        self._backend = backend
        self._bulk = bulk
        self._counters = counters
        self._secret = b""
        self._place = ("", 0)
        """The island that this host is in, and the epoch."""
        self._entries: dict[int, _Entry] = {}
        self._clients: dict[str, int] = {}
        self._gone_clients: set[int] = set()
        self._parked: dict[int, list[_Request]] = {}
        self._requests: dict[tuple[str, int], _Request] = {}
        self._landings: dict[int, int] = {}
        self._restoring: dict[int, Gathering] = {}
        self.replicas = Replicas(env, bulk, replicas, keep)
        self.files = Files(env, aside)
        self._printing = Printing(env, output, self._gone_clients.__contains__)
        self._dropped: OrderedDict[int, tuple[str, ArraySpec | None]] = OrderedDict()
        """What became of arrays that were here, and what they were."""

    # --- what the executor of this host does with it ---------------------------------------------------

    def joins(self, island: str, epoch: int, secret: bytes) -> None:
        """Accept clients whose tickets were signed with this key, and what they send to this epoch."""
        self._place, self._secret = (island, epoch), secret

    def expect(
        self, array: int, value: Value, spec: ArraySpec, devices: tuple[DeviceAddress, ...]
    ) -> None:
        """A launch has arrived that makes this array; requests parked for it wait on."""
        if self._landings or self._restoring:
            self._abandon(array)
        self._entries[array] = _Entry(value, spec, devices)

    def submitted(self, array: int, value: Value) -> None:
        """The op that makes the array's value has been submitted: requests for it can be watched."""
        entry = self._entries.get(array)
        if entry is None or entry.value is not value:
            return
        entry.submitted = True
        if value.error is not None and value.error.kind in INFRASTRUCTURE:
            self._tell_lost(array, entry)
        if self._parked:
            for request in self._parked.pop(array, ()):
                self._serve(array, request)

    def _tell_lost(self, array: int, entry: _Entry) -> None:
        """Only this host may know: a run has ended when the host that leads its gang says so."""
        if not entry.told:
            entry.told = True
            self.env.send(CONTROL, ArraysLost((array,)))

    def value(self, array: int) -> Value | None:
        """The value of an array, None if this host does not have it."""
        entry = self._entries.get(array)
        return None if entry is None else entry.value

    def values_under_way(self) -> tuple[Value, ...]:
        """The values of all arrays whose making has been handed over to the backend."""
        return tuple(entry.value for entry in self._entries.values() if entry.submitted)

    def _abandon(self, array: int) -> None:
        """Whatever was to be the array's value here is not wanted any more."""
        if (transfer := self._landings.pop(array, None)) is not None:
            self._bulk.cancel(transfer)
        if (gathering := self._restoring.pop(array, None)) is not None:
            self.replicas.cancel(gathering)

    def drop(self, array: int, why: str = "deleted") -> None:
        """Forget an array; whoever still waits for it, or asks too late, is told."""
        entry = self._entries.pop(array, None)
        self._dropped[array] = gone = (why, None if entry is None else entry.spec)
        if len(self._dropped) > DROPPED_KEPT:
            self._dropped.popitem(last=False)
        if self._landings or self._restoring:
            self._abandon(array)
        if self._parked:
            for request in self._parked.pop(array, ()):
                self._fail(request, self._deleted(*gone))

    def _deleted(self, why: str, spec: ArraySpec | None) -> ErrorReport:
        what = "the array" if spec is None else f"the array {spec.short}"
        words = f"{what} was {why} before its value was asked for; keep a copy, copy.copy(x)"
        return ErrorReport.of(ArrayDeleted(words), self.env.address.node)

    def drop_client(self, client: int) -> None:
        """Forget all that a client held; whatever still comes from it is dropped."""
        self._gone_clients.add(client)
        for node in [node for node, number in self._clients.items() if number == client]:
            self._forget_node(node)
        for array in [array for array in self._entries if client_of(array) == client]:
            self.drop(array)
        for array in [array for array in self._parked if client_of(array) == client]:
            self.drop(array)
        self.replicas.drop_client(client)
        self._printing.gone(client)

    def census(self) -> dict[str, int]:
        """Arrays and bytes that clients hold on this host."""
        return {
            "live_arrays": len(self._entries),
            "live_bytes": sum(self._bytes_here(entry) for entry in self._entries.values()),
            "requests_waiting": len(self._requests),
            "uploads_arriving": len(self._landings),
        } | self.replicas.census()

    def _bytes_here(self, entry: _Entry) -> int:
        shards = sum(device.host == self.env.address.node for device in entry.devices)
        return shards * entry.spec.shard_bytes

    # --- replicas --------------------------------------------------------------------------------------

    def save(self) -> Iterator[Saved]:
        """All that the next incarnation can have: replicas, and what is ready on the devices in its turn.

        It takes a while to copy them from accelerators, so whoever takes them gets one after the other.
        """
        saved = self.replicas.held.leave()
        return chain(saved, self._snapshots({(array, box) for array, box, _ in saved}))

    def _snapshots(self, held: set[tuple[int, Box]]) -> Iterator[Saved]:
        for array, entry in self._entries.items():
            if not entry.submitted:
                continue  # what it will be is not known, even if there is something already
            boxes = [box for box, _ in self._boxes(entry)]
            if all((array, box) in held for box in boxes):
                continue
            views = self._backend.snapshot(entry.value, entry.spec, entry.devices) or ()
            yield from ((array, box, view) for box, view in views if (array, box) not in held)

    def _boxes(self, entry: _Entry) -> list[tuple[Box, tuple[int, ...]]]:
        return host_boxes(entry.spec, entry.devices, self.env.address.node)

    @handles(FetchReplica, ReplicaData, ReplicaRefused, OfferReplica, DropReplicas, Keep, Overdue)
    def _of_replicas(self, sender: Address, message: object) -> None:
        self.replicas.receive(sender, message)

    @handles(Restore)
    def _restore(self, sender: Address, message: Restore) -> None:
        array, spec = message.array, message.spec
        if sender.node != CONTROLLER or client_of(array) in self._gone_clients:
            self.env.count("messages_refused")
            return
        value = Value()
        self.expect(array, value, spec, message.devices)
        boxes = self._boxes(self._entries[array])
        sources: dict[Box, list[str]] = {box: [] for box, _ in boxes}
        for source in message.sources:
            if source.box in sources:
                sources[source.box].append(source.host)

        def gathered(found: dict[Box, Bytes] | ErrorReport) -> None:
            self._restoring.pop(array, None)
            if isinstance(found, ErrorReport):
                if found.kind == ArrayLost.__name__:
                    # Others may have copies, or it is made again: that is for the controller to say.
                    found = msgspec.structs.replace(found, kind=HostLost.__name__)
                self._fail_array(array, value, found)
            else:
                parts: list[Part] = [
                    (positions, relative(box), unpack(found[box], 0, spec, box))
                    for box, positions in boxes
                ]
                self._build(array, value, parts)

        gathering = self.replicas.gather(message.copied, spec.dtype, sources, gathered)
        if not gathering.over:
            self._restoring[array] = gathering

    # --- files -----------------------------------------------------------------------------------------

    @handles(CommitFiles, AbandonFiles)
    def _of_files(self, sender: Address, message: object) -> None:
        self.files.receive(sender, message)

    @handles(Describe)
    def _describe(self, sender: Address, message: Describe) -> None:
        if sender.node in self._clients:
            self.files.receive(sender, message)
        else:
            error = Disconnected(_STRANGER)
            self.env.send(sender, RequestFailed(message.request, ErrorReport.of(error)))

    @handles(ReadArray)
    def _read_array(self, sender: Address, message: ReadArray) -> None:
        array, spec = message.array, message.spec
        if sender.node != CONTROLLER or client_of(array) in self._gone_clients:
            self.env.count("messages_refused")
            return
        old = self._entries.get(array)
        if old is not None and old.value.error is None:
            if old.arrived:
                self.env.send(CONTROL, Uploaded(array, None, again=True))
            return  # otherwise it is being read, and what becomes of it will be said
        value = Value()
        self.expect(array, value, spec, message.devices)
        boxes = self._boxes(self._entries[array])

        def found(parts: list[np.ndarray[Any, Any]] | ErrorReport) -> None:
            if self.value(array) is not value:
                return
            if isinstance(parts, ErrorReport):
                self._fail_array(array, value, parts)
            else:
                self._build(
                    array,
                    value,
                    [
                        (positions, relative(box), part)
                        for (box, positions), part in zip(boxes, parts, strict=True)
                    ],
                )

        self.files.read(message.source, spec, [box for box, _ in boxes], found)

    def turn_ended(self) -> None:
        """Have files read for all that was asked for in this turn."""
        self.files.turn_ended()

    # --- clients -------------------------------------------------------------------------------------

    @handles(Identify)
    def _identify(self, sender: Address, message: Identify) -> None:
        if not self._secret or not 0 < message.client < 1 << 63:
            self.env.count("tickets_refused")
            return
        wanted = hashlib.blake2b(
            message.client.to_bytes(8, "big", signed=True), key=self._secret, digest_size=16
        ).digest()
        if message.ticket == wanted and message.client not in self._gone_clients:
            self._clients[sender.node] = message.client
            self._printing.met(message.client, sender, message.output)
        else:
            self.env.count("tickets_refused")
            self.env.log("warning", "ticket refused", node=sender.node, client=message.client)

    @handles(PeerLost)
    def _peer_lost(self, sender: Address, message: PeerLost) -> None:
        """Requests of a lost client are void; its arrays stay until the controller says otherwise.

        What it was uploading may have been lost with the link, and is asked for again.
        """
        client = self._clients.get(message.node)
        words = (
            f"the connection to the client was lost while an array came from there: {message.words}"
        )
        for array in [array for array in self._landings if client_of(array) == client]:
            self._abandon(array)
            report = ErrorReport.of(TransferFailed(words), self.env.address.node)
            self._fail_array(array, self._entries[array].value, report)
        self._forget_node(message.node)
        self.replicas.receive(sender, message)

    def _forget_node(self, node: str) -> None:
        client = self._clients.pop(node, None)
        if client is not None:
            self._printing.lost(client)
        for key in [key for key in self._requests if key[0] == node]:
            self._withdraw(self._requests.pop(key))

    def _withdraw(self, request: _Request) -> None:
        """Nobody waits for the answer any more."""
        request.cancelled = True
        for array in request.waiting_for:
            parked = self._parked.get(array)
            if parked is not None and request in parked:
                parked.remove(request)
                if not parked:
                    del self._parked[array]

    def _allowed(self, sender: Address, array: int) -> bool:
        return self._clients.get(sender.node) == client_of(array)

    # --- uploads -------------------------------------------------------------------------------------

    @handles(Upload)
    def _upload(self, sender: Address, message: Upload) -> None:
        array, spec = message.array, message.spec
        old = self._entries.get(array)
        if not self._allowed(sender, array):
            self.env.count("uploads_refused")
            return
        if (message.island, message.epoch) != self._place:
            # It was meant for an earlier incarnation; the controller asks for what this one lacks.
            self.env.count("uploads_stale")
            return
        if old is not None and old.value.error is None:
            self.env.count("uploads_doubled")
            if old.arrived:
                self.env.send(CONTROL, Uploaded(array, None, again=True))
            if array not in self._landings:
                return
            self._bulk.cancel(self._landings.pop(array))  # it may have come when it was of no use
            value = old.value
        else:
            value = Value()
            self.expect(array, value, spec, message.devices)
        boxes = self._boxes(self._entries[array])
        offsets, total = packed_offsets([box_bytes(box, spec.dtype) for box, _ in boxes])

        def deliver(buffer: bytes | Bytes) -> None:
            if (transfer := self._landings.pop(array, None)) is not None:
                self._bulk.cancel(transfer)
            parts: list[Part] = [
                (positions, relative(box), unpack(buffer, offset, spec, box))
                for (box, positions), offset in zip(boxes, offsets, strict=True)
            ]
            self._build(array, value, parts)

        def landed(buffer: Bytes) -> None:
            # What came to an earlier landing before that one was given up is as good, but not twice.
            if self.value(array) is value and array in self._landings:
                deliver(buffer)

        if message.data is None:
            try:
                landing = self._bulk.land(total, landed)
            except Error as refused:
                self._fail_array(array, value, ErrorReport.of(refused, self.env.address.node))
                return
            self._landings[array] = landing.transfer
            self.env.send(sender, UploadLanding(array, landing, message.attempt))
        elif len(message.data) != total:
            error = ProtocolError(
                f"{len(message.data)} bytes came for the array {message.spec.short}, of which {total} lie here"
            )
            self._fail_array(array, value, ErrorReport.of(error, self.env.address.node))
        else:
            deliver(message.data)

    def _build(self, array: int, value: Value, parts: list[Part]) -> None:
        """All bytes of an upload or a restored array are here."""
        entry = self._entries[array]

        def done(error: ErrorReport | None) -> None:
            entry.arrived = error is None
            if self.value(array) in (value, None):
                self.env.send(CONTROL, Uploaded(array, error))

        self._backend.submit([Build(value, entry.spec, entry.devices, parts, done)])
        self.submitted(array, value)

    def _fail_array(self, array: int, value: Value, error: ErrorReport) -> None:
        """The bytes of an upload or a restored array will not come."""
        value.error = error
        self.env.send(CONTROL, Uploaded(array, error))
        self.submitted(array, value)

    @handles(DropUploads)
    def _drop_uploads(self, sender: Address, message: DropUploads) -> None:
        if sender.node != CONTROLLER:
            self.env.count("messages_refused")
            return
        for array in message.arrays:
            self.drop(array)

    @handles(UploadAborted)
    def _upload_aborted(self, sender: Address, message: UploadAborted) -> None:
        if not self._allowed(sender, message.array):
            return
        if self._landings.get(message.array) != message.transfer:
            return
        value = self._entries[message.array].value
        self._abandon(message.array)
        self._fail_array(message.array, value, message.error)

    # --- requests ------------------------------------------------------------------------------------

    @handles(Fetch)
    def _fetch(self, sender: Address, message: Fetch) -> None:
        self._accept(
            sender, _Request(sender, message.request, {message.array}, message), (message.array,)
        )

    @handles(Wait)
    def _wait(self, sender: Address, message: Wait) -> None:
        arrays = tuple(dict.fromkeys(message.arrays))
        self._accept(sender, _Request(sender, message.request, set(arrays)), arrays)

    def _accept(self, sender: Address, request: _Request, arrays: tuple[int, ...]) -> None:
        if sender.node not in self._clients:
            stranger = Disconnected(_STRANGER)
            self._fail(request, ErrorReport.of(stranger, self.env.address.node))
            return
        if not all(self._allowed(sender, array) for array in arrays):
            error = NotOwner(
                "an array of another client was asked for; have that client pass its value"
            )
            self._fail(request, ErrorReport.of(error, self.env.address.node))
            return
        if len(self._requests) >= PARKED_REQUESTS:
            error_full = ProtocolError(
                f"more than {PARKED_REQUESTS} arrays are waited for on this host; wait for fewer at a time"
            )
            self._fail(request, ErrorReport.of(error_full, self.env.address.node))
            return
        self._requests[(sender.node, request.number)] = request
        if not arrays:
            self._ready(request)
        for array in arrays:
            entry = self._entries.get(array)
            if entry is None and array in self._dropped:
                self._fail(request, self._deleted(*self._dropped[array]))
                return
            elif entry is None or not entry.submitted:
                self._parked.setdefault(array, []).append(request)
            else:
                self._serve(array, request)

    @handles(CancelRequest)
    def _cancel(self, sender: Address, message: CancelRequest) -> None:
        request = self._requests.pop((sender.node, message.request), None)
        if request is None:
            return
        self._withdraw(request)

    def _serve(self, array: int, request: _Request) -> None:
        if request.cancelled:
            return
        entry = self._entries[array]
        if request.fetch is not None:
            self._read(entry, request, request.fetch)
            return

        def watched(error: ErrorReport | None) -> None:
            if error is not None:
                self._missing(array, entry, request, error)
                return
            request.waiting_for.discard(array)
            if not request.waiting_for:
                self._ready(request)

        self._backend.submit([Watch((entry.value,), watched)])

    def _missing(self, array: int, entry: _Entry, request: _Request, error: ErrorReport) -> None:
        """There is no value: for a reason of the program's, or until the controller has it rebuilt."""
        if error.kind not in INFRASTRUCTURE or array not in self._entries:
            self._fail(request, error)
            return
        current = self._entries[array]
        if current is not entry and current.submitted:
            self._serve(array, request)
            return
        self._parked.setdefault(array, []).append(request)
        if current is entry:
            self._tell_lost(array, entry)

    def _ready(self, request: _Request) -> None:
        if not request.cancelled:
            self._requests.pop((request.client.node, request.number), None)
            self._printing.flush()
            self.env.send(request.client, Ready(request.number))

    def _fail(self, request: _Request, error: ErrorReport) -> None:
        if not request.cancelled:
            request.cancelled = True
            self._requests.pop((request.client.node, request.number), None)
            self._printing.flush()
            self.env.send(request.client, RequestFailed(request.number, error))

    def _read(self, entry: _Entry, request: _Request, fetch: Fetch) -> None:
        spec = entry.spec
        here = self.env.address.node
        if fetch.spec != spec or any(
            not 0 <= position < len(fetch.devices) or fetch.devices[position].host != here
            for position in fetch.positions
        ):
            error = ArgumentError(
                f"the array {spec.short} does not lie on this host as it was asked for; make it again"
            )
            self._fail(request, ErrorReport.of(error, here))
            return

        def read(views: list[np.ndarray[Any, Any]] | ErrorReport) -> None:
            if isinstance(views, ErrorReport):
                self._missing(fetch.array, entry, request, views)
            elif not request.cancelled:
                self._deliver(request, fetch, views)

        boxes = [(position, relative(spec.box(position))) for position in fetch.positions]
        self._backend.submit([Read(entry.value, boxes, spec, fetch.devices, read)])

    def _deliver(self, request: _Request, fetch: Fetch, views: list[np.ndarray[Any, Any]]) -> None:
        self._printing.flush()
        if fetch.landing is None:
            self._requests.pop((request.client.node, request.number), None)
            self.env.send(request.client, Fetched(request.number, pack(views)))
            return
        offsets, total = packed_offsets([view.nbytes for view in views])
        if total > fetch.landing.size_bytes:
            error = ProtocolError(
                f"there is no room for {total} bytes of the array {fetch.spec.short} where they are to go"
            )
            self._fail(request, ErrorReport.of(error, self.env.address.node))
            return

        def pushed(error: Exception | None) -> None:
            if error is None:
                self._requests.pop((request.client.node, request.number), None)
            else:
                self._fail(request, ErrorReport.of(error, self.env.address.node))

        self._bulk.push(fetch.landing, list(zip(offsets, views, strict=True)), pushed)

    # --- what clients' programs write ----------------------------------------------------------------

    @handles(Written)
    def _written(self, sender: Address, note: Written) -> None:
        self._printing.written()

    @handles(SendWritten)
    def _send_written(self, sender: Address, note: SendWritten) -> None:
        self._printing.send_written()

    # --- counters ------------------------------------------------------------------------------------

    @handles(GetStats)
    def _stats(self, sender: Address, message: GetStats) -> None:
        if sender.node not in self._clients:
            error = Disconnected(_STRANGER)
            self.env.send(sender, RequestFailed(message.request, ErrorReport.of(error)))
            return
        counters = self._backend.counters() | self.census() | self._counters()
        self.env.send(sender, Stats(message.request, self.env.address.node, counters))
