"""Iterations of a loop, as one computation on one mesh, or as guarded computations of a program.

Both forms pass the carry on unchanged once the predicate is false, so they can be launched ahead of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from pw.client.arrays.mesh import Mesh
from pw.client.loops.carry import Carry, Loop, as_type
from pw.client.trace.branches import recorded
from pw.client.trace.jit import jit
from pw.client.trace.program import recorded_program
from pw.client.trace.recorder import ProgramRecorder
from pw.client.trace.recording import recording
from pw.client.trace.wrapped import name_of
from pw.core.errors import ArrayDeleted

State = list[Any]
"""The predicate, and the leaves of the carry."""


def bounded(loop: Loop, carry: Carry, limit: Any, more: Any, leaves: Sequence[Any]) -> State:
    """Return the state after at most `limit` iterations, in a function that JAX traces."""

    def goes_on(state: Any) -> Any:
        number, more, _ = state
        return jnp.logical_and(more, number < limit)

    def step(state: Any) -> Any:
        number, _, leaves = state
        pairs = zip(loop.step(leaves), carry.types, strict=True)
        made = [as_type(leaf, type_) for leaf, type_ in pairs]
        return number + 1, jnp.asarray(loop.goes_on(made)), made

    first = (jnp.zeros((), jnp.int32), jnp.asarray(more), list(leaves))
    _, more, leaves = jax.lax.while_loop(goes_on, step, first)
    return [more, *leaves]


def guarded(loop: Loop, carry: Carry, count: int, state: Sequence[Any]) -> State:
    """Record `count` iterations, each behind the predicate that the one before has made."""
    varying = carry.varying
    shardings = [carry.predicate, *[carry.types[at].sharding for at in varying]]
    more, *leaves = state

    def whole(changed: Sequence[Any]) -> list[Any]:
        found = list(leaves)
        for at, leaf in zip(varying, changed, strict=True):
            found[at] = leaf
        return found

    def step(*changed: Any) -> State:
        made = loop.step(whole(changed))
        return [loop.goes_on(made), *[made[at] for at in varying]]

    def stay(*changed: Any) -> State:
        return [False, *changed]

    step.__name__ = name_of(loop.body_fun)
    for _ in range(count):
        changed = [leaves[at] for at in varying]
        more, *changed = recorded(
            _recorder(), more, (step, stay), changed, shardings, is_iteration=True
        )
        leaves = whole(changed)
    return [more, *leaves]


def placed(recorder: ProgramRecorder, carry: Carry, leaves: Sequence[Any]) -> list[Any]:
    """Return the leaves of the first carry where the loop wants them."""
    pairs = zip(leaves, carry.types, strict=True)
    return [recorder.reshard(leaf, type_.sharding) for leaf, type_ in pairs]


class Bursts:
    """The computations or programs of a loop that the client drives."""

    def __init__(self, loop: Loop, carry: Carry, signature: Sequence[Any]) -> None:
        self._loop, self._carry = loop, carry
        self._taken = [at for at in sorted(carry.donated) if signature[at] is carry.types[at]]
        """Leaves of a program that its first burst takes from the caller."""
        mesh = carry.mesh
        self.sizes = (1, 4, 16) if mesh is None else ()
        """The possible numbers of iterations in a burst; empty if there may be any number."""
        self.iterations = 1
        """How many iterations the next burst has."""
        self._programs: dict[int, Callable[..., Any]] = {}
        self._start = self._start_of_program() if mesh is None else self._start_on(mesh)
        self._burst = None if mesh is None else self._portion_on(mesh)

    def start(self, leaves: Sequence[Any]) -> State:
        """Return arrays that are the loop's own, and the first predicate."""
        state: State = self._start(*leaves)
        if self._burst is None:
            for at in self._taken:
                state.insert(1 + at, leaves[at])
        return state

    def burst(self, count: int, state: State) -> State:
        """Launch up to `count` iterations, which take over the carry."""
        if self._burst is not None:
            made: State = self._burst(count, *state)
            return made
        run = self._programs.get(count)
        if run is None:
            run = self._programs[count] = self._program(count)
        varying, whole = self._carry.varying, list(state)
        whole[0], changed = run(state[0], *state[1:])
        for at, leaf in zip(varying, changed, strict=True):
            whole[1 + at] = leaf
        return whole

    # --- on one mesh -----------------------------------------------------------------------------------

    def _start_on(self, mesh: Mesh) -> Callable[..., Any]:
        loop, types = self._loop, self._carry.types

        def start(*leaves: Any) -> State:
            own = [as_type(leaf, type_) for leaf, type_ in zip(leaves, types, strict=True)]
            return [jnp.asarray(loop.goes_on(own)), *own]

        start.__name__ = loop.name
        shardings = [type_.sharding for type_ in types]
        return jit(
            start,
            mesh=mesh,
            in_shardings=tuple(shardings),
            out_shardings=[PartitionSpec(), *shardings],
            donate_argnums=tuple(self._carry.donated),
        )

    def _portion_on(self, mesh: Mesh) -> Callable[..., Any]:
        loop, carry, types = self._loop, self._carry, self._carry.types

        def burst(limit: Any, more: Any, *leaves: Any) -> State:
            return bounded(loop, carry, limit, more, leaves)

        burst.__name__ = loop.name
        shardings = [type_.sharding for type_ in types]
        return jit(
            burst,
            mesh=mesh,
            in_shardings=(PartitionSpec(), PartitionSpec(), *shardings),
            out_shardings=[PartitionSpec(), *shardings],
            donate_argnums=tuple(range(2, 2 + len(types))),
        )

    # --- on several ------------------------------------------------------------------------------------

    def _start_of_program(self) -> Callable[..., Any]:
        loop, carry, taken = self._loop, self._carry, self._taken

        def start(*leaves: Any) -> State:
            recorder = _recorder()
            own = placed(recorder, carry, leaves)
            more = recorder.reshard(loop.goes_on(own), carry.predicate)
            _take_over(recorder, [leaves[at] for at in carry.donated if at not in taken], loop.name)
            return [more, *[leaf for at, leaf in enumerate(own) if at not in taken]]

        start.__name__ = loop.name
        return recorded_program(start)

    def _program(self, count: int) -> Callable[..., Any]:
        loop, carry = self._loop, self._carry

        def burst(*state: Any) -> tuple[Any, list[Any]]:
            more, *leaves = guarded(loop, carry, count, state)
            changed = [leaves[at] for at in carry.varying]
            _take_over(_recorder(), [state[1 + at] for at in carry.varying], loop.name)
            return more, changed

        burst.__name__ = loop.name
        return recorded_program(burst)


def _recorder() -> ProgramRecorder:
    recorder = recording()
    assert recorder is not None
    return recorder


def _take_over(recorder: ProgramRecorder, leaves: Sequence[Any], name: str) -> None:
    """Donate leaves, unless they are already donated."""
    for leaf in leaves:
        with suppress(ArrayDeleted):
            recorder.give(recorder.lift(leaf), name)
