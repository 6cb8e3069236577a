"""Answers clients that fetch arrays or wait for them.

A request about an array that is not known yet is parked, because it may come before the launch that
makes the array. So is a request about an array that was lost, until the controller has it rebuilt.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pw.core.actor import Env, Part, handles
from pw.core.errors import INFRASTRUCTURE, ArgumentError, ErrorReport, NotOwner, ProtocolError
from pw.core.ids import CONTROL, Address
from pw.core.landing import Bulk
from pw.core.messages import (
    ArraysLost,
    CancelRequest,
    Fetch,
    Fetched,
    PeerLost,
    Ready,
    RequestFailed,
    Wait,
)
from pw.core.packing import pack
from pw.core.recorder import FETCHED
from pw.core.sharding import packed_offsets
from pw.devices.host.arrays import Arrays, Entry
from pw.devices.host.backend import Backend, Read, Value, Watch, relative
from pw.devices.host.clients import Clients
from pw.devices.host.printing import Printing

PARKED_REQUESTS = 100_000
"""Requests that one host keeps; it refuses more."""


@dataclass(slots=True, eq=False)
class _Request:
    client: Address
    number: int
    waiting_for: set[int]
    fetch: Fetch | None = None
    over: bool = False
    """It was answered, failed or withdrawn."""


@dataclass(eq=False, repr=False)
class Requests(Part):
    """The open requests of a host."""

    env: Env
    backend: Backend
    bulk: Bulk
    arrays: Arrays
    clients: Clients
    printing: Printing
    _open: dict[tuple[str, int], _Request] = field(default_factory=dict)
    _parked: dict[int, list[_Request]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._open)

    def find(self, node: str, number: int) -> object | None:
        """Return an open request."""
        return self._open.get((node, number))

    def parked(self) -> list[int]:
        """Return the arrays for which requests are parked."""
        return list(self._parked)

    def submitted(self, array: int, value: Value) -> None:
        """Serve the requests for an array: the op that makes its value has been submitted."""
        entry = self.arrays.get(array)
        if entry is None or entry.value is not value:
            return
        entry.submitted = True
        if value.error is not None and value.error.kind in INFRASTRUCTURE:
            self._tell_lost(entry)
        if self._parked:
            for request in self._parked.pop(array, ()):
                self._serve(entry, request)

    def _tell_lost(self, entry: Entry) -> None:
        """Tell the controller: perhaps only this host knows that the array was lost."""
        if not entry.is_reported:
            entry.is_reported = True
            self.env.send(CONTROL, ArraysLost((entry.array,)))

    def dropped(self, array: int) -> None:
        """Fail the requests that are parked for a dropped array."""
        if array in self._parked and (error := self.arrays.why_missing(array)) is not None:
            for request in self._parked.pop(array):
                self._fail(request, error)

    @handles(Fetch)
    def _fetch(self, sender: Address, message: Fetch) -> None:
        request = _Request(sender, message.request, {message.array}, message)
        self._accept(sender, request, (message.array,))

    @handles(Wait)
    def _wait(self, sender: Address, message: Wait) -> None:
        arrays = tuple(dict.fromkeys(message.arrays))
        self._accept(sender, _Request(sender, message.request, set(arrays)), arrays)

    def _accept(self, sender: Address, request: _Request, arrays: tuple[int, ...]) -> None:
        if self.clients.at(sender.node) is None:
            self._fail(request, self.clients.refusal())
            return
        if not all(self.clients.owns(sender, array) for array in arrays):
            error = NotOwner(
                "an array of another client was asked for; have that client pass its value"
            )
            self._fail(request, ErrorReport.of(error, self.env.address.node))
            return
        if len(self._open) >= PARKED_REQUESTS:
            full = ProtocolError(
                f"more than {PARKED_REQUESTS} arrays are waited for on this host; wait for fewer at a time"
            )
            self._fail(request, ErrorReport.of(full, self.env.address.node))
            return
        self._open[(sender.node, request.number)] = request
        if not arrays:
            self._answer(request, Ready(request.number))
        for array in arrays:
            entry = self.arrays.get(array)
            if entry is not None and entry.submitted:
                self._serve(entry, request)
            elif (missing := self.arrays.why_missing(array)) is not None:
                self._fail(request, missing)
                return
            else:
                self._parked.setdefault(array, []).append(request)

    def _serve(self, entry: Entry, request: _Request) -> None:
        if request.over:
            return
        if request.fetch is not None:
            self._read(entry, request, request.fetch)
            return

        def watched(error: ErrorReport | None) -> None:
            if error is not None:
                self._missing(entry, request, error)
                return
            request.waiting_for.discard(entry.array)
            if not request.waiting_for:
                self._answer(request, Ready(request.number))

        self.backend.submit([Watch((entry.value,), watched)])

    def _missing(self, entry: Entry, request: _Request, error: ErrorReport) -> None:
        """There is no value: fail the request, or park it until a lost array is rebuilt."""
        current = self.arrays.get(entry.array)
        if error.kind not in INFRASTRUCTURE or current is None:
            self._fail(request, error)
        elif current is not entry and current.submitted:
            self._serve(current, request)
        else:
            self._parked.setdefault(entry.array, []).append(request)
            if current is entry:
                self._tell_lost(entry)

    def _read(self, entry: Entry, request: _Request, fetch: Fetch) -> None:
        spec = entry.spec
        asked = (
            fetch.spec
        )  # in terms of the client's slice; a handed over array is in terms of another's
        if (asked.shape, asked.dtype, asked.sharding) != (
            spec.shape,
            spec.dtype,
            spec.sharding,
        ) or any(
            not 0 <= position < len(fetch.devices)
            or fetch.devices[position].host != self.env.address.node
            for position in fetch.positions
        ):
            error = ArgumentError(
                f"the array {spec.short} does not lie on this host as it was asked for; make it again"
            )
            self._fail(request, ErrorReport.of(error, self.env.address.node))
            return

        def read(views: list[np.ndarray[Any, Any]] | ErrorReport) -> None:
            if isinstance(views, ErrorReport):
                self._missing(entry, request, views)
            elif not request.over:
                self._deliver(request, fetch, views)

        boxes = [(position, relative(spec.box(position))) for position in fetch.positions]
        self.backend.submit([Read(entry.value, boxes, spec, fetch.devices, read)])

    def _deliver(self, request: _Request, fetch: Fetch, views: list[np.ndarray[Any, Any]]) -> None:
        if fetch.landing is None:
            self._answer(request, Fetched(request.number, pack(views)))
            return
        self.printing.flush()
        offsets, total = packed_offsets([view.nbytes for view in views])
        if total > fetch.landing.size_bytes:
            error = ProtocolError(
                f"there is no room for {total} bytes of the array {fetch.spec.short} where they are to go"
            )
            self._fail(request, ErrorReport.of(error, self.env.address.node))
            return

        began_s, recorder = self.env.now_s(), self.env.recorder

        def pushed(error: Exception | None) -> None:
            if error is None:
                self._open.pop((request.client.node, request.number), None)
                if recorder.on:
                    recorder.add(FETCHED, began_s, self.env.now_s(), fetch.array, total)
            else:
                self._fail(request, ErrorReport.of(error, self.env.address.node))

        self.bulk.push(fetch.landing, list(zip(offsets, views, strict=True)), pushed)

    def _fail(self, request: _Request, error: ErrorReport) -> None:
        self._answer(request, RequestFailed(request.number, error))

    def _answer(self, request: _Request, answer: Ready | Fetched | RequestFailed) -> None:
        """End a request with an answer, after the output of the client's programs."""
        if not request.over:
            request.over = True
            self._open.pop((request.client.node, request.number), None)
            self.printing.flush()
            self.env.send(request.client, answer)

    @handles(CancelRequest)
    def _cancel(self, sender: Address, message: CancelRequest) -> None:
        self._withdraw((sender.node, message.request))

    @handles(PeerLost)
    def _peer_lost(self, sender: Address, message: PeerLost) -> None:
        self.forget_node(message.node)

    def forget_node(self, node: str) -> None:
        """Withdraw the requests of a lost client; its arrays stay until the controller drops them."""
        self.clients.forget(node)
        for key in [key for key in self._open if key[0] == node]:
            self._withdraw(key)

    def _withdraw(self, key: tuple[str, int]) -> None:
        request = self._open.pop(key, None)
        if request is None:
            return
        request.over = True
        for array in request.waiting_for:
            parked = self._parked.get(array)
            if parked is not None and request in parked:
                parked.remove(request)
                if not parked:
                    del self._parked[array]
