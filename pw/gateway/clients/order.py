"""The order of one client's requests: when each is handled, and how it is answered.

Requests are handled strictly in order; what waits for a host (a value to be ready, a fetch) is answered
later, out of order. A request that waits for a host buffer or a credit holds up those behind it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple

from pw.gateway.arrays.arrays import ProxyArray
from pw.gateway.arrays.buffers import HostBuffers
from pw.gateway.arrays.runs import Runs
from pw.gateway.arrays.waits import Waits
from pw.gateway.protocol import protos, statuses
from pw.gateway.protocol.replies import ReplyHeads

_RESULTS = {
    "make_array_from_host_buffer_request": "array_handle",
    "make_arrays_from_host_buffer_shards_request": "array_handles",
    "make_error_arrays_request": "array_handles",
    "assemble_array_from_single_device_arrays_request": "result_handle",
    "remap_arrays_request": "result_handles",
    "bitcast_arrays_request": "result_handles",
    "reshard_arrays_request": "result_handles",
    "disassemble_into_single_device_arrays_request": "result_handles",
    "copy_arrays_request": "result_handles",
    "fully_replicated_shard_request": "result_handle",
    "loaded_executable_execute_request": "result_array_handle",
}
"""The field in which a request names its results."""

_UNCOUNTED = ("delete_array_request", "destruct_array_request")
"""Requests whose replies do not count for the sequence number."""

DELETIONS = 1 << 62
"""The first handle of a future of a deletion; the replies to questions for these do not count, either."""

FEW = 4
"""Requests that go on, after a wait of the script, as soon as their host buffers are here."""

Handler = Callable[[Any, Any], Any]
"""Fills the reply. Returns None; or what does the rest before the next request, an awaitable or `Buffered`; or,
if the reply may come out of order, `Later` or `When`."""


class When(NamedTuple):
    """The return value of a handler whose reply is complete when a future of the session is settled."""

    future: Future[Any]
    kept: list[ProxyArray]
    """Arrays that are not released before."""


class Later:
    """The return value of a handler whose reply may come out of order."""

    def __init__(self, work: Coroutine[Any, Any, None]) -> None:
        self.work = work


class Buffered(NamedTuple):
    """The return value of a handler whose work, and all requests behind it, wait for host buffers."""

    handles: Sequence[int]
    make: Callable[[], None]


class RequestOrder:
    """The requests of one client, in the order of their stream.

    Args:
        loop: the gateway's loop.
        handlers: handle the kinds of requests.
        failed: stores the error of a request under the handles of its results; called with the request's kind
            and body, and the error.
        buffers: the client's host buffers.
        runs: tells when futures of the session are settled.
        waits: shows what the script waits for.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        handlers: Mapping[str, Handler],
        failed: Callable[[str, Any, BaseException], None],
        buffers: HostBuffers,
        runs: Runs,
        waits: Waits,
    ) -> None:
        self._loop = loop
        self._handlers = handlers
        self._failed = failed
        self._buffers = buffers
        self._runs = runs
        self._waits = waits
        self.reply: Callable[[bytes, bool], None] = lambda reply, is_awaited: None
        """Takes each encoded reply, and whether the client may be waiting for it."""
        self.hurry: Callable[[], None] = lambda: None
        """Sends the replies now."""
        self._reply_class = protos.message("xla.ifrt.proxy.IfrtResponse")
        self._heads = ReplyHeads()
        self._working: set[asyncio.Task[None]] = set()
        self._waiting: deque[Any] = deque()
        """Requests behind one that waits; `_is_busy` then."""
        self._is_busy = False
        self._wanted: Sequence[int] = ()
        """Host buffers that the request at work waits for."""
        self.since_wait = 0
        """Number of requests that have waited for host buffers since the script last waited."""
        self._left: Callable[[], object] | None = None
        """Function to call when the requests before the client's end are handled."""

    def feed(self, request: Any) -> None:
        """Handle the next request of the stream; its reply goes to `reply`."""
        if self._is_busy:
            self._waiting.append(request)
        else:
            self._handle(request)

    def _handle(self, request: Any) -> None:
        kind: str = request.WhichOneof("request") or ""
        metadata = request.request_metadata
        body: Any = getattr(request, kind) if kind else None
        reply = self._reply_class()
        try:
            handler = self._handlers.get(kind)
            if handler is None:
                raise statuses.unsupported(f"the gateway of pw does not support {kind or 'this'}")
            rest = handler(body, reply)
        except Exception as error:  # noqa: BLE001 - the reply carries it
            self._fail(kind, body, metadata.op_id, error)
        else:
            if rest is None:
                is_counted = kind not in _UNCOUNTED and not (
                    kind == "check_future_request" and body.future_handle >= DELETIONS
                )
                is_awaited = _is_awaited(kind, body)
                self._answer(metadata.op_id, reply, is_counted=is_counted, is_awaited=is_awaited)
            elif type(rest) is Later:
                self._start(self._finish(rest.work, metadata.op_id, reply))
            elif type(rest) is When:
                self._answer_when(rest, metadata.op_id, reply)
            elif type(rest) is Buffered:
                self._is_busy = True
                self._make_when_here(rest, kind, body, metadata.op_id, reply)
            else:
                self._is_busy = True
                self._start(self._go_on(rest, kind, body, metadata.op_id, reply))
        if metadata.user_context_id:
            self._heads.dead_contexts.append(metadata.user_context_id)

    async def _go_on(
        self, rest: Awaitable[None], kind: str, body: Any, operation: int, reply: Any
    ) -> None:
        """Do the rest of a request, and then the requests behind it."""
        try:
            await rest
        except Exception as error:  # noqa: BLE001 - the reply carries it
            self._fail(kind, body, operation, error)
        else:
            self._answer(operation, reply, is_awaited=_is_awaited(kind, body))
        self._resume()

    def _make_when_here(
        self, buffered: Buffered, kind: str, body: Any, operation: int, reply: Any
    ) -> None:
        make = partial(self._make, buffered.make, kind, body, operation, reply)
        then: Callable[[], object] = make
        if self.since_wait >= FEW:
            # Runs gather until the next turn, and hosts are woken less often.
            then = partial(self._loop.call_soon, make)
        self.since_wait += 1
        self._wanted = buffered.handles
        if self._left is not None:
            self._buffers.fail_missing(self._wanted)
        self._buffers.when_all_here(self._wanted, then)

    def _make(
        self, make: Callable[[], None], kind: str, body: Any, operation: int, reply: Any
    ) -> None:
        """Handle a request whose host buffers are here now, and then the requests behind it."""
        try:
            make()
        except Exception as error:  # noqa: BLE001 - the reply carries it
            self._fail(kind, body, operation, error)
        else:
            self._answer(operation, reply, is_awaited=_is_awaited(kind, body))
        self._resume()

    def _resume(self) -> None:
        """Handle the requests behind one that has waited."""
        self._is_busy, self._wanted = False, ()
        while self._waiting and not self._is_busy:
            self._handle(self._waiting.popleft())
        if self._left is not None and not self._is_busy:
            self._left()

    async def _finish(self, work: Awaitable[None], operation: int, reply: Any) -> None:
        """Answer a request when its work is done, in any order."""
        try:
            await work
        except Exception as error:  # noqa: BLE001 - the reply carries it
            self._answer(operation, self._reply_class(), error)
        else:
            self._answer(operation, reply)

    def _answer_when(self, when: When, operation: int, reply: Any) -> None:
        """Answer a request for which the script waits."""
        end, kept = self._waits.begin(when.future), when.kept

        def settled(ended: Future[Any]) -> None:  # names no `when`: the future would keep itself
            end()
            error = ended.exception()
            self._answer(operation, reply if error is None else self._reply_class(), error)
            self.hurry()
            kept.clear()

        self._runs.then(when.future, settled)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._working.add(task)
        task.add_done_callback(self._working.discard)

    def _fail(self, kind: str, body: Any, operation: int, error: BaseException) -> None:
        """Answer a request with its error."""
        self._failed(kind, body, error)
        self._answer(operation, self._reply_class(), error)

    def _answer(
        self,
        operation: int,
        reply: Any,
        error: BaseException | None = None,
        *,
        is_counted: bool = True,
        is_awaited: bool = True,
    ) -> None:
        if error is not None:
            metadata = reply.response_metadata
            metadata.op_id = operation
            metadata.status.code, metadata.status.message = statuses.status_of(error)
            self.reply(reply.SerializeToString(), True)
        else:
            head = (
                self._heads.counted(operation) if is_counted else self._heads.uncounted(operation)
            )
            self.reply(head + reply.SerializeToString(), is_awaited)

    def leave(self, then: Callable[[], object]) -> None:
        """Call `then` when the requests that have come are handled: the client sends no more."""
        if self._is_busy:
            self._left = then
            self._buffers.fail_missing(self._wanted)
        else:
            then()

    def close(self) -> None:
        """Handle and answer nothing more."""
        for task in self._working:
            task.cancel()
        self._waiting.clear()
        self.reply, self.hurry = lambda reply, is_awaited: None, lambda: None


def results_of(kind: str, body: Any) -> Sequence[int]:
    """Return the handles that a request names its results by; 0 for one that the gateway names."""
    named = _RESULTS.get(kind)
    if named is None:
        return ()
    value = getattr(body, named)
    return (value,) if isinstance(value, int) else value


def _is_awaited(kind: str, body: Any) -> bool:
    """Whether the client may be waiting for the reply: not if it has named the results, or wants none."""
    named = _RESULTS.get(kind)
    return kind not in _UNCOUNTED if named is None else not getattr(body, named)
