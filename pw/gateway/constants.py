"""Small host values that come again: JAX sends the scalars of eager operations with each operation.

The second time that a value comes it is uploaded, and all arrays of this value are that array from then on:
arrays of the runtime never change.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from typing import Any

import numpy as np

from pw.gateway.arrays import INLINE_BYTES, ProxyArray
from pw.gateway.runs import Runs

CONSTANTS = 256
"""Values that are known at once; the one that came longest ago is forgotten first."""
CONSTANT_BYTES = 256

_Key = tuple[bytes, str, tuple[int, ...], tuple[int, ...], str, bool]


class Constants:
    """The small host values of one client."""

    def __init__(self, runs: Runs) -> None:
        self._runs = runs
        self._known: OrderedDict[_Key, ProxyArray | None] = OrderedDict()
        """Of each value an array that nothing deletes; None if it has come once."""

    def place(self, array: ProxyArray) -> None:
        """Let an array of a host value be stored, if it is large or has come before."""
        value = array.value
        assert value is not None
        if value.nbytes > INLINE_BYTES:
            self._runs.own(array)
        elif value.nbytes <= CONSTANT_BYTES:
            self._share(array, value)

    def _share(self, array: ProxyArray, value: np.ndarray[Any, Any]) -> None:
        key = (
            value.tobytes(),
            array.dtype,
            array.shard_shape,
            array.devices,
            array.memory,
            array.is_replicated,
        )
        known = self._known
        if key not in known:
            known[key] = None
            if len(known) > CONSTANTS:
                known.popitem(last=False)
            return
        known.move_to_end(key)
        first = known[key]
        if first is None:
            first = known[key] = replace(array)
            self._runs.own(first)
        assert first.stored is not None
        array.consist_of(first.stored)
        array.others = first.others

    def clear(self) -> None:
        """Forget all values."""
        self._known.clear()
