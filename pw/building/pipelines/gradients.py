"""The tasks of one stage: its forward pass, its backward pass, and its weight gradients.

The stage and `jax.vjp` of it are traced as one function, and that is cut into the tasks. So a task computes
only what it gives, and what the backward pass needs of the forward pass is found, not declared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp

from pw.building.pipelines.stage_trace import tracing_stages
from pw.building.pipelines.stages import Stage, is_float
from pw.building.pipelines.table import Kind
from pw.client.equations.graph import Graph, Literal, Name, StagePiece, size_bytes, smallest


@dataclass(frozen=True, eq=False)
class Tasks:
    """The pieces of a stage by kind of task; a kind that has nothing to do has none."""

    pieces: dict[Kind, StagePiece]

    def kept_bytes(self) -> int:
        """Return the bytes that a microbatch keeps for its later tasks, on all devices of the stage."""
        later = {name for kind, piece in self.pieces.items() if kind != "F" for name in piece.takes}
        avals: dict[Name, Any] = {}
        for kind, piece in self.pieces.items():
            outputs = zip(piece.gives, piece.closed.out_avals, strict=True)
            avals |= {name: aval for name, aval in outputs if name[0] in ("saved", "kept")}
            inputs = zip(piece.takes, piece.closed.in_avals, strict=True)
            avals |= {name: aval for name, aval in inputs if name[0] == "x" and kind != "F"}
        return sum(size_bytes(aval) for name, aval in avals.items() if name in later)


def total_dtype(dtype: Any) -> Any:
    """Return the dtype in which gradients are summed over microbatches: at least float32."""
    return jnp.promote_types(dtype, jnp.float32)


def tasks_of(stage: Stage, *, is_last: bool, split: bool, recompute: bool, fuse: bool) -> Tasks:
    """Return the tasks of a stage.

    Args:
        stage: the stage.
        is_last: its result is the loss.
        split: the weight gradients are a task of their own.
        recompute: the backward pass computes the forward pass again, and keeps its input only.
        fuse: the forward pass is part of the backward pass (in the last stage, where nothing waits for it).
    """
    graph = _together(stage, is_last)
    ys = [name for name in graph.results if name[0] == "y"]
    gxs = [name for name in graph.results if name[0] == "gx"]
    totals = [name for name in graph.results if name[0] == "total"]
    label = f"{stage.name}_{stage.number}"
    first = [*ys, *gxs] if fuse else gxs
    backward = [(f"{label}_B", first), (f"{label}_W", totals)]
    if not split:
        backward = [(f"{label}_B", [*first, *totals])]
    if fuse:
        pieces = cut(graph, backward, "kept")
    elif recompute:
        pieces = [*cut(graph, [(f"{label}_F", ys)], "saved"), *cut(graph, backward, "kept")]
    else:
        pieces = cut(graph, [(f"{label}_F", ys), *backward], "saved")
    kinds: tuple[Kind, ...] = ("B", "W") if fuse else ("F", "B", "W")
    return Tasks({kind: piece for kind, piece in zip(kinds, pieces, strict=False) if piece.gives})


def _together(stage: Stage, is_last: bool) -> Graph:
    """Trace a stage with its gradients: sums for its parameters ("total"), and those of its input ("gx")."""
    evaluate = jax.extend.core.jaxpr_as_fun(stage.closed)
    avals = dict(zip(stage.takes, stage.closed.in_avals, strict=True))
    results = dict(zip(stage.gives, stage.outputs, strict=True))
    through = [name for name, aval in avals.items() if name[0] in ("param", "x") and is_float(aval)]
    params = [name for name in through if name[0] == "param"]
    ends = [name for name, aval in results.items() if is_float(aval)]
    totals: list[Name] = [("total", name[1]) for name in params]
    cotangents: list[Name] = [] if is_last else [("gy", name[1]) for name in ends]

    def together(values: Sequence[Any], gys: Sequence[Any], sums: Sequence[Any]) -> list[Any]:
        by_name = dict(zip(stage.takes, values, strict=True))

        def forward(moving: Sequence[Any]) -> tuple[list[Any], list[Any]]:
            moved = by_name | dict(zip(through, moving, strict=True))
            outputs = dict(zip(stage.gives, evaluate(*moved.values()), strict=True))
            return [outputs[name] for name in ends], list(outputs.values())

        seeds, pull, outputs = jax.vjp(forward, [by_name[name] for name in through], has_aux=True)
        (grads,) = pull([jnp.ones_like(seed) for seed in seeds] if is_last else list(gys))
        gradients = dict(zip(through, grads, strict=True))
        added = [
            total + gradients[name].astype(total.dtype)
            for name, total in zip(params, sums, strict=True)
        ]
        return [*outputs, *(gradients[name] for name in through if name[0] == "x"), *added]

    zeros = [jax.ShapeDtypeStruct(avals[p].shape, total_dtype(avals[p].dtype)) for p in params]
    gys = [] if is_last else [results[name] for name in ends]
    with tracing_stages(stage.mesh):
        closed = jax.make_jaxpr(together)(_shapes(avals.values()), _shapes(gys), zeros)
    gxs: list[Name] = [("gx", name[1]) for name in through if name[0] == "x"]
    return Graph(closed, (*stage.takes, *cotangents, *totals), (*stage.gives, *gxs, *totals))


def _shapes(avals: Any) -> list[Any]:
    return [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]


def cut(graph: Graph, parts: Sequence[tuple[str, Sequence[Name]]], kind: str) -> list[StagePiece]:
    """Cut a function into pieces, one after the other; each gives some of its results.

    An equation belongs to the first part that needs it. A later part that uses a value of an earlier one
    takes it under a name (`kind`, n), and the earlier part gives it. Where a value follows by `CHEAP`
    equations from values that are not larger together, those are kept, and the later part computes it again:
    without this, each operation of an activation function would keep an array of its own.

    Args:
        graph: the function.
        parts: name of each piece, and the results that it gives.
        kind: kind of the values between pieces, in their names.
    """
    part_of: dict[int, int] = {}
    """Number of the part of each equation."""
    uses: list[set[int]] = []
    for number, (_, wanted) in enumerate(parts):
        atoms = [graph.results[name] for name in wanted]
        equations, _ = graph.before(atoms, lambda v: graph.position.get(v) in part_of)
        uses.append(equations)
        part_of.update(dict.fromkeys(equations, number))
    kept: dict[Any, Name] = {}
    names = dict(graph.arguments)
    for number, (_, wanted) in enumerate(parts):
        ends = [graph.results[name] for name in wanted]
        needed = _outside(graph, uses[number], ends, part_of, number)
        chosen = smallest(graph, needed, (), kept)
        again, _ = graph.before(needed, lambda v, chosen=chosen: v in chosen)  # type: ignore[misc]
        uses[number] |= again
        for variable in chosen:
            kept.setdefault(variable, (kind, len(kept)))
    names |= kept
    pieces = []
    for number, (name, wanted) in enumerate(parts):
        gives = {result: graph.results[result] for result in wanted}
        for variable, saved in kept.items():
            if part_of[graph.position[variable]] == number:
                gives[saved] = variable
        pieces.append(graph.piece(name, uses[number], gives, names))
    return pieces


def _outside(
    graph: Graph, equations: set[int], ends: Sequence[Any], part_of: Mapping[int, int], number: int
) -> list[Any]:
    """Return the variables of earlier parts that a part uses."""
    operands = [atom for at in sorted(equations) for atom in graph.equations[at].invars]
    variables: dict[Any, None] = {}
    for atom in (*operands, *ends):
        if not isinstance(atom, Literal):
            at = graph.position.get(atom)
            if at is not None and part_of.get(at, number) < number:
                variables[atom] = None
    return list(variables)
