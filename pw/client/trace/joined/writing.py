"""Exports the pieces of a function for an island's own mesh."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax._src.interpreters import mlir
from jax.extend.mlir import ir, passmanager
from jax.sharding import PartitionSpec

from pw.client.arrays.mesh import Mesh
from pw.client.arrays.sharding import NamedSharding
from pw.client.arrays.signature import ArrayType
from pw.client.trace.export import Traced
from pw.client.trace.joined.cutting import Bucket, Cut, Piece, elements_of, used_by
from pw.client.trace.joined.module import INNER, Flat, replace_operands, walk, zeros_of
from pw.client.trace.stablehlo import SHARDING, add_attributes, donors, portable, sharding_of
from pw.core.dtypes import BY_MLIR
from pw.core.errors import ShardingError
from pw.core.programs.program import Computation
from pw.core.programs.stablehlo import Stablehlo, encode
from pw.core.sharding import dtype_of

WHOLE_BYTES = 64 << 10
"""Buckets up to this size are added on every island: one transfer takes less time than two."""

_REDUCES = ("sdy.all_reduce", "stablehlo.all_reduce")


class Parts(NamedTuple):
    """How a bucket travels: as equal parts, each split over all devices of an island."""

    number: int
    elements: int
    """Of one part."""
    dtype: np.dtype[Any]


class Written(NamedTuple):
    """A piece: its code, and the specs of its arguments and results."""

    name: str
    artifact: bytes
    inputs: list[tuple[Any, PartitionSpec]]
    """Aval and inner spec of each argument: values, then the parts of sums."""
    outputs: list[tuple[Any, PartitionSpec]]
    donated: tuple[int, ...]

    def on(self, mesh: Mesh) -> Traced:
        """Return the computation of the piece on an island."""
        inputs = [_type_on(mesh, *said) for said in self.inputs]
        outputs = [_type_on(mesh, *said) for said in self.outputs]
        computation = Computation(
            self.name,
            hashlib.sha256(self.artifact).digest(),
            mesh.placement,
            tuple(type_.spec for type_ in inputs),
            tuple(type_.spec for type_ in outputs),
            self.donated,
        )
        return Traced(computation, self.artifact, mesh, tuple(inputs), (), tuple(outputs), None)


def _type_on(mesh: Mesh, aval: Any, spec: PartitionSpec) -> ArrayType:
    return ArrayType.of(aval, NamedSharding(mesh, spec))


class Writer:
    """Writes the pieces of one function."""

    def __init__(
        self,
        flat: Flat,
        cut: Cut,
        reduced: dict[Any, str],
        mesh: Mesh,
        name: str,
    ) -> None:
        self._flat = flat
        self._cut = cut
        self._reduced = reduced
        self._mesh = mesh
        self._name = name
        self._is_split = mesh.size > 1
        self._argument = {value: at for at, value in enumerate(cut.arguments)}

    def parts(self, bucket: Bucket) -> Parts:
        """Return how a bucket travels."""
        dtype = _dtype_of(bucket.element)
        count = 1 if bucket.elements * dtype.itemsize <= WHOLE_BYTES else self._flat.islands
        each = -(-bucket.elements // count)
        return Parts(count, -(-each // self._mesh.size) * self._mesh.size, dtype)

    def part_type(self, bucket: Bucket) -> tuple[Any, PartitionSpec]:
        """Return the aval and inner spec of a part of a bucket."""
        parts = self.parts(bucket)
        axes = self._mesh.axis_names if self._is_split else None
        return jax.core.ShapedArray((parts.elements,), parts.dtype), PartitionSpec(axes)

    def write(self, piece: Piece, at: int, donated: tuple[int, ...]) -> Written:
        """Export a piece that takes the buffers of the donated arguments.

        Its arguments are `piece.inputs`, then the parts of each bucket of `piece.sums`. Its results are
        `piece.outputs`, the function's results at `piece.results`, and the parts of `piece.makes`.
        """
        of_sums = [
            self.part_type(bucket)
            for bucket in piece.sums
            for _ in range(self.parts(bucket).number)
        ]
        inputs = [*map(self._said, piece.inputs), *of_sums]
        outputs = [*map(self._said, piece.outputs), *map(self._result, piece.results)]
        if piece.makes is not None:
            outputs += [self.part_type(piece.makes)] * self.parts(piece.makes).number
        name = (
            self._name
            if len(self._cut.pieces) == 1
            else f"{self._name} ({at + 1} of {len(self._cut.pieces)})"
        )
        module = self._module(piece, inputs, outputs, donated)
        # Equal code has equal artifacts, wherever it is in a script.
        passmanager.PassManager.parse("builtin.module(strip-debuginfo)").run(module.operation)
        artifact = encode(Stablehlo(portable(module)))
        return Written(name, artifact, inputs, outputs, donated)

    # --- specs ------------------------------------------------------------------------------------

    def _said(self, value: Any) -> tuple[Any, PartitionSpec]:
        """Return a value's aval and inner spec."""
        if value in self._argument:
            at = self._argument[value]
            inner = self._flat.arguments[at] if at < len(self._flat.arguments) else ""
            return self._spec(value, inner, 0)
        attributes = self._cut.maker(value).attributes
        inner = ir.StringAttr(attributes[INNER]).value if INNER in attributes else ""
        return self._spec(value, inner, value.result_number)

    def _result(self, at: int) -> tuple[Any, PartitionSpec]:
        said = self._flat.results[at] if at < len(self._flat.results) else ""
        return self._spec(self._cut.results[at], said, 0)

    def _spec(self, value: Any, inner: str, index: int) -> tuple[Any, PartitionSpec]:
        type_ = ir.RankedTensorType(value.type)
        aval = jax.core.ShapedArray(tuple(type_.shape), _dtype_of(type_.element_type))
        return aval, inner_spec(inner, index, self._mesh, tuple(type_.shape))

    # --- code -------------------------------------------------------------------------------------

    def _module(
        self, piece: Piece, inputs: Sequence[Any], outputs: Sequence[Any], donated: Sequence[int]
    ) -> Any:
        axes = ", ".join(f'"{name}"={size}' for name, size in self._mesh.shape.items())
        meshes = {"mesh": f"<[{axes}]>"} | self._flat.meshes if self._is_split else {}
        said = "\n".join(f"sdy.mesh @{name} = {mesh}" for name, mesh in meshes.items())
        module = ir.Module.parse(
            f"module attributes {{mhlo.num_partitions = {self._mesh.size} : i32, "
            f"mhlo.num_replicas = 1 : i32}} {{\n{said}\n}}"
        )
        types = [[_tensor(aval) for aval, _ in said] for said in (inputs, outputs)]
        attributes = {
            "sym_name": ir.StringAttr.get("main"),
            "sym_visibility": ir.StringAttr.get("public"),
            "function_type": ir.TypeAttr.get(ir.FunctionType.get(*types)),
        }
        location = self._flat.main.location
        function = ir.Operation.create(
            "func.func",
            attributes=attributes,
            regions=1,
            loc=location,
            ip=ir.InsertionPoint(module.body),
        )
        if self._is_split:
            add_attributes(function, "arg_attrs", len(inputs), _shardings(inputs))
            add_attributes(function, "res_attrs", len(outputs), _shardings(outputs))
        add_attributes(function, "arg_attrs", len(inputs), donors(donated))
        block = ir.Block.create_at_start(function.regions[0], types[0], [location] * len(inputs))
        self._body(piece, block)
        return module

    def _body(self, piece: Piece, block: Any) -> None:
        end = ir.InsertionPoint(block)
        given = list(block.arguments)
        values = dict(zip(piece.inputs, given, strict=False))
        rest = iter(given[len(piece.inputs) :])
        sums: dict[Any, Any] = {}
        for bucket in piece.sums:
            arrived = [next(rest) for _ in range(self.parts(bucket).number)]
            sums.update(self._unpacked(bucket, arrived, end))

        def find(value: Any, summed: bool = True) -> Any:
            if summed and value in self._reduced:
                return sums[value]
            if value not in values:
                self._copy(self._cut.maker(value), find, values, end)  # a cheap one
            return values[value]

        for one in piece.operations:
            self._copy(one, find, values, end)
        made = [find(value, False) for value in piece.outputs]
        made += [find(self._cut.results[at]) for at in piece.results]
        if piece.makes is not None:
            made += self._packed(piece.makes, [find(v, False) for v in piece.makes.values], end)
        ir.Operation.create("func.return", operands=made, loc=self._flat.main.location, ip=end)

    def _copy(self, one: Any, find: Any, values: dict[Any, Any], end: Any) -> None:
        if one.name in _REDUCES:  # its result is partial until it is reduced
            values[one.results[0]] = find(one.operands[0])
            return
        used = dict.fromkeys(used_by(one))
        given = {value: find(value) for value in used}
        copied = one.clone(end)
        for inner in (copied, *walk(copied)):
            replace_operands(inner, given)
            self._dress(inner)
        for inner in [one for one in walk(copied) if one.name in _REDUCES]:
            inner.results[0].replace_all_uses_with(inner.operands[0])
            inner.erase()
        values.update(zip(one.results, copied.results, strict=True))

    def _dress(self, one: Any) -> None:
        """Give an operation its sharding over the axes inside an island.

        Not where it has several results: XLA simplifies loops before it reads shardings, and drops results.
        """
        attributes = one.attributes
        if SHARDING in attributes:
            del attributes[SHARDING]
        if INNER in attributes:
            if self._is_split and len(one.results) == 1 and one.name != "stablehlo.while":
                attributes[SHARDING] = ir.Attribute.parse(ir.StringAttr(attributes[INNER]).value)
            del attributes[INNER]

    def _packed(self, bucket: Bucket, values: Sequence[Any], end: Any) -> list[Any]:
        """Return the parts of a bucket."""
        parts = self.parts(bucket)
        flat = [
            self._new("stablehlo.reshape", _line(value.type, elements_of(value)), [value], end)
            for value in values
        ]
        element = ir.RankedTensorType(values[0].type).element_type
        total = parts.elements * parts.number
        if spare := total - bucket.elements:
            zeros = zeros_of(ir.RankedTensorType.get([spare], element))
            flat.append(self._new("stablehlo.constant", zeros.type, [], end, value=zeros))
        whole = flat[0]
        if len(flat) > 1:
            whole = self._joined(flat, ir.RankedTensorType.get([total], element), end)
        line = ir.RankedTensorType.get([parts.elements], element)
        if parts.number == 1:
            return [whole]
        return [self._slice(whole, line, at * parts.elements, end) for at in range(parts.number)]

    def _unpacked(self, bucket: Bucket, parts: list[Any], end: Any) -> Iterator[tuple[Any, Any]]:
        """Yield the values of a bucket and their sums."""
        element = ir.RankedTensorType(parts[0].type).element_type
        each = ir.RankedTensorType(parts[0].type).shape[0]
        whole = parts[0]
        if len(parts) > 1:
            whole = self._joined(parts, ir.RankedTensorType.get([each * len(parts)], element), end)
        start = 0
        for value in bucket.values:
            size = elements_of(value)
            line = self._slice(whole, _line(value.type, size), start, end)
            yield value, self._new("stablehlo.reshape", value.type, [line], end)
            start += size

    def _joined(self, parts: list[Any], type_: Any, end: Any) -> Any:
        along = ir.IntegerAttr.get(ir.IntegerType.get_signless(64), 0)
        return self._new("stablehlo.concatenate", type_, parts, end, dimension=along)

    def _slice(self, whole: Any, type_: Any, start: int, end: Any) -> Any:
        size = ir.RankedTensorType(type_).shape[0]
        numbers = {"start_indices": start, "limit_indices": start + size, "strides": 1}
        attributes = {name: ir.DenseI64ArrayAttr.get([n]) for name, n in numbers.items()}
        return self._new("stablehlo.slice", type_, [whole], end, **attributes)

    def _new(self, name: str, type_: Any, operands: list[Any], end: Any, **attributes: Any) -> Any:
        location = self._flat.main.location
        made = ir.Operation.create(name, [type_], operands, attributes, loc=location, ip=end)
        return made.results[0]


def inner_spec(said: str, index: int, mesh: Mesh, shape: tuple[int, ...]) -> PartitionSpec:
    """Return sharding `index` of an attribute in MLIR's words as a spec on an island's mesh.

    Where it names a part of an axis, or an axis that does not divide the dimension, the dimension is whole.
    """
    found = re.findall(r"<@[^,<>]*, \[((?:\{[^{}]*\}(?:p\d+)?(?:, )?)*)\]", said)
    if mesh.size == 1 or index >= len(found):
        return PartitionSpec()
    lists = re.findall(r"\{([^{}]*)\}", found[index])
    axes = [() if ":" in entry else tuple(re.findall(r'"([^"]*)"', entry)) for entry in lists]
    spec = PartitionSpec(*(names or None for names in axes))
    try:
        NamedSharding(mesh, spec).core.check(shape)
    except ShardingError:
        return PartitionSpec()
    return spec


def _shardings(said: Sequence[tuple[Any, PartitionSpec]]) -> dict[int, dict[str, Any]]:
    """Return the attributes of arguments or results with these specs."""
    described = {}
    for at, (aval, spec) in enumerate(said):
        entries = [*spec, *([None] * (aval.ndim - len(spec)))]
        axes = [(one,) if isinstance(one, str) else one or () for one in entries]
        described[at] = {SHARDING: sharding_of("mesh", axes)}
    return described


def _tensor(aval: Any) -> Any:
    return ir.RankedTensorType.get(list(aval.shape), mlir.dtype_to_ir_type(np.dtype(aval.dtype)))


def _line(type_: Any, elements: int) -> Any:
    return ir.RankedTensorType.get([elements], ir.RankedTensorType(type_).element_type)


def _dtype_of(element: Any) -> np.dtype[Any]:
    """Return the dtype of an element type in MLIR."""
    return dtype_of(BY_MLIR[str(element)])
