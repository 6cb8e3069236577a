"""The tasks of one stage: its forward pass, its backward pass, and its weight gradients.

The stage and `jax.vjp` of it are traced as one function, and that is cut into the tasks. So a task computes
only what it gives, and what the backward pass needs of the forward pass is found, not declared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp

from pw.client.trace.graph import Graph, Name, StagePiece, cut, size_bytes
from pw.pipelines.stage_trace import tracing_stages
from pw.pipelines.stages import Stage, is_float
from pw.pipelines.table import Kind


@dataclass(frozen=True, eq=False)
class Tasks:
    """The pieces of a stage by kind of task; a kind that has nothing to do has none."""

    pieces: dict[Kind, StagePiece]

    def kept_bytes(self) -> int:
        """Return the bytes that a microbatch keeps for its later tasks, on all devices of the stage."""
        later = {name for kind, piece in self.pieces.items() if kind != "F" for name in piece.takes}
        found: dict[Name, Any] = {}
        for kind, piece in self.pieces.items():
            given = zip(piece.gives, piece.closed.out_avals, strict=True)
            found |= {name: aval for name, aval in given if name[0] in ("saved", "kept")}
            taken = zip(piece.takes, piece.closed.in_avals, strict=True)
            found |= {name: aval for name, aval in taken if name[0] == "x" and kind != "F"}
        return sum(size_bytes(aval) for name, aval in found.items() if name in later)


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
    through = [name for name, aval in avals.items() if _flows(name, aval)]
    params = [name for name in through if name[0] == "param"]
    ends = [name for name, aval in results.items() if is_float(aval)]
    totals: list[Name] = [("total", name[1]) for name in params]
    cotangents: list[Name] = [] if is_last else [("gy", name[1]) for name in ends]

    def together(values: Sequence[Any], given: Sequence[Any], sums: Sequence[Any]) -> list[Any]:
        known = dict(zip(stage.takes, values, strict=True))

        def forward(moving: Sequence[Any]) -> tuple[list[Any], list[Any]]:
            moved = known | dict(zip(through, moving, strict=True))
            made = dict(zip(stage.gives, evaluate(*moved.values()), strict=True))
            return [made[name] for name in ends], list(made.values())

        seeds, pull, made = jax.vjp(forward, [known[name] for name in through], has_aux=True)
        (found,) = pull([jnp.ones_like(seed) for seed in seeds] if is_last else list(given))
        gradients = dict(zip(through, found, strict=True))
        added = [
            total + gradients[name].astype(total.dtype)
            for name, total in zip(params, sums, strict=True)
        ]
        return [*made, *(gradients[name] for name in through if name[0] == "x"), *added]

    zeros = [jax.ShapeDtypeStruct(avals[p].shape, total_dtype(avals[p].dtype)) for p in params]
    given = [] if is_last else [results[name] for name in ends]
    with tracing_stages(stage.mesh):
        closed = jax.make_jaxpr(together)(_shapes(avals.values()), _shapes(given), zeros)
    gxs: list[Name] = [("gx", name[1]) for name in through if name[0] == "x"]
    return Graph(closed, (*stage.takes, *cotangents, *totals), (*stage.gives, *gxs, *totals))


def _flows(name: Name, aval: Any) -> bool:
    """Whether the gradient of a value is wanted."""
    return name[0] in ("param", "x") and is_float(aval)


def _shapes(avals: Any) -> list[Any]:
    return [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]
