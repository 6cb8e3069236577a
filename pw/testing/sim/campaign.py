"""Many seeds, one after the other or on several processes, added up."""

from __future__ import annotations

import gc
import multiprocessing
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial

from pw.testing.sim.profiles import Profile
from pw.testing.sim.runner import Outcome, simulate


@dataclass(slots=True)
class Campaign:
    """The outcomes of many seeds."""

    profile: Profile
    seeds: int = 0
    events: int = 0
    simulated_s: float = 0.0
    wall_s: float = 0.0
    """From the first seed to the last, on as many processes as there were."""
    values: int = 0
    errors: int = 0
    injected: Counter[str] = field(default_factory=Counter)
    checked: Counter[str] = field(default_factory=Counter)
    failures: list[Outcome] = field(default_factory=list)

    def add(self, outcome: Outcome) -> None:
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


def run_campaign(
    seeds: Sequence[int],
    profile: Profile,
    *,
    jobs: int = 1,
    digest: bool = False,
    on_outcome: Callable[[Outcome], None] = lambda outcome: None,
) -> Campaign:
    """Run many seeds.

    Args:
        seeds: the seeds to run.
        profile: the size of the cluster, and its faults.
        jobs: processes to run them on; the outcomes do not depend on it.
        digest: have each outcome say the digest of its messages.
        on_outcome: called with each outcome, in the order of the seeds.
    """
    campaign = Campaign(profile)
    started_s = time.perf_counter()
    for outcome in _outcomes(seeds, profile, jobs, digest):
        campaign.add(outcome)
        campaign.wall_s = time.perf_counter() - started_s
        on_outcome(outcome)
    return campaign


def _outcomes(seeds: Iterable[int], profile: Profile, jobs: int, digest: bool) -> Iterator[Outcome]:
    one = partial(simulate, profile=profile, digest=digest)
    if jobs <= 1:
        yield from map(one, seeds)
        return
    # What is imported is left out of the collections of the seeds.
    spawned = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, spawned, initializer=gc.freeze) as pool:
        yield from pool.map(one, seeds, chunksize=4)
