"""`Segments`: a task with calls on other devices than its stage's, as those of `pw.moe`, in parts.

Such calls stay what they are in a program. What is computed between them becomes computations, each on one
mesh: that of the stage or, where all operands are elsewhere (gradients of experts), that of the operands.
What depends on no argument is computed where it is used.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pw.client.arrays.mesh import OwnMesh
from pw.client.equations.calls import meshes_of_results
from pw.client.equations.counted_rows import has_counts
from pw.client.equations.graph import Graph, Literal, Name, StagePiece
from pw.client.equations.meshes import first_mesh


@dataclass(frozen=True, eq=False)
class StageSegment:
    """A part of a task."""

    piece: StagePiece
    mesh: OwnMesh | None
    """Mesh of the computation; None for a call of a program."""


def stays(equation: Any) -> bool:
    """Whether an equation is a part of the program, not of a computation."""
    return first_mesh([equation]) is not None or has_counts(equation)


def has_calls(piece: StagePiece) -> bool:
    """Whether a task has calls on other devices."""
    return any(map(stays, piece.closed.jaxpr.eqns))


class Segments:
    """The parts of a task.

    Args:
        piece: the task.
        stage: the devices of the stage.
        lie: the mesh of each value that the task takes.
    """

    def __init__(self, piece: StagePiece, stage: OwnMesh, lie: Mapping[Name, OwnMesh]) -> None:
        graph = self._graph = Graph(piece.closed, piece.takes, piece.gives)
        self._piece = piece
        results = {atom: name for name, atom in graph.results.items() if _is_variable(atom)}
        inner = {v: ("inner", at) for at, v in enumerate(graph.position)}
        self._names: dict[Any, Name] = {**inner, **results, **graph.arguments}
        calls, members = _placed(graph, stage, lie)
        self.parts = self._in_order(stage, calls, members)
        """Segments of the task, in the order in which they are called."""

    def __call__(
        self, values: Sequence[Any], call: Callable[[StageSegment, Sequence[Any]], Sequence[Any]]
    ) -> list[Any]:
        """Return the results of the task; `call` returns those of a segment on a mesh."""
        by_name = dict(zip(self._piece.takes, values, strict=True))
        for part in self.parts:
            operands = [by_name[name] for name in part.piece.takes]
            results = (
                part.piece.function()(*operands) if part.mesh is None else call(part, operands)
            )
            by_name.update(zip(part.piece.gives, results, strict=True))
        ends = self._graph.results.values()
        return [by_name[self._names[end]] if _is_variable(end) else end.val for end in ends]

    def _in_order(
        self,
        stage: OwnMesh,
        calls: Mapping[int, int],
        members: Mapping[tuple[int, OwnMesh], set[int]],
    ) -> list[StageSegment]:
        """Return the segments; a level has its segments first, and then its calls."""
        graph, label = self._graph, self._piece.name
        own = set(calls).union(*members.values())

        def with_floating(equations: set[int], ends: Sequence[Any] = ()) -> set[int]:
            operands = _operands(graph, equations)
            return (
                equations | graph.before([*operands, *ends], lambda v: graph.position[v] in own)[0]
            )

        sets = {key: with_floating(equations) for key, equations in members.items()}
        alone = with_floating(set(calls), list(filter(_is_variable, graph.results.values())))
        used = {key: _operands(graph, equations) for key, equations in sets.items()}
        outside = _operands(graph, alone) | set(filter(_is_variable, graph.results.values()))
        # The last one on the stage's devices has the name of the task, by which timelines know it.
        order = sorted(sets, key=lambda key: (key[1] == stage, key[0]))
        names = dict(
            zip(
                reversed(order), [label, *(f"{label}_{n}" for n in range(len(order)))], strict=False
            )
        )
        everywhere = outside.union(*used.values())
        segments = [
            (
                2 * calls[at] + 1 if at in calls else -1,
                at,
                self._segment(label, None, {at}, {at}, everywhere),
            )
            for at in alone
        ]
        for key, equations in sets.items():
            elsewhere = outside.union(*(used[other] for other in used if other != key))
            level, mesh = key
            part = self._segment(names[key], mesh, equations, members[key], elsewhere)
            segments.append((2 * level, min(members[key]), part))
        return [part for *_, part in sorted(segments, key=lambda one: one[:2])]

    def _segment(
        self,
        name: str,
        mesh: OwnMesh | None,
        equations: set[int],
        members: set[int],
        wanted: set[Any],
    ) -> StageSegment:
        """Return the segment of these equations; of the results of the `members` it gives the `wanted` ones."""
        graph = self._graph
        results = [v for at in sorted(members) for v in graph.equations[at].outvars]
        gives = {self._names[v]: v for v in results if v in wanted}
        return StageSegment(graph.piece(name, equations, gives, self._names), mesh)


def _placed(
    graph: Graph, stage: OwnMesh, lie: Mapping[Name, OwnMesh]
) -> tuple[dict[int, int], dict[tuple[int, OwnMesh], set[int]]]:
    """Return the level of each call, and the equations of each level and mesh that are one computation.

    A segment is behind the calls and the segments of other meshes that it needs; a call is in the level
    of the last segment that it needs.
    """
    meshes: dict[Any, OwnMesh] = {v: lie[name] for v, name in graph.arguments.items()}
    levels: dict[int, int] = {}
    calls: dict[int, int] = {}
    members: defaultdict[tuple[int, OwnMesh], set[int]] = defaultdict(set)
    own: dict[int, OwnMesh] = {}
    for at, equation in enumerate(graph.equations):
        operand_meshes = [
            meshes.get(atom) if _is_variable(atom) else None for atom in equation.invars
        ]
        before = [graph.position.get(atom) for atom in equation.invars if _is_variable(atom)]
        earlier = [one for one in before if one in levels]
        there = {mesh for mesh in operand_meshes if mesh is not None}
        if stays(equation):
            levels[at] = calls[at] = max((levels[one] for one in earlier), default=0)
            result_meshes = meshes_of_results(equation, operand_meshes)
            meshes |= {
                v: to or stage for v, to in zip(equation.outvars, result_meshes, strict=True)
            }
        elif there:
            mesh = own[at] = there.pop() if len(there) == 1 else stage
            ready = [levels[one] + (own.get(one) != mesh) for one in earlier]
            levels[at] = max(ready, default=0)
            members[levels[at], mesh].add(at)
            meshes |= dict.fromkeys(equation.outvars, mesh)
    return calls, members


def _operands(graph: Graph, equations: set[int]) -> set[Any]:
    return {atom for at in equations for atom in graph.equations[at].invars if _is_variable(atom)}


def _is_variable(atom: Any) -> bool:
    return not isinstance(atom, Literal)
