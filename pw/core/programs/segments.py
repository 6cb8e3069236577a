"""Divides the nodes and edges of a program into segments; the first step of lowering.

A value that has the spec its consumer wants is read from its slot. Otherwise there is an *edge*:
one for each pair of a value and a wanted spec, shared by all consumers, with a slot of its own.

Each island has one open segment. A segment gains dependencies only while it is empty: a consumer
that needs another dependency closes the open segment and opens the next. So each dependency, and
each earlier segment of the same island, is older than the first instruction of a segment, and
segments never wait for each other in a circle (G4). Later sends do not matter: a `Send` does
not wait.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from pw.core.programs.counted import check_counts
from pw.core.programs.guards import guard_of, is_hold
from pw.core.programs.physical import Physical
from pw.core.programs.plan import Counts, Route
from pw.core.programs.program import Program, ValueRef
from pw.core.sharding import ArraySpec


@dataclass(slots=True)
class Edge:
    """The transfer of a value to the spec that a consumer wants."""

    index: int
    slot: int
    source_slot: int
    source: ArraySpec
    destination: ArraySpec
    producer: int
    routes: tuple[Route, ...]
    counts: Counts | None = None

    def reads(self) -> tuple[int, ...]:
        """The slots that its senders read."""
        if self.counts is None:
            return (self.source_slot,)
        return (self.source_slot, self.counts.slot)

    def sends(self) -> Iterator[Route]:
        """The routes between two hosts."""
        return (r for r in self.routes if r.source_host != r.destination_host)

    def receives(self) -> dict[str, list[Route]]:
        """Return all routes, by destination host."""
        incoming: dict[str, list[Route]] = {}
        for route in self.routes:
            incoming.setdefault(route.destination_host, []).append(route)
        return incoming


@dataclass(slots=True)
class Draft:
    """An unfinished segment; its steps are numbers of nodes, and edges to receive."""

    index: int
    island: str
    depends: set[int] = field(default_factory=set)
    input_sends: list[Edge] = field(default_factory=list)
    steps: list[int | Edge] = field(default_factory=list)


class SegmentSchedule:
    """Lays nodes and edges out in segments."""

    def __init__(self, program: Program, physical: Physical) -> None:
        self.physical = physical
        self.segments: list[Draft] = []
        self.args: list[tuple[int, ...]] = []
        self.guards: list[int] = []
        """Slot of each node's guard; -1 for none."""
        self.results: list[tuple[int, ...]] = []
        self.sends_after: defaultdict[int, list[Edge]] = defaultdict(list)
        self.last_node: dict[int, int | None] = {}
        """Last node that uses a slot, or a hold of it; None if a receive on the same host does."""
        self.holds: dict[int, int] = {}
        """Slot of the value of each hold, by the hold's own slot (`pw.core.programs.guards.hold`)."""
        self._program = program
        self._first: dict[str, Draft] = {}
        self._open: dict[str, Draft] = {}
        self._segment_of_node: list[int] = []
        self._edges: dict[tuple[ValueRef, ArraySpec, ValueRef | None], Edge] = {}
        end = len(program.inputs)
        for node in program.nodes:
            start, end = end, end + len(program.computations[node.computation].outputs)
            self.results.append(tuple(range(start, end)))
        self._edge_slots = end
        for number in range(len(program.nodes)):
            self._place_node(number)
        self.output_slots = self._place_outputs()
        """Slot of each program output."""

    def first_segment(self, island: str) -> Draft:
        """The first segment of `island`; made if there is none."""
        return self._first.get(island) or self._new_segment(island)

    def _new_segment(self, island: str) -> Draft:
        draft = Draft(len(self.segments), island)
        self.segments.append(draft)
        self._open[island] = draft
        self._first.setdefault(island, draft)
        return draft

    def _place_node(self, number: int) -> None:
        node = self._program.nodes[number]
        computation = self._program.computations[node.computation]
        arriving: list[Edge] = []
        slots = []
        counted = dict(node.counted)
        guard = tuple(guard_of(node, computation))
        inputs = zip(node.args, computation.inputs, strict=True)
        for at, (value, spec) in enumerate((*guard, *inputs), -len(guard)):
            slots.append(self._slot(value, spec, arriving, counted.get(at)))
        self._note_use(slots, number)
        self.guards.append(slots.pop(0) if guard else -1)
        segment = self._receive(self.physical.island(computation.placement), arriving)
        segment.steps.append(number)
        self._segment_of_node.append(segment.index)
        self.args.append(tuple(slots))
        if is_hold(node, computation):
            self.holds[self.results[number][0]] = slots[1]

    def origin(self, slot: int) -> int:
        """Return the slot of a value whose hold may be in `slot`; they have one buffer."""
        while slot in self.holds:
            slot = self.holds[slot]
        return slot

    def _note_use(self, slots: Iterable[int], node: int | None) -> None:
        for slot in slots:
            self.last_node[slot] = self.last_node[self.origin(slot)] = node

    def _place_outputs(self) -> tuple[int, ...]:
        slots = []
        arriving: dict[str, list[Edge]] = {}
        for output in self._program.outputs:
            there = arriving.setdefault(self.physical.island(output.spec.placement), [])
            slots.append(self._slot(output.value, output.spec, there, output.counts))
        for island, edges in arriving.items():
            if edges:
                self._receive(island, edges)
        return tuple(slots)

    def _slot(
        self,
        value: ValueRef,
        wanted: ArraySpec,
        arriving: list[Edge],
        counted: ValueRef | None = None,
    ) -> int:
        """The slot of `value` with the spec `wanted`; a new edge is added to `arriving`.

        A value with counts gets zeros as padding wherever its spec changes, also where its bytes would
        stay: what a program computes does not depend on its binding.
        """
        own = self._program.spec_of(value)
        slot = self._made_in(value)
        if own == wanted:
            return slot
        routes = self.physical.routes(own, wanted, always=counted is not None)
        if routes is None:
            return slot
        edge = self._edges.get((value, wanted, counted))
        if edge is None:
            index, producer, counts = len(self._edges), value.node, None
            if counted is not None:
                counts = self._counts(own, counted)
                producer = max(producer, counted.node)
            edge = Edge(
                index, self._edge_slots + index, slot, own, wanted, producer, routes, counts
            )
            self._edges[value, wanted, counted] = edge
            arriving.append(edge)
        return edge.slot

    def _made_in(self, value: ValueRef) -> int:
        return value.index if value.node < 0 else self.results[value.node][value.index]

    def _counts(self, rows: ArraySpec, counted: ValueRef) -> Counts:
        program = self._program
        spec = program.spec_of(counted)
        check_counts(rows, spec)
        if counted.node < 0:
            maker = f"the caller of {program.name!r}"
        else:
            maker = repr(program.computations[program.nodes[counted.node].computation].name)
        return Counts(self._made_in(counted), spec, maker)

    def _receive(self, island: str, arriving: list[Edge]) -> Draft:
        """The open segment of `island`, after it has received `arriving`."""
        remote: list[Edge] = []
        local: list[Edge] = []
        for edge in arriving:
            is_local = self.physical.island(edge.source.placement) == island
            (local if is_local else remote).append(edge)
        needed = {self._send(edge).index for edge in remote}
        segment = self._open.get(island)
        if segment is None or not needed <= segment.depends:
            segment = self._new_segment(island)
        segment.depends |= needed
        for edge in local:
            if any(edge.sends()):
                self._send(edge)
            if any(route.source_host == route.destination_host for route in edge.routes):
                self._note_use(edge.reads(), None)
        segment.steps.extend(arriving)
        return segment

    def _send(self, edge: Edge) -> Draft:
        """Add the send of `edge` to the segment that makes its value; that segment."""
        if edge.producer >= 0:
            self.sends_after[edge.producer].append(edge)
            return self.segments[self._segment_of_node[edge.producer]]
        segment = self.first_segment(self.physical.island(edge.source.placement))
        segment.input_sends.append(edge)
        return segment
