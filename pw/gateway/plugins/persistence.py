"""Arrays in files, as the persistence of Pathways on Cloud asks for them.

An array is a checkpoint of its own, in the folder `location/name`: its hosts write and read it, and
`pw.restore` can, too (the tree of such a checkpoint is the array).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from pw.client.checkpoints import files as checkpoint_files
from pw.client.checkpoints import tree as checkpoint_tree
from pw.core.dtypes import BY_XLA
from pw.core.messages import FileSource
from pw.gateway.arrays.arrays import ProxyArray, Stored
from pw.gateway.arrays.devices import Devices
from pw.gateway.arrays.runs import Runs
from pw.gateway.plugins.reshards import Reshards
from pw.gateway.protocol import statuses
from pw.gateway.protocol.shardings import ShardLayout


class Persistence:
    """Writes and reads the arrays of one client."""

    def __init__(self, devices: Devices, runs: Runs, reshards: Reshards) -> None:
        self._devices = devices
        self._runs = runs
        self._reshards = reshards

    async def write(self, location: str, name: str, array: ProxyArray) -> Future[None]:
        """Have hosts write an array; what is there is replaced. The future settles when it is on disk."""
        path = _path(location, name)
        if array.value is not None:
            self._runs.own(array)
        stored = await self._reshards.gathered(array)
        named = {checkpoint_tree.SINGLE: stored.number}
        tree = checkpoint_tree.single_tree(array.shape, array.dtype)
        saving = self._runs.runtime.ask.save(path, True, named, tree)
        saving.add_done_callback(lambda _: stored.spec)  # it is kept until then
        return saving

    async def read(
        self, location: str, name: str, dtype: str, shape: tuple[int, ...], layout: ShardLayout
    ) -> ProxyArray:
        """Have hosts read an array.

        Raises:
            Error: there is none.
            Status: it is another one, or it cannot be divided that way.
        """
        path = _path(location, name)
        own_dtype = BY_XLA.get(dtype)
        if own_dtype is None:
            raise statuses.unsupported(f"arrays of {dtype} cannot be read from files")
        target = self._reshards.unfilled(own_dtype, shape, layout)
        is_spread = target is None  # each island reads all, and keeps its part
        if target is None:
            replicated = self._reshards.on_each(shape, layout.devices, layout.memory)
            target = self._reshards.unfilled(own_dtype, shape, replicated)
            assert target is not None
        array, parts = target
        runtime = self._runs.runtime
        described = await self._runs.settled(runtime.ask.look(path, parts[0][1].placement))
        actual = checkpoint_tree.single_in(described, path)
        if actual != (shape, own_dtype):
            raise statuses.StatusError(
                "INVALID_ARGUMENT",
                f"the array {name} in {location} is {actual[1]}{list(actual[0])}, not {own_dtype}{list(shape)}",
            )
        source = FileSource(path, described.checkpoint, checkpoint_tree.SINGLE)
        for part, spec in parts:
            part.consist_of(Stored(runtime, runtime.load(source, spec), spec))
        if is_spread:
            (array,) = await self._reshards.reshard([array], [layout])
        return array

    async def arrived(self, arrays: Sequence[ProxyArray]) -> list[Future[Any]]:
        """Return what settles when arrays have been read."""
        waiting = self._runs.ready(arrays)
        return [] if waiting is None else [waiting]


def _path(location: str, name: str) -> str:
    """Return the folder of an array. Raises ArgumentError, Status."""
    if not name or os.path.isabs(name) or ".." in name.split("/"):
        raise statuses.StatusError(
            "INVALID_ARGUMENT", f"{name!r} cannot be the name of an array in files"
        )
    return os.path.join(checkpoint_files.normal_path(location), name)
