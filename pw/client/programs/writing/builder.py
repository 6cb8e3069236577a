"""`ProgramBuilder`: collects the calls of a traced function into a program.

Each call is one node, whatever the number of shards. A value lies where its producer leaves it; if
a consumer needs it elsewhere, the edge between them is a transfer. A host value is placed by its
consumers: each different placement is an input of the program.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from pw.client.arrays.array import Array
from pw.client.arrays.mesh import OwnMesh
from pw.client.arrays.ragged import pairs_of
from pw.client.arrays.sharding import OwnSharding
from pw.client.arrays.signature import ArrayType, aval_of, signature_of
from pw.client.computations.export import Traced
from pw.client.computations.joined import JoinedTraced
from pw.client.connection import current
from pw.client.programs.writing.branch import Branch
from pw.client.programs.writing.constant import Constant
from pw.client.programs.writing.counted import GivenCounts, counts_of, given_counts
from pw.client.programs.writing.holding import held_back
from pw.client.programs.writing.launch import Feed, JoinedLaunch, Launch, Pick
from pw.client.programs.writing.moving import divided, gathered
from pw.client.programs.writing.values import JoinedValue, PlacedValue
from pw.core.errors import ArgumentError, ArrayDeleted, NotOwner
from pw.core.programs.guards import merge
from pw.core.programs.program import Computation, Node, Output, Program, ValueRef
from pw.islands.running import run


class ProgramBuilder:
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
        self._producers: list[tuple[Sequence[ArrayType], Branch | None]] = []
        """The types of the results of each node, and its branch."""
        self._halves: dict[int, tuple[Branch, Branch]] = {}
        """The branches of the halves of each merge."""
        self._picks: list[Pick] = []
        """Islands' parts of leaves; they follow the leaves of a call, the last one first."""
        self._position_of: dict[Any, int] = {}
        self._donated: dict[object, str] = {}
        """Donated inputs, results and moved copies, and the computations that took them."""
        self._given_counts: list[GivenCounts] = []

    def leaf(self, index: int, signature: Any) -> PlacedValue:
        """Leaf `index` of the program's arguments."""
        if isinstance(signature, ArrayType):
            if signature.parts:
                return self.joined(signature, self._picked(index, signature))
            value = self._input(Feed(index, None, signature))
            return PlacedValue(signature.aval, signature, value, None)
        return PlacedValue(aval_of(signature), None, None, index)

    def lift(self, leaf: Any) -> PlacedValue:
        """Return an argument of a computation as a value of this program."""
        if isinstance(leaf, PlacedValue):
            return leaf
        if isinstance(leaf, Array):
            leaf._check_usable()
            if leaf._type.parts:
                return self.joined(leaf._type, [self.lift(part) for part in leaf.members])
            value = self._input(Feed(-1, leaf, leaf._type))
            return PlacedValue(leaf.aval, leaf._type, value, None)
        return PlacedValue(aval_of(signature_of(leaf)), None, None, Constant(leaf))

    def call(self, traced: Traced | JoinedTraced, leaves: Sequence[Any]) -> list[PlacedValue]:
        """Add a node that applies `traced` to `leaves`; returns its results."""
        self._use(traced.mesh)
        arguments = [self.lift(leaf) for leaf in (*leaves, *traced.captured)]
        types = [*traced.inputs, *(array._type for array in traced.captured)]
        if isinstance(traced, JoinedTraced):
            self._given_counts += given_counts(traced.counted, arguments, traced.name)
            return self._call_joined(traced, arguments)
        computation, values = traced.computation, arguments
        self._given_counts += given_counts(traced.counted, arguments, computation.name)
        arguments = [
            gathered(self, argument, type_) if isinstance(argument, JoinedValue) else argument
            for argument, type_ in zip(arguments, types, strict=True)
        ]
        args = []
        for position, (argument, type_) in enumerate(zip(arguments, types, strict=True)):
            donated = position in computation.donated
            args.append(self.place(argument, type_, computation.name, own=donated))
        counted = tuple(self._counted(traced, values, args))
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
                self._donated[identity] = computation.name
            if arguments[position].ref is None:
                self._donated[args[position]] = computation.name
        self._artifacts[computation.artifact] = traced.artifact
        return self._results(computation, args, traced.mesh, traced.outputs, counted)

    def _call_joined(
        self, traced: JoinedTraced, arguments: Sequence[PlacedValue]
    ) -> list[PlacedValue]:
        """Add the computations of a function over several islands."""
        parts = [
            self.divided(argument, type_)
            for argument, type_ in zip(arguments, traced.types, strict=True)
        ]
        results = run(
            traced.plan,
            parts,
            _same,
            lambda code, island, given: self.call(traced.on_island(code, island), given),
        )
        for number in traced.plan.unused:
            for part in parts[number]:
                self.give(part, traced.name)
        return [
            self.joined(type_, list(map(self._in_memory_of, values, type_.parts)))
            for values, type_ in zip(results, traced.outputs, strict=True)
        ]

    def _in_memory_of(self, part: PlacedValue, type_: ArrayType) -> PlacedValue:
        """Return a result of the computations of an island, which leave all in the memory of devices."""
        return self.reshard(part, type_.sharding) if type_.sharding.memory else part

    def _results(
        self,
        computation: Computation,
        args: Sequence[ValueRef],
        mesh: OwnMesh,
        types: Sequence[ArrayType],
        counted: tuple[tuple[int, ValueRef], ...] = (),
    ) -> list[PlacedValue]:
        """Add a node of the current branch; returns its results."""
        index = self._index_of.setdefault(computation, len(self._index_of))
        branch = self.branch
        guard = None if branch is None else self._predicate(branch.predicate, mesh)
        unless = branch is not None and branch.unless
        self._nodes.append(Node(index, tuple(args), guard, unless, counted))
        self._producers.append((types, branch))
        node = len(self._nodes) - 1
        return [
            PlacedValue(type_.aval, type_, ValueRef(node, result), None)
            for result, type_ in enumerate(types)
        ]

    def _counted(
        self, traced: Traced, arguments: Sequence[PlacedValue], args: Sequence[ValueRef]
    ) -> Iterator[tuple[int, ValueRef]]:
        """Yield the positions of arguments whose rows have to move, with their counts."""
        counts = {at: one.counts for at, one in enumerate(arguments) if one.counts is not None}
        counts |= {rows: arguments[own] for rows, own in traced.counted}
        for rows, own in counts.items():
            if isinstance(arguments[rows], JoinedValue):
                continue
            wanted = traced.computation.inputs[rows]
            value = counts_of(self, args[rows], wanted, own)
            if value is not None:
                yield rows, value

    def type_of(self, value: ValueRef) -> ArrayType:
        """Return the type of a value as its producer makes it."""
        if value.node < 0:
            return self._feeds[value.index].type
        return self._producers[value.node][0][value.index]

    # --- branches ------------------------------------------------------------------------------------

    @contextmanager
    def within(self, branch: Branch) -> Iterator[None]:
        """Record what follows in a branch. What it donates is there for the other branch."""
        outer, donated = self.branch, self._donated
        self.branch, self._donated = branch, donated | (branch.donated or {})
        try:
            yield
        finally:
            branch.donated = self._donated
            self.branch, self._donated = outer, donated

    def is_of_branch(self, value: PlacedValue, branch: Branch | None) -> bool:
        """Whether a value is made in a branch, and not before it."""
        ref = value.ref
        return ref is not None and ref.node >= 0 and self._producers[ref.node][1] is branch

    def merge(
        self,
        name: str,
        branches: tuple[Branch, Branch],
        values: Sequence[tuple[ValueRef, ValueRef]],
        types: Sequence[ArrayType],
        counts: Sequence[tuple[ValueRef | None, ValueRef | None]] = (),
    ) -> list[PlacedValue]:
        """Return what the taken one of two branches has made; what either has donated is gone.

        Args:
            name: for the user.
            branches: for a true predicate, and for a false one.
            values: the results of both, as `place` returned them.
            types: of the results; both lie so.
            counts: of values that are rows of a `Ragged` and have to move, by `counts_of`.
        """
        for branch in branches:
            self._donated.update(branch.donated or {})
        at_mesh: defaultdict[OwnMesh, list[int]] = defaultdict(list)
        for position, type_ in enumerate(types):
            at_mesh[type_.sharding.mesh].append(position)
        merged: dict[int, PlacedValue] = {}
        for mesh, positions in at_mesh.items():
            here = [types[position] for position in positions]
            predicate = self._predicate(branches[0].predicate, mesh)
            halves = [values[position][half] for half in (0, 1) for position in positions]
            computation = merge(name, [type_.spec for type_ in here])
            of_rows = [
                counts[position][half] for half in (0, 1) for position in positions if counts
            ]
            counted = tuple((at, one) for at, one in enumerate(of_rows, 1) if one is not None)
            results = self._results(computation, [predicate, *halves], mesh, here, counted)
            self._halves[len(self._nodes) - 1] = branches
            merged.update(zip(positions, results, strict=True))
        return [merged[position] for position in range(len(types))]

    def _predicate(self, value: PlacedValue, mesh: OwnMesh) -> ValueRef:
        """Return the predicate for hosts of a mesh; it may be donated to a computation meanwhile."""
        if value.ref is not None:
            return value.ref
        type_ = ArrayType.of(value.aval, OwnSharding.replicated(mesh))
        return self.place(value, type_, "pw.cond")

    def reshard(self, leaf: Any, sharding: OwnSharding) -> PlacedValue:
        """Return the value with this sharding: another array, unless it has the sharding already."""
        value = self.lift(leaf)
        self._use(sharding.mesh)
        type_ = ArrayType.of(value.aval, sharding)
        if type_ is value.type:
            self._check_not_given(value, "pw.put")
            return value
        if type_.parts:
            pairs = zip(self.divided(value, type_), type_.parts, strict=True)
            return self.joined(type_, [self.reshard(part, to.sharding) for part, to in pairs])
        if isinstance(value, JoinedValue):
            value = gathered(self, value, type_)
        self._check_not_given(value, "pw.put")
        return replace(value, aval=type_.aval, type=type_, moved=object())

    def place(
        self, value: PlacedValue, type_: ArrayType, consumer: str, own: bool = False
    ) -> ValueRef:
        """Return the value for a consumer; a host value becomes an input of its own type, or `type_`."""
        self._check_not_given(value, consumer)
        if value.ref is not None:
            return value.ref
        type_ = value.type or type_
        source = value.source
        if isinstance(source, Constant):
            return self._input(Feed(-1, source.placed(type_, own), type_), own)
        return self._input(Feed(source, None, type_), own)

    def give(self, value: PlacedValue, consumer: str) -> None:
        """Donate a value that no computation takes."""
        self._check_not_given(value, consumer)
        if value.identity is not None:
            self._donated[value.identity] = consumer

    def is_given(self, value: PlacedValue) -> bool:
        """Whether a value has been donated."""
        return value.identity in self._donated

    def joined(self, type_: ArrayType, parts: Sequence[PlacedValue]) -> JoinedValue:
        """Return a value over several islands with these parts."""
        return JoinedValue(type_.aval, type_, None, None, parts=tuple(parts))

    def divided(self, value: PlacedValue, type_: ArrayType) -> list[PlacedValue]:
        """Return the parts of a value for the islands of `type_`."""
        source = value.source
        if value.type is not None:
            return divided(self, value, type_)
        if not isinstance(source, Constant):
            return self._picked(source, type_)
        return [
            PlacedValue(
                part.aval,
                None,
                None,
                source if island.is_whole else Constant(island.of(source.value)),
            )
            for island, part in zip(type_.islands, type_.parts, strict=True)
        ]

    def _picked(self, leaf: int, type_: ArrayType) -> list[PlacedValue]:
        """Return the islands' parts of a leaf; one for each leaf, island, part and spec."""
        parts = []
        for at, (island, part) in enumerate(zip(type_.islands, type_.parts, strict=True)):
            key = (Pick(leaf, at, island), part.spec)
            position = self._position_of.get(key)
            if position is None:
                self._picks.append(key[0])
                position = self._position_of[key] = -len(self._picks)
            value = self._input(Feed(position, None, part))
            parts.append(PlacedValue(part.aval, part, value, None))
        return parts

    def _check_not_given(self, value: PlacedValue, consumer: str) -> None:
        donated_to = self._donated.get(value.identity)
        if donated_to is not None:
            what = _in_words(value, self._feeds, self.describe)
            raise ArrayDeleted(
                f"{consumer!r} uses {what} of the program {self.name!r} that was donated to the computation "
                f"{donated_to!r} before; use what {donated_to!r} returned, or give it a copy, x.copy()"
            )

    def finish(self, outputs: Sequence[PlacedValue], tree: Any = None) -> Launch:
        """Register the program with these results, each with the sharding of its value."""
        grouped = [one.type for one in outputs if one.type is not None]
        types = [part for type_ in grouped for part in type_.parts or (type_,)]
        program = self.program(outputs, tree)
        if not program.nodes and not types:
            return Launch(current.runtime(), self.name, None, (), (), {}, tree)
        donated = {
            value.index: name
            for value, name in self._donated.items()
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

    def program(self, outputs: Sequence[PlacedValue], tree: Any = None) -> Program:
        """Return the program with these results, without registering it."""
        delivered = []
        parts = [
            part
            for value in outputs
            for part in (value.parts if isinstance(value, JoinedValue) else (value,))
        ]
        for value in parts:
            type_ = value.type
            assert type_ is not None
            delivered.append(Output(self.place(value, type_, "return"), type_.spec))
        counts = {at: one.counts for at, one in enumerate(outputs) if one.counts is not None}
        counts |= {rows: outputs[own] for rows, own in pairs_of(tree)}
        for rows, own in counts.items() if len(parts) == len(outputs) else ():
            ref, spec = delivered[rows].value, delivered[rows].spec
            delivered[rows] = Output(ref, spec, counts_of(self, ref, spec, own))
        donated = [one for one in self._donated if isinstance(one, ValueRef) and one.node < 0]
        nodes, delivered = self._held_back(delivered)
        return Program(
            self.name,
            tuple(self._index_of),
            tuple(nodes),
            tuple(feed.type.spec for feed in self._feeds),
            tuple(delivered),
            tuple(sorted(value.index for value in donated)),
            self._timeout_s,
        )

    def _held_back(self, outputs: list[Output]) -> tuple[list[Node], list[Output]]:
        specs = [feed.type.spec for feed in self._feeds]
        branches = [branch for _, branch in self._producers]

        def predicate(branch: Branch, value: ValueRef) -> ValueRef:
            return self._predicate(branch.predicate, self.type_of(value).sharding.mesh)

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


def _same(number: Any, island: int) -> Any:
    """Return a number as an argument of a computation on any island."""
    return number


def _in_words(
    value: PlacedValue, feeds: Sequence[Any], describe: Callable[[int], str] | None
) -> str:
    """Return the user's name of a value of a program: an argument, or a value with its type.

    Args:
        value: of the program.
        feeds: the inputs of the program, each with its leaf of the arguments.
        describe: names such a leaf, if there are names.
    """
    ref, type_ = value.ref, value.aval.str_short()
    leaf = feeds[ref.index].leaf if ref is not None and ref.node < 0 else value.source
    if describe is None or not isinstance(leaf, int) or leaf < 0:
        return f"a value {type_}"
    return f"{describe(leaf)}, {type_},"
