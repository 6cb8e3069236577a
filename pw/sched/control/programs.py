"""A program at the controller: its plan, and what each island's scheduler needs of a run.

What does not change from run to run is computed once, so that a run costs the controller a check of
its arguments and one local message for each island.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from operator import is_

import msgspec

from pw.core.errors import ErrorReport
from pw.core.ids import arrays_in, is_repeat
from pw.core.messages import Artifact, InstallProgram, Submit
from pw.core.programs.lower import lower, lower_with_memory
from pw.core.programs.peak import IslandMemory
from pw.core.programs.physical import Physical
from pw.core.programs.plan import BoundProgram, HostPlan
from pw.core.programs.program import Program
from pw.core.programs.ways import edges_of, written
from pw.core.sharding import ArraySpec, Binding

Home = tuple[str, tuple[str, ...]]
"""Name of the island, and names of the hosts, that hold an array."""


@dataclass(slots=True)
class RegisteredProgram:
    """A client's program, lowered onto the islands as they are in this mapping epoch."""

    program: int
    body: Program
    artifacts: tuple[Artifact, ...]
    only_transfers: bool = False
    """True if edges go from host to host only."""
    error: ErrorReport | None = None
    segment_count: int = 0
    parts: dict[str, Submit] = field(default_factory=dict)
    """Part of a run that is submitted to each island, without arguments and results."""
    hosts: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Names of the hosts of each island that have the program installed."""
    installing: set[str] = field(default_factory=set)
    """Names of islands that have not reported the program as installed."""
    installs: int = 0
    """Number of lowerings of the program; reports about an earlier lowering do not count."""
    kept: int = 0
    """Number of kept records of the program's runs."""
    slices: frozenset[int] = field(init=False)
    """Numbers of all slices that the program touches."""
    exports: bool = field(init=False)
    """True if the controller has made it, and its runs may make arrays of other clients."""
    _lowered_for: tuple[tuple[Binding, ...], dict[str, IslandMemory]] = ((), {})
    """Bindings of the program's slices when it was lowered last, and the memory of a run by island."""
    _bound: dict[int, Binding | None] | None = None
    """Bindings of the slices of the results when `_homes` was computed."""
    _homes: list[Home] | None = None

    def __post_init__(self) -> None:
        self.slices = frozenset(self.body.slices())
        self.exports = is_repeat(self.program)

    def donated(self, args: tuple[int | bytes, ...]) -> tuple[int, ...]:
        """Return the arrays that a run with these arguments takes from its client."""
        donated = [args[index] for index in self.body.donated if 0 <= index < len(args)]
        return tuple(arrays_in(donated))

    def result_homes(self, bindings: Mapping[int, Binding]) -> list[Home] | None:
        """Return the island and hosts of each result; None while a slice of one is not bound."""
        bound = self._bound
        if bound is not None:
            for at, was in bound.items():
                if bindings.get(at) is not was:
                    break
            else:
                return self._homes
        specs = [output.spec for output in self.body.outputs]
        self._bound = {at: bindings.get(at) for at in (spec.placement.slice for spec in specs)}
        homes = [holders(spec, bindings) for spec in specs]
        self._homes = None if None in homes else [home for home in homes if home is not None]
        return self._homes

    def lower(
        self,
        bindings: Mapping[int, Binding],
        limited: Collection[str] = (),
        bounded: Collection[int] = (),
    ) -> list[tuple[str, InstallProgram]]:
        """Bind the program to devices; return what to send to which island's scheduler.

        Args:
            bindings: the binding of every slice.
            limited: the islands that count their devices' memory.
            bounded: the slices that have a bound of memory.

        Raises:
            PlacementError: a computation or an array names devices that cannot hold it together.
            ShardingError: an array does not divide as its sharding says.
        """
        memory: dict[str, IslandMemory] = {}
        physical = Physical(self.body, bindings)
        body = written(self.body, edges_of(self.body, physical, only_transfers=self.only_transfers))
        bounded = self.slices.intersection(bounded)
        if limited or bounded:
            plan, memories = lower_with_memory(body, bindings, physical, limited, bounded)
            memory = {one.island: one for one in memories}
        else:
            plan = lower(body, bindings, physical)
        self.segment_count = len(plan.segments)
        by_island: dict[str, list[HostPlan]] = {}
        for host_plan in plan.hosts:
            by_island.setdefault(physical.island_of[host_plan.host], []).append(host_plan)
        self.hosts = {
            island: tuple(host_plan.host for host_plan in plans)
            for island, plans in by_island.items()
        }
        self.parts = self._parts(plan, with_memory=bool(memory))
        self.installing = set(by_island)
        self.installs += 1
        self.error = None
        before, bound = self._lowered_for, tuple(bindings[at] for at in sorted(self.slices))
        self._lowered_for = bound, memory
        # A slice that was given back may have the same devices again; its bound is counted anew.
        is_bound_anew = not all(map(is_, bound, before[0]))
        again = before == self._lowered_for and not (bounded and is_bound_anew)
        return [
            (
                island,
                InstallProgram(
                    self.program,
                    body,
                    tuple(plans),
                    self.artifacts,
                    memory.get(island),
                    self.installs,
                    again=again,
                ),
            )
            for island, plans in by_island.items()
        ]

    def _parts(self, plan: BoundProgram, with_memory: bool) -> dict[str, Submit]:
        island_of = [segment.island for segment in plan.segments]
        indices: dict[str, list[int]] = {}
        waiters: dict[int, set[str]] = {}
        for index, island in enumerate(island_of):
            indices.setdefault(island, []).append(index)
            for producer in plan.segments[index].depends:
                if island_of[producer] != island:
                    waiters.setdefault(producer, set()).add(island)
        # With memory to reserve, all islands must admit a run before one of them starts it.
        admitting = tuple(sorted(indices)) if with_memory and len(indices) > 1 else ()
        parts = {}
        for island, own in indices.items():
            segments = [plan.segments[index] for index in own]
            depends = [
                tuple((island_of[one], one) for one in segment.depends if island_of[one] != island)
                for segment in segments
            ]
            parts[island] = Submit(
                0,
                self.program,
                tuple(own),
                tuple(segment.hosts for segment in segments),
                tuple(segment.reporters for segment in segments),
                tuple(depends),
                (),
                (),
                tuple(tuple(sorted(waiters.get(index, ()))) for index in own),
                (),
                admitting,
                self.body.timeout_s > 0,
                len(indices) == 1,
            )
        return parts

    def submissions(
        self,
        run: int,
        args: tuple[int | bytes, ...],
        results: tuple[int, ...],
        awaits: tuple[int, ...],
        *,
        has_gaps: bool = False,
    ) -> list[tuple[str, Submit]]:
        """Return the message for each island's scheduler that queues one run."""
        own = {"run": run, "args": args, "results": results, "awaits": awaits, "has_gaps": has_gaps}
        return [(at, msgspec.structs.replace(part, **own)) for at, part in self.parts.items()]


def holders(spec: ArraySpec, bindings: Mapping[int, Binding]) -> Home | None:
    """Return the island and hosts of an array of `spec`; None while its slice is not bound."""
    binding = bindings.get(spec.placement.slice)
    if binding is None:
        return None
    hosts = dict.fromkeys(device.host for device in binding.located(spec.placement))
    return binding.island, tuple(hosts)


def said_of(what: str, error: ErrorReport) -> ErrorReport:
    """Return the same error, about one of the user's objects."""
    return msgspec.structs.replace(error, message=f"{what}: {error.message}")
