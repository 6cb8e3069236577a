"""What the gateway asks of the runtime, without ever blocking its event loop."""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

import numpy as np
from msgspec.structs import replace

from pw.client.connection.runtime import Runtime
from pw.core.messages import INLINE_BYTES
from pw.core.programs.program import Output, Program, ValueRef
from pw.core.programs.stablehlo import spec_of_shards
from pw.core.sharding import ArraySpec, Placement
from pw.gateway.arrays.arrays import ProxyArray, Stored, memory_of
from pw.gateway.arrays.waits import Waits
from pw.gateway.protocol import statuses

T = TypeVar("T")
Came = Callable[[np.ndarray[Any, Any] | None, BaseException | None], None]
"""Takes a value, or why there is none."""

MOVES_KEPT = 256
"""Registered programs that only move an array; the one used longest ago is released first."""


class Runs:
    """Runs programs, and stores, moves and reads arrays, for one client of the gateway.

    Args:
        runtime: the session.
        loop: the gateway's loop.
        placement: returns the placement of JAX's devices.
        waits: shows what the script waits for.
    """

    def __init__(
        self,
        runtime: Runtime,
        loop: asyncio.AbstractEventLoop,
        placement: Callable[[tuple[int, ...]], Placement],
        waits: Waits,
    ) -> None:
        self.runtime = runtime
        self._placement = placement
        self._waits = waits
        self._loop = loop
        self._thread = threading.get_ident()
        self._moves: OrderedDict[tuple[tuple[ArraySpec, ...], tuple[ArraySpec, ...]], int] = (
            OrderedDict()
        )

    def then(self, future: Future[Any], call: Callable[[Future[Any]], None]) -> None:
        """Call `call` on the loop when a future of the session is settled."""

        def settled(ended: Future[Any]) -> None:  # names no `future`: a cycle would keep its result
            if threading.get_ident() == self._thread:
                call(ended)
            else:
                self._loop.call_soon_threadsafe(call, ended)

        future.add_done_callback(settled)

    async def settled(self, future: Future[T]) -> T:
        """Return the result of a future of the session."""
        here = self._loop.create_future()

        def settle(_: object) -> None:
            if not here.done():
                here.set_result(None)

        self.then(future, settle)
        await here
        return future.result()

    async def waited(self, future: Future[T]) -> T:
        """Return the result of a future for which the script waits."""
        end = self._waits.begin(future)
        try:
            return await self.settled(future)
        finally:
            end()

    async def credit(self) -> None:
        """Wait until a run can be sent."""
        while not self.runtime.has_credit():
            credit = self._loop.create_future()
            self.runtime.when_credit(partial(self._loop.call_soon_threadsafe, _wake, credit))
            await credit

    def run(
        self, program: int, args: Sequence[int | bytes], specs: Sequence[ArraySpec]
    ) -> list[Stored]:
        """Run a program; call it with a credit, so that it does not wait."""
        runtime = self.runtime
        numbers = runtime.run(program, args, len(specs))
        return [Stored(runtime, number, one) for number, one in zip(numbers, specs, strict=True)]

    # --- what arrays consist of ----------------------------------------------------------------------

    def argument(self, array: ProxyArray, wanted: ArraySpec) -> int | bytes | None:
        """Return an array as an argument for an input of this spec; None if it needs a view or a copy."""
        if (stored := array.stored) is not None:
            if stored.spec == wanted:
                return stored.number
        elif (value := array.value) is not None:
            if memory_of(array.memory) != wanted.memory:
                return None
            if value.nbytes <= INLINE_BYTES and not array.used:  # a second run needs an upload
                array.used = True
                shared = None if array.constant is None else self._shared(array, wanted)
                return _as(value, array, wanted).tobytes() if shared is None else shared
            return self.stored(array, wanted).number
        other = array.views.get(wanted)
        return None if other is None else other.number

    def _shared(self, array: ProxyArray, wanted: ArraySpec) -> int | None:
        """Return the array that all of this constant share; None if it is not used again."""
        constant = array.constant
        assert constant is not None
        constant.is_recent = True
        if not constant.was_used:
            constant.was_used = True
            return None
        if constant.stored is None:
            constant.keep(self.stored(array, wanted))
            assert constant.stored is not None
        elif constant.stored.spec == wanted:
            array.consist_of(constant.stored)
            array.value = None
        else:
            return None
        return constant.stored.number

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
        view = array.views.get(wanted)
        if view is None:
            view = array.views[wanted] = self._view(array, wanted)
        return view

    def own(self, array: ProxyArray) -> Stored:
        """Return the runtime's array that an array without pieces consists of; uploads its value."""
        return array.stored or self.stored(array, self.spec_of(array))

    def spec_of(self, array: ProxyArray) -> ArraySpec:
        """Return the spec in which an array is stored."""
        return spec_of_shards(
            array.shard_shape,
            array.dtype,
            self._placement(array.devices),
            is_stacked=not array.is_replicated,
            memory=memory_of(array.memory),
        )

    async def fitting(self, array: ProxyArray, wanted: ArraySpec) -> Stored:
        """Return the runtime's array of the same shards with this spec, also in another memory."""
        await self.credit()
        if memory_of(array.memory) == wanted.memory:
            return self.stored(array, wanted)
        here = self.stored(array, replace(wanted, memory=memory_of(array.memory)))
        await self.credit()
        (moved,) = self.moved([here], [wanted])
        return moved

    def _view(self, array: ProxyArray, wanted: ArraySpec) -> Stored:
        roots = [root for root in array.roots() if root is not array]
        sources = [self.own(root) for root in roots] or [self.own(array)]
        index = {id(root): number for number, root in enumerate(roots)}
        shards = []
        for position in range(len(array.devices)):
            root, there = array.root(position)
            shards.append((index.get(id(root), 0), there))
        identity = [(0, position) for position in range(len(shards))]
        if len(sources) == 1 and sources[0].spec == wanted and shards == identity:
            return sources[0]
        (number,) = self.runtime.view(
            [(source.number, source.spec) for source in sources], [wanted], [tuple(shards)]
        )
        return Stored(self.runtime, number, wanted)

    def moved(self, sources: Sequence[Stored], targets: Sequence[ArraySpec]) -> list[Stored]:
        """Copy arrays to other devices; call it with a credit."""
        key = (tuple(source.spec for source in sources), tuple(targets))
        program = self._moves.get(key)
        if program is None:
            outputs = tuple(Output(ValueRef(-1, at), spec) for at, spec in enumerate(targets))
            body = Program("device_put", (), (), key[0], outputs)
            program = self._moves[key] = self.runtime.register_program(body, {})
            if len(self._moves) > MOVES_KEPT:
                self.runtime.release_program(self._moves.popitem(last=False)[1])
        self._moves.move_to_end(key)
        return self.run(program, [source.number for source in sources], targets)

    # --- reading -------------------------------------------------------------------------------------

    def shard(self, array: ProxyArray, position: int) -> Awaitable[np.ndarray[Any, Any]]:
        """Begin to read one shard: later requests may delete it. Returns what gets its value."""
        value = self._begin_to_read(array, position)
        return self._fetched(value) if isinstance(value, Future) else self._here(value)

    def read(self, array: ProxyArray, position: int, came: Came) -> None:
        """Do as `shard`; call `came` with the value or the error, as soon as it comes."""
        value = self._begin_to_read(array, position)
        if not isinstance(value, Future):
            came(value, None)
            return
        end = self._waits.begin(value)

        def settled(ended: Future[Any]) -> None:  # names no `value`: it would keep itself
            end()
            error = ended.exception()
            came(ended.result()[0][1] if error is None else None, error)

        self.then(value, settled)

    def _begin_to_read(
        self, array: ProxyArray, position: int
    ) -> np.ndarray[Any, Any] | Future[Any]:
        array, position = array.root(position)
        if array.error is not None:
            raise array.error
        if array.is_dead(position):
            raise statuses.deleted()
        value = array.host_shard(position)
        if value is not None:
            return value
        stored = self.own(array)
        stored.is_read()
        if stored.ahead is not None and not position:
            return stored.ahead
        return self._fetch(stored, position)

    def here(self, array: ProxyArray) -> np.ndarray[Any, Any] | None:
        """Return the first shard if it is in this process; None if it must be awaited, or cannot be read."""
        array, position = array.root(0)
        if array.error is not None or array.is_dead(position):
            return None
        value = array.host_shard(position)
        stored = array.stored
        if value is not None or position or stored is None:
            return value
        ahead = stored.ahead
        if ahead is None or not ahead.done() or ahead.exception() is not None:
            return None
        stored.is_read()
        ((_, value),) = ahead.result()
        fetched: np.ndarray[Any, Any] = value
        return fetched

    def fetch_ahead(self, stored: Stored) -> None:
        """Begin to fetch the first shard of a result before the script asks."""
        stored.ahead = self._fetch(stored, 0)

    def hurry(self) -> None:
        """Send what the session has been asked for at once: the script waits for it."""
        self.runtime.thread.hurry()

    def _fetch(self, stored: Stored, position: int) -> Future[Any]:
        asked = self.runtime.fetch_shards(stored.number, stored.spec, (position,))
        stored.reads += 1
        self.then(asked, partial(_fetch_ended, [stored]))
        return asked

    async def _here(self, value: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return value

    async def _fetched(self, asked: Future[Any]) -> np.ndarray[Any, Any]:
        ((_, value),) = await self.waited(asked)
        fetched: np.ndarray[Any, Any] = value
        return fetched

    def ready(self, arrays: Sequence[ProxyArray]) -> Future[None] | None:
        """Return a future of the arrays being ready; None if they are, because they lie here."""
        wanted = []
        for array in arrays:
            array.check()
            wanted += [root.stored for root in array.roots() if root.stored is not None]
        if len(wanted) == 1:
            wanted[0].is_awaited()
        return self.runtime.wait([(one.number, one.spec) for one in wanted]) if wanted else None

    def close(self) -> None:
        """Release the programs."""
        for program in self._moves.values():
            self.runtime.release_program(program)
        self._moves.clear()


def _wake(credit: asyncio.Future[None]) -> None:
    if not credit.done():
        credit.set_result(None)


def _fetch_ended(read: list[Stored], _: object) -> None:
    read.pop().reads -= 1  # the future keeps this call, and `read` with it


def _as(value: np.ndarray[Any, Any], array: ProxyArray, wanted: ArraySpec) -> np.ndarray[Any, Any]:
    """Return a host value in the form of this spec."""
    if value.shape == wanted.shape:
        return value
    if array.is_replicated:
        return np.concatenate([value] * len(array.devices))
    return value[: array.shard_shape[0]]
