"""The report of a simulation, for people."""

from __future__ import annotations

from collections import Counter

from pw.testing.sim.campaign import Campaign
from pw.testing.sim.runner import SeedOutcome

LAST_EVENTS = 40


def summary(campaign: Campaign) -> list[str]:
    """Return the counts of faults and checks, and the speed."""
    profile = campaign.profile
    size = f"{profile.hosts} hosts, {profile.clients} clients, {profile.runs} runs a seed"
    lines = [
        f"{campaign.seeds} seeds of profile {profile.name!r}: {size}",
        f"  injected   {_counted(campaign.injected)}",
        f"  checked    {_counted(campaign.checked)}",
        f"  fetched    {campaign.values} values, {campaign.errors} errors that were asked for or excused",
        f"  simulated  {campaign.simulated_s / 3600:.2f} h in {campaign.wall_s:.1f} s, "
        f"{campaign.events} events: {campaign.simulated_hours_a_minute:.2f} simulated hours a minute",
    ]
    failed = len(campaign.failures)
    if not failed:
        return [*lines, "  violated   nothing"]
    monitors = Counter(each.violation.monitor for each in campaign.failures if each.violation)
    return [*lines, f"  violated   {failed} seeds: {_counted(monitors)}"]


def command(outcome: SeedOutcome) -> str:
    """Return the command that replays a seed, event for event."""
    profile = outcome.profile
    without = f" --without {','.join(profile.left_out)}" if profile.left_out else ""
    return (
        f"pw sim --profile {profile.name} --hosts {profile.hosts} --clients {profile.clients} "
        f"--runs {profile.runs}{without} --seed {outcome.seed} --trace"
    )


def failure(outcome: SeedOutcome) -> list[str]:
    """Return the violation of a seed that failed, and the events before it."""
    violation = outcome.violation
    assert violation is not None
    lines = [f"seed {outcome.seed} violates {violation.monitor!r}: {violation.what}"]
    events = outcome.trace[-LAST_EVENTS:]
    if events:
        lines += [f"the last {len(events)} events:", *(f"  {line}" for line in events)]
    return [*lines, f"replay it with: {command(outcome)}"]


def _counted(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.most_common()) or "nothing"
