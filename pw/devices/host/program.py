"""A program as one host runs it: its plan, indexed for what each launch looks up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from pw.core.ids import client_of
from pw.core.programs.plan import (
    Execute,
    Free,
    HostPlan,
    Instruction,
    Receive,
    Send,
    last_on_devices,
)
from pw.core.programs.program import Computation, Program
from pw.core.sharding import (
    ArraySpec,
    Binding,
    Box,
    DeviceAddress,
    Placement,
    box_slices,
    dtype_of,
    host_boxes,
)
from pw.core.tenants import OPERATOR
from pw.devices.host.backend import relative
from pw.devices.host.views import ViewPart, view_parts


@dataclass(slots=True)
class SegmentSteps:
    """What one launch of a program does on this host."""

    instructions: tuple[Instruction, ...] = ()
    receives: tuple[Receive, ...] = ()
    watched: frozenset[int] = frozenset()
    """Positions of the last computations with results on each device: a report waits for them."""
    watch_after: frozenset[int] = frozenset()
    """Positions after which they are watched: their own, or that of the last send of their results."""
    unread: frozenset[int] = frozenset()
    """Positions of gang computations whose results no later gang computation reads. If any other
    gang computation fails, one of these fails as well."""
    together: bool = False
    """True if a gang of several hosts computes some of it."""
    devices: frozenset[int] = frozenset()
    """Ordinals of this host's devices that compute some of it."""
    kept: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Donated arguments that the plan still needs, by the position of their computation."""
    skips: dict[int, frozenset[int]] = field(default_factory=dict)
    """If there are guards or merges, the devices of each computation by its position: which of them is the last
    that is not skipped is not known before the run, nor whether another gang computation reads a result."""

    @classmethod
    def of(
        cls,
        instructions: tuple[Instruction, ...],
        body: Program,
        gangs: set[int],
        own: Callable[[Computation], frozenset[int]],
    ) -> SegmentSteps:
        """Index the instructions of one segment of a program.

        Args:
            instructions: instructions of the segment on this host.
            body: the program.
            gangs: computations that run on several hosts.
            own: returns the devices of this host that a computation runs on.
        """
        receives = (i for i in instructions if isinstance(i, Receive))
        segment = cls(instructions, tuple(receives))
        results: list[tuple[frozenset[int], int]] = []
        for position, instruction in enumerate(instructions):
            if isinstance(instruction, Execute):
                computation = body.computations[instruction.computation]
                segment.together |= instruction.computation in gangs
                if instruction.results:
                    devices = own(computation)
                    segment.devices |= devices
                    results.append((devices, position))
                donated = instruction.donated
                kept = tuple(at for at in computation.donated if at not in donated)
                if kept:
                    segment.kept[position] = kept
        if _may_skip(instructions, body):
            for position, instruction in enumerate(instructions):
                if isinstance(instruction, Execute):
                    segment.skips[position] = own(body.computations[instruction.computation])
                    if instruction.computation in gangs:
                        segment.unread |= {position}
            return segment
        segment.watched = frozenset(last_on_devices(results))
        segment.watch_after = frozenset(_last_send(instructions, at) for at in segment.watched)
        segment.unread = _unread(instructions, gangs)
        return segment


def _may_skip(instructions: tuple[Instruction, ...], body: Program) -> bool:
    """Whether some instructions have a guard, or are merges."""
    return any(
        isinstance(one, Execute)
        and (one.guard >= 0 or body.computations[one.computation].traits.predicates)
        for one in instructions
    )


def _last_send(instructions: tuple[Instruction, ...], position: int) -> int:
    """Return the last send before the next computation, or the position itself."""
    last = position
    for behind in range(position + 1, len(instructions)):
        if isinstance(instructions[behind], Send):
            last = behind
        elif not isinstance(instructions[behind], Free):
            break
    return last


def _unread(instructions: tuple[Instruction, ...], gangs: set[int]) -> frozenset[int]:
    unread: set[int] = set()
    maker: dict[int, int] = {}
    for position, instruction in enumerate(instructions):
        if isinstance(instruction, Execute) and instruction.computation in gangs:
            unread -= {maker[slot] for slot in instruction.args if slot in maker}
            unread.add(position)
            maker |= dict.fromkeys(instruction.results, position)
    return frozenset(unread)


_PYTHON = frozenset((-1,))
NO_SEGMENT = SegmentSteps()
"""Segment without work for this host."""


class Inline(NamedTuple):
    """An argument whose value comes with the launch."""

    spec: ArraySpec
    devices: tuple[DeviceAddress, ...]
    dtype: np.dtype[np.generic]
    boxes: tuple[tuple[tuple[int, ...], Box, tuple[slice, ...]], ...]
    """Positions of devices, the whole of a shard there, and its place in the value."""


class HostResult(NamedTuple):
    """A result of a program on this host."""

    output: int
    slot: int
    spec: ArraySpec
    devices: tuple[DeviceAddress, ...]


class SingleStep(NamedTuple):
    """What a launch of a program does that is one computation on this host, and nothing else."""

    segment: int
    position: int
    """Position of the computation among the instructions."""
    computation: int
    key: bytes
    args: tuple[int, ...]
    """The program's input of each argument."""
    results: tuple[HostResult | None, ...]
    """The program's result of each result; None for one that is dropped."""
    kept: tuple[int, ...]
    """Donated arguments that the plan still needs."""


def _is_local(receive: Receive, devices: tuple[DeviceAddress, ...], host: str) -> bool:
    """Whether every shard on `host` is made of exactly one piece, which `host` has itself."""
    if any(route.source_host != host for route in receive.routes):
        return False
    spec = receive.spec
    shard = tuple((0, size) for size in spec.sharding.shard_shape(spec.shape))
    covered: list[int] = []
    for route in receive.routes:
        for piece in route.pieces:
            if piece.destination_box != shard:
                return False
            covered += piece.destination_devices
    here = [position for position, device in enumerate(devices) if device.host == host]
    return sorted(covered) == here


def _of_branches(
    instructions: list[Instruction], body: Program, outputs: set[int]
) -> tuple[frozenset[int], frozenset[int]]:
    """Return `HostProgram.predicates` and `held`."""
    received = {i.slot for i in instructions if isinstance(i, Receive)} - outputs
    predicates, held = set(received), set(received)
    for instruction in instructions:
        if isinstance(instruction, Execute):
            count = body.computations[instruction.computation].traits.predicates
            predicates.difference_update(instruction.args[count:])
            held.discard(instruction.guard)
            if count or instruction.guard >= 0:
                held.difference_update(instruction.args[:count])
            else:
                held.difference_update(instruction.args)
        elif not isinstance(instruction, Free):
            predicates.difference_update(instruction.reads)
            held.difference_update(instruction.reads)
    return frozenset(predicates - held), frozenset(held)


def owner_of(key: bytes) -> int:
    """Return the client that owns the computation with this key; 0 for other keys."""
    program = key.partition(b"/")[0]
    return client_of(int(program)) if program.isdigit() else 0


@dataclass(slots=True)
class HostProgram:
    """An installed program."""

    body: Program
    plan: HostPlan
    keys: tuple[bytes | None, ...]
    """The backend's key of each computation, None for those that do not run here. Each installation
    has its own keys, so that forgetting one does not harm the next."""
    segments: dict[int, SegmentSteps]
    install: int
    """The number of this installation."""
    bindings: dict[int, Binding]
    located: dict[Placement, tuple[DeviceAddress, ...]] = field(default_factory=dict)
    inlines: dict[int, Inline] = field(default_factory=dict)
    results: tuple[HostResult, ...] = ()
    outputs_of_slot: dict[int, list[int]] = field(default_factory=dict)
    passed_on: tuple[int, ...] = ()
    """Slots of arguments that are also results."""
    last_segment: int = -1
    """The last segment that this host launches in a run."""
    local_edges: set[int] = field(default_factory=set)
    """Edges whose pieces are all on this host."""
    gangs: set[int] = field(default_factory=set)
    """Computations that run here and on other hosts."""
    superseded: tuple[bytes, ...] = ()
    """Keys of earlier installations, which runs that have begun still use."""
    unsettled: set[int] = field(default_factory=set)
    """Computations whose results no op may use before their outcome is known."""
    tenant: str = OPERATOR
    """The tenant of its client."""
    recorded: dict[int, int] = field(default_factory=dict)
    """The recorder's number of each computation that was recorded."""
    predicates: frozenset[int] = frozenset()
    """Slots of received values that hosts read only as predicates; they need not be on the devices."""
    held: frozenset[int] = frozenset()
    """Slots of received values that are needed only if a branch is taken."""
    views: tuple[ViewPart, ...] = ()
    """Parts of the results on this host, if the program makes views and does nothing else."""
    single: SingleStep | None = None
    """The only step of the program, if it is one computation whose results can be used at once."""

    @classmethod
    def of(cls, number: int, install: int, body: Program, plan: HostPlan) -> HostProgram:
        """Index the plan of a program; `install` counts its installations."""
        instructions = [instruction for part in plan.segments for instruction in part.instructions]
        used = {i.computation for i in instructions if isinstance(i, Execute)}
        program = cls(
            body,
            plan,
            tuple(
                f"{number}/{install}/{index}".encode()
                if index in used and computation.traits.is_installed
                else None
                for index, computation in enumerate(body.computations)
            ),
            {},
            install,
            {binding.slice: binding for binding in plan.bindings},
        )
        for output, slot in plan.outputs:
            program.outputs_of_slot.setdefault(slot, []).append(output)
        specs = [output.spec for output in body.outputs]
        program.results = tuple(
            HostResult(output, slot, specs[output], program.devices(specs[output]))
            for output, slot in plan.outputs
        )
        program.predicates, program.held = _of_branches(
            instructions, body, set(program.outputs_of_slot)
        )
        inputs = len(body.inputs)
        program.passed_on = tuple(slot for slot in program.outputs_of_slot if slot < inputs)
        for receive in instructions:
            if (
                isinstance(receive, Receive)
                and receive.counts is None
                and _is_local(receive, program.devices(receive.spec), plan.host)
            ):
                program.local_edges.add(receive.edge)
        for index in used:
            computation = body.computations[index]
            if body.makes_views:
                located = {at: program.at(at) for at in (s.placement for s in computation.outputs)}
                program.views = tuple(view_parts(computation, located, plan.host))
            if not computation.traits.is_installed:
                continue
            if any(device.host != plan.host for device in program.at(computation.placement)):
                program.gangs.add(index)
            may_differ = computation.traits.runs_on_host and index in program.gangs
            if computation.checks or computation.calls_back or may_differ:
                program.unsettled.add(index)
        program.segments = {
            part.segment: SegmentSteps.of(part.instructions, body, program.gangs, program._own)
            for part in plan.segments
        }
        program.last_segment = max(program.segments, default=-1)
        program.single = program._single()
        return program

    def _single(self) -> SingleStep | None:
        if len(self.plan.segments) != 1 or self.views:
            return None
        (part,) = self.plan.segments
        steps = self.segments[part.segment]
        rest = [one for one in part.instructions if not isinstance(one, Execute | Free)]
        positions = [at for at, one in enumerate(part.instructions) if isinstance(one, Execute)]
        if len(positions) != 1 or rest or steps.skips:
            return None
        (position,) = positions
        step = part.instructions[position]
        assert isinstance(step, Execute)
        key, outputs = self.keys[step.computation], {one.slot: one for one in self.results}
        if (
            key is None
            or step.computation in self.unsettled
            or not step.results
            or not set(step.args) <= set(self.plan.inputs)
            or not set(outputs) <= set(step.results)
            or len(outputs) != len(self.results)
        ):
            return None
        return SingleStep(
            part.segment,
            position,
            step.computation,
            key,
            step.args,
            tuple(outputs.get(slot) for slot in step.results),
            steps.kept.get(position, ()),
        )

    def _own(self, computation: Computation) -> frozenset[int]:
        """Return the devices of this host that a computation runs on, or its Python thread."""
        if computation.traits.runs_on_host:
            return _PYTHON
        here = (d for d in self.at(computation.placement) if d.host == self.plan.host)
        return frozenset(device.ordinal for device in here)

    def place(self, index: int) -> str:
        """Return the ordinals of this host's devices that computation `index` runs on, as in "0,1"."""
        computation = self.body.computations[index]
        if computation.traits.runs_on_host:
            return "python"
        return ",".join(map(str, sorted(self._own(computation))))

    @property
    def compiled(self) -> tuple[bytes, ...]:
        """All keys that the backend has for this program."""
        return (*self.superseded, *(key for key in self.keys if key is not None))

    def inline(self, index: int) -> Inline:
        """Return how to lay out argument `index` when it comes with the launch."""
        if (inline := self.inlines.get(index)) is None:
            spec = self.body.inputs[index]
            devices = self.devices(spec)
            boxes = tuple(
                (positions, relative(box), box_slices(box))
                for box, positions in host_boxes(spec, devices, self.plan.host)
            )
            inline = Inline(spec, devices, dtype_of(spec.dtype), boxes)
            self.inlines[index] = inline
        return inline

    def at(self, placement: Placement) -> tuple[DeviceAddress, ...]:
        """Return the physical device at every position of `placement`."""
        if placement not in self.located:
            self.located[placement] = self.bindings[placement.slice].located(placement)
        return self.located[placement]

    def devices(self, spec: ArraySpec) -> tuple[DeviceAddress, ...]:
        """Return the physical device at every position of the mesh of `spec`."""
        return self.at(spec.placement)
