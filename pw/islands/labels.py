"""Which devices hold equal values.

A value's *labels* are one number for each partition; partitions with equal labels hold equal elements. So a
value that is the same on all devices of an island is kept, and sent, once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from pw.core.jax_private.compiling import HloSharding
from pw.islands.flat import entry, operations_of, returned, used_by
from pw.islands.groups import NAMES, PERMUTE, groups_of

Labels = tuple[int, ...]

_EACH_OWN = {"stablehlo.partition_id", "stablehlo.replica_id"}
_BY_POSITION = {"stablehlo.all_to_all", "stablehlo.reduce_scatter"}


def number(keys: Iterable[object]) -> Labels:
    """Return labels that are equal where the keys are."""
    numbers: dict[object, int] = {}
    return tuple([numbers.setdefault(key, len(numbers)) for key in keys])


class LabelsOf:
    """The labels of all values of a function.

    Args:
        arguments: the labels of its arguments.
    """

    def __init__(self, block: Any, arguments: Sequence[Labels], partitions: int) -> None:
        self._partitions = partitions
        self._none: Labels = (0,) * partitions
        self._labels: dict[Any, Labels] = {}
        self._joined: dict[tuple[Labels, Labels], Labels] = {}
        self.add(block, arguments)

    def __getitem__(self, value: Any) -> Labels:
        return self._labels[value]

    def add(self, block: Any, arguments: Sequence[Labels]) -> list[Labels]:
        """Find the labels of a block's values; return those of what it returns."""
        self._labels.update(zip(block.arguments, arguments, strict=True))
        for one in operations_of(block):
            self._operation(one)
        return [self._labels[value] for value in returned(block)]

    def join(self, labels: Iterable[Labels]) -> Labels:
        """Return the labels of what is computed from values with these labels."""
        result = self._none
        for one in labels:
            if one is result or one == self._none:
                continue
            if result == self._none:
                result = one
                continue
            key = (result, one)
            if key not in self._joined:
                self._joined[key] = number(zip(result, one, strict=True))
            result = self._joined[key]
        return result

    def _operation(self, one: Any) -> None:
        if one.name == "stablehlo.while":
            results = self._loop(one)
        elif one.name in ("stablehlo.if", "stablehlo.case"):
            results = self._branches(one)
        elif one.name == "stablehlo.optimization_barrier":
            results = [self._labels[value] for value in one.operands]
        else:
            results = [self._simple(one)] * len(one.results)
        self._labels.update(zip(one.results, results, strict=True))

    def _simple(self, one: Any) -> Labels:
        if one.name in _EACH_OWN:
            return tuple(range(self._partitions))
        operands = self.join(self._labels[value] for value in used_by(one) if value in self._labels)
        if one.name not in NAMES:
            return operands
        keys: list[object] = [None] * self._partitions
        for group in groups_of(one):
            if one.name == PERMUTE:
                keys[group[1]] = operands[group[0]]
                continue
            members = tuple([operands[at] for at in group])
            for at, partition in enumerate(group):
                keys[partition] = (members, at if one.name in _BY_POSITION else 0)
        return number(keys)

    def _loop(self, one: Any) -> list[Labels]:
        carried = [self._labels[value] for value in one.operands]
        condition, body = entry(one, 0), entry(one, 1)
        while True:
            going = self.add(condition, carried)
            after = self.add(body, carried)
            joined = [self.join([*pair, *going]) for pair in zip(carried, after, strict=True)]
            if joined == carried:
                return carried
            carried = joined

    def _branches(self, one: Any) -> list[Labels]:
        chosen = self._labels[one.operands[0]]
        ends = [self.add(entry(one, at), ()) for at in range(len(one.regions))]
        return [self.join([chosen, *same]) for same in zip(*ends, strict=True)]


def labels_of(sharding: str, partitions: int) -> Labels:
    """Return the labels of an array that is divided as an HLO sharding says, in XLA's words."""
    tiling = HloSharding.from_string(sharding)
    if tiling.is_replicated():
        return (0,) * partitions
    if not tiling.is_tiled():
        return tuple(range(partitions))
    holders = list(tiling.tile_assignment_devices())
    copies = tiling.tile_assignment_dimensions()[-1] if tiling.replicate_on_last_tile_dim() else 1
    tile = dict(zip(holders, (at // copies for at in range(len(holders))), strict=True))
    return number(tile[at] for at in range(partitions))
