"""`Tape`: the calls of a function that is differentiated, and the walk back over them.

While the function runs in a program, each call of a `pw.jit` function with a value that depends on
what the function is differentiated by becomes its forward computation (`Derivative`), and an entry of
the tape. Then each entry, the last one first, becomes its backward computation on the same slice, if
one of its results has a cotangent. Cotangents of a value that is used several times are added where
the value lies, in the order in which they are made.

A tracer is known by its identity. The function gets new tracers for the values by which it is
differentiated, so the same value in a closure is a constant, as in JAX. Tapes nest: the computations
of an inner tape are calls on the outer one, so gradients of gradients need nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from pw.client.arrays.mesh import default_mesh
from pw.client.arrays.sharding import NamedSharding
from pw.client.arrays.signature import ArrayType, Statics
from pw.client.gradients.derivative import Derivative, is_inexact
from pw.client.trace import recorder as recorders
from pw.client.trace.jit import jit
from pw.client.trace.recorder import Recorder
from pw.client.trace.tracer import ProgramTracer
from pw.core.errors import TracingError

tree_flatten, tree_unflatten = jax.tree_util.tree_flatten, jax.tree_util.tree_unflatten


@dataclass(slots=True, eq=False)
class _Variable:
    """A value through which gradients flow, and the sum of its cotangents so far."""

    sharding: NamedSharding | None
    cotangent: Any = None


@dataclass(slots=True, eq=False)
class _Entry:
    """A call: its variables, and what makes the cotangents of its arguments of those of its results."""

    arguments: list[_Variable | None]
    results: list[_Variable | None]
    pull: Callable[[Sequence[Any]], Sequence[Any]]


class Tape(recorders.Tape):
    """The calls of one function that is differentiated."""

    def __init__(self, recorder: Recorder) -> None:
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
            pull = partial(_refuse, function)
        else:
            flows = derivative.flows
            shardings = [one.sharding for one in made]
            pull = partial(derivative.pull, lifted, kept, shardings)
        if flows:
            given_to = [self._know(one) if at in flows else None for at, one in enumerate(made)]
            self._entries.append(_Entry(arguments, given_to, pull))
        return results

    def walk_back(self, loss: ProgramTracer) -> None:
        """Add the backward computations of all calls on which the loss depends."""
        end = self._variable(loss)
        if end is not None:
            end.cotangent = np.ones((), loss.dtype)
        while self._entries:
            entry = self._entries.pop()
            cotangents = [None if one is None else one.cotangent for one in entry.results]
            if all(one is None for one in cotangents):
                continue
            for variable, found in zip(entry.arguments, entry.pull(cotangents), strict=True):
                if variable is not None and found is not None:
                    self._add(variable, found)

    def gradient(self, watched: ProgramTracer) -> ProgramTracer:
        """Return the gradient by a value, with its sharding; zeros if the loss does not depend on it."""
        found = self._variables[id(watched)][0].cotangent
        if found is None:
            sharding = watched.sharding or NamedSharding.replicated(default_mesh())
            return _zeros(ArrayType.of(watched.aval, sharding))
        if watched.sharding is None:
            return self._recorder.lift(found)
        return self._recorder.reshard(found, watched.sharding)

    def _know(self, tracer: ProgramTracer) -> _Variable:
        variable = _Variable(tracer.sharding)
        self._variables[id(tracer)] = (variable, tracer)
        return variable

    def _variable(self, tracer: ProgramTracer) -> _Variable | None:
        known = self._variables.get(id(tracer))
        return None if known is None else known[0]

    def _add(self, variable: _Variable, found: ProgramTracer) -> None:
        if variable.cotangent is None:
            variable.cotangent = found
            return
        before = variable.cotangent
        sharding = variable.sharding or before.sharding
        total, more = (self._recorder.reshard(one, sharding) for one in (before, found))
        variable.cotangent = total + more


def _refuse(function: Any, cotangents: Sequence[Any]) -> NoReturn:
    raise TracingError(f"a gradient flows through {function!r}, which {function.why_no_gradient}")


def _zeros(type_: ArrayType) -> ProgramTracer:
    """Return zeros of a type, which its devices make."""
    compiled = type_.sharding.mesh.slice.compiled
    key = ("zeros", type_)
    zeros = compiled.get(key)
    if zeros is None:

        def make_zeros() -> Any:
            return jnp.zeros(type_.aval.shape, type_.aval.dtype)

        zeros = compiled.add(
            key, jit(make_zeros, mesh=type_.sharding.mesh, out_shardings=type_.sharding)
        )
    made: ProgramTracer = zeros()
    return made
