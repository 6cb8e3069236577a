"""Plans a function over islands: its steps, with the code of each."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from pw.islands.assignment import Assignment
from pw.islands.cutting import Cut, Opened, Piece
from pw.islands.division import Divided
from pw.islands.exchanges import Exchange, Permute, exchange_of
from pw.islands.flat import calls, entry, flatten, walk
from pw.islands.groups import NAMES, PERMUTE, groups_of, is_crossing
from pw.islands.labels import Labels, LabelsOf, labels_of
from pw.islands.loops import choose, iterations
from pw.islands.partial_sums import Sums
from pw.islands.plan import NUMBER, Code, Lies, Loop, Plan, Ref, Step
from pw.islands.sums import Bucket
from pw.islands.writing import ENDED, Sides, Writer

LAG = 1
"""How many pieces are enqueued between a bucket's piece and its additions, which wait for other islands."""

_LiesOf = Callable[[int, int], Lies]
"""How argument or result `at` lies on an island."""


def plan(
    divided: Divided,
    assignment: Assignment,
    sides: Sides,
    name: str,
    donated: Collection[int] = (),
) -> Plan:
    """Cut a divided function at the collectives that cross islands.

    Args:
        divided: the function, which is changed.
        assignment: the island of each of its partitions.
        sides: how its arguments and results lie.
        name: for the user.
        donated: positions of arguments whose buffers it may take.

    Raises:
        CannotCut: with the reason.
    """
    main = flatten(divided.module)
    block = entry(main)
    given = [labels_of(one, assignment.partitions) for one in divided.arguments]
    planner = _Planner(main, assignment, sides, name)
    return planner.plan(block, given, donated)


class _Input(NamedTuple):
    what: Any
    """See `Writer.piece`."""
    ref: Ref
    lies: Lies


class _Raw(NamedTuple):
    """A piece that is not written yet."""

    piece: Piece
    name: str
    inputs: list[list[_Input]]
    """By island."""
    outputs: list[list[tuple[Any, Lies]]]
    numbers: list[int]


class _Block(NamedTuple):
    """A function, or the body of a loop, whose steps are not written yet."""

    cut: Cut
    steps: list[Any]
    """`_Raw`, `Step` or `_RawLoop`."""
    arguments: list[int]
    results: list[int]


class _RawLoop(NamedTuple):
    iterations: int
    operands: list[int]
    body: _Block
    outputs: list[int]


class _Planner:
    def __init__(self, main: Any, assignment: Assignment, sides: Sides, name: str) -> None:
        self._main = main
        self._assignment = assignment
        self._sides = sides
        self._name = name
        self._islands = range(assignment.count)
        self._numbers = itertools.count()
        self._is_uniform = _is_uniform(main, assignment, sides)

    def plan(self, block: Any, given: Sequence[Labels], donated: Collection[int]) -> Plan:
        """Plan the whole function."""
        self._labels = LabelsOf(block, given, self._assignment.partitions)
        self._writer = Writer(
            self._main, self._sides.meshes, self._assignment, self._labels, self._name
        )
        arguments, results = self._sides.arguments, self._sides.results
        raw = self._block(
            block,
            lambda at, island: arguments[at][island],
            lambda at, island: results[at][island],
        )
        steps, taken = self._written(raw, {raw.arguments[at] for at in donated})
        unused = tuple(at for at in donated if raw.arguments[at] not in taken)
        return Plan(tuple(steps), tuple(raw.results), unused)

    # --- steps ------------------------------------------------------------------------------------

    def _block(
        self, block: Any, argument: _LiesOf, result: _LiesOf, kept: Collection[int] = ()
    ) -> _Block:
        sums = Sums(block, self._assignment, self._labels)
        while choices := [one for one in sums.opened if one.name != "stablehlo.while"]:
            for one in choices:
                choose(one)
            self._labels.add(block, [self._labels[value] for value in block.arguments])
            sums = Sums(block, self._assignment, self._labels)
        cut = Cut(block, sums, self._assignment, kept)
        arguments = [next(self._numbers) for _ in cut.arguments]
        number: dict[Any, int] = dict(zip(cut.arguments, arguments, strict=True))
        place = {value: at for at, value in enumerate(cut.arguments)}
        results = [arguments[at] if at in kept else 0 for at in range(len(cut.results))]
        kept_lies: dict[Any, Callable[[int], Lies]] = {}
        """How results of opened loops lie that are what the loops were given."""
        carried_as = {
            value: argument
            for one in sums.opened
            for value, argument in zip(one.operands, entry(one, 1).arguments, strict=True)
        }
        """By value: as what an opened loop carries it."""
        steps: list[Any] = []
        filled: dict[Bucket, int] = {}
        count = len(cut.pieces)

        def named(what: Any) -> int:
            if what not in number:
                number[what] = next(self._numbers)
            return number[what]

        def lies_of(value: Any, island: int) -> Lies:
            if value in place:
                return argument(place[value], island)
            if value in kept_lies:
                return kept_lies[value](island)
            return self._writer.between(value, island)

        def wire(exchange: Exchange, at: int, source: int, island: int) -> tuple[Ref, Lies]:
            kind, operand = exchange.wires[at], exchange.operand
            if kind.is_operand and self._is_alike(operand, place, argument):
                return Ref(number[operand], source), argument(place[operand], island)
            return (
                Ref(named((exchange, at)), source),
                self._writer.of_wire(exchange, kind, island),
            )

        def inputs_of(piece: Piece, island: int) -> list[_Input]:
            found = [
                _Input(value, Ref(named(value), island), lies_of(value, island))
                for value in piece.inputs
            ]
            for bucket in piece.sums:
                own = bucket.sum.aligned.islands[island]
                lies = self._writer.of_bucket(bucket, island)
                for part in range(bucket.parts):
                    holder = island if bucket.parts == 1 else own[part]
                    found.append(_Input((bucket, part), Ref(named(("sum", bucket)), holder), lies))
            for exchange in piece.takes:
                for source in exchange.needs(island):
                    ref, lies = wire(exchange, *source, island)
                    found.append(_Input((exchange, source), ref, lies))
            return found

        def outputs_of(piece: Piece, island: int) -> list[tuple[Any, Lies]]:
            made: list[tuple[Any, Lies]] = [
                (value, self._writer.between(value, island)) for value in piece.outputs
            ]
            made += [(("whole", value), handed(value, island)) for value in piece.handed]
            for exchange in piece.sends:
                for at, kind in enumerate(exchange.wires):
                    if kind.is_operand and self._is_alike(exchange.operand, place, argument):
                        continue
                    lies = self._writer.of_wire(exchange, kind, island)
                    made.append(((exchange, at), lies))
            made += [(("result", cut.results[at], at), result(at, island)) for at in piece.results]
            if piece.makes is not None:
                lies = self._writer.of_bucket(piece.makes, island)
                made += [((piece.makes, at), lies) for at in range(piece.makes.parts)]
            if any(map(calls, piece.operations)):
                # XLA drops operations on several devices that only make what is empty, calls too.
                made.append(((ENDED, piece), Lies((), np.dtype(np.bool_), ())))
            return made

        def handed(value: Any, island: int) -> Lies:
            return self._writer.between(carried_as.get(value, value), island)

        def add_up(bucket: Bucket) -> None:
            del filled[bucket]
            steps.append(self._adder(bucket, named))

        seen = 0
        for step in cut.steps:
            if isinstance(step, Opened):
                steps.append(self._loop(cut, step, number, named, lies_of))
                for value, result_, is_kept in zip(
                    step.operation.operands, step.operation.results, step.kept, strict=True
                ):
                    if is_kept and cut.is_ready(value):
                        kept_lies[result_] = partial(lies_of, value)
                continue
            for bucket in list(filled):
                if filled[bucket] + LAG < seen or bucket in step.sums:
                    add_up(bucket)
            inputs = [inputs_of(step, island) for island in self._islands]
            outputs = [outputs_of(step, island) for island in self._islands]
            numbers = [named(what) for what, _ in outputs[0]]
            for (what, _), one in zip(outputs[0], numbers, strict=True):
                if isinstance(what, tuple) and what[0] == "result":
                    results[what[2]] = one
            name = self._name if count == 1 else f"{self._name} ({seen + 1} of {count})"
            if numbers:
                steps.append(_Raw(step, name, inputs, outputs, numbers))
            if step.makes is not None:
                filled[step.makes] = seen
            seen += 1
        return _Block(cut, steps, arguments, results)

    def _is_alike(self, operand: Any, place: dict[Any, int], argument: _LiesOf) -> bool:
        """Whether a value is an argument that lies in the same way on all islands."""
        if operand not in place:
            return False
        return len({argument(place[operand], island) for island in self._islands}) == 1

    def _adder(self, bucket: Bucket, named: Callable[[Any], int]) -> Step:
        codes: list[Code] = []
        inputs: list[tuple[Ref, ...]] = []
        for island in self._islands:
            if not codes or not self._is_uniform:
                codes.append(self._writer.adder(bucket, island))
            own = bucket.sum.aligned.islands[island]
            part = 0 if bucket.parts == 1 else own.index(island)
            inputs.append(tuple(Ref(named((bucket, part)), other) for other in own))
        every = tuple(codes) if not self._is_uniform else (codes[0],) * len(self._islands)
        return Step(every, tuple(inputs), (named(("sum", bucket)),))

    def _loop(
        self,
        cut: Cut,
        opened: Opened,
        number: dict[Any, int],
        named: Callable[[Any], int],
        lies_of: Callable[[Any, int], Lies],
    ) -> _RawLoop:
        loop = opened.operation
        count, body = iterations(loop), entry(loop, 1)
        is_ready = [
            is_kept and cut.is_ready(value)
            for value, is_kept in zip(loop.operands, opened.kept, strict=True)
        ]
        operands = [
            number[value] if ready else named(("whole", value))
            for value, ready in zip(loop.operands, is_ready, strict=True)
        ]

        def carried(at: int, island: int) -> Lies:
            if is_ready[at]:
                return lies_of(loop.operands[at], island)
            return self._writer.between(body.arguments[at], island)

        kept = [at for at, is_kept in enumerate(opened.kept) if is_kept]
        made = self._block(body, carried, carried, kept)
        return _RawLoop(count, operands, made, [named(value) for value in loop.results])

    # --- code -------------------------------------------------------------------------------------

    def _written(self, block: _Block, donated: set[int]) -> tuple[list[Any], set[int]]:
        """Write the steps of a block; return them, and which of the `donated` values a step takes over."""
        last, taken = _last_uses(block, donated), set[int]()
        written: list[Any] = []
        for at, step in enumerate(block.steps):
            if isinstance(step, Step):
                written.append(step)
            elif isinstance(step, _RawLoop):
                written.append(self._written_loop(step))
            else:
                own = {value for value, where in last.items() if where == at}
                taken |= own
                written.append(self._written_piece(block.cut, step, own))
        return written, taken

    def _written_piece(self, cut: Cut, raw: _Raw, taken: set[int]) -> Step:
        codes: list[Code] = []
        inputs: list[tuple[Ref, ...]] = []
        has_number = False
        for island in self._islands:
            own = raw.inputs[island]
            if not codes or not self._is_uniform:
                donated = [at for at, one in enumerate(own) if one.ref.value in taken]
                code, has_number = self._writer.piece(
                    cut,
                    raw.piece,
                    island,
                    [(one.what, one.lies) for one in own],
                    [(_made(what), lies) for what, lies in raw.outputs[island]],
                    raw.name,
                    donated,
                )
            codes.append(code)
            number = (Ref(NUMBER, island),) if has_number else ()
            inputs.append((*[one.ref for one in own], *number))
        return Step(tuple(codes), tuple(inputs), tuple(raw.numbers))

    def _written_loop(self, loop: _RawLoop) -> Loop:
        body = loop.body
        first, _ = self._written(body, set())
        changing = {
            own
            for own, after in zip(body.arguments, body.results, strict=True)
            if own != after and body.results.count(after) == 1
        }
        rest, _ = self._written(body, changing) if loop.iterations > 1 else (first, set())
        return Loop(
            loop.iterations,
            tuple(loop.operands),
            tuple(body.arguments),
            tuple(first),
            tuple(rest),
            tuple(body.results),
            tuple(loop.outputs),
        )


def _made(what: Any) -> Any:
    """Return an output as `Writer.piece` names it."""
    return ("whole", what[1]) if isinstance(what, tuple) and what[0] == "result" else what


def _last_uses(block: _Block, wanted: set[int]) -> dict[int, int]:
    """Return the last step that uses each value, if each island uses only its own there, and once."""
    last: dict[int, int] = {}
    uses: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for at, step in enumerate(block.steps):
        if isinstance(step, _RawLoop):
            last.update(dict.fromkeys(wanted.intersection(step.operands), -1))
            continue
        refs = (
            step.inputs
            if isinstance(step, Step)
            else [[one.ref for one in own] for own in step.inputs]
        )
        for island, own in enumerate(refs):
            for ref in own:
                if ref.value in wanted:
                    last[ref.value] = at if last.get(ref.value) != -1 else -1
                    uses.setdefault((ref.value, at), []).append((island, ref.island))
    found = {}
    for value, at in last.items():
        here = uses.get((value, at), [])
        islands = [island for island, _ in here]
        is_own = all(a == b for a, b in here) and len(set(islands)) == len(islands)
        is_piece = at >= 0 and isinstance(block.steps[at], _Raw)
        if is_own and is_piece and value not in block.results:
            found[value] = at
    return found


def _is_uniform(main: Any, assignment: Assignment, sides: Sides) -> bool:
    """Whether the code of each piece is the same on all islands."""
    if not assignment.is_even or len({tuple(mesh.items()) for mesh in sides.meshes}) > 1:
        return False
    if any(len(set(lies)) > 1 for lies in (*sides.arguments, *sides.results)):
        return False
    for one in walk(main):
        if one.name not in NAMES:
            continue
        if not is_crossing(one, assignment):
            own = [
                sorted(
                    tuple(assignment.position[each] for each in group)
                    for group in groups_of(one)
                    if group and assignment.islands[group[0]] == island
                )
                for island in range(assignment.count)
            ]
            if any(groups != own[0] for groups in own):
                return False
            continue
        if one.name == PERMUTE:
            made = exchange_of(one, assignment)
            if isinstance(made, Permute) and not made.is_uniform:
                return False
            continue
        made = exchange_of(one, assignment)
        lies = getattr(made, "lies", None)
        if lies is not None and (len(set(lies.inner)) > 1 or len(set(lies.order)) > 1):
            return False
    return True
