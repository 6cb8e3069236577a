"""The resource manager: which hosts exist, which islands they form, and what slices are bound to.

An island is `waiting` for hosts, `forming` under a new epoch, then `ready`. Any host that is lost, or
fails to join, ends the epoch: the remaining hosts are told to leave, come back as new incarnations, and
the island is formed again under the next epoch. Slices survive that: they are bound anew, and the
controller lowers programs again.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

from pw.core.actor import Actor, Env, handles
from pw.core.errors import ErrorReport, HostLost, InsufficientDevices, IslandFull, PlacementError
from pw.core.ids import CONTROL, SERVICES, Address, executor_of
from pw.core.messages import (
    AllocateSlice,
    CoordinationStarted,
    Directory,
    EndEpoch,
    FormIsland,
    HostRejected,
    HostStatus,
    IslandFormed,
    IslandJoined,
    IslandJoinFailed,
    IslandLost,
    IslandStatus,
    LeaveIsland,
    Peer,
    PeerLost,
    RegisterHost,
    ReleaseSlice,
    SliceBound,
    SliceRefused,
    StartCoordination,
    StopCoordination,
)
from pw.core.sharding import DeviceAddress


@dataclass(slots=True)
class _Host:
    node: str
    registration: RegisterHost
    joined: IslandJoined | None = None


@dataclass(slots=True)
class _Island:
    name: str
    expected_hosts: int
    platform: str
    local_devices: int
    epoch: int = 0
    state: str = "waiting"
    hosts: dict[str, _Host] = field(default_factory=dict)
    kind: str = ""
    load: Counter[DeviceAddress] = field(default_factory=Counter)
    """Virtual devices bound to each physical one."""

    def ranked(self) -> list[_Host]:
        """Hosts in the order of their ranks."""
        return [self.hosts[node] for node in sorted(self.hosts)]

    def devices(self) -> list[DeviceAddress]:
        """Physical devices in rank order."""
        return [
            DeviceAddress(host.node, ordinal)
            for host in self.ranked()
            for ordinal in range(self.local_devices)
        ]

    def describe(self) -> str:
        """One line for error messages."""
        hosts = _counted(self.expected_hosts, "host")
        devices = _counted(self.expected_hosts * self.local_devices, "device")
        text = f"{self.name} ({self.platform}, {devices} on {hosts}"
        if self.state == "ready":
            return text + ")"
        return text + f", {self.state}: {len(self.hosts)} of {self.expected_hosts} hosts are here)"


@dataclass(slots=True)
class _SliceEntry:
    request: AllocateSlice
    island: str
    devices: tuple[DeviceAddress, ...]


class ResourceManager(Actor):
    """Owns all devices of all islands and maps virtual ones to them."""

    def __init__(self, env: Env, secret: bytes) -> None:
        super().__init__(env)
        self._secret = secret
        self._islands: dict[str, _Island] = {}
        self._slices: dict[int, _SliceEntry] = {}

    # --- hosts ---------------------------------------------------------------------------------------

    @handles(RegisterHost)
    def _register(self, sender: Address, message: RegisterHost) -> None:
        island = self._islands.get(message.island)
        if island is not None and sender.node in island.hosts and island.state != "waiting":
            self._end_epoch(island, f"host {sender.node} registered again", sender.node)
        if island is None or (not island.hosts and island.state == "waiting"):
            epoch = island.epoch if island else 0
            island = _Island(
                message.island,
                message.island_hosts,
                message.platform,
                message.local_devices,
                epoch,
            )
            self._islands[message.island] = island
        if (error := self._objection(island, sender.node, message)) is not None:
            self.env.log("warning", "host rejected", host=sender.node, reason=str(error))
            self.env.send(sender, HostRejected(ErrorReport.of(error)))
            return
        island.hosts[sender.node] = _Host(sender.node, message)
        self.env.introduce(sender.node, message.endpoint)
        self.env.log(
            "info",
            "host registered",
            host=sender.node,
            island=island.name,
            hosts=f"{len(island.hosts)}/{island.expected_hosts}",
        )
        if len(island.hosts) == island.expected_hosts:
            self._form(island)

    def _objection(self, island: _Island, node: str, message: RegisterHost) -> Exception | None:
        if message.island_hosts != island.expected_hosts:
            return IslandFull(
                f"island {island.name!r} was declared with {island.expected_hosts} hosts, this worker "
                f"says {message.island_hosts}; start it with --island-hosts {island.expected_hosts}"
            )
        if node not in island.hosts and len(island.hosts) >= island.expected_hosts:
            return IslandFull(
                f"island {island.name!r} already has all its {island.expected_hosts} hosts "
                f"({', '.join(sorted(island.hosts))}); use another --island or raise --island-hosts"
            )
        if message.local_devices != island.local_devices or message.platform != island.platform:
            return PlacementError(
                f"hosts of island {island.name!r} have {island.local_devices} {island.platform} devices "
                f"each, this worker has {message.local_devices} {message.platform} devices; all hosts of "
                "an island must be alike"
            )
        return None

    def _form(self, island: _Island) -> None:
        island.epoch += 1
        island.state = "forming"
        if island.expected_hosts > 1:
            self.env.send(
                SERVICES, StartCoordination(island.name, island.epoch, island.expected_hosts)
            )
        else:
            self._invite(island, "")

    @handles(CoordinationStarted)
    def _coordination_started(self, sender: Address, message: CoordinationStarted) -> None:
        island = self._islands.get(message.island)
        if island is None or island.epoch != message.epoch or island.state != "forming":
            self.env.send(SERVICES, StopCoordination(message.island, message.epoch))
        elif message.error:
            self._end_epoch(island, f"no coordination service: {message.error}", "")
        else:
            self._invite(island, message.address)

    def _invite(self, island: _Island, group_address: str) -> None:
        hosts = tuple(host.node for host in island.ranked())
        for rank, node in enumerate(hosts):
            self.env.send(
                executor_of(node),
                FormIsland(island.name, island.epoch, hosts, rank, group_address, self._secret),
            )

    @handles(IslandJoined)
    def _joined(self, sender: Address, message: IslandJoined) -> None:
        island = self._current(sender, message.island, message.epoch)
        if island is None:
            return
        if island.state != "forming":
            self.env.count("messages_stale")
            return
        if message.devices != island.local_devices:
            self._end_epoch(
                island,
                f"host {sender.node} announced {island.local_devices} devices and has "
                f"{message.devices}",
                sender.node,
            )
            return
        island.hosts[sender.node].joined = message
        if all(host.joined for host in island.hosts.values()):
            self._ready(island, message.kind)

    def _ready(self, island: _Island, kind: str) -> None:
        island.state = "ready"
        island.kind = kind
        island.load.clear()
        hosts = tuple(host.node for host in island.ranked())
        self.env.log(
            "info", "island ready", island=island.name, epoch=island.epoch, hosts=",".join(hosts)
        )
        self._announce()
        self.env.send(CONTROL, IslandFormed(island.name, island.epoch, hosts))
        for number, entry in list(self._slices.items()):
            if entry.island != island.name:
                continue
            if self._fits(island, entry.request):
                self._bind(number, entry.request, island)
            else:  # the island came back smaller, or as another platform
                del self._slices[number]
                self._refuse(entry.request)

    def _announce(self) -> None:
        directory = Directory(
            tuple(
                Peer(host.node, host.registration.endpoint)
                for island in self._islands.values()
                for host in island.hosts.values()
                if island.state == "ready"
            )
        )
        for peer in directory.peers:
            self.env.send(executor_of(peer.node), directory)
        self.env.send(CONTROL, directory)

    @handles(IslandJoinFailed)
    def _join_failed(self, sender: Address, message: IslandJoinFailed) -> None:
        island = self._current(sender, message.island, message.epoch)
        if island is not None:
            self._end_epoch(
                island, f"host {sender.node} could not join: {message.error.message}", ""
            )

    @handles(EndEpoch)
    def _epoch_broken(self, sender: Address, message: EndEpoch) -> None:
        island = self._islands.get(message.island)
        if island is not None and island.epoch == message.epoch and island.state == "ready":
            self._end_epoch(island, message.reason, "")

    def _current(self, sender: Address, name: str, epoch: int) -> _Island | None:
        island = self._islands.get(name)
        if island is None or island.epoch != epoch or sender.node not in island.hosts:
            self.env.count("messages_stale")
            return None
        return island

    @handles(PeerLost)
    def _peer_lost(self, sender: Address, message: PeerLost) -> None:
        for island in self._islands.values():
            if message.node in island.hosts:
                self._end_epoch(
                    island, f"host {message.node} was lost: {message.reason}", message.node
                )

    def _end_epoch(self, island: _Island, reason: str, lost: str) -> None:
        """The island leaves its epoch; every host but `lost` is asked to come back anew."""
        self.env.log("warning", "island left its epoch", island=island.name, reason=reason)
        if island.state == "waiting":
            island.hosts.pop(lost, None)
            return
        was_ready = island.state == "ready"
        remaining = [node for node in island.hosts if node != lost]
        island.state = "waiting"
        island.hosts.clear()
        for node in remaining:
            self.env.send(executor_of(node), LeaveIsland(island.name, island.epoch, reason))
        if island.expected_hosts > 1:
            self.env.send(SERVICES, StopCoordination(island.name, island.epoch))
        if was_ready:
            error = HostLost(f"island {island.name} left epoch {island.epoch}: {reason}")
            self.env.send(CONTROL, IslandLost(island.name, island.epoch, ErrorReport.of(error)))
            self._announce()

    # --- slices --------------------------------------------------------------------------------------

    @handles(AllocateSlice)
    def _allocate(self, sender: Address, message: AllocateSlice) -> None:
        fitting = [
            island
            for island in self._islands.values()
            if island.state == "ready" and self._fits(island, message)
        ]
        if not fitting:
            self._refuse(message)
            return
        island = min(
            fitting,
            key=lambda island: (
                (sum(island.load.values()) + message.devices) / len(island.devices()),
                island.name,
            ),
        )
        self._bind(message.slice, message, island)

    def _refuse(self, request: AllocateSlice) -> None:
        error = ErrorReport.of(self._insufficient(request))
        self.env.send(CONTROL, SliceRefused(request.slice, error))

    def _fits(self, island: _Island, request: AllocateSlice) -> bool:
        if request.island is not None and request.island != island.name:
            return False
        if request.kind is not None and request.kind.lower() not in (
            island.platform.lower(),
            island.kind.lower(),
        ):
            return False
        if request.topology is not None:
            extent = math.prod(request.topology)
            if extent != request.devices or any(size < 1 for size in request.topology):
                return False
            rows, columns = _block(request.topology)
            if rows > island.expected_hosts or columns > island.local_devices:
                return False
        return request.devices <= len(island.devices())

    def _bind(self, number: int, request: AllocateSlice, island: _Island) -> None:
        devices = self._choose(island, request)
        island.load.update(devices)
        self._slices[number] = _SliceEntry(request, island.name, devices)
        self.env.send(
            CONTROL, SliceBound(number, island.name, island.platform, island.kind, devices)
        )

    def _choose(self, island: _Island, request: AllocateSlice) -> tuple[DeviceAddress, ...]:
        """The least loaded devices; with a topology, the least loaded block of that form."""
        devices = island.devices()
        position = {device: index for index, device in enumerate(devices)}
        if request.topology is None or len(request.topology) < 2:
            chosen = sorted(devices, key=lambda device: (island.load[device], position[device]))
            return tuple(sorted(chosen[: request.devices], key=position.__getitem__))
        rows, columns = _block(request.topology)
        width = island.local_devices
        blocks = [
            tuple(
                devices[(row + r) * width + column + c] for r in range(rows) for c in range(columns)
            )
            for row in range(island.expected_hosts - rows + 1)
            for column in range(width - columns + 1)
        ]
        return min(blocks, key=lambda block: sum(island.load[device] for device in block))

    def _insufficient(self, request: AllocateSlice) -> InsufficientDevices:
        asked = _counted(request.devices, "device")
        for name in ("kind", "island", "topology"):
            value = getattr(request, name)
            if value is not None:
                asked += f" with {name}={value!r}"
        there = "; ".join(island.describe() for island in self._islands.values())
        return InsufficientDevices(
            f"no island has {asked} for one slice. There are: {there or 'no islands yet'}"
        )

    @handles(ReleaseSlice)
    def _release(self, sender: Address, message: ReleaseSlice) -> None:
        entry = self._slices.pop(message.slice, None)
        if entry is not None:
            self._islands[entry.island].load.subtract(entry.devices)

    # --- status --------------------------------------------------------------------------------------

    def status(self, queued: dict[str, tuple[int, int]]) -> tuple[IslandStatus, ...]:
        """Describe all islands; `queued` has the (queued, launched) segments of each."""
        bound = Counter(entry.island for entry in self._slices.values())
        return tuple(
            IslandStatus(
                island.name,
                island.epoch,
                island.state,
                island.platform,
                island.kind,
                tuple(
                    HostStatus(
                        host.node,
                        host.registration.process,
                        host.registration.local_devices,
                        host.registration.endpoint,
                        host.joined is not None,
                    )
                    for host in island.ranked()
                ),
                island.expected_hosts,
                bound[island.name],
                *queued.get(island.name, (0, 0)),
            )
            for island in sorted(self._islands.values(), key=lambda island: island.name)
        )


def _block(topology: tuple[int, ...]) -> tuple[int, int]:
    """Rows (hosts) and columns (devices of one host) that a topology asks for."""
    if len(topology) < 2:
        return 1, 1
    return topology[0], math.prod(topology[1:])


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"
