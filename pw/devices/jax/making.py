"""Makes an executable of an artifact, in the host or in a process beside it, and loads it in the host.

Parsing, vetting and compiling run on what a client has sent, so they may crash, or never end. A host
of CPU devices leaves them to processes beside it (`pw.devices.jax.compile_processes`) and loads what
they have made. There the devices of an executable are the first ones of that process: only the
device assignment differs, which XLA takes anew when it loads an executable.

Accelerators compile in the host, after another process has parsed and vetted the artifact.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.export
import msgspec
import numpy as np
from jax._src import core, stages
from jax._src.interpreters import mlir, pxla
from jaxlib import _jax, xla_client
from jaxlib.cpu import _lapack

from pw.core.packing import ArrayType
from pw.core.programs.program import Computation, Kind
from pw.core.programs.stablehlo import Facts, decode
from pw.core.sharding import DeviceAddress, dtype_of
from pw.devices.jax.callbacks import TARGETS, Results, calls_in
from pw.devices.jax.layouts import Layouts
from pw.devices.jax.modules import compiled, facts_of, options_of, parsed
from pw.devices.jax.vetting import Vetted, vet_export, vet_module


class Order(msgspec.Struct, frozen=True, array_like=True):
    """What to make an executable of."""

    kind: Kind
    artifact: bytes
    devices: tuple[DeviceAddress, ...]
    computation: Computation | None = None
    """Of a StableHLO module None: it says itself what it takes and gives."""


class Made(msgspec.Struct, frozen=True, array_like=True):
    """What is known of an executable besides itself."""

    is_straight: bool
    needs_lapack: bool
    positions: tuple[int, ...]
    """Its devices, in its own order, as indices of `Order.devices`."""
    partitions: int
    temporary_bytes: int = 0
    facts: Facts | None = None
    calls: tuple[tuple[int, tuple[ArrayType | None, ...]], ...] = ()
    """The functions of its client that it calls, with their results."""


class Saved(msgspec.Struct, frozen=True, array_like=True):
    """An executable that another process can load."""

    made: Made
    data: bytes


Functions = Callable[[dict[int, Results]], Sequence[Callable[..., Any]]]
"""Makes the functions of this process that a module calls, by index."""


def examine(order: Order) -> None:
    """Parse and vet an artifact. Raises CompileError, or what JAX raises."""
    with mlir.make_ir_context() as context:
        if order.kind is Kind.STABLEHLO:
            code = decode(order.artifact)
            module = parsed(code, context)
            vet_module(module, TARGETS)
            calls_in(module, len(code.callbacks))
            xla_client.CompileOptions.ParseFromString(code.options)  # some end the process
        elif order.kind is Kind.EXPORT:
            _exported(order, context)


def make(
    order: Order,
    physical: Sequence[jax.Device],
    functions: Functions = lambda calls: (),
) -> tuple[Made, Any]:
    """Parse, vet and compile an artifact for these devices; return XLA's executable as well.

    Raises CompileError, or what JAX raises.
    """
    if order.kind is Kind.STABLEHLO:
        return _made_of_module(order, physical, functions)
    return _made_of_function(order, physical)


def saved(made: Made, executable: Any) -> bytes:
    """Return bytes for `load`. Raises if the platform cannot serialize executables."""
    return _encode(Saved(made, executable.serialize()))


def load(
    data: bytes, physical: Sequence[jax.Device], functions: Functions = lambda calls: ()
) -> tuple[Made, Any]:
    """Return what `saved` was given, for these devices. Raises if it is something else."""
    found = _decode(data)
    made = found.made
    if made.needs_lapack and physical[0].platform == "cpu":
        find_lapack()
    placed = [physical[position] for position in made.positions]
    options = _placement_of(made, placed) if placed[0].platform == "cpu" else None
    client: Any = physical[0].client
    devices = _jax.DeviceList(tuple(placed))
    calls = list(functions(dict(made.calls)))
    return made, client.deserialize_executable(found.data, devices, options, calls)


def _placement_of(made: Made, placed: Sequence[jax.Device]) -> Any:
    """Options that say no more than on which devices an executable is loaded."""
    options = xla_client.CompileOptions()
    build = options.executable_build_options
    replicas = len(placed) // made.partitions
    options.num_replicas = build.num_replicas = replicas
    options.num_partitions = build.num_partitions = made.partitions
    build.use_spmd_partitioning = build.use_shardy_partitioner = True
    ids = np.array([device.id for device in placed]).reshape(replicas, made.partitions)
    options.device_assignment = xla_client.DeviceAssignment.create(ids)
    return options


def call_of(
    made: Made, executable: Any, order: Order, physical: Sequence[jax.Device], layouts: Layouts
) -> jax.stages.Compiled:
    """A function of global arrays that runs XLA's executable on these devices."""
    computation = order.computation
    assert computation is not None
    located = dict(zip(computation.placement.devices, order.devices, strict=True))
    avals, shardings = [], []
    for spec in (*computation.inputs, *computation.outputs):
        where = tuple(located[index] for index in spec.placement.devices)
        avals.append(core.ShapedArray(spec.shape, dtype_of(spec.dtype)))
        shardings.append(layouts(spec.sharding, where, spec.memory).sharding)
    count = len(computation.inputs)
    placed = [physical[position] for position in made.positions]
    unloaded = pxla.UnloadedMeshExecutable(
        xla_executable=executable,
        device_list=_jax.DeviceList(tuple(placed)),
        backend=physical[0].client,
        input_avals=avals[:count],
        input_shardings=shardings[:count],
        output_avals=avals[count:],
        output_shardings=shardings[count:],
        committed=True,
        name=f"jit({computation.name})",
        unordered_effects=[],
        ordered_effects=[],
        keepalive=[],
        host_callbacks=[],
        kept_var_idx=set(range(count)),
        mut=None,
        # None is XLA's own layout: JAX makes no other arrays here.
        xla_in_layouts=[None] * count,
        dispatch_in_layouts=[None] * count,
        xla_out_layouts=[None] * len(computation.outputs),
        all_args_info=None,
        pgle_profiler=None,
    )
    donated = set(computation.donated)
    infos = tuple(stages.ArgInfo(aval, at in donated) for at, aval in enumerate(avals[:count]))
    gives = jax.tree.structure((0,) * len(computation.outputs))
    return stages.Compiled(unloaded.load(), [], (infos, {}), gives, no_kwargs=True)


@functools.cache
def find_lapack() -> None:
    """Have the native functions of linear algebra find their library: JAX does so when it lowers them."""
    _lapack.initialize()


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Saved).decode


def _exported(order: Order, context: Any) -> tuple[jax.export.Exported, Vetted]:
    assert order.computation is not None
    exported = jax.export.deserialize(bytearray(order.artifact))
    vet_export(exported, order.computation)
    module = _jax.mlir.deserialize_portable_artifact(exported.mlir_module_serialized, context)
    return exported, vet_module(module)


def _flat(exported: jax.export.Exported) -> Callable[..., tuple[jax.Array, ...]]:
    """`exported` from arrays to a tuple of arrays, whatever trees it was made with."""

    def computation(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        args, kwargs = jax.tree.unflatten(exported.in_tree, arrays)
        return tuple(jax.tree.leaves(exported.call(*args, **kwargs)))

    return computation


def _same(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """A re-shard, whose work is in its shardings."""
    return arrays


def _made_of_function(order: Order, physical: Sequence[jax.Device]) -> tuple[Made, Any]:
    computation = order.computation
    assert computation is not None
    function: Callable[..., Any] = _same
    vetted = Vetted(is_straight=True, needs_lapack=False)
    if order.kind is Kind.EXPORT:
        with mlir.make_ir_context() as context:
            exported, vetted = _exported(order, context)
        function = _flat(exported)
    positions = {address: at for at, address in enumerate(order.devices)}
    layouts = Layouts("", lambda address: physical[positions[address]])
    located = dict(zip(computation.placement.devices, order.devices, strict=True))
    shardings = [
        layouts(
            spec.sharding, tuple(located[at] for at in spec.placement.devices), spec.memory
        ).sharding
        for spec in (*computation.inputs, *computation.outputs)
    ]
    count = len(computation.inputs)
    jitted = jax.jit(
        function,
        in_shardings=tuple(shardings[:count]),
        out_shardings=tuple(shardings[count:]),
        donate_argnums=computation.donated,
        keep_unused=True,
    )
    avals = [jax.ShapeDtypeStruct(spec.shape, dtype_of(spec.dtype)) for spec in computation.inputs]
    found: Any = jitted.lower(*avals).compile()
    at_device = {device: at for at, device in enumerate(physical)}
    placed = found._executable._unloaded_executable.device_list
    made = Made(
        vetted.is_straight,
        vetted.needs_lapack,
        tuple(at_device[device] for device in placed),
        len(placed),
        _temporary_bytes(found),
    )
    return made, found._executable.xla_executable


def _made_of_module(
    order: Order, physical: Sequence[jax.Device], functions: Functions
) -> tuple[Made, Any]:
    code = decode(order.artifact)
    with mlir.make_ir_context() as context:
        module = parsed(code, context)
        vetted = vet_module(module, TARGETS)
        calls = calls_in(module, len(code.callbacks))
        options = options_of(code.options, physical)
        executable = compiled(module, options, physical, functions(calls))
    facts = facts_of(executable, physical)
    made = Made(
        vetted.is_straight,
        vetted.needs_lapack,
        tuple(range(len(physical))),
        options.num_partitions,
        facts.temporary_bytes,
        facts,
        tuple(calls.items()),
    )
    return made, executable


def _temporary_bytes(found: jax.stages.Compiled) -> int:
    try:
        analysis: Any = found.memory_analysis()
        return max(0, int(analysis.temp_size_in_bytes))
    except Exception:  # noqa: BLE001 - not every platform says, and none has to
        return 0
