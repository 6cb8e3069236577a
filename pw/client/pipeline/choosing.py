"""Where a function without marks is cut: into stages that cost alike, with few bytes between them.

The function is a list of units, in the order in which it was traced: equations, and the iterations of scans.
It is cut between units. Three things decide, one after the other:

1. How many bytes a cut may send: as few as are possible with a slowest stage that is at most `SLACK` times as
   slow as it could be. Still fewer if they save more time than the slowest stage loses.
2. How slow the slowest stage is.
3. How even all stages are, and what all cuts send.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from jax._src.source_info_util import user_frames

from pw.client.gradients.graph import Graph, Literal, size_bytes
from pw.client.pipeline.costs import cost_of, cost_of_jaxpr
from pw.core.errors import ArgumentError

FLOPS_PER_SENT_BYTE = 300
"""Operations in the time that sending a byte costs; most of the time, other microbatches hide it."""

SLACK = 1.1
"""How much slower than necessary the slowest stage may be, so that cuts send less."""

MOST_SLACK = 1.5
"""The same, where the bytes that are saved take longer than the slowest stage loses."""

CELLS = 100
"""Places for a cut that are compared, for each stage."""


_HERE = str(Path(__file__).parent)


@dataclass(frozen=True)
class Place:
    """A place between units: before an equation, or before one of the iterations of a scan."""

    equation: int
    iteration: int = 0


@dataclass(frozen=True)
class Unit:
    """What is not cut: an equation, or an iteration of a scan."""

    place: Place
    cost: float
    sent_bytes: int
    """What later units use of this one and those before."""


@dataclass(frozen=True)
class Cuts:
    """The places at which a function is cut, and the operations of the function they were chosen for."""

    operations: tuple[tuple[str, int], ...]
    """The name of each equation, and into how many units it can be divided."""
    places: tuple[Place, ...]


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
    chosen = balanced([u.cost for u in units], [u.sent_bytes for u in units], count)
    if chosen is None:
        raise ArgumentError(_why_not(graph, units, count, name))
    return Cuts(operations, tuple(units[at].place for at in chosen))


def sources(graph: Graph) -> dict[Any, frozenset[str]]:
    """Return for each variable whether it follows from parameters ("param"), from the "batch", or both."""
    sources: dict[Any, frozenset[str]] = {}
    for variable, (kind, _) in graph.arguments.items():
        sources[variable] = frozenset([kind if kind == "param" else "batch"])
    for eqn in graph.equations:
        operands = [sources.get(v, frozenset()) for v in eqn.invars if not isinstance(v, Literal)]
        sources.update(dict.fromkeys(eqn.outvars, frozenset().union(*operands)))
    return sources


def units_of(graph: Graph) -> list[Unit]:
    """Return the units of a function: of what the loss needs, and depends on parameters and batch.

    What depends on one of them only is computed by each stage that uses it; its cost is that of the first user.
    """
    follows = sources(graph)
    results = list(graph.results.values())
    needed, _ = graph.before(results, lambda v: False)
    mixed = {at for at in needed if len(follows[graph.equations[at].outvars[0]]) == 2}
    last = {v: at for at in sorted(mixed) for v in _variables(graph.equations[at].invars)}
    last |= dict.fromkeys(_variables(results), len(graph.equations))
    counted = set(mixed)
    units: list[Unit] = []
    live: dict[Any, int] = {}
    """The size of each value that is there and used later."""
    for at in sorted(mixed):
        eqn = graph.equations[at]
        alone, _ = graph.before(eqn.invars, lambda v: graph.position[v] in counted)
        counted.update(alone)
        cost = sum(cost_of(graph.equations[one]) for one in alone)
        rounds = rounds_of(eqn)
        if rounds > 1:
            each = cost_of_jaxpr(eqn.params["jaxpr"].jaxpr)
            sent = _sent_within(eqn, live, last, follows, at)
            units += [
                Unit(Place(at, n), each + (0 if n else cost), sent[n]) for n in range(rounds - 1)
            ]
            cost = each
        else:
            cost += cost_of(eqn)
        live = {v: size for v, size in live.items() if last[v] > at}
        live |= {v: size_bytes(v.aval) for v in eqn.outvars if last.get(v, -1) > at}
        units.append(Unit(Place(at, max(rounds - 1, 0)), cost, sum(live.values())))
    return units


def rounds_of(eqn: Any) -> int:
    """Return into how many units an equation can be divided: the iterations of a scan."""
    return int(eqn.params["length"]) if eqn.primitive.name == "scan" else 1


def _sent_within(
    eqn: Any, live: dict[Any, int], last: dict[Any, int], follows: dict[Any, Any], at: int
) -> list[int]:
    """Return what a cut behind each iteration of a scan sends, and the parameters that both sides have."""
    consts, carries, length = (eqn.params[n] for n in ("num_consts", "num_carry", "length"))
    first, carried = eqn.invars[:consts], eqn.invars[consts : consts + carries]
    kept = [v for v in live if last[v] > at or v not in _variables(carried) or v in first]
    shared = {v for v in _variables(first) if "param" in follows.get(v, ()) and v not in live}
    fixed = sum(live[v] for v in kept) + sum(size_bytes(v.aval) for v in shared)
    fixed += sum(size_bytes(v.aval) for v in eqn.outvars[:carries])
    row = sum(size_bytes(v.aval) for v in eqn.outvars[carries:] if v in last) // length
    return [fixed + row * (n + 1) for n in range(length)]


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
        is_end = cell in (0, CELLS * count - 1)  # a stage that does nothing
        if not is_end and (cell not in cells or sent[at] < sent[cells[cell]]):
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


def line_of(eqn: Any) -> str:
    """Return the line of the user's code that an equation comes from: the innermost outside of libraries."""
    frames = list(user_frames(eqn.source_info.traceback))
    own = [f for f in frames if "site-packages" not in f.file_name and _HERE not in f.file_name]
    return next(
        (f"{at.file_name}:{at.start_line} ({at.function_name})" for at in own or frames), "?"
    )


def _why_not(graph: Graph, units: Sequence[Unit], count: int, name: str) -> str:
    total = sum(unit.cost for unit in units)
    unit = max(units, key=lambda unit: unit.cost)
    eqn = graph.equations[unit.place.equation]
    return (
        f"{name!r} cannot be cut into {count} stages of about the same cost: of its {len(units)} operations on "
        f"parameters and batch, {eqn.primitive.name} at {line_of(eqn)} takes {unit.cost / total:.0%} of the "
        "cost, and is not divided; pass a smaller stages=, take loops and checkpoints apart, or call "
        "pw.stage_boundary where the stages meet"
    )


def _variables(atoms: Sequence[Any]) -> list[Any]:
    return [atom for atom in atoms if not isinstance(atom, Literal)]
