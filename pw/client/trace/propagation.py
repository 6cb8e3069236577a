"""Computes the shardings of a computation's results without compiling it.

XLA propagates shardings from the arguments to the results with Shardy. jaxlib has these passes, and
they need neither devices nor a backend. The client runs them on a copy of the exported module. So
it knows the results' shardings once a function is traced, and they are those of `jax.jit`. The
hosts compile for these shardings.

Where the passes find no `PartitionSpec` (a part of a mesh axis, an axis that does not divide the
dimension), they leave the dimension whole.
"""

from __future__ import annotations

from typing import Any

import jax
from jax._src.interpreters import mlir  # a context that knows all of JAX's dialects
from jax.extend.mlir import ir, passmanager
from jax.extend.mlir.dialects import sdy
from jax.sharding import PartitionSpec

_PASSES = "builtin.module(inline,symbol-dce,sdy-propagation-pipeline)"


def result_specs(exported: jax.export.Exported) -> list[PartitionSpec]:
    """Return the spec of every result of `exported`, over the mesh of its arguments."""
    with mlir.make_ir_context():
        module: Any = exported.mlir_module(serialized=False)
        passmanager.PassManager.parse(_PASSES).run(module.operation)
        main: Any = ir.SymbolTable(module.operation)["main"]
        described: Any = main.attributes["res_attrs"]
        return [
            _spec(said) if aval.size else PartitionSpec()  # XLA does not split empty arrays
            for said, aval in zip(described, exported.out_avals, strict=True)
        ]


def _spec(said: Any) -> PartitionSpec:
    if "sdy.sharding" not in said:
        return PartitionSpec()
    sharding = sdy.TensorShardingAttr(said["sdy.sharding"])
    dimensions = [sdy.DimensionShardingAttr(entry) for entry in sharding.dimension_shardings]
    axes = [tuple(sdy.AxisRefAttr(axis).name for axis in entry.axes) for entry in dimensions]
    return PartitionSpec(*(names or None for names in axes))
