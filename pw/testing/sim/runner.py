"""One seed from beginning to end: work under faults, then liveness, then the census."""

from __future__ import annotations

import dataclasses
import gc
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from pw.sched.control.offers import ALONE_S
from pw.testing.sim.cluster import SimCluster
from pw.testing.sim.faults import Faults
from pw.testing.sim.floods import Fairness
from pw.testing.sim.many import Crowd, user_of_many
from pw.testing.sim.monitors import Monitors
from pw.testing.sim.profiles import FAULTS, SimProfile
from pw.testing.sim.stragglers import GangUser, Straggling
from pw.testing.sim.tenants import Tenancy, Tenant
from pw.testing.sim.trace import Digest, Trace
from pw.testing.sim.watching import Watches
from pw.testing.sim.workload import SimClient
from pw.testing.sim.world import Violation, World

Alter = Callable[[SimCluster], None]
"""Function that changes a cluster before anything happens in it."""

EVENTS_PER_RUN = 20_000
"""Number of events of a run after which the simulation makes no progress: a small program takes far fewer."""
LIVENESS_S = 300.0
FORMED_S = 60.0
"""Seconds in which islands form; longer than a supervisor is stopped, whose host cannot restart meanwhile."""
AFTERMATH_S = 700.0
"""Seconds after which hosts keep nothing for a peer that may come back (`pw.devices.host.coordinator`)."""


@dataclass(slots=True)
class SeedOutcome:
    """The outcome of one seed."""

    seed: int
    profile: SimProfile
    violation: Violation | None = None
    injected: Counter[str] = field(default_factory=Counter)
    checked: Counter[str] = field(default_factory=Counter)
    events: int = 0
    simulated_s: float = 0.0
    wall_s: float = 0.0
    values: int = 0
    errors: int = 0
    trace: list[str] = field(default_factory=list)
    """Last events, or all of them."""
    digest: str = ""
    """Digest of all messages between nodes, if wanted (see `trace.Digest`)."""


def simulate(
    seed: int,
    profile: SimProfile,
    *,
    trace: bool = False,
    alter: Alter | None = None,
    digest: bool = False,
) -> SeedOutcome:
    """Run one seed.

    Args:
        seed: decides everything that may vary.
        profile: the size of the cluster, and its faults.
        trace: keep a line for each event.
        alter: changes the cluster first.
        digest: instead of a line for each event, hash the messages.
    """
    started_s = time.perf_counter()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        outcome = _simulate(seed, profile, Digest() if digest else Trace(full=trace), alter)
    finally:
        if was_enabled:
            gc.enable()
    outcome.wall_s = time.perf_counter() - started_s
    return outcome


def _simulate(seed: int, profile: SimProfile, trace: Trace, alter: Alter | None) -> SeedOutcome:
    world = World(seed, profile, trace)
    outcome = SeedOutcome(seed, profile)
    clients: list[SimClient] = []
    try:
        _play(world, clients, alter)
    except Violation as violation:
        outcome.violation = violation
    outcome.injected = world.ledger.injected
    outcome.checked = world.checked
    outcome.events = world.events
    outcome.simulated_s = world.now_s
    outcome.values = sum(client.fetched for client in clients)
    outcome.errors = sum(client.failed for client in clients)
    if trace.is_full or outcome.violation is not None:
        outcome.trace = trace.lines()
    if isinstance(trace, Digest):
        outcome.digest = trace.value
    return outcome


def _play(world: World, clients: list[SimClient], alter: Alter | None) -> None:
    profile = world.profile
    cluster = SimCluster(world)
    if alter is not None:
        alter(cluster)
    monitors = Monitors(cluster)
    Fairness(cluster)
    share = -(-profile.runs // profile.clients)
    users: Callable[[SimCluster, int, int], SimClient] = SimClient
    if profile.tenants:
        users = user_of_many if profile.many else GangUser if profile.stragglers else Tenant
    clients += [users(cluster, number, share) for number in range(profile.clients)]
    cluster.users = clients
    checks = Crowd if profile.many else Straggling if profile.stragglers else Tenancy
    tenancy = checks(cluster, clients)
    faults = Faults(cluster, clients)
    watches = Watches(cluster)

    def done() -> bool:
        for client in clients:  # noqa: SIM110 - after each event: a generator takes longer
            if not client.finished:
                return False
        return True

    budget = EVENTS_PER_RUN * profile.runs
    world.run(profile.span_s, budget, done)
    tenancy.check()
    faults.heal()
    for client in clients:
        client.final = True
    # A client whose recovery waited for one exporter that is gone may then wait for another.
    patience_s = LIVENESS_S + (2 * ALONE_S if profile.handovers or profile.names else 0.0)
    if not world.run(world.now_s + patience_s, budget, done):
        raise Violation("liveness", _stuck(cluster, clients))
    if not world.run(world.now_s + FORMED_S, budget, cluster.formed):
        raise Violation("liveness", "islands are not formed though all hosts are up")
    watches.check(budget)
    world.run(world.now_s + AFTERMATH_S, budget, lambda: False)
    if cluster.census():
        gc.collect()
    monitors.check_repeats()
    monitors.check_census()


def _stuck(cluster: SimCluster, clients: list[SimClient]) -> str:
    """Describe the open requests long after the last fault."""
    waiting = [
        f"{client.name} waits for {', '.join(client.open.values()) or 'its turn'}"
        for client in clients
        if not client.finished
    ]
    waiting += [
        f"{host.name} holds {dict(+Counter(host.census()))}"
        for host in cluster.hosts
        if +Counter(host.census())
    ]
    waiting += [f"{status.name} is {status.state}" for status in cluster.status()]
    return "long after the last fault " + "; ".join(waiting)


def shrink(seed: int, profile: SimProfile, monitor: str, alter: Alter | None = None) -> SeedOutcome:
    """Return the outcome of a failing seed under the mildest profile that still fails (`SeedOutcome.profile`).

    Kinds of faults are left out one by one, then runs and clients halved, as long as the same monitor
    is still violated. Each random stream belongs to one decision, so the rest of a run changes little.
    """
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


def _milder(profile: SimProfile) -> Iterator[SimProfile]:
    for fault in FAULTS:
        if getattr(profile, fault):
            yield profile.without(fault)
    for size in ("runs", "clients"):
        count = getattr(profile, size)
        for fewer in sorted({count // 2, count * 3 // 4, count - 1}):
            if 0 < fewer < count:
                yield dataclasses.replace(profile, **{size: fewer})
