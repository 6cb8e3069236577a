"""What to do about arrays that were lost with a host: a pure function.

From the arrays that are lost and still held, it works backwards through the lineage to what exists: arrays
that are where they were, copies in host memory, and inputs that the client has kept. What must be
run again comes out in the order of the original runs, so that everything a run reads is there before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from pw.core.errors import ArrayLost, ErrorReport
from pw.core.ids import arrays_in
from pw.core.messages import Source
from pw.core.sharding import ArraySpec, Box
from pw.sched.control.clients import Array
from pw.sched.control.lineage import Lineage, Origin, Record

ATTEMPTS = 16
"""How often one run is run again, or one array brought again, before its arrays are given up."""
ANEW_S = 60.0
"""When the last attempt was so long ago, it was not in vain: attempts are counted from the beginning."""

Copies = Mapping[int, Mapping[str, frozenset[Box]]]
"""Boxes of arrays in host memory, by array and host."""


@dataclass(slots=True)
class RecoveryPlan:
    """How to get lost arrays back."""

    restores: dict[int, tuple[Source, ...]] = field(default_factory=dict)
    """Arrays to be made from copies."""
    uploads: list[int] = field(default_factory=list)
    """Inputs to be asked for again."""
    runs: list[Record] = field(default_factory=list)
    """To be run again, in this order."""
    lost: dict[int, ErrorReport] = field(default_factory=dict)
    """What cannot be had back, and why."""


def sources_of(spec: ArraySpec, copies: Mapping[str, frozenset[Box]]) -> tuple[Source, ...] | None:
    """Who has which box of an array in host memory; None if a box is missing."""
    sources = []
    for box, _ in spec.distinct_boxes():
        there = [Source(box, host) for host, boxes in copies.items() if box in boxes]
        if not there:
            return None
        sources += there
    return tuple(sources)


def plan_recovery(
    lineage: Lineage,
    wanted: Iterable[int],
    exists: Callable[[int], bool],
    copies: Copies,
    why: Mapping[int, ErrorReport],
    bound: Callable[[int], bool] = lambda slice: True,
    failed: Callable[[int], ErrorReport | None] = lambda array: None,
    now_s: float = 0.0,
) -> RecoveryPlan:
    """How to get the `wanted` arrays back.

    Args:
        lineage: where the client's arrays came from.
        wanted: lost arrays that the client holds.
        exists: whether an array is on devices, and good.
        copies: what is in host memory, and on which hosts.
        why: how an array was lost, where that is known.
        bound: whether a slice has devices, or can have them; its island may have been given up.
        failed: how an array that the client holds has failed for good.
        now_s: the time.
    """
    plan = RecoveryPlan()
    records: dict[int, Record] = {}
    stack = list(wanted)
    seen: set[int] = set()
    while stack:
        array = stack.pop()
        if array in seen or exists(array):
            continue
        seen.add(array)
        origin = lineage.origins.get(array)
        sources = sources_of(origin.spec, copies.get(array, {})) if origin else None
        if origin is not None and not bound(origin.spec.placement.slice):
            plan.lost[array] = _lost(origin, why.get(array), _NOWHERE)
        elif sources is not None:
            plan.restores[array] = sources
        elif origin is None or (origin.maker is None and not origin.is_input):
            plan.lost[array] = failed(array) or _lost(origin, why.get(array), _NO_ORIGIN)
        elif origin.maker is None:
            plan.uploads.append(array)
        elif any(c.python for c in origin.maker.program.body.computations):
            plan.lost[array] = _lost(origin, why.get(array), _IMPURE)
        elif is_in_vain(origin.maker, now_s):
            plan.lost[array] = _lost(origin, why.get(array), _IN_VAIN)
        elif not all(map(bound, origin.maker.program.slices)):
            plan.lost[array] = _lost(origin, why.get(array), _NOWHERE)
        else:
            records[origin.maker.order] = origin.maker
            stack += arrays_in(origin.maker.args)
    for order in sorted(records):
        record = records[order]
        missing = next((arg for arg in arrays_in(record.args) if arg in plan.lost), None)
        if missing is None:
            plan.runs.append(record)
            continue
        for array in record.results:
            if array in seen and array not in plan.restores:
                plan.lost[array] = plan.lost[missing]
    return plan


def is_in_vain(tried: Record | Array, now_s: float) -> bool:
    """Whether something was tried so often, with no long time between, that it is given up."""
    return tried.attempts >= ATTEMPTS and now_s - tried.attempted_s < ANEW_S


_NO_ORIGIN = (
    "there are no copies of it, and how it was made is not known any more. Call pw.checkpoint on what "
    "a program cannot do without"
)
_NOWHERE = (
    "the devices on which it lay, or something that it is made of, did not come back, or were given back. Put "
    "it on other ones: pw.make_virtual_device_set().add_slice(...)"
)
_IMPURE = (
    "a Python function had a part in making it, which may have run already and is not run again by itself. "
    "Call it once more, or pw.checkpoint what it returns"
)
_IN_VAIN = (
    f"it was made again {ATTEMPTS} times, and lost again each time. The logs of the hosts "
    "say why they end"
)


def named(spec: ArraySpec, origin: Origin | None) -> str:
    """What a message calls an array of a client: what it is, and where the client has it from."""
    if origin is not None and origin.maker is not None:
        return f"the array {spec.short} that {origin.maker.program.body.name!r} made"
    if origin is not None and origin.source is not None:
        return f"the array {spec.short} that was restored from {origin.source.path!r}"
    return f"the array {spec.short}"


def _lost(origin: Origin | None, cause: ErrorReport | None, reason: str) -> ErrorReport:
    what = "an array" if origin is None else named(origin.spec, origin)
    if cause is None:
        return ErrorReport.of(ArrayLost(f"{what} is lost and cannot be made again: {reason}"))
    words = f"{what} is lost ({cause.message}) and cannot be made again: {reason}"
    return ErrorReport.of(ArrayLost(words), cause.where)
