"""Plans how to bring back arrays that were lost with a host: a pure function.

It goes backwards through the lineage, from the lost arrays that the client holds, to what exists:
arrays on their hosts, replicas in host memory, and inputs that the client has kept. Runs come out
in their original order, so that each finds what it reads.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from pw.core.errors import ArrayLost, ErrorReport
from pw.core.ids import arrays_in
from pw.core.messages import BoxSource, FileSource, OfferSource
from pw.core.sharding import ArraySpec
from pw.sched.control.array_states import ArrayEntry, ArrayTable
from pw.sched.control.checkpoints.replicas import ReplicaMap, sources_of
from pw.sched.control.lineage import ATTEMPTS, Lineage, Origin, Record


@dataclass(slots=True)
class RecoveryPlan:
    """Plan by which lost arrays are brought back."""

    restores: dict[int, tuple[BoxSource, ...]] = field(default_factory=dict)
    """Replicas from which arrays are made, by array; none for an array whose values are an error."""
    uploads: list[int] = field(default_factory=list)
    """Inputs that the client uploads again, or that are read from files."""
    runs: list[Record] = field(default_factory=list)
    """Runs that are run again, in this order."""
    lost: dict[int, ErrorReport] = field(default_factory=dict)
    """Arrays that cannot be brought back, with their errors."""


def plan_recovery(
    lineage: Lineage,
    arrays: ArrayTable,
    replicas: ReplicaMap,
    bound: Callable[[int], bool] = lambda slice: True,
    now_s: float = 0.0,
    wanted: Iterable[int] = (),
    can_bring: Callable[[int], bool] = lambda array: True,
    is_asked: Callable[[int], bool] = lambda array: False,
    brought: Collection[int] = (),
    away: Collection[int] = (),
) -> RecoveryPlan:
    """Return how to bring back the lost arrays of a client, and make what others want of it.

    Args:
        lineage: where the client's arrays came from.
        arrays: those that the client holds, some of them lost.
        replicas: the boxes in host memory.
        bound: whether a slice has devices, or can have them.
        now_s: the time.
        wanted: arrays of other clients that views of this client's arrays make.
        can_bring: whether the client that an array was taken from can make it again.
        is_asked: whether that client was asked for it, and has not submitted the run that makes it.
        brought: what the client does not hold, and was asked for.
        away: slices that are expected back. What needs one of them is left for a later plan.

    A run that reads an array for which another client was asked is left for a later plan, when that
    client has submitted its run. Otherwise each could wait for a run that stands behind the other's.
    """
    plan = RecoveryPlan()

    def can_share(origin: Origin) -> bool:
        """Whether an array is a view whose sources exist or have replicas: it shares their memory again."""
        maker = origin.maker
        if maker is None or not maker.program.body.makes_views or maker.in_vain(now_s):
            return False
        for arg in arrays_in(maker.args):
            source = lineage.origins.get(arg)
            if not arrays.is_good(arg) and (
                source is None or sources_of(source.spec, replicas.get(arg, {})) is None
            ):
                return False
        return True

    records: dict[int, Record] = {}
    stack = list(arrays.lost)
    for array in wanted:
        maker = lineage.maker(array)
        arguments = () if maker is None else map(arrays.get, arrays_in(maker.args))
        error = next((one.error for one in arguments if one is not None and one.error), None)
        if error is None:
            stack.append(array)
        else:
            plan.lost[array] = error
    seen: set[int] = set()
    waiting: set[int] = set()
    while stack:
        array = stack.pop()
        held = arrays.get(array)
        if array in seen or (held is not None and held.is_good):
            continue
        seen.add(array)
        origin = lineage.origins.get(array)
        cause = held.cause if held is not None and held.is_lost else None
        sources = sources_of(origin.spec, replicas.get(array, {})) if origin else None
        if origin is not None and origin.spec.placement.slice in away:
            waiting.add(array)
        elif origin is not None and not bound(origin.spec.placement.slice):
            plan.lost[array] = _lost(origin, cause, _NOWHERE)
        elif origin is not None and origin.value_error is not None:
            plan.restores[array] = ()
        elif sources is not None and not (origin is not None and can_share(origin)):
            plan.restores[array] = sources
        elif origin is None or (origin.maker is None and not origin.is_input):
            plan.lost[array] = _error(held, origin) or _lost(origin, cause, _NO_ORIGIN)
        elif array in brought:
            pass  # it is on its way
        elif isinstance(origin.source, OfferSource) and (origin.error or not can_bring(array)):
            plan.lost[array] = origin.error or _lost(origin, cause, _GIVER_GONE)
        elif origin.maker is None:
            plan.uploads.append(array)
        elif not origin.maker.program.body.is_repeatable:
            plan.lost[array] = _lost(origin, cause, _IMPURE)
        elif origin.maker.in_vain(now_s):
            plan.lost[array] = _lost(origin, cause, _IN_VAIN)
        elif not origin.maker.program.slices.isdisjoint(away):
            waiting.add(array)
        elif not all(map(bound, origin.maker.program.slices)):
            plan.lost[array] = _lost(origin, cause, _NOWHERE)
        else:
            records[origin.maker.order] = origin.maker
            stack += arrays_in(origin.maker.args)
    imports = [a for a in plan.uploads if isinstance(lineage.origins[a].source, OfferSource)]
    waiting.update(imports)
    for order in sorted(records):
        record = records[order]
        missing = next((arg for arg in arrays_in(record.args) if arg in plan.lost), None)
        results = [
            array for array in record.results if array in seen and array not in plan.restores
        ]
        if missing is not None:
            plan.lost.update(dict.fromkeys(results, plan.lost[missing]))
        elif any(arg in waiting or is_asked(arg) for arg in arrays_in(record.args)):
            waiting.update(results)
        else:
            plan.runs.append(record)
    if waiting:  # what only they need is brought with them
        needed = {
            *arrays.lost,
            *imports,
            *(arg for run in plan.runs for arg in arrays_in(run.args)),
        }
        plan.restores = {
            array: sources for array, sources in plan.restores.items() if array in needed
        }
        plan.uploads = [array for array in plan.uploads if array in needed]
    return plan


_NO_ORIGIN = (
    "there are no replicas of it, and how it was made is not known any more. Call pw.checkpoint on "
    "the arrays that your program cannot do without"
)
_NOWHERE = (
    "the devices on which it lay, or something that it is made of, did not come back, or were "
    "given back. Put it on other ones: pw.make_virtual_device_set().add_slice(...)"
)
_GIVER_GONE = (
    "there are no replicas of it, and the session that handed it over has ended. Call pw.checkpoint on the "
    "arrays that your program cannot do without"
)
_IMPURE = (
    "a Python function had a part in making it, which may have run already and is not run again by "
    "itself. Call it once more, or pw.checkpoint what it returns"
)
_IN_VAIN = (
    f"it was made again {ATTEMPTS} times, and lost again each time. The logs of the hosts "
    "say why they end"
)


def named(spec: ArraySpec, origin: Origin | None) -> str:
    """Return the name of an array in a message: its shape, and where the client has it from."""
    if origin is not None and origin.maker is not None:
        return f"the array {spec.short} that {origin.maker.program.body.name!r} made"
    if origin is not None and isinstance(origin.source, FileSource):
        return f"the array {spec.short} that was restored from {origin.source.path!r}"
    if origin is not None and isinstance(origin.source, OfferSource):
        return f"the array {spec.short} that another session handed over"
    return f"the array {spec.short}"


def _error(held: ArrayEntry | None, origin: Origin | None) -> ErrorReport | None:
    """Return the error of an array that failed, if it is known."""
    if held is not None:
        return held.error
    return None if origin is None else origin.error


def _lost(origin: Origin | None, cause: ErrorReport | None, reason: str) -> ErrorReport:
    what = "an array" if origin is None else named(origin.spec, origin)
    if cause is None:
        return ErrorReport.of(ArrayLost(f"{what} is lost and cannot be made again: {reason}"))
    words = f"{what} is lost ({cause.message}) and cannot be made again: {reason}"
    return ErrorReport.of(ArrayLost(words), cause.where)
