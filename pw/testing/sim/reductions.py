"""Programs as `pw.client.trace.joined` makes them: pieces on each island, and sums between islands.

Each slice runs the same pieces. A piece fills a bucket of as many parts as there are slices; slice i adds
part i of all slices, in their order, and the last piece of each slice takes all sums. The additions
of a bucket come after the next piece, so that they do not hold it up.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from random import Random

from pw.core.messages import Artifact
from pw.core.programs.program import Computation, Node, Output, Program, Value
from pw.core.sharding import ArraySpec, Placement, Sharding
from pw.testing.sim.programs import Draft, Slice

ADDS = "/sum"
"""In the names of computations that add the parts of all slices."""


def reduction(random: Random, slices: Sequence[Slice], name: str) -> Draft:
    """Return a program that takes and gives one array on each slice, and reduces between them."""
    width = random.choice([n for n in (1, 2, 4) if n <= min(part.size for part in slices)])
    length = random.choice((16, 64, 4096))
    places = [Placement(part.number, tuple(range(width))) for part in slices]

    def whole(place: Placement, split: bool) -> ArraySpec:
        return ArraySpec((length,), "uint8", Sharding(("x",), (width,), (("x",),) * split), place)

    states = [whole(place, False) for place in places]
    parts = [whole(place, True) for place in places]
    islands = range(len(slices))
    computations: list[Computation] = []
    nodes: list[Node] = []
    blobs: dict[bytes, bytes] = {}

    def call(
        what: str, at: int, takes: list[ArraySpec], makes: list[ArraySpec], given: list[Value]
    ) -> int:
        blob = f"computes {name}{what}".encode()  # the same code on every slice
        digest = hashlib.sha256(blob).digest()
        blobs[digest] = blob
        computations.append(
            Computation(f"{name}{what}", digest, places[at], tuple(takes), tuple(makes))
        )
        nodes.append(Node(len(computations) - 1, tuple(given)))
        return len(nodes) - 1

    carried = [Value(-1, at) for at in islands]
    filled: list[list[int]] = []
    sums: list[Value] = []

    def add(number: int) -> None:
        for at in islands:
            given = [Value(filled[number][own], 1 + at) for own in islands]
            takes = [parts[at]] * len(slices)
            sums.append(Value(call(f"{ADDS}{number}", at, takes, [parts[at]], given), 0))

    buckets = random.choice((1, 2, 3))
    for number in range(buckets):
        made = [
            call(
                f"/piece{number}",
                at,
                [states[at]],
                [states[at], *([parts[at]] * len(slices))],
                [carried[at]],
            )
            for at in islands
        ]
        carried = [Value(node, 0) for node in made]
        filled.append(made)
        if number:
            add(number - 1)
    add(buckets - 1)
    outputs = []
    for at in islands:
        takes = [states[at], *([parts[at]] * len(sums))]
        last = call("/last", at, takes, [states[at]], [Value(-1, at), *sums])
        outputs.append(Output(Value(last, 0), states[at]))
    gone = tuple(islands) if random.random() < 0.3 else ()
    body = Program(name, tuple(computations), tuple(nodes), tuple(states), tuple(outputs), gone)
    artifacts = tuple(Artifact(digest, blob) for digest, blob in sorted(blobs.items()))
    return Draft(body, artifacts, blobs)
