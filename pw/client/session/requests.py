"""What a session waits for: requests to hosts and to the controller, and asking again.

A value is asked of the hosts that its slice is bound to. When they cannot give it, because one of them was
lost or has not got the array, that is the controller's to judge, not the host's: it may be bringing the
array back. So what was asked stays open, and the controller is asked when it makes sense to try again.

    asked -every host has answered-> settled
      |  ^
      |  +-- Answered: ask where the slices are now ------------+
      |                                                         |
      +- a host is lost, or has not got it; a slice is lost -> inquiring
      |                                                         |
      +-> failed <- RunFailed, Answered with an error, RETRIES in vain -+

What a host says about the program itself (it raised, it did not compile) is final. So is any error if this
client has deleted the array, or donated it. The controller may know of a loss a little later than the
client, and a host of an array that is made again, so what fails in vain is asked after a growing pause.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from pw.client.session.hosts import Devices, Hosts
from pw.client.session.notes import Ask, Await, Get, Look, Settle, reject, resolve
from pw.core.actor import Env
from pw.core.errors import (
    INFRASTRUCTURE,
    ArrayDeleted,
    Disconnected,
    Error,
    ErrorReport,
    HostLost,
)
from pw.core.ids import CONTROL, CONTROLLER
from pw.core.landing import Bulk, Bytes
from pw.core.messages import (
    INLINE_BYTES,
    CancelRequest,
    Describe,
    Explain,
    Fetch,
    GetStats,
    Inquire,
    Wait,
)
from pw.core.packing import unpack
from pw.core.sharding import ArraySpec, Box, box_bytes, packed_offsets

RETRIES = 8
"""How often the same is asked again before its last error is believed, unless a slice was bound since."""

RETRY_S = 0.01
"""How long to wait before asking a third time; twice as long before each further time."""

_MAY_PASS = INFRASTRUCTURE | {ArrayDeleted.__name__, Disconnected.__name__}
"""Errors of hosts that do not say what becomes of an array."""


@dataclass(slots=True, eq=False)
class _Open:
    """One thing the API waits for, and the requests it takes."""

    future: Settle
    arrays: tuple[int, ...]
    specs: tuple[ArraySpec, ...] = ()
    ask: Callable[[_Open, list[Devices]], None] | None = None
    """Sends the requests, which takes hosts; None for what is asked once and fails with whom it asks."""
    result: Any = None
    missing: set[int] = field(default_factory=set)
    given_up: bool = False
    """This client has deleted or donated one of the arrays meanwhile."""
    retries: int = 0
    bindings: int = 0
    error: ErrorReport | None = None
    """Why it is asked again."""


@dataclass(slots=True, eq=False)
class _Request:
    """One message to one host (or the controller) that will be answered."""

    of: _Open
    node: str
    boxes: list[Box] = field(default_factory=list)
    spec: ArraySpec | None = None
    transfer: int | None = None


@dataclass(frozen=True, slots=True)
class AskAgain:
    """Note to the session: the pause of this request is over."""

    request: int


class Requests:
    """Everything that is open between one client and its cluster."""

    def __init__(self, env: Env, bulk: Bulk, hosts: Hosts) -> None:
        self._env = env
        self._bulk = bulk
        self._hosts = hosts
        self._closed: Error | None = None
        self._open: dict[_Open, None] = {}
        self._requests: dict[int, _Request] = {}
        self._next_request = 0
        self._failed: dict[int, ErrorReport] = {}

    # --- what the API wants ----------------------------------------------------------------------------

    def get(self, note: Get) -> None:
        """Fetch a value."""
        opened = _Open(note.parts, (note.array,), (note.spec,), self._fetch)
        if self._begin(opened):
            self._ask(opened)

    def wait(self, note: Await) -> None:
        """Wait for arrays."""
        arrays = tuple(array for array, _ in note.arrays)
        opened = _Open(note.ready, arrays, tuple(spec for _, spec in note.arrays), self._wait)
        if self._begin(opened):
            self._ask(opened)

    def ask(self, note: Ask) -> None:
        """Ask the controller, and for counters every host."""
        opened = _Open(note.answer, note.arrays)
        if not self._begin(opened):
            return
        message = note.what(self._request(_Request(opened, CONTROLLER)))
        if isinstance(message, Explain):
            hosts = {request.node for request in self._requests.values()} - {CONTROLLER}
            message = Explain(message.request, tuple(sorted(hosts)))
        self._env.send(CONTROL, message)
        if note.what is GetStats:
            opened.result = {}
            for host in self._hosts.names:
                self._hosts.send(host, GetStats(self._request(_Request(opened, host))))
        self._check(opened)

    def look(self, note: Look) -> None:
        """Ask a host what there is on disk."""

        def describe(opened: _Open, located: list[Devices]) -> None:
            host = located[0][0].host
            self._hosts.send(host, Describe(self._request(_Request(opened, host)), note.path))

        opened = _Open(note.answer, (), (note.spec,), describe)
        if self._begin(opened):
            self._ask(opened)

    def _begin(self, opened: _Open) -> bool:
        if self._closed is not None:
            reject(opened.future, self._closed)
            return False
        self._open[opened] = None
        return True

    def _check(self, opened: _Open) -> bool:
        """Whether all arrays may exist; if one cannot, it has failed."""
        for array in opened.arrays:
            if (error := self._failed.get(array)) is not None:
                self._fail(opened, error)
                return False
        return True

    def _ask(self, opened: _Open) -> None:
        """Send the requests to where the arrays are now."""
        assert opened.ask is not None
        if not self._check(opened):
            return
        located = [self._hosts.devices(spec) for spec in opened.specs]
        bound = [devices for devices in located if devices is not None]
        if len(bound) < len(located):
            self._inquire(opened, _unbound(opened))
        else:
            opened.ask(opened, bound)

    def _fetch(self, opened: _Open, located: list[Devices]) -> None:
        (array,), (spec,), (devices,) = opened.arrays, opened.specs, located
        opened.result = []
        for host, positions in _cover(spec, devices).items():
            boxes = [spec.box(position) for position in positions]
            _, total = packed_offsets([box_bytes(box, spec.dtype) for box in boxes])
            request = _Request(opened, host, boxes, spec)
            number = self._request(request)
            landing = None
            if total > INLINE_BYTES:
                try:
                    landing = self._bulk.land(total, self._landed(number))
                except Error as error:
                    self._fail(opened, ErrorReport.of(error))
                    return
                request.transfer = landing.transfer
            self._hosts.send(host, Fetch(number, array, spec, devices, tuple(positions), landing))

    def _landed(self, number: int) -> Callable[[Bytes], None]:
        return lambda buffer: self.fetched(number, buffer)

    def _wait(self, opened: _Open, located: list[Devices]) -> None:
        by_host: dict[str, list[int]] = {}
        for array, devices in zip(opened.arrays, located, strict=True):
            for host in dict.fromkeys(device.host for device in devices):
                by_host.setdefault(host, []).append(array)
        for host, arrays in by_host.items():
            self._hosts.send(host, Wait(self._request(_Request(opened, host)), tuple(arrays)))
        self._settle(opened)

    def _request(self, request: _Request) -> int:
        self._next_request += 1
        request.of.missing.add(self._next_request)
        self._requests[self._next_request] = request
        return self._next_request

    # --- answers -------------------------------------------------------------------------------------

    def fetched(self, number: int, buffer: bytes | Bytes) -> None:
        """The bytes of a fetch are here."""
        request = self._taken(number)
        if request is None or request.spec is None:
            return
        sizes = [box_bytes(box, request.spec.dtype) for box in request.boxes]
        offsets, _ = packed_offsets(sizes)
        for box, offset in zip(request.boxes, offsets, strict=True):
            request.of.result.append((box, unpack(buffer, offset, request.spec, box)))
        self._settle(request.of)

    def ready(self, number: int) -> None:
        """One host's shards are ready."""
        request = self._taken(number)
        if request is not None:
            self._settle(request.of)

    def report(self, number: int, result: Any) -> None:
        """The controller has told how things are."""
        request = self._taken(number)
        if request is not None:
            request.of.result = result
            self._settle(request.of)

    def counters(self, number: int, node: str, counters: dict[str, int]) -> None:
        """One process's counters."""
        request = self._taken(number)
        if request is not None:
            request.of.result[node] = counters
            self._settle(request.of)

    def answered(self, number: int, error: ErrorReport | None) -> None:
        """The controller has done what it was asked to, or knows that a host can be asked again."""
        request = self._taken(number)
        if request is None:
            return
        if error is not None:
            self._fail(request.of, error)
        elif request.of.ask is None:
            self._settle(request.of)
        elif request.of.retries < 2:
            self._ask(request.of)
        else:
            pause = self._request(_Request(request.of, CONTROLLER))
            self._env.call_later(RETRY_S * 2 ** (request.of.retries - 2), AskAgain(pause))

    def ask_again(self, number: int) -> None:
        """A pause is over."""
        request = self._taken(number)
        if request is not None:
            self._ask(request.of)

    def failed(self, number: int, error: ErrorReport) -> None:
        """A request has failed, which may be no failure of what was asked."""
        request = self._taken(number)
        if request is None:
            return
        if request.transfer is not None:
            self._bulk.cancel(request.transfer)
        if request.of.ask is None or request.node == CONTROLLER or error.kind not in _MAY_PASS:
            self._fail(request.of, error)
            return
        if error.kind == Disconnected.__name__:
            self._hosts.lost(request.node)  # it has lost its link to this client
        self._inquire(request.of, error)

    def is_open(self, number: int) -> bool:
        """Whether somebody waits for the answer."""
        return number in self._requests

    def _taken(self, number: int) -> _Request | None:
        request = self._requests.pop(number, None)
        if request is not None:
            request.of.missing.discard(number)
        return request

    # --- news ----------------------------------------------------------------------------------------

    def host_lost(self, node: str, error: ErrorReport) -> None:
        """Nothing that was asked of a host will be answered."""
        for number, request in list(self._requests.items()):
            if request.node == node:
                self.failed(number, error)

    def slice_moved(self, slice: int) -> None:
        """Whoever was asked about arrays of this slice does not have them any more."""
        for opened in list(self._open):
            asked = any(self._requests[number].node != CONTROLLER for number in opened.missing)
            if asked and any(spec.placement.slice == slice for spec in opened.specs):
                self._inquire(opened, _unbound(opened))

    def arrays_failed(self, arrays: tuple[int, ...], error: ErrorReport) -> None:
        """These arrays never will be."""
        self._failed.update(dict.fromkeys(arrays, error))
        failed = set(arrays)
        for opened in list(self._open):
            if not failed.isdisjoint(opened.arrays):
                self._fail(opened, error)

    def forget(self, arrays: Sequence[int]) -> None:
        """The client has deleted or donated these: what is asked of them now is not asked again."""
        if self._failed:
            for array in arrays:
                self._failed.pop(array, None)
        gone = set(arrays) if self._open else set()
        for opened in self._open:
            opened.given_up = opened.given_up or not gone.isdisjoint(opened.arrays)

    def close(self, error: Error) -> None:
        """Fail all that is open; no host is asked any more."""
        self._closed = error
        for opened in self._open:
            reject(opened.future, error)
        for request in self._requests.values():
            if request.transfer is not None:
                self._bulk.cancel(request.transfer)
        self._open.clear()
        self._requests.clear()

    # --- asking again, and ends --------------------------------------------------------------------------

    def _inquire(self, opened: _Open, error: ErrorReport) -> None:
        """Have the controller say when to ask again, or believe the error."""
        self._withdraw(opened)
        if opened.bindings != self._hosts.bindings:
            opened.bindings, opened.retries = self._hosts.bindings, 0
        opened.retries += 1
        if opened.error is None or error.kind != ArrayDeleted.__name__:
            opened.error = error  # what a host has not got it does not know the end of
        if opened.given_up:
            self._fail(opened, error)
            return
        if opened.retries > RETRIES:
            self._fail(opened, opened.error)
            return
        self._env.count("inquiries")
        number = self._request(_Request(opened, CONTROLLER))
        self._env.send(CONTROL, Inquire(number, opened.arrays))

    def _settle(self, opened: _Open) -> None:
        if not opened.missing:
            del self._open[opened]
            resolve(opened.future, opened.result)

    def _fail(self, opened: _Open, error: ErrorReport) -> None:
        self._withdraw(opened)
        del self._open[opened]
        reject(opened.future, error.exception())

    def _withdraw(self, opened: _Open) -> None:
        """Nobody waits for what has not been answered yet."""
        for number in opened.missing:
            request = self._requests.pop(number)
            if request.transfer is not None:
                self._bulk.cancel(request.transfer)
            if request.node != CONTROLLER:
                self._hosts.send(request.node, CancelRequest(number))
        opened.missing.clear()


def _cover(spec: ArraySpec, devices: Devices) -> dict[str, list[int]]:
    """For each host the mesh positions to ask for so that every distinct box comes exactly once."""
    chosen: dict[str, list[int]] = {}
    for _, positions in spec.distinct_boxes():
        chosen.setdefault(devices[positions[0]].host, []).append(positions[0])
    return chosen


def _unbound(opened: _Open) -> ErrorReport:
    what = ", ".join(spec.short for spec in opened.specs[:4]) or "what was asked for"
    return ErrorReport.of(
        HostLost(
            f"the devices of {what} are away: a host of their island was lost. It can be used again when the "
            "island has all its hosts (see pw.status())"
        )
    )
