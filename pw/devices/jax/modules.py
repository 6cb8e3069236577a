"""Compiles StableHLO modules as clients send them (`pw.core.programs.stablehlo`), with their own compile
options.

JAX is not asked to trace or to lower anything: the module, its shardings and its donations are the
client's. A compiled module takes and gives shards, one on each of its devices, so the host looks at
specs only to check their sizes and to name the results.

Of the options, only those are taken that say how to divide and to optimize the module. The others
are this process's own: they name files, and plugins.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend.backend import get_compile_options
from jax.sharding import NamedSharding

from pw.core.errors import CompileError
from pw.core.jax_private import stablehlo
from pw.core.jax_private.arrays import devices_of, result_handler
from pw.core.jax_private.compiling import CompileOptions, DeviceList, assignment_of, program_shape
from pw.core.messages import Detail
from pw.core.platforms import platform_of
from pw.core.programs.program import Computation
from pw.core.programs.stablehlo import Facts, ShardFacts, Stablehlo, harmless_options
from pw.core.sharding import ArraySpec, DeviceAddress, Sharding
from pw.devices.jax.callbacks import Raised
from pw.devices.jax.layouts import Layouts, aval_of, local_shards

_BUILD_OPTIONS = (
    "allow_spmd_sharding_propagation_to_output",
    "allow_spmd_sharding_propagation_to_parameters",
    "auto_spmd_partitioning_mesh_ids",
    "auto_spmd_partitioning_mesh_shape",
    "exec_time_optimization_effort",
    "fdo_profile",
    "memory_fitting_effort",
    "memory_fitting_level",
    "optimization_level",
    "use_auto_spmd_partitioning",
    "use_shardy_partitioner",
    "use_spmd_partitioning",
)
_DEBUG_OPTIONS = (
    "xla_backend_optimization_level",
    "xla_cpu_enable_fast_math",
    "xla_cpu_fast_math_honor_division",
    "xla_cpu_fast_math_honor_functions",
    "xla_cpu_fast_math_honor_infs",
    "xla_cpu_fast_math_honor_nans",
    "xla_gpu_enable_fast_min_max",
    "xla_llvm_disable_expensive_passes",
    "xla_test_all_input_layouts",
)

_HOST_MEMORY = "S(5)"
"""Text with which XLA says in a layout that an argument lies in host memory."""

_ALIASES = re.compile(r"\binput_output_alias=\{(.*?\)) \}")
_ALIASED = re.compile(r": \((\d+), \{")
_DONORS = re.compile(r"\bbuffer_donor=\{(.*?) \}")
_DONOR = re.compile(r"\((\d+), \{")

_COLLECTIVE = re.compile(
    r" (?:all-gather|all-reduce|all-to-all|collective-\w+|ragged-all-to-all|recv|reduce-scatter|send)"
    r"(?:-start)?\("
)
"""An operation in the text of a compiled module that exchanges values between devices."""

Call = Callable[..., Sequence[jax.Array]]

_TOKEN = "token"
"""The dtype of a token, in the facts; it lies in an array of no booleans."""


class Module:
    """A compiled module on its devices."""

    def __init__(
        self,
        executable: Any,
        facts: Facts,
        is_straight: bool,
        calls_back: bool = False,
        raised: Raised | None = None,
    ) -> None:
        self.executable = executable
        self.facts = facts
        self.is_straight = is_straight
        """True if the module has no loops, branches, native calls or collectives."""
        self.calls_back = calls_back
        """True if the module may call functions of its client."""
        self.raised = raised
        """Errors of those functions, if the module runs on several devices."""

    def describe(self, detail: Detail) -> Facts | str | dict[str, float]:
        """Return a detail that a client has asked for."""
        if detail is Detail.TEXT:
            return str(self.executable.get_hlo_text())
        if detail is Detail.COSTS:
            costs: dict[str, Any] = self.executable.cost_analysis()
            return {name: value for name, value in costs.items() if isinstance(value, float)}
        return self.facts


class ClientCalling(NamedTuple):
    """A call that may take long, and must not run on the execute thread: it calls the client."""

    call: Call
    """Returns when all that the computation calls has returned; raises what a function has raised."""


def call_of(
    module: Module, computation: Computation, devices: tuple[DeviceAddress, ...], layouts: Layouts
) -> Call | ClientCalling:
    """A function that takes a `jax.Array` for each argument, and returns one for each result.

    Raises CompileError unless the module is what `computation` says.
    """
    if module.calls_back != computation.calls_back:
        raise CompileError("the function calls its client, or does not, unlike its call says")
    layout = layouts(Sharding(("_",), (len(devices),)), devices)
    device: jax.Device = layout.sharding.mesh.devices.flat[0]
    _check(module.facts, computation, str(device.default_memory().kind))
    handlers = []
    for spec in computation.outputs:
        sharding = layouts.of(spec, devices).sharding
        aval = aval_of(spec.shape, spec.dtype, sharding)
        handlers.append(result_handler(aval, sharding))
    execute = module.executable.execute_sharded
    takes = [layouts.of(spec, devices).sharding for spec in computation.inputs]

    def call(*arrays: jax.Array) -> Sequence[jax.Array]:
        for array, sharding in zip(arrays, takes, strict=True):
            if array.sharding is not sharding:
                arrays = tuple(map(_in_order, arrays, takes))
                break
        results: Sequence[jax.Array] = execute(arrays).consume_with_handlers(handlers)
        return results

    raised = module.raised

    def call_to_its_end(*arrays: jax.Array) -> Sequence[jax.Array]:
        results = execute(list(map(_in_order, arrays, takes)), with_tokens=True)
        outputs: Sequence[jax.Array] = results.consume_with_handlers(handlers)
        results.consume_token().block_until_ready()
        if raised is not None:
            raised.check()
        return outputs

    return ClientCalling(call_to_its_end) if module.calls_back else call


def parsed(code: Stablehlo, context: Any) -> Any:
    """The MLIR module of an artifact. Raises CompileError."""
    try:
        return stablehlo.parsed(code.module, context)
    except Exception as error:
        raise CompileError(f"the code of the function cannot be read: {error}") from error


def compiled(
    module: Any,
    options: Any,
    physical: Sequence[jax.Device],
    functions: Sequence[Callable[..., Any]],
) -> Any:
    """XLA's executable of a parsed module on these devices. Raises CompileError with XLA's words."""
    client: Any = physical[0].client
    try:
        return client.compile_and_load(
            module, DeviceList(tuple(physical)), options, list(functions)
        )
    except Exception as error:
        raise CompileError(str(error)) from error


def _in_order(array: jax.Array, sharding: NamedSharding) -> jax.Array:
    """The array with its shards in the order of a sharding over the same devices.

    An edge leaves an array alone if each device has its shard already, and XLA takes shards as they
    come.
    """
    if devices_of(array.sharding) == devices_of(sharding):
        return array
    shards = [*local_shards(array).values()]
    return jax.make_array_from_single_device_arrays(
        array.shape, sharding, shards, dtype=array.dtype
    )


def options_of(sent: bytes, devices: Sequence[jax.Device]) -> Any:
    """The compile options of a client, without those that reach this machine, for these devices.

    If it sends none, they are JAX's own.
    """
    if sent:
        asked = CompileOptions.ParseFromString(sent)
    else:
        asked = get_compile_options(1, len(devices))
    replicas, partitions = asked.num_replicas, asked.num_partitions
    if replicas * partitions != len(devices) or replicas < 1:
        raise CompileError(
            f"the function is compiled for {replicas} replicas of {partitions} partitions, and has "
            f"{len(devices)} devices"
        )
    overrides = harmless_options(asked.env_option_overrides)
    options = get_compile_options(replicas, partitions)
    options.env_option_overrides = overrides
    build, asked_build = options.executable_build_options, asked.executable_build_options
    build.num_replicas, build.num_partitions = replicas, partitions
    for name in _BUILD_OPTIONS:
        setattr(build, name, getattr(asked_build, name))
    for name in _DEBUG_OPTIONS:
        setattr(build.debug_options, name, getattr(asked_build.debug_options, name))
    ids = [device.id for device in devices]
    options.device_assignment = assignment_of(ids, replicas, partitions)
    if not platform_of(devices[0].platform).is_host:
        # Otherwise the hosts of a gang would wait for one another while they compile; but clients ask
        # them in any order.
        options.env_option_overrides = [
            *options.env_option_overrides,
            ("xla_gpu_shard_autotuning", False),
        ]
    return options


def communicates(executable: Any) -> bool:
    """Whether the devices of a compiled module exchange values, as the partitioner has arranged it."""
    return any(_COLLECTIVE.search(module.to_string()) for module in executable.hlo_modules())


def facts_of(executable: Any, devices: Sequence[jax.Device]) -> Facts:
    module = executable.hlo_modules()[0]
    proto = module.as_serialized_hlo_module_proto()
    program = program_shape(proto)
    result = program.result_shape()
    results = result.tuple_shapes() if result.is_tuple() else [result]
    parameters = program.parameter_shapes()
    own = devices[0].default_memory().kind
    memories = [own if _HOST_MEMORY not in str(shape) else "pinned_host" for shape in parameters]
    inputs = _shards(parameters, executable.get_parameter_shardings(), memories)
    kinds = executable.get_output_memory_kinds()[0]
    outputs = _shards(results, executable.get_output_shardings(), kinds)
    sizes = executable.get_compiled_memory_stats()
    return Facts(
        module.name,
        inputs,
        outputs,
        _donated(module.to_string().partition("\n")[0]),
        sizes.generated_code_size_in_bytes,
        sizes.argument_size_in_bytes,
        sizes.output_size_in_bytes,
        sizes.alias_size_in_bytes,
        max(0, sizes.temp_size_in_bytes),
    )


def _shards(
    shapes: Sequence[Any], shardings: Sequence[Any] | None, kinds: Sequence[str]
) -> tuple[ShardFacts, ...]:
    shards = []
    for index, shape in enumerate(shapes):
        sharding = shardings[index].SerializeToString() if shardings is not None else b""
        if shape.is_token():
            shards.append(ShardFacts(_TOKEN, (0,), sharding, (0,), 0, kinds[index]))
            continue
        layout = shape.layout()
        shards.append(
            ShardFacts(
                shape.numpy_dtype().name,
                tuple(shape.dimensions()),
                sharding,
                tuple(layout.minor_to_major()),
                layout.element_size_in_bits(),
                kinds[index],
            )
        )
    return tuple(shards)


def _donated(header: str) -> tuple[int, ...]:
    """The positions of the arguments whose buffers a module takes, by the first line of its text."""
    positions: set[int] = set()
    for section, entry in ((_ALIASES, _ALIASED), (_DONORS, _DONOR)):
        if match := section.search(header):
            positions.update(int(position) for position in entry.findall(match[1]))
    return tuple(sorted(positions))


def _check(facts: Facts, computation: Computation, own_memory: str) -> None:
    """Raise CompileError unless a module takes, gives and donates what a computation says."""
    for what, actual, specs in (
        ("arguments", facts.inputs, computation.inputs),
        ("results", facts.outputs, computation.outputs),
    ):
        if any(spec.placement != computation.placement for spec in specs):
            raise CompileError(f"the {what} of the function lie on other devices than the function")
        shards = [(one.shape, "bool" if one.dtype == _TOKEN else one.dtype) for one in actual]
        wanted = [(_shard_shape(spec), spec.dtype) for spec in specs]
        if shards != wanted:
            raise CompileError(
                f"the {what} of the compiled function are {shards} on each device, not {wanted} as its "
                "call says; compile it again"
            )
    for index, (one, spec) in enumerate(zip(facts.outputs, computation.outputs, strict=True)):
        if one.memory_kind != (spec.memory or own_memory):
            raise CompileError(
                f"result {index} of the compiled function lies in the memory {one.memory_kind!r}, not "
                f"{spec.memory or own_memory!r} as its call says; compile it again"
            )
    if facts.donated != tuple(sorted(computation.donated)):
        raise CompileError(
            f"the compiled function takes the buffers of its arguments {facts.donated}, not "
            f"{computation.donated} as its call says; compile it again"
        )


def _shard_shape(spec: ArraySpec) -> tuple[int, ...]:
    spec.sharding.check(spec.shape)
    return spec.sharding.shard_shape(spec.shape)
