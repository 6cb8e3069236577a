"""`Tape`: the calls of a function that is differentiated, and the walk back over them.

While the function runs in a program, each call of a `pw.jit` function with a value that depends on
what the function is differentiated by becomes its forward computation (`Derivative`), and an entry of
the tape. Then each entry, the last one first, becomes its backward computation on the same slice, if
one of its results has a cotangent. Cotangents of a value that is used several times are added where
the value lies, in the order in which they are made.

A tracer is known by its identity. The function gets new tracers for the values by which it is
differentiated, so the same value in a closure is a constant, as in JAX. Tapes nest: the computations
of an inner tape are calls on the outer one, so gradients of gradients need nothing else.

A call in a branch of a `pw.cond` has its backward computation in the same branch. The cotangents that the two
branches have for a value from outside are merged where they leave the branches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import numpy as np

from pw.client.arrays.mesh import default_mesh
from pw.client.arrays.ragged import Ragged
from pw.client.arrays.sharding import NamedSharding
from pw.client.arrays.signature import ArrayType, Statics
from pw.client.gradients.derivative import Derivative, is_inexact
from pw.client.trace import tape as tapes
from pw.client.trace.branch import Branch
from pw.client.trace.branches import merged
from pw.client.trace.jit import jit
from pw.client.trace.joined.apart import apart, together
from pw.client.trace.python_calls import refuse_gradient
from pw.client.trace.recorder import ProgramRecorder
from pw.client.trace.tracer import ProgramTracer
from pw.client.trace.zeros import zeros

tree_flatten, tree_unflatten = jax.tree_util.tree_flatten, jax.tree_util.tree_unflatten


@dataclass(slots=True, eq=False)
class _Variable:
    """A value through which gradients flow, and the sum of its cotangents so far."""

    sharding: NamedSharding | None
    home: Branch | None
    """The branch that makes it."""
    cotangents: dict[Branch | None, Any] = field(default_factory=dict)
    """For each branch whose calls use it, the sum so far: an array, or a `Ragged`, of whose rows those that
    count have to move."""


@dataclass(slots=True, eq=False)
class _Entry:
    """A call: its variables, and what makes the cotangents of its arguments of those of its results."""

    arguments: list[_Variable | None]
    results: list[_Variable | None]
    pull: Callable[[Sequence[Any]], Sequence[Any]]
    branch: Branch | None


class Tape(tapes.CallTape):
    """The calls of one function that is differentiated."""

    def __init__(self, recorder: ProgramRecorder) -> None:
        self._recorder = recorder
        self.outer = recorder.tape
        self._entries: list[_Entry] = []
        self._variables: dict[int, tuple[_Variable, ProgramTracer]] = {}
        """By the identity of the tracer, which therefore has to stay."""

    def watch(self, leaf: Any) -> ProgramTracer:
        """Return a value by which the function is differentiated."""
        source = self._recorder.lift(leaf)
        made = replace(source)
        if self.outer is not None:
            self.outer.alias(made, source)
        self._know(made)
        return made

    def takes(self, leaves: Sequence[Any]) -> bool:
        """Whether gradients flow through one of the values."""
        return any(id(leaf) in self._variables for leaf in leaves)

    def alias(self, made: ProgramTracer, source: ProgramTracer) -> None:
        """Say that two tracers are the same value."""
        known = self._variables.get(id(source))
        if known is not None:
            self._variables[id(made)] = (known[0], made)
        if self.outer is not None:
            self.outer.alias(made, source)

    def call(self, function: Any, key: Any, leaves: Sequence[Any]) -> Any:
        """Add a call of a `pw.jit` function; returns its results in their tree."""
        tree, _, statics, _, _ = key
        lifted = [self._recorder.lift(leaf) for leaf in leaves]
        arguments = [self._variable(leaf) for leaf in lifted]
        active = [at for at, one in enumerate(arguments) if one is not None]
        derivative = None
        if not function.why_no_gradient:
            derivative = function.derivative(key, tuple(active), Derivative)
        with self._recorder.taping(self.outer):
            if derivative is not None and derivative.flows:
                results, kept = derivative.forward(lifted)
            else:
                given, named = tree_unflatten(tree, lifted)
                given, named = Statics.restore(given, named, statics)
                results, kept = function(*given, **named), []
        made = tree_flatten(results)[0]
        if derivative is None:
            flows = {at for at, one in enumerate(made) if is_inexact(one.aval)}
            pull = partial(refuse_gradient, function=function)
        else:
            flows = derivative.flows
            shardings = [one.sharding for one in made]
            pull = partial(derivative.pull, lifted, kept, shardings)
        if flows:
            given_to = [self._know(one) if at in flows else None for at, one in enumerate(made)]
            self._entries.append(_Entry(arguments, given_to, pull, self._recorder.branch))
        return results

    def merge(
        self,
        branches: tuple[Branch, Branch],
        sides: Sequence[Sequence[ProgramTracer]],
        results: Sequence[ProgramTracer],
    ) -> None:
        """Say which values of two branches were merged."""
        sources = [[self._variable(one) for one in side] for side in sides]
        flows = [any(two) for two in zip(*sources, strict=True)]
        given_to = [
            self._know(one) if flow else None for one, flow in zip(results, flows, strict=True)
        ]
        if any(flows):
            self._entries += [
                _Entry(own, given_to, list, branch)
                for branch, own in zip(branches, sources, strict=True)
            ]
        if self.outer is not None:
            self.outer.merge(branches, sides, results)

    def divide(self, whole: ProgramTracer, parts: Sequence[ProgramTracer]) -> None:
        """Say which values are the parts that islands have of a value."""
        source = self._variable(whole)
        if source is not None:
            types = whole._type, [part._type for part in parts]
            pull = partial(self._put_together, *types)
            given_to: list[_Variable | None] = [self._know(part) for part in parts]
            self._entries.append(_Entry([source], given_to, pull, self._recorder.branch))
        if self.outer is not None:
            self.outer.divide(whole, parts)

    def join(self, parts: Sequence[ProgramTracer], whole: ProgramTracer) -> None:
        """Say which value was put together from parts that islands have."""
        sources = [self._variable(part) for part in parts]
        if any(sources):
            pull = partial(self._take_apart, whole.sharding)
            self._entries.append(_Entry(sources, [self._know(whole)], pull, self._recorder.branch))
        if self.outer is not None:
            self.outer.join(parts, whole)

    def _put_together(self, whole: Any, types: Sequence[Any], cotangents: Sequence[Any]) -> Any:
        own = [
            zeros(type_) if one is None else self._moved(one, type_.sharding)
            for one, type_ in zip(cotangents, types, strict=True)
        ]
        return [together(self._recorder, own, whole)]

    def _take_apart(self, sharding: Any, cotangents: Sequence[Any]) -> Any:
        return apart(self._recorder, self._moved(cotangents[0], sharding), sharding)

    def walk_back(self, loss: ProgramTracer) -> None:
        """Add the backward computations of all calls on which the loss depends."""
        end = self._variable(loss)
        if end is not None:
            end.cotangents[end.home] = np.ones((), loss.dtype)
        while self._entries:
            entry = self._entries.pop()
            cotangents = [None if one is None else self._total(one) for one in entry.results]
            if all(one is None for one in cotangents):
                continue
            with self._within(entry.branch):
                for variable, found in zip(entry.arguments, entry.pull(cotangents), strict=True):
                    if variable is not None and found is not None:
                        self._add(variable, found)

    def gradient(self, watched: ProgramTracer) -> ProgramTracer:
        """Return the gradient by a value, with its sharding; zeros if the loss does not depend on it."""
        found = self._total(self._variables[id(watched)][0])
        if found is None:
            sharding = watched.sharding or NamedSharding.replicated(default_mesh())
            return zeros(ArrayType.of(watched.aval, sharding))
        if watched.sharding is None:
            return self._recorder.lift(found.rows if isinstance(found, Ragged) else found)
        return self._moved(found, watched.sharding)

    def _know(self, tracer: ProgramTracer) -> _Variable:
        variable = _Variable(tracer.sharding, self._recorder.branch)
        self._variables[id(tracer)] = (variable, tracer)
        return variable

    def _variable(self, tracer: ProgramTracer) -> _Variable | None:
        known = self._variables.get(id(tracer))
        return None if known is None else known[0]

    def _add(self, variable: _Variable, found: ProgramTracer) -> None:
        branch = self._recorder.branch
        before = variable.cotangents.get(branch)
        if before is None:
            variable.cotangents[branch] = found
            return
        sharding = variable.sharding or _sharding_of(before)
        total, more = (self._moved(one, sharding) for one in (before, found))
        variable.cotangents[branch] = total + more

    def _moved(self, cotangent: Any, sharding: NamedSharding) -> ProgramTracer:
        """Return a cotangent with a sharding; rows behind those that count become zeros where they move."""
        if not isinstance(cotangent, Ragged):
            return self._recorder.reshard(cotangent, sharding)
        if cotangent.rows.sharding == sharding:
            rows: ProgramTracer = cotangent.rows
            return rows
        received: ProgramTracer = _receive(sharding)(cotangent)
        return received

    def _within(self, branch: Branch | None) -> AbstractContextManager[Any]:
        if branch is None or branch is self._recorder.branch:
            return nullcontext()
        return self._recorder.within(branch)

    def _total(self, variable: _Variable) -> Any:
        """Return the sum of the cotangents of a value; those of branches that use it are merged."""
        found = variable.cotangents
        while used := [one for one in found if one is not None and one is not variable.home]:
            self._leave(variable, max(used, key=_depth))
        return found.get(variable.home)

    def _leave(self, variable: _Variable, branch: Branch) -> None:
        """Merge the cotangents that a branch and the other one have for a value from outside of them."""
        assert branch.other is not None
        branches = (branch.other, branch) if branch.unless else (branch, branch.other)
        found = [variable.cotangents.pop(one, None) for one in branches]
        known = next(one for one in found if one is not None)
        rows = known.rows if isinstance(known, Ragged) else known
        type_ = ArrayType.of(rows.aval, variable.sharding or rows.sharding)
        made, counts = [], []
        for one, own in zip(branches, found, strict=True):
            with self._within(one):
                value: Any = zeros(type_) if own is None else own
            is_ragged = isinstance(value, Ragged)
            made.append([value.rows if is_ragged else value])
            counts.append([value.counts if is_ragged else None])
        with self._within(branch.outer):
            (total,) = merged(self._recorder, "cotangent", branches, made, counts, [type_])
            self._add(variable, total)


def _sharding_of(cotangent: Any) -> Any:
    return cotangent.rows.sharding if isinstance(cotangent, Ragged) else cotangent.sharding


def _depth(branch: Branch) -> int:
    return branch.depth


def _receive(sharding: NamedSharding) -> Any:
    """Return the computation that takes a `Ragged` and returns its rows with a sharding."""
    mesh = sharding.mesh

    def rows(ragged: Ragged) -> Any:
        return ragged.rows

    def make() -> Any:
        lies = Ragged(sharding, NamedSharding.replicated(mesh))
        return jit(rows, mesh=mesh, in_shardings=(lies,), out_shardings=sharding)

    return mesh.slice.compiled.made(("rows", sharding), make)
