"""Hosts, islands and their epochs: between the resource manager, hosts, and coordination services."""

from __future__ import annotations

import msgspec

from pw.core.errors import ErrorReport
from pw.core.messages.base import Base


class RegisterHost(Base, frozen=True, tag=10):
    """HostExecutor to ResourceManager: this host is up and wants to join its island."""

    island: str
    island_hosts: int
    """0: this host, a spare, does not know."""
    local_devices: int
    platform: str
    endpoint: str
    process: int
    """Operating system process id, for people who look for it."""
    spare: bool = False
    """Takes a free place in `island` (in any island when that is empty), and waits if there is none."""
    epoch: int = 0
    """The epoch of `island` that I am in, with `members`: I have lost the controller meanwhile."""
    members: tuple[str, ...] = ()
    """All hosts of that epoch, in the order of their ranks."""


class HostRejected(Base, frozen=True, tag=11):
    """ResourceManager to HostExecutor: you cannot join, stop."""

    error: ErrorReport


class FormIsland(Base, frozen=True, tag=12):
    """ResourceManager to every HostExecutor of an island: join this epoch's group at your rank."""

    island: str
    epoch: int
    hosts: tuple[str, ...]
    rank: int
    group_address: str
    secret: bytes
    """Key with which the cluster signs client tickets."""


class IslandJoined(Base, frozen=True, tag=13):
    """HostExecutor to ResourceManager: I am in the group, with these devices."""

    island: str
    epoch: int
    kind: str
    devices: int
    memory_bytes: int | None
    """Memory of one device, None where nothing limits it."""


class IslandJoinFailed(Base, frozen=True, tag=14):
    """HostExecutor to ResourceManager: I could not join."""

    island: str
    epoch: int
    error: ErrorReport


class LeaveIsland(Base, frozen=True, tag=15):
    """ResourceManager to HostExecutor: the epoch is over; come back as a new incarnation."""

    island: str
    epoch: int
    reason: str


class Peer(msgspec.Struct, frozen=True, array_like=True):
    """A host and the endpoint at which others reach it."""

    node: str
    endpoint: str
    member: bool = True
    """In an island that is ready; the others are here, and may have copies to give."""


class Directory(Base, frozen=True, tag=16):
    """ResourceManager to all hosts and clients: these hosts exist now, and where."""

    peers: tuple[Peer, ...]


class IslandFormed(Base, frozen=True, tag=17):
    """ResourceManager to Controller (local): an island is ready under a new epoch."""

    island: str
    epoch: int
    hosts: tuple[str, ...]
    device_memory_bytes: int | None = None
    """Memory of each device; None where nothing limits it."""


class IslandLost(Base, frozen=True, tag=18):
    """ResourceManager to Controller (local): an island left its epoch, with all that was on it."""

    island: str
    epoch: int
    error: ErrorReport
    host: str = ""
    """Who was lost, if that is the reason."""


class CoordinationStarted(Base, frozen=True, tag=19):
    """The coordination services to ResourceManager (local): an epoch's service is up, or is not."""

    island: str
    epoch: int
    address: str
    error: str


class StartCoordination(Base, frozen=True, tag=20):
    """ResourceManager to the coordination services (local): a fresh service for this epoch's group."""

    island: str
    epoch: int
    hosts: int


class StopCoordination(Base, frozen=True, tag=21):
    """ResourceManager to the coordination services (local): this epoch's group is over."""

    island: str
    epoch: int


class EndEpoch(Base, frozen=True, tag=22):
    """IslandScheduler to ResourceManager (local): the gang's order is broken, form the island anew."""

    island: str
    epoch: int
    reason: str


class DrainHost(Base, frozen=True, tag=24):
    """ClientSession to Controller and on to ResourceManager: move all work and data off this host."""

    request: int
    node: str
    client: str = ""
    """Node of the client, whom the resource manager answers; the controller fills it in."""


class Draining(Base, frozen=True, tag=27):
    """ResourceManager to Controller (local): these hosts are here only to be emptied."""

    nodes: tuple[str, ...]


class HostEmptied(Base, frozen=True, tag=26):
    """Controller to ResourceManager (local): nothing on this host is needed any more."""

    node: str


class Leave(Base, frozen=True, tag=25):
    """ResourceManager to HostExecutor: you are drained and hold nothing any more, end for good."""

    reason: str
