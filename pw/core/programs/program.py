"""Programs: sharded dataflow graphs of compiled functions.

A `Program` has one `Node` per call of a computation and one `ValueRef` per edge, whatever the number
of shards. Where a value lies differently from what its consumer asks for, the edge implies a
transfer; the client never writes one.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

import msgspec

from pw.core.compact import OnPlacement, OnSpec
from pw.core.sharding import ArraySpec, Placement


class Kind(StrEnum):
    """What hosts do for a computation."""

    STABLEHLO = "stablehlo"
    """Compile a StableHLO module with the caller's options (`pw.core.programs.stablehlo`); it takes and
    gives shards."""
    PYTHON = "python"
    """Call a pickled Python function, if they allow it."""
    STREAM = "stream"
    """Make one element of a stream, in a Python process of its own, if they allow it. The arguments say which
    element, so it can be made again; the last result says how the generator went on."""
    RESHARD = "reshard"
    """Compile a function that returns its argument: XLA re-shards it. Only the controller makes these
    (`pw.core.programs.ways`)."""
    VIEW = "view"
    """Nothing: the results consist of shards of the arguments, where they lie."""
    MERGE = "merge"
    """Nothing: of the arguments (predicate, a..., b...), the results are a if the predicate is true, else b."""


class Traits(NamedTuple):
    """How a kind of computation differs from the others."""

    is_installed: bool = True
    """Hosts install something for it, and run that; the hosts of a gang run it together."""
    has_artifact: bool = True
    """Its client has sent code for it."""
    runs_on_host: bool = False
    """Its code is pickled Python: a process of each host runs it, not the devices."""
    keeps_state: bool = False
    """A Python process of its own keeps its state between calls. Its last result is that state."""
    is_repeatable: bool = True
    """It makes the same results again of the same arguments."""
    allocates: bool = True
    """Its results need device memory of their own."""
    spans_devices: bool = False
    """Its placement spans the devices of all its arguments and results; each may lie on fewer."""
    predicates: int = 0
    """How many of its first arguments are predicates. Hosts read them, and need an argument behind them only
    if it is chosen."""
    from_clients: bool = True
    """Clients may send it; the others are made by the controller."""


TRAITS = {
    Kind.STABLEHLO: Traits(),
    Kind.PYTHON: Traits(runs_on_host=True, is_repeatable=False),
    Kind.STREAM: Traits(runs_on_host=True, keeps_state=True),
    Kind.RESHARD: Traits(has_artifact=False, from_clients=False),
    Kind.VIEW: Traits(is_installed=False, has_artifact=False, allocates=False, spans_devices=True),
    Kind.MERGE: Traits(is_installed=False, has_artifact=False, allocates=False, predicates=1),
}


class Computation(msgspec.Struct, frozen=True, array_like=True):
    """A function over all its shards.

    `artifact` is the SHA-256 of its code; arguments and results are flat lists of arrays as
    `inputs` and `outputs` say. `donated` are positions in `inputs` whose buffers the computation
    may take over.
    """

    name: str
    artifact: bytes
    placement: Placement
    inputs: tuple[ArraySpec, ...]
    outputs: tuple[ArraySpec, ...]
    donated: tuple[int, ...] = ()
    kind: Kind = Kind.STABLEHLO
    checks: tuple[str, ...] = ()
    """The user's names of results that must have no NaNs. If there are any, the last output is a replicated
    vector with a boolean for each of them."""
    calls_back: bool = False
    """It calls functions in its client's process (`Stablehlo.callbacks`), and waits for their results."""
    shards: tuple[tuple[tuple[int, int], ...], ...] = ()
    """Of a view: for each output, the (input, mesh position there) of its shard at each mesh position."""

    @property
    def traits(self) -> Traits:
        """How its kind differs from the others."""
        return TRAITS[self.kind]

    def slices(self) -> set[int]:
        """Return the slices of the computation."""
        specs = (*self.inputs, *self.outputs)
        return {self.placement.slice, *(spec.placement.slice for spec in specs)}


class ValueRef(msgspec.Struct, frozen=True, array_like=True):
    """Result `index` of node `node`; with `node` -1, the program's input `index`."""

    node: int
    index: int


class Node(msgspec.Struct, frozen=True, array_like=True):
    """One call of a computation.

    With a `guard`, a scalar boolean, it happens only if that is true (with `unless`, false); without it,
    all that is computed from its results does not happen either.
    """

    computation: int
    args: tuple[ValueRef, ...]
    guard: ValueRef | None = None
    unless: bool = False
    counted: tuple[tuple[int, ValueRef], ...] = ()
    """Positions of arguments of which only the rows that count have to travel, each with its counts, which are
    replicated where the argument is made (`pw.core.programs.counted`)."""


class Output(msgspec.Struct, frozen=True, array_like=True):
    """One result of a program, delivered as `spec` (which may ask for a transfer)."""

    value: ValueRef
    spec: ArraySpec
    counts: ValueRef | None = None
    """If only the rows that count have to travel: the counts, as in `Node.counted`."""


class Program(msgspec.Struct, frozen=True, array_like=True):
    """A graph of computations; nodes are in an order in which they can run.

    `donated` are the program inputs whose arrays are gone once the program has been run.
    """

    name: str
    computations: tuple[Computation, ...]
    nodes: tuple[Node, ...]
    inputs: tuple[ArraySpec, ...]
    outputs: tuple[Output, ...]
    donated: tuple[int, ...] = ()
    timeout_s: float = 0.0
    """Seconds that a run may take from its first launch; 0 for no limit."""

    def spec_of(self, value: ValueRef) -> ArraySpec:
        """Return the spec of `value` as its producer makes it."""
        if value.node < 0:
            return self.inputs[value.index]
        return self.computations[self.nodes[value.node].computation].outputs[value.index]

    @property
    def makes_views(self) -> bool:
        """Whether its results are views; it does nothing else then."""
        return any(computation.kind is Kind.VIEW for computation in self.computations)

    @property
    def is_repeatable(self) -> bool:
        """Whether it may be run again: none of its computations has effects outside of the cluster."""
        return all(computation.traits.is_repeatable for computation in self.computations)

    def artifacts(self) -> tuple[bytes, ...]:
        """Return the artifact of each computation that has one."""
        return tuple([one.artifact for one in self.computations if one.traits.has_artifact])

    def slices(self) -> set[int]:
        """Return the slices of the program."""
        specs = (*self.inputs, *(output.spec for output in self.outputs))
        slices = {spec.placement.slice for spec in specs}
        return slices.union(*(computation.slices() for computation in self.computations))

    def with_placed(self, spec: OnSpec, placement: OnPlacement) -> Program:
        """Return a copy with other specs, and another placement for each computation."""
        computations = [
            msgspec.structs.replace(
                computation,
                placement=placement(computation.placement),
                inputs=tuple(map(spec, computation.inputs)),
                outputs=tuple(map(spec, computation.outputs)),
            )
            for computation in self.computations
        ]
        outputs = [
            Output(output.value, spec(output.spec), output.counts) for output in self.outputs
        ]
        return msgspec.structs.replace(
            self,
            computations=tuple(computations),
            inputs=tuple(map(spec, self.inputs)),
            outputs=tuple(outputs),
        )
