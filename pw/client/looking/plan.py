"""`pw.plan()`: the plan of a program, as an object and as tables."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pw.client.connection import current
from pw.client.display.tables import Shown, Table
from pw.client.keywords import checks_keywords
from pw.core.errors import ArgumentError
from pw.core.messages import PlannedBranch, PlannedEdge, PlannedSegment, ProgramPlan
from pw.core.sizes import size_in_words
from pw.core.waits import LOOKING_S

__all__ = ["Plan", "PlannedBranch", "PlannedEdge", "PlannedSegment", "plan"]


@dataclass(frozen=True, slots=True, repr=False)
class Plan(Shown):
    """The plan of a program at the time of the question; prints as tables."""

    name: str
    program: str
    """Number of the client, a dot, and the number of the program."""
    segments: tuple[PlannedSegment, ...]
    """Units that one island runs; `depends` are positions in this tuple."""
    edges: tuple[PlannedEdge, ...]
    """Values that are moved, each with its way and the estimates of all possible ways, in seconds."""
    branches: tuple[PlannedBranch, ...] = ()
    """Branches of `pw.cond` and iterations of loops; `outer` are positions in this tuple."""

    @classmethod
    def of(cls, reply: ProgramPlan) -> Plan:
        """Return the controller's answer."""
        return cls(reply.name, reply.program, reply.segments, reply.edges, reply.branches)

    @property
    def head(self) -> str:
        """One line about the program."""
        count = sum(edge.count for edge in self.edges)
        return f"{self.name} (program {self.program}): {len(self.segments)} segments, {count} edges"

    def tables(self) -> tuple[Table, ...]:
        """Return the tables of segments, branches and edges."""
        segments = {
            "segment": lambda number, _: number,
            "island": lambda _, s: s.island,
            "hosts": lambda _, s: len(s.hosts),
            "after": lambda _, s: ", ".join(map(str, s.depends)),
            "computations": lambda _, s: _counted(s.computations),
        }
        branches = {
            "branch": lambda number, _: number,
            "runs if": lambda _, b: f"{b.predicate} is {'false' if b.unless else 'true'}",
            "inside": lambda _, b: "" if b.outer < 0 else b.outer,
            "computations": lambda _, b: _counted(b.computations),
        }
        edges = {
            "edge": lambda e: f"{e.value} → {e.consumer}",
            "from": lambda e: e.source,
            "to": lambda e: e.destination,
            "type": lambda e: e.type,
            "bytes": lambda e: size_in_words(e.size_bytes),
            "count": lambda e: e.count,
            "way": lambda e: e.way,
            "estimates": lambda e: ", ".join(f"{w} {s * 1e3:.3g} ms" for w, s in e.estimates_s),
        }
        of_branches = (Table.of("Branches", enumerate(self.branches), branches),)
        return (
            Table.of("Segments", enumerate(self.segments), segments),
            *(of_branches if self.branches else ()),
            Table.of("Edges", zip(self.edges, strict=True), edges),
        )


def _counted(computations: tuple[tuple[str, int], ...]) -> str:
    """Return names and how often each is called, as in "double × 2, add"."""
    return ", ".join(name + (f" × {n}" if n > 1 else "") for name, n in computations)


@checks_keywords
def plan(what: Any, timeout_s: float = LOOKING_S) -> Plan:
    """Return the plan of a program: its segments on each island, its edges, and the way of each edge.

    In a terminal the result prints as tables, in a notebook it shows as such; a script reads its attributes.

    Args:
        what: a function of `pw.jit`, `pw.pmap` or `pw.program` that was called before: the plan is that of
            its newest kind of call. Or the name of a program, or of a run as `pw.status()` shows it; among
            programs of one name the newest one counts. `pw.put` to another sharding is called "pw.put".
        timeout_s: how long to wait for the controller's answer, in seconds.

    Raises:
        ArgumentError: the function was not called, there is no such program, or it has no devices now.
        ConnectionFailed: the controller has not answered within `timeout_s`, or is gone for good.
    """
    if isinstance(what, str):
        return Plan.of(current.runtime().ask.plan(what, 0, timeout_s))
    newest_launch = getattr(what, "newest_launch", None)  # a check of its type would import JAX
    launch = None if newest_launch is None else newest_launch()
    if launch is None:
        raise ArgumentError(
            f"{what!r} has no plan; call a function of pw.jit or pw.program once, and pass it to pw.plan"
        )
    return Plan.of(launch.runtime.ask.plan(launch.name, launch.program, timeout_s))
