"""Chooses the way of each edge of a program: the step before lowering.

Hosts can always send an edge to each other. Sometimes another way is faster, and all of them can be written
as computations of the program itself (`Kind.RESHARD`), so that nothing below knows of them: launch order,
memory and recovery are those of any computation.

- Where source and destination lie on the same devices, XLA can re-shard: without communication if each
  device has what it wants, or with a collective.
- A value that many hosts of one island take whole can be sent once, in parts, and put together by a
  collective (*spread*).
- A value that several islands take can be passed on by those that have it (*relay*): along a binomial
  tree, so that the number of islands that have it doubles in each round.

The choice is a pure function of the program and the bindings of its slices. It compares estimates
(`pw.core.costs`).
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum

import msgspec

from pw.core.costs import MOVES, RUNS, Costs
from pw.core.dtypes import PACKED
from pw.core.platforms import platform_of
from pw.core.programs.physical import Physical
from pw.core.programs.program import Computation, Kind, Node, Output, Program, ValueRef
from pw.core.sharding import ArraySpec, Box, Sharding, box_bytes

"""Dtypes that are left to transfers: XLA keeps several elements in a byte."""


class Way(StrEnum):
    """Way of an edge from its source to its destination."""

    TRANSFERS = "transfers"
    """Transfers from host to host."""
    ROWS = "rows that count"
    """Transfers from host to host, without the padding (`pw.core.programs.counted`)."""
    SLICES = "slices"
    """XLA, without communication: each device has what it wants."""
    COLLECTIVE = "collective"
    """XLA, with communication between the devices."""
    SPREAD = "spread"
    """Transfers of parts to all hosts of the destination, and then a collective."""
    RELAY = "relay"
    """Transfer from an island that has the value to the next one."""


@dataclass(slots=True)
class EdgeWay:
    """An edge, and how it goes.

    Attributes:
        value: what is moved.
        consumer: the node that takes it first; None for a result of the program.
        source: how it lies.
        destination: how it is wanted.
        estimates: seconds of each possible way.
        way: the chosen one.
        between: of a spread edge, how the parts lie.
        via: of a relayed edge, what the island that passes it on has.
        passes_on: other edges come from its destination.
    """

    value: ValueRef
    consumer: int | None
    source: ArraySpec
    destination: ArraySpec
    estimates: dict[Way, float] = field(default_factory=dict)
    way: Way = Way.TRANSFERS
    between: ArraySpec | None = None
    via: ArraySpec | None = None
    passes_on: bool = False


def edges_of(
    program: Program, physical: Physical, *, only_transfers: bool = False
) -> list[EdgeWay]:
    """Return the edges of a program with their ways, in the order in which they are needed first.

    Args:
        program: the program.
        physical: the devices of its specs.
        only_transfers: choose no other way.
    """
    ways: dict[tuple[ValueRef, ArraySpec, ValueRef | None], EdgeWay] = {}

    def want(
        value: ValueRef, wanted: ArraySpec, consumer: int | None, counts: ValueRef | None = None
    ) -> None:
        own, key = program.spec_of(value), (value, wanted, counts)
        if key in ways or own == wanted:
            return
        if counts is not None:
            ways[key] = EdgeWay(value, consumer, own, wanted, way=Way.ROWS)
        elif not physical.is_there(own, wanted):
            ways[key] = EdgeWay(value, consumer, own, wanted)

    for number, node in enumerate(program.nodes):
        counted = dict(node.counted)
        inputs = program.computations[node.computation].inputs
        for at, (value, wanted) in enumerate(zip(node.args, inputs, strict=True)):
            want(value, wanted, number, counted.get(at))
    for output in program.outputs:
        want(output.value, output.spec, None, output.counts)
    edges = [edge for edge in ways.values() if edge.way is not Way.ROWS]
    if edges and not only_transfers and not program.makes_views:
        estimating = _Estimating(physical, RUNS if program.nodes else MOVES)
        for edge in edges:
            estimating.compare(edge)
        estimating.relay(edges)
    return list(ways.values())


def written(program: Program, edges: list[EdgeWay]) -> Program:
    """Return the program with a computation for each edge that does not go by transfers alone."""
    if all(edge.way in (Way.TRANSFERS, Way.ROWS) and not edge.passes_on for edge in edges):
        return program
    return _Writing(program, edges).result()


# --- estimates ------------------------------------------------------------------------------------


class _Estimating:
    """Estimates the ways of edges."""

    def __init__(self, physical: Physical, runs: int) -> None:
        self._physical = physical
        self._runs = runs
        self._first: dict[tuple[ArraySpec, ArraySpec], EdgeWay] = {}

    def compare(self, edge: EdgeWay) -> None:
        """Estimate the ways of one edge, without the others, and choose the fastest one."""
        pair = (edge.source, edge.destination)
        first = self._first.get(pair)
        if first is None:
            first = self._first[pair] = edge
            self._estimate(edge)
        edge.estimates, edge.way, edge.between = dict(first.estimates), first.way, first.between

    def _estimate(self, edge: EdgeWay) -> None:
        source, destination = edge.source, edge.destination
        is_plain = not (source.memory or destination.memory) and source.dtype not in PACKED
        if is_plain and source.size_bytes:
            devices = self._physical.devices
            if devices(source.placement) == devices(destination.placement):
                way = reshard_of(source, destination)
                if way is not None and (way is Way.SLICES or self._is_large(destination)):
                    edge.estimates[way] = self._reshard_s(way, source, destination)
            elif self._is_large(destination):
                parts = _in_parts(destination)
                if parts is not None and len(self._physical.hosts(destination.placement)) > 1:
                    spread_s = self._transfers_s(source, parts)
                    gather_s = self._reshard_s(Way.COLLECTIVE, parts, destination)
                    edge.estimates[Way.SPREAD] = spread_s + gather_s
                    edge.between = parts
        edge.estimates[Way.TRANSFERS] = self._transfers_s(source, destination)
        edge.way = min(edge.estimates, key=lambda way: (edge.estimates[way], way))

    def _is_large(self, spec: ArraySpec) -> bool:
        return spec.size_bytes >= self._costs(spec).least_bytes

    def _costs(self, spec: ArraySpec) -> Costs:
        return platform_of(self._physical.bindings[spec.placement.slice].platform).costs

    def _is_near(self, *specs: ArraySpec) -> bool:
        """Whether all hosts of these specs are on one machine."""
        machines = {self._physical.bindings[spec.placement.slice].machine for spec in specs}
        return len(machines) == 1 and "" not in machines

    def _transfers_s(self, source: ArraySpec, destination: ArraySpec) -> float:
        """Estimate the transfers between hosts, by the host with most work."""
        costs = self._costs(destination)
        wire = costs.shared_byte_s if self._is_near(source, destination) else costs.wire_byte_s
        messages: Counter[str] = Counter()
        sent: Counter[str] = Counter()
        received: Counter[str] = Counter()
        read: Counter[str] = Counter()
        staged: Counter[str] = Counter()
        copied: Counter[str] = Counter()
        shard = source.sharding.shard_shape(source.shape)
        for route in self._physical.routes(source, destination) or ():
            here, there = route.source_host, route.destination_host
            for piece in route.pieces:
                size_bytes = box_bytes(piece.source_box, source.dtype)
                placed_bytes = size_bytes * len(piece.destination_devices)
                read[here] += size_bytes
                staged[there] += placed_bytes
                if here != there:
                    sent[here] += size_bytes
                    received[there] += size_bytes
                is_whole = size_bytes == destination.shard_bytes
                if not is_whole or (here == there and not _is_one_run(piece.source_box, shard)):
                    copied[there] += placed_bytes
            if here != there:
                messages.update((here, there))
        return max(
            (
                costs.message_s * messages[host]
                + wire * max(sent[host], received[host])
                + costs.copy_byte_s * copied[host]
                + costs.stage_byte_s * (read[host] + staged[host])
                for host in {**read, **staged}
            ),
            default=0.0,
        )

    def _reshard_s(self, way: Way, source: ArraySpec, destination: ArraySpec) -> float:
        """Estimate a re-shard by XLA."""
        costs = self._costs(destination)
        widths = Counter(device.host for device in self._physical.devices(destination.placement))
        width = max(widths.values())
        total_s = costs.launch_s + costs.compile_s / self._runs
        total_s += costs.device_byte_s * destination.shard_bytes * width
        if way is Way.COLLECTIVE:
            common = _common(source.box(0), destination.box(0))
            fetched = (destination.shard_bytes - box_bytes(common, source.dtype)) * width
            if len(widths) > 1:
                total_s += costs.collective_s + costs.collective_byte_s * fetched
            else:
                total_s += costs.device_byte_s * fetched
        return total_s

    def relay(self, edges: list[EdgeWay]) -> None:
        """Have large values that go to several islands passed on, where that is faster."""
        targets: dict[ValueRef, dict[str, EdgeWay]] = {}
        for edge in edges:
            island = self._physical.island(edge.destination.placement)
            if island != self._physical.island(edge.source.placement):
                targets.setdefault(edge.value, {}).setdefault(island, edge)
        for by_island in targets.values():
            receivers = list(by_island.values())
            if len(receivers) > 2:
                self._relay(receivers)

    def _relay(self, receivers: list[EdgeWay]) -> None:
        first = receivers[0]
        specs = [edge.destination for edge in receivers]
        # On one machine the islands share the wire, so that passing on wins nothing.
        if not self._is_large(specs[0]) or self._is_near(first.source, *specs):
            return
        costs = self._costs(specs[0])
        each_s = max(edge.estimates[edge.way] for edge in receivers)
        pass_s = each_s + costs.launch_s + costs.compile_s / self._runs
        rounds = [at.bit_length() for at in range(1, len(receivers) + 1)]
        relayed_s, direct_s = pass_s * rounds[-1], each_s * len(receivers)
        for edge, round_ in zip(receivers, rounds, strict=True):
            edge.estimates[Way.RELAY] = pass_s * round_
            edge.estimates[edge.way] = direct_s
        if relayed_s >= direct_s:
            return
        for at, edge in enumerate(receivers, 1):
            parent = at - (1 << (at.bit_length() - 1))
            if parent:
                edge.way, edge.via = Way.RELAY, specs[parent - 1]
                receivers[parent - 1].passes_on = True


def reshard_of(source: ArraySpec, destination: ArraySpec) -> Way | None:
    """Return how XLA re-shards on the same devices in the same order; None if it might copy the whole array.

    Only what XLA's partitioner does in one step: slices of what a device has, an all-gather, and an
    all-to-all that moves mesh axes from one dimension to another one.
    """
    grows = shrinks = True
    for position in range(source.sharding.device_count):
        own, wanted = source.box(position), destination.box(position)
        common = _common(own, wanted)
        shrinks = shrinks and common == wanted
        grows = grows and common == own
        if not (shrinks or grows):
            break
    if shrinks:
        return Way.SLICES
    return Way.COLLECTIVE if grows or _is_exchange(source, destination) else None


def _is_exchange(source: ArraySpec, destination: ArraySpec) -> bool:
    one, other = source.sharding, destination.sharding
    if (one.axis_names, one.axis_sizes) != (other.axis_names, other.axis_sizes):
        return False
    ndim = len(source.shape)
    pairs = list(zip(_axes(one, ndim), _axes(other, ndim), strict=True))
    changed = [(before, after) for before, after in pairs if before != after]
    if len(changed) != 2:
        return False
    for (gave, kept), (had, got) in (changed, changed[::-1]):
        moved = gave[len(kept) :]
        if moved and gave == (*kept, *moved) and got == (*had, *moved):
            return True
    return False


def _axes(sharding: Sharding, ndim: int) -> list[tuple[str, ...]]:
    return [*sharding.spec, *([()] * (ndim - len(sharding.spec)))]


def _common(one: Box, other: Box) -> Box:
    both = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True)]
    return tuple([(low, max(low, high)) for low, high in both])


def _is_one_run(box: Box, shape: tuple[int, ...]) -> bool:
    """Return whether a box of an array of `shape` is one run of memory, which needs no copy."""
    extents = [stop - start for start, stop in box]
    first = next((at for at, extent in enumerate(extents) if extent > 1), len(extents))
    return tuple(extents[first + 1 :]) == shape[first + 1 :]


def _in_parts(spec: ArraySpec) -> ArraySpec | None:
    """Return a spec in which no two devices have the same part; None if the array does not divide so."""
    sharding, ndim = spec.sharding, len(spec.shape)
    axes = _axes(sharding, ndim)
    used = {axis for names in axes for axis in names}
    sizes = dict(zip(sharding.axis_names, sharding.axis_sizes, strict=True))
    free = tuple(axis for axis in sharding.axis_names if axis not in used and sizes[axis] > 1)
    factor = math.prod(sizes[axis] for axis in free)
    if factor == 1:
        return None
    for dimension, size in enumerate(spec.shape):
        if size % (sharding.partitions(ndim)[dimension] * factor) == 0:
            axes[dimension] = (*axes[dimension], *free)
            return msgspec.structs.replace(
                spec, sharding=msgspec.structs.replace(sharding, spec=tuple(axes))
            )
    return None


# --- the program ----------------------------------------------------------------------------------


class _Writing:
    """Writes the program with its re-shards; each stands before the first node that needs it."""

    def __init__(self, program: Program, edges: list[EdgeWay]) -> None:
        self._program = program
        self._edges = {
            (edge.value, edge.destination): edge for edge in edges if edge.way is not Way.ROWS
        }
        self._computations = list(program.computations)
        self._index: dict[tuple[ArraySpec, ArraySpec], int] = {}
        self._nodes: list[Node] = []
        self._number: list[int] = []
        """New number of each node."""
        self._arrived: dict[tuple[ValueRef, ArraySpec], ValueRef] = {}

    def result(self) -> Program:
        program = self._program
        for node in program.nodes:
            inputs = program.computations[node.computation].inputs
            counted = {at: self._renumbered(counts) for at, counts in node.counted}
            args = [
                self._renumbered(value) if at in counted else self._value(value, wanted)
                for at, (value, wanted) in enumerate(zip(node.args, inputs, strict=True))
            ]
            guard = None if node.guard is None else self._renumbered(node.guard)
            pairs = tuple(counted.items())
            self._number.append(
                self._add(Node(node.computation, tuple(args), guard, node.unless, pairs))
            )
        outputs = [self._output(output) for output in program.outputs]
        return msgspec.structs.replace(
            program,
            computations=tuple(self._computations),
            nodes=tuple(self._nodes),
            outputs=tuple(outputs),
        )

    def _output(self, output: Output) -> Output:
        if output.counts is not None:
            own, counts = self._renumbered(output.value), self._renumbered(output.counts)
            return Output(own, output.spec, counts)
        return Output(self._value(output.value, output.spec), output.spec)

    def _value(self, value: ValueRef, wanted: ArraySpec) -> ValueRef:
        """Return the value that a consumer with this spec takes."""
        key = (value, wanted)
        if key not in self._arrived:
            edge = self._edges.get(key)
            own = self._renumbered(value)
            self._arrived[key] = own if edge is None else self._moved(edge, own)
        return self._arrived[key]

    def _renumbered(self, value: ValueRef) -> ValueRef:
        return value if value.node < 0 else ValueRef(self._number[value.node], value.index)

    def _moved(self, edge: EdgeWay, own: ValueRef) -> ValueRef:
        wanted = edge.destination
        match edge.way:
            case Way.SLICES | Way.COLLECTIVE:
                here = msgspec.structs.replace(edge.source, placement=wanted.placement)
                return self._reshard(own, here, wanted)
            case Way.SPREAD:
                assert edge.between is not None
                return self._reshard(own, edge.between, wanted)
            case Way.RELAY:
                assert edge.via is not None
                own = self._value(edge.value, edge.via)
        return self._reshard(own, wanted, wanted) if edge.passes_on else own

    def _reshard(self, value: ValueRef, source: ArraySpec, destination: ArraySpec) -> ValueRef:
        index = self._index.get((source, destination))
        if index is None:
            index = self._index[source, destination] = len(self._computations)
            self._computations.append(reshard(source, destination))
        return ValueRef(self._add(Node(index, (value,))), 0)

    def _add(self, node: Node) -> int:
        self._nodes.append(node)
        return len(self._nodes) - 1


def reshard(source: ArraySpec, destination: ArraySpec) -> Computation:
    """Return the computation that re-shards on the devices of both."""
    name = "relay" if source == destination else "re-shard"
    return Computation(
        f"{name} {destination.short}",
        b"",
        destination.placement,
        (source,),
        (destination,),
        kind=Kind.RESHARD,
    )
