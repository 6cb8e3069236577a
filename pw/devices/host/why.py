"""Explains why work on a host does not end: how far each launch is, and what it waits for.

Not every launch is watched, since only some hosts of a gang report. So the last launches are
remembered, with weak references to the last values that they make: a value tells how far it is,
and a value that no component holds any more has been enqueued at least.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from weakref import ReferenceType

from msgspec.structs import replace

from pw.core.actors.actor import Env, Part, handles
from pw.core.actors.watchdog import LookForStall, Watchdog
from pw.core.ids import Address, client_id
from pw.core.messages import ExplainHost, HostReport, LaunchReport
from pw.core.programs.plan import Execute, Free
from pw.devices.host.backend import Backend
from pw.devices.host.callbacks import HostCallbacks
from pw.devices.host.coordinator import ShardCoordinator
from pw.devices.host.interpreter import Interpreter
from pw.devices.host.launch_order import LaunchOrder
from pw.devices.host.program import NO_SEGMENT, HostProgram
from pw.devices.host.value import Value
from pw.devices.host.work import HostLaunch, Replicating, Work

_STAGES = ("submitted", "entered", "enqueued", "finished")


@dataclass(eq=False, repr=False)
class Explanations(Part):
    """Answers the controller, and writes a line to the log when nothing goes on."""

    env: Env
    order: LaunchOrder
    interpreter: Interpreter
    coordinator: ShardCoordinator
    backend: Backend
    watchdog: Watchdog
    callbacks: HostCallbacks

    @handles(ExplainHost)
    def _explain(self, sender: Address, message: ExplainHost) -> None:
        self.env.send(sender, self.describe(message.request, frozenset(message.work)))

    @handles(LookForStall)
    def _look(self, sender: Address, timer: LookForStall) -> None:
        if self.watchdog.stalled(bool(self.interpreter.lanes)):
            self.env.count("stalls")
            for line in _lines(self.describe(0, frozenset())):
                self.env.log("warning", "stalled", why=line)

    def describe(self, request: int, work: frozenset[tuple[int, int]]) -> HostReport:
        """Describe this host: the next work of each client first, then these launches."""
        order, lanes = self.order, self.interpreter.lanes
        launches = [self._head(head) for head in lanes.heads()]
        for queued in lanes.rest():
            if isinstance(queued, HostLaunch) and queued.name in work:
                launches.append(_report(*queued.name, queued.run.program, "queued"))
        for run, segment, program, last in self.interpreter.recent:
            if (run, segment) in work:
                launches.append(_report(run, segment, program, self._stage(last)))
        names = {(launch.run, launch.segment) for launch in launches}
        launches += [LaunchReport(*one, "", (), "missing") for one in sorted(work - names)]
        state = "" if order.epoch else "it waits to be told of its island"
        if order.is_broken:
            state = "it has left its island, and waits until that is formed again"
        return HostReport(
            request,
            order.host,
            state,
            self.watchdog.quiet_s,
            len(lanes),
            tuple(launches),
            self.coordinator.edges(),
            self.backend.whereabouts(),
            self.callbacks.oldest(),
        )

    def _stage(self, last: tuple[ReferenceType[Value], ...]) -> str:
        values = [one() for one in last]
        stages = ["enqueued" if v is None else self.backend.stage(v) for v in values]
        return min(stages, key=_STAGES.index, default="finished")

    def _head(self, head: Work) -> LaunchReport:
        """Describe the next work of a client, and the values that it waits for."""
        values: list[Value | None] = []
        if isinstance(head, Replicating):
            values = list(head.values())
        elif isinstance(head, HostLaunch) and head.position < len(head.segment.instructions):
            instruction = head.segment.instructions[head.position]
            if not isinstance(instruction, Free):
                values = [head.run.slots.get(slot) for slot in instruction.reads]
        arriving = self.interpreter.arriving
        awaited = [value for value in values if value is not None and value in arriving]
        edge_of, unsettled = self.coordinator.receiving.edge_of, arriving.unsettled
        edges = tuple(edge_of(value) for value in awaited if value not in unsettled)
        names = tuple(dict.fromkeys(unsettled[value] for value in awaited if value in unsettled))
        if isinstance(head, HostLaunch):
            names += tuple(_makers_of_predicates(head))
            is_waiting = bool(awaited or names)
            report = _report(*head.name, head.run.program, "waiting" if is_waiting else "queued")
            return replace(report, waits_for=edges, unsettled=names)
        client = client_id(head.client, 0) if isinstance(head, Replicating) else 0
        return LaunchReport(client, 0, "copies", (), "waiting", edges, names)


def _makers_of_predicates(launch: HostLaunch) -> Iterator[str]:
    """Return the names of the computations whose results are read as predicates now."""
    run, instructions = launch.run, launch.segment.instructions[: launch.position]
    read = [value for value, decision in (run.decisions or {}).items() if decision is None]
    for instruction in instructions:
        if isinstance(instruction, Execute):
            results = [run.slots.get(slot) for slot in instruction.results]
            if any(value in results for value in read):
                yield run.program.body.computations[instruction.computation].name


def _report(run: int, segment: int, program: HostProgram, state: str) -> LaunchReport:
    instructions = program.segments.get(segment, NO_SEGMENT).instructions
    computations = program.body.computations
    names = [computations[i.computation].name for i in instructions if isinstance(i, Execute)]
    return LaunchReport(run, segment, program.body.name, tuple(dict.fromkeys(names)), state)


def _lines(report: HostReport) -> Iterator[str]:
    """Return what the log says of the work that has waited longest."""
    head = report.launches[0] if report.launches else None
    if head is None:
        return
    names = ", ".join(map(repr, head.computations)) or "no computation"
    yield (
        f"{head.program!r} ({names}) waits since "
        f"{report.quiet_s:.0f} s; {report.queued} launches have not been enqueued"
    )
    for edge in report.edges:
        if edge.incoming and (edge.run, edge.edge) in head.waits_for:
            yield (
                f"transfer {edge.edge} from {edge.peer}, shards {edge.shards}: {edge.state}, "
                f"{edge.received_bytes} of {edge.size_bytes} bytes after {edge.open_s:.0f} s"
            )
    for thread in report.threads:
        yield f"{thread.thread}: {thread.doing} for {thread.busy_s:.0f} s at {thread.stack[-1]}"
    for client, called_s in report.calls:
        yield f"client {client} has not answered a call of one of its functions for {called_s:.0f} s"
