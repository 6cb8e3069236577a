"""A program as one host runs it: its plan, indexed by what the executor looks up for every launch."""

from __future__ import annotations

from dataclasses import dataclass, field

from pw.core.plan import Execute, HostPlan, Instruction, Receive
from pw.core.program import Program
from pw.core.sharding import ArraySpec, Binding, DeviceAddress, Placement
from pw.devices.coordinator import is_local


@dataclass(slots=True)
class HostProgram:
    """An installed program."""

    body: Program
    plan: HostPlan
    keys: tuple[bytes | None, ...]
    """The backend's name of each computation; None for those that do not run here. No other installing
    has the same names, so that what is forgotten of one is not missed by the next."""
    segments: dict[int, tuple[Instruction, ...]]
    bindings: dict[int, Binding]
    located: dict[Placement, tuple[DeviceAddress, ...]] = field(default_factory=dict)
    outputs_of_slot: dict[int, list[int]] = field(default_factory=dict)
    local_edges: set[int] = field(default_factory=set)
    """Edges that this host completes by itself, without waiting."""
    gangs: set[int] = field(default_factory=set)
    """Computations that run here and on other hosts."""
    last_executed: dict[int, int] = field(default_factory=dict)
    """Position of the last computation with results in each segment, those that a report waits for."""
    superseded: tuple[bytes, ...] = ()
    """Names that earlier installings gave: runs that have begun go on with them."""
    judged: set[int] = field(default_factory=set)
    """Computations of whose results nobody may see anything before it is known what became of them."""

    @classmethod
    def of(cls, number: int, install: int, body: Program, plan: HostPlan) -> HostProgram:
        """Index the plan of program `number` for the plan's host; `install` counts its installings."""
        segments = {part.segment: part.instructions for part in plan.segments}
        instructions = [instruction for part in plan.segments for instruction in part.instructions]
        used = {i.computation for i in instructions if isinstance(i, Execute)}
        program = cls(
            body,
            plan,
            tuple(
                f"{number}/{install}/{index}".encode() if index in used else None
                for index in range(len(body.computations))
            ),
            segments,
            {binding.slice: binding for binding in plan.bindings},
        )
        for output, slot in plan.outputs:
            program.outputs_of_slot.setdefault(slot, []).append(output)
        for part in plan.segments:
            for position, instruction in enumerate(part.instructions):
                if isinstance(instruction, Execute) and instruction.results:
                    program.last_executed[part.segment] = position
        for receive in instructions:
            if isinstance(receive, Receive) and is_local(
                receive, program.devices(receive.spec), plan.host
            ):
                program.local_edges.add(receive.edge)
        for index in used:
            placement = body.computations[index].placement
            if any(device.host != plan.host for device in program.at(placement)):
                program.gangs.add(index)
            computation = body.computations[index]
            if computation.checks or (computation.python and index in program.gangs):
                program.judged.add(index)
        return program

    @property
    def compiled(self) -> tuple[bytes, ...]:
        """All that the backend has for this program."""
        return (*self.superseded, *(key for key in self.keys if key is not None))

    def at(self, placement: Placement) -> tuple[DeviceAddress, ...]:
        """The physical device at every position of `placement`."""
        if placement not in self.located:
            self.located[placement] = self.bindings[placement.slice].located(placement)
        return self.located[placement]

    def devices(self, spec: ArraySpec) -> tuple[DeviceAddress, ...]:
        """The physical device at every position of the mesh of `spec`."""
        return self.at(spec.placement)
