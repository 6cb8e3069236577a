"""The programs that clients register in a simulated run."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from pw.core.sharding import ArraySpec
from pw.testing.sim.branches import random_branches, random_burst
from pw.testing.sim.moving import random_moves
from pw.testing.sim.pipelines import random_pipeline
from pw.testing.sim.profiles import Profile
from pw.testing.sim.programs import ProgramDraft, SimSlice, random_program, random_step


def random_draft(
    random: Random,
    profile: Profile,
    slices: Sequence[SimSlice],
    kinds: Sequence[ArraySpec],
    name: str,
) -> ProgramDraft:
    """Return a program of a form that the profile has."""
    if profile.steps and random.random() < profile.steps:
        return random_step(random, kinds, name)
    if profile.moves and random.random() < profile.moves:
        return random_moves(random, slices, kinds, name)
    if profile.pipelines and random.random() < profile.pipelines:
        return random_pipeline(random, slices, kinds, name)
    broken = profile.broken_programs and random.random() < 0.05
    make = random_program
    if random.random() < profile.branches:
        make = random_burst if random.random() < 0.3 else random_branches
    return make(random, slices, kinds, name, broken=broken)
