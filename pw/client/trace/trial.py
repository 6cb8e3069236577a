"""`Trial`: what functions would add to a program; loops and maps learn from one where their values lie."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from pw.client.arrays.mesh import Mesh
from pw.client.trace.launch import Feed
from pw.client.trace.recorder import ProgramRecorder
from pw.client.trace.tracer import ProgramTracer
from pw.core.programs.program import Computation, Node, ValueRef


@dataclass(frozen=True, slots=True, eq=False)
class Trial:
    """What a block has added to a program that does not keep it."""

    _leaf: Callable[[int, Any], ProgramTracer]
    _nodes: Sequence[Node]
    _first: int
    """The first node of the trial."""
    _feeds: Sequence[Feed]
    _index_of: Mapping[Computation, int]
    _given: Mapping[object, str]
    _meshes: Mapping[Mesh, None]
    """Where computations of the trial run."""

    def leaf(self, index: int, signature: Any) -> ProgramTracer:
        """Return argument `index` of the functions that are tried; those of the program have other numbers."""
        return self._leaf(-2 - index, signature)

    def donated(self) -> frozenset[int]:
        """Return the arguments that were donated."""
        inputs = [
            value.index for value in self._given if isinstance(value, ValueRef) and value.node < 0
        ]
        return frozenset(-2 - self._feeds[at].leaf for at in inputs if self._feeds[at].leaf < -1)

    def takes_elsewhere(self, index: int, mesh: Mesh) -> bool:
        """Whether a computation takes argument `index` on other devices than those of a mesh."""
        computations = tuple(self._index_of)
        devices = mesh.placement
        return any(
            value.node < 0
            and self._feeds[value.index].leaf == -2 - index
            and computations[node.computation].placement != devices
            for node in self._nodes[self._first :]
            for value in node.args
        )

    def uses_program(self) -> bool:
        """Whether computations take values of the program besides the arguments."""
        return any(
            self._feeds[value.index].leaf >= 0 if value.node < 0 else value.node < self._first
            for node in self._nodes[self._first :]
            for value in node.args
        )

    def one_mesh(self) -> Mesh | None:
        """Return the mesh of all computations, if they could be one computation there."""
        computations = tuple(self._index_of)
        used = [computations[node.computation] for node in self._nodes[self._first :]]
        if len(self._meshes) != 1 or any(one.checks or not one.traits.is_traceable for one in used):
            return None
        (mesh,) = self._meshes
        return None if mesh.parts else mesh

    def first_mesh(self) -> Mesh | None:
        """Return the mesh of the first computation."""
        return next(iter(self._meshes), None)


@contextmanager
def trial(recorder: ProgramRecorder) -> Iterator[Trial]:
    """Record in a block to learn what the calls would add; the program stays as it was."""
    own = vars(recorder)
    before = dict(own)
    for name, kept in before.items():
        if isinstance(kept, (dict, list, set)):
            own[name] = kept.copy()
    own.update(_meshes={}, tape=None)
    try:
        yield Trial(
            recorder.leaf,
            recorder._nodes,
            len(recorder._nodes),
            recorder._feeds,
            recorder._index_of,
            recorder._given,
            recorder._meshes,
        )
    finally:
        own.clear()
        own.update(before)
