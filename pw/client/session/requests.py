"""Requests: what a client asks hosts and the controller, and asks again after a loss.

The client asks the hosts of an array's slice for its value. When they cannot give it, because one of them
was lost or does not have the array, the controller decides: it may be restoring the array. So the request
stays open, and the controller says when to ask again.

    asked -every host has answered-> settled
      |  ^
      |  +-- Answered: ask where the slices are now ------------+
      |                                                         |
      +- a host is lost or lacks the array; a slice is lost -> inquiring
      |                                                         |
      +-> failed <- RunFailed, Answered with an error, RETRIES in vain -+

A host's error about the program itself (it raised, it did not compile) is final. So is any error of
an array that this client has deleted or donated. The controller may hear of a loss later than the
client, so the client asks again after pauses that grow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from pw.client.session.hosts import Devices, Hosts, by_host, cover
from pw.client.session.journaling import JournalingEnv
from pw.client.session.thread_messages import (
    Ask,
    AskCompiler,
    AskedAhead,
    Await,
    DescribeCheckpoint,
    Get,
    Settle,
    reject,
    resolve,
)
from pw.core import messages as msg
from pw.core.actors.actor import Part, handles
from pw.core.errors import INFRASTRUCTURE, ArrayDeleted, Disconnected, Error, ErrorReport, HostLost
from pw.core.ids import CONTROL, CONTROLLER, Address
from pw.core.landing import Bulk, Bytes
from pw.core.packing import unpack
from pw.core.sharding import ArraySpec, Box, box_bytes, packed_offsets

UNRAISED_KEPT = 64
"""Failed runs that are told at the end of the session, if no call has raised their errors."""

WITHDRAWN_S = 1.0
"""Seconds for which the errors of arrays are known that were deleted before: who waited for one on a line asks
here when its slice has moved, and this may come behind the error."""

RETRIES = 8
"""After so many retries the last error is final, unless a slice was bound meanwhile."""

RETRY_S = 0.01
"""The pause before asking a third time; it doubles each further time."""

_MAY_PASS = INFRASTRUCTURE | {ArrayDeleted.__name__, Disconnected.__name__}
"""Errors of hosts that leave it open whether an array is lost."""


@dataclass(slots=True, eq=False)
class _Query:
    """A future of the API, and the requests that settle it."""

    future: Settle
    arrays: tuple[int, ...]
    specs: tuple[ArraySpec, ...] = ()
    ask: Callable[[_Query, list[Devices]], None] | None = None
    """Sends requests to hosts; None if the request is sent once and fails with its receiver."""
    result: Any = None
    missing: set[int] = field(default_factory=set)
    given_up: bool = False
    """True if this client has deleted or donated one of the arrays."""
    retries: int = 0
    bindings: int = 0
    error: ErrorReport | None = None
    """Error for which it is asked again."""
    ahead: AskedAhead | None = None
    """Says whether a thread waits, if none did when it was asked."""


@dataclass(slots=True, eq=False)
class _Request:
    """One message to a host or the controller, which answers it."""

    query: _Query
    node: str
    boxes: list[Box] = field(default_factory=list)
    spec: ArraySpec | None = None
    transfer: int | None = None


@dataclass(frozen=True, slots=True)
class AskAgain:
    """Timer: the pause of this request is over."""

    request: int


class Requests(Part):
    """The open requests of one client."""

    def __init__(self, env: JournalingEnv, bulk: Bulk, hosts: Hosts) -> None:
        self._env = env
        self._bulk = bulk
        self._hosts = hosts
        self._closed: Error | None = None
        self._queries: dict[_Query, None] = {}
        self._requests: dict[int, _Request] = {}
        self._next_request = 0
        self.failed: dict[int, ErrorReport] = {}
        """The errors of arrays that will never exist."""
        self.unraised: dict[int, msg.RunFailed] = {}
        """Newest failures that no call has raised, by run."""
        self.asked_hosts: Callable[[], set[str]] = set
        """The hosts that threads have asked over their lines."""
        self.withdraw_from_lines: Callable[[frozenset[int]], None] = lambda arrays: None
        """Takes back what threads have asked over their lines about failed arrays."""

    # --- from the API --------------------------------------------------------------------------------

    @handles(Get)
    def on_get(self, sender: Address, note: Get) -> None:
        """Get the parts of an array, or fail the future if the session has ended."""
        ask = partial(self._fetch, note.positions)
        query = _Query(note.parts, (note.array,), (note.spec,), ask, ahead=note.ahead)
        if self._begin(query):
            self._ask(query)

    @handles(Await)
    def on_await(self, sender: Address, note: Await) -> None:
        """Wait for arrays, or fail the future if the session has ended."""
        arrays = tuple(array for array, _ in note.arrays)
        specs = tuple(spec for _, spec in note.arrays)
        query = _Query(note.ready, arrays, specs, self._wait, ahead=note.ahead)
        if self._begin(query):
            self._ask(query)

    @handles(Ask)
    def _on_ask(self, sender: Address, note: Ask) -> None:
        """Ask the controller, and for counters also every host."""
        self._env.journal.prune_requests(self.is_open)
        query = _Query(note.answer, note.arrays)
        if not self._begin(query):
            return
        message = note.what(self._request(_Request(query, CONTROLLER)))
        if isinstance(message, msg.Explain):
            hosts = {request.node for request in self._requests.values()} - {CONTROLLER}
            hosts |= self.asked_hosts()
            message = msg.Explain(message.request, tuple(sorted(hosts)))
        self._env.send(CONTROL, message)
        if note.what is msg.GetStats:
            query.result = {}
            for host in self._hosts.names:
                self._hosts.send(host, msg.GetStats(self._request(_Request(query, host))))
        self._check(query)

    @handles(DescribeCheckpoint)
    def _on_look(self, sender: Address, note: DescribeCheckpoint) -> None:
        def describe(query: _Query, located: list[Devices]) -> None:
            host = located[0][0].host
            self._hosts.send(host, msg.Describe(self._request(_Request(query, host)), note.path))

        query = _Query(note.answer, (), (note.spec,), describe)
        if self._begin(query):
            self._ask(query)

    @handles(AskCompiler)
    def _on_ask_compiler(self, sender: Address, note: AskCompiler) -> None:
        def compile(query: _Query, located: list[Devices]) -> None:
            bound = self._hosts.binding(note.spec)
            assert bound is not None, "the devices were found in it"
            (devices,) = located
            for host in dict.fromkeys(device.host for device in devices):
                number = self._request(_Request(query, host))
                where = (devices, bound.island, bound.epoch)
                self._hosts.send(host, msg.Compile(number, note.artifact, *where, note.detail))

        query = _Query(note.answer, (), (note.spec,), compile)
        if self._begin(query):
            self._ask(query)

    def _begin(self, query: _Query) -> bool:
        if self._closed is not None:
            reject(query.future, self._closed)
            return False
        self._queries[query] = None
        return True

    def _check(self, query: _Query) -> bool:
        """Return whether no array has failed; otherwise fail."""
        for array in query.arrays:
            if (error := self.failed.get(array)) is not None:
                self._fail(query, error)
                return False
        return True

    def _ask(self, query: _Query) -> None:
        """Send the requests to the hosts that have the arrays now."""
        assert query.ask is not None
        if not self._check(query):
            return
        located = [self._hosts.devices(spec) for spec in query.specs]
        if query.arrays and not query.retries:
            copied = map(self._hosts.devices_of_copies, query.specs)
            located = [devices or other for devices, other in zip(located, copied, strict=True)]
        bound = [devices for devices in located if devices is not None]
        if len(bound) < len(located):
            self._inquire(query, _unbound(query))
        else:
            query.ask(query, bound)

    def _fetch(self, shards: tuple[int, ...], query: _Query, located: list[Devices]) -> None:
        (array,), (spec,), (devices,) = query.arrays, query.specs, located
        place = self._hosts.place(spec)
        query.result = []
        chosen = by_host(shards, devices) if shards else cover(spec, devices)
        for host, positions in chosen.items():
            boxes = [spec.box(position) for position in positions]
            _, total = packed_offsets([box_bytes(box, spec.dtype) for box in boxes])
            request = _Request(query, host, boxes, spec)
            number = self._request(request)
            landing = None
            if total > msg.INLINE_BYTES:
                try:
                    landing = self._bulk.land(
                        total, partial(self._fetched, number), self._hosts.endpoint(host)
                    )
                except Error as error:
                    self._fail(query, ErrorReport.of(error))
                    return
                request.transfer = landing.transfer
            self._hosts.send(
                host, msg.Fetch(number, array, spec, devices, tuple(positions), landing, *place)
            )

    def _wait(self, query: _Query, located: list[Devices]) -> None:
        by_place: dict[tuple[str, str, int], list[int]] = {}
        for array, spec, devices in zip(query.arrays, query.specs, located, strict=True):
            place = self._hosts.place(spec)
            for host in dict.fromkeys(device.host for device in devices):
                by_place.setdefault((host, *place), []).append(array)
        for (host, island, epoch), arrays in by_place.items():
            number = self._request(_Request(query, host))
            self._hosts.send(host, msg.Wait(number, tuple(arrays), island, epoch))
        self._settle(query)

    def _request(self, request: _Request) -> int:
        self._next_request += 1
        request.query.missing.add(self._next_request)
        self._requests[self._next_request] = request
        return self._next_request

    # --- answers -------------------------------------------------------------------------------------

    @handles(msg.Fetched)
    def _on_fetched(self, sender: Address, message: msg.Fetched) -> None:
        self._fetched(message.request, message.data)

    def _fetched(self, number: int, buffer: bytes | Bytes) -> None:
        request = self._pop(number)
        if request is None or request.spec is None:
            return
        sizes = [box_bytes(box, request.spec.dtype) for box in request.boxes]
        offsets, _ = packed_offsets(sizes)
        for box, offset in zip(request.boxes, offsets, strict=True):
            request.query.result.append((box, unpack(buffer, offset, request.spec, box)))
        self._settle(request.query)

    @handles(msg.Compiled)
    def _on_compiled(self, sender: Address, message: msg.Compiled) -> None:
        """Take the first answer. The other hosts go on, as a program will need their executables."""
        request = self._pop(message.request)
        if request is not None:
            for number in request.query.missing:
                del self._requests[number]
            request.query.missing.clear()
            request.query.result = message
            self._settle(request.query)

    @handles(
        msg.Ready,
        msg.Described,
        msg.Status,
        msg.Explanation,
        msg.Memory,
        msg.ProgramPlan,
        msg.Published,
        msg.VersionOffer,
        msg.NameList,
        msg.Queue,
        msg.DevicesTested,
        msg.MovesPlanned,
        msg.Stats,
    )
    def _on_report(self, sender: Address, message: Any) -> None:
        request = self._pop(message.request)
        if request is None:
            return
        if isinstance(message, msg.Stats):
            request.query.result[message.node] = message
        elif not isinstance(message, msg.Ready):
            request.query.result = message
        self._settle(request.query)

    @handles(msg.Answered)
    def _on_answered(self, sender: Address, message: msg.Answered) -> None:
        """The controller has done what it was asked to, or knows when to ask a host again."""
        self._env.journal.prune_requests(self.is_open)
        request = self._pop(message.request)
        if request is None:
            return
        if message.error is not None:
            self._fail(request.query, message.error)
        elif request.query.ask is None:
            self._settle(request.query)
        elif request.query.retries < 2:
            self._ask(request.query)
        else:
            pause = self._request(_Request(request.query, CONTROLLER))
            self._env.call_later(RETRY_S * 2 ** (request.query.retries - 2), AskAgain(pause))

    @handles(AskAgain)
    def _on_ask_again(self, sender: Address, note: AskAgain) -> None:
        request = self._pop(note.request)
        if request is not None:
            self._ask(request.query)

    @handles(msg.RequestFailed)
    def _on_failed(self, sender: Address, message: msg.RequestFailed) -> None:
        self._failed(message.request, message.error)

    def _failed(self, number: int, error: ErrorReport) -> None:
        """Fail the API's future, or ask the controller whether that is final."""
        request = self._pop(number)
        if request is None:
            return
        if request.transfer is not None:
            self._bulk.cancel(request.transfer)
        may_pass = request.node != CONTROLLER and error.kind in _MAY_PASS
        if may_pass and isinstance(request.query.result, dict):  # counters: other hosts have theirs
            request.query.result[request.node] = msg.Stats(number, request.node, {"lost": 1})
            self._settle(request.query)
            return
        if request.query.ask is None or not may_pass:
            self._fail(request.query, error)
            return
        if error.kind == Disconnected.__name__:
            self._hosts.lost(request.node)  # it has lost its link to this client
        self._inquire(request.query, error)

    def is_open(self, number: int) -> bool:
        """Whether a future waits for the answer."""
        return number in self._requests

    def _pop(self, number: int) -> _Request | None:
        request = self._requests.pop(number, None)
        if request is not None:
            request.query.missing.discard(number)
        return request

    # --- news ----------------------------------------------------------------------------------------

    def host_lost(self, node: str, error: ErrorReport) -> None:
        """Fail all requests to this host."""
        for number, request in list(self._requests.items()):
            if request.node == node:
                self._failed(number, error)

    def slice_moved(self, slice: int) -> None:
        """Ask again for arrays of this slice: the hosts that were asked do not have them any more."""
        for query in list(self._queries):
            asked = any(self._requests[number].node != CONTROLLER for number in query.missing)
            if asked and any(spec.placement.slice == slice for spec in query.specs):
                self._inquire(query, _unbound(query))

    @handles(msg.SliceLost)
    def _on_slice_lost(self, sender: Address, message: msg.SliceLost) -> None:
        self.slice_moved(message.slice)

    @handles(msg.RunFailed)
    def _on_run_failed(self, sender: Address, message: msg.RunFailed) -> None:
        arrays = frozenset(message.results)
        self.failed.update(dict.fromkeys(message.results, message.error))
        self.unraised[message.run] = message
        if len(self.unraised) > UNRAISED_KEPT:
            del self.unraised[next(iter(self.unraised))]
        self.withdraw_from_lines(arrays)
        for query in list(self._queries):
            if not arrays.isdisjoint(query.arrays):
                self._fail(query, message.error)
        gone = [array for array in message.results if not self._env.may_have(array)]
        if gone:
            self._env.call_later(WITHDRAWN_S, partial(self.forget, gone))

    def forget(self, arrays: Sequence[int]) -> None:
        """The client has deleted or donated these arrays: do not ask for them again."""
        if self.failed:
            for array in arrays:
                self.failed.pop(array, None)
        gone = set(arrays) if self._queries else set()
        for query in self._queries:
            query.given_up = query.given_up or not gone.isdisjoint(query.arrays)

    def close(self, error: Error) -> None:
        """Fail all that is open, and all that is asked later."""
        self._closed = error
        for query in self._queries:
            reject(query.future, error)
        for request in self._requests.values():
            if request.transfer is not None:
                self._bulk.cancel(request.transfer)
        self._queries.clear()
        self._requests.clear()

    # --- asking again, and ends --------------------------------------------------------------------------

    def _inquire(self, query: _Query, error: ErrorReport) -> None:
        """Ask the controller when to ask again, or fail."""
        self._withdraw(query)
        if query.bindings != self._hosts.bindings:
            query.bindings, query.retries = self._hosts.bindings, 0
        query.retries += 1
        if query.error is None or error.kind != ArrayDeleted.__name__:
            query.error = error  # a host that lacks an array does not know why
        if query.given_up:
            self._fail(query, error)
            return
        if query.retries > RETRIES:
            self._fail(query, query.error)
            return
        self._env.count("inquiries")
        number = self._request(_Request(query, CONTROLLER))
        slices = tuple(dict.fromkeys(spec.placement.slice for spec in query.specs))
        self._env.send(CONTROL, msg.Inquire(number, query.arrays, slices))

    def _settle(self, query: _Query) -> None:
        if not query.missing:
            del self._queries[query]
            resolve(query.future, query.result)

    def _fail(self, query: _Query, error: ErrorReport) -> None:
        if query.ahead is None or query.ahead.is_waited_for:
            for run in [run for run, one in self.unraised.items() if one.error is error]:
                del self.unraised[run]
        self._withdraw(query)
        del self._queries[query]
        reject(query.future, error.exception())

    def _withdraw(self, query: _Query) -> None:
        """Cancel the requests that have not been answered."""
        for number in query.missing:
            request = self._requests.pop(number)
            if request.transfer is not None:
                self._bulk.cancel(request.transfer)
            if request.node != CONTROLLER:
                self._hosts.send(request.node, msg.CancelRequest(number))
        query.missing.clear()


def _unbound(query: _Query) -> ErrorReport:
    what = ", ".join(spec.short for spec in query.specs[:4]) or "what was asked for"
    return ErrorReport.of(
        HostLost(
            f"the devices of {what} are away: a host of their island was lost. They come back when the island "
            "has all its hosts (see pw.status())"
        )
    )
