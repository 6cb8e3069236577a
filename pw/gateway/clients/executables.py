"""Compiled programs of one client, by its handles: compiling, describing and running them."""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from pw.core.jax_private.stablehlo import hlo_text
from pw.core.messages import Detail
from pw.core.programs.stablehlo import Stablehlo
from pw.gateway.arrays.arrays import ProxyArray, ProxyArrays, Stored
from pw.gateway.arrays.runs import Runs
from pw.gateway.executables.compiled import GatewayExecutable, write_metadata
from pw.gateway.executables.executor import Executor, Ran
from pw.gateway.functions import Caller
from pw.gateway.plugins.plugins import Plugin
from pw.gateway.protocol import protos, shardings, statuses
from pw.gateway.protocol.dtypes import kind_of

_PROGRAMS = ("xla::ifrt::XlaProgram", "xla::ifrt::HloProgram")


class Executables:
    """The executables of one client by their handles."""

    def __init__(
        self,
        arrays: ProxyArrays,
        runs: Runs,
        executor: Executor,
        caller: Caller,
        loaders: Mapping[str, Callable[[bytes], Plugin]],
    ) -> None:
        self._arrays = arrays
        self._caller = caller
        self._runs = runs
        self._executor = executor
        self._loaders = loaders
        self._by_handle: dict[int, GatewayExecutable | Plugin] = {}
        self._next = 1
        self._statuses: dict[int, Sequence[Stored | Future[Any]] | BaseException] = {}
        """Ends of executions by handle, until the client asks for them."""

    def __len__(self) -> int:
        return len(self._by_handle)

    def find(self, handle: int) -> GatewayExecutable:
        """Return a compiled executable. Raises Status if there is none."""
        executable = self._by_handle.get(handle)
        if executable is None:
            raise statuses.not_found(f"there is no executable {handle:#x}")
        if isinstance(executable, Plugin):
            raise statuses.unsupported(
                f"{executable.name} is not compiled; it can only be executed"
            )
        return executable

    def has(self, handle: int) -> bool:
        """Whether there is such an executable."""
        return handle in self._by_handle

    def _new_handle(self) -> int:
        self._next += 1
        return self._next

    # --- compiling -----------------------------------------------------------------------------------

    async def compile(self, body: Any, response: Any) -> None:
        """Compile a program on a host of its devices, and register it."""
        load = self._loaders.get(body.program.type_name)
        if load is not None:
            plugin = load(body.program.data)
            digest = hashlib.sha256(body.program.data).digest()
            self._add(plugin, plugin.name, plugin.devices, digest, response)
            return
        if body.program.type_name not in _PROGRAMS:
            raise statuses.unsupported(
                f"programs of the kind {body.program.type_name} are not supported"
            )
        asked = protos.message("xla.ifrt.XlaCompileOptionsProto")
        options = asked.FromString(body.compile_options.data).compile_options
        devices = _assigned(options.executable_build_options.device_assignment) or (0,)
        options.executable_build_options.ClearField("device_assignment")
        code = Stablehlo(
            body.program.data,
            options.SerializeToString(deterministic=True),
            tuple(body.host_callbacks),
        )
        executable = await self._executor.compiled(code, devices)
        for one in executable.graph.computations:
            if one.calls_back:
                self._caller.know(one.artifact, _functions(code))
        self._executor.register(executable)
        self._add(executable, executable.name, devices, executable.digest, response)
        functions = response.compile_response.loaded_host_callback_handles
        functions.extend(self._new_handle() for _ in code.callbacks)

    def _add(
        self,
        program: GatewayExecutable | Plugin,
        name: str,
        devices: tuple[int, ...],
        fingerprint: bytes,
        response: Any,
    ) -> None:
        handle = self._new_handle()
        self._by_handle[handle] = program
        reply = response.compile_response
        reply.loaded_executable_handle = handle
        reply.name = name
        reply.num_devices = len(devices)
        reply.device_ids.extend(devices)
        reply.addressable_device_ids.extend(devices)
        reply.fingerprint_value = fingerprint
        reply.ready_future_handle = handle  # it is ready: `check_future` knows no other ones

    # --- running -------------------------------------------------------------------------------------

    def execute(self, body: Any, response: Any) -> Awaitable[None] | None:
        """Run an executable once. Returns the rest of it if that must wait for a credit."""
        usable = self._arrays.usable
        plugin = self._by_handle.get(body.loaded_executable_handle)
        try:
            args = [usable(handle) for handle in body.args_handles]
        except Exception as error:
            if isinstance(plugin, Plugin):
                plugin.failed(error)
            raise
        if isinstance(plugin, Plugin):
            return self._run_plugin(plugin, args, body, response)
        executable = self.find(body.loaded_executable_handle)
        options = body.execute_options
        kept = options.non_donatable_input_indices
        donations = [at for at in executable.facts.donated if at not in kept]
        ran = self._executor.run(executable, args, donations)
        if isinstance(ran, Ran):
            self._executed(body, response, *ran)
            return None
        return self._run_later(ran, body, response)

    async def _run_later(self, running: Awaitable[Ran], body: Any, response: Any) -> None:
        self._executed(body, response, *await running)

    async def _run_plugin(
        self, plugin: Plugin, args: Sequence[ProxyArray], body: Any, response: Any
    ) -> None:
        arrays, ends = await plugin.run(args)
        self._executed(body, response, arrays, ends)

    def _executed(
        self,
        body: Any,
        response: Any,
        arrays: Sequence[ProxyArray],
        ends: Sequence[Stored | Future[Any]],
    ) -> None:
        """Name the results of an execution, which ends when `ends` are ready."""
        reply = response.loaded_executable_execute_response
        reply.SetInParent()
        name = self._arrays.name
        if body.result_array_handle:
            for array, handle in zip(arrays, body.result_array_handle, strict=True):
                name(array, handle)
        else:
            for array in arrays:
                _describe_result(reply.outputs.add(array_handle=name(array)), array)
        if body.execute_options.fill_status:
            handle = body.result_status_handle or self._new_handle()
            self._statuses[handle] = ends
            reply.status_handle = handle

    def fail_status(self, handle: int, error: BaseException) -> None:
        """Let the client's question for the end of an execution raise `error`."""
        if handle:
            self._statuses[handle] = error

    async def fetch_result(self, body: Any, response: Any) -> None:
        """Answer when an execution has ended."""
        status = self._statuses.pop(body.result_status_handle, None)
        if status is None:
            raise statuses.not_found(f"there is no execution {body.result_status_handle:#x}")
        if isinstance(status, BaseException):
            raise status
        response.loaded_executable_fetch_execute_result_response.SetInParent()
        stored = [(one.number, one.spec) for one in status if isinstance(one, Stored)]
        ends = [one for one in status if not isinstance(one, Stored)]
        if stored:
            ends.append(self._runs.runtime.wait(stored))
        for end in ends:
            await self._runs.settled(end)

    # --- describing ----------------------------------------------------------------------------------

    def metadata(self, body: Any, response: Any) -> None:
        """Describe an executable."""
        if isinstance(self._by_handle.get(body.loaded_executable_handle), Plugin):
            response.loaded_executable_metadata_response.SetInParent()
            return
        executable = self.find(body.loaded_executable_handle)
        write_metadata(executable, response.loaded_executable_metadata_response)

    async def cost_analysis(self, body: Any, response: Any) -> None:
        """Tell what a compiled program costs: of several computations, all together."""
        costs: Counter[str] = Counter()
        for detail in await self._details(body, Detail.COSTS):
            costs.update(detail.costs)
        attributes = response.loaded_executable_cost_analysis_response.attributes
        attributes.SetInParent()
        for key, value in costs.items():
            attributes.attributes[key].float_value = value

    async def text(self, body: Any, response: Any) -> None:
        """Show a compiled program."""
        divided = self.find(body.loaded_executable_handle).divided
        if divided:
            text = await asyncio.to_thread(hlo_text, divided)
        else:
            (detail,) = await self._details(body, Detail.TEXT)
            text = detail.text
        reply = response.loaded_executable_human_readable_program_text_response
        reply.human_readable_program_text = text

    async def _details(self, body: Any, detail: Detail) -> list[Any]:
        executable = self.find(body.loaded_executable_handle)
        ask = self._runs.runtime.ask
        first = executable.sources[0].placement
        own = [one for one in executable.sources if one.placement == first]
        asked = [ask.compile(code, placement, detail) for code, placement in own]
        return [await self._runs.waited(one) for one in asked]

    # --- ends ----------------------------------------------------------------------------------------

    def destruct(self, handle: int) -> None:
        """Release an executable."""
        program = self._by_handle.pop(handle, None)
        if isinstance(program, Plugin):
            program.release()
        elif program is not None:
            self._executor.release(program)
            if program.calls_back:
                self._forget_functions(program)

    def _forget_functions(self, executable: GatewayExecutable) -> None:
        """Forget the functions that an executable calls, when its last run has ended."""
        last = executable.last

        def ended(_: object = None) -> None:
            executable.last = ()
            for one in executable.graph.computations:
                self._caller.forget(one.artifact)

        if last:
            waiting = self._runs.runtime.wait([(one.number, one.spec) for one in last])
            self._runs.then(waiting, ended)
        else:
            ended()

    def close(self) -> None:
        """Release all executables."""
        for handle in list(self._by_handle):
            self.destruct(handle)
        self._statuses.clear()


def _assigned(assignment: Any) -> tuple[int, ...]:
    """Return the devices of a `DeviceAssignmentProto`, replica by replica."""
    return tuple(
        computation.replica_device_ids[replica]
        for replica in range(assignment.replica_count)
        for computation in assignment.computation_devices
    )


def _functions(code: Stablehlo) -> tuple[int, ...]:
    """Return the numbers that the script has given to the functions that a module calls."""
    proto = protos.message("xla.ifrt.XlaHostCallbackProto")
    return tuple(
        operand.channel_id
        for callback in code.callbacks
        for operand in proto.FromString(callback).operands[:1]
    )


def _describe_result(into: Any, array: ProxyArray) -> None:
    into.dtype.kind = kind_of(array.dtype)
    into.shape.SetInParent()
    into.shape.dims.extend(array.shape)
    shardings.write(
        into.sharding,
        array.devices,
        array.memory,
        array.shape,
        array.shard_shape,
        is_replicated=array.is_replicated,
    )
