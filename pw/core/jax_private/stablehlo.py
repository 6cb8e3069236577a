"""StableHLO modules, as JAX and XLA convert them."""

from __future__ import annotations

from typing import Any

from jax._src.export._export import _module_to_bytecode
from jaxlib import _jax


def parsed(artifact: bytes, context: Any = None) -> Any:
    """Return a portable module as MLIR has it, in this context of MLIR, else in the current one.

    Public: `jax.export.deserialize`, for what `jax.export` has serialized.
    """
    return _jax.mlir.deserialize_portable_artifact(artifact, context)


def portable(module: Any) -> bytes:
    """Return the bytes of a module that other versions of JAX can read.

    Public: `jax.export.Exported.mlir_module_serialized`, for functions.
    """
    return bytes(_module_to_bytecode(module))


def of_hlo(proto: bytes) -> bytes:
    """Return the StableHLO module of an `HloModuleProto`, as MLIR writes it. Public: none."""
    return bytes(_jax.mlir.hlo_to_stablehlo(proto))


def hlo_text(module: bytes) -> str:
    """Return a StableHLO module in XLA's words. Public: `jax.stages.Lowered.as_text("hlo")`, for functions."""
    return str(_jax.mlir.mlir_module_to_xla_computation(module, False, False).as_hlo_text())
