"""How a compiler would lay the results of a computation out, known without compiling it.

XLA takes shardings from the arguments through a function to its results with Shardy, which jaxlib
brings along and which needs neither devices nor a backend. The same passes run here on a copy of what is
exported, so a result's sharding is known when its function has been traced, and is what `jax.jit` would
have given it. The hosts are then told to lay it out just so.

Where the result of the passes is no `PartitionSpec` (a part of a mesh axis, an axis that does not divide
the dimension), the passes themselves leave the dimension whole.
"""

from __future__ import annotations

from typing import Any

import jax
from jax._src.interpreters import mlir  # a context that knows all of JAX's dialects
from jax.extend.mlir import ir, passmanager
from jax.extend.mlir.dialects import sdy
from jax.sharding import PartitionSpec

__all__ = ["result_specs"]

_PASSES = "builtin.module(inline,symbol-dce,sdy-propagation-pipeline)"


def result_specs(exported: jax.export.Exported) -> list[PartitionSpec]:
    """The sharding of every result of `exported`, over the mesh of its arguments."""
    with mlir.make_ir_context():
        module: Any = exported.mlir_module(serialized=False)
        passmanager.PassManager.parse(_PASSES).run(module.operation)
        main: Any = ir.SymbolTable(module.operation)["main"]
        described: Any = main.attributes["res_attrs"]
        return [
            _spec(said)
            if aval.size
            else PartitionSpec()  # what has no elements, XLA does not split
            for said, aval in zip(described, exported.out_avals, strict=True)
        ]


def _spec(said: Any) -> PartitionSpec:
    if "sdy.sharding" not in said:
        return PartitionSpec()
    sharding = sdy.TensorShardingAttr(said["sdy.sharding"])
    dimensions = [sdy.DimensionShardingAttr(entry) for entry in sharding.dimension_shardings]
    axes = [tuple(sdy.AxisRefAttr(axis).name for axis in entry.axes) for entry in dimensions]
    return PartitionSpec(*(names or None for names in axes))
