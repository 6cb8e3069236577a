"""What a host can say about work that does not end: how far each launch has got here.

The executor does not watch what it hands over; only some hosts of a gang report. So that every host
can be asked all the same, the last launches are remembered, each with weak references to the last values
that it makes: a value itself tells how far it is, and one that nobody holds any more has been enqueued
at least.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator
from weakref import ReferenceType

from pw.core.messages import HostReport, LaunchReport
from pw.core.plan import Execute, Instruction
from pw.devices.host.backend import Backend, Value
from pw.devices.host.program import NO_SEGMENT, HostProgram

KEPT = 512
"""Launches that are remembered: more than may be under way on an island."""

_STAGES = ("handed over", "entered", "enqueued", "finished")

_Handed = tuple[int, int, HostProgram, tuple[ReferenceType[Value], ...]]


class Account:
    """The launches that this host has handed over last."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._recent: deque[_Handed] = deque(maxlen=KEPT)

    def handed(
        self, run: int, segment: int, program: HostProgram, made: tuple[ReferenceType[Value], ...]
    ) -> None:
        """All instructions of a launch have become ops; these are the last values that they make."""
        self._recent.append((run, segment, program, made))

    def reports(self, wanted: Collection[tuple[int, int]]) -> Iterator[LaunchReport]:
        """How far these launches (run, segment) are."""
        for run, segment, program, made in self._recent:
            if (run, segment) in wanted:
                values = [one() for one in made]
                stages = ["enqueued" if v is None else self._backend.stage(v) for v in values]
                least = min(stages, key=_STAGES.index, default="finished")
                yield launch_report(run, segment, program, least)


def launch_report(
    run: int,
    segment: int,
    program: HostProgram,
    state: str,
) -> LaunchReport:
    """One launch in words."""
    instructions = program.segments.get(segment, NO_SEGMENT).instructions
    names = computations(program, instructions)
    return LaunchReport(run, segment, program.body.name, names, state)


def computations(program: HostProgram, instructions: tuple[Instruction, ...]) -> tuple[str, ...]:
    """Names of the computations among these instructions, each once."""
    return tuple(
        dict.fromkeys(
            program.body.computations[instruction.computation].name
            for instruction in instructions
            if isinstance(instruction, Execute)
        )
    )


def told(report: HostReport) -> Iterator[str]:
    """What the log of a host says of the client's work that has waited for longest."""
    head = report.launches[0] if report.launches else None
    if head is None:
        return
    names = ", ".join(map(repr, head.computations)) or "no computation"
    yield (
        f"{head.program!r} ({names}) waits since "
        f"{report.quiet_s:.0f} s; {report.queued} launches have not been handed over"
    )
    for edge in report.edges:
        if edge.incoming and (edge.run, edge.edge) in head.waits_for:
            yield (
                f"transfer {edge.edge} from {edge.peer}, shards {edge.shards}: {edge.state}, "
                f"{edge.received_bytes} of {edge.size_bytes} bytes after {edge.open_s:.0f} s"
            )
    for thread in report.threads:
        yield f"{thread.thread}: {thread.doing} for {thread.busy_s:.0f} s at {thread.stack[-1]}"
