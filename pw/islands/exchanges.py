"""Collectives between islands that move values: what is done before and behind the move.

An exchange makes *wires* of its operand: values that lie on the devices of an island, and that other
islands take as they are. Devices at the same position exchange, so what has to change places does so inside
of an island, by XLA's collectives, before the wires or behind them. Groups that do not lie the same way on
all islands have one wire: all values of the island, from which each device picks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jax.extend.mlir import ir

from pw.islands.assignment import Assignment
from pw.islands.emit import Emit
from pw.islands.flat import elements_of, shape_of
from pw.islands.groups import Aligned, Groups, groups_of
from pw.islands.partial_sums import reducer

GATHER = "stablehlo.all_gather"
TO_ALL = "stablehlo.all_to_all"
SCATTER = "stablehlo.reduce_scatter"
BROADCAST = "stablehlo.collective_broadcast"


class Wire(NamedTuple):
    """A value that an island offers to others."""

    shape: tuple[int, ...]
    """Shape of the wire on a device."""
    is_equal: bool = False
    """True if all devices of an island have the same value."""
    is_operand: bool = False
    """True if the operand is sent unchanged."""
    follows: bool = False
    """True if devices with equal operands have the same value."""


Source = tuple[int, int]
"""A wire, and the island that it comes from."""


class Exchange:
    """One collective between islands with one operand and one result.

    Attributes:
        operands: what it takes; several if they travel together.
        results: what it makes of each.
    """

    def __init__(self, operation: Any, assignment: Assignment) -> None:
        self.operation = operation
        self.operand = operation.operands[0]
        self.operands: list[Any] = [self.operand]
        self.results: list[Any] = [operation.results[0]]
        self._assignment = assignment
        self._groups = groups_of(operation)

    @property
    def wires(self) -> list[Wire]:
        """Return the wires that each island offers."""
        raise NotImplementedError

    def needs(self, island: int) -> list[Source]:
        """Return what an island takes, its own included."""
        raise NotImplementedError

    def pack(self, emit: Emit, operand: Any) -> list[Any]:
        """Return the wires of an island."""
        raise NotImplementedError

    def unpack(self, emit: Emit, arrived: Mapping[Source, Any]) -> Any:
        """Return the result on an island."""
        raise NotImplementedError

    def pack_all(self, emit: Emit, operands: Sequence[Any]) -> list[Any]:
        """Return the wires of an island, of all operands."""
        return self.pack(emit, operands[0])

    def unpack_all(self, emit: Emit, arrived: Mapping[Source, Any]) -> list[Any]:
        """Return all results on an island."""
        return [self.unpack(emit, arrived)]

    def _number(self, name: str) -> int:
        return int(ir.IntegerAttr(self.operation.attributes[name]).value)


class Gather(Exchange):
    """An all-gather of aligned groups: the operand travels."""

    def __init__(self, operation: Any, assignment: Assignment, lies: Aligned) -> None:
        super().__init__(operation, assignment)
        self.lies = lies

    @property
    def wires(self) -> list[Wire]:
        """The operand."""
        return [Wire(shape_of(self.operand), is_operand=True, follows=True)]

    def needs(self, island: int) -> list[Source]:
        """The operands of all islands of its groups."""
        return [(0, other) for other in self.lies.islands[island]]

    def pack(self, emit: Emit, operand: Any) -> list[Any]:
        """Return the operand: nothing is done before."""
        return [operand]

    def unpack(self, emit: Emit, arrived: Mapping[Source, Any]) -> Any:
        """Gather inside of the island, and bring all in the order of the group."""
        lies, along = self.lies, self._number("all_gather_dim")
        values = [arrived[0, other] for other in lies.islands[emit.island]]
        order = lies.order[emit.island]
        if lies.width == 1:
            return emit.concat([values[island] for island, _ in order], along)
        inner = lies.inner[emit.island]
        if order == tuple((a, b) for a in range(lies.spread) for b in range(lies.width)):
            gathered = [_gathered(emit, value, inner, along, lies.width) for value in values]
            return emit.concat(gathered, along)
        rows = emit.all_gather(emit.stack(values), inner)
        return emit.concat(
            [emit.row(rows, at * lies.spread + island) for island, at in order], along
        )


class Gathers(Exchange):
    """All-gathers that travel together: their operands, one after the other."""

    def __init__(self, gathers: Sequence[Gather], assignment: Assignment) -> None:
        super().__init__(gathers[0].operation, assignment)
        self._each = list(gathers)
        self.operands = [one.operand for one in gathers]
        self.results = [one.results[0] for one in gathers]

    @property
    def wires(self) -> list[Wire]:
        """All elements in one dimension."""
        return [Wire((sum(map(elements_of, self.operands)),), follows=True)]

    def needs(self, island: int) -> list[Source]:
        """The operands of all islands of their groups."""
        return self._each[0].needs(island)

    def pack_all(self, emit: Emit, operands: Sequence[Any]) -> list[Any]:
        """Put the operands one behind the other."""
        return [emit.line(operands, sum(map(elements_of, operands)))]

    def unpack_all(self, emit: Emit, arrived: Mapping[Source, Any]) -> list[Any]:
        """Take the operands apart, and gather each."""
        results, start = [], 0
        for one in self._each:
            stop = start + elements_of(one.operand)
            own = {
                source: emit.reshape(emit.slice(line, 0, start, stop), shape_of(one.operand))
                for source, line in arrived.items()
            }
            results.append(one.unpack(emit, own))
            start = stop
        return results


def _gathered(emit: Emit, value: Any, groups: Groups, along: int, width: int) -> Any:
    if along == 0:
        return emit.all_gather(value, groups)
    rows = emit.all_gather(emit.stack([value]), groups)
    return emit.concat([emit.row(rows, at) for at in range(width)], along)


class ToAll(Exchange):
    """An all-to-all of aligned groups: an island has a wire for each island of a group."""

    def __init__(self, operation: Any, assignment: Assignment, lies: Aligned) -> None:
        super().__init__(operation, assignment)
        self.lies = lies

    @property
    def wires(self) -> list[Wire]:
        """Return the chunks of the island's members for each island, by sender."""
        follows = self.lies.width == 1
        return [Wire((self.lies.width, *self._chunk), follows=follows)] * self.lies.spread

    @property
    def _split(self) -> int:
        return self._number("split_dimension")

    @property
    def _chunk(self) -> tuple[int, ...]:
        shape = list(shape_of(self.operand))
        shape[self._split] //= self.lies.spread * self.lies.width
        return tuple(shape)

    def needs(self, island: int) -> list[Source]:
        """Return the sources on the islands of its groups that have values for this island."""
        own = self.lies.islands[island]
        return [(own.index(island), other) for other in own]

    def pack(self, emit: Emit, operand: Any) -> list[Any]:
        """Let the members of an island exchange the chunks for each island."""
        return [
            emit.all_to_all(emit.stack(chunks), self.lies.inner[emit.island])
            for chunks in _by_island(emit, operand, self._split, self.lies)
        ]

    def unpack(self, emit: Emit, arrived: Mapping[Source, Any]) -> Any:
        """Put the chunks side by side, in the order of their senders."""
        own = self.lies.islands[emit.island]
        mine = own.index(emit.island)
        chunks = [
            emit.row(arrived[mine, own[island]], at) for island, at in self.lies.order[emit.island]
        ]
        return emit.concat(chunks, self._number("concat_dimension"))


def _by_island(emit: Emit, operand: Any, split: int, lies: Aligned) -> list[list[Any]]:
    """Return the chunks for each island, by member."""
    order = lies.order[emit.island]
    chunks = emit.parts(operand, split, len(order))
    by_member = dict(zip(order, chunks, strict=True))
    return [[by_member[island, at] for at in range(lies.width)] for island in range(lies.spread)]


class Scatter(ToAll):
    """A reduce-scatter of aligned groups: as an all-to-all, and what arrives is added."""

    def __init__(self, operation: Any, assignment: Assignment, lies: Aligned) -> None:
        super().__init__(operation, assignment, lies)
        self._kind = str(reducer(operation))

    @property
    def wires(self) -> list[Wire]:
        """Return the sums that this island's members make for each island."""
        return [Wire(self._chunk, follows=self.lies.width == 1)] * self.lies.spread

    @property
    def _split(self) -> int:
        return self._number("scatter_dimension")

    def pack(self, emit: Emit, operand: Any) -> list[Any]:
        """Add up inside of the island."""
        totals = []
        for chunks in _by_island(emit, operand, self._split, self.lies):
            total = emit.reduce_scatter(
                emit.stack(chunks), self.lies.inner[emit.island], self._kind
            )
            totals.append(emit.row(total, 0))
        return totals

    def unpack(self, emit: Emit, arrived: Mapping[Source, Any]) -> Any:
        """Add, in the order of the islands."""
        total, *rest = [arrived[source] for source in self.needs(emit.island)]
        for part in rest:
            total = emit.combine(self._kind, total, part)
        return total


class Permute(Exchange):
    """A permutation: values change places inside of their island first, then go to the same place elsewhere."""

    def __init__(self, operation: Any, assignment: Assignment) -> None:
        super().__init__(operation, assignment)
        crossing = [pair for pair in self._groups if assignment.crosses(pair)]
        self._own = [pair for pair in self._groups if not assignment.crosses(pair)]
        islands, position = assignment.islands, assignment.position
        self._moves: list[list[tuple[int, int]]] = [[] for _ in range(assignment.count)]
        """Positions, by island, from and to which its values for other islands move."""
        self._sources: list[dict[int, int]] = [{} for _ in range(assignment.count)]
        """Island that sends, by island and position there."""
        self._is_even = len({assignment.devices(islands[one]) for p in crossing for one in p}) == 1
        for source, target in crossing:
            self._moves[islands[source]].append((position[source], position[target]))
            self._sources[islands[target]][position[target]] = islands[source]

    @property
    def is_simple(self) -> bool:
        """Whether islands have as many devices, and no two values of one go to the same position elsewhere."""
        return self._is_even and all(
            len({there for _, there in own}) == len(own) for own in self._moves
        )

    @property
    def is_uniform(self) -> bool:
        """Whether each island has all its values from one other, at their positions."""
        return (
            self._is_straight
            and not self._own
            and all(
                len(set(sources.values())) == 1 and len(sources) == len(members)
                for sources, members in zip(self._sources, self._assignment.members, strict=True)
            )
        )

    @property
    def _is_straight(self) -> bool:
        """Whether all values keep their positions."""
        return all(here == there for own in self._moves for here, there in own)

    @property
    def wires(self) -> list[Wire]:
        """The values for other islands, then those that stay."""
        shape = shape_of(self.operand)
        is_operand = self._is_straight
        away = Wire(shape, is_operand=is_operand, follows=is_operand)
        return [away, *([Wire(shape)] if self._own else [])]

    def needs(self, island: int) -> list[Source]:
        """The values of islands that send to this one, and its own."""
        sources = [(0, other) for other in sorted(set(self._sources[island].values()))]
        return [*sources, *([(1, island)] if self._own else [])]

    def pack(self, emit: Emit, operand: Any) -> list[Any]:
        """Bring values to their places on the island."""
        away = operand
        if not self._is_straight:
            away = emit.permute(operand, tuple(self._moves[emit.island]))
        if not self._own:
            return [away]
        position, members = self._assignment.position, self._assignment.members[emit.island]
        pairs = [(position[a], position[b]) for a, b in self._own if a in members]
        return [away, emit.permute(operand, tuple(pairs))]

    def unpack(self, emit: Emit, arrived: Mapping[Source, Any]) -> Any:
        """Choose: what has arrived, what has stayed, or zeros."""
        island = emit.island
        result = arrived[1, island] if self._own else emit.zeros(self.results[0].type)
        sources = self._sources[island]
        for other in sorted(set(sources.values())):
            away = arrived[0, other]
            is_all = len(sources) == emit.devices and len(set(sources.values())) == 1
            result = away if is_all else emit.select(self._is_from(emit, other), away, result)
        return result

    def _is_from(self, emit: Emit, other: int) -> Any:
        """Return whether this device's value comes from the island `other`."""
        assignment = self._assignment
        mine = [
            self._sources[island].get(place) == other
            for island, place in zip(assignment.islands, assignment.position, strict=True)
        ]
        return emit.flag(mine)
