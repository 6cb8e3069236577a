"""Many seeds, one after the other or on several processes, added up."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial

from pw.testing.sim.profiles import SimProfile
from pw.testing.sim.runner import SeedOutcome, simulate

SUBMITTED = 1000
"""Number of seeds that a pool gets at once."""


@dataclass(slots=True)
class Campaign:
    """The outcomes of many seeds."""

    profile: SimProfile
    seeds: int = 0
    events: int = 0
    simulated_s: float = 0.0
    wall_s: float = 0.0
    """Seconds from the first seed to the last, on as many processes as there were."""
    values: int = 0
    errors: int = 0
    injected: Counter[str] = field(default_factory=Counter)
    checked: Counter[str] = field(default_factory=Counter)
    failures: list[SeedOutcome] = field(default_factory=list)

    def add(self, outcome: SeedOutcome) -> None:
        """Count one seed."""
        self.seeds += 1
        self.events += outcome.events
        self.simulated_s += outcome.simulated_s
        self.values += outcome.values
        self.errors += outcome.errors
        self.injected.update(outcome.injected)
        self.checked.update(outcome.checked)
        if outcome.violation is not None:
            self.failures.append(outcome)

    @property
    def simulated_hours_a_minute(self) -> float:
        """Virtual hours for each minute of a person's time."""
        return self.simulated_s / 60 / self.wall_s if self.wall_s else 0.0


@contextlib.contextmanager
def workers(jobs: int) -> Iterator[Executor | None]:
    """Yield processes that run seeds, or None for one job: this process runs them then."""
    if jobs <= 1:
        yield None
        return
    # What is imported is left out of the collections of the seeds.
    spawned = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, spawned, initializer=gc.freeze) as pool:
        yield pool


def run_campaign(
    seeds: Sequence[int],
    profile: SimProfile,
    *,
    pool: Executor | None = None,
    digest: bool = False,
    on_outcome: Callable[[SeedOutcome], None] = lambda outcome: None,
    limit_s: float = float("inf"),
) -> Campaign:
    """Run many seeds, in their order.

    Args:
        seeds: the seeds to run.
        profile: the size of the cluster, and its faults.
        pool: of `workers`; the outcomes do not depend on it.
        digest: have each outcome say the digest of its messages.
        on_outcome: called with each outcome, in the order of the seeds.
        limit_s: run no seed after so many seconds, except the first one.
    """
    campaign = Campaign(profile)
    started_s = time.perf_counter()
    with contextlib.closing(_outcomes(seeds, profile, pool, digest)) as outcomes:
        for outcome in outcomes:
            campaign.add(outcome)
            campaign.wall_s = time.perf_counter() - started_s
            on_outcome(outcome)
            if campaign.wall_s > limit_s:
                break
    return campaign


def _outcomes(
    seeds: Sequence[int], profile: SimProfile, pool: Executor | None, digest: bool
) -> Generator[SeedOutcome, None, None]:
    one = partial(simulate, profile=profile, digest=digest)
    if pool is None:
        yield from map(one, seeds)
        return
    for first in range(0, len(seeds), SUBMITTED):
        yield from pool.map(one, seeds[first : first + SUBMITTED])
