"""`pw sim`: run the cluster simulator, and replay seeds."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from concurrent.futures import Executor

import typer

from pw.core.errors import Error
from pw.testing.sim import PROFILES, SeedOutcome, SimProfile, run_campaign, simulate
from pw.testing.sim.campaign import workers
from pw.testing.sim.profiles import FAULTS
from pw.testing.sim.report import failure, summary
from pw.testing.sim.runner import Alter, shrink

SHOWN = 5
"""Failures whose last events are printed; the others are only named."""


def chosen_profiles(
    name: str, hosts: int | None, clients: int | None, runs: int | None, without: str
) -> list[SimProfile]:
    """Return a profile, or all, in the wanted size. Raises Error if there is no such profile or fault."""
    if name not in (*PROFILES, "all"):
        raise Error(f"there is no profile {name!r}; there are {', '.join(PROFILES)} and all")
    faults = [fault for fault in without.split(",") if fault]
    if unknown := set(faults) - set(FAULTS):
        raise Error(f"there is no fault {unknown.pop()!r}; there are {', '.join(FAULTS)}")
    chosen = [*PROFILES.values()] if name == "all" else [PROFILES[name]]
    return [profile.sized(hosts, clients, runs).without(*faults) for profile in chosen]


def seeds_of(text: str) -> range:
    """Return the seeds of `first:end` or a count. Raises Error for other text."""
    first, _, end = text.rpartition(":")
    try:
        return range(int(first or 0), int(end))
    except ValueError:
        raise Error(f"--seeds takes first:end or a count, not {text!r}") from None


def replay(
    seed: int, profile: SimProfile, *, trace: bool, smallest: bool, alter: Alter | None = None
) -> bool:
    """Run one seed and print the outcome. Returns whether all promises held."""
    outcome = simulate(seed, profile, trace=trace, alter=alter)
    if smallest and outcome.violation is not None:
        outcome = shrink(seed, profile, outcome.violation.monitor, alter)
    if trace:
        _print(outcome.trace)
        outcome.trace = []
    if outcome.violation is not None:
        _print(failure(outcome))
        return False
    typer.echo(
        f"seed {seed}: {outcome.events} events, {outcome.simulated_s:.1f} s, nothing violated"
    )
    return True


def search_all(seeds: range, profiles: Sequence[SimProfile], jobs: int, limit_s: float) -> bool:
    """Run many seeds of profiles, which share the time. Returns whether all promises held."""
    failed: list[SeedOutcome] = []
    with workers(jobs) as pool:
        end_s = time.monotonic() + limit_s
        for number, profile in enumerate(profiles):
            share_s = (end_s - time.monotonic()) / (len(profiles) - number)
            failed += search(seeds, profile, pool, share_s)
    if len(profiles) > 1:
        _print([f"violated: profile {one.profile.name}, seed {one.seed}" for one in failed])
    return not failed


def search(
    seeds: range, profile: SimProfile, pool: Executor | None, limit_s: float
) -> list[SeedOutcome]:
    """Run many seeds and print a report. Returns those that violated a promise."""
    failures = 0

    def look(outcome: SeedOutcome) -> None:
        nonlocal failures
        if outcome.violation is None:
            return
        failures += 1
        if failures > SHOWN:
            outcome.trace = []
        _print(failure(outcome))

    campaign = run_campaign(seeds, profile, pool=pool, on_outcome=look, limit_s=limit_s)
    _print(summary(campaign))
    return campaign.failures


def print_digest(seeds: range, profile: SimProfile, jobs: int) -> bool:
    """Print a digest of all messages of these seeds. Returns whether all promises held."""
    digest = hashlib.sha256()
    with workers(jobs) as pool:
        campaign = run_campaign(
            seeds,
            profile,
            pool=pool,
            digest=True,
            on_outcome=lambda outcome: digest.update(outcome.digest.encode()),
        )
    name = f"{profile.name} {seeds.start}:{seeds.stop}"
    typer.echo(f"{digest.hexdigest()[:32]}  {name}, {len(campaign.failures)} violated")
    return not campaign.failures


def _print(lines: list[str]) -> None:
    for line in lines:
        typer.echo(line)
