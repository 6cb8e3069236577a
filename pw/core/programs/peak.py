"""Computes the device memory of a run from the layout of its program.

On each island the walk follows the run step by step. It adds what the run makes or receives, and
subtracts it after its last use. The peak of a device must be free there before the run starts.
Arguments are there already and count as zero; a donated one counts as negative from its last use
on. While a computation runs, results that reuse donated arguments need no memory, and the
compiler's temporaries come on top (`IslandMemory.peaks`, because only hosts know them). Runs in
flight share the room for temporaries (`pw.sched.island.memory`).

Five estimates are too high. An edge from another island counts from the start of its segment,
because its bytes come when the sender has them. A value counts on all its devices until no host of
the island uses it. A result that hosts watch, because it is the last one on some device, counts to
the end of its segment; so does a value that hosts send to others, as nothing orders the copy from
the devices and what is computed behind it. A result of the program that a merge has chosen counts
beside the value whose bytes it has. Small host values that travel inside a `Run` do not count while
they are arguments; what they make of the peak where they are donated or returned is added by the
scheduler (`HostValue`).

Devices with shards of the same arrays are one group, so the cost is one step for each computation
and edge, not for each device.

What a run has on a slice with a bound is counted apart (`IslandMemory.slices`), by the same walk over
the values of that slice alone.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import msgspec

from pw.core.programs.plan import Execute, last_on_devices
from pw.core.programs.program import Program
from pw.core.programs.segments import Draft, Edge, SegmentSchedule
from pw.core.sharding import ArraySpec, DeviceAddress, Placement


class OutputMemory(msgspec.Struct, frozen=True, array_like=True):
    """The devices of a program output, and the buffer that it may share."""

    output: int
    devices: tuple[DeviceAddress, ...]
    shard_bytes: int
    same_as_input: int = -1
    same_as_output: int = -1
    """Number of an earlier output with the same buffer; -1 for none."""
    shards: tuple[int, ...] = ()
    """Number of the input that has the shard on each of the devices, if the output is a view."""
    slice: int = 0
    """Number of the slice of the output, if the slice has a bound."""


class HostValue(msgspec.Struct, frozen=True, array_like=True):
    """A program input that may be a small host value, and is donated or returned, or in a view.

    Such a value has no buffer before: its donation frees nothing, and the run makes what it returns.
    """

    input: int
    devices: tuple[DeviceAddress, ...]
    shard_bytes: int


class IslandMemory(msgspec.Struct, frozen=True, array_like=True):
    """The memory of one run of a program on the devices of one island."""

    island: str
    groups: tuple[tuple[DeviceAddress, ...], ...]
    """The devices of the run; those of one group hold shards of the same values."""
    peak_bytes: tuple[int, ...]
    """Bytes that a device of each group holds while nothing is computed, at most."""
    executes: tuple[tuple[int, int, int], ...]
    """(computation, group, bytes that a device holds while it runs)."""
    inputs: tuple[int, ...]
    """Program inputs on this island."""
    donated: tuple[int, ...]
    outputs: tuple[OutputMemory, ...]
    slice: int = 0
    """Number of the only slice whose values count; 0 if those of all slices do."""
    slices: tuple[IslandMemory, ...] = ()
    """Memory on each slice that has a bound."""
    host_values: tuple[HostValue, ...] = ()
    """Inputs that are donated or returned, which may be host values."""

    def peaks(self, temporary_bytes: Sequence[int] = ()) -> list[int]:
        """Return how many bytes must be free on a device of each group.

        Args:
            temporary_bytes: the memory of each computation besides its arguments and results.
        """
        peaks = list(self.peak_bytes)
        for computation, group, size_bytes in self.executes:
            if computation < len(temporary_bytes):
                size_bytes += temporary_bytes[computation]
            peaks[group] = max(peaks[group], size_bytes)
        return peaks


def island_memory(
    program: Program,
    schedule: SegmentSchedule,
    executes: Mapping[int, Execute],
    limited: Collection[str] | None = None,
    bounded: Collection[int] = (),
) -> tuple[IslandMemory, ...]:
    """Return the memory of a run on each of its islands where it counts.

    Args:
        program: the program.
        schedule: its layout in segments.
        executes: the instruction of each node.
        limited: names of the islands that count all memory; None for all. Others count that of slices that
            have a bound.
        bounded: numbers of the slices that have a bound.
    """
    slots = _Slots(program, schedule)
    bindings = schedule.physical.bindings
    memories = []
    for island in dict.fromkeys(draft.island for draft in schedule.segments):
        own = [number for number in bindings if bindings[number].island == island]
        apart = [number for number in own if number in bounded]
        counts_all = limited is None or island in limited
        if not counts_all and not apart:
            continue
        memory = _Walk(slots, island, executes, own if counts_all else apart, apart).memory()
        parts = [(number, _Walk(slots, island, executes, (number,)).memory()) for number in apart]
        slices = tuple(
            msgspec.structs.replace(part, slice=number) for number, part in parts if part.groups
        )
        memories.append(msgspec.structs.replace(memory, slices=slices))
    return tuple(memories)


@dataclass(slots=True, init=False)
class _Slots:
    """The spec of the value in every slot."""

    program: Program
    schedule: SegmentSchedule
    specs: dict[int, ArraySpec]

    def __init__(self, program: Program, schedule: SegmentSchedule) -> None:
        self.program, self.schedule = program, schedule
        self.specs = dict(enumerate(program.inputs))
        for node, results in zip(program.nodes, schedule.results, strict=True):
            self.specs.update(
                zip(results, program.computations[node.computation].outputs, strict=True)
            )
        for draft in schedule.segments:
            for step in draft.steps:
                if isinstance(step, Edge):
                    self.specs[step.slot] = step.destination


class _Walk:
    """One island's part of a run on some of its slices, step by step."""

    def __init__(
        self,
        slots: _Slots,
        island: str,
        executes: Mapping[int, Execute],
        slices: Collection[int],
        bounded: Collection[int] = (),
    ) -> None:
        self._program, self._schedule, self._specs = slots.program, slots.schedule, slots.specs
        self._slices, self._bounded = frozenset(slices), bounded
        self._island, self._executes = island, executes
        self._physical = slots.schedule.physical
        self._name_outputs()
        self._drafts = [draft for draft in slots.schedule.segments if draft.island == island]
        self._group()
        self._live = [0] * len(self.groups)
        self._peaks = [0] * len(self.groups)
        self._at_execute: dict[tuple[int, int], int] = {}
        self._sent = self._last_sends()
        """Where the last segment ends that sends each value to another host."""

    def _name_outputs(self) -> None:
        """Have outputs count on the slice for which they are made.

        A result may have been computed on another slice with the same devices.
        """
        for output, slot in zip(self._program.outputs, self._schedule.output_slots, strict=True):
            is_made = slot >= len(self._program.inputs)
            if is_made and self._counts(output.spec) and not self._counts(self._specs[slot]):
                self._specs = self._specs | {slot: output.spec}

    def _is_here(self, spec: ArraySpec) -> bool:
        return self._physical.island(spec.placement) == self._island

    def _counts(self, spec: ArraySpec) -> bool:
        return spec.placement.slice in self._slices

    def _group(self) -> None:
        """Group devices that hold shards of the same values."""
        placements = dict.fromkeys(
            spec.placement for spec in self._specs.values() if self._counts(spec)
        )
        members: defaultdict[DeviceAddress, list[Placement]] = defaultdict(list)
        for placement in placements:
            for device in self._physical.devices(placement):
                members[device].append(placement)
        alike: defaultdict[tuple[Placement, ...], list[DeviceAddress]] = defaultdict(list)
        for device, held in members.items():
            alike[tuple(held)].append(device)
        self.groups = tuple(tuple(devices) for devices in alike.values())
        self._groups_of: defaultdict[Placement, list[int]] = defaultdict(list)
        for group, shared in enumerate(alike):
            for placement in shared:
                self._groups_of[placement].append(group)

    def memory(self) -> IslandMemory:
        """Walk through the steps, and return the peaks."""
        program = self._program
        ends = self._last_uses()
        position = 0
        for draft in self._drafts:
            for edge in self._arriving(draft):
                self._receive(edge)
            for step in draft.steps:
                if not isinstance(step, Edge):
                    self._execute(self._executes[step])
                elif self._is_here(step.source):
                    self._receive(step)
                for slot in ends.get(position, ()):
                    self._add(self._specs[slot], -1)
                position += 1
        if not program.makes_views:  # a merge may have made a result last
            self._peaks = list(map(max, self._peaks, self._live))
        inputs = [n for n, spec in enumerate(program.inputs) if self._counts(spec)]
        donated = frozenset(program.donated)
        return IslandMemory(
            self._island,
            self.groups,
            tuple(self._peaks),
            tuple((*where, size_bytes) for where, size_bytes in self._at_execute.items()),
            tuple(inputs),
            tuple(number for number in inputs if number in donated),
            tuple(self._outputs()),
            host_values=tuple(self._host_values(donated.intersection(inputs))),
        )

    def _host_values(self, donated: Collection[int]) -> Iterator[HostValue]:
        """Yield what small host values take of the peak."""
        program = self._program
        returned: set[int] = set()
        for number, (output, slot) in enumerate(
            zip(program.outputs, self._schedule.output_slots, strict=True)
        ):
            if not self._counts(output.spec):
                continue
            devices = self._physical.devices(output.spec.placement)
            by_source: dict[int, list[DeviceAddress]] = {}
            for source, device in zip(self._sources(number), devices, strict=False):
                by_source.setdefault(source, []).append(device)
            for source, theirs in by_source.items():
                yield HostValue(source, tuple(theirs), output.spec.device_bytes)
            if slot < len(program.inputs):
                returned.add(slot)
        for number in sorted(returned.union(donated)):
            spec = program.inputs[number]
            if spec.device_bytes:
                yield HostValue(number, self._physical.devices(spec.placement), spec.device_bytes)

    def _arriving(self, draft: Draft) -> Iterator[Edge]:
        for step in draft.steps:
            if isinstance(step, Edge) and not self._is_here(step.source):
                yield step

    def _add(self, spec: ArraySpec, sign: int = 1) -> None:
        for group in self._groups_of[spec.placement]:
            self._live[group] += sign * spec.device_bytes

    def _receive(self, edge: Edge) -> None:
        self._add(edge.destination)
        self._peaks = list(map(max, self._peaks, self._live))

    def _execute(self, execute: Execute) -> None:
        if not self._schedule.holds.keys().isdisjoint(execute.results):
            return  # a hold: its result is its argument
        for slot in execute.results:
            self._add(self._specs[slot])
        computation = self._program.computations[execute.computation]
        if not computation.traits.allocates:
            return  # its results are its arguments, which are freed right behind it if nothing else needs them
        donated_bytes = self._taken_over(execute)
        if not self._groups_of[computation.placement]:  # it runs on another slice
            self._peaks = list(map(max, self._peaks, self._live))
        for group in self._groups_of[computation.placement]:
            where = execute.computation, group
            size_bytes = self._live[group] - donated_bytes
            self._at_execute[where] = max(self._at_execute.get(where, 0), size_bytes)

    def _taken_over(self, execute: Execute) -> int:
        """Return the bytes of results that reuse donated arguments."""
        results = Counter(
            self._form(slot) for slot in execute.results if self._counts(self._specs[slot])
        )
        size_bytes = 0
        for position in execute.donated:
            slot = execute.args[position]
            if self._schedule.origin(slot) in self._sent:
                continue  # a copy of it may be taken over
            if results[self._form(slot)] and self._counts(self._specs[slot]):
                results[self._form(slot)] -= 1
                size_bytes += self._specs[slot].device_bytes
        return size_bytes

    def _form(self, slot: int) -> tuple[tuple[int, ...], str, str]:
        spec = self._specs[slot]
        return spec.sharding.shard_shape(spec.shape), spec.dtype, spec.memory

    def _last_uses(self) -> dict[int, list[int]]:
        """Return the slots whose last use is each step."""
        last: dict[int, int] = {}
        steps = (step for draft in self._drafts for step in draft.steps)
        for position, step in enumerate(steps):
            if isinstance(step, Edge):
                used = [step.slot]
                if any(route.source_host == route.destination_host for route in step.routes):
                    used += step.reads()
            else:
                execute = self._executes[step]
                used = [*execute.reads, *execute.results]
            last.update(dict.fromkeys(map(self._schedule.origin, used), position))
        for slot, end in itertools.chain(self._watched(), self._sent.items()):
            last[slot] = max(last.get(slot, end), end)
        stays = set(range(len(self._program.inputs))) - set(self._program.donated)
        stays.update(self._schedule.output_slots)
        ends: dict[int, list[int]] = {}
        for slot, position in last.items():
            if slot not in stays:
                ends.setdefault(position, []).append(slot)
        return ends

    def _watched(self) -> Iterator[tuple[int, int]]:
        """Yield results that hosts watch, and where their segments end.

        Where computations are skipped a host watches others, and no more bytes.
        """
        end, of_hosts = -1, cache(self._devices_by_host)
        for draft in self._drafts:
            end += len(draft.steps)
            results: defaultdict[str, list[tuple[frozenset[DeviceAddress], int]]] = defaultdict(
                list
            )
            for step in draft.steps:
                if not isinstance(step, Edge) and (slots := self._executes[step].results):
                    node = self._program.computations[self._executes[step].computation]
                    for host, own in of_hosts(node.placement):
                        results[host].append((own, slots[-1]))
            for slot in itertools.chain.from_iterable(map(last_on_devices, results.values())):
                yield self._schedule.origin(slot), end

    def _last_sends(self) -> dict[int, int]:
        """Return values that hosts send to others, and where the last segments end that send them."""
        last: dict[int, int] = {}
        end, sends_after = -1, self._schedule.sends_after
        for draft in self._drafts:
            end += len(draft.steps)
            edges = list(draft.input_sends)
            for step in draft.steps:
                if not isinstance(step, Edge):
                    edges += sends_after.get(step, ())
            for edge in edges:
                if any(edge.sends()):
                    last.update(dict.fromkeys(map(self._schedule.origin, edge.reads()), end))
        return last

    def _devices_by_host(self, placement: Placement) -> list[tuple[str, frozenset[DeviceAddress]]]:
        """Return the devices of a placement on each of its hosts."""
        devices: defaultdict[str, list[DeviceAddress]] = defaultdict(list)
        for device in self._physical.devices(placement):
            devices[device.host].append(device)
        return [(host, frozenset(own)) for host, own in devices.items()]

    def _outputs(self) -> Iterator[OutputMemory]:
        first: dict[int, int] = {}
        slots = self._schedule.output_slots
        for number, (output, slot) in enumerate(zip(self._program.outputs, slots, strict=True)):
            if not self._counts(output.spec):
                continue
            number_of_slice = output.spec.placement.slice
            yield OutputMemory(
                number,
                self._physical.devices(output.spec.placement),
                output.spec.device_bytes,
                slot if slot < len(self._program.inputs) else -1,
                first.get(slot, -1),
                self._sources(number),
                number_of_slice if number_of_slice in self._bounded else 0,
            )
            first.setdefault(slot, number)

    def _sources(self, output: int) -> tuple[int, ...]:
        """Return the input that has each shard of an output of a view; nothing for other outputs."""
        if not self._program.makes_views:
            return ()
        return tuple([source for source, _ in self._program.computations[0].shards[output]])
