"""Writes operations of StableHLO at the end of a block, for the devices of one island."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.extend.mlir import ir
from jax.interpreters import mlir

from pw.islands.assignment import Assignment
from pw.islands.flat import element_of, elements_of, entry, shape_of
from pw.islands.groups import Groups, dense


class Emit:
    """New operations of a piece.

    Args:
        end: where they are inserted.
        location: theirs.
        assignment: which island each partition is on.
        island: the one whose piece it is.
        number: the argument with the number of the island, int32; None if the piece has none.
    """

    def __init__(
        self, end: Any, location: Any, assignment: Assignment, island: int, number: Any = None
    ) -> None:
        self.end = end
        self.location = location
        self.assignment = assignment
        self.island = island
        self._number = number
        self._channels = itertools.count(1)
        self._place: Any = None
        self.wants_number = False
        """The code would be the same on all islands, if it had their number."""

    @property
    def devices(self) -> int:
        """Return the number of the island's devices."""
        return self.assignment.devices(self.island)

    def new(self, name: str, type_: Any, operands: Sequence[Any], **attributes: Any) -> Any:
        """Add an operation with one result; return the result."""
        operation = ir.Operation.create(
            name, [type_], list(operands), attributes, loc=self.location, ip=self.end
        )
        return operation.results[0]

    # --- values -----------------------------------------------------------------------------------

    def constant(self, value: np.ndarray[Any, Any] | np.generic) -> Any:
        """Return a constant."""
        array: Any = np.asarray(value, order="C")
        kind = mlir.dtype_to_ir_type(array.dtype)
        value_of: Any = ir.DenseElementsAttr.get(array, type=kind, shape=array.shape)
        return self.new("stablehlo.constant", value_of.type, [], value=value_of)

    def flag(self, rows: Sequence[bool]) -> Any:
        """Return whether this device's row of a table, with a row for each partition, is true."""
        number = self.table(np.array(rows, np.int32))
        one_bit = ir.RankedTensorType.get([], ir.IntegerType.get_signless(1))
        return self.new(
            "stablehlo.compare",
            one_bit,
            [number, self.constant(np.int32(0))],
            comparison_direction=ir.Attribute.parse("#stablehlo<comparison_direction NE>"),
        )

    def zeros(self, type_: Any) -> Any:
        """Return zeros of a type."""
        kind = type_.element_type
        if isinstance(kind, ir.ComplexType):  # Python has no attributes of complex numbers
            part = self.zeros(ir.RankedTensorType.get(type_.shape, kind.element_type))
            return self.new("stablehlo.complex", type_, [part, part])
        if isinstance(kind, ir.IntegerType):
            zero = "false" if kind.width == 1 else "0"
        else:
            zero = "0.0"
        value_of = ir.Attribute.parse(f"dense<{zero}> : {type_}")
        return self.new("stablehlo.constant", type_, [], value=value_of)

    def token(self) -> Any:
        """Return a token."""
        return self.new("stablehlo.create_token", ir.Type.parse("!stablehlo.token"), [])

    def reshape(self, value: Any, shape: Sequence[int]) -> Any:
        """Return a value in another shape."""
        if shape_of(value) == tuple(shape):
            return value
        return self.new("stablehlo.reshape", self.type(shape, value), [value])

    def concat(self, values: Sequence[Any], along: int) -> Any:
        """Return values side by side."""
        if len(values) == 1:
            return values[0]
        shape = list(shape_of(values[0]))
        shape[along] = sum(shape_of(value)[along] for value in values)
        return self.new(
            "stablehlo.concatenate", self.type(shape, values[0]), values, dimension=_i64(along)
        )

    def line(self, values: Sequence[Any], size: int) -> Any:
        """Return the elements of values one after the other, and zeros behind them: `size` in sum."""
        parts = [flat(self, value) for value in values]
        if spare := size - sum(map(elements_of, values)):
            parts.append(self.zeros(self.type((spare,), values[0])))
        return self.concat(parts, 0)

    def stack(self, values: Sequence[Any]) -> Any:
        """Return values side by side in a new first dimension."""
        return self.concat([self.reshape(value, (1, *shape_of(value))) for value in values], 0)

    def slice(self, value: Any, along: int, start: int, stop: int) -> Any:
        """Return a part of a value along a dimension."""
        shape = list(shape_of(value))
        if (start, stop) == (0, shape[along]):
            return value
        starts, limits = [0] * len(shape), list(shape)
        starts[along], limits[along] = start, stop
        shape[along] = stop - start
        return self.new(
            "stablehlo.slice",
            self.type(shape, value),
            [value],
            start_indices=_array(starts),
            limit_indices=_array(limits),
            strides=_array([1] * len(shape)),
        )

    def row(self, value: Any, at: int) -> Any:
        """Return an element along the first dimension, without that dimension."""
        return self.reshape(self.slice(value, 0, at, at + 1), shape_of(value)[1:])

    def parts(self, value: Any, along: int, count: int) -> list[Any]:
        """Return the equal parts of a value along a dimension."""
        size = shape_of(value)[along] // count
        return [self.slice(value, along, at * size, (at + 1) * size) for at in range(count)]

    def row_at(self, value: Any, index: Any) -> Any:
        """Return the element along the first dimension that `index`, an int32, says."""
        shape = shape_of(value)
        zero = self.constant(np.int32(0))
        sizes = (1, *shape[1:])
        row = self.new(
            "stablehlo.dynamic_slice",
            self.type(sizes, value),
            [value, index, *[zero] * (len(shape) - 1)],
            slice_sizes=_array(sizes),
        )
        return self.reshape(row, shape[1:])

    def select(self, flag: Any, left: Any, right: Any) -> Any:
        """Return one of two values."""
        return self.new("stablehlo.select", left.type, [flag, left, right])

    def fraction(self, value: Any, copies: Groups) -> Any:
        """Return this device's part of the elements of a value that all devices of a group hold."""
        width, size = len(copies[0]), elements_of(value)
        each = -(-size // width)
        line = self.line([value], each * width)
        rank = {position: at for group in copies for at, position in enumerate(group)}
        own = np.array([rank[at] for at in self.assignment.position], np.int32)
        return self.row_at(self.reshape(line, (width, each)), self.table(own))

    def convert(self, value: Any, element: Any) -> Any:
        """Return a value with elements of another type."""
        if element_of(value) == element:
            return value
        return self.new(
            "stablehlo.convert", ir.RankedTensorType.get(list(shape_of(value)), element), [value]
        )

    def type(self, shape: Sequence[int], like: Any) -> Any:
        """Return the type of a tensor with the elements of a value."""
        return ir.RankedTensorType.get(list(shape), element_of(like))

    # --- which device it is -----------------------------------------------------------------------

    def partition(self) -> Any:
        """Return the number of the device among all, ui32."""
        unsigned = ir.IntegerType.get_unsigned(32)
        return self.convert(
            self.table(np.arange(self.assignment.partitions, dtype=np.int32)), unsigned
        )

    def table(self, rows: np.ndarray[Any, Any]) -> Any:
        """Return the row of a table, with a row for each partition, that is this device's."""
        mine = rows[self.assignment.members[self.island]]
        if (rows == rows[:1]).all():
            return self.constant(mine[0])
        self.wants_number = self.assignment.is_even
        if self._number is None:
            return self.row_at(self.constant(mine), self._own_place())
        order = [one for own in self.assignment.members for one in own]
        return self.row_at(self.constant(rows[order]), self._own_place())

    def _own_place(self) -> Any:
        """Return the index of the device: on the island, or island after island, int32."""
        if self._place is None:
            signed = ir.IntegerType.get_signless(32)
            place = self.constant(np.int32(0))
            if self.devices > 1:
                unsigned = ir.RankedTensorType.get([], ir.IntegerType.get_unsigned(32))
                place = self.convert(self.new("stablehlo.partition_id", unsigned, []), signed)
            if self._number is not None:
                each = self.constant(np.int32(self.devices))
                start = self.new("stablehlo.multiply", each.type, [self._number, each])
                place = self.new("stablehlo.add", start.type, [start, place])
            self._place = place
        return self._place

    # --- collectives of the island ------------------------------------------------------------------

    def all_gather(self, value: Any, groups: Groups) -> Any:
        """Return the values of each group of positions, one after the other in the first dimension."""
        width = len(groups[0])
        if width == 1:
            return value
        shape = shape_of(value)
        return self.new(
            "stablehlo.all_gather",
            self.type((width * shape[0], *shape[1:]), value),
            [value],
            all_gather_dim=_i64(0),
            use_global_device_ids=ir.UnitAttr.get(),
            **self._among(groups),
        )

    def all_to_all(self, value: Any, groups: Groups) -> Any:
        """Exchange: row r of the first dimension goes to member r of the group."""
        if len(groups[0]) == 1:
            return value
        return self.new(
            "stablehlo.all_to_all",
            value.type,
            [value],
            split_dimension=_i64(0),
            concat_dimension=_i64(0),
            split_count=_i64(len(groups[0])),
            **self._among(groups),
        )

    def permute(self, value: Any, pairs: Groups) -> Any:
        """Return the value of the device that sends here, zeros if there is none."""
        return self.new(
            "stablehlo.collective_permute",
            value.type,
            [value],
            source_target_pairs=dense(pairs),
            channel_handle=self._channel(),
        )

    def all_reduce(self, value: Any, groups: Groups, kind: str) -> Any:
        """Return the values of a group, combined by an operation of StableHLO."""
        if len(groups[0]) == 1:
            return value
        return self._reducing(
            "stablehlo.all_reduce",
            value.type,
            value,
            kind,
            use_global_device_ids=ir.UnitAttr.get(),
            **self._among(groups),
        )

    def reduce_scatter(self, value: Any, groups: Groups, kind: str) -> Any:
        """Return this device's part, along the first dimension, of what `all_reduce` returns."""
        width = len(groups[0])
        if width == 1:
            return value
        shape = shape_of(value)
        return self._reducing(
            "stablehlo.reduce_scatter",
            self.type((shape[0] // width, *shape[1:]), value),
            value,
            kind,
            scatter_dimension=_i64(0),
            use_global_device_ids=ir.UnitAttr.get(),
            **self._among(groups),
        )

    def combine(self, kind: str, left: Any, right: Any) -> Any:
        """Combine two values element by element."""
        return self.new(kind, left.type, [left, right])

    def fold(self, values: Sequence[Any], like: Any) -> Any:
        """Combine values, one after the other, by the reduction of the operation `like`."""
        total = values[0]
        for value in values[1:]:
            total = self._combined(total, value, like)
        return total

    def _combined(self, left: Any, right: Any, like: Any) -> Any:
        """Combine by a reducer of scalars: its operations, on whole tensors."""
        body = entry(like)
        shape = shape_of(left)
        values = dict(zip(body.arguments, (left, right), strict=True))
        *steps, last = [one.operation for one in body.operations]
        for step in steps:
            operands = [values[value] for value in step.operands]
            types = [
                ir.RankedTensorType.get(list(shape), element_of(result)) for result in step.results
            ]
            attributes = {name: step.attributes[name] for name in step.attributes}
            if step.name == "stablehlo.constant":
                dense = ir.DenseElementsAttr(step.attributes["value"])
                attributes["value"] = ir.DenseElementsAttr.get_splat(
                    types[0], dense.get_splat_value()
                )
            copy = ir.Operation.create(
                step.name, types, operands, attributes, loc=self.location, ip=self.end
            )
            values.update(zip(step.results, copy.results, strict=True))
        return values[last.operands[0]]

    def _reducing(self, name: str, type_: Any, value: Any, kind: str, **attributes: Any) -> Any:
        operation = ir.Operation.create(
            name, [type_], [value], attributes, regions=1, loc=self.location, ip=self.end
        )
        scalar = ir.RankedTensorType.get([], element_of(value))
        block = ir.Block.create_at_start(operation.regions[0], [scalar] * 2, [self.location] * 2)
        inside = ir.InsertionPoint(block)
        both = list(block.arguments)
        total = ir.Operation.create(kind, [scalar], both, {}, loc=self.location, ip=inside)
        ir.Operation.create(
            "stablehlo.return", [], list(total.results), {}, loc=self.location, ip=inside
        )
        return operation.results[0]

    def _among(self, groups: Groups) -> dict[str, Any]:
        return {"replica_groups": dense(groups), "channel_handle": self._channel()}

    def _channel(self) -> Any:
        return ir.Attribute.parse(
            f"#stablehlo.channel_handle<handle = {next(self._channels)}, type = 1>"
        )

    def here(self, one: Any) -> None:
        """Let a collective inside of the island, which was copied, name the island's own devices."""
        name = (
            "source_target_pairs" if "source_target_pairs" in one.attributes else "replica_groups"
        )
        members = self.assignment.members[self.island]
        rows = np.array(ir.DenseIntElementsAttr(one.attributes[name]))
        own = [
            [self.assignment.position[int(each)] for each in row if each >= 0]
            for row in rows
            if int(row[0]) in members
        ]
        one.attributes[name] = dense(own)
        one.attributes["channel_handle"] = self._channel()


def flat(emit: Emit, value: Any) -> Any:
    """Return the elements of a value in one dimension."""
    return emit.reshape(value, (elements_of(value),))


def _i64(value: int) -> Any:
    return ir.IntegerAttr.get(ir.IntegerType.get_signless(64), value)


def _array(values: Sequence[int]) -> Any:
    return ir.DenseI64ArrayAttr.get(list(values))
