"""The units of a function: what `pw.pipeline` does not cut, in the order in which the function was traced.

A unit is an equation that depends on parameters and batch, or an iteration of a scan. What depends on one of
them only is computed by each stage that uses it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pw.building.pipelines.costs import cost_of
from pw.client.equations.graph import Graph, Literal, size_bytes
from pw.core.jax_private.tracing import user_frames

_HERE = str(Path(__file__).parent)


@dataclass(frozen=True)
class Place:
    """A place between units: before an equation, or before one of the iterations of a scan."""

    equation: int
    iteration: int = 0


@dataclass(frozen=True)
class Unit:
    """An equation, or an iteration of a scan, that is not cut."""

    place: Place
    cost: float
    sent_bytes: int
    """Bytes of this unit and those before that later units use."""


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
    """Bytes of each value that is there and used later."""
    for at in sorted(mixed):
        eqn = graph.equations[at]
        alone, _ = graph.before(eqn.invars, lambda v: graph.position[v] in counted)
        counted.update(alone)
        cost = sum(cost_of(graph.equations[one]) for one in alone)
        rounds = rounds_of(eqn)
        cost = (cost + cost_of(eqn)) / rounds
        if rounds > 1:
            sent = _sent_within(eqn, live, last, follows, at)
            units += [Unit(Place(at, n), cost, sent[n]) for n in range(rounds - 1)]
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


def line_of(eqn: Any) -> str:
    """Return the line of the user's code that an equation comes from; JAX may not know it.

    It is the innermost line outside of libraries.
    """
    frames = list(user_frames(eqn.source_info.traceback))
    own = [f for f in frames if "site-packages" not in f.file_name and _HERE not in f.file_name]
    lines = (f"{at.file_name}:{at.start_line} ({at.function_name})" for at in own or frames)
    return next(lines, "")


def _variables(atoms: Sequence[Any]) -> list[Any]:
    return [atom for atom in atoms if not isinstance(atom, Literal)]
