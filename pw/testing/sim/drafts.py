"""The programs that clients register in a simulated run."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import msgspec

from pw.core.programs.program import Output, ValueRef
from pw.core.sharding import ArraySpec, Placement, Sharding
from pw.testing.sim.branches import random_branches, random_burst
from pw.testing.sim.pipelines import random_pipeline
from pw.testing.sim.profiles import SimProfile
from pw.testing.sim.programs import (
    Drafting,
    ProgramDraft,
    SimSlice,
    random_program,
    random_spec,
    random_step,
)


def random_draft(
    random: Random,
    profile: SimProfile,
    slices: Sequence[SimSlice],
    kinds: Sequence[ArraySpec],
    name: str,
) -> ProgramDraft:
    """Return a program of a form that the profile has."""
    if profile.steps and random.random() < profile.steps:
        return random_step(random, kinds, name)
    if profile.moves and random.random() < profile.moves:
        return _random_moves(random, slices, kinds, name)
    if profile.pipelines and random.random() < profile.pipelines:
        return random_pipeline(random, slices, kinds, name)
    broken = profile.broken_programs and random.random() < 0.05
    make = random_program
    if random.random() < profile.branches:
        make = random_burst if random.random() < 0.3 else random_branches
    return make(random, slices, kinds, name, broken=broken)


def _random_moves(
    random: Random, slices: Sequence[SimSlice], kinds: Sequence[ArraySpec], name: str
) -> ProgramDraft:
    """Return a program whose argument goes to each slice, and there from one sharding to others."""
    source = random.choice(kinds)
    program = Drafting(name)
    outputs = []
    for part in random.sample(list(slices), len(slices)):
        devices = tuple(
            range(random.choice([n for n in (2, 4, part.size) if n <= part.size] or [1]))
        )
        place = Placement(part.number, devices)
        base = ArraySpec(source.shape, source.dtype, Sharding(("x",), (len(devices),)), place)
        value = ValueRef(-1, 0)
        takes = base if random.random() < 0.7 else _other(random, part, base)
        for step in range(random.choice((1, 2, 3))):
            makes = _other(random, part, base)
            one = f"{name}/{len(program.nodes)}"
            (value,) = program.compute(one, [takes], [makes], [value], placement=place)
            takes = base if step else _other(random, part, base)
        outputs.append(Output(value, random.choice((base, makes))))
    return program.draft([source], outputs, (0,) if random.random() < 0.2 else ())


def _other(random: Random, part: SimSlice, base: ArraySpec) -> ArraySpec:
    """Return another sharding over the same devices, mostly in the same order."""
    spec = random_spec(random, part, base.shape, base.dtype, base.placement.devices)
    return (
        msgspec.structs.replace(spec, placement=base.placement) if random.random() < 0.8 else spec
    )
