"""Answers clients that fetch arrays or wait for them.

A request about an array that is not known yet is parked, because it may come before the launch that
makes the array. So is a request about an array that was lost, until the controller has it rebuilt. Where
there are copies of it, as while its client is suspended, they are the answer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pw.core import messages as msg
from pw.core.actors.actor import Env, Part, handles
from pw.core.errors import (
    INFRASTRUCTURE,
    ArgumentError,
    ErrorReport,
    HostLost,
    NotOwner,
    ProtocolError,
)
from pw.core.ids import CONTROL, Address, are_of
from pw.core.landing import Bulk
from pw.core.packing import pack
from pw.core.recorder import FETCHED
from pw.core.sharding import box_bytes, packed_offsets
from pw.devices.host.arrays import Arrays, Entry
from pw.devices.host.backend import Backend, DoneReading, Read, Watch, relative
from pw.devices.host.clients import Clients
from pw.devices.host.printing import Printing
from pw.devices.host.value import Value

PARKED_REQUESTS = 20_000
"""Requests of one client that a host keeps; it refuses more."""


IN_MESSAGE_BYTES = 1 << 20
"""More bytes than these are not sent in a message; clients ask so for `INLINE_BYTES` at most."""


@dataclass(slots=True, eq=False)
class _HostRequest:
    client: Address
    number: int
    waiting_for: set[int]
    fetch: msg.Fetch | None = None
    positions: tuple[int, ...] = ()
    """Shards of the result of a launch that the client wants; they become a `fetch` when there is an array."""
    over: bool = False
    """True if the request was answered, failed or withdrawn."""


@dataclass(eq=False, repr=False)
class HostRequests(Part):
    """The open requests of a host."""

    env: Env
    backend: Backend
    bulk: Bulk
    arrays: Arrays
    clients: Clients
    printing: Printing
    most_open: int = PARKED_REQUESTS
    """How many requests one client may have open."""
    _open: dict[str, dict[int, _HostRequest]] = field(default_factory=dict)
    """The requests of each client's node, by their numbers."""
    _parked: dict[int, list[_HostRequest]] = field(default_factory=dict)
    """Requests that wait until there is such an array, by array."""
    place: tuple[str, int] = ("", 0)
    """The island and the epoch of this host."""

    def __len__(self) -> int:
        return sum(map(len, self._open.values()))

    def find(self, node: str, number: int) -> object | None:
        """Return an open request."""
        return self._open.get(node, {}).get(number)

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
            self.env.send(CONTROL, msg.ArraysLost((entry.array,)))

    def dropped(self, array: int) -> None:
        """Fail the requests that are parked for a dropped array."""
        if array in self._parked and (error := self.arrays.why_missing(array)) is not None:
            for request in self._parked.pop(array):
                self._fail(request, error)

    @handles(msg.Fetch)
    def _fetch(self, sender: Address, message: msg.Fetch) -> None:
        request = _HostRequest(sender, message.request, {message.array}, message)
        if self.is_stale(message):
            self._refuse_stale(request)
        else:
            self._accept(sender, request, (message.array,))

    @handles(msg.Wait)
    def _wait(self, sender: Address, message: msg.Wait) -> None:
        arrays = tuple(dict.fromkeys(message.arrays))
        request = _HostRequest(sender, message.request, set(arrays))
        if self.is_stale(message):
            self._refuse_stale(request)
        else:
            self._accept(sender, request, arrays)

    def is_stale(self, message: msg.Fetch | msg.Wait) -> bool:
        """Whether a request was meant for an earlier incarnation of this host.

        It could wait for ever here: a client hears nothing more of a slice that it has given back.
        """
        return message.epoch > 0 and (message.island, message.epoch) != self.place

    def _refuse_stale(self, request: _HostRequest) -> None:
        error = HostLost(
            "an array was asked for on an island that was formed again; to delete an array whose value is "
            "still wanted, keep a copy first, copy.copy(x)"
        )
        self._fail(request, ErrorReport.of(error, self.env.address.node))

    def send(self, client: Address, answer: msg.Ready | msg.Fetched | msg.RequestFailed) -> None:
        """Answer a client, after the output of its programs."""
        self.printing.flush()
        self.env.send(client, answer)

    def answer_launch(self, sender: Address, launch: msg.LeasedLaunch, is_there: bool) -> None:
        """Answer the question that came with a launch, when the array is ready.

        Where there are only copies of the array, the client hears that it is ready, and asks again.

        Args:
            sender: the client's line.
            launch: the launch, which has a question.
            is_there: whether its results are there.
        """
        number, array, positions = launch.request, launch.awaited, launch.positions
        entry = self.arrays.get(array)
        if not positions and self._is_there(sender, entry):
            self.send(sender, msg.Ready(number))
            return
        request = _HostRequest(sender, number, {array}, positions=positions)
        if len(set(positions)) < len(positions):
            twice = ArgumentError("a shard was asked for twice with one launch")
            self._fail(request, ErrorReport.of(twice, self.env.address.node))
            return
        if positions and is_there and entry is not None and self._is_there(sender, entry):
            fetch = _fetch_of(entry, request)
            if self._has(entry, positions):
                views = self.backend.read_now(self._reading(entry, fetch, lambda views: None))
                if views is not None:
                    self._deliver(request, fetch, views)
                    return
        self._accept(sender, request, (array,))

    def _is_there(self, client: Address, entry: Entry | None) -> bool:
        """Whether there is such an array of a client, and its value."""
        return (
            entry is not None
            and entry.submitted
            and self.clients.owns(client, entry.array)
            and self.backend.is_there(entry.value)
        )

    def _accept(self, sender: Address, request: _HostRequest, arrays: tuple[int, ...]) -> None:
        client = self.clients.at(sender.node)
        if client is None:
            self._fail(request, self.clients.refusal())
            return
        if arrays and not are_of(client, arrays):
            error = NotOwner(
                "an array of another client was asked for; have that client pass its value"
            )
            self._fail(request, ErrorReport.of(error, self.env.address.node))
            return
        mine = self._open.setdefault(sender.node, {})
        if len(mine) >= self.most_open:
            full = ArgumentError(
                f"this client has {self.most_open} open requests for arrays on this host; "
                "wait for some of them before asking for more"
            )
            self._fail(request, ErrorReport.of(full, self.env.address.node))
            return
        mine[request.number] = request
        if not arrays:
            self._answer(request, msg.Ready(request.number))
        for array in arrays:
            entry = self.arrays.get(array)
            if entry is not None and entry.submitted:
                self._serve(entry, request)
            elif entry is None and self._serve_copies(array, request):
                continue
            elif (missing := self.arrays.why_missing(array)) is not None:
                self._fail(request, missing)
                return
            else:
                self._parked.setdefault(array, []).append(request)

    def _serve(self, entry: Entry, request: _HostRequest) -> None:
        if request.over:
            return
        fetch = _fetch_of(entry, request) if request.positions else request.fetch
        if fetch is not None:
            self._read(entry, request, fetch)
            return

        def watched(error: ErrorReport | None) -> None:
            if error is not None:
                self._missing(entry, request, error)
            else:
                self._ready(entry.array, request)

        self.backend.submit([Watch((entry.value,), watched)])

    def _serve_copies(self, array: int, request: _HostRequest) -> bool:
        """Serve a request from copies: the client is suspended, or its array has not been restored yet.

        Returns whether this host has all the copies that it takes.
        """
        copies, fetch = self.arrays.copies(array), request.fetch
        if not copies:
            return False
        if fetch is None:
            self._ready(array, request)
            return True
        count = fetch.spec.sharding.device_count
        boxes = [fetch.spec.box(position) for position in fetch.positions if position < count]
        views = [copies[box] for box in boxes if box in copies]
        sizes = [box_bytes(box, fetch.spec.dtype) for box in boxes]
        if len(boxes) != len(fetch.positions) or [view.nbytes for view in views] != sizes:
            return False
        self._deliver(request, fetch, views)
        return True

    def _ready(self, array: int, request: _HostRequest) -> None:
        request.waiting_for.discard(array)
        if not request.waiting_for:
            self._answer(request, msg.Ready(request.number))

    def _missing(self, entry: Entry, request: _HostRequest, error: ErrorReport) -> None:
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

    def _read(self, entry: Entry, request: _HostRequest, fetch: msg.Fetch) -> None:
        spec = entry.spec
        if entry.value.error is not None and not entry.devices:  # its upload was refused
            self._missing(entry, request, entry.value.error)
            return
        asked = fetch.spec  # of the client's slice; that of a handed over array names another's
        if (asked.shape, asked.dtype, asked.sharding) != (
            spec.shape,
            spec.dtype,
            spec.sharding,
        ) or not self._has(entry, fetch.positions):
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

        self.backend.submit([self._reading(entry, fetch, read)])

    def _has(self, entry: Entry, positions: tuple[int, ...]) -> bool:
        """Whether this host has the shards of an array at these mesh positions."""
        here, devices = self.env.address.node, entry.devices
        return all(0 <= at < len(devices) and devices[at].host == here for at in positions)

    def _reading(self, entry: Entry, fetch: msg.Fetch, done: DoneReading) -> Read:
        spec = entry.spec
        boxes = [(position, relative(spec.box(position))) for position in fetch.positions]
        return Read(entry.value, boxes, spec, entry.devices, done)

    def _deliver(
        self, request: _HostRequest, fetch: msg.Fetch, views: list[np.ndarray[Any, Any]]
    ) -> None:
        offsets, total = packed_offsets([view.nbytes for view in views])
        if fetch.landing is None and total <= IN_MESSAGE_BYTES:
            self._answer(request, msg.Fetched(request.number, pack(views)))
            return
        self.printing.flush()
        if fetch.landing is None or total > fetch.landing.size_bytes:
            error = ProtocolError(
                f"there is no room for {total} bytes of the array {fetch.spec.short} where they are to go"
            )
            self._fail(request, ErrorReport.of(error, self.env.address.node))
            return

        began_s, recorder = self.env.now_s(), self.env.recorder

        def pushed(error: Exception | None) -> None:
            if error is None:
                self._end(request.client.node, request.number)
                if recorder.on:
                    recorder.add(FETCHED, began_s, self.env.now_s(), fetch.array, total)
            else:
                self._fail(request, ErrorReport.of(error, self.env.address.node))

        self.bulk.push(fetch.landing, list(zip(offsets, views, strict=True)), pushed)

    def _fail(self, request: _HostRequest, error: ErrorReport) -> None:
        self._answer(request, msg.RequestFailed(request.number, error))

    def _answer(
        self, request: _HostRequest, answer: msg.Ready | msg.Fetched | msg.RequestFailed
    ) -> None:
        """End a request with an answer."""
        if not request.over:
            request.over = True
            self._end(request.client.node, request.number)
            self.send(request.client, answer)

    @handles(msg.CancelRequest)
    def _cancel(self, sender: Address, message: msg.CancelRequest) -> None:
        self._withdraw(sender.node, message.request)

    @handles(msg.PeerLost)
    def _peer_lost(self, sender: Address, message: msg.PeerLost) -> None:
        self.forget_node(message.node)

    def forget_node(self, node: str) -> None:
        """Withdraw the requests of a lost client; its arrays stay until the controller drops them."""
        self.clients.forget(node)
        for number in list(self._open.get(node, ())):
            self._withdraw(node, number)

    def _end(self, node: str, number: int) -> _HostRequest | None:
        """Take a request out of the open ones."""
        mine = self._open.get(node, {})
        request = mine.pop(number, None)
        if request is not None and not mine:
            del self._open[node]
        return request

    def _withdraw(self, node: str, number: int) -> None:
        request = self._end(node, number)
        if request is None:
            return
        request.over = True
        for array in request.waiting_for:
            parked = self._parked.get(array)
            if parked is not None and request in parked:
                parked.remove(request)
                if not parked:
                    del self._parked[array]


def _fetch_of(entry: Entry, request: _HostRequest) -> msg.Fetch:
    """Return what a launch has asked for of its result, which is here now."""
    return msg.Fetch(
        request.number, entry.array, entry.spec, entry.devices, request.positions, None
    )
