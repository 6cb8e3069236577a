"""Divides the operations of a function into pieces, and its sums over islands into buckets.

An operation's *phase* is the number of reductions that it waits for, one after the other. A
training step has two: gradients, then the update. Within a phase the reduced values go into buckets
in program order, so the transfer of the first gradients starts while the others are computed: the
piece of a bucket has the operations that the bucket needs and no earlier bucket has needed. What no
bucket of its phase needs, such as the update, is the last piece of the phase.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from jax.extend.mlir import ir

from pw.client.trace.joined.module import Flat, entry, walk

BUCKET_BYTES = 1 << 20
"""A bucket has at least so many bytes, if there are so many,"""
BUCKETS = 4
"""and at least this part of all bytes: each further piece keeps XLA from fusing across its border."""

_CHEAP = {"stablehlo.constant", "sdy.constant", "stablehlo.iota"}
_CHEAP_OF_CHEAP = {
    "stablehlo.broadcast_in_dim",
    "stablehlo.convert",
    "stablehlo.reshape",
    "stablehlo.multiply",
    "stablehlo.add",
    "stablehlo.compare",
}


@dataclass(eq=False)
class Bucket:
    """Values of one dtype that are reduced together."""

    index: int
    kind: str
    values: list[Any]
    """Each is flattened, one after the other."""

    @property
    def element(self) -> Any:
        """The dtype in MLIR."""
        return ir.RankedTensorType(self.values[0].type).element_type

    @property
    def elements(self) -> int:
        """How many elements an island has."""
        return sum(elements_of(value) for value in self.values)


@dataclass(eq=False)
class Piece:
    """Operations that run as one computation on each island."""

    operations: list[Any]
    makes: Bucket | None = None
    """The bucket that it fills; a value may come from an earlier piece."""
    inputs: list[Any] = field(default_factory=list)
    """Values of earlier pieces, and arguments of the function."""
    sums: list[Bucket] = field(default_factory=list)
    """Buckets whose sums it uses."""
    outputs: list[Any] = field(default_factory=list)
    results: list[int] = field(default_factory=list)
    """Positions of the function's results that it makes, behind `outputs`."""


class Cut:
    """The pieces of a function, in an order in which they can run.

    Attributes:
        bucket_of: the bucket of each reduced value.
    """

    def __init__(self, flat: Flat, reduced: dict[Any, str], free: Sequence[Any]) -> None:
        block = entry(flat.main)
        self._operations = [one.operation for one in block.operations]
        self._return = self._operations.pop()
        self._reduced = reduced
        self.arguments = list(block.arguments)
        self.results = list(self._return.operands)
        self._uses = {one: list(dict.fromkeys(used_by(one))) for one in self._operations}
        self._maker = {value: one for one in self._operations for value in one.results}
        self._cheap: set[Any] = set()
        for one in self._operations:
            self._consider(one, set(free))
        self._phase = self._phases()
        self.bucket_of: dict[Any, Bucket] = {}
        self.pieces = self._pieces()
        self._connect()

    def is_cheap(self, value: Any) -> bool:
        """Whether each piece that uses the value computes it again."""
        return self._maker.get(value) in self._cheap

    def maker(self, value: Any) -> Any:
        """Return the operation that makes a value."""
        return self._maker[value]

    def _consider(self, one: Any, free: set[Any]) -> None:
        if one.name in _CHEAP or (
            one.name in _CHEAP_OF_CHEAP
            and all(value in free or self.is_cheap(value) for value in self._uses[one])
        ):
            self._cheap.add(one)

    # --- phases -----------------------------------------------------------------------------------

    def _phases(self) -> dict[Any, int]:
        phase: dict[Any, int] = {}
        for one in self._operations:
            if one not in self._cheap:
                phase[one] = max(
                    (self._known_at(value, phase) for value in self._uses[one]), default=0
                )
        self._last = max(
            [*phase.values(), *(self._known_at(value, phase) for value in self.results)], default=0
        )
        self._delay(phase)
        return phase

    def _known_at(self, value: Any, phase: dict[Any, int]) -> int:
        """The first phase in which a value, or its sum, can be used."""
        made = phase.get(self._maker.get(value), 0)
        return made + 1 if value in self._reduced else made

    def _delay(self, phase: dict[Any, int]) -> None:
        """Move operations on arguments alone, such as weight decay, to the phase that needs them."""
        arguments, needed = set(self.arguments), self._needed(0, phase, list(self._reduced))
        alone: set[Any] = set()
        for one in self._operations:
            if one in phase and phase[one] == 0 and one not in needed:
                used = (value for value in self._uses[one] if not self.is_cheap(value))
                if all(value in arguments or self._maker.get(value) in alone for value in used):
                    alone.add(one)
        users: dict[Any, int] = {}
        for one in reversed(self._operations):
            if one in alone:
                phase[one] = min(
                    (users.get(v, self._last) for v in one.results), default=self._last
                )
            if one in phase:
                for value in self._uses[one]:
                    users[value] = min(users.get(value, self._last), phase[one])

    def _needed(self, at: int, phase: dict[Any, int], values: Sequence[Any]) -> set[Any]:
        """Return the operations of phase `at` that values of this phase are computed by."""
        found: set[Any] = set()
        pending = [self._maker[value] for value in values if value in self._maker]
        while pending:
            one = pending.pop()
            if one not in found and phase.get(one) == at:
                found.add(one)
                pending += [
                    self._maker[value]
                    for value in self._uses[one]
                    if value in self._maker and value not in self._reduced
                ]
        return found

    # --- pieces -----------------------------------------------------------------------------------

    def _pieces(self) -> list[Piece]:
        pieces: list[Piece] = []
        for at in range(self._last + 1):
            due = [value for value in self._reduced if self._known_at(value, self._phase) == at + 1]
            taken: set[Any] = set()
            made: list[Piece] = []
            for bucket in self._buckets(due):
                needed = self._needed(at, self._phase, bucket.values) - taken
                taken |= needed
                made.append(Piece([one for one in self._operations if one in needed], bucket))
            rest = [
                one for one in self._operations if self._phase.get(one) == at and one not in taken
            ]
            if made and rest:
                own = {*made[-1].operations, *rest}
                made[-1].operations = [one for one in self._operations if one in own]
            elif rest or at == self._last:
                made.append(Piece(rest))
            pieces += made
        return pieces

    def _buckets(self, values: Sequence[Any]) -> Iterator[Bucket]:
        whole = sum(bytes_of(value) for value in values)
        full = max(BUCKET_BYTES, -(-whole // BUCKETS))
        filling: dict[tuple[str, str], Bucket] = {}
        for value in values:
            kind = self._reduced[value]
            key = (kind, str(ir.RankedTensorType(value.type).element_type))
            bucket = filling.get(key)
            if bucket is None:
                bucket = filling[key] = Bucket(0, kind, [])
            bucket.values.append(value)
            if sum(map(bytes_of, bucket.values)) >= full:
                yield self._numbered(filling.pop(key))
        for bucket in filling.values():
            yield self._numbered(bucket)

    def _numbered(self, bucket: Bucket) -> Bucket:
        bucket.index = len({id(one) for one in self.bucket_of.values()})
        self.bucket_of.update(dict.fromkeys(bucket.values, bucket))
        return bucket

    # --- what passes between pieces -------------------------------------------------------------------

    def _connect(self) -> None:
        """Find the inputs and outputs of each piece."""
        made_by: dict[Any, Piece] = {}
        for piece in self.pieces:
            for one in piece.operations:
                made_by.update(dict.fromkeys(one.results, piece))
        last = self.pieces[-1]
        arguments = set(self.arguments)
        for at, value in enumerate(self.results):
            own = None if value in self._reduced else made_by.get(value)
            (own or last).results.append(at)
        for piece in self.pieces:
            inputs: dict[Any, None] = {}
            sums: dict[Bucket, None] = {}
            for value in self._used_in(piece):
                if value in arguments:
                    inputs[value] = None
                elif made_by.get(value) is not piece:
                    inputs[value] = None
                    maker = made_by[value]
                    if value not in maker.outputs:
                        maker.outputs.append(value)
            for value in self._summed_in(piece):
                sums[self.bucket_of[value]] = None
            piece.inputs, piece.sums = list(inputs), list(sums)

    def _used_in(self, piece: Piece) -> Iterator[Any]:
        """Yield the values that a piece uses as they are on each island."""
        pending = [value for one in piece.operations for value in self._uses[one]]
        pending += [self.results[at] for at in piece.results]
        pending = [value for value in pending if value not in self._reduced]
        if piece.makes is not None:
            pending += piece.makes.values
        while pending:
            value = pending.pop(0)
            if self.is_cheap(value):
                pending += self._uses[self._maker[value]]
            else:
                yield value

    def _summed_in(self, piece: Piece) -> Iterator[Any]:
        used = [value for one in piece.operations for value in self._uses[one]]
        used += [self.results[at] for at in piece.results]
        yield from (value for value in used if value in self._reduced)


def used_by(operation: Any) -> Iterator[Any]:
    """Yield the values from outside that an operation and its regions use."""
    inside: set[Any] = set()
    for one in (operation, *walk(operation)):
        for region in one.regions:
            for block in region.blocks:
                inside.update(block.arguments)
        for value in one.operands:
            if value not in inside:
                yield value
        if one is not operation:
            inside.update(one.results)


def elements_of(value: Any) -> int:
    """Return how many elements a value has on an island."""
    return math.prod(ir.RankedTensorType(value.type).shape)


def bytes_of(value: Any) -> int:
    """Return the size of a value on an island."""
    kind = ir.RankedTensorType(value.type).element_type
    bits = kind.width if isinstance(kind, (ir.FloatType, ir.IntegerType)) else 128
    return elements_of(value) * max(8, bits) // 8
