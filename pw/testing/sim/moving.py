"""Programs that move a value around: to all slices of a client at once, and between shardings on each."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import msgspec

from pw.core.programs.program import Output, ValueRef
from pw.core.sharding import ArraySpec, Placement, Sharding
from pw.testing.sim.programs import Drafting, ProgramDraft, SimSlice, random_spec


def random_moves(
    random: Random, slices: Sequence[SimSlice], kinds: Sequence[ArraySpec], name: str
) -> ProgramDraft:
    """Return a program whose argument goes to each slice, and there from one sharding to others."""
    given = random.choice(kinds)
    program = Drafting(name)
    outputs = []
    for part in random.sample(list(slices), len(slices)):
        devices = tuple(
            range(random.choice([n for n in (2, 4, part.size) if n <= part.size] or [1]))
        )
        place = Placement(part.number, devices)
        whole = ArraySpec(given.shape, given.dtype, Sharding(("x",), (len(devices),)), place)
        value = ValueRef(-1, 0)
        takes = whole if random.random() < 0.7 else _other(random, part, whole)
        for step in range(random.choice((1, 2, 3))):
            makes = _other(random, part, whole)
            one = f"{name}/{len(program.nodes)}"
            (value,) = program.compute(one, [takes], [makes], [value], placement=place)
            takes = whole if step else _other(random, part, whole)
        outputs.append(Output(value, random.choice((whole, makes))))
    return program.draft([given], outputs, (0,) if random.random() < 0.2 else ())


def _other(random: Random, part: SimSlice, whole: ArraySpec) -> ArraySpec:
    """Return another sharding over the same devices, mostly in the same order."""
    spec = random_spec(random, part, whole.shape, whole.dtype, whole.placement.devices)
    return (
        msgspec.structs.replace(spec, placement=whole.placement) if random.random() < 0.8 else spec
    )
