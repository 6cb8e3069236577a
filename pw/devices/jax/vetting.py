"""Refuses code of clients that could do harm on a host.

StableHLO is not a sandbox: a `custom_call` may name any function that is linked into the worker,
also the one that calls Python objects by address. So only listed targets are compiled, with the
reasons in `docs/internals/compiling.md`: linear algebra, whose shapes are checked here
(`pw.devices.jax.kernels`); kernels that check their shapes themselves; and the markers that the
partitioner or the compiler replaces. Code with a channel to the host is refused.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any, NamedTuple

from jax.extend.mlir import ir

from pw.core.errors import CodeRefused
from pw.devices.jax import kernels

_CHOICES = frozenset({"stablehlo.while", "stablehlo.case", "stablehlo.if"})
_HOST_CHANNELS = frozenset(
    {"stablehlo.send", "stablehlo.recv", "stablehlo.infeed", "stablehlo.outfeed"}
)
_DIALECTS = frozenset({"builtin", "func", "stablehlo", "chlo", "sdy"})
"""Dialects of the StableHLO modules of JAX."""
_LAYOUT = "LayoutConstraint"
"""Target of a mark of `with_sharding_constraint` with a `Layout`; the compiler, which replaces it, looks at no
shapes."""
_INSTEAD = {
    "ragged_all_to_all": (
        "jax.lax.ragged_all_to_all writes wherever its offsets say. Pad the parts, and use jax.lax.all_to_all"
    ),
    "CustomSPMDPartitioning": (
        "custom_partitioning has the compiler call functions of the script's process. Use jax.shard_map, or "
        "jax.lax.with_sharding_constraint"
    ),
}
"""Advice for functions of JAX that are refused, with the reason."""
_ALLOWED_TARGETS = re.compile(
    r"(?:cusolver|cusparse|hipsolver)_[a-z0-9]+_ffi"
    r"|(?:cu|hip)_(?:threefry2x32_ffi|lu_pivots_to_permutation)"
    r"|Sharding|SPMDFullToShardShape|SPMDShardToFullShape|annotate_device_placement|shape_assertion"
    r"|xla\.sdy\.\w+|MoveToHost|MoveToDevice|PinToDevice"
    r"|AllocateBuffer|ApproxTopK|Eigh|LuDecomposition|ProductOfElementaryHouseholderReflectors|Qr"
    r"|stablehlo\.dynamic_(?:approx_top_k|reduce_window|rng_bit_generator|top_k)"
)


class Vetted(NamedTuple):
    """What is known of code that is harmless."""

    is_straight: bool
    """True if it has no loops, branches or native calls, so that calls take equally long."""
    needs_lapack: bool
    """True if it calls LAPACK, which the process that runs it has to find first."""


def vet(module: Any, more_targets: Collection[str] = ()) -> Vetted:
    """Raise CodeRefused if a StableHLO module calls native functions that are not listed, or its host.

    Args:
        module: module as MLIR has parsed it.
        more_targets: native functions that are allowed as well.
    """
    refused: list[CodeRefused] = []
    seen: set[str] = set()
    targets: set[str] = set()

    def look(operation: Any) -> Any:
        name = operation.name
        seen.add(name)
        try:
            if name == "stablehlo.custom_call":
                targets.add(_custom_call(operation, more_targets))
            elif name in _HOST_CHANNELS:
                raise CodeRefused(
                    f"the function talks to its host ({name}), which is not allowed; return such "
                    "values, or use a pw.host_function"
                )
            elif name.partition(".")[0] not in _DIALECTS:
                raise CodeRefused(f"the function has an operation that is not StableHLO: {name}")
        except CodeRefused as error:
            refused.append(error)
            return ir.WalkResult.INTERRUPT
        return ir.WalkResult.ADVANCE

    module.operation.walk(look)
    if refused:
        raise refused[0]
    return Vetted(not targets and not seen & _CHOICES, any(map(kernels.is_kernel, targets)))


def _custom_call(operation: Any, more_targets: Collection[str]) -> str:
    """Vet a native call; return its target."""
    attributes = operation.attributes
    target = ir.StringAttr(attributes["call_target_name"]).value
    if kernels.is_kernel(target):
        operands = [_tensor(target, operand.type) for operand in operation.operands]
        results = [_tensor(target, result.type) for result in operation.results]
        kernels.check(target, operands, results, _options(attributes), _batch_dims(attributes))
    elif target == _LAYOUT:
        if [one.type for one in operation.operands] != [one.type for one in operation.results]:
            raise CodeRefused(f"the function calls {target!r} with a result of another type")
    elif target not in more_targets and not _ALLOWED_TARGETS.fullmatch(target):
        instead = _INSTEAD.get(target, "write it with jax.numpy or jax.lax, or leave it out")
        raise CodeRefused(
            f"the function calls the native function {target!r}, which workers do not allow: {instead}"
        )
    return target


def _tensor(target: str, mlir_type: Any) -> kernels.Tensor:
    try:
        tensor = ir.RankedTensorType(mlir_type)
        return str(tensor.element_type), tuple(tensor.shape)
    except ValueError as error:
        raise CodeRefused(f"the function calls {target!r} with {mlir_type}") from error


def _options(attributes: Any) -> dict[str, int]:
    if "mhlo.backend_config" not in attributes:
        return {}
    options = {}
    config: Any = ir.DictAttr(attributes["mhlo.backend_config"])
    for named in config:
        if isinstance(named.attr, ir.BoolAttr | ir.IntegerAttr):
            options[named.name] = int(named.attr.value)
    return options


def _batch_dims(attributes: Any) -> int:
    """How many dimensions the partitioner may divide, as the module says."""
    dims = "0"
    if "mhlo.frontend_attributes" in attributes:
        marks = ir.DictAttr(attributes["mhlo.frontend_attributes"])
        if "num_batch_dims" in marks:
            dims = ir.StringAttr(marks["num_batch_dims"]).value
    if not dims.isdecimal() or len(dims) > 2:
        raise CodeRefused(f"the function calls LAPACK with {dims!r} batch dimensions")
    return int(dims)
