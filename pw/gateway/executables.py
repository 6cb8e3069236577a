"""Compiled programs of one client, by its handles: compiling, describing and running them."""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from pw.core.messages import Detail
from pw.core.programs.stablehlo import Stablehlo
from pw.gateway import protos, shardings, statuses
from pw.gateway.arrays import ProxyArray, ProxyArrays, Stored
from pw.gateway.compiled import GatewayExecutable, write_metadata
from pw.gateway.dtypes import kind_of
from pw.gateway.executor import Executor, Ran
from pw.gateway.functions import Caller
from pw.gateway.joined import text_of
from pw.gateway.plugins import Plugin
from pw.gateway.runs import Runs

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
        self._known: dict[int, GatewayExecutable | Plugin] = {}
        self._next = 1
        self._statuses: dict[int, Sequence[Stored | Future[Any]] | BaseException] = {}
        """What the ends of executions are known by, until the client asks for them."""

    def __len__(self) -> int:
        return len(self._known)

    def find(self, handle: int) -> GatewayExecutable:
        """Return a compiled executable. Raises Status if there is none."""
        found = self._known.get(handle)
        if found is None:
            raise statuses.not_found(f"there is no executable {handle:#x}")
        if isinstance(found, Plugin):
            raise statuses.unsupported(f"{found.name} is not compiled; it can only be executed")
        return found

    def has(self, handle: int) -> bool:
        """Whether there is such an executable."""
        return handle in self._known

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
        made = await self._executor.compiled(code, devices)
        for one in made.graph.computations:
            if one.calls_back:
                self._caller.know(one.artifact, _functions(code))
        self._executor.register(made)
        self._add(made, made.name, devices, made.digest, response)
        functions = response.compile_response.loaded_host_callback_handles
        functions.extend(self._new_handle() for _ in code.callbacks)

    def _add(
        self,
        made: GatewayExecutable | Plugin,
        name: str,
        devices: tuple[int, ...],
        fingerprint: bytes,
        response: Any,
    ) -> None:
        handle = self._new_handle()
        self._known[handle] = made
        said = response.compile_response
        said.loaded_executable_handle = handle
        said.name = name
        said.num_devices = len(devices)
        said.device_ids.extend(devices)
        said.addressable_device_ids.extend(devices)
        said.fingerprint_value = fingerprint
        said.ready_future_handle = handle  # it is ready: `check_future` knows no other ones

    # --- running -------------------------------------------------------------------------------------

    def execute(self, body: Any, response: Any) -> Awaitable[None] | None:
        """Run an executable once. Returns the rest of it if that must wait for a credit."""
        usable = self._arrays.usable
        plugin = self._known.get(body.loaded_executable_handle)
        try:
            args = [usable(handle) for handle in body.args_handles]
        except Exception as error:
            if isinstance(plugin, Plugin):
                plugin.failed(error)
            raise
        if isinstance(plugin, Plugin):
            return self._run_plugin(plugin, args, body, response)
        made = self.find(body.loaded_executable_handle)
        options = body.execute_options
        kept = options.non_donatable_input_indices
        given = [at for at in made.facts.donated if at not in kept] if made.facts.donated else []
        ran = self._executor.run(made, args, given)
        if isinstance(ran, Ran):
            self._executed(body, response, *ran)
            return None
        return self._run_later(ran, body, response)

    async def _run_later(self, running: Awaitable[Ran], body: Any, response: Any) -> None:
        self._executed(body, response, *await running)

    async def _run_plugin(
        self, plugin: Plugin, args: Sequence[ProxyArray], body: Any, response: Any
    ) -> None:
        made, ends = await plugin.run(args)
        self._executed(body, response, made, ends)

    def _executed(
        self,
        body: Any,
        response: Any,
        made: Sequence[ProxyArray],
        ends: Sequence[Stored | Future[Any]],
    ) -> None:
        """Name the results of an execution, which ends when `ends` are ready."""
        said = response.loaded_executable_execute_response
        said.SetInParent()
        name = self._arrays.name
        if body.result_array_handle:
            for array, handle in zip(made, body.result_array_handle, strict=True):
                name(array, handle)
        else:
            for array in made:
                _describe_result(said.outputs.add(array_handle=name(array)), array)
        if body.execute_options.fill_status:
            handle = body.result_status_handle or self._new_handle()
            self._statuses[handle] = ends
            said.status_handle = handle

    def fail_status(self, handle: int, error: BaseException) -> None:
        """Let the client's question for the end of an execution raise `error`."""
        if handle:
            self._statuses[handle] = error

    async def fetch_result(self, body: Any, response: Any) -> None:
        """Answer when an execution has ended."""
        known = self._statuses.pop(body.result_status_handle, None)
        if known is None:
            raise statuses.not_found(f"there is no execution {body.result_status_handle:#x}")
        if isinstance(known, BaseException):
            raise known
        response.loaded_executable_fetch_execute_result_response.SetInParent()
        stored = [(one.number, one.spec) for one in known if isinstance(one, Stored)]
        ends = [one for one in known if not isinstance(one, Stored)]
        if stored:
            ends.append(self._runs.runtime.wait(stored))
        for end in ends:
            await self._runs.settled(end)

    # --- describing ----------------------------------------------------------------------------------

    def metadata(self, body: Any, response: Any) -> None:
        """Describe an executable."""
        if isinstance(self._known.get(body.loaded_executable_handle), Plugin):
            response.loaded_executable_metadata_response.SetInParent()
            return
        made = self.find(body.loaded_executable_handle)
        write_metadata(made, response.loaded_executable_metadata_response)

    async def cost_analysis(self, body: Any, response: Any) -> None:
        """Tell what a compiled program costs: of several computations, all together."""
        costs: Counter[str] = Counter()
        for told in await self._details(body, Detail.COSTS):
            costs.update(told.costs)
        attributes = response.loaded_executable_cost_analysis_response.attributes
        attributes.SetInParent()
        for key, value in costs.items():
            attributes.attributes[key].float_value = value

    async def text(self, body: Any, response: Any) -> None:
        """Show a compiled program."""
        divided = self.find(body.loaded_executable_handle).divided
        if divided:
            text = await asyncio.to_thread(text_of, divided)
        else:
            (told,) = await self._details(body, Detail.TEXT)
            text = told.text
        said = response.loaded_executable_human_readable_program_text_response
        said.human_readable_program_text = text

    async def _details(self, body: Any, detail: Detail) -> list[Any]:
        made = self.find(body.loaded_executable_handle)
        ask = self._runs.runtime.ask
        first = made.sources[0].placement
        own = [one for one in made.sources if one.placement == first]
        asked = [ask.compile(code, placement, detail) for code, placement in own]
        return [await self._runs.waited(one) for one in asked]

    # --- ends ----------------------------------------------------------------------------------------

    def destruct(self, handle: int) -> None:
        """Release an executable."""
        made = self._known.pop(handle, None)
        if isinstance(made, Plugin):
            made.release()
        elif made is not None:
            self._executor.release(made)
            if made.calls_back:
                self._forget_functions(made)

    def _forget_functions(self, made: GatewayExecutable) -> None:
        """Forget the functions that an executable calls, when its last run has ended."""
        last = made.last

        def ended(_: object = None) -> None:
            made.last = ()
            for one in made.graph.computations:
                self._caller.forget(one.artifact)

        if last:
            waiting = self._runs.runtime.wait([(one.number, one.spec) for one in last])
            self._runs.then(waiting, ended)
        else:
            ended()

    def close(self) -> None:
        """Release all executables."""
        for handle in list(self._known):
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
