"""Hosts, islands and their epochs: between the resource manager, hosts, and coordination services."""

from __future__ import annotations

from typing import Annotated

import msgspec

from pw.core.errors import ErrorReport
from pw.core.messages.base import (
    ClientToController,
    ControllerToExecutor,
    ControllerToSession,
    HostToResources,
    Local,
)
from pw.core.messages.bounds import (
    Coordinate,
    Coordinates,
    Count,
    DeviceCount,
    HostCount,
    Hosts,
    Islands,
    Name,
    Seconds,
)


class RegisterHost(HostToResources, frozen=True, tag=10):
    """HostExecutor to ResourceManager: this host is up and wants to join its island."""

    island: Name
    island_hosts: HostCount
    """Number of hosts of the island; 0 for a spare, which does not know."""
    local_devices: Annotated[DeviceCount, msgspec.Meta(ge=1)]
    platform: Name
    endpoint: Name
    process: int
    """Process id of the host's runtime, for people."""
    spare: bool = False
    """True to take a free place in `island` (in any if that is empty), or wait for one."""
    epoch: Count = 0
    """Epoch that this host is in, with `members`; it has lost the controller."""
    members: Hosts = ()
    """Names of all hosts of that epoch, in the order of their ranks."""
    python: bool = False
    """True if the host runs clients' Python functions."""
    python_tenants: tuple[str, ...] = ()
    """Names of the only tenants whose functions the host runs; empty for all."""
    coords: Coordinates = ()
    """Coordinates of the devices on the interconnect, in order, as the operator says; empty if the operator
    says none."""
    wraps: Coordinate = ()
    """For each axis the number of devices after which it wraps around, 0 where it does not; empty if none
    does."""
    is_to_end: bool = False
    """True if its operator has told this host to end: it comes only to be emptied."""
    grace_s: Seconds = 0.0
    """Seconds in which the host is emptied when its operator tells it to end; 0 if it ends at once."""


class HostRejected(ControllerToExecutor, frozen=True, tag=11):
    """ResourceManager to HostExecutor: this host cannot join, and stops."""

    error: ErrorReport


class HostRegistered(ControllerToExecutor, frozen=True, tag=201):
    """ResourceManager to HostExecutor: this controller knows the host, which waits for its place."""

    key: bytes
    """The host's own, with which it checks the permits of others (`pw.core.tenants`)."""


class FormIsland(ControllerToExecutor, frozen=True, tag=12):
    """ResourceManager to every HostExecutor of an island: join the group of this epoch at this rank."""

    island: str
    epoch: int
    hosts: tuple[str, ...]
    rank: int
    group_address: str
    tickets: bytes
    """Public key with which hosts check the tickets of clients."""


class IslandJoined(HostToResources, frozen=True, tag=13):
    """HostExecutor to ResourceManager: this host has joined the group, with these devices."""

    island: Name
    epoch: int
    kind: Name
    devices: int
    memory_bytes: Count | None
    """Bytes of memory of one device; None where nothing limits it."""
    coords: Coordinates = ()
    """Coordinates of the devices, in order, as JAX has them; empty where it has none."""
    spill_bytes: Count = 0
    """Bytes of host memory for arrays that leave the devices; 0 if they stay there."""
    spill_files: bool = False
    """True if this host has a folder for arrays that leave its memory."""


class IslandJoinFailed(HostToResources, frozen=True, tag=14):
    """HostExecutor to ResourceManager: this host could not join."""

    island: str
    epoch: int
    error: ErrorReport


class LeaveIsland(ControllerToExecutor, frozen=True, tag=15):
    """ResourceManager to HostExecutor: the epoch has ended; restart as a new incarnation."""

    island: str
    epoch: int
    reason: str


class Peer(msgspec.Struct, frozen=True, array_like=True):
    """A host and the endpoint at which others reach it."""

    node: str
    endpoint: str
    member: bool = True
    """True if the host's island is ready; other hosts may still have replicas."""


class Directory(ControllerToSession, ControllerToExecutor, frozen=True, tag=16):
    """ResourceManager to all hosts and clients: the hosts that exist now, and their endpoints."""

    peers: tuple[Peer, ...]


class IslandFormed(Local, frozen=True, tag=17):
    """ResourceManager to Controller (local): an island is ready under a new epoch."""

    island: str
    epoch: int
    hosts: tuple[str, ...]
    device_memory_bytes: int | None = None
    """Bytes of memory of each device; None where nothing limits it."""
    compiles_apart: bool = False
    """True if other processes compile for the hosts, so that a crash of a compiler does not crash a host."""
    devices: int = 0
    """Number of devices of the island, without those that have failed their test."""
    spill_bytes: int = 0
    """Bytes of memory of each host for arrays that leave the devices; 0 if they stay there."""
    spill_files: bool = False
    """True if each host has a folder for arrays that leave its memory."""


class EpochEnded(Local, frozen=True, tag=18):
    """ResourceManager to Controller (local): an island has left its epoch; its values are lost."""

    island: str
    epoch: int
    error: ErrorReport
    host: str = ""
    """Name of the lost host, if that is the reason."""
    client: int = 0
    """Number of the client whose work the error may name; 0 if it names none."""


class CoordinationStarted(Local, frozen=True, tag=19):
    """Coordination services to ResourceManager (local): the service of this epoch is up, or has failed."""

    island: str
    epoch: int
    address: str
    error: str


class StartCoordination(Local, frozen=True, tag=20):
    """ResourceManager to coordination services (local): start a new service for this epoch."""

    island: str
    epoch: int
    hosts: int


class StopCoordination(Local, frozen=True, tag=21):
    """ResourceManager to coordination services (local): end the service of this epoch."""

    island: str
    epoch: int


class EndEpoch(Local, frozen=True, tag=22):
    """IslandScheduler to ResourceManager (local): the launch order is broken; end this epoch."""

    island: str
    epoch: int
    reason: str
    client: int = 0
    """Number of the client whose work the reason may name; 0 if it names none."""


class DrainHost(ClientToController, frozen=True, tag=24):
    """ClientSession to Controller and on to ResourceManager: move all work and data off this host."""

    request: int
    node: Name
    client: str = ""
    """Node of the client, which gets the answer; the controller fills it in."""


class AskToLeave(HostToResources, frozen=True, tag=23):
    """HostExecutor to ResourceManager: this host is to end; move all work and data off it first."""


class Draining(Local, frozen=True, tag=27):
    """ResourceManager to Controller (local): these hosts are draining."""

    nodes: tuple[str, ...]


class HostEmptied(Local, frozen=True, tag=26):
    """Controller to ResourceManager (local): all that this drained host holds is elsewhere, if it can be."""

    node: str
    keeps: bool = False
    """True if it has replicas that are nowhere else, and no other host is there that could take them."""


class Leave(ControllerToExecutor, frozen=True, tag=25):
    """ResourceManager to HostExecutor: this host is drained; it ends for good."""

    reason: str
    keeps: bool = False
    """True if it has replicas that are nowhere else: its supervisor may have a folder for them."""


class HostMustEnd(Local, frozen=True, tag=28):
    """ResourceManager to Controller (local): have clients leave an island, which loses a host for good.

    No other host can take its place, and no other island has room.
    """

    node: str
    island: str


class ClientsLeft(Local, frozen=True, tag=29):
    """Controller to ResourceManager (local): the clients have left the island that this host must leave."""

    node: str


class HostEnded(Local, frozen=True, tag=39):
    """ResourceManager to Controller (local): a host for which clients had to leave is not there any more."""

    node: str


class WatchIslands(ClientToController, frozen=True, tag=230):
    """ClientSession to Controller: tell this client the state of each island, now and when it changes."""

    is_on: bool
    """False to tell it no more."""
    awaited: Islands = ()
    """Islands that the client has heard of from an earlier controller."""


class IslandState(msgspec.Struct, frozen=True, array_like=True):
    """The state of an island, for a client that watches islands."""

    island: str
    epoch: int
    """Epoch in which the island is, or was last."""
    is_ready: bool
    is_given_up: bool = False
    """True if it has been away for longer than clients wait for a lost island."""
    hosts: tuple[str, ...] = ()
    """Names of the island's hosts in that epoch, in the order of their ranks."""
    devices: int = 0
    """Number of devices of those hosts."""
    reason: str = ""
    """Why the island is not ready; empty if it is."""


class IslandStates(ControllerToSession, frozen=True, tag=231):
    """Controller to ClientSession: the states of these islands, to a client that watches islands."""

    islands: tuple[IslandState, ...]
    is_all: bool = False
    """True if the controller knows no other island: the answer to `WatchIslands`."""
