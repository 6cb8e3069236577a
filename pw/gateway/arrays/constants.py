"""Small host values that come again: JAX sends the scalars of eager operations with each operation.

The second time that a run uses a value it is uploaded, and all arrays of this value are that array from then
on: arrays of the runtime never change. It is released when no run has used it for a while.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict

from pw.gateway.arrays.arrays import ProxyArray, ProxyConstant

CONSTANTS = 256
"""Most values that are known at once; the one that came longest ago is forgotten first."""
CONSTANT_BYTES = 256
UNUSED_S = 1.0
"""Seconds after its last use until a value is released, or at most twice as many."""

_Key = tuple[bytes, str, tuple[int, ...], tuple[int, ...], str, bool]


class Constants:
    """The small host values of one client.

    Args:
        loop: the gateway's loop.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._constants: OrderedDict[_Key, ProxyConstant] = OrderedDict()
        self._sweeping: asyncio.TimerHandle | None = None

    def add(self, array: ProxyArray) -> None:
        """Let an array of a small host value share what others of this value are stored as."""
        value = array.value
        if value is None or value.nbytes > CONSTANT_BYTES:
            return
        key = (
            value.tobytes(),
            array.dtype,
            array.shard_shape,
            array.devices,
            array.memory,
            array.is_replicated,
        )
        constants = self._constants
        array.constant = constants.get(key)
        if array.constant is None:
            array.constant = constants[key] = ProxyConstant()
            if len(constants) > CONSTANTS:
                constants.popitem(last=False)[1].release()
        else:
            constants.move_to_end(key)
        if self._sweeping is None:
            self._sweeping = self._loop.call_later(UNUSED_S, self._sweep)

    def _sweep(self) -> None:
        """Release what no run has used since the last time."""
        for constant in self._constants.values():
            if constant.is_recent:
                constant.is_recent = False
            else:
                constant.release()
        kept = any(constant.stored for constant in self._constants.values())
        self._sweeping = self._loop.call_later(UNUSED_S, self._sweep) if kept else None

    def islands_changed(self, event: object) -> None:
        """Forget all values: those that were to go to an island while it was away have failed."""
        self._forget()

    def clear(self) -> None:
        """Forget all values, and sweep no more."""
        if self._sweeping is not None:
            self._sweeping.cancel()
        self._forget()

    def _forget(self) -> None:
        for constant in self._constants.values():
            constant.release()
        self._constants.clear()
