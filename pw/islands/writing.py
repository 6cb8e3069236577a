"""Makes a module of each piece, for the devices of an island.

A piece is one manual computation over the mesh of an island: its operations are those of one device. So XLA
has nothing to divide there, and compiles what it was given.

Values between pieces are *stacked*, the shards of an island's devices side by side in the first dimension;
those that are equal on all devices of an island are kept once. Arguments and results lie as their owner
says.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax.extend.mlir import ir, passmanager
from jax.interpreters import mlir

from pw.core.dtypes import BY_MLIR
from pw.core.jax_private.stablehlo import portable
from pw.core.programs.stablehlo import Stablehlo, encode
from pw.core.sharding import dtype_of
from pw.islands import sums
from pw.islands.assignment import Assignment
from pw.islands.cutting import Cut, Piece
from pw.islands.emit import Emit, flat
from pw.islands.exchanges import Exchange, Wire
from pw.islands.flat import calls, element_of, is_token, replace_operands, shape_of, used_by, walk
from pw.islands.groups import NAMES, REDUCE, Groups, is_crossing
from pw.islands.labels import LabelsOf
from pw.islands.plan import Code, Lies
from pw.islands.sums import Bucket

ENDED = "ended"

Mesh = dict[str, int]
"""The axes of an island's devices with their sizes."""


@dataclass(frozen=True)
class Sides:
    """The layouts of a function's arguments and results on its islands."""

    meshes: tuple[Mesh, ...]
    arguments: tuple[tuple[Lies, ...], ...]
    """Layout of each argument on each island."""
    results: tuple[tuple[Lies, ...], ...]


class Writer:
    """Writes the pieces of one function."""

    def __init__(
        self, main: Any, meshes: Sequence[Mesh], assignment: Assignment, labels: LabelsOf, name: str
    ) -> None:
        self._location = main.location
        self._meshes = tuple(meshes)
        self._assignment = assignment
        self._labels = labels
        self.name = name

    # --- how values lie -----------------------------------------------------------------------------

    def lies(self, shape: Sequence[int], element: Any, island: int, *, is_equal: bool) -> Lies:
        """Return how a value of this shape on each device lies between pieces."""
        dtype = dtype_of(BY_MLIR[str(element)])
        devices = self._assignment.devices(island)
        if is_equal or devices == 1:
            return Lies(tuple(shape), dtype, ())
        first, *rest = shape or (1,)
        return Lies((devices * first, *rest), dtype, (tuple(self._meshes[island]),))

    def between(self, value: Any, island: int) -> Lies:
        """Return how a value of a function lies between its pieces."""
        return self.lies(shape_of(value), element_of(value), island, is_equal=self.is_equal(value))

    def is_equal(self, value: Any) -> bool:
        """Whether a value is the same on all devices of each island."""
        if is_token(value):
            return True
        labels = self._labels[value]
        return all(len({labels[one] for one in own}) == 1 for own in self._assignment.members)

    def of_bucket(self, bucket: Bucket, island: int) -> Lies:
        """Return how a part of a bucket lies."""
        is_equal = bucket.is_equal_on(self._assignment.devices(island))
        return self.lies((bucket.each,), bucket.element, island, is_equal=is_equal)

    def of_wire(self, exchange: Exchange, wire: Wire, island: int) -> Lies:
        """Return how a wire lies."""
        if (copies := self.copies(exchange, wire)) is not None:
            each = -(-math.prod(wire.shape) // len(copies[0]))
            return self.lies((each,), element_of(exchange.operand), island, is_equal=False)
        is_equal = wire.is_equal or (wire.follows and self.is_equal(exchange.operand))
        return self.lies(wire.shape, element_of(exchange.operand), island, is_equal=is_equal)

    def copies(self, exchange: Exchange, wire: Wire) -> Groups | None:
        """Return the positions that hold equal values of a large wire: each sends a fraction of it."""
        dtype = dtype_of(BY_MLIR[str(element_of(exchange.operand))])
        if not wire.follows or math.prod(wire.shape) * dtype.itemsize <= sums.SMALL_BYTES:
            return None
        labels = self._labels[exchange.operand]
        by_island = []
        for own in self._assignment.members:
            equal: dict[int, list[int]] = {}
            for position, partition in enumerate(own):
                equal.setdefault(labels[partition], []).append(position)
            by_island.append(tuple(map(tuple, equal.values())))
        sizes = {len(group) for groups in by_island for group in groups}
        return (
            by_island[0] if len(set(by_island)) == 1 and len(sizes) == 1 and sizes != {1} else None
        )

    # --- code -------------------------------------------------------------------------------------

    def piece(
        self,
        cut: Cut,
        piece: Piece,
        island: int,
        inputs: Sequence[tuple[Any, Lies]],
        outputs: Sequence[tuple[Any, Lies]],
        name: str,
        donated: Sequence[int],
    ) -> tuple[Code, bool]:
        """Write a piece for an island.

        Args:
            cut: has the piece.
            piece: of the function.
            island: its number.
            inputs: what each input is: a value, (bucket, part) or (exchange, source); and how it lies.
            outputs: what each output is: a value, ("whole", value), (bucket, part), (exchange, wire) or
                (ENDED, piece), which says no more than that the piece has ended.
            name: for the user.
            donated: positions of inputs.

        Returns the code, and whether it has the number of the island as its last input.
        """

        def body(emit: Emit, arguments: Sequence[Any]) -> list[Any]:
            return _Body(self, cut, piece, emit).write(
                dict(zip((what for what, _ in inputs), arguments, strict=False)),
                [what for what, _ in outputs],
            )

        lies = [one for _, one in inputs], [one for _, one in outputs]
        return self._code(name, island, *lies, donated, body)

    def adder(self, bucket: Bucket, island: int) -> Code:
        """Write the computation that adds the islands' parts of a bucket."""
        lies = self.of_bucket(bucket, island)
        count = bucket.sum.aligned.spread
        kind = bucket.sum.kind.partition(".")[2]
        code, _ = self._code(
            f"{self.name} ({kind} over islands)",
            island,
            [lies] * count,
            [lies],
            (),
            lambda emit, parts: [bucket.add(emit, parts)],
        )
        return code

    def _code(
        self,
        name: str,
        island: int,
        inputs: Sequence[Lies],
        outputs: Sequence[Lies],
        donated: Sequence[int],
        body: Callable[[Emit, Sequence[Any]], list[Any]],
    ) -> tuple[Code, bool]:
        module, emit = self._module(island, inputs, outputs, donated, body, has_number=False)
        has_number = emit.wants_number
        if has_number:
            inputs = [*inputs, Lies((), np.dtype(np.int32), ())]
            module, _ = self._module(island, inputs, outputs, donated, body, has_number=True)
        # Equal code has equal artifacts, wherever it is in a script.
        passmanager.PassManager.parse("builtin.module(strip-debuginfo)").run(module.operation)
        artifact = encode(Stablehlo(portable(module)))
        code = Code(
            name, artifact, tuple(inputs), tuple(outputs), tuple(donated), calls(module.operation)
        )
        return code, has_number

    def _module(
        self,
        island: int,
        inputs: Sequence[Lies],
        outputs: Sequence[Lies],
        donated: Sequence[int],
        body: Callable[[Emit, Sequence[Any]], list[Any]],
        *,
        has_number: bool,
    ) -> tuple[Any, Emit]:
        mesh, location = self._meshes[island], self._location
        devices = self._assignment.devices(island)
        axes = ", ".join(f'"{name}"={size}' for name, size in mesh.items())
        declaration = f"sdy.mesh @mesh = <[{axes}]>" if devices > 1 else ""
        module = ir.Module.parse(
            f"module @jit_{''.join(c if c.isalnum() else '_' for c in self.name)} attributes {{"
            f"mhlo.num_partitions = {devices} : i32, mhlo.num_replicas = 1 : i32}} {{\n{declaration}\n}}"
        )
        types = [[_tensor(one.shape, one) for one in side] for side in (inputs, outputs)]
        function = ir.Operation.create(
            "func.func",
            attributes={
                "sym_name": ir.StringAttr.get("main"),
                "sym_visibility": ir.StringAttr.get("public"),
                "function_type": ir.TypeAttr.get(ir.FunctionType.get(*types)),
                "arg_attrs": _described(inputs, devices, donated),
                "res_attrs": _described(outputs, devices, ()),
            },
            regions=1,
            loc=location,
            ip=ir.InsertionPoint(module.body),
        )
        block = ir.Block.create_at_start(function.regions[0], types[0], [location] * len(inputs))
        end = ir.InsertionPoint(block)
        arguments = list(block.arguments)
        manual = None
        if devices > 1:
            local = [
                [_tensor(_local(one, mesh), one) for one in side] for side in (inputs, outputs)
            ]
            names = ", ".join(f'"{name}"' for name in mesh)
            manual = ir.Operation.create(
                "sdy.manual_computation",
                types[1],
                arguments,
                {
                    "in_shardings": _per_value(inputs),
                    "out_shardings": _per_value(outputs),
                    "manual_axes": ir.Attribute.parse(f"#sdy<manual_axes{{{names}}}>"),
                },
                regions=1,
                loc=location,
                ip=end,
            )
            inner = ir.Block.create_at_start(manual.regions[0], local[0], [location] * len(inputs))
            arguments = list(inner.arguments)
        inside = ir.InsertionPoint(inner) if manual is not None else end
        number = arguments[-1] if has_number else None
        emit = Emit(inside, location, self._assignment, island, number)
        results = body(emit, arguments)
        shaped = [
            emit.reshape(value, _local(one, mesh))
            for value, one in zip(results, outputs, strict=True)
        ]
        if manual is not None:
            ir.Operation.create("sdy.return", [], shaped, {}, loc=location, ip=inside)
            shaped = list(manual.results)
        ir.Operation.create("func.return", [], shaped, {}, loc=location, ip=end)
        return module, emit


class _Body:
    """The operations of a piece on an island."""

    def __init__(self, writer: Writer, cut: Cut, piece: Piece, emit: Emit) -> None:
        self._writer = writer
        self._cut = cut
        self._piece = piece
        self._emit = emit
        self._values: dict[Any, Any] = {}
        self._sums: dict[Any, Any] = {}

    def write(self, arguments: dict[Any, Any], outputs: Sequence[Any]) -> list[Any]:
        """Write all operations; return the values of the outputs."""
        emit, piece = self._emit, self._piece
        for value in piece.inputs:
            self._values[value] = (
                emit.token() if is_token(value) else emit.reshape(arguments[value], shape_of(value))
            )
        for bucket in piece.sums:
            count = len(bucket.sums(emit.island))
            parts = [emit.reshape(arguments[bucket, at], (bucket.each,)) for at in range(count)]
            self._sums.update(bucket.unpack(emit, parts))
        for exchange in piece.takes:
            arrived = {}
            for source in exchange.needs(emit.island):
                wire = exchange.wires[source[0]]
                arrived[source] = self._gathered_wire(exchange, wire, arguments[exchange, source])
            values = exchange.unpack_all(emit, arrived)
            self._values.update(zip(exchange.results, values, strict=True))
        for one in piece.operations:
            self._copy(one)
        packed: dict[Any, Any] = {}
        for exchange in piece.sends:
            wires = exchange.pack_all(emit, [self._find(value) for value in exchange.operands])
            for at, (wire, value) in enumerate(zip(exchange.wires, wires, strict=True)):
                copies = self._writer.copies(exchange, wire)
                packed[exchange, at] = value if copies is None else emit.fraction(value, copies)
        if piece.makes is not None:
            parts = piece.makes.pack(emit, [self._find(v, total=False) for v in piece.makes.values])
            packed.update({(piece.makes, at): part for at, part in enumerate(parts)})
        results = []
        for what in outputs:
            if what in packed:
                results.append(packed[what])
            elif isinstance(what, tuple) and what[0] == ENDED:
                results.append(emit.constant(np.bool_(0)))
            elif isinstance(what, tuple):
                results.append(self._find(what[1]))
            else:
                results.append(self._find(what, total=False))
        # A computation's results are there when it has ended, and so has what a token stands for.
        none = ir.RankedTensorType.get([0], ir.IntegerType.get_signless(1))
        return [emit.zeros(none) if is_token(value) else value for value in results]

    def _gathered_wire(self, exchange: Exchange, wire: Wire, arrived: Any) -> Any:
        """Return a wire as it was before each device has sent a fraction of it."""
        copies = self._writer.copies(exchange, wire)
        if copies is not None:
            arrived = self._emit.all_gather(flat(self._emit, arrived), copies)
            arrived = self._emit.slice(arrived, 0, 0, math.prod(wire.shape))
        return self._emit.reshape(arrived, wire.shape)

    def _find(self, value: Any, *, total: bool = True) -> Any:
        if total and value in self._sums:
            return self._sums[value]
        if value not in self._values:
            self._copy(self._cut.maker(value))  # a cheap one
        return self._values[value]

    def _copy(self, one: Any) -> None:
        emit = self._emit
        if one.name == "stablehlo.partition_id":
            self._values[one.results[0]] = emit.partition()
            return
        assignment = emit.assignment
        if one.name == REDUCE and is_crossing(one, assignment):
            # Partial, until it is reduced.
            self._values[one.results[0]] = self._find(one.operands[0])
            return
        total = self._cut.sums.reduced.get(one.results[0]) if len(one.results) == 1 else None
        if total is not None and total.along is not None:  # all parts, until they are added up
            self._values[one.results[0]] = self._find(one.operands[0], total=False)
            return
        used = dict.fromkeys(used_by(one))
        values = {value: self._find(value) for value in used}
        masked = {
            at: self._counted_once(values[one.operands[at]], groups)
            for other, at, groups in self._cut.sums.masked
            if other == one
        }
        has_id = any(inner.name == "stablehlo.partition_id" for inner in walk(one))
        ids = emit.partition() if has_id else None
        copied = one.clone(emit.end)
        for inner in (copied, *walk(copied)):
            replace_operands(inner, values)
        for at, value in masked.items():
            copied.operands[at] = value
        for inner in [copied, *walk(copied)]:
            if inner.name == "stablehlo.partition_id":
                inner.results[0].replace_all_uses_with(ids)
                inner.erase()
            elif inner.name == REDUCE and is_crossing(inner, assignment):
                inner.results[0].replace_all_uses_with(inner.operands[0])
                inner.erase()
            elif inner.name in NAMES:
                emit.here(inner)
        self._values.update(zip(one.results, copied.results, strict=True))

    def _counted_once(self, value: Any, groups: Groups) -> Any:
        """Return a value that is zero on all devices of a group but the first."""
        first = {group[0] for group in groups}
        partitions = range(self._emit.assignment.partitions)
        flag = self._emit.flag([one in first for one in partitions])
        return self._emit.select(flag, value, self._emit.zeros(value.type))


def _local(lies: Lies, mesh: Mesh) -> tuple[int, ...]:
    """Return the shape of a device's shard."""
    shape = list(lies.shape)
    for at, names in enumerate(lies.axes):
        for name in names:
            shape[at] //= mesh[name]
    return tuple(shape)


def _tensor(shape: Sequence[int], lies: Lies) -> Any:
    return ir.RankedTensorType.get(list(shape), mlir.dtype_to_ir_type(lies.dtype))


def _sharding(lies: Lies) -> str:
    axes = [*lies.axes, *[()] * (len(lies.shape) - len(lies.axes))]
    entries = ["{" + ", ".join(f'"{name}"' for name in names) + "}" for names in axes]
    return f"<@mesh, [{', '.join(entries)}]>"


def _per_value(side: Sequence[Lies]) -> Any:
    return ir.Attribute.parse(f"#sdy.sharding_per_value<[{', '.join(map(_sharding, side))}]>")


def _described(side: Sequence[Lies], devices: int, donated: Sequence[int]) -> Any:
    """Return the attributes of arguments or results."""
    dictionaries = []
    for at, lies in enumerate(side):
        attributes: dict[str, Any] = {}
        if devices > 1:
            attributes["sdy.sharding"] = ir.Attribute.parse(f"#sdy.sharding{_sharding(lies)}")
        if at in donated:
            attributes["jax.buffer_donor"] = ir.BoolAttr.get(True)
        dictionaries.append(ir.DictAttr.get(attributes))
    return ir.ArrayAttr.get(dictionaries)
