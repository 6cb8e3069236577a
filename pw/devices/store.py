"""A host's object store: the shards of logical arrays that clients hold, and their way to clients.

An entry appears when the launch that makes the array arrives, or when its client uploads it, and goes
when a `Discard` says so, in launch order. What a client asks about an array that is not known yet is
parked: its request came by another link than the launch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pw.core.actor import Actor, Env, handles
from pw.core.errors import (
    ArgumentError,
    ArrayDeleted,
    Disconnected,
    Error,
    ErrorReport,
    NotOwner,
    ProtocolError,
)
from pw.core.ids import CONTROL, Address, client_of
from pw.core.landing import Bulk, Bytes
from pw.core.messages import (
    CancelRequest,
    Fetch,
    Fetched,
    GetStats,
    Identify,
    PeerLost,
    Ready,
    RequestFailed,
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
    box_bytes,
    host_boxes,
    packed_offsets,
)
from pw.devices.backend import Backend, Build, Part, Read, Value, Watch

PARKED_REQUESTS = 100_000
"""Requests for arrays not known yet that one host keeps; beyond that it refuses."""


DROPPED_KEPT = 65_536
"""Arrays dropped last that are remembered, so that a request that comes too late is told."""


def relative(box: Any) -> Any:
    """The whole of a box, relative to itself."""
    return tuple((0, stop - start) for start, stop in box)


@dataclass(slots=True)
class _Entry:
    value: Value
    spec: ArraySpec
    bytes_here: int
    submitted: bool = False
    """The op that makes the value has been handed to the backend, so that it can be watched."""


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
        self, env: Env, backend: Backend, bulk: Bulk, counters: Callable[[], dict[str, int]]
    ) -> None:
        super().__init__(env)
        self._backend = backend
        self._bulk = bulk
        self._counters = counters
        self._secret = b""
        self._entries: dict[int, _Entry] = {}
        self._clients: dict[str, int] = {}
        self._gone_clients: set[int] = set()
        self._parked: dict[int, list[_Request]] = {}
        self._requests: dict[tuple[str, int], _Request] = {}
        self._landings: dict[int, int] = {}
        self._dropped: dict[int, str] = {}

    # --- what the executor of this host does with it ---------------------------------------------------

    def admit_tickets_of(self, secret: bytes) -> None:
        """Accept clients whose tickets were signed with this key."""
        self._secret = secret

    def expect(self, array: int, value: Value, spec: ArraySpec, shards: int) -> None:
        """A launch has arrived that makes this array, with so many shards here."""
        self._entries[array] = _Entry(value, spec, shards * spec.shard_bytes)

    def submitted(self, array: int) -> None:
        """The op that makes the array has been submitted: requests for it can be watched."""
        entry = self._entries.get(array)
        if entry is None:
            return
        entry.submitted = True
        for request in self._parked.pop(array, ()):
            self._serve(array, request)

    def is_submitted(self, array: int) -> bool:
        """Whether requests for the array can be served, or it is gone."""
        entry = self._entries.get(array)
        return entry is None or entry.submitted

    def value(self, array: int) -> Value | None:
        """The value of an array, None if this host does not have it."""
        entry = self._entries.get(array)
        return None if entry is None else entry.value

    def drop(self, array: int, why: str = "deleted") -> None:
        """Forget an array; whoever still waits for it, or asks too late, is told."""
        self._entries.pop(array, None)
        self._dropped[array] = why
        if len(self._dropped) > DROPPED_KEPT:
            del self._dropped[next(iter(self._dropped))]
        if (transfer := self._landings.pop(array, None)) is not None:
            self._bulk.cancel(transfer)
        for request in self._parked.pop(array, ()):
            self._fail(request, self._deleted(why))

    def _deleted(self, why: str) -> ErrorReport:
        return ErrorReport.of(ArrayDeleted(f"the array was {why}"), self.env.address.node)

    def drop_client(self, client: int) -> None:
        """Forget all that a client held; whatever still comes from it is dropped."""
        self._gone_clients.add(client)
        for node in [node for node, number in self._clients.items() if number == client]:
            self._forget_node(node)
        for array in [array for array in self._entries if client_of(array) == client]:
            self.drop(array)
        for array in [array for array in self._parked if client_of(array) == client]:
            self.drop(array)

    def census(self) -> dict[str, int]:
        """Arrays and bytes that clients hold on this host."""
        return {
            "live_arrays": len(self._entries),
            "live_bytes": sum(entry.bytes_here for entry in self._entries.values()),
            "requests_waiting": len(self._requests),
        }

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
        else:
            self.env.count("tickets_refused")
            self.env.log("warning", "ticket refused", node=sender.node, client=message.client)

    @handles(PeerLost)
    def _peer_lost(self, sender: Address, message: PeerLost) -> None:
        """Requests of a lost client are void; its arrays stay until the controller says otherwise."""
        self._forget_node(message.node)

    def _forget_node(self, node: str) -> None:
        self._clients.pop(node, None)
        for key in [key for key in self._requests if key[0] == node]:
            self._requests.pop(key).cancelled = True

    def _allowed(self, sender: Address, array: int) -> bool:
        return self._clients.get(sender.node) == client_of(array)

    # --- uploads -------------------------------------------------------------------------------------

    @handles(Upload)
    def _upload(self, sender: Address, message: Upload) -> None:
        client = client_of(message.array)
        if not self._allowed(sender, message.array) or message.array in self._entries:
            self.env.count("uploads_refused")
            return
        spec = message.spec
        boxes = host_boxes(spec, message.devices, self.env.address.node)
        offsets, total = packed_offsets([box_bytes(box, spec.dtype) for box, _ in boxes])
        value = Value()
        shards = sum(len(positions) for _, positions in boxes)
        self._entries[message.array] = _Entry(value, spec, shards * spec.shard_bytes)

        def deliver(buffer: bytes | Bytes) -> None:
            self._landings.pop(message.array, None)
            entry = self._entries.get(message.array)
            if entry is None or entry.value is not value or client in self._gone_clients:
                return
            parts: list[Part] = [
                (positions, relative(box), unpack(buffer, offset, spec, box))
                for (box, positions), offset in zip(boxes, offsets, strict=True)
            ]
            done = lambda error: self.env.send(CONTROL, Uploaded(message.array, error))  # noqa: E731
            self._backend.submit([Build(value, spec, message.devices, parts, done)])
            self.submitted(message.array)

        if message.data is not None:
            if len(message.data) != total:
                error = ArgumentError(f"an upload of {total} bytes came with {len(message.data)}")
                value.error = ErrorReport.of(error, self.env.address.node)
                self.env.send(CONTROL, Uploaded(message.array, value.error))
                self.submitted(message.array)
                return
            deliver(message.data)
        else:
            try:
                landing = self._bulk.land(total, deliver)
            except Error as refused:
                value.error = ErrorReport.of(refused, self.env.address.node)
                self.env.send(CONTROL, Uploaded(message.array, value.error))
                self.submitted(message.array)
                return
            self._landings[message.array] = landing.transfer
            self.env.send(sender, UploadLanding(message.array, landing))

    @handles(UploadAborted)
    def _upload_aborted(self, sender: Address, message: UploadAborted) -> None:
        entry = self._entries.get(message.array)
        if entry is None or not self._allowed(sender, message.array):
            return
        transfer = self._landings.pop(message.array, None)
        if transfer is not None:
            self._bulk.cancel(transfer)
            entry.value.error = message.error
            self.env.send(CONTROL, Uploaded(message.array, message.error))
            self.submitted(message.array)

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
        if not all(self._allowed(sender, array) for array in arrays):
            error = NotOwner("the request names an array of another client")
            self._fail(request, ErrorReport.of(error, self.env.address.node))
            return
        if len(self._requests) >= PARKED_REQUESTS:
            error_full = ProtocolError(f"more than {PARKED_REQUESTS} requests wait on this host")
            self._fail(request, ErrorReport.of(error_full, self.env.address.node))
            return
        self._requests[(sender.node, request.number)] = request
        if not arrays:
            self._ready(request)
        for array in arrays:
            entry = self._entries.get(array)
            if entry is None and array in self._dropped:
                self._fail(request, self._deleted(self._dropped[array]))
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
        request.cancelled = True
        for array in request.waiting_for:
            parked = self._parked.get(array)
            if parked is not None and request in parked:
                parked.remove(request)
                if not parked:
                    del self._parked[array]

    def _serve(self, array: int, request: _Request) -> None:
        if request.cancelled:
            return
        entry = self._entries[array]
        if request.fetch is not None:
            self._read(entry, request, request.fetch)
            return

        def watched(error: ErrorReport | None) -> None:
            if error is not None:
                self._fail(request, error)
                return
            request.waiting_for.discard(array)
            if not request.waiting_for:
                self._ready(request)

        self._backend.submit([Watch((entry.value,), watched)])

    def _ready(self, request: _Request) -> None:
        if not request.cancelled:
            self._requests.pop((request.client.node, request.number), None)
            self.env.send(request.client, Ready(request.number))

    def _fail(self, request: _Request, error: ErrorReport) -> None:
        if not request.cancelled:
            request.cancelled = True
            self._requests.pop((request.client.node, request.number), None)
            self.env.send(request.client, RequestFailed(request.number, error))

    def _read(self, entry: _Entry, request: _Request, fetch: Fetch) -> None:
        spec = entry.spec
        here = self.env.address.node
        if fetch.spec != spec or any(
            not 0 <= position < len(fetch.devices) or fetch.devices[position].host != here
            for position in fetch.positions
        ):
            error = ArgumentError("the fetch asks for shards that are not on this host")
            self._fail(request, ErrorReport.of(error, here))
            return

        def read(views: list[np.ndarray[Any, Any]] | ErrorReport) -> None:
            if isinstance(views, ErrorReport):
                self._fail(request, views)
            elif not request.cancelled:
                self._deliver(request, fetch, views)

        boxes = [(position, relative(spec.box(position))) for position in fetch.positions]
        self._backend.submit([Read(entry.value, boxes, spec, fetch.devices, read)])

    def _deliver(self, request: _Request, fetch: Fetch, views: list[np.ndarray[Any, Any]]) -> None:
        if fetch.landing is None:
            self._requests.pop((request.client.node, request.number), None)
            self.env.send(request.client, Fetched(request.number, pack(views)))
            return
        offsets, total = packed_offsets([view.nbytes for view in views])
        if total > fetch.landing.size_bytes:
            error = ArgumentError("the fetch's landing is too small for its shards")
            self._fail(request, ErrorReport.of(error, self.env.address.node))
            return

        def pushed(error: Exception | None) -> None:
            if error is None:
                self._requests.pop((request.client.node, request.number), None)
            else:
                self._fail(request, ErrorReport.of(error, self.env.address.node))

        self._bulk.push(fetch.landing, list(zip(offsets, views, strict=True)), pushed)

    # --- counters ------------------------------------------------------------------------------------

    @handles(GetStats)
    def _stats(self, sender: Address, message: GetStats) -> None:
        if sender.node not in self._clients:
            error = Disconnected("this host does not know the client")
            self.env.send(sender, RequestFailed(message.request, ErrorReport.of(error)))
            return
        counters = self._backend.counters() | self.census() | self._counters()
        self.env.send(sender, Stats(message.request, self.env.address.node, counters))
