"""Lowering: turns a program and the bindings of its slices into a list of instructions for each host.

A `Send` stands right after the producer of its value (for a program input, at the start of the
island's first segment), a `Receive` right before the first consumer, and a `Free` right after the
last use of a slot on a host. `pw.core.programs.segments` decides the segment of each instruction.

The cost is one step for every computation, edge and piece.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping

from pw.core.programs.peak import IslandMemory, island_memory
from pw.core.programs.physical import Physical
from pw.core.programs.plan import (
    BoundProgram,
    Execute,
    Free,
    HostPlan,
    HostSegment,
    Instruction,
    Receive,
    Segment,
    Send,
)
from pw.core.programs.program import Computation, Program
from pw.core.programs.segments import Draft, Edge, SegmentSchedule
from pw.core.sharding import Binding


def lower(
    program: Program, bindings: Mapping[int, Binding], physical: Physical | None = None
) -> BoundProgram:
    """Give every host its part of `program`.

    Slots are numbered: program inputs, then the results of the nodes in order, then edges.

    Args:
        program: the program; nodes in an order in which they can run.
        bindings: the binding of every slice that the program touches.
        physical: the devices of its specs, if the caller knows them.

    Returns:
        The plan, for all hosts with instructions, outputs or donated inputs.

    Raises:
        KeyError: a slice has no binding.
        PlacementError: a computation or an array names devices that cannot hold it together.
        ShardingError: an array does not divide as its sharding says, or a consumer wants another
            shape or dtype than its producer makes.
        ArgumentError: a node has the wrong number of arguments, or reads what is computed later.
    """
    return _write(program, SegmentSchedule(program, physical or Physical(program, bindings)))[0]


def lower_with_memory(
    program: Program,
    bindings: Mapping[int, Binding],
    physical: Physical | None = None,
    limited: Collection[str] | None = None,
    bounded: Collection[int] = (),
) -> tuple[BoundProgram, tuple[IslandMemory, ...]]:
    """Lower a program as `lower` does, and return the memory of a run on each island that counts it.

    Args:
        program: the program; nodes in an order in which they can run.
        bindings: the binding of every slice that the program touches.
        physical: the devices of its specs, if the caller knows them.
        limited: names of the islands that count all memory; None for all.
        bounded: numbers of the slices whose memory counts apart, also on other islands.
    """
    schedule = SegmentSchedule(program, physical or Physical(program, bindings))
    plan, executes = _write(program, schedule)
    return plan, island_memory(program, schedule, executes, limited, bounded)


def _write(program: Program, schedule: SegmentSchedule) -> tuple[BoundProgram, dict[int, Execute]]:
    """Write the instructions of every host. Returns the plan, and the `Execute` of each node."""
    physical = schedule.physical
    kept = set(range(len(program.inputs))) - set(program.donated) | set(schedule.output_slots)
    kept.update([schedule.origin(slot) for slot in schedule.output_slots])
    executes: dict[int, Execute] = {}
    written: defaultdict[str, dict[int, list[Instruction]]] = defaultdict(dict)

    def write(host: str, segment: Draft, instruction: Instruction) -> None:
        written[host].setdefault(segment.index, []).append(instruction)

    def write_sends(segment: Draft, edges: Iterable[Edge]) -> None:
        for edge in edges:
            for route in edge.sends():
                send = Send(edge.index, edge.source_slot, edge.source, route, edge.counts)
                write(route.source_host, segment, send)

    for segment in schedule.segments:
        write_sends(segment, segment.input_sends)
        for step in segment.steps:
            if isinstance(step, Edge):
                for host, routes in step.receives().items():
                    receive = Receive(
                        step.index,
                        step.slot,
                        step.destination,
                        tuple(routes),
                        step.source_slot,
                        step.source,
                        step.counts,
                    )
                    write(host, segment, receive)
            else:
                execute = executes[step] = _execute(program, schedule, kept, step)
                for host in _hosts(physical, program.computations[execute.computation]):
                    write(host, segment, execute)
                write_sends(segment, schedule.sends_after[step])

    inputs: defaultdict[str, list[int]] = defaultdict(list)
    for number, spec in enumerate(program.inputs):
        for host in physical.hosts(spec.placement):
            inputs[host].append(number)
    outputs: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
    for number, (output, slot) in enumerate(
        zip(program.outputs, schedule.output_slots, strict=True)
    ):
        for host in physical.hosts(output.spec.placement):
            outputs[host].append((number, slot))

    # A host that only has outputs or donated inputs of a run takes part, too.
    concerned = set(outputs)
    for number in program.donated:
        concerned.update(physical.hosts(program.inputs[number].placement))
    for host in sorted(concerned - set(written), key=physical.rank.__getitem__):
        written[host][schedule.first_segment(physical.island_of[host]).index] = []

    touched = [computation.slices() for computation in program.computations]
    members: list[list[str]] = [[] for _ in schedule.segments]
    plans = []
    for host in sorted(written, key=physical.rank.__getitem__):
        parts = dict(sorted(written[host].items()))
        for index in parts:
            members[index].append(host)
        _free(parts, inputs[host], kept)
        named = _slices(touched, parts)
        named |= {program.inputs[number].placement.slice for number in inputs[host]}
        named |= {program.outputs[number].spec.placement.slice for number, _ in outputs[host]}
        plans.append(
            HostPlan(
                host,
                tuple(HostSegment(index, tuple(part)) for index, part in parts.items()),
                tuple(inputs[host]),
                tuple(outputs[host]),
                tuple(physical.bindings[number] for number in sorted(named)),
            )
        )
    segments = []
    results = frozenset(schedule.output_slots)
    for draft, hosts in zip(schedule.segments, members, strict=True):
        reporters = _reporters(program, schedule, draft, hosts[0], results)
        silent = (host for host in hosts if host not in reporters)
        depends = tuple(sorted(draft.depends))
        segments.append(Segment(draft.island, (*reporters, *silent), depends, len(reporters)))
    return BoundProgram(tuple(segments), tuple(plans)), executes


def _hosts(physical: Physical, computation: Computation) -> tuple[str, ...]:
    """Return the hosts that take part in a computation: if it spans devices, those of its results."""
    if not computation.traits.spans_devices:
        return physical.hosts(computation.placement)
    specs = dict.fromkeys(spec.placement for spec in computation.outputs)
    return tuple(dict.fromkeys(host for place in specs for host in physical.hosts(place)))


def _reporters(
    program: Program, schedule: SegmentSchedule, draft: Draft, first: str, results: frozenset[int]
) -> dict[str, None]:
    """Return hosts of a segment that together see the end of all its computations and received outputs.

    Computations on the same devices run one after the other, so one host reports for all of them: `first`, if
    it takes part. `results` are the slots of the program's outputs.
    """
    physical = schedule.physical
    teams: dict[tuple[str, ...], None] = {}
    for step in draft.steps:
        if not isinstance(step, Edge):
            node = program.nodes[step]
            computation = program.computations[node.computation]
            team = _hosts(physical, computation)
            # Each host makes its part of a view or a merge, and skips a computation, without the others.
            is_alone = not computation.traits.is_installed or node.guard is not None
            teams |= dict.fromkeys([(host,) for host in team] if is_alone else [team])
        elif step.slot in results:
            teams[physical.hosts(step.destination.placement)] = None
    reporters: dict[str, None] = {}
    if not teams or any(first in team for team in teams):
        reporters[first] = None
    for team in teams:
        if reporters.keys().isdisjoint(team):
            reporters[team[0]] = None
    return reporters


def _execute(program: Program, schedule: SegmentSchedule, kept: set[int], number: int) -> Execute:
    """Return node `number` as an instruction, the same on all of its hosts.

    The hosts of a gang compile one executable, so no host donates a buffer that another one still
    needs. A hold takes no buffer: it and its value have one, and what takes one of them has to wait for both.
    """
    node, args, guard = program.nodes[number], schedule.args[number], schedule.guards[number]
    donated = program.computations[node.computation].donated
    if donated and schedule.holds.keys().isdisjoint(schedule.results[number]):
        buffers = [schedule.origin(slot) for slot in args]
        times = Counter(buffers)
        donated = tuple(
            position
            for position in donated
            if schedule.last_node[buffers[position]] == number
            and times[buffers[position]] == 1
            and buffers[position] != guard
            and buffers[position] not in kept
        )
    return Execute(node.computation, args, schedule.results[number], donated, guard, node.unless)


def _touched(instruction: Instruction) -> Iterable[int]:
    """Return the slots that an instruction reads or fills on its host."""
    match instruction:
        case Execute():
            return (*instruction.reads, *instruction.results)
        case Send():
            return instruction.reads
        case Receive():
            local = any(r.source_host == r.destination_host for r in instruction.routes)
            return (instruction.slot, *(instruction.reads if local else ()))
        case Free():
            return instruction.slots


def _free(parts: dict[int, list[Instruction]], held: list[int], kept: set[int]) -> None:
    """Add to one host's `parts` a Free after the last use of every slot that is not `kept`.

    Donated inputs that are `held` there and never used go at the start.
    """
    seen = set(kept)
    for part in reversed(parts.values()):
        backwards: list[Instruction] = []
        for instruction in reversed(part):
            ended = set(_touched(instruction)) - seen
            if ended:
                backwards.append(Free(tuple(sorted(ended))))
                seen |= ended
            backwards.append(instruction)
        part[:] = reversed(backwards)
    unused = tuple(slot for slot in held if slot not in seen)
    if unused:
        next(iter(parts.values())).insert(0, Free(unused))


def _slices(touched: list[set[int]], parts: dict[int, list[Instruction]]) -> set[int]:
    """Return the slices in one host's instructions; `touched` are those of each computation."""
    named: set[int] = set()
    computations: set[int] = set()
    for part in parts.values():
        for instruction in part:
            match instruction:
                case Execute():
                    computations.add(instruction.computation)
                case Send():
                    named.add(instruction.spec.placement.slice)
                case Receive():
                    named.add(instruction.spec.placement.slice)
                    named.add(instruction.source.placement.slice)
                case Free():
                    pass
    return named.union(*(touched[number] for number in computations))
