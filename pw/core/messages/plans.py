"""The plan of a program, for people."""

from __future__ import annotations

import msgspec

from pw.core.messages.base import ClientToController, ControllerToSession
from pw.core.messages.bounds import Name


class GetPlan(ClientToController, frozen=True, tag=188):
    """ClientSession to Controller: describe the plan of a program; `Answered` says why there is none."""

    request: int
    name: Name
    """Name of a program, or of a run in flight (client.number); the newest program of a name counts."""
    program: int = 0
    """Number of the program instead, if it is the asker's own."""


class PlannedSegment(msgspec.Struct, frozen=True, array_like=True):
    """Segment that one island runs as a unit; its number is its position in the plan."""

    island: str
    hosts: tuple[str, ...]
    depends: tuple[int, ...]
    computations: tuple[tuple[str, int], ...]
    """Names of computations, with the number of calls of each."""


class PlannedEdge(msgspec.Struct, frozen=True, array_like=True):
    """A value that its consumer wants elsewhere, or in another sharding; or several alike."""

    value: str
    consumer: str
    source: str
    destination: str
    type: str
    """Dtype and shape of the array."""
    size_bytes: int
    """Bytes of the array."""
    count: int
    """Number of edges that are alike."""
    way: str
    estimates_s: tuple[tuple[str, float], ...]
    """Seconds of each possible way for one run, the chosen one first."""


class PlannedBranch(msgspec.Struct, frozen=True, array_like=True):
    """Computations that run only if a predicate says so; its number is its position in the plan."""

    predicate: str
    """Name of the computation or argument that makes the predicate."""
    unless: bool
    """True if the computations run when the predicate is false."""
    outer: int
    """Number of the branch that makes the predicate, so that this one is skipped with that one; -1 for none."""
    computations: tuple[tuple[str, int], ...]
    """Names of computations, with the number of calls of each."""


class ProgramPlan(ControllerToSession, frozen=True, tag=189):
    """Controller to ClientSession: the plan of a program."""

    request: int
    name: str
    program: str
    """Client's number, a dot, and the program's number."""
    segments: tuple[PlannedSegment, ...]
    edges: tuple[PlannedEdge, ...]
    branches: tuple[PlannedBranch, ...] = ()
