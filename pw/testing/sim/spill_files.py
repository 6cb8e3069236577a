"""Simulated files of one host for arrays that have left its memory (`pw.devices.host.spill_files`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from pw.core.errors import Error, ErrorReport
from pw.core.sharding import DeviceAddress
from pw.devices.host.backend import Part
from pw.testing.sim.devices import SimBackend
from pw.testing.sim.node import SimNode
from pw.testing.sim.shards import Shards

DISK_BYTES_PER_S = 2e8
FULL = 0.3
"""Share of the hosts whose disk has no room for some of the files."""


class FileShards(Shards):
    """The shards of one array in a file."""

    devices: tuple[DeviceAddress, ...] = ()
    """Devices at the positions of the mesh."""


class SimFiles:
    """The files of one incarnation of a host; the next one begins without files.

    Args:
        node: the incarnation.
        backend: its devices.
    """

    def __init__(self, node: SimNode, backend: SimBackend) -> None:
        self._node = node
        self._backend = backend
        self._random = node.world.streams(f"disk/{node.name}")
        self._failures = 0.2 if self._random.random() < FULL else 0.0
        self.failed = 0
        """Number of files that could not be written."""
        self._files: dict[int, FileShards] = {}
        """Files that are complete, by the id of their payload."""

    def __len__(self) -> int:
        return len(self._files)

    def write(
        self, parts: Sequence[Part], devices: tuple[DeviceAddress, ...], done: Callable[[Any], None]
    ) -> None:
        """Write shards to a file after a while, or fail."""
        total = sum(data.nbytes for _, _, data in parts)
        delay_s = self._random.uniform(0.5, 20.0) * (1e-3 + total / DISK_BYTES_PER_S)
        is_full = self._random.random() < self._failures
        shards = FileShards(
            {devices[at].ordinal: data.copy() for positions, _, data in parts for at in positions}
        )
        shards.devices = devices
        written = partial(self._written, None if is_full else shards, done)
        self._node.world.after(delay_s, self._backend.answer, written)

    def _written(self, shards: FileShards | None, done: Callable[[Any], None]) -> None:
        if shards is None:
            self.failed += 1
            done(ErrorReport.of(Error("no space left on the device"), self._node.name))
            return
        self._files[id(shards)] = shards
        done(shards)

    def view(self, file: FileShards, position: int) -> np.ndarray[Any, Any]:
        """Return a view of the shard at a position."""
        return file[file.devices[position].ordinal]

    def delete(self, file: FileShards) -> None:
        """Delete a file; what reads it goes on."""
        del self._files[id(file)]
