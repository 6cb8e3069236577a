"""`Bursts`: iterations of a loop that is called alone: computations on one mesh, or programs.

Both pass the carry on unchanged once the predicate is false, so they can be launched ahead of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from pw.client.arrays.mesh import OwnMesh
from pw.client.equations.calls import program_trace
from pw.client.functions.jit import jit
from pw.client.functions.program import program
from pw.client.functions.transfer import put
from pw.client.loops.carry import Carry, as_type
from pw.client.loops.loop import Loop
from pw.client.loops.native import iterated

State = list[Any]
"""The predicate, and the leaves of the carry."""


class Bursts:
    """The computations or programs of a loop that the client drives."""

    def __init__(self, loop: Loop, carry: Carry, signature: Sequence[Any]) -> None:
        self._loop, self._carry = loop, carry
        self._from_caller = [at for at in sorted(carry.donated) if signature[at] is carry.types[at]]
        """Positions of the leaves that the first burst of a program takes over from the caller."""
        mesh = carry.mesh
        self.sizes = (1, 4, 16) if mesh is None else ()
        """Possible numbers of iterations in a burst; empty if there may be any number."""
        self.iterations = 1
        """Number of iterations in the next burst."""
        self._programs: dict[int, Callable[..., Any]] = {}
        self._start = self._start_of_program() if mesh is None else self._start_on(mesh)
        self._burst = None if mesh is None else self._burst_on(mesh)

    def start(self, leaves: Sequence[Any]) -> State:
        """Return arrays that are the loop's own, and the first predicate."""
        state: State = self._start(*leaves)
        if self._burst is None:
            for at in self._from_caller:
                state.insert(1 + at, leaves[at])
        return state

    def burst(self, count: int, state: State) -> State:
        """Launch up to `count` iterations, which take over the carry."""
        if self._burst is not None:
            after: State = self._burst(count, *state)
            return after
        if count not in self._programs:
            self._programs[count] = self._program(count)
        after = list(state)
        after[0], varying = self._programs[count](*state)
        for at, leaf in zip(self._carry.varying, varying, strict=True):
            after[1 + at] = leaf
        return after

    # --- on one mesh -----------------------------------------------------------------------------------

    def _start_on(self, mesh: OwnMesh) -> Callable[..., Any]:
        loop, types = self._loop, self._carry.types

        def start(*leaves: Any) -> State:
            own = list(map(as_type, leaves, types))
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

    def _burst_on(self, mesh: OwnMesh) -> Callable[..., Any]:
        loop, types = self._loop, self._carry.types

        def goes_on(state: Any) -> Any:
            left, more, _ = state
            return jnp.logical_and(more, left > 0)

        def step(state: Any) -> Any:
            left, _, leaves = state
            leaves = list(map(as_type, loop.step(leaves), types))
            return left - 1, jnp.asarray(loop.goes_on(leaves)), leaves

        def burst(limit: Any, more: Any, *leaves: Any) -> State:
            first = jnp.asarray(limit, jnp.int32), more, list(leaves)
            _, more, last = jax.lax.while_loop(goes_on, step, first)
            return [more, *last]

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
        loop, carry, from_caller = self._loop, self._carry, self._from_caller

        def start(*leaves: Any) -> State:
            own = [
                put(leaf, type_.sharding) for leaf, type_ in zip(leaves, carry.types, strict=True)
            ]
            more = put(loop.goes_on(own), carry.predicate)
            return [more, *[leaf for at, leaf in enumerate(own) if at not in from_caller]]

        start.__name__ = loop.name
        return program(start, donate_argnums=tuple(carry.donated - set(from_caller)))

    def _program(self, count: int) -> Callable[..., Any]:
        loop, carry = self._loop, self._carry

        def burst(*state: Any) -> tuple[Any, list[Any]]:
            trace = program_trace()
            assert trace is not None
            more, *leaves = iterated(trace, loop, count, state[1:], state)
            return more, [leaves[at] for at in carry.varying]

        burst.__name__ = loop.name
        return program(burst, donate_argnums=tuple(1 + at for at in carry.varying))
