"""What the parts of installed programs are called, for those who are told how far they are."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from pw.core.messages import InstallProgram
from pw.core.plan import Execute


@dataclass(frozen=True, slots=True)
class Names:
    """What the parts of an installed program are called, and who does them."""

    program: str = ""
    segments: dict[int, tuple[str, ...]] = field(default_factory=dict)
    """The computations of each segment."""
    shards: dict[int, dict[str, tuple[int, ...]]] = field(default_factory=dict)
    """Which shards of the last computation of each segment are on which host."""

    @classmethod
    def of(cls, message: InstallProgram) -> Names:
        """The names in a program."""
        names = cls(message.body.name)
        computations = message.body.computations
        holders: dict[int, dict[str, list[int]]] = {}
        for plan in message.plans:
            bindings = {binding.slice: binding for binding in plan.bindings}
            for part in plan.segments:
                made = dict.fromkeys(
                    instruction.computation
                    for instruction in part.instructions
                    if isinstance(instruction, Execute)
                )
                if not made:
                    names.segments.setdefault(part.segment, ())
                    continue
                known = names.segments.get(part.segment, ())
                here_too = (computations[one].name for one in made)
                names.segments[part.segment] = tuple(dict.fromkeys((*known, *here_too)))
                last = list(made)[-1]
                if last not in holders:
                    placement = computations[last].placement
                    positions = holders[last] = defaultdict(list)
                    for at, device in enumerate(bindings[placement.slice].located(placement)):
                        positions[device.host].append(at)
                here = tuple(holders[last].get(plan.host, ()))
                names.shards.setdefault(part.segment, {})[plan.host] = here
        return names
