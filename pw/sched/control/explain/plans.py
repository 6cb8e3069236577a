"""Describes the plan of a program: its segments, its edges, and why each edge goes the way it does."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from msgspec.structs import replace

from pw.core import messages as msg
from pw.core.errors import ArgumentError, Error, ErrorReport
from pw.core.ids import run_name, serial_of
from pw.core.programs.lower import lower
from pw.core.programs.physical import Physical
from pw.core.programs.plan import BoundProgram, Execute
from pw.core.programs.program import Program
from pw.core.programs.ways import EdgeWay, edges_of, written
from pw.core.sharding import ArraySpec
from pw.sched.control.clients import Client
from pw.sched.control.programs import RegisteredProgram
from pw.sched.control.runs import RunsInFlight
from pw.sched.control.sessions import ControlPart, handles_client

NAMED = 20
"""Number of programs that the error for an unknown name lists."""


@dataclass(eq=False)
class Plans(ControlPart):
    """Answers `GetPlan`; it plans again, as the plan is a function of the program and its devices."""

    runs: RunsInFlight

    @handles_client(msg.GetPlan)
    def _get(self, client: Client, message: msg.GetPlan) -> None:
        answer: msg.ProgramPlan | msg.Answered
        try:
            answer = self._describe(message.request, self._program_of(client, message))
        except Error as error:
            answer = msg.Answered(message.request, ErrorReport.of(error))
        self.sessions.tell(client, answer)

    def _program_of(self, client: Client, message: msg.GetPlan) -> RegisteredProgram:
        if message.program in client.programs:
            return client.programs[message.program]
        sees = self.sessions.sight(client.number)
        for run in self.runs.in_flight.values():
            if run_name(run.record.order) == message.name and sees(run.client):
                return run.record.program
        seen = [one for one in self.sessions.clients if sees(one.number)]
        programs = [program for one in seen for program in one.programs.values()]
        matches = [program for program in programs if program.body.name == message.name]
        if matches:
            return matches[-1]
        names = dict.fromkeys(program.body.name for program in reversed(programs))
        there = ", ".join(list(names)[:NAMED]) or "none"
        raise ArgumentError(
            f"there is no program, and no run in flight, called {message.name!r}. The newest programs: {there}"
        )

    def _describe(self, request: int, program: RegisteredProgram) -> msg.ProgramPlan:
        body, bindings = program.body, self._islands.bindings
        if program.error is not None:
            raise program.error.exception()
        if not program.slices <= bindings.keys():
            raise ArgumentError(
                f"{body.name!r} has no devices at the moment: a host of their island was lost"
            )
        physical = Physical(body, bindings)
        edges = edges_of(body, physical, only_transfers=program.only_transfers)
        expanded = written(body, edges)
        segments = _segments(expanded, lower(expanded, bindings, physical))
        planned = segments, _edges(body, edges, physical), _branches(body)
        return msg.ProgramPlan(request, body.name, run_name(program.program), *planned)


def _segments(program: Program, plan: BoundProgram) -> tuple[msg.PlannedSegment, ...]:
    calls: list[dict[Execute, None]] = [{} for _ in plan.segments]
    for host in plan.hosts:
        for part in host.segments:
            executes = (one for one in part.instructions if isinstance(one, Execute))
            calls[part.segment] |= dict.fromkeys(executes)
    return tuple(
        [
            msg.PlannedSegment(
                segment.island,
                segment.hosts,
                segment.depends,
                tuple(
                    Counter(program.computations[one.computation].name for one in executes).items()
                ),
            )
            for segment, executes in zip(plan.segments, calls, strict=True)
        ]
    )


def _edges(
    program: Program, edges: list[EdgeWay], physical: Physical
) -> tuple[msg.PlannedEdge, ...]:
    def called(node: int) -> str:
        return program.computations[program.nodes[node].computation].name

    def lies(spec: ArraySpec) -> str:
        island = physical.island(spec.placement)
        return f"slice {serial_of(spec.placement.slice)} on {island}, {_split(spec)}"

    alike: Counter[msg.PlannedEdge] = Counter()
    for edge in edges:
        value = edge.value
        ways = sorted(edge.estimates.items(), key=lambda one: (one[0] is not edge.way, one[1]))
        described = msg.PlannedEdge(
            f"argument {value.index}" if value.node < 0 else called(value.node),
            "the caller" if edge.consumer is None else called(edge.consumer),
            lies(edge.source),
            lies(edge.destination),
            edge.source.short,
            edge.source.size_bytes,
            1,
            edge.way.value,
            tuple([(way.value, seconds) for way, seconds in ways]),
        )
        alike[described] += 1
    return tuple([replace(edge, count=count) for edge, count in alike.items()])


def _branches(program: Program) -> tuple[msg.PlannedBranch, ...]:
    """Return the branches of a program in the order in which they begin."""
    guards = dict.fromkeys(
        (node.guard, node.unless) for node in program.nodes if node.guard is not None
    )
    numbers = {guard: number for number, guard in enumerate(guards)}
    branches = []
    for guard, unless in guards:
        maker = "" if guard.node >= 0 else f"argument {guard.index}"
        outer, value = -1, guard
        if guard.node >= 0:
            node = program.nodes[guard.node]
            outer = -1 if node.guard is None else numbers[node.guard, node.unless]
        while not maker:
            node = program.nodes[value.node]
            computation = program.computations[node.computation]
            predicates = computation.traits.predicates
            if not predicates:
                maker = computation.name
            else:  # of the predicate of an earlier iteration, and false
                value = node.args[predicates + value.index]
                maker = "" if value.node >= 0 else f"argument {value.index}"
        names = Counter(
            program.computations[node.computation].name
            for node in program.nodes
            if (node.guard, node.unless) == (guard, unless)
        )
        branches.append(msg.PlannedBranch(maker, unless, outer, tuple(names.items())))
    return tuple(branches)


def _split(spec: ArraySpec) -> str:
    """Return how a spec divides an array, as in "P(x, -) of 4"."""
    axes = spec.sharding.spec
    split = [("+".join(names) or "-") for names in axes]
    return f"P({', '.join(split)}) of {spec.sharding.device_count}"
