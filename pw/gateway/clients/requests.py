"""One client of the gateway: what it has, and what its requests do.

The client goes on without waiting, and names results itself. So a request that fails stores its error
under the handles of its results, and each use of them raises it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any

from pw.client.connection.island_events import IslandListener
from pw.client.connection.runtime import Runtime
from pw.core.errors import Disconnected
from pw.gateway.arrays.arrays import ProxyArrays
from pw.gateway.arrays.buffers import HostBuffers
from pw.gateway.arrays.constants import Constants
from pw.gateway.arrays.devices import Devices
from pw.gateway.arrays.runs import Runs
from pw.gateway.arrays.transfers import DONATE, Transfers
from pw.gateway.arrays.waits import Waits
from pw.gateway.clients.executables import Executables
from pw.gateway.clients.order import (
    DELETIONS,
    Buffered,
    Handler,
    Later,
    RequestOrder,
    When,
    results_of,
)
from pw.gateway.executables.executor import Executor
from pw.gateway.functions import Caller, Script, ScriptLine
from pw.gateway.plugins.colocated import CUSTOM, Colocated
from pw.gateway.plugins.moves import Moves
from pw.gateway.plugins.plugins import PLUGIN, Plugins
from pw.gateway.plugins.reshards import Reshards
from pw.gateway.protocol import shardings, statuses
from pw.gateway.protocol.dtypes import STRING


class GatewayClient:
    """One client's state, and the handlers of its requests.

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
        tell = None if script is None else lambda *line: script.send(ScriptLine(*line))
        self._waits = Waits(self._loop, tell)
        self._runs = Runs(runtime, self._loop, devices.placement, self._waits)
        self._constants = Constants(self._loop)
        readers = runtime.island_readers
        self._islands = IslandListener(readers, self._constants.islands_changed)
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
        self._next_deletion = DELETIONS
        executables = self.executables

        def later(work: Callable[[Any, Any], Coroutine[Any, Any, None]]) -> Handler:
            return lambda body, reply: Later(work(body, reply))

        handlers: dict[str, Handler] = {
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
        self.order = RequestOrder(
            self._loop, handlers, self._store_error, self.buffers, self._runs, self._waits
        )

    def close(self) -> None:
        """Release all that the client has."""
        self.order.close()
        self.buffers.close(Disconnected("the client has left"))
        self.executables.close()
        self._moves.close()
        self._waits.close()
        self._caller.close()
        self._runs.close()
        self.arrays.clear()
        self._islands.close()
        self._constants.clear()

    def _store_error(self, kind: str, body: Any, error: BaseException) -> None:
        """Store an error under the handles of a request's results."""
        for handle in results_of(kind, body):
            if handle:
                self.arrays.fail(handle, error)
        if kind == "loaded_executable_execute_request":
            self.executables.fail_status(body.result_status_handle, error)

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
        self.order.since_wait = 0
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
        arrays = await self._reshards.reshard(sources, layouts)
        if body.copy_semantics == DONATE:
            for array in sources:
                array.delete()
        for handle, array in zip(handles, arrays, strict=True):
            reply.reshard_arrays_response.array_handles.append(self.arrays.name(array, handle))

    def _copy_to_host(self, body: Any, reply: Any) -> None:
        self.order.since_wait = 0
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
        is_here = self.executables.has(body.loaded_executable_handle)
        reply.loaded_executable_is_deleted_response.is_deleted = not is_here

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
        assignment = reply.get_default_device_assignment_response.device_assignment
        assignment.replica_count, assignment.computation_count = replicas, partitions
        for computation in range(partitions):
            numbers: Sequence[int] = [
                devices[at * partitions + computation] for at in range(replicas)
            ]
            assignment.computation_devices.add(replica_device_ids=numbers)

    def _default_layout(self, body: Any, reply: Any) -> None:
        order = ",".join(map(str, reversed(range(len(body.dims)))))
        layout = reply.get_default_layout_response
        layout.serialized_pjrt_layout = f"{{{order}}}".encode()
