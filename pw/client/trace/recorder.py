"""`ProgramRecorder`: collects the calls of a traced function into a program.

Each call is one node, whatever the number of shards. A value lies where its producer leaves it; if
a consumer needs it elsewhere, the edge between them is a transfer. A host value is placed by its
consumers: each different placement is an input of the program.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from pw.client.arrays.array import Array
from pw.client.arrays.mesh import OwnMesh
from pw.client.arrays.ragged import pairs_of
from pw.client.arrays.sharding import OwnSharding
from pw.client.arrays.signature import ArrayType, aval_of, signature_of
from pw.client.connection import current
from pw.client.trace.argument_errors import value_in_words
from pw.client.trace.branch import Branch
from pw.client.trace.constant import Constant
from pw.client.trace.counted import GivenCounts, counts_of, given_counts
from pw.client.trace.export import Traced
from pw.client.trace.holding import held_back
from pw.client.trace.joined.moving import divided, gathered
from pw.client.trace.joined.traced import JoinedTraced
from pw.client.trace.launch import Feed, JoinedLaunch, Launch, Pick
from pw.client.trace.tracer import JoinedTracer, ProgramTracer
from pw.core.errors import ArgumentError, ArrayDeleted, NotOwner, TracerError
from pw.core.programs.guards import merge
from pw.core.programs.program import Computation, Node, Output, Program, ValueRef


class ProgramRecorder:
    """A program under construction."""

    def __init__(self, name: str, timeout_s: float = 0.0) -> None:
        self.name = name
        self.runtime: Any = None
        self.describe: Callable[[int], str] | None = None
        """Names a leaf of the program's arguments, for errors."""
        self._timeout_s = timeout_s
        self._feeds: list[Feed] = []
        self._feed_of: dict[Any, int] = {}
        self._artifacts: dict[bytes, bytes] = {}
        self._index_of: dict[Computation, int] = {}
        self._nodes: list[Node] = []
        self.branch: Branch | None = None
        """The branch that is traced; each node is guarded by its predicate."""
        self._made: list[tuple[Sequence[ArrayType], Branch | None]] = []
        """The types of the results of each node, and its branch."""
        self._halves: dict[int, tuple[Branch, Branch]] = {}
        """The branches of the halves of each merge."""
        self._picks: list[Pick] = []
        """Islands' parts of leaves; they follow the leaves of a call, the last one first."""
        self._position_of: dict[Any, int] = {}
        self._given: dict[object, str] = {}
        """Donated inputs, results and moved copies, and the computations that took them."""
        self._given_counts: list[GivenCounts] = []

    def leaf(self, index: int, signature: Any) -> ProgramTracer:
        """Leaf `index` of the program's arguments."""
        if isinstance(signature, ArrayType):
            if signature.parts:
                return self.joined(signature, self._picked(index, signature))
            value = self._input(Feed(index, None, signature))
            return ProgramTracer(signature.aval, signature, value, None)
        return ProgramTracer(aval_of(signature), None, None, index)

    def lift(self, leaf: Any) -> ProgramTracer:
        """Return an argument of a computation as a value of this program."""
        if isinstance(leaf, ProgramTracer):
            return leaf
        if isinstance(leaf, Array):
            leaf._check_usable()
            if leaf._type.parts:
                return self.joined(leaf._type, [self.lift(part) for part in leaf.members])
            value = self._input(Feed(-1, leaf, leaf._type))
            return ProgramTracer(leaf.aval, leaf._type, value, None)
        return ProgramTracer(aval_of(signature_of(leaf)), None, None, Constant(leaf))

    def call(self, traced: Traced | JoinedTraced, leaves: Sequence[Any]) -> list[ProgramTracer]:
        """Add a node that applies `traced` to `leaves`; returns its results."""
        self._use(traced.mesh)
        arguments = [self.lift(leaf) for leaf in (*leaves, *traced.captured)]
        types = [*traced.inputs, *(array._type for array in traced.captured)]
        if isinstance(traced, JoinedTraced):
            self._given_counts += given_counts(traced.counted, arguments, traced.name)
            return traced.record(self, arguments)
        computation, given = traced.computation, arguments
        self._given_counts += given_counts(traced.counted, arguments, computation.name)
        arguments = [
            gathered(self, argument, type_) if isinstance(argument, JoinedTracer) else argument
            for argument, type_ in zip(arguments, types, strict=True)
        ]
        args = []
        for position, (argument, type_) in enumerate(zip(arguments, types, strict=True)):
            donated = position in computation.donated
            args.append(self.place(argument, type_, computation.name, own=donated))
        counted = tuple(self._counted(traced, given, args))
        identities = [argument.identity for argument in arguments]
        for position in computation.donated:
            identity = identities[position]
            if identity is not None:
                if identities.count(identity) > 1:
                    raise ArgumentError(
                        f"{computation.name!r} donates an argument "
                        f"{arguments[position].aval.str_short()} that it is also given as another "
                        "argument; pass a copy or do not donate it"
                    )
                self._given[identity] = computation.name
            if arguments[position]._value is None:
                self._given[args[position]] = computation.name
        self._artifacts[computation.artifact] = traced.artifact
        return self._results(computation, args, traced.mesh, traced.outputs, counted)

    def _results(
        self,
        computation: Computation,
        args: Sequence[ValueRef],
        mesh: OwnMesh,
        types: Sequence[ArrayType],
        counted: tuple[tuple[int, ValueRef], ...] = (),
    ) -> list[ProgramTracer]:
        """Add a node of the current branch; returns its results."""
        index = self._index_of.setdefault(computation, len(self._index_of))
        branch = self.branch
        guard = None if branch is None else self._predicate(branch.predicate, mesh)
        unless = branch is not None and branch.unless
        self._nodes.append(Node(index, tuple(args), guard, unless, counted))
        self._made.append((types, branch))
        node = len(self._nodes) - 1
        return [
            ProgramTracer(type_.aval, type_, ValueRef(node, result), None)
            for result, type_ in enumerate(types)
        ]

    def _counted(
        self,
        traced: Traced,
        arguments: Sequence[ProgramTracer],
        args: Sequence[ValueRef],
    ) -> Iterator[tuple[int, ValueRef]]:
        """Yield the positions of arguments whose rows have to move, with their counts."""
        counts = {at: one.counts for at, one in enumerate(arguments) if one.counts is not None}
        counts |= {rows: arguments[own] for rows, own in traced.counted}
        for rows, own in counts.items():
            if isinstance(arguments[rows], JoinedTracer):
                continue
            wanted = traced.computation.inputs[rows]
            value = counts_of(self, args[rows], wanted, own)
            if value is not None:
                yield rows, value

    def made_as(self, value: ValueRef) -> ArrayType:
        """Return the type of a value as its producer makes it."""
        if value.node < 0:
            return self._feeds[value.index].type
        return self._made[value.node][0][value.index]

    # --- branches ------------------------------------------------------------------------------------

    @contextmanager
    def within(self, branch: Branch) -> Iterator[None]:
        """Record what follows in a branch. What it donates is there for the other branch."""
        outer, given = self.branch, self._given
        self.branch, self._given = branch, given | (branch.given or {})
        try:
            yield
        finally:
            branch.given = self._given
            self.branch, self._given = outer, given

    def is_of_branch(self, tracer: ProgramTracer, branch: Branch | None) -> bool:
        """Whether a value is made in a branch, and not before it."""
        value = tracer._value
        return value is not None and value.node >= 0 and self._made[value.node][1] is branch

    def merge(
        self,
        name: str,
        branches: tuple[Branch, Branch],
        values: Sequence[tuple[ValueRef, ValueRef]],
        types: Sequence[ArrayType],
        counts: Sequence[tuple[ValueRef | None, ValueRef | None]] = (),
    ) -> list[ProgramTracer]:
        """Return what the taken one of two branches has made; what either has donated is gone.

        Args:
            name: for the user.
            branches: for a true predicate, and for a false one.
            values: the results of both, as `place` returned them.
            types: of the results; both lie so.
            counts: of values that are rows of a `Ragged` and have to move, by `counts_of`.
        """
        for branch in branches:
            self._given.update(branch.given or {})
        at_mesh: defaultdict[OwnMesh, list[int]] = defaultdict(list)
        for position, type_ in enumerate(types):
            at_mesh[type_.sharding.mesh].append(position)
        merged: dict[int, ProgramTracer] = {}
        for mesh, positions in at_mesh.items():
            here = [types[position] for position in positions]
            predicate = self._predicate(branches[0].predicate, mesh)
            halves = [values[position][half] for half in (0, 1) for position in positions]
            computation = merge(name, [type_.spec for type_ in here])
            of_rows = [
                counts[position][half] for half in (0, 1) for position in positions if counts
            ]
            counted = tuple((at, one) for at, one in enumerate(of_rows, 1) if one is not None)
            made = self._results(computation, [predicate, *halves], mesh, here, counted)
            self._halves[len(self._nodes) - 1] = branches
            merged.update(zip(positions, made, strict=True))
        return [merged[position] for position in range(len(types))]

    def _predicate(self, tracer: ProgramTracer, mesh: OwnMesh) -> ValueRef:
        """Return the predicate for hosts of a mesh; it may be donated to a computation meanwhile."""
        if tracer._value is not None:
            return tracer._value
        type_ = ArrayType.of(tracer.aval, OwnSharding.replicated(mesh))
        return self.place(tracer, type_, "pw.cond")

    def reshard(self, leaf: Any, sharding: OwnSharding) -> ProgramTracer:
        """Return the value with this sharding: another array, unless it has the sharding already."""
        tracer = self.lift(leaf)
        self._use(sharding.mesh)
        type_ = ArrayType.of(tracer.aval, sharding)
        if type_ is tracer._type:
            self._check_not_given(tracer, "pw.put")
            return tracer
        if type_.parts:
            pairs = zip(self.divided(tracer, type_), type_.parts, strict=True)
            return self.joined(type_, [self.reshard(part, to.sharding) for part, to in pairs])
        if isinstance(tracer, JoinedTracer):
            tracer = gathered(self, tracer, type_)
        self._check_not_given(tracer, "pw.put")
        source = tracer._leaf
        if isinstance(leaf, np.ndarray):  # its owner may write to it before it is used
            value = np.array(leaf, dtype=type_.numpy_dtype, order="C")
            value.flags.writeable = False
            source = Constant(value)
        return ProgramTracer(tracer.aval, type_, tracer._value, source, object(), tracer.counts)

    def place(
        self, tracer: ProgramTracer, type_: ArrayType, consumer: str, own: bool = False
    ) -> ValueRef:
        """Return the value for a consumer; a host value becomes an input of its own type, or `type_`."""
        self._check_not_given(tracer, consumer)
        if tracer._value is not None:
            self._check_in_branch(tracer, consumer)
            return tracer._value
        type_ = tracer._type or type_
        source = tracer._leaf
        if isinstance(source, Constant):
            return self._input(Feed(-1, source.placed(type_, own), type_), own)
        return self._input(Feed(source, None, type_), own)

    def give(self, tracer: ProgramTracer, consumer: str) -> None:
        """Donate a value that no computation takes."""
        self._check_not_given(tracer, consumer)
        if tracer.identity is not None:
            self._given[tracer.identity] = consumer

    def is_given(self, tracer: ProgramTracer) -> bool:
        """Whether a value has been donated."""
        return tracer.identity in self._given

    def joined(self, type_: ArrayType, parts: Sequence[ProgramTracer]) -> JoinedTracer:
        """Return a value over several islands with these parts."""
        return JoinedTracer(type_.aval, type_, None, None, parts=tuple(parts))

    def divided(self, tracer: ProgramTracer, type_: ArrayType) -> list[ProgramTracer]:
        """Return the parts of a value for the islands of `type_`."""
        source = tracer._leaf
        if tracer._type is not None:
            return divided(self, tracer, type_)
        if not isinstance(source, Constant):
            return self._picked(source, type_)
        return [
            ProgramTracer(
                part.aval,
                None,
                None,
                source if island.is_whole else Constant(island.of(source.value)),
            )
            for island, part in zip(type_.islands, type_.parts, strict=True)
        ]

    def _picked(self, leaf: int, type_: ArrayType) -> list[ProgramTracer]:
        """Return the islands' parts of a leaf; one for each leaf, island, part and spec."""
        found = []
        for at, (island, part) in enumerate(zip(type_.islands, type_.parts, strict=True)):
            key = (Pick(leaf, at, island), part.spec)
            position = self._position_of.get(key)
            if position is None:
                self._picks.append(key[0])
                position = self._position_of[key] = -len(self._picks)
            value = self._input(Feed(position, None, part))
            found.append(ProgramTracer(part.aval, part, value, None))
        return found

    def _check_not_given(self, tracer: ProgramTracer, consumer: str) -> None:
        donated_to = self._given.get(tracer.identity)
        if donated_to is not None:
            what = value_in_words(tracer, self._feeds, self.describe)
            raise ArrayDeleted(
                f"{consumer!r} uses {what} of the program {self.name!r} that was donated to the computation "
                f"{donated_to!r} before; use what {donated_to!r} returned, or give it a copy, x.copy()"
            )

    def _check_in_branch(self, tracer: ProgramTracer, consumer: str) -> None:
        value = tracer._value
        branch = None if value is None or value.node < 0 else self._made[value.node][1]
        if branch is not None and not branch.encloses(self.branch):
            raise TracerError(
                f"{consumer!r} uses a value {tracer.aval.str_short()} that {branch.name!r}, a branch of a "
                "pw.cond, has made; outside of the branch it may not exist. Return it from both branches "
                "instead, and use the result of pw.cond"
            )

    def finish(self, outputs: Sequence[ProgramTracer], tree: Any = None) -> Launch:
        """Register the program with these results, each with the sharding of its tracer."""
        grouped = [one._type for one in outputs if one._type is not None]
        types = [part for type_ in grouped for part in type_.parts or (type_,)]
        program = self.program(outputs, tree)
        if not program.nodes and not types:
            return Launch(current.runtime(), self.name, None, (), (), {}, tree)
        donated = {
            value.index: name
            for value, name in self._given.items()
            if isinstance(value, ValueRef) and value.node < 0
        }
        number = self.runtime.register_program(program, self._artifacts)
        checks = [counts.check for counts in self._given_counts]
        if self._picks or len(types) > len(outputs):
            launch = JoinedLaunch(
                self.runtime, self.name, number, self._feeds, types, donated, tree, checks
            )
            return launch.joining(self._picks, grouped)
        return Launch(self.runtime, self.name, number, self._feeds, types, donated, tree, checks)

    def program(self, outputs: Sequence[ProgramTracer], tree: Any = None) -> Program:
        """Return the program with these results, without registering it."""
        delivered = []
        whole = [
            part
            for tracer in outputs
            for part in (tracer.parts if isinstance(tracer, JoinedTracer) else (tracer,))
        ]
        for tracer in whole:
            type_ = tracer._type
            assert type_ is not None
            delivered.append(Output(self.place(tracer, type_, "return"), type_.spec))
        counts = {at: one.counts for at, one in enumerate(outputs) if one.counts is not None}
        counts |= {rows: outputs[own] for rows, own in pairs_of(tree)}
        for rows, own in counts.items() if len(whole) == len(outputs) else ():
            value, spec = delivered[rows].value, delivered[rows].spec
            needed = counts_of(self, value, spec, own)
            delivered[rows] = Output(value, spec, needed)
        given = [one for one in self._given if isinstance(one, ValueRef) and one.node < 0]
        nodes, delivered = self._held_back(delivered)
        return Program(
            self.name,
            tuple(self._index_of),
            tuple(nodes),
            tuple(feed.type.spec for feed in self._feeds),
            tuple(delivered),
            tuple(sorted(value.index for value in given)),
            self._timeout_s,
        )

    def _held_back(self, outputs: list[Output]) -> tuple[list[Node], list[Output]]:
        specs = [feed.type.spec for feed in self._feeds]
        branches = [branch for _, branch in self._made]

        def predicate(branch: Branch, value: ValueRef) -> ValueRef:
            return self._predicate(branch.predicate, self.made_as(value).sharding.mesh)

        return held_back(
            self._nodes, self._index_of, specs, outputs, branches, self._halves, predicate
        )

    def _input(self, feed: Feed, own: bool = False) -> ValueRef:
        """Return an input of the program; one for each source and spec, unless its consumer donates it."""
        self._use(feed.type.sharding.mesh)
        fixed = feed.fixed if isinstance(feed.fixed, bytes) else id(feed.fixed)
        key = (feed.leaf, fixed, feed.type.spec)
        index = None if own else self._feed_of.get(key)
        if index is None:
            index = len(self._feeds)
            self._feeds.append(feed)
            if not own:
                self._feed_of[key] = index
        return ValueRef(-1, index)

    def _use(self, mesh: OwnMesh) -> None:
        mesh.check_alive()
        if self.runtime is None:
            self.runtime = mesh.runtime
        elif self.runtime is not mesh.runtime:
            raise NotOwner(
                f"the program {self.name!r} uses devices or arrays of two sessions; fetch values of the "
                "other one with pw.get(x) and pass those"
            )
