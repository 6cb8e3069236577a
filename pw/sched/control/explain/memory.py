"""Reports the memory of all devices, and names the arrays that hold it.

Theory of operation. Hosts know what lies on their devices: they count a shard once, however many
arrays name it. Schedulers know what runs have reserved, and how much a device has. The controller
knows whose each array is, and which program made it. A report asks schedulers and hosts at the same time
and puts the answers together; a host that has not answered within `ANSWER_S` is named.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from pw.core.actors.actor import handles
from pw.core.errors import ErrorReport
from pw.core.ids import Address, client_of, scheduler_of, serial_of, store_of
from pw.core.messages import (
    ArrayMemory,
    CountedMemory,
    DeviceUse,
    GetMemory,
    HeldArray,
    HeldMemory,
    HostMeasured,
    IslandInfo,
    IslandMeasured,
    MeasureHost,
    MeasureIsland,
    Memory,
    OwnerMemory,
)
from pw.core.sharding import DeviceAddress
from pw.core.sizes import size_in_words
from pw.core.tenants import OPERATOR
from pw.sched.control.clients import Client
from pw.sched.control.explain.hiding import memory_without_others
from pw.sched.control.explain.limits import may_ask
from pw.sched.control.sessions import ControlPart, Sessions, handles_client, handles_host

ANSWER_S = 0.8
"""How long hosts have to answer."""
LARGEST = 5
"""Arrays of each device that a report names."""


@dataclass(slots=True)
class _Question:
    """One report, as far as it is known."""

    client: Client
    request: int
    devices: list[tuple[str, DeviceAddress]] = field(default_factory=list)
    """All devices, with their islands."""
    islands: dict[str, IslandMeasured | None] = field(default_factory=dict)
    """Answers of schedulers; None as long as one has not answered."""
    hosts: dict[str, HostMeasured | None] = field(default_factory=dict)
    """Answers of hosts; None as long as one has not answered."""

    @property
    def is_answered(self) -> bool:
        return None not in self.islands.values() and None not in self.hosts.values()


@dataclass(eq=False)
class MemoryReports(ControlPart):
    """Answers `GetMemory`; see the module."""

    island_status: Callable[[], tuple[IslandInfo, ...]]

    def __post_init__(self) -> None:
        super().__post_init__()
        self._questions: dict[int, _Question] = {}
        self._asked = 0

    @handles_client(GetMemory)
    def _begin(self, client: Client, message: GetMemory) -> None:
        theirs = [q for q in self._questions.values() if q.client is client]
        if not may_ask(self.sessions, client, message, len(theirs)):
            return
        self._asked += 1
        question = self._questions[self._asked] = _Question(client, message.request)
        for island in self.island_status():
            if island.state != "ready" or island.name not in self._islands.islands:
                continue
            question.islands[island.name] = None
            self._env.send(scheduler_of(island.name), MeasureIsland(self._asked))
            for host in island.hosts:
                question.hosts[host.name] = None
                question.devices += (
                    (island.name, DeviceAddress(host.name, ordinal))
                    for ordinal in range(host.devices)
                )
                measure = MeasureHost(self._asked, host.devices, LARGEST)
                self._env.send(store_of(host.name), measure)
        if question.is_answered:
            self._finish(self._asked)
        else:
            self._env.call_later(ANSWER_S, partial(self._finish, self._asked))

    @handles(IslandMeasured)
    def _island_measured(self, sender: Address, message: IslandMeasured) -> None:
        question = self._questions.get(message.request)
        if question is not None and message.island in question.islands:
            question.islands[message.island] = message
            if question.is_answered:
                self._finish(message.request)

    @handles_host(HostMeasured)
    def _host_measured(self, host: str, message: HostMeasured) -> None:
        question = self._questions.get(message.request)
        if question is None or host not in question.hosts:
            self._env.count("messages_stale")
            return
        question.hosts[host] = message
        if question.is_answered:
            self._finish(message.request)

    def _finish(self, number: int) -> None:
        """Answer with all that is known; a question that was answered before needs nothing."""
        question = self._questions.pop(number, None)
        if question is None:
            return
        silent = tuple(host for host, answer in question.hosts.items() if answer is None)
        devices = tuple(self._devices(question))
        if question.client.tenant != OPERATOR:
            devices = memory_without_others(devices, self.sessions.sight(question.client.number))
        answer = Memory(question.request, devices, silent)
        self._env.send(question.client.address, answer)

    def _devices(self, question: _Question) -> Iterator[DeviceUse]:
        counted = {
            one.device: one
            for answer in question.islands.values()
            if answer is not None
            for one in answer.devices
        }
        for island, device in question.devices:
            scheduler, host = question.islands[island], question.hosts[device.host]
            limit_bytes = None if scheduler is None else scheduler.limit_bytes
            # A host that has fewer devices than it said answers for those that it has.
            held = None
            if host is not None and device.ordinal < len(host.devices):
                held = host.devices[device.ordinal]
            yield self._device(island, device, limit_bytes, counted.get(device), held)

    def _device(
        self,
        island: str,
        device: DeviceAddress,
        limit_bytes: int | None,
        counted: CountedMemory | None,
        held: HeldMemory | None,
    ) -> DeviceUse:
        reserved = {} if counted is None else dict(counted.reserved)
        temporary_bytes = 0 if counted is None else counted.temporary_bytes
        taken = sum(reserved.values()) + temporary_bytes
        if counted is not None:
            taken += counted.arrays_bytes
        return DeviceUse(
            island,
            device.host,
            device.ordinal,
            limit_bytes,
            None if limit_bytes is None else limit_bytes - taken,
            None if held is None else sum(size_bytes for _, _, size_bytes in held.clients),
            sum(reserved.values()),
            temporary_bytes,
            None if held is None else held.in_use_bytes,
            None if held is None else held.peak_bytes,
            tuple(self._owners(reserved, () if held is None else held.clients)),
            tuple(named(self.sessions, one) for one in (() if held is None else held.largest)),
        )

    def _owners(
        self, reserved: Mapping[int, int], held: Sequence[tuple[int, int, int]]
    ) -> Iterator[OwnerMemory]:
        arrays = {client: (count, size_bytes) for client, count, size_bytes in held}
        for number in sorted({*arrays, *reserved}):
            client = self.sessions.get(number)
            yield OwnerMemory(
                number,
                "(has left)" if client is None else client.name,
                *arrays.get(number, (0, 0)),
                reserved.get(number, 0),
            )


def named(sessions: Sessions, held: HeldArray) -> ArrayMemory:
    """Return an array with its owner, and the program that made it."""
    client = sessions.owner(held.array)
    maker = None if client is None else client.lineage.maker(held.array)
    program = "" if maker is None else maker.program.body.name
    return ArrayMemory(
        client_of(held.array), serial_of(held.array), held.type, program, held.size_bytes
    )


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
    client = sessions.owner(array)
    entry = None if client is None else client.arrays.find(array)
    of = named(sessions, HeldArray(array, "" if entry is None else entry.spec.short, size_bytes))
    maker = f" made by {of.program!r}" if of.program else ""
    whose = "" if client is None or of.client == asker else f" (client {of.client}, {client.name})"
    return f"{size_in_words(size_bytes)} {of.type or f'array {of.array}'}{maker}{whose}"
