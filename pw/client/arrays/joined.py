"""`JoinedArray`: an array over a mesh that joins islands.

Each island has a part (see `island_parts`), an ordinary array. The client holds the parts together; the
cluster knows only them. So each part has its lineage, its replicas and its errors, and an island that is
formed again restores its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from pw.client.arrays.array import Array, refuse
from pw.client.arrays.island_parts import put_together, sources
from pw.client.arrays.signature import ArrayType
from pw.client.connection.waiting import Waiting
from pw.core.jax_private import array_types


class JoinedArray(Array):
    """A logical array with a part on each of several islands."""

    __slots__ = ("_own_fate", "_parts")
    __hash__ = object.__hash__

    def __init__(self, parts: Sequence[Array], type_: ArrayType) -> None:
        self._parts = tuple(parts)
        super().__init__(parts[0]._runtime, parts[0]._id, type_)

    def __del__(self) -> None:
        """Nothing: the parts release themselves."""

    @property
    def _gone(self) -> str | None:
        """Why the array cannot be used: because it, or one of its parts, was deleted or donated."""
        own = self._own_fate
        return own or next((part._gone for part in self._parts if part._gone is not None), None)

    @_gone.setter
    def _gone(self, fate: str | None) -> None:
        self._own_fate = fate

    @property
    def members(self) -> tuple[Array, ...]:
        """The parts, island after island."""
        return self._parts

    def delete(self) -> None:
        """Free all parts now, in order with the computations that use them."""
        for part in self._parts:
            part.delete()
        self._fetching = None

    def surviving(self, island: str = "") -> Array | None:
        """Return a part that has all elements, on an island that is not lost; None without one.

        Args:
            island: name of the island to be preferred.
        """
        survivors = [
            part
            for one, part in zip(self._type.islands, self._parts, strict=True)
            if one.is_whole and not self._runtime.is_lost(part._type.spec.placement.slice)
        ]
        nearest = (part for part in survivors if part._type.sharding.mesh.slice.island == island)
        return next(nearest, survivors[0] if survivors else None)

    @property
    def has_lost(self) -> bool:
        """Whether an island that has a part is lost."""
        return any(self._runtime.is_lost(part._type.spec.placement.slice) for part in self._parts)

    def start_fetch(self) -> Waiting[Any]:
        """Return the future of the value here; the first call fetches the parts that it is made of."""
        self._check_usable()
        if self._fetching is None or (self._fetching.done() and self._fetching.exception()):
            islands, shape = self._type.islands, self._type.spec.shape
            needed = list(dict.fromkeys(at for at, _ in sources(islands)))
            if islands[needed[0]].is_whole:
                survivor = self.surviving()
                return (self._parts[needed[0]] if survivor is None else survivor).start_fetch()
            fetched = [self._parts[at].start_fetch() for at in needed]
            self._fetching = _all_of(
                fetched,
                lambda values: put_together(islands, dict(zip(needed, values, strict=True)), shape),
            )
        return self._fetching


def uploaded(session: Any, value: np.ndarray[Any, Any], type_: ArrayType, **how: bool) -> Array:
    """Upload a host value to its hosts, to each island its part.

    Args:
        session: session of the devices.
        value: numpy array, as `host_value` returns it.
        type_: type of the array.
        how: options of `upload` of a session.
    """
    if not type_.parts:
        return Array(session, session.upload(value, type_.spec, **how), type_)
    parts = []
    for island, part in zip(type_.islands, type_.parts, strict=True):
        own = np.ascontiguousarray(island.of(value)).reshape(part.spec.shape)
        parts.append(Array(session, session.upload(own, part.spec, **how), part))
    return JoinedArray(parts, type_)


def _all_of(futures: Sequence[Waiting[Any]], combine: Any) -> Waiting[Any]:
    """Return the future of what `combine` makes of all results, or of the first error."""
    combined: Waiting[Any] = Waiting(futures[0].explain)
    left = len(futures)

    def ended(_: Future[Any]) -> None:
        nonlocal left
        left -= 1  # the callbacks of a session run in one thread
        if left:
            return
        try:
            combined.set_result(combine([future.result() for future in futures]))
        except BaseException as error:  # noqa: BLE001 - a future holds it for its reader
            combined.set_exception(error)

    for future in futures:
        future.add_done_callback(ended)
    return combined


array_types.register(JoinedArray, lambda array: array._type.aval, refuse)
