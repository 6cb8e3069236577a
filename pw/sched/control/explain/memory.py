"""Reports the memory of all devices, and names the arrays that hold it.

Theory of operation. Hosts know what lies on their devices: they count a shard once, however many
arrays name it. Schedulers know what runs have reserved, and how much a device has. The controller
knows whose each array is, and which program made it. A report asks schedulers and hosts at the same
time and puts the answers together; a host that has not answered in time is named.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from msgspec.structs import replace

from pw.core import messages as msg
from pw.core.errors import ErrorReport
from pw.core.ids import client_id, client_of, scheduler_of, serial_of, store_of
from pw.core.messages.owners import Sees, visible
from pw.core.sharding import DeviceAddress
from pw.core.sizes import size_in_words
from pw.sched.control.clients import Client
from pw.sched.control.explain.inquiries import Inquiries, Inquiry
from pw.sched.control.sessions import ControlPart, Sessions, handles_client

LARGEST = 5
"""Number of arrays of each device that a report names."""

OTHERS = "(other tenants)"


@dataclass(eq=False)
class MemoryReports(ControlPart):
    """Answers `GetMemory`."""

    inquiries: Inquiries
    island_status: Callable[[], tuple[msg.IslandInfo, ...]]

    @handles_client(msg.GetMemory)
    def _measure(self, client: Client, message: msg.GetMemory) -> None:
        self.inquiries.answer(client, message, self._inquire(client, message))

    def _inquire(self, client: Client, message: msg.GetMemory) -> Inquiry:
        islands = [
            island
            for island in self.island_status()
            if island.state == "ready" and island.name in self._islands.islands
        ]
        hosts = [(island.name, host) for island in islands for host in island.hosts]
        schedulers = [scheduler_of(island.name) for island in islands]
        counts = yield msg.IslandMeasured, dict.fromkeys(schedulers, msg.MeasureIsland)
        answers = yield (
            msg.HostMeasured,
            {
                store_of(host.name): partial(msg.MeasureHost, devices=host.devices, largest=LARGEST)
                for _, host in hosts
            },
        )
        sees = self.sessions.sight(client.number)
        limits = {answer.island: answer.limit_bytes for answer in counts.values()}
        counted = {one.device: one for answer in counts.values() for one in answer.devices}
        devices = []
        for island, host in hosts:
            answer = answers.get(store_of(host.name))
            # A host that has fewer devices than it said answers for those that it has.
            held = dict(enumerate(() if answer is None else answer.devices))
            for ordinal in range(host.devices):
                at = DeviceAddress(host.name, ordinal)
                device_counts = counted.get(at) or msg.CountedMemory(at, 0, (), 0)
                devices.append(
                    self._device(island, limits.get(island), device_counts, held.get(ordinal), sees)
                )
        silent = tuple(host.name for _, host in hosts if store_of(host.name) not in answers)
        return visible(msg.Memory(message.request, tuple(devices), silent), sees)

    def _device(
        self,
        island: str,
        limit_bytes: int | None,
        counted: msg.CountedMemory,
        held: msg.HeldMemory | None,
        sees: Sees,
    ) -> msg.DeviceUse:
        reserved_bytes = sum(size_bytes for _, size_bytes in counted.reserved)
        used_bytes = counted.arrays_bytes + reserved_bytes + counted.temporary_bytes
        return msg.DeviceUse(
            island,
            counted.device.host,
            counted.device.ordinal,
            limit_bytes,
            None if limit_bytes is None else limit_bytes - used_bytes,
            None if held is None else sum(size_bytes for _, _, size_bytes in held.clients),
            reserved_bytes,
            counted.temporary_bytes,
            None if held is None else held.in_use_bytes,
            None if held is None else held.peak_bytes,
            self._owners(counted, held, sees),
            () if held is None else tuple(map(self._named, held.largest)),
            None if held is None else held.host_bytes,
            tuple(self._slices(counted)),
            None if held is None else held.file_bytes,
        )

    def _slices(self, counted: msg.CountedMemory) -> Iterator[msg.SliceMemory]:
        """Yield the slices with a bound on a device."""
        used = dict(counted.slices)
        for number, bound_bytes in self._islands.bounds.items():
            if counted.device in self._islands.bindings[number].devices:
                used_bytes = used.get(number, 0)
                yield msg.SliceMemory(client_of(number), serial_of(number), used_bytes, bound_bytes)

    def _owners(
        self, counted: msg.CountedMemory, held: msg.HeldMemory | None, sees: Sees
    ) -> tuple[msg.OwnerMemory, ...]:
        """Return what each client has on a device, with one sum for all that the asker may not see."""
        owned: defaultdict[int, list[int]] = defaultdict(lambda: [0, 0, 0])
        rows = [(client, 0, 0, size_bytes) for client, size_bytes in counted.reserved]
        rows += [] if held is None else [(*row, 0) for row in held.clients]
        for client, *row in rows:
            shown = client if sees(client) else 0
            owned[shown] = [a + b for a, b in zip(owned[shown], row, strict=True)]
        numbers = sorted(owned, key=lambda number: number or math.inf)
        return tuple(msg.OwnerMemory(n, self._name(n), *owned[n]) for n in numbers)

    def _name(self, number: int) -> str:
        client = self.sessions.get(number)
        return OTHERS if not number else "(has left)" if client is None else client.name

    def _named(self, held: msg.ArrayMemory) -> msg.ArrayMemory:
        program = maker_of(self.sessions, client_id(held.client, held.array))
        return replace(held, program=program)


def maker_of(sessions: Sessions, array: int) -> str:
    """Return the name of the program that made an array; empty if none did, or it is not known."""
    client = sessions.owner(array)
    maker = None if client is None else client.lineage.maker(array)
    return "" if maker is None else maker.program.body.name


def with_holders(
    sessions: Sessions, asker: int, error: ErrorReport, holders: Sequence[tuple[int, int]]
) -> ErrorReport:
    """Return an error with the names of the arrays that hold the memory.

    Args:
        sessions: the clients.
        asker: the client whose run has no room.
        error: what the scheduler says.
        holders: arrays and their bytes, the largest first.
    """
    if not holders:
        return error
    sees = sessions.sight(asker)
    seen = [holder for holder in holders if sees(client_of(holder[0]))]
    words = "; ".join(_holder(sessions, asker, *holder) for holder in seen)
    if hidden_bytes := sum(
        size_bytes for array, size_bytes in holders if not sees(client_of(array))
    ):
        words = "; ".join(filter(None, (words, f"{size_in_words(hidden_bytes)} of other tenants")))
    text = f"{error.message}. The largest arrays there: {words}. `pw memory` shows all"
    return ErrorReport(error.kind, text, error.where, error.traceback)


def _holder(sessions: Sessions, asker: int, array: int, size_bytes: int) -> str:
    client, program = sessions.owner(array), maker_of(sessions, array)
    entry = None if client is None else client.arrays.find(array)
    what = f"array {serial_of(array)}" if entry is None else entry.spec.short
    maker = f" made by {program!r}" if program else ""
    if client is not None and client.number != asker:
        maker += f" (client {client.number}, {client.name})"
    return f"{size_in_words(size_bytes)} {what}{maker}"
