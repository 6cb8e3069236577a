"""Programs that move a value around: to all slices of a client at once, and between shardings on each."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from random import Random

import msgspec

from pw.core.messages import Artifact
from pw.core.programs.program import Computation, Node, Output, Program, Value
from pw.core.sharding import ArraySpec, Placement, Sharding
from pw.testing.sim.programs import Draft, Slice, random_spec


def random_moves(
    random: Random, slices: Sequence[Slice], kinds: Sequence[ArraySpec], name: str
) -> Draft:
    """Return a program whose argument goes to each slice, and there from one sharding to others."""
    given = random.choice(kinds)
    computations: list[Computation] = []
    nodes: list[Node] = []
    blobs: dict[bytes, bytes] = {}
    outputs = []
    for part in random.sample(list(slices), len(slices)):
        devices = tuple(
            range(random.choice([n for n in (2, 4, part.size) if n <= part.size] or [1]))
        )
        place = Placement(part.number, devices)
        whole = ArraySpec(given.shape, given.dtype, Sharding(("x",), (len(devices),)), place)
        value = Value(-1, 0)
        takes = whole if random.random() < 0.7 else _other(random, part, whole)
        for step in range(random.choice((1, 2, 3))):
            makes = _other(random, part, whole)
            blob = f"computes {name}/{len(nodes)}".encode()
            digest = hashlib.sha256(blob).digest()
            blobs[digest] = blob
            computations.append(
                Computation(f"{name}/{len(nodes)}", digest, place, (takes,), (makes,))
            )
            nodes.append(Node(len(nodes), (value,)))
            value = Value(len(nodes) - 1, 0)
            takes = whole if step else _other(random, part, whole)
        outputs.append(Output(value, random.choice((whole, makes))))
    gone = (0,) if random.random() < 0.2 else ()
    body = Program(name, tuple(computations), tuple(nodes), (given,), tuple(outputs), gone)
    artifacts = tuple(Artifact(digest, blob) for digest, blob in sorted(blobs.items()))
    return Draft(body, artifacts, blobs)


def _other(random: Random, part: Slice, whole: ArraySpec) -> ArraySpec:
    """Return another sharding over the same devices, mostly in the same order."""
    spec = random_spec(random, part, whole.shape, whole.dtype, whole.placement.devices)
    return (
        msgspec.structs.replace(spec, placement=whole.placement) if random.random() < 0.8 else spec
    )
