"""An installed program: how its segments are called, where they run, and how long they take."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field

from pw.core.errors import ErrorReport
from pw.core.messages import InstallProgram
from pw.core.programs.plan import Execute
from pw.core.sharding import Binding
from pw.sched.island.window import Footprint


@dataclass(frozen=True, slots=True)
class Names:
    """Names of the segments of a program, for reports."""

    program: str = ""
    segments: dict[int, tuple[str, ...]] = field(default_factory=dict)
    """Names of the computations of each segment."""
    shards: dict[int, dict[str, tuple[int, ...]]] = field(default_factory=dict)
    """Mesh positions of the shards that each host has of each segment's last computation."""


@dataclass(slots=True)
class InstalledProgram:
    """One program."""

    names: Names
    footprints: dict[int, Footprint]
    """Footprint of each segment."""
    install: int
    """Number of the newest installation; hosts may answer for an earlier one."""
    compiling: set[str]
    """Names of hosts that have not answered for the newest installation."""
    estimates_us: dict[int, float]
    """Device time of each segment that has ended once, in microseconds."""
    epoch: int = 0
    """Number of the island's epoch in which hosts compiled the program."""
    error: ErrorReport | None = None
    """Error of a host that could not compile the program."""
    on_hosts: int = 0
    """Number of the installation that hosts have: they are not told of one that changes nothing."""
    is_plain: bool = False
    """True if all computations are compiled, repeatable, and stay on their hosts."""

    def measured(self, segment: int, device_time_us: int) -> None:
        """A launch of a segment took so long."""
        estimate_us = self.estimates_us.get(segment, float(device_time_us))
        self.estimates_us[segment] = 0.8 * estimate_us + 0.2 * device_time_us


UNKNOWN = InstalledProgram(Names(), {}, 0, set(), {})
"""Program in the place of one that is not installed."""


def is_plain(message: InstallProgram) -> bool:
    """Whether a program only computes: it has no Python of users and no calls of their processes."""
    return not any(
        one.traits.runs_on_host or not one.traits.is_repeatable or one.calls_back
        for one in message.body.computations
    )


def _executions(message: InstallProgram) -> Iterator[tuple[int, str, list[int]]]:
    """Yield each segment with a host and the computations that it runs there, in order."""
    for plan in message.plans:
        for part in plan.segments:
            computations = [
                one.computation for one in part.instructions if isinstance(one, Execute)
            ]
            yield part.segment, plan.host, list(dict.fromkeys(computations))


def _bindings(message: InstallProgram) -> dict[int, Binding]:
    return {binding.slice: binding for plan in message.plans for binding in plan.bindings}


def names_of(message: InstallProgram) -> Names:
    """Return how the segments of a program are called."""
    names, bindings = Names(message.body.name), _bindings(message)
    computations = message.body.computations
    shards_on: dict[int, dict[str, list[int]]] = {}
    """Mesh positions of shards, by computation and host."""
    for segment, host, numbers in _executions(message):
        earlier = names.segments.get(segment, ())
        here_too = (computations[number].name for number in numbers)
        names.segments[segment] = tuple(dict.fromkeys((*earlier, *here_too)))
        if not numbers:
            continue
        last = numbers[-1]
        if last not in shards_on:
            placement = computations[last].placement
            shards_on[last] = defaultdict(list)
            for at, device in enumerate(bindings[placement.slice].located(placement)):
                shards_on[last][device.host].append(at)
        here = tuple(shards_on[last].get(host, ()))
        names.shards.setdefault(segment, {})[host] = here
    return names


def sites_of(message: InstallProgram) -> dict[int, frozenset[Hashable]]:
    """Return where each segment runs: its devices; its hosts if it uses no device."""
    bindings = _bindings(message)
    computations: defaultdict[int, set[int]] = defaultdict(set)
    hosts: defaultdict[int, set[str]] = defaultdict(set)
    for segment, host, numbers in _executions(message):
        computations[segment].update(numbers)
        hosts[segment].add(host)
    sites: dict[int, frozenset[Hashable]] = {}
    for segment, used in computations.items():
        sites_here: set[Hashable] = set()
        for number in used:
            computation = message.body.computations[number]
            placement = computation.placement
            devices = bindings[placement.slice].located(placement)
            sites_here.update(
                {d.host for d in devices} if computation.traits.runs_on_host else devices
            )
        sites[segment] = frozenset(sites_here or hosts[segment])
    return sites
