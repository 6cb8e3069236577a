"""Programs with branches (`pw.core.programs.guards`): one choice, choices in a branch, and loops of guarded
iterations.

The predicates are digests as well, so about half of them are true. The computations of a branch lie on any of
the client's slices, so a gang of one island may be guarded by a predicate of another.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

from pw.core.programs.guards import hold, merge, predicate_spec
from pw.core.programs.program import Output, ValueRef
from pw.core.sharding import ArraySpec, Placement
from pw.testing.sim.digests import RAISES
from pw.testing.sim.programs import Drafting, ProgramDraft, SimSlice, random_spec

_Guard = tuple[ValueRef, bool]
"""Predicate, and whether it must be false."""


def random_branches(
    random: Random,
    slices: Sequence[SimSlice],
    kinds: Sequence[ArraySpec],
    name: str,
    *,
    broken: bool = False,
) -> ProgramDraft:
    """A program with branches that takes an array of one kind, and returns one or two of them.

    Args:
        random: the source of chance.
        slices: where its computations may run.
        kinds: what it may take and return.
        name: names its client, and makes its results differ from those of other programs.
        broken: one of its computations always fails, if it is not skipped.
    """
    step = _BranchDraft(random, slices, random.choice(kinds), name, broken)
    value: ValueRef = ValueRef(-1, 0)
    for _ in range(random.choice((1, 1, 2))):
        value = step.loop(value) if random.random() < 0.4 else step.choice(value, None)
    outputs = [Output(value, step.kind)]
    if random.random() < 0.3:
        behind = step.do([value], [step.kind], None, step.kind.placement)[0]
        outputs.append(Output(behind, step.kind))
    gone = (0,) if random.random() < 0.15 else ()
    return step.draft((step.kind,), outputs, gone)


def random_burst(
    random: Random,
    slices: Sequence[SimSlice],
    kinds: Sequence[ArraySpec],
    name: str,
    *,
    broken: bool = False,
) -> ProgramDraft:
    """A burst of a loop: a program that takes and returns a predicate and a carry, which it takes over.

    The arguments are those of `random_branches`. Its iterations are all skipped if the predicate is false.
    """
    step = _BranchDraft(random, slices, random.choice(kinds), name, broken)
    spec = predicate_spec(step.kind.placement)
    predicate, carry = ValueRef(-1, 0), ValueRef(-1, 1)
    for _ in range(random.randint(1, 4)):
        guard = (predicate, False)
        result = step.do([carry], [step.kind], guard)[0]
        if random.random() < 0.5:  # through another slice, or other devices
            result = step.do([step.do([result], [step.spec()], guard)[0]], [step.kind], guard)[0]
        following = step.do([result], [spec], guard)[0]
        carry = step.merge(predicate, [result, carry], step.kind)
        predicate = step.merge(predicate, [following, predicate], spec)
    return step.draft((spec, step.kind), [Output(predicate, spec), Output(carry, step.kind)], (1,))


def _guarded(guard: _Guard | None) -> dict[str, Any]:
    return {} if guard is None else {"guard": guard[0], "unless": guard[1]}


class _BranchDraft(Drafting):
    """A program under construction; all its values but the predicates have the shape of one kind."""

    def __init__(
        self, random: Random, slices: Sequence[SimSlice], kind: ArraySpec, name: str, broken: bool
    ) -> None:
        super().__init__(name)
        self._random, self._slices, self.kind = random, slices, kind
        self._bad = random.randrange(4) if broken else -1

    def choice(self, value: ValueRef, guard: _Guard | None, depth: int = 0) -> ValueRef:
        """Add a choice between two branches; returns what they make of a value."""
        predicate = self._predicate([value], guard)
        results = []
        for unless in (False, True):
            own = value
            if self._random.random() < 0.4:
                own = self._hold(value, (predicate, unless))
            for _ in range(self._random.choice((0, 1, 1, 2))):
                own = self.do([own], [self.spec()], (predicate, unless))[0]
            if depth < 2 and self._random.random() < 0.3:
                own = self.choice(own, (predicate, unless), depth + 1)
            results.append(own)
        return self.merge(predicate, results, self.kind, guard)

    def loop(self, value: ValueRef) -> ValueRef:
        """Add guarded iterations; each makes the predicate of the next one."""
        predicate = self._predicate([value], None)
        for _ in range(self._random.randint(2, 5)):
            guard = (predicate, False)
            result = self.do([value], [self.spec()], guard)[0]
            following = self._predicate([result], guard)
            value = self.merge(predicate, [result, value], self.kind)
            predicate = following
        return value

    def do(
        self,
        args: Sequence[ValueRef],
        makes: Sequence[ArraySpec],
        guard: _Guard | None,
        placement: Placement | None = None,
    ) -> list[ValueRef]:
        """Add a computation on the devices of its first result."""
        random, number = self._random, len(self.nodes)
        placement = placement or makes[0].placement
        takes = [self.spec(placement) for _ in args]
        prefix = RAISES if number == self._bad else b"computes"
        return self.compute(
            f"{self.name}/{number}",
            takes,
            makes,
            args,
            blob=prefix + f" {self.name}/{number}".encode(),
            placement=placement,
            donated=tuple(index for index in range(len(takes)) if random.random() < 0.2),
            **_guarded(guard),
        )

    def _hold(self, value: ValueRef, guard: _Guard) -> ValueRef:
        """Hold a value back where it lies until a branch is chosen."""
        spec = self.kind
        if value.node >= 0:
            made_by = self.computations[self.nodes[value.node].computation]
            spec = made_by.outputs[value.index]
        return self.add(hold(spec), [guard[0], value, value], **_guarded(guard))[0]

    def _predicate(self, args: Sequence[ValueRef], guard: _Guard | None) -> ValueRef:
        return self.do(args, [predicate_spec(self.spec().placement)], guard)[0]

    def merge(
        self,
        predicate: ValueRef,
        results: Sequence[ValueRef],
        spec: ArraySpec,
        guard: _Guard | None = None,
    ) -> ValueRef:
        """Add a merge of two values of a spec."""
        computation = merge(f"{self.name}/merge", [spec])
        return self.add(computation, [predicate, *results], **_guarded(guard))[0]

    def spec(self, placement: Placement | None = None) -> ArraySpec:
        """Return a spec of the shape of the kind: often the kind, or on other devices."""
        random, kind = self._random, self.kind
        if placement is not None:
            if placement == kind.placement and random.random() < 0.7:
                return kind
            part = SimSlice(placement.slice, len(placement.devices))
            return random_spec(random, part, kind.shape, kind.dtype, placement.devices)
        if random.random() < 0.3:
            return kind
        return random_spec(random, random.choice(self._slices), kind.shape, kind.dtype)
