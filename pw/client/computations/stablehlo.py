"""The StableHLO module of a traced function, as hosts compile it.

XLA propagates shardings from the arguments to the results with Shardy. jaxlib has these passes, and
they need neither devices nor a backend. The client runs them on a copy of the module. So it knows the
results' shardings once a function is traced, and they are those of `jax.jit`. It writes them into the
module, so that the hosts compile for these shardings.

Where the passes find no `PartitionSpec` (a part of a mesh axis, an axis that does not divide the
dimension), they leave the dimension whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jax.extend.mlir import ir, passmanager
from jax.extend.mlir.dialects import sdy
from jax.interpreters import mlir
from jax.sharding import PartitionSpec

from pw.core.jax_private.stablehlo import parsed, portable
from pw.core.programs.stablehlo import Stablehlo, encode
from pw.core.sharding import ArraySpec, Sharding

SHARDING = "sdy.sharding"

_PASSES = "builtin.module(inline,symbol-dce,sdy-propagation-pipeline)"


def result_specs(module: bytes, shapes: Sequence[tuple[int, ...]]) -> list[PartitionSpec]:
    """Return the spec of each result, given their shapes, over the mesh of the arguments."""
    with mlir.make_ir_context():
        propagated = parsed(module)
        passmanager.PassManager.parse(_PASSES).run(propagated.operation)
        described: Any = _main(propagated).attributes["res_attrs"]
        return [
            _spec(result) if 0 not in shape else PartitionSpec()  # XLA does not split empty arrays
            for result, shape in zip(described, shapes, strict=False)
        ]


def artifact_of(module: bytes, donated: Sequence[int], results: Sequence[ArraySpec]) -> bytes:
    """Return the artifact of a portable module that takes the buffers of the donated arguments.

    Its results are divided as `results` say; without these, as the module says.
    """
    if not donated and not results:
        return encode(Stablehlo(module))
    with mlir.make_ir_context(), ir.Location.unknown():
        marks = parsed(module)
        main = _main(marks)
        add_attributes(main, "arg_attrs", len(main.type.inputs), donors(donated))
        divide_results(marks, results)
        return encode(Stablehlo(portable(marks)))


def divide_results(module: Any, results: Sequence[ArraySpec]) -> None:
    """Let the results of a module be divided as these say; in place."""
    mesh = _mesh_of(module, results[0].sharding) if results else ""
    if mesh:  # a module without one has whole results
        split = [{SHARDING: sharding_of(mesh, _axes(spec))} for spec in results]
        add_attributes(_main(module), "res_attrs", len(results), dict(enumerate(split)))


def donors(donated: Sequence[int]) -> dict[int, dict[str, Any]]:
    """Return the attributes of the arguments whose buffers a function takes; XLA finds the results for them."""
    return {at: {"jax.buffer_donor": ir.BoolAttr.get(True)} for at in donated}


def add_attributes(
    main: Any, which: str, count: int, more: Mapping[int, Mapping[str, Any]]
) -> None:
    """Add attributes to the arguments (`arg_attrs`) or results (`res_attrs`) of a function."""
    if not more:
        return
    attributes = main.attributes
    present: Any = attributes[which] if which in attributes else [{}] * count
    attributes[which] = ir.ArrayAttr.get(
        [
            ir.DictAttr.get({one.name: one.attr for one in own} | dict(more.get(at, {})))
            for at, own in enumerate(present)
        ]
    )


def sharding_of(mesh: str, axes: Iterable[Sequence[str]]) -> Any:
    """Return the attribute of an array whose dimensions are split over these axes of a mesh."""
    entries = ["{" + ", ".join(f'"{axis}"' for axis in names) + "}" for names in axes]
    return ir.Attribute.parse(f"#sdy.sharding<@{mesh}, [{', '.join(entries)}]>")


def _axes(spec: ArraySpec) -> list[tuple[str, ...]]:
    split = spec.sharding.spec
    return [split[at] if at < len(split) else () for at in range(len(spec.shape))]


def _mesh_of(module: Any, sharding: Sharding) -> str:
    """Return the name of the mesh in a module with the axes of a sharding; "" if there is none."""
    sizes = zip(sharding.axis_names, sharding.axis_sizes, strict=True)
    wanted = "<[" + ", ".join(f'"{name}"={size}' for name, size in sizes) + "]>"
    for one in module.body.operations:
        if one.operation.name == "sdy.mesh" and wanted in str(one.operation.attributes["mesh"]):
            return ir.StringAttr(one.operation.attributes["sym_name"]).value
    return ""


def _main(module: Any) -> Any:
    return ir.SymbolTable(module.operation)["main"]


def _spec(result: Any) -> PartitionSpec:
    if SHARDING not in result:
        return PartitionSpec()
    sharding = sdy.TensorShardingAttr(result[SHARDING])
    dimensions = [sdy.DimensionShardingAttr(entry) for entry in sharding.dimension_shardings]
    axes = [tuple(sdy.AxisRefAttr(axis).name for axis in entry.axes) for entry in dimensions]
    return PartitionSpec(*(names or None for names in axes))
