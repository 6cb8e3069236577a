"""A host inside the client's process, over devices that the process already holds.

Used by the embedded cluster where JAX has accelerators, and by the test harness.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable, Sequence

import jax
import jax.extend.backend

from pw.cli.assembly import add_host, coords_of, memory_of
from pw.core.errors import ErrorReport
from pw.core.messages import FormIsland, IslandJoined, IslandJoinFailed, RegisterHost
from pw.core.sharding import DeviceAddress
from pw.devices.host.replica_memory import Replica
from pw.devices.host.spill_files import SpillFolder
from pw.devices.jax.backend import JaxBackend
from pw.devices.jax.executables import default_folder
from pw.devices.jax.file_threads import FileThreads
from pw.transport.bulk.plane import BulkPlane
from pw.transport.links.local import LocalHub
from pw.transport.links.node import Node


class InProcessHost:
    """One host of an island of one host, on the caller's event loop."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        hub: LocalHub,
        name: str,
        island: str,
        devices: Sequence[jax.Device],
        bulk: BulkPlane | None = None,
        ended: Callable[[], None] = lambda: None,
        device_memory_bytes: int | None = None,
        spill_bytes: int = 0,
        spill_files: str = "",
    ) -> None:
        self.files = FileThreads(loop)
        self._spill_folder = SpillFolder(spill_files, self.files) if spill_files else None
        self.name = name
        self.stopped = ""
        self._ended = ended
        self._devices = list(devices)
        self._device_memory_bytes = device_memory_bytes
        self._spill_bytes = spill_bytes
        self.node = Node(name, loop, hub.network(name))
        self.bulk = bulk or BulkPlane(loop)
        self.backend = JaxBackend(
            loop,
            name,
            self.device,
            allow_python=True,
            compile_cache=default_folder(),
            recorder=self.node.recorder,
        )
        registration = RegisterHost(
            island, 1, len(self._devices), _platform(self._devices[0]), "", os.getpid(), python=True
        )
        self.executor = add_host(
            self.node,
            registration,
            self,
            self.backend,
            self.bulk,
            aside=self.files,
            spill_bytes=spill_bytes,
            spill_files=self._spill_folder,
        )
        self.executor.register()

    def device(self, address: DeviceAddress) -> jax.Device:
        """The JAX device at an address of this host."""
        return self._devices[address.ordinal]

    def join(
        self, form: FormIsland, joined: Callable[[IslandJoined | IslandJoinFailed], None]
    ) -> None:
        """Join at once: the island has one host."""
        device = self._devices[0]
        memory = memory_of([device], self._device_memory_bytes)
        joined(
            IslandJoined(
                form.island,
                form.epoch,
                device.device_kind,
                len(self._devices),
                memory,
                coords_of(self._devices),
                self._spill_bytes,
                self._spill_folder is not None,
            )
        )

    def stop(self, reason: str, error: ErrorReport | None) -> None:
        """End the host; the process is the user's and lives on."""
        self.finish(reason)

    def keep(self, replicas: Sequence[Replica], kept: Callable[[ErrorReport | None], None]) -> None:
        """Answer at once: there is no next incarnation."""
        kept(None)

    def hand_over(self, replicas: Iterable[Replica]) -> None:
        """Drop the replicas: there is no next incarnation."""

    def finish(self, reason: str) -> None:
        """End the host, as `stop` does: there is no supervisor."""
        self.stopped = reason
        self._ended()

    def close(self) -> None:
        """End the host's actors, threads and bulk plane."""
        self.node.close()
        self.backend.close()
        self.files.close()
        if self._spill_folder is not None:
            self._spill_folder.close()
        self.bulk.close()


def _platform(device: jax.Device) -> str:
    """Return the platform for `jax.export`, "cuda" or "rocm" for devices that call themselves "gpu"."""
    backends = jax.extend.backend.backends()
    named = (name for name, client in backends.items() if client.platform == device.platform)
    return next(named, device.platform)
