"""One client of the gateway: handles its requests in order, and writes the replies.

The client goes on without waiting, and names results itself. So a request that fails stores its error
under the handles of its results, and each use of them raises it. Requests are handled strictly in
order; what waits for a host (a value to be ready, a fetch) is answered later, out of order. A request
that waits for a host buffer or a credit holds up those behind it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple

from pw.client.connection.runtime import Runtime
from pw.core.errors import Disconnected
from pw.gateway import protos, shardings, statuses
from pw.gateway.arrays import ProxyArray, ProxyArrays
from pw.gateway.buffers import HostBuffers
from pw.gateway.colocated import CUSTOM, Colocated
from pw.gateway.constants import Constants
from pw.gateway.devices import Devices
from pw.gateway.dtypes import STRING
from pw.gateway.executables import Executables
from pw.gateway.executor import Executor
from pw.gateway.functions import Caller, Line, Script
from pw.gateway.moves import Moves
from pw.gateway.plugins import PLUGIN, Plugins
from pw.gateway.replies import ReplyHeads
from pw.gateway.reshards import Reshards
from pw.gateway.runs import Runs
from pw.gateway.transfers import DONATE, Transfers
from pw.gateway.waits import Waits

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

_DELETIONS = 1 << 62
"""The first handle of a future of a deletion; the replies to questions for these do not count, either."""

FEW = 4
"""After a wait of the script, so many requests go on as soon as their host buffers are here."""

Handler = Callable[[Any, Any], Any]
"""Fills the reply. Returns None; or what does the rest before the next request, an awaitable or `Buffered`; or,
if the reply may come out of order, `Later` or `When`."""


class When(NamedTuple):
    """What a handler returns whose reply is complete when a future of the session is settled."""

    future: Future[Any]
    kept: list[ProxyArray]
    """Arrays that are not released before."""


class Later:
    """What a handler returns whose reply may come out of order."""

    def __init__(self, work: Coroutine[Any, Any, None]) -> None:
        self.work = work


class Buffered(NamedTuple):
    """What a handler returns whose work, and all requests behind it, wait for host buffers."""

    handles: Sequence[int]
    make: Callable[[], None]


class GatewayClient:
    """One client's state and its stream of requests.

    Args:
        runtime: the session that it uses.
        devices: the devices that it sees.
        number: the session's number in the protocol.
        script: runs functions that computations call; None if there is none.
    """

    def __init__(
        self, runtime: Runtime, devices: Devices, number: int, script: Script | None = None
    ) -> None:
        self.number = number
        self._loop = asyncio.get_running_loop()
        self.buffers = HostBuffers(self._loop)
        self.arrays = ProxyArrays()
        self._devices = devices
        self._caller = Caller(script, runtime.calls)
        tell = None if script is None else lambda *line: script.send(Line(*line))
        self._waits = Waits(self._loop, tell)
        self._runs = Runs(runtime, self._loop, devices.placement, self._waits)
        self._constants = Constants(self._loop)
        transfers = self._transfers = Transfers(
            self.arrays, self.buffers, devices, self._runs, self._constants
        )
        executor = Executor(devices, self._runs)
        self._moves = Moves(executor)
        self._reshards = Reshards(devices, self._runs, self._moves, transfers)
        loaders = {
            PLUGIN: Plugins(devices, self._runs, self._reshards).find,
            CUSTOM: Colocated(devices, self._runs, self._reshards).load,
        }
        self.executables = Executables(self.arrays, self._runs, executor, self._caller, loaders)
        self.reply: Callable[[bytes, bool], None] = lambda reply, is_awaited: None
        """Takes each encoded reply, and whether the client may be waiting for it."""
        self.hurry: Callable[[], None] = lambda: None
        """Sends the replies now."""
        self._reply_class = protos.message("xla.ifrt.proxy.IfrtResponse")
        self._heads = ReplyHeads()
        self._next_deletion = _DELETIONS
        self._working: set[asyncio.Task[None]] = set()
        self._waiting: deque[Any] = deque()
        """Requests behind one that waits; `_is_busy` then."""
        self._is_busy = False
        self._wanted: Sequence[int] = ()
        """Host buffers that the request at work waits for."""
        self._since_wait = 0
        """How many requests have waited for host buffers since the script last waited."""
        self._left: Callable[[], object] | None = None
        """Called when the requests before the client's end are handled."""
        executables = self.executables

        def later(work: Callable[[Any, Any], Coroutine[Any, Any, None]]) -> Handler:
            return lambda body, reply: Later(work(body, reply))

        self._handlers: dict[str, Handler] = {
            "init_request": self._init,
            "check_future_request": self._check_future,
            "check_value_ready_request": self._check_ready,
            "make_array_from_host_buffer_request": self._make_array,
            "make_arrays_from_host_buffer_shards_request": self._make_arrays,
            "make_error_arrays_request": transfers.make_error_arrays,
            "assemble_array_from_single_device_arrays_request": transfers.assemble,
            "disassemble_into_single_device_arrays_request": transfers.disassemble,
            "fully_replicated_shard_request": transfers.fully_replicated_shard,
            "remap_arrays_request": transfers.remap,
            "copy_arrays_request": transfers.copy_arrays,
            "reshard_arrays_request": self._reshard,
            "copy_to_host_buffer_request": self._copy_to_host,
            "delete_array_request": self._delete,
            "destruct_array_request": self._destruct,
            "is_array_deleted_request": self._is_deleted,
            "compile_request": later(executables.compile),
            "loaded_executable_metadata_request": executables.metadata,
            "loaded_executable_execute_request": executables.execute,
            "loaded_executable_fetch_execute_result_request": later(executables.fetch_result),
            "loaded_executable_cost_analysis_request": later(executables.cost_analysis),
            "loaded_executable_human_readable_program_text_request": later(executables.text),
            "loaded_executable_delete_request": self._delete_executable,
            "loaded_executable_is_deleted_request": self._is_executable_deleted,
            "loaded_executable_destruct_request": self._destruct_executable,
            "loaded_host_callback_poll_request": later(self._poll),
            "get_default_device_assignment_request": self._default_assignment,
            "get_default_layout_request": self._default_layout,
        }

    # --- the stream ----------------------------------------------------------------------------------

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
                    kind == "check_future_request" and body.future_handle >= _DELETIONS
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
        if self._since_wait >= FEW:
            # Runs gather until the next turn, and hosts are woken less often.
            then = partial(self._loop.call_soon, make)
        self._since_wait += 1
        self._wanted = buffered.handles
        if self._left is not None:
            self.buffers.fail_missing(self._wanted)
        self.buffers.when_all_here(self._wanted, then)

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
        """Store an error under the handles of a request's results, and answer with it."""
        named = _RESULTS.get(kind)
        if named is not None:
            value = getattr(body, named)
            for handle in (value,) if isinstance(value, int) else value:
                if handle:
                    self.arrays.fail(handle, error)
        if kind == "loaded_executable_execute_request":
            self.executables.fail_status(body.result_status_handle, error)
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
            self.buffers.fail_missing(self._wanted)
        else:
            then()

    def close(self) -> None:
        """Release all that the client has."""
        for task in self._working:
            task.cancel()
        self._waiting.clear()
        self.buffers.close(Disconnected("the client has left"))
        self.executables.close()
        self._moves.close()
        self._waits.close()
        self._caller.close()
        self._runs.close()
        self.arrays.clear()
        self._constants.clear()
        self.reply, self.hurry = lambda reply, is_awaited: None, lambda: None

    # --- requests ------------------------------------------------------------------------------------

    def _init(self, body: Any, reply: Any) -> None:
        reply.init_response.session_id = self.number
        self._devices.describe(reply.init_response, self._runs.runtime.endpoint or "")

    def _check_future(self, body: Any, reply: Any) -> None:
        reply.check_future_response.SetInParent()  # all that futures are given for has ended

    def _make_array(self, body: Any, reply: Any) -> Buffered | None:
        return self._with_buffers(
            [body.host_buffer_handle], self._transfers.make_array_from_host_buffer, body, reply
        )

    def _make_arrays(self, body: Any, reply: Any) -> Buffered | None:
        handles = [one.host_buffer_handle for spec in body.specs for one in spec.host_buffers]
        make = self._transfers.make_arrays_from_host_buffer_shards
        return self._with_buffers(handles, make, body, reply)

    def _with_buffers(
        self, handles: Sequence[int], make: Handler, body: Any, reply: Any
    ) -> Buffered | None:
        """Call `make` when all these host buffers are here."""
        if not self.buffers.are_here(handles):
            return Buffered(handles, partial(make, body, reply))
        make(body, reply)
        return None

    def _check_ready(self, body: Any, reply: Any) -> Any:
        reply.check_value_ready_response.SetInParent()
        self._since_wait = 0
        arrays = [self.arrays.usable(handle) for handle in body.value_handles]
        waiting = self._runs.ready(arrays)
        return None if waiting is None else When(waiting, arrays)

    async def _reshard(self, body: Any, reply: Any) -> None:
        sources = [self.arrays.usable(handle) for handle in body.array_handles]
        handles = list(body.result_handles) or [0] * len(sources)
        layouts = [
            shardings.read(spec.sharding, source.shape)
            for source, spec in zip(sources, body.array_specs, strict=True)
        ]
        made = await self._reshards.reshard(sources, layouts)
        if body.copy_semantics == DONATE:
            for array in sources:
                array.delete()
        for handle, array in zip(handles, made, strict=True):
            reply.reshard_arrays_response.array_handles.append(self.arrays.name(array, handle))

    def _copy_to_host(self, body: Any, reply: Any) -> None:
        self._since_wait = 0
        array = self.arrays.usable(body.array_handle)
        strides = tuple(body.byte_strides.strides) if body.HasField("byte_strides") else None
        value = None if array.dtype == STRING else self._runs.here(array)
        if value is None:
            self._transfers.copy_to_host(array, strides, body.host_buffer_handle)
        else:
            data = self._transfers.laid_out(value, strides)
            self.buffers.put(body.host_buffer_handle, data)
        # Answered at once: the client's lookup of the buffer, which comes next, waits for the bytes.
        reply.copy_to_host_buffer_response.SetInParent()

    def _delete(self, body: Any, reply: Any) -> None:
        self._transfers.delete(body.array_handle)
        self._next_deletion += 1
        reply.delete_array_response.deletion_future_handle = self._next_deletion

    def _destruct(self, body: Any, reply: Any) -> None:
        self._transfers.destruct(body.array_handle)
        reply.destruct_array_response.SetInParent()

    def _is_deleted(self, body: Any, reply: Any) -> None:
        array = self.arrays.find(body.array_handle)
        reply.is_array_deleted_response.deleted = array.is_deleted

    def _delete_executable(self, body: Any, reply: Any) -> None:
        self.executables.destruct(body.loaded_executable_handle)
        reply.loaded_executable_delete_response.future_handle = body.loaded_executable_handle

    def _destruct_executable(self, body: Any, reply: Any) -> None:
        self.executables.destruct(body.loaded_executable_handle)
        reply.loaded_executable_destruct_response.SetInParent()

    def _is_executable_deleted(self, body: Any, reply: Any) -> None:
        known = self.executables.has(body.loaded_executable_handle)
        reply.loaded_executable_is_deleted_response.is_deleted = not known

    async def _poll(self, body: Any, reply: Any) -> None:
        """Never answer: JAX's client could not run the call (see `pw.gateway.functions`)."""
        await self._loop.create_future()

    def _default_assignment(self, body: Any, reply: Any) -> None:
        replicas, partitions = body.num_replicas, body.num_partitions
        devices = self._devices.default_assignment(replicas * partitions)
        if len(devices) < replicas * partitions:
            raise statuses.StatusError(
                "INVALID_ARGUMENT",
                f"{replicas * partitions} devices are asked for, and there are {len(self._devices)}",
            )
        said = reply.get_default_device_assignment_response.device_assignment
        said.replica_count, said.computation_count = replicas, partitions
        for computation in range(partitions):
            numbers: Sequence[int] = [
                devices[at * partitions + computation] for at in range(replicas)
            ]
            said.computation_devices.add(replica_device_ids=numbers)

    def _default_layout(self, body: Any, reply: Any) -> None:
        order = ",".join(map(str, reversed(range(len(body.dims)))))
        said = reply.get_default_layout_response
        said.serialized_pjrt_layout = f"{{{order}}}".encode()


def _is_awaited(kind: str, body: Any) -> bool:
    """Whether the client may be waiting for the reply: not if it has named the results, or wants none."""
    named = _RESULTS.get(kind)
    return kind not in _UNCOUNTED if named is None else not getattr(body, named)
