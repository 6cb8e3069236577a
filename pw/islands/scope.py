"""The values of a function, or of the body of a loop: their numbers in a plan, and how they lie on islands."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from pw.islands.cutting import Cut, Opened, Piece
from pw.islands.exchanges import Exchange, Wire
from pw.islands.flat import calls, entry
from pw.islands.plan import Counter, Lies, Ref
from pw.islands.sums import Bucket
from pw.islands.writing import ENDED, Writer

LiesOf = Callable[[int, int], Lies]
"""Function that returns how argument or result `at` lies on an island."""


class Input(NamedTuple):
    """A value that a piece takes on an island."""

    what: Any
    """See `Writer.piece`."""
    ref: Ref
    lies: Lies


class Scope:
    """Names the values that pass between the pieces of a block.

    Args:
        cut: the block.
        writer: knows how values lie between pieces.
        numbers: gives numbers that no other value has.
        islands: their numbers.
        argument: how the block's arguments lie.
        result: how its results lie.

    Attributes:
        arguments: the numbers of the block's arguments.
    """

    def __init__(
        self,
        cut: Cut,
        writer: Writer,
        numbers: Iterator[int],
        islands: range,
        argument: LiesOf,
        result: LiesOf,
    ) -> None:
        self.cut = cut
        self._writer = writer
        self._numbers = numbers
        self._islands = islands
        self._argument = argument
        self._result = result
        self.arguments = [next(numbers) for _ in cut.arguments]
        self._number: dict[Any, int] = dict(zip(cut.arguments, self.arguments, strict=True))
        self._place = {value: at for at, value in enumerate(cut.arguments)}
        self._kept: dict[Any, Any] = {}
        """Value that a loop keeps as it is, by the result of the loop."""
        self._carried: dict[Any, Any] = {}
        """Argument of a loop's body, by the value that is handed to the loop."""
        for one in cut.sums.opened:
            carried = zip(one.operands, entry(one, 1).arguments, strict=True)
            self._carried.update(carried)

    def named(self, what: Any) -> int:
        """Return the number of a value, or of what `Writer.piece` names so."""
        if what not in self._number:
            self._number[what] = next(self._numbers)
        return self._number[what]

    def lies(self, value: Any, island: int) -> Lies:
        """Return how a value lies between pieces."""
        value = self._kept.get(value, value)
        if value in self._place:
            return self._argument(self._place[value], island)
        return self._writer.between(value, island)

    # --- pieces -----------------------------------------------------------------------------------

    def inputs(self, piece: Piece, island: int) -> list[Input]:
        """Return what a piece takes on an island."""
        inputs = [
            Input(value, Ref(self.named(value), island), self.lies(value, island))
            for value in piece.inputs
        ]
        for bucket in piece.sums:
            lies = self._writer.of_bucket(bucket, island)
            for part, holder in enumerate(bucket.sums(island)):
                inputs.append(Input((bucket, part), Ref(self.sum(bucket), holder), lies))
        for exchange in piece.takes:
            for source in exchange.needs(island):
                inputs.append(self._wire(exchange, *source, island))
        return inputs

    def outputs(self, piece: Piece, island: int) -> list[tuple[Any, Lies]]:
        """Return what a piece makes on an island."""
        between = self._writer.between
        outputs: list[tuple[Any, Lies]] = [
            (value, between(value, island)) for value in piece.outputs
        ]
        for value in piece.handed:
            outputs.append((("whole", value), between(self._carried.get(value, value), island)))
        for exchange in piece.sends:
            for at, wire in enumerate(exchange.wires):
                if not self._is_argument(exchange, wire):
                    outputs.append(((exchange, at), self._writer.of_wire(exchange, wire, island)))
        for at in piece.results:
            outputs.append((("result", self.cut.results[at], at), self._result(at, island)))
        if piece.makes is not None:
            lies = self._writer.of_bucket(piece.makes, island)
            outputs += [((piece.makes, at), lies) for at in range(piece.makes.parts)]
        if any(map(calls, piece.operations)):
            # XLA drops operations on several devices that only make what is empty, calls too.
            outputs.append(((ENDED, piece), Lies((), np.dtype(np.bool_), ())))
        return outputs

    def _wire(self, exchange: Exchange, at: int, source: int, island: int) -> Input:
        wire, operand = exchange.wires[at], exchange.operand
        what = (exchange, (at, source))
        if self._is_argument(exchange, wire):
            return Input(what, Ref(self._number[operand], source), self.lies(operand, island))
        lies = self._writer.of_wire(exchange, wire, island)
        return Input(what, Ref(self.named((exchange, at)), source), lies)

    def _is_argument(self, exchange: Exchange, wire: Wire) -> bool:
        """Whether a wire is an argument as it lies on all islands, which takes no computation."""
        if not wire.is_operand or exchange.operand not in self._place:
            return False
        lies = {self.lies(exchange.operand, island) for island in self._islands}
        return len(lies) == 1 and self._writer.copies(exchange, wire) is None

    # --- sums and loops -----------------------------------------------------------------------------

    def sum(self, bucket: Bucket) -> int:
        """Return the number of the sums of a bucket, of which each island has its part."""
        return self.named(("sum", bucket))

    def addends(self, bucket: Bucket, island: int) -> tuple[Ref, ...]:
        """Return what an island adds up of a bucket."""
        own = bucket.sum.aligned.islands[island]
        part = 0 if bucket.parts == 1 else own.index(island)
        return tuple(Ref(self.named((bucket, part)), other) for other in own)

    def operands(self, opened: Opened) -> list[int]:
        """Return the numbers of what an opened loop takes."""
        kept = self._kept_by(opened)
        operands = opened.operation.operands
        return [
            self._number[value] if is_kept else self.named(("whole", value))
            for value, is_kept in zip(operands, kept, strict=True)
        ]

    def carried(self, opened: Opened, counter: Counter) -> LiesOf:
        """Return how lies what an opened loop carries."""
        kept, body = self._kept_by(opened), entry(opened.operation, 1)
        operands = list(opened.operation.operands)

        def lies(at: int, island: int) -> Lies:
            if at == counter.at:
                return Lies((), counter.start.dtype, ())
            if kept[at]:
                return self.lies(operands[at], island)
            return self._writer.between(body.arguments[at], island)

        return lies

    def results(self, opened: Opened) -> list[int]:
        """Return the numbers of what an opened loop makes."""
        operands, results = list(opened.operation.operands), list(opened.operation.results)
        for value, result, is_kept in zip(operands, results, self._kept_by(opened), strict=True):
            if is_kept:
                self._kept[result] = self._kept.get(value, value)
        return [self.named(value) for value in results]

    def _kept_by(self, opened: Opened) -> list[bool]:
        """Return which operands a loop keeps as they are, and as they lie."""
        operands = opened.operation.operands
        return [
            is_kept and self.cut.is_ready(value)
            for value, is_kept in zip(operands, opened.kept, strict=True)
        ]
