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
from jax._src.config import traceback_in_locations_limit
from jax._src.interpreters import mlir
from jax.sharding import NamedSharding
from jaxlib import _jax, xla_client
from jaxlib.cpu import _lapack

from pw.core.packing import ArrayType
from pw.core.platforms import platform_of
from pw.core.programs.stablehlo import CALLS, Facts, Stablehlo, decode, encode
from pw.core.sharding import ArraySpec, DeviceAddress, dtype_of
from pw.devices.jax.callbacks import Results, calls_in
from pw.devices.jax.modules import compiled, facts_of, options_of, parsed
from pw.devices.jax.vetting import vet


class Order(msgspec.Struct, frozen=True, array_like=True):
    """What to make an executable of."""

    artifact: bytes
    devices: tuple[DeviceAddress, ...]


class ExecutableFacts(msgspec.Struct, frozen=True, array_like=True):
    """What is known of an executable besides itself."""

    is_straight: bool
    needs_lapack: bool
    partitions: int
    facts: Facts
    calls: tuple[tuple[int, tuple[ArrayType | None, ...]], ...] = ()
    """The functions of its client that it calls, with their results."""


class Saved(msgspec.Struct, frozen=True, array_like=True):
    """An executable that another process can load."""

    made: ExecutableFacts
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
        xla_client.CompileOptions.ParseFromString(code.options)  # some end the process


def make(
    order: Order,
    physical: Sequence[jax.Device],
    functions: Functions = lambda calls: (),
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
    made = ExecutableFacts(
        vetted.is_straight,
        vetted.needs_lapack,
        options.num_partitions,
        facts,
        tuple(calls.items()),
    )
    return made, executable


def reshard_of(spec: ArraySpec, source: NamedSharding, destination: NamedSharding) -> bytes:
    """Return the artifact of a function that returns its argument with another sharding."""
    function = jax.jit(lambda array: array, in_shardings=source, out_shardings=destination)
    like = jax.ShapeDtypeStruct(spec.shape, dtype_of(spec.dtype))
    with traceback_in_locations_limit(0):
        exported = jax.export.export(function)(like)
    return encode(Stablehlo(exported.mlir_module_serialized))


def saved(made: ExecutableFacts, executable: Any) -> bytes:
    """Return bytes for `load`. Raises if the platform cannot serialize executables."""
    return _encode(Saved(made, executable.serialize()))


def load(
    data: bytes, physical: Sequence[jax.Device], functions: Functions = lambda calls: ()
) -> tuple[ExecutableFacts, Any]:
    """Return what `saved` was given, for these devices. Raises if it is something else."""
    found = _decode(data)
    made = found.made
    is_host = platform_of(physical[0].platform).is_host
    if made.needs_lapack and is_host:
        find_lapack()
    options = _placement_of(made, physical) if is_host else None
    client: Any = physical[0].client
    devices = _jax.DeviceList(tuple(physical))
    calls = list(functions(dict(made.calls)))
    return made, client.deserialize_executable(found.data, devices, options, calls)


def _placement_of(made: ExecutableFacts, physical: Sequence[jax.Device]) -> Any:
    """Options that say no more than on which devices an executable is loaded."""
    options = xla_client.CompileOptions()
    build = options.executable_build_options
    replicas = len(physical) // made.partitions
    options.num_replicas = build.num_replicas = replicas
    options.num_partitions = build.num_partitions = made.partitions
    build.use_spmd_partitioning = build.use_shardy_partitioner = True
    ids = np.array([device.id for device in physical]).reshape(replicas, made.partitions)
    options.device_assignment = xla_client.DeviceAssignment.create(ids)
    return options


@functools.cache
def find_lapack() -> None:
    """Have the native functions of linear algebra find their library: JAX does so when it lowers them."""
    _lapack.initialize()


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Saved).decode
