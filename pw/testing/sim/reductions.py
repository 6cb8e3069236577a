"""Programs as `pw.client.trace.joined` makes them: pieces on each island, and sums between islands.

Each slice runs the same pieces. A piece fills a bucket of as many parts as there are slices; slice i adds
part i of all slices, in their order, and the last piece of each slice takes all sums. The additions
of a bucket come after the next piece, so that they do not hold it up.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from pw.core.programs.program import Output, ValueRef
from pw.core.sharding import ArraySpec, Placement, Sharding
from pw.testing.sim.programs import Drafting, ProgramDraft, SimSlice

ADDS = "/sum"
"""In the names of computations that add the parts of all slices."""


def reduction(random: Random, slices: Sequence[SimSlice], name: str) -> ProgramDraft:
    """Return a program that takes and gives one array on each slice, and reduces between them."""
    width = random.choice([n for n in (1, 2, 4) if n <= min(part.size for part in slices)])
    length = random.choice((16, 64, 4096))
    places = [Placement(part.number, tuple(range(width))) for part in slices]

    def whole(place: Placement, split: bool) -> ArraySpec:
        return ArraySpec((length,), "uint8", Sharding(("x",), (width,), (("x",),) * split), place)

    states = [whole(place, False) for place in places]
    parts = [whole(place, True) for place in places]
    islands = range(len(slices))
    program = Drafting(name)  # with the same code on every slice
    carried = [ValueRef(-1, at) for at in islands]
    filled: list[list[list[ValueRef]]] = []
    sums: list[ValueRef] = []

    def add(number: int) -> None:
        for at in islands:
            given = [filled[number][own][1 + at] for own in islands]
            takes = [parts[at]] * len(slices)
            sums.extend(program.compute(f"{name}{ADDS}{number}", takes, [parts[at]], given))

    buckets = random.choice((1, 2, 3))
    for number in range(buckets):
        made = [
            program.compute(
                f"{name}/piece{number}",
                [states[at]],
                [states[at], *([parts[at]] * len(slices))],
                [carried[at]],
            )
            for at in islands
        ]
        carried = [results[0] for results in made]
        filled.append(made)
        if number:
            add(number - 1)
    add(buckets - 1)
    outputs = []
    for at in islands:
        takes = [states[at], *([parts[at]] * len(sums))]
        (last,) = program.compute(f"{name}/last", takes, [states[at]], [ValueRef(-1, at), *sums])
        outputs.append(Output(last, states[at]))
    return program.draft(states, outputs, tuple(islands) if random.random() < 0.3 else ())
