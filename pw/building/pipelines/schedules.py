"""The named schedules: GPipe, 1F1B, interleaved 1F1B and zero-bubble.

Each is made by one simulation of equal tasks: at each step each group takes the first task in its
order of preference that is ready. They differ in that order, and in how many microbatches a stage may
have in flight.

- *gpipe* (Huang et al., 2019, arXiv:1811.06965): all forwards before all backwards. A stage keeps the
  activations of all microbatches.
- *1f1b* (Narayanan et al., 2019, PipeDream; Fan et al., 2021, DAPPLE, arXiv:2007.01045): backward first; stage
  s of S has at most S - s microbatches in flight. The bubble is that of gpipe.
- *interleaved* (Narayanan et al., 2021, arXiv:2104.04473, section 2.2): a group has several stages, s and
  s + G and so on, so the pipeline fills in less time. It is 1F1B with their order of warm-up.
- *zero-bubble* (Qi et al., 2023, arXiv:2401.10241, schedule ZB-H1): 1F1B whose weight gradients wait for
  times at which the group has nothing else to do. A weight gradient needs the activations, so each stage
  keeps those of up to S microbatches, as the first stage does in 1F1B.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pw.building.pipelines.schedule import Schedule
from pw.building.pipelines.table import Kind, Task
from pw.core.errors import ArgumentError

NAMES = ("gpipe", "1f1b", "interleaved", "zero-bubble")


def named(name: str, group_of: Sequence[int], microbatches: int) -> Schedule:
    """Return a named schedule.

    Args:
        name: one of `NAMES`.
        group_of: the device group of each stage.
        microbatches: how many there are.

    Raises:
        ArgumentError: there is no such schedule, or it does not fit these stages.
    """
    if microbatches < 1:
        raise ArgumentError(f"a pipeline needs at least one microbatch, not {microbatches}")
    if name == "gpipe":
        return _walk(name, group_of, microbatches, ("F", "B"), lambda stage: microbatches)
    if name == "1f1b":
        return _walk(name, group_of, microbatches, ("B", "F"), _in_flight(group_of))
    if name == "zero-bubble" and len(set(group_of)) == len(group_of):
        return _zero_bubble(group_of, microbatches)
    if name == "zero-bubble":
        return _walk(name, group_of, microbatches, ("B", "F", "W"), _in_flight(group_of))
    if name == "interleaved":
        return _interleaved(group_of, microbatches)
    raise ArgumentError(
        f"there is no schedule {name!r}; choose one of {', '.join(NAMES)}, or pass a pw.Schedule"
    )


def _in_flight(group_of: Sequence[int]) -> Callable[[int], int]:
    """Return how many microbatches a stage may have in flight: as many as stages from it to the last one."""
    return lambda stage: len(group_of) - stage


def _walk(
    name: str,
    group_of: Sequence[int],
    microbatches: int,
    preferred: Sequence[Kind],
    most: Callable[[int], int],
) -> Schedule:
    """Let each group take, step by step, the first ready task in its order of preference."""
    stages, groups = len(group_of), max(group_of) + 1
    split = "W" in preferred
    counts: dict[tuple[int, Kind], int] = {(s, k): 0 for s in range(stages) for k in preferred}
    rows: list[list[Task]] = [[] for _ in range(groups)]

    def is_ready(stage: int, kind: Kind) -> bool:
        number = counts[stage, kind]
        if number == microbatches:
            return False
        if kind == "F":
            there = stage == 0 or before[stage - 1, "F"] > number
            room = not split or number - counts[stage, "W"] < stages
            return there and room and number - counts[stage, "B"] < most(stage)
        if kind == "B":
            behind = stage == stages - 1 or before[stage + 1, "B"] > number
            return behind and before[stage, "F"] > number
        return before[stage, "B"] > number  # W

    while sum(counts.values()) < len(counts) * microbatches:
        before = dict(counts)
        for group, row in enumerate(rows):
            own = [stage for stage in range(stages) if group_of[stage] == group]
            # The last stage first: its result lets the others go on.
            ready = (
                (stage, kind)
                for kind in preferred
                for stage in (own if kind == "F" and preferred[0] == "F" else reversed(own))
                if is_ready(stage, kind)
            )
            chosen = next(ready, None)
            if chosen is not None:
                stage, kind = chosen
                row.append(Task(stage, counts[chosen], kind))
                counts[chosen] += 1
    return Schedule(rows, name)


def _zero_bubble(group_of: Sequence[int], microbatches: int) -> Schedule:
    """ZB-H1 with one stage for each group: the weight gradients of stage s are s microbatches late."""
    stages = len(group_of)
    rows: list[list[Task]] = [[] for _ in group_of]
    for stage, group in enumerate(group_of):
        row = rows[group]
        ahead = min(stages - stage - 1, microbatches)
        row += [Task(stage, each, "F") for each in range(ahead)]
        weights = 0
        for each in range(microbatches):
            forward = ahead + each
            if forward < microbatches:
                row.append(Task(stage, forward, "F"))
            row.append(Task(stage, each, "B"))
            if forward >= microbatches or each >= stage + weights:
                row.append(Task(stage, weights, "W"))
                weights += 1
        row += [Task(stage, each, "W") for each in range(weights, microbatches)]
    return Schedule(rows, "zero-bubble")


def _interleaved(group_of: Sequence[int], microbatches: int) -> Schedule:
    """The order of Narayanan et al., section 2.2: microbatches go through a group's stages in blocks."""
    stages, groups = len(group_of), max(group_of) + 1
    if stages % groups or any(group != stage % groups for stage, group in enumerate(group_of)):
        wanted = max(stages // groups, 1) * groups
        raise ArgumentError(
            f"the interleaved schedule needs equally many stages on each of its {groups} device groups, in "
            f"turns: stage s on group s % {groups}. The {stages} stages are on groups {list(group_of)}. List "
            f"each mesh once in meshes=, and divide the model into {wanted} or {wanted + groups} stages; or "
            "choose schedule='1f1b', for any stages"
        )
    if microbatches % groups:
        more = microbatches + -microbatches % groups
        raise ArgumentError(
            f"the interleaved schedule on {groups} device groups takes a multiple of {groups} "
            f"microbatches, not {microbatches}; give microbatches={more}, or choose schedule='1f1b', for any "
            "number"
        )
    chunks = stages // groups
    rows = []
    for group in range(groups):
        order = [
            (chunk, block * groups + within)
            for block in range(microbatches // groups)
            for chunk in range(chunks)
            for within in range(groups)
        ]
        forwards = [Task(chunk * groups + group, each, "F") for chunk, each in order]
        backwards = [
            Task((chunks - 1 - chunk) * groups + group, each, "B") for chunk, each in order
        ]
        ahead = (groups - group - 1) * (2 if chunks > 1 else 1) + (chunks - 1) * groups
        ahead = min(ahead, len(forwards))
        row = forwards[:ahead]
        for forward, backward in zip(forwards[ahead:], backwards, strict=False):
            row += [forward, backward]
        rows.append(row + backwards[len(forwards) - ahead :])
    return Schedule(rows, "interleaved")
