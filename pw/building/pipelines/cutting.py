"""How one function is cut into stages: at its marks (`marks`), or where it is best (`choosing`).

The function is traced as a whole, and its jaxpr is cut:

- What depends on both the batch and the parameters belongs to the stage in which it was traced: the number
  of marks before it.
- What depends on the parameters alone, or on the batch alone (a transposed weight, a mask), belongs to each
  stage that uses it. So a weight that two stages use, such as a tied embedding, is a parameter of both.
- Of a parameter that stages use by rows (a stack of the layers' weights), each has those that it uses.
- A value that a later stage uses travels through the stages between, as a part of their inputs and results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend

from pw.building.pipelines.choosing import Cuts
from pw.building.pipelines.groups import unrolled, with_marks
from pw.building.pipelines.marks import counted, has_mark, mark
from pw.building.pipelines.rows import divided, of_rows
from pw.building.pipelines.segments import stays
from pw.building.pipelines.stage_trace import tracing_stages
from pw.building.pipelines.stages import KEY, Stage, described, is_float, takes_key
from pw.building.pipelines.units import sources
from pw.client.arrays.mesh import OwnMesh
from pw.client.computations.export import tracing
from pw.client.equations.graph import Graph, Literal, Name
from pw.client.functions.wrapped import name_of
from pw.core.errors import ArgumentError


def cut_stages(
    function: Callable[..., Any],
    mesh_of: Callable[[int, int], OwnMesh],
    params: Any,
    batch: Sequence[Any],
    key: Any,
    count: int | None,
    choose: Callable[[Graph], Cuts],
) -> list[Stage]:
    """Trace `function(params, *batch)` and cut it at its marks, or where `choose` says.

    Args:
        function: returns the loss.
        mesh_of: returns the mesh of a stage, given its number and how many there are (0: not known yet).
        params: a tree of `jax.ShapeDtypeStruct`s. Parameter i of a stage is leaf i of the whole tree.
        batch: trees of shapes of one microbatch.
        key: the type of a PRNG key, or None.
        count: how many stages the user wants, or None.
        choose: returns where a function without marks is cut.

    Raises:
        ArgumentError: the function has no marks and `count` is None, or another number of marks, or marks where
            it cannot be cut, or it gives no loss.
    """
    name = name_of(function)

    def flat(params: Any, batch: Any, key: Any) -> list[Any]:
        named = {"key": key} if key is not None and takes_key(function) else {}
        return jax.tree.leaves(function(params, *batch, **named))

    with counted() as marks, tracing_stages(mesh_of(0, 0), lambda: mesh_of(marks(), 0)):
        closed = jax.make_jaxpr(flat)(params, tuple(batch), key)
    loss = closed.out_avals
    if len(loss) != 1 or loss[0].shape or not is_float(loss[0]):
        raise ArgumentError(
            f"{name!r} returns {described(loss)}; a pipeline needs the loss, one floating-point number: the "
            "mean over the microbatch"
        )
    counts = [len(jax.tree.leaves(tree)) for tree in (params, tuple(batch), key)]
    kinds = [("param", counts[0]), ("batch", counts[1]), ("key", counts[2])]
    takes = [(kind, index) for kind, count in kinds for index in range(count)]
    graph = Graph(closed, takes, [("y", 0)])
    if count is not None and not any(map(has_mark, graph.equations)):
        if any(map(stays, graph.equations)):
            raise ArgumentError(
                f"{name!r} has experts on other devices (pw.moe), and which stage they belong to is not known "
                "before it is cut; call pw.stage_boundary where stages meet, or pass a list of stage functions"
            )
        with tracing(mesh_of(0, 0)):
            cuts = choose(graph)
            graph = with_marks(unrolled(graph, cuts.scans), cuts.places)
    return _Cut(graph, name, mesh_of, count).stages()


class _Cut:
    """One function, cut at its marks."""

    def __init__(
        self, graph: Graph, name: str, mesh_of: Callable[[int, int], OwnMesh], count: int | None
    ) -> None:
        self._graph, self._name, self._mesh_of = graph, name, mesh_of
        self._marks = [at for at, e in enumerate(graph.equations) if e.primitive is mark]
        for eqn in graph.equations:
            if eqn.primitive is not mark and has_mark(eqn):
                raise ArgumentError(
                    f"{name!r} calls pw.stage_boundary inside of {eqn.primitive.name}; a model can be cut only "
                    "outside of loops, branches and checkpoints"
                )
        self._count = len(self._marks) + 1
        if self._count != (count or self._count):
            raise ArgumentError(
                f"{name!r} has {len(self._marks)} pw.stage_boundary(x), which make {self._count} stages, and "
                f"stages= says {count}; leave out one of both"
            )
        if not self._marks and count is None:
            raise ArgumentError(
                f"{name!r} has no pw.stage_boundary(x), so there is nothing to cut; pass stages= (how many), a "
                "list of stage functions, or mark where the stages meet"
            )
        self._stage = self._places()

    def _places(self) -> dict[Any, int]:
        """Return the stage of each variable that belongs to one: the number of marks before it.

        Marks go: what was computed from their results is computed from what they were put on.
        """
        graph, follows = self._graph, sources(self._graph)
        places: dict[Any, int] = {}
        marked: dict[Any, Any] = {}
        stage = 0
        for at, eqn in enumerate(graph.equations):
            operands = [_behind(atom, marked) for atom in eqn.invars]
            if eqn.primitive is mark:
                stage += 1
                marked.update(zip(eqn.outvars, operands, strict=True))
                continue
            graph.equations[at] = eqn.replace(invars=operands)
            if any(len(follows[variable]) == 2 for variable in eqn.outvars):
                places.update(dict.fromkeys(eqn.outvars, stage))
        graph.results |= {name: _behind(v, marked) for name, v in graph.results.items()}
        return places

    def stages(self) -> list[Stage]:
        """Return the stages."""
        graph, last = self._graph, self._count - 1
        loss = graph.results["y", 0]
        if isinstance(loss, Literal) or self._stage.get(loss) != last:
            raise ArgumentError(
                f"the loss of {self._name!r} does not depend on what follows its pw.stage_boundary number "
                f"{last}; each stage has to add something to the loss"
            )
        carried: list[list[Any]] = [[] for _ in range(self._count)]
        """Values that each stage takes from the one before."""
        ends: list[list[Any]] = [[] for _ in range(self._count)]
        ends[last] = [loss]
        parts: list[set[int]] = []
        for stage in range(last, -1, -1):
            equations, starts = graph.before(
                ends[stage],
                lambda v, stage=stage: self._stage.get(v, stage) < stage,  # type: ignore[misc]
            )
            parts.insert(0, equations)
            if stage:
                earlier = [v for v in starts if self._stage.get(v, stage) < stage]
                carried[stage] = sorted(earlier, key=graph.position.__getitem__)
                if not carried[stage]:
                    raise ArgumentError(
                        f"nothing that {self._name!r} computes before pw.stage_boundary number {stage} is "
                        "used after it"
                    )
                ends[stage - 1] = carried[stage]
        rows = divided(graph, parts)
        return [self._built(n, parts[n], carried[n], ends[n], rows[n]) for n in range(self._count)]

    def _built(
        self,
        number: int,
        equations: set[int],
        carried: Sequence[Any],
        ends: Sequence[Any],
        rows: dict[Any, tuple[int, int]],
    ) -> Stage:
        graph = self._graph
        parts, changed = of_rows(graph, equations, rows)
        names: dict[Any, Name] = dict(graph.arguments)
        names |= {part: graph.arguments[variable] for variable, part in parts.items()}
        names |= {variable: ("x", index) for index, variable in enumerate(carried)}
        gives: dict[Name, Any] = {("y", index): end for index, end in enumerate(ends)}
        name = f"{self._name}_{number}"
        piece = graph.piece(name, equations, gives, names, changed)
        mesh = self._mesh_of(number, self._count)
        order = sorted(
            range(len(piece.takes)), key=lambda at: (_ORDER[piece.takes[at][0]], piece.takes[at][1])
        )
        jaxpr = piece.closed.jaxpr
        ordered = jaxpr.replace(invars=[jaxpr.invars[at] for at in order])
        closed = jax.extend.core.ClosedJaxpr(ordered, piece.closed.consts)
        takes = tuple(piece.takes[at] for at in order)
        x = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in carried]
        own = {graph.arguments[variable][1]: part for variable, part in rows.items()}
        return Stage(
            number, self._name, mesh, closed, takes, piece.gives, x if number else None, own
        )


_ORDER = {"param": 0, "x": 1, "batch": 2, KEY[0]: 3}


def _behind(atom: Any, marked: dict[Any, Any]) -> Any:
    """Return what a mark was put on, for a result of the mark."""
    return atom if isinstance(atom, Literal) else marked.get(atom, atom)
