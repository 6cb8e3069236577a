"""Plans a function over islands: its steps, with the code of each."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from pw.islands import plan as plans
from pw.islands.assignment import Assignment
from pw.islands.collectives import exchange_of
from pw.islands.cutting import Cut, Opened, Piece
from pw.islands.division import Divided
from pw.islands.endings import end_by_island
from pw.islands.exchanges import Permute
from pw.islands.flat import entry, flatten, walk
from pw.islands.groups import NAMES, PERMUTE, aligned, groups_of, is_crossing
from pw.islands.labels import Labels, LabelsOf, labels_of
from pw.islands.loops import choose, iterations
from pw.islands.partial_sums import Sums
from pw.islands.plan import NUMBER, Code, Lies, Plan, PlanLoop, PlanStep, Ref
from pw.islands.reductions import merge
from pw.islands.scope import Input, LiesOf, Scope
from pw.islands.sums import Bucket
from pw.islands.writing import Sides, Writer


def plan(
    divided: Divided, assignment: Assignment, sides: Sides, name: str, donated: Collection[int] = ()
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
    merge(main, assignment)
    end_by_island(main, assignment)
    block = entry(main)
    labels = [labels_of(one, assignment.partitions) for one in divided.arguments]
    planner = _Planner(main, assignment, sides, name)
    return planner.plan(block, labels, donated)


class _Raw(NamedTuple):
    """A piece that is not written yet."""

    piece: Piece
    name: str
    inputs: list[list[Input]]
    """Values that the piece takes, by island."""
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
    counter: plans.Counter
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

    def plan(self, block: Any, labels: Sequence[Labels], donated: Collection[int]) -> Plan:
        """Plan the whole function."""
        self._labels = LabelsOf(block, labels, self._assignment.partitions)
        self._writer = Writer(
            self._main, self._sides.meshes, self._assignment, self._labels, self._name
        )
        arguments, results = self._sides.arguments, self._sides.results
        raw = self._block(
            block, lambda at, island: arguments[at][island], lambda at, island: results[at][island]
        )
        steps, reused = self._written(raw, {raw.arguments[at] for at in donated})
        unused = tuple(at for at in donated if raw.arguments[at] not in reused)
        return Plan(tuple(steps), tuple(raw.results), unused)

    # --- steps ------------------------------------------------------------------------------------

    def _block(
        self,
        block: Any,
        argument: LiesOf,
        result: LiesOf,
        kept: Collection[int] = (),
        within: str = "",
    ) -> _Block:
        sums = Sums(block, self._assignment, self._labels)
        while choices := [one for one in sums.opened if one.name != "stablehlo.while"]:
            for one in choices:
                choose(one)
            self._labels.add(block, [self._labels[value] for value in block.arguments])
            sums = Sums(block, self._assignment, self._labels)
        cut = Cut(block, sums, self._labels, self._assignment, kept)
        scope = Scope(cut, self._writer, self._numbers, self._islands, argument, result)
        results = [scope.arguments[at] if at in kept else 0 for at in range(len(cut.results))]
        steps: list[Any] = []
        count, seen = len(cut.pieces), 0
        for step in cut.steps:
            if isinstance(step, Opened):
                steps.append(self._loop(scope, step))
                continue
            seen += 1
            name = self._name if count == 1 else f"{self._name} ({within}{seen} of {count})"
            inputs = [scope.inputs(step, island) for island in self._islands]
            outputs = [scope.outputs(step, island) for island in self._islands]
            numbers = [scope.named(what) for what, _ in outputs[0]]
            for (what, _), number in zip(outputs[0], numbers, strict=True):
                if isinstance(what, tuple) and what[0] == "result":
                    results[what[2]] = number
            if numbers:
                steps.append(_Raw(step, name, inputs, outputs, numbers))
            if step.makes is not None:
                steps.append(self._adder(scope, step.makes))
        return _Block(cut, steps, scope.arguments, results)

    def _adder(self, scope: Scope, bucket: Bucket) -> PlanStep:
        codes: list[Code] = []
        for island in self._islands:
            is_new = not codes or not self._is_uniform
            codes.append(self._writer.adder(bucket, island) if is_new else codes[0])
        inputs = tuple(scope.addends(bucket, island) for island in self._islands)
        return PlanStep(tuple(codes), inputs, (scope.sum(bucket),))

    def _loop(self, scope: Scope, opened: Opened) -> _RawLoop:
        count, counter = iterations(opened.operation)
        operands, carried = scope.operands(opened), scope.carried(opened, counter)
        kept = [at for at, is_kept in enumerate(opened.kept) if is_kept or at == counter.at]
        body = entry(opened.operation, 1)
        inner = self._block(body, carried, carried, kept, "in each iteration, ")
        return _RawLoop(count, counter, operands, inner, scope.results(opened))

    # --- code -------------------------------------------------------------------------------------

    def _written(self, block: _Block, donated: set[int]) -> tuple[list[Any], set[int]]:
        """Write the steps of a block; return them, and which of the `donated` values a step takes over."""
        last, reused = _last_uses(block, donated), set[int]()
        once = _used_once(block)
        written: list[Any] = []
        for at, step in enumerate(block.steps):
            if isinstance(step, PlanStep):
                written.append(step)
            elif isinstance(step, _RawLoop):
                written.append(self._written_loop(step, once))
            else:
                own = {value for value, where in last.items() if where == at}
                reused |= own
                written.append(self._written_piece(block.cut, step, own))
        return written, reused

    def _written_piece(self, cut: Cut, raw: _Raw, reused: set[int]) -> PlanStep:
        codes: list[Code] = []
        inputs: list[tuple[Ref, ...]] = []
        has_number = False
        for island in self._islands:
            own = raw.inputs[island]
            if not codes or not self._is_uniform:
                donated = [at for at, one in enumerate(own) if one.ref.value in reused]
                code, has_number = self._writer.piece(
                    cut,
                    raw.piece,
                    island,
                    [(one.what, one.lies) for one in own],
                    [(_output(what), lies) for what, lies in raw.outputs[island]],
                    raw.name,
                    donated,
                )
            codes.append(code)
            number = (Ref(NUMBER, island),) if has_number else ()
            inputs.append((*[one.ref for one in own], *number))
        return PlanStep(tuple(codes), tuple(inputs), tuple(raw.numbers))

    def _written_loop(self, loop: _RawLoop, once: set[int]) -> PlanLoop:
        """Write the iterations of a loop: the first one may donate only what is used `once` around it."""
        body = loop.body
        changing = {
            own
            for own, after in zip(body.arguments, body.results, strict=True)
            if own != after and body.results.count(after) == 1
        }
        pairs = zip(body.arguments, loop.operands, strict=True)
        own = changing.intersection(argument for argument, value in pairs if value in once)
        first, _ = self._written(body, own)
        rest = first
        if own != changing and loop.iterations > 1:
            rest, _ = self._written(body, changing)
        return PlanLoop(
            loop.iterations,
            loop.counter,
            tuple(loop.operands),
            tuple(body.arguments),
            tuple(first),
            tuple(rest),
            tuple(body.results),
            tuple(loop.outputs),
        )


def _output(what: Any) -> Any:
    """Return an output as `Writer.piece` names it."""
    return ("whole", what[1]) if isinstance(what, tuple) and what[0] == "result" else what


def _used_once(block: _Block) -> set[int]:
    """Return the values that a block makes, and uses once."""
    uses = Counter(block.results)
    for step in block.steps:
        if isinstance(step, _RawLoop):
            uses.update(step.operands)
        elif isinstance(step, PlanStep):
            uses.update({ref.value for own in step.inputs for ref in own})
        else:
            uses.update({one.ref.value for own in step.inputs for one in own})
    return {value for value, count in uses.items() if count == 1}.difference(block.arguments)


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
            if isinstance(step, PlanStep)
            else [[one.ref for one in own] for own in step.inputs]
        )
        for island, own in enumerate(refs):
            for ref in own:
                if ref.value in wanted:
                    last[ref.value] = at if last.get(ref.value) != -1 else -1
                    uses.setdefault((ref.value, at), []).append((island, ref.island))
    own_last = {}
    for value, at in last.items():
        here = uses.get((value, at), [])
        islands = [island for island, _ in here]
        is_own = all(a == b for a, b in here) and len(set(islands)) == len(islands)
        is_piece = at >= 0 and isinstance(block.steps[at], _Raw)
        if is_own and is_piece and value not in block.results:
            own_last[value] = at
    return own_last


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
            exchange = exchange_of(one, assignment)
            if isinstance(exchange, Permute) and not exchange.is_uniform:
                return False
            continue
        lies = aligned(groups_of(one), assignment)
        if lies is not None and (len(set(lies.inner)) > 1 or len(set(lies.order)) > 1):
            return False
    return True
