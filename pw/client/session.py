"""A client's side of the protocol: what was asked, what is still open, what has failed.

The session is an actor like all others; the API's threads reach it with the notes below. It forwards
runs to the controller, asks hosts directly for values, and settles futures. It never waits: names are
given on this side, so whatever follows a call can be sent at once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import InvalidStateError
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pw.client.notes import (
    Allocate,
    Ask,
    Await,
    AwaitHosts,
    Close,
    Forget,
    Get,
    Open,
    Put,
    Settle,
    Tell,
)
from pw.core.actor import Actor, Env, handles
from pw.core.errors import ConnectionFailed, Disconnected, Error, ErrorReport, HostLost
from pw.core.ids import CONTROL, CONTROLLER, Address, store_of
from pw.core.landing import Bulk, Bytes
from pw.core.messages import (
    INLINE_BYTES,
    Attach,
    Attached,
    CancelRequest,
    CreateArray,
    Delete,
    Directory,
    Evicted,
    Fetch,
    Fetched,
    GetStats,
    Identify,
    PeerLost,
    PeerRefused,
    Ready,
    RequestFailed,
    RunFailed,
    RunsSettled,
    SliceBound,
    SliceLost,
    SliceRefused,
    Stats,
    Status,
    Upload,
    UploadAborted,
    UploadLanding,
    Wait,
)
from pw.core.packing import pack, unpack
from pw.core.sharding import (
    ArraySpec,
    Box,
    DeviceAddress,
    box_bytes,
    box_slices,
    host_boxes,
    packed_offsets,
)


@dataclass(slots=True)
class _Open:
    """One thing the API waits for, and the requests to hosts it consists of."""

    future: Settle
    arrays: tuple[int, ...]
    missing: set[int] = field(default_factory=set)
    result: Any = None


@dataclass(slots=True)
class _Request:
    """One message to one host (or the controller) that will be answered."""

    of: _Open
    node: str
    boxes: list[Box] = field(default_factory=list)
    spec: ArraySpec | None = None
    transfer: int | None = None


@dataclass(slots=True)
class _Uploading:
    spec: ArraySpec
    value: np.ndarray[Any, Any]
    hosts: set[str]


class ClientSession(Actor):
    """One client's conversation with a cluster."""

    def __init__(self, env: Env, bulk: Bulk, on_credits: Callable[[int], None]) -> None:
        super().__init__(env)
        self._bulk = bulk
        self._on_credits = on_credits
        self.closed: Error | None = None
        self._attaching: Settle | None = None
        self._attached: Attached | None = None
        self._identified: set[str] = set()
        self._hosts: tuple[str, ...] = ()
        self._slices: dict[int, SliceBound] = {}
        self._allocating: dict[int, Settle] = {}
        self._failed: dict[int, ErrorReport] = {}
        self._requests: dict[int, _Request] = {}
        self._open: dict[int, _Open] = {}
        self._uploads: dict[int, _Uploading] = {}
        self._awaiting_hosts: list[AwaitHosts] = []
        self._next_request = 0

    # --- the connection ------------------------------------------------------------------------------

    @handles(Open)
    def _on_open(self, sender: Address, note: Open) -> None:
        self._attaching = note.attached
        self.env.send(CONTROL, Attach(note.name, note.share, note.priority))

    @handles(Attached)
    def _on_attached(self, sender: Address, message: Attached) -> None:
        self._attached = message
        if self._attaching is not None:
            _resolve(self._attaching, message)
            self._attaching = None

    @handles(Directory)
    def _on_directory(self, sender: Address, message: Directory) -> None:
        for peer in message.peers:
            if peer.node != self.env.address.node:
                self.env.introduce(peer.node, peer.endpoint)
        self._hosts = tuple(peer.node for peer in message.peers)
        self._identified &= set(self._hosts)
        self._check_hosts()

    @handles(AwaitHosts)
    def _on_await_hosts(self, sender: Address, note: AwaitHosts) -> None:
        self._awaiting_hosts.append(note)
        self._check_hosts()

    def _check_hosts(self) -> None:
        for note in [note for note in self._awaiting_hosts if note.count <= len(self._hosts)]:
            self._awaiting_hosts.remove(note)
            _resolve(note.ready, None)

    @handles(PeerRefused)
    def _on_refused(self, sender: Address, message: PeerRefused) -> None:
        if message.node == CONTROLLER:
            self._die(message.error.exception())

    @handles(Evicted)
    def _on_evicted(self, sender: Address, message: Evicted) -> None:
        self._die(Disconnected(f"the controller closed this session: {message.reason}"))

    @handles(PeerLost)
    def _on_peer_lost(self, sender: Address, message: PeerLost) -> None:
        if message.node == CONTROLLER:
            words = f"the controller was lost: {message.reason}"
            if self._attached is None:
                words = f"no controller answers: {message.reason}; is pw-controller running there?"
            self._die(ConnectionFailed(words))
            return
        self._identified.discard(message.node)
        error = ErrorReport.of(HostLost(f"host {message.node} was lost: {message.reason}"))
        for number, request in list(self._requests.items()):
            if request.node == message.node:
                self._request_failed(number, error)

    @handles(Close)
    def _on_close(self, sender: Address, note: Close) -> None:
        self._die(note.error)
        _resolve(note.closed, None)

    def _die(self, error: Error) -> None:
        if self.closed is not None:
            return
        self.closed = error
        if self._attaching is not None:
            _reject(self._attaching, error)
        for future in self._allocating.values():
            _reject(future, error)
        for note in self._awaiting_hosts:
            _reject(note.ready, error)
        for opened in list(self._open.values()):
            _reject(opened.future, error)
        self._allocating.clear()
        self._requests.clear()
        self._open.clear()
        self._uploads.clear()
        self._on_credits(1 << 30)

    # --- slices --------------------------------------------------------------------------------------

    @handles(Allocate)
    def _on_allocate(self, sender: Address, note: Allocate) -> None:
        if self.closed is not None:
            _reject(note.bound, self.closed)
            return
        self._allocating[note.request.slice] = note.bound
        self.env.send(CONTROL, note.request)

    @handles(SliceBound)
    def _on_bound(self, sender: Address, message: SliceBound) -> None:
        self._slices[message.slice] = message
        future = self._allocating.pop(message.slice, None)
        if future is not None:
            _resolve(future, message)

    @handles(SliceRefused)
    def _on_slice_refused(self, sender: Address, message: SliceRefused) -> None:
        future = self._allocating.pop(message.slice, None)
        if future is not None:
            _reject(future, message.error.exception())

    @handles(SliceLost)
    def _on_slice_lost(self, sender: Address, message: SliceLost) -> None:
        """The slice may be bound again; until then nothing can be fetched from it."""
        self._slices.pop(message.slice, None)

    # --- runs and arrays -----------------------------------------------------------------------------

    @handles(Tell)
    def _on_tell(self, sender: Address, note: Tell) -> None:
        if self.closed is None:
            self.env.send(CONTROL, note.message)

    @handles(Forget)
    def _on_forget(self, sender: Address, note: Forget) -> None:
        for array in note.arrays:
            self._failed.pop(array, None)
        if self.closed is None:
            self.env.send(CONTROL, Delete(note.arrays))

    @handles(RunsSettled)
    def _on_settled(self, sender: Address, message: RunsSettled) -> None:
        self._on_credits(message.count)

    @handles(RunFailed)
    def _on_run_failed(self, sender: Address, message: RunFailed) -> None:
        for array in message.results:
            self._failed[array] = message.error
        failed = set(message.results)
        for opened in list(self._open.values()):
            if not failed.isdisjoint(opened.arrays):
                self._fail(opened, message.error)

    # --- uploads -------------------------------------------------------------------------------------

    @handles(Put)
    def _on_put(self, sender: Address, note: Put) -> None:
        if self.closed is not None:
            return
        devices = self._devices(note.spec)
        self.env.send(CONTROL, CreateArray(note.array, note.spec))
        if devices is None:
            return
        hosts = dict.fromkeys(device.host for device in devices)
        self._uploads[note.array] = _Uploading(note.spec, note.value, set(hosts))
        for host in hosts:
            boxes = host_boxes(note.spec, devices, host)
            size = sum(box_bytes(box, note.spec.dtype) for box, _ in boxes)
            data = None
            if size <= INLINE_BYTES:
                data = pack([note.value[box_slices(box)] for box, _ in boxes])
                self._pushed(note.array, host)
            self._to_host(host, Upload(note.array, note.spec, devices, data))

    @handles(UploadLanding)
    def _on_landing(self, sender: Address, message: UploadLanding) -> None:
        upload = self._uploads.get(message.array)
        if upload is None:
            return
        devices = self._devices(upload.spec)
        if devices is None:
            return
        boxes = host_boxes(upload.spec, devices, sender.node)
        offsets, _ = packed_offsets([box_bytes(box, upload.spec.dtype) for box, _ in boxes])
        parts = [
            (offset, upload.value[box_slices(box)])
            for offset, (box, _) in zip(offsets, boxes, strict=True)
        ]

        def pushed(error: Exception | None) -> None:
            self._pushed(message.array, sender.node)
            if error is not None:
                self._to_host(sender.node, UploadAborted(message.array, ErrorReport.of(error)))

        self._bulk.push(message.landing, parts, pushed)

    def _pushed(self, array: int, host: str) -> None:
        upload = self._uploads.get(array)
        if upload is not None:
            upload.hosts.discard(host)
            if not upload.hosts:
                del self._uploads[array]

    # --- fetching and waiting ------------------------------------------------------------------------

    @handles(Get)
    def _on_get(self, sender: Address, note: Get) -> None:
        devices = self._can_ask(note.parts, ((note.array, note.spec),))
        if devices is None:
            return
        opened = self._opened(note.parts, (note.array,), [])
        for host, chosen in _cover(note.spec, devices[0]).items():
            boxes = [note.spec.box(position) for position in chosen]
            _, total = packed_offsets([box_bytes(box, note.spec.dtype) for box in boxes])
            number = self._request(_Request(opened, host, boxes, note.spec))
            landing = None
            if total > INLINE_BYTES:
                try:
                    landing = self._bulk.land(total, self._landed(number))
                except Error as error:
                    self._fail(opened, ErrorReport.of(error))
                    return
                self._requests[number].transfer = landing.transfer
            self._to_host(
                host,
                Fetch(number, note.array, note.spec, devices[0], tuple(chosen), landing),
            )

    def _landed(self, number: int) -> Callable[[Bytes], None]:
        return lambda buffer: self._take(number, buffer)

    @handles(Fetched)
    def _on_fetched(self, sender: Address, message: Fetched) -> None:
        self._take(message.request, message.data)

    def _take(self, number: int, buffer: bytes | Bytes) -> None:
        request = self._requests.pop(number, None)
        if request is None or request.spec is None:
            return
        sizes = [box_bytes(box, request.spec.dtype) for box in request.boxes]
        offsets, _ = packed_offsets(sizes)
        for box, offset in zip(request.boxes, offsets, strict=True):
            request.of.result.append((box, unpack(buffer, offset, request.spec, box)))
        self._answered(number, request)

    @handles(Await)
    def _on_await(self, sender: Address, note: Await) -> None:
        devices = self._can_ask(note.ready, note.arrays)
        if devices is None:
            return
        opened = self._opened(note.ready, tuple(array for array, _ in note.arrays), None)
        by_host: dict[str, list[int]] = {}
        for (array, _), located in zip(note.arrays, devices, strict=True):
            for host in dict.fromkeys(device.host for device in located):
                by_host.setdefault(host, []).append(array)
        for host, arrays in by_host.items():
            self._to_host(host, Wait(self._request(_Request(opened, host)), tuple(arrays)))
        if not by_host:
            self._settle(opened)

    @handles(Ready)
    def _on_ready(self, sender: Address, message: Ready) -> None:
        request = self._requests.pop(message.request, None)
        if request is not None:
            self._answered(message.request, request)

    @handles(RequestFailed)
    def _on_request_failed(self, sender: Address, message: RequestFailed) -> None:
        self._request_failed(message.request, message.error)

    def _request_failed(self, number: int, error: ErrorReport) -> None:
        request = self._requests.get(number)
        if request is not None:
            self._fail(request.of, error)

    def _can_ask(
        self, future: Settle, arrays: tuple[tuple[int, ArraySpec], ...]
    ) -> list[tuple[DeviceAddress, ...]] | None:
        """Devices of each array; None (and the future is rejected) if one cannot be had."""
        located = []
        for array, spec in arrays:
            failed = self._failed.get(array)
            if self.closed is not None:
                _reject(future, self.closed)
                return None
            if failed is not None:
                _reject(future, failed.exception())
                return None
            devices = self._devices(spec)
            if devices is None:
                _reject(
                    future,
                    HostLost(
                        "the array's slice has no island at the moment: a host was lost. Its arrays are "
                        "lost as well; the slice can be used again when the island has all its hosts"
                    ),
                )
                return None
            located.append(devices)
        return located

    def _devices(self, spec: ArraySpec) -> tuple[DeviceAddress, ...] | None:
        bound = self._slices.get(spec.placement.slice)
        if bound is None:
            return None
        return tuple(bound.devices[index] for index in spec.placement.devices)

    def _opened(self, future: Settle, arrays: tuple[int, ...], result: Any) -> _Open:
        opened = _Open(future, arrays, result=result)
        self._open[id(opened)] = opened
        return opened

    def _request(self, request: _Request) -> int:
        self._next_request += 1
        request.of.missing.add(self._next_request)
        self._requests[self._next_request] = request
        return self._next_request

    def _answered(self, number: int, request: _Request) -> None:
        request.of.missing.discard(number)
        if not request.of.missing:
            self._settle(request.of)

    def _settle(self, opened: _Open) -> None:
        if self._open.pop(id(opened), None) is not None:
            _resolve(opened.future, opened.result)

    def _fail(self, opened: _Open, error: ErrorReport) -> None:
        self._withdraw(opened)
        _reject(opened.future, error.exception())

    def _withdraw(self, opened: _Open) -> None:
        self._open.pop(id(opened), None)
        for number in opened.missing:
            request = self._requests.pop(number, None)
            if request is None:
                continue
            if request.transfer is not None:
                self._bulk.cancel(request.transfer)
            if request.node != CONTROLLER:
                self._to_host(request.node, CancelRequest(number))
        opened.missing.clear()

    def _to_host(self, host: str, message: object) -> None:
        if host not in self._identified and self._attached is not None:
            self._identified.add(host)
            self.env.send(store_of(host), Identify(self._attached.client, self._attached.ticket))
        self.env.send(store_of(host), message)

    # --- reports -------------------------------------------------------------------------------------

    @handles(Ask)
    def _on_ask(self, sender: Address, note: Ask) -> None:
        if self.closed is not None:
            _reject(note.answer, self.closed)
            return
        opened = self._opened(note.answer, (), {})
        number = self._request(_Request(opened, CONTROLLER))
        self.env.send(CONTROL, note.what(number))
        if note.what is GetStats:
            for host in self._hosts:
                self._to_host(host, GetStats(self._request(_Request(opened, host))))

    @handles(Status)
    def _on_status(self, sender: Address, message: Status) -> None:
        request = self._requests.pop(message.request, None)
        if request is not None:
            request.of.result = message
            self._answered(message.request, request)

    @handles(Stats)
    def _on_stats(self, sender: Address, message: Stats) -> None:
        request = self._requests.pop(message.request, None)
        if request is not None:
            request.of.result[message.node] = message.counters
            self._answered(message.request, request)


def _cover(spec: ArraySpec, devices: tuple[DeviceAddress, ...]) -> dict[str, list[int]]:
    """For each host the mesh positions to ask for so that every distinct box comes exactly once."""
    chosen: dict[str, list[int]] = {}
    for _, positions in spec.distinct_boxes():
        chosen.setdefault(devices[positions[0]].host, []).append(positions[0])
    return chosen


def _resolve(future: Settle, result: Any) -> None:
    """Settle a future that its owner may be giving up at this moment."""
    if not future.done():
        with contextlib.suppress(InvalidStateError):
            future.set_result(result)


def _reject(future: Settle, error: Exception) -> None:
    if not future.done():
        with contextlib.suppress(InvalidStateError):
            future.set_exception(error)
