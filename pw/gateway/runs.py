"""What the gateway asks of the runtime, without ever blocking its event loop."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

import numpy as np

from pw.client.connection.runtime import Runtime
from pw.core.program import Output, Program, Value
from pw.core.sharding import ArraySpec
from pw.core.stablehlo import spec_of_shards
from pw.gateway.arrays import INLINE_BYTES, ProxyArray, Stored

T = TypeVar("T")

MOVES_KEPT = 256
"""Registered programs that only move an array; the one used longest ago is released first."""


class Runs:
    """Runs programs, and stores, moves and reads arrays, for one client of the gateway."""

    def __init__(self, runtime: Runtime, loop: asyncio.AbstractEventLoop) -> None:
        self.runtime = runtime
        self._loop = loop
        self._moves: OrderedDict[tuple[ArraySpec, ArraySpec], int] = OrderedDict()

    async def settled(self, future: Future[T]) -> T:
        """Return the result of a future that the session's thread settles."""
        if future.done():
            return future.result()
        here = self._loop.create_future()

        def settle() -> None:
            if here.done():
                return
            if (error := future.exception()) is not None:
                here.set_exception(error)
            else:
                here.set_result(future.result())

        future.add_done_callback(lambda _: self._loop.call_soon_threadsafe(settle))
        result: T = await here
        return result

    async def run(
        self, program: int, args: Sequence[int | bytes], specs: Sequence[ArraySpec]
    ) -> list[Stored]:
        """Run a program; waits only for a credit."""
        while (made := self.runtime.try_run(program, args, len(specs))) is None:
            credit = self._loop.create_future()
            self.runtime.when_credit(partial(self._loop.call_soon_threadsafe, _wake, credit))
            await credit
        return [
            Stored(self.runtime, number, spec_) for number, spec_ in zip(made, specs, strict=True)
        ]

    # --- what arrays consist of ----------------------------------------------------------------------

    def argument(self, array: ProxyArray, wanted: ArraySpec) -> int | bytes:
        """Return an array as an argument of a run whose input has this spec."""
        if (stored := array.stored) is not None and stored.spec == wanted:
            return stored.number
        value = array.value
        if value is not None and value.nbytes <= INLINE_BYTES and not array.used:
            array.used = True
            return _as(value, array, wanted).tobytes()
        return self.stored(array, wanted).number

    def stored(self, array: ProxyArray, wanted: ArraySpec) -> Stored:
        """Return the runtime's array of the same shards with this spec; makes it if there is none."""
        if array.stored is None and not array.pieces:
            assert array.value is not None
            number = self.runtime.upload(_as(array.value, array, wanted), wanted)
            array.consist_of(Stored(self.runtime, number, wanted))
            array.value = None
        stored = array.stored
        if stored is not None and stored.spec == wanted:
            return stored
        found = array.others.get(wanted)
        if found is None:
            found = array.others[wanted] = self._view(array, wanted)
        return found

    def own(self, array: ProxyArray) -> Stored:
        """Return the runtime's array that an array without pieces consists of; uploads its value."""
        return array.stored or self.stored(array, self.spec_of(array))

    def spec_of(self, array: ProxyArray) -> ArraySpec:
        """Return the spec in which an array is stored."""
        return spec_of_shards(
            array.shard_shape,
            array.dtype,
            self.placement(array.devices),
            is_stacked=not array.is_replicated,
        )

    placement: Callable[[tuple[int, ...]], Any]
    """Set by the owner: the placement of JAX's devices."""

    def _view(self, array: ProxyArray, wanted: ArraySpec) -> Stored:
        roots = [root for root in array.roots() if root is not array]
        sources = [self.own(root) for root in roots] or [self.own(array)]
        index = {id(root): number for number, root in enumerate(roots)}
        shards = []
        for position in range(len(array.devices)):
            root, there = array.root(position)
            shards.append((index.get(id(root), 0), there))
        if len(sources) == 1 and sources[0].spec == wanted and _is_identity(shards):
            return sources[0]
        (number,) = self.runtime.view(
            [(source.number, source.spec) for source in sources], [wanted], [tuple(shards)]
        )
        return Stored(self.runtime, number, wanted)

    async def moved(self, source: Stored, target: ArraySpec) -> Stored:
        """Copy an array to other devices."""
        key = (source.spec, target)
        program = self._moves.get(key)
        if program is None:
            body = Program("move", (), (), (source.spec,), (Output(Value(-1, 0), target),))
            program = self._moves[key] = self.runtime.register_program(body, {})
            if len(self._moves) > MOVES_KEPT:
                self.runtime.release_program(self._moves.popitem(last=False)[1])
        self._moves.move_to_end(key)
        (made,) = await self.run(program, [source.number], [target])
        return made

    # --- reading -------------------------------------------------------------------------------------

    async def shard(self, array: ProxyArray, position: int) -> np.ndarray[Any, Any]:
        """Return the value of one shard."""
        array, position = array.root(position)
        array.check()
        value: np.ndarray[Any, Any] | None = array.host_shard(position)
        if value is not None:
            return value
        stored = self.own(array)
        stored.reads += 1
        try:
            asked = self.runtime.fetch_shards(stored.number, stored.spec, (position,))
            ((_, value),) = await self.settled(asked)
        finally:
            stored.reads -= 1
        assert value is not None
        return value

    def ready(self, arrays: Sequence[ProxyArray]) -> Future[None] | None:
        """Return a future of the arrays being ready; None if they are, because they lie here."""
        wanted = []
        for array in arrays:
            array.check()
            for root in array.roots():
                if root.stored is not None:
                    wanted.append((root.stored.number, root.stored.spec))
        return self.runtime.wait(wanted) if wanted else None

    def close(self) -> None:
        """Release the programs."""
        for program in self._moves.values():
            self.runtime.release_program(program)
        self._moves.clear()


def _wake(credit: asyncio.Future[None]) -> None:
    if not credit.done():
        credit.set_result(None)


def _is_identity(shards: list[tuple[int, int]]) -> bool:
    return shards == [(0, position) for position in range(len(shards))]


def _as(value: np.ndarray[Any, Any], array: ProxyArray, wanted: ArraySpec) -> np.ndarray[Any, Any]:
    """Return a host value in the form of this spec."""
    if value.shape == wanted.shape:
        return value
    if array.is_replicated:
        return np.concatenate([value] * len(array.devices))
    return value[: array.shard_shape[0]]
