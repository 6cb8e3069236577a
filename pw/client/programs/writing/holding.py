"""Holds large operands of branches back: they leave their slice only if the branch is taken.

An edge to a guarded computation begins at its value, which is made before the branch is chosen. So the value
goes through a *hold* (`pw.core.programs.guards.hold`): a guarded merge where it lies. The edge begins at the
hold, and the hosts there send the value, or a few bytes which say that it is skipped.

A hold makes its hosts wait for the predicate, and the taken branch for the value. So only large values get one.
It guards the innermost branch that has all consumers of an edge: what both branches need there is sent at once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from pw.client.programs.writing.branch import Branch
from pw.core.programs.guards import hold
from pw.core.programs.program import Computation, Node, Output, ValueRef
from pw.core.sharding import ArraySpec

LEAST_BYTES = 1 << 20
"""The least size of an operand that is held back.

By the model of `pw.core.costs`, a network of 25 Gbit/s needs as long for so many bytes as a message
takes. Readings over tcp on one busy machine agree only roughly: with the predicate on the operand's slice, runs
that skip the branch took 0.93 of their time for 512 KiB, and 0.8 for 1 MiB; with the predicate on the other
slice 0.92 and 0.85, but runs in flight that take the branch 1.6 to 2.4 times as long, because they wait for
each other.
"""


@dataclass(slots=True)
class _Edge:
    """An edge from before a branch into it."""

    branch: Branch | None
    """The innermost branch with all of its consumers."""
    first: int
    """Its first consumer."""
    places: list[tuple[int, int]] = field(default_factory=list)
    """The nodes that take it, and the positions of it among their arguments."""


def held_back(
    nodes: Sequence[Node],
    index_of: dict[Computation, int],
    inputs: Sequence[ArraySpec],
    outputs: Sequence[Output],
    branches: Sequence[Branch | None],
    halves: Mapping[int, tuple[Branch, Branch]],
    predicate: Callable[[Branch, ValueRef], ValueRef],
) -> tuple[list[Node], list[Output]]:
    """Return the nodes and outputs of a program with holds for large operands of its branches.

    Args:
        nodes: the nodes of the program.
        index_of: its computations and their positions; those of holds are added.
        inputs: the specs of its inputs.
        outputs: its results.
        branches: the branch of each node.
        halves: of each merge of a `pw.cond`, the branches of its halves.
        predicate: returns the predicate of a branch for the hosts of a value.
    """
    computations = list(index_of)

    def spec_of(value: ValueRef) -> ArraySpec:
        if value.node < 0:
            return inputs[value.index]
        return computations[nodes[value.node].computation].outputs[value.index]

    def made_in(value: ValueRef) -> Branch | None:
        return None if value.node < 0 else branches[value.node]

    edges: dict[tuple[ValueRef, ArraySpec], _Edge] = {}
    for number, node in enumerate(nodes):
        taken = computations[node.computation].inputs
        counted = dict(node.counted)
        for at, (value, wanted) in enumerate(zip(node.args, taken, strict=True)):
            own = spec_of(value)
            is_far = own.placement != wanted.placement
            if not is_far or own.size_bytes < LEAST_BYTES or at in counted:
                continue
            branch = branches[number]
            if number in halves and at:
                branch = halves[number][at > len(node.args) // 2]
            edge = edges.setdefault((value, wanted), _Edge(branch, number))
            edge.branch = _common(edge.branch, branch)
            edge.places.append((number, at))
    for output in outputs:
        edges.pop((output.value, output.spec), None)

    holds: defaultdict[int, dict[tuple[ValueRef, Branch], None]] = defaultdict(dict)
    """The holds before each node."""
    held: dict[tuple[int, int], tuple[ValueRef, Branch]] = {}
    for (value, _), edge in edges.items():
        holder = _holder(edge.branch, made_in(value))
        if holder is not None:
            rest = range(value.node + 1, edge.first)
            before = next((at for at in rest if holder.encloses(branches[at])), edge.first)
            holds[before][value, holder] = None
            held |= dict.fromkeys(edge.places, (value, holder))
    if not held:
        return list(nodes), list(outputs)

    rewritten: list[Node] = []
    moved: list[int] = []
    through: dict[tuple[ValueRef, Branch], ValueRef] = {}

    def renumbered(value: ValueRef) -> ValueRef:
        return value if value.node < 0 else ValueRef(moved[value.node], value.index)

    for number, node in enumerate(nodes):
        for value, holder in holds[number]:
            if (value, holder) in through:
                continue
            index = index_of.setdefault(hold(spec_of(value)), len(index_of))
            source, chosen = renumbered(value), renumbered(predicate(holder, value))
            through[value, holder] = ValueRef(len(rewritten), 0)
            rewritten.append(Node(index, (chosen, source, source), chosen, holder.unless))
        moved.append(len(rewritten))
        args = [
            through[held[number, at]] if (number, at) in held else renumbered(value)
            for at, value in enumerate(node.args)
        ]
        rewritten.append(
            msgspec.structs.replace(
                node,
                args=tuple(args),
                guard=node.guard and renumbered(node.guard),
                counted=tuple([(at, renumbered(counts)) for at, counts in node.counted]),
            )
        )
    return rewritten, [
        Output(renumbered(one.value), one.spec, one.counts and renumbered(one.counts))
        for one in outputs
    ]


def _common(one: Branch | None, other: Branch | None) -> Branch | None:
    """Return the innermost branch that has both; None for the program."""
    while one is not None and not one.encloses(other):
        one = one.outer
    return one


def _holder(branch: Branch | None, made_in: Branch | None) -> Branch | None:
    """Return the innermost branch around consumers that can hold back what is made in another one, if any."""
    while branch is not None and not branch.encloses(made_in):
        if not branch.is_iteration:
            return branch
        branch = branch.outer
    return None
