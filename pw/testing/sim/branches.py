"""Programs with branches (`pw.core.guards`): one choice, choices in a branch, and loops of guarded iterations.

The predicates are digests as well, so about half of them are true. The computations of a branch lie on any of
the client's slices, so a gang of one island may be guarded by a predicate of another.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from random import Random

from pw.core.guards import merge, predicate_spec
from pw.core.messages import Artifact
from pw.core.program import Computation, Node, Output, Program, Value
from pw.core.sharding import ArraySpec, Placement
from pw.testing.sim.digests import RAISES
from pw.testing.sim.programs import Draft, Slice, random_spec

_Guard = tuple[Value, bool]
"""A predicate, and whether it must be false."""


def random_branches(
    random: Random,
    slices: Sequence[Slice],
    kinds: Sequence[ArraySpec],
    name: str,
    *,
    broken: bool = False,
) -> Draft:
    """A program with branches that takes an array of one kind, and returns one or two of them.

    Args:
        random: the source of chance.
        slices: where its computations may run.
        kinds: what it may take and return.
        name: names its client, and makes its results differ from those of other programs.
        broken: one of its computations always fails, if it is not skipped.
    """
    step = _Step(random, slices, random.choice(kinds), name, broken)
    value: Value = Value(-1, 0)
    for _ in range(random.choice((1, 1, 2))):
        value = step.loop(value) if random.random() < 0.4 else step.choice(value, None)
    outputs = [Output(value, step.kind)]
    if random.random() < 0.3:
        behind = step.call([value], [step.kind], None, step.kind.placement)[0]
        outputs.append(Output(behind, step.kind))
    gone = (0,) if random.random() < 0.15 else ()
    computations = tuple(step.computations)
    body = Program(name, computations, tuple(step.nodes), (step.kind,), tuple(outputs), gone)
    artifacts = tuple(Artifact(digest, blob) for digest, blob in sorted(step.blobs.items()))
    return Draft(body, artifacts, step.blobs)


class _Step:
    """A program under construction; all its values but the predicates have the shape of one kind."""

    def __init__(
        self, random: Random, slices: Sequence[Slice], kind: ArraySpec, name: str, broken: bool
    ) -> None:
        self._random, self._slices, self.kind, self._name = random, slices, kind, name
        self._bad = random.randrange(4) if broken else -1
        self.computations: list[Computation] = []
        self.nodes: list[Node] = []
        self.blobs: dict[bytes, bytes] = {}

    def choice(self, value: Value, guard: _Guard | None, depth: int = 0) -> Value:
        """Add a choice between two branches; returns what they make of a value."""
        predicate = self._predicate([value], guard)
        results = []
        for unless in (False, True):
            own = value
            for _ in range(self._random.choice((0, 1, 1, 2))):
                own = self.call([own], [self._spec()], (predicate, unless))[0]
            if depth < 2 and self._random.random() < 0.3:
                own = self.choice(own, (predicate, unless), depth + 1)
            results.append(own)
        return self._merge(predicate, results, guard)

    def loop(self, value: Value) -> Value:
        """Add guarded iterations; each makes the predicate of the next one."""
        predicate = self._predicate([value], None)
        for _ in range(self._random.randint(2, 5)):
            guard = (predicate, False)
            made = self.call([value], [self._spec()], guard)[0]
            following = self._predicate([made], guard)
            value = self._merge(predicate, [made, value], None)
            predicate = following
        return value

    def call(
        self,
        given: Sequence[Value],
        makes: Sequence[ArraySpec],
        guard: _Guard | None,
        placement: Placement | None = None,
    ) -> list[Value]:
        """Add a computation on the devices of its first result."""
        random, number = self._random, len(self.nodes)
        placement = placement or makes[0].placement
        takes = [self._spec(placement) for _ in given]
        prefix = RAISES if number == self._bad else b"computes"
        blob = prefix + f" {self._name}/{number}".encode()
        digest = hashlib.sha256(blob).digest()
        self.blobs[digest] = blob
        donated = tuple(index for index in range(len(takes)) if random.random() < 0.2)
        name = f"{self._name}/{number}"
        self.computations.append(
            Computation(name, digest, placement, tuple(takes), tuple(makes), donated)
        )
        return self._node(given, len(makes), guard)

    def _node(self, given: Sequence[Value], count: int, guard: _Guard | None) -> list[Value]:
        predicate, unless = guard or (None, False)
        number = len(self.nodes)
        self.nodes.append(Node(len(self.computations) - 1, tuple(given), predicate, unless))
        return [Value(number, index) for index in range(count)]

    def _predicate(self, given: Sequence[Value], guard: _Guard | None) -> Value:
        return self.call(given, [predicate_spec(self._spec().placement)], guard)[0]

    def _merge(self, predicate: Value, results: Sequence[Value], guard: _Guard | None) -> Value:
        self.computations.append(merge(f"{self._name}/merge", [self.kind]))
        return self._node([predicate, *results], 1, guard)[0]

    def _spec(self, placement: Placement | None = None) -> ArraySpec:
        """Return a spec of the shape of the kind: often the kind, or on other devices."""
        random, kind = self._random, self.kind
        if placement is not None:
            if placement == kind.placement and random.random() < 0.7:
                return kind
            part = Slice(placement.slice, len(placement.devices))
            return random_spec(random, part, kind.shape, kind.dtype, placement.devices)
        if random.random() < 0.3:
            return kind
        return random_spec(random, random.choice(self._slices), kind.shape, kind.dtype)
