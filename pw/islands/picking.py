"""The exchange of a collective whose groups do not lie the same way on all islands."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from pw.islands.emit import Emit
from pw.islands.exchanges import BROADCAST, GATHER, SCATTER, Exchange, Source, Wire
from pw.islands.flat import shape_of
from pw.islands.groups import PERMUTE, REDUCE


class PickFromAll(Exchange):
    """Any collective: every island gets all values, and each device picks those of its group."""

    @property
    def wires(self) -> list[Wire]:
        """All values of the island."""
        devices = max(map(len, self._assignment.members))
        return [Wire((devices, *shape_of(self.operand)), is_equal=True)]

    def needs(self, island: int) -> list[Source]:
        """The values of all islands."""
        return [(0, other) for other in range(self._assignment.count)]

    def pack(self, emit: Emit, operand: Any) -> list[Any]:
        """Gather the values of the island."""
        rows = emit.all_gather(emit.stack([operand]), (tuple(range(emit.devices)),))
        missing = self.wires[0].shape[0] - emit.devices
        if missing:
            type_ = emit.type((missing, *shape_of(operand)), operand)
            rows = emit.concat([rows, emit.zeros(type_)], 0)
        return [rows]

    def unpack(self, emit: Emit, arrived: Mapping[Source, Any]) -> Any:
        """Pick the values of the group, and do what the collective does."""
        assignment = self._assignment
        each = self.wires[0].shape[0]
        rows = emit.concat([arrived[source] for source in self.needs(emit.island)], 0)
        rank = [
            island * each + place
            for island, place in zip(assignment.islands, assignment.position, strict=True)
        ]
        if self.operation.name == PERMUTE:
            return self._permuted(emit, rows, rank)
        groups: dict[int, tuple[int, ...]] = {one: group for group in self._groups for one in group}
        group_of = [groups.get(one, (one,)) for one in range(assignment.partitions)]
        width = max(map(len, self._groups))
        if self.operation.name == BROADCAST:
            width = 1

        def member(at: int) -> Any:
            index = np.array([rank[group[at % len(group)]] for group in group_of], np.int32)
            return emit.row_at(rows, emit.table(index))

        values = [member(at) for at in range(width)]
        own = np.array([group.index(one) for one, group in enumerate(group_of)], np.int32)
        if self.operation.name == BROADCAST:
            return values[0]
        if self.operation.name == GATHER:
            return emit.concat(values, self._number("all_gather_dim"))
        if self.operation.name == REDUCE:
            result = values[0]
            for at, value in enumerate(values[1:], 1):
                total = emit.fold([result, value], self.operation)
                is_member = [at < len(group) for group in group_of]
                result = (
                    total if all(is_member) else emit.select(emit.flag(is_member), total, result)
                )
            return result
        split = self._number(
            "scatter_dimension" if self.operation.name == SCATTER else "split_dimension"
        )
        place = emit.table(own)
        chunks = [
            emit.row_at(emit.stack(emit.parts(value, split, width)), place) for value in values
        ]
        if self.operation.name == SCATTER:
            return emit.fold(chunks, self.operation)
        return emit.concat(chunks, self._number("concat_dimension"))

    def _permuted(self, emit: Emit, rows: Any, rank: list[int]) -> Any:
        source = {target: rank[origin] for origin, target in self._groups}
        index = [source.get(one, -1) for one in range(self._assignment.partitions)]
        row = emit.row_at(rows, emit.table(np.maximum(np.array(index, np.int32), 0)))
        if -1 not in index:
            return row
        flag = emit.flag([one >= 0 for one in index])
        return emit.new("stablehlo.select", row.type, [flag, row, emit.zeros(row.type)])
