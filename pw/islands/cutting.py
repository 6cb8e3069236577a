"""Divides the operations of a function into pieces, between the collectives that cross islands.

An operation's *phase* is the number of collectives between islands that it waits for, one after the other.
A training step has two: gradients, then the update. Within a phase the reduced values go into buckets,
those that are known first to the first, so the transfer of the first gradients starts while the others are
computed: the piece of a bucket has the operations that the bucket needs and no earlier bucket has needed.
What no bucket of its phase needs, such as the update, is the last piece of the phase. An opened loop comes
behind the pieces of its phase.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from pw.islands.assignment import Assignment
from pw.islands.collectives import exchange_of, together
from pw.islands.exchanges import Exchange
from pw.islands.flat import bytes_of, calls, element_of, entry, operations_of, returned, used_by
from pw.islands.labels import LabelsOf
from pw.islands.loops import iterations
from pw.islands.partial_sums import Sum, Sums
from pw.islands.sums import Bucket

BUCKET_BYTES = 1 << 20
"""Least bytes of a bucket, if there are so many."""
BUCKETS = 4
"""A piece has at least a quarter of all bytes, because XLA cannot fuse across pieces."""

_CHEAP = {"stablehlo.constant", "stablehlo.iota", "stablehlo.partition_id"}
_CHEAP_OF_CHEAP = {
    "stablehlo.broadcast_in_dim",
    "stablehlo.convert",
    "stablehlo.reshape",
    "stablehlo.multiply",
    "stablehlo.add",
    "stablehlo.compare",
    "stablehlo.dynamic_slice",
}


@dataclass(eq=False)
class Piece:
    """Operations that run as one computation on each island."""

    operations: list[Any]
    makes: Bucket | None = None
    """The bucket that it fills; a value may come from an earlier piece."""
    sends: list[Exchange] = field(default_factory=list)
    """Exchanges whose wires it makes."""
    inputs: list[Any] = field(default_factory=list)
    """Values of earlier pieces, and arguments of the function."""
    sums: list[Bucket] = field(default_factory=list)
    """Buckets whose sums it uses."""
    takes: list[Exchange] = field(default_factory=list)
    """Exchanges whose results it uses."""
    outputs: list[Any] = field(default_factory=list)
    """Values for later pieces; one that is reduced later is a part of the sum."""
    handed: list[Any] = field(default_factory=list)
    """Values for opened loops."""
    results: list[int] = field(default_factory=list)
    """Positions of the function's results that it makes."""


@dataclass(eq=False)
class Opened:
    """A loop that needs other islands in each iteration."""

    operation: Any

    def __post_init__(self) -> None:
        body = entry(self.operation, 1)
        carried = zip(returned(body), body.arguments, strict=True)
        self.kept = [value == argument for value, argument in carried]
        """Which of the values that it carries stay as they are."""

    @property
    def ends(self) -> Any:
        """The result that is there when all calls of the script in the loop have ended; None without calls."""
        if not calls(self.operation):
            return None
        counter = iterations(self.operation)[1].at
        body = returned(entry(self.operation, 1))
        last = _last(
            [None if kept or at == counter else body[at] for at, kept in enumerate(self.kept)]
        )
        return None if last is None else self.operation.results[body.index(last)]


def _last(values: Sequence[Any]) -> Any:
    """Return the result that the last piece makes if it calls the script; of these, where not None."""
    return min((value for value in values if value is not None), key=bytes_of, default=None)


class Cut:
    """The steps of a block, in an order in which they can run.

    Args:
        block: of operations.
        sums: what is reduced in it.
        labels: which devices hold equal values.
        assignment: the islands of the devices.
        kept: positions of results that are the arguments there, and that no piece makes.

    Attributes:
        bucket_of: the bucket of each reduced value.
        exchange_of: the exchange of each value that one makes.
    """

    def __init__(
        self,
        block: Any,
        sums: Sums,
        labels: LabelsOf,
        assignment: Assignment,
        kept: Collection[int] = (),
    ) -> None:
        self._operations = operations_of(block)
        self.sums = sums
        self._labels = labels
        self._assignment = assignment
        self.arguments = list(block.arguments)
        self.results = returned(block)
        self._uses = {one: list(dict.fromkeys(used_by(one))) for one in self._operations}
        self._maker = {value: one for one in self._operations for value in one.results}
        self.exchange_of: dict[Any, Exchange] = {}
        for one in sums.exchanged:
            exchange = exchange_of(one, assignment)
            self.exchange_of[exchange.results[0]] = exchange
        self._opened = {one: Opened(one) for one in sums.opened}
        self._kept = frozenset(kept)
        self._outside = {one.operation for one in self.exchange_of.values()} | set(self._opened)
        """Operations that no piece has."""
        self._calling = {one for one in self._operations if calls(one) and one not in self._opened}
        """Operations that call the script: nothing else is in their pieces, so that no device waits for one
        whose call fails."""
        self._cheap: set[Any] = set()
        for one in self._operations:
            self._consider(one)
        self._depth: dict[Any, int] = {}
        """Number of operations that each waits for, one after the other: XLA keeps no other order."""
        self._phase = self._phases()
        self.bucket_of: dict[Any, Bucket] = {}
        self.steps = self._steps()
        self._connect()

    @property
    def pieces(self) -> list[Piece]:
        """The steps that are pieces."""
        return [one for one in self.steps if isinstance(one, Piece)]

    def is_cheap(self, value: Any) -> bool:
        """Whether each piece that uses the value computes it again."""
        return self._maker.get(value) in self._cheap

    def maker(self, value: Any) -> Any:
        """Return the operation that makes a value."""
        return self._maker[value]

    def _consider(self, one: Any) -> None:
        if one.name in _CHEAP or (
            one.name in _CHEAP_OF_CHEAP and all(self.is_cheap(value) for value in self._uses[one])
        ):
            self._cheap.add(one)

    # --- phases -----------------------------------------------------------------------------------

    def _phases(self) -> dict[Any, int]:
        phase: dict[Any, int] = {}
        for one in self._operations:
            before = (self._depth.get(self._maker.get(value), 0) for value in self._uses[one])
            self._depth[one] = 1 + max(before, default=0)
            if one not in self._cheap:
                phase[one] = max(
                    (self._usable_at(value, phase) for value in self._uses[one]), default=0
                )
        self._last = max(
            [*phase.values(), *(self._usable_at(value, phase) for value in self.results)], default=0
        )
        self._delay(phase)
        for one in self._operations:
            if one in phase and calls(one) and not any(list(value.uses) for value in one.results):
                phase[one] = self._last
        return phase

    def _usable_at(self, value: Any, phase: dict[Any, int]) -> int:
        """The first phase in which a value, or its sum, can be used."""
        maker = self._maker.get(value)
        at = phase.get(maker, 0)
        is_later = value in self.sums.reduced or maker in self._outside or maker in self._calling
        return at + 1 if is_later else at

    def _delay(self, phase: dict[Any, int]) -> None:
        """Move operations on arguments alone, such as weight decay, to the phase that needs them."""
        arguments, needed = set(self.arguments), self._needed(0, phase, self._leaving(0, phase))
        alone: set[Any] = set()
        stay = needed | self._outside | self._calling
        for one in self._operations:
            if one in phase and phase[one] == 0 and one not in stay:
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

    def _leaving(self, at: int, phase: dict[Any, int]) -> list[Any]:
        """Return the values of phase `at` that collectives and opened loops of this phase take."""
        values = [value for value in self.sums.reduced if self._usable_at(value, phase) == at + 1]
        for one in self._outside:
            if phase.get(one) == at:
                values += one.operands
        return values

    def _needed(self, at: int, phase: dict[Any, int], values: Sequence[Any]) -> set[Any]:
        """Return the operations of phase `at` that values of this phase are computed by."""
        operations: set[Any] = set()
        pending = [self._maker[value] for value in values if value in self._maker]
        while pending:
            one = pending.pop()
            if one not in operations and one not in self._outside and phase.get(one) == at:
                operations.add(one)
                pending += [
                    self._maker[value]
                    for value in self._uses[one]
                    if value in self._maker and value not in self.sums.reduced
                ]
        return operations

    # --- pieces -----------------------------------------------------------------------------------

    def _steps(self) -> list[Piece | Opened]:
        steps: list[Piece | Opened] = []
        for at in range(self._last + 1):
            steps += self._pieces(at)
            steps += [step for one, step in self._opened.items() if self._phase[one] == at]
        return steps

    def _pieces(self, at: int) -> list[Piece]:
        earlier: set[Any] = set()
        pieces: list[Piece] = []

        def add(values: Sequence[Any], **what: Any) -> None:
            needed = self._needed(at, self._phase, values) - earlier
            earlier.update(needed)
            pieces.append(Piece([one for one in self._operations if one in needed], **what))

        due_now = [one for one in self.exchange_of.values() if self._phase[one.operation] == at]
        sent = together(due_now, self._labels, self._assignment)
        if sent:
            for exchange in sent:
                self.exchange_of.update(dict.fromkeys(exchange.results, exchange))
            add([value for one in sent for value in one.operands], sends=sent)
        due = [
            value for value in self.sums.reduced if self._usable_at(value, self._phase) == at + 1
        ]
        due.sort(key=lambda value: self._depth[self._maker[value]])
        for bucket in self._buckets(due):
            add(bucket.values, makes=bucket)
        elsewhere = earlier | self._outside | self._calling
        rest = [
            one for one in self._operations if self._phase.get(one) == at and one not in elsewhere
        ]
        if pieces and rest and pieces[-1].makes is not None:
            own = {*pieces[-1].operations, *rest}
            pieces[-1].operations = [one for one in self._operations if one in own]
        elif rest or at == self._last or any(self._phase[one] == at for one in self._opened):
            pieces.append(Piece(rest))
        calling = [
            one for one in self._operations if one in self._calling and self._phase[one] == at
        ]
        if calling:
            pieces.append(Piece(calling))
        return pieces

    def _buckets(self, values: Sequence[Any]) -> Iterator[Bucket]:
        all_bytes = sum(bytes_of(value) for value in values)
        full = max(BUCKET_BYTES, -(-all_bytes // BUCKETS))
        filling: dict[tuple[Sum, str], list[Any]] = {}
        for value in values:
            key = (self.sums.reduced[value], str(element_of(value)))
            filling.setdefault(key, []).append(value)
            if sum(map(bytes_of, filling[key])) >= full:
                yield self._bucket(key[0], filling.pop(key))
        for (total, _), own in filling.items():
            yield self._bucket(total, own)

    def _bucket(self, total: Sum, values: list[Any]) -> Bucket:
        index = len({id(one) for one in self.bucket_of.values()})
        bucket = Bucket(index, total, values)
        self.bucket_of.update(dict.fromkeys(values, bucket))
        return bucket

    # --- what passes between pieces -------------------------------------------------------------------

    def _connect(self) -> None:
        """Find the inputs and outputs of each piece."""
        step_of: dict[Any, Piece | Opened] = {}
        for step in self.steps:
            for one in step.operations if isinstance(step, Piece) else (step.operation,):
                step_of.update(dict.fromkeys(one.results, step))
        pieces = self.pieces
        arguments = set(self.arguments)
        calling = any(map(calls, pieces[-1].operations))
        # The function has ended when its results are there: so the last piece has one if it calls the client.
        own_results = [None if at in self._kept else value for at, value in enumerate(self.results)]
        last = _last(own_results) if calling else None
        before_last = self.steps[: self.steps.index(pieces[-1])]
        opened = (one.ends for one in before_last if isinstance(one, Opened))
        ends = [value for value in opened if value is not None]
        for at, value in enumerate(self.results):
            if at in self._kept:
                continue
            own = None if value in self.sums.reduced or value is last else step_of.get(value)
            (own if isinstance(own, Piece) else pieces[-1]).results.append(at)
        for at, step in enumerate(self.steps):
            if isinstance(step, Opened):
                before = next(one for one in reversed(self.steps[:at]) if isinstance(one, Piece))
                for value, is_kept in zip(step.operation.operands, step.kept, strict=True):
                    if not (is_kept and self.is_ready(value)) and value not in before.handed:
                        before.handed.append(value)
        for piece in pieces:
            inputs: dict[Any, None] = {}
            takes: dict[Exchange, None] = {}
            waited = ends if piece is pieces[-1] else ()
            for value in (*self._used_in(piece), *waited):
                exchange = self.exchange_of.get(value)
                if exchange is not None:
                    takes[exchange] = None
                elif value in arguments:
                    inputs[value] = None
                elif step_of.get(value) is not piece:
                    inputs[value] = None
                    maker = step_of[value]
                    if isinstance(maker, Piece) and value not in maker.outputs:
                        maker.outputs.append(value)
            sums = dict.fromkeys(
                self.bucket_of[value] for value in self._wholes(piece) if value in self.sums.reduced
            )
            piece.inputs, piece.sums, piece.takes = list(inputs), list(sums), list(takes)

    def is_ready(self, value: Any) -> bool:
        """Whether a loop can keep a value as it is: an argument, or a result of another loop."""
        return value in self.arguments or self._maker.get(value) in self._opened

    def _used_in(self, piece: Piece) -> Iterator[Any]:
        """Yield the values that a piece uses as they are on each device."""
        pending = [value for value in self._wholes(piece) if value not in self.sums.reduced]
        if piece.makes is not None:
            pending += piece.makes.values
        while pending:
            value = pending.pop(0)
            if self.is_cheap(value):
                pending += self._uses[self._maker[value]]
            else:
                yield value

    def _wholes(self, piece: Piece) -> Iterator[Any]:
        """Yield the values that a piece uses, reduced ones after their sum."""
        for one in piece.operations:
            yield from self._uses[one]
        yield from (self.results[at] for at in piece.results)
        yield from (value for one in piece.sends for value in one.operands)
        yield from piece.handed
