"""Which exchange each collective between islands is, and which of them travel together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pw.islands.assignment import Assignment
from pw.islands.exchanges import (
    GATHER,
    SCATTER,
    TO_ALL,
    Exchange,
    Gather,
    Gathers,
    Permute,
    Scatter,
    ToAll,
)
from pw.islands.flat import bytes_of, element_of
from pw.islands.groups import PERMUTE, aligned, groups_of
from pw.islands.labels import LabelsOf
from pw.islands.partial_sums import reducer
from pw.islands.picking import PickFromAll

TOGETHER_BYTES = 1 << 20
"""Most bytes, on a device, of all-gathers that travel together."""


def together(
    exchanges: Sequence[Exchange], labels: LabelsOf, assignment: Assignment
) -> list[Exchange]:
    """Let small all-gathers travel together, if their groups and the devices with equal values are the same."""
    result: list[Exchange] = []
    filling: dict[Any, list[Gather]] = {}

    def close(key: Any) -> None:
        own = filling.pop(key)
        result.append(own[0] if len(own) == 1 else Gathers(own, assignment))

    for one in exchanges:
        if not isinstance(one, Gather):
            result.append(one)
            continue
        key = groups_of(one.operation), str(element_of(one.operand)), labels[one.operand]
        size = sum(bytes_of(other.operand) for other in (*filling.get(key, ()), one))
        if size > TOGETHER_BYTES and key in filling:
            close(key)
        filling.setdefault(key, []).append(one)
    for key in list(filling):
        close(key)
    return result


def exchange_of(operation: Any, assignment: Assignment) -> Exchange:
    """Return how a collective between islands is made."""
    if operation.name == PERMUTE:
        moved = Permute(operation, assignment)
        is_simple = moved.is_simple and assignment.is_even
        return moved if is_simple else PickFromAll(operation, assignment)
    lies = aligned(groups_of(operation), assignment)
    if lies is not None:
        if operation.name == GATHER:
            return Gather(operation, assignment, lies)
        if operation.name == TO_ALL:
            return ToAll(operation, assignment, lies)
        if operation.name == SCATTER and reducer(operation) is not None:
            return Scatter(operation, assignment, lies)
    return PickFromAll(operation, assignment)
