"""A host's object store: the shards of arrays that clients hold, and their way to clients.

Its parts: the table of arrays, uploads, requests, compilations, replicas, files, the output of clients'
programs, and the tests of devices. When the epoch ends, the host's process takes the values that are ready
and the replicas (`save`); the next incarnation's store begins with them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from heapq import nlargest
from itertools import chain

from pw.core.actors.actor import Actor, Env, handles
from pw.core.ids import CONTROLLER, Address, client_of
from pw.core.landing import Bulk
from pw.core.messages import (
    ArrayMemory,
    DropUploads,
    GetStats,
    HeldMemory,
    HostMeasured,
    LogLine,
    MeasureHost,
    PeerLost,
    RequestFailed,
    Stats,
)
from pw.core.programs.program import Program
from pw.core.tenants import OPERATOR
from pw.core.timeline import Recordings
from pw.devices.host.arrays import Arrays
from pw.devices.host.backend import Backend
from pw.devices.host.callbacks import HostCallbacks
from pw.devices.host.checkpoint_files import BlockingCalls, Files
from pw.devices.host.clients import Clients
from pw.devices.host.compiling import Compilations
from pw.devices.host.confirming import Confirming
from pw.devices.host.device_health import DeviceHealth
from pw.devices.host.printing import OutputLines, Printing
from pw.devices.host.replica_memory import Keeping, Replica
from pw.devices.host.replicas import Replicas
from pw.devices.host.requests import HostRequests
from pw.devices.host.spill_files import SpillFiles
from pw.devices.host.tiers import Tiers
from pw.devices.host.uploads import HostUploads
from pw.devices.host.value import Value


class ObjectStore(Actor):
    """Keeps the arrays of clients on this host, and moves them to and from clients."""

    def __init__(
        self,
        env: Env,
        backend: Backend,
        bulk: Bulk,
        counters: Callable[[], dict[str, int]],
        replicas: Sequence[Replica] = (),
        aside: BlockingCalls | None = None,
        keep: Keeping | None = None,
        output: OutputLines | None = None,
        checkpoint_root: str = "",
        lines: Callable[[], tuple[LogLine, ...]] = tuple,
        spill_bytes: int = 0,
        spill_files: SpillFiles | None = None,
        test_devices_s: float = 0.0,
    ) -> None:
        super().__init__(env)
        self._lines = lines
        self._backend = backend
        self._counters = counters
        self._gone_clients: set[int] = set()
        self.printing = Printing(env, output, self._gone_clients)
        self.clients = Clients(env, self.printing, self._gone_clients)
        self.replicas = Replicas(
            env,
            bulk,
            replicas,
            keep,
            self._gone_clients,
            files=spill_files,
            spill_bytes=spill_bytes,
        )
        self.files = Files(env, aside, self.clients, checkpoint_root)
        self.arrays = Arrays(env.address.node, bulk, self.replicas, spill_files)
        self.tiers = Tiers(env, backend, self.arrays, spill_files, spill_bytes)
        self.requests = HostRequests(env, backend, bulk, self.arrays, self.clients, self.printing)
        self.uploads = HostUploads(
            env,
            backend,
            bulk,
            self.arrays,
            self.clients,
            self.requests,
            self.replicas,
            self.files,
            self.tiers,
        )
        self.compilations = Compilations(env, backend, self.clients)
        self.health = DeviceHealth(env, backend, test_devices_s)
        self.callbacks = HostCallbacks(env, backend, bulk, self.clients)
        self.recordings = Recordings(env, lambda sender: self.clients.at(sender.node) is not None)
        self.compose(
            self.clients,
            self.uploads,
            self.requests,
            self.compilations,
            Confirming(env, backend, self.arrays),
            self.callbacks,
            self.replicas,
            self.replicas.memory,
            self.files,
            self.printing,
            self.recordings,
            self.health,
            order={
                PeerLost: (HostUploads, HostRequests)
            },  # which forget the client of the lost node
        )

    def joins(
        self, island: str, epoch: int, tickets: bytes, devices: int, local_devices: int
    ) -> None:
        """Accept clients whose tickets have this public key, and uploads to this epoch.

        Args:
            island: island of this host.
            epoch: epoch of the island.
            tickets: the public key.
            devices: number of devices of the island.
            local_devices: number of devices of this host.
        """
        self.uploads.devices = self.compilations.devices = (devices, local_devices)
        self.uploads.place = self.compilations.place = self.requests.place = (island, epoch)
        self.clients.tickets = tickets
        self.health.joins(local_devices)

    def value(self, array: int) -> Value | None:
        """Return the value of an array, None if this host does not have it."""
        entry = self.arrays.get(array)
        return None if entry is None else entry.value

    def values_under_way(self) -> tuple[Value, ...]:
        """Return the values whose making op has been submitted."""
        return tuple(entry.value for entry in self.arrays.values() if entry.submitted)

    def drop(self, array: int, why: str = "deleted") -> None:
        """Forget an array; requests for it fail, now and later."""
        self.arrays.drop(array, why)
        self.requests.dropped(array)

    def drop_donated(self, body: Program, args: Sequence[int | bytes]) -> None:
        """Forget the arrays that a run of a program takes over."""
        if body.donated:
            why = f"donated to {body.name!r}"
            for index in body.donated:
                if isinstance(arg := args[index], int):
                    self.drop(arg, why)

    def drop_client(self, client: int) -> None:
        """Forget all that a client held, and drop what still comes from it."""
        self._gone_clients.add(client)
        self.compilations.forget_client(client, self.clients.nodes_of(client))
        for node in self.clients.nodes_of(client):
            self.requests.forget_node(node)
            self.callbacks.forget_node(node)
            self.recordings.forget_node(node)
        for array in dict.fromkeys((*self.arrays, *self.requests.parked())):
            if client_of(array) == client:
                self.drop(array)
        self.replicas.drop_client(client)
        self.printing.gone(client)

    def save(self) -> Iterator[Replica]:
        """Return all that the next incarnation can have: the replicas, and the values that are ready.

        Values are read one by one, because they may have to come from accelerators.
        """
        saved = self.replicas.memory.leave()
        held = {(one.array, one.box) for one in saved}
        room_bytes = self.tiers.spill_bytes
        return chain(saved, self.arrays.snapshots(self._backend, held, room_bytes))

    @handles(DropUploads)
    def _drop_uploads(self, sender: Address, message: DropUploads) -> None:
        if sender.node != CONTROLLER:
            self.env.count("messages_refused")
            return
        for array in message.arrays:
            self.drop(array)

    def turn_ended(self) -> None:
        """Have files read for all that was asked for in this turn."""
        self.files.read_all()

    def census(self) -> dict[str, int]:
        """Count the arrays and bytes that clients hold on this host, and the open requests."""
        return {
            "live_arrays": len(self.arrays),
            "live_bytes": self.arrays.size_bytes(),
            "requests_waiting": len(self.requests),
            "uploads_arriving": len(self.uploads),
            "compilations_kept": len(self.compilations),
            "calls_waiting": len(self.callbacks),
        } | self.replicas.census()

    @handles(GetStats)
    def _stats(self, sender: Address, message: GetStats) -> None:
        if self.clients.at(sender.node) is None:
            self.env.send(sender, RequestFailed(message.request, self.clients.refusal()))
            return
        counters = self._backend.counters() | self.census() | self._counters()
        lines = self._lines() if self.env.tenant_of(sender.node) == OPERATOR else ()
        self.env.send(sender, Stats(message.request, self.env.address.node, counters, lines))

    @handles(MeasureHost)
    def _measure(self, sender: Address, message: MeasureHost) -> None:
        if sender.node != CONTROLLER:
            self.env.count("messages_refused")
            return
        memory = self.arrays.on_devices()
        in_memory = self.arrays.off_devices(in_files=False)
        in_files = self.arrays.off_devices(in_files=True)
        devices = tuple(
            _memory_of(
                memory.get(ordinal, ()),
                message.largest,
                self._backend.allocated_bytes(ordinal),
                in_memory[ordinal],
                in_files[ordinal],
            )
            for ordinal in range(message.devices)
        )
        self.env.send(sender, HostMeasured(message.request, devices))


def _memory_of(
    arrays: Sequence[ArrayMemory],
    largest: int,
    allocated: tuple[int | None, int | None],
    host_bytes: int,
    file_bytes: int,
) -> HeldMemory:
    """Return how much memory of a device each client's arrays take, and so many of the largest arrays."""
    counts: defaultdict[int, list[int]] = defaultdict(lambda: [0, 0])
    for one in arrays:
        counts[one.client][0] += 1
        counts[one.client][1] += one.size_bytes
    return HeldMemory(
        tuple((client, number, size_bytes) for client, (number, size_bytes) in counts.items()),
        tuple(nlargest(largest, arrays, key=lambda one: one.size_bytes)),
        *allocated,
        host_bytes,
        file_bytes,
    )
