"""Makes a failing schedule small before a person reads it.

Kinds of faults are left out one by one, then runs and clients halved, as long as the same monitor
is still violated. Each random stream belongs to one decision, so the rest of a run changes little.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from pw.testing.sim.profiles import FAULTS, Profile
from pw.testing.sim.runner import Alter, Outcome, simulate


def shrink(seed: int, profile: Profile, monitor: str, alter: Alter | None = None) -> Outcome:
    """The outcome of the seed under the mildest profile found (`Outcome.profile`)."""
    best = simulate(seed, profile, alter=alter)
    progress = True
    while progress:
        progress = False
        for candidate in _milder(best.profile):
            outcome = simulate(seed, candidate, alter=alter)
            if outcome.violation is not None and outcome.violation.monitor == monitor:
                best, progress = outcome, True
                break
    return best


def _milder(profile: Profile) -> Iterator[Profile]:
    for fault in FAULTS:
        if getattr(profile, fault):
            yield profile.without(fault)
    for size in ("runs", "clients"):
        count = getattr(profile, size)
        for fewer in sorted({count // 2, count * 3 // 4, count - 1}):
            if 0 < fewer < count:
                yield dataclasses.replace(profile, **{size: fewer})
