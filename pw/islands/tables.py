"""What a value is on each device, if it depends on nothing but the number of the device."""

from __future__ import annotations

from typing import Any

import numpy as np
from jax.extend.mlir import ir

from pw.islands.flat import shape_of

Table = np.ndarray[Any, Any]
"""A row for each partition."""

_BINARY = {
    "stablehlo.add": np.add,
    "stablehlo.subtract": np.subtract,
    "stablehlo.multiply": np.multiply,
    "stablehlo.divide": np.floor_divide,
    "stablehlo.remainder": np.remainder,
}


class Tables:
    """Evaluates integers for each of so many partitions."""

    def __init__(self, partitions: int) -> None:
        self._partitions = partitions
        self._tables: dict[Any, Table | None] = {}

    def of(self, value: Any) -> Table | None:
        """Return what a value is on each device; None if that is not known."""
        if isinstance(value.owner, ir.Block):
            return None
        if value not in self._tables:
            self._tables[value] = self._evaluated(value.owner.operation)
        return self._tables[value]

    def _evaluated(self, one: Any) -> Table | None:
        if one.name == "stablehlo.partition_id":
            return np.arange(self._partitions)
        if one.name == "stablehlo.constant":
            return self._constant(one)
        shape = shape_of(one.results[0]) if len(one.results) == 1 else ()
        if one.name in ("stablehlo.reshape", "stablehlo.convert"):
            table = self.of(one.operands[0])
            return None if table is None else table.reshape(self._partitions, *shape)
        if one.name in _BINARY:
            left, right = self.of(one.operands[0]), self.of(one.operands[1])
            if left is None or right is None or (one.name in _DIVIDES and not right.all()):
                return None
            result: Table = _BINARY[one.name](left, right)
            return result
        if one.name == "stablehlo.dynamic_slice":
            tables = [self.of(value) for value in one.operands]
            if any(table is None for table in tables):
                return None
            operand, *starts = tables
            return np.stack([_row(operand, starts, at, shape) for at in range(self._partitions)])
        return None

    def _constant(self, one: Any) -> Table | None:
        dense = ir.DenseElementsAttr(one.attributes["value"])
        kind = ir.RankedTensorType(dense.type).element_type
        if not isinstance(kind, ir.IntegerType) or kind.width < 8:
            return None
        value = np.array(ir.DenseIntElementsAttr(one.attributes["value"]), np.int64)
        table = np.broadcast_to(value, shape_of(one.results[0]))
        return np.broadcast_to(table, (self._partitions, *table.shape))


_DIVIDES = {"stablehlo.divide", "stablehlo.remainder"}


def _row(table: Any, starts: list[Any], at: int, shape: tuple[int, ...]) -> Table:
    """Return a slice of a device's value."""
    row = table[at]
    for dimension, (start, size) in enumerate(zip(starts, shape, strict=True)):
        first = int(np.clip(start[at], 0, row.shape[dimension] - size))
        row = row.take(range(first, first + size), dimension)
    result: Table = row
    return result
