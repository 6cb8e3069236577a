"""Where a function without marks is cut: into stages that cost alike, with few bytes between them.

The function is a list of units (`units`), and is cut between them. Three things decide, one after the other:

1. How many bytes a cut may send: as few as are possible with a slowest stage that is at most `SLACK` times as
   slow as it could be. Still fewer if they save more time than the slowest stage loses.
2. How slow the slowest stage is.
3. How even all stages are, and what all cuts send.

If the iterations of a scan are too coarse for stages that cost alike, the scan is unrolled first.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from pw.building.pipelines.groups import unrolled
from pw.building.pipelines.units import Place, Unit, line_of, rounds_of, units_of
from pw.client.equations.graph import Graph
from pw.core.errors import ArgumentError

FLOPS_PER_SENT_BYTE = 300
"""Operations in the time that sending a byte costs; most of the time, other microbatches hide it."""

SLACK = 1.1
"""Factor by which the slowest stage may be slower than necessary, so that cuts send less."""

MOST_SLACK = 1.5
"""Factor where the bytes that are saved take longer than the slowest stage loses."""

COARSE = 10
"""Iterations of a scan in a stage, below which the scan may be unrolled."""

CELLS = 100
"""Places for a cut that are compared, for each stage."""


@dataclass(frozen=True)
class Cuts:
    """The places at which a function is cut, and the operations of the function they were chosen for."""

    operations: tuple[tuple[str, int], ...]
    """Name of each equation, and the number of units into which it can be divided."""
    scans: tuple[int, ...]
    """Positions of the equations that are unrolled."""
    places: tuple[Place, ...]
    """Places of the cuts in the function that has these scans unrolled."""


def choose(graph: Graph, count: int, name: str, before: Cuts | None = None) -> Cuts:
    """Choose where a function is cut into `count` stages.

    Args:
        graph: the function; its arguments are parameters and parts of the batch.
        count: how many stages.
        name: the function's, for errors.
        before: an earlier choice. It stays if the operations are the same, so that batches of all shapes
            have their parameters in the same stages.

    Raises:
        ArgumentError: the function cannot be cut into so many stages of about the same cost.
    """
    operations = tuple((eqn.primitive.name, rounds_of(eqn)) for eqn in graph.equations)
    if before and before.operations == operations and len(before.places) == count - 1:
        return before
    units = units_of(graph)
    if not units:
        raise ArgumentError(
            f"the loss of {name!r} does not depend on both its parameters and its batch"
        )
    share = sum(unit.cost for unit in units) / count
    coarse = {u.place.equation for u in units if u.place.iteration and u.cost * COARSE > share}
    scans: tuple[int, ...] = ()
    slowest, places = _cut(units, count)
    if coarse and slowest > SLACK * share:
        finer = units_of(unrolled(graph, coarse))
        faster, finer_places = _cut(finer, count)
        if faster * SLACK < slowest:
            slowest, places, scans = faster, finer_places, tuple(coarse)
    if slowest == math.inf:
        raise ArgumentError(_why_not(graph, units, count, name))
    return Cuts(operations, scans, places)


def _cut(units: Sequence[Unit], count: int) -> tuple[float, tuple[Place, ...]]:
    """Return the cost of the slowest stage, and where the others begin; infinity if there is no choice."""
    costs = [unit.cost for unit in units]
    chosen = balanced(costs, [unit.sent_bytes for unit in units], count)
    if chosen is None:
        return math.inf, ()
    ends = pairwise([0, *chosen, len(units)])
    return max(sum(costs[a:b]) for a, b in ends), tuple(units[at].place for at in chosen)


def balanced(costs: Sequence[float], sent: Sequence[int], count: int) -> list[int] | None:
    """Choose where a list of units is cut; None if a stage would be nearer to all than to its share.

    Args:
        costs: of each unit.
        sent: the bytes that a cut behind each unit sends.
        count: of stages.

    Returns:
        The first unit of each stage but the first.
    """
    reached = list(accumulate(costs))
    total = reached[-1]
    if len(costs) < count or not total:
        return None
    cells: dict[int, int] = {}
    for at in range(len(costs) - 1):
        cell = int(reached[at] / total * CELLS * count)
        does_something = 0 < cell < CELLS * count - 1  # the first stage, and the last
        if does_something and (cell not in cells or sent[at] < sent[cells[cell]]):
            cells[cell] = at
    places = sorted(cells.values())
    sizes = sorted({sent[at] for at in places}) or [0]
    slowest = {size: _slowest(reached, _up_to(places, sent, size), count) for size in sizes}
    best = slowest[sizes[-1]]
    if best > (total + total / count) / 2 and count > 1:
        return None
    enough = min(size for size in sizes if slowest[size] <= SLACK * best)
    size = min(
        (size for size in sizes if size <= enough and slowest[size] <= MOST_SLACK * best),
        key=lambda size: slowest[size] + FLOPS_PER_SENT_BYTE * size,
    )
    return _evenest(reached, sent, _up_to(places, sent, size), count, slowest[size])


def _up_to(places: Sequence[int], sent: Sequence[int], size: int) -> list[int]:
    """Return the places where a cut sends at most so many bytes."""
    return [at for at in places if sent[at] <= size]


def _slowest(reached: Sequence[float], places: Sequence[int], count: int) -> float:
    """Return the least cost that the slowest stage can have; infinity if there are too few places."""
    if len(places) < count - 1:
        return math.inf
    ends = [*(reached[at] for at in places), reached[-1]]
    low, high = 0.0, reached[-1]
    for _ in range(50):
        middle = (low + high) / 2
        start = 0.0
        for _ in range(count):
            at = bisect_right(ends, start + middle)
            start = ends[at - 1] if at else 0.0
        low, high = (low, middle) if start == ends[-1] else (middle, high)
    return high


def _evenest(
    reached: Sequence[float], sent: Sequence[int], places: Sequence[int], count: int, slowest: float
) -> list[int]:
    """Return the first units of the stages but the first; no stage costs more than `slowest`.

    Of the choices, it is the one with the least sum of squares, with a little for the bytes of its cuts.
    """
    most = max((sent[at] for at in places), default=0) or 1
    limit = slowest * (1 + 1e-9)
    best: list[tuple[float, float, tuple[int, ...]]] = [(0.0, 0.0, ())]
    """The best ways to each place: their worth, the cost up to there, and the cuts."""
    for number in range(1, count + 1):
        ends = places if number < count else [len(reached) - 1]
        after = []
        for at in ends:
            ways = [
                (worth + ((reached[at] - start) / limit) ** 2, cuts)
                for worth, start, cuts in best
                if 0 <= reached[at] - start <= limit and (not cuts or cuts[-1] <= at)
            ]
            if ways:
                worth, cuts = min(ways)
                after.append((worth + 0.01 * sent[at] / most, reached[at], (*cuts, at + 1)))
        best = after
    return list(min(best)[2][:-1])


def _why_not(graph: Graph, units: Sequence[Unit], count: int, name: str) -> str:
    total = sum(unit.cost for unit in units)
    unit = max(units, key=lambda unit: unit.cost)
    eqn = graph.equations[unit.place.equation]
    what = (
        f"{eqn.primitive.name} at {line_of(eqn) or '?'} takes {unit.cost / total:.0%} of the cost"
    )
    return (
        f"{name!r} cannot be cut into {count} stages of about the same cost: of its {len(units)} operations on "
        f"parameters and batch, {what}, and is not divided; pass a smaller stages=, take loops and checkpoints "
        "apart, or call pw.stage_boundary where the stages meet"
    )
