"""Deliberate bugs of pipelines (see `mutations`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from pw.core.compact import Compact
from pw.core.ids import Address
from pw.core.messages import Install
from pw.core.programs.plan import Execute, Free, HostSegment, Instruction
from pw.testing.sim.breaking import mutation, rehandle
from pw.testing.sim.cluster import SimCluster
from pw.testing.sim.host import SimHost


@mutation("later-task-first", "pipelines", "program order")
def _unscheduled(cluster: SimCluster) -> None:
    """Hosts compute a task before the one that the program has in front of it; the results are the same."""

    def careless(host: SimHost) -> None:
        def wrap(handler: Callable[..., None]) -> Any:
            def install(sender: Address, message: Install) -> None:
                plan = message.plan.whole()
                parts = tuple(map(_swapped, plan.segments))
                handler(sender, replace(message, plan=Compact.of(replace(plan, segments=parts))))

            return install

        rehandle(host.executor, Install, wrap)

    cluster.alterations.append(careless)


def _swapped(segment: HostSegment) -> HostSegment:
    """Move the first computation that does not need the one before it in front of that one."""
    before = list(segment.instructions)
    for at, first in enumerate(before):
        if not isinstance(first, Execute):
            continue
        following: list[Instruction] = before[at + 1 :]
        second = next((one for one in following if not isinstance(one, Free)), None)
        if isinstance(second, Execute) and not _touches(first, second):
            before.remove(second)
            before.insert(at, second)
            return replace(segment, instructions=tuple(before))
    return segment


def _touches(first: Execute, second: Execute) -> bool:
    """Whether the second needs a result of the first, or overwrites what the first reads."""
    overwritten = {second.args[position] for position in second.donated}
    return bool(set(first.results) & set(second.args) or overwritten & set(first.args))
