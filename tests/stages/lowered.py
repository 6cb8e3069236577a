"""What a JAX client sends to a compiler, without a client: artifacts of kind STABLEHLO."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax._src.interpreters import mlir, pxla
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxlib import _jax
from jaxlib.mlir.dialects import stablehlo

from pw.core.programs.program import Computation
from pw.core.programs.stablehlo import Stablehlo, encode
from pw.core.sharding import ArraySpec


def stablehlo_of(
    function: Callable[..., Any],
    args: Sequence[jax.ShapeDtypeStruct],
    devices: Sequence[jax.Device] | None = None,
    compiler_options: dict[str, Any] | None = None,
    **jit: Any,
) -> Stablehlo:
    """The module and the options that JAX's remote protocol carries for `jax.jit(function, **jit)(*args)`."""
    with jax.enable_x64(True):
        lowered: Any = jax.jit(function, **jit).lower(*args)
    module = lowered.compiler_ir()
    portable = _jax.mlir.serialize_portable_artifact(
        mlir.module_to_bytecode(module), stablehlo.get_current_version(), True
    )
    known = lowered._lowering.compile_args
    free = [
        tuple("Unspecified" in type(sharding).__name__ for sharding in known[which])
        for which in ("in_shardings", "out_shardings")
    ]
    options = pxla.create_compile_options(
        module,
        known["tuple_args"],
        *free,
        known["backend"],
        np.array(devices or jax.devices()[: known["num_devices"]]),
        dict(compiler_options or {}),
    )
    return Stablehlo(portable, options.SerializeAsString())


def computation_of(
    code: Stablehlo,
    inputs: Sequence[ArraySpec],
    outputs: Sequence[ArraySpec],
    donated: tuple[int, ...] = (),
) -> tuple[Computation, bytes]:
    """A computation of this module, and its artifact."""
    artifact = encode(code)
    placement = (*inputs, *outputs)[0].placement
    digest = hashlib.sha256(artifact).digest()
    return (Computation("f", digest, placement, tuple(inputs), tuple(outputs), donated), artifact)


def over(devices: int, *axes: str | None) -> NamedSharding:
    """A sharding over the first devices of this process; the axis is called x."""
    return NamedSharding(Mesh(np.array(jax.devices()[:devices]), ("x",)), PartitionSpec(*axes))


def like(
    shape: tuple[int, ...], dtype: str = "float32", sharding: Any = None
) -> jax.ShapeDtypeStruct:
    """An argument of this shape, dtype and sharding."""
    return jax.ShapeDtypeStruct(shape, np.dtype(dtype), sharding=sharding)
