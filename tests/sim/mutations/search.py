"""Looks for seeds in which the simulator notices a mutation."""

from __future__ import annotations

from pw.testing.sim import PROFILES, simulate
from tests.sim.mutations.table import MUTATIONS

SEEDS = 40


def unnoticed(name: str) -> list[str]:
    """Return nothing if one of the monitors that should notices the mutation, else what did in all seeds."""
    install, seen = MUTATIONS[name]
    others = []
    for seed in (seen.seed, *range(SEEDS)):
        violation = simulate(seed, PROFILES[seen.profile], alter=install).violation
        if violation is not None and violation.monitor in seen.monitors:
            return []
        others.append("nothing" if violation is None else violation.monitor)
    return others


def soonest(name: str, seeds: int) -> tuple[int | None, int]:
    """Return the seed in which the mutation is noticed after the fewest events, and how many."""
    install, seen = MUTATIONS[name]
    found: dict[int, int] = {}
    for seed in range(seeds):
        outcome = simulate(seed, PROFILES[seen.profile], alter=install)
        if outcome.violation is not None and outcome.violation.monitor in seen.monitors:
            found[seed] = outcome.events
    return min(found.items(), key=lambda item: item[1], default=(None, 0))
