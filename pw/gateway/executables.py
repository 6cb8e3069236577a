"""Compiled programs of one client: compiling, describing and running them.

A computation of JAX becomes a program of one computation (`pw.core.program.Kind.STABLEHLO`). A host
compiles it first, because only the compiler knows how the results are divided; then the program is
registered, and each execution is a run of it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from pw.core.messages import Detail
from pw.core.program import Computation, Kind, Node, Output, Program, Value
from pw.core.sharding import ArraySpec, Placement
from pw.core.stablehlo import Facts, ShardFacts, Stablehlo, encode, spec_of_shards
from pw.gateway import protos, shardings, statuses
from pw.gateway.arrays import ProxyArray, ProxyArrays, Stored
from pw.gateway.completion import with_completion
from pw.gateway.devices import Devices
from pw.gateway.dtypes import kind_of
from pw.gateway.functions import Caller
from pw.gateway.runs import DEFAULT_MEMORY, Runs, memory_of

_PROGRAMS = ("xla::ifrt::XlaProgram", "xla::ifrt::HloProgram")


@dataclass(frozen=True, slots=True)
class _Result:
    """What every execution's result has in common."""

    dtype: str
    shape: tuple[int, ...]
    shard_shape: tuple[int, ...]
    memory: str
    is_replicated: bool
    spec: ArraySpec


@dataclass(slots=True, eq=False)
class Executable:
    """A compiled program of the client."""

    name: str
    devices: tuple[int, ...]
    placement: Placement
    code: Stablehlo
    artifact: bytes
    facts: Facts
    inputs: tuple[ArraySpec, ...]
    results: tuple[_Result, ...]
    has_completion: bool
    """It has no results; the runtime's computation has one more, which is ready when it has ended."""
    programs: dict[tuple[int, ...], int] = field(default_factory=dict)
    """The registered programs, by the positions of the arguments that they donate."""
    last: tuple[Stored, ...] = ()
    """The results of the latest run, if runs call functions of the script."""


class Executables:
    """The executables of one client by their handles."""

    def __init__(self, arrays: ProxyArrays, devices: Devices, runs: Runs, caller: Caller) -> None:
        self._arrays = arrays
        self._caller = caller
        self._devices = devices
        self._runs = runs
        self._known: dict[int, Executable] = {}
        self._next = 1
        self._statuses: dict[int, list[Any] | BaseException] = {}
        """What the ends of executions are known by, until the client asks for them."""

    def __len__(self) -> int:
        return len(self._known)

    def find(self, handle: int) -> Executable:
        """Return an executable. Raises Status if there is none."""
        found = self._known.get(handle)
        if found is None:
            raise statuses.not_found(f"there is no executable {handle:#x}")
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
        placement = self._devices.placement(devices)
        facts = await self._facts(code, placement)
        has_completion = not facts.outputs
        if has_completion:
            code = Stablehlo(with_completion(code.module), code.options, code.callbacks)
            facts = await self._facts(code, placement)
        made = self._described(devices, placement, code, facts, has_completion=has_completion)
        if code.callbacks:
            self._caller.know(hashlib.sha256(made.artifact).digest(), _functions(code))
        self._program(made, facts.donated)
        handle = self._new_handle()
        self._known[handle] = made
        said = response.compile_response
        said.loaded_executable_handle = handle
        said.name = made.name
        said.num_devices = len(devices)
        said.device_ids.extend(devices)
        said.addressable_device_ids.extend(devices)
        said.fingerprint_value = hashlib.sha256(made.artifact).digest()
        said.loaded_host_callback_handles.extend(self._new_handle() for _ in code.callbacks)
        said.ready_future_handle = handle  # it is ready: `check_future` knows no other ones

    async def _facts(self, code: Stablehlo, placement: Placement) -> Facts:
        asked = self._runs.runtime.ask.compile(code, placement, Detail.FACTS)
        compiled = await self._runs.settled(asked)
        assert compiled.facts is not None
        return compiled.facts

    def _described(
        self,
        devices: tuple[int, ...],
        placement: Placement,
        code: Stablehlo,
        facts: Facts,
        *,
        has_completion: bool,
    ) -> Executable:
        inputs = tuple(_spec(placement, one) for one in facts.inputs)
        results = []
        for one in facts.outputs:
            sharding = _op_sharding(one)
            parts = (1,) * len(one.shape)
            if sharding is not None and len(devices) > 1:
                parts = shardings.partitions(sharding, len(one.shape))
            shape = tuple(size * count for size, count in zip(one.shape, parts, strict=True))
            results.append(
                _Result(
                    _dtype(one),
                    shape,
                    one.shape,
                    one.memory_kind or DEFAULT_MEMORY,
                    _is_replicated(one, len(devices)),
                    _spec(placement, one),
                )
            )
        artifact = encode(code)
        return Executable(
            facts.name,
            devices,
            placement,
            code,
            artifact,
            facts,
            inputs,
            tuple(results),
            has_completion,
        )

    def _program(self, made: Executable, donated: tuple[int, ...]) -> int:
        """Return the program that donates these arguments; registers it the first time."""
        number = made.programs.get(donated)
        if number is None:
            outputs = tuple(result.spec for result in made.results)
            digest = hashlib.sha256(made.artifact).digest()
            computation = Computation(
                made.name,
                digest,
                made.placement,
                made.inputs,
                outputs,
                made.facts.donated,
                Kind.STABLEHLO,
                calls_back=bool(made.code.callbacks),
            )
            body = Program(
                made.name,
                (computation,),
                (Node(0, tuple(Value(-1, at) for at in range(len(made.inputs)))),),
                made.inputs,
                tuple(Output(Value(0, at), spec) for at, spec in enumerate(outputs)),
                donated,
            )
            number = self._runs.runtime.register_program(body, {digest: made.artifact})
            made.programs[donated] = number
        return number

    # --- running -------------------------------------------------------------------------------------

    def execute(self, body: Any, response: Any) -> Awaitable[None] | None:
        """Run an executable once. Returns the rest of it if that must wait for a credit."""
        made = self.find(body.loaded_executable_handle)
        options = body.execute_options
        usable = self._arrays.usable
        args = [usable(handle) for handle in body.args_handles]
        if len(args) != len(made.inputs):
            raise statuses.Status(
                "INVALID_ARGUMENT",
                f"{made.name} takes {len(made.inputs)} arrays, and was given {len(args)}",
            )
        kept = options.non_donatable_input_indices
        given = [at for at in made.facts.donated if at not in kept] if made.facts.donated else []
        if given:
            _check_donated(args, given)
        argument = self._runs.argument
        arguments = [argument(one, spec) for one, spec in zip(args, made.inputs, strict=True)]
        if None in arguments:
            _check_places(made, args)
        elif self._runs.has_credit():
            self._run(made, args, arguments, given, body, response)
            return None
        return self._run_later(made, args, arguments, given, body, response)

    async def _run_later(
        self,
        made: Executable,
        args: Sequence[ProxyArray],
        arguments: list[int | bytes | None],
        given: Sequence[int],
        body: Any,
        response: Any,
    ) -> None:
        """Make the views that the arguments need, and run when there is a credit."""
        kept: list[Stored] = []
        for at, known in enumerate(arguments):
            if known is None:
                kept.append(await self._runs.fitting(args[at], made.inputs[at]))
                arguments[at] = kept[-1].number
        await self._runs.credit()
        self._run(made, args, arguments, given, body, response)

    def _run(
        self,
        made: Executable,
        args: Sequence[ProxyArray],
        arguments: Sequence[Any],
        given: Sequence[int],
        body: Any,
        response: Any,
    ) -> None:
        donated = tuple(at for at in given if _may_be_donated(args[at]))
        program = self._program(made, donated)
        specs = [result.spec for result in made.results]
        stored = self._runs.run(program, arguments, specs)
        if made.code.callbacks:
            made.last = tuple(stored)
        for at in given:
            args[at].delete()
        said = response.loaded_executable_execute_response
        said.SetInParent()
        results = stored[: len(stored) - 1] if made.has_completion else stored
        made_arrays = []
        for one, result in zip(results, made.results, strict=False):
            array = ProxyArray(
                result.dtype,
                result.shape,
                result.shard_shape,
                made.devices,
                result.memory,
                result.is_replicated,
            )
            array.consist_of(one)
            made_arrays.append(array)
        name = self._arrays.name
        if body.result_array_handle:
            for array, handle in zip(made_arrays, body.result_array_handle, strict=True):
                name(array, handle)
        else:
            for array in made_arrays:
                _describe_result(said.outputs.add(array_handle=name(array)), array)
        if body.execute_options.fill_status:
            handle = body.result_status_handle or self._new_handle()
            self._statuses[handle] = [(one.number, one.spec, one) for one in stored[-1:]]
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
        if known:
            await self._runs.settled(
                self._runs.runtime.wait([(number, spec) for number, spec, _ in known])
            )

    # --- describing ----------------------------------------------------------------------------------

    def metadata(self, body: Any, response: Any) -> None:
        """Describe an executable."""
        made = self.find(body.loaded_executable_handle)
        said = response.loaded_executable_metadata_response
        facts = made.facts
        outputs = () if made.has_completion else facts.outputs
        for listed, layouts, every in (
            (said.parameter_shardings, said.parameter_layouts_list, facts.inputs),
            (said.output_shardings, said.output_layouts_list, outputs),
        ):
            listed.SetInParent()
            layouts.SetInParent()
            for one in every:
                listed.shardings.add().ParseFromString(one.sharding)
                layout = layouts.layouts.add(
                    minor_to_major=one.minor_to_major, tail_padding_alignment_in_elements=1
                )
                if one.element_bits:
                    layout.element_size_in_bits = one.element_bits
        kinds = said.output_memory_kinds.memory_kind_lists.add()
        kinds.memory_kinds.extend(one.memory_kind or DEFAULT_MEMORY for one in outputs)
        said.donated_input_indices.SetInParent()
        said.donated_input_indices.donated_input_indices.extend(facts.donated)
        stats = said.compiled_memory_stats
        stats.generated_code_size_in_bytes = facts.code_bytes
        stats.argument_size_in_bytes = facts.argument_bytes
        stats.output_size_in_bytes = facts.output_bytes
        stats.alias_size_in_bytes = facts.alias_bytes
        stats.temp_size_in_bytes = facts.temporary_bytes
        said.size_of_generated_code_in_bytes = facts.code_bytes

    async def cost_analysis(self, body: Any, response: Any) -> None:
        """Tell what a compiled program costs."""
        costs = (await self._detail(body, Detail.COSTS)).costs
        attributes = response.loaded_executable_cost_analysis_response.attributes
        attributes.SetInParent()
        for key, value in costs.items():
            attributes.attributes[key].float_value = value

    async def text(self, body: Any, response: Any) -> None:
        """Show a compiled program."""
        text = (await self._detail(body, Detail.TEXT)).text
        said = response.loaded_executable_human_readable_program_text_response
        said.human_readable_program_text = text

    async def _detail(self, body: Any, detail: Detail) -> Any:
        made = self.find(body.loaded_executable_handle)
        asked = self._runs.runtime.ask.compile(made.code, made.placement, detail)
        return await self._runs.settled(asked)

    # --- ends ----------------------------------------------------------------------------------------

    def destruct(self, handle: int) -> None:
        """Release an executable."""
        if (made := self._known.pop(handle, None)) is not None:
            for program in made.programs.values():
                self._runs.runtime.release_program(program)
            if made.code.callbacks:
                self._forget_functions(made)

    def _forget_functions(self, made: Executable) -> None:
        """Forget the functions that an executable calls, when its last run has ended."""
        last, digest = made.last, hashlib.sha256(made.artifact).digest()

        def ended(_: object = None) -> None:
            made.last = ()
            self._caller.forget(digest)

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


def _dtype(one: ShardFacts) -> str:
    """Return the dtype of an argument or result; a token lies in an array of no booleans."""
    return "bool" if one.dtype == "token" else one.dtype


def _functions(code: Stablehlo) -> tuple[int, ...]:
    """Return the numbers that the script has given to the functions that a module calls."""
    proto = protos.message("xla.ifrt.XlaHostCallbackProto")
    return tuple(
        operand.channel_id
        for callback in code.callbacks
        for operand in proto.FromString(callback).operands[:1]
    )


def _op_sharding(one: ShardFacts) -> Any:
    return protos.message("xla.OpSharding").FromString(one.sharding) if one.sharding else None


def _is_replicated(one: ShardFacts, devices: int) -> bool:
    """Whether all shards are known to be equal."""
    sharding = _op_sharding(one)
    if devices == 1:
        return True
    if sharding is None:
        return False
    if sharding.HasField("named_sharding"):
        named = sharding.named_sharding
        if named.unreduced_axes or named.manual_axes:
            return False
        return all(count == 1 for count in shardings.partitions(sharding, len(one.shape)))
    kinds = protos.message("xla.OpSharding").DESCRIPTOR.enum_types_by_name["Type"].values_by_name
    return bool(sharding.type == kinds["REPLICATED"].number)


def _spec(placement: Placement, one: ShardFacts) -> ArraySpec:
    is_replicated = _is_replicated(one, len(placement.devices))
    memory = memory_of(one.memory_kind)
    return spec_of_shards(
        one.shape, _dtype(one), placement, is_stacked=not is_replicated, memory=memory
    )


def _may_be_donated(array: ProxyArray) -> bool:
    stored = array.stored
    return stored is not None and stored.may_be_donated


def _check_donated(args: Sequence[ProxyArray], given: Sequence[int]) -> None:
    """Raise Status if an array is donated that is also another argument."""
    roots: dict[int, int] = {}
    for at, array in enumerate(args):
        for root in _identities(array):
            other = roots.setdefault(root, at)
            if other != at and (at in given or other in given):
                raise statuses.Status(
                    "INVALID_ARGUMENT",
                    f"Attempt to donate the same buffer twice in Execute() (arguments {other} and {at}); pass "
                    "a copy, or do not donate it",
                )


def _identities(array: ProxyArray) -> Iterator[int]:
    for root in array.roots():
        yield id(root.stored or root)


def _check_places(made: Executable, args: Sequence[ProxyArray]) -> None:
    """Raise Status unless all arguments lie on the devices of an executable."""
    for at, array in enumerate(args):
        if array.devices != made.devices:
            raise statuses.Status(
                "INVALID_ARGUMENT",
                f"{made.name} runs on the devices {list(made.devices)}, but its argument {at} lies on "
                f"{list(array.devices)}; move it with jax.device_put",
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
