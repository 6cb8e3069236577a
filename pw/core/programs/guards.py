"""Guards and merges: computations that some runs skip.

A branch has its place in the order of launches on every host. Its computations have a *guard*, a boolean that
is an ordinary edge of the program: each host of a gang reads the same guard, so all of them skip or none (G1),
and the hosts wait for nothing that was launched later (G4). Results of a skipped computation carry an error of
the kind `SKIPPED`; what is computed from them, also on other hosts, is skipped as well. A *merge* chooses
between the results of two branches.

The predicate of a merge may be skipped itself: an earlier branch should have computed it and was not taken,
as in the iterations behind the last one of a loop. It counts as false then.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pw.core.errors import SKIPPED, ErrorReport, ShardingError
from pw.core.programs.program import Computation, Kind, Node, ValueRef
from pw.core.sharding import ArraySpec, Placement, Sharding

NOT_TAKEN = ErrorReport(SKIPPED, "it belongs to a branch that was not taken")


def predicate_spec(placement: Placement) -> ArraySpec:
    """Return the spec that hosts read a guard with: a boolean on each device."""
    return ArraySpec((), "bool", Sharding(("devices",), (len(placement.devices),), ()), placement)


def guard_of(node: Node, computation: Computation) -> Iterator[tuple[ValueRef, ArraySpec]]:
    """Yield the guard of a node, if there is one, and the spec that its hosts need."""
    if node.guard is not None:
        yield node.guard, predicate_spec(computation.placement)


def merge(name: str, specs: Sequence[ArraySpec]) -> Computation:
    """Return the computation that chooses between two values of each spec, all on one placement.

    It takes a value over if nothing else needs it, so no buffer is shared without need.
    """
    placement = specs[0].placement
    inputs = (predicate_spec(placement), *specs, *specs)
    donated = tuple(range(1, len(inputs)))
    return Computation(name, b"", placement, inputs, tuple(specs), donated, kind=Kind.MERGE)


def hold(spec: ArraySpec) -> Computation:
    """Return the computation that holds a value back: a merge whose halves are both the value.

    Its node is guarded by its predicate. Where a branch is not taken, the result is skipped, so that an edge
    from it carries no bytes; otherwise it is the value, under another name.
    """
    return merge("hold back", [spec])


def is_hold(node: Node, computation: Computation) -> bool:
    """Whether a node holds a value back (`hold`)."""
    if not computation.traits.predicates or node.guard is None or len(node.args) != 3:
        return False
    return node.args[1] == node.args[2]


def check_merge(computation: Computation) -> None:
    """Raise ShardingError unless both halves of a merge's arguments are like its results."""
    predicate, halves = computation.inputs[:1], computation.inputs[1:]
    is_boolean = [(one.shape, one.dtype) for one in predicate] == [((), "bool")]
    if not is_boolean or halves != 2 * computation.outputs:
        raise ShardingError(
            f"the merge {computation.name!r} takes a boolean and two values for each result, all alike"
        )


def is_skipped(error: ErrorReport | None) -> bool:
    """Whether the error stands for a value of a branch that was not taken."""
    return error is not None and error.kind == SKIPPED
