"""Makes an executable of an artifact, in the host or in a process beside it, and loads it in the host.

Parsing, vetting and compiling run on what a client has sent, so they may crash, or never end. A host
of CPU devices leaves them to processes beside it (`pw.devices.jax.compile_processes`) and loads what
they have made. There the devices of an executable are the first ones of that process: only the
device assignment differs, which XLA takes anew when it loads an executable.

Accelerators compile in the host, after another process has parsed and vetted the artifact.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.export
import msgspec
from jax.interpreters import mlir
from jax.sharding import NamedSharding

from pw.core.jax_private.compiling import CompileOptions, DeviceList, assignment_of, find_lapack
from pw.core.jax_private.tracing import without_lines
from pw.core.packing import ArrayType
from pw.core.platforms import platform_of
from pw.core.programs.stablehlo import CALLS, Facts, Stablehlo, decode, encode
from pw.core.sharding import ArraySpec, DeviceAddress, dtype_of
from pw.devices.jax.callbacks import Results, calls_in
from pw.devices.jax.modules import communicates, compiled, facts_of, options_of, parsed
from pw.devices.jax.vetting import vet


class Order(msgspec.Struct, frozen=True, array_like=True):
    """What to make an executable of."""

    artifact: bytes
    devices: tuple[DeviceAddress, ...]


class ExecutableFacts(msgspec.Struct, frozen=True, array_like=True):
    """Properties of an executable that JAX does not say of it."""

    is_straight: bool
    """True if it has no loops, branches, native calls or collectives."""
    needs_lapack: bool
    partitions: int
    facts: Facts
    calls: tuple[tuple[int, tuple[ArrayType | None, ...]], ...] = ()
    """Indices of the functions of its client that it calls, with their results."""


class Saved(msgspec.Struct, frozen=True, array_like=True):
    """An executable that another process can load."""

    details: ExecutableFacts
    data: bytes


Functions = Callable[[dict[int, Results]], Sequence[Callable[..., Any]]]
"""Makes the functions of this process that a module calls, by index."""


def examine(order: Order) -> None:
    """Parse and vet an artifact. Raises CompileError, or what JAX raises."""
    code = decode(order.artifact)
    with mlir.make_ir_context() as context:
        module = parsed(code, context)
        vet(module, CALLS)
        calls_in(module, len(code.callbacks))
        CompileOptions.ParseFromString(code.options)  # some end the process


def make(
    order: Order, physical: Sequence[jax.Device], functions: Functions = lambda calls: ()
) -> tuple[ExecutableFacts, Any]:
    """Parse, vet and compile an artifact for these devices; return XLA's executable as well.

    Raises CompileError, or what JAX raises.
    """
    code = decode(order.artifact)
    with mlir.make_ir_context() as context:
        module = parsed(code, context)
        vetted = vet(module, CALLS)
        calls = calls_in(module, len(code.callbacks))
        options = options_of(code.options, physical)
        executable = compiled(module, options, physical, functions(calls))
    facts = facts_of(executable, physical)
    details = ExecutableFacts(
        vetted.is_straight and not communicates(executable),
        vetted.needs_lapack,
        options.num_partitions,
        facts,
        tuple(calls.items()),
    )
    return details, executable


def reshard_of(spec: ArraySpec, source: NamedSharding, destination: NamedSharding) -> bytes:
    """Return the artifact of a function that returns its argument with another sharding."""
    function = jax.jit(lambda array: array, in_shardings=source, out_shardings=destination)
    like = jax.ShapeDtypeStruct(spec.shape, dtype_of(spec.dtype))
    with without_lines():
        exported = jax.export.export(function)(like)
    return encode(Stablehlo(exported.mlir_module_serialized))


def saved(details: ExecutableFacts, executable: Any) -> bytes:
    """Return bytes for `load`. Raises if the platform cannot serialize executables."""
    return _encode(Saved(details, executable.serialize()))


def load(
    data: bytes, physical: Sequence[jax.Device], functions: Functions = lambda calls: ()
) -> tuple[ExecutableFacts, Any]:
    """Return what `saved` was given, for these devices. Raises if it is something else."""
    file = _decode(data)
    details = file.details
    is_host = platform_of(physical[0].platform).is_host
    if details.needs_lapack and is_host:
        find_lapack()
    options = _placement_of(details, physical) if is_host else None
    client: Any = physical[0].client
    devices = DeviceList(tuple(physical))
    calls = list(functions(dict(details.calls)))
    return details, client.deserialize_executable(file.data, devices, options, calls)


def _placement_of(details: ExecutableFacts, physical: Sequence[jax.Device]) -> Any:
    """Options that say no more than on which devices an executable is loaded."""
    options = CompileOptions()
    build = options.executable_build_options
    replicas = len(physical) // details.partitions
    options.num_replicas = build.num_replicas = replicas
    options.num_partitions = build.num_partitions = details.partitions
    build.use_spmd_partitioning = build.use_shardy_partitioner = True
    ids = [device.id for device in physical]
    options.device_assignment = assignment_of(ids, replicas, details.partitions)
    return options


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Saved).decode
